"""What PyGraph's tests share: what they need of the machine, and which code runs."""

from __future__ import annotations

import unittest
from unittest import mock

from torch._inductor.pygraph import native
from torch.testing._internal.modelled_cuda import cu


needs_structs = unittest.skipIf(cu is None, "requires cuda-bindings")
needs_compiled = unittest.skipIf(native.compiled is None, "requires _replay")


class ByPython:
    """Of a TestCase: its tests run where nothing is compiled."""

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(native, "compiled", None)
        patch.start()
        self.addCleanup(patch.stop)
