// indexer_int8.cu    score[t,e] = sum_h weights[t,h] * relu(q[t,h] . key_e), -inf where e >= (p + 1) / ratio, on integer tensor cores
// twin     reference/attention.py::Indexer        tests  pytest parity/test_operations_indexer.py
// tensors  as indexer.cu, di = 128, hi <= HEADS: q [T, hi, 128] bf16, e2m1 values times a power of two per 32 | weights [T, hi] fp32
//          keys [b, capacity, 64] u8 at multiples of 16 | scales [b, capacity, 4] e8m0 at multiples of 4 | score [T, E] fp32
//          prepared [T, Query<HEADS>::BYTES] u8, what _prepare writes and _tiles reads | HEADS is 16 or 64
// numerics dot products exact (indexer.cuh), then relu, weight and sum in fp32: fmaf over heads 8 n + 2 t, 8 n + 2 t + 1 with n
//          ascending for t = 0..3, then ((t 0 + t 2) + (t 1 + t 3)). Both ways to run give the same bits, whatever else is in the call.
//          A q that is no e2m1 value times a power of two makes its token's scores NaN
// launch   rows: grid = (T, S), block = 384, any S: a warp takes every S * 12th run of 32 keys of a token
//          prepare: grid = T, block = 256; then tiles: grid = (ceil(E / (64 WARPS)), ceil(T / 64)), block = 32 WARPS,
//          4 Query<HEADS>::COMMON bytes of dynamic shared memory
// variants 3 int8 (fast, decode): rows, keys straight from memory to registers, decoded once for all heads
//          4 int8_tiles (fast, prefill): a warp keeps 64 decoded keys in registers, queries stream through shared memory
#include "indexer.cuh"

constexpr int ROW_WARPS = 12, STAGES = 4, PREPARE_THREADS = 256, TILE_KEYS = 64;

extern __shared__ __align__(128) unsigned char stages[];

// ---- rows: one query a block, many keys ----

template <int HEADS>
__device__ __forceinline__ void score_rows(const __nv_bfloat16 *q, const float *weights, const unsigned char *key_codes, const unsigned char *scales,
                                           const int *position, const int *row, float *score, int hi, int E, int capacity, int ratio,
                                           long long q_stride, long long weights_stride, long long keys_row_stride, long long scales_row_stride,
                                           long long score_stride) {
  constexpr int N = HEADS / 8, GROUP = N < 4 ? N : 4;
  __shared__ __align__(16) unsigned char prepared[Query<HEADS>::BYTES];
  const int token = blockIdx.x;
  q += token * q_stride;
  weights += token * weights_stride;
  const int p = position[token], batch = row[token];
  prefetch_query(q, weights, hi);
  const QueryPart part = query_part(q, weights, hi, threadIdx.x);
  if (min(p, batch) < 0) return;  // a row is never negative: both are on their way before the branch
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int seen = min(min(visible_entries(p, ratio), capacity), E), step = gridDim.y * ROW_WARPS * RUN;
  int first = (blockIdx.y * ROW_WARPS + warp) * RUN;
  const Keys keys = {key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, seen - 1};
  float *out = score + token * score_stride + g + 8 * t;  // of this lane's key of a run
  unsigned char *ring = stages + warp * (STAGES * RUN * KEY_BYTES) + lane * 16;
  unsigned own_scales[2] = {0u, 0u};  // all four of key g + 8 t, of this round and the next
  if (first < seen) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch_run(ring + i * RUN * KEY_BYTES, keys, first + i * step);
    own_scales[0] = keys.scale(first + 8 * t + g);
    own_scales[1] = keys.scale(first + step + 8 * t + g);
  }

  const bool wide_query = __syncthreads_or(prepare_query<HEADS, ROW_WARPS * WARP>(prepared, q, weights, hi, part)) != 0;
  unsigned heads[N][8];
  float2 weight[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    load_heads(heads[n], prepared, n);
    weight[n] = reinterpret_cast<const float2 *>(prepared + Query<HEADS>::FAST)[4 * n + t];
  }

  for (unsigned stage = 0; first < seen; first += step, stage++) {
    fetch_run(ring + (stage + STAGES - 1) % STAGES * RUN * KEY_BYTES, keys, first + (STAGES - 1) * step);
    const KeyScale size = key_scale(own_scales[0]);
    own_scales[0] = own_scales[1];
    own_scales[1] = keys.scale(first + 2 * step + 8 * t + g);
    const unsigned shift = size.fits ? size.shift : 0u;
    const unsigned wide = wide_query ? FULL_MASK : __ballot_sync(FULL_MASK, !size.fits);  // lanes whose key is wide
    cp_async_wait<STAGES - 1>();
    const unsigned char *run = ring + stage % STAGES * RUN * KEY_BYTES;
    float sum[4];
#pragma unroll
    for (int m = 0; m < 2; m++) {  // sixteen keys
      unsigned a[4][4];
      const unsigned upper = __shfl_sync(FULL_MASK, shift, 2 * m, 4), lower = __shfl_sync(FULL_MASK, shift, 2 * m + 1, 4);
      decode_keys(a, load_16(run + 2 * m * 16 * WARP), load_16(run + (2 * m + 1) * 16 * WARP), select_bytes(upper, 0u, 0x4440u | t),
                  select_bytes(lower, 0u, 0x4440u | t));
      float pair[2] = {};
#pragma unroll
      for (int from = 0; from < N; from += GROUP) {
        int d[GROUP][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int n = 0; n < GROUP; n++) {
            const unsigned b[2] = {heads[from + n][2 * j], heads[from + n][2 * j + 1]};
            mma_m16n8k32_s8(d[n], a[j], b);
          }
#pragma unroll
        for (int n = 0; n < GROUP; n++) add_heads(pair, d[n], weight[from + n]);
      }
      sum[2 * m] = pair[0];
      sum[2 * m + 1] = pair[1];
    }
    float total[1];
    quad_sums(total, sum);
    float result = total[0] * key_factor(size.top);
    if (wide != 0u) {
      if ((wide & 0x33333333u) != 0u) {
        const float upper_half = wide_result<HEADS>(keys, first, prepared);
        if (t < 2) result = upper_half;
      }
      if ((wide & 0xccccccccu) != 0u) {
        const float lower_half = wide_result<HEADS>(keys, first + 16, prepared);
        if (t >= 2) result = lower_half;
      }
    }
    const int e = first + 8 * t + g;
    if (e < E) out[first] = e < seen ? result : -INFINITY;
  }
  for (; first < E; first += step)
    if (first + 8 * t + g < E) out[first] = -INFINITY;
}

extern "C" __global__ void __launch_bounds__(ROW_WARPS *WARP, 1)
indexer_score_int8_16(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales, const int *position,
                      const int *row, float *score, int hi, int E, int capacity, int ratio, long long q_stride, long long weights_stride,
                      long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  score_rows<16>(q, weights, keys, scales, position, row, score, hi, E, capacity, ratio, q_stride, weights_stride, keys_row_stride, scales_row_stride,
                 score_stride);
}

extern "C" __global__ void __launch_bounds__(ROW_WARPS *WARP, 1)
indexer_score_int8_64(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales, const int *position,
                      const int *row, float *score, int hi, int E, int capacity, int ratio, long long q_stride, long long weights_stride,
                      long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  score_rows<64>(q, weights, keys, scales, position, row, score, hi, E, capacity, ratio, q_stride, weights_stride, keys_row_stride, scales_row_stride,
                 score_stride);
}

// ---- tiles: many queries a block, 64 keys a warp ----

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
indexer_prepare_16(const __nv_bfloat16 *q, const float *weights, const int *position, unsigned char *prepared, int hi, long long q_stride,
                   long long weights_stride) {
  const int token = blockIdx.x;
  if (position[token] < 0) return;
  unsigned char *to = prepared + (long long)token * Query<16>::BYTES;
  q += token * q_stride;
  weights += token * weights_stride;
  const int wide = __syncthreads_or(prepare_query<16, PREPARE_THREADS>(to, q, weights, hi, query_part(q, weights, hi, threadIdx.x)));
  if (threadIdx.x < 4) reinterpret_cast<int *>(to + Query<16>::FLAG)[threadIdx.x] = wide != 0;
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
indexer_prepare_64(const __nv_bfloat16 *q, const float *weights, const int *position, unsigned char *prepared, int hi, long long q_stride,
                   long long weights_stride) {
  const int token = blockIdx.x;
  if (position[token] < 0) return;
  unsigned char *to = prepared + (long long)token * Query<64>::BYTES;
  q += token * q_stride;
  weights += token * weights_stride;
  const int wide = __syncthreads_or(prepare_query<64, PREPARE_THREADS>(to, q, weights, hi, query_part(q, weights, hi, threadIdx.x)));
  if (threadIdx.x < 4) reinterpret_cast<int *>(to + Query<64>::FLAG)[threadIdx.x] = wide != 0;
}

template <int HEADS, int WARPS>
__device__ __forceinline__ void score_tiles(const unsigned char *prepared, const unsigned char *key_codes, const unsigned char *scales,
                                            const int *position, const int *row, float *score, int T, int E, int capacity, int ratio,
                                            long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  constexpr int N = HEADS / 8, THREADS = WARPS * WARP, COMMON = Query<HEADS>::COMMON;
  static_assert(COMMON % 16 == 0 && Query<HEADS>::BYTES % 16 == 0, "copied 16 bytes at a time");
  __shared__ int seen_of[CHUNK], row_of[CHUNK];  // seen_of: of these entries, -1 for a pad
  const int begin = blockIdx.y * CHUNK, count = min(CHUNK, T - begin), tid = threadIdx.x, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x * (WARPS * TILE_KEYS), first = tile + tid / WARP * TILE_KEYS, limit = min(capacity, E);
  for (int i = tid; i < count; i += THREADS) {
    const int p = position[begin + i];
    seen_of[i] = p < 0 ? -1 : min(visible_entries(p, ratio), limit);
    row_of[i] = row[begin + i];
  }
  __syncthreads();
  prepared += (long long)begin * Query<HEADS>::BYTES;
  auto fetch = [&](int i) {
    if (i < count && seen_of[i] > tile)
      for (int at = 16 * tid; at < COMMON; at += 16 * THREADS)
        cp_async_16(stages + i % STAGES * COMMON + at, prepared + (long long)i * Query<HEADS>::BYTES + at, 16);
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  KeyTile<4> own;
  int batch = -1;  // the row whose keys these are
  auto keys_of = [&] { return Keys{key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, limit - 1}; };
  for (int i = 0; i < count; i++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fetch(i + STAGES - 1);
    const int seen = seen_of[i];
    if (seen < 0) continue;
    float *out = score + (begin + i) * score_stride + first + 8 * t + g;
    float result[2] = {-INFINITY, -INFINITY};
    if (seen > first) {
      if (row_of[i] != batch) {
        batch = row_of[i];
        int most = 0;
        for (int k = i; k < count; k++)
          if (row_of[k] == batch) most = max(most, seen_of[k]);
        decode_tile(own, keys_of(), first, most);
      }
      const unsigned char *query = stages + i % STAGES * COMMON;
      float sum[8] = {};
#pragma unroll
      for (int n = 0; n < N; n++) {
        unsigned b[8];
        load_heads(b, query, n);
        const float2 weight = reinterpret_cast<const float2 *>(query + Query<HEADS>::FAST)[4 * n + t];
        int d[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const unsigned b_step[2] = {b[2 * j], b[2 * j + 1]};
            mma_m16n8k32_s8(d[m], own.a[m][j], b_step);
          }
#pragma unroll
        for (int m = 0; m < 4; m++) {
          float pair[2] = {sum[2 * m], sum[2 * m + 1]};
          add_heads(pair, d[m], weight);
          sum[2 * m] = pair[0];
          sum[2 * m + 1] = pair[1];
        }
      }
      tile_scores<HEADS>(result, sum, own, keys_of, first, seen, *reinterpret_cast<const int *>(query + Query<HEADS>::FLAG) != 0,
                         prepared + (long long)i * Query<HEADS>::BYTES);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int e = first + 32 * k + 8 * t + g;
      if (e < E) out[32 * k] = e < seen ? result[k] : -INFINITY;
    }
  }
}

extern "C" __global__ void __launch_bounds__(4 * WARP, 1)
indexer_tiles_16_4(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                  float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                  long long score_stride) {
  score_tiles<16, 4>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}

extern "C" __global__ void __launch_bounds__(8 * WARP, 1)
indexer_tiles_64_8(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                  float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                  long long score_stride) {
  score_tiles<64, 8>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}

extern "C" __global__ void __launch_bounds__(12 * WARP, 1)
indexer_tiles_64_12(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                  float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                  long long score_stride) {
  score_tiles<64, 12>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}
