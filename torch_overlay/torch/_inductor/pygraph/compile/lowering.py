"""
Operators that copy CPU values to the GPU, and the code that Inductor generates for them.

pygraph::deliver  copies small tensors with one kernel launch
pygraph::stage    copies a tensor if its bytes changed since the last call
pygraph::upload   copies a tensor in every call

The generated module calls an object of pygraph.values for each: an operator's dispatch would take longer than the copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import ExternKernelAllocLine, SubgraphPythonWrapperCodegen, WrapperLine
from torch._inductor.lowering import register_lowering
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.codegen.wrapper import PythonWrapperCodegen


lib = torch.library.Library("pygraph", "DEF")  # noqa: TOR901
lib.define("deliver(Tensor[] values, Device device) -> Tensor[]")
lib.define("stage(Tensor value, Device device, bool non_blocking) -> Tensor")
lib.define("upload(Tensor value, Device device, bool non_blocking) -> Tensor")

DELIVER = torch.ops.pygraph.deliver.default
STAGE = torch.ops.pygraph.stage.default
UPLOAD = torch.ops.pygraph.upload.default


# Generated code does not call the operators. Whoever interprets the FX graph does.
def copy_to(device: torch.device, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Return a contiguous copy of a tensor on the device."""
    return value.to(device, non_blocking=non_blocking, copy=True, memory_format=torch.contiguous_format)


@torch.library.impl(lib, "deliver", "CompositeExplicitAutograd")
def _(values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [copy_to(device, value) for value in values]


@torch.library.impl(lib, "stage", "CompositeExplicitAutograd")
@torch.library.impl(lib, "upload", "CompositeExplicitAutograd")
def _(value: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    return copy_to(device, value, non_blocking)


@torch.library.register_fake("pygraph::deliver", lib=lib)
def _(values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(v.shape, dtype=v.dtype, device=device) for v in values]


@torch.library.register_fake("pygraph::stage", lib=lib)
@torch.library.register_fake("pygraph::upload", lib=lib)
def _(value: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def define_global(wrapper: PythonWrapperCodegen, name: str, type: str, *args: str) -> None:
    """Define ``name`` in the generated module as an object of pygraph.values."""
    # A subgraph's wrapper writes no module of its own.
    while isinstance(wrapper, SubgraphPythonWrapperCodegen):
        wrapper = wrapper.parent_wrapper
    wrapper.add_import_once(f"from torch._inductor.pygraph.values.deliver import {type}")
    wrapper.header.writeline(f"{name} = {type}({', '.join(args)})")


@dataclasses.dataclass
class PackLine(WrapperLine):
    """Copies CPU values into the parameters of a Deliver's kernel."""

    owner: str
    values: list[str]

    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline(f"{self.owner}.pack([{', '.join(self.values)}])")


class Pack(ir.ExternKernel):
    """Reads the CPU values that a Launch copies to the GPU, on the host, and is never captured."""

    def __init__(self, values: Sequence[ir.IRNode], gpu: torch.device) -> None:
        super().__init__(None, ir.NoneLayout(device=torch.device("cpu")), values, ())
        self.gpu = gpu
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        # No result keeps it alive. Inductor may still eliminate the Launch as dead code.
        return True

    @property
    def deliver_name(self) -> str:
        return f"deliver_{self.get_name()}"

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        values = (f"({v.get_dtype()}, {tuple(map(int, v.get_size()))})" for v in self.inputs)
        define_global(wrapper, self.deliver_name, "Deliver", str(self.gpu.index), *values)
        wrapper.writeline(PackLine(self.deliver_name, self.codegen_args()))


class Launch(ir.ExternKernel):
    """Launches the kernel that writes the values to the GPU. It may be captured; see CapturedValues."""

    def __init__(self, pack: Pack) -> None:
        device = pack.gpu
        super().__init__(None, ir.MultiOutputLayout(device=device), [], ())
        self.pack = pack
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)
        V.graph.additional_buffer_deps[self.get_operation_name()].add(pack.get_name())
        self.outputs = [
            ir.MultiOutput(
                ir.FixedLayout(device, value.get_dtype(), value.get_size()),
                self,
                [(list, i)],
                skip_size_stride_alignment_checks=True,
            )
            for i, value in enumerate(pack.inputs)
        ]

    def should_allocate(self) -> bool:
        return False

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        self.python_kernel_name = f"{self.pack.deliver_name}.launch"
        wrapper.writeline(ExternKernelAllocLine(wrapper, self))


@register_lowering(DELIVER, type_promotion_kind=None)
def lower_deliver(values: list[Any], device: torch.device) -> list[Any]:
    realize = ir.ExternKernel.realize_input
    contiguous = ir.ExternKernel.require_contiguous
    launch = Launch(Pack([realize(contiguous(v)) for v in values], device))
    V.graph.add_device_info(device)
    # An uncaptured Launch returns memory that all calls share.
    V.graph.never_reuse_buffers.update(o.get_name() for o in launch.outputs)
    return [ir.TensorBox.create(o) for o in launch.outputs]


class HostCopy(ir.FallbackKernel):
    """Copies a CPU tensor to the GPU with a Stage or an Upload, and is never captured."""

    @property
    def how(self) -> str:
        """The method that copies: "stage" or "upload"."""
        return self.op_overload._opname

    @property
    def owner(self) -> str:
        """The name of the object in the generated module."""
        return f"{self.how}_{self.get_name()}"

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        self.python_kernel_name = f"{self.owner}.{self.how}"
        device, non_blocking = self.constant_args
        args = [str(device.index), *(["True"] if non_blocking else [])]
        define_global(wrapper, self.owner, self.how.capitalize(), *args)
        super().codegen(wrapper)

    def codegen_args(self) -> list[str]:
        # The object was constructed with the device and non_blocking.
        return super().codegen_args()[:1]


def _lower_host_copy(op: torch._ops.OpOverload) -> None:
    @register_lowering(op, type_promotion_kind=None)
    def lowering(value: Any, device: torch.device, non_blocking: bool) -> Any:
        value = ir.ExternKernel.require_contiguous(value)
        output = HostCopy.create(op, value, device, non_blocking)
        output.skip_size_stride_alignment_checks = True
        # The result is a new allocation, and aligned even if the CPU tensor is not.
        V.graph.unaligned_buffers.discard(output.get_name())
        if op is STAGE:
            # All calls of the generated code get the same memory.
            V.graph.never_reuse_buffers.add(output.get_name())
        V.graph.add_device_info(device)
        return ir.TensorBox.create(output)


_lower_host_copy(STAGE)
_lower_host_copy(UPLOAD)
