/* What a message decides block by block and tile by tile: rotations, and streams of two widths. */

/* Walsh-Hadamard transform of consecutive blocks, over the root of their size: its own inverse. */
inline void rotate(float *v, int64_t n, int64_t block) {
  const float scale = 1.0f / std::sqrt(float(block));
  for (int64_t b = 0; b < n; b += block) {
    for (int64_t h = 1; h < block; h *= 2) {
      for (int64_t i = 0; i < block; i += 2 * h) {
        float *x = v + b + i, *y = x + h;
        for (int64_t j = 0; j < h; ++j) {
          float sum = x[j] + y[j], difference = x[j] - y[j];
          x[j] = sum;
          y[j] = difference;
        }
      }
    }
    for (int64_t i = 0; i < block; ++i) v[b + i] *= scale;
  }
}

/* Whether a block's largest magnitude is finite and more than ``ratio`` times all others: the only one that is not less than
 * it once multiplied. */
inline bool stands_out(const float *v, int64_t n, float ratio) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(v[i]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  const float first = float_of(most);
  int32_t near = 0;
#pragma omp simd reduction(+ : near)
  for (int64_t i = 0; i < n; ++i) near += float_of(bits_of(v[i]) & 0x7fffffffu) * ratio >= first ? 1 : 0;
  return near == 1 && most < 0x7f800000u;
}

inline bool finds_blocks(const mcc_codec &c) { return c.tiles.some && c.tiles.ratio > 0.0f; }

inline void clear_map(const mcc_codec &c) {
  if (finds_blocks(c)) std::memset(c.tiles.rotated, 0, size_t((c.count / c.grid.rotation + 7) / 8));
}

/* Rotates those of n numbers from ``begin`` on whose blocks are found or in the map, in a copy in ``room``. */
inline const float *rotate_some(const mcc_codec &c, int64_t begin, int64_t n, const float *v, float *room) {
  const int64_t block = c.grid.rotation;
  for (int64_t i = 0; i + block <= n; i += block) {
    const int64_t number = (begin + i) / block;
    if (finds_blocks(c)) {
      if (!stands_out(v + i, block, c.tiles.ratio)) continue;
      /* Threads may share a byte. */
      __atomic_fetch_or(c.tiles.rotated + number / 8, uint8_t(1u << (number % 8)), __ATOMIC_RELAXED);
    } else if (!bit_of(c.tiles.rotated, number)) {
      continue;
    }
    if (v != room) std::memcpy(room, v, size_t(n) * 4);
    v = room;
    rotate(room + i, block, block);
  }
  return v;
}

/* Rotates n numbers from ``begin`` on back, of which ``padded`` are coded. */
inline void rotate_back(const mcc_codec &c, int64_t begin, int64_t n, int64_t padded, float *v) {
  const int64_t block = c.grid.rotation;
  if (block && !c.tiles.some) rotate(v, padded, block);
  if (!c.tiles.some) return;
  for (int64_t i = 0; i + block <= n; i += block)
    if (bit_of(c.tiles.rotated, (begin + i) / block)) rotate(v + i, block, block);
}

/* The streams of a message, and where each tile is in them. */
class Streams {
 public:
  Streams(const mcc_codec &c, int64_t total) : low_(c), wide_(c) {
    const mcc_tiles &t = c.tiles;
    if (t.marked == nullptr) return;
    wide_.grid = t.wide, wide_.codes = t.wide_codes, wide_.scales = t.wide_scales;
    tiles_ = total / t.tile;
    before_.resize(size_t(tiles_ / 64) + 1);
    for (int64_t i = 1; i < int64_t(before_.size()); ++i)
      before_[size_t(i)] = before_[size_t(i - 1)] + __builtin_popcountll(word(i - 1));
    all_ = marked_before(tiles_);
  }

  bool mixed() const { return low_.tiles.marked != nullptr; }
  const mcc_codec &of(TilePlace p) const { return p.wide ? wide_ : low_; }

  TilePlace place(int64_t tile) const {
    if (!mixed()) return {false, tile};
    const bool marked = tile < tiles_ && bit_of(low_.tiles.marked, tile);
    return place_of(marked, tile, marked_before(tile), all_, low_.tiles.more);
  }

  /* Calls run(codec, at, i, m) for the parts of [begin, begin + n) that lie together in a stream: its numbers from ``at`` on
   * are m from the i-th on. */
  template <class Run>
  void parts(int64_t begin, int64_t n, Run run) const {
    if (!mixed()) {
      run(low_, begin, int64_t(0), n);
      return;
    }
    const int64_t size = low_.tiles.tile;
    for (int64_t i = 0; i < n;) {
      const int64_t tile = (begin + i) / size, within = begin + i - tile * size;
      const TilePlace p = place(tile);
      int64_t m = size - within;
      for (int64_t next = 1; i + m < n; ++next, m += size) {
        const TilePlace q = place(tile + next);
        if (q.wide != p.wide || q.at != p.at + next) break;
      }
      m = std::min(m, n - i);
      run(of(p), p.at * size + within, i, m);
      i += m;
    }
  }

 private:
  /* The bits of 64 tiles. */
  uint64_t word(int64_t i) const {
    const int64_t left = (tiles_ + 7) / 8 - i * 8;
    uint64_t bits = 0;
    std::memcpy(&bits, low_.tiles.marked + i * 8, left >= 8 ? 8 : size_t(left));
    return bits;
  }

  int64_t marked_before(int64_t tile) const {
    const int64_t i = std::min(tile, tiles_) / 64, rest = std::min(tile, tiles_) % 64;
    return before_[size_t(i)] + (rest ? __builtin_popcountll(word(i) & ((uint64_t(1) << rest) - 1)) : 0);
  }

  mcc_codec low_, wide_;
  int64_t tiles_ = 0, all_ = 0;
  std::vector<int64_t> before_;
};
