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

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
experts_stream16(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int S, int slots_per_row, int N,
                 int K, long long x_stride, int slices) {
  const bool second = blockIdx.z;
  experts_product<2, 2>(x, experts, second ? second_w : w, second ? second_scale : w_scale, second ? second_y : y, blockIdx.y, blockIdx.x, S,
                        slots_per_row, N, K, x_stride, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
experts_stream32(const __nv_bfloat16 *__restrict__ x, const int *__restrict__ experts, const unsigned char *__restrict__ w,
                 const unsigned char *__restrict__ w_scale, __nv_bfloat16 *__restrict__ y, const unsigned char *__restrict__ second_w,
                 const unsigned char *__restrict__ second_scale, __nv_bfloat16 *__restrict__ second_y, int S, int slots_per_row, int N,
                 int K, long long x_stride, int slices) {
  const bool second = blockIdx.z;
  experts_product<4, 1>(x, experts, second ? second_w : w, second ? second_scale : w_scale, second ? second_y : y, blockIdx.y, blockIdx.x, S,
                        slots_per_row, N, K, x_stride, slices);
}
