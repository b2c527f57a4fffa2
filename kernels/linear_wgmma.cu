// linear_wgmma.cu    y[t,n] = sum_k x[t,k] w[n,k] of many tokens, on Hopper's tensor cores: w in e4m3 codes or in bf16
// archs    sm_90a
// twin     reference/linear.py::Linear            tests  pytest parity/test_operations_dense.py -k "linear and wgmma" (emulated on the CPU)
// tensors  as linear_fp8.cu: x [T, groups * K] bf16, w [groups * N, K] e4m3 codes, w_scale e8m0 1 per 128 x 128, y [T, groups * N] bf16
//          as linear_bf16.cu: w [N, K] bf16, y [T, N] fp32 or bf16, one of the two pointers is null
// numerics wgmma_tiles.cuh: products exact, fp32 sums by wgmma; fp8: see Fp8Tiles; one rounding to bf16 at the store (bf16: before
//          the scale too, if rounded_first). A row with a NaN code gives NaN
// launch   grid = (ceil(T / 256 or 128), ceil(N / 128), groups), block = 256; dynamic shared memory: Layout::BYTES
// needs    rows of x and w at multiples of 16 bytes; K % 64 == 0; groups > 1: N % 64 == 0
// variants wgmma256: 256 tokens a block | wgmma128: 128, two blocks a multiprocessor. The same bits
#include "hopper.cuh"

extern __shared__ __align__(1024) unsigned char wgmma_shared[];

#include "wgmma_tiles.cuh"

// The block's rows of x. All threads call.
template <class L, int TOKENS> __device__ __forceinline__ int list_rows(int T, long long x_stride) {
  const int m0 = blockIdx.x * TOKENS, rows = min(T - m0, TOKENS);
  unsigned *x_rows = reinterpret_cast<unsigned *>(wgmma_shared + L::AT_ROWS);
  for (int m = threadIdx.x; m < TOKENS; m += WGMMA_THREADS) x_rows[m] = (unsigned)(min(m, rows - 1) * x_stride / 8);
  __syncthreads();
  return rows;
}

template <int TOKENS, int STAGES>
__device__ __forceinline__ void linear_fp8(const __nv_bfloat16 *x, const unsigned char *w, const unsigned char *w_scale,
                                           __nv_bfloat16 *y, int T, int N, int K, long long x_stride) {
  const int m0 = blockIdx.x * TOKENS, n0 = blockIdx.y * W_ROWS, group = blockIdx.z;
  const int rows = list_rows<Layout<Fp8Wgmma, TOKENS, STAGES>, TOKENS>(T, x_stride);
  const __nv_bfloat16 *tile = wgmma_product<Fp8Wgmma, TOKENS, STAGES, __nv_bfloat16>(
      Fp8Wgmma{w, w_scale, group * N, K}, x + m0 * x_stride + (size_t)group * K, n0, N, K, [](float sum) { return to_bf16(sum); });
  const long long stride = (long long)N * gridDim.z;
  store_tile(tile, rows, y + m0 * stride + (size_t)group * N, stride, n0, N, [](int m) { return (long long)m; });
}

template <int TOKENS, int STAGES, class Out>
__device__ __forceinline__ void linear_bf16(const __nv_bfloat16 *x, const __nv_bfloat16 *w, Out *y, int T, int N, int K,
                                            long long x_stride, float scale, bool rounded_first) {
  const int m0 = blockIdx.x * TOKENS, n0 = blockIdx.y * W_ROWS;
  const int rows = list_rows<Layout<Bf16Wgmma, TOKENS, STAGES>, TOKENS>(T, x_stride);
  const Out *tile = wgmma_product<Bf16Wgmma, TOKENS, STAGES, Out>(Bf16Wgmma{w, K}, x + m0 * x_stride, n0, N, K, [&](float sum) {
    const float v = (rounded_first ? round_bf16(sum) : sum) * scale;
    if constexpr (sizeof(Out) == 2) return to_bf16(v);
    else return v;
  });
  store_tile(tile, rows, y + (long long)m0 * N, N, n0, N, [](int m) { return (long long)m; });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 1)
linear_fp8_wgmma256(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                    __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride) {
  linear_fp8<256, 5>(x, w, w_scale, y, T, N, K, x_stride);
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 2)
linear_fp8_wgmma128(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                    __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride) {
  linear_fp8<128, 4>(x, w, w_scale, y, T, N, K, x_stride);
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 1)
linear_bf16_wgmma256(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                     __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  if (y_bf16) linear_bf16<256, 4>(x, w, y_bf16, T, N, K, x_stride, scale, rounded_first);
  else linear_bf16<256, 4>(x, w, y_fp32, T, N, K, x_stride, scale, rounded_first);
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 2)
linear_bf16_wgmma128(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                     __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  if (y_bf16) linear_bf16<128, 3>(x, w, y_bf16, T, N, K, x_stride, scale, rounded_first);
  else linear_bf16<128, 3>(x, w, y_fp32, T, N, K, x_stride, scale, rounded_first);
}
