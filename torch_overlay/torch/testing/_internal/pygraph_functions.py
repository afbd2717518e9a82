"""Functions as Inductor writes them, on the modelled device of modelled_cuda.py, for tests of recording and replay."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import unittest
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.cudagraph_utils import PlaceholderInfo
from torch._inductor.pygraph import native, reset_report
from torch._inductor.pygraph.capture import collectives
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.select import deploy
from torch._inductor.pygraph.types.partition import Call, Input, PartitionInfo
from torch._inductor.test_case import TestCase
from torch.testing._internal.modelled_cuda import cu, modelled_device, ModelledDevice, on_host
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


ALLOCATOR = "empty_strided_cuda"

# By the beginning of an input's name. What has another one is saved by the forward.
ORIGINS = {
    "arg": "forward",
    "primals": "forward",
    "tangents": "tangent",
    "partition": "partition",
}


def hiding(index: int | None | Callable[[], int | None]) -> Any:
    "The words of an external input, or behind these of an output, are not found."
    find = binding.find_words

    def found(*args: Any) -> list[Any]:
        hidden = index() if callable(index) else index
        return [word for word in find(*args) if word.input != hidden]

    return mock.patch.object(binding, "find_words", found)


def sin(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.sin(x, out=out)


def add(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.add(x, y, out=out)


def mul(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.mul(x, y, out=out)


# What generated code launches, by name.
KERNELS = {"sin": sin, "add": add, "mul": mul}


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf, activations):
        ctx.save_for_backward(*activations)
        return leaf.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


class HeldByAutograd:
    "As the activations of a forward are: by C++ alone."

    def __init__(self, activation: torch.Tensor) -> None:
        self.output = Saves.apply(torch.zeros(1, requires_grad=True), [activation])

    def activation(self) -> torch.Tensor:
        return self.output.grad_fn.saved_tensors[0]


class Ranks(TorchDispatchMode):
    """
    Other ranks, which give what this one does.

    Attributes:
        ran: how often a collective ran
    """

    def __init__(self, device: ModelledDevice) -> None:
        super().__init__()
        self.device = device
        self.ran = 0

    def reduce(self, x: torch.Tensor) -> None:
        self.ran += 1
        x.mul_(2)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if func is torch.ops._c10d_functional.all_reduce_.default:
            self.device.launch(self.reduce, args[0])
            return args[0]
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            gathered = self.device.empty_strided((16,), (1,), torch.float32)
            self.device.launch(self.gather, gathered, args[0])
            return gathered
        return func(*args, **(kwargs or {}))

    def gather(self, gathered: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        gathered.view(2, 8)[:] = x


@dataclasses.dataclass
class HeldByName:
    tensor: torch.Tensor

    def activation(self) -> torch.Tensor:
        return self.tensor


@unittest.skipIf(cu is None, "requires cuda-bindings")
class RecordTestCase(TestCase):
    "A test of functions that are deployed on the modelled device."

    compiled = native.compiled

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(native, "compiled", self.compiled)
        patch.start()
        self.addCleanup(patch.stop)
        counters.clear()
        reset_report()
        trees.reset_cudagraph_trees()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.device = stack.enter_context(modelled_device())
        # There is no process group.
        stack.enter_context(mock.patch.object(collectives, "agree", lambda group, what, ready: ready))
        self.hook: Callable[[], Any] = lambda: None
        self.groups = ("0",)
        self.forward: Deployed | None = None
        self.backward: Deployed | None = None
        self.addCleanup(trees.reset_cudagraph_trees)

    def randn(self, *size: int) -> torch.Tensor:
        return self.device.tensor(torch.randn(*(size or (8,))))

    def generated(self, body: str) -> Any:
        "A function as Inductor writes it, of ``args``."
        module = {
            "torch": torch,
            "empty": lambda: self.device.empty_strided((8,), (1,), torch.float32),
            "launch": self.device.launch,
            "hook": lambda: self.hook(),
            ALLOCATOR: self.device.empty_strided,
            **KERNELS,
        }
        lines = (
            body.replace("new()", f"{ALLOCATOR}((8,), (1,), torch.float32)")
            .strip()
            .splitlines()
        )
        exec(
            f"def call(args, {ALLOCATOR}={ALLOCATOR}):\n"
            + "\n".join("    " + line.strip() for line in lines),
            module,
        )
        return module["call"]

    def deploy(
        self,
        body: str,
        inputs: Sequence[Any],
        *,
        mode: str = "inference",
        force: str | None = "node_update",
        returned: Sequence[int] = (0,),
        mutated: tuple[int, ...] = (),
        static: Sequence[int] = (),
        names: Sequence[str] = (),
        reused: Sequence[int] = (),
        code_hash: str | None = None,
        kernels: Iterable[str] = (),
    ) -> Deployed:
        model = self.generated(body)
        names = names or [f"arg{i}_1" for i in range(len(inputs))]
        return Deployed(
            model,
            inputs,
            static,
            device_index=0,
            is_backward=mode == "backward",
            is_inference=mode == "inference",
            info=PartitionInfo(
                "call",
                inputs=tuple(
                    Input(n, ORIGINS.get(n.partition("_")[0].rstrip("0123456789"), "saved"))
                    for n in names
                ),
                allocator=ALLOCATOR,
                delivers=tuple(re.findall(r"(\w+)\.launch\(\)", body)),
                groups=self.groups,
                has_collectives="c10d" in body,
                returned_output_idxs=tuple(returned),
                reused_input_idxs=tuple(reused),
                code_hash=code_hash,
                calls=tuple(Call("triton", k, (), (), kernels=(f"triton_{k}",)) for k in kernels),
            ),
            objects=model.__globals__,
            mutated_input_idxs=mutated,
            placeholders=tuple(PlaceholderInfo(name, None, [], None) for name in names),
            force=force,
        )

    def expected(self, fn: Deployed, inputs: Sequence[Any]) -> list[Any]:
        "The outputs and inputs of the uncaptured function, on the host."
        copies = [
            self.device.clone(i) if isinstance(i, torch.Tensor) else i for i in inputs
        ]
        outputs = fn.model(list(copies))
        return self.values([*outputs, *copies])

    def values(self, tensors: Sequence[Any]) -> list[Any]:
        return [
            on_host(t).clone() if isinstance(t, torch.Tensor) else t for t in tensors
        ]

    def check(
        self,
        body: str,
        make: Callable[[], list[Any]] | None = None,
        calls: int = 7,
        **kwargs: Any,
    ) -> Deployed:
        "All calls' outputs are kept, and compared after each and after the last."
        make = make or (lambda: [self.randn(), self.randn()])
        fn = None
        kept: list[tuple[list[Any], list[Any]]] = []
        for _ in range(calls):
            inputs = make()
            fn = fn or self.deploy(body, inputs, **kwargs)
            expected = self.expected(fn, inputs)
            outputs = fn(*inputs)
            kept.append(([*outputs, *inputs], expected))
            del outputs, inputs
            for actual, expected in kept:
                self.assertEqual(self.values(actual), expected)
        return fn

    ADD = """
        x, y = args; args.clear()
        a = new(); launch(sin, a, x)
        b = new(); launch(add, b, a, y)
        return (b,)
    """


def new_generation() -> None:
    "As each call of a compiled function does."
    from torch._dynamo.mutation_guard import GenerationTracker

    GenerationTracker.generation += 1


class Deployed:
    "What deferred_cudagraphify makes of a function: what was deployed last is called."

    def __init__(
        self, model: Any, inputs: Sequence[Any], static: Sequence[int], **kwargs: Any
    ) -> None:
        self.model = model
        self.current = deploy.deploy(
            model, list(inputs), static, self.replace, stack_traces=None, **kwargs
        )

    def replace(self, fn: Any) -> None:
        self.current = fn

    def call(self, inputs: list[Any]) -> Any:
        return self.current(inputs)

    def __call__(self, *inputs: Any) -> Any:
        new_generation()
        return self.call(list(inputs))
