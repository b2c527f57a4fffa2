// hyper_connection.cu    mHC: n residual streams mixed into a block's input, and its output mixed back
//
//   m = fn @ flat * rsqrt(mean(flat^2) + norm_eps), flat = X[t] as n*D numbers, m = n + n + n*n entries
//   pre = sigmoid(m[:n] scale[0] + base[:n]) + hc_eps | post = 2 sigmoid(m[n:2n] scale[1] + base[n:2n])
//   comb = softmax over the last axis of (m[2n:] scale[2] + base[2n:]) + hc_eps; columns / (their sum + hc_eps);
//          then iters - 1 times rows, then columns, each / (its sum + hc_eps)
//   hc_pre   a = sum_i pre[i] X[i]          hc_head  the same with pre only, fn [n, n*D], base [n], scale [1]
//   hc_post  out[j] = post[j] y + sum_i comb[i,j] X[i]     NOTE: the first axis of comb is the source
// twin     reference/ops.py::sinkhorn, reference/model.py      tests  pytest parity/test_operations_attention.py -k hc_
// tensors  X [T, n, D] bf16, rows x_stride elements apart | fn [(2+n)n, n*D] fp32 | base [(2+n)n], scale [3] fp32
//          pre, post [T, n], comb [T, n, n] fp32 | a, y [T, D] bf16 | out [T, n, D] bf16, may not alias X
// numerics fp32; dot products by fmaf in 8 interleaved sums a lane, added pairwise, then a butterfly; row, column and stream
//          sums in ascending order; one rounding to bf16 at the store of a and out. A token's result does not depend on others
// launch   naive: grid = ceil(T / 32), block = 32, a thread per token | hc_pre, hc_head: grid = T, block = 128,
//          (2+n)n + 1 + n*n floats of dynamic shared memory | hc_post: grid = T, block = 32, 64 or 128
// variants 0 naive, kept as second oracle | 1 block per token (default)
#include "common.cuh"

constexpr int THREADS = 128, WARPS = THREADS / WARP, ROWS_AT_ONCE = 4;

extern __shared__ __align__(16) float mixes[];

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// ---- variant 0 ----

constexpr int NAIVE_RUN = 128;  // one running sum of 28,672 terms is off by 2e-5, more than the gate allows; sums of 128 are not

extern "C" __global__ void __launch_bounds__(32)
hc_pre_naive(const __nv_bfloat16 *X, const float *fn, const float *base, const float *scale, float *pre, float *post,
             float *comb, __nv_bfloat16 *a, int T, int n, int D, int iters, long long x_stride, float hc_eps, float norm_eps) {
  const int token = blockIdx.x * 32 + threadIdx.x, dim = n * D;
  if (token >= T) return;
  const __nv_bfloat16 *x = X + token * x_stride;
  float squares = 0.f;
  for (int c0 = 0; c0 < dim; c0 += NAIVE_RUN) {
    float run = 0.f;
    for (int c = c0; c < min(c0 + NAIVE_RUN, dim); c++) run = fmaf(from_bf16(x[c]), from_bf16(x[c]), run);
    squares += run;
  }
  const float r = rsqrtf(squares / (float)dim + norm_eps);
  auto mix = [&](int m, int part) {
    float dot = 0.f;
    for (int c0 = 0; c0 < dim; c0 += NAIVE_RUN) {
      float run = 0.f;
      for (int c = c0; c < min(c0 + NAIVE_RUN, dim); c++) run = fmaf(fn[(long long)m * dim + c], from_bf16(x[c]), run);
      dot += run;
    }
    return dot * r * scale[part] + base[m];
  };
  float *pre_t = pre + (long long)token * n;
  for (int i = 0; i < n; i++) pre_t[i] = sigmoid(mix(i, 0)) + hc_eps;
  float *M = comb + (long long)token * n * n;
  for (int i = 0; i < n; i++) post[(long long)token * n + i] = 2.f * sigmoid(mix(n + i, 1));
  for (int i = 0; i < n; i++) {
    float largest = -INFINITY, sum = 0.f;
    for (int j = 0; j < n; j++) largest = fmaxf(largest, M[i * n + j] = mix(2 * n + i * n + j, 2));
    for (int j = 0; j < n; j++) sum += M[i * n + j] = expf(M[i * n + j] - largest);
    for (int j = 0; j < n; j++) M[i * n + j] = M[i * n + j] / sum + hc_eps;
  }
  for (int step = 0; step < 2 * iters - 1; step++) {  // columns, rows, columns, .., columns
    const int along = step % 2 ? 1 : n, across = step % 2 ? n : 1;
    for (int line = 0; line < n; line++) {
      float sum = 0.f;
      for (int k = 0; k < n; k++) sum += M[line * across + k * along];
      for (int k = 0; k < n; k++) M[line * across + k * along] = M[line * across + k * along] / (sum + hc_eps);
    }
  }
  for (int c = 0; c < D; c++) {
    float sum = 0.f;
    for (int i = 0; i < n; i++) sum = fmaf(pre_t[i], from_bf16(x[i * D + c]), sum);
    a[(long long)token * D + c] = to_bf16(sum);
  }
}

// ---- variant 1 ----

__device__ __forceinline__ float pairwise(const float (&v)[8]) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// mixes[m] = fn[m] . x for m < rows, mixes[rows] = x . x. Warps take rows four at a time; lanes take runs of eight.
// Every thread of the block calls; the barrier is the caller's.
__device__ __forceinline__ void mix_streams(const __nv_bfloat16 *x, const float *fn, int rows, int dim) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  for (int m = warp * ROWS_AT_ONCE; m < rows + 1; m += WARPS * ROWS_AT_ONCE) {
    float part[ROWS_AT_ONCE][8] = {};
    for (int c = lane * 8; c < dim; c += WARP * 8) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = c + j < dim ? from_bf16(x[c + j]) : 0.f;
#pragma unroll
      for (int k = 0; k < ROWS_AT_ONCE; k++) {
        if (m + k > rows) continue;
        const float *w = fn + (long long)(m + k) * dim + c;
        if (m + k == rows) {
#pragma unroll
          for (int j = 0; j < 8; j++) part[k][j] = fmaf(v[j], v[j], part[k][j]);
        } else if (c + 8 <= dim) {
#pragma unroll
          for (int j = 0; j < 8; j++) part[k][j] = fmaf(w[j], v[j], part[k][j]);
        } else {
#pragma unroll
          for (int j = 0; j < 8; j++)
            if (c + j < dim) part[k][j] = fmaf(w[j], v[j], part[k][j]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; k++) {
      const float dot = warp_sum(pairwise(part[k]));
      if (lane == 0 && m + k <= rows) mixes[m + k] = dot;
    }
  }
}

// a = sum_i weights[i] * X[i], eight columns a thread.
__device__ __forceinline__ void write_mixed(const __nv_bfloat16 *x, const float *weights, __nv_bfloat16 *a, int n, int D) {
  for (int c = threadIdx.x * 8; c < D; c += THREADS * 8) {
    float sum[8] = {};
    const int width = min(8, D - c);
    if (width == 8) {
      for (int i = 0; i < n; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = fmaf(weights[i], from_bf16(x[i * D + c + j]), sum[j]);
#pragma unroll
      for (int j = 0; j < 8; j++) a[c + j] = to_bf16(sum[j]);
    } else {
      for (int j = 0; j < width; j++) {
        for (int i = 0; i < n; i++) sum[j] = fmaf(weights[i], from_bf16(x[i * D + c + j]), sum[j]);
        a[c + j] = to_bf16(sum[j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_pre(const __nv_bfloat16 *X, const float *fn, const float *base, const float *scale, float *pre, float *post, float *comb,
       __nv_bfloat16 *a, int n, int D, int iters, long long x_stride, float hc_eps, float norm_eps) {
  const int token = blockIdx.x, tid = threadIdx.x, rows = (2 + n) * n, dim = n * D;
  const __nv_bfloat16 *x = X + token * x_stride;
  mix_streams(x, fn, rows, dim);
  __syncthreads();
  const float r = rsqrtf(mixes[rows] / (float)dim + norm_eps);
  float *M = mixes + rows + 1;  // [n, n]
  for (int m = tid; m < rows; m += THREADS) {
    const float v = mixes[m] * r * scale[m < n ? 0 : m < 2 * n ? 1 : 2] + base[m];
    if (m < n) pre[(long long)token * n + m] = mixes[m] = sigmoid(v) + hc_eps;
    else if (m < 2 * n) post[(long long)token * n + m - n] = 2.f * sigmoid(v);
    else M[m - 2 * n] = v;
  }
  __syncthreads();
  if (tid < WARP) {  // Sinkhorn by one warp: a lane per row, then a lane per column
    for (int i = tid; i < n; i += WARP) {
      float largest = M[i * n], sum = 0.f;
      for (int j = 1; j < n; j++) largest = fmaxf(largest, M[i * n + j]);
      for (int j = 0; j < n; j++) sum += M[i * n + j] = expf(M[i * n + j] - largest);
      for (int j = 0; j < n; j++) M[i * n + j] = M[i * n + j] / sum + hc_eps;
    }
    for (int iteration = 0; iteration < iters; iteration++) {
      if (iteration > 0) {
        for (int i = tid; i < n; i += WARP) {
          float sum = 0.f;
          for (int j = 0; j < n; j++) sum += M[i * n + j];
          for (int j = 0; j < n; j++) M[i * n + j] = M[i * n + j] / (sum + hc_eps);
        }
      }
      __syncwarp();
      for (int j = tid; j < n; j += WARP) {
        float sum = 0.f;
        for (int i = 0; i < n; i++) sum += M[i * n + j];
        for (int i = 0; i < n; i++) M[i * n + j] = M[i * n + j] / (sum + hc_eps);
      }
      __syncwarp();
    }
    for (int i = tid; i < n * n; i += WARP) comb[(long long)token * n * n + i] = M[i];
  }
  write_mixed(x, mixes, a + (long long)token * D, n, D);
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_head(const __nv_bfloat16 *X, const float *fn, const float *base, const float *scale, __nv_bfloat16 *a, int n, int D,
        long long x_stride, float hc_eps, float norm_eps) {
  const int token = blockIdx.x, tid = threadIdx.x, dim = n * D;
  const __nv_bfloat16 *x = X + token * x_stride;
  mix_streams(x, fn, n, dim);
  __syncthreads();
  const float r = rsqrtf(mixes[n] / (float)dim + norm_eps);
  float *weights = mixes + n + 1;
  for (int i = tid; i < n; i += THREADS) weights[i] = sigmoid(mixes[i] * r * scale[0] + base[i]) + hc_eps;
  __syncthreads();
  write_mixed(x, weights, a + (long long)token * D, n, D);
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_post(const __nv_bfloat16 *y, const __nv_bfloat16 *X, const float *post, const float *comb, __nv_bfloat16 *out, int n,
        int D, long long y_stride, long long x_stride) {
  const int token = blockIdx.x;
  const __nv_bfloat16 *x = X + token * x_stride, *block_out = y + token * y_stride;
  const float *weight = post + (long long)token * n, *mixing = comb + (long long)token * n * n;
  __nv_bfloat16 *streams = out + (long long)token * n * D;
  for (int c = threadIdx.x * 8; c < D; c += blockDim.x * 8) {
    const int width = min(8, D - c);
    for (int j = 0; j < n; j++) {
      float sum[8];
      if (width == 8) {
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] = weight[j] * from_bf16(block_out[c + k]);
        for (int i = 0; i < n; i++)
#pragma unroll
          for (int k = 0; k < 8; k++) sum[k] = fmaf(mixing[i * n + j], from_bf16(x[i * D + c + k]), sum[k]);
#pragma unroll
        for (int k = 0; k < 8; k++) streams[j * D + c + k] = to_bf16(sum[k]);
      } else {
        for (int k = 0; k < width; k++) {
          float one = weight[j] * from_bf16(block_out[c + k]);
          for (int i = 0; i < n; i++) one = fmaf(mixing[i * n + j], from_bf16(x[i * D + c + k]), one);
          streams[j * D + c + k] = to_bf16(one);
        }
      }
    }
  }
}
