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
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.select import deploy
from torch._inductor.pygraph.types.calls import CallInfo, NOTE
from torch._inductor.pygraph.types.partition import Collective, PartitionInfo
from torch._inductor.test_case import TestCase
from torch.testing._internal.modelled_cuda import cu, modelled_device, ModelledDevice, on_host
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

import ctypes
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch._inductor.pygraph import report
from torch._inductor.pygraph.graph.placeholder import (
    tensor_at,
)
from torch._inductor.pygraph.select import selection, store, timing
from torch._inductor.pygraph.types import candidate
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._inductor.pygraph.values import deliver
from torch.testing._internal.modelled_cuda import (
    ModelledGraph,
    ModelledStream,
)


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
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_"):
            for x in tree_leaves(args[0]):
                self.device.launch(self.reduce, x)
            return args[0]
        compute = getattr(self, name.removesuffix("_coalesced").removesuffix("_out"), None)
        # Stand-ins of a recording have no memory.
        if compute is None or tree_leaves(args)[0].is_meta:
            return func(*args, **(kwargs or {}))
        if (out := (kwargs or {}).get("out")) is not None:
            self.device.launch(compute, out, args[0])
            return out
        results = []
        for like, x in zip(tree_leaves(func(_on_meta(args[0]), *args[1:])), tree_leaves(args[0])):
            results.append(self.device.empty_strided(tuple(like.shape), (1,), torch.float32))
            self.device.launch(compute, results[-1], x)
        return results[0] if isinstance(args[0], torch.Tensor) else results

    def all_gather_into_tensor(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        # In place, the operand is a part of the result.
        result.copy_(torch.cat([x, 2 * x]))

    def reduce_scatter_tensor(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        torch.mul(x[:4], 3, out=result)

    def all_to_all_single(self, result: torch.Tensor, x: torch.Tensor) -> None:
        self.ran += 1
        result[:4], result[4:] = x[:4], -x[:4]


def _on_meta(tensors: Any) -> Any:
    return tree_map(lambda t: t.to("meta"), tensors)


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

    def streams(self, *raw: int) -> list[ModelledStream]:
        return [ModelledStream(self.device, cuda_stream) for cuda_stream in raw]

    def enqueued(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.device.stream.work.append(lambda: compute(*args))

    def check_operator(self, force: str) -> None:
        inner = self.check(self.ADD, calls=5)
        ran = []

        def hook():
            # What draws on the host is not captured.
            x, y = (self.device.tensor(torch.arange(8.0)) for _ in range(2))
            (out,) = inner(x, y)
            if self.device.captured is None:
                ran.append((self.values([out]), self.expected(inner, [x, y])[:1]))

        self.hook = hook
        outer = self.deploy(
            "hook(); x, y = args; args.clear(); a = new(); launch(add, a, x, y); return (a,)",
            [self.randn(), self.randn()],
            force=force,
        )
        for _ in range(6):
            x, y = self.randn(), self.randn()
            (out,) = outer(x, y)
            self.assertEqual(on_host(out), on_host(x) + on_host(y))
        for actual, expected in ran:
            self.assertEqual(actual, expected)
        manager = trees.get_manager(0)
        roots = [len(nodes) for nodes in manager.roots.values()]
        self.assertEqual((roots, manager.new_graph_id().id), ([1, 1], 2))
        self.assertEqual([r.choice for r in report()], ["node_update", force])

    COLLECTIVES = {
        "in_between": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            b = new(); launch(add, b, a, y)
            return (b,)
        """,
        "of_an_output": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "after_a_mutation": """
            x, y = args; args.clear()
            launch(add, x, x, y)
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (a,)
        """,
        "of_an_input": """
            x, y = args; args.clear()
            c10d.wait_tensor(c10d.all_reduce_(x, 'sum', '0'))
            a = new(); launch(add, a, x, y)
            return (a,)
        """,
        "gathered": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.all_reduce_(a, 'sum', '0'))
            return (c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, '0')),)
        """,
        "gathered_input": """
            x, y = args; args.clear()
            a = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, '0'))[4:12]
            b = new(); launch(mul, b, a, y)
            return (b,)
        """,
        "gathered_together": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c, d = c10d.all_gather_into_tensor_coalesced([a, y], 2, '0')
            c10d.wait_tensor(c); c10d.wait_tensor(d)
            b = new(); launch(add, b, c[4:12], d[:8])
            return (b,)
        """,
        "scattered": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c = c10d.wait_tensor(c10d.reduce_scatter_tensor(a, 'sum', 2, '0'))
            c10d.wait_tensor(c10d.all_reduce_(c, 'sum', '1'))
            b = new(); launch(sin, b, y); launch(mul, b[:4], c, y[:4])
            return (b,)
        """,
        "scattered_together": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c, d = c10d.reduce_scatter_tensor_coalesced([a, y], 'sum', 2, '0')
            c10d.wait_tensor(c); c10d.wait_tensor(d)
            b = new(); launch(sin, b, y); launch(mul, b[:4], c, d)
            return (b,)
        """,
        "gathered_into": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            b = new(); c10d.wait_tensor(c10d.all_gather_into_tensor_out(a[:4], 2, '0', out=b))
            c = new(); launch(mul, c, b, y)
            return (b, c)
        """,
        "scattered_into": """
            x, y = args; args.clear()
            b = new(); launch(sin, b, x)
            c10d.wait_tensor(c10d.reduce_scatter_tensor_out(y, 'sum', 2, '0', out=b[:4]))
            return (b,)
        """,
        "gathered_into_input": """
            x, y = args; args.clear()
            a = new(); launch(sin, a, x)
            c10d.wait_tensor(c10d.all_gather_into_tensor_out(a[:4], 2, '0', out=y))
            c = new(); launch(mul, c, a, y)
            return (c,)
        """,
        "broadcast": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c10d.wait_tensor(c10d.broadcast_(a, 0, '0'))
            b = new(); launch(mul, b, a, y)
            return (b,)
        """,
        "reduced_together": """
            x, y = args; args.clear()
            a, b = new(), new(); launch(sin, a, x); launch(sin, b, y)
            for t in c10d.all_reduce_coalesced_([a, b], 'sum', '0'): c10d.wait_tensor(t)
            c = new(); launch(mul, c, a, b)
            return (c,)
        """,
        "exchanged": """
            x, y = args; args.clear()
            a = new(); launch(add, a, x, y)
            c = c10d.wait_tensor(c10d.all_to_all_single(a, [4, 4], [4, 4], '0'))
            b = new(); launch(mul, b, c, y)
            return (b,)
        """,
    }

    def check_collectives(self, name: str, calls: int = 7) -> None:
        "Each call of a function runs its collectives once, whatever it does else."
        body = "c10d = torch.ops._c10d_functional\n" + self.COLLECTIVES[name].strip()
        mutated = {"after_a_mutation": (0,), "of_an_input": (0,), "gathered_into_input": (1,)}.get(name, ())
        fn = None
        with Ranks(self.device) as ranks:
            for _ in range(calls):
                inputs = [self.randn(), self.randn()]
                fn = fn or self.deploy(body, inputs, force=self.force, mutated=mutated)
                ranks.ran = 0
                expected = self.expected(fn, inputs)
                in_eager, ranks.ran = ranks.ran, 0
                outputs = fn(*inputs)
                self.assertEqual(self.values([*outputs, *inputs]), expected)
                self.assertEqual(ranks.ran, in_eager)
                del outputs, inputs

    def numbers_of_the_host(
        self, number: Callable[[], float], calls: int, force: str | None
    ) -> list[float]:
        "What each call of a function gives whose kernel takes a number from host code."

        def scale(out: torch.Tensor, x: torch.Tensor) -> None:
            by = number()
            self.device.launch(lambda o, a: torch.mul(a, by, out=o), out, x)

        x = self.device.tensor(torch.ones(8))
        fn = self.deploy(
            "x, = args; args.clear(); a = new(); scale(a, x); return (a,)",
            [x],
            force=force,
        )
        fn.model.__globals__["scale"] = scale
        return [on_host(fn(x)[0])[0].item() for _ in range(calls)]

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

    def is_of_backward(self, node: int) -> bool:
        nodes, graphs = self.device.driver.nodes, self.device.driver.graphs.values()
        return any(node in graph and nodes[graph[0]].launch.kernel.name == "cos_" for graph in graphs)

    @contextlib.contextmanager
    def selects_at_once(self, *us: float) -> Iterator[None]:
        "What is timed takes so long, in turns."
        costs = [timing.Cost(*[timing.Estimate(t)] * 3) for t in us]
        times = itertools.cycle(costs)
        few = dict(WARMUP_SAMPLES=0, SAMPLES=1, MAX_SAMPLES=1, DEVICE_SAMPLES=1)
        with (
            mock.patch.multiple(timing, **few),
            mock.patch.object(selection, "ROUND_CALLS", 1),
            mock.patch.object(timing.Samples, "cost", lambda _: next(times)),
        ):
            yield

    def conjugating(self, body: str) -> Any:
        "A function whose operator_mul is aten.mul: what it launches depends on its inputs."

        def mul_of_conjugate(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
            torch.mul(x.conj(), y, out=out)

        def operator_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = self.device.empty_strided((8,), (1,), torch.complex64)
            kernel = mul_of_conjugate if x.is_conj() else mul
            self.device.launch(kernel, out, x, y)
            return out

        fn = RecordTestCase.generated(self, body)
        fn.__globals__["operator_mul"] = operator_mul
        return fn

    def check_complex(
        self, body: str, force: str, mode: str, conjugated_from: int
    ) -> None:
        def value(t: torch.Tensor) -> torch.Tensor:
            on_cpu = on_host(t).clone()
            return on_cpu.conj().resolve_conj() if t.is_conj() else on_cpu

        fn = None
        for i in range(8):
            x, y = (
                self.device.tensor(torch.randn(8, dtype=torch.complex64))
                for _ in range(2)
            )
            if i >= conjugated_from:
                x = torch.ops.aten._conj(x)
            fn = fn or self.deploy(
                body,
                [x, y],
                force=force,
                mode=mode,
                names=["tangents_1", "tangents_2"],
            )
            expected = value(x) * value(y)
            (out,) = fn(x, y)
            if "_conj" in body:
                expected = expected.conj()
            self.assertEqual(value(out), expected)
            del out

    LAYER = """
        x, w, b = args; args.clear()
        a = new(); launch(add, a, x, w)
        c = new(); launch(add, c, a, b)
        return (c,)
    """

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

    def fits(
        self, limit: int, program: Callable[[str | None, Any], Any], force: str | None
    ) -> bool:
        "Whether a program gets along with so much memory, in a process of its own."
        self.forward = self.backward = None
        trees.reset_cudagraph_trees()
        reset_report()
        self.device.blocks.clear()
        self.device.limit = limit
        try:
            # Before: graphs keep their memory between calls, of which calls need more.
            inputs = [(self.randn(), self.randn()) for _ in range(5)]
            program(force, itertools.cycle(inputs))
        except torch.OutOfMemoryError:
            return False
        return True

    def check_fits(
        self, program: Callable[[str | None, Any], Any], force: str | None
    ) -> list[str]:
        "What is chosen for the last function, from where the program fits without graphs."
        limit = next(n for n in range(0, 4096, 32) if self.fits(n, program, "no_graph"))
        choices = []
        for n in range(limit, 4 * limit, 32):
            self.assertTrue(self.fits(n, program, force), f"{n} bytes of {limit}")
            choices.append(report()[-1].choice)
        self.device.limit = 1 << 30
        return choices

    def train(self, force: str | None, inputs: Iterator[Any]) -> None:
        self.weight, _ = next(inputs)
        for _ in range(7):
            x, t = next(inputs)
            with mock.patch.object(self, "randn", lambda: t):
                for actual, expected in self.step(x, force=force):
                    self.assertEqual(on_host(actual), expected)
            # Nothing is kept into the next step.
            del actual

    # Eight times the sine, and y added.
    DEEP = "x, y = args; args.clear(); " + "".join(
        f"{b} = new(); launch(sin, {b}, {a}); "
        for a, b in itertools.pairwise("xabcdefgh")
    )

    DEEP += "i = new(); launch(add, i, h, y); return (i,)"

    def run_deep(self, force: str | None, inputs: Iterator[Any], calls: int = 5) -> None:
        fn = None
        for _ in range(calls):
            x, y = next(inputs)
            fn = fn or self.deploy(self.DEEP, [x, y], force=force)
            expected = on_host(x)
            for _ in range(8):
                expected = expected.sin()
            (out,) = fn(x, y)
            self.assertEqual(on_host(out), expected + on_host(y))
            del out

    def run_shared(self, force: str | None, inputs: Iterator[Any]) -> None:
        body = """
            x, y = args; args.clear()
            a = empty(); launch(sin, a, x); launch(add, a, a, y)
            return (a, a.view(2, 4))
        """
        fn = None
        for _ in range(5):
            x, y = next(inputs)
            fn = fn or self.deploy(body, [x, y], force=force, returned=[0, 1])
            out, view = fn(x, y)
            self.assertEqual(on_host(out), on_host(x).sin() + on_host(y))
            del out, view


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
