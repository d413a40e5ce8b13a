/* The scales of up to 16 groups at once, in registers: what scale_of, rounded and factor_of of numbers.h say, by the same
 * operations in the same order, so the same bits. */

#if MCC_AVX512

/* Extents of 16 groups. */
struct Extents {
  __m512i most, least, greatest;
  __m512d sums[2];
};

/* Measures ``count`` groups of whole 16s; inlined, as its callers know the kind of the grid and maybe the groups' size. */
__attribute__((always_inline)) inline void measure_16(const mcc_grid &g, const float *v, int64_t group, int64_t count, Extents &e) {
  const __m512i sign = _mm512_set1_epi32(int32_t(0x80000000u)), zero = _mm512_setzero_si512();
  __m512i most[16], least[16], greatest[16];
  __m512d sums[16];
  for (int64_t k = count; k < 16; ++k) {
    most[k] = least[k] = greatest[k] = zero;
    sums[k] = _mm512_setzero_pd();
  }
  for (int64_t k = 0; k < count; ++k) {
    const float *from = v + k * group;
    if (takes_most(g)) most[k] = largest_lanes(from, group);
    if (takes_range(g)) {
      __m512i low = _mm512_set1_epi32(-1), high = zero;
      for (int64_t i = 0; i < group; i += 16) {
        const __m512i u = _mm512_loadu_si512(from + i);
        const __m512i place = _mm512_xor_si512(u, _mm512_or_si512(_mm512_srai_epi32(u, 31), sign));
        low = _mm512_min_epu32(low, place), high = _mm512_max_epu32(high, place);
      }
      least[k] = low, greatest[k] = high;
    }
    if (takes_sum(g)) { /* of squares: a sign's is not taken here */
      __m512d sum0 = _mm512_setzero_pd(), sum1 = sum0;
      for (int64_t i = 0; i < group; i += 16) {
        const __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(from + i)), b = _mm512_cvtps_pd(_mm256_loadu_ps(from + i + 8));
        sum0 = _mm512_add_pd(sum0, _mm512_mul_pd(a, a)), sum1 = _mm512_add_pd(sum1, _mm512_mul_pd(b, b));
      }
      sums[k] = _mm512_add_pd(sum0, sum1);
    }
  }
  if (takes_most(g)) e.most = extremes_16<true>(most);
  if (takes_range(g)) e.least = extremes_16<false>(least), e.greatest = extremes_16<true>(greatest);
  if (takes_sum(g)) e.sums[0] = sums_8(sums), e.sums[1] = sums_8(sums + 8);
}

/* Scales of 16 groups: see ``Scale``. */
struct Scales {
  __m512 first, second;
};

inline __m512 from_ordered_16(__m512i k) {
  const __m512i sign = _mm512_set1_epi32(int32_t(0x80000000u));
  const __m512i negative = _mm512_xor_si512(k, _mm512_set1_epi32(-1));
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(negative, _mm512_movepi32_mask(k), k, sign));
}

/* ``factor`` times the root mean squares of groups of n. */
inline __m512 roots_16(const Extents &e, int64_t n, double factor) {
  const __m512d count = _mm512_set1_pd(double(n)), by = _mm512_set1_pd(factor);
  const __m512d low = _mm512_mul_pd(_mm512_sqrt_pd(_mm512_div_pd(e.sums[0], count)), by);
  const __m512d high = _mm512_mul_pd(_mm512_sqrt_pd(_mm512_div_pd(e.sums[1], count)), by);
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

/* Which of eight groups have a number that stands out. */
inline __mmask8 stands_out_8(__m256 most, __m512d sum, int64_t n) {
  const __m512d wide = _mm512_cvtps_pd(most), square = _mm512_mul_pd(wide, wide);
  const __m512d others = _mm512_mul_pd(_mm512_sub_pd(sum, square), _mm512_set1_pd(kStandsOut * kStandsOut));
  return _mm512_cmp_pd_mask(_mm512_mul_pd(square, _mm512_set1_pd(double(n - 1))), others, _CMP_GT_OQ);
}

/* ``signed_scale`` to nearest. */
inline __m512 signed_scales(const mcc_grid &g, const Extents &e, __m512 low, __m512 high, int64_t n) {
  const __m512 zero = _mm512_setzero_ps(), opposite = _mm512_xor_ps(low, _mm512_set1_ps(-0.0f));
  const __mmask16 positive = _mm512_cmp_ps_mask(high, opposite, _CMP_GT_OQ);
  __m512 most = _mm512_mask_mov_ps(opposite, positive, high);
  if (g.bits == 2 || g.bits == 3) {
    const __m512 usual = roots_16(e, n, g.bits == 2 ? 2.1 : 2.5);
    const __mmask16 below = _mm512_cmp_ps_mask(usual, most, _CMP_LT_OQ);
    const __mmask16 out = __mmask16(stands_out_8(_mm512_castps512_ps256(most), e.sums[0], n) |
                                    stands_out_8(_mm512_extractf32x8_ps(most, 1), e.sums[1], n) << 8);
    most = _mm512_mask_mov_ps(most, __mmask16(below & ~out), usual);
  }
  const __m512 signs = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), positive, _mm512_set1_ps(-1.0f));
  return _mm512_add_ps(_mm512_mul_ps(signs, most), zero); /* no negative zeros */
}

/* The scales of 16 groups of n, to nearest and by magnitude. */
__attribute__((always_inline)) inline Scales scales_16(const mcc_grid &g, const Extents &e, int64_t n) {
  const __m512 zero = _mm512_setzero_ps();
  if (takes_range(g)) {
    const __m512 low = _mm512_add_ps(from_ordered_16(e.least), zero);
    const __m512 high = _mm512_add_ps(from_ordered_16(e.greatest), zero);
    const __mmask16 bad = _mm512_cmplt_epu32_mask(e.least, _mm512_set1_epi32(0x007fffff)) |
                          _mm512_cmpgt_epu32_mask(e.greatest, _mm512_set1_epi32(int32_t(0xff800000u)));
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    const __m512 first = is_minmax(g) ? low : signed_scales(g, e, low, high, n);
    return {_mm512_mask_mov_ps(first, bad, nan), _mm512_mask_mov_ps(high, bad, nan)};
  }
  const __m512 most = _mm512_castsi512_ps(e.most);
  if (!takes_sum(g)) return {most, zero};
  const __m512 fitted = roots_16(e, n, midrise_rms(g.bits));
  return {_mm512_mask_mov_ps(most, _mm512_cmp_ps_mask(fitted, most, _CMP_LT_OQ), fitted), zero};
}

/* The scales of ``count`` groups; the usual size of groups has loops of its own. */
__attribute__((always_inline)) inline Scales found_scales(const mcc_grid &g, const float *v, int64_t count) {
  Extents e;
  g.group == 64 ? measure_16(g, v, 64, count, e) : measure_16(g, v, g.group, count, e);
  return scales_16(g, e, g.group);
}

/* Stores the scales of groups from the first-th on, and returns what the receiver will read. */
__attribute__((always_inline)) inline Scales kept_scales(const mcc_codec &c, const mcc_grid &g, Scales s, int64_t first,
                                                         int64_t count) {
  if (c.scale_dtype == MCC_FP32 && !is_minmax(g)) {
    _mm512_mask_storeu_ps(static_cast<float *>(c.scales) + first, __mmask16((1u << count) - 1), s.first);
    return s;
  }
  float low[16], high[16];
  _mm512_storeu_ps(low, s.first), _mm512_storeu_ps(high, s.second);
  for (int64_t k = 0; k < count; ++k) {
    const Scale kept = rounded(g, c.scale_dtype, {low[k], high[k]});
    store_scale(g, c.scales, c.scale_dtype, first + k, kept);
    low[k] = kept.first, high[k] = kept.second;
  }
  return {_mm512_loadu_ps(low), _mm512_loadu_ps(high)};
}

/* Steps and bases of up to 16 groups, and units where kUnits: see ``factor_of``. */
template <bool kUnits>
struct FactorsOf16 {
  alignas(64) float step[16], unit[16], base[16];

  void take(const Shared &steps, const Shared &units) { /* one for all numbers */
    step[0] = *steps.at(0).by, unit[0] = *units.at(0).by, base[0] = *steps.at(0).base;
  }

  __attribute__((always_inline)) void take(const mcc_grid &g, Scales s) {
    const __m512 zero = _mm512_setzero_ps(), length = is_minmax(g) ? _mm512_sub_ps(s.second, s.first) : s.first;
    const __m512 top = _mm512_set1_ps(float(top_of(g)));
    _mm512_store_ps(step, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(length, zero, _CMP_NEQ_OQ), top, length));
    if (kUnits) _mm512_store_ps(unit, _mm512_div_ps(length, top));
    _mm512_store_ps(base, is_minmax(g) ? s.first : zero);
  }

  /* Those of groups whose numbers begin at the begin-th; where ``kept`` is not null their scales are stored there. */
  __attribute__((always_inline)) void find(const mcc_codec *kept, const mcc_grid &g, const float *v, int64_t begin, int64_t count) {
    const int64_t first = quotient(begin, g.group);
    if (takes_range(g) || takes_sum(g)) {
      const Scales scales = found_scales(g, v, count);
      take(g, kept ? kept_scales(*kept, g, scales, first, count) : scales);
      return;
    }
    /* What takes so little is found for one group while the next one is read. */
    for (int64_t k = 0; k < count; ++k) {
      Extent e;
      e.most = _mm512_reduce_max_epu32(largest_lanes(v + k * g.group, g.group));
      Scale s = scale_of(g, e, g.group);
      if (kept) {
        s = rounded(g, kept->scale_dtype, s);
        store_scale(g, kept->scales, kept->scale_dtype, first + k, s);
      }
      step[k] = factor_of(g, true, s).by, base[k] = 0.0f;
      if (kUnits) unit[k] = factor_of(g, false, s).by;
    }
  }
};

#endif
