// indexer_wgmma.cu    score[t,e] = sum_h weights[t,h] * relu(q[t,h] . key_e) as indexer_int8.cu, the products by Hopper's wgmma
//
// archs    sm_90a
// twin     reference/attention.py::Indexer        tests  pytest parity/unit/test_indexer_wgmma.py (emulated), bench/indexer.py
// tensors  as indexer_int8.cu with HEADS = 64, queries prepared in the order of wgmma (indexer.cuh)
// numerics as indexer_int8.cu, the same bits: products exact, sums of a lane over the same heads in the same order
// launch   rows: grid = (T, S), block = 128 GROUPS, any S, rows_shared(GROUPS) bytes of shared memory: a warpgroup takes every S * GROUPSth
//          run of 128 keys
//          prepare: grid = T, block = 256; then tiles: grid = (ceil(E / KEYS), ceil(T / 64)), block = 128 GROUPS, TILES_SHARED bytes,
//          KEYS = 64 M GROUPS
// variants 5 wgmma (decode): 3 warpgroups, keys decoded while the product of those before runs | 8 wgmma_16: 4 warpgroups
//          6 wgmma_tiles (prefill): 3 warpgroups keep 128 decoded keys each; 2 of 256 were 1 to 3 % slower on an H200: not kept
//          Two queries a product (N = 128) gave an illegal access on an H200, though not under emulation: not kept
//
// A is 64 keys of a warpgroup, 16 a warp, decoded into registers; B the 64 heads of a query in shared memory; D keys x heads.
#include "hopper.cuh"
#include "indexer.cuh"

constexpr int HEADS = 64, ROW_STAGES = 6, GROUP_RUN = 4 * RUN;
constexpr int INTEGERS = HEADS * INDEX_DIM, TAIL = Query<HEADS>::COMMON - INTEGERS;  // of a query: B operand, weights and flag
constexpr int RING = 10 * 1024, RUN_BYTES = RUN * KEY_BYTES;
constexpr int STAGES = 3, STAGE_QUERIES = 8, TILES_SHARED = STAGES * STAGE_QUERIES * (INTEGERS + TAIL);  // 203,136
constexpr int rows_shared(int groups) { return RING + groups * 4 * ROW_STAGES * RUN_BYTES; }            // 157,696 and 206,848
static_assert(rows_shared(4) <= 227 * 1024 && TILES_SHARED <= 226 * 1024 && Query<HEADS>::BYTES <= RING && INTEGERS % SWIZZLE_ATOM_BYTES == 0 && TAIL % 16 == 0, "places in shared memory");

extern __shared__ __align__(1024) unsigned char shared_bytes[];

// D = A B of 64 keys and N heads, started: wgmma_wait tells that it is done. a is not to change before.
template <int N> __device__ __forceinline__ void start_products(int (&d)[N / 2], unsigned (&a)[4][4], unsigned long long heads) {
  wgmma_keep(a);
  wgmma_fence();
  wgmma_rs_s8<false, N>(d, a[0], heads);
#pragma unroll
  for (int j = 1; j < 4; j++) wgmma_rs_s8<true, N>(d, a[j], wgmma_further(heads, 32 * j));
  wgmma_commit();
}

// This lane's weights of a query.
__device__ __forceinline__ void load_weights(float4 (&weight)[4], const unsigned char *fast) {
#pragma unroll
  for (int i = 0; i < 4; i++) weight[i] = *reinterpret_cast<const float4 *>(fast + 4 * fast_chunk(threadIdx.x % 4, i));
}

// Adds the 64 heads of the QUERYth query of a product, in ascending order.
template <int QUERY = 0, int COUNT> __device__ __forceinline__ void add_all_heads(float (&sum)[2], const int (&d)[COUNT], const float4 (&weight)[4]) {
#pragma unroll
  for (int n = 0; n < HEADS / 8; n++) {
    const int at = 32 * QUERY + 4 * n, four[4] = {d[at], d[at + 1], d[at + 2], d[at + 3]};
    const float4 w = weight[n / 2];
    add_heads(sum, four, n % 2 ? make_float2(w.z, w.w) : make_float2(w.x, w.y));
  }
}

// ---- rows: one query a block, many keys ----

template <int GROUPS>
__device__ __forceinline__ void score_rows(const __nv_bfloat16 *q, const float *weights, const unsigned char *key_codes, const unsigned char *scales,
                                           const int *position, const int *row, float *score, int hi, int E, int capacity, int ratio,
                                           long long q_stride, long long weights_stride, long long keys_row_stride, long long scales_row_stride,
                                           long long score_stride) {
  const int token = blockIdx.x;
  q += token * q_stride;
  weights += token * weights_stride;
  const int p = position[token], batch = row[token];
  prefetch_query(q, weights, hi);
  const QueryPart part = query_part(q, weights, hi, threadIdx.x);
  if (min(p, batch) < 0) return;  // a row is never negative: all of them are on their way before the branch
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int seen = min(min(visible_entries(p, ratio), capacity), E), step = gridDim.y * GROUPS * GROUP_RUN;
  const int own = warp % 4 * RUN;
  int first = (warp / 4 * gridDim.y + blockIdx.y) * GROUP_RUN;  // of the warpgroup; a warp has 32 of these keys
  const Keys keys = {key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, seen - 1};
  const unsigned char *codes = keys.codes + g * KEY_BYTES;
  const unsigned *key_scales = reinterpret_cast<const unsigned *>(keys.scales);
  float *out = score + token * score_stride + own + g + 8 * t;
  unsigned char *ring = shared_bytes + RING + warp * (ROW_STAGES * RUN_BYTES) + lane * 16;
  compute_once(codes);
  compute_once(key_scales);
  compute_once(out);
  auto fetch = [&](int stage, int e) {  // this lane's share of keys e to e + 31, as fetch_run
    unsigned char *to = ring + stage * RUN_BYTES;
    if (e + RUN <= seen) {
      const unsigned char *from = codes + (size_t)(unsigned)e * KEY_BYTES;
#pragma unroll
      for (int i = 0; i < 4; i++) cp_async_16(to + i * 16 * WARP, from + i * 8 * KEY_BYTES, 16);
    } else if (e < seen) {
#pragma unroll 1
      for (int i = 0; i < 4; i++) cp_async_16(to + i * 16 * WARP, keys.block(e + 8 * i + g), 16);
    }
    cp_async_commit();
  };
  auto scales_of = [&](int e) { return key_scales[min(e + 8 * t + g, seen - 1)]; };
  unsigned own_scales = 0u, next_scales = 0u;  // all four of key g + 8 t, of this run and the next
  if (first < seen) {
#pragma unroll 1
    for (int i = 0; i < ROW_STAGES - 1; i++) fetch(i, first + own + i * step);
    own_scales = scales_of(first + own);
    next_scales = scales_of(first + own + step);
  }
  const bool own_wide = prepare_query<HEADS, GROUPS * WARPGROUP, true>(shared_bytes, q, weights, hi, part);
  fence_proxy_async();
  const bool wide_query = __syncthreads_or(own_wide) != 0;
  if (first < seen) {
    const unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes));
    float4 weight[4];
    load_weights(weight, shared_bytes + Query<HEADS>::FAST);
    unsigned a[2][4][4];
    // Half m of the run in this stage; shift: of key g + 8 t.
    auto decode = [&](unsigned (&to)[4][4], int stage, int m, unsigned shift) {
      const unsigned char *run = ring + stage * RUN_BYTES;
      const unsigned upper = __shfl_sync(FULL_MASK, shift, 2 * m, 4), lower = __shfl_sync(FULL_MASK, shift, 2 * m + 1, 4);
      decode_keys(to, load_16(run + 2 * m * 16 * WARP), load_16(run + (2 * m + 1) * 16 * WARP), select_bytes(upper, 0u, 0x4440u | t),
                  select_bytes(lower, 0u, 0x4440u | t));
    };
    KeyScale size = key_scale(own_scales);
    cp_async_wait<ROW_STAGES - 2>();
    decode(a[0], 0, 0, size.fits ? size.shift : 0u);
    int stage = 0, free_stage = ROW_STAGES - 1;
    for (; first < seen; first += step) {
      const KeyScale of_run = size;
      int d[HEADS / 2];
      start_products<HEADS>(d, a[0], heads);
      decode(a[1], stage, 1, of_run.fits ? of_run.shift : 0u);
      float halves[2][2] = {};
      wgmma_wait<0>();
      wgmma_keep(d);
      add_all_heads(halves[0], d, weight);
      start_products<HEADS>(d, a[1], heads);
      fetch(free_stage, first + own + (ROW_STAGES - 1) * step);
      free_stage = stage;
      stage = stage + 1 < ROW_STAGES ? stage + 1 : 0;
      size = key_scale(next_scales);
      next_scales = scales_of(first + own + 2 * step);
      cp_async_wait<ROW_STAGES - 2>();
      decode(a[0], stage, 0, size.fits ? size.shift : 0u);  // of the next run; there may be none, and the ring hold anything
      wgmma_wait<0>();
      wgmma_keep(d);
      add_all_heads(halves[1], d, weight);
      const float sum[4] = {halves[0][0], halves[0][1], halves[1][0], halves[1][1]};
      float total[1];
      quad_sums(total, sum);
      float result = total[0] * key_factor(of_run.top);
      const unsigned wide = wide_query ? FULL_MASK : __ballot_sync(FULL_MASK, !of_run.fits);
      if (wide != 0u) {
#pragma unroll 1
        for (int m = 0; m < 2; m++) {
          if ((wide & 0x33333333u << 2 * m) == 0u) continue;
          const float of_half = wide_result<HEADS, true>(keys, first + own + 16 * m, shared_bytes);
          if (t / 2 == m) result = of_half;
        }
      }
      const int e = first + own + 8 * t + g;
      if (e < E) out[first] = e < seen ? result : -INFINITY;
    }
    cp_async_wait<0>();
  }
  for (; first < E; first += step)
    if (first + own + 8 * t + g < E) out[first] = -INFINITY;
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
indexer_rows_wgmma_3(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales, const int *position,
                     const int *row, float *score, int hi, int E, int capacity, int ratio, long long q_stride, long long weights_stride,
                     long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  score_rows<3>(q, weights, keys, scales, position, row, score, hi, E, capacity, ratio, q_stride, weights_stride, keys_row_stride, scales_row_stride, score_stride);
}

extern "C" __global__ void __launch_bounds__(4 * WARPGROUP, 1)
indexer_rows_wgmma_4(const __nv_bfloat16 *q, const float *weights, const unsigned char *keys, const unsigned char *scales, const int *position,
                     const int *row, float *score, int hi, int E, int capacity, int ratio, long long q_stride, long long weights_stride,
                     long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  score_rows<4>(q, weights, keys, scales, position, row, score, hi, E, capacity, ratio, q_stride, weights_stride, keys_row_stride, scales_row_stride, score_stride);
}

// ---- tiles: many queries a block ----

extern "C" __global__ void __launch_bounds__(256)
indexer_prepare_wgmma(const __nv_bfloat16 *q, const float *weights, const int *position, unsigned char *prepared, int hi, long long q_stride,
                      long long weights_stride) {
  const int token = blockIdx.x;
  if (position[token] < 0) return;
  unsigned char *to = prepared + (long long)token * Query<HEADS>::BYTES;
  q += token * q_stride;
  weights += token * weights_stride;
  const int wide = __syncthreads_or(prepare_query<HEADS, 256, true>(to, q, weights, hi, query_part(q, weights, hi, threadIdx.x)));
  if (threadIdx.x < 4) reinterpret_cast<int *>(to + Query<HEADS>::FLAG)[threadIdx.x] = wide != 0;
}

// QUERIES: of a product, 1 or 2; slots of two are neighbours.
template <int GROUPS, int M, int QUERIES>
__device__ __forceinline__ void score_tiles(const unsigned char *prepared, const unsigned char *key_codes, const unsigned char *scales,
                                            const int *position, const int *row, float *score, int T, int E, int capacity, int ratio,
                                            long long keys_row_stride, long long scales_row_stride, long long score_stride) {
  constexpr int N = QUERIES * HEADS, THREADS = GROUPS * WARPGROUP, TILE_KEYS = 16 * M, COMMON = Query<HEADS>::COMMON, BYTES = Query<HEADS>::BYTES;
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
  auto fetch = [&](int stage) {  // queries 8 stage to 8 stage + 7
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

  KeyTile<M> own = {};
  int batch = -1;
  auto keys_of = [&] { return Keys{key_codes + batch * keys_row_stride + 16 * t, scales + batch * scales_row_stride, limit - 1}; };
  for (int stage = 0; stage * STAGE_QUERIES < count; stage++) {
    cp_async_wait<STAGES - 2>();
    fence_proxy_async();
    __syncthreads();
    fetch(stage + STAGES - 1);
    const int base = stage * STAGE_QUERIES, first_slot = stage % STAGES * STAGE_QUERIES, some = min(STAGE_QUERIES, count - base);
#pragma unroll 1
    for (int k = 0; k < some;) {
      float *out = score + (begin + base + k) * score_stride + first + 8 * t + g;
      const int seen = seen_of[base + k];
      if (seen <= first_of_group) {  // a pad, or a query that sees no key of the warpgroup
        for (int half = 0; half < M / 2; half++)
          if (seen >= 0 && first + 32 * half + 8 * t + g < E) out[32 * half] = -INFINITY;
        k++;
        continue;
      }
      if (row_of[base + k] != batch) {
        batch = row_of[base + k];
        int most = 0;
        for (int j = base + k; j < count; j++)
          if (row_of[j] == batch) most = max(most, seen_of[j]);
        decode_tile(own, keys_of(), first, most);
      }
      int end = k + 1;  // queries k to end - 1 see keys of the warpgroup, of one row
      while (end < some && row_of[base + end] == batch && seen_of[base + end] > first_of_group) end++;
      const int begin_of_run = k;
      bool any_wide = own.wide != 0u;
      unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes + (first_slot + k) * INTEGERS));
      int d[2][N / 2];
      start_products<N>(d[0], own.a[0], heads);
      wgmma_wait<0>();
      wgmma_keep(d[0]);
#pragma unroll 1
      for (; k < end; k += QUERIES) {  // NOTE: ptxas 13.0 makes one product wait for another where one is under way from one round to the next
        const unsigned char *tail = tails + (first_slot + k) * TAIL;
        const unsigned long long next_heads = k + QUERIES < end ? wgmma_further(heads, QUERIES * INTEGERS) : heads;
        float sum[QUERIES][2 * M];
#pragma unroll
        for (int m = 0; m < M; m++) {  // the next product, also of the next query, runs beside the sums of this one
          start_products<N>(d[(m + 1) % 2], own.a[(m + 1) % M], m + 1 < M ? heads : next_heads);
#pragma unroll
          for (int j = 0; j < QUERIES; j++) {
            float4 weight[4];
            load_weights(weight, tail + j * TAIL);
            float pair[2] = {};
            if (j == 0) add_all_heads<0>(pair, d[m % 2], weight);
            else add_all_heads<QUERIES - 1>(pair, d[m % 2], weight);
            sum[j][2 * m] = pair[0];
            sum[j][2 * m + 1] = pair[1];
          }
          if (m + 1 == M) break;
          wgmma_wait<0>();
          wgmma_keep(d[(m + 1) % 2]);
        }
        heads = next_heads;
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
          float result[M / 2];
          quad_sums(result, sum[j]);
          const bool real = k + j < end;
          const int limit_of = real ? seen_of[base + k + j] : 0;
          if (real) any_wide = any_wide || *reinterpret_cast<const int *>(tail + j * TAIL + 4 * HEADS) != 0;
#pragma unroll
          for (int half = 0; half < M / 2; half++) {
            const int e = 32 * half + first + 8 * t + g;
            if (real && e < E) out[32 * half] = e < limit_of ? result[half] * own.factor[half] : -INFINITY;
          }
          out += score_stride;
        }
        wgmma_wait<0>();
        wgmma_keep(d[0]);
      }
      k = end;
      if (any_wide) {  // those that no integers hold, written again
#pragma unroll 1
        for (int j = begin_of_run; j < end; j++) {
          const unsigned which = *reinterpret_cast<const int *>(tails + (first_slot + j) * TAIL + 4 * HEADS) != 0 ? (1u << M) - 1u : own.wide;
          const int limit_of = seen_of[base + j];
#pragma unroll 1
          for (int m = 0; m < M; m++) {
            if ((which >> m & 1u) == 0u || first + 16 * m >= limit_of) continue;
            const float of_group = wide_result<HEADS, true>(keys_of(), first + 16 * m, prepared + (long long)(base + j) * BYTES);
            const int e = first + 32 * (m / 2) + 8 * t + g;
            if (t / 2 == m % 2 && e < limit_of) score[(begin + base + j) * score_stride + e] = of_group;
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
indexer_tiles_wgmma(const unsigned char *prepared, const unsigned char *keys, const unsigned char *scales, const int *position, const int *row,
                      float *score, int T, int E, int capacity, int ratio, long long keys_row_stride, long long scales_row_stride,
                      long long score_stride) {
  score_tiles<3, 2, 1>(prepared, keys, scales, position, row, score, T, E, capacity, ratio, keys_row_stride, scales_row_stride, score_stride);
}
