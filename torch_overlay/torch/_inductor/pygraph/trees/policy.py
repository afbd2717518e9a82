"""The protocol by which CUDA graph trees and their nodes call PyGraph: ``WrappedFunction.pygraph``."""

from __future__ import annotations

from typing import Protocol, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager
    from torch._inductor.cudagraph_utils import FunctionID
    from torch._inductor.pygraph.types.function import FunctionSpec, RecordingFacts, RecordingRequest, Refused


class GraphPolicy(Protocol):
    @property
    def spec(self) -> FunctionSpec: ...

    @property
    def binds_inputs(self) -> bool:
        """Whether a mutated external input is written where the caller has it."""

    def added(self, function_id: FunctionID) -> None:
        """Trees gave the function a name, under which it will be recorded."""

    def may_run(self, manager: CUDAGraphTreeManager) -> bool:
        """
        Return whether trees may run the function in this call. Called before trees end a path,
        which would take the path's outputs away.
        """

    def node_type(self) -> type[CUDAGraphNode]: ...

    def request(self, declared_static: Mapping[int, torch.Tensor]) -> RecordingRequest:
        """
        Return what the recording that is being made is to be like.

        Args:
            declared_static: inputs that are declared to keep their address, without those
                that a graph of the path owns, by index
        """

    def recorded(self, facts: RecordingFacts) -> None: ...

    def refused(self, manager: CUDAGraphTreeManager, refused: Refused) -> None:
        """Called once the node is gone, before the call runs uncaptured."""

    def interrupted(self, manager: CUDAGraphTreeManager) -> None:
        """An exception that is not the recording's own ended it, such as an interrupt."""

    def copied(self, nbytes: int) -> None:
        """A replay copied so many bytes of inputs."""
