/* Rows of tokens: their weighted sums, and the gradients of these. A token's rows are read once, in fp32. */

void combine_rows(const mcc_context *, const void *rows, int dtype, int64_t count, int64_t width, const int64_t *places,
                  const float *weights, int64_t tokens, int64_t k, void *out) {
#pragma omp parallel if (tokens * k * width > kSerial)
  {
    std::vector<float> row(size_t(dtype == MCC_FP32 ? 0 : width)), sum(row.size());
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      float *to = dtype == MCC_FP32 ? static_cast<float *>(out) + t * width : sum.data();
      bool any = false;
      for (int64_t j = t * k; j < (t + 1) * k; ++j) {
        if (places[j] < 0 || places[j] >= count) continue;
        const float *from = view(row.data(), rows, dtype, places[j] * width, width);
        const float weight = weights != nullptr ? weights[j] : 1.0f;
        if (any)
          for (int64_t i = 0; i < width; ++i) to[i] += weight * from[i];
        else
          for (int64_t i = 0; i < width; ++i) to[i] = weight * from[i];
        any = true;
      }
      if (!any) std::fill(to, to + width, 0.0f);
      if (dtype != MCC_FP32) store(out, to, dtype, t * width, width);
    }
  }
}

/* to = weight * a; returns a . b, summed in fp32 over 1,024 numbers and in fp64 over those. */
inline double scaled_and_dot(float *to, float weight, const float *a, const float *b, int64_t n) {
  double total = 0;
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t last = std::min(first + kChunk, n);
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = first; i < last; ++i) {
      to[i] = weight * a[i];
      dot += a[i] * b[i];
    }
    total += double(dot);
  }
  return total;
}

void combine_rows_back(const mcc_context *, const void *grad, const void *rows, int dtype, int64_t count, int64_t width,
                       const int64_t *places, const float *weights, int64_t tokens, int64_t k, void *grad_rows,
                       float *grad_weights) {
#pragma omp parallel if (tokens * k * width > kSerial)
  {
    std::vector<float> token(size_t(dtype == MCC_FP32 ? 0 : width)), row(token.size()), scaled(token.size());
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      const float *from = view(token.data(), grad, dtype, t * width, width);
      for (int64_t j = t * k; j < (t + 1) * k; ++j) {
        const int64_t at = places[j] * width;
        grad_weights[j] = 0.0f;
        if (places[j] < 0 || places[j] >= count) continue;
        float *to = dtype == MCC_FP32 ? static_cast<float *>(grad_rows) + at : scaled.data();
        grad_weights[j] = float(scaled_and_dot(to, weights[j], from, view(row.data(), rows, dtype, at, width), width));
        if (dtype != MCC_FP32) store(grad_rows, to, dtype, at, width);
      }
    }
  }
}
