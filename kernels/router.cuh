// router.cuh    scores, choice and weights of one token by one warp: the bits of gate.cu
//
// For a kernel that routes beside other work. E at most MOST_EXPERTS. Tests: pytest parity/test_operations_at_once.py.
#pragma once
#include "common.cuh"

constexpr int SQRTSOFTPLUS = 0, SIGMOID = 1, SOFTMAX = 2, MOST_EXPERTS = 1024, MOST_CHOSEN = 32;

// An order of experts by value, larger first, then by number, lower first; NaN above everything. Never 0.
__device__ __forceinline__ unsigned long long place_of(float value, int expert) {
  const unsigned bits = __float_as_uint(value + 0.f);  // -0 and 0 are equal
  const unsigned ordered = value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (unsigned long long)ordered << 32 | (0xffffffffu - (unsigned)expert);
}

// out[e] of all experts; all lanes may read them after __syncwarp.
__device__ __forceinline__ void score_row(const float *logits, float *out, int E, int scoring) {
  const int lane = threadIdx.x % WARP;
  if (scoring != SOFTMAX) {
    for (int e = lane; e < E; e += WARP) {
      const float v = logits[e];
      out[e] = scoring == SIGMOID ? 1.f / (1.f + expf(-v)) : sqrtf((v > 0.f ? v : 0.f) + log1pf(expf(-fabsf(v))));
    }
    return;
  }
  float largest = -INFINITY, sum = 0.f;
  for (int e = lane; e < E; e += WARP) largest = fmaxf(largest, logits[e]);
  largest = warp_max(largest);
  for (int e = lane; e < E; e += WARP) sum += expf(logits[e] - largest);
  sum = warp_sum(sum);
  for (int e = lane; e < E; e += WARP) out[e] = expf(logits[e] - largest) / sum;
}

// chosen[0..k): the best of scores + bias, or those of the table's row; ascending, -1 for a pad. By all lanes; lane 0 writes.
__device__ __forceinline__ void choose_row(const float *scores, const float *bias, const int *table, bool pad, int *chosen, int E, int k) {
  const int lane = threadIdx.x % WARP;
  auto insert = [&](int count, int expert) {  // at its place in the ascending list
    int at = count;
    for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1];
    chosen[at] = expert;
  };
  if (pad || table) {
    if (lane == 0)
      for (int j = 0; j < k; j++) {
        if (pad) chosen[j] = -1;
        else insert(j, table[j]);
      }
    return;
  }
  unsigned long long below = ~0ull;
  for (int j = 0; j < k; j++) {
    unsigned long long best = 0;
    for (int e = lane; e < E; e += WARP) {
      const unsigned long long place = place_of(bias ? scores[e] + bias[e] : scores[e], e);
      if (place < below && place > best) best = place;
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      const unsigned long long other = __shfl_xor_sync(FULL_MASK, best, step);
      best = other > best ? other : best;
    }
    below = best;
    if (lane == 0) insert(j, (int)(0xffffffffu - (unsigned)below));
  }
}

// weights[0..k) of the chosen, from the scores without bias; the sum in ascending order of experts. By one lane.
__device__ __forceinline__ void weigh_row(const float *scores, const int *chosen, float *weights, int k, bool normalise, float route_scale) {
  float sum = 0.f;
  for (int j = 0; j < k; j++)
    if (chosen[j] >= 0) sum += scores[chosen[j]];
  for (int j = 0; j < k; j++) {
    const float s = chosen[j] >= 0 ? scores[chosen[j]] : 0.f;
    weights[j] = chosen[j] < 0 ? 0.f : (normalise ? s / sum : s) * route_scale;
  }
}
