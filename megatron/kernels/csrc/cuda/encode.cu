/* Quantize and pack: every number is read once, where its scale's group fits into a warp. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

#include "tiles.h"

constexpr int kThreads = 128;

/* The second tensor moves by what its numbers decode to. */
__device__ __forceinline__ void move_eight(const mcc_codec &c, int64_t begin, const float *given, const float *decoded) {
  float moved[kEach];
  if (c.role == MCC_DELTA) read_eight(c.other, c.other_dtype, begin, c.count, moved);
#pragma unroll
  for (int j = 0; j < kEach; ++j) moved[j] = c.role == MCC_DELTA ? moved[j] + decoded[j] : given[j] - decoded[j];
  write_eight(c.other, c.other_dtype, begin, c.count, moved);
}

/* Groups and rotated blocks of 8, 16, ... 256 numbers: neighboring lanes hold one, kWords words of eight each, and nothing leaves
 * their registers. */
template <bool kRotated, bool kTiled, int kBits, int kWords>
__global__ void quantize_lanes(mcc_codec c, Tiling t, int64_t coded) {
  static_assert(kWords == 1 || (kBits != 0 && !kRotated && !kTiled), "more words have no second tensor and no rotation");
  constexpr int kOwn = kWords * kEach;
  assume<kBits>(c);
  const int lanes = int(c.grid.group / kOwn), shift = __ffs(lanes) - 1;
  const int64_t shares = (coded + kOwn - 1) / kOwn, whole = (shares + kWarp - 1) / kWarp * kWarp;
  Needs needs(c.grid);
  if (kTiled && c.tiles.marked != nullptr) {
    const Needs wide(c.tiles.wide);
    needs.range |= wide.range, needs.sum |= wide.sum, needs.most |= wide.most;
  }
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float given[kOwn], v[kOwn];
    const int64_t begin = w * kOwn;
#pragma unroll
    for (int u = 0; u < kOwn; u += kEach) given_eight(c, begin + u, given + u);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) v[j] = given[j];
    bool turned = false;
    if (kRotated) rotate_lanes(v, c.grid.rotation);
    if (kTiled && !kRotated && c.tiles.some) {
      turned = turns(c, t, begin, v);
      rotate_some(v, c.grid.rotation, turned);
    }
    const Part part = kTiled ? part_of(c, t, begin) : Part{c.grid, c.codes, c.scales, begin};
    const mcc_grid &g = kTiled ? part.grid : c.grid;
    Extent e;
    measure<kOwn>(kTiled ? Needs(g) : needs, v, coded - begin, e);
    join_group(needs, e, lanes);
    const int64_t rest = coded - (w >> shift) * g.group;
    const Scale scale = rounded(g, c.scale_dtype, scale_of(g, e, rest < 0 ? 0 : rest < g.group ? rest : g.group));
    if (begin < coded && (w & (lanes - 1)) == 0)
      store_scale(g, part.scales, c.scale_dtype, part.at / kOwn >> shift, scale);
    const Factor step = factor_of(g, true, scale), unit = factor_of(g, false, scale);
#pragma unroll
    for (int u = 0; u < kOwn; u += kEach) {
      Codes codes = codes_of<true>(g, v + u, &step, part.at + u);
      if (begin + u + kEach > coded) codes = first_codes(codes, g.bits, coded - begin - u);
      if (begin + u < coded) write_codes(part.codes + (part.at + u) / kEach * g.bits, g.bits, codes);
      if (kWords == 1 && c.role != MCC_PLAIN) values_of<true>(g, codes, &unit, v);
    }
    if (kWords > 1 || c.role == MCC_PLAIN) continue;
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
    Codes codes = codes_of<!kChannels>(g, v, steps, part.at);
    if (begin + kEach > c.count) codes = first_codes(codes, g.bits, c.count - begin);
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
  const Needs needs(g);
  Extent e;
  for (int64_t begin = first + threadIdx.x * kEach; begin < stop; begin += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    given_eight(c, begin, v); /* zeros beyond the last number */
    measure<kEach>(needs, v, stop - begin, e);
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
  const Needs needs(c.grid);
  Extent e;
  if (column < c.grid.group)
    for (int64_t row = y; row < rows; row += 8) {
      const float v = given_at(c, row * c.grid.group + column);
      measure<1>(needs, &v, 1, e);
    }
  most[y][x] = needs.range ? e.greatest : e.most;
  least[y][x] = e.least;
  sum[y][x] = e.sum;
  __syncthreads();
  if (y != 0 || column >= c.grid.group) return;
  for (int i = 1; i < 8; ++i) {
    Extent other;
    (needs.range ? other.greatest : other.most) = most[i][x];
    other.least = least[i][x];
    other.sum = sum[i][x];
    join(e, other);
  }
  store_scale(c.grid, c.scales, c.scale_dtype, column, rounded(c.grid, c.scale_dtype, scale_of(c.grid, e, rows)));
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

/* The kernel of a usual codec, whose groups fit into a warp. Two words of a lane share what a group costs it. */
template <bool kRotated>
auto usual_encoder(int bits) {
  return of_usual_bits(bits, [](auto kBits) { return quantize_lanes<kRotated, false, kBits, kRotated ? 1 : 2>; });
}

void encode_lanes(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded) {
  const bool rotated = rotates_all(c), tiled = is_tiled(c);
  const int bits = usual_bits(c);
  if (bits != 0 && !rotated && c.grid.group >= 2 * kEach) {
    MCC_LAUNCH(usual_encoder<false>(bits), word_blocks((coded + 1) / 2, kThreads), kThreads, context, c, t, coded);
    return;
  }
  const auto kernel = rotated && bits != 0 ? usual_encoder<true>(bits)
                      : rotated            ? tiled ? quantize_lanes<true, true, 0, 1> : quantize_lanes<true, false, 0, 1>
                      : tiled              ? quantize_lanes<false, true, 0, 1>
                                           : quantize_lanes<false, false, 0, 1>;
  MCC_LAUNCH(kernel, word_blocks(coded, kThreads), kThreads, context, c, t, coded);
}

void encode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded) {
  if (group_in_warp(c.grid)) {
    encode_lanes(context, c, t, coded);
    return;
  }
  write_scales(context, c, t);
  const auto kernel = c.grid.layout == MCC_CHANNEL ? quantize_words<true, false>
                      : is_tiled(c)                ? quantize_words<false, true>
                                                   : quantize_words<false, false>;
  if (c.count > 0) MCC_LAUNCH(kernel, word_blocks(c.count, kThreads), kThreads, context, c, t);
}

}  // namespace cuda
}  // namespace mcc
