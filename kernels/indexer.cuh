// indexer.cuh    queries and keys of the indexer as signed bytes: products on the integer tensor cores, sums exact
//
// A block of 32 e2m1 codes is integers 2 * code in -12..12 times a power of two. Where the four blocks of a key lie within three
// binades, they are shifted to one common scale (at most 12 << 3 = 96), and so are the four blocks of a query's head: the dot
// product of the 128 is then one exact s32 sum below 2^21. Anything else, also a NaN scale or a scale near the ends of e8m0's range,
// goes the wide way: a product per block of 32, scaled and added in fp64. Both give the same bits where both are exact.
//
// Order of the 128 dims within the mma's K, the same for both operands: lane t = lane % 4 holds block t of its row; step j of four
// takes dims 32 t + 8 j + 0..3 at k = 4 t.. and 32 t + 8 j + 4..7 at k = 16 + 4 t.. So a lane's operands of all steps are 16 bytes
// of e2m1 codes, or 32 bytes of a query.
#pragma once
#include "common.cuh"

constexpr int INDEX_DIM = 128, KEY_BYTES = INDEX_DIM / 2, KEY_BLOCKS = INDEX_DIM / 32;

// Number of entries that the query at p may see.
__device__ __forceinline__ int visible_entries(int p, int ratio) { return (p + 1) / ratio; }

// ---- keys ----

// Magnitudes of the codes 0..7, doubled, as bytes of two words.
constexpr unsigned TWICE_FP4_LOW = 0x03020100u, TWICE_FP4_HIGH = 0x0c080604u;
__constant__ unsigned MINUS_TWO = 0xfffffffeu, ALL_ONES = 0xffffffffu;  // factors not known to the compiler: it multiplies, on the pipe with less to do

// Byte b of `shift`: how far block b of the key is shifted left, 0..3. fits: all four can be. top: the largest of the four scale bytes.
struct KeyScale {
  unsigned shift;
  int top;
  bool fits;
};

__device__ __forceinline__ KeyScale key_scale(unsigned scales) {
  const int top = (int)max(max(scales & 255u, scales >> 8 & 255u), max(scales >> 16 & 255u, scales >> 24));
  const unsigned shift = scales + (unsigned)(3 - top) * 0x01010101u;  // bytes of 0..3, or some byte is larger
  return {shift, top, (shift & 0xfcfcfcfcu) == 0u && top <= 200};
}

// 2^-22 of an integer sum times 2^(fp32 factor): the product of two doubled codes counts 1/4, a shift of 3 another 1/8.
__device__ __forceinline__ float key_factor(int top) { return __uint_as_float((unsigned)(top + 18) << 23); }

// Of the codes 0..7 as bytes of two words: -magnitude, and 128 - magnitude with 0 for code 0. The latter's top bits are 0, so where bit 3
// of a nibble is set select_bytes gives 0. So -m - 2 * 0 is a negative code's value, -m - 2 * (128 - m) = m - 256 a positive one's, and
// no byte of the difference of two words borrows from the next: 256 - m - 2 (128 - m) = m.
struct CodeTable {
  unsigned negative[2], rest[2];
};

__device__ __forceinline__ CodeTable code_table(unsigned shift) {
  const unsigned factor = ALL_ONES << shift;
  CodeTable table;
  table.rest[0] = TWICE_FP4_LOW * factor + 0x80808000u;
  table.rest[1] = TWICE_FP4_HIGH * factor + 0x80808080u;
  table.negative[0] = table.rest[0] ^ 0x80808000u;
  table.negative[1] = table.rest[1] ^ 0x80808080u;
  return table;
}

// Eight codes as signed bytes, the first four in `low`. No branch, two look-ups and a product for four codes.
__device__ __forceinline__ void decode_codes(unsigned codes, const CodeTable &table, unsigned &low, unsigned &high) {
  const unsigned magnitudes = codes & 0x77777777u, codes_high = codes >> 16, magnitudes_high = magnitudes >> 16;
  low = select_bytes(table.rest[0], table.rest[1], codes) * MINUS_TWO + select_bytes(table.negative[0], table.negative[1], magnitudes);
  high = select_bytes(table.rest[0], table.rest[1], codes_high) * MINUS_TWO + select_bytes(table.negative[0], table.negative[1], magnitudes_high);
}

// A operands of sixteen keys from this lane's block of keys g (upper) and g + 8 (lower); shifts of the two blocks.
__device__ __forceinline__ void decode_keys(unsigned (&a)[4][4], const uint4 &upper, const uint4 &lower, unsigned upper_shift, unsigned lower_shift) {
  const CodeTable up = code_table(upper_shift), low = code_table(lower_shift);
  decode_codes(upper.x, up, a[0][0], a[0][2]);
  decode_codes(lower.x, low, a[0][1], a[0][3]);
  decode_codes(upper.y, up, a[1][0], a[1][2]);
  decode_codes(lower.y, low, a[1][1], a[1][3]);
  decode_codes(upper.z, up, a[2][0], a[2][2]);
  decode_codes(lower.z, low, a[2][1], a[2][3]);
  decode_codes(upper.w, up, a[3][0], a[3][2]);
  decode_codes(lower.w, low, a[3][1], a[3][3]);
}

// ---- queries ----

// A prepared query of HEADS heads (a multiple of 8), as bytes at multiples of 16:
//   integers  [HEADS][128] s8. For mma in the order of the dims, but the two halves of a block of 32 change places in odd heads, against
//             bank conflicts. For wgmma in the order of k, its 16-byte chunks swizzled as hopper.cuh says
//   fast      [HEADS] fp32, weight times scale of the head (where: fast_index) | flag [4] i32: the first is 1 where every key must go the wide way
//   weights   [HEADS] fp32 | scales [HEADS][4] fp32: value = integer * scale of the block, NaN where it is no such value
template <int HEADS> struct Query {
  static constexpr int FAST = HEADS * INDEX_DIM, FLAG = FAST + 4 * HEADS, WEIGHTS = FLAG + 16, SCALES = WEIGHTS + 4 * HEADS,
                       BYTES = SCALES + 4 * KEY_BLOCKS * HEADS, COMMON = WEIGHTS;  // COMMON: what the fast way reads
};

// Where the 16 bytes of half `half` of block `block` of a head begin, and for wgmma those of chunk `chunk` of 16 k.
__device__ __forceinline__ int query_offset(int head, int block, int half) { return head * INDEX_DIM + block * 32 + 16 * (half ^ (head & 1)); }
__device__ __forceinline__ int swizzled_offset(int head, int chunk) { return head * INDEX_DIM + 16 * (chunk ^ (head & 7)); }

// Where the weight of a head lies in `fast`. For wgmma a lane's sixteen, of heads 8 n + 2 t and 8 n + 2 t + 1, are four chunks of 16 bytes,
// chunk n / 2 at fast_chunk; the four lanes of a row read different banks.
__device__ __forceinline__ int fast_chunk(int t, int chunk) { return 16 * t + 4 * (chunk ^ t >> 1); }
template <bool FOR_WGMMA> __device__ __forceinline__ int fast_index(int head) {
  return FOR_WGMMA ? fast_chunk(head >> 1 & 3, head >> 4) + (head >> 3 & 1) * 2 + (head & 1) : head;
}

// Eight dims of a query, sixteen parts a head, and with the first of them the head's weight; zeros beyond the last head.
struct QueryPart {
  uint4 dims;
  float weight;
};
__device__ __forceinline__ QueryPart query_part(const __nv_bfloat16 *q, const float *weights, int hi, unsigned number) {
  QueryPart part = {make_uint4(0u, 0u, 0u, 0u), 0.f};
  if (number < (unsigned)hi * 16u) {
    part.dims = *reinterpret_cast<const uint4 *>(q + number * 8u);
    if (number % 16u == 0u) part.weight = weights[number / 16u];
  }
  return part;
}

// Asks for a query's q and weights before it is known whether the token is a pad.
__device__ __forceinline__ void prefetch_query(const __nv_bfloat16 *q, const float *weights, int hi) {
  const int line = threadIdx.x;  // of 128 bytes
  if (64 * line < hi * INDEX_DIM) prefetch_global(q + 64 * line);
  if (32 * line < hi) prefetch_global(weights + 32 * line);
}

// The whole block writes a prepared query but for its flag: it is set where a thread returns true. bf16 q [hi][128], 16-byte aligned;
// next: query_part of this thread's number. No barrier.
template <int HEADS, int THREADS, bool FOR_WGMMA = false>
__device__ __forceinline__ bool prepare_query(unsigned char *prepared, const __nv_bfloat16 *q, const float *weights, int hi, QueryPart next) {
  static_assert(HEADS % 8 == 0 && THREADS % WARP == 0, "whole warps");
  bool any_wide = false;
#pragma unroll 1
  for (unsigned unit = threadIdx.x; unit < HEADS * 16u; unit += THREADS) {  // eight dims; sixteen lanes hold a head, four a block
    const int head = (int)(unit / 16u), block = (int)(unit % 16u / 4u), eighth = (int)(unit % 4u);
    const uint4 packed = next.dims;
    const float weight = next.weight;
    next = query_part(q, weights, hi, unit + THREADS);
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
    unsigned largest = 0u;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, max(words[i] << 16 & 0x7fff0000u, words[i] & 0x7fff0000u));
    largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
    largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
    // Scale byte of the block, 0 for a block of zeros, 255 with an infinity or NaN
    const int own = largest == 0u ? 0 : largest < 0x7f800000u ? (int)e2m1_scale(fmaxf(__uint_as_float(largest), E2M1_AMAX_FLOOR)) : 255;
    int top = max(own, __shfl_xor_sync(FULL_MASK, own, 4));
    top = max(top, __shfl_xor_sync(FULL_MASK, top, 8));
    const bool apart = top != 0 && (own == 255 || top < 67 || top > 187 || (own != 0 && own < top - 3));
    const bool wide = (__ballot_sync(FULL_MASK, apart) >> (threadIdx.x & 16) & 0xffffu) != 0u;
    const int scale = own == 255 || top == 0 || (wide && own == 0) ? 127 : wide ? own : top - 3;  // 2^(scale - 128) a unit
    const float inverse = __uint_as_float((unsigned)(255 - scale) << 23);
    bool exact = own != 255;
    unsigned bytes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      unsigned whole[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const unsigned word = words[2 * i + k / 2];
        const float v = (k % 2 ? bf16_high(word) : bf16_low(word)) * inverse, shifted = v + 12582912.f;  // 1.5 * 2^23
        exact = exact && shifted - 12582912.f == v;
        whole[k] = __float_as_uint(shifted);
      }
      bytes[i] = select_bytes(select_bytes(whole[0], whole[1], 0x0040u), select_bytes(whole[2], whole[3], 0x0040u), 0x5410u);
    }
    if (FOR_WGMMA) {
#pragma unroll
      for (int i = 0; i < 2; i++) *reinterpret_cast<unsigned *>(prepared + swizzled_offset(head, 2 * eighth + i) + 4 * block) = bytes[i];
    } else {
      *reinterpret_cast<uint2 *>(prepared + query_offset(head, block, eighth / 2) + 8 * (eighth % 2)) = make_uint2(bytes[0], bytes[1]);
    }
    const unsigned inexact = __ballot_sync(FULL_MASK, !exact) >> (threadIdx.x & 16) & 0xffffu;
    any_wide = any_wide || wide || inexact != 0u;
    if (eighth == 0) {
      const float size = (inexact >> 4 * block & 15u) != 0u ? e8m0_decode(255u) : e8m0_decode((unsigned)(scale - 1));
      reinterpret_cast<float *>(prepared + Query<HEADS>::SCALES)[head * KEY_BLOCKS + block] = size;
      if (block == 0) {
        reinterpret_cast<float *>(prepared + Query<HEADS>::WEIGHTS)[head] = weight;
        reinterpret_cast<float *>(prepared + Query<HEADS>::FAST)[fast_index<FOR_WGMMA>(head)] = weight * size;  // one size for all blocks, unless wide
      }
    }
  }
  return any_wide;
}

// B operands of eight heads for all four steps: b[2 j], b[2 j + 1] of step j.
template <bool FOR_WGMMA = false> __device__ __forceinline__ void load_heads(unsigned (&b)[8], const unsigned char *prepared, int head_tile) {
  const int lane = threadIdx.x % WARP, head = head_tile * 8 + lane / 4, block = lane % 4;
  if (FOR_WGMMA) {
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = *reinterpret_cast<const unsigned *>(prepared + swizzled_offset(head, i) + 4 * block);
  } else {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 v = *reinterpret_cast<const uint4 *>(prepared + query_offset(head, block, half));
      b[4 * half] = v.x;
      b[4 * half + 1] = v.y;
      b[4 * half + 2] = v.z;
      b[4 * half + 3] = v.w;
    }
  }
}

// ---- scores ----

// relu of an exact sum, times 2^-22. The bits of a sum >= 0, below 2^22, are the denormal sum * 2^-149; those of a sum < 0 are a NaN,
// which .sat makes 0. One instruction, exact.
__device__ __forceinline__ float relu_of_sum(int sum) { return __saturatef(__int_as_float(sum) * 1.7014118346046923e38f); }

// Adds eight heads: sums of keys g and g + 8 over this lane's two heads 2 t and 2 t + 1, in ascending order.
__device__ __forceinline__ void add_heads(float (&sum)[2], const int (&d)[4], float2 weights) {
  sum[0] = fmaf(weights.x, relu_of_sum(d[0]), sum[0]);
  sum[1] = fmaf(weights.x, relu_of_sum(d[2]), sum[1]);
  sum[0] = fmaf(weights.y, relu_of_sum(d[1]), sum[0]);
  sum[1] = fmaf(weights.y, relu_of_sum(d[3]), sum[1]);
}

// s[i] of four lanes summed, (t + (t ^ 2)) first; lane t receives the sums with i % 4 == t.
template <int N> __device__ __forceinline__ void quad_sums(float (&out)[N / 4], const float (&s)[N]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N / 4; n++) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float low = s[4 * n + i], high = s[4 * n + 2 + i];
      pair[i] = (t & 2 ? high : low) + __shfl_xor_sync(FULL_MASK, t & 2 ? low : high, 2);
    }
    out[n] = (t & 1 ? pair[1] : pair[0]) + __shfl_xor_sync(FULL_MASK, t & 1 ? pair[0] : pair[1], 1);
  }
}

// The wide way for sixteen keys: shares of this lane in the scores of keys g and g + 8, to be added over the four lanes.
// upper, lower: this lane's block of the two keys, and all four scale bytes of either.
template <int HEADS, bool FOR_WGMMA>
__device__ __forceinline__ void wide_scores(float (&sum)[2], const uint4 &upper, const uint4 &lower, unsigned upper_scales, unsigned lower_scales,
                                            const unsigned char *prepared) {
  const float *weights = reinterpret_cast<const float *>(prepared + Query<HEADS>::WEIGHTS);
  const float *scales = reinterpret_cast<const float *>(prepared + Query<HEADS>::SCALES);
  const int t = threadIdx.x % 4;
  unsigned a[4][4];
  decode_keys(a, upper, lower, 0u, 0u);
  sum[0] = sum[1] = 0.f;
#pragma unroll 1
  for (int n = 0; n < HEADS / 8; n++) {
    unsigned b[8];
    load_heads<FOR_WGMMA>(b, prepared, n);
    double total[4] = {};
#pragma unroll 1
    for (int block = 0; block < KEY_BLOCKS; block++) {
      int d[4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool own = t == block;  // zeros in the other blocks
        const unsigned a_step[4] = {own ? a[j][0] : 0u, own ? a[j][1] : 0u, own ? a[j][2] : 0u, own ? a[j][3] : 0u};
        const unsigned b_step[2] = {b[2 * j], b[2 * j + 1]};
        mma_m16n8k32_s8(d, a_step, b_step);
      }
      const double key[2] = {0.5 * (double)e8m0_decode(upper_scales >> 8 * block & 255u), 0.5 * (double)e8m0_decode(lower_scales >> 8 * block & 255u)};
#pragma unroll
      for (int i = 0; i < 4; i++)
        total[i] += (double)d[i] * (key[i / 2] * (double)scales[(n * 8 + 2 * t + i % 2) * KEY_BLOCKS + block]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float dot = (float)total[i % 2 * 2 + i / 2];  // head by head, as add_heads
      sum[i % 2] = fmaf(weights[n * 8 + 2 * t + i / 2], dot < 0.f ? 0.f : dot, sum[i % 2]);
    }
  }
}

// ---- keys in memory ----

// The keys of a batch row for this lane: codes of its block t of a key, and all scale bytes. The last one stands for those beyond it.
struct Keys {
  const unsigned char *codes, *scales;
  int last;

  __device__ __forceinline__ const unsigned char *block(int e) const { return codes + (size_t)(unsigned)min(e, last) * KEY_BYTES; }
  __device__ __forceinline__ unsigned scale(int e) const { return reinterpret_cast<const unsigned *>(scales)[min(e, last)]; }
};

__device__ __forceinline__ uint4 load_16(const unsigned char *p) { return *reinterpret_cast<const uint4 *>(p); }

// Scores of 16 keys from first on, the wide way: lane t receives that of key g + 8 (t % 2).
template <int HEADS, bool FOR_WGMMA = false> __device__ __forceinline__ float wide_result(const Keys &keys, int first, const unsigned char *prepared) {
  const int e = first + threadIdx.x % WARP / 4;
  float pair[2], total[1];
  wide_scores<HEADS, FOR_WGMMA>(pair, load_16(keys.block(e)), load_16(keys.block(e + 8)), keys.scale(e), keys.scale(e + 8), prepared);
  const float both[4] = {pair[0], pair[1], pair[0], pair[1]};
  quad_sums(total, both);
  return total[0];
}

constexpr int RUN = 32;  // keys of a warp's round in decode

// Starts the copy of this lane's share of 32 keys: block t of keys g, g + 8, g + 16, g + 24. Only this lane reads it.
__device__ __forceinline__ void fetch_run(unsigned char *to, const Keys &keys, int first) {
  const unsigned char *from = keys.block(first + threadIdx.x % WARP / 4);
  if (first + RUN - 1 <= keys.last) {
#pragma unroll
    for (int i = 0; i < 4; i++) cp_async_16(to + i * 16 * WARP, from + i * 8 * KEY_BYTES, 16);
  } else if (first <= keys.last) {
#pragma unroll
    for (int i = 0; i < 4; i++) cp_async_16(to + i * 16 * WARP, keys.block(first + 8 * i + threadIdx.x % WARP / 4), 16);
  }
  cp_async_commit();
}

// ---- decoded keys of a warp, for many queries ----

constexpr int CHUNK = 64;  // queries of a block

// Of M groups of sixteen keys from first on: A operands, factors of keys 8 t + g and 32 k more, and bit m where group m has to go the wide way.
template <int M> struct KeyTile {
  static constexpr int KEYS = 16 * M, RESULTS = M / 2;
  unsigned a[M][4][4];
  float factor[RESULTS];
  unsigned wide;
};

// most: entries from there on may hold anything, nobody sees them. The warp's lanes call together.
template <int M> __device__ __forceinline__ void decode_tile(KeyTile<M> &tile, const Keys &keys, int first, int most) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  tile.wide = 0u;
#pragma unroll
  for (int m = 0; m < M; m++) {
    const int e = first + 16 * m + g;
    const KeyScale upper = key_scale(keys.scale(e)), lower = key_scale(keys.scale(e + 8));
    decode_keys(tile.a[m], load_16(keys.block(e)), load_16(keys.block(e + 8)), upper.fits ? upper.shift >> 8 * t & 3u : 0u,
                lower.fits ? lower.shift >> 8 * t & 3u : 0u);
    if (__any_sync(FULL_MASK, (!upper.fits && e < most) || (!lower.fits && e + 8 < most))) tile.wide |= 1u << m;
  }
#pragma unroll
  for (int k = 0; k < M / 2; k++) tile.factor[k] = key_factor(key_scale(keys.scale(first + 32 * k + 8 * t + g)).top);
}

// Scores of keys 8 t + g and 32 k more, from sums of keys g and g + 8 of every group; wide_query: all go the wide way. keys_of: gives the
// keys, which are rarely asked for; prepared: the whole of the query.
template <int HEADS, bool FOR_WGMMA = false, int M, class KeysOf>
__device__ __forceinline__ void tile_scores(float (&result)[M / 2], const float (&sum)[2 * M], const KeyTile<M> &tile, const KeysOf &keys_of, int first,
                                            int seen, bool wide_query, const unsigned char *prepared) {
  const int t = threadIdx.x % 4;
  quad_sums(result, sum);
#pragma unroll
  for (int k = 0; k < M / 2; k++) result[k] *= tile.factor[k];
  const unsigned wide = wide_query ? (1u << M) - 1u : tile.wide;
  if (wide == 0u) return;
  const Keys keys = keys_of();
#pragma unroll 1
  for (int m = 0; m < M; m++) {
    if ((wide >> m & 1u) == 0u || first + 16 * m >= seen) continue;
    const float own = wide_result<HEADS, FOR_WGMMA>(keys, first + 16 * m, prepared);
#pragma unroll
    for (int k = 0; k < M / 2; k++)
      if (m == t / 2 + 2 * k) result[k] = own;
  }
}
