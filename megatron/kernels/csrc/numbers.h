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

MCC_FN int top_of(const mcc_grid &g) { return g.symmetric ? (1 << (g.bits - 1)) - 1 : 1 << (g.bits - 1); }
MCC_FN bool is_sign(const mcc_grid &g) { return g.bits == 1 && g.symmetric; }

MCC_FN float load_scale(const void *scales, int dtype, int64_t i) {
  return dtype == MCC_FP32 ? static_cast<const float *>(scales)[i]
                           : bf16_to_float(static_cast<const uint16_t *>(scales)[i]);
}

/* Stores a scale in its type and returns what the receiver will read. */
MCC_FN float store_scale(void *scales, int dtype, int64_t i, float scale) {
  if (dtype == MCC_FP32) {
    static_cast<float *>(scales)[i] = scale;
    return scale;
  }
  uint16_t h = float_to_bf16(scale);
  static_cast<uint16_t *>(scales)[i] = h;
  return bf16_to_float(h);
}

/* Steps per unit: what a number is multiplied by before it is rounded. */
MCC_FN float step_of(const mcc_grid &g, float scale) { return scale > 0 ? float(top_of(g)) / scale : 0.0f; }
/* Units per step: what a level is multiplied by. */
MCC_FN float unit_of(const mcc_grid &g, float scale) { return is_sign(g) ? scale : scale / float(top_of(g)); }

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


/* Lowest and highest level of a grid that is not a sign's. */
MCC_FN float lowest(const mcc_grid &g) { return float(g.symmetric ? -top_of(g) : -(1 << (g.bits - 1))); }
MCC_FN float highest(const mcc_grid &g) { return float(g.symmetric ? top_of(g) : (1 << (g.bits - 1)) - 1); }

/* The code of a number times its step; NaN takes the lowest level. */
MCC_FN uint8_t nearest_code(float y, float low, float high, int32_t offset) {
  y = y > low ? y : low;
  y = y < high ? y : high;
  return uint8_t(int32_t(bits_of(y + kMagic)) - (kMagicBits - offset));
}

MCC_FN uint8_t stochastic_code(float y, float low, float high, int32_t offset, float noise) {
  y += noise;
  y = y > low ? y : low;
  y = y < high + 0.5f ? y : high + 0.5f;
  const float nearest = (y + kMagic) - kMagic;
  return uint8_t(int32_t(nearest > y ? nearest - 1.0f : nearest) + offset);
}

MCC_FN float value_of(const mcc_grid &g, uint8_t code, float unit) {
  return is_sign(g) ? float(int32_t(code) * 2 - 1) * unit : float(int32_t(code) - (1 << (g.bits - 1))) * unit;
}
