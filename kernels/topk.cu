// topk.cu    selected[t] = the k entries of largest score among the (p + 1) / ratio visible ones, ascending, then -1
// twin     reference/attention.py::Indexer        tests  pytest parity/test_operations_attention.py -k topk
// tensors  score [T, E] fp32, rows score_stride elements apart; what lies beyond the visible entries is never read
//          position [T] i32, -1 = pad: its row stays untouched | selected [T, k] i32, rows selected_stride apart
// numerics exact: scores are compared by all 32 bits (-0 = +0, -inf is the smallest number, a positive NaN the largest), ties go to
//          the lower entry. No candidate buffer, so no limit on clustered scores; integer counts, so no thread order shows
// launch   naive: grid = ceil(T / 32), block = 32 | radix: grid = T, block = 256 | E up to 2^31 / 256
// variants 0 naive: a thread per row counts the better entries of each entry, kept as second oracle
//          1 radix (default): four histograms of 8 bits find the k-th score, then one ordered pass writes
#include "common.cuh"

constexpr int THREADS = 256, BINS = 256, WARPS = THREADS / WARP;

// Unsigned order = order of the scores.
__device__ __forceinline__ unsigned sort_key(float score) {
  const unsigned bits = __float_as_uint(score + 0.f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int visible_entries(int p, int ratio, int E) { return min((p + 1) / ratio, E); }

extern "C" __global__ void __launch_bounds__(32)
topk_naive(const float *score, const int *position, int *selected, int T, int E, int k, int ratio, long long score_stride,
           long long selected_stride) {
  const int token = blockIdx.x * 32 + threadIdx.x;
  if (token >= T || position[token] < 0) return;
  const float *row = score + token * score_stride;
  int *out = selected + token * selected_stride;
  const int seen = visible_entries(position[token], ratio, E);
  int written = 0;
  for (int e = 0; e < seen; e++) {
    const unsigned key = sort_key(row[e]);
    int better = 0;
    for (int other = 0; other < seen; other++) {
      const unsigned its_key = sort_key(row[other]);
      better += its_key > key || (its_key == key && other < e);
    }
    if (better < k) out[written++] = e;
  }
  while (written < k) out[written++] = -1;
}

// Sum of v over the threads before this one. All threads call.
__device__ __forceinline__ int exclusive_sum(int v, int *warp_totals) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int inclusive = v;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == WARP - 1) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = inclusive - v;
  for (int w = 0; w < warp; w++) before += warp_totals[w];
  return before;
}

extern "C" __global__ void __launch_bounds__(THREADS)
topk_radix(const float *score, const int *position, int *selected, int E, int k, int ratio, long long score_stride,
           long long selected_stride) {
  __shared__ int histogram[BINS], warp_totals[3][WARPS];
  __shared__ unsigned chosen_bin;
  __shared__ int chosen_rest;
  const int token = blockIdx.x, tid = threadIdx.x, p = position[token];
  if (p < 0) return;
  const float *row = score + token * score_stride;
  int *out = selected + token * selected_stride;
  const int seen = visible_entries(p, ratio, E);
  if (seen <= k) {  // the whole block: every visible entry
    for (int i = tid; i < k; i += THREADS) out[i] = i < seen ? i : -1;
    return;
  }

  unsigned prefix = 0, known = 0;  // the high bits of the k-th largest key, and their mask
  int rest = k;                    // how many keys with that prefix are still to be taken
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[tid] = 0;
    __syncthreads();
    for (int e = tid; e < seen; e += THREADS) {
      const unsigned key = sort_key(row[e]);
      if ((key & known) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1);
    }
    __syncthreads();
    const int bin = BINS - 1 - tid;  // thread 0 has the largest keys
    const int here = histogram[bin], above = exclusive_sum(here, warp_totals[0]);
    if (above < rest && above + here >= rest) {  // exactly one thread
      chosen_bin = bin;
      chosen_rest = rest - above;
    }
    __syncthreads();
    prefix |= chosen_bin << shift;
    known |= 255u << shift;
    rest = chosen_rest;
  }

  // Keys above the k-th, and the first `rest` equal to it. Each thread owns a run of entries, so the order is kept.
  const int run = (seen + THREADS - 1) / THREADS, begin = min(tid * run, seen), end = min(begin + run, seen);
  int larger = 0, equal = 0;
  for (int e = begin; e < end; e++) {
    const unsigned key = sort_key(row[e]);
    larger += key > prefix;
    equal += key == prefix;
  }
  const int equal_before = exclusive_sum(equal, warp_totals[1]);
  const int larger_before = exclusive_sum(larger, warp_totals[2]);
  int ties = equal_before, written = larger_before + min(equal_before, rest);
  for (int e = begin; e < end; e++) {
    const unsigned key = sort_key(row[e]);
    if (key > prefix || (key == prefix && ties++ < rest)) out[written++] = e;
  }
}
