/* Exact top-k of magnitudes by radix selection in two passes over the input.
 *
 * The first counts the upper 12 bits of all keys. The second knows in which of these bins the threshold lies: it writes a
 * bit for every key above that bin, another for every key in it (a few percent of ordinary numbers), and counts the next
 * 10 bits of the latter. The last 9 bits are counted, ties settled and indices written from the bits alone. A row's counts
 * are summed up by the last of its blocks, not by a launch of its own: at a few million numbers, launches that wait for each
 * other take most of the time.
 *
 * Rows that fit in a block's shared memory are read once, and need no other memory. */
#include "platform.h"

namespace mcc {
namespace cuda {

constexpr int kBins = 4096, kThreads = 256, kEach = 8;
constexpr int kPart = kThreads; /* words of 32 bits that a block takes: one for each thread */
constexpr int kShort = 4096, kShortBins = 2048;

/* Everything that is not finite is one largest value. */
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t u = bits_of(x) & 0x7fffffffu;
  return u < 0x7f800000u ? u : 0x7f800000u;
}

/* What is known of a row's threshold so far. */
struct Selection {
  uint32_t prefix;   /* its upper bits */
  uint32_t need;     /* place of the threshold among the keys with this prefix, from above, counted from 1 */
};

/* A row's keys above the threshold and in its bin, by bits: ``words`` for each row. */
struct Bits {
  uint32_t *above, *equal;
  int64_t words;
};

/* What the blocks of a row share, for each row. */
struct Search {
  Selection *found;
  uint32_t *bins;    /* kBins of them: empty at the start of each level */
  uint32_t *tickets; /* see last_block */
};

/* Bits that a level adds to the prefix. */
template <int kLevel>
constexpr int kWidth = kLevel == 0 ? 12 : kLevel == 1 ? 10 : 9;

/* The bin in which the wanted place lies, from the bins of all of the row's blocks, which become empty for the next level. */
template <int kLevel>
__device__ __forceinline__ void narrow(const Selection &known, uint32_t *bins, Selection *found) {
  __shared__ uint32_t room[33];
  constexpr int kShare = kLevel == 0 ? 16 : 4; /* half of the threads have empty bins at the last level */
  static_assert(kShare * kThreads >= 1 << kWidth<kLevel>, "each bin is a thread's");
  /* The threads count from the highest bins down. */
  const int first = (kThreads - 1 - threadIdx.x) * kShare;
  uint4 *own = reinterpret_cast<uint4 *>(bins + first);
  uint32_t share[kShare], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kShare; j += 4) {
    const uint4 four = __ldcg(own + j / 4);
    share[j] = four.x, share[j + 1] = four.y, share[j + 2] = four.z, share[j + 3] = four.w;
    sum += four.x + four.y + four.z + four.w;
    if (kLevel < 2) own[j / 4] = make_uint4(0, 0, 0, 0); /* the row's other blocks have added theirs */
  }
  const uint32_t higher = block_scan(sum, room, total);
  if (higher < known.need && known.need <= higher + sum) {
    uint32_t rest = known.need - higher;
    int bin = kShare - 1;
#pragma unroll
    for (int j = kShare - 1; j > 0; --j) {
      if (bin != j || share[j] >= rest) continue;
      rest -= share[j];
      bin = j - 1;
    }
    found->prefix = (known.prefix << kWidth<kLevel>) | uint32_t(first + bin);
    found->need = rest;
  }
}

/* Adds a block's bins to the row's. Its last block narrows the row: no other one reads ``found`` behind its ticket. */
template <int kLevel>
__device__ __forceinline__ void add_bins(const uint32_t *own, int64_t row, int64_t blocks, const Selection &known,
                                         const Search &search) {
  uint32_t *bins = search.bins + row * kBins;
  for (int b = threadIdx.x; b < 1 << kWidth<kLevel>; b += kThreads)
    if (own[b]) atomicAdd(&bins[b], own[b]);
  if (last_block(search.tickets + row, uint32_t(blocks))) narrow<kLevel>(known, bins, search.found + row);
}

/* A block's part of a row, by its upper 12 bits. */
template <int kPack>
__device__ __forceinline__ void count_span(const float *x, int64_t begin, int64_t end, uint32_t *own) {
  constexpr int kStep = kPack * kThreads;
  int64_t i = begin + threadIdx.x * kPack;
  for (; i + (kEach / kPack - 1) * kStep + kPack <= end; i += kEach * kThreads) {
    float v[kEach];
#pragma unroll
    for (int j = 0; j < kEach / kPack; ++j) read_pack<kPack>(x, MCC_FP32, i + j * kStep, v + j * kPack);
#pragma unroll
    for (int j = 0; j < kEach; ++j) atomicAdd(&own[key_of(v[j]) >> 19], 1u);
  }
  for (; i < end; i += kStep)
    for (int64_t j = i; j < i + kPack && j < end; ++j) atomicAdd(&own[key_of(x[j]) >> 19], 1u);
}

__global__ void count_high(const float *x, int64_t n, int64_t spans, int64_t span, uint32_t count, Search search) {
  __shared__ uint32_t own[kBins];
  const int64_t row = blockIdx.x / spans, begin = blockIdx.x % spans * span;
  const int64_t end = begin + span < n ? begin + span : n;
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) own[b] = 0;
  __syncthreads();
  x += row * n;
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0)
    count_span<4>(x, begin, end, own);
  else
    count_span<1>(x, begin, end, own);
  __syncthreads();
  add_bins<0>(own, row, spans, {0, count}, search);
}

/* Part of a row: a warp takes 32 words in turn, and each of its lanes keeps one. */
__global__ void split(const float *x, int64_t n, int64_t parts, Bits bits, Search search) {
  __shared__ uint32_t own[1 << 10];
  const int64_t row = blockIdx.x / parts, first = blockIdx.x % parts * kPart + threadIdx.x / kWarp * kWarp;
  const int lane = threadIdx.x % kWarp;
  const Selection known = search.found[row];
  const uint32_t bin = known.prefix;
  for (int b = threadIdx.x; b < 1 << 10; b += blockDim.x) own[b] = 0;
  __syncthreads();
  x += row * n;
  uint32_t above = 0, equal = 0;
#pragma unroll 1
  for (int u = 0; u < kWarp; u += kEach) {
    uint32_t keys[kEach];
    const int64_t begin = (first + u) * kWarp + lane;
#pragma unroll
    for (int j = 0; j < kEach; ++j) keys[j] = begin + j * kWarp < n ? key_of(x[begin + j * kWarp]) : 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool inside = begin + j * kWarp < n, same = inside && keys[j] >> 19 == bin;
      const unsigned high = __ballot_sync(kAll, inside && keys[j] >> 19 > bin), level = __ballot_sync(kAll, same);
      if (lane == u + j) {
        above = high;
        equal = level;
      }
      if (same) atomicAdd(&own[(keys[j] >> 9) & 1023u], 1u);
    }
  }
  if (first + lane < bits.words) {
    bits.above[row * bits.words + first + lane] = above;
    bits.equal[row * bits.words + first + lane] = equal;
  }
  __syncthreads();
  add_bins<1>(own, row, parts, known, search);
}

/* The last 9 bits of the keys in the threshold's bin. */
__global__ void count_low(const float *x, int64_t n, int64_t parts, Bits bits, Search search) {
  __shared__ uint32_t own[1 << 9];
  const int64_t row = blockIdx.x / parts, word = blockIdx.x % parts * kPart + threadIdx.x;
  const Selection known = search.found[row];
  for (int b = threadIdx.x; b < 1 << 9; b += blockDim.x) own[b] = 0;
  __syncthreads();
  uint32_t left = word < bits.words ? bits.equal[row * bits.words + word] : 0;
  for (; left; left &= left - 1) {
    const uint32_t key = key_of(x[row * n + word * kWarp + __ffs(int(left)) - 1]);
    if (key >> 9 == known.prefix) atomicAdd(&own[key & 511u], 1u);
  }
  __syncthreads();
  add_bins<2>(own, row, parts, known, search);
}

/* A row's counts by parts become the counts of the parts before. */
__device__ __forceinline__ void sum_parts(int64_t parts, uint32_t *above, uint32_t *equal) {
  __shared__ uint32_t room[33];
  uint32_t before_more = 0, before_same = 0;
  for (int64_t begin = 0; begin < parts; begin += blockDim.x) {
    const int64_t p = begin + threadIdx.x;
    uint32_t all_more, all_same;
    const uint32_t more = block_scan(p < parts ? __ldcg(above + p) : 0u, room, all_more);
    const uint32_t same = block_scan(p < parts ? __ldcg(equal + p) : 0u, room, all_same);
    if (p < parts) {
      above[p] = before_more + more;
      equal[p] = before_same + same;
    }
    before_more += all_more;
    before_same += all_same;
  }
}

/* The bits become those above the whole threshold and those equal to it, and are counted by parts; the counts are summed by
 * the row's last block. */
__global__ void settle(const float *x, int64_t n, int64_t parts, Bits bits, Search search, uint32_t *above,
                       uint32_t *equal) {
  __shared__ uint32_t room[33];
  const int64_t row = blockIdx.x / parts, word = blockIdx.x % parts * kPart + threadIdx.x;
  const uint32_t threshold = search.found[row].prefix;
  uint32_t high = 0, same = 0;
  if (word < bits.words) {
    const int64_t at = row * bits.words + word;
    high = bits.above[at];
    for (uint32_t left = bits.equal[at]; left; left &= left - 1) {
      const int place = __ffs(int(left)) - 1;
      const uint32_t key = key_of(x[row * n + word * kWarp + place]);
      high |= uint32_t(key > threshold) << place;
      same |= uint32_t(key == threshold) << place;
    }
    bits.above[at] = high;
    bits.equal[at] = same;
  }
  const uint32_t more = block_sum(uint32_t(__popc(high)), room), ties = block_sum(uint32_t(__popc(same)), room);
  if (threadIdx.x == 0) {
    above[blockIdx.x] = more;
    equal[blockIdx.x] = ties;
  }
  if (last_block(search.tickets + row, uint32_t(parts))) sum_parts(parts, above + row * parts, equal + row * parts);
}

/* A warp writes the indices of 32 words in turn, lanes beside each other. */
__global__ void write_indices(int64_t parts, int64_t count, const Selection *found, Bits bits, const uint32_t *above,
                              const uint32_t *equal, int64_t *indices) {
  __shared__ uint32_t room[33];
  const int64_t row = blockIdx.x / parts, word = blockIdx.x % parts * kPart + threadIdx.x;
  const uint32_t ties = found[row].need, lane = threadIdx.x % kWarp, lower = (1u << lane) - 1;
  const uint32_t high = word < bits.words ? bits.above[row * bits.words + word] : 0;
  const uint32_t same = word < bits.words ? bits.equal[row * bits.words + word] : 0;
  uint32_t total;
  const uint32_t more = above[blockIdx.x] + block_scan(uint32_t(__popc(high)), room, total);
  const uint32_t ties_before = equal[blockIdx.x] + block_scan(uint32_t(__popc(same)), room, total);
  indices += row * count;
  for (int u = 0; u < kWarp; ++u) {
    const uint32_t h = __shfl_sync(kAll, high, u), s = __shfl_sync(kAll, same, u);
    const uint32_t own_more = __shfl_sync(kAll, more, u) + __popc(h & lower);
    const uint32_t own_same = __shfl_sync(kAll, ties_before, u) + __popc(s & lower);
    const bool chosen = (h >> lane & 1u) || ((s >> lane & 1u) && own_same < ties);
    if (chosen) indices[own_more + (own_same < ties ? own_same : ties)] = (word - lane + u) * kWarp + lane;
  }
}

__global__ void write_all(int64_t n, int64_t total, int64_t *indices) {
  for (int64_t i = thread_index(); i < total; i += thread_total()) indices[i] = i % n;
}

/* One block to a row of at most kShort numbers: 11, 10 and 10 bits of their keys. */
__global__ void __launch_bounds__(kThreads) select_short(const float *x, int n, uint32_t count, int64_t *indices) {
  __shared__ uint32_t keys[kShort], bins[kShortBins], room[33], found[2];
  constexpr int kShare = kShortBins / kThreads;
  x += int64_t(blockIdx.x) * n;
  indices += int64_t(blockIdx.x) * count;
  for (int i = threadIdx.x; i < n; i += kThreads) keys[i] = key_of(x[i]);
  uint32_t prefix = 0, need = count, total; /* as in Selection */
  for (int level = 0; level < 3; ++level) {
    const int shift = 20 - 10 * level, width = level == 0 ? 11 : 10;
    for (int b = threadIdx.x; b < kShortBins; b += kThreads) bins[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads)
      if (level == 0 || keys[i] >> (shift + width) == prefix) atomicAdd(&bins[keys[i] >> shift & ((1u << width) - 1)], 1u);
    __syncthreads();
    /* The threads count from the highest bins down. */
    const uint32_t *share = bins + (kThreads - 1 - threadIdx.x) * kShare;
    uint32_t sum = 0;
    for (int j = 0; j < kShare; ++j) sum += share[j];
    const uint32_t higher = block_scan(sum, room, total);
    if (higher < need && need <= higher + sum) {
      uint32_t rest = need - higher;
      int bin = kShare - 1;
      for (; bin > 0 && share[bin] < rest; --bin) rest -= share[bin];
      found[0] = (prefix << width) | uint32_t(share - bins + bin);
      found[1] = rest;
    }
    __syncthreads();
    prefix = found[0];
    need = found[1];
  }
  const int each = (n + kThreads - 1) / kThreads, first = threadIdx.x * each, last = first + each < n ? first + each : n;
  uint32_t above = 0, same = 0;
  for (int i = first; i < last; ++i) {
    above += keys[i] > prefix;
    same += keys[i] == prefix;
  }
  above = block_scan(above, room, total);
  same = block_scan(same, room, total);
  for (int i = first; i < last; ++i) {
    if (keys[i] > prefix || (keys[i] == prefix && same < need)) indices[above + (same < need ? same : need)] = i;
    above += keys[i] > prefix;
    same += keys[i] == prefix;
  }
}

void abs_topk(const mcc_context *context, const float *x, int64_t k, int64_t n, int64_t count, int64_t *indices) {
  if (k == 0 || n == 0 || count <= 0) return;
  if (count >= n) {
    MCC_LAUNCH(write_all, grid_of(blocks_for(k * n, kThreads)), kThreads, context, n, k * n, indices);
    return;
  }
  if (n <= kShort) {
    MCC_LAUNCH(select_short, grid_of(k), kThreads, context, x, int(n), uint32_t(count), indices);
    return;
  }
  const int64_t words = blocks_for(n, kWarp), parts = blocks_for(words, kPart);
  /* Spans are long enough that adding a block's bins to the row's costs little. */
  const int64_t most = blocks_for(1024, k), spans = parts < most ? parts : most;
  const int64_t span = blocks_for(parts, spans) * kPart * kWarp;
  const auto room = [&](int64_t bytes) { return context->workspace(context->owner, size_t(bytes)); };
  Selection *found = static_cast<Selection *>(room(k * int64_t(sizeof(Selection))));
  uint32_t *bins = static_cast<uint32_t *>(room(k * (kBins + 1) * 4));
  const Search search = {found, bins, bins + k * kBins};
  uint32_t *above = static_cast<uint32_t *>(room(k * parts * 4)), *equal = static_cast<uint32_t *>(room(k * parts * 4));
  const Bits bits = {static_cast<uint32_t *>(room(k * words * 4)), static_cast<uint32_t *>(room(k * words * 4)), words};
  const unsigned blocks = grid_of(k * parts);
  cudaMemsetAsync(bins, 0, size_t(k) * (kBins + 1) * 4, static_cast<cudaStream_t>(context->stream));
  MCC_LAUNCH(count_high, grid_of(k * spans), kThreads, context, x, n, spans, span, uint32_t(count), search);
  MCC_LAUNCH(split, blocks, kThreads, context, x, n, parts, bits, search);
  MCC_LAUNCH(count_low, blocks, kThreads, context, x, n, parts, bits, search);
  MCC_LAUNCH(settle, blocks, kThreads, context, x, n, parts, bits, search, above, equal);
  MCC_LAUNCH(write_indices, blocks, kThreads, context, parts, count, found, bits, above, equal, indices);
}

__global__ void dilate_rows(const uint8_t *mask, int64_t total, int64_t n, int64_t radius, uint8_t *out) {
  for (int64_t i = thread_index(); i < total; i += thread_total()) {
    if (!mask[i]) continue;
    const int64_t row = i / n * n, column = i - row;
    const int64_t from = column > radius ? column - radius : 0, to = radius < n - column ? column + radius + 1 : n;
    /* Up to the next True on either side, so that dense masks do not write each place many times. */
    for (int64_t j = column; j < to && (j == column || !mask[row + j]); ++j) out[row + j] = 1;
    for (int64_t j = column - 1; j >= from && !mask[row + j]; --j) out[row + j] = 1;
  }
}

void dilate(const mcc_context *context, const uint8_t *mask, int64_t k, int64_t n, int64_t radius, uint8_t *out) {
  if (k == 0 || n == 0) return;
  cudaMemsetAsync(out, 0, size_t(k * n), static_cast<cudaStream_t>(context->stream));
  MCC_LAUNCH(dilate_rows, grid_of(blocks_for(k * n, kThreads)), kThreads, context, mask, k * n, n, radius, out);
}

/* Indices come from other ranks' messages: those outside of x are left out. */
__global__ void gather_places(const float *x, int64_t n, const int64_t *indices, int64_t count, float *packed) {
  for (int64_t i = thread_index(); i < count; i += thread_total())
    packed[i] = uint64_t(indices[i]) < uint64_t(n) ? x[indices[i]] : 0.0f;
}

void gather(const mcc_context *context, const float *x, int64_t n, const int64_t *indices, int64_t count, float *packed) {
  if (count == 0) return;
  MCC_LAUNCH(gather_places, grid_of(blocks_for(count, kThreads)), kThreads, context, x, n, indices, count, packed);
}

__global__ void scatter_places(float *x, int64_t n, const int64_t *indices, int64_t count, const float *packed) {
  for (int64_t i = thread_index(); i < count; i += thread_total())
    if (uint64_t(indices[i]) < uint64_t(n)) x[indices[i]] += packed[i];
}

void scatter_add(const mcc_context *context, float *x, int64_t n, const int64_t *indices, int64_t count, const float *packed) {
  if (count == 0) return;
  MCC_LAUNCH(scatter_places, grid_of(blocks_for(count, kThreads)), kThreads, context, x, n, indices, count, packed);
}

}  // namespace cuda
}  // namespace mcc
