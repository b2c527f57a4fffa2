// compressor.cu    pooled[e] = sum_t softmax_t(gate_t + ape[t % m]) * kv_t, per channel, over the tokens t of group e
//
//   m = 4 (overlap, c = 2): features are two halves A, B of d'. Entry e pools 8 slots: A of the four tokens of group e - 1,
//         B of the four of group e, one softmax over the eight; entry 0 pools its own four only.
//   else (c = 1): entry e pools its m tokens.
// twin     reference/attention.py                 tests  pytest parity/test_operations_attention.py -k compressor
// tensors  kv, gate [b, s, c*d'] fp32, batch and token strides in elements (equal for both) | ape [m, c*d'] fp32
//          state_kv, state_gate [b, R, c*d'] fp32, R = 2m (overlap) or m: token p in slot p % R, ape added to gate
//          start, count [b] i32: this call holds tokens start .. start + count - 1 of the row
//          pooled [b, E, d'] bf16 | entry, entry_position [b, E] i32: entry number and e * m, -1 where nothing is completed
// numerics fp32: largest gate, then exponentials, their sum and the weighted sum in order of t, one division; one rounding, to bf16
// launch   compressor_pool: grid = (E, b, ceil(d' / 64)); compressor_keep: grid = (R, b, ceil(c*d' / 64)), after it, as it
//          overwrites what pooling reads; compressor_step: grid = (1, b, ceil(d' / 64)); block = 64. One thread a channel
// variants prefill (compressor_pool, then compressor_keep) | decode (compressor_step: stores one token, then pools if it is a
//          group's last). Both give the same bits
#include "common.cuh"

constexpr int CHANNELS = 64;

// Group e is complete when its last token is in; the first group that this call can complete is the one `start` lies in.
__device__ __forceinline__ int complete_groups(int tokens, int ratio) { return tokens / ratio; }

extern "C" __global__ void __launch_bounds__(CHANNELS)
compressor_pool(const float *kv, const float *gate, const float *ape, const float *state_kv, const float *state_gate,
                const int *start, const int *count, __nv_bfloat16 *pooled, int *entry, int *entry_position, int E,
                int width, int ratio, int overlap, long long batch_stride, long long token_stride) {
  const int batch = blockIdx.y, channel = blockIdx.z * CHANNELS + threadIdx.x;
  const int first_token = start[batch], end = first_token + count[batch];
  const int e = first_token / ratio + blockIdx.x;
  const bool complete = e < complete_groups(end, ratio);
  if (blockIdx.z == 0 && threadIdx.x == 0) {
    entry[batch * E + blockIdx.x] = complete ? e : -1;
    entry_position[batch * E + blockIdx.x] = complete ? e * ratio : -1;
  }
  if (!complete || channel >= width) return;

  const int row_width = overlap ? 2 * width : width, slots = overlap ? 2 * ratio : ratio;
  const int oldest = overlap && e > 0 ? (e - 1) * ratio : e * ratio, own = e * ratio, last = own + ratio;
  auto column = [&](int t) { return overlap && t >= own ? width + channel : channel; };
  auto kept = [&](int t) { return ((long long)batch * slots + t % slots) * row_width + column(t); };
  auto fresh = [&](int t) { return batch * batch_stride + (t - first_token) * token_stride + column(t); };
  auto gate_of = [&](int t) {
    return t < first_token ? state_gate[kept(t)] : gate[fresh(t)] + ape[t % ratio * row_width + column(t)];
  };
  float largest = gate_of(oldest);
  for (int t = oldest + 1; t < last; t++) largest = fmaxf(largest, gate_of(t));
  float sum = 0.f, weighted = 0.f;
  for (int t = oldest; t < last; t++) {
    const float weight = expf(gate_of(t) - largest);
    sum += weight;
    weighted = fmaf(weight, t < first_token ? state_kv[kept(t)] : kv[fresh(t)], weighted);
  }
  pooled[((long long)batch * E + blockIdx.x) * width + channel] = to_bf16(weighted / sum);
}

// Keeps the tokens of this call that a later entry needs: those of the unfinished group and, with overlap, of the group before.
extern "C" __global__ void __launch_bounds__(CHANNELS)
compressor_keep(const float *kv, const float *gate, const float *ape, float *state_kv, float *state_gate, const int *start,
                const int *count, int row_width, int ratio, int overlap, long long batch_stride, long long token_stride) {
  const int batch = blockIdx.y, slot = blockIdx.x, slots = gridDim.x, channel = blockIdx.z * CHANNELS + threadIdx.x;
  const int first_token = start[batch], end = first_token + count[batch];
  const int needed_from = (complete_groups(end, ratio) - overlap) * ratio;  // may be negative
  const int oldest = max(first_token, needed_from);
  const int t = oldest + ((slot - oldest) % slots + slots) % slots;  // the token from `oldest` on that belongs into this slot
  if (t >= end || channel >= row_width) return;
  const long long to = ((long long)batch * slots + slot) * row_width + channel;
  const long long from = batch * batch_stride + (t - first_token) * token_stride + channel;
  state_kv[to] = kv[from];
  state_gate[to] = gate[from] + ape[t % ratio * row_width + channel];
}

extern "C" __global__ void __launch_bounds__(CHANNELS)
compressor_step(const float *kv, const float *gate, const float *ape, float *state_kv, float *state_gate, const int *start,
                const int *count, __nv_bfloat16 *pooled, int *entry, int *entry_position, int width, int ratio, int overlap,
                long long batch_stride) {
  const int batch = blockIdx.y, channel = blockIdx.z * CHANNELS + threadIdx.x;
  const int p = start[batch], e = p / ratio;
  const bool valid = count[batch] > 0, complete = valid && (p + 1) % ratio == 0;
  if (blockIdx.z == 0 && threadIdx.x == 0) {
    entry[batch] = complete ? e : -1;
    entry_position[batch] = complete ? e * ratio : -1;
  }
  if (!valid || channel >= width) return;

  const int row_width = overlap ? 2 * width : width, slots = overlap ? 2 * ratio : ratio;
  const long long state = (long long)batch * slots * row_width;
  for (int c = channel; c < row_width; c += width) {  // this thread's channel of both halves: nobody else reads them
    const long long to = state + (long long)(p % slots) * row_width + c;
    state_kv[to] = kv[batch * batch_stride + c];
    state_gate[to] = gate[batch * batch_stride + c] + ape[p % ratio * row_width + c];
  }
  if (!complete) return;

  // Slots in order of t: A of the previous group (overlap only), then the group's own tokens.
  const int own = e * ratio, previous = overlap && e > 0 ? ratio : 0;
  auto kept = [&](int t) {
    return state + (long long)(t % slots) * row_width + (overlap && t >= own ? width : 0) + channel;
  };
  float largest = -INFINITY;
  for (int t = own - previous; t <= p; t++) largest = fmaxf(largest, state_gate[kept(t)]);
  float sum = 0.f, weighted = 0.f;
  for (int t = own - previous; t <= p; t++) {
    const float weight = expf(state_gate[kept(t)] - largest);
    sum += weight;
    weighted = fmaf(weight, state_kv[kept(t)], weighted);
  }
  pooled[(long long)batch * width + channel] = to_bf16(weighted / sum);
}
