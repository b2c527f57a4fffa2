// experts.cu    y[slot, n] = sum_k x[row of slot, k] w[expert of slot, n, k]: the FP4 linears of the routed experts
// twin     reference/moe.py::Expert               tests  pytest parity/test_operations_dense.py -k experts
// tensors  a slot is one (token, choice): S = T * k of them | experts [S] i32, -1 = none: its row of y stays untouched
//          x [S / slots_per_row, K] bf16, rows x_stride elements apart (up: k slots share a token's row; down: one row a slot)
//          w [E, N, K/2] two e2m1 a byte, low nibble = even column | w_scale [E, N, K/32] e8m0, 1 per 32 along K
//          y [S, N] bf16. A second (w, w_scale, y) is computed by blocks with blockIdx.z = 1: w1 and w3 in one launch
//          plan [2 (E + 1) + S] i32: first tile of every expert and the end, first list entry likewise, slots listed by expert
// numerics weights stay packed; code times scale is exact in fp32 and in bf16; fp32 accumulation (linear.cuh), one
//          rounding to bf16 at the store
// launch   naive: grid = (S, ceil(N / 128), 1 or 2), block = 128 | thin: grid = (S, ceil(N / 32), 1 or 2), block = 128
//          plan: grid = 1, block = 256, before mma: grid = (S / 64 + min(E, S), ceil(N / 64), 1 or 2), block = 128
// needs    K % 32 == 0
// variants 0 naive: a thread per output, kept as second oracle | 1 thin: eight lanes per 2 outputs, for few tokens
//          2 mma: tiles of 64 slots of one expert
#include "linear.cuh"

struct Fp4Weight {
  static constexpr bool TILE_SCALE = false;
  const unsigned char *w, *scale;  // of this expert
  int K;
  bool aligned;  // rows start at multiples of 4 bytes

  __device__ __forceinline__ float block_scale(int n, int k) const { return e8m0_decode(scale[(size_t)n * (K / 32) + k / 32]); }
  __device__ __forceinline__ void eight(float (&v)[8], int n, int k) const {
    if (k >= K) return zero_8(v);  // K % 32 == 0: eight columns are in or out together, and share a scale
    const unsigned char *packed = w + (size_t)n * (K / 2) + k / 2;
    const unsigned word = aligned ? *reinterpret_cast<const unsigned *>(packed)
                                  : packed[0] | packed[1] << 8 | packed[2] << 16 | (unsigned)packed[3] << 24;
    const float s = block_scale(n, k);
    e2m1_decode_8(v, word);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= s;
  }
  __device__ __forceinline__ void codes(float (&v)[8], int n, int k) const { eight(v, n, k); }
  __device__ __forceinline__ float tile_scale(int, int) const { return 1.f; }
  __device__ __forceinline__ float at(int n, int k) const {
    const unsigned packed = w[(size_t)n * (K / 2) + k / 2];
    return e2m1_decode(k % 2 ? packed >> 4 : packed) * block_scale(n, k);
  }
};

__device__ __forceinline__ Fp4Weight expert_weight(const unsigned char *w, const unsigned char *scale, int expert, int N, int K) {
  w += (size_t)expert * N * (K / 2);
  return {w, scale + (size_t)expert * N * (K / 32), K, ((size_t)w & 3) == 0};
}

extern "C" __global__ void __launch_bounds__(128)
experts_naive(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
              const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y,
              const unsigned char *__restrict__ second_w, const unsigned char *__restrict__ second_scale,
              __nv_bfloat16 *__restrict__ second_y, int slots_per_row, int N, int K, long long x_stride) {
  const int slot = blockIdx.x, expert = experts[slot], n = blockIdx.y * 128 + threadIdx.x;
  if (expert < 0 || n >= N) return;
  const bool second = blockIdx.z;
  const Fp4Weight weight = expert_weight(second ? second_w : w, second ? second_scale : w_scale, expert, N, K);
  const float sum = naive_dot(x + slot / slots_per_row * x_stride, weight, n, K);
  (second ? second_y : y)[(size_t)slot * N + n] = to_bf16(sum);
}

extern "C" __global__ void __launch_bounds__(THIN_THREADS)
experts_thin(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
             const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y,
             const unsigned char *__restrict__ second_w, const unsigned char *__restrict__ second_scale,
             __nv_bfloat16 *__restrict__ second_y, int slots_per_row, int N, int K, long long x_stride) {
  const int slot = blockIdx.x, expert = experts[slot];
  if (expert < 0) return;  // the whole block leaves
  const bool second = blockIdx.z;
  __nv_bfloat16 *out = (second ? second_y : y) + (size_t)slot * N;
  thin_product(x + slot / slots_per_row * x_stride, rows_aligned(x, x_stride),
               expert_weight(second ? second_w : w, second ? second_scale : w_scale, expert, N, K), thin_first_row(), N, K,
               [&](int n, float sum) { out[n] = to_bf16(sum); });
}

// Lists the slots of every expert, ascending, and counts tiles of 64. Fixed order: each expert's thread walks all slots.
extern "C" __global__ void __launch_bounds__(256) experts_plan(const int *__restrict__ experts, int *plan, int S, int E) {
  int *first_tile = plan, *first_entry = plan + E + 1, *list = plan + 2 * (E + 1);
  for (int e = threadIdx.x; e < E; e += 256) {
    int count = 0;
    for (int slot = 0; slot < S; slot++) count += experts[slot] == e;
    first_entry[e] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int tiles = 0, entries = 0;
    for (int e = 0; e <= E; e++) {
      const int count = e < E ? first_entry[e] : 0;
      first_tile[e] = tiles;
      first_entry[e] = entries;
      tiles += ceil_div(count, TILE);
      entries += count;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += 256) {
    int at = first_entry[e];
    for (int slot = 0; slot < S; slot++)
      if (experts[slot] == e) list[at++] = slot;
  }
}

// The slots of one tile: rows of x are gathered through the list.
struct SlotRows {
  const __nv_bfloat16 *x;
  const int *list;
  int count, slots_per_row;
  long long row_stride;
  bool aligned;
  __device__ __forceinline__ const __nv_bfloat16 *row(int m) const {
    return m < count ? x + list[m] / slots_per_row * row_stride : nullptr;
  }
};

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)
experts_mma(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ plan, const unsigned char *__restrict__ w,
            const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y,
            const unsigned char *__restrict__ second_w, const unsigned char *__restrict__ second_scale,
            __nv_bfloat16 *__restrict__ second_y, int E, int slots_per_row, int N, int K, long long x_stride) {
  const int *first_tile = plan, *first_entry = plan + E + 1, *list = plan + 2 * (E + 1);
  const int tile = blockIdx.x, n0 = blockIdx.y * TILE;
  if (tile >= first_tile[E]) return;  // the whole block leaves
  int expert = 0, beyond = E;         // the last expert whose first tile is not after this one: it has slots
  while (beyond - expert > 1) {
    const int middle = (expert + beyond) / 2;
    if (first_tile[middle] <= tile) expert = middle;
    else beyond = middle;
  }
  const int first = first_entry[expert] + (tile - first_tile[expert]) * TILE, end = first_entry[expert + 1];
  const SlotRows rows{x, list + first, min(end - first, TILE), slots_per_row, x_stride, rows_aligned(x, x_stride)};
  const bool second = blockIdx.z;
  __nv_bfloat16 *out = second ? second_y : y;
  tile_product(rows, expert_weight(second ? second_w : w, second ? second_scale : w_scale, expert, N, K), n0, N, K,
               [&](int m, int n, float sum) { out[(size_t)list[first + m] * N + n0 + n] = to_bf16(sum); });
}
