// attention_profile.cu    sparse_attn_wgmma.cu with a clock around every wait: who waits for whom, and for how long
//
// archs    sm_90a
// tests    bench/attention_prefill.py --profile prints it; the results are those of the kernel, the time is not
// tensors  as sparse_attn_wgmma.cu; out [ROLES, WAITS] i64: cycles that the warps of a role spent at each place, summed over the warps
//          of the first BLOCKS blocks. Roles: the two that multiply, the one that loads. Places: the barriers by number, then ..
// launch   as sparse_attn_wgmma.cu; profile_take: grid = 1, block = ROLES * WAITS, hands out the numbers and sets them to zero
#include "hopper.cuh"
#include "sparse_attn_splits.cuh"

constexpr int ROLES = 3, WAITS = 20, BLOCKS = 8;
enum Waits { PRODUCTS = 14, ONE_PRODUCT_LEFT, FENCE, WHOLE, ROUNDS };  // of 0 or 1 group in flight; the fence; all; how often FENCE

#ifdef CUDA_ON_CPU
static inline long long clock64() { return 0; }  // no clock there: the results alone
#endif

__device__ unsigned long long spent[ROLES * WAITS];

__device__ __forceinline__ void note(int place, long long since) {
  if (blockIdx.x < BLOCKS && threadIdx.x % 32 == 0)
    atomicAdd(spent + threadIdx.x / 128 * WAITS + place, (unsigned long long)(clock64() - since));
}

__device__ __forceinline__ void timed_wait(Mbarrier *barrier, Mbarrier *first, int parity) {
  const long long since = clock64();
  mbarrier_wait(barrier, parity);
  note((int)(barrier - first), since);
}
template <int PENDING> __device__ __forceinline__ void timed_products() {
  const long long since = clock64();
  wgmma_wait<PENDING>();
  note(PENDING ? ONE_PRODUCT_LEFT : PRODUCTS, since);
}
__device__ __forceinline__ void timed_fence() {
  const long long since = clock64();
  fence_proxy_async();
  note(FENCE, since);
  if (blockIdx.x < BLOCKS && threadIdx.x % 32 == 0) atomicAdd(spent + threadIdx.x / 128 * WAITS + ROUNDS, 1ull);
}
extern __shared__ __align__(1024) unsigned char smem[];  // as there: the loader of kernels looks for it here

#define mbarrier_wait(which, parity) timed_wait(which, barrier(0), parity)
#define wgmma_wait timed_products
#define fence_proxy_async timed_fence
#define WITHOUT_KERNELS
#include "sparse_attn_wgmma.cu"

extern "C" __global__ void profile_take(long long *out) {
  out[threadIdx.x] = (long long)spent[threadIdx.x];
  spent[threadIdx.x] = 0;
}

template <int PARTS> __device__ __forceinline__ void timed(const Call &call) {
  const long long since = clock64();
  attend<PARTS, false>(call);
  note(WHOLE, since);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
profile_wgmma(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries, const int *selected,
   const int *position, const int *row, const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r, int slots,
   int window, int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
   long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride, long long entry_stride,
   long long selected_stride, long long out_stride, long long visible_stride, int tokens) {
  timed<2>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed, capacity,
              ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride,
              selected_stride, out_stride, visible_stride, tokens, 1, nullptr, nullptr});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
profile_wgmma_p_bf16(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries, const int *selected,
   const int *position, const int *row, const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r, int slots,
   int window, int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
   long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride, long long entry_stride,
   long long selected_stride, long long out_stride, long long visible_stride, int tokens) {
  timed<1>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed, capacity,
              ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride,
              selected_stride, out_stride, visible_stride, tokens, 1, nullptr, nullptr});
}

