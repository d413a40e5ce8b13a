/* One pass over a bucket: its norm and whether it is finite; and the histogram of a sample. */

constexpr int64_t kPiece = 1 << 14; /* elements of a partial sum, whatever the number of threads */

void finite_norm(const mcc_context *, const void *x, int dtype, int64_t count, double *out) {
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<double> sums(static_cast<size_t>(pieces));
  int bad = 0;
#pragma omp parallel for schedule(static) reduction(| : bad) if (count > kSerial)
  for (int64_t p = 0; p < pieces; ++p) {
    alignas(64) float buffer[kChunk];
    alignas(64) double lanes[32] = {0};
    uint32_t most = 0;
    const int64_t end = std::min((p + 1) * kPiece, count);
    for (int64_t begin = p * kPiece; begin < end; begin += kChunk) {
      const int64_t n = std::min(kChunk, end - begin);
      const float *v = view(buffer, x, dtype, begin, n);
      const int64_t whole = n / 32 * 32;
      for (int64_t i = 0; i < whole; i += 32)
        for (int j = 0; j < 32; ++j) lanes[j] += double(v[i + j]) * double(v[i + j]);
      for (int64_t i = whole; i < n; ++i) lanes[i - whole] += double(v[i]) * double(v[i]);
#pragma omp simd reduction(max : most)
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = bits_of(v[i]) & 0x7fffffffu;
        most = u > most ? u : most;
      }
    }
    double sum = 0;
    for (double lane : lanes) sum += lane;
    sums[size_t(p)] = sum;
    bad |= most >= 0x7f800000u;
  }
  double sum = 0;
  for (double s : sums) sum += s;
  out[0] = sum;
  out[1] = bad ? 0.0 : 1.0;
}

inline float element(const void *x, int dtype, int64_t i) {
  if (dtype == MCC_FP32) return static_cast<const float *>(x)[i];
  const uint16_t h = static_cast<const uint16_t *>(x)[i];
  return dtype == MCC_BF16 ? bf16_to_float(h) : fp16_to_float(h);
}

void histogram(const mcc_context *, const void *x, int dtype, int64_t count, int64_t stride, int64_t bins, int64_t *counts, double *range) {
  const int64_t samples = (count + stride - 1) / stride;
  float low = INFINITY, high = -INFINITY;
#pragma omp parallel for schedule(static) reduction(min : low) reduction(max : high) if (samples > kSerial)
  for (int64_t i = 0; i < samples; ++i) {
    const float v = element(x, dtype, i * stride);
    const bool finite = (bits_of(v) & 0x7fffffffu) < 0x7f800000u;
    low = finite && v < low ? v : low;
    high = finite && v > high ? v : high;
  }
  range[0] = low;
  range[1] = high;
  std::fill(counts, counts + bins, 0);
  if (!(low <= high)) return;
  const double width = double(high) - double(low), factor = width > 0 ? double(bins) / width : 0.0;
#pragma omp parallel if (samples > kSerial)
  {
    std::vector<int64_t> own(static_cast<size_t>(bins), 0);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < samples; ++i) {
      const float v = element(x, dtype, i * stride);
      if ((bits_of(v) & 0x7fffffffu) >= 0x7f800000u) continue;
      const int64_t bin = int64_t((double(v) - double(low)) * factor);
      ++own[size_t(std::min(bin, bins - 1))];
    }
#pragma omp critical
    for (int64_t b = 0; b < bins; ++b) counts[b] += own[size_t(b)];
  }
}
