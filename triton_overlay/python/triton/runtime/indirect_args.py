"""
Kernel parameters that are passed by address: the launcher gives the address of a slot, 8 bytes of
device memory that hold the pointer, and the kernel loads the pointer when it starts. A launch that
was recorded once, such as a CUDA graph's, then reaches other data when the slots are rewritten.

A parameter is indirect if it has the attribute ``tt.indirect``, and the ``tt.divisibility`` beside
it speaks of the pointer in the slot. Both are attributes of an ASTSource, so they are part of its
hash and reach the backend as attributes of the function's arguments. What ``@triton.jit`` was given
as ``indirect_args`` becomes such attributes in :func:`mark`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from .jit import KernelParam

MARK = "tt.indirect"

Attrs = dict[tuple[int, ...], list[list[Any]]]


def parse(kernel: str, params: list[KernelParam], indirect_args: Mapping[int | str, int] | None) -> dict[int, int]:
    """
    The ``indirect_args`` of ``@triton.jit`` as parameter index -> alignment of the pointer in bytes.

    Raises ValueError if a key is no parameter that could hold a pointer, or a value no alignment.
    """
    if not isinstance(indirect_args or {}, Mapping):
        raise ValueError(f"{kernel}: indirect_args must map each parameter to the alignment in bytes that its pointer "
                         f"will have, as in {{'x_ptr': 16}}")
    indices = {key: param.num for param in params for key in (param.name, param.num)}
    parsed = {}
    for key, alignment in (indirect_args or {}).items():
        if key not in indices:
            raise ValueError(f"{kernel}: indirect_args names {key!r}, which is none of its parameters "
                             f"{[param.name for param in params]}")
        param = params[indices[key]]
        if param.is_constexpr:
            raise ValueError(f"{kernel}: parameter {param.name!r} cannot be indirect, it is a constexpr")
        if param.num in parsed:
            raise ValueError(f"{kernel}: indirect_args has {param.name!r} twice, by name and by index")
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{kernel}: the alignment of {param.name!r} in indirect_args is {alignment!r}, it must be "
                             f"a power of two: the bytes that its pointer will be a multiple of")
        parsed[param.num] = alignment
    return parsed


def mark(fn, signature: Mapping[str, Any], constants: Mapping[tuple[int, ...], Any], attrs: Attrs) -> Attrs:
    """
    ``attrs`` with the parameters marked that ``fn`` declares to be indirect.

    What the binder learnt of such an argument is about the slot, so it gives way to the declaration.
    A parameter for which None is passed is compiled away, as it is without the declaration.

    Raises ValueError if a marked parameter is no pointer.
    """
    marked = dict(attrs)
    for index, alignment in fn.indirect_args.items():
        if (index, ) not in constants or constants[(index, )] is not None:
            marked[(index, )] = [["tt.divisibility", alignment], [MARK, 1]]
    for path, pairs in marked.items():
        if any(name == MARK for name, _ in pairs):
            _check_pointer(fn, signature, path)
    return marked


def asks(src) -> bool:
    """Whether a source, an AST or a file of IR, has indirect parameters."""
    return MARK in (str(src.attrs) if hasattr(src, "attrs") else src.src)


def check_tunable(fn, names: Iterable[str]) -> None:
    """Raises ValueError if one of ``names``, which the autotuner resets or restores, is indirect in ``fn``."""
    while not hasattr(fn, "indirect_args"):
        if not hasattr(fn, "fn"):
            return
        fn = fn.fn
    for name in names:
        if name in [fn.arg_names[index] for index in fn.indirect_args]:
            raise ValueError(f"{fn.__name__}: the autotuner cannot reset or restore {name!r}, which is indirect: it "
                             f"would change the slot that holds the pointer. Tune the kernel without indirect_args")


def _check_pointer(fn, signature: Mapping[str, Any], path: tuple[int, ...]) -> None:
    name = fn.arg_names[path[0]] if path[0] < len(fn.arg_names) else None
    if name not in signature:
        raise ValueError(f"{fn.__name__}: parameter {path[0]} cannot be indirect, there is none")
    ty = signature[name]
    for index in path[1:]:
        ty = ty[index]
    if not (isinstance(ty, str) and ty.startswith("*")):
        raise ValueError(f"{fn.__name__}: parameter {name!r} cannot be indirect, it is no pointer but {ty}")
