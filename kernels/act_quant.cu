// act_quant.cu    out = e4m3(x / s) * s with s = 2^ceil(log2(max(amax, 1e-4) / 448)) of each block along the row
// twin     reference/formats.py::round_e4m3_blocks tests  pytest parity/test_operations_dense.py -k act_quant
// tensors  x [R, dim] bf16, rows x_stride elements apart | out [R, dim] bf16, contiguous: the rounded values, which bf16
//          holds exactly; may be x itself. The last block of a row is shorter where block does not divide dim
// numerics exact but for one rounding, to nearest with ties to even: the scale's exponent comes from the bits of amax,
//          x / s is a product with a power of two. A block that holds an infinity or a NaN becomes NaN
// launch   B = R * ceil(dim / block) blocks of values | naive: grid = ceil(B / 128), block = 128
//          group: grid = ceil(B / 16), block = 128
// variants 0 naive: a thread per block, kept as second oracle | 1 group: eight lanes per block (default), the same bits
#include "common.cuh"

struct Scales {
  float scale, inverse;
};

__device__ __forceinline__ Scales scales_of(float amax, bool finite) {
  const unsigned b = e4m3_scale(fmaxf(amax, E4M3_AMAX_FLOOR));
  const float nan = __uint_as_float(0x7fffffffu);
  return finite ? Scales{e8m0_decode(b), e8m0_inverse(b)} : Scales{nan, nan};
}

__device__ __forceinline__ bool is_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ __nv_bfloat16 rounded(__nv_bfloat16 v, Scales s) {
  return to_bf16(e4m3_round(from_bf16(v) * s.inverse) * s.scale);
}

extern "C" __global__ void __launch_bounds__(128)
act_quant_naive(const __nv_bfloat16 *x, __nv_bfloat16 *out, int R, int dim, long long x_stride, int block) {
  const int blocks = ceil_div(dim, block);
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i >= (long long)R * blocks) return;
  const int first = (int)(i % blocks) * block, last = min(first + block, dim);
  const __nv_bfloat16 *row = x + i / blocks * x_stride;
  float amax = 0.f;
  bool finite = true;
  for (int c = first; c < last; c++) {
    amax = fmaxf(amax, fabsf(from_bf16(row[c])));
    finite &= is_finite(from_bf16(row[c]));
  }
  const Scales s = scales_of(amax, finite);
  for (int c = first; c < last; c++) out[i / blocks * dim + c] = rounded(row[c], s);
}

extern "C" __global__ void __launch_bounds__(128)
act_quant_group(const __nv_bfloat16 *x, __nv_bfloat16 *out, int R, int dim, long long x_stride, int block) {
  const int blocks = ceil_div(dim, block), lane = threadIdx.x % 8;
  const long long i = blockIdx.x * 16ll + threadIdx.x / 8;
  const bool exists = i < (long long)R * blocks;
  const int first = exists ? (int)(i % blocks) * block : 0, last = exists ? min(first + block, dim) : 0;
  const __nv_bfloat16 *row = x + i / blocks * x_stride;
  float amax = 0.f;
  for (int c = first + lane; c < last; c += 8) {
    const float v = fabsf(from_bf16(row[c]));
    amax = is_finite(v) ? fmaxf(amax, v) : INFINITY;
  }
  amax = warp_max<8>(amax);
  const Scales s = scales_of(amax, is_finite(amax));
  for (int c = first + lane; c < last; c += 8) out[i / blocks * dim + c] = rounded(row[c], s);
}
