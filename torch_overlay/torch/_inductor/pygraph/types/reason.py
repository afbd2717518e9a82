"""
Why a function was or was not captured, bound or chosen.

A reason is a code with details. The report, the advice and the store key on the code;
``_MEANINGS`` is the only place that has text for people.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple


class Code(str, enum.Enum):
    """What a reason is. The value is what logs show and what the store keeps."""

    # The choice between candidates
    FORCED = "FORCED"
    COLLECTIVES_NOT_TIMED = "COLLECTIVES_NOT_TIMED"
    DEVICE_BOUND = "DEVICE_BOUND"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    FASTER_BY_ITSELF = "FASTER_BY_ITSELF"
    SLOWER_BY_ITSELF = "SLOWER_BY_ITSELF"
    SLOWER_ON_HOST = "SLOWER_ON_HOST"
    WITHIN_NOISE = "WITHIN_NOISE"
    NOT_FASTER = "NOT_FASTER"
    JOINS_NEIGHBOURS = "JOINS_NEIGHBOURS"
    COPIES_MORE = "COPIES_MORE"
    NOT_CAPTURABLE = "NOT_CAPTURABLE"
    UNKNOWN_THREAD = "UNKNOWN_THREAD"
    REPLAY_FAILED = "REPLAY_FAILED"
    NO_PRELUDE = "NO_PRELUDE"

    # Capture
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NO_MEMORY_BEFORE_CAPTURE = "NO_MEMORY_BEFORE_CAPTURE"
    CAPTURE_FAILED = "CAPTURE_FAILED"
    INSTANTIATE_FAILED = "INSTANTIATE_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    CPU_INPUT = "CPU_INPUT"
    MOVING_MUTATED_INPUT = "MOVING_MUTATED_INPUT"
    MUTATED_POOL_INPUT = "MUTATED_POOL_INPUT"
    MUTATED_GRAPH_OUTPUT = "MUTATED_GRAPH_OUTPUT"
    LAZY_OUTPUT = "LAZY_OUTPUT"
    HOST_RANDOM = "HOST_RANDOM"
    ERROR = "ERROR"

    # Binding
    HIDDEN_ALIGNMENT = "HIDDEN_ALIGNMENT"
    HOST_COPY_GONE = "HOST_COPY_GONE"
    HOST_COPY_OF_ADDRESS = "HOST_COPY_OF_ADDRESS"
    UNKNOWN_NODE = "UNKNOWN_NODE"
    PRELUDE_NOT_ADDED = "PRELUDE_NOT_ADDED"
    CPU_VALUE_NOT_FOUND = "CPU_VALUE_NOT_FOUND"
    DRIVER = "DRIVER"

    # Collectives
    COLLECTIVE_NOT_OMITTABLE = "COLLECTIVE_NOT_OMITTABLE"
    COLLECTIVE_OF_INPUT = "COLLECTIVE_OF_INPUT"
    COLLECTIVE_AFTER_GRAPH = "COLLECTIVE_AFTER_GRAPH"
    RANKS_DISAGREE_ON_CAPTURE = "RANKS_DISAGREE_ON_CAPTURE"
    RANKS_DISAGREE_ON_DEPLOY = "RANKS_DISAGREE_ON_DEPLOY"

    # Proof
    DIFFERS = "DIFFERS"
    ONLY_CLOSE = "ONLY_CLOSE"
    NOT_COMPARABLE = "NOT_COMPARABLE"
    KERNELS_NOT_CAPTURED = "KERNELS_NOT_CAPTURED"
    HOST_CODE_VARIES = "HOST_CODE_VARIES"
    NO_MEMORY_FOR_PROOF = "NO_MEMORY_FOR_PROOF"
    WROTE_PLACEHOLDER = "WROTE_PLACEHOLDER"
    NODE_REFUSED_ON_DEVICE = "NODE_REFUSED_ON_DEVICE"


class Meaning(NamedTuple):
    """
    Args:
        text: a clause about "it", the function; details are filled in by name
        advice: what the user can change, or nothing
    """

    text: str
    advice: str = ""


_MUTATED = "Return the new value instead of writing into the input."

_HIDDEN_ADDRESS = (
    "A kernel keeps the input's address where it cannot be set, so that the input is "
    "copied. If its address never changes, mark it with "
    "torch._dynamo.mark_static_address."
)

_NOT_CAPTURABLE = (
    "An operator waits for the device or allocates outside of PyTorch. If it is a "
    "custom operator, tag it torch.Tag.cudagraph_unsafe: the rest is captured then."
)

_OUT_OF_MEMORY = (
    "Capturing needs the memory that the uncaptured function takes, on top of what the "
    "program has then. Free some, or make the batch smaller."
)

_MEANINGS = {
    Code.FORCED: Meaning("config.pygraph_force is set"),
    Code.COLLECTIVES_NOT_TIMED: Meaning(
        "it has collectives, which ranks would not time alike"
    ),
    Code.DEVICE_BOUND: Meaning(
        "launching takes {host_us:.0f} us of the device's {device_us:.0f} us"
    ),
    Code.FASTER: Meaning(
        "measured faster: {graph_us:.1f} us from call to call, "
        "{uncaptured_us:.1f} us without the graph"
    ),
    Code.SLOWER: Meaning(
        "measured slower: {graph_us:.1f} us from call to call, "
        "{uncaptured_us:.1f} us without the graph"
    ),
    Code.FASTER_BY_ITSELF: Meaning("measured faster, by itself"),
    Code.SLOWER_BY_ITSELF: Meaning("measured slower, by itself"),
    Code.SLOWER_ON_HOST: Meaning(
        "measured faster on the device and slower on the host"
    ),
    Code.WITHIN_NOISE: Meaning(
        "not measured faster: {gain_us:.1f} us are within {noise_us:.1f} us of noise"
    ),
    Code.NOT_FASTER: Meaning("not measured faster"),
    Code.JOINS_NEIGHBOURS: Meaning("it shares the memory of neighbouring graphs"),
    Code.COPIES_MORE: Meaning("it copies {nbytes} bytes, not {timed_nbytes} as timed"),
    Code.NOT_CAPTURABLE: Meaning("it cannot be captured", _NOT_CAPTURABLE),
    Code.UNKNOWN_THREAD: Meaning(
        "CUDA graph trees do not know this thread",
        "Call it from the thread that imported torch, or compile it in the thread that "
        "calls it.",
    ),
    Code.REPLAY_FAILED: Meaning("a replay failed: {error}"),
    Code.NO_PRELUDE: Meaning("no {binding}: {error}"),
    Code.OUT_OF_MEMORY: Meaning(
        "out of memory: capture takes {needed_mib} MiB, {free_mib} MiB are free",
        _OUT_OF_MEMORY,
    ),
    Code.NO_MEMORY_BEFORE_CAPTURE: Meaning(
        "out of memory before it was captured", _OUT_OF_MEMORY
    ),
    Code.CAPTURE_FAILED: Meaning("capture failed: {error}", _NOT_CAPTURABLE),
    Code.INSTANTIATE_FAILED: Meaning("the graph cannot be instantiated: {error}"),
    Code.LAUNCH_FAILED: Meaning("the graph cannot be launched: {error}"),
    Code.CPU_INPUT: Meaning(
        "an input is on the CPU",
        "Create or pass the tensor on the GPU, or leave it out of the compiled function.",
    ),
    Code.MOVING_MUTATED_INPUT: Meaning(
        "a mutated input is another tensor in each call", _MUTATED
    ),
    Code.MUTATED_POOL_INPUT: Meaning(
        "a mutated input lies in the graphs' memory pool", _MUTATED
    ),
    Code.MUTATED_GRAPH_OUTPUT: Meaning(
        "an output of an earlier graph is mutated", _MUTATED
    ),
    Code.LAZY_OUTPUT: Meaning("it returns a conjugate that is not computed"),
    Code.HOST_RANDOM: Meaning("it draws random numbers on the host"),
    Code.ERROR: Meaning("{error}"),
    Code.HIDDEN_ALIGNMENT: Meaning(
        "a kernel reads a part of an input that may be less aligned"
    ),
    Code.HOST_COPY_GONE: Meaning("the source of a copy from the host is gone"),
    Code.HOST_COPY_OF_ADDRESS: Meaning(
        "an input's address is copied from the host", _HIDDEN_ADDRESS
    ),
    Code.UNKNOWN_NODE: Meaning("the graph holds a {kind} node"),
    Code.PRELUDE_NOT_ADDED: Meaning("no prelude could be added: {error}"),
    Code.CPU_VALUE_NOT_FOUND: Meaning("a CPU value is no parameter of the graph"),
    Code.DRIVER: Meaning("{error}"),
    Code.COLLECTIVE_NOT_OMITTABLE: Meaning("{op} cannot be left out of the proof"),
    Code.COLLECTIVE_OF_INPUT: Meaning("a collective reads or writes an input"),
    Code.COLLECTIVE_AFTER_GRAPH: Meaning("collectives follow an earlier graph's output"),
    Code.RANKS_DISAGREE_ON_CAPTURE: Meaning("not all ranks capture its collectives"),
    Code.RANKS_DISAGREE_ON_DEPLOY: Meaning(
        "not all ranks deploy the graph of its collectives"
    ),
    Code.DIFFERS: Meaning(
        "{result} differs from the uncaptured function's", _HIDDEN_ADDRESS
    ),
    Code.ONLY_CLOSE: Meaning(
        "its results are only close to the uncaptured function's", _HIDDEN_ADDRESS
    ),
    Code.NOT_COMPARABLE: Meaning("the outputs cannot be compared: {error}"),
    Code.KERNELS_NOT_CAPTURED: Meaning(
        "an operator launches kernels that are not captured", _NOT_CAPTURABLE
    ),
    Code.HOST_CODE_VARIES: Meaning(
        "the host passes other arguments to its kernels in each call"
    ),
    Code.NO_MEMORY_FOR_PROOF: Meaning(
        "there is no memory to check whether its host code varies", _OUT_OF_MEMORY
    ),
    Code.WROTE_PLACEHOLDER: Meaning(
        "the graph wrote to an address that it should not hold", _HIDDEN_ADDRESS
    ),
    Code.NODE_REFUSED_ON_DEVICE: Meaning(
        "cudaGraphKernelNodeSetParam failed on the device with {status}"
    ),
}


@dataclasses.dataclass(frozen=True)
class Reason:
    """
    A code and what is to be said about this case of it.

    Args:
        details: (name, value) of what the text of the code is filled with
    """

    code: Code
    details: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, code: Code, **details: Any) -> Reason:
        return cls(code, tuple(details.items()))

    @property
    def text(self) -> str:
        return _MEANINGS[self.code].text.format(**dict(self.details))

    @property
    def advice(self) -> str:
        """What the user can change, in one or two sentences, or an empty string."""
        return _MEANINGS[self.code].advice

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code.value, "details": dict(self.details)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Reason:
        """
        Raises:
            ValueError, KeyError, TypeError: it was written by another version.
        """
        reason = cls.of(Code(content["code"]), **content["details"])
        # A detail that is missing would fail where the text is needed.
        reason.text
        return reason


def first_line(error: object) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


class RefusedError(RuntimeError):
    """
    A graph cannot do what the function does.

    Attributes:
        reason: why
        is_capturable: whether a graph may still do it with another binding
    """

    def __init__(self, reason: Reason, *, is_capturable: bool = True) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.is_capturable = is_capturable
