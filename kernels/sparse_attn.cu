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
//          depend on the token's own keys and on `splits`, which the caller fixes by shape
// launch   naive: grid = (T, h), block = 32, 2 d floats of dynamic shared memory
//          sparse_attn: grid = (T, ceil(h / group)); sparse_attn_split: grid = (T, ceil(h / group), splits); block = 128,
//          (32 + 2 group) (round_up(d, 16) + 4) + 32 group + 3 group floats and 32 ints of dynamic shared memory
//          sparse_attn_combine: grid = (T, h), block = 32, 64 or 128
// variants 0 naive: a warp per token and head, one key at a time, kept as second oracle | 1 one kernel (prefill)
//          2 keys split over blocks, then combined (decode); the sink is counted once, by the combination
#include "entry.cuh"

constexpr int TILE = 32, THREADS = 128, MIN_SPLIT = 64, SUMS = 16;

extern __shared__ __align__(16) float smem[];

// Where the keys of one token are.
struct Keys {
  const unsigned char *ring, *entries;
  const int *ring_position, *selected;
  int *visible;  // null: nobody asks
  long long slot_stride, entry_stride;
  int slots, window, columns;  // columns of visible beyond the window
  int oldest, in_window, total, seen_entries;
};

struct Key {
  const unsigned char *bytes;  // null: no key
  int column, shown;           // where and what to write to visible
};

__device__ __forceinline__ Key find_key(const Keys &keys, int i) {
  if (i < keys.in_window) {
    const int slot = (keys.oldest + i) % keys.slots;
    return {keys.ring + slot * keys.slot_stride, i, keys.ring_position[slot]};
  }
  const int listed = i - keys.in_window, e = keys.selected ? keys.selected[listed] : listed;
  const bool seen = e >= 0 && e < keys.seen_entries;
  return {seen ? keys.entries + e * keys.entry_stride : nullptr, keys.window + listed, seen ? e : -1};
}

// exp(a - b) for b >= a, also where both are infinite; NaN stays NaN.
__device__ __forceinline__ float exp_below(float a, float b) { return a == b ? 1.f : expf(a - b); }

__device__ __forceinline__ float pairwise(const float (&v)[SUMS]) {
  float eight[8], four[4];
#pragma unroll
  for (int j = 0; j < 8; j++) eight[j] = v[j] + v[j + 8];
#pragma unroll
  for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

__device__ __forceinline__ int padded_row(int d) { return (d + 15) / 16 * 16 + 4; }

// Scores and values of keys first .. end - 1, at least one, for up to `group` heads. acc[head][column], running maximum
// and sum are left in shared memory, after a barrier.
struct Partial {
  float *acc, *largest, *sum;
};

__device__ __forceinline__ Partial attend(const Keys &keys, const __nv_bfloat16 *q, int heads, int group, int d, int r,
                                          float scale, int first, int end, bool show) {
  const int tid = threadIdx.x, row = padded_row(d), width = row - 4;  // width: d rounded up, the rest is zero
  float *kv = smem, *query = kv + TILE * row, *acc = query + group * row, *score = acc + group * row;
  float *largest = score + group * TILE, *sum = largest + group, *rescale = sum + group;
  int *seen = reinterpret_cast<int *>(rescale + group);

  for (int i = tid; i < heads * width; i += THREADS) {
    const int h = i / width, c = i % width;
    query[h * row + c] = c < d ? from_bf16(q[h * d + c]) : 0.f;
    acc[h * row + c] = 0.f;
  }
  if (tid < heads) {
    largest[tid] = -INFINITY;
    sum[tid] = 0.f;
  }
  const int parts = entry_parts(d, r), chunks = width / SUMS;
  for (int tile = first; tile < end; tile += TILE) {
    const int count = min(TILE, end - tile);
    for (int i = tid; i < count * parts; i += THREADS) {
      const int k = i % count, part = i / count;
      const Key key = find_key(keys, tile + k);
      float *to = kv + k * row;
      if (key.bytes) load_entry_part(to, key.bytes, part, d, r);
      else for (int c = part * SCALE_BLOCK; c < (part == parts - 1 ? d : (part + 1) * SCALE_BLOCK); c++) to[c] = 0.f;
      if (part == 0) {
        for (int c = d; c < width; c++) to[c] = 0.f;
        seen[k] = key.bytes != nullptr;
        if (show) keys.visible[key.column] = key.shown;
      }
    }
    __syncthreads();
    for (int i = tid; i < heads * TILE; i += THREADS) {
      const int h = i / TILE, k = i % TILE;
      if (k >= count) continue;
      const float *a = query + h * row, *b = kv + k * row;
      float part[SUMS] = {};
      for (int c = 0; c < width; c += SUMS)
#pragma unroll
        for (int j = 0; j < SUMS; j++) part[j] = fmaf(a[c + j], b[c + j], part[j]);
      score[i] = seen[k] ? pairwise(part) * scale : -INFINITY;
    }
    __syncthreads();
    if (tid < heads) {
      float new_largest = largest[tid];
      for (int k = 0; k < count; k++) new_largest = fmaxf(new_largest, score[tid * TILE + k]);
      rescale[tid] = exp_below(largest[tid], new_largest);
      largest[tid] = new_largest;
    }
    __syncthreads();
    for (int i = tid; i < heads * TILE; i += THREADS)
      if (i % TILE < count) score[i] = seen[i % TILE] ? expf(score[i] - largest[i / TILE]) : 0.f;
    __syncthreads();
    if (tid < heads) {
      float added = 0.f;
      for (int k = 0; k < count; k++) added += score[tid * TILE + k];
      sum[tid] = sum[tid] * rescale[tid] + added;
    }
    for (int i = tid; i < heads * chunks; i += THREADS) {
      const int h = i / chunks, c = i % chunks * SUMS;
      const float *p = score + h * TILE;
      float *total = acc + h * row + c, o[SUMS];
#pragma unroll
      for (int j = 0; j < SUMS; j++) o[j] = total[j] * rescale[h];
      for (int k = 0; k < count; k++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) o[j] = fmaf(p[k], kv[k * row + c + j], o[j]);
#pragma unroll
      for (int j = 0; j < SUMS; j++) total[j] = o[j];
    }
    __syncthreads();
  }
  return {acc, largest, sum};
}

// Columns of visible that hold no key.
__device__ __forceinline__ void show_nothing_else(const Keys &keys) {
  for (int j = keys.in_window + threadIdx.x; j < keys.window + keys.columns; j += THREADS)
    if (j < keys.window || j - keys.window >= keys.total - keys.in_window) keys.visible[j] = -1;
}

__device__ __forceinline__ Keys keys_of(int p, int batch, int oldest, const unsigned char *ring, const int *ring_position,
                                        const unsigned char *entries, const int *selected, int *visible, int slots,
                                        int window, int listed, int capacity, int ratio, long long ring_row_stride,
                                        long long ring_slot_stride, long long ring_position_stride,
                                        long long entries_row_stride, long long entry_stride) {
  Keys keys;
  keys.ring = ring + batch * ring_row_stride;
  keys.ring_position = ring_position + batch * ring_position_stride;
  keys.slot_stride = ring_slot_stride;
  keys.entries = entries + batch * entries_row_stride;
  keys.entry_stride = entry_stride;
  keys.selected = selected;
  keys.visible = visible;
  keys.slots = slots;
  keys.window = window;
  keys.oldest = oldest;
  keys.in_window = p - oldest + 1;
  keys.seen_entries = ratio > 0 ? min((p + 1) / ratio, capacity) : 0;
  keys.columns = selected ? listed : ratio > 0 ? capacity : 0;
  keys.total = keys.in_window + (selected ? listed : keys.seen_entries);
  return keys;
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

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_attn(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
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
  const Partial all = attend(keys, q + token * q_stride + (long long)head0 * d, here, group, d, r, scale, 0, keys.total, show);
  for (int i = threadIdx.x; i < here * d; i += THREADS) {
    const int h = i / d, c = i % d;
    const float with_sink = fmaxf(all.largest[h], sink[head0 + h]), share = exp_below(all.largest[h], with_sink);
    const float denominator = all.sum[h] * share + exp_below(sink[head0 + h], with_sink);
    out[token * out_stride + (long long)(head0 + h) * d + c] = to_bf16(all.acc[h * padded_row(d) + c] * share / denominator);
  }
  if (show) show_nothing_else(keys);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_attn_split(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
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
  if (show && split == 0) show_nothing_else(keys);
  const long long row0 = ((long long)token * splits + split) * heads + head0;
  if (first >= end) {  // the whole block; an empty split has no sums
    for (int h = threadIdx.x; h < here; h += THREADS) {
      part_ml[(row0 + h) * 2] = -INFINITY;
      part_ml[(row0 + h) * 2 + 1] = 0.f;
    }
    return;
  }
  const Partial own = attend(keys, q + token * q_stride + (long long)head0 * d, here, group, d, r, scale, first, end, show);
  for (int i = threadIdx.x; i < here * d; i += THREADS) part_o[row0 * d + i] = own.acc[i / d * padded_row(d) + i % d];
  for (int h = threadIdx.x; h < here; h += THREADS) {
    part_ml[(row0 + h) * 2] = own.largest[h];
    part_ml[(row0 + h) * 2 + 1] = own.sum[h];
  }
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
