/* What tiles lose when they are quantized: who gets one more bit is decided by it. */

#if MCC_AVX512

inline bool loses_64(const mcc_grid &g) { return g.group % 64 == 0 && g.method != MCC_L2 && !is_sign(g); }

/* Sums of neighbors. */
inline __m512 pair_sums(__m512 a, __m512 b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

/* Squares of what 16 numbers lose. */
template <bool kBased>
inline __m512 lost_16(const mcc_grid &g, const float *v, Factor step, Factor unit) {
  const __m512 magic = _mm512_set1_ps(kMagic), shift = _mm512_set1_ps(shift_of(g)), base = _mm512_set1_ps(step.base);
  const __m512 x = _mm512_loadu_ps(v);
  __m512 y = _mm512_mul_ps(kBased ? _mm512_sub_ps(x, base) : x, _mm512_set1_ps(step.by));
  y = _mm512_sub_ps(y, shift);
  y = _mm512_min_ps(_mm512_max_ps(y, _mm512_set1_ps(lowest(g))), _mm512_set1_ps(highest(g)));
  const __m512 level = _mm512_add_ps(_mm512_sub_ps(_mm512_add_ps(y, magic), magic), shift);
  const __m512 scaled = _mm512_mul_ps(level, _mm512_set1_ps(unit.by));
  const __m512 d = _mm512_sub_ps(x, kBased ? _mm512_add_ps(scaled, base) : scaled);
  return _mm512_mul_ps(d, d);
}

template <bool kBased>
inline void lose_64s(const mcc_grid &g, const float *v, Factor step, Factor unit, int64_t n, float *words) {
  for (int64_t i = 0; i < n; i += 64) {
    __m512 lost[4];
    for (int k = 0; k < 4; ++k) lost[k] = lost_16<kBased>(g, v + i + 16 * k, step, unit);
    const __m512 fours = pair_sums(pair_sums(lost[0], lost[1]), pair_sums(lost[2], lost[3]));
    _mm256_storeu_ps(words + i / 8, _mm512_castps512_ps256(pair_sums(fours, fours)));
  }
}

inline void lose_64(const mcc_grid &g, const float *v, Factor step, Factor unit, int64_t n, float *words) {
  is_minmax(g) ? lose_64s<true>(g, v, step, unit, n, words) : lose_64s<false>(g, v, step, unit, n, words);
}

#else

inline bool loses_64(const mcc_grid &) { return false; }
inline void measure_16s(const mcc_grid &, const float *, int64_t, Extent &) {}
inline void lose_64(const mcc_grid &, const float *, Factor, Factor, int64_t, float *) {}

#endif

/* The squares of what up to kChunk numbers lose, summed by eights. */
inline void lose(const mcc_grid &g, const float *v, Factor step, Factor unit, int64_t n, Buffers &b, float *words) {
  if (loses_64(g) && n % 64 == 0) {
    lose_64(g, v, step, unit, n, words);
    return;
  }
  quantize_run<0>(g, v, Factors{&step.by, &step.base}, n, 0, b.codes);
  dequantize_run<0>(g, b.codes, Factors{&unit.by, &unit.base}, n, b.decoded);
  for (int64_t i = 0; i < n; ++i) b.decoded[i] = v[i] - b.decoded[i];
  for (int64_t i = 0; i < n; i += 8) words[i / 8] = sum_of_squares(b.decoded + i);
}

/* A sum of neighbors, of neighbors of those, and so on: one order for all devices. */
inline float tree_sum(float *words, int64_t n) {
  while (n > 1) {
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; ++i) words[i] = words[2 * i] + words[2 * i + 1];
    if (n % 2) words[half] = words[n - 1];
    n = half + n % 2;
  }
  return words[0];
}

/* The error of a tile that lies together. */
inline float error_of(const mcc_grid &g, const float *v, int64_t tile, Buffers &b) {
  float words[kChunk / 8];
  for (int64_t i = 0; i < tile; i += g.group) {
    Extent e;
    loses_64(g) ? measure_16s(g, v + i, g.group, e) : measure(g, v + i, g.group, e);
    const Scale s = scale_of(g, e, g.group);
    lose(g, v + i, factor_of(g, true, s), factor_of(g, false, s), g.group, b, words + i / 8);
  }
  return tree_sum(words, tile / 8);
}

/* The error of a tile that is one group, larger than a chunk. */
inline float error_of_large(const mcc_codec &c, int64_t begin, int64_t tile, Buffers &b) {
  std::vector<float> words(static_cast<size_t>(tile / 8));
  const auto piece = [&](int64_t i, int64_t padded) {
    return source(c, begin + i, std::max<int64_t>(std::min(padded, c.count - begin - i), 0), padded, b);
  };
  Extent e;
  for (int64_t i = 0; i < tile; i += kChunk) {
    const int64_t n = std::min(kChunk, tile - i);
    measure(c.grid, piece(i, n), n, e);
  }
  const Scale s = scale_of(c.grid, e, tile);
  const Factor step = factor_of(c.grid, true, s), unit = factor_of(c.grid, false, s);
  for (int64_t i = 0; i < tile; i += kChunk) {
    const int64_t n = std::min(kChunk, tile - i);
    lose(c.grid, piece(i, n), step, unit, n, b, words.data() + i / 8);
  }
  return tree_sum(words.data(), tile / 8);
}

void tile_errors(const mcc_context *, const mcc_codec *codec, float *errors) {
  const mcc_codec &c = *codec;
  const int64_t tile = c.tiles.tile, total = padded_count(c, c.count), tiles = total / tile;
  const bool large = tile > kChunk;
  /* Whole tiles and whole blocks; of large tiles, one, and the rest in chunks. */
  const int64_t unit = std::max<int64_t>(tile, c.grid.rotation), chunk = large ? tile : kChunk / unit * unit;
  clear_map(c);
#pragma omp parallel if (total > kSerial)
  {
    Buffers b;
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < total; begin += chunk) {
      const int64_t padded = std::min(chunk, total - begin);
      if (large && begin / tile < tiles) {
        errors[begin / tile] = error_of_large(c, begin, tile, b);
        continue;
      }
      for (int64_t from = begin; from < begin + padded; from += kChunk) {
        const int64_t most = std::min(kChunk, begin + padded - from);
        const int64_t n = std::max<int64_t>(std::min(most, c.count - from), 0);
        const float *v = source(c, from, n, most, b); /* finds the blocks of short tiles, too */
        for (int64_t i = 0; !large && i + tile <= most; i += tile) errors[(from + i) / tile] = error_of(c.grid, v + i, tile, b);
      }
    }
  }
}

void mark_tiles(const mcc_context *, const int64_t *indices, int64_t count, uint8_t *map, int64_t bytes) {
  std::memset(map, 0, size_t(bytes));
  for (int64_t i = 0; i < count; ++i) map[indices[i] / 8] |= uint8_t(1u << (indices[i] % 8));
}
