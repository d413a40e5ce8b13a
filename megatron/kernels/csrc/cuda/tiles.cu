/* Maps of tiles and blocks, and what tiles lose when they are quantized. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

#include "tiles.h"

constexpr int kTileThreads = 256, kMapBytes = 4 * kTileThreads; /* of a map, to a block of threads */

/* Marked tiles in a byte of the map. */
__device__ __forceinline__ uint32_t marked_in(const uint8_t *map, int64_t byte, int64_t tiles) {
  const int64_t left = tiles - byte * 8;
  if (left <= 0) return 0;
  return uint32_t(__popc(map[byte] & (left >= 8 ? 0xffu : (1u << unsigned(left)) - 1u)));
}

__global__ void count_marked(const uint8_t *map, int64_t tiles, uint32_t *counts) {
  __shared__ uint32_t room[33];
  uint32_t own = 0;
  for (int64_t i = 0; i < kMapBytes; i += kTileThreads) own += marked_in(map, blockIdx.x * int64_t(kMapBytes) + i + threadIdx.x, tiles);
  own = block_sum(own, room);
  if (threadIdx.x == 0) counts[blockIdx.x] = own;
}

__global__ void rank_marked(const uint8_t *map, int64_t tiles, const uint32_t *counts, uint32_t *before) {
  __shared__ uint32_t room[33];
  const int64_t bytes = (tiles + 7) / 8, first = blockIdx.x * int64_t(kMapBytes) + threadIdx.x * 4;
  uint32_t earlier = 0, own = 0, all = 0;
  for (int64_t b = threadIdx.x; b < blockIdx.x; b += blockDim.x) earlier += counts[b];
  earlier = block_sum(earlier, room);
  for (int j = 0; j < 4; ++j) own += marked_in(map, first + j, tiles);
  uint32_t rank = earlier + block_scan(own, room, all);
  for (int j = 0; j < 4 && first + j < bytes; ++j) {
    before[first + j] = rank;
    rank += marked_in(map, first + j, tiles);
    if (first + j + 1 == bytes) before[bytes] = rank;
  }
}

__global__ void pack_flags(const uint8_t *flags, int64_t count, uint8_t *map) {
  for (int64_t b = thread_index(); b * 8 < count; b += thread_total()) {
    unsigned bits = 0;
    for (int j = 0; j < 8 && b * 8 + j < count; ++j) bits |= unsigned(flags[b * 8 + j]) << j;
    map[b] = uint8_t(bits);
  }
}

__global__ void mark_bits(const int64_t *indices, int64_t count, uint8_t *map, int64_t bytes) {
  for (int64_t b = thread_index(); b < bytes; b += thread_total()) {
    int64_t low = 0, high = count; /* the first index that is not below this byte's */
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indices[middle] < b * 8) low = middle + 1;
      else high = middle;
    }
    unsigned bits = 0;
    for (; low < count && indices[low] < b * 8 + 8; ++low) bits |= 1u << unsigned(indices[low] - b * 8);
    map[b] = uint8_t(bits);
  }
}

Tiling tiling_of(const mcc_context *context, const mcc_codec &c, int64_t coded) {
  Tiling t = {nullptr, 0, nullptr};
  if (finds_blocks(c)) t.flags = static_cast<uint8_t *>(context->workspace(context->owner, size_t(c.count / c.grid.rotation + 1)));
  if (c.tiles.marked == nullptr) return t;
  t.tiles = coded / c.tiles.tile;
  const int64_t bytes = blocks_for(t.tiles, 8), blocks = blocks_for(bytes, kMapBytes);
  uint32_t *before = static_cast<uint32_t *>(context->workspace(context->owner, size_t(bytes + 1 + blocks) * 4));
  uint32_t *counts = before + bytes + 1;
  MCC_LAUNCH(count_marked, grid_of(blocks), kTileThreads, context, c.tiles.marked, t.tiles, counts);
  MCC_LAUNCH(rank_marked, grid_of(blocks), kTileThreads, context, c.tiles.marked, t.tiles, counts, before);
  t.before = before;
  return t;
}

void write_blocks(const mcc_context *context, const mcc_codec &c, const Tiling &t) {
  const int64_t blocks = finds_blocks(c) ? c.count / c.grid.rotation : 0;
  if (blocks == 0) return;
  MCC_LAUNCH(pack_flags, grid_of(blocks_for(blocks, 8 * kTileThreads)), kTileThreads, context, t.flags, blocks, c.tiles.rotated);
}

void mark_tiles(const mcc_context *context, const int64_t *indices, int64_t count, uint8_t *map, int64_t bytes) {
  if (bytes == 0) return;
  MCC_LAUNCH(mark_bits, grid_of(blocks_for(bytes, kTileThreads)), kTileThreads, context, indices, count, map, bytes);
}

/* The sum of squares of what eight numbers lose. */
__device__ __forceinline__ float lost(const mcc_grid &g, const float *v, Scale scale) {
  const Factor step = factor_of(g, true, scale), unit = factor_of(g, false, scale);
  float d[kEach];
  values_of<true>(g, codes_of<true>(g, v, &step, 0), &unit, d);
#pragma unroll
  for (int j = 0; j < kEach; ++j) d[j] = v[j] - d[j];
  return sum_of_squares(d);
}

/* Groups, blocks and tiles of 8, 16, ... 256 numbers: neighboring lanes hold one. */
template <bool kRotated>
__global__ void errors_in_lanes(mcc_codec c, Tiling t, int64_t coded, float *errors) {
  const mcc_grid &g = c.grid;
  const int lanes = int(g.group / kEach), tile_lanes = int(c.tiles.tile / kEach);
  const int64_t words = (coded + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  const Needs needs(g);
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float v[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, v);
    if (kRotated) rotate_lanes(v, g.rotation);
    if (!kRotated && c.tiles.some) rotate_some(v, g.rotation, turns(c, t, begin, v));
    Extent e;
    measure<kEach>(needs, v, coded - begin, e);
    join_group(needs, e, lanes);
    float sum = lost(g, v, scale_of(g, e, g.group));
    for (int d = 1; d < tile_lanes; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
    const int64_t tile = w / tile_lanes;
    if (w == tile * tile_lanes && tile < c.tiles.more) errors[tile] = sum;
  }
}

/* A block for each tile, with scales that lie there already, in fp32. Neighbors are added first: those of as many words as
 * there are threads, then spans of those, whose sums wait until a neighbor of the same size comes. */
__global__ void errors_of_tiles(mcc_codec c, float *errors) {
  __shared__ float room[kWarp], waiting[64];
  const mcc_grid &g = c.grid;
  const int64_t first = blockIdx.x * c.tiles.tile, words = c.tiles.tile / kEach;
  const int lane = threadIdx.x % kWarp;
  for (int64_t span = 0; span * kTileThreads < words; ++span) {
    const int64_t w = span * kTileThreads + threadIdx.x, begin = first + w * kEach;
    float sum = 0.0f;
    if (w < words) {
      float v[kEach];
      given_eight(c, begin, v);
      const int64_t group = quotient(begin, g.group);
      const bool pair = is_minmax(g);
      const float *scales = static_cast<const float *>(c.scales) + (pair ? 2 * group : group);
      sum = lost(g, v, {scales[0], pair ? scales[1] : 0.0f});
    }
    for (int d = 1; d < kWarp; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (lane == 0) room[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int d = 1; d < kTileThreads / kWarp; d *= 2)
        for (int i = 0; i < kTileThreads / kWarp; i += 2 * d) room[i] += room[i + d];
      float carried = room[0];
      int level = 0;
      for (int64_t i = span; i & 1; i >>= 1) carried = waiting[level++] + carried;
      waiting[level] = carried;
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  /* The spans that wait, the last ones first: they have no neighbors. */
  const int64_t spans = (words + kTileThreads - 1) / kTileThreads;
  bool any = false;
  float total = 0.0f;
  for (int level = 0; (spans >> level) != 0; ++level) {
    if (!((spans >> level) & 1)) continue;
    total = any ? waiting[level] + total : waiting[level];
    any = true;
  }
  errors[blockIdx.x] = total;
}

void tile_errors(const mcc_context *context, const mcc_codec *codec, float *errors) {
  mcc_codec c = *codec;
  const int64_t coded = coded_count(c), tiles = coded / c.tiles.tile, tile = c.tiles.tile;
  if (c.count == 0) return;
  const Tiling t = tiling_of(context, c, coded);
  if (group_in_warp(c.grid) && c.grid.rotation <= kInWarp && tile <= kInWarp && (tile & (tile - 1)) == 0) {
    c.tiles.more = tiles;
    const auto kernel = rotates_all(c) ? errors_in_lanes<true> : errors_in_lanes<false>;
    MCC_LAUNCH(kernel, word_blocks(coded, 128), 128, context, c, t, coded, errors);
    write_blocks(context, c, t);
    return;
  }
  if (c.grid.rotation) c = rotated_codec(context, c, t);
  c.scale_dtype = MCC_FP32;
  c.scales = context->workspace(context->owner, size_t(blocks_for(coded, c.grid.group) * 8));
  write_scales(context, c, t);
  if (tiles > 0) MCC_LAUNCH(errors_of_tiles, grid_of(tiles), kTileThreads, context, c, errors);
}

}  // namespace cuda
}  // namespace mcc
