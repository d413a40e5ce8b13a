/* Quantise, pack, unpack, dequantise: one pass over memory, in chunks that stay in the first-level cache. */

inline void measure(const mcc_grid &g, const float *v, int64_t n, Extent &e) {
  if (takes_range(g)) {
    uint32_t least = e.least, greatest = e.greatest;
#pragma omp simd reduction(min : least) reduction(max : greatest)
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t k = ordered(bits_of(v[i]));
      least = k < least ? k : least;
      greatest = k > greatest ? k : greatest;
    }
    e.least = least, e.greatest = greatest;
  }
  if (takes_sum(g)) {
    double s = 0;
    if (sums_squares(g)) {
#pragma omp simd reduction(+ : s)
      for (int64_t i = 0; i < n; ++i) s += double(v[i]) * double(v[i]);
    } else {
#pragma omp simd reduction(+ : s)
      for (int64_t i = 0; i < n; ++i) s += double(float_of(bits_of(v[i]) & 0x7fffffffu));
    }
    e.sum += s;
  }
  if (takes_most(g)) {
    uint32_t m = e.most;
#pragma omp simd reduction(max : m)
    for (int64_t i = 0; i < n; ++i) {
      uint32_t u = bits_of(v[i]) & 0x7fffffffu;
      m = u > m ? u : m;
    }
    e.most = m;
  }
}

/* Factors of numbers: one for all (kEach = 0), or one for each (1). */
struct Factors {
  const float *by, *base;
};

/* Codes of n numbers; kBased where their grid begins at a base, kShifted where its levels lie between whole steps. */
template <int kEach, bool kBased, bool kShifted>
inline void quantize_levels(const mcc_grid &g, const float *__restrict v, Factors step, int64_t n, int64_t index,
                            uint8_t *__restrict codes) {
  const int32_t offset = offset_of(g);
  const float low = lowest(g), high = highest(g), shift = shift_of(g);
  const float *by = step.by, *base = step.base;
  const auto steps = [&](int64_t i) {
    const float y = (kBased ? v[i] - base[i * kEach] : v[i]) * by[i * kEach];
    return kShifted ? y - shift : y;
  };
  if (!g.stochastic) {
    for (int64_t i = 0; i < n; ++i) codes[i] = code_of(nearest_level(steps(i), low, high), offset);
    return;
  }
  const Noise noise(g.seed);
  for (int64_t i = 0; i < n; ++i)
    codes[i] = code_of(stochastic_level(steps(i), low, high, noise.at(uint32_t(index + i))), offset);
}

template <int kEach>
inline void quantize_run(const mcc_grid &g, const float *v, Factors step, int64_t n, int64_t index, uint8_t *codes) {
  if (is_sign(g)) {
    for (int64_t i = 0; i < n; ++i) codes[i] = v[i] >= 0.0f;
  } else if (is_minmax(g)) {
    quantize_levels<kEach, true, false>(g, v, step, n, index, codes);
  } else if (g.kind == MCC_MIDRISE) {
    quantize_levels<kEach, false, true>(g, v, step, n, index, codes);
  } else {
    quantize_levels<kEach, false, false>(g, v, step, n, index, codes);
  }
}

template <int kEach>
inline void dequantize_run(const mcc_grid &g, const uint8_t *__restrict codes, Factors unit, int64_t n,
                           float *__restrict v) {
  const float *by = unit.by, *base = unit.base;
  if (is_sign(g)) {
    for (int64_t i = 0; i < n; ++i) v[i] = float(int32_t(codes[i]) * 2 - 1) * by[i * kEach];
  } else if (is_minmax(g)) {
    for (int64_t i = 0; i < n; ++i) v[i] = float(int32_t(codes[i])) * by[i * kEach] + base[i * kEach];
  } else {
    const float zero = float(offset_of(g)) - shift_of(g);
    for (int64_t i = 0; i < n; ++i) v[i] = (float(int32_t(codes[i])) - zero) * by[i * kEach];
  }
}

struct Buffers {
  alignas(64) float value[kChunk], kept[kChunk], other[kChunk], decoded[kChunk];
  alignas(64) uint8_t codes[kChunk + 8];
};

/* What is to be encoded of [begin, begin + n): x, or its difference to the reference, or its sum with the residual;
 * rotated, and padded to whole blocks by zeros. */
inline const float *source(const mcc_codec &c, int64_t begin, int64_t n, int64_t padded, Buffers &b) {
  const float *x = view(b.value, c.x, c.x_dtype, begin, n);
  if (c.role == MCC_PLAIN && c.tiles.some) return rotate_some(c, begin, n, x, b.value);
  if (c.role == MCC_PLAIN && !c.grid.rotation) return x;
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
    if (c.tiles.some) return rotate_some(c, begin, n, b.value, b.value);
    std::fill(b.value + n, b.value + padded, 0.0f);
    rotate(b.value, padded, c.grid.rotation);
  }
  return b.value;
}

/* Factors of all channels, or of the tensor; none where groups have their own. */
struct Shared {
  std::vector<float> by, base;

  Shared(const mcc_codec &c, bool steps) {
    const int64_t n = c.grid.layout == MCC_GROUP ? 0 : c.grid.layout == MCC_TENSOR ? 1 : c.grid.group;
    by.resize(size_t(n)), base.resize(size_t(n));
    for (int64_t i = 0; i < n; ++i) {
      const Factor f = load_factor(c.grid, steps, c.scales, c.scale_dtype, i);
      by[size_t(i)] = f.by, base[size_t(i)] = f.base;
    }
  }
  Factors at(int64_t i) const { return {by.data() + i, base.data() + i}; }
};

/* Calls run(offset, n, factors, each) for the pieces of [begin, begin + n) whose factors lie together. */
template <class Run>
inline void by_scale(const mcc_codec &c, bool steps, const Shared &shared, int64_t begin, int64_t n, Run run) {
  if (c.grid.layout == MCC_TENSOR) {
    run(int64_t(0), n, shared.at(0), 0);
    return;
  }
  int64_t group = begin / c.grid.group, end = (group + 1) * c.grid.group - begin;
  if (c.grid.layout == MCC_CHANNEL) {
    /* A group is a row here. */
    for (int64_t i = 0; i < n; i = end, end += c.grid.group)
      run(i, std::min(end, n) - i, shared.at(i == 0 ? begin - group * c.grid.group : 0), 1);
    return;
  }
  for (int64_t i = 0; i < n; ++group, i = end, end += c.grid.group) {
    const Factor factor = load_factor(c.grid, steps, c.scales, c.scale_dtype, group);
    run(i, std::min(end, n) - i, Factors{&factor.by, &factor.base}, 0);
  }
}

inline int64_t padded_count(const mcc_codec &c, int64_t n) {
  const int64_t block = c.tiles.some ? 0 : c.grid.rotation;
  return block ? (n + block - 1) / block * block : n;
}

/* Stores the scale of n numbers; returns what the receiver will read. */
inline Scale keep_scale(const mcc_codec &c, int64_t i, const Extent &e, int64_t n) {
  const Scale s = rounded(c.grid, c.scale_dtype, scale_of(c.grid, e, n));
  store_scale(c.grid, c.scales, c.scale_dtype, i, s);
  return s;
}

#include "scales512.inl"

#include "groups512.inl"

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

/* Extents of columns, each array only where the grid needs it. */
struct Columns {
  std::vector<uint32_t> most, least, greatest;
  std::vector<double> sum;

  Columns(const mcc_grid &g, int64_t n)
      : most(size_t(takes_most(g) ? n : 0), 0),
        least(size_t(takes_range(g) ? n : 0), 0xffffffffu),
        greatest(least.size(), 0),
        sum(size_t(takes_sum(g) ? n : 0), 0.0) {}

  void take(const mcc_grid &g, int64_t at, const float *v, int64_t n) {
    for (int64_t i = 0; i < (least.empty() ? 0 : n); ++i) {
      const uint32_t k = ordered(bits_of(v[i]));
      uint32_t &low = least[size_t(at + i)], &high = greatest[size_t(at + i)];
      low = k < low ? k : low;
      high = k > high ? k : high;
    }
    for (int64_t i = 0; i < (most.empty() ? 0 : n); ++i) {
      const uint32_t u = bits_of(v[i]) & 0x7fffffffu;
      uint32_t &m = most[size_t(at + i)];
      m = u > m ? u : m;
    }
    for (int64_t i = 0; i < (sum.empty() ? 0 : n); ++i) {
      const double wide = double(float_of(bits_of(v[i]) & 0x7fffffffu));
      sum[size_t(at + i)] += sums_squares(g) ? wide * wide : wide;
    }
  }

  Extent at(int64_t i) const {
    Extent e;
    if (!most.empty()) e.most = most[size_t(i)];
    if (!least.empty()) e.least = least[size_t(i)], e.greatest = greatest[size_t(i)];
    if (!sum.empty()) e.sum = sum[size_t(i)];
    return e;
  }
};

/* Scales of columns; rows are split alike for any number of threads, so that sums do not depend on it. */
inline void channel_scales(const mcc_codec &c) {
  const mcc_grid &g = c.grid;
  const int64_t rows = c.count / g.group, splits = std::min<int64_t>(16, std::max<int64_t>(rows, 1));
  const int64_t share = (rows + splits - 1) / splits;
  std::vector<Columns> columns(size_t(splits), Columns(g, g.group));
#pragma omp parallel for schedule(static) if (c.count > kSerial)
  for (int64_t split = 0; split < splits; ++split) {
    Buffers b;
    for (int64_t row = split * share; row < std::min(rows, (split + 1) * share); ++row) {
      for (int64_t column = 0; column < g.group; column += kChunk) {
        const int64_t n = std::min(kChunk, g.group - column);
        columns[size_t(split)].take(g, column, source(c, row * g.group + column, n, n, b), n);
      }
    }
  }
  for (int64_t i = 0; i < g.group; ++i) {
    Extent e;
    for (const Columns &part : columns) join(e, part.at(i));
    keep_scale(c, i, e, rows);
  }
}

/* The scales of groups that a chunk does not hold whole; in fixed pieces, so that threads do not change the result. */
inline void wide_scales(const mcc_codec &c, const Streams &streams, int64_t total) {
  if (c.grid.layout == MCC_CHANNEL) {
    channel_scales(c);
    return;
  }
  const mcc_grid &g = c.grid;
  const int64_t size = g.layout == MCC_TENSOR ? total : g.group;
  const int64_t groups = g.layout == MCC_TENSOR ? 1 : (total + size - 1) / size;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * size, end = std::min(begin + size, total);
    const int64_t pieces = (end - begin + kChunk - 1) / kChunk;
    std::vector<Extent> extents(static_cast<size_t>(pieces));
    const TilePlace place = streams.place(group); /* tiles this large are groups */
    const mcc_codec &own = streams.of(place);
#pragma omp parallel for schedule(static) if (end - begin > kSerial)
    for (int64_t p = 0; p < pieces; ++p) {
      Buffers b;
      const int64_t at = begin + p * kChunk, wide = std::min(kChunk, end - at);
      const int64_t n = std::max<int64_t>(std::min(wide, c.count - at), 0);
      measure(own.grid, source(c, at, n, wide, b), wide, extents[size_t(p)]);
    }
    Extent whole;
    for (const Extent &e : extents) join(whole, e);
    keep_scale(own, place.at, whole, end - begin);
  }
}

/* The numbers of n codes from ``at`` on of a stream. */
inline void values_of_part(const mcc_codec &c, const Shared &units, const uint8_t *codes, int64_t at, int64_t n, float *v) {
  by_scale(c, false, units, at, n, [&](int64_t i, int64_t m, Factors f, int each) {
    each ? dequantize_run<1>(c.grid, codes + i, f, m, v + i) : dequantize_run<0>(c.grid, codes + i, f, m, v + i);
  });
}

/* Encodes n numbers from ``at`` on of a stream: whole groups with scales of their own, or ``wide``, with scales that lie
 * there. Writes what they decode to where ``decoded`` is not null. */
inline void encode_part(const mcc_codec &c, Common common, bool wide, const float *v, int64_t at, int64_t n, uint8_t *codes,
                        float *decoded) {
  const mcc_grid &g = c.grid;
  if (wide == (g.layout == MCC_TENSOR) && quantizes_64(c, n)) {
    quantize_64(c, v, wide ? common : Common{nullptr, nullptr}, at, n, decoded);
    return;
  }
  if (!wide) {
    for (int64_t i = 0; i < n; i += g.group) {
      const int64_t m = std::min(g.group, n - i);
      Extent e;
      measure(g, v + i, m, e);
      const Factor step = factor_of(g, true, keep_scale(c, (at + i) / g.group, e, m));
      quantize_run<0>(g, v + i, Factors{&step.by, &step.base}, m, at + i, codes + i);
    }
  } else {
    by_scale(c, true, *common.steps, at, n, [&](int64_t i, int64_t m, Factors f, int each) {
      each ? quantize_run<1>(g, v + i, f, m, at + i, codes + i) : quantize_run<0>(g, v + i, f, m, at + i, codes + i);
    });
  }
  std::memset(codes + n, 0, 8);
  pack(codes, n, g.bits, c.codes + at / 8 * g.bits);
  if (decoded) values_of_part(c, *common.units, codes, at, n, decoded);
}

/* Encodes the tiles of a chunk by stream, so that few are encoded alone: as ``encode_part``, for scales of their own. */
class Sorted {
 public:
  Sorted(Common common, uint8_t *codes, float *decoded) : common_(common), codes_(codes), decoded_(decoded) {}

  static bool takes(const mcc_codec &c, const Streams &streams, int64_t begin) {
    return streams.exact() && c.tiles.tile <= kChunk / 2 && begin % c.tiles.tile == 0;
  }

  void encode(const mcc_codec &c, const Streams &streams, int64_t begin, int64_t n, const float *v) {
    const int64_t tile = c.tiles.tile;
    int64_t number = begin / tile;
    for (int64_t i = 0; i < n; i += tile, ++number) {
      Stretch &s = stretches_[streams.marked(number)];
      const int64_t m = std::min(tile, n - i);
      if (!s.tiles) s.first = number;
      s.from[s.tiles++] = i;
      copy_numbers(s.value + s.size, v + i, m);
      s.size += m;
    }
    for (const Stretch &s : stretches_)
      if (s.tiles) finish(streams, s, tile);
  }

 private:
  struct Stretch {
    int64_t first = 0, size = 0, tiles = 0, from[kChunk / 8];
    alignas(64) float value[kChunk];
  };

  void finish(const Streams &streams, const Stretch &s, int64_t tile) {
    alignas(64) float decoded[kChunk];
    const TilePlace p = streams.place(s.first);
    encode_part(streams.of(p), common_, false, s.value, p.at * tile, s.size, codes_, decoded_ ? decoded : nullptr);
    for (int64_t k = 0; decoded_ && k < s.tiles; ++k)
      copy_numbers(decoded_ + s.from[k], decoded + k * tile, std::min(tile, s.size - k * tile));
  }

  Common common_;
  uint8_t *codes_;
  float *decoded_;
  Stretch stretches_[2];
};

/* Decodes n numbers from ``at`` on of a stream; adds them where ``add`` says so. */
inline void decode_part(const mcc_codec &c, const Shared &units, int64_t at, int64_t n, bool add, float *out, Buffers &b) {
  if (dequantizes_64(c, n)) {
    dequantize_64(c, c.grid.layout == MCC_TENSOR ? &units : nullptr, at, n, add, out);
    return;
  }
  unpack(c.codes + at / 8 * c.grid.bits, n, c.grid.bits, b.codes);
  float *v = add ? b.decoded : out;
  values_of_part(c, units, b.codes, at, n, v);
  for (int64_t i = 0; i < (add ? n : 0); ++i) out[i] += v[i];
}

/* The second tensor moves by what its numbers, ``v`` where they are not rotated, decode to. */
inline void update_other(const mcc_codec &c, int64_t begin, int64_t n, int64_t padded, const float *v, Buffers &b) {
  float *decoded = b.decoded;
  rotate_back(c, begin, n, padded, decoded);
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
  const Streams streams(c, total);
  const bool wide = g.layout != MCC_GROUP || g.group > kChunk || (g.rotation && kChunk % g.group);
  clear_map(c);
  if (wide) wide_scales(c, streams, total);
  const Shared steps(c, true), units(c, false);
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
      float *decoded = c.role == MCC_PLAIN ? nullptr : b.decoded;
      if (!wide && Sorted::takes(c, streams, begin)) {
        Sorted({&steps, &units}, b.codes, decoded).encode(c, streams, begin, padded, v);
      } else {
        streams.parts(begin, padded, [&](const mcc_codec &own, int64_t at, int64_t i, int64_t m) {
          encode_part(own, {&steps, &units}, wide, v + i, at, m, b.codes + i, decoded ? decoded + i : nullptr);
        });
      }
      if (c.role != MCC_PLAIN) update_other(c, begin, n, padded, v, b);
    }
  }
}

void dequantize(const mcc_context *, const mcc_codec *codec) {
  const mcc_codec &c = *codec;
  const mcc_grid &g = c.grid;
  const int64_t total = padded_count(c, c.count), chunks = (total + kChunk - 1) / kChunk;
  const Streams streams(c, total);
  const Shared units(c, false);
  const bool adds = c.role == MCC_ADD && !g.rotation, writes = c.role == MCC_PLAIN && c.out_dtype == MCC_FP32;
#pragma omp parallel if (total > kSerial)
  {
    Buffers b;
#pragma omp for schedule(static)
    for (int64_t k = 0; k < chunks; ++k) {
      const int64_t begin = k * kChunk, padded = std::min(kChunk, total - begin);
      const int64_t n = std::max<int64_t>(std::min(padded, c.count - begin), 0);
      const bool direct = adds || (writes && padded == n);
      float *v = direct ? static_cast<float *>(c.out) + begin : b.value;
      streams.parts(begin, padded, [&](const mcc_codec &own, int64_t at, int64_t i, int64_t m) {
        decode_part(own, units, at, m, adds, v + i, b);
      });
      rotate_back(c, begin, n, padded, v);
      if (direct) continue;
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
