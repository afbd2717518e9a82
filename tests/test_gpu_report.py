"""Tables and plots, from stored results alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "torch_overlay" / "benchmarks" / "dynamo"))

from pygraph import report  # noqa: E402


RESULTS = Path(__file__).parent / "data" / "made_up_results.json"


@pytest.fixture
def rows():
    return json.loads(RESULTS.read_text())["cases"]


def _of(rows, suite):
    return [row for row in rows if row["suite"] == suite]


def test_only_right_results_count(rows):
    by_name = {row["name"]: row for row in rows}
    assert report.speedup(by_name["eos"], "pygraph", "stock_cg") == 1.5
    assert report.best_speedup(by_name["eos"]) == 1.0
    assert report.speedup(by_name["dlrm"], "pygraph", "stock_cg") is None
    assert report.time_of(by_name["dalle2"], "hand_written") is None
    assert report.best_speedup(by_name["maskrcnn"]) is None
    # PyGraph may be right where another variant is not, and the reverse.
    wrong_stock = {**by_name["eos"], "failed": {"stock_cg": "wrong result"}}
    assert report.best_speedup(wrong_stock) == 1.0 and report.speedup(wrong_stock, "pygraph", "stock_cg") is None


def test_facts_of_a_row(rows):
    row = next(row for row in rows if row["name"] == "dalle2")
    assert report.coverage(row, "stock_cg") == pytest.approx(98.7, abs=0.01)
    assert report.coverage(row, "hand_written") is None
    assert report.copied(row, "stock_cg") == 2048
    assert report.deployed(row) == (1, 2)
    assert report.start_up(row, "pygraph") == pytest.approx(11.55)


def test_summary(rows):
    assert report.summary(_of(rows, "paper")) == [
        "3 of 6 workloads ran with right results, 1 were skipped.",
        "Speed-up over stock CUDA graphs: geomean 1.328 of 3, 1.042 to 1.500.",
        "... where stock's host waits for the device: geomean 1.328 of 3, 1.042 to 1.500.",
        "Speed-up over no CUDA graphs: geomean 1.842 of 3, 1.000 to 3.000.",
        "Speed-up over the better of the two: geomean 1.160 of 3, 1.000 to 1.500.",
        "Speed-up over stock without graph partition: geomean 2.109 of 3, 1.500 to 3.000.",
        "Compile and warm-up, of stock CUDA graphs': geomean 1.100 of 3, 1.100 to 1.100.",
        "Compile and warm-up of all together: 1.100 of stock's, of at most 1.15.",
    ]


def test_rows_whose_host_has_time(rows):
    row = next(row for row in rows if row["name"] == "eos")
    names = ["... where stock's host waits for the device", "... where it does not"]
    for share, found in ((0.89, [1.5, None]), (0.91, [None, 1.5])):
        row["host_us"]["stock_cg"] = share * row["stock_cg_us"]
        assert [report.SPEEDUPS[name](row) for name in names] == found


def test_table_of_workloads(rows):
    lines = report.format_table(_of(rows, "paper")).splitlines()
    cells = {line.split()[0]: line.split() for line in lines[2:8]}
    assert cells["eos"] == "eos (EOS) 400.0 40.0 60.0 40.0 1.00 1.50 1.00 24.0 0 of 1 bitwise pass".split()
    assert cells["dlrm"][5] == "failed" and cells["dlrm"][-3:] == ["NO", "(5.0e-01)", "FAIL"]
    assert cells["maskrcnn"][-1] == "FAIL" and cells["alexnet"][-1] == "skipped"
    assert "alexnet: needs torchvision" in lines
    assert any(line.startswith("dalle2: hand_written: RuntimeError: CUDA error") for line in lines)


def test_page_of_a_suite(rows):
    page = report.document("paper", _of(rows, "paper"), {"Speed": "speed.png"})
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert all(len({line.replace("\\|", "").count("|") for line in table}) == 1 for table in tables)
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles[0] == "# Suite paper" and "## Each step" in titles and titles[-2:] == ["## Notes", "## Runs"]
    assert "![Speed](speed.png)" in page
    # In the paper's order.
    assert page.index("| eos (EOS)") < page.index("| dalle2") < page.index("| dlrm") < page.index("| xlnet_infer")
    assert "0 to 99.28" in page and "8.0 KB to 16 B" in page


def test_pages_show_what_there_is(rows):
    assert "## Each step" not in report.document("tp", _of(rows, "tp"), {})
    assert "xlnet_x2" in report.document("tp", _of(rows, "tp"), {})
    small = report.document("pi", _of(rows, "pi"), {})
    assert "| mlp | 417.0 | 75.9 | 74.3 | 0.979 |" in small and "geomean" not in small


def test_the_record_has_a_page():
    record = json.loads((ROOT / "ci" / "gpu_record.json").read_text())
    for suite in {case["suite"] for case in record["cases"]}:
        assert report.document(suite, _of(record["cases"], suite), {})


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (8192, "8 KiB"), (15335424, "14.62 MiB"), (3 * 2**30, "3 GiB")],
)
def test_sizes(size, text):
    assert report.bytes_text(size) == text


def test_plots(rows, tmp_path):
    pytest.importorskip("matplotlib")
    from pygraph import plots

    assert list(plots.draw("paper", _of(rows, "paper"), tmp_path).values()) == [
        "paper-speedup.png",
        "paper-ablation.png",
    ]
    # Nothing is drawn of what was not measured.
    assert list(plots.draw("tp", _of(rows, "tp"), tmp_path).values()) == ["tp-speedup.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())


def test_bars_of_a_plot(rows):
    pytest.importorskip("matplotlib")
    from pygraph import plots

    figure = plots._speedup(report.in_order(_of(rows, "paper")))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["EOS", "DALLE2", "DLRM", "XLNET-I", "geomean"]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights[1][:4] == pytest.approx([1.0, 3.0, 0.0, 2.0833], abs=1e-3)
    # A result that is wrong is marked, not shown as slow.
    assert [text.get_text() for text in axes.texts] == ["x"]


def test_one_command_writes_all_that_follows_from_the_record(tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copytree(ROOT / "torch_overlay" / "benchmarks", tmp_path / "torch_overlay" / "benchmarks")
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "gpu_record", tmp_path / "ci")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copy(RESULTS, tmp_path / "ci" / "gpu_record.json")
    command = [sys.executable, str(tmp_path / "ci" / "gpu_record"), "--readme"]
    subprocess.run(command, check=True, capture_output=True)
    pages = tmp_path / "docs" / "measurements"
    found = {file.name for file in pages.iterdir()}
    assert {"paper.md", "paper-speedup.png", "tp.md", "tp-speedup.png", "pi.md", "pi-speedup.png"} <= found
    written = (tmp_path / "README.md").read_text()
    assert "![Speed-up of suite paper](docs/measurements/paper-speedup.png)" in written
    before, after = ((ROOT / "README.md").read_text(), written)
    for border in ("## Build", "## Limits"):
        assert border in written
    assert before.partition("<!-- measurements")[0] == after.partition("<!-- measurements")[0]
    assert before.rpartition("measurements: end -->")[2] == after.rpartition("measurements: end -->")[2]
    # Again, nothing changes.
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "README.md").read_text() == written


def test_a_line_for_each_suite(rows):
    record = {
        "cases": rows,
        "tests": {"passed": 9, "failed": 0, "skipped": 1, "complete": True},
        "programs": [
            {"seed": 0, "programs": 10, "equal": 10, "passed": True},
            {"seed": 3, "programs": 20, "equal": 19, "passed": True, "inductors_causes": ["values"]},
            {"seed": 4, "programs": 5, "equal": 4, "passed": False, "causes": ["crash"]},
        ],
    }
    lines = report.overview(record, "docs").splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:5]}
    assert cells["[paper](docs/paper.md)"][:3] == ["3 of 5", "1.328 (1.042 to 1.500)", "1.160 (1.000 to 1.500)"]
    assert "start-up 1.10 of stock's" in cells["[paper](docs/paper.md)"][3]
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[-2].startswith("- Tests that need a GPU: 9 passed, 0 failed, 1 skipped")
    assert lines[-1].startswith(
        "- 35 random programs (seeds 0, 3, 4), 33 equal to eager; 2 differ; of torch.compile's own: values; "
        "seed 4 FAILED: crash"
    )
    assert report.overview({}) == ""


def test_readme_names_what_fails_and_the_page_why(rows):
    failing = next(row for row in rows if row.get("missed"))
    failing["explanation"] = "an explanation"
    text = report.readme({"cases": rows}, "docs/measurements")
    assert f"`{failing['name']}` ({'; '.join(failing['missed'])})" in text
    assert "an explanation" not in text and "an explanation" in report.document("paper", _of(rows, "paper"), {})
    assert "does not show" not in report.readme({"cases": [{**row, "missed": []} for row in rows]}, "docs")


def test_rows_say_when_and_where_they_were_measured(rows):
    cases = _of(rows, "paper")
    for case, date, sources in zip(cases, ("2026-11-03T10:00", "2026-11-01T10:00", "2026-11-03T10:00"), "aba"):
        case |= {"date": date, "device": "H200", "sources": 12 * sources + "0"}
    assert "| 2026-11-01 to 2026-11-03, H200 |" in report.overview({"cases": cases[:3]})
    assert "| 2026-11-01, H200 |" in report.overview({"cases": cases[1:2]})
    first, second, third = (f"`{case['name']}`" for case in cases[:3])
    # In the order of the paper.
    runs = f"- 2026-11-03, H200, {12 * 'a'}: {third}, {first}\n- 2026-11-01, H200, {12 * 'b'}: {second}\n"
    assert report.document("pi", cases[:3], {}).endswith(f"## Runs\n\n{runs}")


def test_tables_never_mix_devices(rows, tmp_path):
    cases = [{**row, "device": device} for row in _of(rows, "paper") for device in ("NVIDIA H100", "NVIDIA A100")]
    record = {"cases": [*cases, *_of(rows, "pi")]}
    suites = report.by_suite(record)
    assert list(suites) == ["paper-nvidia-h100", "paper-nvidia-a100", "pi"]
    assert all(len({row.get("device") for row in found}) == 1 for found in suites.values())
    text = report.readme(record, "docs")
    assert "![Speed-up of suite paper-nvidia-h100](docs/paper-nvidia-h100-speedup.png)" in text
    lines = [line for line in text.splitlines() if line.startswith("| NVIDIA ")]
    assert [line.split(" | ")[:3] for line in lines[:2]] == [
        ["| NVIDIA H100", "3 of paper", "1.33 (up to 1.50)"],
        ["| NVIDIA A100", "3 of paper", "1.33 (up to 1.50)"],
    ]
    # Captured by hand: not all of them.
    assert lines[0].split(" | ")[3:] == ["1.84 (up to 3.00)", "1.18 (up to 1.38), 2 workloads", "2.11 (up to 3.00) |"]
    assert "1.29 (up to 3.36)" in lines[2]


def test_readme_names_the_sources(rows):
    cases = [{**row, "sources": 64 * "a"} for row in _of(rows, "paper")]
    record = {"cases": cases, "tests": {"sources": 64 * "a", "complete": True, "passed": 1, "failed": 0, "skipped": 0}}
    assert f"All results are of the sources `{12 * 'a'}`." in report.readme(record, "docs")
    record["tests"]["sources"] = 64 * "b"
    assert "Results are of 2 sources." in report.readme(record, "docs")


def test_noise_is_on_the_page(rows):
    row = {"suite": "pi", "name": "a", "equal": True, "noise": 0.21, "missed": [], "stock_cg_us": 2.0, "pygraph_us": 1.0}
    page = report.document("pi", [row], {})
    assert "pass, noisy" in page and "- `a`: stock CUDA graphs' rounds spread over 21 %, twice" in page


def test_a_host_that_slows_down_is_noticed(rows):
    run = {"suite": "pi", "date": "2026-11-03T10:00", "device": "H200", "missed": []}
    cases = [{**run, "name": name, "eager_loop_us": [4.0, 4.1]} for name in "abc"]
    assert report.slow_hosts(cases) == {}
    cases[1]["eager_loop_us"] = [4.0, 5.0]
    # Another run has another host.
    cases.append({**run, "name": "d", "date": "2026-11-04T10:00", "eager_loop_us": [9.0, 9.0]})
    assert report.slow_hosts(cases) == {"b": pytest.approx(1.25, abs=0.02)}
    assert "- `b`: the host was 1.2" in report.document("pi", cases, {})
    assert "The host was slower than usual, up to 1.2" in report.readme({"cases": cases}, "docs")


def test_memory_of_pools_is_on_the_page():
    pools = {"stock_cg": {"graphs": [20, 1], "others": [9, 6]}, "pygraph": {"graphs": [12, 0], "others": [15, 8]}}
    row = {"suite": "paper", "name": "a", "alone": {"pygraph": {}}, "pools_mib": pools, "equal": True}
    page = report.document("paper", [row, {**row, "name": "b", "pools_mib": {}}], {})
    assert "| a | - | - | - | - | 12 of 20 | 7 of 3 | - |" in page
    # A row without any of it is left out.
    assert "| b |" not in page[page.index("| a | - | - | - | - | 12 of 20") :]


def test_columns_of_the_suites():
    row = {"suite": "x", "name": "a", "no_cg_us": 20.0, "stock_cg_us": 12.0, "pygraph_us": 10.0, "equal": True}

    def header(**more):
        return report.format_table([{**row, **more}], markdown=True).splitlines()[0].split(" | ")

    assert "GPU values" not in header() and "JAX" not in header() and "copied" not in header()
    assert "GPU values" in header(gpu_us=9.0) and "best" in header(best="no_cg")
    assert report.also([{**row, "gpu_us": 8.0}]) == "+2.0 us over GPU values, at most +2.0 us"
    chosen = {**row, "candidates_us": {"no_cg": 20.0, "copy": 9.9}, "best": "copy", "choice": "node_update"}
    assert report.also([chosen]) == "0 of 1 chose the best; regret 1.01 %, at most 1.0 %"
    assert report.also([{**row, "jax_us": 15.0, "hand_written_us": 9.0}]) == (
        "1.50 times as fast as JAX (1); 0.90 times as fast as captured by hand (1)"
    )
    # By the run in which the two took turns.
    turns = {**row, "hand_written_us": 9.0, "pygraph_beside_hand_us": 9.0}
    assert report.also([turns]) == "1.00 times as fast as captured by hand (1)"
    assert report.speedup(turns, "pygraph", "stock_cg") == pytest.approx(1.2)
    # What is wrong is not fast.
    assert report.also([{**row, "jax_us": 15.0, "failed": {"jax": "wrong result"}, "gpu_us": 1.0, "equal": False}]) == "-"


def test_layers_and_musts_are_on_the_page_of_replay():
    layers = {"stock_cg": {"dynamo": 12.0, "host": 50.0}, "pygraph": {"dynamo": 11.0, "host": 20.0}}
    musts = [{"what": "a call: 19.0 us", "met": True}, {"what": "trees: 9.0 us", "met": False}]
    row = {"suite": "replay", "name": "linear_relu", "pygraph_us": 19.0, "equal": True, "layers": layers}
    page = report.document("replay", [{**row, "musts": musts, "missed": ["trees: 9.0 us"]}], {})
    assert "| linear_relu | 12.0 | 11.0 | - |" in page
    assert "- `linear_relu`: trees: 9.0 us" in page and "- `linear_relu`: a call: 19.0 us" in page


def test_rows_are_never_half_written(tmp_path):
    file = tmp_path / "rows.json"
    report.write_rows(file, [{"a": 1}])
    assert json.loads(file.read_text()) == [{"a": 1}] and [f.name for f in tmp_path.iterdir()] == ["rows.json"]


FIGURE8 = {
    "figure8": [
        {"parameters": 1, "ways": {"copies": {"us": 9.0, "latency_us": 12.0, "host_us": 8.0}, "table": {"us": 5.0}}},
        {"parameters": 256, "ways": {"copies": {"us": 300.0}, "table": {"error": "wrong result"}}},
    ],
    "crossovers": [{"faster": "table", "than": "copies", "by": "us", "from": 4}],
    "kernels": [
        {
            "model": "bert",
            "kernel": "triton_poi",
            "pointers": 3,
            "plain": {"registers": 20, "spilled_bytes": 0, "us": 2.5},
            "indirect": {"registers": 24, "spilled_bytes": 0, "us": 2.6},
        },
        {"model": "bert", "kernel": "triton_red", "error": "it has no indirect form"},
    ],
}


def test_what_a_suite_has_beside_rows_is_on_its_page(rows, tmp_path):
    page = report.document("bindings", _of(rows, "pi"), {}, FIGURE8)
    assert "| 1 | 9.0 | 5.0 |" in page and "| 256 | 300.0 | - |" in page
    assert "- `table` is faster than `copies` (in a row) from 4 inputs on." in page
    assert "| bert | triton_poi | 3 | 20 to 24 | 0 to 0 | 2.5 to 2.6 |  |" in page
    assert "it has no indirect form" in page

    pytest.importorskip("matplotlib")
    from pygraph import plots

    assert "bindings-figure8.png" in plots.draw("bindings", [], tmp_path, FIGURE8).values()
