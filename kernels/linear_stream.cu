// linear_stream.cu    y[t,n] = sum_k x[t,k] w[n,k] of few tokens, at the rate at which w can be read: w in e4m3 codes or in bf16
// twin     reference/linear.py::Linear            tests  pytest parity/test_operations_dense.py -k "linear and stream"
// tensors  as linear_fp8.cu: x [T, groups * K] bf16, w [groups * N, K] e4m3 codes, w_scale e8m0 1 per 128 x 128, y [T, groups * N] bf16
//          as linear_bf16.cu: w [N, K] bf16, y [T, N] fp32 or bf16, one of the two pointers is null
// numerics stream.cuh: products exact, fp32 sums by mma; fp8: the codes are exact in bf16, each 128 columns' sum is multiplied by its
//          scale; one rounding to bf16 at the store (bf16: before the scale too, if rounded_first). A row with a NaN code gives NaN
// launch   grid = (ceil(T / 8), ceil(N / (8 R * 8 / slices)), groups), block = 256; slices 1, 2, 4 or 8: parts of a row of w
// variants 8: a warp takes 8 rows of w (R = 1), four chunks at once, for few rows | 16: 16 rows, two
//          chunks. The same bits for the same number of slices
#include "stream.cuh"

struct StreamOutput {
  float *y_fp32;
  __nv_bfloat16 *y_bf16;
  long long stride;
  int first;  // token of this block
  float scale;
  bool rounded_first;
  __device__ __forceinline__ void operator()(int token, int n, float sum) const {
    const float v = (rounded_first ? round_bf16(sum) : sum) * scale;
    if (y_bf16) y_bf16[(first + token) * stride + n] = to_bf16(v);
    else y_fp32[(first + token) * stride + n] = v;
  }
};

template <int R, int U>
__device__ __forceinline__ void linear_fp8(const __nv_bfloat16 *x, const unsigned char *w, const unsigned char *w_scale,
                                           __nv_bfloat16 *y, int T, int N, int K, long long x_stride, int slices) {
  const int first = blockIdx.x * STREAM_TOKENS, group = blockIdx.z;
  const __nv_bfloat16 *rows = x + (size_t)group * K;
  const bool whole = aligned_16(rows, 2 * x_stride) && aligned_16(w, K) && K % (4 * Fp8Stream::RUN) == 0;
  const int token = first + (int)threadIdx.x % WARP / 4;
  stream_product<Fp8Stream, R, U>(
      Fp8Stream{w, w_scale, group * N, K}, rows + (token < T ? token : first) * x_stride, token < T, whole,
      stream_first_row<R>(blockIdx.y, slices), N, K, slices, StreamOutput{nullptr, y + (size_t)group * N, (long long)N * gridDim.z, first, 1.f, false});
}

template <int R, int U>
__device__ __forceinline__ void linear_bf16(const __nv_bfloat16 *x, const __nv_bfloat16 *w, float *y_fp32, __nv_bfloat16 *y_bf16, int T,
                                            int N, int K, long long x_stride, float scale, int rounded_first, int slices) {
  const int first = blockIdx.x * STREAM_TOKENS;
  const bool whole = aligned_16(x, 2 * x_stride) && aligned_16(w, 2ll * K) && K % (4 * Bf16Stream::RUN) == 0;
  const int token = first + (int)threadIdx.x % WARP / 4;
  stream_product<Bf16Stream, R, U>(
      Bf16Stream{w, K}, x + (token < T ? token : first) * x_stride, token < T, whole,
      stream_first_row<R>(blockIdx.y, slices), N, K, slices, StreamOutput{y_fp32, y_bf16, N, first, scale, rounded_first != 0});
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
linear_fp8_stream8(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                   __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride, int slices) {
  linear_fp8<1, 4>(x, w, w_scale, y, T, N, K, x_stride, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
linear_fp8_stream16(const __nv_bfloat16 *__restrict__ x, const unsigned char *__restrict__ w, const unsigned char *__restrict__ w_scale,
                    __nv_bfloat16 *__restrict__ y, int T, int N, int K, long long x_stride, int slices) {
  linear_fp8<2, 2>(x, w, w_scale, y, T, N, K, x_stride, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
linear_bf16_stream8(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                    __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first,
                    int slices) {
  linear_bf16<1, 4>(x, w, y_fp32, y_bf16, T, N, K, x_stride, scale, rounded_first, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
linear_bf16_stream16(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ w, float *__restrict__ y_fp32,
                     __nv_bfloat16 *__restrict__ y_bf16, int T, int N, int K, long long x_stride, float scale, int rounded_first,
                     int slices) {
  linear_bf16<2, 2>(x, w, y_fp32, y_bf16, T, N, K, x_stride, scale, rounded_first, slices);
}
