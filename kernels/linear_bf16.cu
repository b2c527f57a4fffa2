// linear_bf16.cu    y[t,n] = scale * sum_k x[t,k] w[n,k], w in bf16
// twin     reference/linear.py::Linear            tests  pytest parity/test_operations_dense.py -k linear_bf16
// tensors  x [T, K] bf16, rows x_stride elements apart | w [N, K] bf16 | y [T, N] fp32 or bf16: one of the two pointers is null
// numerics fp32 accumulation (linear.cuh); rounded_first: the sum is rounded to bf16 before the scale; a bf16 y is rounded
//          at the store
// launch   naive: grid = (T, ceil(N / 128)), block = 128 | thin: grid = (T, ceil(N / 32)), block = 128
//          mma: grid = (ceil(T / 64), ceil(N / 64)), block = 128
// variants 0 naive: a thread per output, kept as second oracle | 1 thin: eight lanes per 2 outputs, for few tokens | 2 mma tiles
#include "linear.cuh"

struct Bf16Weight {
  static constexpr bool TILE_SCALE = false;
  const __nv_bfloat16 *w;
  int K;
  bool aligned;
  __device__ __forceinline__ float at(int n, int k) const { return from_bf16(w[(size_t)n * K + k]); }
  __device__ __forceinline__ void eight(float (&v)[8], int n, int k) const { row_8(v, w + (size_t)n * K, k, K, aligned); }
  __device__ __forceinline__ void codes(float (&v)[8], int n, int k) const { eight(v, n, k); }
  __device__ __forceinline__ float tile_scale(int, int) const { return 1.f; }
};

struct Output {
  float *y_fp32;
  __nv_bfloat16 *y_bf16;
  int N, rounded_first;
  float scale;
  __device__ __forceinline__ void store(int t, int n, float sum) const {
    const float v = (rounded_first ? round_bf16(sum) : sum) * scale;
    if (y_bf16) y_bf16[(size_t)t * N + n] = to_bf16(v);
    else y_fp32[(size_t)t * N + n] = v;
  }
};

extern "C" __global__ void __launch_bounds__(128)
linear_bf16_naive(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                  __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  const int t = blockIdx.x, n = blockIdx.y * 128 + threadIdx.x;
  if (n >= N) return;
  const Bf16Weight weight{w, K, false};
  Output{y_fp32, y_bf16, N, rounded_first, scale}.store(t, n, naive_dot(x + t * x_stride, weight, n, K));
}

extern "C" __global__ void __launch_bounds__(THIN_THREADS)
linear_bf16_thin(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                 __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  const int t = blockIdx.x;
  const Output output{y_fp32, y_bf16, N, rounded_first, scale};
  thin_product(x + t * x_stride, rows_aligned(x, x_stride), Bf16Weight{w, K, rows_aligned(w, K)}, thin_first_row(), N, K,
               [&](int n, float sum) { output.store(t, n, sum); });
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)
linear_bf16_mma(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  const int m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
  const DenseRows rows{x + m0 * x_stride, x_stride, T - m0, rows_aligned(x, x_stride)};
  const Output output{y_fp32, y_bf16, N, rounded_first, scale};
  tile_product(rows, Bf16Weight{w, K, rows_aligned(w, K)}, n0, N, K,
               [&](int m, int n, float sum) { output.store(m0 + m, n0 + n, sum); });
}
