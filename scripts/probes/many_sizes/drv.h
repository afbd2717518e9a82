// The driver API, loaded at run time, so that a stand-in can take its place.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#define STR_(x) #x
#define STR(x) STR_(x)
#define DRIVER_FUNCTIONS(X)                                                                      \
  X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuModuleLoad)        \
  X(cuModuleGetFunction) X(cuMemAlloc) X(cuMemcpyHtoD) X(cuMemcpyDtoH) X(cuMemsetD8)             \
  X(cuMemsetD8Async) X(cuStreamCreate) X(cuStreamSynchronize) X(cuStreamBeginCapture)            \
  X(cuStreamEndCapture) X(cuLaunchKernel) X(cuGraphGetNodes) X(cuGraphNodeGetType)               \
  X(cuGraphKernelNodeGetParams) X(cuGraphInstantiate) X(cuGraphExecKernelNodeSetParams)          \
  X(cuGraphMemsetNodeGetParams) X(cuGraphExecMemsetNodeSetParams)                                \
  X(cuGraphNodeSetEnabled) X(cuGraphLaunch) X(cuGraphUpload) X(cuGraphExecUpdate)                \
  X(cuGraphDestroy) X(cuGraphExecDestroy) X(cuEventCreate) X(cuEventRecord)                      \
  X(cuEventElapsedTime) X(cuFuncGetParamInfo) X(cuFuncGetName) X(cuKernelGetFunction)            \
  X(cuFuncGetModule) X(cuPointerGetAttribute) X(cuGetErrorName) X(cuGraphKernelNodeGetAttribute)

struct Driver {
#define FIELD(f) decltype(&::f) f##_ = nullptr;
  DRIVER_FUNCTIONS(FIELD)
#undef FIELD
  Driver() {
    const char* path = getenv("PROBE_LIBCUDA");
    void* lib = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!lib) throw std::runtime_error(dlerror());
#define LOAD(f) f##_ = (decltype(&::f))dlsym(lib, STR(f));
    DRIVER_FUNCTIONS(LOAD)
#undef LOAD
  }
};
inline Driver& drv() {
  static Driver d;
  return d;
}
inline std::string error_name(CUresult r) {
  const char* s = nullptr;
  if (drv().cuGetErrorName_) drv().cuGetErrorName_(r, &s);
  return s ? s : std::to_string((int)r);
}
#define CK(call)                                                                              \
  do {                                                                                        \
    CUresult r_ = (call);                                                                     \
    if (r_ != CUDA_SUCCESS) throw std::runtime_error(std::string(#call ": ") + error_name(r_)); \
  } while (0)
