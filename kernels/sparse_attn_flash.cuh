// sparse_attn_flash.cuh    attention of up to 64 heads of one token over a run of its keys: decoded once, two products by mma
//
// A block of 8 warps has 16, 32 or 64 heads (HEADS) and takes keys in tiles of 64. Per tile, a barrier between steps:
//   decode    raw entries -> kv [64][D] bf16; then the bytes of the next tile are asked for, by cp.async
//   scores    Q K^T, each warp some heads x some keys x half of D, K^T by ldmatrix: two halves of every sum
//   softmax   256 / HEADS threads a head: maximum, exponentials, sum; p as PARTS bf16
//   values    P V, each warp all heads x D / 8 columns, V the same tile by ldmatrix.trans; sums stay in registers
// numerics keys, queries and their products are exact; a score is the sum of two fp32 sums of D / 2 products by the tensor
//          core, first half first. p = exp(score - running maximum), full expf; sums of p as a binary tree over the 64 keys
//          of a tile, then tile by tile. p is PARTS bf16: two leave 2^-18 of it behind, one is the rounding point p.bf16.
//          None of it depends on HEADS, so a head's bits do not depend on how many share its block.
#pragma once
#include "sparse_attn_splits.cuh"

constexpr int KEYS = 64, WARPS = 8, THREADS = WARPS * WARP, ROTARY = 64, HALVES = 2;

// Parameters of the kernels, in their order.
struct Attention {
  const __nv_bfloat16 *q;
  const unsigned char *ring;
  const int *ring_position;
  const unsigned char *entries;
  const int *selected, *position, *row;
  const float *sink;
  __nv_bfloat16 *out;
  float *part_o, *part_ml;
  int *done, *visible;
  int heads, slots, window, listed, capacity, ratio;
  float scale;
  long long q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride, selected_stride,
      out_stride, visible_stride;
};

__device__ __forceinline__ Keys keys_of_token(const Attention &a, int token, int p, int batch) {
  const int oldest = max(0, p - a.window + 1);
  return keys_of(p, batch, oldest, a.ring, a.ring_position, a.entries,
                 a.selected ? a.selected + token * a.selected_stride : nullptr,
                 a.visible ? a.visible + token * a.visible_stride : nullptr, a.slots, a.window, a.listed, a.capacity, a.ratio,
                 a.ring_row_stride, a.ring_slot_stride, a.ring_position_stride, a.entries_row_stride, a.entry_stride);
}

// What follows from the shape: dims of an entry, shared memory in bytes, which warp does what.
template <int D, int HEADS, int PARTS> struct Shape {
  static constexpr int BLOCKS = (D - ROTARY) / SCALE_BLOCK, BYTES = (D + ROTARY + BLOCKS + 7) / 8 * 8;
  static constexpr int ROW = D + 8, SCORE_ROW = KEYS + 8, P_ROW = KEYS + 8;  // padded against bank conflicts
  static constexpr int M_WARPS = HEADS == 64 ? 2 : HEADS / 16, N_WARPS = WARPS / HALVES / M_WARPS;  // of scores
  static constexpr int M_TILES = HEADS / 16 / M_WARPS, N_TILES = KEYS / 8 / N_WARPS;
  static constexpr int V_TILES = D / 8 / WARPS;                                       // of values: 8 columns each
  static constexpr int LANES = THREADS / HEADS, PAIRS = KEYS / 2 / LANES;             // of softmax: threads a head, key pairs a thread
  static constexpr int QUERY = 0, KV = QUERY + HEADS * ROW * 2, P = KV + KEYS * ROW * 2;
  static constexpr int SCORE = P + PARTS * HEADS * P_ROW * 2, RAW = SCORE + HALVES * HEADS * SCORE_ROW * 4;
  static constexpr int SOURCE = RAW + KEYS * BYTES, RESCALE = SOURCE + KEYS * 8, WEIGHT = RESCALE + HEADS * 4;
  static constexpr int SEEN = WEIGHT + HEADS * 4, SHARED = SEEN + 16 + 16;
  static_assert(HEADS == 16 || HEADS == 32 || HEADS == 64, "heads of a block");
  static_assert(SHARED <= 227 * 1024 && MAX_SPLITS * HEADS * 8 + HEADS * 4 <= SEEN, "what fits in shared memory, also when merging");
};

// ---- entries ----

// Bytes of 64 entries -> kv [64][ROW]. A key is decoded by 8 threads, 8 codes at a time. All threads call.
template <class S, int D> __device__ __forceinline__ void decode_tile(const unsigned char *raw, __nv_bfloat16 *kv) {
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 8, lane = threadIdx.x % 8;
#pragma unroll 1
  for (int half = 0; half < KEYS / 32; half++) {
    const int key = warp + 8 * group + 32 * half;  // keys 8 apart fall into different banks
    const unsigned char *from = raw + key * S::BYTES;
    __nv_bfloat16 *to = kv + key * S::ROW + lane * 8;
    const uint2 scales = *reinterpret_cast<const uint2 *>(from + D + ROTARY);
    const uint2 *rotated = reinterpret_cast<const uint2 *>(from + D - ROTARY + lane * 16);
    const uint2 low = rotated[0], high = rotated[1];
    uint2 codes[S::BLOCKS];
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++) codes[block] = *reinterpret_cast<const uint2 *>(from + block * SCALE_BLOCK + lane * 8);
    unsigned slow = large_scales(scales.x) | large_scales(scales.y);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++) {
      const unsigned scale = (block < 4 ? scales.x : scales.y) >> block % 4 * 8 & 255u;
      const unsigned factor = (scale + 120u) * 0x00800080u;  // 2^120 scale, twice
      slow |= nan_codes(codes[block].x) | nan_codes(codes[block].y);
      uint4 v;
      v.x = mul_bf16x2(widen_codes<0>(codes[block].x), factor);
      v.y = mul_bf16x2(widen_codes<2>(codes[block].x), factor);
      v.z = mul_bf16x2(widen_codes<0>(codes[block].y), factor);
      v.w = mul_bf16x2(widen_codes<2>(codes[block].y), factor);
      *reinterpret_cast<uint4 *>(to + block * SCALE_BLOCK) = v;
    }
    *reinterpret_cast<uint4 *>(to + D - ROTARY) = make_uint4(low.x, low.y, high.x, high.y);
    if (slow & 0x80808080u)  // once more, one by one
#pragma unroll 1
      for (int i = 0; i < S::BLOCKS * 8; i++) {
        const int c = i / 8 * SCALE_BLOCK + i % 8;
        to[c] = to_bf16(load_entry_dim(from, c + lane * 8, D, ROTARY));
      }
  }
}

// ---- softmax ----

// Sum over a head's 64 keys as a binary tree: over pairs, then over the pairs' numbers from the highest bit down.
template <class S> __device__ __forceinline__ float tree_sum(const float (&p)[S::PAIRS * 2]) {
  float sum[S::PAIRS];
#pragma unroll
  for (int j = 0; j < S::PAIRS; j++) sum[j] = p[2 * j] + p[2 * j + 1];
#pragma unroll
  for (int step = S::PAIRS / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < S::PAIRS / 2; j++)
      if (j < step) sum[j] += sum[j + step];
  float all = sum[0];
#pragma unroll
  for (int step = S::LANES / 2; step > 0; step /= 2) all += __shfl_xor_sync(FULL_MASK, all, step);
  return all;
}

// A thread's share of one head: keys 2 lane + 2 LANES j and the one after, j < PAIRS.
template <class S, int HEADS, int PARTS>
__device__ __forceinline__ void softmax_tile(const float *score, __nv_bfloat16 *p_parts, float *rescale, const unsigned *seen,
                                             float scale, float &largest, float &sum) {
  const int head = threadIdx.x / S::LANES, column = threadIdx.x % S::LANES * 2;
  const float *first = score + head * S::SCORE_ROW + column, *second = first + HEADS * S::SCORE_ROW;
  float x[S::PAIRS * 2], new_largest = largest;
#pragma unroll
  for (int j = 0; j < S::PAIRS; j++) {
    const int k = 2 * S::LANES * j;
    const unsigned bits = seen[k / 32] >> (k % 32 + column);
    const float2 a = *reinterpret_cast<const float2 *>(first + k), b = *reinterpret_cast<const float2 *>(second + k);
    x[2 * j] = bits & 1u ? (a.x + b.x) * scale : -INFINITY;
    x[2 * j + 1] = bits & 2u ? (a.y + b.y) * scale : -INFINITY;
    new_largest = fmaxf(new_largest, fmaxf(x[2 * j], x[2 * j + 1]));
  }
#pragma unroll
  for (int step = S::LANES / 2; step > 0; step /= 2) new_largest = fmaxf(new_largest, __shfl_xor_sync(FULL_MASK, new_largest, step));
  const float origin = new_largest == -INFINITY ? 0.f : new_largest;  // no key yet: every p is 0
#pragma unroll
  for (int i = 0; i < S::PAIRS * 2; i++) x[i] = expf(x[i] - origin);
  const float fade = exp_below(largest, new_largest);
  sum = sum * fade + tree_sum<S>(x);
  largest = new_largest;
  if (column == 0) rescale[head] = fade;
  __nv_bfloat16 *to = p_parts + head * S::P_ROW + column;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int j = 0; j < S::PAIRS; j++) {
      const unsigned pair = pack_bf16(x[2 * j], x[2 * j + 1]);
      *reinterpret_cast<unsigned *>(to + part * HEADS * S::P_ROW + 2 * S::LANES * j) = pair;
      x[2 * j] -= bf16_low(pair), x[2 * j + 1] -= bf16_high(pair);  // what is left for the next part
    }
}

// ---- merging splits in the same launch ----

// The last block of a token and its heads to arrive merges them, all threads. row0: row of part_o of split 0 and head head0.
template <int D, int HEADS>
__device__ __forceinline__ void merge_heads(const Attention &a, unsigned char *smem, int token, int head0, int here, int used,
                                            long long row0) {
  constexpr int QUADS = D / 4, BATCH = 8;  // reads in flight a thread
  float *m = reinterpret_cast<float *>(smem), *l = m + used * HEADS, *inverse = l + used * HEADS;
  const int h = threadIdx.x % HEADS;
#pragma unroll 1
  for (int s = threadIdx.x / HEADS; s < used; s += THREADS / HEADS)
    if (h < here) {
      const float2 ml = __ldcg(reinterpret_cast<const float2 *>(a.part_ml) + row0 + (long long)s * a.heads + h);
      m[s * HEADS + h] = ml.x;
      l[s * HEADS + h] = ml.y;
    }
  __syncthreads();
  if (threadIdx.x < here) inverse[threadIdx.x] = merge_shares(m + threadIdx.x, l + threadIdx.x, HEADS, used, a.sink[head0 + threadIdx.x]);
  __syncthreads();
  for (int i0 = threadIdx.x; i0 < here * QUADS; i0 += THREADS * BATCH) {
    float4 o[BATCH] = {};
#pragma unroll 2
    for (int s = 0; s < used; s++) {
      const float4 *from = reinterpret_cast<const float4 *>(a.part_o) + (row0 + (long long)s * a.heads) * QUADS;
      float4 v[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        if (i0 + j * THREADS < here * QUADS) v[j] = __ldcg(from + i0 + j * THREADS);
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        if (i0 + j * THREADS < here * QUADS) add_share(o[j], v[j], m[s * HEADS + (i0 + j * THREADS) / QUADS]);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = i0 + j * THREADS;
      if (i < here * QUADS) store_4(a.out + token * a.out_stride + (long long)head0 * D + i * 4, o[j], inverse[i / QUADS]);
    }
  }
}

// ---- the block ----

// Rows of q -> query, zeros for heads that do not exist. Waited for with the first tile.
template <class S, int D, int HEADS> __device__ __forceinline__ void load_queries(__nv_bfloat16 *query, const __nv_bfloat16 *q, int here) {
  constexpr int PIECES = D / 8, ROWS = THREADS / PIECES;  // of a row; rows at a time
  const int first = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
  const bool aligned = ((size_t)q & 15) == 0;
#pragma unroll
  for (int pass = 0; pass < HEADS / ROWS; pass++) {
    const int head = first + pass * ROWS, bytes = head < here && aligned ? 16 : 0;
    cp_async_16(query + head * S::ROW + c, bytes ? q + head * D + c : q, bytes);
  }
  if (aligned) return;
  cp_async_wait<0>();
  __syncthreads();  // the zeros are there
#pragma unroll 1
  for (int i = threadIdx.x; i < here * D; i += THREADS) query[i / D * S::ROW + i % D] = q[i];
}

// Asks for the bytes of 64 keys, zeros for those that are none. All threads call.
template <class S> __device__ __forceinline__ void load_tile(unsigned char *raw, const unsigned char *const *source, const unsigned char *any) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 4
  for (int pass = 0; pass < KEYS / WARPS; pass++) {
    const int key = pass * WARPS + warp;
    const unsigned char *from = source[key];
    const int bytes = from ? 8 : 0;
    from = (from ? from : any) + lane * 8;
    unsigned char *to = raw + key * S::BYTES + lane * 8;
#pragma unroll
    for (int c = 0; c < S::BYTES; c += WARP * 8)
      if (c + WARP * 8 <= S::BYTES || c + lane * 8 < S::BYTES) cp_async_8(to + c, from + c, bytes);
  }
}

// grid = (T, ceil(heads / HEADS), splits)
template <int D, int HEADS, int PARTS> __device__ __forceinline__ void flash_block(unsigned char *smem, const Attention &a) {
  using S = Shape<D, HEADS, PARTS>;
  __nv_bfloat16 *query = reinterpret_cast<__nv_bfloat16 *>(smem + S::QUERY), *kv = reinterpret_cast<__nv_bfloat16 *>(smem + S::KV);
  __nv_bfloat16 *p_parts = reinterpret_cast<__nv_bfloat16 *>(smem + S::P);
  float *score = reinterpret_cast<float *>(smem + S::SCORE), *rescale = reinterpret_cast<float *>(smem + S::RESCALE);
  float *weight = reinterpret_cast<float *>(smem + S::WEIGHT);
  unsigned char *raw = smem + S::RAW;
  const unsigned char **source = reinterpret_cast<const unsigned char **>(smem + S::SOURCE);
  unsigned *seen = reinterpret_cast<unsigned *>(smem + S::SEEN);  // [2][2]: a bit a key, of this tile and of the next
  int *last = reinterpret_cast<int *>(smem + S::SEEN + 16);

  const int tid = threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int token = blockIdx.x, head0 = blockIdx.y * HEADS, split = blockIdx.z, splits = gridDim.z;
  const int here = min(HEADS, a.heads - head0);
  const int p = a.position[token], batch = a.row[token];
  if (a.selected) {  // the lines of this split's list, as if the window were full: they are on their way before p is known
    const int keys = split_keys(a.window + a.listed, splits, KEYS).keys, i = split * keys - a.window + tid * 32;
    if (tid * 32 < keys + 32 && i >= 0 && i < a.listed) prefetch_global(a.selected + token * a.selected_stride + i);
  }
  if (tid == 0) {  // what is read at the end
    prefetch_global(a.sink + head0);
    if (a.done) prefetch_global(a.done + token * gridDim.y + blockIdx.y);
  }
  // Where many blocks wait for their turn, those that may have no keys ask for the queries when they know.
  const bool early = split == 0 || gridDim.x * gridDim.y * gridDim.z <= 264;
  if (early) load_queries<S, D, HEADS>(query, a.q + token * a.q_stride + (long long)head0 * D, here);
  cp_async_commit();
  if ((p | batch) < 0) {  // a pad; the row of a token is not negative
    cp_async_wait<0>();
    return;
  }
  const Keys keys = keys_of_token(a, token, p, batch);
  const Splits part = split_keys(keys.total, splits, KEYS);
  const bool show = a.visible && head0 == 0;
  if (show && split == 0) show_nothing_else(keys, tid, THREADS);
  if (split >= part.used) {
    cp_async_wait<0>();
    return;
  }
  if (!early) load_queries<S, D, HEADS>(query, a.q + token * a.q_stride + (long long)head0 * D, here);
  cp_async_commit();
  const int begin = split * part.keys, end = min(keys.total, begin + part.keys);

  // Where key i lies; e as find_key takes it. Threads 0 .. KEYS - 1.
  auto place = [&](int i, int e, int slot) {
    const Key key = i < end ? find_key(keys, i, e) : Key{nullptr, 0, 0};
    source[tid] = key.bytes;
    const unsigned bits = __ballot_sync(FULL_MASK, key.bytes != nullptr);
    if (lane == 0) seen[slot * 2 + warp] = bits;
    if (show && i < end) keys.visible[key.column] = key.shown;
  };
  auto entry_of = [&](int i) { return tid < KEYS && i >= keys.in_window && i < end ? entry_at(keys, i) : -1; };

  float o[HEADS / 16][S::V_TILES][4] = {};
  float largest = -INFINITY, sum = 0.f;  // of the head of this thread in softmax
  int slot = 1;
#pragma unroll 1
  for (int tile = begin - KEYS; tile < end; tile += KEYS, slot ^= 1) {
    const int next = tile + KEYS + tid, next_entry = entry_of(next);
    if (tile >= begin) cp_async_wait<0>();
    __syncthreads();  // bytes of this tile are there, kv and p of the last one are free
    if (tile >= begin) decode_tile<S, D>(raw, kv);
    if (tid < KEYS) place(next, next_entry, slot ^ 1);
    __syncthreads();  // kv is there, raw is free
    if (tile + KEYS < end) load_tile<S>(raw, source, a.ring);
    cp_async_commit();
    if (tile < begin) continue;
    {
      const int half = warp % HALVES, m = warp / HALVES / S::N_WARPS * S::M_TILES * 16, n = warp / HALVES % S::N_WARPS * S::N_TILES * 8;
      float dots[S::M_TILES][S::N_TILES][4] = {};
      warp_block_mma<1, S::M_TILES, S::N_TILES, D / HALVES, false>(dots, query + m * S::ROW + half * (D / HALVES), S::ROW, 0,
                                                                   kv + n * S::ROW + half * (D / HALVES), S::ROW);
      float *to = score + (half * HEADS + m + lane / 4) * S::SCORE_ROW + n + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::M_TILES; i++)
#pragma unroll
        for (int j = 0; j < S::N_TILES; j++) {
          *reinterpret_cast<float2 *>(to + i * 16 * S::SCORE_ROW + j * 8) = make_float2(dots[i][j][0], dots[i][j][1]);
          *reinterpret_cast<float2 *>(to + (i * 16 + 8) * S::SCORE_ROW + j * 8) = make_float2(dots[i][j][2], dots[i][j][3]);
        }
    }
    __syncthreads();  // scores are there
    softmax_tile<S, HEADS, PARTS>(score, p_parts, rescale, seen + slot * 2, a.scale, largest, sum);
    __syncthreads();  // p is there
#pragma unroll
    for (int i = 0; i < HEADS / 16; i++) {
      const float upper = rescale[i * 16 + lane / 4], lower = rescale[i * 16 + 8 + lane / 4];
      if (__any_sync(FULL_MASK, upper != 1.f || lower != 1.f))
#pragma unroll
        for (int j = 0; j < S::V_TILES; j++) o[i][j][0] *= upper, o[i][j][1] *= upper, o[i][j][2] *= lower, o[i][j][3] *= lower;
    }
    warp_block_mma<PARTS, HEADS / 16, S::V_TILES, KEYS, true>(o, p_parts, S::P_ROW, HEADS * S::P_ROW, kv + warp * (D / WARPS), S::ROW);
  }

  const int my_head = threadIdx.x / S::LANES;
  const bool owner = threadIdx.x % S::LANES == 0 && my_head < here;
  const int row = lane / 4, column = warp * (D / WARPS) + lane % 4 * 2;
  if (part.used == 1) {  // all keys were here: the sink joins, and out is written
    if (owner) {
      const float own_sink = a.sink[head0 + my_head], with_sink = fmaxf(largest, own_sink), share = exp_below(largest, with_sink);
      weight[my_head] = share / (sum * share + exp_below(own_sink, with_sink));
    }
    __syncthreads();  // weights are there, kv is free
#pragma unroll
    for (int i = 0; i < HEADS / 16; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = i * 16 + half * 8 + row;
        const float factor = head < here ? weight[head] : 0.f;
#pragma unroll
        for (int j = 0; j < S::V_TILES; j++)
          *reinterpret_cast<unsigned *>(kv + head * S::ROW + column + j * 8) = pack_bf16(o[i][j][half * 2] * factor, o[i][j][half * 2 + 1] * factor);
      }
    __syncthreads();  // outputs are in kv
    __nv_bfloat16 *out = a.out + token * a.out_stride + (long long)head0 * D;
    constexpr int PIECES = D / 8, ROWS = THREADS / PIECES;
    if (((size_t)out & 15) == 0) {
#pragma unroll 4
      for (int pass = 0; pass < HEADS / ROWS; pass++) {
        const int head = threadIdx.x / PIECES + pass * ROWS, c = threadIdx.x % PIECES * 8;
        if (head < here) *reinterpret_cast<uint4 *>(out + head * D + c) = *reinterpret_cast<const uint4 *>(kv + head * S::ROW + c);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < here * D; i += THREADS) out[i] = kv[i / D * S::ROW + i % D];
    }
    return;
  }

  const long long row0 = (long long)token * splits * a.heads + head0, own = row0 + (long long)split * a.heads;
#pragma unroll
  for (int i = 0; i < HEADS / 16; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = i * 16 + half * 8 + row;
      if (head < here)
#pragma unroll
        for (int j = 0; j < S::V_TILES; j++)
          *reinterpret_cast<float2 *>(a.part_o + (own + head) * D + column + j * 8) = make_float2(o[i][j][half * 2], o[i][j][half * 2 + 1]);
    }
  if (owner) *reinterpret_cast<float2 *>(a.part_ml + (own + my_head) * 2) = make_float2(largest, sum);
  if (!a.done) return;  // sparse_attn_combine follows
  __syncthreads();  // the partial sums of all threads are out
  if (tid == 0) {
    __threadfence();
    int *counter = a.done + token * gridDim.y + blockIdx.y;
    *last = atomicAdd(counter, 1) == part.used - 1;
    if (*last) *counter = 0;  // for the next launch
    __threadfence();
  }
  __syncthreads();  // who is last is known
  if (!*last) return;
  merge_heads<D, HEADS>(a, smem, token, head0, here, part.used, row0);
}
