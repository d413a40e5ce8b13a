/* One pass over a bucket: its norm and whether it is finite; and the histogram of a sample. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

constexpr int kThreads = 256;
constexpr int64_t kPiece = 1 << 14;

__global__ void norm_pieces(const void *x, int dtype, int64_t count, double *sums, uint32_t *most) {
  __shared__ double room[33];
  __shared__ uint32_t places[33];
  const int64_t begin = int64_t(blockIdx.x) * kPiece, end = begin + kPiece < count ? begin + kPiece : count;
  double sum = 0;
  uint32_t largest = 0;
  for (int64_t i = begin + threadIdx.x * kEach; i < end; i += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    read_eight(x, dtype, i, end, v);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t u = bits_of(v[j]) & 0x7fffffffu;
      sum = fma(double(v[j]), double(v[j]), sum);
      largest = u > largest ? u : largest;
    }
  }
  sum = block_sum(sum, room);
  largest = block_max(largest, places);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    most[blockIdx.x] = largest;
  }
}

__global__ void norm_whole(const double *sums, const uint32_t *most, int64_t pieces, double *out) {
  __shared__ double room[33];
  __shared__ uint32_t places[33];
  double sum = 0;
  uint32_t largest = 0;
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) {
    sum += sums[p];
    largest = most[p] > largest ? most[p] : largest;
  }
  sum = block_sum(sum, room);
  largest = block_max(largest, places);
  if (threadIdx.x == 0) {
    out[0] = sum;
    out[1] = largest < 0x7f800000u ? 1.0 : 0.0;
  }
}

void finite_norm(const mcc_context *context, const void *x, int dtype, int64_t count, double *out) {
  const int64_t pieces = blocks_for(count, kPiece);
  double *sums = static_cast<double *>(context->workspace(context->owner, size_t(pieces + 1) * 8));
  uint32_t *most = static_cast<uint32_t *>(context->workspace(context->owner, size_t(pieces + 1) * 4));
  if (pieces > 0) MCC_LAUNCH(norm_pieces, grid_of(pieces), kThreads, context, x, dtype, count, sums, most);
  MCC_LAUNCH(norm_whole, 1, kThreads, context, sums, most, pieces, out);
}

/* Calls ``take`` with a thread's share of the finite samples, several of which are fetched at a time. */
template <class Take>
__device__ __forceinline__ void for_samples(const void *x, int dtype, int64_t samples, int64_t stride, Take take) {
  const int64_t step = thread_total();
  for (int64_t i = thread_index(); i < samples; i += kEach * step) {
    float v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = i + j * step < samples ? read(x, dtype, (i + j * step) * stride) : NAN;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if ((bits_of(v[j]) & 0x7fffffffu) < 0x7f800000u) take(v[j]);
  }
}

/* ``limits``: the least number, complemented, and the greatest, both as maxima in which 0 stands for none; and a ticket. */
__global__ void find_range(const void *x, int dtype, int64_t samples, int64_t stride, int64_t bins, int64_t *counts,
                           uint32_t *limits, double *range) {
  __shared__ uint32_t room[33];
  for (int64_t b = thread_index(); b < bins; b += thread_total()) counts[b] = 0;
  uint32_t below = 0, above = 0;
  for_samples(x, dtype, samples, stride, [&](float v) {
    const uint32_t o = ordered(bits_of(v));
    below = ~o > below ? ~o : below;
    above = o > above ? o : above;
  });
  below = block_max(below, room);
  above = block_max(above, room);
  if (threadIdx.x == 0 && above != 0) {
    atomicMax(&limits[0], below);
    atomicMax(&limits[1], above);
  }
  if (!last_block(&limits[2], gridDim.x) || threadIdx.x != 0) return;
  const uint32_t least = ~__ldcg(&limits[0]), greatest = __ldcg(&limits[1]);
  const bool any = greatest != 0;
  range[0] = any ? double(from_ordered(least)) : INFINITY;
  range[1] = any ? double(from_ordered(greatest)) : -INFINITY;
}

constexpr int64_t kShared = 4096;

__global__ void count_bins(const void *x, int dtype, int64_t samples, int64_t stride, int64_t bins, const double *range,
                           unsigned long long *counts) {
  __shared__ uint32_t own[kShared];
  const double low = range[0], width = range[1] - low;
  if (!(width >= 0)) return; /* for all threads alike: none is finite */
  for (int64_t b = threadIdx.x; b < kShared && b < bins; b += blockDim.x) own[b] = 0;
  __syncthreads();
  const double factor = width > 0 ? double(bins) / width : 0.0;
  for_samples(x, dtype, samples, stride, [&](float v) {
    int64_t bin = int64_t((double(v) - low) * factor);
    bin = bin < bins ? bin : bins - 1;
    if (bins <= kShared)
      atomicAdd(&own[bin], 1u);
    else
      atomicAdd(&counts[bin], 1ull);
  });
  __syncthreads();
  if (bins > kShared) return;
  for (int64_t b = threadIdx.x; b < bins; b += blockDim.x)
    if (own[b]) atomicAdd(&counts[b], static_cast<unsigned long long>(own[b]));
}

void histogram(const mcc_context *context, const void *x, int dtype, int64_t count, int64_t stride, int64_t bins,
               int64_t *counts, double *range) {
  const int64_t samples = blocks_for(count, stride), wanted = blocks_for(samples, kThreads * 8);
  const unsigned blocks = grid_of(wanted < 512 ? wanted : 512); /* each adds its bins to the whole's */
  uint32_t *limits = static_cast<uint32_t *>(context->workspace(context->owner, 3 * 4));
  cudaMemsetAsync(limits, 0, 3 * 4, static_cast<cudaStream_t>(context->stream));
  MCC_LAUNCH(find_range, blocks, kThreads, context, x, dtype, samples, stride, bins, counts, limits, range);
  if (samples == 0) return;
  MCC_LAUNCH(count_bins, blocks, kThreads, context, x, dtype, samples, stride, bins, range,
             reinterpret_cast<unsigned long long *>(counts));
}

}  // namespace cuda
}  // namespace mcc
