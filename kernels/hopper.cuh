// hopper.cuh    wrappers of what sm_90a has and mma.cuh does not: wgmma, mbarrier, stmatrix, proxy fences, register budgets
//
// A file that includes this says `// archs    sm_90a`. On the GPU each wrapper is inline PTX. On the CPU it is an emulation
// (cpu/hopper_on_cpu.h), for tests of index arithmetic and pipelines: it follows descriptors, swizzle, fragment layouts and
// barrier phases as the PTX manual has them, carries wgmma out at the wait, and knows nothing of fences.
//
// Swizzle of 128 bytes: a panel is rows of 128 bytes, 64 bf16, at a multiple of 1024 bytes; the 16-byte chunk c of row i
// lies at chunk c ^ (i % 8). wgmma reads the same bytes in two ways:
//   K-major    a row holds 64 k of one m or n. A step of 16 k is 32 bytes further, 64 k are the next panel; 8 rows are STRIDE
//   MN-major   a row holds 64 m or n of one k. A step of 16 k is 2048 bytes further; LEADING is from 64 columns to the next 64
//              (the next panel), STRIDE from 8 k to the next 8, 1024 bytes
//
// What a tcgen05 version (sm_100a) would be: no wgmma there. One thread issues tcgen05.mma (M = 128: two blocks of 64 heads, or
// M = 64), accumulators lie in tensor memory (128 lanes x 512 columns of fp32: O of 128 heads x 512 dims fills it, so O is
// split over a pair of blocks, cta_group::2), allocated by tcgen05.alloc, read by tcgen05.ld for the softmax; P goes back by
// tcgen05.st as operand A. Shared memory descriptors have the same swizzles, other bit fields; completion is tcgen05.commit on
// an mbarrier instead of wgmma.wait_group, and setmaxnreg stays. Nothing of it is written here.
#pragma once
#include "common.cuh"

#ifdef CUDA_ON_CPU
#include "cpu/hopper_on_cpu.h"
#define HOPPER_CALL_SITE CUEMU_CALL_SITE
#else
#include <cuda_fp16.h>
#define HOPPER_CALL_SITE
#endif

typedef unsigned long long Mbarrier;

constexpr int SWIZZLE_ROW_BYTES = 128, SWIZZLE_ATOM_BYTES = 1024, WARPGROUP = 128;

// Byte offset of a 16-byte chunk (0..7) of a row within its panel.
__device__ __forceinline__ int swizzle_128(int row, int chunk) {
  return row * SWIZZLE_ROW_BYTES + ((chunk ^ row) & 7) * 16;
}

__device__ __forceinline__ unsigned shared_offset(const void *p) {
#ifdef CUDA_ON_CPU
  return hopper_emulation::shared_offset(p);
#else
  return shared_address(p);
#endif
}

// ---- mbarrier: phases are counted from 0; a wait names the parity of the phase that must be over ----

__device__ __forceinline__ void mbarrier_init(Mbarrier *barrier, int arrivals) {
#ifdef CUDA_ON_CPU
  hopper_emulation::mbarrier_init(barrier, arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier *barrier) {
#ifdef CUDA_ON_CPU
  hopper_emulation::mbarrier_arrive(barrier);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Whether the phase of this parity is over. The hardware may wait a while before it says no.
__device__ __forceinline__ bool mbarrier_is_over(Mbarrier *barrier, int parity) {
#ifdef CUDA_ON_CPU
  return hopper_emulation::mbarrier_is_over(barrier, parity);
#else
  unsigned over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
#endif
}

// A phase that never ends is a fault of the kernel: after 4 to 9 seconds (the upper half of
// the nanosecond clock) the launch fails, so that the device does not hang.
__device__ __forceinline__ void mbarrier_wait(Mbarrier *barrier, int parity) {
#ifdef CUDA_ON_CPU
  hopper_emulation::mbarrier_wait(barrier, parity);
#else
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 began, now;\n"
      "mov.u32 began, 0xffffffff;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra OVER;\n"
      "mov.u32 now, %%globaltimer_hi;\n"
      "min.u32 began, began, now;\n"
      "sub.u32 now, now, began;\n"
      "setp.lt.u32 p, now, 2;\n"
      "@p bra AGAIN;\n"
      "trap;\n"
      "OVER:\n}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Arrives once for a warp whose lanes have all come here: what they did before is seen by whoever waits.
__device__ __forceinline__ void mbarrier_arrive_warp(Mbarrier *barrier) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
}

// ---- stmatrix: the way back of ldmatrix ----

// Stores four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16-byte aligned), and
// in register i elements [l / 4][2 (l % 4)..] of matrix i.
__device__ __forceinline__ void stmatrix_x4(void *row, const unsigned (&r)[4]) {
#ifdef CUDA_ON_CPU
  const int lane = threadIdx.x % WARP;
  for (int i = 0; i < 4; i++) {
    const unsigned long long to = __shfl_sync(FULL_MASK, (unsigned long long)row, 8 * i + lane / 4);
    reinterpret_cast<unsigned *>(to)[lane % 4] = r[i];
  }
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// ---- order and registers ----

// Between ordinary stores to shared memory and wgmma that reads them: every writing thread, before it tells of them.
__device__ __forceinline__ void fence_proxy_async() {
#ifndef CUDA_ON_CPU
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// The warpgroup gives registers back (DOWN) or takes more: whole warpgroups, a multiple of 8.
template <int REGISTERS> __device__ __forceinline__ void registers_down() {
#ifndef CUDA_ON_CPU
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS> __device__ __forceinline__ void registers_up() {
#ifndef CUDA_ON_CPU
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
#endif
}

// ---- wgmma: D [64 x N] fp32 += A [64 x 16] B [16 x N], bf16, by the 128 threads of a warpgroup ----
//
// Thread i, warp w = i / 32 of the warpgroup, g = i % 32 / 4, t = i % 4:
//   d[4j], d[4j+1]    D[16w + g][8j + 2t], [8j + 2t + 1]      d[4j+2], d[4j+3]   the same of row 16w + g + 8
//   a[0] A[16w + g][2t..2t+1]   a[1] A[16w + g + 8][2t..]     a[2] A[16w + g][2t+8..]   a[3] A[16w + g + 8][2t+8..]

// Descriptor of an operand with 128-byte swizzle, from its place in shared memory (shared_offset).
__device__ __forceinline__ unsigned long long wgmma_operand(unsigned offset, int leading_bytes, int stride_bytes) {
  return (unsigned long long)(unsigned)(stride_bytes >> 4 | 1 << 30) << 32 | ((offset & 0x3ffffu) >> 4 | (unsigned)(leading_bytes >> 4) << 16);
}
__device__ __forceinline__ unsigned long long wgmma_k_major(unsigned offset) {
  return wgmma_operand(offset, 16, SWIZZLE_ATOM_BYTES);
}
__device__ __forceinline__ unsigned long long wgmma_mn_major(unsigned offset, int panel_bytes) {
  return wgmma_operand(offset, panel_bytes, SWIZZLE_ATOM_BYTES);
}
// The same operand, so many bytes further.
__device__ __forceinline__ unsigned long long wgmma_further(unsigned long long operand, int bytes) {
  return operand >> 32 << 32 | (unsigned)((unsigned)operand + (unsigned)(bytes / 16));
}

// Before the first wgmma, and after registers that a wgmma uses were written.
__device__ __forceinline__ void wgmma_fence() {
#ifndef CUDA_ON_CPU
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#ifdef CUDA_ON_CPU
  hopper_emulation::commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

// Waits until at most PENDING of the committed groups are unfinished.
template <int PENDING> __device__ __forceinline__ void wgmma_wait(HOPPER_CALL_SITE) {
#ifdef CUDA_ON_CPU
  hopper_emulation::wait(PENDING, file, line);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
#endif
}

// Registers of a wgmma are neither read early nor written late: between the wgmma and its wait, and beside wgmma_fence.
template <int COUNT> __device__ __forceinline__ void wgmma_keep(float (&d)[COUNT]) {
#ifndef CUDA_ON_CPU
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
#endif
}
template <int COUNT> __device__ __forceinline__ void wgmma_keep(int (&d)[COUNT]) {
#ifndef CUDA_ON_CPU
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
#endif
}
template <int COUNT> __device__ __forceinline__ void wgmma_keep(unsigned (&a)[COUNT][4]) {
#ifndef CUDA_ON_CPU
#pragma unroll
  for (int i = 0; i < COUNT; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
#endif
}

// The same number, of which the compiler knows nothing: what follows from it is computed here, not kept in registers from before a loop.
__device__ __forceinline__ int computed_here(int x) {
#ifndef CUDA_ON_CPU
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// A pointer is computed here and kept, not put together anew at each use.
template <class T> __device__ __forceinline__ void compute_once(T *&p) {
#ifndef CUDA_ON_CPU
  asm volatile("" : "+l"(p));
#endif
}

#ifndef CUDA_ON_CPU
#define HOPPER_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_16(d, i) HOPPER_4(d, i), HOPPER_4(d, i + 4), HOPPER_4(d, i + 8), HOPPER_4(d, i + 12)
#define HOPPER_32(d, i) HOPPER_16(d, i), HOPPER_16(d, i + 16)
#define HOPPER_64(d, i) HOPPER_32(d, i), HOPPER_32(d, i + 32)
#define HOPPER_128(d, i) HOPPER_64(d, i), HOPPER_64(d, i + 64)
#define HOPPER_INT_8(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define HOPPER_INT_32(how, d) HOPPER_INT_8(how, d, 0), HOPPER_INT_8(how, d, 8), HOPPER_INT_8(how, d, 16), HOPPER_INT_8(how, d, 24)
#define HOPPER_INT_64(how, d) HOPPER_INT_32(how, d), HOPPER_INT_8(how, d, 32), HOPPER_INT_8(how, d, 40), HOPPER_INT_8(how, d, 48), HOPPER_INT_8(how, d, 56)
#define HOPPER_D32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_D64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_D128 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#endif

// A from shared memory (K-major), B from shared memory. Not accumulate: D starts at zero.
template <int N, bool B_IS_MN_MAJOR>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
  static_assert(N == 64 || N == 128 || N == 256, "columns");
#ifdef CUDA_ON_CPU
  hopper_emulation::issue(d, N, nullptr, a, b, B_IS_MN_MAJOR, accumulate);
#else
  if constexpr (N == 64)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOPPER_D32 "}, %32, %33, p, 1, 1, 0, %35;\n}\n"
                 : HOPPER_32(d, 0)
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
  else if constexpr (N == 128)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOPPER_D64 "}, %64, %65, p, 1, 1, 0, %67;\n}\n"
                 : HOPPER_64(d, 0)
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" HOPPER_D128 "}, %128, %129, p, 1, 1, 0, %131;\n}\n"
                 : HOPPER_128(d, 0)
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
#endif
}

// A from registers, B from shared memory.
template <int N, bool B_IS_MN_MAJOR>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  static_assert(N == 64 || N == 128 || N == 256, "columns");
#ifdef CUDA_ON_CPU
  hopper_emulation::issue(d, N, a, 0, b, B_IS_MN_MAJOR, accumulate);
#else
  if constexpr (N == 64)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOPPER_D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
                 : HOPPER_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
  else if constexpr (N == 128)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOPPER_D64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
                 : HOPPER_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" HOPPER_D128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n"
                 : HOPPER_128(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(B_IS_MN_MAJOR ? 1 : 0));
#endif
}

// D [64 x N] s32 += A [64 x 32] B [32 x N], signed bytes, exact. A from registers, four bytes where the fragments above have two bf16:
// a[0] A[16w + g][4t..4t+3], a[1] of row 16w + g + 8, a[2] and a[3] the same at 4t+16... B from shared memory, K-major: a row of
// 128 bytes is 128 k of one n, a step of 32 k is 32 bytes further.
// NOTE: not accumulate has outputs only. With d as input and output, ptxas 13.0 takes two products into the same registers for one
// value: what is computed of the first is computed once, of the last.
template <bool ACCUMULATE, int N>
__device__ __forceinline__ void wgmma_rs_s8(int (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {
  static_assert(N == 64 || N == 128, "columns");
#ifdef CUDA_ON_CPU
  hopper_emulation::issue_integers(d, N, a, b, ACCUMULATE);
#else
#define HOPPER_S8(n, scale, registers, a0, a1, a2, a3, address) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" n "k32.s32.s8.s8 {" registers "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" address ", p;\n}\n"
#define HOPPER_S8_64(scale) HOPPER_S8("64", scale, HOPPER_D32, "32", "33", "34", "35", "36")
#define HOPPER_S8_128(scale) HOPPER_S8("128", scale, HOPPER_D64, "64", "65", "66", "67", "68")
  if constexpr (N == 64 && ACCUMULATE)
    asm volatile(HOPPER_S8_64("1") : HOPPER_INT_32("+r", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (N == 64)
    asm volatile(HOPPER_S8_64("0") : HOPPER_INT_32("=r", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (ACCUMULATE)
    asm volatile(HOPPER_S8_128("1") : HOPPER_INT_64("+r", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(HOPPER_S8_128("0") : HOPPER_INT_64("=r", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

// ---- small arithmetic ----

// 2^x to 2 units in the last place; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef CUDA_ON_CPU
  const float y = exp2f(x);
  return y < 1.1754943508222875e-38f ? 0.f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Two bf16 in a word.
__device__ __forceinline__ unsigned pack_bf16_pair(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&both);
}

// a b of two bf16 each, one rounding, denormals kept.
__device__ __forceinline__ unsigned multiply_bf16_pairs(unsigned a, unsigned b) {
#ifdef CUDA_ON_CPU
  return pack_bf16_pair(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));  // the products are exact in fp32
#else
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
  return product;
#endif
}

// The four e4m3 of a word, first byte first in memory: the values of e4m3_decode_4 by the conversion instruction.
__device__ __forceinline__ void e4m3_convert_4(float (&out)[4], unsigned word) {
#ifdef CUDA_ON_CPU
  e4m3_decode_4(out, word);
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(pair) : "h"((unsigned short)(word >> 16 * i)));
    const float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    out[2 * i] = both.x;
    out[2 * i + 1] = both.y;
  }
#endif
}
