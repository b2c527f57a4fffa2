// index_rates.cu    cycles of what index scores are made of: products of 64 keys and 64 heads, sums over heads, decoding of 16 keys a warp
//
// archs    sm_90a
// tests    none: bench/index_rates.py prints what a card takes
// tensors  data [8192] u32, any bytes | cycles [gridDim.x] i64 | sink [gridDim.x, blockDim.x] i32, so that nothing is left out
// launch   grid = any, block = 128 warpgroups, at most three; RATES_SHARED bytes of shared memory
#include "indexer_wgmma.cu"

constexpr int RATES_SHARED = 32 * 1024;

// Runs `once` so many times; every thread of the block calls. Shared memory holds data before.
template <class Once> __device__ __forceinline__ void measure(const unsigned *data, long long *cycles, int rounds, const Once &once) {
  for (int i = threadIdx.x; i < RATES_SHARED / 4; i += blockDim.x) reinterpret_cast<unsigned *>(shared_bytes)[i] = data[i];
  fence_proxy_async();
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int i = 0; i < rounds; i++) once(i);
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - begin;
}

template <int M> __device__ __forceinline__ void fill(unsigned (&a)[M][4][4], const unsigned *data) {
#pragma unroll
  for (int i = 0; i < 16 * M; i++) a[i / 16][i / 4 % 4][i % 4] = data[16 * M * threadIdx.x % 4096 + i];
}

// Two products a round, one after the other.
template <int N> __device__ __forceinline__ void products(const unsigned *data, long long *cycles, int *sink, int rounds) {
  unsigned a[2][4][4];
  fill(a, data);
  const unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes));
  int total = 0;
  measure(data, cycles, rounds, [&](int) {
    int d[2][N / 2];
    start_products<N>(d[0], a[0], heads);
    start_products<N>(d[1], a[1], heads);
    wgmma_wait<0>();
    wgmma_keep(d[0]);
    wgmma_keep(d[1]);
    total += d[0][0] + d[1][0];
  });
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(384, 1) products_64(const unsigned *data, long long *cycles, int *sink, int rounds) {
  products<64>(data, cycles, sink, rounds);
}

extern "C" __global__ void __launch_bounds__(256, 1) products_128(const unsigned *data, long long *cycles, int *sink, int rounds) {
  products<128>(data, cycles, sink, rounds);
}

// Sums of two products a round, no product: the integers are loaded, 8 loads for 64 sums.
extern "C" __global__ void __launch_bounds__(384, 1) sums_64(const unsigned *data, long long *cycles, int *sink, int rounds) {
  float4 weight[4];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) weight[i] = make_float4(1.f + i, 2.f, 3.f, (float)threadIdx.x);
  measure(data, cycles, rounds, [&](int round) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      int d[32];
      const unsigned char *from = shared_bytes + (threadIdx.x * 16 + 128 * round) % 8192 + 512 * m;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint4 four = load_16(from + 1024 * i);
        d[4 * i] = (int)four.x;
        d[4 * i + 1] = (int)four.y;
        d[4 * i + 2] = (int)four.z;
        d[4 * i + 3] = (int)four.w;
      }
      float pair[2] = {};
      add_all_heads(pair, d, weight);
      total += pair[0] + pair[1];
    }
  });
  sink[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_int(total);
}

// Two products a round, each beside the sums of the last.
extern "C" __global__ void __launch_bounds__(384, 1) both_64(const unsigned *data, long long *cycles, int *sink, int rounds) {
  unsigned a[2][4][4];
  fill(a, data);
  const unsigned long long heads = wgmma_k_major(shared_offset(shared_bytes));
  float4 weight[4];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) weight[i] = make_float4(1.f + i, 2.f, 3.f, (float)threadIdx.x);
  int d[2][32] = {};
  measure(data, cycles, rounds, [&](int) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      start_products<64>(d[(m + 1) % 2], a[m], heads);
      float pair[2] = {};
      add_all_heads(pair, d[m], weight);
      total += pair[0] + pair[1];
      wgmma_wait<0>();
      wgmma_keep(d[(m + 1) % 2]);
    }
  });
  sink[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_int(total);
}

// Decodes 16 keys a warp twice a round, from shared memory.
extern "C" __global__ void __launch_bounds__(384, 1) decode_16(const unsigned *data, long long *cycles, int *sink, int rounds) {
  unsigned total = 0;
  measure(data, cycles, rounds, [&](int round) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      unsigned a[1][4][4];
      const unsigned char *run = shared_bytes + (threadIdx.x * 16 + 128 * round) % 8192 + 8192 * m;
      decode_keys(a[0], load_16(run), load_16(run + 2048), (unsigned)(round & 3), (unsigned)(m + 1));
#pragma unroll
      for (int i = 0; i < 16; i++) total ^= a[0][i / 4][i % 4];
    }
  });
  sink[blockIdx.x * blockDim.x + threadIdx.x] = (int)total;
}
