// hyper_connection_split.cu    mHC of four streams, cut among blocks: post, pre and the norm that follows in one or two launches
//
//   formulas as in hyper_connection.cu, with n = 4. For each token, in this order and each part only if it is asked for:
//     X[j] = post[j] y + sum_i comb[i,j] before[i]       the half before put back; NOTE: the first axis of comb is the source
//     sums[s] = fn @ flat, flat . flat                   over the columns of part s alone
//     pre, post, comb, a                                 from the sums of all parts
//     normed = a rsqrt(mean(a^2) + norm_eps) weight
//   rows = 24, or 4 for hc_head: then there is only pre, which is not written
// twin     reference/ops.py::hc_pre, hc_post, hc_head, rms_norm      tests  pytest parity/test_operations_attention.py -k hc_
// tensors  y [T, D], before, X [T, 4, D] bf16, tokens their strides apart, 16-byte aligned; X is read where there is no y, else
//          written, and is not `before` | fn [rows, 4 D], base [rows], scale [3] or [1] fp32 | pre, post [T, 4], comb [T, 4, 4] fp32,
//          the half before's where there is y, then this one's | a, normed [T, D] bf16 | weight [D] fp32 or null: no norm
//          sums [T, parts, SLOT] fp32, any content | counters [T] i32, zero before and after
// numerics X, a: fp32 by fmaf over the streams in ascending order, one rounding to bf16, as hc_post and hc_pre; squares of the norm
//          are of the rounded a. Dot products: split: fmaf over the eight columns of a lane, then a butterfly, then parts in nine
//          interleaved sums, these in order. project: fn as three bf16 that add up to it exactly, products by the tensor cores in
//          sums of 128 columns, added in fp32; parts as before. Sinkhorn multiplies by reciprocals, 1/a = b (1 / (a b)) for lines
//          in pairs: two units in the last place a step. A token's bits depend on D alone, not on T or on how tokens share blocks
// launch   parts = D / 64: hc_split_*, hc_post_split_*: grid = (parts, T), block = 288; the last block of a token finishes it
//          hc_sums, hc_post_sums: grid = (parts, ceil(T / tokens)), block = 288, tokens <= 8; then hc_finish_*: grid = T, block = 288
//          parts = D / 256: hc_project_W, hc_post_project_W: grid = (parts, ceil(T / (16 W))), block = 32 W, dynamic shared memory
//          512 W * (8, with y 10) + 12288 bytes; then hc_finish_*
//          *_4096 and *_8192: the largest D | hc_post_columns: grid = (T, ceil(D / 1024)), block = 128, post alone
// variants by launch, see above; hyper_connection.cu has the naive ones
#include "common.cuh"

constexpr int N = 4, ROWS = 2 * N + N * N, SQUARES = ROWS, SLOT = 28;  // a slot: ROWS products, the squares, padding
constexpr int WORKERS = 8, WARPS = WORKERS + 1, THREADS = WARPS * WARP;   // the ninth warp runs Sinkhorn beside the others
constexpr int STRIP = 64, AT_ONCE = 8, WARP_ROWS = ROWS / WORKERS;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ void unpack_8(float (&v)[8], uint4 packed) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++) v[2 * i] = bf16_low(words[i]), v[2 * i + 1] = bf16_high(words[i]);
}

// post and comb of a token.
struct Mixing {
  float post[N], comb[N][N];
};

__device__ __forceinline__ Mixing load_mixing(const float *post, const float *comb) {
  Mixing m;
  const float4 p = *reinterpret_cast<const float4 *>(post);
  m.post[0] = p.x, m.post[1] = p.y, m.post[2] = p.z, m.post[3] = p.w;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float4 c = reinterpret_cast<const float4 *>(comb)[i];
    m.comb[i][0] = c.x, m.comb[i][1] = c.y, m.comb[i][2] = c.z, m.comb[i][3] = c.w;
  }
  return m;
}

// One column of stream j after the half.
__device__ __forceinline__ float put_back(const Mixing &m, int j, float y, float x0, float x1, float x2, float x3) {
  float sum = m.post[j] * y;
  sum = fmaf(m.comb[0][j], x0, sum);
  sum = fmaf(m.comb[1][j], x1, sum);
  sum = fmaf(m.comb[2][j], x2, sum);
  return fmaf(m.comb[3][j], x3, sum);
}

// Two neighbouring columns of all streams, packed.
__device__ __forceinline__ void put_back_2(unsigned (&out)[N], const Mixing &m, unsigned y, unsigned x0, unsigned x1, unsigned x2,
                                           unsigned x3) {
#pragma unroll
  for (int j = 0; j < N; j++)
    out[j] = pack_bf16(put_back(m, j, bf16_low(y), bf16_low(x0), bf16_low(x1), bf16_low(x2), bf16_low(x3)),
                       put_back(m, j, bf16_high(y), bf16_high(x0), bf16_high(x1), bf16_high(x2), bf16_high(x3)));
}

// Eight neighbouring columns of all streams.
__device__ __forceinline__ void put_back_8(uint4 (&out)[N], const Mixing &m, uint4 y, const uint4 (&x)[N]) {
  unsigned words[N];
  put_back_2(words, m, y.x, x[0].x, x[1].x, x[2].x, x[3].x);
#pragma unroll
  for (int j = 0; j < N; j++) out[j].x = words[j];
  put_back_2(words, m, y.y, x[0].y, x[1].y, x[2].y, x[3].y);
#pragma unroll
  for (int j = 0; j < N; j++) out[j].y = words[j];
  put_back_2(words, m, y.z, x[0].z, x[1].z, x[2].z, x[3].z);
#pragma unroll
  for (int j = 0; j < N; j++) out[j].z = words[j];
  put_back_2(words, m, y.w, x[0].w, x[1].w, x[2].w, x[3].w);
#pragma unroll
  for (int j = 0; j < N; j++) out[j].w = words[j];
}

__device__ __forceinline__ uint4 vector_at(const __nv_bfloat16 *p) { return *reinterpret_cast<const uint4 *>(p); }

extern "C" __global__ void __launch_bounds__(128)
hc_post_columns(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, __nv_bfloat16 *X, int D,
                long long y_stride, long long before_stride) {
  const long long token = blockIdx.x;
  const int c = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (c >= D) return;
  uint4 x[N], out[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = vector_at(before + token * before_stride + i * D + c);
  put_back_8(out, load_mixing(post + token * N, comb + token * N * N), vector_at(y + token * y_stride + c), x);
#pragma unroll
  for (int j = 0; j < N; j++) *reinterpret_cast<uint4 *>(X + (token * N + j) * D + c) = out[j];
}

// ---- dot products of one part ----

// Lane 8 i receives the sum of v[i] over the warp.
__device__ __forceinline__ float sum_of_four(const float (&v)[4]) {
  const int lane = threadIdx.x % WARP;
  const bool upper = lane & 16, odd = lane & 8;
  const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(FULL_MASK, upper ? v[0] : v[2], 16);
  const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(FULL_MASK, upper ? v[1] : v[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(FULL_MASK, odd ? a : b, 8);
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, step);
  return sum;
}

// sums of columns blockIdx.x * STRIP on, for `count` tokens from `first` on. A warp has three rows of fn; a lane four columns each of
// two pairs of streams.
template <bool POST>
__device__ __forceinline__ void
sum_strip(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, const __nv_bfloat16 *X,
          __nv_bfloat16 *X_out, const float *fn, float *sums, int first, int count, int rows, int D, long long y_stride,
          long long before_stride, long long x_stride) {
  __shared__ __align__(16) float streams[AT_ONCE][N * STRIP];
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, c0 = blockIdx.x * STRIP;
  float w[WARP_ROWS][8];
#pragma unroll
  for (int r = 0; r < WARP_ROWS; r++) {
    const int m = warp * WARP_ROWS + r;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int q = half * 2 * STRIP + lane * 4;
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (m < rows) v = __ldg(reinterpret_cast<const float4 *>(fn + (m * N + q / STRIP) * (long long)D + c0 + q % STRIP));
      w[r][4 * half] = v.x, w[r][4 * half + 1] = v.y, w[r][4 * half + 2] = v.z, w[r][4 * half + 3] = v.w;
    }
  }
  for (int item = tid; item < count * (STRIP / 8); item += THREADS) {
    const int t = item / (STRIP / 8), inside = item % (STRIP / 8) * 8, c = c0 + inside;
    const long long token = first + t;
    uint4 x[N];
    if (POST) {
      uint4 old[N];
#pragma unroll
      for (int i = 0; i < N; i++) old[i] = vector_at(before + token * before_stride + i * D + c);
      put_back_8(x, load_mixing(post + token * N, comb + token * N * N), vector_at(y + token * y_stride + c), old);
#pragma unroll
      for (int j = 0; j < N; j++) *reinterpret_cast<uint4 *>(X_out + token * x_stride + j * D + c) = x[j];
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) x[i] = vector_at(X + token * x_stride + i * D + c);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      float v[8];
      unpack_8(v, x[j]);
      float4 *to = reinterpret_cast<float4 *>(&streams[t][j * STRIP + inside]);
      to[0] = {v[0], v[1], v[2], v[3]};
      to[1] = {v[4], v[5], v[6], v[7]};
    }
  }
  __syncthreads();
  if (warp == WORKERS) return;
  for (int t = 0; t < count; t++) {
    const float4 low = *reinterpret_cast<const float4 *>(&streams[t][lane * 4]);
    const float4 high = *reinterpret_cast<const float4 *>(&streams[t][2 * STRIP + lane * 4]);
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float part[4] = {};
#pragma unroll
    for (int k = 0; k < 8; k++) {
#pragma unroll
      for (int r = 0; r < WARP_ROWS; r++) part[r] = fmaf(w[r][k], x[k], part[r]);
      part[3] = fmaf(x[k], x[k], part[3]);
    }
    const float sum = sum_of_four(part);
    const int which = lane / 8, m = which < WARP_ROWS ? warp * WARP_ROWS + which : SQUARES;
    if (lane % 8 == 0 && (which < WARP_ROWS ? m < rows : warp == 0))
      sums[((first + t) * (long long)gridDim.x + blockIdx.x) * SLOT + m] = sum;
  }
}

// ---- from the sums of all parts to pre, post, comb, a and its norm ----

// 1 / (s + eps) of four sums, in pairs: half as many reciprocals, which take longest. The sums are of order 1, none is below eps.
__device__ __forceinline__ void inverses(float (&s)[N], float eps) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float a = s[i] + eps, b = s[i + 1] + eps, both = __fdividef(1.f, a * b);
    s[i] = b * both;
    s[i + 1] = a * both;
  }
}

__device__ __forceinline__ void normalise_columns(float (&M)[N][N], float eps) {
  float s[N];
#pragma unroll
  for (int j = 0; j < N; j++) s[j] = (M[0][j] + M[1][j]) + (M[2][j] + M[3][j]);
  inverses(s, eps);
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int j = 0; j < N; j++) M[i][j] *= s[j];
}

__device__ __forceinline__ void normalise_rows(float (&M)[N][N], float eps) {
  float s[N];
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = (M[i][0] + M[i][1]) + (M[i][2] + M[i][3]);
  inverses(s, eps);
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int j = 0; j < N; j++) M[i][j] *= s[i];
}

// base and scale of each row of fn, brought by the ninth warp before a barrier.
struct Affine {
  float base[WARP], scale[WARP];
};

__device__ __forceinline__ void load_affine(Affine &to, const float *base, const float *scale, int rows) {
  const int lane = threadIdx.x % WARP;
  if (threadIdx.x / WARP < WORKERS) return;
  to.base[lane] = lane < rows ? base[lane] : 0.f;
  to.scale[lane] = lane < rows ? scale[lane < N ? 0 : lane < 2 * N ? 1 : 2] : 0.f;
}

// All 288 threads of a block, one token. The eight workers take VECS times eight columns a thread; the ninth warp makes comb, every
// lane the same numbers. EARLY: the norm's weights are asked for first, where registers are plenty.
template <int VECS, bool EARLY>
__device__ __forceinline__ void
finish(long long token, const __nv_bfloat16 *X, const Affine &affine, float *pre, float *post, float *comb, __nv_bfloat16 *a,
       const float *weight, __nv_bfloat16 *normed, const float *sums, int parts, int rows, int D, int iters, long long x_stride,
       float hc_eps, float norm_eps) {
  __shared__ float part[WARPS][WARP], squares_of[WORKERS];
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP;
  const bool works = warp < WORKERS;
  uint4 held[VECS][N];
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int c = (v * WORKERS * WARP + tid) * 8;
#pragma unroll
    for (int i = 0; i < N; i++) {
      held[v][i] = {0u, 0u, 0u, 0u};
      if (works && c < D) held[v][i] = __ldcg(reinterpret_cast<const uint4 *>(X + token * x_stride + i * D + c));
    }
  }
  const bool mine = lane < rows || lane == SQUARES;
  float4 weights_of[VECS][2];
  auto load_weights = [&]() {
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      const int c = (v * WORKERS * WARP + tid) * 8;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        weights_of[v][half] = {0.f, 0.f, 0.f, 0.f};
        if (weight && works && c < D) weights_of[v][half] = __ldg(reinterpret_cast<const float4 *>(weight + c) + half);
      }
    }
  };
  if (EARLY) load_weights();
  constexpr int MOST_PARTS = VECS * WORKERS * WARP * 8 / STRIP, LOADS = (MOST_PARTS + WARPS - 1) / WARPS;
  float its_parts[LOADS], sum = 0.f;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int s = warp + i * WARPS;
    its_parts[i] = mine && s < parts ? __ldcg(sums + (token * parts + s) * SLOT + lane) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++) sum += its_parts[i];
  part[warp][lane] = sum;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += part[w][lane];
  const float r = rsqrtf(__shfl_sync(FULL_MASK, total, SQUARES) / (float)(N * D) + norm_eps);
  const float logit = total * r * affine.scale[lane] + affine.base[lane], gate = sigmoid(logit);

  float M[N][N];
  uint4 mixed[VECS];
  float squares = 0.f;
  if (works) {
    float weights[N];
#pragma unroll
    for (int i = 0; i < N; i++) weights[i] = __shfl_sync(FULL_MASK, gate, i) + hc_eps;
    if (warp == 0 && rows == ROWS) {
      if (lane < N) pre[token * N + lane] = gate + hc_eps;
      else if (lane < 2 * N) post[token * N + lane - N] = 2.f * gate;
    }
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      const int c = (v * WORKERS * WARP + tid) * 8;
      float out[8] = {};
#pragma unroll
      for (int i = 0; i < N; i++) {
        float x[8];
        unpack_8(x, held[v][i]);
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = fmaf(weights[i], x[k], out[k]);
      }
      mixed[v] = {pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3]), pack_bf16(out[4], out[5]), pack_bf16(out[6], out[7])};
      if (c < D) *reinterpret_cast<uint4 *>(a + token * D + c) = mixed[v];
      unpack_8(out, mixed[v]);
#pragma unroll
      for (int k = 0; k < 8; k++) squares = fmaf(out[k], out[k], squares);
    }
    if (!EARLY) load_weights();
    squares = warp_sum(squares);
    if (lane == 0) squares_of[warp] = squares;
  } else if (rows == ROWS) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int j = 0; j < N; j++) M[i][j] = __shfl_sync(FULL_MASK, logit, 2 * N + i * N + j);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float largest = fmaxf(fmaxf(M[i][0], M[i][1]), fmaxf(M[i][2], M[i][3]));
#pragma unroll
      for (int j = 0; j < N; j++) M[i][j] = expf(M[i][j] - largest);
    }
    normalise_rows(M, 0.f);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int j = 0; j < N; j++) M[i][j] += hc_eps;
    normalise_columns(M, hc_eps);
    for (int iteration = 1; iteration < iters / 2; iteration++) {
      normalise_rows(M, hc_eps);
      normalise_columns(M, hc_eps);
    }
  }
  __syncthreads();
  if (works) {
    if (!weight) return;
    squares = 0.f;
#pragma unroll
    for (int w = 0; w < WORKERS; w++) squares += squares_of[w];
    const float scaled = rsqrtf(squares / (float)D + norm_eps);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      const int c = (v * WORKERS * WARP + tid) * 8;
      if (c >= D) continue;
      const float4 low = weights_of[v][0], high = weights_of[v][1];
      const float its_weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float out[8];
      unpack_8(out, mixed[v]);
#pragma unroll
      for (int k = 0; k < 8; k++) out[k] = out[k] * scaled * its_weight[k];
      store_8(normed + token * D + c, out);
    }
  } else if (rows == ROWS) {
    for (int iteration = max(1, iters / 2); iteration < iters; iteration++) {
      normalise_rows(M, hc_eps);
      normalise_columns(M, hc_eps);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (lane == i) *reinterpret_cast<float4 *>(comb + (token * N + i) * N) = {M[i][0], M[i][1], M[i][2], M[i][3]};
  }
}

template <int VECS>
__device__ __forceinline__ void
finish_if_last(const __nv_bfloat16 *X, const Affine &affine, float *pre, float *post, float *comb, __nv_bfloat16 *a,
               const float *weight, __nv_bfloat16 *normed, const float *sums, int *counters, int rows, int D, int iters,
               long long x_stride, float hc_eps, float norm_eps) {
  __shared__ int last;
  const int token = blockIdx.y, parts = gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // all that the block has written is seen by who sees the counter
    last = atomicAdd(&counters[token], 1) == parts - 1;
    if (last) counters[token] = 0;
  }
  __syncthreads();  // what the other blocks wrote is read past the L1 from here on
  if (!last) return;
  finish<VECS, true>(token, X, affine, pre, post, comb, a, weight, normed, sums, parts, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_split_4096(const __nv_bfloat16 *X, const float *fn, const float *base, const float *scale, float *pre, float *post, float *comb,
              __nv_bfloat16 *a, const float *weight, __nv_bfloat16 *normed, float *sums, int *counters, int rows, int D, int iters,
              long long x_stride, float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  sum_strip<false>(nullptr, nullptr, nullptr, nullptr, X, nullptr, fn, sums, blockIdx.y, 1, rows, D, 0, 0, x_stride);
  finish_if_last<2>(X, affine, pre, post, comb, a, weight, normed, sums, counters, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_split_8192(const __nv_bfloat16 *X, const float *fn, const float *base, const float *scale, float *pre, float *post, float *comb,
              __nv_bfloat16 *a, const float *weight, __nv_bfloat16 *normed, float *sums, int *counters, int rows, int D, int iters,
              long long x_stride, float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  sum_strip<false>(nullptr, nullptr, nullptr, nullptr, X, nullptr, fn, sums, blockIdx.y, 1, rows, D, 0, 0, x_stride);
  finish_if_last<4>(X, affine, pre, post, comb, a, weight, normed, sums, counters, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_post_split_4096(const __nv_bfloat16 *y, const __nv_bfloat16 *before, __nv_bfloat16 *X, const float *fn, const float *base,
                   const float *scale, float *pre, float *post, float *comb, __nv_bfloat16 *a, const float *weight,
                   __nv_bfloat16 *normed, float *sums, int *counters, int rows, int D, int iters, long long y_stride,
                   long long before_stride, long long x_stride, float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  sum_strip<true>(y, before, post, comb, nullptr, X, fn, sums, blockIdx.y, 1, rows, D, y_stride, before_stride, x_stride);
  finish_if_last<2>(X, affine, pre, post, comb, a, weight, normed, sums, counters, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_post_split_8192(const __nv_bfloat16 *y, const __nv_bfloat16 *before, __nv_bfloat16 *X, const float *fn, const float *base,
                   const float *scale, float *pre, float *post, float *comb, __nv_bfloat16 *a, const float *weight,
                   __nv_bfloat16 *normed, float *sums, int *counters, int rows, int D, int iters, long long y_stride,
                   long long before_stride, long long x_stride, float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  sum_strip<true>(y, before, post, comb, nullptr, X, fn, sums, blockIdx.y, 1, rows, D, y_stride, before_stride, x_stride);
  finish_if_last<4>(X, affine, pre, post, comb, a, weight, normed, sums, counters, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_sums(const __nv_bfloat16 *X, const float *fn, float *sums, int T, int tokens, int rows, int D, long long x_stride) {
  const int first = blockIdx.y * tokens;
  sum_strip<false>(nullptr, nullptr, nullptr, nullptr, X, nullptr, fn, sums, first, min(tokens, T - first), rows, D, 0, 0, x_stride);
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_post_sums(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, __nv_bfloat16 *X,
             const float *fn, float *sums, int T, int tokens, int rows, int D, long long y_stride, long long before_stride,
             long long x_stride) {
  const int first = blockIdx.y * tokens;
  sum_strip<true>(y, before, post, comb, nullptr, X, fn, sums, first, min(tokens, T - first), rows, D, y_stride, before_stride, x_stride);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
hc_finish_4096(const __nv_bfloat16 *X, const float *base, const float *scale, float *pre, float *post, float *comb, __nv_bfloat16 *a,
               const float *weight, __nv_bfloat16 *normed, const float *sums, int parts, int rows, int D, int iters, long long x_stride,
               float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  // The last tokens first: of them the most is left in the L2.
  finish<2, false>(gridDim.x - 1 - blockIdx.x, X, affine, pre, post, comb, a, weight, normed, sums, parts, rows, D, iters, x_stride, hc_eps, norm_eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hc_finish_8192(const __nv_bfloat16 *X, const float *base, const float *scale, float *pre, float *post, float *comb, __nv_bfloat16 *a,
               const float *weight, __nv_bfloat16 *normed, const float *sums, int parts, int rows, int D, int iters, long long x_stride,
               float hc_eps, float norm_eps) {
  __shared__ Affine affine;
  load_affine(affine, base, scale, rows);
  // The last tokens first: of them the most is left in the L2.
  finish<4, false>(gridDim.x - 1 - blockIdx.x, X, affine, pre, post, comb, a, weight, normed, sums, parts, rows, D, iters, x_stride, hc_eps, norm_eps);
}

// ---- dot products by the tensor cores, for many tokens ----

extern __shared__ __align__(16) uint4 staged[];

constexpr int WIDE = 256, CHUNK = 32, TERMS = 3, TILES = ROWS / 8;  // columns of a block, at a time; bf16 terms of fn; eight rows each

// fn of one chunk as bf16 terms: [row][stream][column], 16-byte vectors of odd rows with the halves of 128 bytes swapped.
struct Terms {
  __nv_bfloat16 of[TERMS][ROWS][N * CHUNK];
};

__device__ __forceinline__ int term_at(int row, int stream, int vector) { return ((stream * 4 + vector) ^ (row & 1) << 2) * 8; }

template <bool POST, int TOKEN_WARPS>
__device__ __forceinline__ void
project(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, const __nv_bfloat16 *X,
        __nv_bfloat16 *X_out, const float *fn, float *sums, int T, int rows, int D, long long y_stride, long long before_stride,
        long long x_stride) {
  constexpr int BLOCK = TOKEN_WARPS * WARP, FN_LOADS = ROWS * N * CHUNK / 4 / BLOCK, X_LOADS = 2 * (N + POST), TOKENS = 16 * TOKEN_WARPS;
  __shared__ __align__(16) Terms terms[2];
  __shared__ __align__(16) float mixing[POST ? TOKENS : 1][N + N * N];
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, g = lane / 4, t = lane % 4;
  const int c0 = blockIdx.x * WIDE, first = blockIdx.y * TOKENS;
  long long token[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    token[r] = first + warp * 16 + r * 8 + g;
    exists[r] = token[r] < T;
  }
  if (POST) {
    for (int i = tid; i < TOKENS * (1 + N); i += BLOCK) {
      const int local = i / (1 + N), which = i % (1 + N);
      const long long its = first + local;
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (its < T) v = which ? reinterpret_cast<const float4 *>(comb + its * N * N)[which - 1] : *reinterpret_cast<const float4 *>(post + its * N);
      *reinterpret_cast<float4 *>(&mixing[local][4 * which]) = v;
    }
    __syncthreads();
  }

  // The next chunk is on its way while this one is multiplied: a thread copies what it will read itself, so it waits for no other.
  uint4 *const slots = staged + tid;
  auto load = [&](int chunk) {
    const int c = c0 + chunk * CHUNK + t * 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const long long its = exists[r] ? token[r] : 0;
      const __nv_bfloat16 *from = (POST ? before + its * before_stride : X + its * x_stride) + c;
#pragma unroll
      for (int i = 0; i < N; i++) cp_async_16(slots + (r * (N + POST) + i) * BLOCK, from + i * D, exists[r] ? 16 : 0);
      if (POST) cp_async_16(slots + (r * (N + POST) + N) * BLOCK, y + its * y_stride + c, exists[r] ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < FN_LOADS; i++) {
      const int e = i * BLOCK + tid, m = e / WARP, stream = e / 8 % N, at = c0 + chunk * CHUNK + e % 8 * 4;
      cp_async_16(slots + (X_LOADS + i) * BLOCK, fn + ((m < rows ? m : 0) * N + stream) * (long long)D + at, m < rows ? 16 : 0);
    }
    cp_async_commit();
  };
  auto store_terms = [&](Terms &to) {
#pragma unroll
    for (int i = 0; i < FN_LOADS; i++) {
      const int e = i * BLOCK + tid, m = e / WARP, at = term_at(m, e / 8 % N, e % 8 / 2) + e % 2 * 4;
      const uint4 bits = slots[(X_LOADS + i) * BLOCK];
      float v[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
      for (int term = 0; term < TERMS; term++) {
        uint2 packed;
        packed.x = pack_bf16(v[0], v[1]);
        packed.y = pack_bf16(v[2], v[3]);
        *reinterpret_cast<uint2 *>(&to.of[term][m][at]) = packed;
        v[0] -= bf16_low(packed.x), v[1] -= bf16_high(packed.x), v[2] -= bf16_low(packed.y), v[3] -= bf16_high(packed.y);  // exact
      }
    }
  };

  float total[TILES][4] = {}, squares[2] = {};
  load(0);
  for (int chunk = 0; chunk < WIDE / CHUNK; chunk++) {
    Terms &now = terms[chunk % 2];
    cp_async_wait<0>();
    store_terms(now);
    uint4 x[2][N];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint4 read[N];
#pragma unroll
      for (int i = 0; i < N; i++) read[i] = slots[(r * (N + POST) + i) * BLOCK];
      if (POST) {
        const float *its = mixing[warp * 16 + r * 8 + g];
        put_back_8(x[r], load_mixing(its, its + N), slots[(r * (N + POST) + N) * BLOCK], read);
        if (exists[r]) {
          const int c = c0 + chunk * CHUNK + t * 8;
#pragma unroll
          for (int j = 0; j < N; j++) *reinterpret_cast<uint4 *>(X_out + token[r] * x_stride + j * D + c) = x[r][j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < N; j++) x[r][j] = read[j];
      }
#pragma unroll
      for (int j = 0; j < N; j++) {
        float v[8];
        unpack_8(v, x[r][j]);
#pragma unroll
        for (int k = 0; k < 8; k++) squares[r] = fmaf(v[k], v[k], squares[r]);
      }
    }
    if (chunk + 1 < WIDE / CHUNK) load(chunk + 1);
    __syncthreads();  // the terms are there; those of the chunk before are not read any more
    // The order of columns inside a product is free: a lane's eight are the places 2t, 2t + 1, 2t + 8, 2t + 9 of two products.
    float part[TILES][4] = {};
#pragma unroll (POST ? TERMS : 1)
    for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
      for (int j = 0; j < N; j++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          if (tile * 8 >= rows) continue;
          const uint4 b = *reinterpret_cast<const uint4 *>(&now.of[term][tile * 8 + g][term_at(g, j, t)]);
          const unsigned a_one[4] = {x[0][j].x, x[1][j].x, x[0][j].y, x[1][j].y}, b_one[2] = {b.x, b.y};
          const unsigned a_two[4] = {x[0][j].z, x[1][j].z, x[0][j].w, x[1][j].w}, b_two[2] = {b.z, b.w};
          mma_m16n8k16_bf16(part[tile], a_one, b_one);
          mma_m16n8k16_bf16(part[tile], a_two, b_two);
        }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int k = 0; k < 4; k++) total[tile][k] += part[tile][k];
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    squares[r] += __shfl_xor_sync(FULL_MASK, squares[r], 1);
    squares[r] += __shfl_xor_sync(FULL_MASK, squares[r], 2);
    if (!exists[r]) continue;
    float *to = sums + (token[r] * gridDim.x + blockIdx.x) * SLOT;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      if (tile * 8 < rows) *reinterpret_cast<float2 *>(to + tile * 8 + 2 * t) = {total[tile][2 * r], total[tile][2 * r + 1]};
    if (t == 0) to[SQUARES] = squares[r];
  }
}

extern "C" __global__ void __launch_bounds__(128, 3)
hc_project_4(const __nv_bfloat16 *X, const float *fn, float *sums, int T, int rows, int D, long long x_stride) {
  project<false, 4>(nullptr, nullptr, nullptr, nullptr, X, nullptr, fn, sums, T, rows, D, 0, 0, x_stride);
}

extern "C" __global__ void __launch_bounds__(256, 2)
hc_project_8(const __nv_bfloat16 *X, const float *fn, float *sums, int T, int rows, int D, long long x_stride) {
  project<false, 8>(nullptr, nullptr, nullptr, nullptr, X, nullptr, fn, sums, T, rows, D, 0, 0, x_stride);
}

extern "C" __global__ void __launch_bounds__(128, 3)
hc_post_project_4(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, __nv_bfloat16 *X,
                  const float *fn, float *sums, int T, int rows, int D, long long y_stride, long long before_stride, long long x_stride) {
  project<true, 4>(y, before, post, comb, nullptr, X, fn, sums, T, rows, D, y_stride, before_stride, x_stride);
}

extern "C" __global__ void __launch_bounds__(256, 2)
hc_post_project_8(const __nv_bfloat16 *y, const __nv_bfloat16 *before, const float *post, const float *comb, __nv_bfloat16 *X,
                  const float *fn, float *sums, int T, int rows, int D, long long y_stride, long long before_stride, long long x_stride) {
  project<true, 8>(y, before, post, comb, nullptr, X, fn, sums, T, rows, D, y_stride, before_stride, x_stride);
}
