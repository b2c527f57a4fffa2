// sparse_attn.cu    attention of one KV head over two sources, the window ring and compressed entries, with a sink
//
//   out[t,h] = sum_k p_k kv_k / (sum_k p_k + exp(sink[h] - M)),  p_k = exp(scale q[t,h] . kv_k - M)
//
// Keys of the token at p, in order: window positions max(0, p - window + 1) .. p, each in ring slot position % slots; then
// compressed entries: those listed in `selected` (-1 = none), or all when there is no list. An entry e is seen only if
// e < (p + 1) / ratio. A key is its own value. Both sources are read in place, in the stored format (entry.cuh).
// twin     reference/ops.py::sparse_attention     tests  pytest parity/test_operations_attention.py -k sparse_attn
// tensors  q [T, h, d] bf16, rows q_stride elements apart | ring [b, slots, EB] u8 | ring_position [b, slots] i32
//          entries [b, capacity, EB] u8 or null | selected [T, listed] i32 or null | position, row [T] i32, position -1 = pad:
//          outputs stay untouched | sink [h] fp32, any value: +inf gives 0, -inf none
//          out [T, h, d] bf16 | visible [T, window + listed or capacity] i32 or null: what was read, -1 elsewhere. Column j < window
//          holds ring_position of the slot, so a stale slot shows; columns from window on hold entry numbers
//          part_o [T, splits, h, d], part_ml [T, splits, h, 2] fp32: sums, and maximum and sum of exponentials of a split
// numerics keys exact in fp32; scores by fmaf in 16 interleaved sums, added pairwise; softmax and p kv in fp32, keys in order, running
//          maximum by tiles of 32; full expf; one rounding, to bf16, at the store. Batch-invariant: the split bounds
//          depend on the token's own keys and on `splits`, which the caller fixes by shape. mma: products are exact (keys and
//          queries fit in bf16, p is three bf16 that add up to it), sums are the tensor core's in fp32
// launch   naive: grid = (T, h), block = 32, 2 d floats of dynamic shared memory
//          sparse_attn: grid = (T, ceil(h / group)); sparse_attn_split: grid = (T, ceil(h / group), splits); block = 128,
//          (32 + 2 group) (round_up(d, 16) + 4) + 35 group floats and 32 ints of dynamic shared memory
//          .._mma: the same grids, group = 16; (16 + 32) (round_up(d, 16) + 8) + 3 * 16 * 40 bf16 more, and no fp32 keys and queries
//          sparse_attn_combine: grid = (T, h), block = 32, 64 or 128
// variants 0 naive: a warp per token and head, one key at a time, kept as second oracle
//          1 tile: 32 keys decoded once for up to 8 heads | 2 mma: for 16 heads, on the tensor cores (default from 16 heads on)
//          each as one kernel (prefill), or with keys split over blocks, then combined (decode); the sink is counted once,
//          by the combination
#include "sparse_attn_keys.cuh"

constexpr int TILE = 32, THREADS = 128, MIN_SPLIT = 64, SUMS = 16;
constexpr int BLOCKS_PER_SM = 2;  // what shared memory allows at d = 512: registers beyond that are free

extern __shared__ __align__(16) float smem[];

__device__ __forceinline__ float pairwise(const float (&v)[SUMS]) {
  float eight[8], four[4];
#pragma unroll
  for (int j = 0; j < 8; j++) eight[j] = v[j] + v[j + 8];
#pragma unroll
  for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

__device__ __forceinline__ int padded_row(int d) { return (d + 15) / 16 * 16 + 4; }

// What a block keeps in dynamic shared memory: T is float, or bf16 for the tensor cores.
template <class T> struct Tiles {
  T *kv, *query;        // [TILE][row], [group][row]
  __nv_bfloat16 *p[3];  // mma only: [16][P_ROW] each, the parts of p
  float *acc, *score, *largest, *sum, *rescale;  // [group][acc_row], [group][TILE], [group] ..
  int *seen;
  int width, row, acc_row;  // d rounded up to 16, the rest is zero; rows padded against bank conflicts
};

constexpr int P_ROW = TILE + 8, MMA_HEADS = 16;

template <class T> __device__ __forceinline__ Tiles<T> tiles_of(int d, int group) {
  Tiles<T> s;
  s.acc_row = padded_row(d);
  s.width = s.acc_row - 4;
  s.row = sizeof(T) == 4 ? s.acc_row : s.width + 8;  // ldmatrix wants rows at multiples of 16 bytes
  s.kv = reinterpret_cast<T *>(smem);
  s.query = s.kv + TILE * s.row;
  T *end = s.query + group * s.row;
  if (sizeof(T) == 2)
    for (int i = 0; i < 3; i++, end += MMA_HEADS * P_ROW) s.p[i] = reinterpret_cast<__nv_bfloat16 *>(end);
  s.acc = reinterpret_cast<float *>(end);
  s.score = s.acc + group * s.acc_row;
  s.largest = s.score + group * TILE;
  s.sum = s.largest + group;
  s.rescale = s.sum + group;
  s.seen = reinterpret_cast<int *>(s.rescale + group);
  return s;
}

// score[h][k] = scale * query[h] . kv[k], -inf where there is no key. Every thread of the block calls.
__device__ __forceinline__ void score_tile(const Tiles<float> &s, int heads, int count, float scale) {
  for (int i = threadIdx.x; i < heads * TILE; i += THREADS) {
    const int h = i / TILE, k = i % TILE;
    if (k >= count) continue;
    const float *a = s.query + h * s.row, *b = s.kv + k * s.row;
    float part[SUMS] = {};
    for (int c = 0; c < s.width; c += SUMS)
#pragma unroll
      for (int j = 0; j < SUMS; j++) part[j] = fmaf(a[c + j], b[c + j], part[j]);
    s.score[i] = s.seen[k] ? pairwise(part) * scale : -INFINITY;
  }
}

__device__ __forceinline__ void score_tile(const Tiles<__nv_bfloat16> &s, int heads, int count, float scale) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  float dots[1][4] = {};  // 16 heads x 8 keys of this warp
  warp_tile_mma<1, false>(dots, s.query, s.row, s.kv + warp * 8 * s.row, s.row, s.width);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int h = g + (i & 2 ? 8 : 0), k = warp * 8 + t * 2 + (i & 1);
    if (h < heads && k < count) s.score[h * TILE + k] = s.seen[k] ? dots[0][i] * scale : -INFINITY;
  }
}

// acc[h] = acc[h] * rescale[h] + sum_k p[h][k] kv[k]. Every thread of the block calls.
__device__ __forceinline__ void add_values(const Tiles<float> &s, int heads, int count) {
  const int chunks = s.width / SUMS;
  for (int i = threadIdx.x; i < heads * chunks; i += THREADS) {
    const int h = i / chunks, c = i % chunks * SUMS;
    const float *p = s.score + h * TILE;
    float *total = s.acc + h * s.acc_row + c, o[SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; j++) o[j] = total[j] * s.rescale[h];
    for (int k = 0; k < count; k++)
#pragma unroll
      for (int j = 0; j < SUMS; j++) o[j] = fmaf(p[k], s.kv[k * s.row + c + j], o[j]);
#pragma unroll
    for (int j = 0; j < SUMS; j++) total[j] = o[j];
  }
}

__device__ __forceinline__ void add_values(const Tiles<__nv_bfloat16> &s, int heads, int) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  for (int c = warp * 16; c < s.width; c += THREADS / WARP * 16) {
    float o[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int h = g + (i & 2 ? 8 : 0);
        o[n][i] = h < heads ? s.acc[h * s.acc_row + c + n * 8 + t * 2 + (i & 1)] * s.rescale[h] : 0.f;
      }
#pragma unroll
    for (int part = 2; part >= 0; part--) warp_tile_mma<2, true>(o, s.p[part], P_ROW, s.kv + c, s.row, TILE);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int h = g + (i & 2 ? 8 : 0);
        if (h < heads) s.acc[h * s.acc_row + c + n * 8 + t * 2 + (i & 1)] = o[n][i];
      }
  }
}

// p as three bf16 that add up to it exactly: 24 bits are three times 8.
__device__ __forceinline__ void split_p(const Tiles<__nv_bfloat16> &s, int h, int k, float p) {
#pragma unroll
  for (int part = 0; part < 3; part++) {
    s.p[part][h * P_ROW + k] = to_bf16(p);
    p -= round_bf16(p);
  }
}
__device__ __forceinline__ void split_p(const Tiles<float> &, int, int, float) {}

struct Partial {
  float *acc, *largest, *sum;
};

// Sums over keys first .. end - 1, at least one, for up to `group` heads. acc[head][column], running maximum and sum of
// exponentials are left in shared memory, after a barrier. T chooses between tile and mma.
template <class T>
__device__ __forceinline__ Partial attend(const Keys &keys, const __nv_bfloat16 *q, int heads, int group, int d, int r,
                                          float scale, int first, int end, bool show) {
  constexpr bool WHOLE_TILES = sizeof(T) == 2;  // mma reads rows that are no keys and no heads: zeros
  const int tid = threadIdx.x, rows = WHOLE_TILES ? group : heads;
  const Tiles<T> s = tiles_of<T>(d, group);
  for (int i = tid; i < rows * s.width; i += THREADS) {
    const int h = i / s.width, c = i % s.width;
    put(s.query[h * s.row + c], h < heads && c < d ? from_bf16(q[h * d + c]) : 0.f);
    s.acc[h * s.acc_row + c] = 0.f;
  }
  if (tid < heads) {
    s.largest[tid] = -INFINITY;
    s.sum[tid] = 0.f;
  }
  const int parts = entry_parts(d, r);
  for (int tile = first; tile < end; tile += TILE) {
    const int count = min(TILE, end - tile), filled = WHOLE_TILES ? TILE : count;
    for (int i = tid; i < filled * parts; i += THREADS) {
      const int k = i % filled, part = i / filled;
      const Key key = k < count ? find_key(keys, tile + k) : Key{nullptr, 0, 0};
      T *to = s.kv + k * s.row;
      if (key.bytes) load_entry_part(to, key.bytes, part, d, r);
      else for (int c = part * SCALE_BLOCK; c < (part == parts - 1 ? d : (part + 1) * SCALE_BLOCK); c++) put(to[c], 0.f);
      if (part == 0) {
        for (int c = d; c < s.width; c++) put(to[c], 0.f);
        s.seen[k] = key.bytes != nullptr;
        if (show && k < count) keys.visible[key.column] = key.shown;
      }
    }
    __syncthreads();
    score_tile(s, heads, count, scale);
    __syncthreads();
    if (tid < heads) {
      float new_largest = s.largest[tid];
      for (int k = 0; k < count; k++) new_largest = fmaxf(new_largest, s.score[tid * TILE + k]);
      s.rescale[tid] = exp_below(s.largest[tid], new_largest);
      s.largest[tid] = new_largest;
    }
    __syncthreads();
    for (int i = tid; i < rows * TILE; i += THREADS) {
      const int h = i / TILE, k = i % TILE;
      const float p = h < heads && k < count && s.seen[k] ? expf(s.score[i] - s.largest[h]) : 0.f;
      s.score[i] = p;
      split_p(s, h, k, p);
    }
    __syncthreads();
    if (tid < heads) {
      float added = 0.f;
      for (int k = 0; k < count; k++) added += s.score[tid * TILE + k];
      s.sum[tid] = s.sum[tid] * s.rescale[tid] + added;
    }
    add_values(s, heads, count);
    __syncthreads();
  }
  return {s.acc, s.largest, s.sum};
}

extern "C" __global__ void __launch_bounds__(32)
sparse_attn_naive(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
                  const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out,
                  int *visible, int heads, int d, int r, int slots, int window, int listed, int capacity, int ratio,
                  float scale, long long q_stride, long long ring_row_stride, long long ring_slot_stride,
                  long long ring_position_stride, long long entries_row_stride, long long entry_stride,
                  long long selected_stride, long long out_stride, long long visible_stride) {
  const int token = blockIdx.x, h = blockIdx.y, lane = threadIdx.x, p = position[token];
  if (p < 0) return;
  const Keys keys = keys_of(p, row[token], max(0, p - window + 1), ring, ring_position, entries,
                            selected ? selected + token * selected_stride : nullptr,
                            visible ? visible + token * visible_stride : nullptr, slots, window, listed, capacity, ratio,
                            ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride);
  float *query = smem, *acc = smem + d;
  for (int c = lane; c < d; c += WARP) {  // a lane's own columns, here and below
    query[c] = from_bf16(q[token * q_stride + (long long)h * d + c]);
    acc[c] = 0.f;
  }
  float largest = sink[h], sum = 1.f;  // the sink is the first term
  if (largest == -INFINITY) sum = 0.f;
  for (int i = 0; i < keys.total; i++) {
    const Key key = find_key(keys, i);
    if (visible && h == 0 && lane == 0) keys.visible[key.column] = key.shown;
    if (!key.bytes) continue;
    float dot = 0.f;
    for (int c = lane; c < d; c += WARP) dot = fmaf(query[c], load_entry_dim(key.bytes, c, d, r), dot);
    const float score = warp_sum(dot) * scale, new_largest = fmaxf(largest, score);
    const float rescale = exp_below(largest, new_largest), weight = exp_below(score, new_largest);
    sum = sum * rescale + weight;
    for (int c = lane; c < d; c += WARP) acc[c] = fmaf(weight, load_entry_dim(key.bytes, c, d, r), acc[c] * rescale);
    largest = new_largest;
  }
  for (int c = lane; c < d; c += WARP) out[token * out_stride + (long long)h * d + c] = to_bf16(acc[c] / sum);
  if (visible && h == 0)
    for (int j = keys.in_window + lane; j < window + keys.columns; j += WARP)
      if (j < window || j - window >= keys.total - keys.in_window) keys.visible[j] = -1;
}

template <class T>
__device__ __forceinline__ void
prefill(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
        const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, int *visible,
        int heads, int d, int r, int slots, int window, int listed, int capacity, int ratio, float scale,
        long long q_stride, long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride,
        long long entries_row_stride, long long entry_stride, long long selected_stride, long long out_stride,
        long long visible_stride, int group) {
  const int token = blockIdx.x, head0 = blockIdx.y * group, p = position[token];
  if (p < 0) return;
  const int oldest = max(0, p - window + 1);
  const Keys keys = keys_of(p, row[token], oldest, ring, ring_position, entries,
                            selected ? selected + token * selected_stride : nullptr,
                            visible ? visible + token * visible_stride : nullptr, slots, window, listed, capacity, ratio,
                            ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride);
  const int here = min(group, heads - head0);
  const bool show = visible && head0 == 0;
  const Partial all = attend<T>(keys, q + token * q_stride + (long long)head0 * d, here, group, d, r, scale, 0, keys.total, show);
  for (int i = threadIdx.x; i < here * d; i += THREADS) {
    const int h = i / d, c = i % d;
    const float with_sink = fmaxf(all.largest[h], sink[head0 + h]), share = exp_below(all.largest[h], with_sink);
    const float denominator = all.sum[h] * share + exp_below(sink[head0 + h], with_sink);
    out[token * out_stride + (long long)(head0 + h) * d + c] = to_bf16(all.acc[h * padded_row(d) + c] * share / denominator);
  }
  if (show) show_nothing_else(keys, threadIdx.x, THREADS);
}

template <class T>
__device__ __forceinline__ void
decode(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
       const int *selected, const int *position, const int *row, float *part_o, float *part_ml, int *visible,
       int heads, int d, int r, int slots, int window, int listed, int capacity, int ratio, float scale,
       long long q_stride, long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride,
       long long entries_row_stride, long long entry_stride, long long selected_stride,
       long long visible_stride, int group) {
  const int token = blockIdx.x, head0 = blockIdx.y * group, split = blockIdx.z, splits = gridDim.z, p = position[token];
  if (p < 0) return;
  const int oldest_in_decode = max(0, p - window + 1);
  const Keys keys = keys_of(p, row[token], oldest_in_decode, ring, ring_position, entries,
                            selected ? selected + token * selected_stride : nullptr,
                            visible ? visible + token * visible_stride : nullptr, slots, window, listed, capacity, ratio,
                            ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride);
  const int per_split = max(MIN_SPLIT, ceil_div(ceil_div(keys.total, splits), TILE) * TILE);
  const int first = min(keys.total, split * per_split), end = min(keys.total, first + per_split);
  const int here = min(group, heads - head0);
  const bool show = visible && head0 == 0;
  if (show && split == 0) show_nothing_else(keys, threadIdx.x, THREADS);
  const long long row0 = ((long long)token * splits + split) * heads + head0;
  if (first >= end) {  // the whole block; an empty split has no sums
    for (int h = threadIdx.x; h < here; h += THREADS) {
      part_ml[(row0 + h) * 2] = -INFINITY;
      part_ml[(row0 + h) * 2 + 1] = 0.f;
    }
    return;
  }
  const Partial own = attend<T>(keys, q + token * q_stride + (long long)head0 * d, here, group, d, r, scale, first, end, show);
  for (int i = threadIdx.x; i < here * d; i += THREADS) part_o[row0 * d + i] = own.acc[i / d * padded_row(d) + i % d];
  for (int h = threadIdx.x; h < here; h += THREADS) {
    part_ml[(row0 + h) * 2] = own.largest[h];
    part_ml[(row0 + h) * 2 + 1] = own.sum[h];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
sparse_attn_tile(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position,
                 const unsigned char *entries, const int *selected, const int *position, const int *row,
                 const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r, int slots, int window,
                 int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
                 long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
                 long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride,
                 int group) {
  prefill<float>(q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, d, r, slots,
                 window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride,
                 ring_position_stride, entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride,
                 group);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
sparse_attn_mma(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position,
                const unsigned char *entries, const int *selected, const int *position, const int *row,
                const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r, int slots, int window,
                int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
                long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
                long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride,
                int group) {
  prefill<__nv_bfloat16>(q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, d, r,
                         slots, window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride,
                         ring_position_stride, entries_row_stride, entry_stride, selected_stride, out_stride,
                         visible_stride, group);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
sparse_attn_split_tile(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position,
                       const unsigned char *entries, const int *selected, const int *position, const int *row,
                       float *part_o, float *part_ml, int *visible, int heads, int d, int r, int slots, int window,
                       int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
                       long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
                       long long entry_stride, long long selected_stride, long long visible_stride, int group) {
  decode<float>(q, ring, ring_position, entries, selected, position, row, part_o, part_ml, visible, heads, d, r, slots,
                window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride,
                ring_position_stride, entries_row_stride, entry_stride, selected_stride, visible_stride, group);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
sparse_attn_split_mma(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position,
                      const unsigned char *entries, const int *selected, const int *position, const int *row,
                      float *part_o, float *part_ml, int *visible, int heads, int d, int r, int slots, int window,
                      int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
                      long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
                      long long entry_stride, long long selected_stride, long long visible_stride, int group) {
  decode<__nv_bfloat16>(q, ring, ring_position, entries, selected, position, row, part_o, part_ml, visible, heads, d, r,
                        slots, window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride,
                        ring_position_stride, entries_row_stride, entry_stride, selected_stride, visible_stride, group);
}

// out = sum_s O_s exp(m_s - M) / (sum_s l_s exp(m_s - M) + exp(sink - M)), M the largest of all m_s and the sink.
extern "C" __global__ void __launch_bounds__(THREADS)
sparse_attn_combine(const float *part_o, const float *part_ml, const float *sink, const int *position, __nv_bfloat16 *out,
                    int heads, int d, int splits, long long out_stride) {
  const int token = blockIdx.x, h = blockIdx.y;
  if (position[token] < 0) return;
  const long long stride = heads, row0 = (long long)token * splits * heads + h;  // rows of part_o from split to split
  float largest = sink[h];
  for (int s = 0; s < splits; s++) largest = fmaxf(largest, part_ml[(row0 + s * stride) * 2]);
  float denominator = exp_below(sink[h], largest);
  for (int s = 0; s < splits; s++) {
    const float *ml = part_ml + (row0 + s * stride) * 2;
    if (ml[1] != 0.f) denominator += ml[1] * exp_below(ml[0], largest);
  }
  for (int c = threadIdx.x * 8; c < d; c += blockDim.x * 8) {
    const int width = min(8, d - c);
    float o[8] = {};
    for (int s = 0; s < splits; s++) {
      const float *ml = part_ml + (row0 + s * stride) * 2;
      if (ml[1] == 0.f) continue;  // nothing was summed, nothing was written
      const float share = exp_below(ml[0], largest);
      const float *from = part_o + (row0 + s * stride) * d + c;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < width) o[j] = fmaf(share, from[j], o[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < width) out[token * out_stride + (long long)h * d + c + j] = to_bf16(o[j] / denominator);
  }
}
