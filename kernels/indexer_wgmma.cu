// indexer_wgmma.cu    score[t,e] = sum_h weights[t,h] * relu(q[t,h] . key_e) as indexer_int8.cu, the products by Hopper's wgmma
//
// archs    sm_90a
// twin     reference/attention.py::Indexer        tests  pytest parity/unit/test_indexer_wgmma.py (emulated), bench/indexer.py
// tensors  as indexer_int8.cu with HEADS = 64, queries prepared in the order of wgmma (indexer.cuh)
// numerics as indexer_int8.cu, the same bits: products exact, sums of a lane over the same heads in the same order
// launch   rows: grid = (T, S), block = 384, any S, ROWS_SHARED bytes of shared memory: a warpgroup takes every S * 3rd run of 128 keys
//          prepare: grid = T, block = 256; then tiles: grid = (ceil(E / KEYS), ceil(T / 64)), block = 128 warpgroups, TILES_SHARED bytes
// variants 5 wgmma (decode): keys decoded for the next product while the last one runs
//          6 wgmma_tiles (prefill): 2 warpgroups keep 256 decoded keys each, KEYS = 512 | 7 wgmma_tiles_3: 3 of 128, KEYS = 384
//
// A is 64 keys of a warpgroup, 16 a warp, decoded into registers; B the 64 heads of a query in shared memory; D 64 keys x 64 heads.
#include "hopper.cuh"
#include "indexer.cuh"

constexpr int HEADS = 64, N = HEADS / 8, ROW_WARPS = 12, ROW_STAGES = 4, GROUP_RUN = 4 * RUN;
constexpr int INTEGERS = HEADS * INDEX_DIM, TAIL = Query<HEADS>::COMMON - INTEGERS;  // of a query: B operand, weights and flag
constexpr int RING = 10 * 1024, ROWS_SHARED = RING + ROW_WARPS * ROW_STAGES * RUN * KEY_BYTES;            // 108,544
constexpr int STAGES = 3, STAGE_QUERIES = 4, TILES_SHARED = STAGES * STAGE_QUERIES * (INTEGERS + TAIL);  // 101,568
static_assert(ROWS_SHARED <= 227 * 1024 && TILES_SHARED <= 226 * 1024 && Query<HEADS>::BYTES <= RING && INTEGERS % SWIZZLE_ATOM_BYTES == 0 && TAIL % 16 == 0, "places in shared memory");

extern __shared__ __align__(1024) unsigned char shared_bytes[];

// D = A B of 64 keys and 64 heads, started: wgmma_wait tells that it is done. a is not to change before.
__device__ __forceinline__ void start_products(int (&d)[32], unsigned (&a)[4][4], unsigned long long heads) {
  wgmma_keep(a);
  wgmma_fence();
  wgmma_rs_s8<false>(d, a[0], heads);
#pragma unroll
  for (int j = 1; j < 4; j++) wgmma_rs_s8<true>(d, a[j], wgmma_further(heads, 32 * j));
  wgmma_commit();
}

// weights: those of two heads every STEP.
template <int STEP> __device__ __forceinline__ void add_all_heads(float (&sum)[2], const int (&d)[32], const float2 *weights) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int four[4] = {d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]};
    add_heads(sum, four, weights[STEP * n]);
  }
}

extern "C" __global__ void __launch_bounds__(ROW_WARPS *WARP, 1)
indexer_rows_wgmma(const __nv_bfloat16 *q, const float *weights, const unsigned char *key_codes, const unsigned char *scales, const int *position,
                   const int *row, float *score, int hi, int E, int capacity, int ratio, long long q_stride, long long weights_stride,
                   long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  const int token = blockIdx.x;
  prefetch_query(q + token * q_stride, weights + token * weights_stride, hi);
  const int p = position[token], batch = row[token];
  if (min(p, batch) < 0) return;  // a row is never negative: both are on their way before the branch
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int seen = min(min(visible_entries(p, ratio), capacity), E), step = gridDim.y * (ROW_WARPS / 4) * GROUP_RUN;
  int first = (blockIdx.y * (ROW_WARPS / 4) + warp / 4) * GROUP_RUN;  // of the warpgroup; a warp has 32 of these keys
  const int own = warp % 4 * RUN;
  const Keys keys = {key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, seen - 1};
  float *out = score + token * score_stride + own + g + 8 * t;
  unsigned char *ring = shared_bytes + RING + warp * (ROW_STAGES * RUN * KEY_BYTES) + lane * 16;
  unsigned own_scales[2] = {0u, 0u};
  if (first < seen) {
#pragma unroll
    for (int i = 0; i < ROW_STAGES - 1; i++) fetch_run(ring + i * RUN * KEY_BYTES, keys, first + own + i * step);
    own_scales[0] = keys.scale(first + own + 8 * t + g);
    own_scales[1] = keys.scale(first + own + step + 8 * t + g);
  }
  const bool wide_query = prepare_query<HEADS, ROW_WARPS * WARP, true>(shared_bytes, q + token * q_stride, weights + token * weights_stride, hi);
  fence_proxy_async();
  __syncthreads();
  const unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes));
  float2 weight[N];
#pragma unroll
  for (int n = 0; n < N; n++) weight[n] = reinterpret_cast<const float2 *>(shared_bytes + Query<HEADS>::FAST)[4 * n + t];

  for (unsigned stage = 0; first < seen; first += step, stage++) {
    fetch_run(ring + (stage + ROW_STAGES - 1) % ROW_STAGES * RUN * KEY_BYTES, keys, first + own + (ROW_STAGES - 1) * step);
    const KeyScale size = key_scale(own_scales[0]);
    own_scales[0] = own_scales[1];
    own_scales[1] = keys.scale(first + own + 2 * step + 8 * t + g);
    const unsigned shift = size.fits ? size.shift : 0u;
    const unsigned wide = wide_query ? FULL_MASK : __ballot_sync(FULL_MASK, !size.fits);
    cp_async_wait<ROW_STAGES - 1>();
    const unsigned char *run = ring + stage % ROW_STAGES * RUN * KEY_BYTES;
    unsigned a[2][4][4];
    int d[2][32];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const unsigned upper = __shfl_sync(FULL_MASK, shift, 2 * m, 4), lower = __shfl_sync(FULL_MASK, shift, 2 * m + 1, 4);
      decode_keys(a[m], load_16(run + 2 * m * 16 * WARP), load_16(run + (2 * m + 1) * 16 * WARP), select_bytes(upper, 0u, 0x4440u | t),
                  select_bytes(lower, 0u, 0x4440u | t));
      start_products(d[m], a[m], heads);
    }
    float halves[2][2] = {};
    wgmma_wait<1>();
    wgmma_keep(d[0]);
    add_all_heads<1>(halves[0], d[0], weight);
    wgmma_wait<0>();
    wgmma_keep(d[1]);
    add_all_heads<1>(halves[1], d[1], weight);
    const float sum[4] = {halves[0][0], halves[0][1], halves[1][0], halves[1][1]};
    float total[1];
    quad_sums(total, sum);
    float result = total[0] * key_factor(size.top);
    if (wide != 0u) {
      if ((wide & 0x33333333u) != 0u) {
        const float upper_half = wide_result<HEADS, true>(keys, first + own, shared_bytes);
        if (t < 2) result = upper_half;
      }
      if ((wide & 0xccccccccu) != 0u) {
        const float lower_half = wide_result<HEADS, true>(keys, first + own + 16, shared_bytes);
        if (t >= 2) result = lower_half;
      }
    }
    const int e = first + own + 8 * t + g;
    if (e < E) out[first] = e < seen ? result : -INFINITY;
  }
  for (; first < E; first += step)
    if (first + own + 8 * t + g < E) out[first] = -INFINITY;
}

extern "C" __global__ void __launch_bounds__(256)
indexer_prepare_wgmma(const __nv_bfloat16 *q, const float *weights, const int *position, unsigned char *prepared, int hi, long long q_stride,
                      long long weights_stride) {
  const int token = blockIdx.x;
  if (position[token] < 0) return;
  unsigned char *to = prepared + (long long)token * Query<HEADS>::BYTES;
  const bool wide = prepare_query<HEADS, 256, true>(to, q + token * q_stride, weights + token * weights_stride, hi);
  if (threadIdx.x < 4) reinterpret_cast<int *>(to + Query<HEADS>::FLAG)[threadIdx.x] = wide;
}

template <int GROUPS, int M>
__device__ __forceinline__ void score_tiles(const unsigned char *prepared, const unsigned char *key_codes, const unsigned char *scales,
                                            const int *position, const int *row, float *score, int T, int E, int capacity, int ratio,
                                            long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  constexpr int THREADS = GROUPS * WARPGROUP, TILE_KEYS = 16 * M, COMMON = Query<HEADS>::COMMON, BYTES = Query<HEADS>::BYTES;
  __shared__ int seen_of[CHUNK], row_of[CHUNK];  // seen_of: of these entries, -1 for a pad
  unsigned char *tails = shared_bytes + STAGES * STAGE_QUERIES * INTEGERS;
  const int begin = blockIdx.y * CHUNK, count = min(CHUNK, T - begin), tid = threadIdx.x, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x * (GROUPS * 4 * TILE_KEYS), first_of_group = tile + tid / WARPGROUP * (4 * TILE_KEYS);
  const int first = tile + tid / WARP * TILE_KEYS, limit = min(capacity, E);
  for (int i = tid; i < count; i += THREADS) {
    const int p = position[begin + i];
    seen_of[i] = p < 0 ? -1 : min(visible_entries(p, ratio), limit);
    row_of[i] = row[begin + i];
  }
  __syncthreads();
  prepared += (long long)begin * BYTES;
  auto fetch = [&](int stage) {  // queries 4 stage to 4 stage + 3
#pragma unroll 1
    for (int k = 0; k < STAGE_QUERIES; k++) {
      const int i = stage * STAGE_QUERIES + k, slot = stage % STAGES * STAGE_QUERIES + k;
      if (i >= count || seen_of[i] <= tile) continue;
      for (int at = 16 * tid; at < COMMON; at += 16 * THREADS)
        cp_async_16(at < INTEGERS ? shared_bytes + slot * INTEGERS + at : tails + slot * TAIL + at - INTEGERS, prepared + (long long)i * BYTES + at, 16);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  KeyTile<M> own;
  int batch = -1;
  auto keys_of = [&] { return Keys{key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, limit - 1}; };
  for (int stage = 0; stage * STAGE_QUERIES < count; stage++) {
    cp_async_wait<STAGES - 2>();
    fence_proxy_async();
    __syncthreads();
    fetch(stage + STAGES - 1);
#pragma unroll 1
    for (int k = 0; k < STAGE_QUERIES; k++) {
      const int i = stage * STAGE_QUERIES + k, slot = stage % STAGES * STAGE_QUERIES + k;
      if (i >= count) break;
      const int seen = seen_of[i];
      if (seen < 0) continue;
      float result[M / 2];
#pragma unroll
      for (int half = 0; half < M / 2; half++) result[half] = -INFINITY;
      if (seen > first_of_group) {  // the warpgroup together
        if (row_of[i] != batch) {
          batch = row_of[i];
          int most = 0;
          for (int j = i; j < count; j++)
            if (row_of[j] == batch) most = max(most, seen_of[j]);
          decode_tile(own, keys_of(), first, most);
        }
        const unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes + slot * INTEGERS));
        const unsigned char *tail = tails + slot * TAIL;
        const float2 *weight = reinterpret_cast<const float2 *>(tail) + t;
        float sum[2 * M];
        int d[2][32];
        start_products(d[0], own.a[0], heads);
#pragma unroll
        for (int m = 0; m < M; m++) {
          if (m + 1 < M) {
            start_products(d[(m + 1) % 2], own.a[m + 1], heads);
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
          wgmma_keep(d[m % 2]);
          float pair[2] = {};
          add_all_heads<4>(pair, d[m % 2], weight);
          sum[2 * m] = pair[0];
          sum[2 * m + 1] = pair[1];
        }
        tile_scores<HEADS, true>(result, sum, own, keys_of, first, seen, *reinterpret_cast<const int *>(tail + 4 * HEADS) != 0, prepared + (long long)i * BYTES);
      }
      float *out = score + (begin + i) * score_stride + first + 8 * t + g;
#pragma unroll
      for (int half = 0; half < M / 2; half++) {
        const int e = first + 32 * half + 8 * t + g;
        if (e < E) out[32 * half] = e < seen ? result[half] : -INFINITY;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP, 1)
indexer_tiles_wgmma_2(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                      float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                      long long score_stride) {
  score_tiles<2, 4>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
indexer_tiles_wgmma_3(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                      float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                      long long score_stride) {
  score_tiles<3, 2>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}
