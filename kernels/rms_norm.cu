// rms_norm.cu    out[t,:] = x[t,:] * rsqrt(mean(x[t,:]^2) + eps) * weight, weight null = 1
// twin     reference/ops.py::rms_norm             tests  pytest parity/test_operations_dense.py -k rms_norm
// tensors  x [R, dim] bf16, rows x_stride elements apart | weight [dim] fp32 or null | out [R, dim] bf16, rows out_stride
//          apart; may be x itself
// numerics sum of squares in fp32 by fmaf: eight neighbours at a time per lane, then a butterfly (bitwise repeatable,
//          batch-invariant, the same bits for any alignment); one rounding, to bf16, at the store
// launch   naive: grid = ceil(R / 64), block = 64 | group: grid = ceil(R / 16), block = 128
//          warp: grid = ceil(R / 4), block = 128 | block: grid = R, block = 256
// variants 0 naive: a thread per row, kept as second oracle | 1 group: eight lanes per row (dim <= 256)
//          2 warp per row (dim <= 2048) | 3 block per row (wider)
//          eight bf16 by one 16-byte access where rows are aligned, else one by one
#include "common.cuh"

// Eight elements of a row from column i on; zero beyond dim.
__device__ __forceinline__ void load_chunk(float (&v)[8], const __nv_bfloat16 *row, int i, int dim, bool aligned) {
  if (aligned && i + 8 <= dim) return load_8(v, row + i);
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = i + j < dim ? from_bf16(row[i + j]) : 0.f;
}

// One lane's share of the sum of squares: chunks of eight, lanes * 8 apart.
__device__ __forceinline__ float squares_of(const __nv_bfloat16 *row, int dim, int lane, int lanes, bool aligned) {
  float sum = 0.f;
  for (int i = lane * 8; i < dim; i += lanes * 8) {
    float v[8];
    load_chunk(v, row, i, dim, aligned);
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(v[j], v[j], sum);
  }
  return sum;
}

__device__ __forceinline__ void write_scaled(const __nv_bfloat16 *row, const float *weight, __nv_bfloat16 *out, float r,
                                             int dim, int lane, int lanes, bool aligned) {
  for (int i = lane * 8; i < dim; i += lanes * 8) {
    float v[8];
    load_chunk(v, row, i, dim, aligned);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * r * (weight && i + j < dim ? weight[i + j] : 1.f);
    if (aligned && i + 8 <= dim) store_8(out + i, v);
    else
      for (int j = 0; j < 8 && i + j < dim; j++) out[i + j] = to_bf16(v[j]);
  }
}

__device__ __forceinline__ bool rows_aligned(const void *x, const void *out, long long x_stride, long long out_stride) {
  return (((size_t)x | (size_t)out | (size_t)(2 * x_stride) | (size_t)(2 * out_stride)) & 15) == 0;
}

extern "C" __global__ void __launch_bounds__(64)
rms_norm_naive(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int R, int dim, long long x_stride,
               long long out_stride, float eps) {
  const int t = blockIdx.x * 64 + threadIdx.x;
  if (t >= R) return;
  const __nv_bfloat16 *row = x + t * x_stride;
  float sum = 0.f;
  for (int i = 0; i < dim; i++) sum = fmaf(from_bf16(row[i]), from_bf16(row[i]), sum);
  const float r = rsqrtf(sum / (float)dim + eps);
  for (int i = 0; i < dim; i++) out[t * out_stride + i] = to_bf16(from_bf16(row[i]) * r * (weight ? weight[i] : 1.f));
}

template <int LANES>
__device__ __forceinline__ void rms_norm_lanes(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int R, int dim,
                                               long long x_stride, long long out_stride, float eps) {
  const int t = blockIdx.x * (128 / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const bool aligned = rows_aligned(x, out, x_stride, out_stride);
  const __nv_bfloat16 *row = x + t * x_stride;
  const float sum = warp_sum<LANES>(t < R ? squares_of(row, dim, lane, LANES, aligned) : 0.f);
  if (t < R) write_scaled(row, weight, out + t * out_stride, rsqrtf(sum / (float)dim + eps), dim, lane, LANES, aligned);
}

extern "C" __global__ void __launch_bounds__(128)
rms_norm_group(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int R, int dim, long long x_stride,
               long long out_stride, float eps) {
  rms_norm_lanes<8>(x, weight, out, R, dim, x_stride, out_stride, eps);
}

extern "C" __global__ void __launch_bounds__(128)
rms_norm_warp(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int R, int dim, long long x_stride,
              long long out_stride, float eps) {
  rms_norm_lanes<WARP>(x, weight, out, R, dim, x_stride, out_stride, eps);
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_block(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int dim, long long x_stride,
               long long out_stride, float eps) {
  const bool aligned = rows_aligned(x, out, x_stride, out_stride);
  const __nv_bfloat16 *row = x + blockIdx.x * x_stride;
  const float sum = block_sum<256>(squares_of(row, dim, threadIdx.x, 256, aligned));
  write_scaled(row, weight, out + blockIdx.x * out_stride, rsqrtf(sum / (float)dim + eps), dim, threadIdx.x, 256, aligned);
}
