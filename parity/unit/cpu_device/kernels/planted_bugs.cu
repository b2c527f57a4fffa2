// planted_bugs.cu    one mistake per kernel; parity/unit/cpu_device/test_planted_bugs.py says how each must be reported
// launch   one block of 64 threads unless the test says otherwise
#include "mma.cuh"

extern "C" __global__ void correct(float *y) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = t;
  __syncthreads();
  y[t] = s[63 - t];
}

// ---- synchronisation ----

extern "C" __global__ void barrier_in_branch(float *y) {
  if (threadIdx.x < 32) __syncthreads();
  y[threadIdx.x] = 1;
  __syncthreads();
}

extern "C" __global__ void barrier_never_complete(float *y) {
  if (threadIdx.x % 32 < 16) __syncwarp();
  else { __syncthreads(); }
  y[0] = 1;
}

extern "C" __global__ void shuffle_in_branch(float *y) {
  float v = threadIdx.x;
  if (threadIdx.x % 2) v += __shfl_xor_sync(0xffffffffu, v, 2);
  y[threadIdx.x] = v;
}

extern "C" __global__ void shuffle_outside_mask(float *y) {
  float v = threadIdx.x;
  v += __shfl_xor_sync(0xffffu, v, 1);
  y[threadIdx.x] = v;
}

extern "C" __global__ void shuffle_with_exited_lane(float *y) {
  if (threadIdx.x % 32 == 7) return;
  y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
}

extern "C" __global__ void mma_in_half_a_warp(float *y) {
  float d[4] = {};
  unsigned a[4] = {}, b[2] = {};
  if (threadIdx.x % 32 < 16) mma_m16n8k16_bf16(d, a, b);
  y[threadIdx.x] = d[0];
}

extern "C" __global__ void copy_without_wait(const float *x, float *y) {
  __shared__ __align__(16) float s[4];
  if (threadIdx.x == 0) {
    cp_async_16(s, x, 16);
    cp_async_commit();
  }
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x & 3];
  if (threadIdx.x == 0) cp_async_wait<0>();
}

// ---- races and initialisation ----

extern "C" __global__ void race_across_warps(float *y) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = t;
  y[t] = s[63 - t];
}

extern "C" __global__ void race_in_a_warp(float *y) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = t;
  y[t] = s[t ^ 1];
}

extern "C" __global__ void race_on_reuse(float *y) {
  __shared__ float s[64];
  int t = threadIdx.x;
  for (int i = 0; i < 2; i++) {
    s[t] = t + i;
    __syncthreads();
    y[t] = s[63 - t];
  }
}

extern "C" __global__ void read_of_unwritten(float *y) {
  __shared__ float s[64];
  if (threadIdx.x > 5) s[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}

// ---- bounds and undefined behaviour ----

extern "C" __global__ void write_past_tensor(float *y, int n) { y[threadIdx.x + (threadIdx.x == 63 ? 1 : 0)] = 1.f; }

extern "C" __global__ void read_before_tensor(const float *x, float *y) { y[threadIdx.x] = x[(int)threadIdx.x - 1]; }

extern "C" __global__ void atomic_past_tensor(int *counters) { atomicAdd(counters + threadIdx.x, 1); }

extern "C" __global__ void past_dynamic_shared(float *y) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x + 1] = 1.f;
  __syncthreads();
  y[threadIdx.x] = dynamic[threadIdx.x + 1];
}

extern "C" __global__ void past_static_shared(float *y, int shift) {
  __shared__ float s[64];
  __shared__ float neighbour[64];
  s[threadIdx.x] = neighbour[threadIdx.x] = 0;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x + shift];
}

extern "C" __global__ void null_pointer(float *y, int *p) { y[threadIdx.x] = *p; }

extern "C" __global__ void misaligned_vector(const float *x, float *y) {
  float4 v = *reinterpret_cast<const float4 *>(x + 1 + threadIdx.x);
  y[threadIdx.x] = v.x + v.w;
}

extern "C" __global__ void shift_too_far(int *y, int n) { y[threadIdx.x] = 1 << (n + threadIdx.x); }

__device__ __noinline__ int recurse(int n, volatile int *q) {
  volatile int a[1000];
  a[n % 1000] = n;
  return n ? recurse(n - 1, a) + q[0] + a[n % 1000] : 0;
}

extern "C" __global__ void stack_overflow(float *y, int n) {
  volatile int zero = 0;
  y[threadIdx.x] = recurse(n, &zero);
}

extern "C" __global__ void failed_assert(float *y, int n) {
  assert(threadIdx.x < (unsigned)n);
  y[threadIdx.x] = 0;
}

// ---- correct, for the atomics ----

extern "C" __global__ void atomic_sums(int *counters, float *total) {
  atomicAdd(counters, 1);
  atomicAdd(total, 1.0f);
  atomicMax(counters + 1, (int)threadIdx.x);
  atomicCAS(counters + 2, 0, (int)threadIdx.x + 1);
}
