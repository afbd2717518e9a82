# Owner(s): ["module: inductor"]
"""
CPU values that one kernel delivers in each call: when they are read, where they lie, and which words
a captured graph holds. The driver is modelled, and may be behind the host.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from pathlib import Path
from unittest import mock

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.graph import binding
from torch._inductor.pygraph.graph.placeholder import MAX_ALIGNMENT, PlaceholderMap
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests
from torch.testing._internal.modelled_copies import CopiesTestCase
from torch.testing._internal.pygraph_common import ByPython, needs_compiled
from torch.testing._internal.pygraph_values import cpu


REAL_KERNEL = deliver._kernel
REAL_PINNED_COPY = deliver.pinned_copy


class DeliverTest(CopiesTestCase):
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


class DeliverByPythonTest(ByPython, DeliverTest):
    test_calls_that_only_copy_are_compiled = None


if __name__ == "__main__":
    run_tests()
