"""
Why something was or was not captured, bound or chosen: a code with details. The report, the advice and the store key on
the name of the code; ``Code`` is the only place that has text for people.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


_MUTATED = "Return the new value instead of writing into the input."

_HIDDEN_ADDRESS = (
    "A kernel keeps the input's address where it cannot be set, so that the input is copied. If its address never "
    "changes, mark it with torch._dynamo.mark_static_address."
)

_NOT_CAPTURABLE = (
    "An operator waits for the device or allocates outside of PyTorch. If it is a custom operator, tag it "
    "torch.Tag.cudagraph_unsafe: the rest is captured then."
)

_OUT_OF_MEMORY = (
    "Capturing needs the memory that the uncaptured function takes, on top of what the program has then. Free some, "
    "or make the batch smaller."
)

_CPU_TENSOR = "Create or pass the tensor on the GPU, or leave it out of the compiled function."

_MIXED_OP = (
    "The operator takes or gives tensors on the CPU and on the GPU. Give it those on the GPU, or call it where "
    "nothing on the GPU waits for it."
)

_NESTED = "Outside of torch.compiler.nested_compile_region, the rest of the graph is captured."


class Code(str, enum.Enum):
    """
    The name is what logs show and what the store keeps. The value is a clause about "it", the function or the
    operator, that the details of a reason fill by name; ``advice`` is what the user can change, or nothing.
    """

    advice: str

    def __new__(cls, text: str, advice: str = "") -> Code:
        code = str.__new__(cls, text)
        code._value_ = text
        code.advice = advice
        return code

    # The choice between candidates
    FORCED = "config.pygraph_force is set"
    COLLECTIVES_NOT_TIMED = "it has collectives, which ranks would not time alike"
    DEVICE_BOUND = "launching takes {host_us:.0f} us of the device's {device_us:.0f} us"
    FASTER = "measured faster: {graph_us:.1f} us from call to call, {uncaptured_us:.1f} us without the graph"
    SLOWER = "measured slower: {graph_us:.1f} us from call to call, {uncaptured_us:.1f} us without the graph"
    FASTER_BY_ITSELF = "measured faster, by itself"
    SLOWER_BY_ITSELF = "measured slower, by itself"
    SLOWER_ON_HOST = "measured faster on the device and slower on the host"
    SPARES_HOST = "measured as fast, and it takes {spared_us:.1f} us less of the host"
    WITHIN_NOISE = "not measured faster: {gain_us:.1f} us are within {noise_us:.1f} us of noise"
    NOT_FASTER = "not measured faster"
    AS_OTHER_SIZES = "as measured at smaller and at larger sizes"
    JOINS_NEIGHBOURS = "it shares the memory of neighbouring graphs"
    COPIES_MORE = "it copies {nbytes} bytes, not {timed_nbytes} as timed"
    NOT_CAPTURABLE = "it cannot be captured", _NOT_CAPTURABLE
    NOT_SCHEDULED = "its kernels run one after another: {error}"
    UNKNOWN_THREAD = (
        "CUDA graph trees do not know this thread",
        "Call it from the thread that imported torch, or compile it in the thread that calls it.",
    )
    REPLAY_FAILED = "a replay failed: {error}"
    NO_PRELUDE = "no {binding}: {error}"

    # Capture
    OUT_OF_MEMORY = "out of memory: capture takes {needed_mib} MiB, {free_mib} MiB are free", _OUT_OF_MEMORY
    NO_MEMORY_BEFORE_CAPTURE = "out of memory before it was captured", _OUT_OF_MEMORY
    CAPTURE_FAILED = "capture failed: {error}", _NOT_CAPTURABLE
    INSTANTIATE_FAILED = "the graph cannot be instantiated: {error}"
    LAUNCH_FAILED = "the graph cannot be launched: {error}"
    CPU_INPUT = "an input is on the CPU", _CPU_TENSOR
    MOVING_MUTATED_INPUT = "a mutated input is another tensor in each call", _MUTATED
    MUTATED_POOL_INPUT = "a mutated input lies in the graphs' memory pool", _MUTATED
    MUTATED_GRAPH_OUTPUT = "an output of an earlier graph is mutated", _MUTATED
    LAZY_OUTPUT = "it returns a conjugate that is not computed"
    HOST_RANDOM = "it draws random numbers on the host"
    ERROR = "recording failed: {error}"

    # Binding
    HIDDEN_ALIGNMENT = "a kernel reads a part of an input that may be less aligned"
    HOST_COPY_OF_TEMPORARY = (
        "an operator copies from or to memory of the host that it may have freed",
        "Let the operator use pinned memory that it keeps, or pass the values to its kernels.",
    )
    HOST_COPY_OF_ADDRESS = "an input's address is copied from the host", _HIDDEN_ADDRESS
    UNKNOWN_NODE = "the graph holds a {kind} node"
    PRELUDE_NOT_ADDED = "no prelude could be added: {error}"
    STATIC_INPUTS_REPLACED = "the program replaces {count} of its static inputs"
    BRANCH_WITH_COLLECTIVES = "it has collectives and branches"
    CPU_VALUE_NOT_FOUND = "a CPU value is no parameter of the graph"
    DRIVER = "{error}"

    # Collectives
    COLLECTIVE_NOT_OMITTABLE = "{op} cannot be left out of the proof"
    COLLECTIVE_OF_INPUT = "a collective reads or writes an input"
    COLLECTIVE_AFTER_GRAPH = "collectives follow an earlier graph's output"
    RANKS_DISAGREE_ON_CAPTURE = "not all ranks capture its collectives"
    RANKS_DISAGREE = "its ranks took no decision together"
    GROUP_DESTROYED = "the process group of its collectives was destroyed"
    RANKS_DISAGREE_ON_DEPLOY = "not all ranks deploy the graph of its collectives"

    # Proof
    DIFFERS = "{result} differs from the uncaptured function's", _HIDDEN_ADDRESS
    ONLY_CLOSE = "its results are only close to the uncaptured function's", _HIDDEN_ADDRESS
    LAUNCHES_DIFFER = "its results vary, and captured once more it launches otherwise: {difference}", _HIDDEN_ADDRESS
    NOT_COMPARABLE = "the outputs cannot be compared: {error}"
    KERNELS_NOT_CAPTURED = "an operator launches kernels that are not captured", _NOT_CAPTURABLE
    HOST_CODE_VARIES = "the host passes other arguments to its kernels in each call"
    NO_MEMORY_FOR_PROOF = "there is no memory to check whether its host code varies", _OUT_OF_MEMORY
    WROTE_PLACEHOLDER = "the graph wrote to an address that it should not hold", _HIDDEN_ADDRESS
    NODE_REFUSED_ON_DEVICE = "cudaGraphKernelNodeSetParam failed on the device with {status}"

    # Operators that split a graph
    BRINGS_CPU_VALUES = "brings CPU values to the GPU"
    NOT_CONSTANT = "eager mode cannot compute it ahead: {error}"
    CPU_OP = (
        "runs on the CPU",
        "It runs in each call: ahead of the graph, or between two graphs if it needs a result of the GPU. Compute it "
        "on the GPU, or outside of the compiled function.",
    )
    COPIES_TO_CPU = (
        "copies a result of the GPU to the CPU",
        "The host waits there for the GPU. Copy results to the CPU after the compiled function, and compute on the "
        "GPU what GPU code needs again.",
    )
    DEVICE_COPY = (
        "copies between devices",
        "Create the tensor where it is used, and copy results to the CPU after the compiled function.",
    )
    READS_CPU_TENSOR = "reads a CPU tensor", _MIXED_OP
    GIVES_CPU_TENSOR = "gives a CPU tensor", _MIXED_OP
    CPU_SEED = "gives or takes a seed that lies on the CPU where it is not captured"
    HOST_FLOAT = "takes a float from the host", "Use the tensor instead of its .item()."
    SUBGRAPH_ON_CPU = "runs a graph that works on the CPU", _NESTED
    SUBGRAPH_NOT_CAPTURABLE = "runs a graph with an operator that cannot be captured", _NESTED
    BRANCH_DRAWS = (
        "runs a branch that draws random numbers",
        "Draw them in front of the branch, and pass them to both paths.",
    )
    BRANCH_MAY_FAIL = (
        "runs a branch with an operator that may fail for values of the other path",
        "Keep indexing by tensors, checks and custom operators out of the paths of torch.cond.",
    )
    CONTROL_FLOW = (
        "chooses on the host what runs next",
        "Where both branches are cheap, compute both and select with torch.where.",
    )
    DATA_DEPENDENT = (
        "makes a size or a number that depends on data",
        "Use a form with a fixed size (torch.where, nonzero_static, padding), or keep the number on the GPU instead "
        "of .item().",
    )
    UNSAFE_OP = (
        "is known not to be capturable, or tagged torch.Tag.cudagraph_unsafe",
        "Remove the tag if the operator neither waits for the device nor reads results on the host.",
    )
    CUSTOM_PARTITION_OP = "is named in torch._inductor.config.custom_should_partition_ops"
    DYNAMIC_SHAPES = (
        "has a varying size, and torch._inductor.config.triton.cudagraph_skip_dynamic_graphs is set",
        "Unset it to capture one graph for each size, and pad inputs to few sizes.",
    )

    # What keeps a whole graph uncaptured
    GRAPHS_OFF = (
        "CUDA graphs were off when it was compiled",
        "Its forward was not captured, or cpp_wrapper is set: see there.",
    )
    NOT_DESCRIBED = (
        "PyGraph does not understand its code: {error}",
        "Report it, please, with TORCH_LOGS=+torch._inductor.pygraph.",
    )
    CPU_DEVICE = "a tensor is on the CPU, and config.graph_partition is off", _CPU_TENSOR
    BOOLEAN_INDEX = ("writes by a boolean index", "Write x = torch.where(mask, value, x) instead of x[mask] = value.")
    MULTIPLE_DEVICES = (
        "it works on several devices: {devices}",
        "A graph is captured on one GPU. Compile the parts for each GPU by themselves.",
    )
    MUTATED_INPUTS = "inputs are mutated", _MUTATED
    OVERLAPPING_INPUT = (
        "elements of an input share memory",
        "An input was made by expand or as_strided. Pass a contiguous copy.",
    )
    NON_TENSOR_INPUT = "an input is neither a tensor nor a number", "Pass tensors and numbers only."
    SPARSE = (
        "gives a sparse tensor",
        "Set torch._inductor.config.graph_partition, so that only the sparse operators stay out.",
    )
    UPSTREAM = "{said}"

    # Why a function has a graph for each size
    SIZE_EXPRESSION = "it computes {expression} from its sizes"
    CALL_AT_OTHER_SIZES = "what {call} does at other sizes is not known"
    SIZES_NOT_DESCRIBED = "what it does at other sizes was not found out: {error}"
    OPERANDS_AT_SIZES = "at sizes {sizes} an operand of {call} is one of {count} tensors"
    DIFFERS_AT_SIZES = "its graph at sizes {sizes} is not what was expected: {what}"
    CUDNN_PLANS = (
        "cuDNN builds a plan for its attention at each new size, which takes 60 ms and more",
        "Set TORCH_CUDNN_SDPA_DEPRIORITIZED=1: PyTorch then chooses flash or memory-efficient attention.",
    )
    NODES_NOT_IN_ROW = "the nodes of its graph do not follow one another"

    # Graph breaks that Dynamo does not make with PyGraph
    CALL_BEHIND_GRAPH = "the call is made behind the graph"
    CHECK_BEHIND_GRAPH = "the check is made behind the graph"
    SIZES_DECIDE = "sizes decide the branch, which Dynamo guards"
    HOST_DECIDES = "the host decides the branch before the graph runs"
    HOST_LOOKS_UP = "the host finds that the index is within bounds, and the graph takes a copy of the row"
    FILLED_IN_GRAPH = "the graph fills the slice by a mask, which it computes from the bounds"
    LEAF_IN_GRAPH = "no result depends on whether the tensor requires a gradient"
    BOTH_PATHS_RUN = "both paths of the branch run in the graph, and torch.where selects"
    COND_IN_GRAPH = "torch.cond runs the path that the branch takes"
    BOOL_IN_GRAPH = "the bool of the tensor stays in the graph"
    BODY_COMPILED = "the body of the loop is compiled once, and the loop runs in Python"
    LAYER_COMPILED = "each layer that a random number drops has a graph of its own, and the loop runs in Python: {why}"
    LOOP_IN_GRAPH = "torch.while_loop runs the loop"
    COPIED_BY_DYNAMO = "Dynamo copies the object, whose attributes it guards"

    # Those that stay
    IN_HANDLER = (
        "a handler of exceptions or a with statement is around it",
        "Move it out of the try or with statement.",
    )
    ERROR_IN_HANDLER = (
        "a handler of exceptions or a with statement is around it, and {why} may raise an error in the graph",
        "Move it, or that operator, out of the try or with statement.",
    )
    BEHIND_A_CHANGE = (
        "the program changed an object before it",
        "Move it in front of the statement that changes an attribute, a list or a dictionary.",
    )
    NOT_PLAIN = (
        "it takes what may have another text or value behind the graph",
        "Pass numbers, strings and tensors without a history, or lists and tuples of them: tensor.detach() has none.",
    )
    BEFORE_A_WRITE = ("the graph writes an input behind it", _MUTATED)
    BEFORE_AN_ERROR = (
        "{op} follows it in the graph, and may raise an error or draw random numbers",
        "Move it behind that operator, or in front of the compiled function.",
    )
    BRANCH_STAYS = (
        "the paths of the branch cannot be joined: {why}",
        "Let both paths leave tensors of the same kind under the same names, and change objects behind the branch; or "
        "select with torch.where.",
    )
    JOIN_IS_SEEN = (
        "the branch leaves a tensor as it was, and the program tells it from a copy: {why}",
        "Return, write and compare results of operators instead of that tensor.",
    )
    LEAF_IS_SEEN = (
        "the program makes a leaf of a tensor: {why}",
        "Set requires_grad in front of the compiled function.",
    )
    BOOL_IS_READ = (
        "the program needs the bool of a tensor as a value: {why}",
        "Only branch on it or negate it, or keep the tensor.",
    )
    LOOP_STAYS = (
        "the loop asks a tensor, and its body cannot be compiled by itself: {why}",
        "Give each variable of the loop a value in front of it, and keep try statements inside of other functions.",
    )
    NO_TENSOR = (
        "a function of torch returns a value that is no tensor",
        "Read and change settings in front of the compiled function, as with torch.backends.cudnn.flags.",
    )
    DYNAMO = (
        "Dynamo breaks the graph: {said}",
        "TORCH_LOGS=graph_breaks says more. If the first call alone does this, call the function once before it is "
        "compiled.",
    )

    # Frames that run without a graph
    EAGER = "compiled code may differ from eager code: {obstacle}"


@dataclasses.dataclass(frozen=True)
class Reason:
    """``details`` is what the text of the code is filled with, by name."""

    code: Code
    details: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, code: Code, **details: Any) -> Reason:
        return cls(code, details)

    @property
    def text(self) -> str:
        return self.code.value.format(**self.details)

    @property
    def advice(self) -> str:
        return self.code.advice

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code.name, "details": self.details}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Reason:
        """Raises ValueError, LookupError or TypeError if it was written by another version."""
        reason = cls(Code[content["code"]], {**content["details"]})
        # A detail that is missing would fail where the text is needed.
        reason.text
        return reason


def log_line(place: str, function: str, outcome: str, *reasons: Reason) -> str:
    """Return a line for the log: source line, function, outcome, codes, texts and what to do."""
    where = place.partition(" in ")[0]
    said = "; ".join(f"({reason.code.name}) {reason.text}" for reason in reasons)
    advice = next((f". {reason.advice}" for reason in reasons if reason.advice), "")
    return f"{' '.join(filter(None, (where, function)))}: {outcome} {said}{advice}"


def first_line(error: object) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


class RefusedError(RuntimeError):
    """A graph cannot do what the function does. ``is_capturable``: one with another binding may still."""

    def __init__(self, reason: Reason, *, is_capturable: bool = True) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.is_capturable = is_capturable
