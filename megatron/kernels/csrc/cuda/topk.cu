/* Exact top-k of magnitudes by radix selection: three histograms find the threshold, then every part of a row writes the
 * indices that lie above it behind those of the parts before. */
#include "platform.h"

namespace mcc {
namespace cuda {

constexpr int kBins = 4096, kThreads = 256;
constexpr int64_t kPart = 1 << 14;

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

/* The 12, 10 and 9 bits of the levels. */
__device__ __forceinline__ int shift_of(int level) { return level == 0 ? 19 : level == 1 ? 9 : 0; }
__device__ __forceinline__ uint32_t mask_of(int level) { return level == 0 ? 4095u : level == 1 ? 1023u : 511u; }

__global__ void count_keys(const float *x, int64_t n, int64_t parts, int level, const Selection *found, uint32_t *bins) {
  __shared__ uint32_t own[kBins];
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) own[b] = 0;
  __syncthreads();
  const int64_t end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
  const uint32_t prefix = level == 0 ? 0 : found[row].prefix;
  for (int64_t i = part * kPart + threadIdx.x; i < end; i += blockDim.x) {
    const uint32_t key = key_of(x[row * n + i]);
    const uint32_t above = level == 0 ? 0 : key >> (level == 1 ? 19 : 9);
    if (above == prefix) atomicAdd(&own[(key >> shift_of(level)) & mask_of(level)], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kBins; b += blockDim.x)
    if (own[b]) atomicAdd(&bins[row * kBins + b], own[b]);
}

/* One block to a row: the bin in which the wanted place lies, and empty bins for the next level. */
__global__ void narrow(int level, uint32_t count, Selection *found, uint32_t *bins) {
  __shared__ uint32_t sums[kThreads];
  constexpr int kShare = kBins / kThreads;
  uint32_t *own = bins + int64_t(blockIdx.x) * kBins;
  uint32_t sum = 0;
  for (int j = 0; j < kShare; ++j) sum += own[threadIdx.x * kShare + j];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t need = level == 0 ? count : found[blockIdx.x].need;
    int share = kThreads - 1;
    for (; share > 0 && sums[share] < need; --share) need -= sums[share];
    int bin = share * kShare + kShare - 1;
    for (; bin > share * kShare && own[bin] < need; --bin) need -= own[bin];
    const uint32_t before = level == 0 ? 0 : found[blockIdx.x].prefix;
    found[blockIdx.x].prefix = (before << (level == 0 ? 0 : level == 1 ? 10 : 9)) | uint32_t(bin);
    found[blockIdx.x].need = need;
  }
  __syncthreads();
  for (int j = 0; j < kShare; ++j) own[threadIdx.x * kShare + j] = 0;
}

__global__ void count_parts(const float *x, int64_t n, int64_t parts, const Selection *found, uint32_t *above,
                            uint32_t *equal) {
  __shared__ uint32_t room[33];
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  const int64_t end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
  const uint32_t threshold = found[row].prefix;
  uint32_t more = 0, same = 0;
  for (int64_t i = part * kPart + threadIdx.x; i < end; i += blockDim.x) {
    const uint32_t key = key_of(x[row * n + i]);
    more += key > threshold;
    same += key == threshold;
  }
  more = block_sum(more, room);
  same = block_sum(same, room);
  if (threadIdx.x == 0) {
    above[blockIdx.x] = more;
    equal[blockIdx.x] = same;
  }
}

/* One block to a row: counts become the counts of the parts before. */
__global__ void sum_parts(int64_t parts, uint32_t *above, uint32_t *equal) {
  __shared__ uint32_t more[kThreads], same[kThreads];
  uint32_t *a = above + int64_t(blockIdx.x) * parts, *e = equal + int64_t(blockIdx.x) * parts;
  const int64_t share = (parts + kThreads - 1) / kThreads, begin = threadIdx.x * share;
  const int64_t end = begin + share < parts ? begin + share : parts;
  uint32_t own_more = 0, own_same = 0;
  for (int64_t p = begin; p < end; ++p) own_more += a[p], own_same += e[p];
  more[threadIdx.x] = own_more;
  same[threadIdx.x] = own_same;
  __syncthreads();
  uint32_t before_more = 0, before_same = 0;
  for (unsigned t = 0; t < threadIdx.x; ++t) before_more += more[t], before_same += same[t];
  for (int64_t p = begin; p < end; ++p) {
    const uint32_t m = a[p], s = e[p];
    a[p] = before_more;
    e[p] = before_same;
    before_more += m;
    before_same += s;
  }
}

__global__ void write_indices(const float *x, int64_t n, int64_t parts, int64_t count, const Selection *found,
                              const uint32_t *above, const uint32_t *equal, int64_t *indices) {
  __shared__ uint32_t warp_more[kThreads / kWarp], warp_same[kThreads / kWarp];
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  const int64_t end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
  const uint32_t threshold = found[row].prefix, ties = found[row].need;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t before_more = above[blockIdx.x], before_same = equal[blockIdx.x];
  for (int64_t tile = part * kPart; tile < end; tile += blockDim.x) {
    const int64_t i = tile + threadIdx.x;
    const uint32_t key = i < end ? key_of(x[row * n + i]) : 0;
    const bool is_more = i < end && key > threshold, is_same = i < end && key == threshold;
    const unsigned more = __ballot_sync(kAll, is_more), same = __ballot_sync(kAll, is_same);
    if (lane == 0) {
      warp_more[warp] = __popc(more);
      warp_same[warp] = __popc(same);
    }
    __syncthreads();
    uint32_t own_more = before_more, own_same = before_same;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w == warp) {
        const unsigned lower = (1u << lane) - 1;
        own_more = before_more + __popc(more & lower);
        own_same = before_same + __popc(same & lower);
      }
      before_more += warp_more[w];
      before_same += warp_same[w];
    }
    const uint32_t taken = own_same < ties ? own_same : ties;
    if (is_more || (is_same && own_same < ties)) indices[row * count + own_more + taken] = i;
    __syncthreads();
  }
}

__global__ void write_all(int64_t n, int64_t total, int64_t *indices) {
  for (int64_t i = thread_index(); i < total; i += thread_total()) indices[i] = i % n;
}

void abs_topk(const mcc_context *context, const float *x, int64_t k, int64_t n, int64_t count, int64_t *indices) {
  if (k == 0 || n == 0 || count <= 0) return;
  if (count >= n) {
    MCC_LAUNCH(write_all, grid_of(blocks_for(k * n, kThreads)), kThreads, context, n, k * n, indices);
    return;
  }
  const int64_t parts = blocks_for(n, kPart);
  void *owner = context->owner;
  Selection *found = static_cast<Selection *>(context->workspace(owner, size_t(k) * sizeof(Selection)));
  uint32_t *bins = static_cast<uint32_t *>(context->workspace(owner, size_t(k) * kBins * 4));
  uint32_t *above = static_cast<uint32_t *>(context->workspace(owner, size_t(k * parts) * 4));
  uint32_t *equal = static_cast<uint32_t *>(context->workspace(owner, size_t(k * parts) * 4));
  cudaMemsetAsync(bins, 0, size_t(k) * kBins * 4, static_cast<cudaStream_t>(context->stream));
  for (int level = 0; level < 3; ++level) {
    MCC_LAUNCH(count_keys, grid_of(k * parts), kThreads, context, x, n, parts, level, found, bins);
    MCC_LAUNCH(narrow, grid_of(k), kThreads, context, level, uint32_t(count), found, bins);
  }
  MCC_LAUNCH(count_parts, grid_of(k * parts), kThreads, context, x, n, parts, found, above, equal);
  MCC_LAUNCH(sum_parts, grid_of(k), kThreads, context, parts, above, equal);
  MCC_LAUNCH(write_indices, grid_of(k * parts), kThreads, context, x, n, parts, count, found, above, equal, indices);
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

__global__ void gather_places(const float *x, const int64_t *indices, int64_t count, float *packed) {
  for (int64_t i = thread_index(); i < count; i += thread_total()) packed[i] = x[indices[i]];
}

void gather(const mcc_context *context, const float *x, const int64_t *indices, int64_t count, float *packed) {
  if (count == 0) return;
  MCC_LAUNCH(gather_places, grid_of(blocks_for(count, kThreads)), kThreads, context, x, indices, count, packed);
}

__global__ void scatter_places(float *x, const int64_t *indices, int64_t count, const float *packed) {
  for (int64_t i = thread_index(); i < count; i += thread_total()) x[indices[i]] += packed[i];
}

void scatter_add(const mcc_context *context, float *x, const int64_t *indices, int64_t count, const float *packed) {
  if (count == 0) return;
  MCC_LAUNCH(scatter_places, grid_of(blocks_for(count, kThreads)), kThreads, context, x, indices, count, packed);
}

}  // namespace cuda
}  // namespace mcc
