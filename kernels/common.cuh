// common.cuh    what several kernels share: reductions in a fixed order, bf16 loads, the three small formats
//
// Same source on the GPU and on the CPU, the same bits on both: integer arithmetic, exact products, no approximate
// function. Includes mma.cuh, so that a kernel needs one include. Tests: pytest parity/unit/cpu_device -k common.
#pragma once
#include "mma.cuh"

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- reductions: butterfly within a warp, then warps in ascending order; every thread receives the result ----

// Over aligned groups of WIDTH lanes. All 32 lanes call.
template <int WIDTH = WARP> __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_MASK, v, step);
  return v;
}

template <int WIDTH = WARP> __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, step));
  return v;
}

// All BLOCK threads of a one-dimensional block call, as often as they like: the first barrier protects the last result.
template <int BLOCK> __device__ __forceinline__ float block_sum(float v) {
  static_assert(BLOCK % WARP == 0, "whole warps");
  __shared__ float part[BLOCK / WARP];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < BLOCK / WARP; i++) sum += part[i];
  return sum;
}

template <int BLOCK> __device__ __forceinline__ float block_max(float v) {
  static_assert(BLOCK % WARP == 0, "whole warps");
  __shared__ float part[BLOCK / WARP];
  v = warp_max(v);
  __syncthreads();
  if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = v;
  __syncthreads();
  float largest = part[0];
#pragma unroll
  for (int i = 1; i < BLOCK / WARP; i++) largest = fmaxf(largest, part[i]);
  return largest;
}

// ---- bf16 ----

__device__ __forceinline__ float from_bf16(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ __nv_bfloat16 to_bf16(float v) { return __float2bfloat16(v); }  // to nearest, ties to even
__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16(v)); }

// The two bf16 of a 32-bit word, low half first in memory.
__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// Eight bf16, one 16-byte access; p is 16-byte aligned.
__device__ __forceinline__ void load_8(float (&out)[8], const __nv_bfloat16 *p) {
  const uint4 packed = *reinterpret_cast<const uint4 *>(p);
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = bf16_low(words[i]);
    out[2 * i + 1] = bf16_high(words[i]);
  }
}

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&pair);
}

// Two bf16 products, each rounded once; denormals are kept.
__device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
  return *reinterpret_cast<const unsigned *>(&product);
}

__device__ __forceinline__ void store_8(__nv_bfloat16 *p, const float (&v)[8]) {
  uint4 packed;
  packed.x = pack_bf16(v[0], v[1]);
  packed.y = pack_bf16(v[2], v[3]);
  packed.z = pack_bf16(v[4], v[5]);
  packed.w = pack_bf16(v[6], v[7]);
  *reinterpret_cast<uint4 *>(p) = packed;
}

// ---- e8m0: one byte b, 2^(b - 127); 255 is NaN ----

__device__ __forceinline__ float e8m0_decode(unsigned b) {
  return __uint_as_float(b == 255u ? 0x7fffffffu : b == 0u ? 0x00400000u : b << 23);  // 2^-127 is a denormal
}

// Bytes of the smallest power of two s with amax / s <= 448 (e4m3) or <= 6 (e2m1). amax is a normal number, the
// caller's floor applied: fmaxf(amax, E4M3_AMAX_FLOOR). Integer arithmetic, so exact at 448 * 2^n and 6 * 2^n.
constexpr float E4M3_AMAX_FLOOR = 1e-4f, E2M1_AMAX_FLOOR = 6.f / 85070591730234615865843651857942052864.f;  // 6 * 2^-126

__device__ __forceinline__ unsigned e4m3_scale(float amax) {  // 448 = 1.75 * 2^8
  const unsigned bits = __float_as_uint(amax);
  return (bits >> 23) - 8u + ((bits & 0x7fffffu) > 0x600000u ? 1u : 0u);
}

__device__ __forceinline__ unsigned e2m1_scale(float amax) {  // 6 = 1.5 * 2^2
  const unsigned bits = __float_as_uint(amax);
  return (bits >> 23) - 2u + ((bits & 0x7fffffu) > 0x400000u ? 1u : 0u);
}

// 1 / 2^(b - 127) for b <= 254: value * e8m0_inverse(b) is value / scale, exactly.
__device__ __forceinline__ float e8m0_inverse(unsigned b) { return e8m0_decode(254u - b); }

// ---- e4m3: sign, 4 exponent bits of bias 7, 3 fraction bits; 0x7f and 0xff are NaN, the largest value is 448 ----

__device__ __forceinline__ float e4m3_decode(unsigned code) {
  const float magnitude = __uint_as_float((code & 0x7fu) << 20) * 1.3292279957849159e36f;  // 2^120: moves the bias, exact
  const unsigned bits = (code & 0x7fu) == 0x7fu ? 0x7fffffffu : __float_as_uint(magnitude);
  return __uint_as_float(bits | (code & 0x80u) << 24);
}

// To nearest, ties to even, after a clamp to +-448; NaN stays NaN.
__device__ __forceinline__ unsigned e4m3_encode(float v) {
  const unsigned bits = __float_as_uint(v), sign = bits >> 24 & 0x80u;
  unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;  // 448
  if (magnitude < 0x3c800000u)                           // below 2^-6: multiples of 2^-9
    return sign | (unsigned)__float2int_rn(__uint_as_float(magnitude) * 512.f);
  magnitude += 0x7ffffu + (magnitude >> 20 & 1u);  // keeps 3 fraction bits
  return sign | ((magnitude >> 20) - (120u << 3));
}

__device__ __forceinline__ float e4m3_round(float v) { return e4m3_decode(e4m3_encode(v)); }

// The four e4m3 of a 32-bit word, first byte first in memory.
__device__ __forceinline__ void e4m3_decode_4(float (&out)[4], unsigned word) {
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = e4m3_decode(word >> 8 * i & 0xffu);
}

// ---- e2m1: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Two a byte, the low nibble first ----

__constant__ float FP4_VALUES[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                     -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

__device__ __forceinline__ float e2m1_decode(unsigned nibble) { return FP4_VALUES[nibble & 15u]; }

// To nearest, ties to the even code, after a clamp to +-6. There is no NaN: it becomes 6, as on the hardware.
__device__ __forceinline__ unsigned e2m1_encode(float v) {
  const float magnitude = fabsf(v);
  const unsigned sign = __float_as_uint(v) >> 28 & 8u;
  const unsigned code = (magnitude > .25f) + (magnitude >= .75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                        (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.f);
  return magnitude != magnitude ? 7u : sign | code;
}

__device__ __forceinline__ float e2m1_round(float v) { return e2m1_decode(e2m1_encode(v)); }

// The eight e2m1 of a 32-bit word, in memory order.
__device__ __forceinline__ void e2m1_decode_8(float (&out)[8], unsigned word) {
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = e2m1_decode(word >> 4 * i);
}
