// sparse_attn_decode.cu    attention of one KV head over two sources with a sink, for 16, 32 or 64 heads a block: one or two kernels
//
//   out[t,h] = sum_k p_k kv_k / (sum_k p_k + exp(sink[h] - M)),  p_k = exp(scale q[t,h] . kv_k - M)
//
// Semantics, tensors and twin: sparse_attn.cu; which keys: sparse_attn_keys.cuh; the block: sparse_attn_flash.cuh.
// twin     reference/ops.py::sparse_attention     tests  pytest parity/test_operations_attention.py -k "sparse_attn and flash"
// tensors  as sparse_attn.cu; part_o [T, splits, heads, d] fp32, part_ml [T, splits, heads, 2] fp32, both 16-byte aligned: what
//          splits leave, written where there are keys and more than one split has any; null for one split
//          done [T, gridDim.y] i32 or null: splits of a token and its heads that are finished, zero between launches
// numerics sparse_attn_flash.cuh; splits are merged in ascending order, fp32; one rounding, to bf16, at the store. Batch-
//          invariant: bits depend on the token's own keys and on `splits`, not on HEADS, on T, or on who merges
// launch   flash_D_hHEADS_pPARTS: grid = (T, ceil(heads / HEADS), splits), block = 256, Shape::SHARED bytes of dynamic shared memory
//          (production/ops/sparse_attn.py has the sum). done given: the last block of a token and its heads merges, one launch.
//          sparse_attn_combine: grid = (T, heads), block = d / 4, after a launch without done
// variants flash: p as two bf16 | flash_p_bf16: p as one, the rounding point p.bf16. Both phases: prefill has one split.
//          d = 512 and 16, 32 or 64 heads a block; d = 128 and 16; r = 64
#include "sparse_attn_flash.cuh"

extern __shared__ __align__(16) unsigned char smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_128_h16_p1(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<128, 16, 1>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_128_h16_p2(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<128, 16, 2>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h16_p1(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 16, 1>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h16_p2(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 16, 2>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h32_p1(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 32, 1>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h32_p2(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 32, 2>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h64_p1(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 64, 1>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_512_h64_p2(
    const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
    const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out, float *part_o, float *part_ml,
    int *done, int *visible, int heads, int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
    long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
    long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride) {
  flash_block<512, 64, 2>(smem, {q, ring, ring_position, entries, selected, position, row, sink, out, part_o, part_ml, done, visible, heads, slots,
                                   window, listed, capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
                                   entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride});
}

extern "C" __global__ void __launch_bounds__(128)
sparse_attn_combine(const float *part_o, const float *part_ml, const float *sink, const int *position, __nv_bfloat16 *out, int heads,
                    int d, int splits, int window, int listed, int capacity, int ratio, long long out_stride) {
  combine_splits<false>(part_o, part_ml, sink, position, out, heads, d, splits, KEYS, window, listed, capacity, ratio, out_stride);
}
