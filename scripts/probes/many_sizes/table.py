"The short table of a combined result. `table.py sizes_probe.json` prints it again."

import itertools
import json
import sys


def runs(kinds):
    "KKKSK as K3 S K."
    return " ".join(k + (str(n) if n > 1 else "") for k, n in ((k, len(list(g))) for k, g in itertools.groupby(kinds)))


def varying(positions):
    more = [len(p["functions"]) for p in positions if len(p["functions"]) > 1]
    attributes = sum(len({a for f in p["functions"] for a in f["attributes"]}) > 1 for p in positions)
    return (
        f"{len(more)} nodes have several functions (at most {max(more, default=1)}), {attributes} several attributes;"
    )


def num(x, digits=2):
    return "-" if x is None or x != x else f"{x:.{digits}f}"


def setparams(part):
    rows = [r for r in part.get("rows", []) if r["row"] == "set"]
    yield "SetParams (driver API, C++); us a node: device idle / launch in flight; launch: host us idle (in flight), device us; wrong = slots that did not take effect"
    base = {r["nodes"]: r for r in rows if r["variant"] == "none"}
    for r in sorted(rows, key=lambda r: (r["nodes"], r["fraction"])):
        b = base.get(r["nodes"], r)
        yield (
            f"  {r['nodes']:4d} nodes {100 * r['fraction']:4.0f} % {r['variant']:36s} {num(r['set_us_node'], 3)} / {num(r['set_us_node_in_flight'], 3)}"
            f"  launch {num(r['launch_host_us'], 1)} ({num(r['launch_host_us_in_flight'], 1)}), more than none {num(r['launch_host_us'] - b['launch_host_us'], 1)}"
            f"  device {num(r['device_us'], 1)}, more {num(r['device_us'] - b['device_us'], 1)}  wrong {r['wrong_slots']}"
        )
    for r in part.get("rows", []):
        if r["row"] in ("exec_update", "memset"):
            yield f"  {r['nodes']:4d} nodes {r['row']}: {num(r['set_us_node'], 3)} us a node, launch {num(r['launch_host_us'], 1)}"
    worst = [
        r["set_us_node"]
        for r in rows
        if r["variant"] in ("c_words_grid", "b_pointers_grid", "c_struct_of_448_bytes") and r["fraction"] == 1
    ]
    if worst:
        yield f"  DECISION setparams: words and grid cost at most {max(worst):.3f} us a node -> {'STOP (> 1.5)' if max(worst) > 1.5 else 'go on (<= 1.5)'}"
    func = [r["set_us_node"] for r in rows if r["variant"].startswith("d") and r["fraction"] == 1]
    if func:
        yield f"  with another function at most {max(func):.3f} us a node"


def memo(part):
    yield f"Scratch capture of one library call (C++; medians, us); library {part.get('built')}"
    for name, e in part.get("cases", {}).items():
        if not e.get("sizes"):
            yield f"  {name:36s} failed: {e.get('run_error') or e.get('cold_failures') or e.get('never_ran_error')}"
            continue
        c, a = e["cold_us"], e["again_us"]
        yield (
            f"  {name:36s} new size {num(c['total'], 1)} (op {num(c['op'], 1)}, read {num(c['read'], 1)}, max {num(e['cold_total_max_us'], 0)}), same size again {num(a['total'], 1)}, plain call {num(e['plain_later_us'], 1)}"
            f" (new {num(e['plain_first_us'], 1)}); {len(e['topologies'])} topologies {e['functions']} functions {e['function_and_cluster_sets']} with cluster; cold failures {e['cold_failure_count']}"
            + (f"; FIRST EVER: {e['never_ran_error'][:90]}" if e.get("never_ran_error") else "")
        )
        bad = {k: v for k, v in e["checks"].items() if v}
        if bad:
            yield f"      {bad}"
        for k, v in list(e.get("unexplained", {}).items())[:3]:
            yield f"      unexplained in {k[:90]}: {v}"
    if part.get("python"):
        yield f"  from Python: {part['python']}"


def topologies(title, part):
    yield title
    for name, e in part.get("compile", {}).items():
        yield f"  {name}: {e}"
    for name, e in part.get("configs", {}).items():
        if not e.get("sizes"):
            yield f"  {name:34s} nothing captured: {e.get('cold_failures', [])[:1]} {e.get('warm_failures', [])[:1]}"
            continue
        warm = e["warm_compared"]
        yield (
            f"  {name:34s} {e['sizes']:4d} sizes  TOPOLOGIES {e['topologies']:3d}  with attributes {e['topologies_with_attributes']:3d}  function sequences {e['function_sequences']:4d}  functions {e['functions']:3d}"
            f"  nodes {e['nodes']}  cold failures {e['cold_failure_count']}  cold = warm {sum(w['same_topology'] and w['same_functions'] and w['same_attributes'] for w in warm)}/{len(warm)}  {num(e['capture_and_dump_ms'])} ms"
        )
        for i, t in enumerate(e["topology_list"][:8]):
            positions = e["positions"].get(i, e["positions"].get(str(i), []))
            yield f"      {t['count']:4d} sizes: {varying(positions)} {runs(t['kinds'])}{'' if t['is_chain'] else ' NO CHAIN'} edges {t['edge_kinds']} of multiples {t['multiples']} e.g. {t['sizes'][:6]}"
    for name, e in part.get("transplants", {}).items():
        yield (
            f"  {name:34s} {e['pairs']} pairs: other topology {e['other_topology']}, EQUAL {e['equal']}, different {len(e['different'])}, set failed {len(e['set_failed'])}, launch failed {len(e['launch_failed'])};"
            f" attributes differ {e['attributes_differ']} (equal nonetheless {e['equal_despite_attributes']}); exec update {e['exec_update']}, with other attributes {e['exec_update_attributes']}; unstable uncaptured {e['uncaptured_unstable']}"
        )
        for kind in ("different", "set_failed", "launch_failed"):
            for x in e[kind][:2]:
                yield f"      {kind}: {str(x)[:330]}"


def cudnn(title, part):
    yield f"{title} (cuDNN {part.get('cudnn')}, {part.get('environment')}); ms of the first, second, third call at a new length"
    for name, e in part.get("cases", {}).items():
        captures = e["cold_captures"]
        failed = [c["error"] for c in captures if "error" in c]
        kernels = next(iter(e.get("kernels", {}).values()), [])
        yield (
            f"  {name:32s} {e['choice']:9s} {e['sizes']:3d} lengths  first {num(e.get('first_median_ms'), 3)} (max {num(e.get('first_max_ms'), 1)}, very first {num(e.get('very_first_ms'), 1)})"
            f"  second {num(e.get('second_median_ms'), 3)}  third {num(e.get('third_median_ms'), 3)}  cold captures {len(captures) - len(failed)} ok, {len(failed)} failed {failed[:1]}  kernels {[k[:40] for k in kernels]}"
        )


def lines(data):
    parts = data.get("parts", {})
    if "setparams" in parts:
        yield from setparams(parts["setparams"])
    if "memo" in parts:
        yield from memo(parts["memo"])
    for name in parts:
        if name.startswith("cudnn"):
            yield from cudnn(f"Attention by default: {name}", parts[name])
    for name in sorted(parts, key=lambda n: ("transplants" in n, n)):
        if name.startswith(("bert", "decode")):
            yield from topologies(
                name
                + (
                    ": a recording set to what another size launches"
                    if "transplants" in name
                    else ": topologies over sizes"
                ),
                parts[name],
            )
    for source in ("bert", "bert_compiled"):
        counts = {
            k: (e["topologies"], e["topologies_with_attributes"])
            for k, e in parts.get(source, {}).get("configs", {}).items()
            if e.get("sizes")
        }
        if counts:
            worst = max(c[0] for c in counts.values())
            yield f"  DECISION {source}: at most {worst} topologies ({max(c[1] for c in counts.values())} with attributes) -> {'STOP (> 8)' if worst > 8 else 'go on (<= 8)'}"
    entries = [e for name, part in parts.items() for e in part.get("transplants", {}).values()]
    if entries:
        same = sum(e["pairs"] - e["other_topology"] for e in entries)
        equal = sum(e["equal"] for e in entries)
        yield f"  DECISION memo by SetParams: {equal} of {same} pairs of one topology replay bitwise ({sum(e['pairs'] for e in entries) - same} pairs have another topology)"
    cold = [
        e["cold_us"]["total"]
        for e in parts.get("memo", {}).get("cases", {}).values()
        if e.get("sizes") and e["cold_us"]["total"]
    ]
    if cold:
        yield f"  DECISION memo cost: a signature at a new size takes {min(cold):.0f} to {max(cold):.0f} us (expected 15 to 30)"
    for name, part in parts.items():
        state = (
            []
            if part.get("complete")
            else ["INCOMPLETE"] + ([f"ended in: {part['current']}"] if part.get("current") else [])
        )
        state += [f"not reached: {part['not_reached']}"] if part.get("not_reached") else []
        errors = part.get("errors", [])
        if state or errors:
            yield f"part {name}: {' '.join(state)} {len(errors)} errors {[str(e.get('step', e.get('variant'))) + ': ' + str(e.get('error'))[:120] for e in errors[:4]]}"
    yield "ends: " + ", ".join(f"{k} {v}" for k, v in data.get("ends", {}).items())


if __name__ == "__main__":
    print("\n".join(lines(json.load(open(sys.argv[1])))))
