# Owner(s): ["module: inductor"]
"""
Both interpreters of a ReplayPlan do the same: random plans and random states of the trees,
the device and the program are given to each, and all that can be seen is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import unittest
from typing import Any, TYPE_CHECKING

from hypothesis import given, HealthCheck, settings, strategies as st

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees as trees
from torch._inductor.cudagraph_trees import (
    CUDAGraphTreeManager,
    ExecutionState,
    MarkStepBox,
    StorageWeakRefWrapper,
)
from torch._inductor.pygraph import native
from torch._inductor.pygraph.native import PythonTreeState
from torch._inductor.pygraph.replay import interpreter
from torch._inductor.pygraph.replay.plan import Output, PathOutput, ReplayPlan
from torch._inductor.pygraph.trees.cached import CachedTensor
from torch._inductor.pygraph.trees.manager import without_trees
from torch._inductor.test_case import run_tests, TestCase


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# What one call may find changed, beside the call before; a call may find several at once.
OF_INPUTS = ("moved", "missing", "number", "conjugate", "misaligned", "in_pool")
OF_THE_CALL = ("short", "tuple", "capturing", "without_trees", "locked", "stream")
OF_THE_RECORDING = ("dropped", "outdated", "refuses", "fails", "words_fail")
OF_THE_PATH = ("none", "itself", "parent", "other", "held", "uncached", "recording", "marked")
OF_CACHES = ("shape", "dtype", "named", "memory", "class", "negative", "used")
CHANGES = (*OF_INPUTS, *OF_THE_CALL, *OF_THE_RECORDING, *OF_THE_PATH, *OF_CACHES)


@dataclasses.dataclass(frozen=True)
class Shape:
    """
    A plan, in numbers.

    Attributes:
        managed: for each output of the graph before that is an input, whether it is dropped
        others: outputs of that graph that are no inputs, dead before this one
        last_outputs: of the other graph that a root may come after
        alignments: of the bound inputs
        numbers: of the calls of a recording for many sizes: a size, a stride, an offset in bytes, and one more
    """

    statics: int
    managed: tuple[bool, ...]
    others: int
    last_outputs: int
    bound: int
    alignments: tuple[int, ...]
    allocators: int
    words: tuple[int, ...] | None
    pending: bool | None
    kinds: tuple[str, ...]
    numbers: tuple[int, ...] | None = None

    @property
    def tensors(self) -> int:
        return self.bound + self.allocators


@st.composite
def shapes(draw: Any) -> Shape:
    managed = tuple(draw(st.lists(st.booleans(), max_size=2)))
    numbers = st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from((0, 8)), st.integers(-9, 9))
    return Shape(
        statics=draw(st.integers(0, 2)),
        managed=managed,
        others=draw(st.integers(0, 2)) if managed else 0,
        last_outputs=draw(st.integers(0, 2)),
        bound=draw(st.integers(0, 3)),
        alignments=tuple(draw(st.lists(st.sampled_from((4, 16, 64)), min_size=3, max_size=3))),
        allocators=draw(st.integers(0, 2)),
        words=draw(st.none() | st.tuples(st.integers(0, 2**64 - 1))),
        pending=draw(st.sampled_from((True, False, None))),
        kinds=tuple(
            draw(
                st.lists(
                    st.sampled_from(("bound", "input", "constant", "made", "cached", "number")),
                    max_size=5,
                )
            )
        ),
        numbers=None if managed else draw(st.none() | numbers),
    )


calls = st.lists(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 7)), max_size=2),
    min_size=1,
    max_size=6,
)


class Other(torch.Tensor):
    pass


class World:
    """
    A plan, its replay, and what is around them. Tensors have names, by address, that are the
    same in each world of one Shape.
    """

    def __init__(self, shape: Shape, replay: Any, tree_state: Any) -> None:
        self.shape = shape
        self.events: list[Any] = []
        self.names: dict[int, str] = {0: "nowhere"}
        self.memory = torch.zeros(1 << 14, dtype=torch.uint8)
        self.start = -self.memory.data_ptr() % 1024
        self.is_capturing = self.refuses = self.fails = self.words_fail = False
        self.stream = 1
        self.owner = trees.thread_containers()
        self.manager = CUDAGraphTreeManager.__new__(CUDAGraphTreeManager)
        self.manager.current_node = None
        self.manager.current_gen = -1
        self.manager.running_forwards_with_pending_backwards = False
        self.state = tree_state(
            0, lambda index: self.stream, lambda: self.events.append("wait")
        )
        self.graph, self.is_outdated = types.CellType("graph"), types.CellType(False)
        self.statics = [self.place(f"static{i}", i) for i in range(shape.statics)]
        self.parent = self.node(len(shape.managed) + shape.others, "parent")
        self.other = self.node(shape.last_outputs, "other")
        self.cached: list[torch.Tensor | None] = [
            self.tensor(f"cached{i}") if kind == "cached" else None
            for i, kind in enumerate(shape.kinds)
        ]
        self.itself = types.SimpleNamespace(name="itself")
        self.plan = self.make_plan()
        self.replay = replay(self.plan, self.state, self.general)

    def place(self, name: str, slot: int, offset: int = 0) -> torch.Tensor:
        "A tensor of eight floats in the memory, in one of its slots of 512 bytes."
        start = self.start + 512 * slot + offset
        t = self.memory[start : start + 32].view(torch.float32)
        self.names[t.data_ptr()] = name
        return t

    def tensor(self, name: str) -> torch.Tensor:
        t = torch.zeros(8)
        self.names[t.data_ptr()] = name
        return t

    def node(self, outputs: int, name: str) -> Any:
        cached = [self.tensor(f"{name}{i}") for i in range(outputs)]

        def is_only_cached(i: int) -> bool:
            return sys.getrefcount(cached[i]) == 2 and cached[i]._use_count() == 1

        weakrefs = [
            StorageWeakRefWrapper(t, lambda i=i: is_only_cached(i))
            for i, t in enumerate(cached)
        ]
        return types.SimpleNamespace(name=name, cached=cached, weakrefs=weakrefs)

    def outputs_of(self, node: Any) -> tuple[PathOutput, ...]:
        count = len(node.cached)
        return tuple(PathOutput(node.weakrefs, node.cached, i) for i in range(count))

    def make_plan(self) -> ReplayPlan:
        shape = self.shape
        # Inputs: static ones, those that the graph before returned, and bound ones.
        num_managed = len(shape.managed)
        managed = [shape.statics + i for i in range(num_managed)]
        static = [(i, t.data_ptr()) for i, t in enumerate(self.statics)]
        static += [
            (i, t.data_ptr()) for i, t in zip(managed, self.parent.cached)
        ]
        of_parent = self.outputs_of(self.parent)
        dead = tuple(of_parent[i] for i, dies in enumerate(shape.managed) if dies)
        first = shape.statics + num_managed
        pool = self.memory.data_ptr() + self.start + 512 * 16
        return ReplayPlan(
            node=self.itself if shape.numbers is None else None,  # type: ignore[arg-type]
            graph=self.graph,
            is_outdated=self.is_outdated,
            manager=self.manager,
            executing=ExecutionState.EXECUTION,
            mark_step=MarkStepBox,
            tracker=GenerationTracker,
            local=trees.local,
            containers=trees.thread_containers,
            owner=self.owner,
            parent=self.parent if shape.managed else None,
            live_outputs=self.outputs_of,
            dead_before=of_parent[num_managed:],
            dead_after=dead,
            pending_backward=shape.pending,
            is_capturing=lambda: self.is_capturing,
            num_inputs=first + shape.bound,
            static=tuple(static),
            bound=tuple(range(first, first + shape.bound)),
            alignments=shape.alignments[: shape.bound],
            pool=(pool, pool + 512),
            dropped=tuple(i for i, dies in zip(managed, shape.managed) if dies),
            restore=self.restore,
            allocators=tuple(
                lambda *numbers, i=i: self.allocate(i, *numbers) for i in range(shape.allocators)
            ),
            views=tuple((i, (0, 1), (1, 0), 2, 4) for i in range(self.views())),
            words=None if shape.words is None or shape.numbers is not None else self.words,
            nodes=self.update if shape.numbers is None else None,
            launch=self.launch,
            cached=self.cached,
            outputs=tuple(map(self.output, range(len(shape.kinds)), shape.kinds)),
        )

    def views(self) -> int:
        return 0 if self.shape.numbers is None else self.shape.tensors

    def output(self, i: int, kind: str) -> Output:
        shape = self.shape
        if kind == "bound" and shape.tensors > 0:
            return Output("bound", i % (shape.tensors + self.views()))
        if kind == "number" and shape.numbers is not None:
            return Output("number", i % len(shape.numbers))
        if kind == "input" and shape.statics > 0:
            return Output("input", i % shape.statics)
        if kind == "made":
            return Output("made", lambda: f"made{i}")
        if kind == "cached":
            address = self.cached[i].data_ptr()  # type: ignore[union-attr]
            return Output("cached", CachedTensor(address, (8,), (1,), torch.float32))
        return Output("constant", i)

    # What the replay calls.

    def general(self, inputs: Any, *of_sizes: Any) -> list[str]:
        self.events.append(("general", type(inputs), [*map(self.name, inputs)], of_sizes[:1]))
        return ["general"]

    def restore(self, inputs: list[Any]) -> None:
        for i in self.plan.dropped:
            self.events.append(("restore", self.name(inputs[i])))
            inputs[i] = "restored"

    def allocate(self, i: int, *numbers: Any) -> torch.Tensor:
        self.events.append(("allocate", i, numbers))
        return self.place(f"allocated{i}", 24 + i)

    def words(self) -> list[int]:
        self.events.append("words")
        if self.words_fail:
            raise ValueError("no words")
        return [*self.shape.words]  # type: ignore[misc]

    def update(self, pointers: list[int]) -> bool:
        count = self.shape.tensors
        named = [self.names[p] for p in pointers[:count]]
        self.events.append(("update", named, [word % (1 << 64) for word in pointers[count:]]))
        return not self.refuses

    def launch(self, graph: str) -> None:
        self.events.append(("launch", graph, self.trees()))
        if self.fails:
            raise RuntimeError("the device is gone")

    # What can be seen of it.

    def name(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = self.names.get(value.data_ptr(), "unknown")
        return name, type(value), value.shape, value.stride(), value.is_conj(), value.is_neg()

    def trees(self) -> list[Any]:
        manager = self.manager
        node = manager._current_node
        return [
            getattr(node, "name", None),
            manager.path_state,
            manager.current_gen,
            manager.running_forwards_with_pending_backwards,
        ]

    def caches(self) -> list[Any]:
        return [
            t if t is None else (t.requires_grad, t.grad, t.grad_fn, dict(t.__dict__))
            for t in self.cached
        ]

    # One call.

    def inputs(self, changes: dict[str, int]) -> list[Any]:
        inputs = [*self.statics, *self.parent.cached[: len(self.shape.managed)]]
        inputs += [self.place(f"x{i}", 4 + i) for i in range(self.shape.bound)]
        if not inputs:
            return inputs
        for change, k in changes.items():
            i = k % len(inputs)
            if change == "moved":
                inputs[i] = self.place("moved", 30)
            elif change == "missing":
                inputs[i] = None
            elif change == "number":
                inputs[i] = 7
            elif change == "conjugate" and isinstance(inputs[i], torch.Tensor):
                inputs[i] = torch._neg_view(inputs[i])
            elif change == "misaligned":
                inputs[i] = self.place("misaligned", 8, (4, 16, 32, 64)[k % 4])
            elif change == "in_pool":
                inputs[i] = self.place("in_pool", 16)
        return inputs[:-1] if "short" in changes else inputs

    def set_path(self, changes: dict[str, int]) -> list[Any]:
        "Returns what somebody holds of the path meanwhile."
        held: list[Any] = []
        last = self.parent if self.shape.managed else None
        nodes = {"none": None, "itself": self.itself, "parent": self.parent, "other": self.other}
        for change, k in changes.items():
            last = nodes.get(change, last)
            for node in (self.parent, self.other):
                if change == "held" and node.cached:
                    t = node.cached[k % len(node.cached)]
                    held.append(t.detach() if k % 2 else t)
                elif change == "uncached" and node.cached:
                    node.weakrefs[k % len(node.weakrefs)].remove_extra_reference()
        if last is self.itself:
            # Nothing of it is alive.
            last.cached, last.weakrefs = [], []
        self.manager.current_node = last
        if last is not None:
            states = (ExecutionState.RECORDING, ExecutionState.WARMUP)
            k = changes.get("recording")
            self.manager.path_state = (
                ExecutionState.EXECUTION if k is None else states[k % 2]
            )
        return held

    @contextlib.contextmanager
    def changed_caches(self, changes: dict[str, int]) -> Iterator[None]:
        ways: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
            "shape": (lambda t: t.unsqueeze_(0), lambda t, data: t.squeeze_(0)),
            "named": (lambda t: t.rename_("a"), lambda t, data: t.rename_(None)),
        }
        for name, other in {
            "dtype": lambda data: data.view(torch.int32),
            "memory": lambda data: torch.zeros(8),
            "negative": torch._neg_view,
        }.items():
            ways[name] = (
                lambda t, other=other: setattr(t, "data", other(t.data)),
                lambda t, data: setattr(t, "data", data),
            )
        ways["class"] = (
            lambda t: setattr(t, "__class__", Other),
            lambda t, data: setattr(t, "__class__", torch.Tensor),
        )
        undo = []
        tensors = [t for t in self.cached if t is not None]
        for change, k in changes.items():
            if not tensors:
                break
            t = tensors[k % len(tensors)]
            if change == "used":
                t.requires_grad_().sum().backward()
                t.register_hook(print)
                t.tag = k  # type: ignore[attr-defined]
            elif change in ways:
                change_it, change_back = ways[change]
                undo.append((change_back, t, t.data))
                with torch.no_grad():
                    change_it(t)
        yield
        with torch.no_grad():
            for change_back, t, data in reversed(undo):
                change_back(t, data)

    def call(self, changes: dict[str, int]) -> list[Any]:
        """Makes a call, and returns all that can be seen of it."""
        self.events.clear()
        self.is_capturing = "capturing" in changes
        self.refuses, self.fails = "refuses" in changes, "fails" in changes
        self.words_fail = "words_fail" in changes
        self.stream = changes.get("stream", self.stream)
        self.is_outdated.cell_contents = "outdated" in changes
        self.graph.cell_contents = None if "dropped" in changes else "graph"
        step = MarkStepBox.mark_step_counter
        MarkStepBox.mark_step_counter = -changes.get("marked", 0)
        inputs: Any = self.inputs(changes)
        if "tuple" in changes:
            inputs = tuple(inputs)
        held = self.set_path(changes)
        is_locked = "locked" in changes and self.state.acquire()
        around = contextlib.nullcontext()
        if "without_trees" in changes:
            around = without_trees()
        try:
            with self.changed_caches(changes), around:
                try:
                    of_sizes = () if self.shape.numbers is None else (self.shape.numbers, self.update)
                    result: Any = [*map(self.name, self.replay(inputs, *of_sizes))]
                except (RuntimeError, ValueError) as e:
                    result = type(e), str(e)
                caches = self.caches()
        finally:
            MarkStepBox.mark_step_counter = step
        if is_locked:
            self.state.release()
        is_free = self.state.acquire()
        self.state.release()
        del held
        seen = [result, caches, is_free, self.state.raw_stream, self.trees()]
        return [*seen, [*map(self.name, inputs)], [*self.events]]


COMPILED: Any = native.compiled


@unittest.skipIf(native.compiled is None, "requires _replay")
class PlanTest(TestCase):
    replayed: set[str]

    def worlds(self, shape: Shape) -> list[World]:
        return [
            World(shape, interpreter.Replay, PythonTreeState),
            World(shape, COMPILED.Replay, COMPILED.TreeState),
        ]

    def check(self, shape: Shape, changes: list[list[tuple[str, int]]]) -> list[bool]:
        "Whether each call was replayed, by both."
        worlds = self.worlds(shape)
        replayed = []
        for of_call in changes:
            seen = [world.call(dict(of_call)) for world in worlds]
            self.assertEqual(repr(seen[0]), repr(seen[1]))
            replayed.append(any(event[0] == "launch" for event in worlds[0].events))
        return replayed

    @settings(
        deadline=None,
        max_examples=400,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(shapes(), calls)
    def test_both_interpreters_do_the_same(self, shape, changes):
        self.check(shape, changes)

    FORWARD = Shape(
        statics=1,
        managed=(),
        others=0,
        last_outputs=1,
        bound=2,
        alignments=(16, 16),
        allocators=1,
        words=(5,),
        pending=True,
        kinds=("bound", "cached", "input", "made", "constant"),
    )
    BACKWARD = dataclasses.replace(FORWARD, managed=(True, False), others=1, pending=False)

    def test_each_change_alone(self):
        "A call is replayed without a change. With one, it is if the change is in this list."
        # The change is of a bound input, or of an output that has to be dead.
        k = 8
        everywhere = {"moved", "stream", "marked", "used", "fails"}
        for shape, expected in (
            (self.FORWARD, {*everywhere, "none", "itself", "parent", "other", "held", "uncached", "recording"}),
            (self.BACKWARD, {*everywhere, "parent"}),
        ):
            found = set()
            for change in CHANGES:
                before, replayed, after = self.check(shape, [[], [(change, k)], []])
                self.assertTrue(before)
                # Nothing tells whether a tensor is alive that its node does not cache.
                self.assertEqual(after, (change, shape.managed) != ("uncached", (True, False)))
                if replayed:
                    found.add(change)
            self.assertEqual(found, expected)

    def test_path_that_is_alive(self):
        for change in ("held", "uncached", "recording"):
            for k in (0, 1):
                changes = [("other", 0), (change, k)]
                self.assertEqual(self.check(self.FORWARD, [[], changes]), [True, False])

    def test_path_that_is_another_one(self):
        "What has to be dead is that one's."
        held = ("held", 2)
        for first, second, replayed in (("other", "itself", True), ("itself", "other", False)):
            changes = [[(first, 0)], [(second, 0), held]]
            self.assertEqual(self.check(self.FORWARD, changes), [True, replayed])

    def test_static_input_that_moved(self):
        self.assertEqual(self.check(self.FORWARD, [[], [("moved", 0)]]), [True, False])

    def test_many_sizes(self):
        "The path stays as it is, whatever it is, and views and numbers are those of the call."
        kinds = ("bound",) * 8 + ("number",) * 4
        sized = dataclasses.replace(self.FORWARD, statics=0, kinds=kinds, numbers=(2, 1, 8, -3))
        for change in OF_THE_PATH:
            self.assertEqual(self.check(sized, [[], [(change, 1)]]), [True, True])
        world = World(sized, COMPILED.Replay, COMPILED.TreeState)
        result, *_ = world.call({"parent": 0})
        self.assertEqual([t[2] for t in result[:6]], [(8,)] * 3 + [(2, 1)] * 3)


if __name__ == "__main__":
    run_tests()
