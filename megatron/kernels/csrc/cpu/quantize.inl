/* Quantise, pack, unpack, dequantise: one pass over memory, in chunks that stay in the first-level cache. */

#include "groups512.inl"

/* What a scale is made of: the largest magnitude's bits (so that NaN counts as the largest), or a sum. */
struct Extent {
  uint32_t most = 0;
  double sum = 0;
};

inline void measure(const mcc_grid &g, const float *v, int64_t n, Extent &e) {
  if (g.method == MCC_L2) {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; ++i) s += double(v[i]) * double(v[i]);
    e.sum += s;
  } else if (is_sign(g)) {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; ++i) s += double(float_of(bits_of(v[i]) & 0x7fffffffu));
    e.sum += s;
  } else {
    uint32_t m = e.most;
#pragma omp simd reduction(max : m)
    for (int64_t i = 0; i < n; ++i) {
      uint32_t u = bits_of(v[i]) & 0x7fffffffu;
      m = u > m ? u : m;
    }
    e.most = m;
  }
}

inline float scale_of(const mcc_grid &g, const Extent &e, int64_t n) {
  if (n == 0) return 0.0f;
  if (g.method == MCC_L2) return float(std::sqrt(e.sum / double(n)) * 2.0);
  return is_sign(g) ? float(e.sum / double(n)) : float_of(e.most);
}

/* Codes of n numbers; ``step`` is one number (kEach = 0) or n of them (1). */
template <int kEach>
inline void quantize_run(const mcc_grid &g, const float *__restrict v, const float *__restrict step, int64_t n,
                         int64_t index, uint8_t *__restrict codes) {
  if (is_sign(g)) {
    for (int64_t i = 0; i < n; ++i) codes[i] = v[i] >= 0.0f;
    return;
  }
  const int32_t offset = 1 << (g.bits - 1);
  const float low = lowest(g), high = highest(g);
  if (!g.stochastic) {
    for (int64_t i = 0; i < n; ++i) codes[i] = nearest_code(v[i] * step[i * kEach], low, high, offset);
    return;
  }
  const Noise noise(g.seed);
  for (int64_t i = 0; i < n; ++i)
    codes[i] = stochastic_code(v[i] * step[i * kEach], low, high, offset, noise.at(uint32_t(index + i)));
}

template <int kEach>
inline void dequantize_run(const mcc_grid &g, const uint8_t *__restrict codes, const float *__restrict unit, int64_t n,
                           float *__restrict v) {
  if (is_sign(g)) {
    for (int64_t i = 0; i < n; ++i) v[i] = float(int32_t(codes[i]) * 2 - 1) * unit[i * kEach];
    return;
  }
  const int32_t offset = 1 << (g.bits - 1);
  for (int64_t i = 0; i < n; ++i) v[i] = float(int32_t(codes[i]) - offset) * unit[i * kEach];
}

/* Eight codes make kBits bytes, the first code in the lowest bits. ``codes`` is padded by zeros to whole eights; ``out``
 * has room for 8 bytes more. */
template <int kBits>
inline void pack_words(const uint8_t *codes, int64_t words, uint8_t *out) {
  for (int64_t w = 0; w < words; ++w) {
    uint64_t packed = 0;
#if MCC_PEXT
    uint64_t eight;
    std::memcpy(&eight, codes + w * 8, 8);
    packed = _pext_u64(eight, 0x0101010101010101ull * ((1u << kBits) - 1));
#else
    for (int j = 0; j < 8; ++j) packed |= uint64_t(codes[w * 8 + j]) << (j * kBits);
#endif
    std::memcpy(out + w * kBits, &packed, 8);
  }
}

/* ``in`` can be read for 8 bytes more. */
template <int kBits>
inline void unpack_words(const uint8_t *in, int64_t words, uint8_t *codes) {
  const uint64_t ones = (1u << kBits) - 1;
  for (int64_t w = 0; w < words; ++w) {
    uint64_t packed;
    std::memcpy(&packed, in + w * kBits, 8);
#if MCC_PEXT
    const uint64_t eight = _pdep_u64(packed, 0x0101010101010101ull * ones);
    std::memcpy(codes + w * 8, &eight, 8);
#else
    for (int j = 0; j < 8; ++j) codes[w * 8 + j] = uint8_t((packed >> (j * kBits)) & ones);
#endif
  }
}

#define MCC_FOR_BITS(run) \
  switch (bits) {         \
    case 1: run(1); break; \
    case 2: run(2); break; \
    case 3: run(3); break; \
    case 4: run(4); break; \
    case 5: run(5); break; \
    case 6: run(6); break; \
    default: run(7);       \
  }

inline void pack(const uint8_t *codes, int64_t n, int bits, uint8_t *out) {
  const int64_t done = pack_whole_64(codes, n, bits, out);
  codes += done, n -= done, out += done / 8 * bits;
  const int64_t words = (n + 7) / 8;
  if (bits == 8) {
    std::memcpy(out, codes, size_t(words) * 8);
    return;
  }
  uint8_t room[kChunk + 8];
#define MCC_PACK(b) pack_words<b>(codes, words, room)
  MCC_FOR_BITS(MCC_PACK)
#undef MCC_PACK
  std::memcpy(out, room, size_t(words * bits));
}

inline void unpack(const uint8_t *in, int64_t n, int bits, uint8_t *codes) {
  const int64_t done = unpack_whole_64(in, n, bits, codes);
  in += done / 8 * bits, n -= done, codes += done;
  const int64_t words = (n + 7) / 8;
  if (bits == 8) {
    std::memcpy(codes, in, size_t(words) * 8);
    return;
  }
  uint8_t room[kChunk + 8];
  std::memcpy(room, in, size_t(words * bits));
#define MCC_UNPACK(b) unpack_words<b>(room, words, codes)
  MCC_FOR_BITS(MCC_UNPACK)
#undef MCC_UNPACK
}

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

struct Buffers {
  alignas(64) float value[kChunk], kept[kChunk], other[kChunk], decoded[kChunk];
  alignas(64) uint8_t codes[kChunk + 8];
};

/* What is to be encoded of [begin, begin + n): x, or its difference to the reference, or its sum with the residual;
 * rotated, and padded to whole blocks by zeros. */
inline const float *source(const mcc_codec &c, int64_t begin, int64_t n, int64_t padded, Buffers &b) {
  const bool copies = c.role != MCC_PLAIN || c.grid.rotation;
  if (!copies) return view(b.value, c.x, c.x_dtype, begin, n);
  const float *x = view(b.value, c.x, c.x_dtype, begin, n);
  if (c.role == MCC_DELTA) {
    const float *o = view(b.other, c.other, c.other_dtype, begin, n);
    for (int64_t i = 0; i < n; ++i) b.value[i] = x[i] - o[i];
  } else if (c.role == MCC_FEEDBACK) {
    const float *o = view(b.other, c.other, c.other_dtype, begin, n);
    for (int64_t i = 0; i < n; ++i) b.value[i] = x[i] + o[i];
  } else if (x != b.value) {
    std::memcpy(b.value, x, size_t(n) * 4);
  }
  if (c.grid.rotation) {
    if (c.role == MCC_FEEDBACK) std::memcpy(b.kept, b.value, size_t(n) * 4);
    std::fill(b.value + n, b.value + padded, 0.0f);
    rotate(b.value, padded, c.grid.rotation);
  }
  return b.value;
}

inline float factor_of(const mcc_codec &c, bool steps, int64_t group) {
  const float scale = load_scale(c.scales, c.scale_dtype, group);
  return steps ? step_of(c.grid, scale) : unit_of(c.grid, scale);
}

/* Steps or units of all channels, or of the tensor; none where groups have their own. */
inline std::vector<float> shared_factors(const mcc_codec &c, bool steps) {
  const int64_t n = c.grid.layout == MCC_GROUP ? 0 : c.grid.layout == MCC_TENSOR ? 1 : c.grid.group;
  std::vector<float> factors(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) factors[size_t(i)] = factor_of(c, steps, i);
  return factors;
}

/* Calls run(offset, n, factors, each) for the pieces of [begin, begin + n) whose factors lie together. */
template <class Run>
inline void by_scale(const mcc_codec &c, bool steps, const float *shared, int64_t begin, int64_t n, Run run) {
  if (c.grid.layout == MCC_TENSOR) {
    run(int64_t(0), n, shared, 0);
    return;
  }
  int64_t group = begin / c.grid.group, end = (group + 1) * c.grid.group - begin;
  if (c.grid.layout == MCC_CHANNEL) {
    /* A group is a row here. */
    for (int64_t i = 0; i < n; i = end, end += c.grid.group)
      run(i, std::min(end, n) - i, shared + (i == 0 ? begin - group * c.grid.group : 0), 1);
    return;
  }
  for (int64_t i = 0; i < n; ++group, i = end, end += c.grid.group) {
    const float factor = factor_of(c, steps, group);
    run(i, std::min(end, n) - i, &factor, 0);
  }
}

inline int64_t padded_count(const mcc_codec &c, int64_t n) {
  const int64_t block = c.grid.rotation;
  return block ? (n + block - 1) / block * block : n;
}

/* Scales of columns; rows are split alike for any number of threads, so that sums do not depend on it. */
inline void channel_scales(const mcc_codec &c) {
  const mcc_grid &g = c.grid;
  const int64_t rows = c.count / g.group, splits = std::min<int64_t>(16, std::max<int64_t>(rows, 1));
  const int64_t share = (rows + splits - 1) / splits;
  const bool sums = g.method == MCC_L2 || is_sign(g);
  std::vector<uint32_t> most(size_t(splits * g.group), 0);
  std::vector<double> sum(sums ? most.size() : 0, 0.0);
#pragma omp parallel for schedule(static) if (c.count > kSerial)
  for (int64_t split = 0; split < splits; ++split) {
    Buffers b;
    uint32_t *own = most.data() + split * g.group;
    double *added = sum.data() + (sums ? split * g.group : 0);
    for (int64_t row = split * share; row < std::min(rows, (split + 1) * share); ++row) {
      for (int64_t column = 0; column < g.group; column += kChunk) {
        const int64_t n = std::min(kChunk, g.group - column);
        const float *v = source(c, row * g.group + column, n, n, b);
        if (!sums) {
          for (int64_t i = 0; i < n; ++i) {
            const uint32_t u = bits_of(v[i]) & 0x7fffffffu;
            own[column + i] = u > own[column + i] ? u : own[column + i];
          }
          continue;
        }
        for (int64_t i = 0; i < n; ++i) {
          const double wide = double(float_of(bits_of(v[i]) & 0x7fffffffu));
          added[column + i] += g.method == MCC_L2 ? wide * wide : wide;
        }
      }
    }
  }
  for (int64_t i = 0; i < g.group; ++i) {
    Extent e;
    for (int64_t split = 0; split < splits; ++split) {
      e.most = std::max(e.most, most[size_t(split * g.group + i)]);
      if (sums) e.sum += sum[size_t(split * g.group + i)];
    }
    store_scale(c.scales, c.scale_dtype, i, scale_of(g, e, rows));
  }
}

/* The scales of groups that a chunk does not hold whole; in fixed pieces, so that threads do not change the result. */
inline void wide_scales(const mcc_codec &c, int64_t total) {
  const mcc_grid &g = c.grid;
  if (g.layout == MCC_CHANNEL) {
    channel_scales(c);
    return;
  }
  const int64_t size = g.layout == MCC_TENSOR ? total : g.group;
  const int64_t groups = g.layout == MCC_TENSOR ? 1 : (total + size - 1) / size;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * size, end = std::min(begin + size, total);
    const int64_t pieces = (end - begin + kChunk - 1) / kChunk;
    std::vector<Extent> extents(static_cast<size_t>(pieces));
#pragma omp parallel for schedule(static) if (end - begin > kSerial)
    for (int64_t p = 0; p < pieces; ++p) {
      Buffers b;
      const int64_t at = begin + p * kChunk, wide = std::min(kChunk, end - at);
      const int64_t n = std::max<int64_t>(std::min(wide, c.count - at), 0);
      measure(g, source(c, at, n, wide, b), wide, extents[size_t(p)]);
    }
    Extent whole;
    for (const Extent &e : extents) {
      whole.most = std::max(whole.most, e.most);
      whole.sum += e.sum;
    }
    /* A short last group is as if padded by zeros. */
    store_scale(c.scales, c.scale_dtype, group, scale_of(g, whole, size));
  }
}

inline void update_other(const mcc_codec &c, const float *units, int64_t begin, int64_t n, int64_t padded, const float *v,
                         Buffers &b) {
  if (c.role == MCC_PLAIN) return;
  float *decoded = b.decoded;
  by_scale(c, false, units, begin, padded, [&](int64_t i, int64_t m, const float *f, int each) {
    each ? dequantize_run<1>(c.grid, b.codes + i, f, m, decoded + i)
         : dequantize_run<0>(c.grid, b.codes + i, f, m, decoded + i);
  });
  if (c.grid.rotation) rotate(decoded, padded, c.grid.rotation);
  if (c.role == MCC_DELTA) {
    const float *o = view(b.other, c.other, c.other_dtype, begin, n);
    for (int64_t i = 0; i < n; ++i) decoded[i] = o[i] + decoded[i];
  } else {
    const float *given = c.grid.rotation ? b.kept : v;
    for (int64_t i = 0; i < n; ++i) decoded[i] = given[i] - decoded[i];
  }
  store(c.other, decoded, c.other_dtype, begin, n);
}

void quantize(const mcc_context *, const mcc_codec *codec) {
  const mcc_codec &c = *codec;
  const mcc_grid &g = c.grid;
  const int64_t total = padded_count(c, c.count);
  const bool wide = g.layout != MCC_GROUP || g.group > kChunk || (g.rotation && kChunk % g.group);
  if (wide) wide_scales(c, total);
  const std::vector<float> steps = shared_factors(c, true), units = shared_factors(c, false);
  int64_t chunk = kChunk;
  if (!wide) {
    /* Whole groups, whole blocks, whole eights. */
    const int64_t unit = g.rotation ? std::max<int64_t>(g.group, g.rotation) : g.group;
    chunk = kChunk / unit * unit;
  }
  const int64_t chunks = (total + chunk - 1) / chunk;
#pragma omp parallel if (total > kSerial)
  {
    Buffers b;
#pragma omp for schedule(static)
    for (int64_t k = 0; k < chunks; ++k) {
      const int64_t begin = k * chunk, padded = std::min(chunk, total - begin);
      const int64_t n = std::max<int64_t>(std::min(padded, c.count - begin), 0);
      const float *v = source(c, begin, n, padded, b);
      if (wide == (g.layout == MCC_TENSOR) && quantizes_64(c, padded)) {
        quantize_64(c, v, wide ? steps.data() : nullptr, begin, padded);
        continue;
      }
      if (!wide) {
        for (int64_t i = 0; i < padded; i += g.group) {
          const int64_t m = std::min(g.group, padded - i);
          Extent e;
          measure(g, v + i, m, e);
          const int64_t group = (begin + i) / g.group;
          const float scale = store_scale(c.scales, c.scale_dtype, group, scale_of(g, e, g.group));
          const float step = step_of(g, scale);
          quantize_run<0>(g, v + i, &step, m, begin + i, b.codes + i);
        }
      } else {
        by_scale(c, true, steps.data(), begin, padded, [&](int64_t i, int64_t m, const float *f, int each) {
          each ? quantize_run<1>(g, v + i, f, m, begin + i, b.codes + i)
               : quantize_run<0>(g, v + i, f, m, begin + i, b.codes + i);
        });
      }
      std::memset(b.codes + padded, 0, 8);
      pack(b.codes, padded, g.bits, c.codes + begin / 8 * g.bits);
      update_other(c, units.data(), begin, n, padded, v, b);
    }
  }
}

void dequantize(const mcc_context *, const mcc_codec *codec) {
  const mcc_codec &c = *codec;
  const mcc_grid &g = c.grid;
  const int64_t total = padded_count(c, c.count), chunks = (total + kChunk - 1) / kChunk;
  const std::vector<float> units = shared_factors(c, false);
#pragma omp parallel if (total > kSerial)
  {
    Buffers b;
#pragma omp for schedule(static)
    for (int64_t k = 0; k < chunks; ++k) {
      const int64_t begin = k * kChunk, padded = std::min(kChunk, total - begin);
      const int64_t n = std::max<int64_t>(std::min(padded, c.count - begin), 0);
      if (padded == n && dequantizes_64(c, n)) {
        dequantize_64(c, g.layout == MCC_TENSOR ? units.data() : nullptr, begin, n);
        continue;
      }
      unpack(c.codes + begin / 8 * g.bits, padded, g.bits, b.codes);
      const bool direct = c.role == MCC_PLAIN && c.out_dtype == MCC_FP32 && padded == n && !g.rotation;
      float *v = direct ? static_cast<float *>(c.out) + begin : b.value;
      by_scale(c, false, units.data(), begin, padded, [&](int64_t i, int64_t m, const float *f, int each) {
        each ? dequantize_run<1>(g, b.codes + i, f, m, v + i) : dequantize_run<0>(g, b.codes + i, f, m, v + i);
      });
      if (direct) continue;
      if (g.rotation) rotate(v, padded, g.rotation);
      if (c.role == MCC_ADD) {
        float *to = static_cast<float *>(c.out) + begin;
        for (int64_t i = 0; i < n; ++i) to[i] += v[i];
        continue;
      }
      if (c.role == MCC_DELTA) {
        const float *o = view(b.other, c.other, c.other_dtype, begin, n);
        for (int64_t i = 0; i < n; ++i) v[i] = o[i] + v[i];
        store(c.other, v, c.other_dtype, begin, n);
      }
      if (c.out != nullptr) store(c.out, v, c.out_dtype, begin, n);
    }
  }
}
