// stream.cu      reads a buffer and writes nothing that depends on speed: evicts the L2, and is the read-only ceiling
// tests    pytest parity/unit/test_bench.py
// tensors  data [n] u8, 16-byte aligned, n a multiple of 16 | out [gridDim.x] u32, xor of what each block read
// launch   grid = any, block = 512: a thread takes 16 bytes, eight of them in flight, a whole grid apart
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512) read_all(const unsigned char *data, unsigned *out, long long n) {
  const uint4 *words = reinterpret_cast<const uint4 *>(data);
  const long long count = n / 16, step = (long long)gridDim.x * 512;
  unsigned sum = 0;
  long long i = (long long)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = words[i + j * step];
#pragma unroll
    for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) {
    const uint4 v = words[i];
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
#pragma unroll
  for (int lane = 16; lane; lane /= 2) sum ^= __shfl_xor_sync(0xffffffff, sum, lane);
  __shared__ unsigned sums[16];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < 16; warp++) sum ^= sums[warp];
    out[blockIdx.x] = sum;
  }
}
