// latents.cu    what follows the projections of the hidden state, in one launch: q_norm and its rounding; kv_norm, rotation and the
//               window ring; one step of the layer's compressor, and of the indexer's, with their norm, rotation and store
//
//   qr = q_norm(qr_raw), qr_q = e4m3 of it | kv = rope(kv_norm(kv_raw)), stored | pooled, rows, entry as compressor_step,
//   rms_norm and rope make them; rows stored as an entry, or through Hadamard as an indexer key
// twin     reference/attention.py                 tests  pytest parity/test_operations_at_once.py
// tensors  as rms_norm.cu, act_quant.cu, rope.cu, kv_store.cu and compressor.cu; everything contiguous but ring, entries, keys, scales
//          (strides in bytes); one token a row of the batch for the compressors: kv, gate [b, c*d'] fp32
// numerics those of the kernels named above, bit for bit
// launch   grid = (ceil(T / 4), 1), or with compressors, T = b: (max(ceil(T / 4), b), 2 or 3); block = 256. blockIdx.y 0: warps 0-3 have
//          the queries of four tokens, warps 4-7 their kv; 1: the compressor of row blockIdx.x; 2: the indexer's
// needs    q_lora, d, d' multiples of 8, at most 2048; di at most 256
#include "rows.cuh"

constexpr int ROW_TOKENS = 4, THREADS = 256, MOST_KEY_DIMS = 256;

struct Compressor {
  const float *kv, *gate, *ape, *norm;
  float *state_kv, *state_gate;
  __nv_bfloat16 *pooled, *rows;
  int *entry, *entry_position;
  int width, ratio, overlap;
};

// One token of a row of the batch: kept, and where it is its group's last the pooled row, normed and rotated. The number of the
// entry that it completes, else -1. All threads call.
__device__ __forceinline__ int compress(const Compressor &c, int batch, int p, bool valid, const float *inv_freq, int half_r, float eps) {
  const int e = p / c.ratio;
  const bool complete = valid && (p + 1) % c.ratio == 0;
  if (threadIdx.x == 0) {
    c.entry[batch] = complete ? e : -1;
    c.entry_position[batch] = complete ? e * c.ratio : -1;
  }
  if (!valid) return -1;
  const int row_width = c.overlap ? 2 * c.width : c.width, slots = c.overlap ? 2 * c.ratio : c.ratio;
  const long long state = (long long)batch * slots * row_width;
  const int own = e * c.ratio, previous = c.overlap && e > 0 ? c.ratio : 0;
  for (int channel = threadIdx.x; channel < c.width; channel += THREADS) {
    for (int at = channel; at < row_width; at += c.width) {  // this thread's channel of both halves: nobody else reads them
      const long long to = state + (long long)(p % slots) * row_width + at;
      c.state_kv[to] = c.kv[(long long)batch * row_width + at];
      c.state_gate[to] = c.gate[(long long)batch * row_width + at] + c.ape[p % c.ratio * row_width + at];
    }
    if (!complete) continue;
    auto kept = [&](int t) { return state + (long long)(t % slots) * row_width + (c.overlap && t >= own ? c.width : 0) + channel; };
    float largest = -INFINITY;
#pragma unroll 8
    for (int t = own - previous; t <= p; t++) largest = fmaxf(largest, c.state_gate[kept(t)]);
    float sum = 0.f, weighted = 0.f;
#pragma unroll 8
    for (int t = own - previous; t <= p; t++) {
      const float weight = expf(c.state_gate[kept(t)] - largest);
      sum += weight;
      weighted = fmaf(weight, c.state_kv[kept(t)], weighted);
    }
    c.pooled[(long long)batch * c.width + channel] = to_bf16(weighted / sum);
  }
  __syncthreads();
  if (complete && threadIdx.x < WARP) {
    __nv_bfloat16 *row = c.rows + (long long)batch * c.width;
    norm_row(c.pooled + (long long)batch * c.width, c.norm, row, c.width, eps);
    __syncwarp();
    rope_row(row, e * c.ratio, inv_freq, c.width, half_r, 1.f);
    __syncwarp();
  }
  return complete ? e : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
latents(const __nv_bfloat16 *qr_raw, const float *q_norm, __nv_bfloat16 *qr, __nv_bfloat16 *qr_q, int q_lora,
        const __nv_bfloat16 *kv_raw, const float *kv_norm, __nv_bfloat16 *kv, const int *position, const int *row, unsigned char *ring,
        int *ring_position, int d, int slots, long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride,
        const float *inv_freq, int half_r, int T, float eps, const int *start, const int *count, int b,
        const float *c_kv, const float *c_gate, const float *c_ape, const float *c_norm, float *c_state_kv, float *c_state_gate,
        __nv_bfloat16 *c_pooled, __nv_bfloat16 *c_rows, int *c_entry, int *c_entry_position, int ratio, int overlap,
        unsigned char *entries, int capacity, long long entries_row_stride, long long entry_stride,
        const float *i_kv, const float *i_gate, const float *i_ape, const float *i_norm, float *i_state_kv, float *i_state_gate,
        __nv_bfloat16 *i_pooled, __nv_bfloat16 *i_rows, int *i_entry, int *i_entry_position, int di,
        unsigned char *keys, unsigned char *scales, int key_capacity, long long keys_row_stride, long long key_stride,
        long long scales_row_stride, long long scale_stride, float inverse_root) {
  __shared__ float key_values[MOST_KEY_DIMS];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (blockIdx.y == 0) {
    const int token = blockIdx.x * ROW_TOKENS + warp % ROW_TOKENS;
    if (token >= T) return;
    if (warp < ROW_TOKENS) {
      __nv_bfloat16 *out = qr + (long long)token * q_lora;
      norm_row(qr_raw + (long long)token * q_lora, q_norm, out, q_lora, eps);
      __syncwarp();
      for (int first = 0; first < q_lora; first += 256) quant_256(out, qr_q + (long long)token * q_lora, first, q_lora);
    } else {
      __nv_bfloat16 *out = kv + (long long)token * d;
      const int p = position[token];
      norm_row(kv_raw + (long long)token * d, kv_norm, out, d, eps);
      __syncwarp();
      rope_row(out, p, inv_freq, d, half_r, 1.f);
      __syncwarp();
      if (p < 0) return;
      const int batch = row[token], slot = p % slots;
      store_entry(ring + batch * ring_row_stride + slot * ring_slot_stride, out, d, 2 * half_r);
      if (lane == 0) ring_position[batch * ring_position_stride + slot] = p;
    }
    return;
  }
  const int batch = blockIdx.x;
  if (batch >= b) return;
  const bool valid = count[batch] > 0;
  if (blockIdx.y == 1) {
    const int e = compress({c_kv, c_gate, c_ape, c_norm, c_state_kv, c_state_gate, c_pooled, c_rows, c_entry, c_entry_position, d, ratio, overlap},
                           batch, start[batch], valid, inv_freq, half_r, eps);
    if (e >= 0 && e < capacity && warp == 0)
      store_entry(entries + batch * entries_row_stride + e * entry_stride, c_rows + (long long)batch * d, d, 2 * half_r);
    return;
  }
  const int e = compress({i_kv, i_gate, i_ape, i_norm, i_state_kv, i_state_gate, i_pooled, i_rows, i_entry, i_entry_position, di, 4, 1}, batch,
                         start[batch], valid, inv_freq, half_r, eps);
  if (e < 0 || e >= key_capacity || warp != 0) return;
  for (int i = lane; i < di; i += WARP) key_values[i] = from_bf16(i_rows[(long long)batch * di + i]);
  hadamard_in_place(key_values, di, inverse_root);
  unsigned char *packed = keys + batch * keys_row_stride + e * key_stride, *scale = scales + batch * scales_row_stride + e * scale_stride;
  for (int first = 0; first < di; first += KEY_BLOCK) {
    const KeyCode key = encode_key_block(key_values[first + lane]);
    const unsigned odd = __shfl_down_sync(FULL_MASK, key.code, 1);
    if (lane % 2 == 0) packed[(first + lane) / 2] = (unsigned char)(key.code | odd << 4);
    if (lane == 0) scale[first / KEY_BLOCK] = (unsigned char)key.scale;
  }
}
