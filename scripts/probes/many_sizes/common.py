"Capture into a scratch graph, dump it, move its parameters into another one. Used by all parts."

import ctypes
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager


FAKE = os.environ.get("PROBE_FAKE") == "1"  # On the CPU, with made-up graphs.
OUT = os.environ.get("OUT", "sizes_probe_out")
START = time.monotonic()
BUDGET = float(os.environ.get("PART_BUDGET", "60"))

import torch  # noqa: E402


DEVICE = "cpu" if FAKE else "cuda"
if FAKE:
    import fake as cu

    torch.set_num_threads(1)
else:
    from cuda.bindings import driver as cu


def left(share=1.0):
    return share * BUDGET - (time.monotonic() - START)


def ck(result):
    if int(result[0]) != 0:
        raise RuntimeError(getattr(result[0], "name", str(result[0])))
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def short(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def clear_error():
    "Drops an error that a failed capture left for the next check to find."
    if not FAKE:
        try:
            ctypes.CDLL("libcudart.so.13").cudaGetLastError()
        except Exception:
            pass


class ContextLost(Exception):
    "Nothing more runs in this process."


class Result:
    "What a part found. It is written after each step, so that a crash loses one step at most."

    def __init__(self, part):
        part += os.environ.get("SUFFIX", "")
        self.path = os.path.join(OUT, f"part_{part}.json")
        self.data = {"part": part, "errors": [], "complete": False}
        if not FAKE:
            self.data["device"] = torch.cuda.get_device_name()
        self.data["torch"] = torch.__version__
        self.save()

    def save(self):
        self.data["seconds"] = round(time.monotonic() - START, 2)
        os.makedirs(OUT, exist_ok=True)
        with open(self.path + ".tmp", "w") as f:
            json.dump(self.data, f)
        os.replace(self.path + ".tmp", self.path)

    @contextmanager
    def step(self, name):
        "A step's failure is noted, and the next step runs."
        self.data["current"] = name
        self.save()
        try:
            yield
        except ContextLost:
            self.data["errors"].append({"step": name, "error": "the context is lost"})
            self.save()
            raise
        except Exception as error:
            self.data["errors"].append({"step": name, "error": short(error), "trace": traceback.format_exc()[-1500:]})
            print(f"  FAILED {name}: {short(error)}", flush=True)
        self.data["current"] = None
        self.save()

    def done(self):
        self.data["complete"] = True
        self.save()


def sync():
    if not FAKE:
        torch.cuda.synchronize()


class Scratch:
    "Captures functions on one stream, with one memory pool."

    def __init__(self):
        self.renew()

    def renew(self):
        if FAKE:
            return
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # Keeps the pool's memory between captures.
        self.holder = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            self.holder.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            torch.empty(1 << 20, device=DEVICE)
            torch.zeros(1, device=DEVICE)
            self.holder.capture_end()

    def run(self, fn, *args):
        "Uncaptured, on the stream of the captures: it makes workspaces and loads functions."
        if FAKE:
            return fn(*args)
        # The arguments come from another stream.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            out = fn(*args)
        torch.cuda.synchronize()
        return out

    def capture(self, fn, *args):
        "(graph, what fn returned). The graph has to stay alive while its nodes are used."
        if FAKE:
            return cu.capture(fn, *args)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                out = fn(*args)
            except BaseException:
                self.abandon(graph)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self.abandon(None)
                raise
        return graph, out

    def abandon(self, graph):
        "Ends a capture that failed, and leaves its stream and its pool."
        for end in (
            graph.capture_end if graph is not None else (lambda: None),
            lambda: torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool),
        ):
            try:
                end()
            except Exception:
                pass
        clear_error()
        self.old = getattr(self, "old", []) + [(self.stream, self.pool, self.holder, graph)]
        self.renew()


LAYOUTS = {}
NAMES = {}
FUNCTION_CLUSTERS = {}


def layout_of(function):
    key = int(function)
    if key not in LAYOUTS:
        layout = []
        while True:
            result = cu.cuFuncGetParamInfo(function, len(layout))
            if int(result[0]) != 0:
                break
            layout.append((int(result[1]), int(result[2])))
        LAYOUTS[key] = layout
        NAMES[key] = ck(cu.cuFuncGetName(function)).decode()
        cluster = []
        for axis in ("WIDTH", "HEIGHT", "DEPTH"):
            try:
                attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{axis}")
                cluster.append(int(ck(cu.cuFuncGetAttribute(attribute, function))))
            except Exception:
                cluster.append(-1)
        FUNCTION_CLUSTERS[key] = tuple(cluster)
    return LAYOUTS[key]


def read_parameters(params, layout):
    "[(offset, bytes)] of a kernel node."
    if params.kernelParams:
        pointers = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        addresses = [pointers[i] for i in range(len(layout))]
    elif params.extra:
        extra = ctypes.cast(int(params.extra), ctypes.POINTER(ctypes.c_void_p))
        i = block = 0
        while extra[i]:
            if extra[i] == 1:
                block = extra[i + 1]
            i += 2
        addresses = [block + offset for offset, _ in layout]
    else:
        return []
    return [(offset, ctypes.string_at(a, size)) for a, (offset, size) in zip(addresses, layout)]


# Attributes of a node that cuGraphExecKernelNodeSetParams does not take.
ATTRIBUTES = {
    "cluster": ("CLUSTER_DIMENSION", lambda v: (v.clusterDim.x, v.clusterDim.y, v.clusterDim.z)),
    "cluster_policy": ("CLUSTER_SCHEDULING_POLICY_PREFERENCE", lambda v: int(v.clusterSchedulingPolicyPreference)),
    "preferred_cluster": (
        "PREFERRED_CLUSTER_DIMENSION",
        lambda v: (v.preferredClusterDim.x, v.preferredClusterDim.y, v.preferredClusterDim.z),
    ),
    "cooperative": ("COOPERATIVE", lambda v: int(v.cooperative)),
    "pdl": ("PROGRAMMATIC_STREAM_SERIALIZATION", lambda v: int(v.programmaticStreamSerializationAllowed)),
    "carveout": ("PREFERRED_SHARED_MEMORY_CARVEOUT", lambda v: int(v.sharedMemCarveout)),
    "priority": ("PRIORITY", lambda v: int(v.priority)),
}


def attributes_of(node):
    found = []
    for name, (attribute, read) in ATTRIBUTES.items():
        try:
            value = read(
                ck(
                    cu.cuGraphKernelNodeGetAttribute(
                        node, getattr(cu.CUlaunchAttributeID, "CU_LAUNCH_ATTRIBUTE_" + attribute)
                    )
                )
            )
        except Exception:
            continue
        found.append((name, value))
    return tuple(found)


class Node:
    def __init__(self, node, kind):
        self.node, self.kind = node, kind
        self.function = self.name = self.grid = self.block = self.shared = None
        self.parameters, self.attributes, self.is_packed = [], (), False
        if kind == "KERNEL":
            p = self.params = ck(cu.cuGraphKernelNodeGetParams(node))
            function = p.func if int(p.func) else ck(cu.cuKernelGetFunction(p.kern))
            layout = layout_of(function)
            self.function, self.name = int(function), NAMES[int(function)]
            self.grid = (p.gridDimX, p.gridDimY, p.gridDimZ)
            self.block = (p.blockDimX, p.blockDimY, p.blockDimZ)
            self.shared = p.sharedMemBytes
            self.is_packed = not p.kernelParams and bool(p.extra)
            self.parameters = read_parameters(p, layout)
            self.attributes = attributes_of(node)
        elif kind == "MEMSET":
            self.params = ck(cu.cuGraphMemsetNodeGetParams(node))
        elif kind == "MEMCPY":
            self.params = ck(cu.cuGraphMemcpyNodeGetParams(node))


def raw_nodes(raw):
    graph = cu.CUgraph(raw)
    count = int(cu.cuGraphGetNodes(graph)[2])
    return graph, (cu.cuGraphGetNodes(graph, count)[1] if count else [])


class Dump:
    "A captured graph: nodes in the order of their creation, and edges by position."

    def __init__(self, captured):
        graph, nodes = raw_nodes(captured.raw_cuda_graph())
        self.nodes = []
        for node in nodes:
            kind = cu.cuGraphNodeGetType(node)[1].name.removeprefix("CU_GRAPH_NODE_TYPE_")
            self.nodes.append(Node(node, kind))
        position = {int(node): i for i, node in enumerate(nodes)}
        self.edges, self.edge_kinds, self.edge_error = (), Counter(), None
        try:
            result = cu.cuGraphGetEdges(graph)
            count = int(result[-1])
            if count:
                result = cu.cuGraphGetEdges(graph, count)
                ck(result[:1])
                self.edges = tuple(sorted((position[int(a)], position[int(b)]) for a, b in zip(result[1], result[2])))
                if len(result) > 4 and result[3]:
                    self.edge_kinds = Counter(str(getattr(e, "type", "?")) for e in result[3])
        except Exception as error:
            self.edge_error = short(error)

    @property
    def kinds(self):
        return "".join({"KERNEL": "K", "MEMSET": "S", "MEMCPY": "C"}.get(n.kind, "?") for n in self.nodes)

    @property
    def topology(self):
        return (self.kinds, self.edges)

    @property
    def functions(self):
        return tuple(n.function or 0 for n in self.nodes)

    @property
    def attributes(self):
        return tuple((n.attributes, FUNCTION_CLUSTERS.get(n.function)) for n in self.nodes)


def table(name):
    "A function's name, short enough for a table."
    return name if len(name) <= 140 else name[:100] + "..." + name[-37:]


class Topologies:
    "Counts topologies, functions and attributes over sizes."

    def __init__(self):
        self.topologies, self.strict, self.sequences = {}, {}, {}
        self.functions, self.by_size, self.ms, self.edge_errors = {}, {}, [], Counter()
        self.per_position = {}

    def add(self, size, dump, ms):
        self.ms.append(ms)
        t = self.topologies.setdefault(dump.topology, {"sizes": [], "edge_kinds": Counter()})
        t["sizes"].append(size)
        t["edge_kinds"].update(dump.edge_kinds)
        self.strict.setdefault((dump.topology, dump.attributes), []).append(size)
        self.sequences.setdefault((dump.topology, dump.functions), []).append(size)
        if dump.edge_error:
            self.edge_errors[dump.edge_error] += 1
        tid = list(self.topologies).index(dump.topology)
        self.by_size[size] = tid
        positions = self.per_position.setdefault(tid, [{} for _ in dump.nodes])
        for seen, node in zip(positions, dump.nodes):
            f = self.functions.setdefault(node.function, len(self.functions))
            e = seen.setdefault(
                f,
                {
                    "sizes": 0,
                    "first": size,
                    "attributes": set(),
                    "grids": set(),
                    "blocks": set(),
                    "shared": set(),
                    "packed": node.is_packed,
                    "parameter_bytes": sum(len(b) for _, b in node.parameters),
                },
            )
            e["sizes"] += 1
            e["attributes"].add(str((node.attributes, FUNCTION_CLUSTERS.get(node.function))))
            e["grids"].add(node.grid)
            e["blocks"].add(node.block)
            e["shared"].add(node.shared)

    def json(self):
        names = {v: table(NAMES.get(k, "(none)")) for k, v in self.functions.items()}
        return {
            "sizes": len(self.by_size),
            "topologies": len(self.topologies),
            "topologies_with_attributes": len(self.strict),
            "function_sequences": len(self.sequences),
            "functions": len(self.functions),
            "nodes": sorted({len(k[0]) for k in self.topologies}),
            "capture_and_dump_ms": round(statistics.median(self.ms), 3) if self.ms else None,
            "edge_errors": dict(self.edge_errors),
            "topology_list": [
                {
                    "kinds": k[0],
                    "edges": len(k[1]),
                    "is_chain": k[1] == tuple((i, i + 1) for i in range(len(k[0]) - 1)),
                    "edge_kinds": dict(v["edge_kinds"]),
                    "count": len(v["sizes"]),
                    "sizes": sorted(v["sizes"]),
                    "multiples": {m: sum(s % m == 0 for s in v["sizes"]) for m in (2, 4, 8, 16, 64)},
                }
                for k, v in self.topologies.items()
            ],
            "attribute_groups": [len(v) for v in self.strict.values()],
            "function_names": names,
            "positions": {
                tid: [
                    {
                        "position": i,
                        "functions": [
                            {
                                "f": f,
                                "sizes": e["sizes"],
                                "first": e["first"],
                                "attributes": sorted(e["attributes"]),
                                "distinct_grids": len(e["grids"]),
                                "blocks": sorted(map(str, e["blocks"])),
                                "shared": sorted(map(str, e["shared"])),
                                "packed": e["packed"],
                                "parameter_bytes": e["parameter_bytes"],
                            }
                            for f, e in seen.items()
                        ],
                    }
                    for i, seen in enumerate(positions)
                ]
                for tid, positions in self.per_position.items()
            },
        }

    def line(self):
        return (
            f"{len(self.by_size):4d} sizes {len(self.topologies):3d} topologies {len(self.strict):3d} with attributes "
            f"{len(self.sequences):4d} function sequences  nodes {sorted({len(k[0]) for k in self.topologies})}"
        )


def survey(result, name, make, fn, sizes, seconds, warm_sizes=(), check_warm=6, run_first=False):
    """
    Captures fn(*make(size)) at each size, mostly without having run it there, and counts topologies.
    """
    counts = Topologies()
    entry = result.data.setdefault("configs", {})[name] = {
        "cold_failures": [],
        "cold_failure_count": 0,
        "warm_compared": [],
    }
    scratch = Scratch()
    end = time.monotonic() + seconds
    with result.step(name):
        for size in warm_sizes:
            for _ in range(2):
                scratch.run(fn, *make(size))
        if warm_sizes:
            # The pool gets blocks of the largest size.
            scratch.capture(fn, *make(max(warm_sizes)))
        compared = failures = 0
        for size in sizes:
            if time.monotonic() > end or left() < 2:
                entry["out_of_time_at"] = size
                break
            args = make(size)
            if run_first:
                scratch.run(fn, *args)
            t0 = time.perf_counter()
            was_cold = True
            try:
                graph, _ = scratch.capture(fn, *args)
            except Exception as error:
                entry["cold_failure_count"] += 1
                failures += 1
                if len(entry["cold_failures"]) < 5:
                    entry["cold_failures"].append({"size": size, "error": short(error)})
                was_cold = False
                if failures > 8:
                    entry["stopped"] = "too many failed captures"
                    break
                try:
                    scratch.run(fn, *args)
                    graph, _ = scratch.capture(fn, *args)
                except Exception as again:
                    entry.setdefault("warm_failures", []).append({"size": size, "error": short(again)})
                    continue
            dump = Dump(graph)
            counts.add(size, dump, (time.perf_counter() - t0) * 1e3)
            if was_cold and compared < check_warm and not run_first:
                compared += 1
                scratch.run(fn, *args)
                warm, _ = scratch.capture(fn, *args)
                warm_dump = Dump(warm)
                entry["warm_compared"].append(
                    {
                        "size": size,
                        "same_topology": warm_dump.topology == dump.topology,
                        "same_functions": warm_dump.functions == dump.functions,
                        "same_attributes": warm_dump.attributes == dump.attributes,
                    }
                )
                del warm_dump, warm
            del dump, graph
    entry.update(counts.json())
    result.save()
    print(f"  {name:28s} {counts.line()}  cold failures {entry['cold_failure_count']}", flush=True)
    return counts


# --- A recording at one size, set to what another size launches ---


class Holder(list):
    "Keeps buffers that a call to the driver reads."


def set_node(executable, target, source, context=None):
    "Gives the node `target` of an executable what the node `source` launches."
    if source.kind == "KERNEL":
        keep = Holder(ctypes.create_string_buffer(b, len(b)) for _, b in source.parameters)
        pointers = (ctypes.c_void_p * max(len(keep), 1))(*map(ctypes.addressof, keep))
        p = source.params
        p.kernelParams = ctypes.addressof(pointers)
        p.extra = 0
        ck(cu.cuGraphExecKernelNodeSetParams(executable, target.node, p))
    elif source.kind == "MEMSET":
        ck(cu.cuGraphExecMemsetNodeSetParams(executable, target.node, source.params, context))
    elif source.kind == "MEMCPY":
        ck(cu.cuGraphExecMemcpyNodeSetParams(executable, target.node, source.params, context))


def launch(executable):
    if FAKE:
        return
    ck(cu.cuGraphLaunch(executable, torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)]


def equal(a, b):
    "Bitwise, for NaN too."
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b)
    )


def transplants(result, name, make, fn, sizes, seconds):
    """
    Instantiates the graph of each size, sets all its nodes to what another size of the same topology
    launches, launches it, and compares with the uncaptured run at that size.
    """
    entry = result.data.setdefault("transplants", {})[name] = {
        "pairs": 0,
        "other_topology": 0,
        "equal": 0,
        "equal_despite_attributes": 0,
        "different": [],
        "set_failed": [],
        "launch_failed": [],
        "exec_update": Counter(),
        "exec_update_attributes": Counter(),
        "attributes_differ": 0,
        "uncaptured_unstable": [],
    }
    scratch = Scratch()
    end = time.monotonic() + seconds
    held = {}
    with result.step("transplants " + name):
        context = None if FAKE else ck(cu.cuCtxGetCurrent())
        for size in sizes:
            args = make(size)
            want = [t.clone() for t in flat(scratch.run(fn, *args))]
            again = [t.clone() for t in flat(scratch.run(fn, *args))]
            if not equal(want, again):
                entry["uncaptured_unstable"].append(size)
            graph, out = scratch.capture(fn, *args)
            held[size] = (graph, Dump(graph), flat(out), want, args)
        # All sizes are captured: memory that one graph's outputs use may be reused only by itself.
        for b in sizes:
            graph_b, dump_b, out_b, want, _ = held[b]
            for a in sizes:
                if time.monotonic() > end or left() < 2:
                    entry["out_of_time"] = True
                    return
                graph_a, dump_a, _, _, _ = held[a]
                entry["pairs"] += 1
                if dump_a.kinds != dump_b.kinds or dump_a.edges != dump_b.edges:
                    entry["other_topology"] += 1
                    continue
                result.data["current"] = f"transplants {name} {a}->{b}"
                if entry["pairs"] % 10 == 1:
                    result.save()
                attributes_differ = dump_a.attributes != dump_b.attributes
                entry["attributes_differ"] += attributes_differ
                differs = [
                    {
                        "position": i,
                        "from": table(x.name or ""),
                        "to": table(y.name or ""),
                        "attributes": [str(x.attributes), str(y.attributes)],
                    }
                    for i, (x, y) in enumerate(zip(dump_a.nodes, dump_b.nodes))
                    if (x.attributes, FUNCTION_CLUSTERS.get(x.function))
                    != (y.attributes, FUNCTION_CLUSTERS.get(y.function))
                ][:3]
                executable = ck(cu.cuGraphInstantiate(cu.CUgraph(graph_a.raw_cuda_graph()), 0))
                try:
                    # Setting a node keeps its cluster. A kernel that needs another one ends the context.
                    if attributes_differ:
                        raise SetFailed(0, dump_a.nodes[0], dump_b.nodes[0], "not tried")
                    for i, (x, y) in enumerate(zip(dump_a.nodes, dump_b.nodes)):
                        try:
                            set_node(executable, x, y, context)
                        except Exception as error:
                            raise SetFailed(i, x, y, short(error)) from error
                    for t in out_b:
                        t.zero_()
                    sync()
                    launch(executable)
                    if equal(out_b, want) or FAKE:
                        entry["equal"] += 1
                        entry["equal_despite_attributes"] += attributes_differ
                    elif len(entry["different"]) < 40:
                        entry["different"].append({"pair": [a, b], "attributes_differ": differs})
                except SetFailed as failed:
                    if len(entry["set_failed"]) < 40:
                        entry["set_failed"].append({"pair": [a, b], "attributes_differ": differs, **failed.data})
                except Exception as error:
                    if len(entry["launch_failed"]) < 40:
                        entry["launch_failed"].append(
                            {"pair": [a, b], "error": short(error), "attributes_differ": differs}
                        )
                    clear_error()
                    try:
                        torch.zeros(1, device=DEVICE).item()
                    except Exception as lost:
                        raise ContextLost from lost
                finally:
                    cu.cuGraphExecDestroy(executable)
                # Does the driver's own update of the whole graph take it?
                executable = ck(cu.cuGraphInstantiate(cu.CUgraph(graph_a.raw_cuda_graph()), 0))
                try:
                    update = cu.cuGraphExecUpdate(executable, cu.CUgraph(graph_b.raw_cuda_graph()))
                    verdict = "ok"
                    if int(update[0]) != 0:
                        verdict = str(getattr(getattr(update[1], "result", update[0]), "name", update[0]))
                    else:
                        for t in out_b:
                            t.zero_()
                        sync()
                        launch(executable)
                        verdict = "equal" if equal(out_b, want) or FAKE else "different"
                    entry["exec_update_attributes" if attributes_differ else "exec_update"][verdict] += 1
                except Exception as error:
                    entry["exec_update"][short(error)] += 1
                finally:
                    cu.cuGraphExecDestroy(executable)
    result.save()


class SetFailed(Exception):
    def __init__(self, position, a, b, error):
        self.data = {
            "position": position,
            "from": table(a.name or ""),
            "to": table(b.name or ""),
            "error": error,
            "shared": [a.shared, b.shared],
            "block": [a.block, b.block],
        }


def print_transplants(name, entry):
    print(
        f"  {name:28s} {entry['pairs']} pairs: {entry['other_topology']} of another topology, {entry['equal']} equal, "
        f"{len(entry['different'])} different, set failed {len(entry['set_failed'])}, launch failed {len(entry['launch_failed'])}; "
        f"attributes differ in {entry['attributes_differ']} (equal nonetheless {entry['equal_despite_attributes']}); "
        f"exec update {dict(entry['exec_update'])}, with other attributes {dict(entry['exec_update_attributes'])}",
        flush=True,
    )


def restart(result, config):
    "Goes on with the next configuration in a new process, after the context was lost."
    result.save()
    environment = dict(os.environ, FIRST=str(config), SUFFIX=f"_from_{config}", PART_BUDGET=str(max(left(), 1)))
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


# --- Attention's backend ---


def backends(*names):
    "Allows these of flash, efficient, cudnn, math; 'default' allows all."
    if FAKE:
        names = ("default",)
    allow = set(names) if names != ("default",) else {"flash", "efficient", "cudnn", "math"}
    torch.backends.cuda.enable_flash_sdp("flash" in allow)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in allow)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in allow)
    torch.backends.cuda.enable_math_sdp("math" in allow)
