"""
What is known of a function, what its recording is asked for, and what the recording gives. All of it is frozen but
FunctionState, which only the function's controller writes.
"""

from __future__ import annotations

import dataclasses
import enum
from types import CellType
from typing import Any, TYPE_CHECKING

from torch._inductor.pygraph.types.candidate import CHAIN, NODE_UPDATE
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._inductor.cudagraph_utils import FunctionID, OutputType
    from torch._inductor.pygraph.types.partition import PartitionInfo
    from torch._inductor.pygraph.types.reason import Reason
    from torch._inductor.pygraph.types.schedule import ScheduleFacts


@dataclasses.dataclass(frozen=True)
class FunctionSpec:
    """
    What is known of a function when it is first called.

    Args:
        objects: the objects of its module that ``info`` names
        mode: "forward", "backward" or "inference"
        is_distributed: another stream may read a gradient that nobody holds any more
        mutated_input_idxs: inputs that the program sees written
        number: of the function among those with its collectives, in the order of their first calls
    """

    info: PartitionInfo
    objects: Mapping[str, Any]
    mode: str
    compile_id: str
    device_index: int
    is_distributed: bool
    mutated_input_idxs: tuple[int, ...] = ()
    number: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether the outputs that the program gets are gradients."""
        return self.mode == "backward"

    @property
    def rank_name(self) -> str:
        """
        Return a name that is the same on all ranks. A rank may compile functions that others do not, but not with
        these collectives.
        """
        return f"{self.mode}/{self.info.name}/{self.info.signature}"

    @property
    def number_on_ranks(self) -> str:
        """Return a name that no other function has, and that is the same on all ranks."""
        return f"{self.rank_name}/{self.number}"

    @property
    def returned_output_idxs(self) -> OrderedSet[int]:
        return OrderedSet(self.info.returned_output_idxs)

    @property
    def reused_input_idxs(self) -> OrderedSet[int]:
        return OrderedSet(self.info.reused_input_idxs)


class Evidence(enum.IntEnum):
    """
    A graph may overwrite its inputs. PyGraph compares its results with those of uncaptured runs. Each kind of evidence takes
    more time or memory than the one before. If the results differ, PyGraph records the function again with the next kind.
    """

    # The results of one uncaptured run.
    ONE_RUN = 0
    # Further uncaptured runs in front of the graph. They show how much the function varies from run to run.
    FURTHER_RUNS = 1
    # Copies of the inputs. With them the function can run again after the graph.
    COPIES = 2


@dataclasses.dataclass(eq=False)
class FunctionState:
    """
    What the controller of a function has learned and decided.

    Attributes:
        alignment: the least alignment of external inputs seen, in bytes
        outputs_outlive: gradients were held beyond their step, or the outputs are none
        has_stepped: whether gradients outlive their step is known
        id: the name that trees gave the function's present recordings
        binding, schedule: of the next recording; the binding is COPY or one of BINDINGS
        is_capturable: cleared for good when a capture failed
        outdated: a cell, which replays read: recordings are to be dropped before the next call
        is_even: the graph measured no better than no graph, and waits for the decisions on neighbours
        prepared_sizes: how many calls prepared replays at further sizes
        needed_bytes: device memory that a call takes, or 0 if it was not rehearsed yet
        evidence: what recordings with managed inputs have to prove a graph
        staged_bytes: bytes of inputs that a bound graph copies, for collectives
        moving_idxs: inputs that were declared static and that the program replaces
        call_times_us: time on the device of each call of the function, by its number
    """

    alignment: int
    outputs_outlive: bool
    has_stepped: bool
    id: FunctionID | None = None
    binding: str = NODE_UPDATE
    is_capturable: bool = True
    outdated: CellType = dataclasses.field(default_factory=lambda: CellType(False))
    is_even: bool = False
    recordings: int = 0
    prepared_sizes: int = 0
    needed_bytes: int = 0
    evidence: Evidence = Evidence.ONE_RUN
    staged_bytes: int = 0
    moving_idxs: OrderedSet[int] = dataclasses.field(default_factory=OrderedSet)
    schedule: str = CHAIN
    call_times_us: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RecordingRequest:
    """
    What one recording is to be like.

    Args:
        state: a copy
        is_decided: the binding was forced or selected: add a prelude to any graph
        static_input_idxs: inputs that keep their address and that no graph of the path owns
        owned_output_idxs: outputs that get memory of their own in each call. The others stay in the pool
        external_bytes: bytes of the external inputs of an earlier recording, or 0
        refusal: why the function cannot be recorded at all
    """

    spec: FunctionSpec
    state: FunctionState
    is_decided: bool
    static_input_idxs: tuple[int, ...]
    owned_output_idxs: OrderedSet[int]
    external_bytes: int
    refusal: Reason | None


@dataclasses.dataclass(frozen=True)
class RecordingFacts:
    """
    What a recording found out, for FunctionState and FunctionReport. None stands for what it did not look at.

    Attributes:
        has_captured: the capture began
        external_inputs, external_bytes: how many inputs are bound, and how large they are
        copied_bytes: bytes of inputs that each replay copies
        staged_bytes: bytes of inputs that the graph copies itself, for collectives
        no_prelude: why it has none though it should; None if it does not pay either
        needs_evidence: results differ, and the graph has overwritten managed inputs. More evidence may show why
    """

    has_captured: bool = False
    alignment: int | None = None
    needed_bytes: int | None = None
    external_inputs: int | None = None
    external_bytes: int | None = None
    copied_bytes: int = 0
    staged_bytes: int = 0
    num_nodes: int | None = None
    updated_nodes: int | None = None
    has_prelude: bool = False
    no_prelude: Reason | None = None
    needs_evidence: bool = False
    schedule: ScheduleFacts | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """
    A recording that was not made. If ``is_capturable``, one with another binding may be. ``rerun`` gives the outputs of
    the call, uncaptured.
    """

    reason: Reason
    is_capturable: bool
    facts: RecordingFacts
    rerun: Callable[[], OutputType]
