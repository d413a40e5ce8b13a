/* Reductions of 16 vectors at once: a step for all of them takes as many instructions as one for each alone would. */

#if MCC_AVX512

template <bool kLargest>
inline __m512i extreme(__m512i a, __m512i b) {
  return kLargest ? _mm512_max_epu32(a, b) : _mm512_min_epu32(a, b);
}

/* The largest lane of each vector, or the least, in the order of the vectors. */
template <bool kLargest>
inline __m512i extremes_16(const __m512i *v) {
  __m512i rows[4];
  for (int j = 0; j < 4; ++j) {
    const __m512i a = v[j], b = v[4 + j], c = v[8 + j], d = v[12 + j];
    const __m512i ab = extreme<kLargest>(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    const __m512i cd = extreme<kLargest>(_mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd));
    rows[j] = extreme<kLargest>(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
  }
  const __m512i low =
      extreme<kLargest>(_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
  const __m512i high =
      extreme<kLargest>(_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
  return extreme<kLargest>(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

/* The sums of eight vectors; each adds its halves, then halves of that, as _mm512_reduce_add_pd does. */
inline __m512d sums_8(const __m512d *v) {
  __m512d halves[4], quarters[2];
  for (int j = 0; j < 4; ++j) { /* vectors 0 and 2, 4 and 6, 1 and 3, 5 and 7 */
    const __m512d a = v[j % 2 * 4 + j / 2], b = v[j % 2 * 4 + j / 2 + 2];
    halves[j] = _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x44), _mm512_shuffle_f64x2(a, b, 0xee));
  }
  for (int j = 0; j < 2; ++j) {
    const __m512d a = halves[2 * j], b = halves[2 * j + 1];
    quarters[j] = _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
  }
  return _mm512_add_pd(_mm512_unpacklo_pd(quarters[0], quarters[1]), _mm512_unpackhi_pd(quarters[0], quarters[1]));
}

/* The bits of the largest magnitudes of 16 numbers each, of whole 16s. */
inline __m512i largest_lanes(const float *v, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16)
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(v + i), magnitude));
  return most;
}

/* 64 codes in 32 bits each, as bytes. */
inline __m512i bytes_of_64(const __m512i *codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i words0 = _mm512_packs_epi32(codes[0], codes[1]), words1 = _mm512_packs_epi32(codes[2], codes[3]);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(words0, words1));
}

#endif
