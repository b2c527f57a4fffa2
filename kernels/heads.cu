// heads.cu    queries of every head in one launch: norm without a weight, then rotation; those of the indexer rotated, then Hadamard and e2m1
//
//   q = rope(q_raw * rsqrt(mean(q_raw^2) + eps)) | index_q_raw rotated in place, index_q = e2m1(bf16(index_q_raw H / sqrt(di)))
// twin     reference/attention.py                 tests  pytest parity/test_operations_at_once.py
// tensors  q_raw, q [T, h, d] bf16 | index_q_raw, index_q [T, hi, di] bf16, hi = 0: there are none | position [T] i32, -1 = pad: not rotated
//          inv_freq [half_r] fp32
// numerics those of rms_norm.cu, rope.cu and hadamard_quant.cu, bit for bit
// launch   grid = (T, ceil((h + hi) / 8)), block = 256, a warp per head; 8 * di floats of dynamic shared memory
// needs    d, di multiples of 8, d at most 2048
#include "rows.cuh"

extern __shared__ __align__(16) float head_values[];

extern "C" __global__ void __launch_bounds__(256)
query_heads(const __nv_bfloat16 *q_raw, __nv_bfloat16 *q, __nv_bfloat16 *index_q_raw, __nv_bfloat16 *index_q, const int *position,
            const float *inv_freq, int h, int d, int hi, int di, int half_r, float eps, float inverse_root) {
  const int t = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y * 8 + warp;
  if (head >= h + hi) return;
  if (head < h) {
    const long long at = ((long long)t * h + head) * d;
    norm_row(q_raw + at, nullptr, q + at, d, eps);
    __syncwarp();
    rope_row(q + at, position[t], inv_freq, d, half_r, 1.f);
    return;
  }
  const long long at = ((long long)t * hi + head - h) * di;
  rope_row(index_q_raw + at, position[t], inv_freq, di, half_r, 1.f);
  __syncwarp();
  float *values = head_values + warp * di;
  for (int i = lane; i < di; i += WARP) values[i] = from_bf16(index_q_raw[at + i]);
  hadamard_in_place(values, di, inverse_root);
  for (int i = lane; i < di; i += WARP) {
    const KeyCode key = encode_key_block(values[i]);
    index_q[at + i] = to_bf16(e2m1_decode(key.code) * e8m0_decode(key.scale));
  }
}
