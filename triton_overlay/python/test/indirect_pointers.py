"""
pytest plugin that passes every pointer of every kernel by address, so that Triton's own tests check the results of
indirect kernels:

    PYTHONPATH=python/test pytest -p indirect_pointers python/test/unit/language/test_core.py

Kernels are specialized on the pointers themselves, as without the plugin; only what is launched differs. Tests that
look at the generated code, or that launch while a stream is captured, are not for it.
"""

import functools

from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import ASTSource
from triton.runtime.indirect_args import MARK

import torch


def pytest_configure(config):
    ASTSource.__init__ = marking(ASTSource.__init__)
    CudaLauncher.__init__, CudaLauncher.__call__ = launching(CudaLauncher.__init__, CudaLauncher.__call__)


def pointers(ty, path):
    """The paths of the pointers in the type of a parameter, which may be a tuple."""
    if isinstance(ty, tuple):
        return [found for index, element in enumerate(ty) for found in pointers(element, (*path, index))]
    return [path] if ty.startswith("*") else []


def marking(init):

    @functools.wraps(init)
    def marked_init(self, fn, signature, constexprs=None, attrs=None):
        init(self, fn, signature, constexprs, attrs)
        for index, name in enumerate(fn.arg_names):
            for path in pointers(signature[name], (index, )):
                if [MARK, 1] not in self.attrs.get(path, []):
                    self.attrs[path] = [*self.attrs.get(path, []), [MARK, 1]]

    return marked_init


def launching(init, call, device="cuda"):
    """The launcher, with the addresses of slots for the pointers among its arguments."""

    @functools.wraps(init)
    def init_with_paths(self, src, metadata):
        init(self, src, metadata)
        self.indirect = [path for path, pairs in getattr(src, "attrs", {}).items() if [MARK, 1] in pairs]

    @functools.wraps(call)
    def call_with_slots(self, *args):
        # The grid, the stream, the function, two sets of metadata and two hooks come first.
        launch, args = args[:9], list(args[9:])
        pointers = [functools.reduce(lambda value, index: value[index], path, args) for path in self.indirect]
        values = [address(pointer, device) for pointer in pointers]
        # Freed after the launch, it is used again only by what comes later on the same stream.
        table = torch.tensor(values, dtype=torch.int64).to(device)
        for index, path in enumerate(self.indirect):
            args = replaced(args, path, table.data_ptr() + 8 * index)
        call(self, *launch, *args)

    return init_with_paths, call_with_slots


def address(pointer, device):
    if not hasattr(pointer, "data_ptr"):
        return pointer
    if isinstance(pointer, torch.Tensor) and pointer.device.type != device and not pointer.is_pinned():
        # As the launcher says of what it is given.
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return pointer.data_ptr()


def replaced(values, path, new):
    """``values`` with ``new`` at ``path``; tuples stay what they are."""
    first, *rest = path
    elements = list(values)
    elements[first] = replaced(elements[first], rest, new) if rest else new
    if isinstance(values, list):
        return elements
    return type(values)(*elements) if hasattr(values, "_fields") else type(values)(elements)
