# Owner(s): ["module: inductor"]
"""
The proof: which results equal those of the rehearsal, and how the rehearsal's writes are undone.
"""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
from torch._inductor.pygraph.graph import placeholder
from torch._inductor.pygraph.verify import proof
from torch._inductor.pygraph.verify.rehearsal import SavedInput
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Sequence


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
DTYPES = FLOATS + COMPLEX + FLOAT8 + INTEGERS

# Fewer elements than chunks, as many, a remainder, several in each.
SHAPES = ((), (1,), (7,), (1024,), (1025,), (33, 77), (4, 32, 48))


def fingerprint(t: torch.Tensor) -> proof.Fingerprint:
    return proof.fingerprints([t])[0]


def vars_of(found: proof.Fingerprint) -> list[Any]:
    return [found.bits, found.sums, found.tolerance]


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOATS:
        return torch.randn(shape).to(dtype)
    if dtype in COMPLEX:
        return torch.view_as_complex(torch.randn(*shape, 2).to(dtype.to_real()))
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 100
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(expected: torch.Tensor, *others: torch.Tensor) -> bool:
    return proof.same(*map(fingerprint, (expected, *others)))


class ProofTest(TestCase):
    @parametrize("dtype", DTYPES)
    def test_equal(self, dtype):
        for shape in SHAPES:
            t = random_tensor(shape, dtype)
            copy = t.clone()
            self.assertTrue(same(t, copy), shape)

    @parametrize("dtype", DTYPES)
    def test_changed_element(self, dtype):
        "To the poison of its dtype, or, where that is zero, by one bit."
        for shape in SHAPES:
            n = math.prod(shape)
            for at in sorted({0, n // 2, n - 1}):
                t = random_tensor(shape, dtype)
                changed = t.clone()
                element = changed.view(-1)[at : at + 1].view(torch.uint8)
                if t.is_floating_point() or t.is_complex():
                    element.fill_(0xFF)
                else:
                    element[0] ^= 1
                self.assertFalse(same(t, changed), (shape, at))
                self.assertFalse(same(changed, t), (shape, at))

    @parametrize("dtype", FLOATS + COMPLEX + INTEGERS)
    def test_element_that_was_not_written(self, dtype):
        "In a tensor of which each chunk is one element."
        t = torch.ones(1024).to(dtype)
        for at in (0, 511, 1023):
            changed = t.clone()
            changed[at] = 0
            self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS)
    def test_small_differences_pass_for_floats(self, dtype):
        t = torch.rand(64 * 1024, dtype=torch.float64).to(dtype)
        t[0] = 1
        next_value = t.clone()
        next_value.view(proof._BITS[t.element_size()]).add_(1)
        self.assertFalse(torch.equal(t, next_value))
        self.assertTrue(same(t, next_value))
        tolerance = proof.TOLERANCE[dtype]
        self.assertFalse(same(t, (t.double() * (1 + 3 * tolerance)).to(dtype)))

    # Sums of bits are equal where as many numbers become negative as become positive.
    def test_element_that_is_almost_zero(self):
        "The sum of others may be, and is not more exact than these are."
        t = torch.randn(768)
        t[3], other = 1e-7, t.clone()
        other[3] = 3e-4
        self.assertTrue(same(t, other))
        other[3] = 3e-3
        self.assertFalse(same(t, other))

    def test_sums_that_cancel_out(self):
        "They may differ by as much as in another run, within reason."
        t = torch.randn(768)
        noise = 3e-3 * torch.randn(768)
        other, again = t + noise, t + noise.roll(1)
        self.assertFalse(same(t, other))
        self.assertTrue(same(t, other, again))
        self.assertTrue(same(t, other, t, again, t))
        self.assertFalse(same(t, t + 12 * noise, again))
        # Of float32, by what came from bfloat16.
        self.assertTrue(same(t, t + 12 * noise, t + 12 * noise.roll(1)))
        self.assertFalse(same(t, t + 300 * noise, t + 300 * noise))
        for wrong in (1.0, math.nan):
            other[5] = wrong
            self.assertFalse(same(t, other, again))
        self.assertFalse(same(t, t + noise, t * math.nan))

    @parametrize("dtype", FLOATS)
    def test_chunks_that_sum_up_to_zero(self, dtype):
        "Gradients of a normalized input: each row does, whatever it is."
        rows = torch.randn(3, 1024, 768, dtype=torch.float64)
        t, other, again = (
            torch.ops.aten.native_layer_norm_backward(
                grad, x, [768], x.mean(1, True), x.var(1, keepdim=True).rsqrt(), None, None, [True, False, False]
            )[0].to(dtype)
            for grad, x in zip(rows, rows.roll(1, 0))
        )
        noise = (t.double() * (1 + 1e-7 * torch.randn(t.shape))).to(dtype)
        unwritten = torch.empty_like(t)
        proof.mark_unwritten(unwritten)
        for wrong in (unwritten, torch.zeros_like(t), -t, other, again):
            self.assertFalse(same(t, wrong))
            self.assertFalse(same(t, wrong, noise))
        self.assertTrue(same(t, noise))

    def test_errors_that_are_larger_in_one_run(self):
        "A gradient that is zero but for rounding, before a batch norm for instance."

        def run() -> torch.Tensor:
            return torch.randn(1 << 20) * (1 + torch.rand(()))

        runs = [[run() for _ in range(5)] for _ in range(10)]
        self.assertGreater(sum(same(*of_ten) for of_ten in runs), 8)
        for t, _, *others in runs:
            self.assertFalse(same(t, torch.zeros_like(t), *others))

    @parametrize("numel", (512, 32_000))
    def test_few_large_elements_are_not_typical(self, numel):
        "As in masked logits."
        t, other = torch.randn(2, numel)
        for i in range(0, numel, 100):
            t[i] = other[i] = torch.finfo(torch.float32).min
        self.assertFalse(same(t, other))

    def test_large_tensor_takes_little_memory(self):
        "Sums of bfloat16 as float64 would take four times what it does."
        with mock.patch.object(proof, "MAX_ELEMENTS", 1 << 14):
            t = torch.randn((1 << 20) + 7).to(torch.bfloat16)
            expected = fingerprint(t)
        actual = fingerprint(t)
        self.assertEqual(expected.bits, actual.bits)
        self.assertEqual(expected.sums["total"], actual.sums["total"])
        self.assertEqual(expected.sums["signed"], actual.sums["signed"])
        self.assertEqual(expected.sums["norm"], actual.sums["norm"])

    def test_sign(self):
        t = torch.tensor([1.0, -2.0]).repeat(4096)
        self.assertFalse(same(t, -t))

    # Sums of eight-byte words wrap.
    def test_sign_of_float64(self):
        t = torch.rand(4096, dtype=torch.float64)
        self.assertFalse(same(t, -t))

    @parametrize("dtype", INTEGERS[1:] + FLOAT8[:2])
    def test_no_difference_passes_for_others(self, dtype):
        t = random_tensor((64 * 1024,), dtype)
        for at in (0, 40_000, -1):
            changed = t.clone()
            changed[at : at + 1 or None].view(torch.uint8)[0] ^= 1
            self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS)
    @parametrize("shape", ((8,), (1024,), (64, 1024)))
    def test_nan_never_passes(self, dtype, shape):
        t = random_tensor(shape, dtype)
        poisoned = t.clone()
        poisoned.view(-1)[-1] = math.nan
        self.assertFalse(same(t, poisoned))
        self.assertFalse(same(poisoned, t))
        poison = torch.full((t.numel() * t.element_size(),), 0xFF, dtype=torch.uint8)
        self.assertFalse(same(t, poison.view(dtype).view(shape)))
        # It is the program's own NaN where the bits are the same, and only there.
        self.assertTrue(same(poisoned, poisoned.clone()))
        poisoned.view(-1)[0] += 1
        self.assertFalse(same(t, poisoned))

    # An infinity makes the chunk's norm infinite, and with it the tolerance.
    def test_infinity_is_in_no_tolerance(self):
        masked = torch.randn(8).index_fill(0, torch.tensor([2]), -math.inf)
        other = torch.zeros(8)
        self.assertFalse(same(masked, other))

    # All of a tensor with fewer elements than chunks is one chunk.
    def test_element_of_small_tensor_that_was_not_written(self):
        t = torch.ones(1000, dtype=torch.bfloat16)
        changed = t.clone()
        changed[5:15] = 0
        self.assertFalse(same(t, changed))

    @parametrize("dtype", FLOATS + (torch.int64, torch.uint8))
    def test_permuted_chunks(self, dtype):
        rows = torch.arange(1, 1025).remainder(120)[:, None].expand(1024, 3).to(dtype)
        swapped = rows.clone()
        swapped[[0, 500]] = rows[[500, 0]]
        self.assertFalse(same(rows, swapped))
        self.assertFalse(same(rows, rows.flip(0)))

    @parametrize("dtype", FLOATS + (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64))
    def test_permuted_elements(self, dtype):
        "In a chunk: other results whose elements sum up to the same for any input."
        rows = random_tensor((1024, 64), dtype)
        once = torch.zeros(1024, 64).index_fill(1, torch.tensor(3), 1).to(dtype)
        for t in (rows, once):
            for other in (t.flip(1), t.roll(2, 1)):
                marks = map(fingerprint, (t, other))
                self.assertFalse(proof.identical(*marks))
            self.assertTrue(same(t, t.clone()))
        self.assertFalse(same(rows, rows.flip(1)))

    @parametrize("shape", ((2048, 512), (1024, 7), (4, 1 << 16)))
    def test_indices_of_a_sort(self, shape):
        x, y = torch.randn(2, *shape)
        self.assertFalse(same(x.argsort(-1), y.argsort(-1)))
        self.assertFalse(same(x.argsort(-1), (x * math.nan).argsort(-1)))

    @parametrize("shape", ((2, 3), (64, 64), (100, 33)))
    def test_layouts(self, shape):
        t = torch.randn(shape)
        rows, columns = shape
        padded = torch.full((rows, columns + 5), math.nan)
        padded[:, :columns] = t
        offset = torch.full((t.numel() + 3,), math.nan)
        offset[3:] = t.flatten()
        for other in (padded[:, :columns], offset[3:].view(shape)):
            self.assertTrue(same(t, other))
            self.assertTrue(same(other, t))
        # Padding is not looked at, elements are.
        padded[:, columns:] = 0
        self.assertTrue(same(t, padded[:, :columns]))
        padded[rows - 1, columns - 1] += 1 + rows * columns
        self.assertFalse(same(t, padded[:, :columns]))

    @parametrize("shape", ((2, 3), (64, 64), (100, 33)))
    def test_transposed(self, shape):
        t = torch.randn(shape).t()
        self.assertTrue(same(t, t.clone(memory_format=torch.preserve_format)))
        changed = t.clone(memory_format=torch.preserve_format)
        changed[-1, -1] += 1 + t.numel()
        self.assertFalse(same(t, changed))

    def test_dense_tensor_is_not_copied(self):
        for t in (
            torch.randn(4, 5, 6),
            torch.randn(4, 5, 6).permute(2, 0, 1),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(40)[8:],
        ):
            self.assertEqual(proof._dense(t).data_ptr(), t.data_ptr())
            self.assertEqual(proof._dense(t).shape, (t.numel(),))

    @parametrize("dtype", (torch.int8, torch.float32, torch.float64, torch.int64))
    def test_elements_at_one_distance(self, dtype):
        base = torch.arange(24).to(dtype).view(6, 4)
        for t in base[:, 0], base[:, :1], base.view(-1)[::2], base[0, :1].expand(9):
            self.assertTrue(same(t, t.clone()))
            other = t.contiguous()
            other[-1] += 1
            self.assertFalse(same(t, other))
            self.assertFalse(proof.is_unwritten(t))

    def test_expanded(self):
        t = torch.randn(64, 1).expand(64, 80)
        self.assertTrue(same(t, t.clone()))
        self.assertTrue(same(t, t.contiguous()))
        other = t.contiguous()
        other[3, 4] += 100
        self.assertFalse(same(t, other))

    @parametrize("dtype", (torch.float32, torch.int64, torch.bool, torch.complex64))
    def test_empty(self, dtype):
        empty = torch.empty(0, 3, dtype=dtype)
        self.assertTrue(same(empty, torch.empty(0, 3, dtype=dtype)))
        self.assertFalse(same(empty, torch.zeros(3, dtype=dtype)))
        self.assertFalse(same(torch.zeros(3, dtype=dtype), empty))

    def test_scalar(self):
        self.assertTrue(same(torch.tensor(2.5), torch.tensor(2.5)))
        self.assertFalse(same(torch.tensor(2.5), torch.tensor(2.6)))
        self.assertFalse(same(torch.tensor(2), torch.tensor(3)))

    def test_zero(self):
        "The tolerance is relative: nothing passes for zero but zero."
        zero = torch.zeros(4096)
        self.assertTrue(same(zero, -zero))
        self.assertFalse(same(zero, torch.full((4096,), 1e-30)))

    def test_needs_grad(self):
        t = torch.randn(8, requires_grad=True)
        self.assertFalse(fingerprint(t).sums["total"].requires_grad)

    # A lazy conjugate or negative has to be resolved first.
    def test_conjugate(self):
        t = torch.randn(8, dtype=torch.complex64)
        self.assertTrue(same(t.conj(), t.conj().resolve_conj()))

    def test_negative(self):
        t = torch.randn(8, dtype=torch.complex64).conj().imag
        self.assertTrue(same(t, t.resolve_neg()))

    @settings(deadline=None)
    @given(
        st.integers(1, 5000), st.integers(0, 1 << 30), st.sampled_from((32, 16, 8))
    )
    def test_any_size(self, n, at, bits):
        t = torch.arange(n).remainder(100).to(getattr(torch, f"int{bits}"))
        self.assertTrue(same(t, t.clone()))
        changed = t.clone()
        changed[at % n] += 1
        self.assertFalse(same(t, changed))

    def test_fingerprint_is_small(self):
        mark = fingerprint(torch.randn(1 << 20))
        self.assertLessEqual(mark.bits.numel(), proof.CHUNKS + 1)
        self.assertEqual(mark.bits.shape, mark.sums["total"].shape)
        self.assertEqual(mark.bits.shape, mark.sums["signed"].shape)
        self.assertEqual(mark.bits.shape, mark.sums["norm"].shape)

    @parametrize("written", (False, True))
    def test_memory_of_a_comparison_with_the_mark(self, written):
        class Largest(TorchDispatchMode):
            nbytes = count = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if func is torch.ops.aten.eq.Scalar:
                    self.count += 1
                    self.nbytes = max(self.nbytes, result.nbytes)
                return result

        t = torch.randn(1 << 20)
        if not written:
            proof.mark_unwritten(t)
        with mock.patch.object(proof, "MAX_ELEMENTS", 1 << 18), Largest() as largest:
            self.assertEqual(proof.is_unwritten(t), not written)
        # The program gets the tensor of a recording. It is as new.
        self.assertEqual(t._version, 0)
        self.assertEqual(largest.nbytes, 1 << 18)
        self.assertEqual(largest.count, 1 if written else 16)
        self.assertTrue(proof.is_unwritten(torch.empty(0)))

    def test_equal_bits(self):
        a = torch.tensor([[1.0, math.nan], [0.0, 4.0]], device="cpu")
        for t in (a, a.t(), a[:, :1], a[0, 0], a[:0], a > 0):
            self.assertTrue(proof.equal_bits(t, t.clone(memory_format=torch.preserve_format)))
        others = (torch.tensor([[1.0, math.nan], [-0.0, 4.0]], device="cpu"), a.view(torch.int32), a.flatten())
        for other in others:
            self.assertFalse(proof.equal_bits(a, other))
        with mock.patch.object(proof, "MAX_BYTES_COMPARED", 4):
            self.assertFalse(proof.equal_bits(a, others[0]))

    def test_many_tensors(self):
        "Their sums are copied to the host together, some tensors at a time."
        tensors = [random_tensor(shape, dtype) for shape in SHAPES for dtype in DTYPES]
        for most in (1, 5000, 1 << 30):
            with mock.patch.object(proof, "MAX_SUMS", most):
                for t, found in zip(tensors, proof.fingerprints(tensors), strict=True):
                    self.assertEqual(vars_of(found), vars_of(fingerprint(t)), atol=0, rtol=0)
        self.assertEqual(proof.fingerprints([]), [])

    def test_failure(self):
        def proved(*inputs_and_outputs: list[Any]) -> proof.Proof:
            return proof.Proof(*inputs_and_outputs, mutated=[2])

        a, b, c = torch.randn(8), torch.randn(8), torch.randn(8)
        x, y = torch.randn(64), torch.randn(2000)
        with mock.patch.object(proof, "is_on_device", lambda output: isinstance(output, torch.Tensor)):
            checked = proved([a, b, c], [x, 3, None, y])
            self.assertIsNone(checked.failure(proved([a, b, c], [x, 3, None, y])))
            # An input that is not mutated is not looked at, nor is what is no tensor.
            self.assertIsNone(checked.failure(proved([a, b + 1, c], [x, 4, None, y])))
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x, 3, None, y * 2]))),
                r"^output 3 \(torch.float32 \[2000\]\) differs",
            )
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x + 1, 3, None, y * 2]))),
                "^output 0 .*differs",
            )
            c += 1
            self.assertRegex(
                str(checked.failure(proved([a, b, c], [x, 3, None, y]))),
                "^mutated input 2 .*differs",
            )

    @parametrize("dtype", (torch.int64, torch.bool, torch.int32, torch.complex64, torch.float32))
    def test_scalars(self, dtype):
        "Those that an operator allocates may be a seed that was not written."
        values = torch.tensor([0, 1]).to(dtype)

        def proved(i: int, *unmarked: int) -> proof.Proof:
            on_device = placeholder.tensor_at(values[i].data_ptr(), values[i].to("meta"), 0)
            return proof.Proof([], [on_device], [], unmarked)

        def on_host(tensors: list[torch.Tensor]) -> list[proof.Fingerprint]:
            return fingerprints([v for t in tensors for v in values if v.data_ptr() == t.data_ptr()])

        fingerprints = proof.fingerprints
        with (
            mock.patch.object(proof, "fingerprints", on_host),
            mock.patch.object(proof, "is_unwritten", lambda t: False),
        ):
            self.assertIsNone(proved(0).failure(proved(0)))
            self.assertIsNotNone(proved(0).failure(proved(1)))
            is_seed = proved(0).failure(proved(1, 0)) is None
            self.assertEqual(is_seed, dtype == torch.int64)

    def test_outputs_on_the_host_are_skipped(self):
        checked = proof.Proof([], [torch.zeros(4), None, 1], mutated=[])
        self.assertEqual(checked.outputs, [None, None, None])


instantiate_parametrized_tests(ProofTest)


class SavedInputTest(TestCase):
    @parametrize(
        "make",
        (
            lambda: torch.randn(8, 4),
            lambda: torch.randn(8, 1).expand(8, 4),
            lambda: torch.randn(8, 16)[:, 3:7],
            lambda: torch.randn(4, 8).t(),
            lambda: torch.randn(16).as_strided((5, 4), (2, 1), 3),
            lambda: torch.randn(0, 4),
            lambda: torch.tensor(3.0),
        ),
    )
    def test_restores_the_memory(self, make):
        t = make()
        before = t.clone()
        saved = SavedInput(t)
        t.untyped_storage().fill_(0x55)
        saved.restore(t)
        self.assertEqual(t, before, atol=0, rtol=0)

    def test_leaves_what_lies_outside(self):
        base = torch.zeros(16)
        saved = SavedInput(base[4:8])
        base.fill_(1)
        saved.restore(base[4:8])
        self.assertEqual(base, torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0] * 8))


instantiate_parametrized_tests(SavedInputTest)


if __name__ == "__main__":
    run_tests()
