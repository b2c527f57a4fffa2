// wgmma_tiles.cuh    y[m,n] = sum_k x[m,k] w[n,k] for many rows on Hopper: w is operand A, decoded in registers, x is operand B
//
// Included by linear_wgmma.cu and experts_wgmma.cu. A block makes 128 rows of w times TOKENS rows of x: two warpgroups of 64 rows of w.
// Shared memory holds stages of 64 columns, loaded by cp.async: a panel of x, 128 bytes a row with the swizzle of hopper.cuh, and
// rows of w as they are stored. A code is decoded once for all TOKENS rows: lane (g, t) of a warp needs columns 2t, 2t + 1,
// 2t + 8, 2t + 9 of every 16 of rows g and g + 8 of w, and takes them out of words that its neighbours read too. bf16 weights are
// a panel too, and need no registers. The products of a group of columns, a stage or half of one, are under way while the codes of
// the next group are decoded; a stage is loaded again two stages later.
// A weight type W says how w is stored, as in tiles.cuh, and:
//   static constexpr int W_BYTES           of w in a stage, W_CHUNKS 16-byte pieces of a row in it
//   static int chunk_at(n, c)              where piece c of row n goes
//   void fragment(stage, n, k16, factor, a) A of step k16 (0..3) of rows n and n + 8
// Sums are in fp32, in an order that depends on K only: bitwise repeatable, batch-invariant. Rows of x and w start at multiples of
// 16 bytes, K is a multiple of 128. Whoever includes this declares the dynamic shared memory before, as wgmma_shared.
#pragma once
#include "hopper.cuh"
#include "packed.cuh"

constexpr int W_ROWS = 128, DEPTH = 64, WGMMA_THREADS = 2 * WARPGROUP;

// ---- how w is stored ----

struct Bf16Wgmma {
  static constexpr int W_BYTES = W_ROWS * SWIZZLE_ROW_BYTES, W_CHUNKS = 8;
  static constexpr bool BLOCK_SCALES = false, ROW_SCALES = false, FROM_REGISTERS = false;
  const __nv_bfloat16 *w;
  int K;
  __device__ __forceinline__ int row_bytes() const { return 2 * K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return reinterpret_cast<const unsigned char *>(w + (size_t)n * K); }
  __device__ __forceinline__ const unsigned char *scales(int) const { return nullptr; }
  static __device__ __forceinline__ int chunk_at(int n, int c) { return swizzle_128(n, c); }
  static __device__ __forceinline__ void fragment(const unsigned char *, int, int, const unsigned (&)[2], unsigned (&)[4], unsigned &) {}
};

struct Fp8Wgmma {  // scales: as Fp8Tiles of tiles.cuh
  static constexpr int STEP_BYTES = W_ROWS * 16 + 32, W_BYTES = 9 * 1024, W_CHUNKS = 4;  // 16 columns of all rows, 32 bytes apart from the next
  static constexpr bool BLOCK_SCALES = true, ROW_SCALES = false, FROM_REGISTERS = true;
  static_assert(4 * STEP_BYTES <= W_BYTES, "a stage holds four steps");
  const unsigned char *w, *scale;
  int first_row, K;
  __device__ __forceinline__ int row_bytes() const { return K; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)(first_row + n) * K; }
  __device__ __forceinline__ const unsigned char *scales(int n) const {  // one per 128 columns
    return scale + (size_t)((first_row + n) / 128) * ceil_div(K, 128);
  }
  static __device__ __forceinline__ int chunk_at(int n, int c) { return c * STEP_BYTES + n * 16; }
  static __device__ __forceinline__ void fragment(const unsigned char *stage, int n, int k16, const unsigned (&factor)[2],
                                                  unsigned (&a)[4], unsigned &nan) {
    const int t = threadIdx.x % 4;
    const unsigned selector = t % 2 ? 0x3424u : 0x1404u;  // two codes to the high bytes of two halves
    const unsigned char *at = stage + k16 * STEP_BYTES + n * 16 + t / 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned codes = __byte_perm(*reinterpret_cast<const unsigned *>(at + i % 2 * 8 * 16 + i / 2 * 8), 0u, selector);
      const unsigned magnitude = codes >> 4 & 0x07f007f0u;
      nan |= magnitude + 0x00100010u;  // bit 11 of a half: one of the two codes that mean NaN
      a[i] = bf16_products(magnitude | (codes & 0x80008000u), factor[0]);
    }
  }
  static constexpr unsigned NAN_BITS = 0x08000800u;
};

struct Fp4Wgmma {
  static constexpr int SLAB_BYTES = W_ROWS * 16 + 64, W_BYTES = 5 * 1024, W_CHUNKS = 2;  // 32 columns of all rows, 64 bytes apart from the next
  static constexpr bool BLOCK_SCALES = false, ROW_SCALES = true, FROM_REGISTERS = true;
  const unsigned char *w, *scale;
  int K;
  __device__ __forceinline__ int row_bytes() const { return K / 2; }
  __device__ __forceinline__ const unsigned char *row(int n) const { return w + (size_t)n * (K / 2); }
  __device__ __forceinline__ const unsigned char *scales(int n) const { return scale + (size_t)n * (K / 32); }
  static __device__ __forceinline__ int chunk_at(int n, int c) { return c * SLAB_BYTES + n * 16; }
  static __device__ __forceinline__ void fragment(const unsigned char *stage, int n, int k16, const unsigned (&factor)[2],
                                                  unsigned (&a)[4], unsigned &) {
    const unsigned selector = 0x4440u | threadIdx.x % 4;  // byte t: codes 2t and 2t + 1 of eight
    const unsigned char *at = stage + k16 / 2 * SLAB_BYTES + n * 16 + k16 % 2 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint2 words = *reinterpret_cast<const uint2 *>(at + i * 8 * 16);
      a[i] = pair(words.x, selector, factor[i]);
      a[2 + i] = pair(words.y, selector, factor[i]);
    }
  }
  static __device__ __forceinline__ unsigned pair(unsigned word, unsigned selector, unsigned factor) {
    const unsigned both = __byte_perm(word, 0u, selector) * 0x1001u;  // the second code 12 bits further: in the high half
    return bf16_products(bf16_products((both << 6 & 0x01c001c0u) | (both << 12 & 0x80008000u), E2M1_UNIT), factor);
  }
  static constexpr unsigned NAN_BITS = 0u;
};

// ---- the product ----

// Dynamic shared memory: stages, and beyond them the tables. An output tile takes the place of the stages at the end.
template <class W, int TOKENS, int STAGES> struct Layout {
  static constexpr int X_BYTES = TOKENS * SWIZZLE_ROW_BYTES, STAGE_BYTES = X_BYTES + W::W_BYTES;
  static constexpr int AT_ROWS = STAGES * STAGE_BYTES;             // [TOKENS] u32: start of a row of x in units of 16 bytes
  static constexpr int AT_SLOTS = AT_ROWS + TOKENS * 4;            // [TOKENS] i32: for the caller
  static constexpr int AT_SCALES = AT_SLOTS + TOKENS * 4;         // [STAGES][2 slabs][W_ROWS] bf16, ROW_SCALES
  static constexpr int BYTES = AT_SCALES + (W::ROW_SCALES ? STAGES * W_ROWS * 4 : 0);
  static_assert(STAGE_BYTES % SWIZZLE_ATOM_BYTES == 0, "panels start at multiples of a swizzle atom");
};

// 2^(120 + s - largest) as a bf16, twice; NaN where a scale is (byte 255).
__device__ __forceinline__ unsigned relative_unit(unsigned s, unsigned largest) {
  if (largest == 255u) return 0x7fff7fffu;
  const int exponent = 247 + (int)s - (int)largest;  // of a bf16; subnormal below 1
  const unsigned bits = exponent >= 1 ? (unsigned)exponent << 7 : exponent >= -6 ? 0x40u >> -exponent : 0u;
  return bits * 0x00010001u;
}

// Sums of rows n0 .. n0 + 127 of w and the `rows` rows of x that the table at AT_ROWS lists, as elements of type Out in shared
// memory, [rows][W_ROWS + OUT_GAP], finished(sum) each. All WGMMA_THREADS threads call, and see all of it afterwards.
template <class Out> struct OutTile {
  static constexpr int GAP = 16 / (int)sizeof(Out), STRIDE = W_ROWS + GAP;  // two rows are 32 bytes of banks apart
};

template <class W, int TOKENS, int STAGES, class Out, class Finish>
__device__ __forceinline__ Out *wgmma_product(const W &w, const __nv_bfloat16 *x, int n0, int N, int K, Finish finished) {
  typedef Layout<W, TOKENS, STAGES> L;
  constexpr int AHEAD = STAGES - 2, X_COPIES = TOKENS * 8 / WGMMA_THREADS, W_COPIES = W_ROWS * W::W_CHUNKS / WGMMA_THREADS;
  constexpr int GROUP = TOKENS == 256 ? 4 : 2;  // steps of 16 columns whose products are started together: registers for two groups
  static_assert(TOKENS * OutTile<Out>::STRIDE * (int)sizeof(Out) <= L::AT_ROWS, "the output tile takes the place of the stages");
  const int tid = threadIdx.x, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int warp_row = tid / WARP * 16, steps = K / DEPTH;  // this warp's rows of w in the block
  const unsigned *x_rows = reinterpret_cast<const unsigned *>(wgmma_shared + L::AT_ROWS);
  unsigned short *row_scales = reinterpret_cast<unsigned short *>(wgmma_shared + L::AT_SCALES);  // bf16
#ifndef CUDA_ON_CPU
  if (shared_offset(wgmma_shared) % SWIZZLE_ATOM_BYTES) __trap();
#endif

  // This thread's 16-byte pieces of a stage.
  const int x_chunk = tid % 8, w_chunk = tid % W::W_CHUNKS, x_row = tid / 8, w_row = tid / W::W_CHUNKS;
  unsigned x_start[X_COPIES], w_start[W_COPIES];
#pragma unroll
  for (int i = 0; i < X_COPIES; i++) x_start[i] = x_rows[x_row + i * (WGMMA_THREADS / 8)];
#pragma unroll
  for (int i = 0; i < W_COPIES; i++)
    w_start[i] = (unsigned)((w.row(min(n0 + w_row + i * (WGMMA_THREADS / W::W_CHUNKS), N - 1)) - w.row(n0)) / 16);
  const unsigned char *x_from = reinterpret_cast<const unsigned char *>(x) + x_chunk * 16, *w_from = w.row(n0) + w_chunk * 16;
  const int x_to = swizzle_128(x_row, x_chunk);  // 32 rows further is the same chunk 4096 bytes further
  int loaded = 0;
  auto load = [&]() {
    unsigned char *stage = wgmma_shared + loaded % STAGES * L::STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
      cp_async_16(stage + x_to + i * (WGMMA_THREADS / 8) * SWIZZLE_ROW_BYTES, x_from + (size_t)x_start[i] * 16, 16);
#pragma unroll
    for (int i = 0; i < W_COPIES; i++)
      cp_async_16(stage + L::X_BYTES + W::chunk_at(w_row + i * (WGMMA_THREADS / W::W_CHUNKS), w_chunk),
                  w_from + (size_t)w_start[i] * 16, 16);
    const int more = ++loaded < steps ? -1 : 0;  // beyond the end: the last columns again, for nobody
    x_from += more & 2 * DEPTH;
    w_from += more & W::W_CHUNKS * 16;
  };
  // NOTE: a branch between the wgmma of a step and those of the next makes ptxas wait for each of them (C7513): nothing below is
  // left out, what is not needed is read from a place that is there.
  const int slab = tid / W_ROWS, scale_row = tid % W_ROWS;  // this thread's scale of a stage
  const unsigned char *scales = W::ROW_SCALES ? w.scales(min(n0 + scale_row, N - 1)) + slab : nullptr;
  auto scale_of = [&](int step) { return W::ROW_SCALES ? e8m0_pair(scales[2 * min(step, steps - 1)]) : 0u; };
  auto keep_scale = [&](int step, unsigned scale) {
    if (W::ROW_SCALES) row_scales[(step % STAGES * 2 + slab) * W_ROWS + scale_row] = (unsigned short)scale;
  };

  // Scales of the 64 rows of w of a warpgroup: the largest, and what a code is multiplied by in 128 columns.
  const unsigned char *block_scales = w.scales(min(n0 + tid / WARPGROUP * 64, N - 1));
  unsigned largest = 0, next_scale = 0, factor[2] = {};
  if constexpr (W::BLOCK_SCALES) {
    for (int i = lane; i < ceil_div(K, 128); i += WARP) largest = max(largest, (unsigned)block_scales[i]);
    largest = __reduce_max_sync(FULL_MASK, largest);
    next_scale = block_scales[0];
  }

#pragma unroll
  for (int step = 0; step < AHEAD; step++) {
    load();
    cp_async_commit();
    keep_scale(step, scale_of(step));
  }
  unsigned pending = scale_of(AHEAD), nan = 0;

  float acc[TOKENS / 2];
  unsigned even[GROUP][4], odd[GROUP][4];
  auto begin = [&](int step, bool first_half) {  // first_half: of 128 columns
    cp_async_wait<AHEAD - 1>();
    fence_proxy_async();
    wgmma_wait<1>();  // but for the group before this one all products are over: their stages and registers are free
    __syncthreads();
    load();
    cp_async_commit();
    keep_scale(step + AHEAD, pending);
    pending = scale_of(step + AHEAD + 1);
    if (W::BLOCK_SCALES && first_half) {
      factor[0] = relative_unit(next_scale, largest);
      next_scale = block_scales[min(step + 2, steps - 1) / 2];
    }
  };
  auto multiply = [&](int step, int first, unsigned (&a)[GROUP][4]) {  // columns 16 first .. 16 (first + GROUP) - 1 of a stage
    const unsigned char *stage = wgmma_shared + step % STAGES * L::STAGE_BYTES;
    const unsigned x_panel = shared_offset(stage), w_panel = x_panel + L::X_BYTES + tid / WARPGROUP * 64 * SWIZZLE_ROW_BYTES;
    if (W::FROM_REGISTERS) {
      wgmma_keep(a);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        if (W::ROW_SCALES && (first + i) % 2 == 0)
#pragma unroll
          for (int half = 0; half < 2; half++)
            factor[half] = row_scales[(step % STAGES * 2 + (first + i) / 2) * W_ROWS + warp_row + g + 8 * half] * 0x00010001u;
        W::fragment(stage + L::X_BYTES, warp_row + g, first + i, factor, a[i], nan);
      }
    }
    wgmma_keep(acc);
    if (W::FROM_REGISTERS) wgmma_keep(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const unsigned long long columns = wgmma_k_major(x_panel + (first + i) * 32);
      const bool adds = step > 0 || first + i > 0;
      if constexpr (W::FROM_REGISTERS) wgmma_rs<TOKENS, false>(acc, a[i], columns, adds);
      else wgmma_ss<TOKENS, false>(acc, wgmma_k_major(w_panel + (first + i) * 32), columns, adds);
    }
    wgmma_commit();
    wgmma_keep(acc);
  };
  int step = 0;
#pragma unroll 1
  do {
    begin(step, true);
    multiply(step, 0, even);
    if constexpr (GROUP == 4) {
      begin(step + 1, false);
      multiply(step + 1, 0, odd);
    } else {
      wgmma_wait<1>();
      multiply(step, 2, odd);
      begin(step + 1, false);
      multiply(step + 1, 0, even);
      wgmma_wait<1>();
      multiply(step + 1, 2, odd);
    }
    step += 2;
  } while (step < steps);
  wgmma_wait<0>();
  wgmma_keep(acc);
  cp_async_wait<0>();
  __syncthreads();  // nobody reads or writes a stage any more

  if constexpr (W::BLOCK_SCALES) {
    if (__any_sync(FULL_MASK, nan & W::NAN_BITS)) {  // rare: which rows of w have a NaN code
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned found = 0;
        const int n = n0 + warp_row + g + 8 * half;
        if (n < N)
          for (int i = t; i < w.row_bytes(); i += 4) found |= (w.row(n)[i] & 0x7fu) == 0x7fu;
        found |= __shfl_xor_sync(FULL_MASK, found, 1);
        found |= __shfl_xor_sync(FULL_MASK, found, 2);
        if (found)
#pragma unroll
          for (int i = 0; i < TOKENS / 2; i++)
            if (i % 4 / 2 == half) acc[i] = __uint_as_float(0x7fffffffu);
      }
    }
  }
  // NOTE: without a product here, by a number that the compiler does not know, ptxas waits for each wgmma (C7514).
  const float result = W::BLOCK_SCALES ? e8m0_decode(largest) : (float)min(K, 1);
  Out *tile = reinterpret_cast<Out *>(wgmma_shared);
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++)
    tile[(i / 4 * 8 + 2 * t + i % 2) * OutTile<Out>::STRIDE + warp_row + g + i % 4 / 2 * 8] = finished(acc[i] * result);
  __syncthreads();
  return tile;
}

// Writes rows of an output tile: columns n0 .. of row m go to y + row_of(m) * stride. All threads call.
template <class Out, class RowOf>
__device__ __forceinline__ void store_tile(const Out *tile, int rows, Out *y, long long stride, int n0, int N, RowOf row_of) {
  constexpr int EACH = 16 / (int)sizeof(Out), PIECES = W_ROWS / EACH;
  const bool aligned = (((size_t)y | (size_t)(stride * (long long)sizeof(Out))) & 15) == 0;
  for (int i = threadIdx.x; i < rows * PIECES; i += WGMMA_THREADS) {
    const int m = i / PIECES, n = n0 + i % PIECES * EACH;
    const Out *from = tile + m * OutTile<Out>::STRIDE + i % PIECES * EACH;
    Out *to = y + row_of(m) * stride + n;
    if (aligned && n + EACH <= N) *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
    else
      for (int j = 0; j < EACH && n + j < N; j++) to[j] = from[j];
  }
}
