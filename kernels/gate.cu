// gate.cu    router: scores of all experts, choice of k of them, weights of the chosen
// twin     reference/moe.py::Gate                 tests  pytest parity/test_operations_dense.py -k gate
// tensors  logits, scores [T, E] fp32 | bias [E] fp32 or null | tid2eid [vocab, k] i32 or null: experts by token
//          tokens [T] i64 | position [T] i32, -1 = pad | experts [T, k] i32, ascending, -1 for pads | weights [T, k] fp32
// numerics fp32. scores: sqrt(log1p(exp(x))), 1 / (1 + exp(-x)) or a softmax over E (butterfly sums).
//          choice by scores + bias (one rounded sum), the lower expert first where equal, NaN above everything;
//          weights come from the scores without bias: s / sum(s) * route_scale, the sum in ascending expert order
// launch   gate_scores: grid = T, block = 32 | gate_choose: grid = T, block = 32; naive: grid = ceil(T / 32), block = 32
//          gate_weights: grid = ceil(T / 128), block = 128
// variants gate_choose 0 naive: a thread per token, kept as second oracle | 1 a warp per token (default), the same bits
#include "common.cuh"

constexpr int SQRTSOFTPLUS = 0, SIGMOID = 1, SOFTMAX = 2;

extern "C" __global__ void __launch_bounds__(32)
gate_scores(const float *__restrict__ logits, float *__restrict__ scores, int E, int scoring) {
  const float *x = logits + (size_t)blockIdx.x * E;
  float *out = scores + (size_t)blockIdx.x * E;
  if (scoring != SOFTMAX) {
    for (int e = threadIdx.x; e < E; e += WARP) {
      const float v = x[e];
      // max(v, 0) + log1p(exp(-|v|)) is log(1 + exp(v)) without overflow
      out[e] = scoring == SIGMOID ? 1.f / (1.f + expf(-v)) : sqrtf((v > 0.f ? v : 0.f) + log1pf(expf(-fabsf(v))));
    }
    return;  // the whole block leaves
  }
  float largest = -INFINITY, sum = 0.f;
  for (int e = threadIdx.x; e < E; e += WARP) largest = fmaxf(largest, x[e]);
  largest = warp_max(largest);
  for (int e = threadIdx.x; e < E; e += WARP) sum += expf(x[e] - largest);
  sum = warp_sum(sum);
  for (int e = threadIdx.x; e < E; e += WARP) out[e] = expf(x[e] - largest) / sum;
}

typedef unsigned long long Key;

// Orders experts by value, larger first, then by number, lower first: a larger key is chosen earlier. Never 0.
__device__ __forceinline__ Key choice_key(float value, int expert) {
  const unsigned bits = __float_as_uint(value + 0.f);  // -0 and 0 are equal
  const unsigned ordered = value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (Key)ordered << 32 | (0xffffffffu - (unsigned)expert);
}

// The largest key below `below` among experts first, first + step, ...; 0 where there is none.
__device__ __forceinline__ Key best_below(Key below, const float *scores, const float *bias, int E, int first, int step) {
  Key best = 0;
  for (int e = first; e < E; e += step) {
    const Key key = choice_key(bias ? scores[e] + bias[e] : scores[e], e);
    if (key < below && key > best) best = key;
  }
  return best;
}

// Puts expert at its place in the ascending list chosen[0..count).
__device__ __forceinline__ void insert_ascending(int *chosen, int count, int expert) {
  int at = count;
  for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1];
  chosen[at] = expert;
}

// What needs no scores: pads and hash routing. True when the row is done.
__device__ __forceinline__ bool chosen_without_scores(const int *tid2eid, const long long *tokens,
                                                      const int *position, int *chosen, int t, int k) {
  if (position[t] < 0)
    for (int j = 0; j < k; j++) chosen[j] = -1;
  else if (tid2eid)
    for (int j = 0; j < k; j++) insert_ascending(chosen, j, tid2eid[(size_t)tokens[t] * k + j]);
  return position[t] < 0 || tid2eid;
}

extern "C" __global__ void __launch_bounds__(32)
gate_choose_naive(const float *__restrict__ scores, const float *__restrict__ bias, const int *__restrict__ tid2eid,
                  const long long *__restrict__ tokens, const int *__restrict__ position, int *experts, int T, int E, int k) {
  const int t = blockIdx.x * 32 + threadIdx.x;
  if (t >= T) return;
  int *chosen = experts + (size_t)t * k;
  if (chosen_without_scores(tid2eid, tokens, position, chosen, t, k)) return;
  Key last = ~0ull;
  for (int j = 0; j < k; j++) {
    last = best_below(last, scores + (size_t)t * E, bias, E, 0, 1);
    insert_ascending(chosen, j, (int)(0xffffffffu - (unsigned)last));
  }
}

extern "C" __global__ void __launch_bounds__(32)
gate_choose(const float *__restrict__ scores, const float *__restrict__ bias, const int *__restrict__ tid2eid,
            const long long *__restrict__ tokens, const int *__restrict__ position, int *experts, int E, int k) {
  const int t = blockIdx.x, lane = threadIdx.x;
  int *chosen = experts + (size_t)t * k;
  if (position[t] < 0 || tid2eid) {
    if (lane == 0) chosen_without_scores(tid2eid, tokens, position, chosen, t, k);
    return;  // the whole warp leaves
  }
  Key last = ~0ull;
  for (int j = 0; j < k; j++) {
    Key best = best_below(last, scores + (size_t)t * E, bias, E, lane, WARP);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      const Key other = __shfl_xor_sync(FULL_MASK, best, step);
      best = other > best ? other : best;
    }
    last = best;
    if (lane == 0) insert_ascending(chosen, j, (int)(0xffffffffu - (unsigned)last));
  }
}

extern "C" __global__ void __launch_bounds__(128)
gate_weights(const float *__restrict__ scores, const int *__restrict__ experts, float *__restrict__ weights, int T, int E,
             int k, int normalise, float route_scale) {
  const int t = blockIdx.x * 128 + threadIdx.x;
  if (t >= T) return;
  float sum = 0.f;
  for (int j = 0; j < k; j++) {
    const int expert = experts[(size_t)t * k + j];
    if (expert >= 0) sum += scores[(size_t)t * E + expert];
  }
  for (int j = 0; j < k; j++) {
    const int expert = experts[(size_t)t * k + j];
    const float s = expert >= 0 ? scores[(size_t)t * E + expert] : 0.f;
    weights[(size_t)t * k + j] = expert < 0 ? 0.f : (normalise ? s / sum : s) * route_scale;
  }
}
