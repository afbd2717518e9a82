"""A driver that copies CPU values to device memory, which is host memory, in the order of a stream."""

from __future__ import annotations

import ctypes
import re
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import TestCase


if TYPE_CHECKING:
    from collections.abc import Callable


class ModelledCopies:
    """
    Device memory is host memory, and a launch copies at once what its parameters hold,
    unless it is captured.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.copies = 0
        self.stream = self.device = 0
        self.captured: list[tuple[Any, int, bytes]] | None = None
        # What is compiled is told so when it copies.
        self.refuses = False
        self.functions: list[Any] = []
        # What the device has not done yet, if it is behind the host.
        self.is_behind = False
        self.queue: list[Callable[[], Any]] = []
        # Addresses of pinned memory of the program's.
        self.pinned: set[int] = set()

    def enqueue(self, work: Callable[[], Any]) -> None:
        if self.is_behind:
            self.queue.append(work)
        else:
            work()

    def catch_up(self, after_copy: Callable[[], Any] = lambda: None) -> None:
        for work in self.queue:
            if not isinstance(work(), CopiesEvent):
                after_copy()
        self.queue.clear()

    def copy(self, to: int, host: int, nbytes: int, non_blocking: bool = True) -> None:
        self.copies += 1
        self.enqueue(lambda: ctypes.memmove(to, host, nbytes))
        if not non_blocking:
            self.catch_up()

    def synchronize(self) -> None:
        "Of the current stream, which this is too."
        self.catch_up()

    def to(
        self, value: torch.Tensor, device: torch.device, non_blocking: bool = False
    ) -> torch.Tensor:
        result = torch.empty_like(value)
        # Which keeps the value, as the allocator of pinned memory does.
        self.enqueue(lambda: result.copy_(value))
        if not non_blocking:
            self.catch_up()
        return result

    def cuMemcpyHtoDAsync(self, to, host, nbytes, stream):
        if stream != self.stream:
            raise AssertionError("on another stream")
        self.copy(to, host, nbytes)
        return (0,)

    def entry_point(self, name: str) -> int:
        def enqueue(to: int, host: int, nbytes: int, stream: int | None) -> int:
            if self.refuses or (stream or 0) != self.stream:
                return 1
            self.copy(to, host, nbytes)
            return 0

        def pointer_attributes(count: int, attributes, results, address: int) -> int:
            if attributes[:count] != [2]:
                raise AssertionError(f"{attributes[:count]} are not modelled")
            memory_type = int(address in self.pinned)
            ctypes.c_uint32.from_address(results[0]).value = memory_type
            return 0

        word, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        model, *types = {
            "cuMemcpyHtoDAsync": (enqueue, word, pointer, size, pointer),
            "cuPointerGetAttributes": (
                pointer_attributes,
                ctypes.c_uint,
                ctypes.POINTER(ctypes.c_int),
                ctypes.POINTER(pointer),
                word,
            ),
        }[name]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(model)
        self.functions.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value

    def cuLaunchKernel(self, sizes, *args):
        *grid_and_block, shared, stream, parameters, extra = args
        nbytes = deliver.offsets(sizes, deliver.PIECE_BYTES)[-1]
        threads = nbytes // deliver.PIECE_BYTES
        expected = [1, 1, 1, threads, 1, 1]
        if grid_and_block != expected or (shared, extra) != (0, 0):
            raise AssertionError(f"launched as {args}")
        if stream != self.stream:
            raise AssertionError("on another stream")
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        (destination,) = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))[:1]
        words = ctypes.string_at(pointers[1], nbytes)
        if self.captured is not None:
            self.captured.append((sizes, destination, words))
        else:
            self.run(sizes, destination, words)
        return (0,)

    def run(self, sizes, destination, words):
        self.launches += 1
        source = ctypes.create_string_buffer(bytes(words))
        gaps = re.findall(
            r"setp.ge.u32 %behind, %piece, (\d+);\s*@%behind add.s64 %to, %to, (\d+);",
            deliver.ptx(sizes),
        )
        for start in range(0, len(words), deliver.PIECE_BYTES):
            piece = start // deliver.PIECE_BYTES
            offset = start + sum(int(gap) for first, gap in gaps if piece >= int(first))
            address = ctypes.addressof(source) + start
            ctypes.memmove(destination + offset, address, deliver.PIECE_BYTES)

    def patches(self):
        return (
            mock.patch.object(deliver, "bindings", lambda: self),
            mock.patch.object(deliver, "entry_point", self.entry_point),
            mock.patch.object(deliver, "_kernel", lambda sizes: sizes),
            mock.patch.object(
                torch._C,
                "_cuda_getCurrentRawStream",
                lambda i: self.stream,
                create=True,
            ),
            mock.patch.object(torch.cuda, "device", lambda i: mock.MagicMock()),
            mock.patch.object(
                torch.cuda,
                "is_current_stream_capturing",
                lambda: self.captured is not None,
            ),
            mock.patch.object(
                torch._C,
                "_cuda_isCurrentStreamCapturing",
                lambda: self.captured is not None,
            ),
            mock.patch.object(
                torch._C, "_cuda_getDevice", lambda: self.device, create=True
            ),
            mock.patch.object(deliver, "pinned_copy", self.pinned_copy),
            mock.patch.object(
                deliver._Staged,
                "_copy",
                lambda staged, host, non_blocking=True: self.copy(
                    staged.copy.data_ptr(), host.data_ptr(), host.nbytes, non_blocking
                ),
            ),
            mock.patch.object(
                torch.Tensor, "is_pinned", lambda t: t.data_ptr() in self.pinned
            ),
            mock.patch.object(torch.cuda, "current_device", lambda: None),
            mock.patch.object(torch.cuda, "current_stream", lambda device: self),
            mock.patch.object(torch.cuda, "Event", lambda: CopiesEvent(self)),
        )

    def pinned_copy(self, value):
        self.launches += 1
        return value.clone()


class CopiesEvent:
    def __init__(self, driver: ModelledCopies) -> None:
        self.driver = driver
        self.is_done = False

    def record(self, stream):
        self.driver.enqueue(self.done)

    def done(self):
        self.is_done = True
        return self

    def query(self):
        return self.is_done


class CopiesTestCase(TestCase):
    "Copies CPU values with the driver of ModelledCopies."

    def setUp(self):
        super().setUp()
        self.driver = ModelledCopies()
        for patch in self.driver.patches():
            patch.start()
            self.addCleanup(patch.stop)

    def deliver(self, *values):
        d = deliver.Deliver(0, *((v.dtype, tuple(v.shape)) for v in values))
        d.device = torch.device("cpu")
        return d

    def give(self, d, *values):
        d.pack(values)
        return d.launch()

    def stage(self, non_blocking=False):
        stage = deliver.Stage(0, non_blocking)
        stage.device = torch.device("cpu")
        return stage

    def fill_later(self, pinned, content):
        "By an asynchronous copy from the GPU."
        self.driver.pinned.add(pinned.data_ptr())
        self.driver.is_behind = True
        self.driver.enqueue(lambda: pinned.fill_(content))
