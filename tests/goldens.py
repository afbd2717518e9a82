"""
Goldens: what PyGraph generates, reports and decides, to compare a changed tree with.

    python tests/goldens.py --check FILE [--texts DIR] [--only REGEX]
    python tests/goldens.py --write FILE [--texts DIR] [--only REGEX]
    python tests/goldens.py --allow PATCH FILE [--only REGEX]

It needs no GPU. An entry of the file is one of:

program/N       a random program, compiled for a pretended GPU
model/NAME      a case of the benchmarks in a small size, compiled alike
selection/N     a function in simulated time, until a candidate is deployed
prelude/N       the same, of a graph that may set its nodes itself
record/N        random steps of a program on the modelled device

Each part of an entry is compared by itself:

code        hashes of the generated code of each graph, by setting
structure   numbers and names: kernels, partitions, blockers, choices, calls
where       the text of the lines that a report points at
reasons     codes of a decision; Inductor's words for a partition

``--allow`` adds each difference that it finds to the file, with the patch that makes it. ``--check``
fails on other differences, and on an allowed one that is gone. The texts that ``--write`` leaves in DIR
show a difference of code as a diff. The random programs are in FILE, so that no entry depends on their
generator.

golden_adapters.py is all that knows the names of PyGraph's modules.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import hashlib
import itertools
import json
import linecache
import logging
import random
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

from golden_adapters import (
    benchmarks,
    draw_programs,
    new_graph_reports,
    Recording,
    Selecting,
    selecting_simulation,
)

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Entry = dict[str, Any]

PARTS = ("code", "structure", "where", "reasons")

# How a program is compiled: Inductor alone, with stock CUDA graphs, with PyGraph.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stock": {"triton.cudagraphs": True},
    "pygraph": {"pygraph": True},
}

SELECTIONS = 300
PRELUDES = 40
RECORDS = 60

# Cases of the benchmarks that need no package beside torch, compile in seconds and have a graph
# without values, which nothing has there.
MODELS = (
    *("pointwise_16x4MiB", "mlp_20x64", "mlp_bf16_2x4096", "sdpa_bf16", "conv2d", "mutated_input_mlp"),
    *("cpu_sum", "cpu_scalar_and_operator", "cpu_index", "cpu_scalar_output", "cpu_constructor_output", "cpu_dtypes"),
    *("cpu_element", "cpu_expression", "cpu_division", "cpu_scalar_mutated", "python_float", "cpu_item", "cpu_output"),
    *("cpu_in_the_middle", "numpy_attribute", "cpu_scalar_attribute", "cpu_tensor_attribute", "cpu_table"),
    *("cpu_tensor_input", "cpu_tensor_in_the_middle", "mutated_input", "branch_on_sum"),
    *("llama_decode", "llama_sessions", "moe_decode", "xlnet_cpu_positions", "dit_step", "gat_train", "ppo_update"),
    *("cartpole_rollout", "dlrm_dcn", "shallow_water"),
    *("eos", "tke", "deeprecommender_train", "deeprecommender_infer", "dlrm", "speech_transformer", "mm_clip"),
    *("dcgan_train", "lcnet", "bert_pretraining"),
    *("train_mlp", "train_chain", "chain_mixed", "recommender", "item_decoder", "cache_16MiB", "attention_small"),
)


# Generated code and reports


NORMALIZED = (
    # Where a kernel was written, and the build of Triton and torch that would compile it.
    (re.compile(r"^# kernel path: .*\n", re.M), ""),
    (re.compile(r"'backend_hash': '\w*'"), "'backend_hash': ''"),
    # They count what the process compiled before.
    (re.compile(r"# AOT ID: \['\d+_"), "# AOT ID: ['"),
    # Modules of PyGraph move; the names that code imports from them tell what it calls.
    (re.compile(r"\bfrom torch\._inductor\.pygraph[\w.]* import"), "from pygraph import"),
    (re.compile(r"\bimport torch\._inductor\.pygraph[\w.]*"), "import pygraph"),
    (re.compile(r"\btorch\._inductor\.pygraph\.(?:\w+\.)*(\w+)"), r"pygraph.\1"),
    # Objects, files of this machine, and the arguments of this process.
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"^(\w+ = None  # .*\)) [0-9a-f]+$", re.M), r"\1"),
    (re.compile(r"(?<![\w.])/[^\s'\"<>()]*/(?=[\w.-]+\.(?:py|h|cpp)\b)"), ""),
    (re.compile(r"compiled_module_main\('[^']*'"), "compiled_module_main(''"),
)

# What a patch changed in all code, and how the code from before it is had again.
CHANGED = {
    "[inductor] Describe the calls of generated code": (
        (re.compile(r", note_call=None\b"), ""),
        (re.compile(r"^ *if note_call is not None: .*\n", re.M), ""),
        (re.compile(r"^( *)if note_call is None or note_call\.reuses: (.*\n) *else: .*\n", re.M), r"\1\2"),
    ),
    "[inductor] Capture torch.cond as a conditional node of the CUDA graph": ((re.compile(r", branches=None\b"), ""),),
    "[inductor] Keep what code generation knows of a function": (
        (re.compile(r"^(def partition_\d+\(args), (empty_strided_\w+)=\2\):", re.M), r"\1):"),
        (re.compile(r"^runner\.objects = .*\n", re.M), ""),
    ),
}


def normalized(source: str) -> str:
    for pattern, replacement in (*NORMALIZED, *itertools.chain(*CHANGED.values())):
        source = pattern.sub(replacement, source)
    return source


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lines_at(source: str) -> str:
    """The text of "file:line in function" or "file:first-last in function"; lines move when code does."""
    match = re.fullmatch(r"(.*):(\d+)(?:-(\d+))? in (\S+)", source)
    if match is None:
        return source
    file, first, last, function = match.groups()
    texts = [linecache.getline(file, int(line)).strip() for line in (first, last) if line]
    # Functions that go on after a graph break are named after their line.
    return re.sub(r"(_at)_\d+$", r"\1", f"{' ... '.join(dict.fromkeys(texts))} in {function}")


def compiled_entry(run: Callable[[dict[str, Any]], None], keep: Callable[[str, str], None]) -> Entry:
    """
    ``run`` compiles with Inductor's options and calls; ``keep`` gets a name and a text for each
    graph.
    """
    from torch.testing._internal.fake_cuda import fake_cuda

    entry: Entry = {part: {} for part in PARTS}
    for setting, options in SETTINGS.items():
        reports = new_graph_reports()
        error = None
        with (
            warnings.catch_warnings(),
            # As many threads as the machine has would be in the code.
            torch._inductor.config.patch({"cpp.threads": 1}),
            fake_cuda() as graphs,
        ):
            warnings.simplefilter("ignore")
            try:
                run(options)
            except Exception as e:
                # Nothing has a value there, so that a program may end where it reads one.
                error = type(e).__name__
        texts = [normalized(graph.source) for graph in graphs]
        for number, text in enumerate(texts):
            keep(f"{setting}.{number}", text)
        structure: dict[str, Any] = {"graphs": [graph_structure(graph) for graph in graphs]}
        if error:
            structure["error"] = error
        where: list[str] = []
        if found := reports():
            structure["reports"] = [report_structure(report) for report in found]
            where += [lines_at(w) for report in found for w in report_where(report)]
        entry["code"][setting] = [hash_of(text) for text in texts]
        entry["structure"][setting] = structure
        entry["where"][setting] = where
        entry["reasons"][setting] = [w for graph in graphs for w in graph_reasons(graph)]
    return entry


def graph_structure(graph: Any) -> list[Any]:
    return [
        "backward" if graph.is_backward else "forward",
        bool(graph.skip_reason),
        [[p.captured, p.kernels, p.copied, p.mutated, p.cpu_inputs, len(p.reasons)] for p in graph.partitions],
        len(graph.inputs),
        # Without weights that are only read.
        [[i.name, i.origin, i.nbytes, i.static, i.mutated] for i in graph.inputs if i.mutated or not i.static],
    ]


def graph_reasons(graph: Any) -> list[str]:
    return [
        (graph.skip_reason or "").partition("Found from")[0].strip(),
        *(r for p in graph.partitions for r in p.reasons),
    ]


def report_structure(report: Any) -> list[Any]:
    return [
        report.mode,
        bool(report.blockers),
        [
            [p.kernels, [b.op for b in p.blockers], [[v.name, v.type, v.how] for v in p.cpu_values]]
            for p in report.partitions
        ],
    ]


def report_where(report: Any) -> list[str]:
    return [
        report.source,
        *(
            source
            for p in report.partitions
            for source in (p.source, *(b.source for b in p.blockers), *(v.source for v in p.cpu_values))
        ),
    ]


def program_entry(name: str, program: dict[str, Any], keep: Callable[[str, str], None]) -> Entry:
    filename = f"<program {name}>"
    source = program["source"]
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)

    def run(options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        script: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, filename, "exec"), script)
        model, kept = script["make"]()
        function = torch.compile(model, options=options)
        args = script["arguments"](kept)
        with torch.no_grad() if program["no_grad"] else contextlib.nullcontext():
            outputs = function(*args)
        if program["backward"]:
            roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])

    return compiled_entry(run, keep)


def module_to(module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Replace ``Module.to``, which swaps fake tensors that others refer to: that crashes the interpreter."""
    moved: dict[int, Any] = {}

    def move(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in moved:
            new = t.detach().to(device, dtype if t.is_floating_point() else None)
            if isinstance(t, torch.nn.Parameter):
                new = torch.nn.Parameter(new, t.requires_grad)
            moved[id(t)] = t, new
        return moved[id(t)][1]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: move(t) for name, t in tensors.items() if t is not None})
    return module


def model_entry(package: Any, name: str, keep: Callable[[str, str], None]) -> Entry:
    case, build = package.cases[name], package.program

    def run(options: dict[str, Any]) -> None:
        device = torch.device("cuda")
        with mock.patch.object(torch.nn.Module, "to", module_to):
            module = build.build(case, device, small=True)
        build.seed()
        with device:
            args, kwargs = case.inputs(True)
        for attribute in case.attributes:
            setattr(module, attribute, kwargs.pop(attribute))
        # Without what Program does besides: copies of modules with fake weights crash the interpreter.
        function, is_training = torch.compile(module, options=options), case.mode == "training"
        with torch.set_grad_enabled(is_training), torch.autocast("cuda", case.dtype, enabled=case.autocast):
            outputs = function(*args, **kwargs)
        if is_training:
            build.loss_of(outputs).backward()

    return compiled_entry(run, keep)


# Decisions


def scenario(name: str) -> dict[str, Any]:
    """What a simulated program does. Times are (host, device) in microseconds."""
    draw = random.Random(name)
    chance = lambda percent: draw.random() * 100 < percent  # noqa: E731
    host, device = 10 ** draw.uniform(1, 3.5), 10 ** draw.uniform(0, 3.7)
    # Some graphs are as good as none.
    of_host = draw.uniform(0.98, 1.02) if chance(25) else draw.uniform(0.02, 1.4)
    found = {
        "mode": draw.choice(("inference", "inference", "inference", "forward", "backward")),
        "how": draw.choice(("selected",) * 8 + ("forced", "remembered")),
        "noise": chance(30),
        "waits": chance(30),
        "uncaptured": (host, device),
        "graph": (of_host * host, draw.uniform(0.9, 1.1) * device),
        "prelude": (draw.uniform(0.3, 1.3) * of_host * host, draw.uniform(0.95, 1.2) * device),
        "rest": (10 ** draw.uniform(0, 3), 10 ** draw.uniform(0, 3)),
        "cold": draw.choice((0, 0, 0, 0.5, 2)),
        "pause": (draw.randrange(2, 9), draw.uniform(1e3, 1e5)) if chance(10) else None,
        "updated_nodes": draw.randrange(1, 32),
        # Of which call of a graph something else becomes true; 0 is its recording.
        "refuses": (draw.choice((0, 0, 3, 40, 150)), chance(50)) if chance(25) else None,
        "copied": [(0, 24), (draw.choice((60, 150)), 2048)] if chance(30) else [],
        "busy": draw.choice((0, 0, 0, 1, 3)),
        "kept": draw.choice((0, 0, 1, 3, 9)),
        "around": [
            (draw.choice((0, 10, 150, 300)), draw.choice(("node_update", "copy", "no_graph", "even", "undecided")))
            for _ in range(draw.randrange(3))
        ],
    }
    if name.startswith("prelude"):
        found |= {"mode": "inference", "how": "selected", "updated_nodes": draw.randrange(28, 200)}
    return found


def selection_entry(module: types.ModuleType, name: str) -> Entry:
    """One entry: who ran each call, with the number of calls in a row, and what was chosen."""
    what = scenario(name)
    simulation = module.NoisySimulation(random.Random(name)) if what["noise"] else module.Simulation()
    ran: list[str] = []
    calls = replays = busy = kept = 0
    decided: int | None = None

    def launch(who: str, times: tuple[float, float]) -> None:
        ran.append(who)
        run = simulation.work if who == "uncaptured" else simulation.replay
        host, device = times
        run(host * (1 + what["cold"] * 2 ** (-calls / 12)), device)

    def happens(replay: int) -> None:
        if what["refuses"] and what["refuses"][0] == replay:
            selecting.refuse(what["refuses"][1])
        if what["copied"]:
            selecting.copies(next(nbytes for first, nbytes in what["copied"][::-1] if replay >= first))

    def record(binding: str) -> Callable[[], None] | None:
        nonlocal busy
        busy += 1
        if busy <= what["busy"]:
            launch("uncaptured", what["uncaptured"])
            return None
        ran.append(f"record {binding}")
        simulation.work(10_000, 10_000)
        who = "prelude" if binding == "prelude" else "graph"
        if replays == 0:
            happens(0)

        def replay() -> None:
            nonlocal replays
            replays += 1
            happens(replays)
            launch(who, what[who])

        return replay

    def forget() -> bool:
        nonlocal kept
        kept += 1
        ran.append("forget" if kept > what["kept"] else "cannot forget")
        return kept > what["kept"]

    selecting = Selecting(
        what["mode"],
        what["how"],
        lambda: launch("uncaptured", what["uncaptured"]),
        record,
        forget,
        lambda: [choice if calls >= first else "undecided" for first, choice in what["around"]],
        what["updated_nodes"],
    )
    with simulation.patched():
        after = 0
        while calls < 1200 and after < 200:
            selecting.call()
            calls += 1
            after += selecting.is_deployed
            if decided is None and selecting.is_decided:
                decided = calls
            simulation.work(*what["rest"])
            if what["pause"] and calls % what["pause"][0] == 0:
                simulation.work(what["pause"][1], 0)
            if what["waits"]:
                simulation.synchronize()
    entry = selecting.look()
    entry["structure"]["decided"] = decided
    entry["structure"]["ran"] = ", ".join(f"{who} x{len([*group])}" for who, group in itertools.groupby(ran))
    entry["structure"]["freed"] = simulation.freed
    return entry


def record_entry(recording: Recording, name: str) -> Entry:
    draw = random.Random(name)
    force = draw.choice(("node_update", "copy", None, None))
    times = [draw.choice((10.0, 50.0, 90.0)) for _ in range(draw.randrange(1, 9))]
    steps = []
    for name in ("infer", "mutate", "partitions", "forward", "backward") * 4:
        steps += [(name, 5, 1, True), ("forget_kept", 0, 9, False)]
    for _ in range(draw.randrange(20, 60) if force else draw.randrange(100, 300)):
        steps.append((draw.choice(recording.steps), draw.randrange(6), draw.randrange(6), chance(draw)))
    # When the collector runs depends on what the process did before.
    gc.collect()
    gc.disable()
    try:
        return recording.run(force, times, steps)
    finally:
        gc.enable()


def chance(draw: random.Random) -> bool:
    return draw.random() < 0.5


# Writing and checking


def names_of(programs: dict[str, Any]) -> list[str]:
    return [
        *(f"program/{name}" for name in programs),
        *(f"model/{name}" for name in MODELS),
        *(f"selection/{n:03}" for n in range(SELECTIONS)),
        *(f"prelude/{n:03}" for n in range(PRELUDES)),
        *(f"record/{n:03}" for n in range(RECORDS)),
    ]


def entries(
    names: list[str], programs: dict[str, Any], package: Any, keep: Callable[[str, str], None]
) -> Iterator[tuple[str, Entry]]:
    """The entries of these names, in the form that JSON gives back."""
    modules: dict[str, Any] = {}

    def once(make: Callable[[], Any]) -> Any:
        if make.__name__ not in modules:
            modules[make.__name__] = make()
        return modules[make.__name__]

    for name in names:
        kind, _, which = name.partition("/")

        def keep_text(graph: str, text: str, name: str = name) -> None:
            keep(f"{name.replace('/', '.')}.{graph}", text)

        if kind == "program":
            entry = program_entry(which, programs[which], keep_text)
        elif kind == "model":
            entry = model_entry(package, which, keep_text)
        elif kind == "record":
            entry = record_entry(once(Recording), name)
        else:
            entry = selection_entry(once(selecting_simulation), name)
        yield name, json.loads(json.dumps(entry))


def dump(golden: dict[str, Any]) -> str:
    """JSON with a line for each program, each part of an entry and each difference."""
    lines = ["{", ' "programs": {']
    programs = golden["programs"].items()
    lines.append(",\n".join(f"  {json.dumps(name)}: {json.dumps(program)}" for name, program in programs))
    lines += [" },", ' "entries": {']
    blocks = []
    for name, entry in golden["entries"].items():
        parts = ",\n".join(f"   {json.dumps(part)}: {json.dumps(entry[part])}" for part in PARTS if part in entry)
        blocks.append(f"  {json.dumps(name)}: {{\n{parts}\n  }}")
    lines += [",\n".join(blocks), " },", ' "allowed": {']
    blocks = []
    for patch, differences in golden["allowed"].items():
        block = ",\n".join(f"   {json.dumps(difference)}" for difference in differences)
        blocks.append(f"  {json.dumps(patch)}: [\n{block}\n  ]")
    lines += [",\n".join(blocks), " }", "}"]
    return "\n".join(lines) + "\n"


def differences(name: str, old: Entry, new: Entry) -> list[list[Any]]:
    """The differences of an entry: [entry, part and place, old, new]."""
    return [[name, f"{part}{place}", a, b] for part in PARTS for place, a, b in leaves(old.get(part), new.get(part))]


def leaves(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ, down to lists of different lengths."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from leaves(old.get(key), new.get(key), f"{place}[{key}]")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for n, (a, b) in enumerate(zip(old, new)):
            yield from leaves(a, b, f"{place}[{n}]")
    elif old != new:
        yield place, old, new


def unexplained(found: list[list[Any]], allowed: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the differences that no patch explains, and the explanations that no difference needs."""
    return [d for d in found if d not in allowed], [d for d in allowed if d not in found]


class Goldens:
    """The file, and what is found now of the entries that were asked for."""

    def __init__(self, file: Path, only: str) -> None:
        self.file = file
        if file.exists():
            self.content = json.loads(file.read_text())
        else:
            self.content = {"programs": draw_programs(), "entries": {}, "allowed": {}}
        self.programs, self.kept = self.content["programs"], self.content["entries"]
        self.names = names_of(self.programs)
        # Generated code by graph.
        self.texts: dict[str, str] = {}
        asked = [name for name in self.names if re.search(only, name)]
        with benchmarks() as package:
            self.found = dict(entries(asked, self.programs, package, self.texts.__setitem__))

    def write(self, texts: Path | None) -> None:
        if texts is not None:
            texts.mkdir(parents=True, exist_ok=True)
            for name, text in self.texts.items():
                (texts / f"{name}.txt").write_text(text)
        merged = {name: self.found.get(name) or self.kept.get(name) for name in self.names}
        self.content["entries"] = {name: entry for name, entry in merged.items() if entry}
        self.forget_allowed()
        self.save()

    def forget_allowed(self) -> None:
        for patch, listed in [*self.content["allowed"].items()]:
            self.content["allowed"][patch] = listed = [d for d in listed if d[0] not in self.found]
            if not listed:
                del self.content["allowed"][patch]

    def save(self) -> None:
        self.file.write_text(dump(self.content))

    def differences(self) -> list[list[Any]]:
        return [d for name, entry in self.found.items() for d in differences(name, self.kept[name], entry)]

    def allow(self, patch: str) -> None:
        """List the differences that no patch is known to make."""
        self.content["allowed"].setdefault(patch, []).extend(self.unexplained()[0])
        self.save()

    def unexplained(self) -> tuple[list[list[Any]], list[list[Any]]]:
        allowed = [d for listed in self.content["allowed"].values() for d in listed if d[0] in self.found]
        return unexplained(self.differences(), allowed)

    def check(self, texts: Path | None) -> int:
        new, gone = self.unexplained()
        for difference in new:
            print("\n".join(self.shown(difference, texts)))
        for name, place, *_ in gone:
            print(f"{name}: {place} is allowed to differ, in another way than it does")
        allowed = len(self.differences()) - len(new)
        print(f"{len(self.found)} entries: {len(new)} differences, {allowed} that patches make, {len(gone)} gone")
        return int(bool(new or gone))

    def shown(self, difference: list[Any], texts: Path | None) -> list[str]:
        name, place, old, new = difference
        lines = [f"{name}: {place}: {json.dumps(old)} -> {json.dumps(new)}"]
        if texts is not None and place.startswith("code["):
            setting, _, number = place.removeprefix("code").strip("[]").partition("][")
            file = f"{name.replace('/', '.')}.{setting}.{number}"
            before = texts / f"{file}.txt"
            if file in self.texts and before.exists():
                a, b = before.read_text().splitlines(), self.texts[file].splitlines()
                lines += difflib.unified_diff(a, b, f"{file} before", f"{file} now", lineterm="")
        return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="exit with 1 if anything differs that is not allowed to")
    action.add_argument("--write", action="store_true", help="keeps FILE's programs and other entries")
    action.add_argument("--allow", metavar="PATCH", help="keeps FILE's entries, and adds what differs from them")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="where the generated code is, or goes")
    parser.add_argument("--only", default="", metavar="REGEX", help="entries whose names have it")
    args = parser.parse_args()
    # More wait for each other longer than such sizes compute.
    torch.set_num_threads(1)
    # Programs that end where they read a value, and graphs that are skipped, are in the entries.
    torch._logging.set_logs(all=logging.ERROR)
    goldens = Goldens(args.file, args.only)
    if args.write:
        goldens.write(args.texts)
    elif args.allow:
        goldens.allow(args.allow)
    else:
        return goldens.check(args.texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
