// What it costs to set nodes of an instantiated graph, and what the next launch costs.
// One JSON object a line on stdout. Usage: setparams KERNELS.cubin SECONDS [libcudart]
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "drv.h"

using Clock = std::chrono::steady_clock;
static double us(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::micro>(b - a).count();
}
static double median(std::vector<double> v) {
  if (v.empty()) return NAN;
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}
static double p90(std::vector<double> v) {
  if (v.empty()) return NAN;
  std::nth_element(v.begin(), v.begin() + v.size() * 9 / 10, v.end());
  return v[v.size() * 9 / 10];
}

struct Args {
  CUdeviceptr x, o;
  long long n;
  int a, slot;
  char big[448];
};
struct Node {
  CUgraphNode node;
  CUDA_KERNEL_NODE_PARAMS params{};
  cudaKernelNodeParams rt{};
  Args args{};
  void* pointers[6];
  CUfunction functions[2];
  bool off = false;
};
static CUfunction F[3], SPIN;
static CUstream S;
static CUdeviceptr X[2], O;
static Clock::time_point START;
static double SECONDS = 1e9;

struct Graph {
  CUgraph graph{};
  CUgraphExec exec{};
  std::vector<Node> nodes;
};

static void fill(Node& node, int state, int slot) {
  node.args = Args{X[state], O, 7 + 2 * state, 3 + 2 * state, slot, {}};
  void* p[6] = {&node.args.x, &node.args.o, &node.args.n, &node.args.a, &node.args.slot, node.args.big};
  memcpy(node.pointers, p, sizeof p);
}

// The nodes point into themselves: `nodes` must not move afterwards.
static Graph build(int n, bool big, int state = 0) {
  Graph g;
  g.nodes.resize(n);
  CK(drv().cuStreamBeginCapture_(S, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int i = 0; i < n; ++i) {
    fill(g.nodes[i], state, i);
    CK(drv().cuLaunchKernel_(big ? F[2] : F[0], 8 + 4 * state, 1, 1, 128, 1, 1, 0, S, g.nodes[i].pointers, nullptr));
  }
  CK(drv().cuStreamEndCapture_(S, &g.graph));
  size_t count = n;
  std::vector<CUgraphNode> found(n);
  CK(drv().cuGraphGetNodes_(g.graph, found.data(), &count));
  if ((int)count != n) throw std::runtime_error("nodes lost");
  for (int i = 0; i < n; ++i) {
    Node& node = g.nodes[i];
    CK(drv().cuGraphKernelNodeGetParams_(found[i], &node.params));
    node.node = found[i];
    // The order of the nodes is that of their creation; their slot says so.
    node.args.slot = *(int*)node.params.kernelParams[4];
    node.params.kernelParams = node.pointers;
    node.params.extra = nullptr;
    if (!node.params.func && drv().cuKernelGetFunction_) {
      CUfunction f;
      CK(drv().cuKernelGetFunction_(&f, node.params.kern));
      node.params.func = f;
      node.params.kern = nullptr;
    }
    node.params.kern = nullptr;
    node.functions[0] = node.params.func;
    node.functions[1] = big ? node.params.func : F[1];
  }
  CK(drv().cuGraphInstantiate_(&g.exec, g.graph, 0));
  CK(drv().cuGraphUpload_(g.exec, S));
  CK(drv().cuStreamSynchronize_(S));
  return g;
}
static void destroy(Graph& g) {
  drv().cuGraphExecDestroy_(g.exec);
  drv().cuGraphDestroy_(g.graph);
}

static cudaError_t (*rt_get)(cudaGraphNode_t, cudaKernelNodeParams*);
static cudaError_t (*rt_set)(cudaGraphExec_t, cudaGraphNode_t, const cudaKernelNodeParams*);

enum What { PTR = 1, GRID = 2, INT = 4, FUNC = 8, BLOCK = 16, ENABLE = 32, SAME = 64, RUNTIME = 128, BIG = 256 };
struct Variant {
  const char* name;
  int what;
  bool fractions;
};

static void set(Graph& g, Node& node, int what, int state) {
  if (what & ENABLE) {
    node.off = state;
    CK(drv().cuGraphNodeSetEnabled_(g.exec, node.node, !state));
    return;
  }
  if (what & PTR) node.args.x = X[state];
  if (what & INT) node.args.n = 7 + 2 * state, node.args.a = 3 + 2 * state;
  if (what & RUNTIME) {
    if (what & GRID) node.rt.gridDim.x = 8 + 4 * state;
    cudaError_t e = rt_set((cudaGraphExec_t)g.exec, (cudaGraphNode_t)node.node, &node.rt);
    if (e != cudaSuccess) throw std::runtime_error("cudaGraphExecKernelNodeSetParams: " + std::to_string((int)e));
    return;
  }
  if (what & GRID) node.params.gridDimX = 8 + 4 * state;
  if (what & FUNC) node.params.func = node.functions[state];
  if (what & BLOCK) node.params.blockDimX = 128 << state, node.params.sharedMemBytes = 1024 * state;
  CK(drv().cuGraphExecKernelNodeSetParams_(g.exec, node.node, &node.params));
}

static int wrong_slots(Graph& g, const Variant& v) {
  int n = g.nodes.size(), wrong = 0;
  std::vector<float> got(n);
  CK(drv().cuMemsetD8_(O, 0xff, n * 4));
  CK(drv().cuGraphLaunch_(g.exec, S));
  CK(drv().cuStreamSynchronize_(S));
  CK(drv().cuMemcpyDtoH_(got.data(), O, n * 4));
  for (Node& node : g.nodes) {
    float have = got[node.args.slot];
    if (node.off) {
      wrong += !std::isnan(have);
      continue;
    }
    unsigned grid = v.what & RUNTIME ? node.rt.gridDim.x : node.params.gridDimX;
    float want = (node.args.x == X[1] ? 2 : 1) + node.args.a * 10 + node.args.n * 100 + grid * 1000.f;
    if (!(v.what & BIG) && node.params.func == F[1]) want += 100000.f;
    wrong += have != want;
  }
  return wrong;
}

static void measure(int n, const Variant& v, double fraction, int reps) {
  if (us(START, Clock::now()) > SECONDS * 1e6) {
    printf("{\"row\":\"skipped\",\"nodes\":%d,\"variant\":\"%s\",\"why\":\"out of time\"}\n", n, v.name);
    return;
  }
  Graph g;
  try {
    g = build(n, v.what & BIG);
    if (v.what & RUNTIME) {
      if (!rt_get || !rt_set) throw std::runtime_error("no libcudart");
      for (Node& node : g.nodes) {
        cudaError_t e = rt_get((cudaGraphNode_t)node.node, &node.rt);
        if (e != cudaSuccess) throw std::runtime_error("cudaGraphKernelNodeGetParams: " + std::to_string((int)e));
        node.rt.kernelParams = node.pointers;
      }
    }
    std::vector<int> chosen;
    int step = fraction > 0 ? (int)std::lround(1 / fraction) : n + 1;
    if (fraction > 0)
      for (int i = 0; i < n; i += step) chosen.push_back(i);
    int state = 0;
    auto change = [&] {
      if (!(v.what & SAME)) state ^= 1;
      for (int i : chosen) set(g, g.nodes[i], v.what, state);
    };
    std::vector<double> set_idle, launch_idle, done, set_busy, launch_busy, device, device_all;
    static CUevent e0, e1;
    if (!e0) {
      CK(drv().cuEventCreate_(&e0, CU_EVENT_DEFAULT));
      CK(drv().cuEventCreate_(&e1, CU_EVENT_DEFAULT));
    }
    // The device is idle.
    for (int r = -20; r < reps; ++r) {
      auto t0 = Clock::now();
      change();
      auto t1 = Clock::now();
      CK(drv().cuGraphLaunch_(g.exec, S));
      auto t2 = Clock::now();
      CK(drv().cuStreamSynchronize_(S));
      auto t3 = Clock::now();
      if (r < 0) continue;
      set_idle.push_back(us(t0, t1));
      launch_idle.push_back(us(t1, t2));
      done.push_back(us(t1, t3));
    }
    // The previous launch is in flight. At most 8 launches are queued.
    for (int r = -8; r < reps; ++r) {
      auto t0 = Clock::now();
      change();
      auto t1 = Clock::now();
      CK(drv().cuGraphLaunch_(g.exec, S));
      auto t2 = Clock::now();
      if (r >= 0 && r % 8 != 0) {
        set_busy.push_back(us(t0, t1));
        launch_busy.push_back(us(t1, t2));
      }
      if (r % 8 == 7) CK(drv().cuStreamSynchronize_(S));
    }
    CK(drv().cuStreamSynchronize_(S));
    // The device's time alone: a kernel spins until everything is queued.
    long long spin_ns = 200000 + 1000LL * n;
    for (int r = -3; r < std::min(reps, 60); ++r) {
      change();
      void* spin_args[] = {&spin_ns};
      CK(drv().cuLaunchKernel_(SPIN, 1, 1, 1, 1, 1, 1, 0, S, spin_args, nullptr));
      CK(drv().cuEventRecord_(e0, S));
      CK(drv().cuGraphLaunch_(g.exec, S));
      CK(drv().cuEventRecord_(e1, S));
      CK(drv().cuStreamSynchronize_(S));
      float ms = 0;
      CK(drv().cuEventElapsedTime_(&ms, e0, e1));
      if (r >= 0) device.push_back(ms * 1e3);
    }
    int wrong = wrong_slots(g, v);
    int k = std::max<int>(chosen.size(), 1);
    printf(
        "{\"row\":\"set\",\"nodes\":%d,\"variant\":\"%s\",\"fraction\":%.2f,\"set_nodes\":%zu,\"reps\":%d,"
        "\"set_us_node\":%.4f,\"set_us_node_p90\":%.4f,\"set_us_node_in_flight\":%.4f,\"launch_host_us\":%.2f,"
        "\"launch_host_us_in_flight\":%.2f,\"launch_to_done_us\":%.2f,\"device_us\":%.2f,\"wrong_slots\":%d}\n",
        n, v.name, fraction, chosen.size(), reps, median(set_idle) / k, p90(set_idle) / k, median(set_busy) / k,
        median(launch_idle), median(launch_busy), median(done), median(device), wrong);
  } catch (const std::exception& e) {
    printf("{\"row\":\"error\",\"nodes\":%d,\"variant\":\"%s\",\"error\":\"%s\"}\n", n, v.name, e.what());
  }
  fflush(stdout);
  if (g.exec) destroy(g);
}

// cuGraphExecUpdate of the whole graph, for comparison.
static void exec_update(int n, int reps) {
  try {
    Graph a = build(n, false, 0), b = build(n, false, 1);
    std::vector<double> t, launch;
    for (int r = 0; r < reps; ++r) {
      CUgraphExecUpdateResultInfo info;
      auto t0 = Clock::now();
      CK(drv().cuGraphExecUpdate_(a.exec, r & 1 ? a.graph : b.graph, &info));
      auto t1 = Clock::now();
      CK(drv().cuGraphLaunch_(a.exec, S));
      auto t2 = Clock::now();
      CK(drv().cuStreamSynchronize_(S));
      t.push_back(us(t0, t1));
      launch.push_back(us(t1, t2));
    }
    printf("{\"row\":\"exec_update\",\"nodes\":%d,\"set_us_node\":%.4f,\"launch_host_us\":%.2f}\n", n, median(t) / n, median(launch));
    destroy(a);
    destroy(b);
  } catch (const std::exception& e) {
    printf("{\"row\":\"error\",\"nodes\":%d,\"variant\":\"exec_update\",\"error\":\"%s\"}\n", n, e.what());
  }
  fflush(stdout);
}

// A memset's address and width.
static void memsets(int n, int reps, CUcontext context) {
  try {
    CUgraph graph;
    CUgraphExec exec;
    CK(drv().cuStreamBeginCapture_(S, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (int i = 0; i < n; ++i) CK(drv().cuMemsetD8Async_(O + 1024 * i, 1, 512, S));
    CK(drv().cuStreamEndCapture_(S, &graph));
    size_t count = n;
    std::vector<CUgraphNode> nodes(n);
    CK(drv().cuGraphGetNodes_(graph, nodes.data(), &count));
    std::vector<CUDA_MEMSET_NODE_PARAMS> params(n);
    for (int i = 0; i < n; ++i) CK(drv().cuGraphMemsetNodeGetParams_(nodes[i], &params[i]));
    CK(drv().cuGraphInstantiate_(&exec, graph, 0));
    std::vector<double> t, launch;
    for (int r = 0; r < reps; ++r) {
      auto t0 = Clock::now();
      for (int i = 0; i < n; ++i) {
        params[i].dst = O + 1024 * i + 256 * (r & 1);
        params[i].width = (r & 1 ? 256 : 512) / params[i].elementSize;
        CK(drv().cuGraphExecMemsetNodeSetParams_(exec, nodes[i], &params[i], context));
      }
      auto t1 = Clock::now();
      CK(drv().cuGraphLaunch_(exec, S));
      auto t2 = Clock::now();
      CK(drv().cuStreamSynchronize_(S));
      t.push_back(us(t0, t1));
      launch.push_back(us(t1, t2));
    }
    printf("{\"row\":\"memset\",\"nodes\":%d,\"set_us_node\":%.4f,\"launch_host_us\":%.2f}\n", n, median(t) / n, median(launch));
  } catch (const std::exception& e) {
    printf("{\"row\":\"error\",\"nodes\":%d,\"variant\":\"memset\",\"error\":\"%s\"}\n", n, e.what());
  }
  fflush(stdout);
}

int main(int argc, char** argv) {
  START = Clock::now();
  if (argc > 2) SECONDS = atof(argv[2]);
  try {
    if (argc > 3) {
      if (void* lib = dlopen(argv[3], RTLD_NOW | RTLD_LOCAL)) {
        rt_get = (decltype(rt_get))dlsym(lib, "cudaGraphKernelNodeGetParams");
        rt_set = (decltype(rt_set))dlsym(lib, "cudaGraphExecKernelNodeSetParams");
      }
    }
    CK(drv().cuInit_(0));
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CK(drv().cuDeviceGet_(&device, 0));
    CK(drv().cuDevicePrimaryCtxRetain_(&context, device));
    CK(drv().cuCtxSetCurrent_(context));
    CK(drv().cuModuleLoad_(&module, argv[1]));
    CK(drv().cuModuleGetFunction_(&F[0], module, "k0"));
    CK(drv().cuModuleGetFunction_(&F[1], module, "k1"));
    CK(drv().cuModuleGetFunction_(&F[2], module, "b0"));
    CK(drv().cuModuleGetFunction_(&SPIN, module, "spin"));
    CK(drv().cuStreamCreate_(&S, CU_STREAM_NON_BLOCKING));
    CK(drv().cuMemAlloc_(&O, 1 << 20));
    for (int i = 0; i < 2; ++i) {
      float value = 1 + i;
      CK(drv().cuMemAlloc_(&X[i], 4096));
      CK(drv().cuMemcpyHtoD_(X[i], &value, 4));
    }
    const Variant variants[] = {
        {"a_pointers", PTR, true},
        {"b_pointers_grid", PTR | GRID, false},
        {"c_words_grid", PTR | GRID | INT, true},
        {"d_words_grid_function", PTR | GRID | INT | FUNC, true},
        {"e_enabled", ENABLE, true},
        {"d2_words_grid_function_block_shared", PTR | GRID | INT | FUNC | BLOCK, false},
        {"c_struct_of_448_bytes", PTR | GRID | INT | BIG, false},
        {"nothing_changes", SAME, false},
        {"c_by_runtime_api", PTR | GRID | INT | RUNTIME, false},
    };
    // The decisive rows first: a run out of time loses the others.
    for (int pass = 0; pass < 2; ++pass)
      for (int n : {150, 700, 50})
        for (const Variant& v : variants) {
          int reps = n > 500 ? 200 : 300;
          if (pass == 0) {
            if (&v == variants) measure(n, {"none", SAME, true}, 0, reps);
            measure(n, v, 1, reps);
          } else if (v.fractions) {
            measure(n, v, 0.1, reps);
          }
        }
    for (int n : {50, 150, 700}) exec_update(n, 200);
    memsets(50, 200, context);
    printf("{\"row\":\"end\",\"seconds\":%.2f}\n", us(START, Clock::now()) / 1e6);
  } catch (const std::exception& e) {
    printf("{\"row\":\"fatal\",\"error\":\"%s\"}\n", e.what());
    return 1;
  }
}
