// projections.cu    products with weights of few tokens that share a launch: all of the hidden state, all of the latent query, the
//                   router's beside the input's rounding, the shared expert's beside routing and beside the routed experts'
//
//   project_hidden   of x_q: wq_a, wkv | of x: wkv and wgate of the compressor and of the indexer's, weights_proj (times a scale, rounded
//                    to bf16 before). The hidden state is read once for all of them
//   project_latents  of qr_q: wq_b, the indexer's wq_b                 project_router  of x: the gate's logits | x_q = e4m3 of x
//   project_shared   of x_q: w1, w3 of the shared expert | scores, experts and weights of each token from the logits
//   project_down     of h_q: w2 of the chosen experts (FP4) | of shared h_q: w2 of the shared expert
// twin     reference/attention.py, reference/moe.py    tests  pytest parity/test_operations_at_once.py
// tensors  as linear_stream.cu, experts_stream.cu, act_quant.cu and gate.cu, rows of x, x_q, qr_q contiguous; a matrix that is not there is
//          null with 0 rows
// numerics those of linear_stream.cu, experts_stream.cu, rows_quant.cu and gate.cu, bit for bit, for the same slices
// launch   grid = (ceil(T / 8), blocks of all matrices), block = 256; a matrix of N rows takes ceil(N / (8 R * 8 / slices)) blocks, in the
//          order above. project_router: T more blocks in y for the rounding (grid.x 0 only). project_shared: one more block in y, first,
//          that routes the eight tokens. project_down: grid = (blocks of w2 of an expert * S + blocks of the shared w2 * ceil(T / 8))
// variants one of each: R = 1 for project_hidden and project_router, 2 for project_latents and project_shared, 4 for project_down
#include "router.cuh"
#include "rows.cuh"
#include "stream.cuh"

// Takes the blocks of a matrix off `block`; true when the block is one of them, and `block` its number among them then.
template <int R> __device__ __forceinline__ bool has_block(int &block, int N, int slices) {
  const int count = ceil_div(N, 8 * R * STREAM_WARPS / slices);
  if (block < count) return true;
  block -= count;
  return false;
}

// This lane's token: a row of x, of which T exist, and whether it is one.
struct Token {
  int first, number;
  bool exists;
  __device__ __forceinline__ Token(int group, int T) : first(group * STREAM_TOKENS) {
    number = first + (int)threadIdx.x % WARP / 4;
    exists = number < T;
    if (!exists) number = first;
  }
};

template <int R, int U>
__device__ __forceinline__ void fp8_product(const __nv_bfloat16 *x, const unsigned char *w, const unsigned char *scale, __nv_bfloat16 *y,
                                            int block, int group, int T, int N, int K, int slices) {
  const Token token(group, T);
  const bool whole = aligned_16(x, 2ll * K) && aligned_16(w, K) && K % (4 * Fp8Stream::RUN) == 0;
  stream_product<Fp8Stream, R, U>(Fp8Stream{w, scale, 0, K}, x + (long long)token.number * K, token.exists, whole, stream_first_row<R>(block, slices),
                                  N, K, slices, [&](int t, int n, float sum) { y[(long long)(token.first + t) * N + n] = to_bf16(sum); });
}

template <int R, int U>
__device__ __forceinline__ void bf16_product(const __nv_bfloat16 *x, const __nv_bfloat16 *w, float *y, int block, int group, int T, int N, int K,
                                             int slices, float scale, bool rounded_first) {
  const Token token(group, T);
  const bool whole = aligned_16(x, 2ll * K) && aligned_16(w, 2ll * K) && K % (4 * Bf16Stream::RUN) == 0;
  stream_product<Bf16Stream, R, U>(Bf16Stream{w, K}, x + (long long)token.number * K, token.exists, whole, stream_first_row<R>(block, slices), N, K,
                                   slices, [&](int t, int n, float sum) {
                                     y[(long long)(token.first + t) * N + n] = (rounded_first ? round_bf16(sum) : sum) * scale;
                                   });
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
project_hidden(const __nv_bfloat16 *__restrict__ x, const __nv_bfloat16 *__restrict__ x_q, int T, int D,
               const unsigned char *__restrict__ wq_a, const unsigned char *__restrict__ wq_a_scale, __nv_bfloat16 *__restrict__ qr_raw,
               int q_lora, int wq_a_slices, const unsigned char *__restrict__ wkv, const unsigned char *__restrict__ wkv_scale,
               __nv_bfloat16 *__restrict__ kv_raw, int d, int wkv_slices, const __nv_bfloat16 *__restrict__ c_wkv, float *__restrict__ c_kv,
               const __nv_bfloat16 *__restrict__ c_wgate, float *__restrict__ c_gate, int c_rows, int c_slices,
               const __nv_bfloat16 *__restrict__ i_wkv, float *__restrict__ i_kv, const __nv_bfloat16 *__restrict__ i_wgate,
               float *__restrict__ i_gate, int i_rows, int i_slices, const __nv_bfloat16 *__restrict__ weights_proj,
               float *__restrict__ index_weights, int hi, int proj_slices, float proj_scale) {
  int block = blockIdx.y;
  const int group = blockIdx.x;
  // One product of each kind: which matrix is chosen before, so that the code stands once.
  const unsigned char *codes = nullptr, *code_scale = nullptr;
  __nv_bfloat16 *latent = nullptr;
  int N = 0, slices = 1;
  if (has_block<1>(block, q_lora, wq_a_slices)) codes = wq_a, code_scale = wq_a_scale, latent = qr_raw, N = q_lora, slices = wq_a_slices;
  else if (has_block<1>(block, d, wkv_slices)) codes = wkv, code_scale = wkv_scale, latent = kv_raw, N = d, slices = wkv_slices;
  if (codes) return fp8_product<1, 4>(x_q, codes, code_scale, latent, block, group, T, N, D, slices);
  const __nv_bfloat16 *w;
  float *y;
  const bool of_compressor = block < 2 * ceil_div(c_rows, 8 * STREAM_WARPS / c_slices);
  if (has_block<1>(block, c_rows, c_slices)) w = c_wkv, y = c_kv;
  else if (has_block<1>(block, c_rows, c_slices)) w = c_wgate, y = c_gate;
  else if (has_block<1>(block, i_rows, i_slices)) w = i_wkv, y = i_kv;
  else if (has_block<1>(block, i_rows, i_slices)) w = i_wgate, y = i_gate;
  else w = weights_proj, y = index_weights;
  const bool proj = y == index_weights;
  N = proj ? hi : of_compressor ? c_rows : i_rows;
  slices = proj ? proj_slices : of_compressor ? c_slices : i_slices;
  bf16_product<1, 4>(x, w, y, block, group, T, N, D, slices, proj ? proj_scale : 1.f, proj);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
project_latents(const __nv_bfloat16 *__restrict__ qr_q, int T, int q_lora, const unsigned char *__restrict__ wq_b,
                const unsigned char *__restrict__ wq_b_scale, __nv_bfloat16 *__restrict__ q_raw, int rows, int slices,
                const unsigned char *__restrict__ i_wq_b, const unsigned char *__restrict__ i_wq_b_scale,
                __nv_bfloat16 *__restrict__ index_q_raw, int i_rows, int i_slices) {
  int block = blockIdx.y;
  const bool own = has_block<2>(block, rows, slices);
  fp8_product<2, 2>(qr_q, own ? wq_b : i_wq_b, own ? wq_b_scale : i_wq_b_scale, own ? q_raw : index_q_raw, block, blockIdx.x, T,
                    own ? rows : i_rows, q_lora, own ? slices : i_slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
project_router(const __nv_bfloat16 *__restrict__ x, __nv_bfloat16 *__restrict__ x_q, int T, int D, const __nv_bfloat16 *__restrict__ gate,
               float *__restrict__ logits, int E, int slices) {
  int block = blockIdx.y;
  if (has_block<1>(block, E, slices)) return bf16_product<1, 4>(x, gate, logits, block, blockIdx.x, T, E, D, slices, 1.f, false);
  if (blockIdx.x > 0) return;
  for (int first = threadIdx.x / WARP * 256; first < D; first += STREAM_WARPS * 256)
    quant_256(x + (long long)block * D, x_q + (long long)block * D, first, D);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
project_shared(const __nv_bfloat16 *__restrict__ x_q, int T, int D, const unsigned char *__restrict__ w1,
               const unsigned char *__restrict__ w1_scale, __nv_bfloat16 *__restrict__ s_gate, const unsigned char *__restrict__ w3,
               const unsigned char *__restrict__ w3_scale, __nv_bfloat16 *__restrict__ s_up, int width, int slices,
               const float *__restrict__ logits, float *__restrict__ scores, const float *__restrict__ bias, const int *__restrict__ tid2eid,
               const long long *__restrict__ tokens, const int *__restrict__ position, int *__restrict__ experts,
               float *__restrict__ weights, int E, int k, int scoring, int normalise, float route_scale) {
  if (blockIdx.y == 0) {
    __shared__ float score[STREAM_WARPS][MOST_EXPERTS];
    __shared__ int chosen[STREAM_WARPS][MOST_CHOSEN];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = blockIdx.x * STREAM_WARPS + warp;
    if (t >= T) return;
    score_row(logits + (long long)t * E, score[warp], E, scoring);
    __syncwarp();
    for (int e = lane; e < E; e += WARP) scores[(long long)t * E + e] = score[warp][e];
    const bool pad = position[t] < 0;
    choose_row(score[warp], bias, tid2eid && !pad ? tid2eid + tokens[t] * k : nullptr, pad, chosen[warp], E, k);
    __syncwarp();
    if (lane == 0) {
      for (int j = 0; j < k; j++) experts[(long long)t * k + j] = chosen[warp][j];
      weigh_row(score[warp], chosen[warp], weights + (long long)t * k, k, normalise != 0, route_scale);
    }
    return;
  }
  int block = blockIdx.y - 1;
  const bool first = has_block<2>(block, width, slices);
  fp8_product<2, 2>(x_q, first ? w1 : w3, first ? w1_scale : w3_scale, first ? s_gate : s_up, block, blockIdx.x, T, width, D, slices);
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
project_down(const __nv_bfloat16 *__restrict__ h_q, const int *__restrict__ experts, int S, int I, const unsigned char *__restrict__ w2,
             const unsigned char *__restrict__ s2, __nv_bfloat16 *__restrict__ down, int D, int slices, const __nv_bfloat16 *__restrict__ shared_h_q,
             const unsigned char *__restrict__ shared_w2, const unsigned char *__restrict__ shared_scale, __nv_bfloat16 *__restrict__ shared, int T,
             int shared_slices) {
  const int of_shared = ceil_div(D, 16 * STREAM_WARPS / shared_slices), groups = ceil_div(T, STREAM_TOKENS);
  int block = blockIdx.x;
  if (block < of_shared * groups)
    return fp8_product<2, 2>(shared_h_q, shared_w2, shared_scale, shared, block / groups, block % groups, T, D, I, shared_slices);
  block -= of_shared * groups;
  const int of_expert = ceil_div(D, 32 * STREAM_WARPS / slices);
  experts_product<4, 1>(h_q, experts, w2, s2, down, block / of_expert, block % of_expert, S, 1, D, I, I, slices);
}
