/* Conversions and vector-friendly pieces that every instruction set's kernels share. Included inside a namespace. */

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float bf16_to_float(uint16_t h) { return float_of(uint32_t(h) << 16); }

/* To nearest, ties to even; NaN stays NaN. */
inline uint16_t float_to_bf16(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded);
}

/* Without branches, so that loops over it vectorise. */
inline float fp16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  /* Normal numbers: the exponent moves by 112. Subnormal ones: exact as an integer times 2^-24. */
  float normal = float_of((rest << 13) + 0x38000000u);
  float subnormal = float(int32_t(rest)) * 0x1p-24f;
  float special = float_of((rest << 13) | 0x7f800000u);
  float value = rest < 0x400u ? subnormal : rest >= 0x7c00u ? special : normal;
  return float_of(bits_of(value) | sign);
}

inline uint16_t float_to_fp16(float x) {
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  /* Adding 0.5 puts the last bit of a subnormal half at the last bit of the sum. */
  uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  uint32_t value = rest < 0x38800000u ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
  value = rest > 0x7f800000u ? 0x7e00u : value;
  return uint16_t(sign | value);
}

inline void load(float *to, const void *from, int dtype, int64_t begin, int64_t n) {
  if (dtype == MCC_FP32) {
    std::memcpy(to, static_cast<const float *>(from) + begin, size_t(n) * 4);
  } else if (dtype == MCC_BF16) {
    const uint16_t *h = static_cast<const uint16_t *>(from) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(h[i]);
  } else {
    const uint16_t *h = static_cast<const uint16_t *>(from) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = fp16_to_float(h[i]);
  }
}

inline void store(void *to, const float *from, int dtype, int64_t begin, int64_t n) {
  if (dtype == MCC_FP32) {
    std::memcpy(static_cast<float *>(to) + begin, from, size_t(n) * 4);
  } else if (dtype == MCC_BF16) {
    uint16_t *h = static_cast<uint16_t *>(to) + begin;
    for (int64_t i = 0; i < n; ++i) h[i] = float_to_bf16(from[i]);
  } else {
    uint16_t *h = static_cast<uint16_t *>(to) + begin;
    for (int64_t i = 0; i < n; ++i) h[i] = float_to_fp16(from[i]);
  }
}

/* The numbers themselves where they are fp32 already, else a converted copy in ``buffer``. */
inline const float *view(float *buffer, const void *from, int dtype, int64_t begin, int64_t n) {
  if (dtype == MCC_FP32) return static_cast<const float *>(from) + begin;
  load(buffer, from, dtype, begin, n);
  return buffer;
}

constexpr int64_t kChunk = 1024;
constexpr int64_t kSerial = 1 << 15; /* elements below which starting threads costs more than it saves */
