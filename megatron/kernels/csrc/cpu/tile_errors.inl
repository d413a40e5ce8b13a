/* What tiles lose when they are quantized: who gets one more bit is decided by it. */

#if MCC_AVX512

inline bool loses_64(const mcc_grid &g) { return g.group % 64 == 0 && g.method != MCC_L2 && !is_sign(g); }

/* Sums of neighbors in every quarter, those of a before those of b. */
inline __m512 pair_sums(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
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
    /* Quarters of fours first, then quarters that are neighbors. */
    __m512 sum = pair_sums(pair_sums(lost[0], lost[1]), pair_sums(lost[2], lost[3]));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e));
    sum = pair_sums(sum, sum);
    words[i / 64] = _mm512_cvtss_f32(pair_sums(sum, sum));
  }
}

inline void lose_64(const mcc_grid &g, const float *v, Factor step, Factor unit, int64_t n, float *words) {
  is_minmax(g) ? lose_64s<true>(g, v, step, unit, n, words) : lose_64s<false>(g, v, step, unit, n, words);
}

/* The squares of what the groups of up to kChunk numbers lose, in sums of neighbors. */
template <int kKind>
inline void lose_groups_64(mcc_grid g, const float *v, int64_t n, float *words) {
  g.kind = kKind, g.method = MCC_MAX, g.stochastic = 0; /* known here, as in quantize_64 */
  if (is_sign(g)) __builtin_unreachable(); /* ``loses_64`` */
  FactorsOf16<true> factors;
  factors.find(nullptr, g, v, 0, quotient(n, g.group));
  for (int64_t i = 0, k = 0; i < n; i += g.group, ++k) {
    const Factor step = {factors.step[k], factors.base[k]}, unit = {factors.unit[k], factors.base[k]};
    lose_64s<kKind == MCC_MINMAX>(g, v + i, step, unit, g.group, words + i / 64);
  }
}

inline void lose_groups_64(const mcc_grid &g, const float *v, int64_t n, float *words) {
  switch (g.kind) {
    case MCC_SYMMETRIC: return lose_groups_64<MCC_SYMMETRIC>(g, v, n, words);
    case MCC_ASYMMETRIC: return lose_groups_64<MCC_ASYMMETRIC>(g, v, n, words);
    case MCC_MIDRISE: return lose_groups_64<MCC_MIDRISE>(g, v, n, words);
    case MCC_SIGNED: return lose_groups_64<MCC_SIGNED>(g, v, n, words);
    default: return lose_groups_64<MCC_MINMAX>(g, v, n, words);
  }
}

#else

inline bool loses_64(const mcc_grid &) { return false; }
inline void lose_64(const mcc_grid &, const float *, Factor, Factor, int64_t, float *) {}
inline void lose_groups_64(const mcc_grid &, const float *, int64_t, float *) {}

#endif

/* How many squares ``lose`` sums. */
inline int64_t summed(const mcc_grid &g) { return loses_64(g) ? 64 : 8; }

/* The squares of what up to kChunk numbers lose, in sums of neighbors. */
inline void lose(const mcc_grid &g, const float *v, Factor step, Factor unit, int64_t n, Buffers &b, float *words) {
  if (loses_64(g)) {
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

/* The errors of the whole tiles among up to kChunk numbers that lie together. */
inline void errors_of(const mcc_grid &g, const float *v, int64_t n, int64_t tile, Buffers &b, float *errors) {
  const int64_t whole = n / tile * tile, each = summed(g);
  float words[kChunk / 8];
  Factor steps[kChunk / 8], units[kChunk / 8];
  if (loses_64(g)) {
    lose_groups_64(g, v, whole, words);
  } else {
    /* The scales of all groups first, so that they do not wait for each other. */
    for (int64_t i = 0, k = 0; i < whole; i += g.group, ++k) {
      Extent e;
      measure(g, v + i, g.group, e);
      const Scale s = scale_of(g, e, g.group);
      steps[k] = factor_of(g, true, s), units[k] = factor_of(g, false, s);
    }
    for (int64_t i = 0, k = 0; i < whole; i += g.group, ++k) lose(g, v + i, steps[k], units[k], g.group, b, words + i / each);
  }
  for (int64_t i = 0, k = 0; i < whole; i += tile, ++k) errors[k] = tree_sum(words + i / each, tile / each);
}

/* The error of a tile that is one group, larger than a chunk. */
inline float error_of_large(const mcc_codec &c, int64_t begin, int64_t tile, Buffers &b) {
  const int64_t each = summed(c.grid);
  std::vector<float> words(static_cast<size_t>(tile / each));
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
    lose(c.grid, piece(i, n), step, unit, n, b, words.data() + i / each);
  }
  return tree_sum(words.data(), tile / each);
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
        if (!large) errors_of(c.grid, v, most, tile, b, errors + from / tile);
      }
    }
  }
}

void mark_tiles(const mcc_context *, const int64_t *indices, int64_t count, uint8_t *map, int64_t bytes) {
  std::memset(map, 0, size_t(bytes));
  for (int64_t i = 0; i < count; ++i) map[indices[i] / 8] |= uint8_t(1u << (indices[i] % 8));
}
