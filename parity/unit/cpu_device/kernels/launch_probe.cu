// launch_probe.cu    what the launcher's tests need: every scalar type, null pointers, an empty kernel of usual size
#include "mma.cuh"

using bf16 = __nv_bfloat16;
typedef unsigned char byte;

// Every number arrives; out [8] fp64
extern "C" __global__ void scalars(double *out, int i, unsigned u, long long l, size_t z, float f, double d, bool b, short s) {
  out[0] = i;
  out[1] = u;
  out[2] = (double)l;
  out[3] = (double)z;
  out[4] = f;
  out[5] = d;
  out[6] = b;
  out[7] = s;
}

// out[0] = which of the pointers are null, one bit each
extern "C" __global__ void __launch_bounds__(32) null_pointers(const bf16 *__restrict__ x, const byte *codes, const __nv_fp8_e4m3 *e4m3,
                                                              const __nv_fp8_e8m0 *e8m0, int *out) {
  if (threadIdx.x == 0) out[0] = (x == nullptr) | (codes == nullptr) << 1 | (e4m3 == nullptr) << 2 | (e8m0 == nullptr) << 3;
}

extern "C" __global__ void empty(const bf16 *x, const float *w, bf16 *y, const int *p, const int *r, const byte *s, int a,
                                 int b, int c, long long d, float e, float f) {}

// y[i] = x[i] through n floats of dynamic shared memory. block = 128
extern "C" __global__ void through_shared(const float *x, float *y, int n) {
  extern __shared__ __align__(16) float staging[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) staging[n - 1 - i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = staging[n - 1 - i];
}
