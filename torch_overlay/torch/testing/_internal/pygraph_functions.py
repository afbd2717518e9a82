"""Functions as Inductor writes them, on the modelled device of modelled_cuda.py, for tests of recording and replay."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees as trees
from torch._inductor.cudagraph_utils import PlaceholderInfo
from torch._inductor.pygraph import native, reset_report
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.placeholder import tensor_at
from torch._inductor.pygraph.select import deploy, selection, store, timing
from torch._inductor.pygraph.types import candidate
from torch._inductor.pygraph.types.calls import CallInfo, NOTE
from torch._inductor.pygraph.types.partition import Collective, PartitionInfo
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import TestCase
from torch.testing._internal.modelled_cuda import modelled_device, ModelledGraph
from torch.testing._internal.modelled_nodes import cu
from torch.testing._internal.modelled_operators import on_host


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


ALLOCATOR = "empty_strided_cuda"

# Beginnings of the names of inputs that the forward does not save.
NOT_SAVED = ("arg", "primals", "tangents", "partition")


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


def alone(groups: Sequence[str], name: str, value: Any, decide: Callable[[list[Any]], Any] = bool) -> Any:
    "What ranks that are all alike agree on."
    return None if value is None else decide([value])


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
        stack.enter_context(mock.patch.object(agreement, "agree", alone))
        stack.enter_context(mock.patch.object(agreement, "rank_in", lambda group: 0))
        self.hook: Callable[[], Any] = lambda: None
        self.groups: tuple[str, ...] = ("0",)
        self.ranks_decide = False
        self.force: str | None = None
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
            f"def call(args, {ALLOCATOR}={ALLOCATOR}, {NOTE}=None):\n"
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
        described: tuple[CallInfo, ...] = (),
        custom: bool = False,
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
                allocator=ALLOCATOR,
                delivers=tuple(re.findall(r"(\w+)\.launch\(\)", body)),
                collectives=tuple(Collective("all_reduce_", group) for group in self.groups or (None,))
                if "c10d" in body
                else (),
                calls_custom=custom,
                ranks_decide=self.ranks_decide,
                saved_input_idxs=tuple(i for i, n in enumerate(names) if not n.startswith(NOT_SAVED)),
                returned_output_idxs=tuple(returned),
                reused_input_idxs=tuple(reused),
                code_hash=code_hash,
                calls=described,
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

    def not_rehearsed(self, body: str, size: int = 8) -> Iterator[tuple[Any, Any]]:
        "What is given to a function that writes an earlier graph's output, and its results."
        first = second = None
        for i in range(7):
            new_generation()
            x, y = self.randn(), self.randn(size)
            first = first or self.deploy(
                "x, = args; args.clear(); a = new(); launch(sin, a, x); return (a,)",
                [x],
                returned=[],
            )
            (a,) = first.call([x])
            second = second or self.deploy(
                f"a, y = args; args.clear(); hook(); {body}",
                [a, y],
                names=["partition_1_placeholder_0", "arg1_1"],
                mutated=(0,),
            )
            inputs, given = [a, y], [on_host(a).clone(), on_host(y)]
            del a
            self.device.empty_cache()
            if i == 2:
                self.device.limit = self.device.nbytes + 4096
            (result,) = second.call(inputs)
            self.device.limit = 1 << 30
            yield given, on_host(result)
            del result, inputs

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        "Words that a kernel takes are addresses, of which it looks at nothing else."
        empty = torch.empty

        def device_empty(size: Any, **kwargs: Any) -> torch.Tensor:
            if "cuda" in str(kwargs.get("device")):
                return self.device.empty_strided((size,), (1,), kwargs["dtype"])
            return empty(size, **kwargs)

        def launch(sizes: tuple[int, ...], *args: Any) -> tuple[int]:
            *_, parameters, _ = args
            pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
            (to,) = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))[:1]
            nbytes = sum(sizes)
            words = ctypes.cast(pointers[1], ctypes.POINTER(ctypes.c_uint64))
            like = empty(nbytes, dtype=torch.uint8, device="meta")
            word = empty(1, dtype=torch.uint8, device="meta")
            self.device.launch(
                write,
                tensor_at(to, like, 0),
                *(tensor_at(w, word, 0) for w in words[: nbytes // 8]),
            )
            return (0,)

        def write(out: torch.Tensor, *words: torch.Tensor) -> None:
            content = (ctypes.c_uint64 * len(words))(*(w.data_ptr() for w in words))
            ctypes.memmove(out.data_ptr(), content, ctypes.sizeof(content))

        with (
            mock.patch.object(torch, "empty", device_empty),
            mock.patch.object(deliver, "bindings") as bindings,
            mock.patch.object(deliver, "_kernel", lambda sizes: sizes),
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True
            ),
        ):
            bindings.return_value.cuLaunchKernel = launch
            yield

    @contextlib.contextmanager
    def failing_once(self, method: str) -> Iterator[None]:
        "Of the graph, if it has such a method."
        original = getattr(ModelledGraph, method, None)
        if original is None:
            yield
            return
        calls = []

        def fail(graph: ModelledGraph) -> None:
            calls.append(graph)
            if len(calls) == 1:
                raise RuntimeError("no memory\nand advice")
            original(graph)

        with mock.patch.object(ModelledGraph, method, fail):
            yield
        self.assertGreater(len(calls), 0)

    @contextlib.contextmanager
    def remembered(self, choice: str = candidate.NODE_UPDATE) -> Iterator[store.Entry]:
        "An earlier process bound it, or copied its inputs, and it was faster."
        with tempfile.TemporaryDirectory() as directory:
            entry = store.Entry(Path(directory), {})
            entry.save(store.Decision(choice, [Reason.of(Code.NOT_FASTER)], {}))
            with mock.patch.object(store, "entry_for", lambda *args: entry):
                yield entry

    def refusing(self, refuses: Callable[[int], bool]) -> Any:
        return mock.patch.object(self.device.driver, "refuses", refuses)

    @contextlib.contextmanager
    def selects_at_once(self, *us: float) -> Iterator[None]:
        "What is timed takes so long, in turns."
        costs = [timing.Cost(*[timing.Estimate(t)] * 3) for t in us]
        times = itertools.cycle(costs)
        few = dict(WARMUP_SAMPLES=0, SAMPLES=1, MAX_SAMPLES=1, DEVICE_SAMPLES=1, MAX_DEVICE_SAMPLES=1)
        with (
            mock.patch.multiple(timing, **few),
            mock.patch.object(selection, "ROUND_CALLS", 1),
            mock.patch.object(timing.Samples, "cost", lambda _: next(times)),
        ):
            yield

    FORWARD = """
        x, w = args; args.clear()
        a = new(); launch(mul, a, x, w)
        b = new(); launch(sin, b, a)
        return (b, a, w)
    """

    # The gradient lies where the activation did.
    BACKWARD = """
        a, w, t = args; args.clear()
        launch(torch.Tensor.cos_, a)
        launch(mul, a, a, t)
        c = new(); launch(mul, c, a, w)
        return (a, c)
    """

    def deploy_forward(
        self, x: torch.Tensor, weight: torch.Tensor, force: str = "node_update"
    ) -> Deployed:
        return self.deploy(
            self.FORWARD,
            [x, weight],
            mode="forward",
            force=force,
            static=[1],
            names=["primals_1", "primals_2"],
        )

    def deploy_backward(
        self, inputs: list[torch.Tensor], force: str | None = "node_update"
    ) -> Deployed:
        return self.deploy(
            self.BACKWARD,
            inputs,
            mode="backward",
            force=force,
            returned=[0, 1],
            static=[0, 1],
            names=["mul", "primals_2", "tangents_1"],
            reused=[0],
        )

    def step(
        self,
        x: torch.Tensor,
        retained: list[Any] | None = None,
        force: str = "node_update",
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        Outputs and gradients of one step, and what they have to be. Without a backward
        if its activation is retained instead.
        """
        t = self.randn()
        new_generation()
        self.forward = self.forward or self.deploy_forward(x, self.weight, force)
        out, a, w = self.forward.call([x, self.weight])
        expected_a = on_host(x) * on_host(self.weight)
        kept = [(out, expected_a.sin())]
        if retained is not None:
            retained.append((a, expected_a))
        self.backward = self.backward or self.deploy_backward(
            [a, w, t], force
        )
        if retained is None:
            inputs = [a, w, t]
            del a
            grad, grad_x = self.backward.call(inputs)
            expected = expected_a.cos() * on_host(t)
            kept += [(grad, expected), (grad_x, expected * on_host(self.weight))]
        return kept

    def gradient(self, force: str) -> torch.Tensor:
        "Of a step whose backward is all that is compiled."
        new_generation()
        inputs = t, w = [self.randn(), self.weight]
        self.backward = self.backward or self.deploy(
            "t, w = args; args.clear(); g = new(); launch(mul, g, t, w); return (g,)",
            inputs,
            mode="backward",
            force=force,
            names=["tangents_1", "primals_1"],
        )
        (grad,) = self.backward.call(inputs)
        self.assertEqual(on_host(grad), on_host(t) * on_host(w))
        return grad

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
