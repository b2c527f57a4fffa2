// experts_tiles.cu    y[slot, n] = sum_k x[row of slot, k] w[expert of slot, n, k] of many tokens, on the tensor cores
// twin     reference/moe.py::Expert               tests  pytest parity/test_operations_dense.py -k "experts and tiles"
// tensors  as experts.cu; a slot is one (token, choice), experts [S] i32, -1 = none: its row of y stays untouched
//          plan [2 (E + 1) + S] i32: first tile of every expert and the end, first list entry likewise, slots listed by expert, ascending
// numerics tiles.cuh: code times scale is exact in bf16, fp32 sums by mma; one rounding to bf16 at the store
// launch   experts_order: grid = 1, block = 1024, dynamic shared memory 4 * 33 * E bytes, before
//          experts_tiles: grid = (ceil(N / 128 or 256), S / 128 + min(E, S), 1 or 2), block = 128 or 256; STAGES stages of shared memory
// needs    rows of x and w at multiples of 16 bytes; K % 64 == 0; E <= 1024
// variants tiles128: 128 slots of one expert x 128 rows of w a block, two blocks a multiprocessor | tiles256: x 256. The same bits
#include "tiles.cuh"

extern __shared__ __align__(128) unsigned char tiles_shared[];

constexpr int ORDER_THREADS = 1024, ORDER_WARPS = ORDER_THREADS / WARP;

// Sum of v over the threads before this one. All ORDER_THREADS threads call.
__device__ __forceinline__ int sum_before(int v) {
  __shared__ int warp_sums[ORDER_WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int through = v;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, through, step);
    if (lane >= step) through += other;
  }
  __syncthreads();
  if (lane == WARP - 1) warp_sums[warp] = through;
  __syncthreads();
  int before = through - v;
  for (int i = 0; i < warp; i++) before += warp_sums[i];
  return before;
}

// Lists the slots of every expert, ascending, and counts tiles of TILES_ROWS. Each warp has a run of slots.
extern "C" __global__ void __launch_bounds__(ORDER_THREADS) experts_order(const int *__restrict__ experts, int *plan, int S, int E) {
  int *counts = reinterpret_cast<int *>(tiles_shared);  // [warp][E]: slots of its run; then those of earlier runs
  int *base = counts + ORDER_WARPS * E;                 // [E]: first list entry
  int *first_tile = plan, *first_entry = plan + E + 1, *list = plan + 2 * (E + 1);
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int run = ceil_div(ceil_div(S, ORDER_WARPS), WARP) * WARP, begin = warp * run, end = min(begin + run, S);
  int *mine = counts + warp * E;
  for (int e = lane; e < E; e += WARP) mine[e] = 0;
  __syncwarp();
  for (int slot = begin + lane; slot - lane < end; slot += WARP) {
    const int expert = slot < end ? experts[slot] : -1;
    const unsigned same = __match_any_sync(FULL_MASK, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  int count = 0;
  if (tid < E)
    for (int i = 0; i < ORDER_WARPS; i++) {
      const int of_run = counts[i * E + tid];
      counts[i * E + tid] = count;
      count += of_run;
    }
  const int tiles = ceil_div(count, TILES_ROWS);
  const int entries_before = sum_before(count), tiles_before = sum_before(tiles);
  if (tid < E) {
    first_entry[tid] = base[tid] = entries_before;
    first_tile[tid] = tiles_before;
    if (tid == E - 1) first_entry[E] = entries_before + count, first_tile[E] = tiles_before + tiles;
  }
  __syncthreads();
  for (int slot = begin + lane; slot - lane < end; slot += WARP) {
    const int expert = slot < end ? experts[slot] : -1;
    const unsigned same = __match_any_sync(FULL_MASK, expert);
    if (expert >= 0) list[base[expert] + mine[expert] + __popc(same & ((1u << lane) - 1u))] = slot;
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
    __syncwarp();
  }
}

template <int COLUMNS, int STAGES>
__device__ __forceinline__ void experts_product(const __nv_bfloat16 *x, const int *plan, const unsigned char *w,
                                                const unsigned char *w_scale, __nv_bfloat16 *y, const unsigned char *second_w,
                                                const unsigned char *second_scale, __nv_bfloat16 *second_y, int E, int slots_per_row,
                                                int N, int K, long long x_stride) {
  __shared__ unsigned x_row[TILES_ROWS];
  __shared__ int slots[TILES_ROWS];
  const int *first_tile = plan, *first_entry = plan + E + 1, *list = plan + 2 * (E + 1);
  const int tile = blockIdx.y;
  if (tile >= first_tile[E]) return;  // the whole block leaves
  int expert = 0, beyond = E;         // the last expert whose first tile is not after this one: it has slots
  while (beyond - expert > 1) {
    const int middle = (expert + beyond) / 2;
    if (first_tile[middle] <= tile) expert = middle;
    else beyond = middle;
  }
  const int first = first_entry[expert] + (tile - first_tile[expert]) * TILES_ROWS, rows = min(first_entry[expert + 1] - first, TILES_ROWS);
  for (int m = threadIdx.x; m < TILES_ROWS; m += blockDim.x) {
    const int slot = list[first + min(m, rows - 1)];
    slots[m] = slot;
    x_row[m] = (unsigned)(slot / slots_per_row * x_stride / 8);
  }
  __syncthreads();
  const bool second = blockIdx.z;
  const Fp4Tiles weight{(second ? second_w : w) + (size_t)expert * N * (K / 2), (second ? second_scale : w_scale) + (size_t)expert * N * (K / 32), K};
  __nv_bfloat16 *out = second ? second_y : y;
  tiles_product<Fp4Tiles, COLUMNS, STAGES>(
      weight, x, x_row, rows, blockIdx.x * COLUMNS, N, K, tiles_shared,
      [&](int m, int n, float one, float two, bool both) { store_two(out + (size_t)slots[m] * N + n, one, two, both); });
}

extern "C" __global__ void __launch_bounds__(128, 2)
experts_tiles128(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ plan, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int E, int slots_per_row, int N,
                 int K, long long x_stride) {
  experts_product<128, 4>(x, plan, w, w_scale, y, second_w, second_scale, second_y, E, slots_per_row, N, K, x_stride);
}

extern "C" __global__ void __launch_bounds__(256, 1)
experts_tiles256(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ plan, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int E, int slots_per_row, int N,
                 int K, long long x_stride) {
  experts_product<256, 4>(x, plan, w, w_scale, y, second_w, second_scale, second_y, E, slots_per_row, N, K, x_stride);
}
