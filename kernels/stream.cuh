// stream.cuh    y[t,n] = sum_k x[t,k] w[n,k] for few tokens: every byte of w is read once, 16 bytes a lane, for up to 8 tokens
//
// Included by linear_stream.cu and experts_stream.cu. A warp multiplies 8 R rows of w by 8 tokens with mma.m16n8k16: rows of w are
// the columns of B. The 16 columns of one mma may be any 16, as long as A and B agree on them: lane (g, t) = (l / 4, l % 4) reads
// 16 bytes of row g, and its codes are its part of B as they lie there (packed.cuh); of x it reads the same columns of token g.
// One A serves two mma: its rows g hold half of a token's columns, its rows g + 8 the other half, so each mma makes eight rows of
// sums that are meant and eight that are dropped (Sums). Nothing passes through shared memory but sums of slices, and the next
// loads are under way meanwhile. A weight type W says how w is stored:
//   static constexpr int RUN                  columns in 16 bytes; a warp takes 4 RUN columns of a row at a time, a chunk
//   static constexpr int GROUP                chunks that share a scale, which multiplies their sum; 1 where the scale is in the weight
//   static constexpr bool SCALES              a byte of scale belongs to every 16 bytes of codes
//   const unsigned char *row(n), *scales(n)   start of row n, and of its scales (SCALES)
//   int row_bytes()
//   static void arrange(x, a)                 8 columns of a token -> A: columns of the first mma in a[0], a[2], of the second in a[1], a[3]
//   static void unit<WIDE>(raw, u, b)         columns 8u .. 8u+7 of the lane's RUN -> B of two mma: b[0..1], b[2..3]. WIDE: see e2m1_unit
//   static unsigned nan(codes)                E4M3_NAN_BITS among its bits where a code is NaN
//   float sum_scale(n, k)                     of row n in the columns of the group at k (GROUP > 1)
//   bool same_scale(n0, last)                 rows n0 .. last have the same
// Sums are in fp32 and in an order that depends on K and the number of slices only: bitwise repeatable, batch-invariant, the
// same for every R and U. No size has to be a multiple of anything; whole chunks of aligned rows are fast.
#pragma once
#include "packed.cuh"

constexpr int STREAM_WARPS = 8, STREAM_THREADS = STREAM_WARPS * WARP, STREAM_TOKENS = 8, STREAM_GRAIN = 256;  // bytes of a row

struct Raw {
  uint4 codes;
  unsigned scale;
};

// D of the two mma: meant are first[0..1] and second[2..3].
struct Sums {
  float first[4], second[4];
  __device__ __forceinline__ void add(const unsigned (&a)[4], const unsigned (&b)[4]) {
    const unsigned b_first[2] = {b[0], b[1]}, b_second[2] = {b[2], b[3]};
    mma_m16n8k16_bf16(first, a, b_first);
    mma_m16n8k16_bf16(second, a, b_second);
  }
  __device__ __forceinline__ float total(int i) const { return first[i] + second[2 + i]; }
};

__device__ __forceinline__ bool aligned_16(const void *p, long long stride_bytes) { return (((size_t)p | (size_t)stride_bytes) & 15) == 0; }

__device__ __forceinline__ unsigned word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// 16 bytes of a row from byte at on, of which the row has `bytes`; zeros beyond. For rows of any alignment.
__device__ __forceinline__ uint4 bytes_16(const unsigned char *row, long long at, long long bytes) {
  unsigned words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (at + i < bytes) words[i / 4] |= (unsigned)row[at + i] << 8 * (i % 4);
  return {words[0], words[1], words[2], words[3]};
}

// ---- how w is stored ----

struct Bf16Stream {
  static constexpr int RUN = 8, GROUP = 1;
  static constexpr bool SCALES = false;
  const __nv_bfloat16 *w;
  int K;
  __device__ __forceinline__ int row_bytes() const { return 2 * K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return reinterpret_cast<const unsigned char *>(w + (size_t)n * K); }
  __device__ __forceinline__ const unsigned char *scales(int) const { return nullptr; }
  static __device__ __forceinline__ void arrange(const uint4 &x, unsigned (&a)[4]) { a[0] = x.x, a[2] = x.y, a[1] = x.z, a[3] = x.w; }
  template <bool WIDE> static __device__ __forceinline__ void unit(const Raw &raw, int, unsigned (&b)[4]) {
    b[0] = raw.codes.x, b[1] = raw.codes.y, b[2] = raw.codes.z, b[3] = raw.codes.w;
  }
  static __device__ __forceinline__ unsigned nan(const uint4 &) { return 0u; }
  __device__ __forceinline__ float sum_scale(int, int) const { return 1.f; }
  __device__ __forceinline__ bool same_scale(int, int) const { return true; }
};

struct Fp8Stream {
  static constexpr int RUN = 16, GROUP = 2;  // 128 columns
  static constexpr bool SCALES = false;
  const unsigned char *w, *scale;
  int first_row, K;  // of this group of outputs
  __device__ __forceinline__ int row_bytes() const { return K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)(first_row + n) * K; }
  __device__ __forceinline__ const unsigned char *scales(int) const { return nullptr; }
  static __device__ __forceinline__ void arrange(const uint4 &x, unsigned (&a)[4]) {
    a[0] = low_halves(x.x, x.y), a[2] = high_halves(x.x, x.y), a[1] = low_halves(x.z, x.w), a[3] = high_halves(x.z, x.w);
  }
  template <bool WIDE> static __device__ __forceinline__ void unit(const Raw &raw, int u, unsigned (&b)[4]) {
    e4m3_pairs(word_of(raw.codes, 2 * u), b[0], b[1]);
    e4m3_pairs(word_of(raw.codes, 2 * u + 1), b[2], b[3]);
  }
  static __device__ __forceinline__ unsigned nan(const uint4 &c) {
    return e4m3_nan_sum(c.x) | e4m3_nan_sum(c.y) | e4m3_nan_sum(c.z) | e4m3_nan_sum(c.w);
  }
  __device__ __forceinline__ float sum_scale(int n, int k) const {
    return e8m0_decode(scale[(size_t)((first_row + n) / 128) * ceil_div(K, 128) + k / 128]);
  }
  __device__ __forceinline__ bool same_scale(int n0, int last) const { return (first_row + n0) / 128 == (first_row + last) / 128; }
};

struct Fp4Stream {  // K % 32 == 0: the 32 columns of a lane share a scale
  static constexpr int RUN = 32, GROUP = 1;
  static constexpr bool SCALES = true;
  const unsigned char *w, *scale;  // of this expert
  int K;
  __device__ __forceinline__ int row_bytes() const { return K / 2; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)n * (K / 2); }
  __device__ __forceinline__ const unsigned char *scales(int n) const { return scale + (size_t)n * (K / 32); }
  static __device__ __forceinline__ void arrange(const uint4 &x, unsigned (&a)[4]) {
    a[0] = low_halves(x.x, x.z), a[2] = high_halves(x.x, x.z), a[1] = low_halves(x.y, x.w), a[3] = high_halves(x.y, x.w);
  }
  template <bool WIDE> static __device__ __forceinline__ void unit(const Raw &raw, int u, unsigned (&b)[4]) {
    e2m1_bits(word_of(raw.codes, u), b);
    const unsigned factor = WIDE ? e8m0_pair(raw.scale) : e2m1_unit(raw.scale);
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = bf16_products(WIDE ? bf16_products(b[i], E2M1_UNIT) : b[i], factor);
  }
  static __device__ __forceinline__ unsigned nan(const uint4 &) { return 0u; }
  __device__ __forceinline__ float sum_scale(int, int) const { return 1.f; }
  __device__ __forceinline__ bool same_scale(int, int) const { return true; }
};

// ---- the product ----

// Columns that one of `slices` parts of a row takes: a multiple of STREAM_GRAIN bytes.
template <class W> __device__ __forceinline__ int slice_columns(int K, int slices) {
  constexpr int GRAIN = STREAM_GRAIN / 16 * W::RUN;
  return ceil_div(ceil_div(K, GRAIN), slices) * GRAIN;
}

// sums[r] += one chunk of rows n0 + 8 r .. n0 + 8 r + 7, x being the lane's columns of its token.
template <class W, int R, bool WIDE>
__device__ __forceinline__ void stream_chunk(const Raw (&raw)[R], const uint4 (&x)[W::RUN / 8], Sums (&sums)[R]) {
#pragma unroll
  for (int u = 0; u < W::RUN / 8; u++) {
    unsigned a[4];
    W::arrange(x[u], a);
#pragma unroll
    for (int r = 0; r < R; r++) {
      unsigned b[4];
      W::template unit<WIDE>(raw[r], u, b);
      sums[r].add(a, b);
    }
  }
}

template <class W, int R> __device__ __forceinline__ bool any_wide(const Raw (&raw)[R]) {
  bool wide = false;
#pragma unroll
  for (int r = 0; r < R; r++) wide |= raw[r].scale > E2M1_WIDEST;
  return W::SCALES && __any_sync(FULL_MASK, wide);
}

// acc[r] += sums[r] times the scales of rows n0 + 8 r + 2 t and the next. same: all rows have the scale of row n0.
template <class W, int R>
__device__ __forceinline__ void add_scaled(const W &w, float (&acc)[R][2], const Sums (&sums)[R], bool same, int n0, int N, int k) {
  const int t = threadIdx.x % 4;
  if (same) {
    const float scale = w.sum_scale(n0, k);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < 2; i++) acc[r][i] = fmaf(sums[r].total(i), scale, acc[r][i]);
  } else {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < 2; i++) acc[r][i] = fmaf(sums[r].total(i), w.sum_scale(min(n0 + 8 * r + 2 * t + i, N - 1), k), acc[r][i]);
  }
}

// Columns k_begin .. k_end - 1 of w times those of `token`, this lane's row of x: acc[r][i] is of its token and row n0 + 8 r + 2 t + i.
// Whole chunks of aligned rows. All lanes of a warp call.
template <class W, int R, int U>
__device__ __forceinline__ void stream_whole(const W &w, const __nv_bfloat16 *token, int n0, int N, int k_begin, int k_end,
                                             float (&acc)[R][2], unsigned (&nan)[R]) {
  constexpr int CHUNK = 4 * W::RUN, STEP = U * CHUNK, UNITS = W::RUN / 8;
  static_assert(U % W::GROUP == 0, "a step holds whole groups");
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, chunks = (k_end - k_begin) / CHUNK;
  const bool same = w.same_scale(n0, min(n0 + 8 * R, N) - 1);
  const unsigned char *codes[R], *scales[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int n = min(n0 + 8 * r + g, N - 1);
    codes[r] = w.row(n) + k_begin / W::RUN * 16 + t * 16;
    scales[r] = W::SCALES ? w.scales(n) + k_begin / W::RUN + t : nullptr;
  }
  const uint4 *x = reinterpret_cast<const uint4 *>(token + k_begin + t * W::RUN);
  auto load = [&](Raw (&raw)[R], int u) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      raw[r].codes = __ldcs(reinterpret_cast<const uint4 *>(codes[r] + u * 64));
      raw[r].scale = W::SCALES ? (unsigned)__ldg(scales[r] + u * 4) : 0u;
    }
  };
  auto advance = [&](int by) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      codes[r] += by * 64;
      if (W::SCALES) scales[r] += by * 4;
    }
  };
  auto load_step = [&](Raw (&raw)[U][R]) {
#pragma unroll
    for (int u = 0; u < U; u++) load(raw[u], u);
    advance(U);
  };
  Sums sums[R] = {};
  auto multiply = [&](const Raw (&raw)[R], int u) {
    uint4 columns[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) columns[i] = __ldg(x + u * (CHUNK / 8) + i);
#pragma unroll
    for (int r = 0; r < R; r++) nan[r] |= W::nan(raw[r].codes);
    if (any_wide<W>(raw)) stream_chunk<W, R, true>(raw, columns, sums);
    else stream_chunk<W, R, false>(raw, columns, sums);
  };
  auto close_group = [&](int k) {
    if (W::GROUP == 1) return;
    add_scaled(w, acc, sums, same, n0, N, k);
#pragma unroll
    for (int r = 0; r < R; r++) sums[r] = {};
  };
  auto multiply_step = [&](const Raw (&raw)[U][R], int k) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      multiply(raw[u], u);
      if (u % W::GROUP == W::GROUP - 1) close_group(k + (u - (W::GROUP - 1)) * CHUNK);
    }
    x += STEP / 8;
  };

  Raw one[U][R], other[U][R];
  const int steps = chunks / U;
  int k = k_begin;
  if (steps > 0) load_step(one);
  for (int step = 0; step < steps; step += 2, k += 2 * STEP) {
    if (step + 1 < steps) load_step(other);
    multiply_step(one, k);
    if (step + 1 >= steps) break;
    if (step + 2 < steps) load_step(one);
    multiply_step(other, k + STEP);
  }
  k = k_begin + steps * STEP;
  for (int chunk = 0; k < k_end; k += CHUNK, chunk++) {  // what is left of a step
    Raw raw[R];
    load(raw, 0);
    multiply(raw, 0);
    if (chunk % W::GROUP == W::GROUP - 1 || k + CHUNK >= k_end) close_group(k - chunk % W::GROUP * CHUNK);
    advance(1);
    x += CHUNK / 8;
  }
  if (W::GROUP == 1)
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < 2; i++) acc[r][i] = sums[r].total(i);
}

// The same sums for rows of any length and alignment, eight rows of w.
template <class W>
__device__ __forceinline__ void stream_any(const W &w, const __nv_bfloat16 *token, int n0, int N, int K, int k_begin, int k_end,
                                           float (&acc)[1][2], unsigned (&nan)[1]) {
  constexpr int CHUNK = 4 * W::RUN;
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, n = min(n0 + g, N - 1);
  const unsigned char *codes = w.row(n), *x = reinterpret_cast<const unsigned char *>(token);
  Sums sums[1] = {};
  int chunk = 0;
  for (int k0 = k_begin; k0 < k_end; k0 += CHUNK, chunk++) {
    const int k = k0 + t * W::RUN;
    Raw raw[1] = {{bytes_16(codes, k / W::RUN * 16, w.row_bytes()), W::SCALES && k < K ? (unsigned)w.scales(n)[k / W::RUN] : 0u}};
    uint4 columns[W::RUN / 8];
#pragma unroll
    for (int i = 0; i < W::RUN / 8; i++) columns[i] = bytes_16(x, 2ll * (k + 8 * i), 2ll * K);
    nan[0] |= W::nan(raw[0].codes);
    if (any_wide<W>(raw)) stream_chunk<W, 1, true>(raw, columns, sums);
    else stream_chunk<W, 1, false>(raw, columns, sums);
    if (W::GROUP > 1 && (chunk % W::GROUP == W::GROUP - 1 || k0 + CHUNK >= k_end)) {
      add_scaled(w, acc, sums, false, n0, N, k0);
      sums[0] = {};
    }
  }
  if (W::GROUP == 1) acc[0][0] = sums[0].total(0), acc[0][1] = sums[0].total(1);
}

// First row of w of this warp: blocks hold STREAM_WARPS / slices tiles of 8 R rows, each the work of `slices` warps.
template <int R> __device__ __forceinline__ int stream_first_row(int block, int slices) {
  return (block * (STREAM_WARPS / slices) + threadIdx.x / WARP / slices) * 8 * R;
}

// Calls store(token, n, sum) for the up to 8 tokens and the rows n < N of this warp's tile. token: this lane's row of x, any
// other where there is none (has_token). All STREAM_THREADS threads of the block call.
template <class W, int R, int U, class Store>
__device__ __forceinline__ void stream_product(const W &w, const __nv_bfloat16 *token, bool has_token, bool whole, int n0, int N, int K,
                                               int slices, Store store) {
  __shared__ float parts[STREAM_WARPS][R * 2][WARP];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4, slice = warp % slices;
  const int columns = slice_columns<W>(K, slices), k_begin = slice * columns, k_end = min(k_begin + columns, K);
  float acc[R][2] = {};
  unsigned nan[R] = {};
  if (n0 < N && k_begin < k_end) {
    if (whole) stream_whole<W, R, U>(w, token, n0, N, k_begin, k_end, acc, nan);
    else
#pragma unroll
      for (int r = 0; r < R; r++) {
        float some[1][2] = {};
        unsigned some_nan[1] = {};
        stream_any(w, token, min(n0 + 8 * r, N - 1), N, K, k_begin, k_end, some, some_nan);
        acc[r][0] = some[0][0], acc[r][1] = some[0][1], nan[r] = some_nan[0];
      }
#pragma unroll
    for (int r = 0; r < R; r++) {  // a row of w with a NaN code: its sums are NaN
      nan[r] |= __shfl_xor_sync(FULL_MASK, nan[r], 1);
      nan[r] |= __shfl_xor_sync(FULL_MASK, nan[r], 2);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (__shfl_sync(FULL_MASK, nan[r], 8 * t + 4 * i) & E4M3_NAN_BITS) acc[r][i] = __uint_as_float(0x7fffffffu);
    }
  }
  if (slices > 1) {  // in ascending order
#pragma unroll
    for (int i = 0; i < R * 2; i++) parts[warp][i][lane] = acc[i / 2][i % 2];
    __syncthreads();
    if (slice != 0) return;
    for (int next = 1; next < slices; next++)
#pragma unroll
      for (int i = 0; i < R * 2; i++) acc[i / 2][i % 2] += parts[warp + next][i][lane];
  }
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int n = n0 + 8 * r + 2 * t + i;
      if (n < N && has_token) store(lane / 4, n, acc[r][i]);
    }
}

// ---- the routed experts: a slot is one (token, choice) ----

// Slots of this block's expert, from this block's on: list[0..]. Returns how many, 0 where another block takes this slot.
__device__ __forceinline__ int slots_together(const int *experts, int S, int slot, int (&list)[STREAM_TOKENS]) {
  __shared__ int found;
  const int expert = experts[slot], lane = threadIdx.x;
  if (lane < WARP) {
    int before = 0, count = 0;  // slots of this expert before this one, and from this one on
    for (int first = 0; first < S; first += WARP) {
      const int other = first + lane;
      const bool same = other < S && experts[other] == expert;
      const unsigned mask = __ballot_sync(FULL_MASK, same);
      const int up_to_here = slot - first;  // lanes below are slots before this one
      const unsigned earlier = up_to_here <= 0 ? 0u : up_to_here >= WARP ? mask : mask & ((1u << up_to_here) - 1u);
      before += __popc(earlier);
      const unsigned later = mask & ~earlier;
      const int rank = count + __popc(later & ((1u << lane) - 1u));
      if ((later >> lane & 1u) && rank < STREAM_TOKENS) list[rank] = other;
      count += __popc(later);
    }
    if (lane == 0) found = before % STREAM_TOKENS ? 0 : min(count, STREAM_TOKENS);
  }
  __syncthreads();
  return found;
}

// y of the slots of one expert, from `slot` on, in the rows of w that `block` has. All threads of the block call.
template <int R, int U>
__device__ __forceinline__ void experts_product(const __nv_bfloat16 *x, const int *experts, const unsigned char *w,
                                                const unsigned char *w_scale, __nv_bfloat16 *y, int slot, int block, int S,
                                                int slots_per_row, int N, int K, long long x_stride, int slices) {
  __shared__ int list[STREAM_TOKENS];
  const int expert = experts[slot];
  if (expert < 0) return;  // the whole block leaves
  const int count = slots_together(experts, S, slot, list);
  if (count == 0) return;  // likewise
  const unsigned char *codes = w + (size_t)expert * N * (K / 2), *scale = w_scale + (size_t)expert * N * (K / 32);
  const bool whole = aligned_16(x, 2 * x_stride) && aligned_16(codes, K / 2) && K % (4 * Fp4Stream::RUN) == 0;
  const int token = threadIdx.x % WARP / 4;
  stream_product<Fp4Stream, R, U>(
      Fp4Stream{codes, scale, K}, x + list[token < count ? token : 0] / slots_per_row * x_stride, token < count, whole,
      stream_first_row<R>(block, slices), N, K, slices,
      [&](int token, int n, float sum) { y[(size_t)list[token] * N + n] = to_bf16(sum); });
}
