"""
Loads the kernel parameters that are marked ``tt.indirect`` through memory, in LLVM IR as text.

This is what the pass ``triton-llvm-param-indirection`` (lib/Target/LLVMIR/LLVMParamIndirection.cpp)
does in a libtriton that has it, for one that was built without.

The load is invariant: LLVM and ptxas may use the non-coherent path and need not repeat it, because
whoever launches the kernel must not write a slot while the kernel may run. Only the load's own
alignment is stated. That of the pointer it gives has been used already, where accesses were formed
(as ``tt.divisibility``); plain parameters carry none in LLVM IR either.
"""

import re


_INDIRECT = re.compile(r"\btt\.indirect\b")
_DIVISIBILITY = re.compile(r"\btt\.divisibility = (\d+)")
# No quote is escaped by a backslash in MLIR or LLVM IR: it is written \22.
_FUNCTION = re.compile(r'^ *tt\.func (?P<visibility>public |private |nested )?@("[^"]*"|[\w$.-]+)\(', re.MULTILINE)
_KERNEL = re.compile(r'^define [^\n(]*\bptx_kernel void @("[^"]*"|[\w$.-]+)\(', re.MULTILINE)
_VALUE = re.compile(r'"[^"]*"|%"[^"]*"|%[-\w$.]+')
_LABEL = re.compile(r'("[^"]*"|[-\w$.]+):.*\n')
_MEMORY = re.compile(r"\bmemory\([^)]*\) ?")


def find(mod) -> list[tuple[int, int]]:
    """
    (position, alignment of the pointer in bytes) of each indirect parameter of the kernel in ``mod``, a TTGIR module.

    The position is that among the parameters of the compiled kernel: a host tensor descriptor is several of
    them, a constexpr none.
    """
    text = str(mod)
    if not _INDIRECT.search(text):
        return []
    found = []
    for function in _FUNCTION.finditer(text):
        params = _split(text[function.end():_closing(text, function.end() - 1)])
        for position, param in enumerate(params):
            bare = _strings_removed(param)
            if not _INDIRECT.search(bare):
                continue
            if (function["visibility"] or "").strip() == "private":
                raise ValueError(f"parameter {position} of a device function cannot be indirect: {bare}")
            if not re.match(r"%[\w$.-]+: !tt\.ptr<", bare):
                raise ValueError(f"parameter {position} cannot be indirect, it is no pointer: {bare}")
            divisibility = _DIVISIBILITY.search(bare)
            found.append((position, int(divisibility[1]) if divisibility else 1))
    return found


def rewrite(llir: str, positions: list[int]) -> str:
    """``llir`` with the parameters of its kernel at ``positions`` loaded from where they point to."""
    kernels = list(_KERNEL.finditer(llir))
    if len(kernels) != 1:
        raise RuntimeError(f"expected one kernel in the LLVM IR, found {len(kernels)}")
    begin = kernels[0].end()
    end = _closing(llir, begin - 1)
    params = _split(llir[begin:end])
    body = llir.index("{\n", end) + 2
    if label := _LABEL.match(llir, body):
        body = label.end()
    stop = llir.index("\n}", body)
    loads, pointers = [], {}
    for position in positions:
        value = re.fullmatch(r"ptr addrspace\(1\) (?:.* )?(%\S+)", params[position])
        if value is None or "byval" in params[position]:
            raise RuntimeError(f"parameter {position} cannot be indirect: {params[position]}")
        # Without the attributes: what was inferred of the pointer is not true of the slot.
        params[position] = f"ptr addrspace(1) {value[1]}"
        pointers[value[1]] = pointer = f"%indirect.{position}"
        loads.append(
            f"  {pointer} = load ptr addrspace(1), ptr addrspace(1) {value[1]}, align 8, !invariant.load !{{}}\n")
    code = _VALUE.sub(lambda match: pointers.get(match[0], match[0]), llir[body:stop])
    rewritten = "".join([llir[:begin], ", ".join(params), llir[end:body], *loads, code, llir[stop:]])
    # Nor is what was inferred of the memory that the kernel reaches through its arguments.
    for group in re.findall(r"#\d+", llir[end:llir.index("\n", end)]):
        rewritten = re.sub(rf"^attributes {group} = .*$", lambda match: _MEMORY.sub("", match[0]), rewritten,
                           flags=re.MULTILINE)
    return rewritten


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` is closed."""
    depth = 0
    for match in re.compile(r'"[^"]*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise RuntimeError("unbalanced parentheses in the IR")


def _split(text: str) -> list[str]:
    """A parameter list at its outer commas."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r'"[^"]*"|->|[(\[{<>}\]),]', text):
        if match[0] == "," and depth == 0:
            parts.append(text[start:match.start()].strip())
            start = match.end()
        elif match[0] in "([{<":
            depth += 1
        elif match[0] in ")]}>":
            depth -= 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _strings_removed(text: str) -> str:
    return re.sub(r'"[^"]*"', '""', text)
