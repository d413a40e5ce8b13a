/* Softmax under a causal mask, bias and GELU, residual and normalisation: what a framework without a compiler would
 * read and write several times. Arithmetic in fp32; rows are independent. */

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

inline float tanh_of(float x) {
  const float wide = x > 10.0f ? 10.0f : x < -10.0f ? -10.0f : x;
  const float e = exp_of(2.0f * wide);
  const float far = (e - 1.0f) / (e + 1.0f);
  const float square = wide * wide;
  /* Near zero the quotient loses digits. */
  const float near = wide * (1.0f - square * (1.0f / 3.0f - square * (2.0f / 15.0f - square * (17.0f / 315.0f))));
  const float y = square < 0.01f ? near : far;
  return x == x ? y : x;
}

template <class Row>
inline void for_rows(int64_t rows, int64_t columns, Row row) {
#pragma omp parallel if (rows * columns > kSerial)
  {
    std::vector<float> buffer(size_t(columns) * 4);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) row(i, buffer.data());
  }
}

void causal_softmax(const mcc_context *, const void *x, void *y, int dtype, int64_t matrices, int64_t rows, int64_t columns, float scale) {
  for_rows(matrices * rows, columns, [&](int64_t row, float *buffer) {
    const int64_t seen = std::min(row % rows + 1 + (columns > rows ? columns - rows : 0), columns);
    const float *v = view(buffer, x, dtype, row * columns, seen);
    float *out = buffer + columns;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < seen; ++i) most = v[i] * scale > most ? v[i] * scale : most;
    float sum = 0;
    const float peak = most == -INFINITY ? 0.0f : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < seen; ++i) {
      out[i] = exp_of(v[i] * scale - peak);
      sum += out[i];
    }
    const float factor = 1.0f / sum;
    for (int64_t i = 0; i < seen; ++i) out[i] *= factor;
    std::fill(out + seen, out + columns, 0.0f);
    store(y, out, dtype, row * columns, columns);
  });
}

void causal_softmax_grad(const mcc_context *, const void *y, const void *dy, void *dx, int dtype, int64_t matrices, int64_t rows,
                         int64_t columns, float scale) {
  for_rows(matrices * rows, columns, [&](int64_t row, float *buffer) {
    const float *p = view(buffer, y, dtype, row * columns, columns);
    const float *g = view(buffer + columns, dy, dtype, row * columns, columns);
    float *out = buffer + 2 * columns;
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < columns; ++i) dot += p[i] * g[i];
    for (int64_t i = 0; i < columns; ++i) out[i] = scale * (p[i] * (g[i] - dot));
    store(dx, out, dtype, row * columns, columns);
  });
}

constexpr float kGeluScale = 0.7978845608028654f, kGeluCube = 0.044715f;

void bias_gelu(const mcc_context *, const void *x, const void *bias, void *y, int dtype, int64_t rows, int64_t columns) {
  for_rows(rows, columns, [&](int64_t row, float *buffer) {
    const float *v = view(buffer, x, dtype, row * columns, columns);
    const float *b = view(buffer + columns, bias, dtype, 0, columns);
    float *out = buffer + 2 * columns;
    for (int64_t i = 0; i < columns; ++i) {
      const float z = v[i] + b[i];
      out[i] = 0.5f * z * (1.0f + tanh_of(kGeluScale * (z + kGeluCube * z * z * z)));
    }
    store(y, out, dtype, row * columns, columns);
  });
}

void bias_gelu_grad(const mcc_context *, const void *x, const void *bias, const void *dy, void *dx, int dtype, int64_t rows,
                    int64_t columns) {
  for_rows(rows, columns, [&](int64_t row, float *buffer) {
    const float *v = view(buffer, x, dtype, row * columns, columns);
    const float *b = view(buffer + columns, bias, dtype, 0, columns);
    const float *g = view(buffer + 2 * columns, dy, dtype, row * columns, columns);
    float *out = buffer + 3 * columns;
    for (int64_t i = 0; i < columns; ++i) {
      const float z = v[i] + b[i];
      const float t = tanh_of(kGeluScale * (z + kGeluCube * z * z * z));
      const float slope = kGeluScale * (1.0f + 3.0f * kGeluCube * z * z);
      out[i] = g[i] * (0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * slope);
    }
    store(dx, out, dtype, row * columns, columns);
  });
}

void add_norm(const mcc_context *, const void *x, const void *residual, const void *weight, const void *bias, void *sum, void *y,
              float *mean, float *rstd, int dtype, int64_t rows, int64_t columns, float eps) {
  for_rows(rows, columns, [&](int64_t row, float *buffer) {
    float *s = buffer, *other = buffer + columns;
    load(s, x, dtype, row * columns, columns);
    const float *r = view(other, residual, dtype, row * columns, columns);
    for (int64_t i = 0; i < columns; ++i) s[i] += r[i];
    store(sum, s, dtype, row * columns, columns);
    if (dtype != MCC_FP32) load(s, sum, dtype, row * columns, columns); /* what others will read of it */
    double total = 0, squares = 0;
    if (bias != nullptr) {
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < columns; ++i) total += double(s[i]);
    }
    const float center = bias != nullptr ? float(total / double(columns)) : 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < columns; ++i) squares += double(s[i] - center) * double(s[i] - center);
    const float inverse = float(1.0 / std::sqrt(squares / double(columns) + double(eps)));
    mean[row] = center;
    rstd[row] = inverse;
    float *out = buffer + 2 * columns;
    const float *w = view(other, weight, dtype, 0, columns);
    for (int64_t i = 0; i < columns; ++i) out[i] = (s[i] - center) * inverse * w[i];
    if (bias != nullptr) {
      const float *b = view(other, bias, dtype, 0, columns);
      for (int64_t i = 0; i < columns; ++i) out[i] += b[i];
    }
    store(y, out, dtype, row * columns, columns);
  });
}

void add_norm_grad(const mcc_context *, const void *sum, const void *weight, const float *mean, const float *rstd, const void *dy,
                   const void *dsum, void *dx, float *dweight, float *dbias, int dtype, int rms, int64_t rows,
                   int64_t columns) {
  std::fill(dweight, dweight + columns, 0.0f);
  if (dbias != nullptr) std::fill(dbias, dbias + columns, 0.0f);
  const int64_t splits = std::min<int64_t>(16, std::max<int64_t>(rows, 1)), share = (rows + splits - 1) / splits;
  std::vector<float> partial(size_t(splits * columns * 2), 0.0f);
#pragma omp parallel for schedule(static) if (rows * columns > kSerial)
  for (int64_t split = 0; split < splits; ++split) {
    std::vector<float> buffer(size_t(columns) * 5);
    float *dw = partial.data() + split * columns * 2, *db = dw + columns;
    const float *w = view(buffer.data() + 3 * columns, weight, dtype, 0, columns);
    for (int64_t row = split * share; row < std::min(rows, (split + 1) * share); ++row) {
      const float *s = view(buffer.data(), sum, dtype, row * columns, columns);
      const float *g = view(buffer.data() + columns, dy, dtype, row * columns, columns);
      const float *through = view(buffer.data() + 2 * columns, dsum, dtype, row * columns, columns);
      float *out = buffer.data() + 4 * columns;
      const float center = mean[row], inverse = rstd[row];
      float plain = 0, along = 0;
#pragma omp simd reduction(+ : plain, along)
      for (int64_t i = 0; i < columns; ++i) {
        const float hat = (s[i] - center) * inverse, own = g[i] * w[i];
        plain += own;
        along += own * hat;
        dw[i] += g[i] * hat;
        db[i] += g[i];
      }
      plain = rms ? 0.0f : plain / float(columns);
      along /= float(columns);
      for (int64_t i = 0; i < columns; ++i) {
        const float hat = (s[i] - center) * inverse;
        out[i] = through[i] + inverse * (g[i] * w[i] - plain - hat * along);
      }
      store(dx, out, dtype, row * columns, columns);
    }
  }
  for (int64_t split = 0; split < splits; ++split)
    for (int64_t i = 0; i < columns; ++i) {
      dweight[i] += partial[size_t(split * columns * 2 + i)];
      if (dbias != nullptr) dbias[i] += partial[size_t(split * columns * 2 + columns + i)];
    }
}
