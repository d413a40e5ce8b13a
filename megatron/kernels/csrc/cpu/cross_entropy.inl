/* Cross-entropy of rows of logits and its gradient in their place: a row stays in the cache between its passes, and every
 * exponential is computed once. Sums in fp32 over 1,024 numbers, in fp64 over those; rows are independent. */

/* e^x to 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN. */
inline float exp_of(float x) {
  const float clamped = x > -87.3f ? (x < 88.8f ? x : 88.8f) : -87.3f;
  const float shifted = clamped * 1.44269504f + kMagic;
  const float k = shifted - kMagic;
  const float f = (clamped - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = (p * f) * f + f + 1.0f;
  /* Twice half the exponent, so that 2^128 does not overflow on the way. */
  const int32_t whole = int32_t(bits_of(shifted)) - kMagicBits, half = whole >> 1;
  float y = p * float_of(uint32_t(half + 127) << 23) * float_of(uint32_t(whole - half + 127) << 23);
  y = x < -87.3f ? 0.0f : y;
  return x == x ? y : x;
}

inline float largest(const float *v, int64_t n) {
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

/* Sum of e^(v - peak); with ``keep``, the terms take v's place. */
template <bool keep>
inline double sum_of_exponentials(float *v, int64_t n, float peak) {
  double total = 0;
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t last = std::min(first + kChunk, n);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) {
      const float e = exp_of(v[i] - peak);
      if (keep) v[i] = e;
      sum += e;
    }
    total += double(sum);
  }
  return total;
}

void cross_entropy(const mcc_context *, void *logits, int dtype, int64_t tokens, int64_t columns, int64_t valid,
                   const int64_t *labels, float *lse, float *target, const float *weights) {
#pragma omp parallel if (tokens * columns > kSerial)
  {
    std::vector<float> buffer(size_t(dtype == MCC_FP32 ? 0 : columns));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      float *row = dtype == MCC_FP32 ? static_cast<float *>(logits) + t * columns : buffer.data();
      if (dtype != MCC_FP32) load(row, logits, dtype, t * columns, valid);
      float factor = weights != nullptr ? weights[t] : 0.0f;
      if (target != nullptr) {
        const float most = largest(row, valid), peak = most == -INFINITY ? 0.0f : most;
        target[t] = labels[t] >= 0 ? row[labels[t]] : 0.0f;
        const double sum = weights != nullptr ? sum_of_exponentials<true>(row, valid, peak)
                                              : sum_of_exponentials<false>(row, valid, peak);
        lse[t] = float(double(peak) + std::log(sum));
        factor = float(double(factor) / sum);
      } else {
        const float total = lse[t];
        for (int64_t i = 0; i < valid; ++i) row[i] = exp_of(row[i] - total);
      }
      if (weights == nullptr) continue;
      for (int64_t i = 0; i < valid; ++i) row[i] *= factor;
      if (labels[t] >= 0) row[labels[t]] -= weights[t];
      std::fill(row + valid, row + columns, 0.0f);
      if (dtype != MCC_FP32) store(logits, row, dtype, t * columns, columns);
    }
  }
}
