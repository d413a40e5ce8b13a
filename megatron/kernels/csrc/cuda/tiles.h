/* What a message decides block by block and tile by tile, and what its kernels share. Included inside a namespace, after
 * words.h. */

/* What the kernels of a message know of its tiles: ``before`` each byte of the map of marked tiles, and behind the last one,
 * how many are marked; room for a flag for each block whose rotation is found here. */
struct Tiling {
  const uint32_t *before;
  int64_t tiles;
  uint8_t *flags;
};

/* Where eight numbers are coded. */
struct Part {
  mcc_grid grid;
  uint8_t *codes;
  void *scales;
  int64_t at; /* the first one in its stream */
};

__device__ __forceinline__ int64_t quotient(int64_t x, int64_t by) {
  return (by & (by - 1)) == 0 ? x >> (__ffsll(by) - 1) : x / by;
}

__device__ __forceinline__ Part part_of(const mcc_codec &c, const Tiling &t, int64_t begin) {
  if (c.tiles.marked == nullptr) return {c.grid, c.codes, c.scales, begin};
  const int64_t size = c.tiles.tile, tile = quotient(begin, size), bytes = (t.tiles + 7) / 8;
  const int64_t all = t.before[bytes];
  bool marked = false;
  int64_t before = all;
  if (tile < t.tiles) {
    const unsigned bits = c.tiles.marked[tile >> 3], bit = unsigned(tile & 7);
    marked = (bits >> bit) & 1u;
    before = t.before[tile >> 3] + __popc(bits & ((1u << bit) - 1u));
  }
  const TilePlace p = place_of(marked, tile, before, all, c.tiles.more);
  const int64_t at = p.at * size + (begin - tile * size);
  if (p.wide) return {c.tiles.wide, c.tiles.wide_codes, c.tiles.wide_scales, at};
  return {c.grid, c.codes, c.scales, at};
}

/* Whether the lane's block of up to 256 numbers is rotated. All lanes of a warp call it. */
__device__ __forceinline__ bool turns(const mcc_codec &c, const Tiling &t, int64_t begin, const float *v) {
  const int block = c.grid.rotation, shift = __ffs(block) - 1;
  const int64_t number = begin >> shift;
  const bool whole = number < (c.count >> shift);
  if (c.tiles.ratio == 0.0f) return whole && bit_of(c.tiles.rotated, number);
  uint32_t most = 0;
  int near = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t u = bits_of(v[j]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  for (int d = 1; d * kEach < block; d *= 2) {
    const uint32_t other = __shfl_xor_sync(kAll, most, d);
    most = other > most ? other : most;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) near += fabsf(v[j]) * c.tiles.ratio >= float_of(most) ? 1 : 0;
  for (int d = 1; d * kEach < block; d *= 2) near += __shfl_xor_sync(kAll, near, d);
  const bool found = whole && near == 1 && most < 0x7f800000u;
  if (whole && (begin & (block - 1)) == 0) t.flags[number] = found;
  return found;
}

/* Rotates the lanes' numbers where their block ``turns``. All lanes of a warp call it. */
__device__ __forceinline__ void rotate_some(float *v, int block, bool turns) {
  if (__ballot_sync(kAll, turns) == 0) return;
  float rotated[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) rotated[j] = v[j];
  rotate_lanes(rotated, block);
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = turns ? rotated[j] : v[j];
}

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

constexpr int kInWarp = kWarp * kEach; /* numbers that the lanes of a warp hold */

inline bool group_in_warp(const mcc_grid &g) {
  return g.layout == MCC_GROUP && g.group <= kInWarp && (g.group & (g.group - 1)) == 0;
}

inline bool rotates_all(const mcc_codec &c) { return c.grid.rotation != 0 && !c.tiles.some; }
inline bool is_tiled(const mcc_codec &c) { return c.tiles.some || c.tiles.marked != nullptr; }
inline bool finds_blocks(const mcc_codec &c) { return c.tiles.some && c.tiles.ratio > 0.0f; }

/* Numbers that are coded: those of a rotation's last block, too. */
inline int64_t coded_count(const mcc_codec &c) {
  return rotates_all(c) ? blocks_for(c.count, c.grid.rotation) * c.grid.rotation : c.count;
}

inline unsigned word_blocks(int64_t count, int threads) {
  const int64_t blocks = blocks_for(blocks_for(count, kEach), threads);
  return grid_of(blocks < 16384 ? blocks : 16384);
}

/* The bits of a usual codec: groups, the largest magnitude as their scale, the default levels of so many bits, no second tensor,
 * and nothing decided by tiles. Others have 0. */
inline int usual_bits(const mcc_codec &c) {
  const bool plain = c.role == MCC_PLAIN && c.grid.layout == MCC_GROUP && c.grid.method == MCC_MAX && !is_tiled(c);
  return plain && c.grid.bits > 1 && c.grid.kind == (c.grid.bits > 3 ? MCC_SYMMETRIC : MCC_SIGNED) ? c.grid.bits : 0;
}

/* Tells the compiler what is known of a codec of so many usual bits: its kernel has half as many instructions then, which are
 * its limit rather than memory. */
template <int kBits>
__device__ __forceinline__ void assume(mcc_codec &c) {
  if (kBits == 0) return;
  c.role = MCC_PLAIN;
  c.grid.layout = MCC_GROUP;
  c.grid.method = MCC_MAX;
  c.grid.bits = kBits;
  c.grid.kind = kBits > 3 ? MCC_SYMMETRIC : MCC_SIGNED;
}

/* What ``kernel`` gives for a usual codec's bits, which it is handed as a type. */
template <class Kernel>
auto of_usual_bits(int bits, const Kernel &kernel) {
  switch (bits) {
    case 2: return kernel(std::integral_constant<int, 2>());
    case 3: return kernel(std::integral_constant<int, 3>());
    case 4: return kernel(std::integral_constant<int, 4>());
    case 5: return kernel(std::integral_constant<int, 5>());
    case 6: return kernel(std::integral_constant<int, 6>());
    case 7: return kernel(std::integral_constant<int, 7>());
    default: return kernel(std::integral_constant<int, 8>());
  }
}

/* In tiles.cu: counts the marked tiles, and finds room for flags; writes the flags as a map. */
Tiling tiling_of(const mcc_context *context, const mcc_codec &c, int64_t coded);
void write_blocks(const mcc_context *context, const mcc_codec &c, const Tiling &t);

/* In encode.cu: scales of numbers that need no rotation; scales, codes and the second tensor. */
void write_scales(const mcc_context *context, const mcc_codec &c, const Tiling &t);
void encode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded);

/* In decode.cu: what a decoder writes. */
void decode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded);

/* In quantize.cu: a codec of the rotated numbers, which lie in memory then. */
mcc_codec rotated_codec(const mcc_context *context, const mcc_codec &c, const Tiling &t);
