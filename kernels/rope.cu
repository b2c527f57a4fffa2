// rope.cu    rotates the last r dims of x[t,head,:] by +-position[t] * inv_freq, adjacent pairs, in place
// twin     reference/ops.py::rope                 tests  pytest parity/test_operations_dense.py -k rope
// tensors  x [T, heads, dim] bf16, strides in elements, read and written | position [T] i32, -1 = pad, untouched
//          inv_freq [r/2] fp32, one per pair, YaRN already applied
// numerics angle = float(position) * inv_freq, full-precision cosf and sinf, products and sums in fp32, each rounded;
//          one rounding to bf16 at the store. sign = -1 rotates back
// launch   grid = (T, ceil(heads / 8)), block = 32
// variants 0 naive: a thread per pair, its angle shared by eight heads
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32)
rope_pairs(__nv_bfloat16 *x, const int *__restrict__ position, const float *__restrict__ inv_freq, int heads, int dim,
           int half_r, long long token_stride, long long head_stride, float sign) {
  const int p = position[blockIdx.x];
  if (p < 0) return;
  const int first_head = blockIdx.y * 8, last_head = min(first_head + 8, heads);
  for (int i = threadIdx.x; i < half_r; i += 32) {
    const float angle = (float)p * inv_freq[i];
    const float c = cosf(angle), s = sign * sinf(angle);
    for (int head = first_head; head < last_head; head++) {
      __nv_bfloat16 *pair = x + blockIdx.x * token_stride + head * head_stride + (dim - 2 * half_r + 2 * i);
      const float a = from_bf16(pair[0]), b = from_bf16(pair[1]);
      pair[0] = to_bf16(a * c - b * s);
      pair[1] = to_bf16(a * s + b * c);
    }
  }
}
