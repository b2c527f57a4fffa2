// moe_combine.cu    routed[t,:] = sum over the row's experts of down[t,j,:]; out = bf16(routed + shared)
// twin     reference/moe.py::MoE                  tests  pytest parity/test_operations_dense.py -k moe_combine
// tensors  down [T, k, D] bf16, weights already applied | experts [T, k] i32 ascending, -1 = no expert | shared [T, D] bf16
//          routed [T, D] fp32 | out [T, D] bf16. A row of -1 only (a pad) stays untouched
// numerics fp32 sum in ascending expert order; one rounding to bf16 at the store of out
// launch   grid = (T, ceil(D / 128)), block = 128
// variants 0 naive: a thread per element
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
moe_combine(const __nv_bfloat16 *__restrict__ down, const int *__restrict__ experts, const __nv_bfloat16 *__restrict__ shared,
            float *__restrict__ routed, __nv_bfloat16 *__restrict__ out, int k, int D) {
  const int t = blockIdx.x, c = blockIdx.y * 128 + threadIdx.x;
  if (c >= D) return;
  float sum = 0.f;
  bool any = false;
  for (int j = 0; j < k; j++) {
    const size_t slot = (size_t)t * k + j;
    if (experts[slot] < 0) continue;
    sum += from_bf16(down[slot * D + c]);
    any = true;
  }
  if (!any) return;
  const size_t i = (size_t)t * D + c;
  routed[i] = sum;
  out[i] = to_bf16(sum + from_bf16(shared[i]));
}
