// entry.cuh    one stored key = value vector of d numbers, as bytes: who writes and who reads it includes this
//
//   [0, d - r)                 e4m3 codes of the dims that are not rotated
//   [d - r, d + r)             r bf16, the rotated dims, never rounded to e4m3
//   [d + r, d + r + (d-r)/64)  one e8m0 scale per 64 codes
//   up to a multiple of 8      zero
// 584 bytes at d = 512, r = 64. Slots and entries begin at multiples of 8 bytes.
#pragma once
#include "common.cuh"

constexpr int SCALE_BLOCK = 64;  // e4m3 codes per scale

__device__ __forceinline__ int entry_scales(int d, int r) { return d + r; }  // offset of the first scale byte
__device__ __forceinline__ int entry_end(int d, int r) { return (entry_scales(d, r) + (d - r) / SCALE_BLOCK + 7) / 8 * 8; }

__device__ __forceinline__ bool is_finite_bits(unsigned magnitude) { return magnitude < 0x7f800000u; }

// Scale byte of a block whose largest |x| has these fp32 bits; 255 (NaN) when that is an infinity or a NaN.
__device__ __forceinline__ unsigned e4m3_block_scale(unsigned amax_bits) {
  return is_finite_bits(amax_bits) ? e4m3_scale(fmaxf(__uint_as_float(amax_bits), E4M3_AMAX_FLOOR)) : 255u;
}
__device__ __forceinline__ unsigned e2m1_block_scale(unsigned amax_bits) {
  return is_finite_bits(amax_bits) ? e2m1_scale(fmaxf(__uint_as_float(amax_bits), E2M1_AMAX_FLOOR)) : 255u;
}

// One warp writes an entry. x is the vector, already normalised and rotated.
__device__ __forceinline__ void store_entry(unsigned char *entry, const __nv_bfloat16 *x, int d, int r) {
  const int lane = threadIdx.x % WARP, plain = d - r;
  for (int first = 0; first < plain; first += SCALE_BLOCK) {
    const float low = from_bf16(x[first + lane]), high = from_bf16(x[first + WARP + lane]);
    const unsigned amax = __reduce_max_sync(FULL_MASK, max(__float_as_uint(fabsf(low)), __float_as_uint(fabsf(high))));
    const unsigned scale = e4m3_block_scale(amax);
    const float inverse = scale == 255u ? 0.f : e8m0_inverse(scale);
    entry[first + lane] = (unsigned char)e4m3_encode(low * inverse);
    entry[first + WARP + lane] = (unsigned char)e4m3_encode(high * inverse);
    if (lane == 0) entry[entry_scales(d, r) + first / SCALE_BLOCK] = (unsigned char)scale;
  }
  __nv_bfloat16 *rotated = reinterpret_cast<__nv_bfloat16 *>(entry + plain);
  for (int i = lane; i < r; i += WARP) rotated[i] = x[plain + i];
  for (int i = entry_scales(d, r) + plain / SCALE_BLOCK + lane; i < entry_end(d, r); i += WARP) entry[i] = 0;
}

// Parts of an entry for readers: part i < (d-r)/64 is a block of 64 codes, the last part the rotated dims. One thread a part.
__device__ __forceinline__ int entry_parts(int d, int r) { return (d - r) / SCALE_BLOCK + 1; }

__device__ __forceinline__ void put(float &to, float v) { to = v; }
__device__ __forceinline__ void put(__nv_bfloat16 &to, float v) { to = to_bf16(v); }  // exact: an e4m3 code times a power of two

template <class T>
__device__ __forceinline__ void load_entry_part(T *out, const unsigned char *entry, int part, int d, int r) {
  const int plain = d - r;
  if (part < plain / SCALE_BLOCK) {
    const float scale = e8m0_decode(entry[entry_scales(d, r) + part]);
    const unsigned char *codes = entry + part * SCALE_BLOCK;
    T *block = out + part * SCALE_BLOCK;
#pragma unroll 8
    for (int i = 0; i < SCALE_BLOCK; i++) put(block[i], e4m3_decode(codes[i]) * scale);
  } else {
    const __nv_bfloat16 *rotated = reinterpret_cast<const __nv_bfloat16 *>(entry + plain);
    for (int i = 0; i < r; i++) put(out[plain + i], from_bf16(rotated[i]));
  }
}

__device__ __forceinline__ float load_entry_dim(const unsigned char *entry, int i, int d, int r) {
  const int plain = d - r;
  if (i >= plain) return from_bf16(reinterpret_cast<const __nv_bfloat16 *>(entry + plain)[i - plain]);
  return e4m3_decode(entry[i]) * e8m0_decode(entry[entry_scales(d, r) + i / SCALE_BLOCK]);
}

// ---- many codes at a time, without a conversion instruction: those have a fraction of the rate of moving bits ----

// Two e4m3 codes of a word, by which of its bytes -> two bf16 with their bits: 2^-120 of their values, also of subnormal ones.
// select_bytes puts a code below eight copies of its sign.
template <int FIRST> __device__ __forceinline__ unsigned widen_codes(unsigned word) {
  return select_bytes(word, 0, FIRST ? 0xb3a2 : 0x9180) << 4 & 0x87f087f0u;
}

// Bits 7 of bytes that are not to be decoded at once: a code that is a NaN; a scale that times 2^120 is no bf16.
__device__ __forceinline__ unsigned nan_codes(unsigned word) { return (word & 0x7f7f7f7fu) + 0x01010101u; }
__device__ __forceinline__ unsigned large_scales(unsigned word) { return (word & 0x7f7f7f7fu) + 0x79797979u & word; }  // > 134

// ---- indexer keys: di e2m1 codes, two a byte, and one e8m0 scale per 32, in two arrays ----

constexpr int KEY_BLOCK = 32;

// x[n] in shared memory becomes x H / sqrt(n), H[i,j] = (-1)^popcount(i & j). All 32 lanes of one warp; n a power of two >= 32.
__device__ __forceinline__ void hadamard_in_place(float *x, int n, float inverse_root) {
  const int lane = threadIdx.x % WARP;
  for (int step = 1; step < n; step *= 2) {
    __syncwarp();
    for (int i = lane; i < n / 2; i += WARP) {
      const int low = i / step * 2 * step + i % step;
      const float a = x[low], b = x[low + step];
      x[low] = a + b;
      x[low + step] = a - b;
    }
  }
  __syncwarp();
  for (int i = lane; i < n; i += WARP) x[i] *= inverse_root;
  __syncwarp();
}

// The same, one output from the definition: the sum in ascending order of i.
__device__ __forceinline__ float hadamard_output(const __nv_bfloat16 *x, int j, int n, float inverse_root) {
  float sum = 0.f;
  for (int i = 0; i < n; i++) {
    const float v = from_bf16(x[i]);
    sum += __popc(i & j) & 1 ? -v : v;
  }
  return sum * inverse_root;
}

struct KeyCode {
  unsigned scale, code;  // of this lane's element
};

// The warp's 32 values, one a lane, rounded to bf16 and then to e2m1.
__device__ __forceinline__ KeyCode encode_key_block(float v) {
  v = round_bf16(v);
  const unsigned scale = e2m1_block_scale(__reduce_max_sync(FULL_MASK, __float_as_uint(fabsf(v))));
  return {scale, scale == 255u ? 0u : e2m1_encode(v * e8m0_inverse(scale))};
}
