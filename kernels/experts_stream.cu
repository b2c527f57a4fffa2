// experts_stream.cu    y[slot, n] = sum_k x[row of slot, k] w[expert of slot, n, k] of few tokens, at the rate at which w can be read
// twin     reference/moe.py::Expert               tests  pytest parity/test_operations_dense.py -k "experts and stream"
// tensors  as experts.cu; a slot is one (token, choice), experts [S] i32, -1 = none: its row of y stays untouched
// numerics stream.cuh: code times scale is exact in bf16, fp32 sums by mma; one rounding to bf16 at the store
// launch   grid = (ceil(N / (8 R * 8 / slices)), S, 1 or 2), block = 256; slices 1, 2, 4 or 8: parts of a row of w.
//          Slots of one expert go together, 8 at most: the first of them reads w for all, the others' blocks leave
// needs    K % 32 == 0
// variants 16: a warp takes 16 rows of w (R = 2), two chunks at once | 32: 32 rows, one chunk. The same bits for the same
//          number of slices
#include "stream.cuh"

// Slots of this block's expert, from this block's on: list[0..]. Returns how many, 0 where another block takes this slot.
__device__ __forceinline__ int slots_together(const int *experts, int S, int slot, int (&list)[STREAM_TOKENS]) {
  __shared__ int found;
  const int expert = experts[slot], lane = threadIdx.x;
  if (lane < WARP) {
    int before = 0, count = 0;  // slots of this expert before this one, and from this one on
    for (int first = 0; first < S; first += WARP) {
      const int other = first + lane;
      const bool same = other < S && experts[other] == expert;
      const unsigned mask = __ballot_sync(FULL_MASK, same);
      const int up_to_here = slot - first;  // lanes below are slots before this one
      const unsigned earlier = up_to_here <= 0 ? 0u : up_to_here >= WARP ? mask : mask & ((1u << up_to_here) - 1u);
      before += __popc(earlier);
      const unsigned later = mask & ~earlier;
      const int rank = count + __popc(later & ((1u << lane) - 1u));
      if ((later >> lane & 1u) && rank < STREAM_TOKENS) list[rank] = other;
      count += __popc(later);
    }
    if (lane == 0) found = before % STREAM_TOKENS ? 0 : min(count, STREAM_TOKENS);
  }
  __syncthreads();
  return found;
}

template <int R, int U>
__device__ __forceinline__ void experts_product(const __nv_bfloat16 *x, const int *experts, const unsigned char *w,
                                                const unsigned char *w_scale, __nv_bfloat16 *y, const unsigned char *second_w,
                                                const unsigned char *second_scale, __nv_bfloat16 *second_y, int S, int slots_per_row,
                                                int N, int K, long long x_stride, int slices) {
  __shared__ int list[STREAM_TOKENS];
  const int expert = experts[blockIdx.y];
  if (expert < 0) return;  // the whole block leaves
  const int count = slots_together(experts, S, blockIdx.y, list);
  if (count == 0) return;  // likewise
  const bool second = blockIdx.z;
  const unsigned char *codes = (second ? second_w : w) + (size_t)expert * N * (K / 2);
  const unsigned char *scale = (second ? second_scale : w_scale) + (size_t)expert * N * (K / 32);
  __nv_bfloat16 *out = second ? second_y : y;
  const bool whole = aligned_16(x, 2 * x_stride) && aligned_16(codes, K / 2) && K % (4 * Fp4Stream::RUN) == 0;
  const int token = threadIdx.x % WARP / 4;
  stream_product<Fp4Stream, R, U>(
      Fp4Stream{codes, scale, K}, x + list[token < count ? token : 0] / slots_per_row * x_stride, token < count, whole,
      stream_first_row<R>(blockIdx.x, slices), N, K, slices,
      [&](int token, int n, float sum) { out[(size_t)list[token] * N + n] = to_bf16(sum); });
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
experts_stream16(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int S, int slots_per_row, int N,
                 int K, long long x_stride, int slices) {
  experts_product<2, 2>(x, experts, w, w_scale, y, second_w, second_scale, second_y, S, slots_per_row, N, K, x_stride, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
experts_stream32(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int S, int slots_per_row, int N,
                 int K, long long x_stride, int slices) {
  experts_product<4, 1>(x, experts, w, w_scale, y, second_w, second_scale, second_y, S, slots_per_row, N, K, x_stride, slices);
}
