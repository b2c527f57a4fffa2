// common_probe.cu    the helpers of common.cuh one by one
#include "common.cuh"

// e4m3, e8m0 [256] fp32, e2m1 [16] fp32: the value of every code. block = 256
extern "C" __global__ void decode_codes(float *e4m3, float *e8m0, float *e2m1) {
  const unsigned code = threadIdx.x;
  e4m3[code] = e4m3_decode(code);
  e8m0[code] = e8m0_decode(code);
  if (code < 16) e2m1[code] = e2m1_decode(code);
}

// The same codes through the words that kernels load. words4 [64], words8 [n8] | four [256], eight [8 n8]. block = 1
extern "C" __global__ void decode_words(const unsigned *words4, const unsigned *words8, float *four, float *eight, int n8) {
  for (int w = 0; w < 64; w++) {
    float values[4];
    e4m3_decode_4(values, words4[w]);
    for (int i = 0; i < 4; i++) four[4 * w + i] = values[i];
  }
  for (int w = 0; w < n8; w++) {
    float values[8];
    e2m1_decode_8(values, words8[w]);
    for (int i = 0; i < 8; i++) eight[8 * w + i] = values[i];
  }
}

// x [n] fp32 | e4m3, e2m1 [n] codes. grid = ceil(n / 128), block = 128
extern "C" __global__ void encode_values(const float *x, unsigned char *e4m3, unsigned char *e2m1, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  e4m3[i] = (unsigned char)e4m3_encode(x[i]);
  e2m1[i] = (unsigned char)e2m1_encode(x[i]);
}

// amax [n] fp32 | e4m3, e2m1 [n] e8m0 bytes | inverse [n] fp32 of the first. grid = ceil(n / 128), block = 128
extern "C" __global__ void scales_of(const float *amax, unsigned char *e4m3, unsigned char *e2m1, float *inverse, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  e4m3[i] = (unsigned char)e4m3_scale(fmaxf(amax[i], E4M3_AMAX_FLOOR));
  e2m1[i] = (unsigned char)e2m1_scale(fmaxf(amax[i], E2M1_AMAX_FLOOR));
  inverse[i] = e8m0_inverse(e4m3[i]);
}

// x [96] fp32 | out [4, 96]: block sum, block maximum, block sum of -x, sum over 8 lanes. block = 96
extern "C" __global__ void reduce(const float *x, float *out) {
  const float v = x[threadIdx.x];
  out[threadIdx.x] = block_sum<96>(v);
  out[96 + threadIdx.x] = block_max<96>(v);
  out[192 + threadIdx.x] = block_sum<96>(-v);
  out[288 + threadIdx.x] = warp_sum<8>(v);
}

// y = x through 16-byte loads and stores. x, y [8 n] bf16. block = n
extern "C" __global__ void copy_8(const __nv_bfloat16 *x, __nv_bfloat16 *y) {
  float v[8];
  load_8(v, x + 8 * threadIdx.x);
  store_8(y + 8 * threadIdx.x, v);
}
