/* What a message decides block by block and tile by tile: rotations, and streams of two widths. */

#if MCC_AVX512

/* One step of the transform below in every 16 numbers: a lane and the one that the shuffle gave, the upper ones marked. */
inline __m512 butterfly(__m512 x, __m512 other, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), upper, other, x);
}

/* ``rotate`` of blocks of whole 16s. */
inline void rotate_16s(float *v, int64_t n, int64_t block) {
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(block)));
  for (int64_t i = 0; i < n; i += 16) {
    __m512 x = _mm512_loadu_ps(v + i);
    x = butterfly(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
    x = butterfly(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
    x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
    x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
    _mm512_storeu_ps(v + i, block == 16 ? _mm512_mul_ps(x, scale) : x);
  }
  for (int64_t h = 16; h < block; h *= 2) {
    const bool last = 2 * h == block;
    for (int64_t i = 0; i < n; i += 2 * h) {
      for (int64_t j = i; j < i + h; j += 16) {
        const __m512 a = _mm512_loadu_ps(v + j), b = _mm512_loadu_ps(v + j + h);
        const __m512 sum = _mm512_add_ps(a, b), difference = _mm512_sub_ps(a, b);
        _mm512_storeu_ps(v + j, last ? _mm512_mul_ps(sum, scale) : sum);
        _mm512_storeu_ps(v + j + h, last ? _mm512_mul_ps(difference, scale) : difference);
      }
    }
  }
}

#else

inline void rotate_16s(float *, int64_t, int64_t) {}

#endif

/* Walsh-Hadamard transform of consecutive blocks, over the root of their size: its own inverse. */
inline void rotate(float *v, int64_t n, int64_t block) {
  if (MCC_AVX512 && block >= 16) {
    rotate_16s(v, n, block);
    return;
  }
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
#if MCC_AVX512
  if (n % 16 == 0) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16)
      largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(v + i), magnitude));
    const uint32_t top = _mm512_reduce_max_epu32(largest);
    const __m512 first = _mm512_set1_ps(float_of(top)), by = _mm512_set1_ps(ratio);
    int near = 0;
    for (int64_t i = 0; i < n; i += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_abs_ps(_mm512_loadu_ps(v + i)), by);
      near += __builtin_popcount(_mm512_cmp_ps_mask(x, first, _CMP_GE_OQ));
    }
    return near == 1 && top < 0x7f800000u;
  }
#endif
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

/* Rotates those of up to kChunk numbers from ``begin`` on whose blocks are found or in the map, in a copy in ``room``. */
inline const float *rotate_some(const mcc_codec &c, int64_t begin, int64_t n, const float *v, float *room) {
  const int64_t block = c.grid.rotation, blocks = n / block, first = begin / block;
  bool turns[kChunk / 8];
  /* Found before any is rotated, so that the blocks do not wait for each other. */
  for (int64_t k = 0; k < blocks; ++k)
    turns[k] = finds_blocks(c) ? stands_out(v + k * block, block, c.tiles.ratio) : bit_of(c.tiles.rotated, first + k);
  for (int64_t k = 0; k < blocks; ++k) {
    if (!turns[k]) continue;
    if (finds_blocks(c)) {
      uint8_t *byte = c.tiles.rotated + (first + k) / 8;
      const uint8_t bit = uint8_t(1u << ((first + k) % 8));
      /* The chunks of several threads may share a byte if they have fewer blocks than it has bits. */
      if (block * 8 <= kChunk) *byte |= bit;
      else __atomic_fetch_or(byte, bit, __ATOMIC_RELAXED);
    }
    if (v != room) std::memcpy(room, v, size_t(n) * 4);
    v = room;
    rotate(room + k * block, block, block);
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
    int64_t before = marked_before(tile);
    return next_place(tile, before);
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
    int64_t tile = begin / size, within = begin - tile * size, before = marked_before(tile);
    TilePlace p = next_place(tile, before);
    for (int64_t i = 0; i < n; within = 0) {
      const TilePlace first = p;
      int64_t m = size - within;
      for (;; m += size) {
        p = next_place(tile, before);
        if (i + m >= n || p.wide != first.wide || p.at != first.at + (m + within) / size) break;
      }
      m = std::min(m, n - i);
      run(of(first), first.at * size + within, i, m);
      i += m;
    }
  }

 private:
  /* The place of a tile which ``before`` marked ones precede, both of which move on. */
  TilePlace next_place(int64_t &tile, int64_t &before) const {
    const bool marked = tile < tiles_ && bit_of(low_.tiles.marked, tile);
    const TilePlace p = place_of(marked, tile, before, all_, low_.tiles.more);
    ++tile, before += marked;
    return p;
  }

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
