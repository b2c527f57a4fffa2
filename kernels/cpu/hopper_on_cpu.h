// hopper_on_cpu.h    the instructions behind kernels/hopper.cuh, emulated: index arithmetic and pipelines, nothing of speed
//
// Written from the PTX manual (wgmma descriptors and fragments, mbarrier phases), not from a card: bench/attention_prefill.py
// asks the card the same small questions. wgmma is carried out when its group is waited for, so that accumulators
// that are read too early are old; a buffer that is given back too early shows as a wrong sum. Sums are fp32, in the order of k.
// Fences, register budgets and the two memory proxies are not there. For the plain build: the checker knows no mbarrier.
#pragma once

#pragma push_macro("__noinline__")
#undef __noinline__
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>
#pragma pop_macro("__noinline__")

static void *cuemu_dynamic_shared();  // of the file that is built: wgmma operands lie in its dynamic shared memory

namespace hopper_emulation {

constexpr unsigned MOST_SHARED_BYTES = 227 * 1024;
constexpr int MOST_YIELDS = 1000000;

inline char *shared_memory() { return (char *)cuemu_dynamic_shared(); }

inline unsigned shared_offset(const void *p) {
  const ptrdiff_t offset = (const char *)p - shared_memory();
  if (offset < 0 || offset >= (ptrdiff_t)MOST_SHARED_BYTES) cuemu_fail("%p is not in dynamic shared memory", p);
  return (unsigned)offset;
}

// ---- mbarrier: pending arrivals, arrivals of a phase, number of the phase ----

struct Phases {
  unsigned pending : 16, expected : 16, phase : 32;
};
static_assert(sizeof(Phases) == 8, "an mbarrier has 64 bits");

inline void mbarrier_init(unsigned long long *barrier, int arrivals) {
  *(Phases *)barrier = {(unsigned)arrivals, (unsigned)arrivals, 0};
}

inline void mbarrier_arrive(unsigned long long *barrier) {
  Phases &phases = *(Phases *)barrier;
  if (phases.pending == 0 || phases.pending > phases.expected)
    cuemu_fail("mbarrier at shared offset %u was not initialised", shared_offset(barrier));
  if (--phases.pending == 0) {
    phases.pending = phases.expected;
    phases.phase++;
  }
}

inline bool mbarrier_is_over(const unsigned long long *barrier, int parity) {
  return (((const Phases *)barrier)->phase & 1) != (unsigned)parity;
}

inline void mbarrier_wait(unsigned long long *barrier, int parity) {
  for (int i = 0; !mbarrier_is_over(barrier, parity); i++) {
    if (i == MOST_YIELDS)
      cuemu_fail("thread %u waits for ever: phase of parity %d of the mbarrier at shared offset %u, which is in phase %u and "
                 "lacks %u of %u arrivals", threadIdx.x, parity, shared_offset(barrier), ((Phases *)barrier)->phase,
                 ((Phases *)barrier)->pending, ((Phases *)barrier)->expected);
    cuemu_yield();
  }
}

// ---- wgmma ----

struct Product {
  float *d;
  int *integers;  // in place of d: signed bytes
  int n;
  bool a_in_registers, b_is_mn_major, accumulate;
  unsigned a_registers[4];
  unsigned long long a, b;
};

struct Lane {
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};

// Of the calling fiber. Kept outside of the kernel's thread-locals, which the device fills before every block.
inline Lane &lane_of_caller() {
  static std::mutex lock;
  static std::unordered_map<const void *, Lane> lanes;
  std::lock_guard<std::mutex> guard(lock);
  return lanes[cuemu_current];
}

inline const char *operand_address(unsigned long long descriptor, unsigned offset) {
  if (descriptor >> 62 != 1) cuemu_fail("wgmma operand without 128-byte swizzle: descriptor 0x%llx", descriptor);
  unsigned at = (unsigned)((descriptor & 0x3fff) << 4) + offset;
  at ^= (at >> 7 & 7) << 4;
  if (at + 2 > MOST_SHARED_BYTES) cuemu_fail("wgmma operand beyond shared memory: offset %u", at);
  return shared_memory() + at;
}
inline float operand_at(unsigned long long descriptor, unsigned offset) {
  return cuemu::bit_cast<float>((unsigned)*(const unsigned short *)operand_address(descriptor, offset) << 16);
}
inline unsigned leading_bytes(unsigned long long descriptor) { return (unsigned)(descriptor >> 16 & 0x3fff) << 4; }
inline unsigned stride_bytes(unsigned long long descriptor) { return (unsigned)(descriptor >> 32 & 0x3fff) << 4; }

inline float k_major(unsigned long long descriptor, int row, int k) {
  return operand_at(descriptor, row % 8 * 128 + row / 8 * stride_bytes(descriptor) + k * 2);
}
inline float mn_major(unsigned long long descriptor, int n, int k) {
  return operand_at(descriptor, n % 64 * 2 + n / 64 * leading_bytes(descriptor) + k % 8 * 128 + k / 8 * stride_bytes(descriptor));
}

struct WaitArg {
  Lane *lane;
  int pending, warp;  // of the warpgroup
};

// The 16 rows of one warp: 32 k, A from registers, B K-major.
inline void multiply_integers(const std::vector<const Product *> &lanes) {
  const Product &first = *lanes[0];
  static thread_local int a[16][32], b[128][32];
  for (int n = 0; n < first.n; n++)
    for (int k = 0; k < 32; k++) b[n][k] = *(const signed char *)operand_address(first.b, n % 8 * 128 + n / 8 * stride_bytes(first.b) + k);
  for (int lane = 0; lane < 32; lane++) {
    const Product &mine = *lanes[lane];
    if (!mine.integers || mine.n != first.n || mine.b != first.b || mine.accumulate != first.accumulate) cuemu_fail("the lanes of a warp issue different wgmma");
    for (int i = 0; i < 16; i++)
      a[lane / 4 + (i & 4 ? 8 : 0)][4 * (lane % 4) + (i & 3) + (i & 8 ? 16 : 0)] = (signed char)(mine.a_registers[i >> 2] >> (i & 3) * 8);
  }
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < first.n / 2; i++) {
      const int *x = a[lane / 4 + (i & 2 ? 8 : 0)], *y = b[i / 4 * 8 + 2 * (lane % 4) + (i & 1)];
      int sum = 0;
      for (int k = 0; k < 32; k++) sum += x[k] * y[k];
      int &d = lanes[lane]->integers[i];
      d = (int)((first.accumulate ? (unsigned)d : 0u) + (unsigned)sum);
    }
}

// The 16 rows of one warp.
inline void multiply(const std::vector<const Product *> &lanes, int warp) {
  const Product &first = *lanes[0];
  if (first.integers) return multiply_integers(lanes);
  static thread_local float a[16][16], b[16][256], c[16][256];
  for (int k = 0; k < 16; k++) {
    for (int n = 0; n < first.n; n++) b[k][n] = first.b_is_mn_major ? mn_major(first.b, n, k) : k_major(first.b, n, k);
    if (!first.a_in_registers)
      for (int row = 0; row < 16; row++) a[row][k] = k_major(first.a, warp * 16 + row, k);
  }
  for (int lane = 0; lane < 32; lane++) {
    const Product &mine = *lanes[lane];
    const int g = lane / 4, t = lane % 4;
    if (mine.n != first.n || mine.a != first.a || mine.b != first.b || mine.accumulate != first.accumulate)
      cuemu_fail("the lanes of a warp issue different wgmma");
    if (first.a_in_registers)
      for (int i = 0; i < 8; i++)
        a[g + (i & 2 ? 8 : 0)][2 * t + (i & 1) + (i & 4 ? 8 : 0)] =
            cuemu::bit_cast<float>((mine.a_registers[i >> 1] >> (i & 1) * 16 & 0xffffu) << 16);
    for (int i = 0; i < first.n / 2; i++)
      c[g + (i & 2 ? 8 : 0)][i / 4 * 8 + 2 * t + (i & 1)] = first.accumulate ? mine.d[i] : 0.f;
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < first.n; n++) c[row][n] = __builtin_fmaf(a[row][k], b[k][n], c[row][n]);
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < first.n / 2; i++) lanes[lane]->d[i] = c[g + (i & 2 ? 8 : 0)][i / 4 * 8 + 2 * t + (i & 1)];
  }
}

inline void wait_function(void **args, unsigned, unsigned) {
  for (int lane = 0; lane < 32; lane++)
    if (!args[lane]) cuemu_fail("wgmma needs whole warps");
  const WaitArg &first = *(const WaitArg *)args[0];
  while ((int)first.lane->groups.size() > first.pending) {
    const size_t count = first.lane->groups.front().size();
    for (size_t i = 0; i < count; i++) {
      std::vector<const Product *> lanes;
      for (int lane = 0; lane < 32; lane++) {
        const auto &groups = ((const WaitArg *)args[lane])->lane->groups;
        if (groups.empty() || groups.front().size() != count) cuemu_fail("the lanes of a warp have issued different wgmma");
        lanes.push_back(&groups.front()[i]);
      }
      multiply(lanes, first.warp);
    }
    for (int lane = 0; lane < 32; lane++) ((const WaitArg *)args[lane])->lane->groups.pop_front();
  }
}

inline void issue(float *d, int n, const unsigned *a_registers, unsigned long long a, unsigned long long b, bool b_is_mn_major,
                  bool accumulate) {
  Product product{d, nullptr, n, a_registers != nullptr, b_is_mn_major, accumulate, {}, a, b};
  for (int i = 0; i < 4; i++) product.a_registers[i] = a_registers ? a_registers[i] : 0;
  lane_of_caller().open.push_back(product);
}

inline void issue_integers(int *d, int n, const unsigned *a_registers, unsigned long long b, bool accumulate) {
  lane_of_caller().open.push_back({nullptr, d, n, true, false, accumulate, {a_registers[0], a_registers[1], a_registers[2], a_registers[3]}, 0, b});
}

inline void commit() {
  Lane &lane = lane_of_caller();
  lane.groups.push_back(std::move(lane.open));
  lane.open.clear();
}

inline void wait(int pending, const char *file, int line) {
  WaitArg arg{&lane_of_caller(), pending, (cuemu_current->linear >> 5) & 3};
  cuemu_warp_operation(~0u, wait_function, &arg, "wgmma.wait_group", file, line, false);
}

}  // namespace hopper_emulation
