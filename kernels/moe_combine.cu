// moe_combine.cu    routed[t,:] = sum over the row's experts of down[t,j,:]; out = bf16(routed + shared)
// twin     reference/moe.py::MoE                  tests  pytest parity/test_operations_dense.py -k moe_combine
// tensors  down [T, k, D] bf16, weights already applied | experts [T, k] i32 ascending, -1 = no expert | shared [T, D] bf16
//          routed [T, D] fp32 | out [T, D] bf16. A row of -1 only (a pad) stays untouched
// numerics fp32 sum in ascending expert order; one rounding to bf16 at the store of out
// launch   grid = (T, ceil(D / (8 * block))), block = any multiple of 32
// variants 0 naive: a thread per eight elements, a block apart
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
moe_combine(const __nv_bfloat16 *__restrict__ down, const int *__restrict__ experts, const __nv_bfloat16 *__restrict__ shared,
            float *__restrict__ routed, __nv_bfloat16 *__restrict__ out, int k, int D) {
  const int t = blockIdx.x, first = blockIdx.y * 8 * blockDim.x + threadIdx.x;
  const int *chosen = experts + (size_t)t * k;
  bool any = false;
  for (int j = 0; j < k; j++) any |= chosen[j] >= 0;
  if (!any) return;
  for (int step = 0; step < 8; step++) {
    const int c = first + step * blockDim.x;
    if (c >= D) return;
    float sum = 0.f;
    for (int j = 0; j < k; j++)
      if (chosen[j] >= 0) sum += from_bf16(down[((size_t)t * k + j) * D + c]);
    routed[(size_t)t * D + c] = sum;
    out[(size_t)t * D + c] = to_bf16(sum + from_bf16(shared[(size_t)t * D + c]));
  }
}
