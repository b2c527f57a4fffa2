// sparse_attn_keys.cuh    which keys one token's attention reads, in which order, and where they lie
//
// Window positions max(0, p - window + 1) .. p first, each in ring slot position % slots; then compressed entries: those
// listed, -1 = none, or all; an entry e is seen only if e < (p + 1) / ratio. Every kernel of sparse attention includes this.
#pragma once
#include "entry.cuh"

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

// Number of the entry that the list names at place i >= in_window, or that stands there without a list; -1 = none.
__device__ __forceinline__ int entry_at(const Keys &keys, int i) {
  const int listed = i - keys.in_window, e = keys.selected ? keys.selected[listed] : listed;
  return e;
}

// Key i of the token; e is entry_at(keys, i) beyond the window.
__device__ __forceinline__ Key find_key(const Keys &keys, int i, int e) {
  if (i < keys.in_window) {
    const int slot = (keys.oldest + i) % keys.slots;
    return {keys.ring + slot * keys.slot_stride, i, keys.ring_position[slot]};
  }
  const int listed = i - keys.in_window;
  const bool seen = e >= 0 && e < keys.seen_entries;
  return {seen ? keys.entries + e * keys.entry_stride : nullptr, keys.window + listed, seen ? e : -1};
}

__device__ __forceinline__ Key find_key(const Keys &keys, int i) {
  return find_key(keys, i, i < keys.in_window ? -1 : entry_at(keys, i));
}

// exp(a - b) for b >= a, also where both are infinite; NaN stays NaN.
__device__ __forceinline__ float exp_below(float a, float b) { return a == b ? 1.f : expf(a - b); }

// Columns of visible that hold no key. Each of `threads` threads calls with its number.
__device__ __forceinline__ void show_nothing_else(const Keys &keys, int thread, int threads) {
#pragma unroll 1
  for (int j = keys.in_window + thread; j < keys.window + keys.columns; j += threads)
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
