"""
Branches of a captured function: torch.cond, of which a graph holds both paths, and torch.while_loop.

Generated code calls run_branch with the functions of both paths. Uncaptured, the host reads the predicate. A recording
passes an object that rehearses each path, then one that captures both: the graph's conditional node runs one of them.
Results lie in buffers that both paths write. A path whose own allocation becomes a result writes that buffer itself,
any other result is copied.

A loop has two paths, too: one iteration, and none. Its results are buffers that hold what it carries.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture.allocation import Allocation, AllocationTrace, copy_by_kernel, placed_allocator
from torch._inductor.pygraph.graph.conditional import (
    add_conditional,
    add_setter,
    captured_into,
    set_predicate,
    side_stream,
)
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.placeholder import storage_extent
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.graph.binding import NodeUpdate
    from torch._inductor.pygraph.graph.conditional import ConditionalNode
    from torch._inductor.utils import InputType
    from torch.cuda import _POOL_HANDLE

    Tensors = Sequence[torch.Tensor]
    Path = Callable[..., Tensors]
    # The path that runs for each value of the predicate.
    Paths = Mapping[bool, Path]
    Layouts = Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]]


# Parameters of generated functions that may be captured.
ALLOCATOR = "empty_strided_cuda"
BRANCHES = "branches"


def run_branch(
    branches: RehearsedBranches | CapturedBranches | None,
    name: str,
    if_true: Path,
    if_false: Path,
    args: list[Any],
    layouts: Layouts,
    allocate: Callable[..., torch.Tensor],
) -> Tensors:
    """
    Return the results of one of two paths.

    Args:
        branches: of a recording, or None
        args: the predicate, and the arguments of both paths. The list is cleared.
        layouts: size, stride and dtype of each result
        allocate: allocates results while there is a recording
    """
    predicate = args.pop(0)
    if branches is None:
        return (if_true if predicate.item() else if_false)(args)
    results = [allocate(*layout) for layout in layouts]
    branches.run(name, predicate, {True: if_true, False: if_false}, args, results)
    return results


def run_loop(
    branches: RehearsedBranches | CapturedBranches | None,
    name: str,
    condition: Path,
    body: Path,
    args: list[Any],
    layouts: Layouts,
    allocate: Callable[..., torch.Tensor],
) -> Tensors:
    """
    Return what a loop carries in the end.

    Args:
        branches: of a recording, or None
        args: what the loop carries in the beginning, and further arguments of condition and body. The list is cleared.
        layouts: size, stride and dtype of what the loop carries
        allocate: allocates results while there is a recording
    """
    carried, others = args[: len(layouts)], args[len(layouts) :]
    args.clear()
    if branches is not None:
        results = [allocate(*layout) for layout in layouts]
        _fill(results, carried)
        branches.run_loop(name, condition, body, others, results)
        return results
    is_first = True
    while condition([*carried, *others])[0].item():
        carried, is_first = [*body([*carried, *others])], False
    return [t.clone() for t in carried] if is_first else carried


def with_branches(model: ModelType, branches: RehearsedBranches | CapturedBranches | None) -> ModelType:
    """Return ``model`` whose branches are those of a recording."""
    return model if branches is None else functools.partial(model, **{BRANCHES: branches})


def _fill(results: Tensors, values: Tensors) -> None:
    """Write what a path returned to the results of the branch, where it does not lie there."""
    for result, value in zip(results, values, strict=True):
        if result.numel() == 0 or result.data_ptr() == value.data_ptr():
            continue
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(value)
        if is_dense and value.stride() == result.stride() and value.storage_offset() == 0:
            copy_by_kernel(result, value)
        else:
            result.copy_(value)


class RehearsedBranches:
    """
    Runs one path of each branch.

    Attributes:
        chosen: paths to take, by the name of the branch. Others are taken by their predicates
        places: for each path that ran the allocations that are results: (place in the order of allocations, result)
        depth: how many paths are inside of one another
    """

    def __init__(self) -> None:
        self.chosen: Mapping[str, bool] = {}
        self.places: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self.depth = 0
        self._inside = 0

    def along(self, chosen: Mapping[str, bool], model: ModelType) -> ModelType:
        """Return ``model`` along some paths."""

        def run(inputs: list[InputType]) -> OutputType:
            self.chosen = chosen
            return model(inputs)

        return run

    def run(self, name: str, predicate: torch.Tensor, paths: Paths, args: list[Any], results: Tensors) -> None:
        taken = bool(predicate.item()) if (chosen := self.chosen.get(name)) is None else chosen
        trace = AllocationTrace()
        self._inside += 1
        self.depth = max(self.depth, self._inside)
        try:
            values = paths[taken](args, **{ALLOCATOR: trace, BRANCHES: self})
        finally:
            self._inside -= 1
        self.places[name, taken] = _places(trace, values, results)
        _fill(results, values)

    def run_loop(self, name: str, condition: Path, body: Path, others: list[Any], results: Tensors) -> None:
        chosen = self.chosen.get(name)
        passed = {ALLOCATOR: AllocationTrace(), BRANCHES: self}
        self.depth = max(self.depth, self._inside + 1)
        goes_on = bool(condition([*results, *others], **passed)[0].item())
        if chosen is not None:
            goes_on = chosen
        while goes_on:
            _fill(results, body([*results, *others], **passed))
            goes_on = bool(condition([*results, *others], **passed)[0].item()) and chosen is None


def _places(trace: AllocationTrace, values: Tensors, results: Tensors) -> list[tuple[int, int]]:
    storages = [StorageWeakRef(value.untyped_storage()) for value in values]
    return [
        (n, i)
        for i, (value, result) in enumerate(zip(values, results, strict=True))
        if trace.holds(value)
        and storages.count(storages[i]) == 1
        and value.storage_offset() == 0
        and Allocation.of(value) == Allocation.of(result)
        and storage_extent(trace.allocations[n := trace.ordinals[storages[i]]].like()) == storage_extent(result)
    ]


class CapturedBranches:
    """Captures both paths of each branch, which ``rehearsed`` ran. ``nodes`` are conditional ones, by name."""

    def __init__(self, rehearsed: RehearsedBranches, device_index: int, pool: _POOL_HANDLE) -> None:
        self.places = rehearsed.places
        self.device_index = device_index
        self.pool = pool
        # Ahead of the capture.
        thread = threading.get_ident()
        self.streams = [side_stream(device_index, depth, thread) for depth in range(rehearsed.depth)]
        self.nodes: dict[str, ConditionalNode] = {}
        # Predicates that choose a path.
        self.constants: torch.Tensor | None = None
        self._inside = 0

    @property
    def bodies(self) -> dict[int, tuple[Any, ...]]:
        """The graphs of the paths, by the handle of the conditional node."""
        return {int(n.node): n.bodies for n in self.nodes.values()}

    def run(self, name: str, predicate: torch.Tensor, paths: Paths, args: list[Any], results: Tensors) -> None:
        self._allocate_in_pool()
        added = self.nodes[name] = add_conditional(predicate.data_ptr(), self.device_index)
        for (taken, path), body in zip(paths.items(), added.bodies):
            places = {n: (storage_extent(results[i]), results[i].data_ptr()) for n, i in self.places[name, taken]}
            allocate = placed_allocator(places, self.device_index)
            with self._captured_into(body):
                # The list of arguments is cleared.
                _fill(results, path([*args], **{ALLOCATOR: allocate, BRANCHES: self}))
        args.clear()

    def run_loop(self, name: str, condition: Path, body: Path, others: list[Any], results: Tensors) -> None:
        self._allocate_in_pool()
        passed = {ALLOCATOR: placed_allocator({}, self.device_index), BRANCHES: self}
        (predicate,) = condition([*results, *others], **passed)
        added = self.nodes[name] = add_conditional(predicate.data_ptr(), self.device_index, is_loop=True)
        with self._captured_into(added.bodies[0]):
            _fill(results, body([*results, *others], **passed))
            (predicate,) = condition([*results, *others], **passed)
            added.setters.append(add_setter(predicate.data_ptr(), added.handle, self.device_index))

    @contextlib.contextmanager
    def _captured_into(self, body: Any) -> Iterator[None]:
        stream = self.streams[self._inside]
        self._inside += 1
        with captured_into(body, stream):
            yield
        self._inside -= 1

    def _allocate_in_pool(self) -> None:
        """Let all that this thread allocates until the end of the capture lie in the graphs' pool, on all streams."""
        if self.nodes:
            return
        torch._C._cuda_endAllocateToPool(self.device_index, self.pool)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device_index, self.pool)
        # The graph holds the pool once, not twice.
        torch._C._cuda_releasePool(self.device_index, self.pool)

    def choose(self, raw_executable: int, chosen: Mapping[str, bool], updates: Iterable[NodeUpdate]) -> None:
        """Let a graph take given paths, whatever the predicates are. Raises DriverError: a node could not be set."""
        executable = bindings().CUgraphExec(raw_executable)
        bound = {int(update.args[1]): update for update in updates}
        if self.constants is None:
            self.constants = torch.tensor([False, True], device=torch.device("cuda", self.device_index))
        for name, node in self.nodes.items():
            for i, setter in enumerate(node.setters):
                if name in chosen:
                    # A loop has at most one iteration.
                    set_predicate(executable, setter, self.constants.data_ptr() + (chosen[name] and i == 0))
                elif (update := bound.get(int(setter.node))) is not None:
                    check(update.set(*update.args))
                else:
                    set_predicate(executable, setter, setter.predicate)
