// sparse_attn_splits.cuh    keys of a decode step split over blocks: their bounds, and how what splits leave is merged
//
//   out = sum_s O_s b^(m_s - M) / (sum_s l_s b^(m_s - M) + exp(sink)),  M the largest m and the sink; b is e, or 2 with POWERS_OF_TWO
//
// numerics bounds depend on the token's keys and on `splits`; splits are added in ascending order, fp32; one rounding, to bf16
#pragma once
#include "sparse_attn_keys.cuh"

constexpr int MAX_SPLITS = 64;

// Keys a split takes, a multiple of `unit`, and how many splits have any.
struct Splits {
  int keys, used;
};

__device__ __forceinline__ Splits split_keys(int total, int splits, int unit) {
  const unsigned n = total, each = (n + splits - 1u) / splits, keys = (each + unit - 1u) / unit * unit;
  return {(int)keys, (int)((n + keys - 1u) / keys)};
}

// b^(x - y) for y >= x, also where both are infinite; NaN stays NaN.
template <bool POWERS_OF_TWO> __device__ __forceinline__ float share_below(float x, float y) {
  if (POWERS_OF_TWO) return x == y ? 1.f : exp2f(x - y);
  return exp_below(x, y);
}

// In: m and l of one head by split, `stride` floats apart, and the sink as m is. Out: m becomes the split's share. Returns 1 / denominator.
template <bool POWERS_OF_TWO = false>
__device__ __forceinline__ float merge_shares(float *m, const float *l, int stride, int used, float sink) {
  float largest = sink;
#pragma unroll 4
  for (int s = 0; s < used; s++) largest = fmaxf(largest, m[s * stride]);
  float denominator = share_below<POWERS_OF_TWO>(sink, largest);
#pragma unroll 2
  for (int s = 0; s < used; s++) {
    const float share = share_below<POWERS_OF_TWO>(m[s * stride], largest);
    denominator += l[s * stride] * share;
    m[s * stride] = share;
  }
  return 1.f / denominator;
}

__device__ __forceinline__ void store_4(__nv_bfloat16 *out, const float4 &o, float factor) {
  if (((size_t)out & 7) == 0) {
    *reinterpret_cast<uint2 *>(out) = make_uint2(pack_bf16(o.x * factor, o.y * factor), pack_bf16(o.z * factor, o.w * factor));
    return;
  }
  out[0] = to_bf16(o.x * factor), out[1] = to_bf16(o.y * factor), out[2] = to_bf16(o.z * factor), out[3] = to_bf16(o.w * factor);
}

__device__ __forceinline__ void add_share(float4 &o, const float4 &v, float share) {
  o.x = fmaf(share, v.x, o.x), o.y = fmaf(share, v.y, o.y), o.z = fmaf(share, v.z, o.z), o.w = fmaf(share, v.w, o.w);
}

// grid = (T, heads), block = d / 4: a thread merges four columns of a head. Nothing for pads, and where one split had all keys.
template <bool POWERS_OF_TWO>
__device__ __forceinline__ void combine_splits(const float *part_o, const float *part_ml, const float *sink, const int *position,
                                               __nv_bfloat16 *out, int heads, int d, int splits, int unit, int window, int listed,
                                               int capacity, int ratio, long long out_stride) {
  __shared__ float m[MAX_SPLITS], l[MAX_SPLITS], inverse;
  const int token = blockIdx.x, h = blockIdx.y, tid = threadIdx.x, p = position[token];
  const long long stride = heads, row0 = (long long)token * splits * heads + h;
  const float own_sink = sink[h];
  for (int s = tid; s < splits; s += blockDim.x) {  // before p is known: of splits that are not used, anything
    const float2 ml = reinterpret_cast<const float2 *>(part_ml)[row0 + s * stride];
    m[s] = ml.x;
    l[s] = ml.y;
  }
  if (p < 0) return;
  const int total = min(p + 1, window) + (listed >= 0 ? listed : ratio > 0 ? min((p + 1) / ratio, capacity) : 0);
  const int used = split_keys(total, splits, unit).used;
  if (used == 1) return;  // out is written
  __syncthreads();
  if (tid == 0) inverse = merge_shares<POWERS_OF_TWO>(m, l, 1, used, POWERS_OF_TWO ? own_sink * 1.4426950408889634f : own_sink);
  __syncthreads();
  const float4 *from = reinterpret_cast<const float4 *>(part_o) + row0 * (d / 4) + tid;
  float4 o = {};
#pragma unroll 8
  for (int s = 0; s < used; s++) add_share(o, from[s * stride * (d / 4)], m[s]);
  store_4(out + token * out_stride + (long long)h * d + tid * 4, o, inverse);
}
