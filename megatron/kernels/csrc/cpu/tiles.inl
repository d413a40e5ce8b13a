/* What a message decides block by block and tile by tile: rotations, and streams of two widths. */

#if MCC_AVX512

/* One step of the transform below in every 16 numbers: a lane and the one that the shuffle gave, the upper ones marked. */
inline __m512 butterfly(__m512 x, __m512 other, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), upper, other, x);
}

inline __m512 rotated_16(__m512 x) {
  x = butterfly(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
  x = butterfly(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
  x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
  return butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
}

/* Blocks of kVectors times 16 numbers, or what their part of a larger one is, in registers. */
template <int kVectors>
inline void rotate_vectors(float *v, int64_t n, __m512 scale) {
  for (int64_t i = 0; i < n; i += 16 * kVectors) {
    __m512 x[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) x[k] = rotated_16(_mm512_loadu_ps(v + i + 16 * k));
#pragma GCC unroll 2
    for (int h = 1; h < kVectors; h *= 2) {
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        if (k & h) continue;
        const __m512 a = x[k], b = x[k + h];
        x[k] = _mm512_add_ps(a, b), x[k + h] = _mm512_sub_ps(a, b);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) _mm512_storeu_ps(v + i + 16 * k, _mm512_mul_ps(x[k], scale));
  }
}

/* ``rotate`` of blocks of whole 16s. */
inline void rotate_16s(float *v, int64_t n, int64_t block) {
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(block)));
  if (block == 16) return rotate_vectors<1>(v, n, scale);
  if (block == 32) return rotate_vectors<2>(v, n, scale);
  rotate_vectors<4>(v, n, block == 64 ? scale : _mm512_set1_ps(1.0f));
  for (int64_t h = 64; h < block; h *= 2) {
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

#if MCC_AVX512

/* The largest and the second-largest magnitudes of sets of numbers, as bits. */
struct Two {
  __m512i first, second;
};

inline Two join(Two a, Two b) {
  const __m512i less = _mm512_min_epu32(a.first, b.first), seconds = _mm512_max_epu32(a.second, b.second);
  return {_mm512_max_epu32(a.first, b.first), _mm512_max_epu32(less, seconds)};
}

template <int kLow, int kHigh>
inline Two join_quarters(Two a, Two b) {
  return join({_mm512_shuffle_i32x4(a.first, b.first, kLow), _mm512_shuffle_i32x4(a.second, b.second, kLow)},
              {_mm512_shuffle_i32x4(a.first, b.first, kHigh), _mm512_shuffle_i32x4(a.second, b.second, kHigh)});
}

/* ``stands_out`` of ``count`` blocks of whole 16s, up to 16; in steps as those of extremes_16. Inlined, as callers may know the
 * blocks' size. */
__attribute__((always_inline)) inline __mmask16 stand_out_16(const float *v, int64_t count, int64_t block, float ratio) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), zero = _mm512_setzero_si512();
  Two all[16], rows[4];
  for (int64_t k = count; k < 16; ++k) all[k] = {zero, zero};
  for (int64_t k = 0; k < count; ++k) {
    const float *from = v + k * block;
    Two own = {zero, zero};
    for (int64_t i = 0; i < block; i += 16) {
      const __m512i x = _mm512_and_si512(_mm512_loadu_si512(from + i), magnitude);
      own.second = _mm512_max_epu32(own.second, _mm512_min_epu32(own.first, x));
      own.first = _mm512_max_epu32(own.first, x);
    }
    all[k] = own;
  }
  for (int j = 0; j < 4; ++j)
    rows[j] = join_quarters<0x88, 0xdd>(join_quarters<0x88, 0xdd>(all[j], all[4 + j]),
                                        join_quarters<0x88, 0xdd>(all[8 + j], all[12 + j]));
  Two pairs[2];
  for (int j = 0; j < 2; ++j) {
    const Two a = rows[2 * j], b = rows[2 * j + 1];
    pairs[j] = join({_mm512_unpacklo_epi32(a.first, b.first), _mm512_unpacklo_epi32(a.second, b.second)},
                    {_mm512_unpackhi_epi32(a.first, b.first), _mm512_unpackhi_epi32(a.second, b.second)});
  }
  const Two a = pairs[0], b = pairs[1];
  const Two found = join({_mm512_unpacklo_epi64(a.first, b.first), _mm512_unpacklo_epi64(a.second, b.second)},
                         {_mm512_unpackhi_epi64(a.first, b.first), _mm512_unpackhi_epi64(a.second, b.second)});
  const __m512 bound = _mm512_mul_ps(_mm512_castsi512_ps(found.second), _mm512_set1_ps(ratio));
  return _mm512_cmp_ps_mask(_mm512_castsi512_ps(found.first), bound, _CMP_GT_OQ) &
         _mm512_cmplt_epu32_mask(found.first, _mm512_set1_epi32(0x7f800000));
}

#endif

/* ``stands_out`` of several blocks. */
inline void stand_out(const float *v, int64_t blocks, int64_t block, float ratio, bool *out) {
#if MCC_AVX512
  for (int64_t k = 0; block % 16 == 0 && k < blocks; k += 16) {
    const int64_t count = std::min<int64_t>(blocks - k, 16);
    const float *from = v + k * block;
    const __mmask16 found = block == 64 ? stand_out_16(from, count, 64, ratio) : stand_out_16(from, count, block, ratio);
    for (int64_t j = 0; j < count; ++j) out[k + j] = (found >> j) & 1;
  }
  if (block % 16 == 0) return;
#endif
  for (int64_t k = 0; k < blocks; ++k) out[k] = stands_out(v + k * block, block, ratio);
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
  if (finds_blocks(c)) stand_out(v, blocks, block, c.tiles.ratio, turns);
  else
    for (int64_t k = 0; k < blocks; ++k) turns[k] = bit_of(c.tiles.rotated, first + k);
  for (int64_t k = 0; k < blocks; ++k) {
    if (!turns[k]) continue;
    if (finds_blocks(c)) {
      uint8_t *byte = c.tiles.rotated + (first + k) / 8;
      const uint8_t bit = uint8_t(1u << ((first + k) % 8));
      /* The chunks of several threads may share a byte if they have fewer blocks than it has bits. */
      if (block * 8 <= kChunk) *byte |= bit;
      else __atomic_fetch_or(byte, bit, __ATOMIC_RELAXED);
    }
    if (v != room) copy_numbers(room, v, n);
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

  /* Whether as many tiles are marked as there is room for, which then are those of the wide stream. */
  bool exact() const { return mixed() && all_ == low_.tiles.more; }
  bool marked(int64_t tile) const { return tile < tiles_ && bit_of(low_.tiles.marked, tile); }

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
    const bool wide = marked(tile);
    const TilePlace p = place_of(wide, tile, before, all_, low_.tiles.more);
    ++tile, before += wide;
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
