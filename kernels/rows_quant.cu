// rows_quant.cu    rounding to e4m3 by itself and behind swiglu, and the sum of the experts: 16 bytes a lane
//
//   quant_rows    out = e4m3(x / s) * s, one s per 128: act_quant.cu
//   swiglu_quant  out = e4m3 of bf16( silu(min(gate, L)) * clamp(up, -L, L) * weight[row] ): swiglu.cu, then act_quant.cu; for two
//                 sets of rows in one launch, the second without weights (the shared expert)
//   combine_rows  routed = sum of down over a row's experts, ascending; out = bf16(routed + shared): moe_combine.cu
// twin     reference/formats.py::round_e4m3_blocks, reference/ops.py::swiglu, reference/moe.py::MoE
// tests    pytest parity/test_operations_at_once.py
// tensors  x, out, gate, up [R, dim] bf16, rows of x x_stride elements apart, the others contiguous; dim % 8 == 0 | weight [R] fp32
//          down [T, k, D] bf16 | experts [T, k] i32, -1 = none; a row of -1 only stays untouched | shared, out [T, D] bf16 | routed [T, D] fp32
// numerics those of the kernels named above, bit for bit
// launch   quant_rows, swiglu_quant: a warp per 256 columns of a row, grid = ceil(rows * ceil(dim / 256) / 8), block = 256
//          combine_rows: grid = (T, ceil(D / 1024)), block = 128
// variants one of each
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
quant_rows(const __nv_bfloat16 *x, __nv_bfloat16 *out, int R, int dim, long long x_stride) {
  const int parts = ceil_div(dim, 256);
  const long long i = blockIdx.x * 8ll + threadIdx.x / WARP;
  if (i >= (long long)R * parts) return;
  quant_256(x + i / parts * x_stride, out + i / parts * dim, (int)(i % parts) * 256, dim);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_quant(const __nv_bfloat16 *gate, const __nv_bfloat16 *up, const float *weight, __nv_bfloat16 *out, int R,
             const __nv_bfloat16 *second_gate, const __nv_bfloat16 *second_up, __nv_bfloat16 *second_out, int second_R, int dim,
             float limit) {
  const int parts = ceil_div(dim, 256);
  long long i = blockIdx.x * 8ll + threadIdx.x / WARP;
  if (i >= (long long)(R + second_R) * parts) return;
  const bool second = i >= (long long)R * parts;
  if (second) i -= (long long)R * parts;
  const long long row = i / parts;
  const int column = (int)(i % parts) * 256 + threadIdx.x % WARP * 8;
  const long long at = row * dim + column;
  float g[8] = {}, u[8] = {};
  if (column < dim) {
    load_8(g, (second ? second_gate : gate) + at);
    load_8(u, (second ? second_up : up) + at);
  }
  const float w = second || !weight ? 1.f : weight[row];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    g[j] = g[j] > limit ? limit : g[j];  // comparisons, not fminf: that would turn a NaN into the limit
    u[j] = u[j] > limit ? limit : u[j] < -limit ? -limit : u[j];
    float v = g[j] / (1.f + expf(-g[j])) * u[j];
    if (!second && weight) v = v * w;
    g[j] = round_bf16(v);
  }
  round_e4m3_128(g);
  if (column < dim) store_8((second ? second_out : out) + at, g);
}

extern "C" __global__ void __launch_bounds__(128)
combine_rows(const __nv_bfloat16 *__restrict__ down, const int *__restrict__ experts, const __nv_bfloat16 *__restrict__ shared,
             float *__restrict__ routed, __nv_bfloat16 *__restrict__ out, int k, int D) {
  const int t = blockIdx.x, c = (blockIdx.y * 128 + threadIdx.x) * 8;
  const int *chosen = experts + (size_t)t * k;
  bool any = false;
  for (int j = 0; j < k; j++) any |= chosen[j] >= 0;
  if (!any || c >= D) return;
  float sum[8] = {}, v[8];
#pragma unroll 6
  for (int j = 0; j < k; j++)
    if (chosen[j] >= 0) {
      load_8(v, down + ((size_t)t * k + j) * D + c);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += v[i];
    }
  load_8(v, shared + (size_t)t * D + c);
  float4 *to = reinterpret_cast<float4 *>(routed + (size_t)t * D + c);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = sum[i] + v[i];
  store_8(out + (size_t)t * D + c, sum);
}
