# Owner(s): ["module: inductor"]
"""
CPU tensors that are staged or uploaded in each call, on a driver that is modelled and may be behind the
host: what is copied again, and which memory is used again.
"""

from __future__ import annotations

import sys
import threading
from unittest import mock

import torch
from torch._inductor.pygraph import native
from torch._inductor.pygraph.values import deliver
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.modelled_copies import CopiesTestCase
from torch.testing._internal.pygraph_common import ByPython, needs_compiled


class StageTest(CopiesTestCase):
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


instantiate_parametrized_tests(StageTest)


class StageByPythonTest(ByPython, StageTest):
    test_stage_is_compiled_while_memory_is_left = None


if __name__ == "__main__":
    run_tests()
