"""
One process of the benchmark ``overhead``: what importing torch or tracing a model takes.

    python -m pygraph.overhead_run import_torch
    python -m pygraph.overhead_run trace_eager 24

Each line of stdin, ``sample`` or ``count``, is answered with a line of JSON; a process imports torch once.
It imports nothing heavy before that. The number is of the model's layers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import platform
import struct
import sys
import time
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Sample = dict[str, float | None]


# Of perf_event_open(2).
SYSCALL = {"x86_64": 298, "aarch64": 241}
ATTRIBUTES = 128
EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
# Type and number of an event.
INSTRUCTIONS = (0, 1)
TASK_CLOCK = (1, 1)

BACKENDS = {"trace_eager": "eager", "trace_aot_eager": "aot_eager"}
WIDTH, HEADS, TOKENS = 32, 4, 8


class Counter:
    """Counts an event of this thread in user mode."""

    def __init__(self, event: tuple[int, int] = INSTRUCTIONS) -> None:
        """Raises OSError where the machine or its settings do not allow to count the event."""
        self.file = -1
        if platform.machine() not in SYSCALL:
            raise OSError(f"no number of perf_event_open is known for {platform.machine()}")
        kind, number = event
        attributes = bytearray(ATTRIBUTES)
        flags = EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
        struct.pack_into("IIQQQQQ", attributes, 0, kind, ATTRIBUTES, number, 0, 0, 0, flags)
        libc = ctypes.CDLL(None, use_errno=True)
        pointer = (ctypes.c_char * ATTRIBUTES).from_buffer(attributes)
        self.file = libc.syscall(SYSCALL[platform.machine()], pointer, 0, -1, -1, 0)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open")

    def read(self) -> int:
        return struct.unpack("Q", os.read(self.file, 8))[0]

    def close(self) -> None:
        os.close(self.file)


class Meter:
    """The CPU seconds of this process and, where they can be counted, its instructions."""

    def __init__(self) -> None:
        try:
            self.counter: Counter | None = Counter()
        except OSError:
            self.counter = None

    def sample(self, work: Callable[[], object]) -> Sample:
        cpu, count = time.process_time(), self.counter.read() if self.counter else 0
        work()
        counted = self.counter.read() - count if self.counter else None
        return {"cpu_s": time.process_time() - cpu, "instructions": counted}


def bytecodes(work: Callable[[], object]) -> Sample:
    """Return how many instructions of bytecode Python executes, which a busy machine does not change."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    if sys.version_info >= (3, 12):
        # Tracing by settrace misses the first call of each function in 3.13.
        monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
        monitoring.use_tool_id(tool, __name__)
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, counted)
        monitoring.set_events(tool, monitoring.events.INSTRUCTION)
        try:
            work()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
        return {"bytecodes": count}

    def in_frame(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "opcode":
            counted()
        return in_frame

    def on_call(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return in_frame

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return {"bytecodes": count}


def model(layers: int) -> Any:
    """Return transformer layers with as much Python around the operators as models have."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def split(x: torch.Tensor, heads: int) -> torch.Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, heads, width // heads).transpose(1, 2)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v")})
            self.out = nn.Linear(WIDTH, WIDTH)
            self.dropout = 0.0

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
            q, k, v = (split(self.projections[name](x), HEADS) for name in ("q", "k", "v"))
            options = {"dropout_p": self.dropout if self.training else 0.0}
            if mask is not None:
                options["attn_mask"] = mask
            y = F.scaled_dot_product_attention(q, k, v, **options)
            return self.out(y.transpose(1, 2).reshape(x.shape))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.attention = Attention()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            x = x + self.attention(self.norms[0](x), **options)
            return x + self.mlp(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
            hidden = [x]
            for layer in self.layers:
                hidden.append(layer(hidden[-1], mask=mask))
            return hidden

    return Model().eval()


class Import:
    """Importing torch, which a process does once."""

    counts = 1

    def start_over(self) -> None:
        pass

    def __call__(self) -> None:
        import torch  # noqa: F401


class Trace:
    """The first call of a compiled model. Tracing takes nearly all of its time."""

    counts = 2

    def __init__(self, backend: str, layers: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.backend = backend
        self.inputs = torch.randn(1, TOKENS, WIDTH), torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        # The first trace imports much.
        self.module = model(1)
        self()
        self.module = model(layers)

    def start_over(self) -> None:
        import torch

        torch._dynamo.reset()
        gc.collect()

    def __call__(self) -> None:
        import torch

        with torch.no_grad():
            torch.compile(self.module, backend=self.backend, fullgraph=True)(*self.inputs)


def main(name: str, layers: str = "1") -> None:
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    meter = Meter()
    work = Import() if name == "import_torch" else Trace(BACKENDS[name], int(layers))
    for line in sys.stdin:
        # A first count fills caches of what looks at frames.
        for _ in range(work.counts if line.strip() == "count" else 1):
            work.start_over()
            found = bytecodes(work) if line.strip() == "count" else meter.sample(work)
        patched = importlib.util.find_spec("torch._inductor.pygraph") is not None
        print(json.dumps({**found, "patched": patched}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
