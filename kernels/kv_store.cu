// kv_store.cu    writes what a layer remembers: the window ring, compressed entries, indexer keys
// twin     reference/formats.py                   tests  pytest parity/test_operations_attention.py -k store
// tensors  kv [T, d] bf16, rows kv_stride elements apart, T = b * s | position, row [T] i32, position -1 = pad: nothing is written
//          ring [b, slots, EB] u8, format in entry.cuh, slot = position % slots | ring_position [b, slots] i32
//          rows [b, E, d] bf16 | entry [b, E] i32, -1 = skip | cache [b, capacity, EB] u8
//          keys [b, capacity, di/2] u8, two e2m1 a byte, low nibble = even index | scales [b, capacity, di/32] e8m0
//          strides: of kv, out in elements, of ring, cache, keys and scales in bytes; bytes between entries stay untouched
// numerics e4m3, one scale per 64 codes, from bits, one rounding; indexer keys: Hadamard in fp32 (butterflies), bf16, e2m1.
//          A block with an infinity or a NaN gets scale 255 and reads as NaN
// launch   store_window: grid = T; the others: grid = (E, b); block = 32; store_index_keys: di floats of dynamic shared memory
//          Two tokens of one call must not share a slot: at most `slots` tokens a row
// variants 0 a warp per entry
#include "entry.cuh"

extern __shared__ __align__(16) float key_values[];

extern "C" __global__ void __launch_bounds__(32)
store_window(const __nv_bfloat16 *kv, const int *position, const int *row, unsigned char *ring, int *ring_position,
             int d, int r, int slots, long long kv_stride, long long ring_row_stride, long long ring_slot_stride,
             long long ring_position_stride) {
  const int token = blockIdx.x, p = position[token];
  if (p < 0) return;
  const int batch = row[token], slot = p % slots;
  store_entry(ring + batch * ring_row_stride + slot * ring_slot_stride, kv + token * kv_stride, d, r);
  if (threadIdx.x == 0) ring_position[batch * ring_position_stride + slot] = p;
}

extern "C" __global__ void __launch_bounds__(32)
store_entries(const __nv_bfloat16 *rows, const int *entry, unsigned char *cache, int d, int r, int E, int capacity,
              long long batch_stride, long long row_stride, long long cache_row_stride, long long cache_entry_stride) {
  const int e = entry[(long long)blockIdx.y * E + blockIdx.x];
  if (e < 0 || e >= capacity) return;
  store_entry(cache + blockIdx.y * cache_row_stride + e * cache_entry_stride,
              rows + blockIdx.y * batch_stride + blockIdx.x * row_stride, d, r);
}

extern "C" __global__ void __launch_bounds__(32)
store_index_keys(const __nv_bfloat16 *rows, const int *entry, unsigned char *keys, unsigned char *scales, int di, int E,
                 int capacity, long long batch_stride, long long row_stride, long long keys_row_stride,
                 long long keys_entry_stride, long long scales_row_stride, long long scales_entry_stride,
                 float inverse_root) {
  const int e = entry[(long long)blockIdx.y * E + blockIdx.x], lane = threadIdx.x;
  if (e < 0 || e >= capacity) return;
  const __nv_bfloat16 *x = rows + blockIdx.y * batch_stride + blockIdx.x * row_stride;
  for (int i = lane; i < di; i += WARP) key_values[i] = from_bf16(x[i]);
  hadamard_in_place(key_values, di, inverse_root);
  unsigned char *packed = keys + blockIdx.y * keys_row_stride + e * keys_entry_stride;
  unsigned char *scale = scales + blockIdx.y * scales_row_stride + e * scales_entry_stride;
  for (int first = 0; first < di; first += KEY_BLOCK) {
    const KeyCode key = encode_key_block(key_values[first + lane]);
    const unsigned odd = __shfl_down_sync(FULL_MASK, key.code, 1);
    if (lane % 2 == 0) packed[(first + lane) / 2] = (unsigned char)(key.code | odd << 4);
    if (lane == 0) scale[first / KEY_BLOCK] = (unsigned char)key.scale;
  }
}
