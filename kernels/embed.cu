// embed.cu    X[t,i,:] = weight[tokens[t],:] for each of the n residual streams i
// twin     reference/model.py (embed)             tests  pytest parity/test_operations_dense.py -k embed
// tensors  tokens [T] i64 | weight [vocab, D] bf16 | position [T] i32, -1 = pad: its rows stay untouched | X [T, n, D] bf16
// numerics a copy of bits
// launch   embed_tokens: grid = T, block = 128 | embed_rows: grid = (T, ceil(D / 1024)), block = 128
// needs    embed_rows: D % 8 == 0, weight and X at multiples of 16 bytes
// variants 0 naive: one block per token, elements by threads | 1 rows: 16 bytes a thread (default where they fit)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
embed_tokens(const long long *__restrict__ tokens, const __nv_bfloat16 *__restrict__ weight,
             const int *__restrict__ position, __nv_bfloat16 *__restrict__ X, int n, int D) {
  const int t = blockIdx.x;
  if (position[t] < 0) return;
  const __nv_bfloat16 *source = weight + (size_t)tokens[t] * D;
  __nv_bfloat16 *streams = X + (size_t)t * n * D;
  for (int c = threadIdx.x; c < D; c += 128) {
    const __nv_bfloat16 v = source[c];
    for (int i = 0; i < n; i++) streams[(size_t)i * D + c] = v;
  }
}

extern "C" __global__ void __launch_bounds__(128)
embed_rows(const long long *__restrict__ tokens, const __nv_bfloat16 *__restrict__ weight,
           const int *__restrict__ position, __nv_bfloat16 *__restrict__ X, int n, int D) {
  const int t = blockIdx.x, c = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (position[t] < 0 || c >= D) return;
  const uint4 v = *reinterpret_cast<const uint4 *>(weight + (size_t)tokens[t] * D + c);
  for (int i = 0; i < n; i++) *reinterpret_cast<uint4 *>(X + ((size_t)t * n + i) * D + c) = v;
}
