// swiglu.cu    out = silu(min(gate, L)) * clamp(up, -L, L) * weight[row], weight null = 1
// twin     reference/ops.py::swiglu               tests  pytest parity/test_operations_dense.py -k swiglu
// tensors  gate, up [R, I] bf16 | weight [R] fp32 or null | out [R, I] bf16, may be gate or up itself
// numerics fp32, silu(g) = g / (1 + expf(-g)); the gate is clamped above only, up on both sides, NaN stays NaN;
//          one rounding to bf16 at the store
// launch   grid = ceil(R * I / 1024), block = 128
// variants 0 naive: a thread per eight elements, 128 apart
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
swiglu_clamped(const __nv_bfloat16 *gate, const __nv_bfloat16 *up, const float *weight, __nv_bfloat16 *out, long long size,
               int I, float limit) {
  const long long first = blockIdx.x * 1024ll + threadIdx.x;
#pragma unroll
  for (int step = 0; step < 8; step++) {
    const long long i = first + step * 128;
    if (i >= size) return;
    float g = from_bf16(gate[i]), u = from_bf16(up[i]);
    g = g > limit ? limit : g;  // comparisons, not fminf: that would turn a NaN into the limit
    u = u > limit ? limit : u < -limit ? -limit : u;
    float v = g / (1.f + expf(-g)) * u;
    if (weight) v = v * weight[i / I];
    out[i] = to_bf16(v);
  }
}
