/* What is used most, in registers: any bits but a sign's, to nearest, 64 numbers at a time. The same operations in the same order
 * as in quantize.inl, so the same bits. */

#if MCC_AVX512

inline bool quantizes_64(const mcc_codec &c, int64_t n) {
  const mcc_grid &g = c.grid;
  const bool even = g.layout == MCC_TENSOR ? n % 64 == 0
                                           : g.layout == MCC_GROUP && g.group % 64 == 0 && n % g.group == 0 &&
                                                 g.group <= kChunk && g.method != MCC_L2;
  return !is_sign(g) && even && !g.stochastic;
}

inline bool dequantizes_64(const mcc_codec &c, int64_t n) {
  const mcc_grid &g = c.grid;
  const bool even = g.layout == MCC_TENSOR || (g.layout == MCC_GROUP && g.group % 64 == 0);
  return !is_sign(g) && even && n % 64 == 0;
}

/* Eight words of eight codes each to kBits words. */
template <int kBits>
inline void pack_words_64(const uint64_t *eights, uint8_t *out) {
  uint64_t packed = 0;
  int filled = 0;
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const uint64_t word = _pext_u64(eights[k], 0x0101010101010101ull * ((1u << kBits) - 1));
    packed |= word << filled;
    filled += 8 * kBits;
    if (filled < 64) continue;
    std::memcpy(out, &packed, 8);
    out += 8, filled -= 64;
    packed = filled ? word >> (8 * kBits - filled) : 0;
  }
}

/* Codes of eight numbers, the k-th word of 8. */
template <int kBits>
inline uint64_t word_of_64(const uint8_t *in, int k) {
  /* No byte behind the last code's is read. */
  const int at = k * kBits, from = at < 8 * kBits - 8 ? at : 8 * kBits - 8;
  uint64_t word;
  std::memcpy(&word, in + from, 8);
  return _pdep_u64(word >> (8 * (at - from)), 0x0101010101010101ull * ((1u << kBits) - 1));
}

template <int kBits>
inline void unpack_words_64(const uint8_t *in, __m128i *codes) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
    codes[k] = _mm_set_epi64x(int64_t(word_of_64<kBits>(in, 2 * k + 1)), int64_t(word_of_64<kBits>(in, 2 * k)));
}

/* 64 codes, a byte each, to 8 bytes for each bit. */
inline void pack_64(__m512i codes, int bits, uint8_t *out) {
  if (bits == 8) {
    _mm512_storeu_si512(out, codes);
    return;
  }
  if (bits == 2 || bits == 4) {
    const __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(bits == 4 ? 0x1001 : 0x0401));
    if (bits == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm512_cvtepi16_epi8(pairs));
      return;
    }
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_cvtepi32_epi8(fours));
    return;
  }
  alignas(64) uint64_t eights[8];
  _mm512_store_si512(eights, codes);
  switch (bits) {
    case 1: return pack_words_64<1>(eights, out);
    case 3: return pack_words_64<3>(eights, out);
    case 5: return pack_words_64<5>(eights, out);
    case 6: return pack_words_64<6>(eights, out);
    default: return pack_words_64<7>(eights, out);
  }
}

/* 16 of 64 codes of 2, 4 or 8 bits, as bytes. */
template <int kQuarter>
inline __m128i unpack_16(const uint8_t *in, int bits) {
  if (bits == 8) return _mm_loadu_si128(reinterpret_cast<const __m128i *>(in) + kQuarter);
  if (bits == 4) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(in + 8 * kQuarter));
    const __m128i low = _mm_set1_epi8(0x0f);
    return _mm_unpacklo_epi8(_mm_and_si128(eight, low), _mm_and_si128(_mm_srli_epi16(eight, 4), low));
  }
  int32_t four;
  std::memcpy(&four, in + 4 * kQuarter, 4);
  const __m128i x = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(four));
  const __m128i spread = _mm_or_si128(_mm_or_si128(x, _mm_slli_epi32(x, 6)),
                                      _mm_or_si128(_mm_slli_epi32(x, 12), _mm_slli_epi32(x, 18)));
  return _mm_and_si128(spread, _mm_set1_epi8(3));
}

/* 64 codes, as bytes. */
inline void unpack_64(const uint8_t *in, int bits, __m128i *codes) {
  switch (bits) {
    case 1: return unpack_words_64<1>(in, codes);
    case 3: return unpack_words_64<3>(in, codes);
    case 5: return unpack_words_64<5>(in, codes);
    case 6: return unpack_words_64<6>(in, codes);
    case 7: return unpack_words_64<7>(in, codes);
  }
  codes[0] = unpack_16<0>(in, bits), codes[1] = unpack_16<1>(in, bits);
  codes[2] = unpack_16<2>(in, bits), codes[3] = unpack_16<3>(in, bits);
}

/* Levels of 16 numbers, plus the code of level 0. */
template <bool kBased>
struct Levels {
  __m512 low, high, shift;
  __m512i zero;
  explicit Levels(const mcc_grid &g)
      : low(_mm512_set1_ps(lowest(g))),
        high(_mm512_set1_ps(highest(g))),
        shift(_mm512_set1_ps(shift_of(g))),
        zero(_mm512_set1_epi32(kMagicBits - offset_of(g))) {}

  __m512i of(__m512 x, __m512 step, __m512 base) const {
    __m512 y = _mm512_mul_ps(kBased ? _mm512_sub_ps(x, base) : x, step);
    y = _mm512_sub_ps(y, shift);
    y = _mm512_min_ps(_mm512_max_ps(y, low), high); /* NaN takes the second: the lowest level */
    return _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(y, _mm512_set1_ps(kMagic))), zero);
  }
};

/* The numbers of 16 levels. */
template <bool kBased>
inline __m512 values_16(__m512i codes, __m512 zero, __m512 unit, __m512 base) {
  const __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(codes), zero), unit);
  return kBased ? _mm512_add_ps(scaled, base) : scaled;
}

/* One step and one unit for all numbers, or none. */
struct Common {
  const Shared *steps, *units;
};

/* Scales and packed codes of whole groups, from ``begin`` on; codes alone where a step is common to all. What they decode
 * to as well where kDecodes. */
template <int kKind, bool kDecodes>
inline void quantize_64(const mcc_codec &c, const float *v, Common common, int64_t begin, int64_t n, float *decoded) {
  mcc_grid g = c.grid;
  /* Known here, so that each kind has a loop without the others' branches. Shared steps need no method. */
  g.kind = kKind, g.method = MCC_MAX, g.stochastic = 0;
  if (is_sign(g)) __builtin_unreachable(); /* ``quantizes_64`` */
  constexpr bool kBased = kKind == MCC_MINMAX;
  const Levels<kBased> levels(g);
  const __m512 zero = _mm512_set1_ps(float(offset_of(g)) - shift_of(g));
  uint8_t *out = c.codes + begin / 8 * g.bits;
  const int64_t group = common.steps ? n : g.group;
  FactorsOf16<kDecodes> factors; /* no more: n is at most kChunk */
  if (common.steps) factors.take(*common.steps, *common.units);
  else factors.find(&c, g, v, begin, quotient(n, group));
  for (int64_t i = 0, number = 0; i < n; i += group, ++number) {
    const __m512 step = _mm512_set1_ps(factors.step[number]), base = _mm512_set1_ps(kBased ? factors.base[number] : 0.0f);
    const __m512 unit = _mm512_set1_ps(kDecodes ? factors.unit[number] : 0.0f);
    for (int64_t j = i; j < i + group; j += 64, out += 8 * g.bits) {
      __m512i level[4];
      for (int k = 0; k < 4; ++k) {
        level[k] = levels.of(_mm512_loadu_ps(v + j + 16 * k), step, base);
        if (kDecodes) _mm512_storeu_ps(decoded + j + 16 * k, values_16<kBased>(level[k], zero, unit, base));
      }
      pack_64(bytes_of_64(level), g.bits, out);
    }
  }
}

template <int kKind>
inline void quantize_64(const mcc_codec &c, const float *v, Common common, int64_t begin, int64_t n, float *decoded) {
  decoded ? quantize_64<kKind, true>(c, v, common, begin, n, decoded)
          : quantize_64<kKind, false>(c, v, common, begin, n, decoded);
}

inline void quantize_64(const mcc_codec &c, const float *v, Common common, int64_t begin, int64_t n, float *decoded) {
  switch (c.grid.kind) {
    case MCC_SYMMETRIC: return quantize_64<MCC_SYMMETRIC>(c, v, common, begin, n, decoded);
    case MCC_ASYMMETRIC: return quantize_64<MCC_ASYMMETRIC>(c, v, common, begin, n, decoded);
    case MCC_MIDRISE: return quantize_64<MCC_MIDRISE>(c, v, common, begin, n, decoded);
    case MCC_SIGNED: return quantize_64<MCC_SIGNED>(c, v, common, begin, n, decoded);
    default: return quantize_64<MCC_MINMAX>(c, v, common, begin, n, decoded);
  }
}

/* Packs and unpacks the whole 64s among n codes; returns how many those are. */
inline int64_t pack_whole_64(const uint8_t *codes, int64_t n, int bits, uint8_t *out) {
  if (bits != 2 && bits != 4) return 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) pack_64(_mm512_loadu_si512(codes + i), bits, out + i / 8 * bits);
  return i;
}

inline int64_t unpack_whole_64(const uint8_t *in, int64_t n, int bits, uint8_t *codes) {
  if (bits != 2 && bits != 4) return 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64, in += 8 * bits) unpack_64(in, bits, reinterpret_cast<__m128i *>(codes + i));
  return i;
}

template <bool kBased>
inline void dequantize_64(const mcc_codec &c, const Shared *shared, int64_t begin, int64_t n, bool add, float *out) {
  mcc_grid g = c.grid;
  if (kBased) g.kind = MCC_MINMAX;
  else if (is_minmax(g)) __builtin_unreachable();
  const __m512 zero = _mm512_set1_ps(float(offset_of(g)) - shift_of(g));
  const uint8_t *in = c.codes + begin / 8 * g.bits;
  int64_t group = shared ? 0 : quotient(begin, g.group), end = shared ? n : (group + 1) * g.group - begin;
  Factor factor = shared ? Factor{*shared->at(0).by, *shared->at(0).base}
                         : load_factor(g, false, c.scales, c.scale_dtype, group);
  for (int64_t i = 0; i < n; i += 64, in += 8 * g.bits) {
    if (i == end) {
      factor = load_factor(g, false, c.scales, c.scale_dtype, ++group);
      end += g.group;
    }
    const __m512 unit = _mm512_set1_ps(factor.by), base = _mm512_set1_ps(factor.base);
    __m128i codes[4];
    unpack_64(in, g.bits, codes);
    for (int k = 0; k < 4; ++k) {
      const __m512 value = values_16<kBased>(_mm512_cvtepu8_epi32(codes[k]), zero, unit, base);
      float *to = out + i + 16 * k;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), value) : value);
    }
  }
}

inline void dequantize_64(const mcc_codec &c, const Shared *shared, int64_t begin, int64_t n, bool add, float *out) {
  is_minmax(c.grid) ? dequantize_64<true>(c, shared, begin, n, add, out)
                    : dequantize_64<false>(c, shared, begin, n, add, out);
}

#else

inline int64_t pack_whole_64(const uint8_t *, int64_t, int, uint8_t *) { return 0; }
inline int64_t unpack_whole_64(const uint8_t *, int64_t, int, uint8_t *) { return 0; }
inline bool quantizes_64(const mcc_codec &, int64_t) { return false; }
inline bool dequantizes_64(const mcc_codec &, int64_t) { return false; }
struct Common {
  const Shared *steps, *units;
};
inline void quantize_64(const mcc_codec &, const float *, Common, int64_t, int64_t, float *) {}
inline void dequantize_64(const mcc_codec &, const Shared *, int64_t, int64_t, bool, float *) {}

#endif
