/* 8-bit floats: one pass over memory, as a group stays in a core's cache between being measured and being encoded. */

constexpr int64_t kShortGroup = 64; /* whose loops would be shorter than what a vector loop takes at a time */

/* The codes of the whole 64s among n numbers, to nearest; returns how many those are. */
template <int kMantissa>
inline int64_t float8_whole_64(const float *v, float step, int64_t n, uint8_t *codes) {
  int64_t i = 0;
#if MCC_AVX512
  using F = Float8<kMantissa>;
  const __m512 by = _mm512_set1_ps(step), magic = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(F::kMagic)));
  const __m512i half = _mm512_set1_epi32(int32_t((1u << (F::kShift - 1)) - 1 - F::kRebias)), one = _mm512_set1_epi32(1);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
  for (; i + 64 <= n; i += 64) {
    __m512i code[4];
    for (int k = 0; k < 4; ++k) {
      const __m512i u = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(v + i + 16 * k), by));
      const __m512i size = _mm512_and_si512(u, magnitude);
      const __m512i rest = _mm512_min_epu32(size, _mm512_set1_epi32(int32_t(F::kMost)));
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(rest, F::kShift), one);
      const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(rest, half), odd), F::kShift);
      const __m512i moved = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(rest), magic));
      const __mmask16 tiny = _mm512_cmplt_epu32_mask(rest, _mm512_set1_epi32(int32_t(F::kLeast)));
      const __m512i found = _mm512_mask_sub_epi32(normal, tiny, moved, _mm512_castps_si512(magic));
      const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80));
      const __mmask16 nan = _mm512_cmpgt_epu32_mask(size, infinity);
      code[k] = _mm512_mask_mov_epi32(_mm512_or_si512(found, sign), nan, _mm512_set1_epi32(kFloat8Nan));
    }
    _mm512_storeu_si512(codes + i, bytes_of_64(code));
  }
#else
  (void)v, (void)step, (void)n, (void)codes;
#endif
  return i;
}

template <int kMantissa>
inline void float8_codes(const mcc_float8 &c, const float *__restrict v, float step, int64_t begin, int64_t n) {
  uint8_t *__restrict codes = c.codes + begin;
  if (!c.stochastic) {
    for (int64_t i = float8_whole_64<kMantissa>(v, step, n, codes); i < n; ++i)
      codes[i] = float8_nearest<kMantissa>(v[i] * step);
    return;
  }
  const Noise noise(c.seed);
  for (int64_t i = 0; i < n; ++i)
    codes[i] = float8_stochastic<kMantissa>(v[i] * step, noise.at(uint32_t(begin + i)));
}

/* The bits of the largest magnitude, of which a NaN's are the largest. */
inline uint32_t float8_largest(const float *v, int64_t n) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(v[i]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  return most;
}

/* Calls run(begin, n) for the chunks of [begin, end), on one thread or on all. */
template <bool kShared, class Run>
inline void float8_chunks(int64_t begin, int64_t end, Run run) {
  const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
  const auto one = [&](int64_t k) { run(begin + k * kChunk, std::min(kChunk, end - begin - k * kChunk)); };
  if constexpr (kShared) {
#pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < chunks; ++k) one(k);
  } else {
    for (int64_t k = 0; k < chunks; ++k) one(k);
  }
}

template <int kMantissa, bool kShared>
inline void float8_group(const mcc_float8 &c, int64_t group) {
  const int64_t begin = group * c.group, end = std::min(begin + c.group, c.count);
  std::vector<uint32_t> largest(kShared ? size_t((end - begin + kChunk - 1) / kChunk) : 0);
  uint32_t most = 0;
  float8_chunks<kShared>(begin, end, [&](int64_t at, int64_t n) {
    alignas(64) float room[kChunk];
    const uint32_t own = float8_largest(view(room, c.x, c.x_dtype, at, n), n);
    if (kShared)
      largest[size_t((at - begin) / kChunk)] = own;
    else
      most = std::max(most, own);
  });
  for (const uint32_t own : largest) most = std::max(most, own);
  const float step = float8_store<kMantissa>(c, group, most);
  float8_chunks<kShared>(begin, end, [&](int64_t at, int64_t n) {
    alignas(64) float room[kChunk];
    float8_codes<kMantissa>(c, view(room, c.x, c.x_dtype, at, n), step, at, n);
  });
}

/* The largest magnitudes of groups, for up to kChunk numbers; ``largest`` has room for 16 more. */
inline void float8_largest_of(const float *v, int64_t n, int64_t group, uint32_t *largest) {
#if MCC_AVX512
  if (group % 16 == 0 && n % group == 0) {
    for (int64_t i = 0; i < n; i += 16 * group, largest += 16) {
      __m512i most[16];
      for (int k = 0; k < 16; ++k)
        most[k] = i + k * group < n ? largest_lanes(v + i + k * group, group) : _mm512_setzero_si512();
      _mm512_storeu_si512(largest, extremes_16<true>(most));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < n; i += group, ++largest) *largest = float8_largest(v + i, std::min(group, n - i));
}

/* Several groups: the scales of all first, so that they do not wait for each other. Those of short ones are applied before the
 * numbers are encoded in one long loop. */
template <int kMantissa>
inline void float8_groups(const mcc_float8 &c, int64_t begin, int64_t n) {
  alignas(64) float room[kChunk], scaled[kChunk];
  uint32_t largest[kChunk + 16];
  float steps[kChunk];
  const float *v = view(room, c.x, c.x_dtype, begin, n);
  float8_largest_of(v, n, c.group, largest);
  for (int64_t i = 0, k = 0; i < n; i += c.group, ++k)
    steps[k] = float8_store<kMantissa>(c, begin / c.group + k, largest[k]);
  if (c.group > kShortGroup) {
    for (int64_t i = 0, k = 0; i < n; i += c.group, ++k)
      float8_codes<kMantissa>(c, v + i, steps[k], begin + i, std::min(c.group, n - i));
    return;
  }
  for (int64_t i = 0, k = 0; i < n; i += c.group, ++k)
    for (int64_t j = i; j < std::min(i + c.group, n); ++j) scaled[j] = v[j] * steps[k];
  float8_codes<kMantissa>(c, scaled, 1.0f, begin, n);
}

template <int kMantissa>
inline void float8_encode_all(const mcc_float8 &c) {
  if (c.group <= kChunk) {
    const int64_t chunk = kChunk / c.group * c.group, chunks = (c.count + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) if (c.count > kSerial)
    for (int64_t k = 0; k < chunks; ++k)
      float8_groups<kMantissa>(c, k * chunk, std::min(chunk, c.count - k * chunk));
    return;
  }
  const int64_t groups = (c.count + c.group - 1) / c.group;
  if (c.group > kSerial) { /* too large for the caches: the threads share each */
    for (int64_t group = 0; group < groups; ++group) float8_group<kMantissa, true>(c, group);
    return;
  }
#pragma omp parallel for schedule(static) if (c.count > kSerial)
  for (int64_t group = 0; group < groups; ++group) float8_group<kMantissa, false>(c, group);
}

template <int kMantissa>
inline void float8_decode_chunk(const mcc_float8 &c, int64_t begin, int64_t n) {
  alignas(64) float room[kChunk];
  const bool direct = !c.added && c.out_dtype == MCC_FP32;
  float *to = static_cast<float *>(c.out) + begin, *__restrict v = direct ? to : room;
  const uint8_t *__restrict codes = c.codes + begin;
  for (int64_t i = 0; i < n;) {
    const int64_t group = (begin + i) / c.group, end = std::min((group + 1) * c.group - begin, n);
    const float unit = float8_unit<kMantissa>(c, group);
    for (; i < end; ++i) v[i] = float8_value<kMantissa>(codes[i]) * unit;
  }
  if (c.added > 0)
    for (int64_t i = 0; i < n; ++i) to[i] += v[i];
  else if (c.added < 0)
    for (int64_t i = 0; i < n; ++i) to[i] -= v[i];
  else if (!direct)
    store(c.out, v, c.out_dtype, begin, n);
}

template <int kMantissa>
inline void float8_decode_all(const mcc_float8 &c) {
  const int64_t chunks = (c.count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) if (c.count > kSerial)
  for (int64_t k = 0; k < chunks; ++k)
    float8_decode_chunk<kMantissa>(c, k * kChunk, std::min(kChunk, c.count - k * kChunk));
}

void float8_encode(const mcc_context *, const mcc_float8 *given) {
  given->mantissa == 3 ? float8_encode_all<3>(*given) : float8_encode_all<2>(*given);
}

void float8_decode(const mcc_context *, const mcc_float8 *given) {
  given->mantissa == 3 ? float8_decode_all<3>(*given) : float8_decode_all<2>(*given);
}
