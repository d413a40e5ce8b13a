/* Moving numbers between memory and fp32, in vectors. Included inside a namespace. */

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

/* Quotients of what is not negative; powers of two are shifted. */
inline int64_t quotient(int64_t x, int64_t by) { return (by & (by - 1)) == 0 ? x >> __builtin_ctzll(uint64_t(by)) : x / by; }

/* Few numbers, which a call of memcpy would take longer for. */
inline void copy_numbers(float *to, const float *from, int64_t n) {
  int64_t i = 0;
#if MCC_AVX512
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 64; k += 16) _mm512_storeu_ps(to + i + k, _mm512_loadu_ps(from + i + k));
#endif
  if (i < n) std::memcpy(to + i, from + i, size_t(n - i) * 4);
}

constexpr int64_t kChunk = 1024;
constexpr int64_t kSerial = 1 << 15; /* elements below which starting threads costs more than it saves */
