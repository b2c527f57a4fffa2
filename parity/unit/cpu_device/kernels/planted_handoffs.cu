// planted_handoffs.cu    one warp hands shared memory to another by an mbarrier: what racecheck follows of it, and what it does not
//
// archs    sm_90a
// launch   one block of 64 threads, 1024 bytes of shared memory; y [64], of which the last 32 are written: 31 .. 0
// tests    pytest parity/unit/test_sanitizer.py (emulated); on a card bench/sanitizer.py
//
// A store of any lane, __syncwarp, an arrival of lane 0, a wait, a load: ordered, since __syncwarp orders the lanes' accesses before
// it and mbarrier.arrive releases what came before it in causality order, not its own thread's accesses only.
#include "hopper.cuh"

extern __shared__ __align__(16) unsigned char smem[];

template <bool EVERY_LANE, bool WAITS> __device__ __forceinline__ void hand_over(float *y) {
  Mbarrier *full = reinterpret_cast<Mbarrier *>(smem);
  float *s = reinterpret_cast<float *>(smem + 16);
  const int lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) mbarrier_init(full, EVERY_LANE ? WARP : 1);
  __syncthreads();
  if (threadIdx.x < WARP) {
    // Nobody reads it: whole warps from here on, so that __syncwarp becomes what it is in sparse_attn_wgmma, an empty instruction.
    stmatrix_x4(smem + 512 + lane * 16, {0u, 0u, 0u, 0u});
    s[lane] = lane;
    if (EVERY_LANE) mbarrier_arrive(full);
    else mbarrier_arrive_warp(full);
  } else {
    if (WAITS) mbarrier_wait(full, 0);
    y[WARP + lane] = s[WARP - 1 - lane];
  }
}

extern "C" __global__ void handoff_every_lane_arrives(float *y) { hand_over<true, true>(y); }
extern "C" __global__ void handoff_one_lane_arrives(float *y) { hand_over<false, true>(y); }
extern "C" __global__ void handoff_nobody_waits(float *y) { hand_over<true, false>(y); }
