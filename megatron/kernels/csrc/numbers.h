/* What numbers, scales and codes are, to the bit, on every device. Included inside a namespace; MCC_FN says for whom the
 * functions are compiled. */

MCC_FN uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

MCC_FN float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

MCC_FN float bf16_to_float(uint16_t h) { return float_of(uint32_t(h) << 16); }

/* To nearest, ties to even; NaN stays NaN. */
MCC_FN uint16_t float_to_bf16(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded);
}

/* Without branches, so that loops over it vectorise. */
MCC_FN float fp16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  /* Normal numbers: the exponent moves by 112. Subnormal ones: exact as an integer times 2^-24. */
  float normal = float_of((rest << 13) + 0x38000000u);
  float subnormal = float(int32_t(rest)) * 0x1p-24f;
  float special = float_of((rest << 13) | 0x7f800000u);
  float value = rest < 0x400u ? subnormal : rest >= 0x7c00u ? special : normal;
  return float_of(bits_of(value) | sign);
}

MCC_FN uint16_t float_to_fp16(float x) {
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  /* Adding 0.5 puts the last bit of a subnormal half at the last bit of the sum. */
  uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  uint32_t value = rest < 0x38800000u ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
  value = rest > 0x7f800000u ? 0x7e00u : value;
  return uint16_t(sign | value);
}

MCC_FN bool is_minmax(const mcc_grid &g) { return g.kind == MCC_MINMAX; }
MCC_FN bool is_sign(const mcc_grid &g) { return g.bits == 1 && g.kind == MCC_SYMMETRIC; }
/* Steps from zero to the scale; of a minmax grid, from its least level to its greatest. */
MCC_FN int top_of(const mcc_grid &g) {
  return is_minmax(g) ? (1 << g.bits) - 1 : (1 << (g.bits - 1)) - (g.kind == MCC_SYMMETRIC ? 1 : 0);
}
/* Lowest and highest level of a grid that is not a sign's; half a step less than those of a mid-rise grid. */
MCC_FN float lowest(const mcc_grid &g) { return is_minmax(g) ? 0.0f : float(-top_of(g)); }
MCC_FN float highest(const mcc_grid &g) {
  return float(g.kind == MCC_SYMMETRIC || is_minmax(g) ? top_of(g) : top_of(g) - 1);
}
/* The code of level 0, and the steps that the levels lie above whole ones. */
MCC_FN int32_t offset_of(const mcc_grid &g) { return is_minmax(g) ? 0 : 1 << (g.bits - 1); }
MCC_FN float shift_of(const mcc_grid &g) { return g.kind == MCC_MIDRISE ? 0.5f : 0.0f; }

/* What the wire says of a set of numbers: its scale, or the least and the greatest of them. */
struct Scale {
  float first, second;
};

MCC_FN float load_scale(const void *scales, int dtype, int64_t i) {
  return dtype == MCC_FP32 ? static_cast<const float *>(scales)[i]
                           : bf16_to_float(static_cast<const uint16_t *>(scales)[i]);
}

/* The next number in bf16 that is not closer to zero (``outwards``) or not farther from it. Finite numbers stay finite, and
 * NaN stays NaN. */
MCC_FN float bf16_towards(float x, bool outwards) {
  const uint32_t u = bits_of(x), size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return x;
  return float_of((outwards && size < 0x7f7f0000u ? u + 0xffffu : u) & 0xffff0000u);
}

/* What the receiver will read. To nearest, which has the least error; but the limits of a minmax grid, and the scales of
 * stochastic rounding, never inwards: a clipped number would be a bias. */
MCC_FN Scale rounded(const mcc_grid &g, int dtype, Scale s) {
  if (dtype == MCC_FP32) return s;
  if (!is_minmax(g) && g.stochastic && !is_sign(g)) return {bf16_towards(s.first, true), 0.0f};
  if (!is_minmax(g)) return {bf16_to_float(float_to_bf16(s.first)), 0.0f};
  return {bf16_towards(s.first, s.first < 0), bf16_towards(s.second, !(s.second < 0))};
}

/* Stores what ``rounded`` returned. */
MCC_FN void store_scale(const mcc_grid &g, void *scales, int dtype, int64_t i, Scale s) {
  const int64_t at = is_minmax(g) ? 2 * i : i;
  if (dtype == MCC_FP32) {
    float *to = static_cast<float *>(scales) + at;
    to[0] = s.first;
    if (is_minmax(g)) to[1] = s.second;
  } else {
    uint16_t *to = static_cast<uint16_t *>(scales) + at;
    to[0] = float_to_bf16(s.first);
    if (is_minmax(g)) to[1] = float_to_bf16(s.second);
  }
}

/* Steps per unit: what a number is multiplied by before it is rounded. */
MCC_FN float step_of(const mcc_grid &g, float scale) { return scale > 0 || scale < 0 ? float(top_of(g)) / scale : 0.0f; }
/* Units per step: what a level is multiplied by. */
MCC_FN float unit_of(const mcc_grid &g, float scale) { return is_sign(g) ? scale : scale / float(top_of(g)); }

/* A step or a unit, and the number that code 0 of a minmax grid stands for. */
struct Factor {
  float by, base;
};

MCC_FN Factor factor_of(const mcc_grid &g, bool steps, Scale s) {
  const float length = is_minmax(g) ? s.second - s.first : s.first;
  return {steps ? step_of(g, length) : unit_of(g, length), is_minmax(g) ? s.first : 0.0f};
}

MCC_FN Factor load_factor(const mcc_grid &g, bool steps, const void *scales, int dtype, int64_t i) {
  if (!is_minmax(g)) return factor_of(g, steps, {load_scale(scales, dtype, i), 0.0f});
  return factor_of(g, steps, {load_scale(scales, dtype, 2 * i), load_scale(scales, dtype, 2 * i + 1)});
}

/* What a scale is made of: the largest magnitude's bits (so that NaN counts as the largest), a sum, or the least and the
 * greatest number as integers of the same order. */
struct Extent {
  uint32_t most = 0, least = 0xffffffffu, greatest = 0;
  double sum = 0;
};

/* Numbers' order as integers'. */
MCC_FN uint32_t ordered(uint32_t u) { return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u); }
MCC_FN float from_ordered(uint32_t k) { return float_of(k & 0x80000000u ? k ^ 0x80000000u : ~k); }

MCC_FN bool takes_range(const mcc_grid &g) { return is_minmax(g) || (g.kind == MCC_SIGNED && g.method == MCC_MAX); }
MCC_FN bool takes_sum(const mcc_grid &g) {
  const bool fitted = (g.kind == MCC_MIDRISE || g.kind == MCC_SIGNED) && !g.stochastic;
  return !is_minmax(g) && (g.method == MCC_L2 || is_sign(g) || fitted);
}
MCC_FN bool sums_squares(const mcc_grid &g) { return g.method == MCC_L2 || !is_sign(g); }
MCC_FN bool takes_most(const mcc_grid &g) { return !takes_range(g) && g.method == MCC_MAX && !is_sign(g); }

MCC_FN void join(Extent &e, const Extent &other) {
  e.most = other.most > e.most ? other.most : e.most;
  e.least = other.least < e.least ? other.least : e.least;
  e.greatest = other.greatest > e.greatest ? other.greatest : e.greatest;
  e.sum += other.sum;
}

/* Scales of mid-rise grids with the least error on normal numbers, in root mean squares. */
MCC_FN double midrise_rms(int bits) {
  return bits == 1   ? 1.5958
         : bits == 2 ? 1.9914
         : bits == 3 ? 2.3441
         : bits == 4 ? 2.6816
         : bits == 5 ? 3.0102
         : bits == 6 ? 3.33
         : bits == 7 ? 3.6395
                     : 3.9376;
}

constexpr float kLargest = 0x1.fffffep127f;
constexpr double kStandsOut = 4.0; /* root mean squares of the others */

/* The scale of n numbers on a signed grid: that of least error, or one whose levels hold them all. */
MCC_FN float signed_scale(const mcc_grid &g, double sum, float low, float high, int64_t n) {
  const bool positive = high > -low;
  const float most = positive ? high : -low, opposite = positive ? -low : high, sign = positive ? -1.0f : 1.0f;
  if (!g.stochastic) {
    if (g.bits != 2 && g.bits != 3) return sign * most;
    const double square = double(most) * double(most), others = (sum - square) * (kStandsOut * kStandsOut);
    const float usual = float(sqrt(sum / double(n)) * (g.bits == 2 ? 2.1 : 2.5)), fitted = usual < most ? usual : most;
    return sign * (square * double(n - 1) > others ? most : fitted);
  }
  const int half = 1 << (g.bits - 1);
  if (half == 1 || !(opposite > 0.0f) || bits_of(most) >= 0x7f800000u) return sign * most;
  const float needed = opposite * (float(half) / float(half - 1)), outer = needed > most ? needed : most;
  return sign * (outer < kLargest ? outer : kLargest);
}

/* The scale of n numbers; of none, zero. */
MCC_FN Scale scale_of(const mcc_grid &g, const Extent &e, int64_t n) {
  if (takes_range(g)) {
    if (n == 0) return {0.0f, 0.0f};
    if (e.least < 0x007fffffu || e.greatest > 0xff800000u) return {float_of(0x7fc00000u), float_of(0x7fc00000u)};
    const float low = from_ordered(e.least) + 0.0f, high = from_ordered(e.greatest) + 0.0f; /* no negative zeros */
    if (is_minmax(g)) return {low, high};
    return {signed_scale(g, e.sum, low, high, n) + 0.0f, 0.0f};
  }
  if (takes_sum(g)) {
    const double mean = n == 0 ? 0.0 : e.sum / double(n);
    if (!sums_squares(g)) return {float(mean), 0.0f};
    const double root = sqrt(mean);
    if (g.method == MCC_L2) return {float(root * 2.0), 0.0f};
    const float scale = float(root * midrise_rms(g.bits)), most = float_of(e.most);
    return {scale < most ? scale : most, 0.0f};
  }
  const float most = float_of(e.most);
  if (g.kind != MCC_MIDRISE || e.most >= 0x7f800000u) return {most, 0.0f};
  const float outer = most * (float(1 << g.bits) / float((1 << g.bits) - 1));
  return {outer < kLargest ? outer : kLargest, 0.0f};
}

MCC_FN bool bit_of(const uint8_t *map, int64_t i) { return (map[i >> 3] >> (i & 7)) & 1; }

/* Where a tile is coded: its stream, and its place among the tiles of that. */
struct TilePlace {
  bool wide;
  int64_t at;
};

/* The place of a tile which ``before`` of the ``all`` marked tiles precede. The marked tiles and then the others, in order,
 * fill the first stream, which has room for ``more``, and then the second. */
MCC_FN TilePlace place_of(bool marked, int64_t tile, int64_t before, int64_t all, int64_t more) {
  const int64_t sorted = marked ? before : all + tile - before;
  const bool wide = sorted < more;
  return {wide, wide ? sorted : sorted - more};
}

/* The sum of eight squares, neighbors first. */
MCC_FN float sum_of_squares(const float *d) {
  return ((d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3])) +
         ((d[4] * d[4] + d[5] * d[5]) + (d[6] * d[6] + d[7] * d[7]));
}

MCC_FN uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

/* Uniform in [0, 1), a function of seed and index alone. */
struct Noise {
  uint32_t first, second;
  MCC_FN explicit Noise(uint64_t seed) : first(uint32_t(seed)), second(uint32_t(seed >> 32)) {}
  MCC_FN float at(uint32_t index) const { return float(int32_t(mixed(mixed(index ^ first) ^ second) >> 8)) * 0x1p-24f; }
};

constexpr float kMagic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold */
constexpr int32_t kMagicBits = 0x4b400000;

/* The level of a number times its step, above kMagicBits; NaN takes the lowest. */
MCC_FN uint32_t nearest_level(float y, float low, float high) {
  y = y > low ? y : low;
  y = y < high ? y : high;
  return bits_of(y + kMagic);
}

MCC_FN uint32_t stochastic_level(float y, float low, float high, float noise) {
  y += noise;
  y = y > low ? y : low;
  y = y < high + 0.5f ? y : high + 0.5f;
  const float nearest = y + kMagic;
  return bits_of(nearest) - (nearest - kMagic > y ? 1u : 0u);
}

MCC_FN uint8_t code_of(uint32_t level, int32_t offset) { return uint8_t(int32_t(level) - (kMagicBits - offset)); }
