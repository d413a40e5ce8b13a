/* Quantize and pack, unpack and dequantize: every number is read once, where its scale's group fits into a warp. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

constexpr int kThreads = 128, kBlock = kThreads * kEach; /* numbers that a block takes at a time */

/* What is encoded at element i. */
__device__ __forceinline__ float given_at(const mcc_codec &c, int64_t i) {
  const float x = read(c.x, c.x_dtype, i);
  if (c.role == MCC_DELTA) return x - read(c.other, c.other_dtype, i);
  if (c.role == MCC_FEEDBACK) return x + read(c.other, c.other_dtype, i);
  return x;
}

__device__ __forceinline__ void given_eight(const mcc_codec &c, int64_t begin, float *v) {
  read_eight(c.x, c.x_dtype, begin, c.count, v);
  if (c.role == MCC_PLAIN) return;
  float other[kEach];
  read_eight(c.other, c.other_dtype, begin, c.count, other);
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = c.role == MCC_DELTA ? v[j] - other[j] : v[j] + other[j];
}

/* The second tensor moves by what its numbers decode to. */
__device__ __forceinline__ void move_eight(const mcc_codec &c, int64_t begin, const float *given, const float *decoded) {
  float moved[kEach];
  if (c.role == MCC_DELTA) read_eight(c.other, c.other_dtype, begin, c.count, moved);
#pragma unroll
  for (int j = 0; j < kEach; ++j) moved[j] = c.role == MCC_DELTA ? moved[j] + decoded[j] : given[j] - decoded[j];
  write_eight(c.other, c.other_dtype, begin, c.count, moved);
}

/* Groups and rotated blocks of 8, 16, ... 256 numbers: neighboring lanes hold one, and nothing leaves their registers. */
template <bool kRotated>
__global__ void quantize_lanes(mcc_codec c, int64_t coded) {
  const mcc_grid &g = c.grid;
  const int lanes = int(g.group / kEach), shift = __ffs(lanes) - 1;
  const int64_t words = (coded + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float given[kEach], v[kEach];
    uint8_t codes[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, given);
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = given[j];
    if (kRotated) rotate_lanes(v, g.rotation);
    Extent e;
    measure<kEach>(g, v, coded - begin, e);
    for (int d = 1; d < lanes; d *= 2) join_lanes(g, e, d);
    const int64_t group = w >> shift, rest = coded - group * g.group;
    const Scale scale = rounded(g, c.scale_dtype, scale_of(g, e, rest < g.group ? rest : g.group));
    if (begin < coded && (w & (lanes - 1)) == 0) store_scale(g, c.scales, c.scale_dtype, group, scale);
    const Factor step = factor_of(g, true, scale), unit = factor_of(g, false, scale);
    codes_of<true>(g, v, &step, begin, codes);
    if (begin + kEach > coded) clear_tail(begin, coded, codes);
    if (begin < coded) write_codes(c.codes + w * g.bits, g.bits, codes);
    if (c.role == MCC_PLAIN) continue;
    values_of<true>(g, codes, &unit, v);
    if (kRotated) rotate_lanes(v, g.rotation);
    if (begin < c.count) move_eight(c, begin, given, v);
  }
}

/* With scales that lie there already. */
template <bool kChannels>
__global__ void quantize_words(mcc_codec c) {
  const int64_t words = (c.count + kEach - 1) / kEach;
  constexpr int kScales = kChannels ? kEach : 1;
  for (int64_t w = thread_index(); w < words; w += thread_total()) {
    float v[kEach], decoded[kEach];
    Factor steps[kScales], units[kScales];
    uint8_t codes[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, v);
    const Place place(c.grid, begin);
#pragma unroll
    for (int j = 0; j < kScales; ++j) {
      const int64_t at = kChannels ? place.at(j) : place.first;
      steps[j] = load_factor(c.grid, true, c.scales, c.scale_dtype, at);
      units[j] = load_factor(c.grid, false, c.scales, c.scale_dtype, at);
    }
    codes_of<!kChannels>(c.grid, v, steps, begin, codes);
    if (begin + kEach > c.count) clear_tail(begin, c.count, codes);
    write_codes(c.codes + w * c.grid.bits, c.grid.bits, codes);
    if (c.role == MCC_PLAIN) continue;
    values_of<!kChannels>(c.grid, codes, units, decoded);
    move_eight(c, begin, v, decoded);
  }
}

/* One block of threads for each piece of a group: partial extents, in an order that does not depend on the launch. */
__global__ void measure_pieces(mcc_codec c, int64_t size, int64_t pieces, int64_t piece, Extent *parts) {
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  const int64_t group = blockIdx.x / pieces, part = blockIdx.x % pieces;
  const int64_t end = (group + 1) * size < c.count ? (group + 1) * size : c.count;
  const int64_t first = group * size + part * piece, stop = first + piece < end ? first + piece : end;
  Extent e;
  for (int64_t begin = first + threadIdx.x * kEach; begin < stop; begin += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    given_eight(c, begin, v); /* zeros beyond the last number */
    measure<kEach>(c.grid, v, stop - begin, e);
  }
  join_block(c.grid, e, room, sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = e;
}

__global__ void combine_pieces(mcc_codec c, int64_t size, int64_t pieces, const Extent *parts) {
  const int64_t group = blockIdx.x, rest = c.count - group * size;
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  Extent e;
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) join(e, parts[group * pieces + p]);
  join_block(c.grid, e, room, sums);
  if (threadIdx.x != 0) return;
  store_scale(c.grid, c.scales, c.scale_dtype, group,
              rounded(c.grid, c.scale_dtype, scale_of(c.grid, e, rest < size ? rest : size)));
}

/* 32 columns to a block of 32 x 8 threads, which take the rows in turn. */
__global__ void measure_channels(mcc_codec c) {
  __shared__ uint32_t most[8][33], least[8][33];
  __shared__ double sum[8][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x) * 32 + x, rows = c.count / c.grid.group;
  Extent e;
  if (column < c.grid.group)
    for (int64_t row = y; row < rows; row += 8) {
      const float v = given_at(c, row * c.grid.group + column);
      measure<1>(c.grid, &v, 1, e);
    }
  const bool range = takes_range(c.grid);
  most[y][x] = range ? e.greatest : e.most;
  least[y][x] = e.least;
  sum[y][x] = e.sum;
  __syncthreads();
  if (y != 0 || column >= c.grid.group) return;
  for (int i = 1; i < 8; ++i) {
    Extent other;
    (range ? other.greatest : other.most) = most[i][x];
    other.least = least[i][x];
    other.sum = sum[i][x];
    join(e, other);
  }
  store_scale(c.grid, c.scales, c.scale_dtype, column, rounded(c.grid, c.scale_dtype, scale_of(c.grid, e, rows)));
}

/* Blocks too large for a warp: the rotated numbers of a chunk of kBlock, in shared memory; every thread calls it. */
__device__ __forceinline__ void rotate_chunk(float *v, int block) {
  for (int h = 1; h < block; h *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < kBlock / 2; pair += blockDim.x) {
      const int i = pair / h * 2 * h + pair % h;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf(float(block));
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] *= scale;
  __syncthreads();
}

/* Rotated numbers as fp32, padded to whole blocks: a copy, from which the other kernels go on. */
__global__ void rotate_to(mcc_codec c, int64_t total, float *out) {
  __shared__ float v[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < c.count ? given_at(c, begin + i) : 0.0f;
  rotate_chunk(v, c.grid.rotation);
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (begin + i < total) out[begin + i] = v[i];
}

/* What a decoder does with decoded numbers, which are rotated back first. */
__global__ void rotate_from(mcc_codec c, int64_t total, const float *decoded) {
  __shared__ float v[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < total ? decoded[begin + i] : 0.0f;
  rotate_chunk(v, c.grid.rotation);
  for (int64_t i = begin + threadIdx.x; i < begin + kBlock && i < c.count; i += blockDim.x) {
    float y = v[i - begin];
    if (c.x != nullptr) { /* an encoder's second tensor */
      const float given = c.role == MCC_DELTA ? read(c.other, c.other_dtype, i) : given_at(c, i);
      write(c.other, c.other_dtype, i, c.role == MCC_DELTA ? given + y : given - y);
      continue;
    }
    if (c.role == MCC_ADD) {
      static_cast<float *>(c.out)[i] += y;
      continue;
    }
    if (c.role == MCC_DELTA) {
      y = read(c.other, c.other_dtype, i) + y;
      write(c.other, c.other_dtype, i, y);
    }
    if (c.out != nullptr) write(c.out, c.out_dtype, i, y);
  }
}

template <bool kChannels, bool kRotated>
__global__ void dequantize_words(mcc_codec c) {
  const int64_t coded = kRotated ? (c.count + c.grid.rotation - 1) / c.grid.rotation * c.grid.rotation : c.count;
  const int64_t words = (coded + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  constexpr int kScales = kChannels ? kEach : 1;
  for (int64_t w = thread_index(); w < (kRotated ? whole : words); w += thread_total()) {
    uint8_t codes[kEach];
    float v[kEach], other[kEach];
    Factor units[kScales];
    const int64_t begin = w * kEach;
    if (!kRotated || begin < coded) {
      const Place place(c.grid, begin);
      read_codes(c.codes + w * c.grid.bits, c.grid.bits, codes);
#pragma unroll
      for (int j = 0; j < kScales; ++j)
        units[j] = load_factor(c.grid, false, c.scales, c.scale_dtype, kChannels ? place.at(j) : place.first);
      values_of<!kChannels>(c.grid, codes, units, v);
    }
    if (kRotated) {
      rotate_lanes(v, c.grid.rotation);
      if (begin >= c.count) continue;
    }
    if (c.role == MCC_ADD || c.role == MCC_DELTA) {
      const bool adds = c.role == MCC_ADD;
      read_eight(adds ? c.out : c.other, adds ? MCC_FP32 : c.other_dtype, begin, c.count, other);
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = other[j] + v[j];
    }
    if (c.role == MCC_DELTA) write_eight(c.other, c.other_dtype, begin, c.count, v);
    if (c.out != nullptr) write_eight(c.out, c.out_dtype, begin, c.count, v);
  }
}

void write_scales(const mcc_context *context, const mcc_codec &c) {
  const mcc_grid &g = c.grid;
  if (g.layout == MCC_CHANNEL) {
    MCC_LAUNCH(measure_channels, grid_of(blocks_for(g.group, 32)), 256, context, c);
    return;
  }
  const int64_t size = g.layout == MCC_TENSOR ? c.count : g.group;
  const int64_t groups = g.layout == MCC_TENSOR ? 1 : blocks_for(c.count, size);
  const int64_t piece = 1 << 14, pieces = blocks_for(size < 1 ? 1 : size, piece);
  const size_t bytes = size_t(groups * pieces) * sizeof(Extent);
  Extent *parts = static_cast<Extent *>(context->workspace(context->owner, bytes));
  MCC_LAUNCH(measure_pieces, grid_of(groups * pieces), 256, context, c, size, pieces, piece, parts);
  MCC_LAUNCH(combine_pieces, grid_of(groups), 256, context, c, size, pieces, parts);
}

unsigned word_blocks(int64_t count) {
  const int64_t blocks = blocks_for(blocks_for(count, kEach), kThreads);
  return grid_of(blocks < 16384 ? blocks : 16384);
}

constexpr int kInWarp = kWarp * kEach; /* numbers that the lanes of a warp hold */

bool group_in_warp(const mcc_grid &g) {
  return g.layout == MCC_GROUP && g.group <= kInWarp && (g.group & (g.group - 1)) == 0;
}

void encode(const mcc_context *context, const mcc_codec &c, int64_t coded) {
  const mcc_grid &g = c.grid;
  if (group_in_warp(g)) {
    const auto kernel = g.rotation ? quantize_lanes<true> : quantize_lanes<false>;
    MCC_LAUNCH(kernel, word_blocks(coded), kThreads, context, c, coded);
    return;
  }
  write_scales(context, c);
  const auto kernel = g.layout == MCC_CHANNEL ? quantize_words<true> : quantize_words<false>;
  if (c.count > 0) MCC_LAUNCH(kernel, word_blocks(c.count), kThreads, context, c);
}

void decode(const mcc_context *context, const mcc_codec &c, int64_t coded) {
  const mcc_grid &g = c.grid;
  const auto kernel = g.layout == MCC_CHANNEL ? dequantize_words<true, false>
                      : g.rotation            ? dequantize_words<false, true>
                                              : dequantize_words<false, false>;
  MCC_LAUNCH(kernel, word_blocks(coded), kThreads, context, c);
}

/* A codec of rotated numbers that lie in memory. */
mcc_codec without_rotation(const mcc_codec &c, int64_t total) {
  mcc_codec plain = c;
  plain.role = MCC_PLAIN;
  plain.count = total;
  plain.grid.rotation = 0;
  return plain;
}

void quantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  if (c.count == 0 && c.grid.layout == MCC_GROUP) return;
  if (c.count == 0) c.grid.rotation = 0;
  const int64_t total = c.grid.rotation ? blocks_for(c.count, c.grid.rotation) * c.grid.rotation : c.count;
  if (!c.grid.rotation || (c.grid.rotation <= kInWarp && group_in_warp(c.grid))) {
    encode(context, c, total);
    return;
  }
  float *rotated = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  const unsigned chunks = grid_of(blocks_for(total, kBlock));
  MCC_LAUNCH(rotate_to, chunks, 256, context, c, total, rotated);
  mcc_codec plain = without_rotation(c, total);
  plain.x = rotated;
  plain.x_dtype = MCC_FP32;
  encode(context, plain, total);
  if (c.role == MCC_PLAIN) return;
  plain.x = nullptr;
  plain.out = rotated;
  plain.out_dtype = MCC_FP32;
  decode(context, plain, total);
  MCC_LAUNCH(rotate_from, chunks, 256, context, c, total, rotated);
}

void dequantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  c.x = nullptr;
  if (c.count == 0) return;
  const int64_t total = c.grid.rotation ? blocks_for(c.count, c.grid.rotation) * c.grid.rotation : c.count;
  if (c.grid.rotation <= kInWarp) {
    decode(context, c, total);
    return;
  }
  float *decoded = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  mcc_codec plain = without_rotation(c, total);
  plain.out = decoded;
  plain.out_dtype = MCC_FP32;
  decode(context, plain, total);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, total, decoded);
}

}  // namespace cuda
}  // namespace mcc
