/* Orthonormal bases by Cholesky-QR in fp64. */

constexpr int64_t kPanel = 64;  /* rows that are taken together */
constexpr int64_t kSplits = 16; /* partial Gram matrices, whatever the number of threads: equal sums everywhere */

/* gram (r x r) += panel^T panel, upper triangle, for ``rows`` rows of doubles. */
inline void add_gram(const double *__restrict panel, int64_t rows, int64_t r, double *__restrict gram) {
  constexpr int64_t kWide = 32, kTall = 4;
  for (int64_t i = 0; i < r; i += kTall) {
    for (int64_t j = i / kWide * kWide; j < r; j += kWide) {
      if (i + kTall <= r && j + kWide <= r) {
        double sums[kTall][kWide] = {{0}};
        for (int64_t row = 0; row < rows; ++row) {
          const double *x = panel + row * r;
          for (int64_t a = 0; a < kTall; ++a)
            for (int64_t b = 0; b < kWide; ++b) sums[a][b] += x[i + a] * x[j + b];
        }
        for (int64_t a = 0; a < kTall; ++a)
          for (int64_t b = 0; b < kWide; ++b) gram[(i + a) * r + j + b] += sums[a][b];
        continue;
      }
      const int64_t tall = std::min(kTall, r - i), wide = std::min(kWide, r - j);
      for (int64_t a = 0; a < tall; ++a) {
        double sums[kWide] = {0};
        for (int64_t row = 0; row < rows; ++row) {
          const double *x = panel + row * r;
          for (int64_t b = 0; b < wide; ++b) sums[b] += x[i + a] * x[j + b];
        }
        for (int64_t b = 0; b < wide; ++b) gram[(i + a) * r + j + b] += sums[b];
      }
    }
  }
}

/* out (rows x r) = panel (rows x r) times inverse, upper triangular. */
inline void times_upper(const double *__restrict panel, int64_t rows, int64_t r, const double *__restrict inverse,
                        double *__restrict out) {
  constexpr int64_t kWide = 32, kTall = 4;
  for (int64_t row = 0; row < rows; row += kTall) {
    const int64_t tall = std::min(kTall, rows - row);
    for (int64_t j = 0; j < r; j += kWide) {
      const int64_t wide = std::min(kWide, r - j), depth = std::min(j + wide, r);
      double sums[kTall][kWide] = {{0}};
      if (tall == kTall && wide == kWide) {
        for (int64_t i = 0; i < depth; ++i)
          for (int64_t a = 0; a < kTall; ++a)
            for (int64_t b = 0; b < kWide; ++b) sums[a][b] += panel[(row + a) * r + i] * inverse[i * r + j + b];
      } else {
        for (int64_t i = 0; i < depth; ++i)
          for (int64_t a = 0; a < tall; ++a)
            for (int64_t b = 0; b < wide; ++b) sums[a][b] += panel[(row + a) * r + i] * inverse[i * r + j + b];
      }
      for (int64_t a = 0; a < tall; ++a)
        for (int64_t b = 0; b < wide; ++b) out[(row + a) * r + j + b] = sums[a][b];
    }
  }
}

inline void widen(const float *x, int64_t n, double *out) {
  for (int64_t i = 0; i < n; ++i) out[i] = double(x[i]);
}

/* The Gram matrix of x (n x r), upper triangle; the same bits for any number of threads. */
inline void gram_of(const float *x, int64_t n, int64_t r, double *gram, bool threads) {
  const int64_t splits = std::min(kSplits, (n + kPanel - 1) / kPanel);
  const int64_t share = (n + splits - 1) / splits;
  std::vector<double> partial(size_t(splits * r * r), 0.0);
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t s = 0; s < splits; ++s) {
    std::vector<double> panel(size_t(kPanel * r));
    const int64_t end = std::min((s + 1) * share, n);
    for (int64_t row = s * share; row < end; row += kPanel) {
      const int64_t rows = std::min(kPanel, end - row);
      widen(x + row * r, rows * r, panel.data());
      add_gram(panel.data(), rows, r, partial.data() + s * r * r);
    }
  }
  std::fill(gram, gram + r * r, 0.0);
  for (int64_t s = 0; s < splits; ++s)
    for (int64_t i = 0; i < r * r; ++i) gram[i] += partial[size_t(s * r * r + i)];
}

/* Squares of a column's part outside the ones before it, over its length: below the first, too few digits are left for a
 * factor; below the second, what the factor gives is not quite orthonormal, and is factored once more. */
constexpr double kFailed = 1e-10, kWeak = 1e-4;

/* Upper triangular R with R^T R = gram, and its inverse in place of it. Returns the least such share. */
inline double inverse_factor(double *gram, int64_t r) {
  double least = 1.0;
  std::vector<double> length(static_cast<size_t>(r));
  for (int64_t i = 0; i < r; ++i) length[size_t(i)] = gram[i * r + i];
  for (int64_t k = 0; k < r; ++k) {
    const double pivot = gram[k * r + k];
    if (!(pivot > kFailed * length[size_t(k)]) || !std::isfinite(pivot)) return 0.0;
    least = std::min(least, pivot / length[size_t(k)]);
    const double root = std::sqrt(pivot);
    for (int64_t j = k; j < r; ++j) gram[k * r + j] /= root;
    for (int64_t i = k + 1; i < r; ++i) {
      const double f = gram[k * r + i];
      for (int64_t j = i; j < r; ++j) gram[i * r + j] -= f * gram[k * r + j];
    }
  }
  /* Row i of the inverse from the rows below it: R X = 1. */
  for (int64_t i = r - 1; i >= 0; --i) {
    const double diagonal = 1.0 / gram[i * r + i];
    std::vector<double> row(size_t(r), 0.0);
    row[size_t(i)] = diagonal;
    for (int64_t k = i + 1; k < r; ++k) {
      const double f = gram[i * r + k] * diagonal;
      for (int64_t j = k; j < r; ++j) row[size_t(j)] -= f * gram[k * r + j];
    }
    for (int64_t j = 0; j < r; ++j) gram[i * r + j] = row[size_t(j)];
  }
  return least;
}

/* Gram-Schmidt, each column twice, in fp64. A column that the ones before it hold already is replaced by the first unit
 * vector that they do not. */
inline void gram_schmidt(const float *x, int64_t n, int64_t r, float *q) {
  std::vector<double> columns(size_t(n * r));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < r; ++j) columns[size_t(j * n + i)] = double(x[i * r + j]);
  int64_t unit = 0;
  auto dot = [&](const double *a, const double *b) {
    double lanes[16] = {0}, sum = 0;
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
      for (int64_t j = 0; j < 16; ++j) lanes[j] += a[i + j] * b[i + j];
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += a[i] * b[i];
    for (double lane : lanes) sum += lane;
    return sum;
  };
  for (int64_t j = 0; j < r; ++j) {
    double *own = columns.data() + j * n;
    for (bool given = true;; given = false) {
      if (!given) {
        const int64_t place = unit++ % n;
        std::fill(own, own + n, 0.0);
        own[place] = 1.0;
        bool meets = false;
        for (int64_t k = 0; k < j; ++k) meets |= columns[size_t(k * n + place)] != 0.0;
        if (!meets) break; /* orthogonal as it is: all of a matrix of zeros are */
      }
      const double before = std::sqrt(dot(own, own));
      if (before == 0) continue;
      for (int pass = 0; pass < 2; ++pass)
        for (int64_t k = 0; k < j; ++k) {
          const double *other = columns.data() + k * n, f = dot(own, other);
          for (int64_t i = 0; i < n; ++i) own[i] -= f * other[i];
        }
      const double after = std::sqrt(dot(own, own));
      if (!std::isfinite(after)) {
        std::fill(own, own + n, std::numeric_limits<double>::quiet_NaN());
        break;
      }
      if (after > (given ? 1e-7 : 1e-3) * before) {
        for (int64_t i = 0; i < n; ++i) own[i] /= after;
        break;
      }
    }
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < r; ++j) q[i * r + j] = float(columns[size_t(j * n + i)]);
}

/* q = x times inverse, upper triangular; q may be x. */
inline void apply_inverse(const float *x, int64_t n, int64_t r, const double *inverse, float *q, bool threads) {
#pragma omp parallel if (threads)
  {
    std::vector<double> panel(size_t(kPanel * r)), product(size_t(kPanel * r));
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n; row += kPanel) {
      const int64_t rows = std::min(kPanel, n - row);
      widen(x + row * r, rows * r, panel.data());
      times_upper(panel.data(), rows, r, inverse, product.data());
      for (int64_t i = 0; i < rows * r; ++i) q[row * r + i] = float(product[size_t(i)]);
    }
  }
}

inline void orthonormalize_one(const float *x, int64_t n, int64_t r, float *q, bool threads) {
  std::vector<double> gram(size_t(r * r));
  gram_of(x, n, r, gram.data(), threads);
  const double share = inverse_factor(gram.data(), r);
  if (share == 0.0) {
    gram_schmidt(x, n, r, q);
    return;
  }
  apply_inverse(x, n, r, gram.data(), q, threads);
  if (share >= kWeak) return;
  gram_of(q, n, r, gram.data(), threads);
  if (inverse_factor(gram.data(), r) == 0.0)
    gram_schmidt(x, n, r, q);
  else
    apply_inverse(q, n, r, gram.data(), q, threads);
}

void orthonormalize(const mcc_context *, const float *x, int64_t k, int64_t n, int64_t r, float *q) {
  if (k == 0 || n == 0 || r == 0) return;
  if (k >= thread_count()) {
#pragma omp parallel for schedule(dynamic) if (k * n * r > kSerial)
    for (int64_t i = 0; i < k; ++i) orthonormalize_one(x + i * n * r, n, r, q + i * n * r, false);
    return;
  }
  /* No parallel region may surround these, not even one of a single thread: libgomp keeps its pool of threads for
   * outermost regions, and a nested one creates threads of its own each time. They compete for the cores with the
   * pool's, which spin for milliseconds after the matrix product before. */
  for (int64_t i = 0; i < k; ++i) orthonormalize_one(x + i * n * r, n, r, q + i * n * r, n * r > kSerial);
}
