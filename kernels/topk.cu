// topk.cu    selected[t] = the k entries of largest score among the (p + 1) / ratio visible ones, ascending, then -1
// twin     reference/attention.py::Indexer        tests  pytest parity/test_operations_attention.py -k topk
// tensors  score [T, E] fp32, rows score_stride elements apart; what lies beyond the visible entries is never read
//          position [T] i32, -1 = pad: its row stays untouched | selected [T, k] i32, rows selected_stride apart
// numerics exact: scores are compared by all 32 bits (-0 = +0, -inf is the smallest number, a positive NaN the largest), ties go to
//          the lower entry. No candidate buffer, so no limit on clustered scores; integer counts, so no thread order shows
// launch   naive: grid = ceil(T / 32), block = 32 | radix: grid = T, block = 256 | E up to 2^31 / 256
//          stream: grid = T * parts, block = 512, parts <= 32, dynamic shared memory 4 * (2048 + 2 * (room + 16 * block)) bytes,
//          room >= k + SPARE; parts > 1: counters [T] i32, zero before the launch and after it, and lists
//          [T, parts, 4 + 2 * capacity] i32, capacity = 2 k + SPARE up to a multiple of 4, 16-byte aligned, any content
// variants 0 naive: a thread per row counts the better entries of each entry, kept as second oracle
//          1 radix (default): four histograms of 8 bits find the k-th score, then one ordered pass writes
//          2 stream: reads a row once. Each of `parts` blocks walks over its share, tile by tile, and keeps in shared memory,
//            in order, what may still be among the k best: keys of at least a bound that rises. The bound of a long row is a
//            guess: the key that GENEROUS * k entries would reach, were the row like four times `block` of its entries, taken
//            evenly. That of a short row is the k-th largest maximum of four of the first tile. Whenever the buffer is full, it
//            is the k-th largest key kept. The last block of a row to finish (a counter) walks over the lists of all parts in
//            the same way, then cuts exactly; should fewer than k have reached the guess, it walks over the whole row without.
//            The result is the exact set whatever the bounds were, so neither the parts nor who finishes last show
#include "common.cuh"

constexpr int THREADS = 256, BINS = 256, WARPS = THREADS / WARP;

// Unsigned order = order of the scores.
__device__ __forceinline__ unsigned sort_key(float score) {
  const unsigned bits = __float_as_uint(score + 0.f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int visible_entries(int p, int ratio, int E) { return min((p + 1) / ratio, E); }

extern "C" __global__ void __launch_bounds__(32)
topk_naive(const float *score, const int *position, int *selected, int T, int E, int k, int ratio, long long score_stride,
           long long selected_stride) {
  const int token = blockIdx.x * 32 + threadIdx.x;
  if (token >= T || position[token] < 0) return;
  const float *row = score + token * score_stride;
  int *out = selected + token * selected_stride;
  const int seen = visible_entries(position[token], ratio, E);
  int written = 0;
  for (int e = 0; e < seen; e++) {
    const unsigned key = sort_key(row[e]);
    int better = 0;
    for (int other = 0; other < seen; other++) {
      const unsigned its_key = sort_key(row[other]);
      better += its_key > key || (its_key == key && other < e);
    }
    if (better < k) out[written++] = e;
  }
  while (written < k) out[written++] = -1;
}

// Sum of v over the threads before this one. All threads call.
__device__ __forceinline__ int exclusive_sum(int v, int *warp_totals) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int inclusive = v;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == WARP - 1) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = inclusive - v;
  for (int w = 0; w < warp; w++) before += warp_totals[w];
  return before;
}

extern "C" __global__ void __launch_bounds__(THREADS)
topk_radix(const float *score, const int *position, int *selected, int E, int k, int ratio, long long score_stride,
           long long selected_stride) {
  __shared__ int histogram[BINS], warp_totals[3][WARPS];
  __shared__ unsigned chosen_bin;
  __shared__ int chosen_rest;
  const int token = blockIdx.x, tid = threadIdx.x, p = position[token];
  if (p < 0) return;
  const float *row = score + token * score_stride;
  int *out = selected + token * selected_stride;
  const int seen = visible_entries(p, ratio, E);
  if (seen <= k) {  // the whole block: every visible entry
    for (int i = tid; i < k; i += THREADS) out[i] = i < seen ? i : -1;
    return;
  }

  unsigned prefix = 0, known = 0;  // the high bits of the k-th largest key, and their mask
  int rest = k;                    // how many keys with that prefix are still to be taken
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[tid] = 0;
    __syncthreads();
    for (int e = tid; e < seen; e += THREADS) {
      const unsigned key = sort_key(row[e]);
      if ((key & known) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1);
    }
    __syncthreads();
    const int bin = BINS - 1 - tid;  // thread 0 has the largest keys
    const int here = histogram[bin], above = exclusive_sum(here, warp_totals[0]);
    if (above < rest && above + here >= rest) {  // exactly one thread
      chosen_bin = bin;
      chosen_rest = rest - above;
    }
    __syncthreads();
    prefix |= chosen_bin << shift;
    known |= 255u << shift;
    rest = chosen_rest;
  }

  // Keys above the k-th, and the first `rest` equal to it. Each thread owns a run of entries, so the order is kept.
  const int run = (seen + THREADS - 1) / THREADS, begin = min(tid * run, seen), end = min(begin + run, seen);
  int larger = 0, equal = 0;
  for (int e = begin; e < end; e++) {
    const unsigned key = sort_key(row[e]);
    larger += key > prefix;
    equal += key == prefix;
  }
  const int equal_before = exclusive_sum(equal, warp_totals[1]);
  const int larger_before = exclusive_sum(larger, warp_totals[2]);
  int ties = equal_before, written = larger_before + min(equal_before, rest);
  for (int e = begin; e < end; e++) {
    const unsigned key = sort_key(row[e]);
    if (key > prefix || (key == prefix && ties++ < rest)) out[written++] = e;
  }
}

// ---- variant 2 ----

constexpr int BLOCK = 512;
constexpr int QUADS = 4, HELD = 4 * QUADS;              // a thread holds four times four neighbours of a tile
constexpr int FINE_BINS = 2048, FINE_BITS = 11;         // of a histogram over the keys' own range
constexpr int SPARE = 512, FEW = 256, MOST_PARTS = 32;  // kept beyond k by a quick cut; keys compared one by one; a warp holds the parts
constexpr int GENEROUS = 4, SPARSE = 2;                 // entries to reach a guessed bound, in k; of a thread, stored one by one
constexpr int LEAST_RANK = 16;                          // of a guess among its samples: of fewer it would be chance
constexpr int ALL = 0x7fffffff;

extern __shared__ __align__(16) unsigned stream_memory[];

// What is kept of some keys: those above `low`, and the first `ties` equal to it.
struct Cut {
  unsigned low;
  int ties;
};

struct Bin {
  int number, above, here;  // keys in higher bins, and in this one
};

struct StreamShared {
  int scan[WARP], tile[2][WARP], kept[2][WARP];  // totals of the warps; two in turn, so that one barrier a round is enough
  unsigned lowest[WARP], highest[WARP], few[FEW];
  int few_count, last;
  Bin bin;
  Cut cut;
  int start[MOST_PARTS + 1], count[MOST_PARTS], counted;  // lists of the parts: first quad, entries; entries of all
  unsigned bound;
};

__device__ __forceinline__ float score_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ int inclusive_in_warp(int v) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

struct Stream {
  static constexpr int WARPS_HERE = BLOCK / WARP, TILE_QUADS = BLOCK * QUADS, TILE = BLOCK * HELD;
  StreamShared &s;
  int *histogram;   // [FINE_BINS]
  unsigned *keys;   // [room + TILE], in the order of the entries
  int *entries;
  int tid, lane, warp;

  __device__ __forceinline__ Stream(StreamShared &shared, int room) : s(shared) {
    histogram = reinterpret_cast<int *>(stream_memory);
    keys = stream_memory + FINE_BINS;
    entries = reinterpret_cast<int *>(keys + room + TILE);
    tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  }

  // The quad of a tile that is this thread's j-th: quads of a warp are neighbours, ascending in j, then in the lane.
  __device__ __forceinline__ int quad(int j) const { return warp * WARP * QUADS + j * WARP + lane; }

  // Of the warps' totals: sum before this warp, and of all.
  __device__ __forceinline__ int before(const int *totals) const { return __reduce_add_sync(FULL_MASK, lane < warp ? totals[lane] : 0); }
  __device__ __forceinline__ int all(const int *totals) const { return __reduce_add_sync(FULL_MASK, lane < WARPS_HERE ? totals[lane] : 0); }

  __device__ __forceinline__ void clear_histogram() const {
#pragma unroll
    for (int i = 0; i < FINE_BINS / BLOCK; i++) histogram[tid + i * BLOCK] = 0;
  }

  // The highest bin with at least `rank` keys in it and above. The histogram is complete; ends with a barrier.
  __device__ __forceinline__ Bin find_bin(int rank) const {
    constexpr int OWN = FINE_BINS / BLOCK;
    const int first = FINE_BINS - OWN * (tid + 1);  // thread 0 has the largest keys
    int here[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) sum += here[i] = histogram[first + i];
    const int inclusive = inclusive_in_warp(sum);
    if (lane == WARP - 1) s.scan[warp] = inclusive;
    __syncthreads();
    int above = inclusive - sum + before(s.scan);
    if (above < rank && above + sum >= rank) {  // exactly one thread
#pragma unroll
      for (int i = OWN - 1; i >= 0; i--) {
        if (above < rank && above + here[i] >= rank) s.bin = {first + i, above, here[i]};
        above += here[i];
      }
    }
    __syncthreads();
    return s.bin;
  }

  // A bound that at least `rank` of the block's keys reach, or next to no more: the rank-th largest, rounded down. Each thread
  // brings some, and the smallest (~0: none) and the largest to be counted; at least `rank` are not below the smallest of all.
  __device__ __forceinline__ unsigned bound_of(const unsigned (&some)[QUADS], unsigned low, unsigned high, int rank) const {
    low = __reduce_min_sync(FULL_MASK, low);
    high = __reduce_max_sync(FULL_MASK, high);
    if (lane == 0) s.lowest[warp] = low, s.highest[warp] = high;
    clear_histogram();
    __syncthreads();
    low = __reduce_min_sync(FULL_MASK, lane < WARPS_HERE ? s.lowest[lane] : ~0u);
    high = __reduce_max_sync(FULL_MASK, lane < WARPS_HERE ? s.highest[lane] : 0u);
    const int shift = max(0, WARP - __clz((int)(high - low)) - FINE_BITS);
#pragma unroll
    for (int j = 0; j < QUADS; j++)
      if (some[j] >= low) atomicAdd(&histogram[(some[j] - low) >> shift], 1);
    __syncthreads();
    return low + ((unsigned)find_bin(rank).number << shift);
  }

  // Of the first tile: the k-th largest of the maxima of its quads, k <= quads. owned: as for append; a quad counts if it has an entry.
  __device__ __forceinline__ unsigned bound_of_tile(const float (&scores)[HELD], unsigned owned, int k) const {
    unsigned best[QUADS], low = ~0u, high = 0u;
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
      best[j] = 0u;
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (owned >> (4 * j + c) & 1u) best[j] = max(best[j], sort_key(scores[4 * j + c]));
      if (owned >> 4 * j & 15u) low = min(low, best[j]), high = max(high, best[j]);
    }
    return bound_of(best, low, high, k);
  }

  // The rank-th largest of samples, four a thread, rank <= BLOCK / 4: each four threads have one that is counted.
  __device__ __forceinline__ unsigned bound_of_samples(float4 sample, int rank) const {
    const unsigned some[QUADS] = {sort_key(sample.x), sort_key(sample.y), sort_key(sample.z), sort_key(sample.w)};
    unsigned best = max(max(some[0], some[1]), max(some[2], some[3]));
    best = max(best, __shfl_xor_sync(FULL_MASK, best, 1));
    best = max(best, __shfl_xor_sync(FULL_MASK, best, 2));
    return bound_of(some, best, best, rank);
  }

  // Of `count` kept keys, at least k of them not below low: the cut that leaves the k largest, or sooner one that leaves k to
  // `most` of them.
  __device__ __forceinline__ Cut select(int count, int k, int most, unsigned low) const {
    __syncthreads();  // the keys are there
    unsigned largest = low;
    for (int i = tid; i < count; i += BLOCK) largest = max(largest, keys[i]);
    largest = __reduce_max_sync(FULL_MASK, largest);
    if (lane == 0) s.highest[warp] = largest;
    unsigned span = 0;
    int rest = k;
    for (bool first = true;; first = false) {
      clear_histogram();
      if (tid == 0) s.few_count = 0;
      __syncthreads();
      if (first) span = __reduce_max_sync(FULL_MASK, lane < WARPS_HERE ? s.highest[lane] : 0u) - low;
      const int shift = max(0, WARP - __clz((int)span) - FINE_BITS);
      for (int i = tid; i < count; i += BLOCK) {
        const unsigned offset = keys[i] - low;
        if (offset <= span) atomicAdd(&histogram[offset >> shift], 1);
      }
      __syncthreads();
      const Bin bin = find_bin(rest);
      low += (unsigned)bin.number << shift;
      span = (1u << shift) - 1u;
      rest -= bin.above;
      if (k - rest + bin.here <= most) return {low, ALL};
      if (shift == 0) return {low, rest};
      if (bin.here <= FEW) break;
    }
    for (int i = tid; i < count; i += BLOCK)
      if (keys[i] - low <= span) s.few[atomicAdd(&s.few_count, 1)] = keys[i];
    __syncthreads();
    const int few = s.few_count;
    if (tid < few) {
      const unsigned mine = s.few[tid];
      int larger = 0, equal = 0, twins_before = 0;
      for (int i = 0; i < few; i++) {
        larger += s.few[i] > mine;
        equal += s.few[i] == mine;
        twins_before += s.few[i] == mine && i < tid;
      }
      if (twins_before == 0 && larger < rest && larger + equal >= rest) s.cut = {mine, rest - larger};  // exactly one thread
    }
    __syncthreads();
    return s.cut;
  }

  // Moves what the cut leaves of `count` entries to the front, in order. Returns how many.
  __device__ __forceinline__ int keep(int count, Cut cut) const {
    int larger = 0, equal = 0;  // of the rounds before
    for (int base = 0, turn = 0; base < count; base += TILE_QUADS, turn ^= 1) {
      unsigned key[QUADS], above[QUADS], same[QUADS];
      int entry[QUADS], packed = 0;
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const int i = base + quad(j);
        const bool there = i < count;
        key[j] = there ? keys[i] : 0u;
        entry[j] = there ? entries[i] : 0;
        above[j] = __ballot_sync(FULL_MASK, there && key[j] > cut.low);
        same[j] = __ballot_sync(FULL_MASK, there && key[j] == cut.low);
        packed += __popc(above[j]) | __popc(same[j]) << 16;
      }
      if (lane == 0) s.kept[turn][warp] = packed;
      __syncthreads();  // all of the round is in registers, and is written at its own place or before
      const int earlier = before(s.kept[turn]), whole = all(s.kept[turn]);
      int larger_before = larger + (earlier & 0xffff), equal_before = equal + (earlier >> 16);
      const unsigned lower_lanes = (1u << lane) - 1u;
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const int ties = equal_before + __popc(same[j] & lower_lanes);
        const bool kept = (above[j] >> lane & 1u) || ((same[j] >> lane & 1u) && ties < cut.ties);
        const int at = larger_before + __popc(above[j] & lower_lanes) + min(ties, cut.ties);
        if (kept) keys[at] = key[j], entries[at] = entry[j];
        larger_before += __popc(above[j]);
        equal_before += __popc(same[j]);
      }
      larger += whole & 0xffff;
      equal += whole >> 16;
    }
    return larger + min(equal, cut.ties);
  }

  // Adds the tile's entries of `mask` (bit 4 j + c: entry c of this thread's j-th quad) behind the `count` kept ones.
  // place: of the thread's first entry; what is kept of an entry is its score's key and its place.
  __device__ __forceinline__ int append(unsigned mask, const float (&scores)[HELD], int place, int count, int turn) const {
    unsigned counts = 0, earlier = 0, totals = 0;  // a byte per j: at most 128
    const bool sparse = !__any_sync(FULL_MASK, __popc(mask) > SPARSE);
    if (__any_sync(FULL_MASK, mask != 0u)) {
#pragma unroll
      for (int j = 0; j < QUADS; j++) counts |= (unsigned)__popc(mask >> 4 * j & 15u) << 8 * j;
      const unsigned inclusive = (unsigned)inclusive_in_warp((int)counts);
      totals = __shfl_sync(FULL_MASK, inclusive, WARP - 1);
      earlier = inclusive - counts;
    }
    if (lane == 0) s.tile[turn][warp] = (int)((totals & 0xffu) + (totals >> 8 & 0xffu) + (totals >> 16 & 0xffu) + (totals >> 24));
    __syncthreads();
    int quad_start = count + before(s.tile[turn]);
    count += all(s.tile[turn]);
    if (sparse) {
      const int second = (int)(totals & 0xffu), third = second + (int)(totals >> 8 & 0xffu), fourth = third + (int)(totals >> 16 & 0xffu);
#pragma unroll 1
      for (unsigned rest = mask; rest != 0u; rest &= rest - 1u) {
        const int i = __ffs((int)rest) - 1, j = i >> 2;
        float of_8[8], of_4[4], of_2[2];  // registers have no run-time index
#pragma unroll
        for (int n = 0; n < 8; n++) of_8[n] = i & 8 ? scores[n + 8] : scores[n];
#pragma unroll
        for (int n = 0; n < 4; n++) of_4[n] = i & 4 ? of_8[n + 4] : of_8[n];
#pragma unroll
        for (int n = 0; n < 2; n++) of_2[n] = i & 2 ? of_4[n + 2] : of_4[n];
        const int start = quad_start + (j & 2 ? j & 1 ? fourth : third : j & 1 ? second : 0) + (int)(earlier >> 8 * j & 0xffu);
        const int at = start + __popc(mask >> 4 * j & ((1u << (i & 3)) - 1u));
        keys[at] = sort_key(i & 1 ? of_2[1] : of_2[0]);
        entries[at] = place + 4 * j * WARP + (i & 3);
      }
    } else if (mask) {
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        int at = quad_start + (int)(earlier >> 8 * j & 0xffu);
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int i = 4 * j + c;
          if (mask >> i & 1u) {
            keys[at] = sort_key(scores[i]);
            entries[at++] = place + 4 * j * WARP + c;
          }
        }
        quad_start += (int)(totals >> 8 * j & 0xffu);
      }
    }
    return count;
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2)
topk_stream(const float *score, const int *position, int *selected, int *counters, int *lists, int E, int k, int ratio, int parts,
            int room, long long score_stride, long long selected_stride) {
  __shared__ StreamShared shared;
  const Stream s(shared, room);
  const int token = blockIdx.x / parts, part = blockIdx.x % parts, tid = s.tid, p = position[token];
  if (p < 0) return;
  const int seen = visible_entries(p, ratio, E);
  int *out = selected + token * selected_stride;
  if (seen <= k) {  // every visible entry
    if (part == 0)
      for (int i = tid; i < k; i += BLOCK) out[i] = i < seen ? i : -1;
    return;
  }
  // Entries are counted from the 16-byte boundary at or below the row, so that whole quads are one access.
  const float *row = score + token * score_stride;
  const int lead = (int)((size_t)row >> 2 & 3u), total = lead + seen;
  const int asked = min(parts, ceil_div(total, Stream::TILE)), width = ceil_div(ceil_div(total, asked), 4) * 4;
  if (part >= asked) return;
  int active = asked, first = part * width, end = min(first + width, total);
  // A list: its length and a bound that k of its keys reach, then scores, then entries.
  const int capacity = ceil_div(2 * k + SPARE, 4) * 4, list_size = 4 + 2 * capacity;
  lists += (long long)token * parts * list_size;

  bool merging = false;                // the last block of the row walks over the lists of all parts
  int quads = ceil_div(end - first, 4);
  int rank = max(LEAST_RANK, (int)(((long long)GENEROUS * k * 4 * BLOCK + seen - 1) / seen));  // of the guess; 0: none
  if (rank > BLOCK / 4) rank = 0;
  unsigned low = 0u, accepted = 0u;    // at least k keys seen reach low, unless it is 0 or the guess; keys from `accepted` on are kept
  int count = 0;
  float next[HELD];
  unsigned next_owned = 0u;            // bit 4 j + c: entry c of quad j exists
  auto whose_list = [&](int quad) {  // the part whose list has it
    int whose = 0;
#pragma unroll
    for (int step = MOST_PARTS / 2; step > 0; step /= 2)
      if (whose + step < active && shared.start[whose + step] <= quad) whose += step;
    return whose;
  };
  auto load = [&](int tile) {
    const int begin = first + 4 * tile * Stream::TILE_QUADS;
    if (!merging && begin >= lead && begin + Stream::TILE <= end) {  // most tiles: nothing to look at
      next_owned = (1u << HELD) - 1u;
      const int at = begin - lead + 4 * s.quad(0);
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const float4 v = __ldcg(reinterpret_cast<const float4 *>(row + at) + j * WARP);
        next[4 * j] = v.x, next[4 * j + 1] = v.y, next[4 * j + 2] = v.z, next[4 * j + 3] = v.w;
      }
      return;
    }
    next_owned = 0u;
    int from_at[QUADS];  // place of a quad: in the row, or of its scores in the lists
    if (merging) {
      int whose[QUADS];
#pragma unroll
      for (int j = 0; j < QUADS; j++) whose[j] = whose_list(tile * Stream::TILE_QUADS + s.quad(j));
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const int q = tile * Stream::TILE_QUADS + s.quad(j), offset = 4 * (q - shared.start[whose[j]]);
        from_at[j] = whose[j] * list_size + 4 + offset;
        if (q < quads) next_owned |= ((1u << min(4, shared.count[whose[j]] - offset)) - 1u) << 4 * j;
      }
    } else {
#pragma unroll
      for (int j = 0; j < QUADS; j++) {
        const int at = first + 4 * (tile * Stream::TILE_QUADS + s.quad(j));
        from_at[j] = at - lead;
        if (at >= lead && at + 4 <= end) next_owned |= 15u << 4 * j;
        else
#pragma unroll
          for (int c = 0; c < 4; c++) next_owned |= (unsigned)(at + c >= lead && at + c < end) << (4 * j + c);
      }
    }
    const float *source = merging ? reinterpret_cast<const float *>(lists) : row;
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
      const float *from = source + from_at[j];
      const unsigned owned = next_owned >> 4 * j & 15u;
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (owned == 15u) v = __ldcg(reinterpret_cast<const float4 *>(from));
      else {
        if (owned & 1u) v.x = __ldcg(from);
        if (owned & 2u) v.y = __ldcg(from + 1);
        if (owned & 4u) v.z = __ldcg(from + 2);
        if (owned & 8u) v.w = __ldcg(from + 3);
      }
      next[4 * j] = v.x, next[4 * j + 1] = v.y, next[4 * j + 2] = v.z, next[4 * j + 3] = v.w;
    }
  };

  for (;;) {
    const bool delivers = active > 1 && !merging;
    const int tiles = ceil_div(quads, Stream::TILE_QUADS);
    for (int tile = -1; tile < tiles; tile++) {
      float now[HELD];
      const unsigned owned = next_owned;
#pragma unroll
      for (int i = 0; i < HELD; i++) now[i] = next[i];
      const bool guesses = tile < 0 && rank && !merging;
      float4 sample = {0.f, 0.f, 0.f, 0.f};
      if (guesses) {  // whole quads: neither the first nor the last. Asked for before the first tile
        const int sampled = 1 + (int)((long long)tid * (total / 4 - 1) / BLOCK);
        sample = __ldcg(reinterpret_cast<const float4 *>(row - lead + 4 * sampled));
      }
      if (tile + 1 < tiles) load(tile + 1);
      if (guesses) low = accepted = s.bound_of_samples(sample, rank);
      if (tile < 0) continue;
      if (tile == 0 && !rank && min(quads, Stream::TILE_QUADS) >= k) low = accepted = max(low, s.bound_of_tile(now, owned, k));
      const float bound = score_of(accepted);
      unsigned mask = 0u;
      if (bound == bound) {  // a score is one comparison; a NaN passes, and a cut decides by its key
#pragma unroll
        for (int i = 0; i < HELD; i++) mask |= (unsigned)!(now[i] < bound) << i;
      } else {
#pragma unroll
        for (int i = 0; i < HELD; i++) mask |= (unsigned)(sort_key(now[i]) >= accepted) << i;
      }
      // places are counted from the row, or along all lists in whole quads
      const int place = (merging ? 0 : first - lead) + 4 * (tile * Stream::TILE_QUADS + s.quad(0));
      count = s.append(mask & owned, now, place, count, tile & 1);
      const bool ends = tile + 1 == tiles;
      if (count > (!ends ? room : delivers ? capacity : k - 1)) {
        const Cut cut = s.select(count, k, ends && !delivers ? k : k + SPARE, low);
        count = s.keep(count, cut);
        low = cut.low;
        accepted = low + (low != ~0u);  // k earlier entries reach low: a later one equal to it loses
      }
    }
    __syncthreads();
    if (!delivers) {
      if (count >= k || !rank) break;
      rank = 0, count = 0;  // too few reached the guess
      low = accepted = 0u;
      continue;
    }

    int *list = lists + part * list_size;
    if (tid == 0) list[0] = count, list[1] = (int)low;
    for (int i = tid; i < count; i += BLOCK) {
      list[4 + i] = __float_as_int(score_of(s.keys[i]));
      list[4 + capacity + i] = s.entries[i];
    }
    __syncthreads();
    if (tid == 0) {
      __threadfence();  // the whole list is seen by who sees the counter
      shared.last = atomicAdd(&counters[token], 1) == active - 1;
      if (shared.last) counters[token] = 0;
    }
    __syncthreads();  // lists are read past the L1
    if (!shared.last) return;
    if (s.warp == 0) {
      const int *its_list = lists + s.lane * list_size;
      const int its_count = s.lane < active ? __ldcg(its_list) : 0, inclusive = inclusive_in_warp(ceil_div(its_count, 4));
      const unsigned its_low = s.lane < active ? (unsigned)__ldcg(its_list + 1) : 0u, highest = __reduce_max_sync(FULL_MASK, its_low);
      shared.count[s.lane] = its_count;
      shared.start[s.lane + 1] = inclusive;
      const int counted = __reduce_add_sync(FULL_MASK, its_count);
      if (s.lane == 0) shared.start[0] = 0, shared.bound = highest, shared.counted = counted;
    }
    __syncthreads();
    count = 0;
    merging = shared.counted >= k;
    if (merging) {
      quads = shared.start[active];
      low = accepted = shared.bound;  // of one part, so it holds for the row
    } else {  // too few reached the guess
      active = 1, first = 0, end = total, quads = ceil_div(total, 4);
      rank = 0;
      low = accepted = 0u;
    }
  }
  for (int i = tid; i < k; i += BLOCK) {
    int entry = s.entries[i];
    if (merging) {
      const int whose = whose_list(entry / 4);
      entry = __ldcg(lists + whose * list_size + 4 + capacity + entry - 4 * shared.start[whose]);
    }
    out[i] = entry;
  }
}
