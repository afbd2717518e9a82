"""Steps of ocean and atmosphere models: large grids in, large grids out, little arithmetic."""

from __future__ import annotations

import torch
from torch import nn


def polynomial(x: torch.Tensor, *coefficients: float) -> torch.Tensor:
    """By Horner's rule, the constant coefficient first."""
    *rest, result = coefficients
    for coefficient in reversed(rest):
        result = coefficient + x * result
    return result


class EquationOfState(nn.Module):
    """
    Density of sea water from salinity, temperature and pressure (UNESCO EOS-80; Millero
    and Poisson 1981), and a sound speed derived from it: one fused pointwise kernel.
    """

    def forward(self, s: torch.Tensor, t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        p = p * 0.1
        s_root = s * s.sqrt()
        water = polynomial(t, 999.842594, 6.793952e-2, -9.09529e-3, 1.001685e-4, -1.120083e-6, 6.536332e-9)
        surface = water + s * polynomial(t, 0.824493, -4.0899e-3, 7.6438e-5, -8.2467e-7, 5.3875e-9)
        surface = surface + s_root * polynomial(t, -5.72466e-3, 1.0227e-4, -1.6546e-6) + 4.8314e-4 * s * s
        k0 = polynomial(t, 19652.21, 148.4206, -2.327105, 1.360477e-2, -5.155288e-5)
        k0 = k0 + s * polynomial(t, 54.6746, -0.603459, 1.09987e-2, -6.167e-5)
        k0 = k0 + s_root * polynomial(t, 7.944e-2, 1.6483e-2, -5.3009e-4)
        a = polynomial(t, 3.239908, 1.43713e-3, 1.16092e-4, -5.77905e-7)
        a = a + s * polynomial(t, 2.2838e-3, -1.0981e-5, -1.6078e-6) + 1.91075e-4 * s_root
        b = polynomial(t, 8.50935e-5, -6.12293e-6, 5.2787e-8)
        b = b + s * polynomial(t, -9.9348e-7, 2.0816e-8, 9.1697e-10)
        modulus = k0 + p * (a + p * b)
        return surface / (1 - p / modulus) * torch.log1p(modulus / surface)


INNER = slice(2, -2)


class TurbulentKineticEnergy(nn.Module):
    """
    One step of a turbulent-kinetic-energy closure on a C-grid (Gaspar et al. 1990):
    implicit vertical mixing by a tridiagonal solve along z, lateral diffusion, flux-limited
    advection, Adams-Bashforth. 21 inputs.
    """

    dt, dissipation, lateral = 1.0, 0.7, 2000.0

    def forward(
        self,
        u,
        v,
        w,
        mask_u,
        mask_v,
        mask_w,
        dxt,
        dxu,
        dyt,
        dyu,
        dzt,
        dzw,
        cos_t,
        cos_u,
        bottom,
        kappa,
        mixing_length,
        forcing,
        surface_forcing,
        tke,
        dtke,
    ) -> tuple[torch.Tensor, ...]:
        tke, dtke = tke.clone(), dtke.clone()
        area = (INNER, INNER)
        now = torch.maximum(torch.tensor([0.0], device=tke.device), tke[..., 0])
        flux = torch.zeros_like(mask_u[area])
        flux[..., :-1] = self.dt / dzt[1:] * 0.5 * (kappa[area][..., :-1] + kappa[area][..., 1:])
        lower, upper = torch.zeros_like(flux), torch.zeros_like(flux)
        lower[..., 1:] = -flux[..., :-1] / dzw[1:]
        upper[..., :-1] = -flux[..., :-1] / dzw[:-1]
        decay = self.dt * self.dissipation * now[area].sqrt() / mixing_length[area]
        diagonal = 1 - lower - upper + decay
        right = tke[area][..., 0] + self.dt * forcing[area]
        right[..., -1] += self.dt * surface_forcing[area] / (0.5 * dzw[-1])

        level = torch.arange(flux.shape[-1], device=flux.device)
        first = bottom[area][..., None] - 1
        water = (first >= 0) & (level >= first)
        solution = tridiagonal(
            lower * (water & (level != first)),
            torch.where(water, diagonal, 1.0),
            upper * water,
            right * water,
        )
        tke[area][..., 1] = torch.where(water, solution, tke[area][..., 1])
        top = tke[area][..., -1, 1]
        correction = torch.zeros_like(mask_u[..., 0])
        correction[area] = torch.where(top < 0, -top * 0.5 * dzw[-1] / self.dt, 0.0)
        tke[INNER, INNER, -1, 1] = top.clamp_min(0.0)

        cos = cos_t[None, :, None]
        dx, dy = dxt[:, None, None], dyt[None, :, None]
        east, north, up = torch.zeros_like(mask_u), torch.zeros_like(mask_v), torch.zeros_like(mask_w)
        energy = tke[..., 0]
        slope = (energy[1:] - energy[:-1]) / (cos * dxu[:-1, None, None])
        east[:-1] = self.lateral * slope * mask_u[:-1]
        slope = (energy[:, 1:] - energy[:, :-1]) / dyu[None, :-1, None]
        north[:, :-1] = self.lateral * slope * mask_v[:, :-1] * cos_u[None, :-1, None]
        tke[INNER, INNER, :, 1] += self.dt * mask_w[area] * divergence(east, north, cos * dx, cos * dy)

        east[...] = self.advection(u[..., 0], energy, mask_w, cos * dx, 0)
        north[...] = self.advection(v[..., 0] * cos_u[None, :, None], energy, mask_w, cos * dy, 1)
        up[...] = self.advection(w[..., 0], energy, mask_w, dzw[None, None, :], 2)
        dtke[INNER, INNER, :, 0] = mask_w[area] * -divergence(east, north, cos * dx, cos * dy)
        dtke[:, :, 0, 0] += -up[:, :, 0] / dzw[0]
        dtke[:, :, 1:, 0] += -(up[:, :, 1:] - up[:, :, :-1]) / dzw[1:]
        tke[..., 1] += self.dt * (1.6 * dtke[..., 0] - 0.6 * dtke[..., 2])
        return tke, dtke, correction

    def advection(self, speed, q, mask, spacing, dim) -> torch.Tensor:
        step = (q.roll(-1, dim) - q) * mask
        behind = (q - q.roll(1, dim)) * mask.roll(1, dim)
        ahead = (q.roll(-2, dim) - q.roll(-1, dim)) * mask.roll(-1, dim)
        ratio = torch.where(speed > 0, behind, ahead) / torch.where(step.abs() < 1e-20, 1e-20, step)
        zero, one = torch.zeros_like(ratio), torch.ones_like(ratio)
        limited = torch.maximum(zero, torch.maximum(torch.minimum(one, 2 * ratio), ratio.clamp_max(2.0)))
        courant = (speed * self.dt / spacing).abs()
        central = speed * (q.roll(-1, dim) + q) * 0.5
        return central - speed.abs() * ((1 - limited) + courant * limited) * step * 0.5


def tridiagonal(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Thomas' algorithm along the last dimension, written level by level and in place."""
    levels = a.shape[-1]
    for i in range(1, levels):
        factor = a[..., i] / b[..., i - 1]
        b[..., i] -= factor * c[..., i - 1]
        d[..., i] -= factor * d[..., i - 1]
    x = torch.empty_like(a)
    x[..., -1] = d[..., -1] / b[..., -1]
    for i in range(levels - 2, -1, -1):
        x[..., i] = (d[..., i] - c[..., i] * x[..., i + 1]) / b[..., i]
    return x


def divergence(east, north, dx, dy) -> torch.Tensor:
    along_x = (east[2:-2, INNER] - east[1:-3, INNER]) / dx[INNER, INNER]
    along_y = (north[INNER, 2:-2] - north[INNER, 1:-3]) / dy[:, INNER]
    return along_x + along_y


class ShallowWater(nn.Module):
    """A leap-frog step of the shallow-water equations (Sadourny 1975), with a time filter."""

    def forward(self, u, v, p, u_old, v_old, p_old, dt) -> tuple[torch.Tensor, ...]:
        west, south = lambda t: t.roll(1, 1), lambda t: t.roll(1, 0)
        east, north = lambda t: t.roll(-1, 1), lambda t: t.roll(-1, 0)
        cu, cv = 0.5 * (p + west(p)) * u, 0.5 * (p + south(p)) * v
        vorticity = (v - west(v) - u + south(u)) / (p + west(p) + south(p) + south(west(p)))
        head = p + 0.25 * (u * u + east(u) ** 2 + v * v + north(v) ** 2)
        sum_v = north(cv) + west(north(cv)) + west(cv) + cv
        sum_u = east(cu) + cu + south(cu) + south(east(cu))
        u_new = u_old + dt * (0.125 * (north(vorticity) + vorticity) * sum_v - (head - west(head)))
        v_new = v_old - dt * (0.125 * (east(vorticity) + vorticity) * sum_u + (head - south(head)))
        p_new = p_old - dt * (east(cu) - cu + north(cv) - cv)
        old = [b + 0.001 * (c - 2 * b + a) for a, b, c in ((u_old, u, u_new), (v_old, v, v_new), (p_old, p, p_new))]
        return u_new, v_new, p_new, *old
