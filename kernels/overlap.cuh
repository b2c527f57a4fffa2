// overlap.cuh    a launch that begins while the one before it ends: what it may do early, and where it waits
//
// A kernel file names such kernels in its header, `// overlap  name name`, and a GPU is told so at their launch
// (production/launch.py). Such a kernel may read weights and its own arguments at once; every block calls after_launch_before()
// before it reads what any earlier launch wrote, and before it writes to global memory. It reads such data by plain loads: no
// __restrict__ and no __ldg, which a compiler may move ahead of the wait. Launched as any other kernel it waits for nothing.
// On the CPU a launch is over before the next one begins.
#pragma once
#include "common.cuh"

// Waits until the launch before is over and what it wrote can be seen; the next launch may begin, and waits in its turn.
__device__ __forceinline__ void after_launch_before() {
#ifndef CUDA_ON_CPU
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
