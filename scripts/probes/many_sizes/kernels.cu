// Each kernel writes to its slot what it was launched with, so that every update can be checked.
struct Big { char bytes[448]; };
extern "C" __global__ void k0(const float* x, float* o, long long n, int a, int slot) {
  if (threadIdx.x == 0 && blockIdx.x == 0) o[slot] = x[0] + a * 10 + n * 100 + gridDim.x * 1000.f;
}
extern "C" __global__ void k1(const float* x, float* o, long long n, int a, int slot) {
  if (threadIdx.x == 0 && blockIdx.x == 0) o[slot] = x[0] + a * 10 + n * 100 + gridDim.x * 1000.f + 100000.f;
}
// As a library kernel: parameters in one struct passed by value.
extern "C" __global__ void b0(const float* x, float* o, long long n, int a, int slot, Big big) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    o[slot] = x[0] + a * 10 + n * 100 + gridDim.x * 1000.f + big.bytes[a] * 0.f;
}
extern "C" __global__ void spin(long long ns) {
  long long t0, t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); } while (t - t0 < ns);
}
