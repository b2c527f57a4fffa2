// hopper_check.cu    the smallest products and moves that kernels/hopper.cuh makes, each alone: where does a wrong kernel begin?
//
// archs    sm_90a
// tests    pytest parity/unit/test_bench.py -k hopper (emulated); bench/attention_prefill.py asks the card
// tensors  a [64, 64] bf16, b [64, 64] or [64, 256] bf16, d fp32 of the product's shape
// launch   grid = 1, block = 128, SHARED_BYTES of dynamic shared memory; check_pipeline: block = 256
#include "hopper.cuh"

constexpr int PANEL = 64 * SWIZZLE_ROW_BYTES, SHARED_BYTES = 6 * PANEL;

extern __shared__ __align__(1024) unsigned char smem[];

// rows x 64 elements, `stride` elements apart, into a swizzled panel.
__device__ __forceinline__ void fill_panel(unsigned char *panel, const __nv_bfloat16 *from, int stride) {
  for (int i = threadIdx.x; i < 64 * 64; i += 128)
    reinterpret_cast<__nv_bfloat16 *>(panel + swizzle_128(i / 64, i % 64 / 8))[i % 8] = from[i / 64 * stride + i % 64];
}

template <int N> __device__ __forceinline__ void store(const float (&d)[N / 2], float *out) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < N / 2; i++) out[(warp * 16 + g + (i & 2 ? 8 : 0)) * N + i / 4 * 8 + 2 * t + (i & 1)] = d[i];
}

// d = a b^T, both operands K-major.
extern "C" __global__ void __launch_bounds__(128) check_k_major(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *d) {
  fill_panel(smem, a, 64);
  fill_panel(smem + PANEL, b, 64);
  fence_proxy_async();
  __syncthreads();
  float sum[32];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_ss<64, false>(sum, wgmma_k_major(shared_offset(smem) + k * 32), wgmma_k_major(shared_offset(smem) + PANEL + k * 32), k > 0);
  wgmma_commit();
  wgmma_keep(sum);
  wgmma_wait<0>();
  wgmma_keep(sum);
  store<64>(sum, d);
}

// d = a b, b MN-major in four panels of 64 columns. leading, stride: bytes of its descriptor; from_registers: a too.
extern "C" __global__ void __launch_bounds__(128)
check_mn_major(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *d, int leading, int stride, int from_registers) {
  fill_panel(smem, a, 64);
  for (int panel = 0; panel < 4; panel++) fill_panel(smem + (1 + panel) * PANEL, b + panel * 64, 256);
  fence_proxy_async();
  __syncthreads();
  float sum[128];
#pragma unroll
  for (int i = 0; i < 128; i++) sum[i] = 0.f;
  if (from_registers) {
    const int row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    unsigned p[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        p[k][i] = *reinterpret_cast<const unsigned *>(a + (row + i % 2 * 8) * 64 + k * 16 + i / 2 * 8 + 2 * t);
    wgmma_keep(p);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma_rs<256, true>(sum, p[k], wgmma_operand(shared_offset(smem) + PANEL + k * 16 * SWIZZLE_ROW_BYTES, leading, stride), true);
    wgmma_commit();
    wgmma_keep(sum);
    wgmma_wait<0>();
  } else {
    wgmma_keep(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma_ss<256, true>(sum, wgmma_k_major(shared_offset(smem) + k * 32),
                          wgmma_operand(shared_offset(smem) + PANEL + k * 16 * SWIZZLE_ROW_BYTES, leading, stride), true);
    wgmma_commit();
    wgmma_keep(sum);
    wgmma_wait<0>();
  }
  wgmma_keep(sum);
  store<256>(sum, d);
}

// out [64, 16] bf16 = in, through fragments and stmatrix.
extern "C" __global__ void __launch_bounds__(128) check_stmatrix(const __nv_bfloat16 *in, __nv_bfloat16 *out) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  unsigned r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = *reinterpret_cast<const unsigned *>(in + (warp * 16 + g + i % 2 * 8) * 16 + i / 2 * 8 + 2 * t);
  stmatrix_x4(smem + swizzle_128(warp * 16 + lane % 16, lane / 16), r);
  __syncwarp();
  for (int i = lane; i < 16 * 16; i += WARP) {
    const int row = warp * 16 + i / 16, column = i % 16;
    out[row * 16 + column] = reinterpret_cast<const __nv_bfloat16 *>(smem + swizzle_128(row, column / 8))[column % 8];
  }
}

// out [256, 256] bf16: code i times 2^(j - 127), by the conversion and one bf16 product.
extern "C" __global__ void __launch_bounds__(128) check_decode(__nv_bfloat16 *out) {
  for (int i = threadIdx.x; i < 256 * 64; i += 128) {
    const unsigned code = i / 64 * 0x01010101u;
    float values[4];
    e4m3_convert_4(values, code);
    for (int j = 0; j < 4; j++) {
      const float scale = e8m0_decode(i % 64 * 4 + j);
      const unsigned both = multiply_bf16_pairs(pack_bf16_pair(values[j], values[j]), pack_bf16_pair(scale, scale));
      out[i / 64 * 256 + i % 64 * 4 + j] = __ushort_as_bfloat16((unsigned short)(j % 2 ? both >> 16 : both & 0xffffu));
    }
  }
}

// A warpgroup writes `rounds` numbers, one at a time, the other one adds them up: out [128] fp32. Register budgets move.
extern "C" __global__ void __launch_bounds__(256, 1) check_pipeline(float *out, int rounds) {
  Mbarrier *full = reinterpret_cast<Mbarrier *>(smem), *free = full + 1;
  float *number = reinterpret_cast<float *>(smem + 128);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 4);
    mbarrier_init(free, 4);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    registers_down<40>();
    for (int i = 0; i < rounds; i++) {
      mbarrier_wait(free, i & 1 ^ 1);
      number[threadIdx.x] = (float)(i + threadIdx.x);
      mbarrier_arrive_warp(full);
    }
  } else {
    registers_up<240>();
    float sum = 0.f;
    for (int i = 0; i < rounds; i++) {
      mbarrier_wait(full, i & 1);
      sum += number[threadIdx.x - WARPGROUP];
      mbarrier_arrive_warp(free);
    }
    out[threadIdx.x - WARPGROUP] = sum;
  }
}
