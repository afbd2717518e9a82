# Owner(s): ["module: inductor"]
"""
How CPU values reach the GPU in each call: delivered by a kernel, staged or uploaded, on a driver and a
stream that may be behind the host.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT, PlaceholderMap
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.pygraph_common import ByPython, needs_compiled
from torch.testing._internal.pygraph_values import cpu


if TYPE_CHECKING:
    from collections.abc import Callable


REAL_KERNEL = deliver._kernel
REAL_PINNED_COPY = deliver.pinned_copy


class ModelledDriver:
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
            if not isinstance(work(), ModelledEvent):
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
            mock.patch.object(torch.cuda, "Event", lambda: ModelledEvent(self)),
        )

    def pinned_copy(self, value):
        self.launches += 1
        return value.clone()


class ModelledEvent:
    def __init__(self, driver: ModelledDriver) -> None:
        self.driver = driver
        self.is_done = False

    def record(self, stream):
        self.driver.enqueue(self.done)

    def done(self):
        self.is_done = True
        return self

    def query(self):
        return self.is_done


class DeliverTest(TestCase):
    def setUp(self):
        super().setUp()
        self.driver = ModelledDriver()
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

    def make(self):
        dtypes = (
            torch.float64,
            torch.int64,
            torch.bool,
            torch.uint8,
            torch.float16,
            torch.bfloat16,
            torch.int32,
            torch.float32,
        )
        sizes = ((), (3,), (2, 5))
        return [cpu(*size, dtype=dtype) for dtype in dtypes for size in sizes]

    def assertGiven(self, outputs, values):
        self.assertEqual(outputs, values, atol=0, rtol=0)
        self.assertEqual([o.dtype for o in outputs], [v.dtype for v in values])

    def test_each_value_keeps_its_dtype(self):
        d = self.deliver(*self.make())
        for calls in range(1, 4):
            values = self.make()
            outputs = self.give(d, *values)
            self.assertGiven(outputs, values)
            self.assertEqual(self.driver.launches, calls)
            for o in outputs:
                offset = o.storage_offset() * o.element_size()
                self.assertEqual(offset % MAX_ALIGNMENT, 0)

    def test_read_when_packed(self):
        d = self.deliver(cpu())
        s = torch.tensor(3.0)
        d.pack([s])
        s.fill_(4)
        self.assertEqual(d.launch(), [3.0])

    def test_each_stream_and_thread_has_its_own(self):
        d = self.deliver(cpu())
        first = self.give(d, torch.tensor(1.0))
        self.driver.stream = 7
        second = self.give(d, torch.tensor(2.0))
        results = []
        thread = threading.Thread(
            target=lambda: results.append(self.give(d, torch.tensor(3.0)))
        )
        thread.start()
        thread.join()
        self.assertEqual([first, second, *results], [[1.0], [2.0], [3.0]])
        self.assertIs(self.give(d, torch.tensor(4.0)), second)

    def test_a_programs_own_capture(self):
        "The values are those of the call, as all that it captures, in the graph's memory."
        d = self.deliver(cpu())
        before = self.give(d, torch.tensor(4.0))
        self.driver.captured = []
        d.pack([torch.tensor(5.0)])
        (output,) = d.launch()
        self.assertEqual(before, [4.0])
        ((sizes, destination, words),) = self.driver.captured
        self.driver.run(sizes, destination, words)
        self.assertEqual(output, 5.0)

    def test_captured_values_are_words_of_the_binding(self):
        first, second = self.make(), [cpu(), cpu(dtype=torch.int64)]
        delivers = [self.deliver(*first), self.deliver(*second)]
        for d, values in zip(delivers, (first, second)):
            d.pack(values)
        captured = deliver.CapturedValues(delivers, is_bound=True)
        self.driver.captured = graph = []
        with captured:
            outputs = [d.launch() for d in delivers]
        self.driver.captured = None
        # The memory is the graph's.
        self.assertEqual([len(d.targets) for d in delivers], [0, 0])
        for d, given in zip(delivers, outputs):
            self.assertIsNot(d.packed().target.outputs, given)

        # The executable graph, as NodeUpdateBinding finds and sets it.
        placeholders = PlaceholderMap(captured.placeholders())
        params = [ctypes.create_string_buffer(w, len(w)) for _, _, w in graph]
        updates = [
            binding.NodeUpdate(
                binding.find_words(p, placeholders), lambda: (0,), (), None
            )
            for p in params
        ]
        pointers = [p.address for p in captured.placeholders()]
        nodes_of = [[] for _ in pointers]
        for i, update in enumerate(updates):
            for word in update.words:
                nodes_of[word.input].append(i)
        self.assertTrue(all(len(n) == 1 for n in nodes_of))
        nodes = binding.Nodes(pointers, updates, nodes_of)

        words = captured.words_for_replay()
        for _ in range(3):
            self.assertEqual(words(), captured.words())
            nodes(captured.words())
            for (sizes, destination, _), p in zip(graph, params):
                self.driver.run(sizes, destination, p.raw)
            self.assertGiven(outputs[0], first)
            self.assertGiven(outputs[1], second)
            self.assertEqual(captured.words(), nodes.pointers)
            first, second = self.make(), [cpu(), cpu(dtype=torch.int64)]
            for d, values in zip(delivers, (first, second)):
                d.pack(values)

    def test_a_graph_that_is_replayed_as_it_is(self):
        "It reads memory that is written ahead of each replay, and by nothing else."
        d = self.deliver(cpu())
        for n in range(3):
            d.pack([torch.tensor(float(n))])
        captured = deliver.CapturedValues([d], is_bound=False)
        self.driver.captured = []
        self.driver.stream = 7
        # What the graph reads is what it begins with a copy of.
        read = mock.patch.object(torch.Tensor, "clone", lambda t: t)
        with captured, read:
            (read_by_graph,) = d.launch()
        self.assertEqual(self.driver.captured, [])
        self.driver.captured = None
        last = 2.0
        for stream in (0, 3):
            self.driver.stream = stream
            captured.write()
            self.assertEqual(read_by_graph, last)
            for value in (4.0 + stream, 5.0 + stream):
                self.assertEqual(self.give(d, torch.tensor(value)), [value])
                self.assertEqual(read_by_graph, last)
            captured.write()
            last = 5.0 + stream
            self.assertEqual(read_by_graph, last)

    def test_words_of_each_thread(self):
        values = self.make()
        first, second = self.deliver(*values), self.deliver(cpu(dtype=torch.int64))
        captured = deliver.CapturedValues([first, second], is_bound=True)
        self.assertIsNone(captured.words_for_replay())
        captured.tokens(first)
        captured.tokens(second)
        words = captured.words_for_replay()
        failures = []

        def check():
            try:
                self.assertEqual(words(), [0] * captured.num_words)
                for n in range(4):
                    first.pack(self.make())
                    self.assertEqual(words(), captured.words())
                    second.pack([torch.tensor(n)])
                    self.assertEqual(words(), captured.words())
                    self.assertEqual(words()[-2:], [n, 0])
            except AssertionError as e:
                failures.append(e)

        check()
        ours = words()
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(words(), ours)

    @needs_compiled
    def test_calls_that_only_copy_are_compiled(self):
        values = self.make()
        d = self.deliver(*values)
        captured = deliver.CapturedValues([d], is_bound=True)
        captured.tokens(d)
        words = captured.words_for_replay()
        for _ in range(2):
            d.pack(values)
        error = AssertionError("done by Python")
        by_python = mock.patch.object(deliver.Deliver, "packed", side_effect=error)
        values = self.make()
        with by_python:
            d.pack(values)
            packed = words()
            for other in [], [*values, cpu()], tuple(values), [None] * len(values):
                with self.assertRaisesRegex(AssertionError, "done by Python"):
                    d.pack(other)
        self.assertEqual(packed, captured.words())
        self.assertGiven(d.launch(), values)
        with self.assertRaises(AttributeError):
            d.pack([None] * len(values))

    def test_other_captures_end(self):
        d = self.deliver(cpu())
        with self.assertRaises(KeyError), deliver.CapturedValues([d], is_bound=True):
            raise KeyError
        self.assertEqual(self.give(d, torch.tensor(2.0)), [2.0])

    def test_without_bindings(self):
        with mock.patch.object(deliver, "_kernel", lambda sizes: None):
            values = [cpu(3), cpu(dtype=torch.int64), cpu(2, 7)]
            d = self.deliver(*values)
            self.assertGiven(self.give(d, *values), values)
            self.driver.captured = []
            with self.assertRaisesRegex(RuntimeError, "cuda-bindings"):
                with deliver.CapturedValues([d], is_bound=True):
                    d.launch()

    def test_no_way_to_a_kernel(self):
        for error in ImportError("no module"), RuntimeError("no libcuda"):
            with mock.patch.object(deliver, "bindings", side_effect=error):
                self.assertIsNone(REAL_KERNEL.__wrapped__((4,)))

    def test_offsets(self):
        self.assertEqual(deliver.offsets([4, 16, 17, 1], 16), [0, 16, 32, 64, 80])

    def stage(self, non_blocking=False):
        stage = deliver.Stage(0, non_blocking)
        stage.device = torch.device("cpu")
        return stage

    def fill_later(self, pinned, content):
        "By an asynchronous copy from the GPU."
        self.driver.pinned.add(pinned.data_ptr())
        self.driver.is_behind = True
        self.driver.enqueue(lambda: pinned.fill_(content))

    def test_delivered_from_pinned_memory(self):
        "A copy to it may be under way, in each call: also when calls are compiled."
        values = [torch.zeros(()), torch.zeros(300), torch.zeros(3)]
        d = self.deliver(*values)
        for content in range(1, 5):
            self.fill_later(values[1], content)
            d.pack(values)
            self.assertEqual(self.driver.queue, [])
            self.driver.is_behind = False
            zeros = [values[0], values[2]]
            _, given, _ = d.launch()
            self.assertEqual(given, torch.full((300,), float(content)))
            self.assertEqual(d.launch()[::2], zeros)
        # By Python in each call, and by what is compiled where there is no pinned value.
        by_python = mock.patch.object(
            deliver.Deliver, "packed", side_effect=AssertionError("done by Python")
        )
        with by_python, self.assertRaisesRegex(AssertionError, "done by Python"):
            d.pack(values)
        if native.compiled is not None:
            with by_python:
                d.pack([cpu(), cpu(300), cpu(3)])

    def test_a_programs_own_capture_of_pinned_memory(self):
        "Which would end if the host waited."
        value, other = torch.ones(()), torch.ones(1000)
        self.driver.pinned = {value.data_ptr(), other.data_ptr()}
        stop = AssertionError("it waits")
        with mock.patch.object(self.driver, "synchronize", side_effect=stop):
            self.driver.captured = []
            self.deliver(value).pack([value])
            with mock.patch.object(torch.Tensor, "to") as to:
                for non_blocking in (False, True):
                    for owner in (
                        self.stage(non_blocking).stage,
                        deliver.Upload(0, non_blocking).upload,
                    ):
                        owner(other)
                        self.assertEqual(
                            to.call_args.kwargs, {"non_blocking": non_blocking}
                        )

    @parametrize("non_blocking", (False, True))
    def test_uploaded_from_pinned_memory(self, non_blocking):
        upload = deliver.Upload(0, non_blocking)
        to = mock.patch.object(
            torch.Tensor, "to", lambda *args, **kwargs: self.driver.to(*args, **kwargs)
        )
        pinned, value = torch.zeros(1000), torch.full((1000,), 2.0)
        with to:
            for content in (5.0, 7.0):
                self.fill_later(pinned, content)
                result = upload.upload(pinned)
                self.assertEqual(len(self.driver.queue), 2 if non_blocking else 0)
                self.driver.catch_up()
                self.assertEqual(result, torch.full((1000,), content))
            # The rest does not wait, and the program may change it at once.
            self.driver.is_behind = True
            result = upload.upload(value)
            self.assertEqual(len(self.driver.queue), 1)
            value.fill_(3)
            self.driver.catch_up()
            self.assertEqual(result, torch.full((1000,), 2.0))

    @parametrize("non_blocking", (False, True))
    def test_staged_from_pinned_memory(self, non_blocking):
        stage = self.stage(non_blocking)
        pinned, value = torch.zeros(1000), torch.zeros(1000)
        seen = []

        def check(value, expected, *, queued):
            copies = self.driver.copies
            copy = stage.stage(value)
            self.assertEqual(len(self.driver.queue), queued)
            self.driver.is_behind = False
            self.driver.catch_up()
            self.assertEqual(copy, torch.full((1000,), float(expected)))
            seen.append(self.driver.copies - copies)

        in_order = 2 if non_blocking else 0
        # Its bytes are those of the last host: at first by Python, then compiled.
        for content in (2, 4, 6):
            for filled in (content, content + 1):
                pinned.zero_()
                self.fill_later(pinned, filled)
                check(pinned, filled, queued=in_order)
            # They are not those of the copy now.
            for _ in range(3):
                check(value, 0, queued=0)
        self.assertEqual(seen, [1, 1, 1, 0, 0] * 3)
        self.fill_later(pinned, 4)
        check(pinned, 4, queued=in_order)
        value.fill_(9)
        check(value, 9, queued=0)
        check(value, 9, queued=0)
        self.assertEqual(seen[15:], [1, 1, 0])

    def test_staged_from_pinned_memory_while_hosts_are_read(self):
        "What is still to be copied from a host stays there."
        stage = self.stage(non_blocking=True)
        pinned = torch.full((1000,), -1.0)
        self.driver.pinned.add(pinned.data_ptr())
        for behind in (100, 30):
            self.driver.is_behind = True
            for i in range(behind):
                stage.stage(pinned if i % 3 == 2 else torch.full((1000,), i + 0.5))
            (staged,) = stage.kept.values()
            seen = []
            self.driver.catch_up(lambda: seen.append(staged.copy[-1].item()))
            expected = [-1.0 if i % 3 == 2 else i + 0.5 for i in range(behind)]
            self.assertEqual(seen, expected)

    def test_default_device(self):
        "It is the program's: memory is where it says."
        empty = torch.empty

        def pinned(*size, pin_memory=False, **options):
            made = empty(*size, **options)
            self.assertEqual(made.device.type, "cpu")
            return made

        value = torch.ones(1000)
        with torch.device("meta"):
            self.assertTrue(torch.empty(0).is_meta)
            with mock.patch.object(torch, "empty", pinned):
                copy = REAL_PINNED_COPY(value)
            stage, d = self.stage(), self.deliver(value[:3])
            staged = [stage.stage(value) for _ in range(3)]
            given = [self.give(d, value[:3])[0] for _ in range(3)]
        self.assertEqual([copy, *staged], [value] * 4)
        self.assertEqual(given, [value[:3]] * 3)

    def test_stage_copies_what_changed(self):
        stage = self.stage()
        value = torch.zeros(1000)
        staged = stage.stage(value)
        self.assertIs(stage.stage(value), staged)
        self.assertIs(stage.stage(value.clone()), staged)
        self.assertEqual(self.driver.copies, 1)
        # No version counter sees this.
        value.numpy()[-1] = 5
        self.assertIs(stage.stage(value), staged)
        self.assertEqual(staged, value)
        self.assertEqual(self.driver.copies, 2)
        # Equal to ==, but not the same.
        value[0] = -0.0
        self.assertTrue(stage.stage(value)[0].signbit())
        value[0] = float("nan")
        stage.stage(value)
        copies = self.driver.copies
        stage.stage(value)
        self.assertEqual(self.driver.copies, copies)
        self.driver.stream = 7
        self.assertIsNot(stage.stage(value), staged)

    @parametrize("numel", (3, 5000, 100_000))
    def test_stage_leaves_what_is_still_read(self, numel):
        "However far the host is ahead; pinned memory that was read is used again."
        stage = self.stage()
        self.driver.is_behind = True
        for behind in (100, 0, 30):
            for i in range(behind):
                stage.stage(torch.full((numel,), i + 0.5))
            (staged,) = stage.kept.values()
            seen = []
            self.driver.catch_up(lambda: seen.append(staged.copy[-1].item()))
            self.assertEqual(seen, [i + 0.5 for i in range(behind)])
        allocated = self.driver.launches
        for i in range(200):
            stage.stage(torch.full((numel,), float(i)))
            self.driver.catch_up()
        self.assertEqual(staged.copy[0], 199.0)
        self.assertLessEqual(self.driver.launches, allocated + deliver.MAX_BATCH)

    @needs_compiled
    def test_stage_is_compiled_while_memory_is_left(self):
        stage = self.stage()
        by_python = []

        def staged(value):
            result = stage._stage(value)
            by_python.append(value[0].item())
            return result

        compiled = native.compiled.Stage(
            staged,
            0,
            torch._C._cuda_isCurrentStreamCapturing,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        stage.compiled = stage.stage = compiled

        def check(first, *, python):
            by_python.clear()
            value = torch.full((1000,), float(first))
            copy = stage.stage(value)
            self.assertEqual(copy, value, atol=0, rtol=0)
            self.assertEqual(by_python, [first] if python else [])
            return copy

        # Nothing is known, and each host is new.
        for i in range(deliver.MAX_BATCH):
            check(i, python=True)
            check(i, python=False)
        # The batch begins again, by Python.
        for n in range(1, 4):
            for i in range(deliver.MAX_BATCH):
                check(100 * n + i, python=i == 0)
                copies = self.driver.copies
                check(100 * n + i, python=False)
                self.assertEqual(self.driver.copies, copies)
        # From in between: another device, stream, thread, size, what is no tensor.
        check(401, python=True)
        check(402, python=False)
        self.driver.device = 1
        check(403, python=True)
        self.driver.device = 0
        check(404, python=False)
        self.driver.refuses = True
        check(405, python=True)
        self.driver.refuses = False
        check(406, python=False)
        self.driver.stream = 7
        check(406, python=True)
        self.driver.stream = 0
        check(406, python=False)
        thread = threading.Thread(target=check, args=(406,), kwargs={"python": True})
        thread.start()
        thread.join()
        self.assertEqual(by_python, [406])
        check(406, python=False)
        self.assertEqual(len(stage.kept), 3)
        self.driver.captured = []
        by_python.clear()
        stage.stage(torch.ones(1000))
        self.assertEqual(by_python, [1])
        self.driver.captured = None
        check(406, python=False)
        with self.assertRaises(AttributeError):
            stage.stage(None)
        with self.assertRaises(TypeError):
            stage.stage()
        copy = check(0, python=True)
        before = sys.getrefcount(copy)
        for i in range(30):
            stage.stage(torch.full((1000,), float(i)))
        self.assertEqual(sys.getrefcount(copy), before)

    def test_stage_without_bindings(self):
        with mock.patch.object(deliver, "entry_point", side_effect=ImportError):
            stage = self.stage()
            for i in range(20):
                value = torch.full((1000,), float(i))
                self.assertEqual(stage.stage(value), value)

    def test_inference_mode_of_the_first_call(self):
        "It is not that of later ones, which write to the same memory."
        stage = self.stage()
        for without_kernel in (False, True):
            with mock.patch.object(
                deliver, "_kernel", lambda sizes: None if without_kernel else sizes
            ):
                d = self.deliver(cpu(3))
                with torch.inference_mode():
                    self.assertFalse(stage.stage(torch.zeros(100)).is_inference())
                    self.give(d, torch.zeros(3))
                self.assertEqual(stage.stage(torch.ones(100)), torch.ones(100))
                self.assertEqual(self.give(d, torch.ones(3)), [torch.ones(3)])

    def test_stage_of_several_threads(self):
        stage = self.stage()
        seen = []

        def run(value):
            staged = stage.stage(torch.full((100,), value))
            seen.append((staged, value))
            barrier.wait()

        # Both live until the end, so that no identity is used again.
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(float(i),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(stage.kept), 2)
        for staged, value in seen:
            self.assertEqual(staged, torch.full((100,), value))

    def test_stage_in_a_programs_own_capture(self):
        "It copies as eager does, and keeps nothing of it."
        stage = self.stage()
        value = torch.zeros(100)
        kept = stage.stage(value)
        self.driver.captured = []
        self.assertIsNot(stage.stage(value), kept)
        self.assertEqual(self.driver.copies, 1)
        self.driver.captured = None
        self.assertIs(stage.stage(value), kept)

    def test_kernel_assembles(self):
        import triton

        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        if not ptxas.exists():
            self.skipTest("this Triton comes without ptxas")
        for sizes in (1,), (8, 24, 2048), (16,) * 255:
            self.assertLessEqual(
                deliver.offsets(sizes, deliver.PIECE_BYTES)[-1],
                deliver.MAX_DELIVERED_BYTES,
            )
            with tempfile.TemporaryDirectory() as directory:
                source = Path(directory, "deliver.ptx")
                source.write_text(deliver.ptx(sizes))
                subprocess.run(
                    [ptxas, "-arch=sm_90", source, "-o", Path(directory, "cubin")],
                    check=True,
                )


instantiate_parametrized_tests(DeliverTest)


class DeliverByPythonTest(ByPython, DeliverTest):
    test_calls_that_only_copy_are_compiled = None
    test_stage_is_compiled_while_memory_is_left = None


if __name__ == "__main__":
    run_tests()
