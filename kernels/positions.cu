// positions.cu    position[row*s + i] = start[row] + i for i < count[row], else -1; advance: start += count
// twin     reference/model.py (State.length)      tests  pytest parity/test_operations_dense.py -k positions
// tensors  start, count [b] i32, tokens taken before this call and valid tokens of it | position, row [b*s] i32
// numerics integers
// launch   token_positions: grid = ceil(b*s / 128), block = 128; advance_length: grid = ceil(b / 128), block = 128
// variants 0 naive: one thread per token
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
token_positions(const int *__restrict__ start, const int *__restrict__ count, int *__restrict__ position,
                int *__restrict__ row, int b, int s) {
  const int token = blockIdx.x * 128 + threadIdx.x;
  if (token >= b * s) return;
  const int batch_row = token / s, i = token % s;
  position[token] = i < count[batch_row] ? start[batch_row] + i : -1;
  row[token] = batch_row;
}

extern "C" __global__ void __launch_bounds__(128) advance_length(int *start, const int *__restrict__ count, int b) {
  const int batch_row = blockIdx.x * 128 + threadIdx.x;
  if (batch_row < b) start[batch_row] += count[batch_row];
}
