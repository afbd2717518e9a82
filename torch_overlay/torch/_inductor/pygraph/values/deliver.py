"""
How values on the CPU come to the GPU in generated code, which owns an object for each (compile/placement.py decides
which):

Deliver  small tensors, whose bytes are parameters of one kernel: in a graph, words to the binding as addresses are
Stage    larger tensors that may stay what they were
Upload   the rest

All read the tensor before they return, and see every change, one made through a NumPy view of its memory too. Pinned
tensors are read in the order of the stream, as in eager mode: an earlier copy from the GPU may not have been made yet.

Deliver and Stage own their results and write the same memory in every call, so each thread and stream has its own.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import itertools
import logging
import math
import threading
from collections import deque
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph.binding import WORD_BYTES
from torch._inductor.pygraph.graph.driver import bindings, check, entry_point
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT, Placeholder, round_up


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


log = logging.getLogger(__name__)

# Values are copied in pieces of this size.
PIECE_BYTES = 16

# Of all the values of one launch, in pieces. A kernel's parameters take 4096 bytes.
MAX_DELIVERED_BYTES = 4096 - PIECE_BYTES

# A thread for each piece.
_PTX = """
.version 7.0
.target sm_52
.address_size 64

.visible .entry pygraph_deliver(
    .param .u64 destination,
    .param .align 16 .b8 words[{nbytes}]
)
{{
    .reg .pred %behind;
    .reg .b32 %piece;
    .reg .b64 %offset, %from, %to, %low, %high;
    mov.u32 %piece, %tid.x;
    mul.wide.u32 %offset, %piece, {piece_bytes};
    mov.b64 %from, words;
    add.s64 %from, %from, %offset;
    ld.param.v2.u64 {{%low, %high}}, [%from];
    ld.param.u64 %to, [destination];
    cvta.to.global.u64 %to, %to;
    add.s64 %to, %to, %offset;
{gaps}
    st.global.v2.u64 [%to], {{%low, %high}};
    ret;
}}
"""


def offsets(sizes: Iterable[int], alignment: int) -> list[int]:
    """Return where values of these sizes (bytes) start, and last, where the buffer ends."""
    aligned = (round_up(nbytes, alignment) for nbytes in sizes)
    return list(itertools.accumulate(aligned, initial=0))


def ptx(sizes: Sequence[int]) -> str:
    """
    Return the kernel that takes values of these sizes (bytes) by value, one after the other in whole pieces. It stores
    them MAX_ALIGNMENT apart: one less aligned input would lower the alignment that a graph accepts of all.
    """
    *starts, _ = offsets(sizes, MAX_ALIGNMENT)
    *pieces, nbytes = offsets(sizes, PIECE_BYTES)
    gaps = []
    apart = 0
    for start, piece in zip(starts, pieces):
        if start - piece > apart:
            gaps += (
                f"    setp.ge.u32 %behind, %piece, {piece // PIECE_BYTES};",
                f"    @%behind add.s64 %to, %to, {start - piece - apart};",
            )
            apart = start - piece
    return _PTX.format(nbytes=nbytes, piece_bytes=PIECE_BYTES, gaps="\n".join(gaps))


@functools.cache
def _kernel(sizes: tuple[int, ...]) -> Any:
    """Return a CUfunction that every device accepts, or None if there is no way to it."""
    image = ptx(sizes).encode() + b"\0"
    try:
        cu = bindings()
        library = check(cu.cuLibraryLoadData(image, [], [], 0, [], [], 0))
        kernel = check(cu.cuLibraryGetKernel(library, b"pygraph_deliver"))
    except (ImportError, RuntimeError) as e:
        log.info("CPU values are copied by way of pinned memory: %s", e)
        return None
    return cu.CUfunction(int(kernel))


class CapturedValues:
    """
    The values that a graph under capture takes by value.

    While it is active in a thread, kernels are captured with tokens in place of values: words that nothing else holds,
    found in the captured nodes as placeholders are. A binding then sets them to ``words()`` in each call. Values of
    another function, which an operator calls, are constants of the graph.

    Args:
        own: those of the function that is captured
        is_bound: False if the graph is replayed as it is, and reads memory of this thread that ``write`` writes before
    """

    def __init__(self, own: list[Deliver], *, is_bound: bool) -> None:
        self.own = own
        self.is_bound = is_bound
        self.delivers: list[Deliver] = []
        self.num_words = 0

    def __enter__(self) -> CapturedValues:
        _local.capture = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        _local.capture = None

    def tokens(self, deliver: Deliver) -> range:
        first = TOKEN + self.num_words
        self.delivers.append(deliver)
        self.num_words += deliver.num_words
        return range(first, first + deliver.num_words)

    def tokens_of(self, deliver: Deliver) -> range:
        """Return the tokens of one of ``delivers``."""
        earlier = itertools.takewhile(lambda other: other is not deliver, self.delivers)
        first = TOKEN + sum(other.num_words for other in earlier)
        return range(first, first + deliver.num_words)

    def all_tokens(self) -> range:
        return range(TOKEN, TOKEN + self.num_words)

    def placeholders(self) -> list[Placeholder]:
        return [Placeholder(t, t + 1, t) for t in self.all_tokens()]

    def words(self) -> list[int]:
        """What this thread packed last."""
        return [w for deliver in self.delivers for w in deliver.packed().words]

    def words_for_replay(self) -> Callable[[], list[int]] | None:
        """Return ``words``, compiled, for the values known by now; None if there are none."""
        if self.num_words == 0:
            return None
        packs = [deliver.compiled for deliver in self.delivers]
        if None in packs:
            return self.words
        return native.compiled.Words(self.words, packs)

    def write(self) -> None:
        """Called before each replay of a graph that is not bound, in the thread that captured it."""
        for deliver in self.delivers:
            with torch.cuda.device(deliver.device_index):
                stream = torch._C._cuda_getCurrentRawStream(deliver.device_index)
                deliver.packed().target.write(stream)  # type: ignore[union-attr]


_local = threading.local()

# Unlike an address, and unlike a value that a parameter is likely to have.
TOKEN = 0x5AC3_96F0_0000_0000


def _function(name: str) -> int | None:
    """Return the address of a driver function, or None if there is no way to it."""
    with contextlib.suppress(ImportError, RuntimeError):
        return entry_point(name)
    return None


class _Packed:
    """
    The bytes of the values, each at its place among the kernel's parameters. ``target``, which the first call makes, is
    what this thread's graphs read that are not bound.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        *starts, nbytes = offsets(sizes, PIECE_BYTES)
        self.memory = ctypes.create_string_buffer(nbytes)
        self.address = ctypes.addressof(self.memory)
        self.places = [(self.address + start, n) for start, n in zip(starts, sizes)]
        self.words = memoryview(self.memory).cast("B").cast("Q")
        self.target: _Target | None = None
        # For what is compiled, as in _Staged.
        self.pointer_attributes = _function("cuPointerGetAttributes")


class _Target:
    """Memory on the device, and what writes it there from ``packed``."""

    def __init__(self, deliver: Deliver, packed: _Packed) -> None:
        sizes = deliver.sizes
        # Else later calls could only write to it in inference mode too.
        with torch.inference_mode(False):
            self.buffer = torch.empty(deliver.nbytes, dtype=torch.uint8, device=deliver.device)
        self.places = [self.buffer.narrow(0, i, n) for i, n in zip(deliver.starts, sizes)]
        self.outputs = [place.view(dtype).view(shape) for place, (dtype, shape) in zip(self.places, deliver.values)]
        self.packed = packed
        self.kernel = _kernel(tuple(sizes))
        self.threads = offsets(sizes, PIECE_BYTES)[-1] // PIECE_BYTES
        self.destination = ctypes.c_uint64(self.buffer.data_ptr())
        self.parameters = (ctypes.c_void_p * 2)(ctypes.addressof(self.destination), packed.address)
        self.parameters_address = ctypes.addressof(self.parameters)

    def write(self, stream: int) -> list[torch.Tensor]:
        if self.kernel is not None:
            # Grid and block, shared memory, stream, parameters, extra.
            sizes = 1, 1, 1, self.threads, 1, 1, 0
            check(bindings().cuLaunchKernel(self.kernel, *sizes, stream, self.parameters_address, 0))
            return self.outputs
        packed = torch.frombuffer(self.packed.memory, dtype=torch.uint8)
        host = pinned_copy(packed)
        for place, (address, size) in zip(self.places, self.packed.places):
            start = address - self.packed.address
            place.copy_(host[start : start + size], non_blocking=True)
        return self.outputs


class Deliver:
    """
    Gives contiguous CPU tensors, of these ``values`` (dtype, shape), a copy on the GPU: ``pack`` reads them, and
    ``launch``, which may be captured, gives the copies. All take at most MAX_DELIVERED_BYTES.
    """

    def __init__(self, device_index: int, *values: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self.device_index = device_index
        self.device = torch.device("cuda", device_index)
        self.values = values
        self.sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in values]
        self.num_words = offsets(self.sizes, PIECE_BYTES)[-1] // WORD_BYTES
        # Of the copies, in bytes behind the first one.
        *self.starts, self.nbytes = offsets(self.sizes, MAX_ALIGNMENT)
        # For each thread.
        self.packs: dict[int, _Packed] = {}
        # For each thread and stream.
        self.targets: dict[tuple[int, int], _Target] = {}
        # What is compiled calls _pack in threads that have more to do than to copy.
        self.pack: Callable[[list[torch.Tensor]], None] = self._pack
        self.compiled: Any = None
        if native.compiled is not None:
            places = list(zip(offsets(self.sizes, PIECE_BYTES), self.sizes))
            self.compiled = native.compiled.Pack(self._pack, places, self.num_words)
            self.pack = self.compiled

    def packed(self) -> _Packed:
        thread = threading.get_ident()
        if thread not in self.packs:
            self.packs[thread] = _Packed(self.sizes)
        return self.packs[thread]

    def _pack(self, values: list[torch.Tensor]) -> None:
        packed = self.packed()
        if any(v.is_pinned() for v in values) and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device_index).synchronize()
        for (address, size), value in zip(packed.places, values):
            ctypes.memmove(address, value.data_ptr(), size)
        if packed.target is None:
            if not torch.cuda.is_current_stream_capturing():
                packed.target = _Target(self, packed)
        elif self.compiled is not None and packed.pointer_attributes is not None:
            # From now on there is nothing but to copy.
            self.compiled.add(threading.get_ident(), packed.address, packed.memory, packed.pointer_attributes)

    def launch(self) -> list[torch.Tensor]:
        """Called on the device, after ``pack``. Raises RuntimeError if a capture can take no values."""
        packed = self.packed()
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        capture: CapturedValues | None = getattr(_local, "capture", None)
        if capture is not None and self not in capture.own:
            capture = None
        if capture is None or capture.is_bound:
            if not torch.cuda.is_current_stream_capturing():
                key = (threading.get_ident(), stream)
                if key not in self.targets:
                    self.targets[key] = _Target(self, packed)
                return self.targets[key].write(stream)
            # The memory is the graph's: one of ours, or one to which values are constant.
            if capture is not None:
                packed = _Packed(self.sizes)
                packed.words[:] = memoryview(array.array("Q", capture.tokens(self)))
            target = _Target(self, packed)
            if target.kernel is None:
                raise RuntimeError("without cuda-bindings CPU values are not captured")
            return target.write(stream)
        capture.delivers.append(self)
        # In the graph's pool, where trees look for what one graph leaves to another.
        return [t.clone() for t in packed.target.outputs]  # type: ignore[union-attr]


def pinned_copy(value: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous tensor. Freed memory is used again when the copies from it are done."""
    pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    # copy_ would share a large copy between OpenMP's threads, which may be more than the process has CPUs.
    ctypes.memmove(pinned.data_ptr(), value.data_ptr(), value.nbytes)
    return pinned


class Upload:
    """Copies a contiguous CPU tensor to the GPU in every call, by way of pinned memory."""

    def __init__(self, device_index: int, non_blocking: bool = False) -> None:
        self.device = torch.device("cuda", device_index)
        self.non_blocking = non_blocking

    def upload(self, value: torch.Tensor) -> torch.Tensor:
        # A capture is by the program itself: what it captures is up to it, as in eager mode.
        if torch.cuda.is_current_stream_capturing() or value.is_pinned():
            return value.to(self.device, non_blocking=self.non_blocking)
        return pinned_copy(value).to(self.device, non_blocking=True)


# Unlike ==, it tells -0 from 0.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# Of pinned memory that one event tells to be read: more where tensors are small.
MAX_BATCH_BYTES = 1 << 18
MAX_BATCH = 16


class _Staged:
    """
    A copy on the GPU, and the bytes in it, for one thread and stream. Pinned memory is used again in batches, each with
    an event behind its last copy: an event for each copy would take as long as the copy.
    """

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self.device = device
        # Else later calls could only write to it in inference mode too.
        with torch.inference_mode(False):
            self.copy = torch.empty(like.shape, dtype=like.dtype, device=device)
        self.nbytes = like.nbytes
        self.batch_size = max(1, min(MAX_BATCH, MAX_BATCH_BYTES // self.nbytes))
        self.batch: list[torch.Tensor] = []
        self.used = 0
        # Whether the copy is of pinned memory of the program's, and not of the last host.
        self.is_of_pinned = False
        # The oldest first.
        self.batches: deque[tuple[list[torch.Tensor], torch.cuda.Event]] = deque()
        # For what is compiled.
        self.functions = _function("cuMemcpyHtoDAsync"), _function("cuPointerGetAttributes")

    def holds(self, value: torch.Tensor) -> bool:
        if self.used == 0 or self.is_of_pinned:
            return False
        return _memcmp(self.batch[self.used - 1].data_ptr(), value.data_ptr(), self.nbytes) == 0

    def put(self, value: torch.Tensor) -> None:
        if self.used == self.batch_size:
            self._next_batch()
        if self.used < len(self.batch):
            host = self.batch[self.used]
            ctypes.memmove(host.data_ptr(), value.data_ptr(), self.nbytes)
        else:
            host = pinned_copy(value)
            self.batch.append(host)
        self._copy(host)
        self.used += 1
        self.is_of_pinned = False

    def _copy(self, host: torch.Tensor, non_blocking: bool = True) -> None:
        self.copy.copy_(host, non_blocking=non_blocking)

    def _next_batch(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.batches.append((self.batch, event))
        batch, event = self.batches[0]
        if event.query():
            self.batches.popleft()
            self.batch = batch
        else:
            self.batch = []
        self.used = 0


class Stage(Upload):
    """Copies a contiguous CPU tensor to the GPU, unless it is not pinned and has the bytes of the last call."""

    def __init__(self, device_index: int, non_blocking: bool = False) -> None:
        super().__init__(device_index, non_blocking)
        self.device_index = device_index
        # For each thread and stream.
        self.kept: dict[tuple[int, int], _Staged] = {}
        # What is compiled calls _stage where it takes more than to compare and to copy.
        self.stage: Callable[[torch.Tensor], torch.Tensor] = self._stage
        self.compiled: Any = None
        if native.compiled is not None:
            self.compiled = native.compiled.Stage(
                self._stage,
                device_index,
                torch._C._cuda_isCurrentStreamCapturing,
                torch._C._cuda_getCurrentRawStream,
                torch._C._cuda_getDevice,
            )
            self.stage = self.compiled

    def _stage(self, value: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            # As in Upload.
            return value.to(self.device, non_blocking=self.non_blocking)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        key = (threading.get_ident(), stream)
        if key not in self.kept:
            self.kept[key] = _Staged(value, self.device)
        kept = self.kept[key]
        if self.compiled is not None and (used := self.compiled.take(*key)) is not None:
            kept.used = used
        if value.is_pinned():
            kept.is_of_pinned = True
            kept._copy(value, self.non_blocking)
            return kept.copy
        if not kept.holds(value):
            kept.put(value)
        if self.compiled is not None and None not in kept.functions:
            self.compiled.add(*key, kept.copy, kept.batch, kept.used, *kept.functions)
        return kept.copy
