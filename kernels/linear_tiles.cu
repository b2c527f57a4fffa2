// linear_tiles.cu    y[t,n] = sum_k x[t,k] w[n,k] of many tokens, on the tensor cores: w in e4m3 codes or in bf16
// twin     reference/linear.py::Linear            tests  pytest parity/test_operations_dense.py -k "linear and tiles"
// tensors  as linear_fp8.cu: x [T, groups * K] bf16, w [groups * N, K] e4m3 codes, w_scale e8m0 1 per 128 x 128, y [T, groups * N] bf16
//          as linear_bf16.cu: w [N, K] bf16, y [T, N] fp32 or bf16, one of the two pointers is null
// numerics tiles.cuh: products exact, fp32 sums by mma; fp8: see Fp8Tiles; one rounding to bf16 at the store (bf16: before the scale
//          too, if rounded_first). A row with a NaN code gives NaN
// launch   grid = (ceil(T / 128), ceil(N / 128 or 256), groups), block = 128 or 256; dynamic shared memory: STAGES stages
// needs    rows of x and w at multiples of 16 bytes; K % 64 == 0; groups > 1: N % 64 == 0
// variants tiles128: 128 x 128 outputs a block, two blocks a multiprocessor | tiles256: 128 x 256. The same bits
#include "tiles.cuh"

extern __shared__ __align__(128) unsigned char tiles_shared[];

template <int COLUMNS, int STAGES>
__device__ __forceinline__ void linear_fp8(const __nv_bfloat16 *x, const unsigned char *w, const unsigned char *w_scale,
                                           __nv_bfloat16 *y, int T, int N, int K, long long x_stride) {
  __shared__ unsigned x_row[TILES_ROWS];
  const int m0 = blockIdx.x * TILES_ROWS, group = blockIdx.z, rows = min(T - m0, TILES_ROWS);
  for (int m = threadIdx.x; m < TILES_ROWS; m += blockDim.x) x_row[m] = (unsigned)(min(m, rows - 1) * x_stride / 8);
  __syncthreads();
  x += m0 * x_stride + (size_t)group * K;
  const long long y_stride = (long long)N * gridDim.z;
  __nv_bfloat16 *out = y + m0 * y_stride + (size_t)group * N;
  const Fp8Tiles weight{w, w_scale, group * N, K};
  auto store = [&](int m, int n, float first, float second, bool both) { store_two(out + m * y_stride + n, first, second, both); };
  tiles_product<Fp8Tiles, COLUMNS, STAGES>(weight, x, x_row, rows, blockIdx.y * COLUMNS, N, K, tiles_shared, store);
}

template <int COLUMNS, int STAGES>
__device__ __forceinline__ void linear_bf16(const __nv_bfloat16 *x, const __nv_bfloat16 *w, float *y_fp32, __nv_bfloat16 *y_bf16, int T,
                                            int N, int K, long long x_stride, float scale, int rounded_first) {
  __shared__ unsigned x_row[TILES_ROWS];
  const int m0 = blockIdx.x * TILES_ROWS, rows = min(T - m0, TILES_ROWS);
  for (int m = threadIdx.x; m < TILES_ROWS; m += blockDim.x) x_row[m] = (unsigned)(min(m, rows - 1) * x_stride / 8);
  __syncthreads();
  x += m0 * x_stride;
  auto finished = [&](float sum) { return (rounded_first ? round_bf16(sum) : sum) * scale; };
  auto store = [&](int m, int n, float first, float second, bool both) {
    const long long at = (long long)(m0 + m) * N + n;
    if (y_bf16) return store_two(y_bf16 + at, finished(first), finished(second), both);
    y_fp32[at] = finished(first);
    if (both) y_fp32[at + 1] = finished(second);
  };
  const Bf16Tiles weight{w, K};
  tiles_product<Bf16Tiles, COLUMNS, STAGES>(weight, x, x_row, rows, blockIdx.y * COLUMNS, N, K, tiles_shared, store);
}

extern "C" __global__ void __launch_bounds__(128, 2)
linear_fp8_tiles128(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                    __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride) {
  linear_fp8<128, 4>(x, w, w_scale, y, T, N, K, x_stride);
}

extern "C" __global__ void __launch_bounds__(256, 1)
linear_fp8_tiles256(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                    __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride) {
  linear_fp8<256, 4>(x, w, w_scale, y, T, N, K, x_stride);
}

extern "C" __global__ void __launch_bounds__(128, 2)
linear_bf16_tiles128(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                     __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  linear_bf16<128, 3>(x, w, y_fp32, y_bf16, T, N, K, x_stride, scale, rounded_first);
}

extern "C" __global__ void __launch_bounds__(256, 1)
linear_bf16_tiles256(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                     __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first) {
  linear_bf16<256, 4>(x, w, y_fp32, y_bf16, T, N, K, x_stride, scale, rounded_first);
}
