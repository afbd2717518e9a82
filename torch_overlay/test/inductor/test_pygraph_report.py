# Owner(s): ["module: inductor"]
"""
What PyGraph says of a run: as text, JSON and a page, in the structured trace, and of what
Inductor keeps out of CUDA graphs. All but the last class needs no GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from hypothesis import given, settings, strategies as st

import torch
import torch._logging._internal as torch_logging
from torch._inductor import config
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.compile import blockers, describe
from torch._inductor.pygraph.compile.blockers import describe_partition
from torch._inductor.pygraph.compile.upstream import blocker_of_graph, reason_of
from torch._inductor.pygraph.report import (
    __main__ as command,
    new_graph,
    Report,
    trace,
)
from torch._inductor.pygraph.report.text import format_bytes, format_us
from torch._inductor.pygraph.types import journal
from torch._inductor.pygraph.types.candidate import COPY, NO_GRAPH, NODE_UPDATE
from torch._inductor.pygraph.types.reason import Code, log_line, Reason
from torch._inductor.pygraph.types.report import (
    Blocker,
    FunctionReport,
    GraphReport,
    PartitionReport,
)
from torch._inductor.pygraph.types.schedule import ScheduledCall
from torch._inductor.pygraph.types.source import innermost, span
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON


if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FASTER = Reason.of(Code.FASTER_BY_ITSELF)

GUIDE = Path(__file__).parents[2] / "docs/source/user_guide/torch_compiler/torch.compiler_pygraph.md"

STACK = f"""\
  File "/home/user/train.py", line 12, in step
    loss = model(x)
  File "{torch.__path__[0]}/nn/modules/module.py", line 1779, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/user/model.py", line 34, in forward
    return F.linear(x, self.weight)
  File "{torch.__path__[0]}/nn/functional.py", line 7, in linear
    return torch._C._nn.linear(input, weight)
"""


def new_report(name: str, mode: str, **fields: Any) -> FunctionReport:
    entry = FunctionReport(name, mode, **fields)
    journal.add(entry)
    return entry


def modelled() -> Report:
    "A run of a training step, and of what can go wrong."
    bert, train = "/home/user/project/models/bert.py", "/home/user/project/train.py"
    functions = [
        FunctionReport(
            "partition_0",
            "forward",
            NODE_UPDATE,
            [FASTER],
            {NO_GRAPH: 2721.8, NODE_UPDATE: 1319.2},
            external_inputs=2,
            stock_copied_bytes=16384,
            kernel_nodes=181,
            updated_nodes=2,
            source=f"{bert}:412-498 in forward",
            compile_id="0/0",
        ),
        FunctionReport(
            "partition_0",
            "backward",
            NODE_UPDATE,
            [FASTER],
            {NO_GRAPH: 4094.3, NODE_UPDATE: 1662.8},
            external_inputs=4,
            stock_copied_bytes=62_525_444,
            kernel_nodes=307,
            updated_nodes=1,
            source=f"{bert}:412-498 in forward",
            compile_id="0/0",
            remembered=True,
        ),
        FunctionReport(
            "partition_1",
            "forward",
            COPY,
            [Reason.of(Code.DIFFERS, result="output 0 (torch.float32 [64, 128])"), FASTER],
            {NO_GRAPH: 320.0, COPY: 210.5},
            external_inputs=3,
            stock_copied_bytes=4_194_304,
            copied_bytes=4_194_304,
            source=f"{bert}:498-510 in <lambda>",
            compile_id="0/0",
        ),
        FunctionReport(
            "partition_0",
            "inference",
            NO_GRAPH,
            [Reason.of(Code.DEVICE_BOUND, host_us=83.2, device_us=1556.4)],
            {NO_GRAPH: 1556.4},
            source=f"{train}:31-44 in evaluate",
            compile_id="1/0",
        ),
        FunctionReport(
            "partition_0",
            "inference",
            NO_GRAPH,
            [
                Reason.of(Code.CAPTURE_FAILED, error="operation not permitted"),
                Reason.of(Code.NOT_CAPTURABLE),
            ],
            {NO_GRAPH: 112.0},
            source=f"{train}:90 in metrics",
            compile_id="2/0",
            sizes=[8, 128],
        ),
        FunctionReport("graph", "inference"),
    ]
    graphs = [
        GraphReport(
            "0/0",
            "forward",
            "NVIDIA H200",
            source=f"{bert}:412-498 in forward",
            partitions=[
                PartitionReport(181, f"{bert}:412-498 in forward"),
                PartitionReport(
                    3,
                    f"{bert}:498 in forward",
                    (
                        Blocker(
                            "aten.nonzero.default",
                            Reason.of(Code.DATA_DEPENDENT),
                            f"{bert}:498 in forward",
                        ),
                    ),
                ),
                PartitionReport(12, f"{bert}:498-510 in <lambda>"),
            ],
        ),
        GraphReport(
            "3/0",
            "inference",
            "NVIDIA H200",
            source=f"{train}:120 in route",
            blockers=[Blocker("torch.cond", Reason.of(Code.CONTROL_FLOW), f"{train}:120 in route")],
        ),
    ]
    return Report(functions, graphs)


class TextTest(TestCase):
    maxDiff = None

    def test_text(self):
        self.assertExpectedInline(
            modelled().text(),
            """\
PyGraph on NVIDIA H200
3 of 6 functions deployed as CUDA graphs, 1 as measured earlier
193 of 196 kernels in functions that can be captured
8.8 ms to 4.86 ms a call of each, without graphs and as chosen: 1.81x
66.7 MB to 4.19 MB copied by a replay of each: stock CUDA graphs and now

1. models/bert.py:412-498 in forward                    backward, graph 0/0, partition_0
   graph, inputs bound: measured faster, by itself (FASTER_BY_ITSELF) (by an earlier
     process)
     no graph                4.09 ms  ################################################
   * graph, inputs bound     1.66 ms  ###################
   307 nodes captured, 4 of 4 external inputs bound, 1 node updated
   copied by each replay: 0 B; by stock CUDA graphs: 62.5 MB

2. models/bert.py:412-498 in forward                     forward, graph 0/0, partition_0
   graph, inputs bound: measured faster, by itself (FASTER_BY_ITSELF)
     no graph                2.72 ms  ################################################
   * graph, inputs bound     1.32 ms  #######################
   181 nodes captured, 2 of 2 external inputs bound, 2 nodes updated
   copied by each replay: 0 B; by stock CUDA graphs: 16.4 kB

3. models/bert.py:498-510 in <lambda>                    forward, graph 0/0, partition_1
   graph, inputs copied: output 0 (torch.float32 [64, 128]) differs from the uncaptured
     function's; measured faster, by itself (DIFFERS, FASTER_BY_ITSELF)
     no graph                 320 us  ################################################
   * graph, inputs copied     210 us  ################################
   0 of 3 external inputs bound
   copied by each replay: 4.19 MB; by stock CUDA graphs: 4.19 MB
   change: A kernel keeps the input's address where it cannot be set, so that the input
     is copied. If its address never changes, mark it with
     torch._dynamo.mark_static_address.

4. project/train.py:31-44 in evaluate                  inference, graph 1/0, partition_0
   no graph: launching takes 83 us of the device's 1556 us (DEVICE_BOUND)
   * no graph                1.56 ms  ################################################

5. project/train.py:90 in metrics        inference, graph 2/0, partition_0, sizes 8, 128
   no graph: capture failed: operation not permitted; it cannot be captured
     (CAPTURE_FAILED, NOT_CAPTURABLE)
   * no graph                 112 us  ################################################
   change: An operator waits for the device or allocates outside of PyTorch. If it is a
     custom operator, tag it torch.Tag.cudagraph_unsafe: the rest is captured then.

6. (unknown source)                                                     inference, graph
   undecided: it was not called often enough to be measured

Not captured

   models/bert.py:498 in forward                           forward, graph 0/0, 3 kernels
   why: aten.nonzero.default makes a size or a number that depends on data at
     models/bert.py:498 in forward (DATA_DEPENDENT)
   change: Use a form with a fixed size (torch.where, nonzero_static, padding), or keep
     the number on the GPU instead of .item().

   project/train.py:120 in route                         inference, graph 3/0, all of it
   why: torch.cond chooses on the host what runs next at project/train.py:120 in route
     (CONTROL_FLOW)
   change: Where both branches are cheap, compute both and select with torch.where.""",
        )

    def test_empty(self):
        self.assertExpectedInline(
            Report([], []).text(),
            """\
PyGraph
0 of 0 functions deployed as CUDA graphs""",
        )

    def test_schedules(self):
        self.assertExpectedInline(
            Report([scheduled()], []).text().split("\n", 4)[-1],
            """\
1. (unknown source)                                               inference, partition_0
   graph, inputs bound, in 2 lanes: measured faster, by itself (FASTER_BY_ITSELF)
     no graph                           80 us  #######################################
     graph, inputs bound                40 us  ####################
   * graph, inputs bound, in 2 lanes    25 us  ############
   reserved by the graphs' pool: 2 MB (graph, inputs bound), 2.5 MB (graph, inputs
     bound, in 2 lanes)
   up to 2 kernels side by side, critical path 20 us of 28 us
   copied by each replay: 0 B; by stock CUDA graphs: 0 B""",
        )

    names = st.text(min_size=1, max_size=40) | st.just("a_name/" * 30)

    @settings(deadline=None, max_examples=50)
    @given(
        st.integers(80, 100),
        st.builds(
            FunctionReport,
            name=names,
            mode=st.sampled_from(["forward", "backward"]),
            choice=st.sampled_from([NO_GRAPH, COPY, NODE_UPDATE, "undecided"]),
            reasons=st.lists(st.builds(Reason.of, st.just(Code.ERROR), error=names)),
            timings_us=st.dictionaries(
                st.sampled_from([NO_GRAPH, COPY, NODE_UPDATE, "prelude,lanes2"]), st.floats(1e-3, 1e9)
            ),
            kernel_nodes=st.integers(0, 10**6),
            stock_copied_bytes=st.integers(0, 10**12),
            pool_bytes=st.dictionaries(st.just("node_update,lanes2"), st.integers(0, 10**12)),
            source=names,
        ),
        names,
    )
    def test_fits(self, width, function, op):
        blocker = Blocker(op, Reason.of(Code.UPSTREAM, said=op), op)
        graph = GraphReport(
            "0/0", op, "H200", partitions=[PartitionReport(1, op, (blocker,))]
        )
        for line in Report([function], [graph]).text(width).split("\n")[1:]:
            self.assertLessEqual(len(line), width, line)

    @parametrize(
        "us,text",
        ((0.5, "0.5 us"), (38.44, "38.4 us"), (999.4, "999 us"), (999.6, "1 ms"))
        + ((1556.4, "1.56 ms"), (12_345.0, "12.3 ms"), (2e6, "2 s")),
    )
    def test_us(self, us, text):
        self.assertEqual(format_us(us), text)

    @parametrize(
        "nbytes,text",
        ((0, "0 B"), (999, "999 B"), (16384, "16.4 kB"), (62_525_444, "62.5 MB"))
        + ((3 * 10**9, "3 GB"),),
    )
    def test_bytes(self, nbytes, text):
        self.assertEqual(format_bytes(nbytes), text)

    def test_order(self):
        "What saves most, then what takes longest, then what is unknown."
        saved = [round(f.saved_us) for f in modelled().by_gain()]
        self.assertEqual(saved, [2432, 1403, 110, 0, 0, 0])
        names = [f.compile_id for f in modelled().by_gain()[3:]]
        self.assertEqual(names, ["1/0", "2/0", ""])

    def test_sequence(self):
        "The report is that of its functions."
        run = modelled()
        self.assertEqual(len(run), 6)
        self.assertEqual((run[0].compile_id, run[3].compile_id), ("0/0", "1/0"))
        self.assertEqual([f.choice for f in run][:1], [NODE_UPDATE])
        self.assertEqual(str(run), run.text())


instantiate_parametrized_tests(TextTest)


class AdviceTest(TestCase):
    @parametrize(
        "text,code,op",
        (
            ("cpu ops", Code.CPU_OP, ""),
            ("DeviceCopy ops", Code.DEVICE_COPY, ""),
            ("Conditional ops", Code.CONTROL_FLOW, ""),
            ("unbacked binding ops", Code.DATA_DEPENDENT, ""),
            ("uses cudagraph-unsafe unbacked symint: u0", Code.DATA_DEPENDENT, ""),
            ("CUDAGraph-unsafe custom ops", Code.UNSAFE_OP, ""),
            ("dynamic shape ops", Code.DYNAMIC_SHAPES, ""),
            ("custom partition op: aten.sin.default", Code.CUSTOM_PARTITION_OP, ""),
            ("partition includes all ops when cudagraphs is disabled", Code.GRAPHS_OFF, ""),
            ("skipping cudagraphs due to cpu device (sin)", Code.CPU_DEVICE, "sin"),
            ("multiple devices: device(type='cuda', index=0), 1", Code.MULTIPLE_DEVICES, ""),
            ("mutated inputs (1 instances)", Code.MUTATED_INPUTS, ""),
            ("complex memory overlap", Code.OVERLAPPING_INPUT, ""),
            ("non-Tensor inputs", Code.NON_TENSOR_INPUT, ""),
            ("control flow operator: torch.while_loop.", Code.CONTROL_FLOW, "torch.while_loop"),
            (
                "index_put_ fallback with boolean indexing is not compatible with CUDA graphs",
                Code.BOOLEAN_INDEX,
                "",
            ),
            (
                "disabling cudagraphs due to incompatible op aten._local_scalar_dense",
                Code.UNSAFE_OP,
                "aten._local_scalar_dense",
            ),
            (
                "disabling cudagraphs due to incompatible op aten.nonzero.default",
                Code.DATA_DEPENDENT,
                "aten.nonzero.default",
            ),
            (
                "graph with symbolic shapes inputs and "
                "config.triton.cudagraph_skip_dynamic_graphs=True.",
                Code.DYNAMIC_SHAPES,
                "",
            ),
            ("sparsity not handled.", Code.SPARSE, ""),
            ("a reason of a later version", Code.UPSTREAM, ""),
        ),
    )
    def test_text_of_upstream(self, text, code, op):
        blocker = blocker_of_graph(text + f" Found from : \n {STACK}")
        self.assertEqual((blocker.reason.code, blocker.op), (code, op))
        self.assertEqual(blocker.source, "/home/user/model.py:34 in forward")
        self.assertNotEqual(blocker.reason.text, "")
        known = code not in (Code.UPSTREAM, Code.CUSTOM_PARTITION_OP)
        self.assertEqual(blocker.reason.advice != "", known)

    def test_text_of_upstream_that_is_not_known(self):
        text = "skipping cudagraphs due to some fault. Found from : \n"
        self.assertEqual(reason_of(text).text, "some fault")

    @unittest.skipUnless(GUIDE.exists(), "only in the repository")
    def test_guide_lists_the_codes(self):
        rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("|")]
        listed = [code for row in rows for code in re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", row)]
        codes = [code for code in listed if not code.startswith("TORCHINDUCTOR")]
        self.assertEqual(sorted(codes), sorted(Code.__members__))

    def test_log_line(self):
        """Source line, function, outcome, code, what to do."""
        reasons = Reason.of(Code.COPIES_TO_CPU), Reason.of(Code.HOST_FLOAT)
        self.assertExpectedInline(
            log_line("a.py:3-5 in f", "forward 0/0", "not captured", *reasons),
            """\
a.py:3-5 forward 0/0: not captured (COPIES_TO_CPU) copies a result of the GPU to the CPU; (HOST_FLOAT) takes a float from the host. The host waits there for the GPU. Copy results to the CPU after the compiled function, and compute on the GPU what GPU code needs again.""",  # noqa: B950
        )

    @parametrize(
        "code",
        (
            Code.CPU_INPUT,
            Code.CAPTURE_FAILED,
            Code.NOT_CAPTURABLE,
            Code.MUTATED_GRAPH_OUTPUT,
            Code.UNKNOWN_THREAD,
            Code.DIFFERS,
            Code.WROTE_PLACEHOLDER,
        ),
    )
    def test_something_to_change_in_a_function(self, code):
        self.assertNotEqual(Reason.of(code).advice, "")

    def test_proof_that_failed_is_no_mutation_to_avoid(self):
        results = ("mutated input 0", "output 0 (torch.float32 [4])")
        of_input, of_output = (
            Reason.of(Code.DIFFERS, result=result).advice for result in results
        )
        self.assertEqual(of_input, of_output)
        self.assertNotEqual(of_input, Reason.of(Code.MUTATED_GRAPH_OUTPUT).advice)

    def test_nothing_to_change(self):
        for code in (Code.FORCED, Code.FASTER, Code.NOT_FASTER, Code.DEVICE_BOUND):
            self.assertEqual(Reason.of(code).advice, "")


instantiate_parametrized_tests(AdviceTest)


def scheduled() -> FunctionReport:
    """Two branches, the second of which is one call."""
    calls = [("triton_a", 0, 0.0, 6.0), ("extern_kernels.mm", 1, 0.0, 10.0), ("<b>", 0, 6.0, 2.0), ("join", 1, 10.0, 10.0)]
    lanes = {"no_graph": 80.0, "node_update": 40.0, "node_update,lanes2": 25.0}
    return FunctionReport(
        "partition_0",
        "inference",
        NODE_UPDATE,
        [FASTER],
        lanes,
        schedule="lanes2",
        calls_us=28.0,
        critical_us=20.0,
        width=2,
        timeline=[ScheduledCall(*call) for call in calls],
        pool_bytes={"node_update": 2_000_000, "node_update,lanes2": 2_500_000},
    )


class HtmlTest(TestCase):
    def page(self, run: Report | None = None) -> ET.Element:
        "It has to be well-formed."
        return ET.fromstring((modelled() if run is None else run).html())

    def text(self, page: ET.Element) -> str:
        return " ".join(" ".join(page.itertext()).split())

    def test_facts(self):
        text = self.text(self.page())
        for fact in (
            "models/bert.py:412-498 in forward",
            "backward, graph 0/0, partition_0",
            "bert.py:498-510 in <lambda>",
            "4.09 ms",
            "1.66 ms",
            "62.5 MB",
            "307 nodes captured, 4 of 4 external inputs bound, 1 node updated",
            "by an earlier process",
            "differs from the uncaptured function's",
            "launching takes 83 us",
            "sizes 8, 128",
            "undecided",
            "aten.nonzero.default makes a size or a number that depends on data",
            "torch.where",
            "torch.cond chooses on the host what runs next",
            "193 of 196 kernels",
            "NVIDIA H200",
        ):
            self.assertIn(fact.lower(), text.lower())

    def test_self_contained(self):
        page = self.page()
        self.assertEqual(
            {e.tag for e in page.iter()} & {"script", "link", "img"}, set()
        )
        attributes = {name for e in page.iter() for name in e.attrib}
        self.assertLessEqual(
            attributes,
            {"lang", "charset", "name", "content", "class", "style", "title"},
        )
        self.assertNotRegex(modelled().html(), r"https?:|url\(|@import")

    def test_light_and_dark(self):
        self.assertIn("prefers-color-scheme: dark", modelled().html())

    def bars(self, page: ET.Element, kind: str) -> list[list[float]]:
        "Widths in percent of the bars in each element of a class."
        return [
            [
                float(re.search(r"width: ([\d.]+)%", bar.get("style"))[1])
                for bar in chart.iter("div")
                if bar.get("style")
            ]
            for chart in page.iter("div")
            if kind in chart.get("class", "").split()
        ]

    def test_bars(self):
        page = self.page()
        # The times of a call, and what a replay copies.
        bars = [[100, 40.6, 100, 0], [100, 48.5, 100, 0], [100, 65.8, 100, 100], [100]]
        self.assertEqual(self.bars(page, "charts")[:4], bars)
        total = 4094.3 + 2721.8 + 320 + 1556.4 + 112
        before, after = self.bars(page, "stack")
        self.assertEqual(sum(before), 100, atol=0.05, rtol=0)
        after_us = 1662.8 + 1319.2 + 210.5 + 1556.4 + 112
        self.assertEqual(sum(after), 100 * after_us / total, atol=0.05, rtol=0)

    def test_lanes(self):
        "A row for each lane, with its calls at their times, also of a run that is read from a file."
        written = json.loads(Report([scheduled()], []).json())["functions"]
        entry = FunctionReport(**written[0] | {"reasons": [FASTER]})
        for function in (scheduled(), entry):
            page = self.page(Report([function], []))
            lanes = [e for e in page.iter("div") if e.get("class") == "lane"]
            self.assertEqual(
                [[(call.text, call.get("style"), call.get("title")) for call in lane] for lane in lanes],
                [
                    [
                        ("triton_a", "left: 0.00%; width: 30.00%", "triton_a: 6 us"),
                        ("<b>", "left: 30.00%; width: 10.00%", "<b>: 2 us"),
                    ],
                    [
                        ("extern_kernels.mm", "left: 0.00%; width: 50.00%", "extern_kernels.mm: 10 us"),
                        ("join", "left: 50.00%; width: 50.00%", "join: 10 us"),
                    ],
                ],
            )
            self.assertIn("2.5 MB", self.text(page))
        self.assertNotIn('class="lane"', modelled().html())

    def test_names_are_escaped(self):
        run = Report(
            [FunctionReport("<b>&'\"", "forward", source="<i>:1 in <lambda>")], []
        )
        self.assertIn("<b>&'\"", self.text(self.page(run)))

    def test_processes(self):
        page = ET.fromstring(command.render([modelled(), modelled()]))
        self.assertEqual(len(list(page.iter("h1"))), 2)

    def test_empty(self):
        self.assertIn("0 of 0 functions", self.text(self.page(Report([], []))))


class RunTest(TestCase):
    "From a run to what the command prints."

    def setUp(self):
        super().setUp()
        reset_report()
        self.addCleanup(reset_report)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        "What TORCH_TRACE=directory does."
        handler = torch_logging.LazyTraceHandler(str(self.directory))
        handler.setFormatter(torch_logging.TorchLogsFormatter(trace=True))
        handlers = torch_logging.trace_log.handlers
        level = torch_logging.trace_log.level
        torch_logging.trace_log.handlers = [handler]
        torch_logging.trace_log.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            torch_logging.trace_log.handlers = handlers
            torch_logging.trace_log.setLevel(level)
            handler.close()

    def run_command(self, *arguments: str | Path) -> str:
        output = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["report", *map(str, arguments)]),
            mock.patch.dict(os.environ, {"COLUMNS": "88"}),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            command.main()
        return output.getvalue()

    def test_trace(self):
        with self.tracing():
            first = new_report("f", "forward", compile_id="1/2", source="a.py:3 in f")
            new_report("g", "backward")
            torch_logging.trace_structured("artifact", payload_fn=lambda: "other")
            for graph in modelled().graphs:
                journal.publish(graph)
            first.choice, first.timings_us = NODE_UPDATE, {NO_GRAPH: 2.0}
            journal.publish(first)
            torch_logging.trace_structured("compile", payload_fn=lambda: "\n\n")
        (read,) = trace.load(self.directory)
        self.assertEqual(list(read), list(report()))
        self.assertEqual(read.graphs, modelled().graphs)
        self.assertEqual(read[0].choice, NODE_UPDATE)

    def test_trace_is_an_artifact(self):
        "As tlparse wants it: under its compilation."
        with self.tracing():
            new_report("f", "forward", compile_id="1/2")
            new_report("f", "forward", compile_id="!0/3/4")
            new_report("f", "forward")
        (log,) = self.directory.glob("*.log")
        records = [
            json.loads(line[line.index("{") :])
            for line in log.read_text().splitlines()
            if not line.startswith("\t")
        ]
        ids = [
            (
                r.get("compiled_autograd_id"),
                r.get("frame_id"),
                r.get("frame_compile_id"),
            )
            for r in records
        ]
        self.assertEqual(ids, [(None, 1, 2), (0, 3, 4), (None, None, None)])
        for record in records:
            self.assertEqual(
                record["artifact"], {"name": "pygraph_report", "encoding": "json"}
            )
            self.assertIn("has_payload", record)

    def test_nothing_is_written_without_a_trace(self):
        with mock.patch.object(torch_logging.trace_log, "handlers", []):
            with mock.patch.object(json, "dumps", None):
                journal.publish(FunctionReport("f", "forward"))

    def test_processes(self):
        for rank in range(2):
            with (
                self.tracing(),
                mock.patch("torch.distributed.is_initialized", lambda: True),
                mock.patch("torch.distributed.get_rank", lambda: rank),
            ):
                new_report(f"of_{rank}", "forward")
        text = self.run_command(self.directory)
        for rank in range(2):
            self.assertRegex(text, rf"(?s)PyGraph, rank {rank}\b.*of_{rank}")

    def test_process_that_was_killed(self):
        "What it wrote before is reported, and so are others."
        with self.tracing():
            new_report("first", "forward")
            new_report("last", "forward")
        (log,) = self.directory.glob("*.log")
        content = log.read_text()
        # To the first record's end: shorter, it has no report.
        for length in range(content.index("\n\t"), len(content)):
            log.write_text(content[:length])
            (self.directory / "other.log").write_text(content)
            *killed, _ = sorted(trace.load(self.directory), key=len)
            names = [f.name for read in killed for f in read]
            self.assertEqual(names, ["first", "last"][: len(names)])

    def test_json(self):
        file = self.directory / "run.json"
        run = modelled()
        file.write_text(run.json())
        (read,) = trace.load(file)
        self.assertEqual(list(read), list(run))
        self.assertEqual(read.graphs, run.graphs)
        self.assertEqual(self.run_command(file), run.text() + "\n")

    def test_html(self):
        file, page = self.directory / "run.json", self.directory / "run.html"
        file.write_text(modelled().json())
        self.assertEqual(self.run_command(file, "--html", page), "")
        self.assertEqual(page.read_text(encoding="utf-8"), modelled().html())

    @parametrize(
        "name,content",
        (("a.json", "{"), ("a.json", "[]"), ("a.json", '{"functions": [{}]}'))
        + (("a.log", ""), ("a.log", "V1 x] {}\n\tpayload\n"), ("", "")),
    )
    def test_no_report(self, name, content):
        "One line that says what to do."
        if name:
            (self.directory / name).write_text(content)
        error = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(error):
            with mock.patch.object(sys, "argv", ["report", str(self.directory / name)]):
                command.main()
        self.assertRegex(error.getvalue(), r"^[^\n]*(json|TORCH_TRACE)[^\n]*\n$")

    @parametrize(
        "payload",
        (
            '{"function": {"name": "f", "mode": "forward", "reasons": [], "of": 3}}',
            '{"function": {"name": "f", "mode": "forward", "reasons": [{"code": "OTHER"}]}}',
            '{"graph": {}}',
            "[]",
        ),
    )
    def test_other_version(self, payload):
        record = '{"artifact": {"name": "pygraph_report"}}'
        (self.directory / "a.log").write_text(f"V1 x] {record}\n\t{payload}\n")
        with self.assertRaisesRegex(ValueError, "is no TORCH_TRACE or JSON of this version"):
            trace.load(self.directory)

    def test_page_that_can_not_be_written(self):
        file, page = self.directory / "run.json", self.directory / "none" / "run.html"
        file.write_text(modelled().json())
        error = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(error):
            with mock.patch.object(sys, "argv", ["report", str(file), "--html", str(page)]):
                command.main()
        self.assertRegex(error.getvalue(), r"^[^\n]*none/run.html[^\n]*\n$")

    def test_a_program_without_a_gpu(self):
        "It had the flag on and wrote a trace: that is not what is missing."
        with self.tracing():
            torch_logging.trace_structured("artifact", payload_fn=lambda: "other")
        with self.assertRaisesRegex(ValueError, "compiled nothing for a GPU"):
            trace.load(self.directory)

    def test_command(self):
        file = self.directory / "run.json"
        file.write_text(modelled().json())
        done = subprocess.run(
            [sys.executable, "-m", "torch._inductor.pygraph.report", str(file)],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("models/bert.py:412-498", done.stdout)


instantiate_parametrized_tests(RunTest)


class SourceTest(TestCase):
    def test_innermost(self):
        self.assertEqual(innermost(STACK), "/home/user/model.py:34 in forward")
        self.assertEqual(innermost("no stack"), "")

    def test_torch_if_nothing_else(self):
        line = STACK.splitlines()[2]
        self.assertRegex(innermost(line), r"module.py:1779 in _call_impl")

    def test_span(self):
        later = STACK.replace("line 12", "line 9")
        other = STACK.replace("train.py", "other.py")
        self.assertEqual(
            span([STACK, later, other, None]), "/home/user/train.py:9-12 in step"
        )
        self.assertEqual(span([STACK]), "/home/user/train.py:12 in step")
        self.assertEqual(span([]), "")

    def node(
        self, *traces: str | None, op: str = "call_function"
    ) -> types.SimpleNamespace:
        origins = [
            types.SimpleNamespace(
                stack_trace=t, op=op, target="aten.sin.default", meta={}
            )
            for t in traces
        ]
        node = types.SimpleNamespace(
            node=types.SimpleNamespace(get_origins=lambda: origins)
        )
        node.get_nodes = lambda: [node, types.SimpleNamespace(node=None)]
        return node

    def test_partition(self):
        good, bad = self.node(None, STACK), self.node(STACK)
        nameless = self.node(None, op="placeholder")
        reasons = {id(bad): "cpu ops", id(nameless): Code.HOST_FLOAT}
        described = describe_partition(
            [good, bad, bad, nameless], lambda node: reasons.get(id(node))
        )
        self.assertEqual(
            described,
            PartitionReport(
                4,
                "/home/user/train.py:12 in step",
                (
                    Blocker("SimpleNamespace", Reason.of(Code.HOST_FLOAT), ""),
                    Blocker(
                        "aten.sin.default",
                        Reason.of(Code.CPU_OP),
                        "/home/user/model.py:34 in forward",
                    ),
                ),
            ),
        )
        self.assertEqual(pickle.loads(pickle.dumps(described)), described)


@instantiate_parametrized_tests
class CompiledTest(TestCase):
    "What Inductor keeps out, for an H200 that need not be there."

    def setUp(self):
        super().setUp()
        reset_report()
        self.addCleanup(reset_report)

    def compile(self, fn, **options) -> list[GraphReport]:
        with fake_cuda():
            x = torch.randn(8, 64, device="cuda", requires_grad=True)
            compiled = torch.compile(fn, options={"pygraph": True, **options})
            compiled(x).sum().backward()
        return report().graphs

    @parametrize("name", ("describe_calls", "_shared_inputs", "_num_kernels", "span"))
    def test_code_that_is_not_described(self, name):
        "The program runs without CUDA graphs, and the log says it once for each graph."
        module = blockers if name == "span" else describe
        with (
            config.patch(pygraph_strict=False),
            mock.patch.object(module, name, side_effect=ValueError("unknown line")),
            self.assertLogs("torch._inductor.pygraph", "INFO") as logs,
        ):
            graphs = self.compile(lambda x: x.sin() @ x.t(), graph_partition=name != "_num_kernels")
        for graph in graphs:
            if name == "_shared_inputs" and graph.mode == "forward":
                self.assertEqual(graph.blockers, [])
                continue
            (blocker,) = graph.blockers
            self.assertEqual(blocker.reason.code, Code.NOT_DESCRIBED)
            self.assertIn("ValueError: unknown line", blocker.reason.text)
        said = [line for line in logs.output if "NOT_DESCRIBED" in line]
        self.assertEqual(len(said), 1 if name == "_shared_inputs" else 2)

    def test_body_that_is_not_described(self):
        "No graph that it is part of is captured. What failed first is the reason."
        outer = types.SimpleNamespace(disable_cudagraphs_reason=None)
        inner = types.SimpleNamespace(disable_cudagraphs_reason=None, parent=outer)
        with (
            config.patch(pygraph_strict=False),
            V.set_graph_handler(inner),
        ):
            for error in "first", "second":
                failing = mock.Mock(side_effect=ValueError(error), __name__="describe")
                self.assertEqual(blockers.or_uncaptured(lambda: "neutral")(failing)(), "neutral")
        for graph in outer, inner:
            self.assertIn("ValueError: first", graph.disable_cudagraphs_reason)

    def test_partition_that_only_allocates(self):
        "A CPU tensor without elements has no kernel, and is not captured."
        with fake_cuda(), torch.no_grad():
            fn = lambda x: (x.sin(), torch.zeros(0, device="cpu"))  # noqa: E731
            torch.compile(fn, options={"pygraph": True})(torch.randn(8, 64, device="cuda"))
        (graph,) = report().graphs
        self.assertEqual(sorted(not p.blockers for p in graph.partitions), [False, True])

    def test_partitions(self):
        def through_the_cpu(x):
            y = x.sin().cpu()
            return y.cos().cuda() + x

        forward, backward = self.compile(through_the_cpu)
        self.assertEqual((forward.mode, backward.mode), ("forward", "backward"))
        self.assertEqual(forward.compile_id, "0/0")
        self.assertEqual(forward.device, "NVIDIA H200")
        captured = [not p.blockers for p in forward.partitions]
        self.assertEqual(captured, [True, False, True])
        line = through_the_cpu.__code__.co_firstlineno + 1
        file = through_the_cpu.__code__.co_filename
        by_code = {b.reason.code: b for b in forward.partitions[1].blockers}
        self.assertEqual(set(by_code), {Code.BRINGS_CPU_VALUES, Code.COPIES_TO_CPU, Code.CPU_OP})
        copy = by_code[Code.COPIES_TO_CPU]
        self.assertEqual(copy.op, "prims.device_put.default")
        self.assertEqual(copy.source, f"{file}:{line} in through_the_cpu")
        # What brings the value to the GPU again is no kernel.
        self.assertEqual(forward.partitions[1].kernels, 2)
        sources = {b.source for b in forward.partitions[1].avoidable}
        places = {f"{file}:{n} in through_the_cpu" for n in (line, line + 1)}
        self.assertLessEqual(sources, places)
        self.assertIn(f"{file}:{line}", forward.partitions[0].source)

    def test_all_of_a_graph(self):
        def through_the_cpu(x):
            return x.sin().cpu().cos().cuda()

        forward, backward = self.compile(through_the_cpu, graph_partition=False)
        self.assertEqual([b.reason.code for b in forward.blockers], [Code.CPU_DEVICE])
        line = through_the_cpu.__code__.co_firstlineno + 1
        self.assertIn(
            f"test_pygraph_report.py:{line} in through_the_cpu", forward.source
        )
        self.assertEqual(backward.blockers, [Blocker("", Reason.of(Code.GRAPHS_OFF), "")])
        self.assertEqual(forward.partitions, [])

    def options(self, **process_wide) -> list[tuple[str | None, bool, str]]:
        """
        (forced candidate, whether its decision is kept, its source) of functions that are
        compiled with no option, "copy" and no cache.
        """
        seen = []

        def cudagraphify(model, *, pygraph, **kwargs):
            where = pygraph.info.report.source.rpartition(" in ")[2]
            seen.append((pygraph.force, pygraph.info.code_hash is not None, where))
            return model

        def plain(x):
            return x + 1

        def copied(x):
            return x + 2

        def uncached(x):
            return x + 3

        with (
            fake_cuda(),
            config.patch(pygraph=True, fx_graph_cache=True, **process_wide),
        ):
            x = torch.randn(8, device="cuda")
            with mock.patch("torch._inductor.compile_fx.cudagraphify", cudagraphify):
                torch.compile(plain)(x)
                torch.compile(copied, options={"pygraph_force": COPY})(x)
                torch.compile(uncached, options={"fx_graph_cache": False})(x)
        return seen

    def test_options(self):
        "Of one function, of the process, and of one function against the process."
        self.assertEqual(
            self.options(),
            [(None, True, "plain"), (COPY, True, "copied"), (None, False, "uncached")],
        )
        self.assertEqual(
            self.options(pygraph_force=NO_GRAPH, force_disable_caches=True),
            [
                (NO_GRAPH, False, "plain"),
                (COPY, False, "copied"),
                (NO_GRAPH, False, "uncached"),
            ],
        )

    def test_off(self):
        self.assertEqual(self.compile(lambda x: x.sin(), pygraph=False), [])

    def test_graph_on_the_cpu(self):
        new_graph(types.SimpleNamespace(device_types=["cpu"]))
        self.assertEqual(report().graphs, [])


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class DeviceTest(TestCase):
    def test_graph_cache(self):
        "What is known of a graph comes with it from the cache."
        from torch._inductor.utils import fresh_cache

        def fn(x):
            return x.sin().cpu().cos().cuda() + x

        seen = []
        with fresh_cache(), config.patch(fx_graph_cache=True):
            for _ in range(2):
                torch._dynamo.reset()
                reset_report()
                compiled = torch.compile(fn, options={"pygraph": True})
                for _ in range(440):
                    compiled(torch.randn(64, device="cuda"))
                seen.append(report())
        first, second = seen
        self.assertEqual(first.graphs, second.graphs)
        self.assertEqual([f.choice for f in first], [f.choice for f in second])
        self.assertEqual([f.remembered for f in second], [True] * len(first))
        for f in first:
            self.assertIn("test_pygraph_report.py", f.source)
        self.assertIn("(CPU_OP)", second.text())


if __name__ == "__main__":
    run_tests()
