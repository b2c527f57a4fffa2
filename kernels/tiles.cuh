// tiles.cuh    y[m,n] = sum_k x[m,k] w[n,k] for many rows: tiles of 128 rows of x, w packed in shared memory, four stages of cp.async
//
// Included by linear_tiles.cu and experts_tiles.cu. A warp has 64 rows of x and 64 rows of w, all mma.m16n8k16. Shared memory holds
// stages of 64 columns as two slabs of 32: a row of a slab is 64 bytes of x, or 64, 32 or 16 of w (bf16, e4m3, e2m1). As in
// stream.cuh the 16 columns of one mma may be any 16: lane (g, t) takes columns 8 t .. 8 t + 7 of a slab, of x as one 16-byte and
// of w as one 16-, 8- or 4-byte word, which serve two mma; codes become bf16 on the way from shared memory to the tensor core.
// Eight lanes touch 128 bytes in a row, so no access of either side meets a bank twice; slabs are 64 bytes more than their rows
// apart for the same reason. A weight type W says how w is stored:
//   static constexpr int SLAB_BYTES           of a row of w in 32 columns
//   const unsigned char *row(n); int row_bytes()
//   typedef Word                              what a lane takes of a row of a slab
//   static void arrange(low, high, a)         8 columns of two rows of x -> A of two mma
//   static void unit(word, factor, b)         8 columns of w -> B of two mma
//   static unsigned nan(word)                 E4M3_NAN_BITS among its bits where a code is NaN
//   static constexpr bool BLOCK_SCALES        a scale per 128 columns for the 64 rows of a warp: factor(s) and result(s), see Fp8Tiles
//   static constexpr bool ROW_SCALES          a scale per 32 columns of a row
// Sums are in fp32, k ascending in steps of 16, in an order that depends on K only: bitwise repeatable, batch-invariant, the same
// for any number of warps. Rows of x and w start at multiples of 16 bytes, K is a multiple of 64.
#pragma once
#include "packed.cuh"

constexpr int TILES_ROWS = 128, TILES_DEPTH = 64, SLAB = 32, WARP_ROWS = 64, WARP_COLUMNS = 64, SLAB_GAP = 64;

__device__ __forceinline__ void mma_two(float (&d)[4], const unsigned (&a)[2][4], const unsigned (&b)[4]) {
  const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  mma_m16n8k16_bf16(d, a[0], first);
  mma_m16n8k16_bf16(d, a[1], second);
}

// ---- how w is stored ----

struct Bf16Tiles {
  static constexpr int SLAB_BYTES = 64;
  static constexpr bool BLOCK_SCALES = false, ROW_SCALES = false;
  typedef uint4 Word;
  const __nv_bfloat16 *w;
  int K;
  __device__ __forceinline__ int row_bytes() const { return 2 * K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return reinterpret_cast<const unsigned char *>(w + (size_t)n * K); }
  static __device__ __forceinline__ void arrange(const uint4 &low, const uint4 &high, unsigned (&a)[2][4]) {
    a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
    a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
  }
  static __device__ __forceinline__ void unit(const Word &word, unsigned, unsigned (&b)[4]) {
    b[0] = word.x, b[1] = word.y, b[2] = word.z, b[3] = word.w;
  }
  static __device__ __forceinline__ unsigned nan(const Word &) { return 0u; }
  __device__ __forceinline__ const unsigned char *scales(int) const { return nullptr; }
};

// Scales are powers of two: a code is multiplied by its scale over the largest of its row, which a bf16 holds down to 2^-124 of
// it, and sums by the largest, so that codes stay exact in bf16 whatever the scales are.
struct Fp8Tiles {
  static constexpr int SLAB_BYTES = 32;
  static constexpr bool BLOCK_SCALES = true, ROW_SCALES = false;
  typedef uint2 Word;
  const unsigned char *w, *scale;
  int first_row, K;  // of this group of outputs; 64 rows from first_row + a multiple of 64 on share their scales
  __device__ __forceinline__ int row_bytes() const { return K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)(first_row + n) * K; }
  static __device__ __forceinline__ void arrange(const uint4 &low, const uint4 &high, unsigned (&a)[2][4]) {
    a[0][0] = low_halves(low.x, low.y), a[0][1] = low_halves(high.x, high.y);
    a[0][2] = high_halves(low.x, low.y), a[0][3] = high_halves(high.x, high.y);
    a[1][0] = low_halves(low.z, low.w), a[1][1] = low_halves(high.z, high.w);
    a[1][2] = high_halves(low.z, low.w), a[1][3] = high_halves(high.z, high.w);
  }
  static __device__ __forceinline__ void unit(const Word &word, unsigned factor, unsigned (&b)[4]) {
    e4m3_pairs(word.x, factor, b[0], b[1]);
    e4m3_pairs(word.y, factor, b[2], b[3]);
  }
  static __device__ __forceinline__ unsigned nan(const Word &word) { return e4m3_nan_sum(word.x) | e4m3_nan_sum(word.y); }
  __device__ __forceinline__ const unsigned char *scales(int n) const {  // one per 128 columns
    return scale + (size_t)((first_row + n) / 128) * ceil_div(K, 128);
  }
};

struct Fp4Tiles {  // K % 32 == 0
  static constexpr int SLAB_BYTES = 16;
  static constexpr bool BLOCK_SCALES = false, ROW_SCALES = true;
  typedef unsigned Word;
  const unsigned char *w, *scale;  // of this expert
  int K;
  __device__ __forceinline__ int row_bytes() const { return K / 2; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)n * (K / 2); }
  static __device__ __forceinline__ void arrange(const uint4 &low, const uint4 &high, unsigned (&a)[2][4]) {
    a[0][0] = low_halves(low.x, low.z), a[0][1] = low_halves(high.x, high.z);
    a[0][2] = high_halves(low.x, low.z), a[0][3] = high_halves(high.x, high.z);
    a[1][0] = low_halves(low.y, low.w), a[1][1] = low_halves(high.y, high.w);
    a[1][2] = high_halves(low.y, low.w), a[1][3] = high_halves(high.y, high.w);
  }
  static __device__ __forceinline__ void unit(const Word &word, unsigned factor, unsigned (&b)[4]) {
    e2m1_bits(word, b);
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = bf16_products(bf16_products(b[i], E2M1_UNIT), factor);
  }
  static __device__ __forceinline__ unsigned nan(const Word &) { return 0u; }
  __device__ __forceinline__ const unsigned char *scales(int n) const { return scale + (size_t)n * (K / 32); }
};

// ---- the product ----

// Bytes of dynamic shared memory of a stage: x, then w.
template <class W, int COLUMNS> struct Stage {
  static constexpr int X_SLAB = TILES_ROWS * 64 + SLAB_GAP, W_SLAB = COLUMNS * W::SLAB_BYTES + SLAB_GAP;
  static constexpr int W_AT = 2 * X_SLAB, BYTES = W_AT + 2 * W_SLAB;
};

// 2^(120 + s - largest) as a bf16, twice; NaN where a scale is (byte 255).
__device__ __forceinline__ unsigned relative_unit(unsigned s, unsigned largest) {
  if (largest == 255u) return 0x7fff7fffu;
  const int exponent = 247 + (int)s - (int)largest;  // of a bf16; subnormal below 1
  const unsigned bits = exponent >= 1 ? (unsigned)exponent << 7 : exponent >= -6 ? 0x40u >> -exponent : 0u;
  return bits * 0x00010001u;
}

// Calls store(m, n, first, second, both) for the rows m < rows and n even: the sums of columns n and n + 1 of y, the second one if
// both. x_row[m]: start of row m of x in units of 16 bytes, that of any other row where there is none.
// 32 * (TILES_ROWS / 64) * (COLUMNS / 64) threads, all call; shared: STAGES * Stage<W, COLUMNS>::BYTES.
template <class W, int COLUMNS, int STAGES, class Store>
__device__ __forceinline__ void tiles_product(const W &w, const __nv_bfloat16 *x, const unsigned (&x_row)[TILES_ROWS], int rows, int n0,
                                              int N, int K, unsigned char *shared, Store store) {
  typedef Stage<W, COLUMNS> S;
  constexpr int THREADS = WARP * (TILES_ROWS / WARP_ROWS) * (COLUMNS / WARP_COLUMNS);
  constexpr int X_CHUNKS = 8, W_CHUNKS = W::SLAB_BYTES / 8, M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
  constexpr int X_COPIES = TILES_ROWS * X_CHUNKS / THREADS, W_COPIES = COLUMNS * W_CHUNKS / THREADS, IN_SLAB = W_CHUNKS / 2;
  static_assert(THREADS == COLUMNS, "a thread loads the scales of a row");
  __shared__ unsigned row_scales[STAGES][W::ROW_SCALES ? COLUMNS : 1];  // bf16, of the first slab in the low half
  const int tid = threadIdx.x, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int warp_m = tid / WARP % (TILES_ROWS / WARP_ROWS) * WARP_ROWS, warp_n = tid / WARP / (TILES_ROWS / WARP_ROWS) * WARP_COLUMNS;
  const int steps = K / TILES_DEPTH;

  // This thread's 16-byte pieces of a stage: of x, one chunk of eight in X_COPIES rows, of w one of W_CHUNKS in W_COPIES rows.
  const int x_chunk = tid % X_CHUNKS, w_chunk = tid % W_CHUNKS;
  unsigned x_start[X_COPIES], w_start[W_COPIES];  // in units of 16 bytes
#pragma unroll
  for (int i = 0; i < X_COPIES; i++) x_start[i] = x_row[tid / X_CHUNKS + i * (THREADS / X_CHUNKS)];
#pragma unroll
  for (int i = 0; i < W_COPIES; i++)
    w_start[i] = (unsigned)((w.row(min(n0 + tid / W_CHUNKS + i * (THREADS / W_CHUNKS), N - 1)) - w.row(n0)) / 16);
  const unsigned char *x_from = reinterpret_cast<const unsigned char *>(x) + x_chunk * 16, *w_from = w.row(n0) + w_chunk * 16;
  unsigned char *x_to = shared + x_chunk / 4 * S::X_SLAB + tid / X_CHUNKS * 64 + x_chunk % 4 * 16;
  unsigned char *w_to = shared + S::W_AT + w_chunk / IN_SLAB * S::W_SLAB + tid / W_CHUNKS * W::SLAB_BYTES + w_chunk % IN_SLAB * 16;
  int filled = 0;  // the stage that is loaded next
  auto load = [&]() {
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
      cp_async_16(x_to + filled * S::BYTES + i * (THREADS / X_CHUNKS) * 64, x_from + (size_t)x_start[i] * 16, 16);
#pragma unroll
    for (int i = 0; i < W_COPIES; i++)
      cp_async_16(w_to + filled * S::BYTES + i * (THREADS / W_CHUNKS) * W::SLAB_BYTES, w_from + (size_t)w_start[i] * 16, 16);
    x_from += 2 * TILES_DEPTH;
    w_from += 2 * W::SLAB_BYTES;
    filled = filled == STAGES - 1 ? 0 : filled + 1;
  };
  auto scales_of = [&](int step) {  // of this thread's row of w in both slabs
    unsigned both = 0;
    if (W::ROW_SCALES && n0 + tid < N)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (step < steps) both |= (e8m0_pair(w.scales(n0 + tid)[step * 2 + i]) & 0xffffu) << 16 * i;
    return both;
  };

  // Scales of 64 rows of w: the largest, and what a code is multiplied by in the next 128 columns.
  const unsigned char *block_scales = w.scales(min(n0 + warp_n, N - 1));
  unsigned largest = 0, unit = 0, next_scale = 0;
  if constexpr (W::BLOCK_SCALES) {
    for (int i = lane; i < ceil_div(K, 128); i += WARP) largest = max(largest, (unsigned)block_scales[i]);
    largest = __reduce_max_sync(FULL_MASK, largest);
    next_scale = block_scales[0];
  }

#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) load();
    cp_async_commit();
    if (W::ROW_SCALES) row_scales[step][tid] = scales_of(step);
  }
  unsigned pending = W::ROW_SCALES ? scales_of(STAGES - 1) : 0u;

  const bool working = warp_m < rows;
  float acc[M_TILES][N_TILES][4] = {};
  unsigned nan = 0;
  for (int step = 0; step < steps; step++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < steps) load();
    cp_async_commit();
    if (W::ROW_SCALES) {
      row_scales[(step + STAGES - 1) % STAGES][tid] = pending;
      pending = scales_of(step + STAGES);
    }
    if (W::BLOCK_SCALES && step % 2 == 0) {
      unit = relative_unit(next_scale, largest);
      if (step + 2 < steps) next_scale = block_scales[step / 2 + 1];
    }
    if (!working) continue;
    const unsigned char *stage = shared + step % STAGES * S::BYTES;
#pragma unroll
    for (int slab = 0; slab < 2; slab++) {
      const unsigned char *x_slab = stage + slab * S::X_SLAB + (warp_m + g) * 64 + t * 16;
      const unsigned char *w_slab = stage + S::W_AT + slab * S::W_SLAB + (warp_n + g) * W::SLAB_BYTES + t * (W::SLAB_BYTES / 4);
      unsigned a[M_TILES][2][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
        W::arrange(*reinterpret_cast<const uint4 *>(x_slab + m * 16 * 64), *reinterpret_cast<const uint4 *>(x_slab + (m * 16 + 8) * 64), a[m]);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        const typename W::Word word = *reinterpret_cast<const typename W::Word *>(w_slab + n * 8 * W::SLAB_BYTES);
        unsigned factor = unit, b[4];
        if (W::ROW_SCALES) factor = __byte_perm(row_scales[step % STAGES][warp_n + n * 8 + g], 0u, slab ? 0x3232 : 0x1010);
        W::unit(word, factor, b);
        nan |= W::nan(word);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) mma_two(acc[m][n], a[m], b);
      }
    }
  }
  if (!working) return;

  if (W::BLOCK_SCALES && __any_sync(FULL_MASK, nan & E4M3_NAN_BITS)) {  // rare: which rows of w have a NaN code
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      unsigned found = 0;
      const int column = n0 + warp_n + n * 8 + g;
      if (column < N)
        for (int i = t; i < w.row_bytes(); i += 4) found |= (w.row(column)[i] & 0x7fu) == 0x7fu;
      found |= __shfl_xor_sync(FULL_MASK, found, 1);
      found |= __shfl_xor_sync(FULL_MASK, found, 2);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (__shfl_sync(FULL_MASK, found, 8 * t + 4 * i))
#pragma unroll
          for (int m = 0; m < M_TILES; m++) acc[m][n][i] = acc[m][n][2 + i] = __uint_as_float(0x7fffffffu);
    }
  }
  const float result = W::BLOCK_SCALES ? e8m0_decode(largest) : 1.f;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = warp_m + m * 16 + half * 8 + g;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        const int column = n0 + warp_n + n * 8 + 2 * t;
        if (column < N) store(row, column, acc[m][n][2 * half] * result, acc[m][n][2 * half + 1] * result, column + 1 < N);
      }
    }
}

// Two neighbouring bf16 at p, in one store where they are aligned; the second one if both.
__device__ __forceinline__ void store_two(__nv_bfloat16 *p, float first, float second, bool both) {
  if (both && ((size_t)p & 3) == 0) {
    *reinterpret_cast<unsigned *>(p) = pack_bf16(first, second);
  } else {
    p[0] = to_bf16(first);
    if (both) p[1] = to_bf16(second);
  }
}
