// rows.cuh    what one warp does to a row: norm, e4m3 rounding, rotation; the bits of rms_norm.cu, act_quant.cu and rope.cu
//
// For kernels that do several of these in one launch. All 32 lanes call; rows and widths are multiples of 8 elements, 16-byte
// aligned. What a warp has written to a row it may read after __syncwarp. Tests: pytest parity/test_operations_at_once.py.
#pragma once
#include "entry.cuh"

constexpr int NORM_GROUP_DIM = 256, NORM_WARP_DIM = 2048;  // as rms_norm: eight lanes a row up to here, a warp up to here

template <int LANES> __device__ __forceinline__ float squares_by(const __nv_bfloat16 *x, int dim) {
  const int lane = threadIdx.x % WARP;
  float sum = 0.f;
  if (lane < LANES)
    for (int i = lane * 8; i < dim; i += LANES * 8) {
      float v[8];
      load_8(v, x + i);
#pragma unroll
      for (int j = 0; j < 8; j++) sum = fmaf(v[j], v[j], sum);
    }
  return warp_sum<LANES>(sum);
}

// out = x * rsqrt(mean(x^2) + eps) * weight, weight null = 1; out may be x.
__device__ __forceinline__ void norm_row(const __nv_bfloat16 *x, const float *weight, __nv_bfloat16 *out, int dim, float eps) {
  const float squares = dim <= NORM_GROUP_DIM ? squares_by<8>(x, dim) : squares_by<WARP>(x, dim);
  const float r = rsqrtf(__shfl_sync(FULL_MASK, squares, 0) / (float)dim + eps);
  for (int i = threadIdx.x % WARP * 8; i < dim; i += WARP * 8) {
    float v[8];
    load_8(v, x + i);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * r * (weight ? weight[i + j] : 1.f);
    store_8(out + i, v);
  }
}

// Eight values of a block of 128, the warp's sixteen lower or upper lanes having one block: rounded to e4m3 with its scale.
__device__ __forceinline__ void round_e4m3_128(float (&v)[8]) {
  unsigned amax = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) amax = max(amax, __float_as_uint(fabsf(v[j])));
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) amax = max(amax, __shfl_xor_sync(FULL_MASK, amax, step));
  const bool finite = is_finite_bits(amax);
  const unsigned b = e4m3_scale(fmaxf(__uint_as_float(finite ? amax : 0u), E4M3_AMAX_FLOOR));
  const float nan = __uint_as_float(0x7fffffffu), scale = finite ? e8m0_decode(b) : nan, inverse = finite ? e8m0_inverse(b) : nan;
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = e4m3_round(v[j] * inverse) * scale;
}

// Columns first .. first + 255 of a row, rounded to e4m3 with one scale per 128; the last block may be shorter.
__device__ __forceinline__ void quant_256(const __nv_bfloat16 *x, __nv_bfloat16 *out, int first, int dim) {
  const int i = first + threadIdx.x % WARP * 8;
  float v[8] = {};
  if (i < dim) load_8(v, x + i);
  round_e4m3_128(v);
  if (i < dim) store_8(out + i, v);
}

// Rotates the last 2 * half_r dims by sign * position * inv_freq, adjacent pairs, in place; a pad (position < 0) stays.
__device__ __forceinline__ void rope_row(__nv_bfloat16 *x, int position, const float *inv_freq, int dim, int half_r, float sign) {
  if (position < 0) return;
  for (int i = threadIdx.x % WARP; i < half_r; i += WARP) {
    const float angle = (float)position * inv_freq[i];
    const float c = cosf(angle), s = sign * sinf(angle);
    __nv_bfloat16 *pair = x + (dim - 2 * half_r + 2 * i);
    const float a = from_bf16(pair[0]), b = from_bf16(pair[1]);
    pair[0] = to_bf16(a * c - b * s);
    pair[1] = to_bf16(a * s + b * c);
  }
}
