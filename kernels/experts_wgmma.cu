// experts_wgmma.cu    y[slot, n] = sum_k x[row of slot, k] w[expert of slot, n, k] of many tokens, on Hopper's tensor cores
// archs    sm_90a
// twin     reference/moe.py::Expert               tests  pytest parity/test_operations_dense.py -k "experts and wgmma" (emulated on the CPU)
// tensors  as experts.cu; a slot is one (token, choice), experts [S] i32, -1 = none: its row of y stays untouched
//          plan [2 (E + 1) + S] i32, by experts_order with the tile of 128
// numerics wgmma_tiles.cuh: code times scale is exact in bf16, fp32 sums by wgmma; one rounding to bf16 at the store
// launch   experts_order of experts_tiles.cu before; grid = (ceil(N / 128), S / 128 + min(E, S), 1 or 2), block = 256;
//          dynamic shared memory: Layout::BYTES
// needs    rows of x and w at multiples of 16 bytes; K % 64 == 0
// variants experts_wgmma128: 128 slots of one expert x 128 rows of w a block, two blocks a multiprocessor
#include "hopper.cuh"

extern __shared__ __align__(1024) unsigned char wgmma_shared[];

#include "wgmma_tiles.cuh"

template <int TOKENS, int STAGES>
__device__ __forceinline__ void experts_product(const __nv_bfloat16 *x, const int *plan, const unsigned char *w,
                                                const unsigned char *w_scale, __nv_bfloat16 *y, const unsigned char *second_w,
                                                const unsigned char *second_scale, __nv_bfloat16 *second_y, int E, int slots_per_row,
                                                int N, int K, long long x_stride) {
  typedef Layout<Fp4Wgmma, TOKENS, STAGES> L;
  const int *first_tile = plan, *first_entry = plan + E + 1, *list = plan + 2 * (E + 1);
  const int tile_number = blockIdx.y;
  if (tile_number >= first_tile[E]) return;  // the whole block leaves
  int expert = 0, beyond = E;                // the last expert whose first tile is not after this one: it has slots
  while (beyond - expert > 1) {
    const int middle = (expert + beyond) / 2;
    if (first_tile[middle] <= tile_number) expert = middle;
    else beyond = middle;
  }
  const int first = first_entry[expert] + (tile_number - first_tile[expert]) * TOKENS, rows = min(first_entry[expert + 1] - first, TOKENS);
  unsigned *x_rows = reinterpret_cast<unsigned *>(wgmma_shared + L::AT_ROWS);
  int *slots = reinterpret_cast<int *>(wgmma_shared + L::AT_SLOTS);
  for (int m = threadIdx.x; m < TOKENS; m += WGMMA_THREADS) {
    const int slot = list[first + min(m, rows - 1)];
    slots[m] = slot;
    x_rows[m] = (unsigned)(slot / slots_per_row * x_stride / 8);
  }
  __syncthreads();
  const bool second = blockIdx.z;
  const int n0 = blockIdx.x * W_ROWS;
  const Fp4Wgmma weight{(second ? second_w : w) + (size_t)expert * N * (K / 2), (second ? second_scale : w_scale) + (size_t)expert * N * (K / 32), K};
  const __nv_bfloat16 *tile = wgmma_product<Fp4Wgmma, TOKENS, STAGES, __nv_bfloat16>(weight, x, n0, N, K, [](float sum) { return to_bf16(sum); });
  store_tile(tile, rows, second ? second_y : y, N, n0, N, [&](int m) { return (long long)slots[m]; });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 2)
experts_wgmma128(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ plan, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int E, int slots_per_row, int N,
                 int K, long long x_stride) {
  experts_product<128, 4>(x, plan, w, w_scale, y, second_w, second_scale, second_y, E, slots_per_row, N, K, x_stride);
}
