"""What PyGraph's tests share: what they need of the machine."""

from __future__ import annotations

import unittest

from torch._inductor.pygraph import native
from torch.testing._internal.modelled_cuda import cu


needs_structs = unittest.skipIf(cu is None, "requires cuda-bindings")
needs_compiled = unittest.skipIf(native.compiled is None, "requires _replay")
