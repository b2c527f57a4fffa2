// hadamard_quant.cu    out = e2m1(bf16(x H / sqrt(n))), H[i,j] = (-1)^popcount(i & j), n = di
// twin     reference/ops.py::hadamard, reference/formats.py    tests  pytest parity/test_operations_attention.py -k hadamard
// tensors  x [R, di] bf16, rows x_stride elements apart | out [R, di] bf16, rows out_stride apart, may be x itself: the
//          rounded values, which bf16 holds exactly. di is a power of two >= 32
// numerics the transform in fp32, then one product with 1/sqrt(n), one rounding to bf16, one to e2m1 with a scale
//          2^ceil(log2(max(amax, 6 * 2^-126) / 6)) per 32, from the bits of amax. A block with an infinity or NaN becomes NaN
// launch   grid = R, block = 32, di floats of dynamic shared memory
// variants 0 naive: every output is a sum of di terms in ascending order, kept as second oracle
//          1 butterflies (default): log2(di) stages, pairs 1, 2, 4, .. apart
#include "entry.cuh"

extern __shared__ __align__(16) float row_values[];

__device__ __forceinline__ void write_rounded(__nv_bfloat16 *out, int di) {
  for (int i = threadIdx.x; i < di; i += WARP) {
    const KeyCode key = encode_key_block(row_values[i]);
    out[i] = to_bf16(e2m1_decode(key.code) * e8m0_decode(key.scale));
  }
}

extern "C" __global__ void __launch_bounds__(32)
hadamard_e2m1_naive(const __nv_bfloat16 *x, __nv_bfloat16 *out, int di, long long x_stride, long long out_stride,
                    float inverse_root) {
  const __nv_bfloat16 *row = x + blockIdx.x * x_stride;
  for (int j = threadIdx.x; j < di; j += WARP) row_values[j] = hadamard_output(row, j, di, inverse_root);
  __syncwarp();
  write_rounded(out + blockIdx.x * out_stride, di);
}

extern "C" __global__ void __launch_bounds__(32)
hadamard_e2m1(const __nv_bfloat16 *x, __nv_bfloat16 *out, int di, long long x_stride, long long out_stride,
              float inverse_root) {
  const __nv_bfloat16 *row = x + blockIdx.x * x_stride;
  for (int i = threadIdx.x; i < di; i += WARP) row_values[i] = from_bf16(row[i]);
  hadamard_in_place(row_values, di, inverse_root);
  write_rounded(out + blockIdx.x * out_stride, di);
}
