// linear.cuh    three ways to compute y[t,n] = sum_k x[t,k] w[n,k], for any storage of w: naive, thin, tiles by mma
//
// Included by linear_bf16.cu, linear_fp8.cu and experts.cu. A weight type W says how w is stored and decodes it exactly:
//   float at(int n, int k)                          one weight, its scale applied, in fp32
//   void eight(float (&v)[8], int n, int k)         w[n][k..k+7] in fp32, scale applied, zero from column K on; k % 8 == 0
//   static constexpr bool TILE_SCALE                true: tiles hold the unscaled codes, see below
//   void codes(float (&v)[8], int n, int k)         as eight, without the scale where TILE_SCALE
//   float tile_scale(int n, int k)                  scale of row n in the 64 columns from k on (1 where not TILE_SCALE)
// and X says where the rows of x are: const bf16 *row(int m), null where there is none; bool aligned, 16 bytes.
// Sums are in fp32, in an order that depends on K and the variant only: bitwise repeatable, batch-invariant.
// No size has to be a multiple of anything: tails are filled with zeros, nothing beyond a row is read.
#pragma once
#include "common.cuh"

// Rows of a matrix, row_stride elements apart.
struct DenseRows {
  const __nv_bfloat16 *x;
  long long row_stride;
  int rows;
  bool aligned;
  __device__ __forceinline__ const __nv_bfloat16 *row(int m) const { return m < rows ? x + m * row_stride : nullptr; }
};

__device__ __forceinline__ bool rows_aligned(const __nv_bfloat16 *x, long long row_stride) {
  return (((size_t)x | (size_t)(2 * row_stride)) & 15) == 0;
}

__device__ __forceinline__ void zero_8(float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.f;
}

// x[k..k+7] of a row, zero from column K on.
__device__ __forceinline__ void row_8(float (&v)[8], const __nv_bfloat16 *row, int k, int K, bool aligned) {
  if (aligned && k + 8 <= K) return load_8(v, row + k);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = k + i < K ? from_bf16(row[k + i]) : 0.f;
}

// ---- naive: one thread, k ascending ----

template <class W> __device__ __forceinline__ float naive_dot(const __nv_bfloat16 *row, const W &w, int n, int K) {
  float sum = 0.f;
  for (int k = 0; k < K; k++) sum = fmaf(from_bf16(row[k]), w.at(n, k), sum);
  return sum;
}

// ---- thin: eight lanes for two rows of w, so eight rows a warp; lane l takes columns 8 l .. 8 l + 7 of every 64 ----

constexpr int THIN_LANES = 8, THIN_ROWS = 2, THIN_THREADS = 128, THIN_BLOCK_ROWS = THIN_THREADS / THIN_LANES * THIN_ROWS;

// First row of this thread's two.
__device__ __forceinline__ int thin_first_row() {
  return (blockIdx.y * (THIN_THREADS / THIN_LANES) + threadIdx.x / THIN_LANES) * THIN_ROWS;
}

// Calls store(n, sum) for the two rows from n0 on, as far as they are below N. All lanes of a warp call.
template <class W, class Store>
__device__ __forceinline__ void thin_product(const __nv_bfloat16 *row, bool aligned, const W &w, int n0, int N, int K,
                                             Store store) {
  const int lane = threadIdx.x % THIN_LANES;
  float partial[THIN_ROWS][8] = {};  // by column modulo 8
  for (int k = lane * 8; k < K; k += THIN_LANES * 8) {
    float x[8], v[8];
    row_8(x, row, k, K, aligned);
#pragma unroll
    for (int r = 0; r < THIN_ROWS; r++) {
      w.eight(v, min(n0 + r, N - 1), k);
#pragma unroll
      for (int i = 0; i < 8; i++) partial[r][i] = fmaf(x[i], v[i], partial[r][i]);
    }
  }
  float sum[THIN_ROWS];
#pragma unroll
  for (int r = 0; r < THIN_ROWS; r++) {
    const float(&p)[8] = partial[r];
    sum[r] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
  }
  // A butterfly of both sums at once: after the first exchange a lane carries one of them.
  const bool second = lane & 4;
  float mine = (second ? sum[1] : sum[0]) + __shfl_xor_sync(FULL_MASK, second ? sum[0] : sum[1], 4);
  mine = warp_sum<4>(mine);
  const int n = n0 + second;
  if (lane % 4 == 0 && n < N) store(n, mine);
}

// ---- tiles: 64 rows of x times 64 rows of w, four warps of 16 rows each, k in steps of 64 through shared memory ----

constexpr int TILE = 64, TILE_THREADS = 128, TILE_ROW = TILE + 8;  // padded: rows of ldmatrix fall into different banks

// Calls store(m, n, sum) for every row m of x that exists and every n < N, m and n counted from the tile's corner
// (x.row is asked for 0..63, w for n0..n0+63). All 128 threads call. TILE_SCALE: each step's sum is multiplied by the
// scale of its row of w, a power of two, so that codes stay exact in bf16 whatever the scale.
template <class W, class X, class Store>
__device__ __forceinline__ void tile_product(const X &x, const W &w, int n0, int N, int K, Store store) {
  __shared__ __align__(16) __nv_bfloat16 x_tile[TILE][TILE_ROW], w_tile[TILE][TILE_ROW];
  __shared__ float scale_tile[TILE];
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP;
  const bool warp_has_rows = x.row(warp * 16) != nullptr;  // rows that exist come first
  float acc[TILE / 8][4] = {};
  for (int k0 = 0; k0 < K; k0 += TILE) {
    for (int i = tid; i < TILE * TILE / 8; i += TILE_THREADS) {
      const int row = i / (TILE / 8), col = i % (TILE / 8) * 8;
      float v[8];
      zero_8(v);
      const __nv_bfloat16 *source = x.row(row);
      if (source) row_8(v, source, k0 + col, K, x.aligned);
      store_8(&x_tile[row][col], v);
      zero_8(v);
      if (n0 + row < N) w.codes(v, n0 + row, k0 + col);
      store_8(&w_tile[row][col], v);
    }
    if (W::TILE_SCALE && tid < TILE) scale_tile[tid] = n0 + tid < N ? w.tile_scale(n0 + tid, k0) : 0.f;
    __syncthreads();
    if (warp_has_rows) {
      if constexpr (W::TILE_SCALE) {
        float step[TILE / 8][4] = {};
        warp_tile_mma<TILE / 8, false>(step, &x_tile[warp * 16][0], TILE_ROW, &w_tile[0][0], TILE_ROW, TILE);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) acc[n][i] = fmaf(step[n][i], scale_tile[n * 8 + lane % 4 * 2 + i % 2], acc[n][i]);
      } else {
        warp_tile_mma<TILE / 8, false>(acc, &x_tile[warp * 16][0], TILE_ROW, &w_tile[0][0], TILE_ROW, TILE);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int m = warp * 16 + lane / 4 + i / 2 * 8, col = n * 8 + lane % 4 * 2 + i % 2;
      if (n0 + col < N && x.row(m)) store(m, col, acc[n][i]);
    }
}
