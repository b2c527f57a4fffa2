// sparse_attn_wgmma.cu    attention of sparse_attn.cu on Hopper's tensor cores: 64 heads of one query a time
//
//   out[t,h] = sum_k p_k kv_k / (sum_k p_k + exp(sink[h] - M)),  p_k = exp(scale q[t,h] . kv_k - M)
//
// archs    sm_90a
// twin     reference/ops.py::sparse_attention     tests  pytest parity/test_operations_wgmma.py (emulated on the CPU), bench/attention_prefill.py
// tensors  as sparse_attn.cu, d = 512, r = 64; `tokens` in place of its `group`. Which keys, in which order: sparse_attn_keys.cuh
// numerics keys exact in bf16 (an e4m3 code times a power of two); scores and sums the tensor core's in fp32, by tiles of 64 keys;
//          p fp32, multiplied as two bf16 whose sum is within 2^-17 of it; exponentials by ex2.approx; the running maximum is
//          a whole power of two, p at most 2^8: it moves when a score is more than 8 powers above. One rounding, to bf16, at
//          the store. Sums of exponentials: two, over even and odd tiles, added last. A token's result depends on its own data
//          and on `splits`, which the caller fixes by capacity. part_o [T, splits, heads, d], part_ml [T, splits, heads, 2] fp32: sums;
//          maximum in powers of two and sum of exponentials; written where there are keys and more than one split has any
// launch   grid = (blocks <= tokens * ceil(h / 64)), persistent: one a multiprocessor; block = 384; shared memory: SHARED_BYTES
//          sparse_attn_wgmma_split: the same of tokens x blocks of heads x splits, each of a multiple of 128 keys; then
//          sparse_attn_combine, grid = (T, heads), block = d / 4
// variants sparse_attn_wgmma, and _p_bf16: p rounded to one bf16 (point `p.bf16`); both with splits (decode) and without;
//
// Roles. Two warpgroups multiply, one loads. Tile i of 64 keys lies in stage i % 2 of shared memory as 8 panels of 64 dims,
// the swizzle of hopper.cuh, and is operand twice: keys x dims for the scores, dims x keys for the sums. Warpgroup i % 2 has its
// scores: it masks them, moves the maximum, makes p, and hands p to the other one through shared memory. Sums: warpgroup w has
// dims 256 w .. in 128 registers a thread, and adds its own tile first, so that halves of stages are free in the order
// stage 0 left, 1 right, 0 right, 1 left; they are filled in this order, from registers that are loaded a half ahead.
//
//   full[stage][half]   the loader has written it            free[stage][half]   warpgroup `half` has summed over it
//   largest_ready       maximum and factor of an even tile   p_ready[owner]      p, and maximum and factor of an odd tile
//   q_full, q_free      queries of an item: token, 64 heads  sums[item % 2]      sums of exponentials of both warpgroups
#include "hopper.cuh"
#include "sparse_attn_splits.cuh"

constexpr int D = 512, R = 64, HEADS = 64, KEYS = 64;
constexpr int PANELS = D / 64, HALF = PANELS / 2, PANEL_BYTES = 64 * SWIZZLE_ROW_BYTES, TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int PRODUCER_WARPS = 4, THREADS = 2 * WARPGROUP + PRODUCER_WARPS * WARP;
constexpr int WARP_KEYS = KEYS / PRODUCER_WARPS, SLOTS = WARP_KEYS / 4;  // keys of a loading warp and thread: 8 lanes share a key
constexpr int CONSUMER_REGISTERS = 192, PRODUCER_REGISTERS = 120;
constexpr float LOG2E = 1.4426950408889634f, STALE = 8.f;  // p is at most 2^STALE

// Shared memory, bytes from its start. P: [owner][part] panels of 64 heads x 64 keys.
constexpr int AT_Q = 0, AT_KV = TILE_BYTES, AT_P = 3 * TILE_BYTES, AT_BARRIERS = AT_P + 4 * PANEL_BYTES;
constexpr int AT_SEEN = AT_BARRIERS + 128;        // [stage] 64 bits: which keys of the tile there are
constexpr int AT_STATE = AT_SEEN + 16;            // [owner][head] float2: running maximum, factor for older sums
constexpr int AT_SUMS = AT_STATE + 2 * HEADS * 8;  // [item % 2][warpgroup][head] floats
constexpr int AT_WORK = AT_SUMS + 4 * HEADS * 4;   // [item % 2] int2: number of an item, pairs of its tiles; 0 pairs: no more
constexpr int SHARED_BYTES = AT_WORK + 16;
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of a block");
static_assert(WARP_KEYS == 16, "masks of 16 keys a warp");

enum Barriers { FULL = 0, FREE = 4, P_READY = 8, LARGEST_READY = 10, Q_FULL, Q_FREE, SUMS_READY, BARRIERS };
static_assert(BARRIERS * 8 <= 128, "room for barriers");

extern __shared__ __align__(1024) unsigned char smem[];

struct Call {
  const __nv_bfloat16 *q;
  const unsigned char *ring;
  const int *ring_position;
  const unsigned char *entries;
  const int *selected, *position, *row;
  const float *sink;
  __nv_bfloat16 *out;
  int *visible;
  int heads, slots, window, listed, capacity, ratio;
  float scale;
  long long q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride, entry_stride;
  long long selected_stride, out_stride, visible_stride;
  int tokens, splits;  // splits and what they leave: decode
  float *part_o, *part_ml;
};

// One piece of work: a token and up to 64 heads; of decode also one split of its keys.
struct Item {
  int token, head0, heads, split;
};

__device__ __forceinline__ int head_blocks(const Call &call) { return ceil_div(call.heads, HEADS); }

// Splits come last: first of all tokens the first, which all have.
template <bool SPLIT> __device__ __forceinline__ Item item_of(const Call &call, int number) {
  const int blocks = head_blocks(call), split = SPLIT ? number / (call.tokens * blocks) : 0;
  if (SPLIT) number -= split * call.tokens * blocks;
  const int token = number / blocks, head0 = number % blocks * HEADS;
  return {token, head0, min(HEADS, call.heads - head0), split};
}

__device__ __forceinline__ Keys keys_of_token(const Call &call, int token, int p) {
  return keys_of(p, call.row[token], max(0, p - call.window + 1), call.ring, call.ring_position, call.entries,
                 call.selected ? call.selected + token * call.selected_stride : nullptr,
                 call.visible ? call.visible + token * call.visible_stride : nullptr, call.slots, call.window,
                 call.listed, call.capacity, call.ratio, call.ring_row_stride, call.ring_slot_stride,
                 call.ring_position_stride, call.entries_row_stride, call.entry_stride);
}

__device__ __forceinline__ volatile int2 *work_of(int items) { return reinterpret_cast<volatile int2 *>(smem + AT_WORK) + (items & 1); }

__device__ __forceinline__ Mbarrier *barrier(int number) { return reinterpret_cast<Mbarrier *>(smem + AT_BARRIERS) + number; }

// ---- loading ----

__device__ __forceinline__ uint2 load_8_bytes(const unsigned char *p) { return __ldg(reinterpret_cast<const uint2 *>(p)); }

// Eight codes -> eight bf16; factor is 2^120 times their scale, twice.
__device__ __forceinline__ uint4 decode_8(const uint2 &codes, unsigned factor) {
  return make_uint4(multiply_bf16_pairs(widen_codes<0>(codes.x), factor), multiply_bf16_pairs(widen_codes<2>(codes.x), factor),
                    multiply_bf16_pairs(widen_codes<0>(codes.y), factor), multiply_bf16_pairs(widen_codes<2>(codes.y), factor));
}

// Where a key lies, in 32 bits: 8-byte words from the ring's or the entries' first byte. From lane to lane by one shuffle.
constexpr unsigned NOWHERE = ~0u, IN_ENTRIES = 1u << 31;

__device__ __forceinline__ unsigned place_of_key(const Keys &keys, int i, int e) {
  if (i >= keys.total) return NOWHERE;
  const unsigned char *bytes = find_key(keys, i, e).bytes;
  if (!bytes) return NOWHERE;
  return i < keys.in_window ? (unsigned)((bytes - keys.ring) / 8) : (unsigned)((bytes - keys.entries) / 8) | IN_ENTRIES;
}

__device__ __forceinline__ const unsigned char *bytes_at(const Keys &keys, unsigned place) {
  return place == NOWHERE ? nullptr : (place & IN_ENTRIES ? keys.entries : keys.ring) + (size_t)(place & ~IN_ENTRIES) * 8;
}

// Eight bf16 at any alignment.
__device__ __forceinline__ uint4 load_8_bf16(const __nv_bfloat16 *p) {
  const unsigned short *from = reinterpret_cast<const unsigned short *>(p);
  return make_uint4(from[0] | from[1] << 16, from[2] | from[3] << 16, from[4] | from[5] << 16, from[6] | from[7] << 16);
}

__device__ __forceinline__ void store_8_bf16(__nv_bfloat16 *p, const uint4 &eight, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4 *>(p) = eight;
    return;
  }
  unsigned short *to = reinterpret_cast<unsigned short *>(p);
  const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = (unsigned short)(words[i / 2] >> i % 2 * 16);
}

// Starts to copy the queries of an item, zeros for heads that there are not. Done after cp_async_wait<0>.
__device__ __forceinline__ void start_queries(const Call &call, const Item &item, int thread) {
  const __nv_bfloat16 *from = call.q + item.token * call.q_stride + (long long)item.head0 * D;
  const bool aligned = (reinterpret_cast<unsigned long long>(call.q) | call.q_stride * 2) % 16 == 0;
#pragma unroll 1
  for (int i = thread; i < HEADS * D / 8; i += PRODUCER_WARPS * WARP) {
    const int head = i / (D / 8), chunk = i % (D / 8);
    uint4 *to = reinterpret_cast<uint4 *>(smem + AT_Q + chunk / 8 * PANEL_BYTES + swizzle_128(head, chunk % 8));
    if (aligned) cp_async_16(to, head < item.heads ? from + i * 8 : from, head < item.heads ? 16 : 0);
    else *to = head < item.heads ? load_8_bf16(from + i * 8) : make_uint4(0u, 0u, 0u, 0u);
  }
  cp_async_commit();
}

// What a loading lane knows of the tile of one stage: its own key, and which of the warp's keys there are, bit i: key i.
struct Tile {
  unsigned place;
  uint2 scales;
  unsigned seen;
};

// A warp has KEYS / PRODUCER_WARPS keys of a tile: lane i finds key i; lanes 8 g + sub decode keys 4 k + g, of each the chunks of
// 8 dims at 64 panel + 8 sub. Halves of tiles, SIDE by SIDE: panels 0..3, or 4..6 and the rotated dims, are loaded a half
// ahead. SPLIT: they are asked for key by key while the half before is decoded, so that loads are on their way at the fence; else
// after it: that cost prefill 3 to 12 % on an H200.
template <bool SPLIT> __device__ __forceinline__ void load(const Call &call) {
  const int thread = threadIdx.x - 2 * WARPGROUP, warp = thread / WARP, lane = thread % WARP, sub = lane % 8;
  const int own_key = warp * WARP_KEYS + lane % WARP_KEYS;
  const int first_chunk = swizzle_128(warp * WARP_KEYS + lane / 8, sub);  // of slot 0; slot k: 4 k rows further
  int uses = 0, items = 0;  // of both stages, queries
  for (int number = blockIdx.x; number < call.tokens * head_blocks(call) * (SPLIT ? call.splits : 1); number += gridDim.x) {
    const Item item = item_of<SPLIT>(call, number);
    const int p = call.position[item.token];
    const bool early = SPLIT && items == 0;  // of the first item, queries and what else can be are asked for before p is known
    if (early) {
      if (call.selected) {  // the lines of this split's list, as if the window were full
        const int listed = split_keys(call.window + call.listed, call.splits, 2 * KEYS).keys, i = item.split * listed - call.window + thread * 32;
        if (thread * 32 < listed + 32 && i >= 0 && i < call.listed) prefetch_global(call.selected + item.token * call.selected_stride + i);
      }
      if (thread == 0) prefetch_global(call.row + item.token);
      if (thread == WARP) prefetch_global(call.sink + item.head0);
      start_queries(call, item, thread);
    }
    if (p < 0) {
      if (early) cp_async_wait<0>();
      continue;
    }
    Keys keys = keys_of_token(call, item.token, p);
    const bool show = keys.visible && item.head0 == 0;
    if (show && item.split == 0) show_nothing_else(keys, thread, PRODUCER_WARPS * WARP);
    int start = 0;
    bool is_part = false;
    if (SPLIT) {
      const Splits splits = split_keys(keys.total, call.splits, 2 * KEYS);
      start = item.split * splits.keys;
      keys.total = min(keys.total, start + splits.keys);
      is_part = splits.used > 1;
      if (start >= keys.total) {
        if (early) cp_async_wait<0>();
        continue;
      }
    }
    if (show)
#pragma unroll 1
      for (int i = start + thread; i < keys.total; i += PRODUCER_WARPS * WARP) {
        const Key key = find_key(keys, i);
        keys.visible[key.column] = key.shown;
      }
    const auto listed = [&](int i) { return i >= keys.in_window && i < keys.total ? entry_at(keys, i) : -1; };
    const auto find = [&](int i, int e) {
      Tile tile;
      tile.place = place_of_key(keys, i, e);
      tile.seen = __ballot_sync(FULL_MASK, tile.place != NOWHERE);
      tile.scales = tile.place != NOWHERE ? load_8_bytes(bytes_at(keys, tile.place) + D + R) : make_uint2(0u, 0u);
      return tile;
    };
    uint2 raw[SLOTS][HALF + 1];
    // Asks for half a key.
    const auto ask = [&](const Tile &tile, int side, int k) {
      const unsigned char *entry = bytes_at(keys, __shfl_sync(FULL_MASK, tile.place, 4 * k + lane / 8));
      if (entry) {
        const unsigned char *codes = entry + side * HALF * SCALE_BLOCK + sub * 8, *last = side ? entry + D - R + sub * 16 : codes + (HALF - 1) * SCALE_BLOCK;
#pragma unroll
        for (int i = 0; i < HALF - 1; i++) raw[k][i] = load_8_bytes(codes + i * SCALE_BLOCK);
        raw[k][HALF - 1] = load_8_bytes(last);
        if (side) raw[k][HALF] = load_8_bytes(last + 8);
      }
      if (tile.seen != FULL_MASK)  // keys that are not there are zeros: 0 times p is to be 0
#pragma unroll
        for (int i = 0; i <= HALF; i++) raw[k][i] = entry ? raw[k][i] : make_uint2(0u, 0u);
    };
    int key = start + own_key;  // of this lane, in the tile that is looked for next
    Tile even = find(key, listed(key)), odd = even;
    key += KEYS;
    int next = listed(key);
#pragma unroll
    for (int k = 0; k < SLOTS; k++) ask(even, 0, k);
    if (!early) {
      mbarrier_wait(barrier(Q_FREE), items & 1 ^ 1);
      start_queries(call, item, thread);
    }
    if (thread == 0) work_of(items)->x = is_part ? ~number : number, work_of(items)->y = ceil_div(keys.total - start, 2 * KEYS);
    cp_async_wait<0>();
    fence_proxy_async();
    mbarrier_arrive_warp(barrier(Q_FULL));
    items++;

    for (int begin = start; begin < keys.total; begin += 2 * KEYS, uses++)
#pragma unroll 1
      for (int part = 0; part < 4; part++) {  // stage 0 left, 1 right, 0 right, 1 left
        const int stage = part & 1, side = part == 1 || part == 2;
        const bool to_find = part == 0 || part == 3;  // the tile of the other stage
        Tile found;
        if (to_find) {
          found = find(key, next);
          key += KEYS;
          next = listed(key);
        }
        const Tile tile = stage ? odd : even;
        if (to_find && stage) even = found;
        if (to_find && !stage) odd = found;
        const Tile after = stage ? even : odd;
        mbarrier_wait(barrier(FREE + 2 * stage + side), uses & 1 ^ 1);
        unsigned char *to = smem + AT_KV + stage * TILE_BYTES + side * HALF * PANEL_BYTES + first_chunk;
        if (side == stage && lane == 0)  // the first of the stage's halves
          reinterpret_cast<unsigned short *>(smem + AT_SEEN)[stage * 4 + warp] = (unsigned short)tile.seen;
        const unsigned own_scales = side ? tile.scales.y & 0xffffffu : tile.scales.x;
        unsigned slow = large_scales(own_scales);
#pragma unroll
        for (int k = 0; k < SLOTS; k++) {
          const unsigned exponents = __shfl_sync(FULL_MASK, own_scales, 4 * k + lane / 8) + 0x78787878u;  // of 2^120 scale
          unsigned char *chunk = smem + ((unsigned)(to - smem) ^ k % 2 * 64) + k * 4 * SWIZZLE_ROW_BYTES;
#pragma unroll
          for (int i = 0; i < HALF; i++) {
            if (i == HALF - 1 && side) {
              *reinterpret_cast<uint4 *>(chunk + i * PANEL_BYTES) = make_uint4(raw[k][i].x, raw[k][i].y, raw[k][i + 1].x, raw[k][i + 1].y);
            } else {
              slow |= nan_codes(raw[k][i].x) | nan_codes(raw[k][i].y);
              *reinterpret_cast<uint4 *>(chunk + i * PANEL_BYTES) = decode_8(raw[k][i], __byte_perm(exponents, 0u, 0x4040u + i * 0x101u) << 7);
            }
          }
          if (SPLIT) ask(after, part < 2, k);
        }
        if (__any_sync(FULL_MASK, slow & 0x80808080u))  // a NaN, or a scale above 2^7: once more, one by one
#pragma unroll 1
          for (int k = 0; k < SLOTS; k++) {
            const unsigned char *entry = bytes_at(keys, __shfl_sync(FULL_MASK, tile.place, 4 * k + lane / 8));
            if (!entry) continue;
#pragma unroll 1
            for (int i = 0; i < 8 * (HALF - side); i++) {
              const int panel = i / 8, column = i % 8;
              __nv_bfloat16 *chunk = reinterpret_cast<__nv_bfloat16 *>(smem + ((unsigned)(to - smem) ^ k % 2 * 64) + k * 4 * SWIZZLE_ROW_BYTES + panel * PANEL_BYTES);
              chunk[column] = to_bf16(load_entry_dim(entry, (side * HALF + panel) * SCALE_BLOCK + sub * 8 + column, D, R));
            }
          }
        fence_proxy_async();
        mbarrier_arrive_warp(barrier(FULL + 2 * stage + side));
        if (!SPLIT)
#pragma unroll
          for (int k = 0; k < SLOTS; k++) ask(after, part < 2, k);
      }
  }
  mbarrier_wait(barrier(Q_FREE), items & 1 ^ 1);
  if (thread == 0) work_of(items)->y = 0;
  mbarrier_arrive_warp(barrier(Q_FULL));
}

// ---- multiplying ----

// Starts s = queries x keys of a stage, in its use number `use`: 64 heads x 64 keys, the half first that is there first.
__device__ __forceinline__ void start_scores(float (&s)[32], int stage, int use) {
  const unsigned long long q = wgmma_k_major(shared_offset(smem) + AT_Q);
  const unsigned long long keys = wgmma_k_major(shared_offset(smem) + AT_KV + stage * TILE_BYTES);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int side = i ^ stage;
    mbarrier_wait(barrier(FULL + 2 * stage + side), use & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HALF * 4; k++) {
      const int further = (side * HALF + k / 4) * PANEL_BYTES + k % 4 * 32;
      wgmma_ss<64, false>(s, wgmma_further(q, further), wgmma_further(keys, further), i > 0 || k > 0);
    }
  }
  wgmma_commit();
  wgmma_keep(s);
}

// A stage as keys x 256 dims.
__device__ __forceinline__ unsigned long long sums_operand(int stage, int side) {
  return wgmma_mn_major(shared_offset(smem) + AT_KV + stage * TILE_BYTES + side * HALF * PANEL_BYTES, PANEL_BYTES);
}

// o += p x this warpgroup's dims of a stage, p in registers or in the owner's panels.
template <int PARTS>
__device__ __forceinline__ void start_own_sums(float (&o)[128], unsigned (&p)[PARTS][4][4], int stage, int side) {
  const unsigned long long values = sums_operand(stage, side);
  wgmma_keep(o);
#pragma unroll
  for (int part = 0; part < PARTS; part++) wgmma_keep(p[part]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int part = PARTS - 1; part >= 0; part--) 
      wgmma_rs<256, true>(o, p[part][k], wgmma_further(values, k * 16 * SWIZZLE_ROW_BYTES), true);
  wgmma_commit();
  wgmma_keep(o);
}

template <int PARTS> __device__ __forceinline__ void start_other_sums(float (&o)[128], int stage, int side) {
  const unsigned long long values = sums_operand(stage, side);
  const unsigned long long p = wgmma_k_major(shared_offset(smem) + AT_P + stage * 2 * PANEL_BYTES);
  wgmma_keep(o);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int part = PARTS - 1; part >= 0; part--)
      wgmma_ss<256, true>(o, wgmma_further(p, part * PANEL_BYTES + k * 32), wgmma_further(values, k * 16 * SWIZZLE_ROW_BYTES), true);
  wgmma_commit();
  wgmma_keep(o);
}

// What a thread knows of its two heads, rows g and g + 8 of its warp's 16: running maximum of log2(e) scale score, a whole
// number, and its part of the sum of p.
struct Running {
  float largest[2], sum[2];
};

// o *= factor of the row
__device__ __forceinline__ void rescale(float (&o)[128], const float (&factor)[2]) {
  if (!__any_sync(FULL_MASK, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] *= factor[i / 2 % 2];
}

// Masks scores and moves the maximum; factor is for what was summed before. t is the thread's place in its quad, which has a row.
__device__ __forceinline__ void move_largest(float (&s)[32], Running &run, float (&factor)[2], unsigned long long seen, float to_log2, int t) {
  if (seen != ~0ull) {
    seen >>= 2 * t;
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(seen >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
    largest = ceilf(fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2)) * to_log2);
    const float before = run.largest[r], now = largest > before + STALE ? largest : before;
    factor[r] = now == before ? 1.f : __uint_as_float((unsigned)(__float2int_rn(fmaxf(before - now, -127.f)) + 127) << 23);
    run.largest[r] = now;
  }
}

// Scores become p, in parts of bf16.
template <int PARTS>
__device__ __forceinline__ void exponentials(float (&s)[32], unsigned (&p)[PARTS][4][4], Running &run, const float (&factor)[2], float to_log2) {
  const float minus[2] = {run.largest[0] == -INFINITY ? 0.f : -run.largest[0], run.largest[1] == -INFINITY ? 0.f : -run.largest[1]};
  float added[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const int r = pair & 1, i = 8 * k + 2 * pair;
      const float low = exp2_fast(fmaf(s[i], to_log2, minus[r])), high = exp2_fast(fmaf(s[i + 1], to_log2, minus[r]));
      added[r] += low + high;
      p[0][k][pair] = pack_bf16_pair(low, high);
      if (PARTS == 2) p[PARTS - 1][k][pair] = pack_bf16_pair(low - bf16_low(p[0][k][pair]), high - bf16_high(p[0][k][pair]));
    }
#pragma unroll
  for (int r = 0; r < 2; r++) run.sum[r] = fmaf(run.sum[r], factor[r], added[r]);
}

// Where a lane's row of stmatrix_x4 lies for a warp's rows 0..15 and chunks `chunk`, `chunk` + 1 of a panel.
__device__ __forceinline__ unsigned char *matrix_row(unsigned char *panel, int first_row, int chunk, int lane) {
  return panel + swizzle_128(first_row + lane % 16, chunk + lane / 16);
}

// p times the factor of its row, a power of two, into the owner's panels; first_row is the warp's.
template <int PARTS, bool WHOLE>
__device__ __forceinline__ void hand_over(const unsigned (&p)[PARTS][4][4], const float (&factor)[2], int owner) {
  const int thread = computed_here(threadIdx.x % WARPGROUP), first_row = thread / WARP * 16;
  const unsigned factors[2] = {pack_bf16_pair(factor[0], factor[0]), pack_bf16_pair(factor[1], factor[1])};
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      unsigned scaled[4];
#pragma unroll
      for (int pair = 0; pair < 4; pair++)
        scaled[pair] = WHOLE ? p[part][k][pair] : multiply_bf16_pairs(p[part][k][pair], factors[pair % 2]);
      stmatrix_x4(matrix_row(smem + AT_P + (owner * 2 + part) * PANEL_BYTES, first_row, 2 * k, thread % WARP), scaled);
    }
  fence_proxy_async();
  mbarrier_arrive_warp(barrier(P_READY + owner));
}

__device__ __forceinline__ float2 *state_of(int owner, int row) { return reinterpret_cast<float2 *>(smem + AT_STATE) + owner * HEADS + row; }

// Maximum and factor, for the other warpgroup; it sees them after a barrier.
__device__ __forceinline__ void tell_largest(const Running &run, const float (&factor)[2], int owner, int row, int t) {
  if (t) return;
  state_of(owner, row)[0] = make_float2(run.largest[0], factor[0]);
  state_of(owner, row)[8] = make_float2(run.largest[1], factor[1]);
}

__device__ __forceinline__ void hear_largest(Running &run, float (&factor)[2], int owner, int row) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float2 state = state_of(owner, row)[8 * r];
    run.largest[r] = state.x;
    factor[r] = state.y;
    run.sum[r] *= state.y;
  }
}

__device__ __forceinline__ unsigned long long seen_keys(int stage) {
  return reinterpret_cast<const unsigned long long *>(smem + AT_SEEN)[stage];
}

// 2^(a - b) for b >= a, also where both are infinite.
__device__ __forceinline__ float exp2_below(float a, float b) { return a == b ? 1.f : exp2_fast(a - b); }

// Sums over the sink, and stores this warpgroup's 256 dims of up to 64 heads by way of its panels of p, which nobody reads now.
// Of a split: leaves them, and maximum and sum of exponentials.
template <bool SPLIT>
__device__ __forceinline__ void finish(const Call &call, const Item &item, bool is_part, float (&o)[128], Running &run, int side, int items) {
  const int thread = computed_here(threadIdx.x % WARPGROUP), lane = thread % WARP, t = lane % 4, first_row = thread / WARP * 16, row = first_row + lane / 4;
  float *sums = reinterpret_cast<float *>(smem + AT_SUMS) + (items & 1) * 2 * HEADS;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = warp_sum<4>(run.sum[r]);
    if (t == 0) sums[side * HEADS + row + 8 * r] = sum;
  }
  mbarrier_arrive_warp(barrier(SUMS_READY));
  mbarrier_wait(barrier(SUMS_READY), items & 1);
  if (SPLIT && is_part) {
    const long long own = ((long long)item.token * call.splits + item.split) * call.heads + item.head0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int head = row + 8 * r;
      if (head >= item.heads) continue;
      float *to = call.part_o + (own + head) * D + side * HALF * 64 + 2 * t;
#pragma unroll
      for (int j = 0; j < 32; j++) *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      if (side == 0 && t == 0)
        *reinterpret_cast<float2 *>(call.part_ml + (own + head) * 2) = make_float2(run.largest[r], sums[head] + sums[HEADS + head]);
    }
    return;
  }
  float scale[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int head = row + 8 * r;
    const float sink = head < item.heads ? call.sink[item.head0 + head] * LOG2E : 0.f;
    const float with_sink = fmaxf(run.largest[r], sink), share = exp2_below(run.largest[r], with_sink);
    scale[r] = share / fmaf(sums[head] + sums[HEADS + head], share, exp2_below(sink, with_sink));
  }
  unsigned char *panels = smem + AT_P + side * 2 * PANEL_BYTES;  // 2 panels: 128 dims a round; a warp uses its own 16 rows
  const bool aligned = (reinterpret_cast<unsigned long long>(call.out) | call.out_stride * 2) % 16 == 0;
  __nv_bfloat16 *out = call.out + item.token * call.out_stride + (long long)item.head0 * D + side * HALF * 64 + lane % 16 * 8;
#pragma unroll
  for (int round = 0; round < 2; round++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float *x = o + (round * 8 + j) * 8;
      const unsigned two_blocks[4] = {pack_bf16_pair(x[0] * scale[0], x[1] * scale[0]), pack_bf16_pair(x[2] * scale[1], x[3] * scale[1]),
                                      pack_bf16_pair(x[4] * scale[0], x[5] * scale[0]), pack_bf16_pair(x[6] * scale[1], x[7] * scale[1])};
      stmatrix_x4(matrix_row(panels + j / 4 * PANEL_BYTES, first_row, j % 4 * 2, lane), two_blocks);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const int head = first_row + i + lane / 16;
      const uint4 eight = *reinterpret_cast<const uint4 *>(panels + lane % 16 / 8 * PANEL_BYTES + swizzle_128(head, lane % 8));
      if (head < item.heads) store_8_bf16(out + (long long)head * D + round * 128, eight, aligned);
    }
    __syncwarp();
  }
}

// Warpgroup SIDE: the scores of tiles SIDE, SIDE + 2 .., and dims 256 SIDE .. of the sums.
template <int PARTS, int SIDE, bool SPLIT> __device__ __forceinline__ void multiply(const Call &call) {
  const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP, t = lane % 4, row = thread / WARP * 16 + lane / 4;
  const float to_log2 = call.scale * LOG2E;
  float o[128], s[32];
  unsigned p[PARTS][4][4];
  int uses = 0, items = 0;  // of both stages, queries
  while (true) {
    mbarrier_wait(barrier(Q_FULL), items & 1);
    const int pairs = work_of(items)->y;
    if (!pairs) return;
    Running run = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.f;
    for (int pair = 0; pair < pairs; pair++, uses++) {
      float own[2], other[2];  // factors
      start_scores(s, SIDE, uses);
      wgmma_wait<0>();
      wgmma_keep(s);
      if (pair + 1 == pairs) mbarrier_arrive_warp(barrier(Q_FREE));
      if (SIDE == 0) {
        move_largest(s, run, own, seen_keys(0), to_log2, t);
        tell_largest(run, own, 0, row, t);
        mbarrier_arrive_warp(barrier(LARGEST_READY));
        exponentials<PARTS>(s, p, run, own, to_log2);
        rescale(o, own);
        start_own_sums<PARTS>(o, p, 0, 0);
        mbarrier_wait(barrier(P_READY + 1), uses & 1);
        hear_largest(run, other, 1, row);
        hand_over<PARTS, false>(p, other, 0);
        wgmma_wait<0>();
        wgmma_keep(o);
        mbarrier_arrive_warp(barrier(FREE));
        rescale(o, other);
        start_other_sums<PARTS>(o, 1, 0);
        wgmma_wait<0>();
        wgmma_keep(o);
        mbarrier_arrive_warp(barrier(FREE + 2));
      } else {
        mbarrier_wait(barrier(LARGEST_READY), uses & 1);
        hear_largest(run, other, 0, row);
        move_largest(s, run, own, seen_keys(1), to_log2, t);
        tell_largest(run, own, 1, row, t);
        exponentials<PARTS>(s, p, run, own, to_log2);
#pragma unroll
        for (int r = 0; r < 2; r++) own[r] *= other[r];
        rescale(o, own);
        start_own_sums<PARTS>(o, p, 1, 1);
        hand_over<PARTS, true>(p, own, 1);
        mbarrier_wait(barrier(P_READY), uses & 1);
        start_other_sums<PARTS>(o, 0, 1);
        wgmma_wait<1>();
        mbarrier_arrive_warp(barrier(FREE + 3));
        wgmma_wait<0>();
        wgmma_keep(o);
        mbarrier_arrive_warp(barrier(FREE + 1));
      }
    }
    const int number = work_of(items)->x;
    const bool is_part = SPLIT && number < 0;
    finish<SPLIT>(call, item_of<SPLIT>(call, is_part ? ~number : number), is_part, o, run, SIDE, items);
    items++;
  }
}

template <int PARTS, bool SPLIT> __device__ __forceinline__ void attend(const Call &call) {
  if (threadIdx.x == 0) {
    if (shared_offset(smem) % SWIZZLE_ATOM_BYTES) __trap();
    for (int i = 0; i < 4; i++) {
      mbarrier_init(barrier(FULL + i), PRODUCER_WARPS);
      mbarrier_init(barrier(FREE + i), 4);
    }
    for (int i = 0; i < 3; i++) mbarrier_init(barrier(P_READY + i), 4);  // and LARGEST_READY
    mbarrier_init(barrier(Q_FULL), PRODUCER_WARPS);
    mbarrier_init(barrier(Q_FREE), 8);
    mbarrier_init(barrier(SUMS_READY), 8);
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    registers_up<CONSUMER_REGISTERS>();
    multiply<PARTS, 0, SPLIT>(call);
  } else if (warpgroup == 1) {
    registers_up<CONSUMER_REGISTERS>();
    multiply<PARTS, 1, SPLIT>(call);
  } else {
    registers_down<PRODUCER_REGISTERS>();
    load<SPLIT>(call);
  }
}

#ifndef WITHOUT_KERNELS  // bench/kernels/attention_profile.cu has its own
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_attn_wgmma(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries,
                  const int *selected, const int *position, const int *row, const float *sink, __nv_bfloat16 *out,
                  int *visible, int heads, int d, int r, int slots, int window, int listed, int capacity, int ratio,
                  float scale, long long q_stride, long long ring_row_stride, long long ring_slot_stride,
                  long long ring_position_stride, long long entries_row_stride, long long entry_stride,
                  long long selected_stride, long long out_stride, long long visible_stride, int tokens) {
  if (d != D || r != R) __trap();
  attend<2, false>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed,
             capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
             entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride, tokens, 1, nullptr, nullptr});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_attn_wgmma_p_bf16(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position,
                      const unsigned char *entries, const int *selected, const int *position, const int *row,
                      const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r, int slots, int window,
                      int listed, int capacity, int ratio, float scale, long long q_stride, long long ring_row_stride,
                      long long ring_slot_stride, long long ring_position_stride, long long entries_row_stride,
                      long long entry_stride, long long selected_stride, long long out_stride, long long visible_stride,
                      int tokens) {
  if (d != D || r != R) __trap();
  attend<1, false>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed,
             capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride,
             entries_row_stride, entry_stride, selected_stride, out_stride, visible_stride, tokens, 1, nullptr, nullptr});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_attn_wgmma_split(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries, const int *selected,
                        const int *position, const int *row, const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r,
                        int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
                        long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride,
                        long long entries_row_stride, long long entry_stride, long long selected_stride, long long out_stride,
                        long long visible_stride, int tokens, int splits, float *part_o, float *part_ml) {
  if (d != D || r != R) __trap();
  attend<2, true>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed,
                   capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride,
                   entry_stride, selected_stride, out_stride, visible_stride, tokens, splits, part_o, part_ml});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_attn_wgmma_split_p_bf16(const __nv_bfloat16 *q, const unsigned char *ring, const int *ring_position, const unsigned char *entries, const int *selected,
                        const int *position, const int *row, const float *sink, __nv_bfloat16 *out, int *visible, int heads, int d, int r,
                        int slots, int window, int listed, int capacity, int ratio, float scale, long long q_stride,
                        long long ring_row_stride, long long ring_slot_stride, long long ring_position_stride,
                        long long entries_row_stride, long long entry_stride, long long selected_stride, long long out_stride,
                        long long visible_stride, int tokens, int splits, float *part_o, float *part_ml) {
  if (d != D || r != R) __trap();
  attend<1, true>({q, ring, ring_position, entries, selected, position, row, sink, out, visible, heads, slots, window, listed,
                   capacity, ratio, scale, q_stride, ring_row_stride, ring_slot_stride, ring_position_stride, entries_row_stride,
                   entry_stride, selected_stride, out_stride, visible_stride, tokens, splits, part_o, part_ml});
}

extern "C" __global__ void __launch_bounds__(128)
sparse_attn_combine(const float *part_o, const float *part_ml, const float *sink, const int *position, __nv_bfloat16 *out,
                    int heads, int d, int splits, int window, int listed, int capacity, int ratio, long long out_stride) {
  combine_splits<true>(part_o, part_ml, sink, position, out, heads, d, splits, 2 * KEYS, window, listed, capacity, ratio, out_stride);
}
#endif
