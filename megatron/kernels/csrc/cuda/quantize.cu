/* Quantize and pack, unpack and dequantize: every number is read once, where its scale's group fits into a warp. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

#include "tiles.h"

constexpr int kThreads = 128, kBlock = kThreads * kEach; /* numbers that a block takes at a time */

/* The second tensor moves by what its numbers decode to. */
__device__ __forceinline__ void move_eight(const mcc_codec &c, int64_t begin, const float *given, const float *decoded) {
  float moved[kEach];
  if (c.role == MCC_DELTA) read_eight(c.other, c.other_dtype, begin, c.count, moved);
#pragma unroll
  for (int j = 0; j < kEach; ++j) moved[j] = c.role == MCC_DELTA ? moved[j] + decoded[j] : given[j] - decoded[j];
  write_eight(c.other, c.other_dtype, begin, c.count, moved);
}

/* Groups and rotated blocks of 8, 16, ... 256 numbers: neighboring lanes hold one, and nothing leaves their registers. */
template <bool kRotated, bool kTiled>
__global__ void quantize_lanes(mcc_codec c, Tiling t, int64_t coded) {
  const int lanes = int(c.grid.group / kEach), shift = __ffs(lanes) - 1;
  const int64_t words = (coded + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  Needs needs(c.grid);
  if (kTiled && c.tiles.marked != nullptr) {
    const Needs wide(c.tiles.wide);
    needs.range |= wide.range, needs.sum |= wide.sum, needs.most |= wide.most;
  }
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float given[kEach], v[kEach];
    uint8_t codes[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, given);
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = given[j];
    bool turned = false;
    if (kRotated) rotate_lanes(v, c.grid.rotation);
    if (kTiled && !kRotated && c.tiles.some) {
      turned = turns(c, t, begin, v);
      rotate_some(v, c.grid.rotation, turned);
    }
    const Part part = kTiled ? part_of(c, t, begin) : Part{c.grid, c.codes, c.scales, begin};
    const mcc_grid &g = kTiled ? part.grid : c.grid;
    Extent e;
    measure<kEach>(g, v, coded - begin, e);
    for (int d = 1; d < lanes; d *= 2) join_lanes(needs, e, d);
    const int64_t rest = coded - (w >> shift) * g.group;
    const Scale scale = rounded(g, c.scale_dtype, scale_of(g, e, rest < g.group ? rest : g.group));
    if (begin < coded && (w & (lanes - 1)) == 0)
      store_scale(g, part.scales, c.scale_dtype, part.at / kEach >> shift, scale);
    const Factor step = factor_of(g, true, scale), unit = factor_of(g, false, scale);
    codes_of<true>(g, v, &step, part.at, codes);
    if (begin + kEach > coded) clear_tail(begin, coded, codes);
    if (begin < coded) write_codes(part.codes + part.at / kEach * g.bits, g.bits, codes);
    if (c.role == MCC_PLAIN) continue;
    values_of<true>(g, codes, &unit, v);
    if (kRotated) rotate_lanes(v, c.grid.rotation);
    if (kTiled && !kRotated && c.tiles.some) rotate_some(v, c.grid.rotation, turned);
    if (begin < c.count) move_eight(c, begin, given, v);
  }
}

/* With scales that lie there already. */
template <bool kChannels, bool kTiled>
__global__ void quantize_words(mcc_codec c, Tiling t) {
  const int64_t words = (c.count + kEach - 1) / kEach;
  constexpr int kScales = kChannels ? kEach : 1;
  for (int64_t w = thread_index(); w < words; w += thread_total()) {
    float v[kEach], decoded[kEach];
    Factor steps[kScales], units[kScales];
    uint8_t codes[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, v);
    const Part part = kTiled ? part_of(c, t, begin) : Part{c.grid, c.codes, c.scales, begin};
    const mcc_grid &g = kTiled ? part.grid : c.grid;
    const Place place(g, part.at);
#pragma unroll
    for (int j = 0; j < kScales; ++j) {
      const int64_t at = kChannels ? place.at(j) : place.first;
      steps[j] = load_factor(g, true, part.scales, c.scale_dtype, at);
      units[j] = load_factor(g, false, part.scales, c.scale_dtype, at);
    }
    codes_of<!kChannels>(g, v, steps, part.at, codes);
    if (begin + kEach > c.count) clear_tail(begin, c.count, codes);
    write_codes(part.codes + part.at / kEach * g.bits, g.bits, codes);
    if (c.role == MCC_PLAIN) continue;
    values_of<!kChannels>(g, codes, units, decoded);
    move_eight(c, begin, v, decoded);
  }
}

/* One block of threads for each piece of a group: partial extents, in an order that does not depend on the launch. */
__global__ void measure_pieces(mcc_codec c, Tiling t, int64_t size, int64_t pieces, int64_t piece, Extent *parts) {
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  const int64_t group = blockIdx.x / pieces, part = blockIdx.x % pieces;
  const mcc_grid g = part_of(c, t, group * size).grid;
  const int64_t end = (group + 1) * size < c.count ? (group + 1) * size : c.count;
  const int64_t first = group * size + part * piece, stop = first + piece < end ? first + piece : end;
  Extent e;
  for (int64_t begin = first + threadIdx.x * kEach; begin < stop; begin += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    given_eight(c, begin, v); /* zeros beyond the last number */
    measure<kEach>(g, v, stop - begin, e);
  }
  join_block(g, e, room, sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = e;
}

__global__ void combine_pieces(mcc_codec c, Tiling t, int64_t size, int64_t pieces, const Extent *parts) {
  const int64_t group = blockIdx.x, rest = c.count - group * size;
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  const Part part = part_of(c, t, group * size);
  Extent e;
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) join(e, parts[group * pieces + p]);
  join_block(part.grid, e, room, sums);
  if (threadIdx.x != 0) return;
  store_scale(part.grid, part.scales, c.scale_dtype, size > 0 ? part.at / size : 0,
              rounded(part.grid, c.scale_dtype, scale_of(part.grid, e, rest < size ? rest : size)));
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

/* Which blocks of a chunk of kBlock numbers are rotated: all, or those that are found here or that the map tells. Every thread
 * calls it. */
__device__ __forceinline__ void turns_of_chunk(const mcc_codec &c, const Tiling &t, bool finds, int64_t begin, const float *v,
                                               uint8_t *turned) {
  const int block = c.grid.rotation, lane = threadIdx.x % kWarp;
  const int64_t blocks = c.count / block;
  __syncthreads();
  for (int b = threadIdx.x / kWarp; b < kBlock / block; b += blockDim.x / kWarp) {
    const int64_t number = begin / block + b;
    const bool whole = number < blocks;
    bool found = !c.tiles.some || (!finds && whole && bit_of(c.tiles.rotated, number));
    if (finds) {
      uint32_t most = 0;
      int near = 0;
      for (int j = lane; j < block; j += kWarp) {
        const uint32_t u = bits_of(v[b * block + j]) & 0x7fffffffu;
        most = u > most ? u : most;
      }
      for (int d = kWarp / 2; d > 0; d /= 2) {
        const uint32_t other = __shfl_xor_sync(kAll, most, d);
        most = other > most ? other : most;
      }
      for (int j = lane; j < block; j += kWarp) near += fabsf(v[b * block + j]) * c.tiles.ratio >= float_of(most) ? 1 : 0;
      for (int d = kWarp / 2; d > 0; d /= 2) near += __shfl_xor_sync(kAll, near, d);
      found = whole && near == 1 && most < 0x7f800000u;
      if (whole && lane == 0) t.flags[number] = found;
    }
    if (lane == 0) turned[b] = found;
  }
}

/* Rotates the blocks of a chunk that are told, in shared memory; every thread calls it. */
__device__ __forceinline__ void rotate_chunk(float *v, int block, const uint8_t *turned) {
  for (int h = 1; h < block; h *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < kBlock / 2; pair += blockDim.x) {
      const int i = pair / h * 2 * h + pair % h;
      if (!turned[i / block]) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf(float(block));
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (turned[i / block]) v[i] *= scale;
  __syncthreads();
}

/* Rotated numbers as fp32, padded to whole blocks: a copy, from which the other kernels go on. */
__global__ void rotate_to(mcc_codec c, Tiling t, int64_t total, float *out) {
  __shared__ float v[kBlock];
  __shared__ uint8_t turned[kBlock / kEach];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < c.count ? given_at(c, begin + i) : 0.0f;
  turns_of_chunk(c, t, t.flags != nullptr, begin, v, turned);
  rotate_chunk(v, c.grid.rotation, turned);
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (begin + i < total) out[begin + i] = v[i];
}

/* What a decoder does with decoded numbers, which are rotated back first. */
__global__ void rotate_from(mcc_codec c, Tiling t, int64_t total, const float *decoded) {
  __shared__ float v[kBlock];
  __shared__ uint8_t turned[kBlock / kEach];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < total ? decoded[begin + i] : 0.0f;
  turns_of_chunk(c, t, false, begin, v, turned);
  rotate_chunk(v, c.grid.rotation, turned);
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

template <bool kChannels, bool kRotated, bool kTiled>
__global__ void dequantize_words(mcc_codec c, Tiling t) {
  const int64_t coded = kRotated ? (c.count + c.grid.rotation - 1) / c.grid.rotation * c.grid.rotation : c.count;
  const int64_t words = (coded + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  constexpr int kScales = kChannels ? kEach : 1;
  for (int64_t w = thread_index(); w < (kRotated || kTiled ? whole : words); w += thread_total()) {
    uint8_t codes[kEach];
    float v[kEach], other[kEach];
    Factor units[kScales];
    const int64_t begin = w * kEach;
    if (!(kRotated || kTiled) || begin < coded) {
      const Part part = kTiled ? part_of(c, t, begin) : Part{c.grid, c.codes, c.scales, begin};
      const mcc_grid &g = kTiled ? part.grid : c.grid;
      const Place place(g, part.at);
      read_codes(part.codes + part.at / kEach * g.bits, g.bits, codes);
#pragma unroll
      for (int j = 0; j < kScales; ++j)
        units[j] = load_factor(g, false, part.scales, c.scale_dtype, kChannels ? place.at(j) : place.first);
      values_of<!kChannels>(g, codes, units, v);
    }
    if (kRotated) rotate_lanes(v, c.grid.rotation);
    if (kTiled && !kRotated && c.tiles.some) {
      const int64_t number = quotient(begin, c.grid.rotation);
      rotate_some(v, c.grid.rotation, number < quotient(c.count, c.grid.rotation) && bit_of(c.tiles.rotated, number));
    }
    if ((kRotated || kTiled) && begin >= c.count) continue;
    if (c.role == MCC_ADD || c.role == MCC_DELTA) {
      const bool adds = c.role == MCC_ADD;
      read_eight(adds ? c.out : c.other, adds ? MCC_FP32 : c.other_dtype, begin, c.count, other);
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = other[j] + v[j];
    }
    if (c.role == MCC_DELTA) write_eights(c.other, c.other_dtype, begin, c.count, v);
    if (c.out != nullptr) write_eights(c.out, c.out_dtype, begin, c.count, v);
  }
}

void write_scales(const mcc_context *context, const mcc_codec &c, const Tiling &t) {
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
  MCC_LAUNCH(measure_pieces, grid_of(groups * pieces), 256, context, c, t, size, pieces, piece, parts);
  MCC_LAUNCH(combine_pieces, grid_of(groups), 256, context, c, t, size, pieces, parts);
}

void encode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded) {
  const bool tiled = c.tiles.some || c.tiles.marked != nullptr;
  if (group_in_warp(c.grid)) {
    const auto kernel = rotates_all(c) ? tiled ? quantize_lanes<true, true> : quantize_lanes<true, false>
                        : tiled        ? quantize_lanes<false, true>
                                       : quantize_lanes<false, false>;
    MCC_LAUNCH(kernel, word_blocks(coded, kThreads), kThreads, context, c, t, coded);
    return;
  }
  write_scales(context, c, t);
  const auto kernel = c.grid.layout == MCC_CHANNEL ? quantize_words<true, false>
                      : tiled                      ? quantize_words<false, true>
                                                   : quantize_words<false, false>;
  if (c.count > 0) MCC_LAUNCH(kernel, word_blocks(c.count, kThreads), kThreads, context, c, t);
}

void decode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded) {
  const bool tiled = c.tiles.some || c.tiles.marked != nullptr;
  const auto kernel = c.grid.layout == MCC_CHANNEL ? dequantize_words<true, false, false>
                      : rotates_all(c)             ? tiled ? dequantize_words<false, true, true> : dequantize_words<false, true, false>
                      : tiled                      ? dequantize_words<false, false, true>
                                                   : dequantize_words<false, false, false>;
  MCC_LAUNCH(kernel, word_blocks(coded, kThreads), kThreads, context, c, t);
}

/* A codec of rotated numbers that lie in memory. */
mcc_codec without_rotation(const mcc_codec &c, float *rotated) {
  mcc_codec plain = c;
  plain.role = MCC_PLAIN;
  plain.count = coded_count(c);
  plain.grid.rotation = 0;
  plain.tiles.some = 0;
  plain.x = plain.out = rotated;
  plain.x_dtype = plain.out_dtype = MCC_FP32;
  return plain;
}

mcc_codec rotated_codec(const mcc_context *context, const mcc_codec &c, const Tiling &t) {
  const int64_t total = coded_count(c);
  float *rotated = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  MCC_LAUNCH(rotate_to, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, rotated);
  write_blocks(context, c, t);
  return without_rotation(c, rotated);
}

void quantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  if (c.count == 0 && c.grid.layout == MCC_GROUP) return;
  if (c.count == 0) c.grid.rotation = c.tiles.some = 0;
  const int64_t total = coded_count(c);
  const Tiling t = tiling_of(context, c, total);
  if (!c.grid.rotation || (c.grid.rotation <= kInWarp && group_in_warp(c.grid))) {
    encode(context, c, t, total);
    write_blocks(context, c, t);
    return;
  }
  mcc_codec plain = rotated_codec(context, c, t);
  encode(context, plain, t, total);
  if (c.role == MCC_PLAIN) return;
  plain.x = nullptr;
  decode(context, plain, t, total);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, static_cast<const float *>(plain.out));
}

void dequantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  c.x = nullptr;
  if (c.count == 0) return;
  const int64_t total = coded_count(c);
  const Tiling t = tiling_of(context, c, total);
  if (c.grid.rotation <= kInWarp) {
    decode(context, c, t, total);
    return;
  }
  float *decoded = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  mcc_codec plain = without_rotation(c, decoded);
  plain.x = nullptr;
  decode(context, plain, t, total);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, static_cast<const float *>(decoded));
}

}  // namespace cuda
}  // namespace mcc
