/* What 8-bit floats and their scales are, to the bit, on every device. Included inside a namespace, after numbers.h. */

/* e4m3 (3 bits of mantissa, no infinities) or e5m2 (2 bits). Steps and limits are fp32's bits. */
template <int kMantissa>
struct Float8 {
  static constexpr int kBias = kMantissa == 3 ? 7 : 15, kShift = 23 - kMantissa;
  static constexpr uint32_t kMost = kMantissa == 3 ? 0x43e00000u : 0x47600000u; /* 448 or 57344 */
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr uint32_t kLeast = uint32_t(128 - kBias) << 23;        /* the least normal number */
  static constexpr uint32_t kLast = uint32_t(128 - kBias - kMantissa) << 23; /* the least subnormal one */
  static constexpr uint32_t kMagic = kLast + (23u << 23); /* adding it puts a subnormal's last bit at the sum's */
  static constexpr uint32_t kSpecial = kMantissa == 3 ? 0x7fu : 0x7cu;   /* the least code that is not finite */
  static constexpr uint32_t kTopPower = 381u - (kMost >> 23); /* of a scale, so that the largest number is finite */
};

constexpr uint8_t kFloat8Nan = 0x7f;

/* The sign and the magnitude of a number that is to be coded; what is too large takes the largest number. */
template <int kMantissa>
MCC_FN uint32_t float8_magnitude(float y) {
  const uint32_t rest = bits_of(y) & 0x7fffffffu;
  return rest < Float8<kMantissa>::kMost ? rest : Float8<kMantissa>::kMost;
}

MCC_FN uint8_t float8_signed(float y, uint32_t code) {
  const uint32_t u = bits_of(y);
  return uint8_t((u & 0x7fffffffu) > 0x7f800000u ? kFloat8Nan : ((u >> 24) & 0x80u) | code);
}

/* By masks: behind a condition compilers would put conversions to integers, and loops over them do not vectorize. */
MCC_FN uint32_t float8_choice(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - uint32_t(condition);
  return (yes & mask) | (no & ~mask);
}

/* To nearest, ties to even. */
template <int kMantissa>
MCC_FN uint8_t float8_nearest(float y) {
  using F = Float8<kMantissa>;
  const uint32_t rest = float8_magnitude<kMantissa>(y);
  const uint32_t half = (1u << (F::kShift - 1)) - 1;
  const uint32_t normal = (rest - F::kRebias + half + ((rest >> F::kShift) & 1u)) >> F::kShift;
  const uint32_t subnormal = bits_of(float_of(rest) + float_of(F::kMagic)) - F::kMagic;
  return float8_signed(y, rest < F::kLeast ? subnormal : normal);
}

/* Up with the probability of what would be cut off; ``noise`` is uniform in [0, 1). */
template <int kMantissa>
MCC_FN uint8_t float8_stochastic(float y, float noise) {
  using F = Float8<kMantissa>;
  const uint32_t rest = float8_magnitude<kMantissa>(y);
  const uint32_t drawn = uint32_t(int32_t(noise * float(1 << F::kShift)));
  const uint32_t normal = (rest - F::kRebias + drawn) >> F::kShift;
  const uint32_t low = rest < F::kLeast ? rest : F::kLeast; /* a number too large for the conversion is not used */
  const float levels = float_of(low) * (1.0f / float_of(F::kLast));
  const uint32_t subnormal = uint32_t(int32_t(levels + float(int32_t(drawn)) * (1.0f / float(1 << F::kShift))));
  const uint32_t code = ((bits_of(y) >> 24) & 0x80u) | float8_choice(rest < F::kLeast, subnormal, normal);
  return uint8_t(float8_choice((bits_of(y) & 0x7fffffffu) > 0x7f800000u, kFloat8Nan, code));
}

template <int kMantissa>
MCC_FN float float8_value(uint8_t code) {
  using F = Float8<kMantissa>;
  const uint32_t sign = uint32_t(code & 0x80u) << 24, rest = code & 0x7fu;
  const uint32_t normal = (rest << F::kShift) + F::kRebias;
  const uint32_t subnormal = bits_of(float(int32_t(rest)) * float_of(F::kLast));
  /* e4m3 has one NaN, e5m2 an infinity and three. */
  const uint32_t special = kMantissa == 3 ? 0x7fc00000u : (rest << F::kShift) | 0x7f800000u;
  return float_of((rest < (1u << kMantissa) ? subnormal : rest >= F::kSpecial ? special : normal) | sign);
}

/* What the codes of a group are multiplied by. No smaller than 2^-126, so that neither it nor its inverse is inf or 0. */
template <int kMantissa>
MCC_FN float float8_unit(const mcc_float8 &c, int64_t group) {
  if (c.scale_dtype == MCC_E8M0) {
    const uint32_t power = static_cast<const uint8_t *>(c.scales)[group];
    return float_of(power == 255 ? 0x7fc00000u : power == 0 ? 0x00400000u : power << 23);
  }
  const float most = float_of(Float8<kMantissa>::kMost);
  const uint32_t least = bits_of(most * 0x1p-126f), u = bits_of(load_scale(c.scales, c.scale_dtype, group));
  return float_of(u > least ? u : least) / most;
}

/* Stores the scale of a group by the bits of its largest magnitude; returns what its numbers are multiplied by. */
template <int kMantissa>
MCC_FN float float8_store(const mcc_float8 &c, int64_t group, uint32_t largest) {
  const float most = float_of(Float8<kMantissa>::kMost);
  if (c.scale_dtype == MCC_E8M0) {
    const uint32_t least = bits_of(most * 0x1p-126f);
    const uint32_t unit = bits_of(float_of(largest > least ? largest : least) / most);
    const uint32_t power = (unit + 0x7fffffu) >> 23, top = Float8<kMantissa>::kTopPower;
    static_cast<uint8_t *>(c.scales)[group] = uint8_t(unit >= 0x7f800000u ? 255u : power < top ? power : top);
  } else if (c.scale_dtype == MCC_BF16) {
    const float outer = c.stochastic ? bf16_towards(float_of(largest), true) : float_of(largest);
    const uint16_t rounded = float_to_bf16(outer);
    static_cast<uint16_t *>(c.scales)[group] = rounded == 0x7f80u && largest < 0x7f800000u ? uint16_t(0x7f7f) : rounded;
  } else {
    static_cast<float *>(c.scales)[group] = float_of(largest);
  }
  return 1.0f / float8_unit<kMantissa>(c, group);
}
