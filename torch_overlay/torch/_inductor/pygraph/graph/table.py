"""
Triton kernels that load their pointers from a table in device memory, whose slots the prelude writes.

A captured node that holds a placeholder's address is given another form of its kernel, one that takes the addresses of
slots and loads the pointers when it starts (``tt.indirect``, see triton.runtime.indirect_args). This form is compiled
from the same source and configuration when the graph is recorded. Generated code, tuning and caches are the plain
kernel's.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


log = logging.getLogger(__name__)

# Slots are allocated so many at a time.
PAGE_SLOTS = 512

WARP_THREADS = 32


class NoIndirectForm(RuntimeError):
    """A kernel has no form that loads what it would have to."""


def compile_indirect(autotuner: CachingAutotuner, config: Any, positions: Sequence[int]) -> Any:
    """
    Return the kernel as Triton's CompiledKernel, with the parameters at ``positions`` loaded from slots.

    Args:
        config: of the plain kernel
        positions: among the parameters of the compiled kernel

    Raises:
        NoIndirectForm: this Triton has no indirect parameters, or not these.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = autotuner.fn
    if fn.fn is None:
        # It was compiled by a worker, or comes from a cache.
        reload = getattr(autotuner, "_reload_kernel", None)
        if reload is None:
            raise NoIndirectForm("its source is gone")
        fn = reload().fn
    meta = autotuner._create_compile_meta(config)
    signature = meta["signature"]
    names = [n for n in fn.arg_names if signature.get(n, "constexpr") != "constexpr"]
    attrs = {path: list(pairs) for path, pairs in meta["configs"][0].items()}
    for position in positions:
        path = (fn.arg_names.index(names[position]),)
        attrs[path] = [*attrs.get(path, []), ["tt.indirect", 1]]
    compiled = triton.compile(
        ASTSource(fn, signature, meta["constants"], attrs),
        target=GPUTarget(meta["device_type"], meta["cc"], WARP_THREADS),
        options=autotuner._create_compile_options(config, meta),
    )
    loaded = [p for p, _ in getattr(compiled.metadata, "indirect_params", ())]
    if loaded != sorted(positions):
        raise NoIndirectForm(f"of parameters {sorted(positions)} it loads {loaded}")
    return compiled


# (hash of the compiled kernel, device) -> CUfunction. Triton never unloads one.
_loaded: dict[tuple[str, int], int] = {}


def _load(compiled: Any, device_index: int) -> int:
    from triton.runtime.driver import driver

    key = (compiled.hash, device_index)
    if key not in _loaded:
        _, _loaded[key], *_ = driver.active.utils.load_binary(
            compiled.name, compiled.kernel, compiled.metadata.shared, device_index
        )
    return _loaded[key]


class Table:
    """The slots of one graph, whose generated code launches ``kernels``. ``num_kernels`` of its nodes read slots."""

    def __init__(self, kernels: Iterable[Any], device_index: int) -> None:
        self.device_index = device_index
        self.autotuners: dict[str, list[CachingAutotuner]] = {}
        for kernel in kernels:
            if isinstance(kernel, CachingAutotuner):
                self.autotuners.setdefault(kernel.fn.__name__, []).append(kernel)
        self.pages: list[torch.Tensor] = []
        # (input, delta) -> address
        self.slots: dict[tuple[int, int], int] = {}
        # A kernel may be called many times.
        self.compiled: dict[tuple[int, tuple[int, ...]], Any] = {}
        self.num_kernels = 0

    def writes(self) -> list[binding.Write]:
        """Return what keeps the slots up to date."""
        return [binding.Write(k, delta, a, binding.SLOT) for (k, delta), a in self.slots.items()]

    def _slot(self, input: int, delta: int) -> int:
        if (input, delta) not in self.slots:
            place = len(self.slots) % PAGE_SLOTS
            if place == 0:
                device = torch.device("cuda", self.device_index)
                self.pages.append(torch.zeros(PAGE_SLOTS, dtype=torch.int64, device=device))
            self.slots[input, delta] = self.pages[-1].data_ptr() + place * binding.WORD_BYTES
        return self.slots[input, delta]

    def takes(self, reader: binding.ReadParameters) -> bool:
        """Replace the kernel of a captured node by its indirect form. Return whether it could."""
        function = binding.kernel_function(reader.params)
        name = check(bindings().cuFuncGetName(function)).decode()
        try:
            # An operator's kernel, or another specialization of a user's kernel, may have the name.
            named = self.autotuners.get(name, ())
            found = [a for a in named if int(function) in (launcher.kernel.function for launcher in a.launchers)]
            if len(found) != 1:
                return False
            self._replace(found[0], reader)
        except Exception as e:
            reason = f"{type(e).__name__}: {e}".partition("\n")[0]
            log.info("%s has no indirect form: %s", name, reason)
            return False
        self.num_kernels += 1
        return True

    def _replace(self, autotuner: CachingAutotuner, reader: binding.ReadParameters) -> None:
        params = reader.params
        layout = [(offset, len(value)) for offset, value in reader.parameters]
        if any(layout[i][1] != binding.WORD_BYTES for i, *_ in reader.words):
            raise NoIndirectForm("an input is part of a larger parameter")
        if len(autotuner.launchers) != 1:
            raise NoIndirectForm("it is not tuned")
        positions = tuple(i for i, *_ in reader.words)
        key = (id(autotuner), positions)
        if key not in self.compiled:
            config = autotuner.launchers[0].config
            self.compiled[key] = compile_indirect(autotuner, config, positions)
        compiled = self.compiled[key]
        if compiled.metadata.num_warps * WARP_THREADS != params.blockDimX:
            raise NoIndirectForm("it was launched in another form")
        function = bindings().CUfunction(_load(compiled, self.device_index))
        if binding.parameter_layout(function) != layout:
            raise NoIndirectForm("it has other parameters")
        values = [value.raw for _, value in reader.parameters]
        for i, _, (k, delta, *_) in reader.words:
            values[i] = self._slot(k, delta).to_bytes(binding.WORD_BYTES, "little")
        params.func = function
        params.sharedMemBytes = compiled.metadata.shared
        binding.set_captured_node(reader.node, params, [ctypes.create_string_buffer(v, len(v)) for v in values])
