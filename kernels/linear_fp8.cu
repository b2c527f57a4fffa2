// linear_fp8.cu    y[t, g*N + n] = sum_k x[t, g*K + k] w[g*N + n, k] for each group g (one, but for wo_a)
// twin     reference/linear.py::Linear            tests  pytest parity/test_operations_dense.py -k linear_fp8
// tensors  x [T, groups * K] bf16, rows x_stride elements apart | y [T, groups * N] bf16
//          w [groups * N, K] e4m3 codes, packed | w_scale [ceil(groups * N / 128), ceil(K / 128)] e8m0, 1 per 128 x 128
// numerics fp32 accumulation (linear.cuh), one rounding to bf16 at the store. naive and thin: code times scale is exact in
//          fp32; mma: the codes are exact in bf16, every 64 columns' sum is multiplied by its scale (a power of two)
// launch   naive: grid = (T, ceil(N / 128), groups), block = 128 | thin: grid = (T, ceil(N / 32), groups), block = 128
//          mma: grid = (ceil(T / 64), ceil(N / 64), groups), block = 128
// variants 0 naive: a thread per output, kept as second oracle | 1 thin: eight lanes per 2 outputs, for few tokens | 2 mma tiles
#include "linear.cuh"

struct Fp8Weight {
  static constexpr bool TILE_SCALE = true;
  const unsigned char *w, *scale;
  int first_row, K;  // of this group
  bool aligned;      // rows start at multiples of 8 bytes

  __device__ __forceinline__ float tile_scale(int n, int k) const {
    return e8m0_decode(scale[(size_t)((first_row + n) / 128) * ceil_div(K, 128) + k / 128]);
  }
  __device__ __forceinline__ void codes(float (&v)[8], int n, int k) const {
    const unsigned char *row = w + (size_t)(first_row + n) * K + k;
    if (aligned && k + 8 <= K) {
      const uint2 packed = *reinterpret_cast<const uint2 *>(row);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = e4m3_decode(packed.x >> 8 * i & 0xffu);
        v[4 + i] = e4m3_decode(packed.y >> 8 * i & 0xffu);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = k + i < K ? e4m3_decode(row[i]) : 0.f;
    }
  }
  __device__ __forceinline__ void eight(float (&v)[8], int n, int k) const {
    if (k >= K) return zero_8(v);
    codes(v, n, k);
    const float s = tile_scale(n, k);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= s;
  }
  __device__ __forceinline__ float at(int n, int k) const {
    return e4m3_decode(w[(size_t)(first_row + n) * K + k]) * tile_scale(n, k);
  }
};

__device__ __forceinline__ Fp8Weight group_weight(const unsigned char *w, const unsigned char *scale, int N, int K) {
  return {w, scale, (int)blockIdx.z * N, K, (((size_t)w | (size_t)K) & 7) == 0};
}

extern "C" __global__ void __launch_bounds__(128)
linear_fp8_naive(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, int T, int N, int K,
                 long long x_stride) {
  const int t = blockIdx.x, n = blockIdx.y * 128 + threadIdx.x, group = blockIdx.z;
  if (n >= N) return;
  const float sum = naive_dot(x + t * x_stride + (size_t)group * K, group_weight(w, w_scale, N, K), n, K);
  y[(size_t)t * N * gridDim.z + (size_t)group * N + n] = to_bf16(sum);
}

extern "C" __global__ void __launch_bounds__(THIN_THREADS)
linear_fp8_thin(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w,
                const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, int T, int N, int K,
                long long x_stride) {
  const int t = blockIdx.x, group = blockIdx.z;
  const __nv_bfloat16 *row = x + (size_t)group * K;
  thin_product(row + t * x_stride, rows_aligned(row, x_stride), group_weight(w, w_scale, N, K), thin_first_row(), N, K,
               [&](int n, float sum) { y[(size_t)t * N * gridDim.z + (size_t)group * N + n] = to_bf16(sum); });
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)
linear_fp8_mma(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w,
               const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, int T, int N, int K,
               long long x_stride) {
  const int m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE, group = blockIdx.z;
  const __nv_bfloat16 *first = x + (size_t)group * K;
  const DenseRows rows{first + m0 * x_stride, x_stride, T - m0, rows_aligned(first, x_stride)};
  tile_product(rows, group_weight(w, w_scale, N, K), n0, N, K, [&](int m, int n, float sum) {
    y[(size_t)(m0 + m) * N * gridDim.z + (size_t)group * N + n0 + n] = to_bf16(sum);
  });
}
