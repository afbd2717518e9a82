// One library call captured alone into a scratch graph, and its nodes' parameters read.
// const char* memo_case(op, dtype, m, n, k, b): JSON. See part_memo.py for the fields.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <vector>

#include "drv.h"

using Clock = std::chrono::steady_clock;
static double us(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::micro>(b - a).count();
}
static bool fake() {
  static bool f = getenv("PROBE_FAKE") != nullptr;
  return f;
}
static CUstream stream() {
  if (fake()) return nullptr;
  static c10::cuda::CUDAStream s = c10::cuda::getStreamFromPool();
  c10::cuda::setCurrentCUDAStream(s);
  return (CUstream)s.stream();
}
static c10::TensorOptions options(c10::ScalarType t) {
  return c10::TensorOptions().dtype(t).device(fake() ? c10::kCPU : c10::kCUDA);
}

constexpr int64_t AREA = 64 << 20;
static char* arena() {
  static at::Tensor& t = *new at::Tensor(at::zeros({AREA * 6}, options(at::kByte)));
  return (char*)t.data_ptr();
}
struct Operand {
  uint64_t base = 0, size = 0;
};
static at::Tensor place(std::vector<Operand>& operands, bool displaced, at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType t) {
  int i = operands.size();
  char* p = arena() + i * AREA + (displaced ? 4096 * (1 << i) : 0);
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  uint64_t bytes = (last + 1) * c10::elementSize(t);
  if (bytes > AREA - 4096 * 64) throw std::runtime_error("operand too large");
  operands.push_back({(uint64_t)p, bytes});
  return at::from_blob(p, sizes, strides, options(t));
}

struct Captured {
  std::vector<Operand> operands;
  std::vector<at::Tensor> outputs;
  struct Kernel {
    CUgraphNodeType type;
    CUfunction function = nullptr;
    unsigned grid[3]{}, block[3]{}, shared = 0, cluster[3]{};
    bool packed = false;
    std::vector<std::pair<size_t, std::string>> parameters;
  };
  std::vector<Kernel> nodes;
  double begin = 0, op = 0, end = 0, read = 0, destroy = 0, total = 0;
};

static const std::vector<std::pair<size_t, size_t>>& layout_of(CUfunction f) {
  static std::map<CUfunction, std::vector<std::pair<size_t, size_t>>> layouts;
  auto [it, is_new] = layouts.try_emplace(f);
  if (is_new) {
    size_t offset, size;
    while (drv().cuFuncGetParamInfo_(f, it->second.size(), &offset, &size) == CUDA_SUCCESS) it->second.emplace_back(offset, size);
  }
  return it->second;
}

static void read_nodes(CUgraph graph, Captured& c) {
  size_t count = 0;
  CK(drv().cuGraphGetNodes_(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  if (count) CK(drv().cuGraphGetNodes_(graph, nodes.data(), &count));
  for (CUgraphNode node : nodes) {
    Captured::Kernel k;
    CK(drv().cuGraphNodeGetType_(node, &k.type));
    if (k.type == CU_GRAPH_NODE_TYPE_KERNEL) {
      CUDA_KERNEL_NODE_PARAMS p;
      CK(drv().cuGraphKernelNodeGetParams_(node, &p));
      k.function = p.func;
      if (!k.function) CK(drv().cuKernelGetFunction_(&k.function, p.kern));
      unsigned g[] = {p.gridDimX, p.gridDimY, p.gridDimZ}, b[] = {p.blockDimX, p.blockDimY, p.blockDimZ};
      memcpy(k.grid, g, sizeof g);
      memcpy(k.block, b, sizeof b);
      k.shared = p.sharedMemBytes;
      CUlaunchAttributeValue v;
      if (drv().cuGraphKernelNodeGetAttribute_ && drv().cuGraphKernelNodeGetAttribute_(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &v) == CUDA_SUCCESS)
        k.cluster[0] = v.clusterDim.x, k.cluster[1] = v.clusterDim.y, k.cluster[2] = v.clusterDim.z;
      auto& layout = layout_of(k.function);
      char* block = nullptr;
      if (!p.kernelParams && p.extra) {
        k.packed = true;
        for (int i = 0; p.extra[i] != CU_LAUNCH_PARAM_END; i += 2)
          if (p.extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) block = (char*)p.extra[i + 1];
      }
      for (size_t i = 0; i < layout.size(); ++i) {
        char* at = p.kernelParams ? (char*)p.kernelParams[i] : block ? block + layout[i].first : nullptr;
        k.parameters.emplace_back(layout[i].first, at ? std::string(at, layout[i].second) : std::string());
      }
    }
    c.nodes.push_back(std::move(k));
  }
}

struct Case {
  std::string op;
  c10::ScalarType t;
  int64_t m, n, k, b;
};

// Makes the operands, which is not timed, and returns a function that makes the call.
static std::function<std::vector<at::Tensor>()> prepare(const Case& c, bool displaced, std::vector<Operand>& o) {
  auto t = c.t;
  if (c.op == "mm") {
    auto x = place(o, displaced, {c.m, c.k}, {c.k, 1}, t), w = place(o, displaced, {c.k, c.n}, {c.n, 1}, t), y = place(o, displaced, {c.m, c.n}, {c.n, 1}, t);
    return [=]() mutable { at::mm_out(y, x, w); return std::vector<at::Tensor>{}; };
  }
  if (c.op == "linear") {  // addmm with the weight transposed, as nn.Linear calls it.
    auto x = place(o, displaced, {c.m, c.k}, {c.k, 1}, t), w = place(o, displaced, {c.k, c.n}, {1, c.k}, t), y = place(o, displaced, {c.m, c.n}, {c.n, 1}, t), bias = place(o, displaced, {c.n}, {1}, t);
    return [=]() mutable { at::addmm_out(y, bias, x, w); return std::vector<at::Tensor>{}; };
  }
  if (c.op == "bmm") {
    auto x = place(o, displaced, {c.b, c.m, c.k}, {c.m * c.k, c.k, 1}, t), w = place(o, displaced, {c.b, c.k, c.n}, {c.k * c.n, 1, c.k}, t), y = place(o, displaced, {c.b, c.m, c.n}, {c.m * c.n, c.n, 1}, t);
    return [=]() mutable { at::bmm_out(y, x, w); return std::vector<at::Tensor>{}; };
  }
  // Attention: m queries, n keys, k heads of 64, batch b; laid out as (batch, length, head, 64).
  int64_t d = 64;
  auto make = [&](int64_t s) { return place(o, displaced, {c.b, c.k, s, d}, {s * c.k * d, d, c.k * d, 1}, t); };
  auto q = make(c.m), k = make(c.n), v = make(c.n);
  if (fake()) return [=] { return std::vector<at::Tensor>{at::scaled_dot_product_attention(q, k, v)}; };
  if (c.op == "flash")
    return [=] {
      auto r = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, false, false);
      return std::vector<at::Tensor>{std::get<0>(r), std::get<1>(r)};
    };
  std::optional<at::Tensor> bias;
  if (c.op == "efficient_bias") {
    int64_t s = (c.n + 15) / 16 * 16;
    bias = place(o, displaced, {c.b, c.k, c.m, c.n}, {c.m * s, 0, s, 1}, t);
  }
  return [=] {
    auto r = at::_scaled_dot_product_efficient_attention(q, k, v, bias, false);
    return std::vector<at::Tensor>{std::get<0>(r)};
  };
}

static Captured capture(const Case& c, bool displaced) {
  Captured result;
  auto call = prepare(c, displaced, result.operands);
  CUstream s = stream();
  CUgraph graph = nullptr;
  auto t0 = Clock::now();
  CK(drv().cuStreamBeginCapture_(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  auto t1 = Clock::now();
  std::string failed;
  try {
    result.outputs = call();
  } catch (const std::exception& e) {
    failed = std::string(e.what()).substr(0, 300);
  }
  auto t2 = Clock::now();
  CUresult ended = drv().cuStreamEndCapture_(s, &graph);
  auto t3 = Clock::now();
  if (!failed.empty()) throw std::runtime_error("in capture: " + failed);
  CK(ended);
  read_nodes(graph, result);
  auto t4 = Clock::now();
  CK(drv().cuGraphDestroy_(graph));
  auto t5 = Clock::now();
  result.begin = us(t0, t1), result.op = us(t1, t2), result.end = us(t2, t3), result.read = us(t3, t4), result.destroy = us(t4, t5);
  result.total = us(t0, t5);
  for (auto& y : result.outputs) result.operands.push_back({(uint64_t)y.data_ptr(), (uint64_t)y.nbytes()});
  return result;
}

static std::string quote(std::string s) {
  std::string r = "\"";
  for (char ch : s) {
    if (ch == '"' || ch == '\\') r += '\\';
    r += (unsigned char)ch < 32 ? ' ' : ch;
  }
  return r + "\"";
}

// How the parameters of two captures differ, node by node.
static void compare(std::ostream& os, const Captured& a, const Captured& b, bool pointers) {
  bool same = a.nodes.size() == b.nodes.size();
  for (size_t i = 0; same && i < a.nodes.size(); ++i) same = a.nodes[i].type == b.nodes[i].type;
  os << "{\"same_topology\":" << (same ? "true" : "false") << ",\"nodes\":[";
  for (size_t i = 0; same && i < a.nodes.size(); ++i) {
    auto &x = a.nodes[i], &y = b.nodes[i];
    bool launch = x.function == y.function && !memcmp(x.grid, y.grid, sizeof x.grid) && !memcmp(x.block, y.block, sizeof x.block) && x.shared == y.shared && !memcmp(x.cluster, y.cluster, sizeof x.cluster);
    os << (i ? "," : "") << "{\"same_launch\":" << (launch ? "true" : "false") << ",\"words\":[";
    int unexplained = 0, temporaries = 0, in_descriptors = 0;
    bool first = true;
    std::string where;
    for (size_t p = 0; x.function == y.function && p < x.parameters.size(); ++p) {
      const std::string &u = x.parameters[p].second, &v = y.parameters[p].second;
      std::vector<bool> covered(u.size());
      for (size_t at = 0; at + 8 <= u.size(); at += 4) {
        uint64_t wa, wb;
        memcpy(&wa, u.data() + at, 8);
        memcpy(&wb, v.data() + at, 8);
        bool found = false;
        for (size_t j = 0; j < a.operands.size() && j < b.operands.size() && !found; ++j) {
          auto &oa = a.operands[j], &ob = b.operands[j];
          if (wa < oa.base || wa > oa.base + oa.size || wa - oa.base != wb - ob.base) continue;
          found = true;
          // CUtensorMap: 128 bytes, aligned to 64; the address is its first word.
          bool descriptor = u.size() >= 128 && (x.parameters[p].first + at) % 64 == 0;
          in_descriptors += descriptor;
          for (int d = 0; d < 8; ++d) covered[at + d] = true;
          os << (first ? "" : ",") << "{\"operand\":" << j << ",\"delta\":" << wa - oa.base << ",\"parameter\":" << p << ",\"at\":" << at << ",\"parameter_size\":" << u.size() << ",\"aligned\":" << (at % 8 == 0 ? "true" : "false") << ",\"like_tma\":" << (descriptor ? "true" : "false") << "}";
          first = false;
        }
        if (found || !pointers || at % 8 || wa < (1ull << 32) || fake()) continue;
        unsigned kind = 0;
        if (drv().cuPointerGetAttribute_(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, wa) == CUDA_SUCCESS && kind == CU_MEMORYTYPE_DEVICE) ++temporaries;
      }
      for (size_t at = 0; at < u.size() && at < v.size(); ++at)
        if (u[at] != v[at] && !covered[at]) {
          ++unexplained;
          if (where.size() < 160) where += (where.empty() ? "" : " ") + std::to_string(p) + "+" + std::to_string(at);
        }
    }
    os << "],\"unexplained_bytes\":" << unexplained << ",\"unexplained_at\":" << quote(where) << ",\"other_device_pointers\":" << temporaries << ",\"words_like_tma\":" << in_descriptors << "}";
  }
  os << "]}";
}

static void times(std::ostream& os, const Captured& c) {
  os << "{\"begin\":" << c.begin << ",\"op\":" << c.op << ",\"end\":" << c.end << ",\"read\":" << c.read << ",\"destroy\":" << c.destroy << ",\"total\":" << c.total << "}";
}

// `runs` times uncaptured; host time of each call.
extern "C" const char* memo_run(const char* op, int dtype, int64_t m, int64_t n, int64_t k, int64_t b, int runs) {
  static std::string text;
  std::ostringstream os;
  try {
    std::vector<Operand> o;
    auto call = prepare({op, (c10::ScalarType)dtype, m, n, k, b}, false, o);
    stream();
    os << "{\"plain\":[";
    for (int i = 0; i < runs; ++i) {
      auto t0 = Clock::now();
      call();
      os << (i ? "," : "") << us(t0, Clock::now());
      if (!fake()) CK(drv().cuStreamSynchronize_(stream()));
    }
    os << "]}";
  } catch (const std::exception& e) {
    os.str("");
    os << "{\"error\":" << quote(std::string(e.what()).substr(0, 300)) << "}";
  }
  text = os.str();
  return text.c_str();
}

extern "C" const char* memo_case(const char* op, int dtype, int64_t m, int64_t n, int64_t k, int64_t b) {
  static std::string text;
  std::ostringstream os;
  Case c{op, (c10::ScalarType)dtype, m, n, k, b};
  try {
    Captured cold = capture(c, false), again = capture(c, false), moved = capture(c, true);
    os << "{\"cold\":";
    times(os, cold);
    os << ",\"again\":";
    times(os, again);
    os << ",\"nodes\":[";
    for (size_t i = 0; i < cold.nodes.size(); ++i) {
      auto& x = cold.nodes[i];
      const char* name = "";
      if (x.function) drv().cuFuncGetName_(&name, x.function);
      size_t bytes = 0;
      for (auto& p : x.parameters) bytes += p.second.size();
      os << (i ? "," : "") << "{\"type\":" << (int)x.type << ",\"function\":" << quote(name) << ",\"grid\":[" << x.grid[0] << "," << x.grid[1] << "," << x.grid[2] << "],\"block\":" << x.block[0] << ",\"shared\":" << x.shared << ",\"cluster\":[" << x.cluster[0] << "," << x.cluster[1] << "," << x.cluster[2] << "],\"packed\":" << (x.packed ? "true" : "false") << ",\"parameters\":" << x.parameters.size() << ",\"bytes\":" << bytes << "}";
    }
    os << "],\"repeated\":";
    compare(os, cold, again, false);
    os << ",\"moved\":";
    compare(os, cold, moved, true);
    os << "}";
  } catch (const std::exception& e) {
    os.str("");
    os << "{\"error\":" << quote(e.what()) << "}";
  }
  text = os.str();
  return text.c_str();
}
