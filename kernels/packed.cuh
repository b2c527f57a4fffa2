// packed.cuh    e4m3 and e2m1 codes to pairs of bf16 by moving their bits: exact, no table, no conversion instruction
//
// A code's exponent and fraction bits, moved to the lowest exponent bits of a bf16, are the code's value times a power of
// two, subnormal codes included: those become subnormal bf16. One product, itself exact, brings the value back.
// Same source and bits on the GPU and on the CPU. Used by stream.cuh and tiles.cuh. Tests: pytest parity/unit/cpu_device -k packed.
#pragma once
#include "common.cuh"

// Two bf16 products, each rounded to nearest; subnormals are kept.
__device__ __forceinline__ unsigned bf16_products(unsigned a, unsigned b) {
#ifdef CUDA_ON_CPU
  return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
#else
  union {
    unsigned bits;
    __nv_bfloat162 pair;
  } x, y, product;
  x.bits = a;
  y.bits = b;
  product.pair = __hmul2(x.pair, y.pair);
  return product.bits;
#endif
}

// Low halves of two words, and high halves: (x0 x1), (x2 x3) -> (x0 x2), (x1 x3).
__device__ __forceinline__ unsigned low_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ unsigned high_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }

// ---- e4m3: codes 0 and 2 of a word, and codes 1 and 3 ----

constexpr unsigned E4M3_UNIT = 0x7b807b80u;  // 2^120, twice

__device__ __forceinline__ void e4m3_pairs(unsigned word, unsigned &even, unsigned &odd) {
  even = bf16_products((word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u), E4M3_UNIT);
  odd = bf16_products((word >> 4 & 0x07f007f0u) | (word & 0x80008000u), E4M3_UNIT);
}

// The same times a power of two that a bf16 holds: unit is 2^(120 + e), twice.
__device__ __forceinline__ void e4m3_pairs(unsigned word, unsigned unit, unsigned &even, unsigned &odd) {
  even = bf16_products((word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u), unit);
  odd = bf16_products((word >> 4 & 0x07f007f0u) | (word & 0x80008000u), unit);
}

// NOTE: e4m3_pairs makes 480 of the two codes that mean NaN. Bit 7 of a byte here says that its code is one of them.
__device__ __forceinline__ unsigned e4m3_nan_sum(unsigned word) { return (word & 0x7f7f7f7fu) + 0x01010101u; }
constexpr unsigned E4M3_NAN_BITS = 0x80808080u;

// ---- e2m1: pairs[i] is codes i and i + 4 of a word ----

constexpr unsigned E2M1_UNIT = 0x7e807e80u;  // 2^126, twice

// Each times 2^-126, to be multiplied by E2M1_UNIT, or by the product of that and a scale.
__device__ __forceinline__ void e2m1_bits(unsigned word, unsigned (&pairs)[4]) {
  pairs[0] = (word << 6 & 0x01c001c0u) | (word << 12 & 0x80008000u);
  pairs[1] = (word << 2 & 0x01c001c0u) | (word << 8 & 0x80008000u);
  pairs[2] = (word >> 2 & 0x01c001c0u) | (word << 4 & 0x80008000u);
  pairs[3] = (word >> 6 & 0x01c001c0u) | (word & 0x80008000u);
}

// 2^126 times a scale of byte b, twice: it fits a bf16 up to b = 128; above, multiply by E2M1_UNIT, then by e8m0_pair(b).
constexpr unsigned E2M1_WIDEST = 128;
__device__ __forceinline__ unsigned e2m1_unit(unsigned b) { return (b + 126u) * 0x00800080u; }

// The scale of byte b as a bf16, twice: 2^-127 is subnormal there, 255 is NaN.
__device__ __forceinline__ unsigned e8m0_pair(unsigned b) {
  return (b == 255u ? 0x7fffu : b == 0u ? 0x0040u : b << 7) * 0x00010001u;
}
