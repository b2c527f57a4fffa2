// indexer.cu    score[t,e] = sum_h weights[t,h] * relu(q[t,h] . key_e), -inf where e >= (p + 1) / ratio
// twin     reference/attention.py::Indexer        tests  pytest parity/test_operations_attention.py -k indexer_score
// tensors  q [T, hi, di] bf16, rows q_stride elements apart | weights [T, hi] fp32, rows weights_stride apart
//          keys [b, capacity, di/2] u8: two e2m1 a byte, low nibble = even index | scales [b, capacity, di/32] e8m0; ONE key of di
//          per entry, shared by the heads; strides in bytes, of a batch row and of an entry
//          position, row [T] i32, position -1 = pad: its scores stay untouched | score [T, E] fp32, rows score_stride apart
//          E may exceed the capacity: such entries are -inf like all that are not complete at p
// numerics keys by a __constant__ table, exact in fp32 and in bf16; dot products in fp32, eight interleaved partial sums by
//          fmaf, added pairwise; heads in ascending order within a warp's share, shares in ascending order
//          mma: products exact, summed by the tensor core in fp32; heads by butterfly
// launch   naive: grid = (T, ceil(E / 64)), block = 64
//          entries: grid = (T, ceil(E / 32)), block = 128, (32 (di + 4) + hi * di) floats of dynamic shared memory
//          mma: grid = (T, ceil(E / 64)), block = 128, (64 + 16) (di + 8) bf16 of dynamic shared memory
// variants 0 naive: a thread per entry, all from global memory, kept as second oracle
//          1 entries (default): 32 keys decoded once a block, a lane per entry, heads spread over 4 warps
//          2 mma: 16 heads x 16 entries a warp on the tensor cores
#include "common.cuh"

constexpr int ENTRIES = 32, WARPS = 4, THREADS = WARPS * WARP, MMA_ENTRIES = 64;

extern __shared__ __align__(128) float shared_values[];

// Number of entries that the query at p may see.
__device__ __forceinline__ int visible_entries(int p, int ratio) { return (p + 1) / ratio; }

__device__ __forceinline__ float key_dim(const unsigned char *key, const unsigned char *scale, int c) {
  return e2m1_decode(key[c / 2] >> 4 * (c % 2)) * e8m0_decode(scale[c / 32]);
}

extern "C" __global__ void __launch_bounds__(64)
indexer_score_naive(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales,
                    const int *position, const int *row, float *score, int hi, int di, int E, int capacity, int ratio,
                    long long q_stride, long long weights_stride, long long keys_row_stride, long long keys_entry_stride,
                    long long scales_row_stride, long long scales_entry_stride, long long score_stride) {
  const int token = blockIdx.x, e = blockIdx.y * 64 + threadIdx.x, p = position[token];
  if (p < 0 || e >= E) return;
  float total = -INFINITY;
  if (e < min(visible_entries(p, ratio), capacity)) {
    const unsigned char *key = keys + row[token] * keys_row_stride + e * keys_entry_stride;
    const unsigned char *scale = scales + row[token] * scales_row_stride + e * scales_entry_stride;
    total = 0.f;
    for (int h = 0; h < hi; h++) {
      float dot = 0.f;
      for (int c = 0; c < di; c++) dot = fmaf(from_bf16(q[token * q_stride + h * di + c]), key_dim(key, scale, c), dot);
      total = fmaf(weights[token * weights_stride + h], dot < 0.f ? 0.f : dot, total);
    }
  }
  score[token * score_stride + e] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
indexer_score_entries(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales,
                      const int *position, const int *row, float *score, int hi, int di, int E, int capacity, int ratio,
                      long long q_stride, long long weights_stride, long long keys_row_stride, long long keys_entry_stride,
                      long long scales_row_stride, long long scales_entry_stride, long long score_stride) {
  __shared__ float share[WARPS][ENTRIES];
  const int token = blockIdx.x, first = blockIdx.y * ENTRIES, p = position[token];
  if (p < 0) return;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, e = first + lane;
  const int seen = min(min(visible_entries(p, ratio), capacity), E) - first;  // of this block's entries
  float *out = score + token * score_stride;
  if (seen <= 0) {  // the whole block
    if (warp == 0 && e < E) out[e] = -INFINITY;
    return;
  }
  const int key_row = di + 4, batch = row[token];  // padded against bank conflicts
  float *decoded = shared_values, *query = shared_values + ENTRIES * key_row;
  const int blocks = di / 32;
  for (int i = threadIdx.x; i < ENTRIES * blocks; i += THREADS) {  // a thread per key and block of 32 codes
    const int k = i % ENTRIES, block = i / ENTRIES;
    if (k >= seen) continue;
    const unsigned char *codes = keys + batch * keys_row_stride + (first + k) * keys_entry_stride + block * 16;
    const float scale = e8m0_decode(scales[batch * scales_row_stride + (first + k) * scales_entry_stride + block]);
    float *to = decoded + k * key_row + block * 32;
#pragma unroll
    for (int c = 0; c < 16; c++) {
      to[2 * c] = e2m1_decode(codes[c]) * scale;
      to[2 * c + 1] = e2m1_decode(codes[c] >> 4) * scale;
    }
  }
  for (int i = threadIdx.x * 8; i < hi * di; i += THREADS * 8)
#pragma unroll
    for (int j = 0; j < 8; j++) query[i + j] = from_bf16(q[token * q_stride + i + j]);
  __syncthreads();

  float total = 0.f;
  if (lane < seen) {
    const float *key = decoded + lane * key_row;
    for (int h = warp; h < hi; h += WARPS) {
      const float *head = query + h * di;
      float part[8] = {};
      for (int c = 0; c < di; c += 8)
#pragma unroll
        for (int j = 0; j < 8; j++) part[j] = fmaf(head[c + j], key[c + j], part[j]);
      const float dot = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
      total = fmaf(weights[token * weights_stride + h], dot < 0.f ? 0.f : dot, total);
    }
  }
  share[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && e < E) {
    float sum = share[0][lane];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += share[w][lane];
    out[e] = lane < seen ? sum : -INFINITY;
  }
}

// Sixteen heads at a time: S[16 heads][16 entries of this warp] by mma, then relu, weights and the sum over heads.
extern "C" __global__ void __launch_bounds__(THREADS)
indexer_score_mma(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales,
                  const int *position, const int *row, float *score, int hi, int di, int E, int capacity, int ratio,
                  long long q_stride, long long weights_stride, long long keys_row_stride, long long keys_entry_stride,
                  long long scales_row_stride, long long scales_entry_stride, long long score_stride) {
  const int token = blockIdx.x, first = blockIdx.y * MMA_ENTRIES, p = position[token];
  if (p < 0) return;
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int seen = min(min(visible_entries(p, ratio), capacity), E) - first;
  float *out = score + token * score_stride;
  if (seen <= 0) {
    if (tid < MMA_ENTRIES && first + tid < E) out[first + tid] = -INFINITY;
    return;
  }
  const int tile_row = di + 8, batch = row[token], blocks = di / 32;
  __nv_bfloat16 *key_tile = reinterpret_cast<__nv_bfloat16 *>(shared_values), *q_tile = key_tile + MMA_ENTRIES * tile_row;
  for (int i = tid; i < MMA_ENTRIES * blocks; i += THREADS) {
    const int k = i % MMA_ENTRIES, block = i / MMA_ENTRIES;
    __nv_bfloat16 *to = key_tile + k * tile_row + block * 32;
    const bool read = k < seen;
    const unsigned char *codes = keys + batch * keys_row_stride + (first + k) * keys_entry_stride + block * 16;
    const float scale = read ? e8m0_decode(scales[batch * scales_row_stride + (first + k) * scales_entry_stride + block]) : 0.f;
#pragma unroll
    for (int c = 0; c < 16; c++) {
      const unsigned pair = read ? codes[c] : 0u;
      to[2 * c] = to_bf16(e2m1_decode(pair) * scale);
      to[2 * c + 1] = to_bf16(e2m1_decode(pair >> 4) * scale);
    }
  }
  float sum[2][2] = {};  // entries 8 n + 2 t and the next
  for (int head = 0; head < hi; head += 16) {
    for (int i = tid; i < 16 * di; i += THREADS) {
      const int h = head + i / di;
      q_tile[i / di * tile_row + i % di] = h < hi ? q[token * q_stride + (long long)head * di + i] : to_bf16(0.f);
    }
    __syncthreads();
    float s[2][4] = {};
    warp_tile_mma<2, false>(s, q_tile, tile_row, key_tile + warp * 16 * tile_row, tile_row, di);
    const float upper = head + g < hi ? weights[token * weights_stride + head + g] : 0.f;
    const float lower = head + g + 8 < hi ? weights[token * weights_stride + head + g + 8] : 0.f;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        sum[n][k] = fmaf(upper, s[n][k] < 0.f ? 0.f : s[n][k], sum[n][k]);
        sum[n][k] = fmaf(lower, s[n][k + 2] < 0.f ? 0.f : s[n][k + 2], sum[n][k]);
      }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      float v = sum[n][k];
      v += __shfl_xor_sync(FULL_MASK, v, 4);
      v += __shfl_xor_sync(FULL_MASK, v, 8);
      v += __shfl_xor_sync(FULL_MASK, v, 16);
      const int entry = warp * 16 + n * 8 + t * 2 + k;
      if (g == 0 && first + entry < E) out[first + entry] = entry < seen ? v : -INFINITY;
    }
}
