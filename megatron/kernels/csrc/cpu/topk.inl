/* Exact top-k of magnitudes by radix selection, and what is done with a choice of coordinates. */

/* Magnitudes as integers, in their order; everything that is not finite is one largest value. */
inline uint32_t key_of(float x) {
  uint32_t u = bits_of(x) & 0x7fffffffu;
  return u < 0x7f800000u ? u : 0x7f800000u;
}

constexpr int kHighBits = 12, kMidBits = 10, kLowBits = 9; /* of a key's 31 */
constexpr int kHighBins = 1 << kHighBits;

inline void count_high(const float *x, int64_t n, int64_t *bins) {
  /* Four tables, so that equal neighbours do not wait for each other. */
  std::vector<uint32_t> tables(4 * kHighBins, 0);
  uint32_t *t = tables.data();
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    ++t[key_of(x[i]) >> 19];
    ++t[kHighBins + (key_of(x[i + 1]) >> 19)];
    ++t[2 * kHighBins + (key_of(x[i + 2]) >> 19)];
    ++t[3 * kHighBins + (key_of(x[i + 3]) >> 19)];
  }
  for (; i < n; ++i) ++t[key_of(x[i]) >> 19];
  for (int b = 0; b < kHighBins; ++b)
    bins[b] = int64_t(t[b]) + t[kHighBins + b] + t[2 * kHighBins + b] + t[3 * kHighBins + b];
}

/* The keys of x[0, n) whose high bits are ``bin``, behind each other; ``keys`` has room for 16 more than there are. */
inline void collect(const float *x, int64_t n, uint32_t bin, uint32_t *keys) {
  int64_t at = 0, i = 0;
#if MCC_AVX512
  const __m512i most = _mm512_set1_epi32(0x7f800000), wanted = _mm512_set1_epi32(int(bin));
  for (; i + 16 <= n; i += 16) {
    __m512i u = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff));
    u = _mm512_min_epu32(u, most);
    const __mmask16 hit = _mm512_cmpeq_epi32_mask(_mm512_srli_epi32(u, 19), wanted);
    if (hit) {
      _mm512_storeu_si512(keys + at, _mm512_maskz_compress_epi32(hit, u));
      at += __builtin_popcount(hit);
    }
  }
#endif
  for (; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    keys[at] = key;
    at += (key >> 19) == bin;
  }
}

/* Indices from ``first`` on of keys above the threshold, and of the first ``ties`` that equal it. */
inline void emit(const float *x, int64_t n, int64_t first, uint32_t threshold, int64_t ties, int64_t *out) {
  int64_t i = 0;
  uint32_t least = ties > 0 ? threshold : threshold + 1;
#if MCC_AVX512
  const __m512i most = _mm512_set1_epi32(0x7f800000), limit = _mm512_set1_epi32(int(threshold));
  const __m512i ramp = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (; i + 16 <= n; i += 16) {
    __m512i u = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff));
    u = _mm512_min_epu32(u, most);
    __mmask16 hit = _mm512_cmpgt_epu32_mask(u, limit);
    if (ties > 0) {
      uint32_t equal = _mm512_cmpeq_epi32_mask(u, limit);
      while (__builtin_popcount(equal) > ties) equal &= ~(1u << (31 - __builtin_clz(equal)));
      ties -= __builtin_popcount(equal);
      hit = __mmask16(hit | equal);
    }
    if (!hit) continue;
    const __mmask8 lower = __mmask8(hit), upper = __mmask8(hit >> 8);
    const __m512i at = _mm512_add_epi64(_mm512_set1_epi64(first + i), ramp);
    _mm512_mask_compressstoreu_epi64(out, lower, at);
    out += __builtin_popcount(lower);
    _mm512_mask_compressstoreu_epi64(out, upper, _mm512_add_epi64(at, _mm512_set1_epi64(8)));
    out += __builtin_popcount(upper);
  }
  least = ties > 0 ? threshold : threshold + 1;
#endif
  for (; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    if (key < least) continue;
    if (key == threshold && --ties == 0) least = threshold + 1;
    *out++ = first + i;
  }
}

/* The bin, from above, in which the ``need``-th element lies; ``need`` becomes its place within the bin. */
inline uint32_t find_bin(const int64_t *bins, int count, int64_t &need) {
  for (int b = count - 1; b > 0; --b) {
    if (bins[b] >= need) return uint32_t(b);
    need -= bins[b];
  }
  return 0;
}

inline void topk_row(const float *x, int64_t n, int64_t count, int64_t *indices, int parts) {
  if (count >= n) {
    for (int64_t i = 0; i < n; ++i) indices[i] = i;
    return;
  }
  const int64_t width = (n + parts - 1) / parts;
  auto begin = [&](int p) { return std::min(width * p, n); };
  std::vector<std::vector<int64_t>> high(static_cast<size_t>(parts),
                                         std::vector<int64_t>(size_t{kHighBins}));
  std::vector<std::vector<uint32_t>> keys(static_cast<size_t>(parts));
#pragma omp parallel for schedule(static) if (parts > 1)
  for (int p = 0; p < parts; ++p) count_high(x + begin(p), begin(p + 1) - begin(p), high[size_t(p)].data());
  std::vector<int64_t> bins(kHighBins, 0);
  for (const auto &own : high)
    for (int b = 0; b < kHighBins; ++b) bins[size_t(b)] += own[size_t(b)];
  int64_t need = count;
  const uint32_t bin = find_bin(bins.data(), kHighBins, need);
#pragma omp parallel for schedule(static) if (parts > 1)
  for (int p = 0; p < parts; ++p) {
    keys[size_t(p)].resize(size_t(high[size_t(p)][bin]) + 16);
    collect(x + begin(p), begin(p + 1) - begin(p), bin, keys[size_t(p)].data());
    keys[size_t(p)].resize(size_t(high[size_t(p)][bin]));
  }
  std::fill(bins.begin(), bins.end(), 0);
  for (const auto &own : keys)
    for (uint32_t key : own) ++bins[(key >> kLowBits) & ((1u << kMidBits) - 1)];
  const uint32_t middle = find_bin(bins.data(), 1 << kMidBits, need);
  const uint32_t prefix = (bin << kMidBits) | middle;
  std::fill(bins.begin(), bins.end(), 0);
  for (const auto &own : keys)
    for (uint32_t key : own)
      if (key >> kLowBits == prefix) ++bins[key & ((1u << kLowBits) - 1)];
  const uint32_t threshold = (prefix << kLowBits) | find_bin(bins.data(), 1 << kLowBits, need);
  /* Where each part writes, and how many of the ties are its own. */
  std::vector<int64_t> offsets(size_t(parts) + 1, 0), ties(size_t(parts), 0);
  for (int p = 0; p < parts; ++p) {
    int64_t above = 0, equal = 0;
    for (uint32_t b = bin + 1; b < uint32_t(kHighBins); ++b) above += high[size_t(p)][b];
    for (uint32_t key : keys[size_t(p)]) {
      above += key > threshold;
      equal += key == threshold;
    }
    ties[size_t(p)] = std::min(equal, need);
    need -= ties[size_t(p)];
    offsets[size_t(p) + 1] = offsets[size_t(p)] + above + ties[size_t(p)];
  }
#pragma omp parallel for schedule(static) if (parts > 1)
  for (int p = 0; p < parts; ++p)
    emit(x + begin(p), begin(p + 1) - begin(p), begin(p), threshold, ties[size_t(p)], indices + offsets[size_t(p)]);
}

void abs_topk(const mcc_context *, const float *x, int64_t k, int64_t n, int64_t count, int64_t *indices) {
  if (k == 0 || n == 0 || count <= 0) return;
  const int threads = thread_count();
  if (k >= threads || n * k < kSerial) {
#pragma omp parallel for schedule(dynamic) if (n * k > kSerial)
    for (int64_t row = 0; row < k; ++row) topk_row(x + row * n, n, count, indices + row * std::min(count, n), 1);
    return;
  }
  for (int64_t row = 0; row < k; ++row) topk_row(x + row * n, n, count, indices + row * std::min(count, n), threads);
}

void dilate(const mcc_context *, const uint8_t *mask, int64_t k, int64_t n, int64_t radius, uint8_t *out) {
#pragma omp parallel for schedule(static) if (n * k > kSerial)
  for (int64_t row = 0; row < k; ++row) {
    const uint8_t *m = mask + row * n;
    uint8_t *o = out + row * n;
    std::memset(o, 0, size_t(n));
    int64_t filled = 0; /* everything before is as it shall be */
    for (int64_t i = 0; i < n; ++i) {
      uint64_t eight = 0;
      if (i + 8 <= n) {
        std::memcpy(&eight, m + i, 8);
        if (eight == 0) {
          i += 7;
          continue;
        }
      }
      if (!m[i]) continue;
      const int64_t from = std::max(filled, i > radius ? i - radius : 0);
      const int64_t to = radius < n - i ? i + radius + 1 : n;
      if (to > from) std::memset(o + from, 1, size_t(to - from));
      filled = std::max(filled, to);
    }
  }
}

void gather(const mcc_context *, const float *x, int64_t, const int64_t *indices, int64_t count, float *packed) {
#pragma omp parallel for schedule(static) if (count > kSerial)
  for (int64_t i = 0; i < count; ++i) packed[i] = x[indices[i]];
}

void scatter_add(const mcc_context *, float *x, int64_t, const int64_t *indices, int64_t count, const float *packed) {
#pragma omp parallel for schedule(static) if (count > kSerial)
  for (int64_t i = 0; i < count; ++i) x[indices[i]] += packed[i];
}
