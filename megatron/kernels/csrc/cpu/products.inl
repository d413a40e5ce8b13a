/* Matrix products in fp32, for AVX2: blocks of both factors are copied to where the cores read them in order
 * (Goto and van de Geijn 2008). Each number is summed over k in one order, whatever the other sizes and the number of threads. */

constexpr int64_t kTileRows = 6, kTileColumns = 16;         /* of the product, in registers */
constexpr int64_t kDepth = 512, kTall = 192, kBroad = 1024;  /* of the blocks in L1, L2 and L3 */

/* c (rows x columns of a tile) = or += the product of a panel of each factor, ``depth`` deep. */
inline void tile_product(int64_t depth, const float *__restrict a, const float *__restrict b, float *c, int64_t c_row,
                         int64_t rows, int64_t columns, bool add) {
  __m256 sums[kTileRows][2];
  for (int i = 0; i < kTileRows; ++i) sums[i][0] = sums[i][1] = _mm256_setzero_ps();
  for (int64_t i = 0; i < rows; ++i) {
    _mm_prefetch(reinterpret_cast<const char *>(c + i * c_row), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(c + i * c_row + columns - 1), _MM_HINT_T0);
  }
#pragma GCC unroll 4
  for (int64_t p = 0; p < depth; ++p) {
    const __m256 left = _mm256_loadu_ps(b), right = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      const __m256 x = _mm256_broadcast_ss(a + i);
      sums[i][0] = _mm256_fmadd_ps(x, left, sums[i][0]);
      sums[i][1] = _mm256_fmadd_ps(x, right, sums[i][1]);
    }
    a += kTileRows;
    b += kTileColumns;
  }
  if (rows == kTileRows && columns == kTileColumns) {
    for (int i = 0; i < kTileRows; ++i)
      for (int half = 0; half < 2; ++half) {
        float *to = c + i * c_row + 8 * half;
        _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), sums[i][half]) : sums[i][half]);
      }
    return;
  }
  float tile[kTileRows * kTileColumns];
  for (int i = 0; i < kTileRows; ++i)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(tile + i * kTileColumns + 8 * half, sums[i][half]);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float *to = c + i * c_row + j;
      *to = add ? *to + tile[i * kTileColumns + j] : tile[i * kTileColumns + j];
    }
}

/* Eight numbers of four lines each, as eight groups of four that lie ``stride`` apart. */
inline void transpose_4x8(const float *from, int64_t line, float *to, int64_t stride) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + line), c = _mm256_loadu_ps(from + 2 * line),
               d = _mm256_loadu_ps(from + 3 * line);
  const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
  const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
  const __m256 groups[4] = {_mm256_shuffle_ps(ab_low, cd_low, 0x44), _mm256_shuffle_ps(ab_low, cd_low, 0xEE),
                            _mm256_shuffle_ps(ab_high, cd_high, 0x44), _mm256_shuffle_ps(ab_high, cd_high, 0xEE)};
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_ps(to + i * stride, _mm256_castps256_ps128(groups[i]));
    _mm_storeu_ps(to + (i + 4) * stride, _mm256_extractf128_ps(groups[i], 1));
  }
}

/* The last two lines of a panel of six. */
inline void transpose_2x8(const float *from, int64_t line, float *to, int64_t stride) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + line);
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  const __m128 pairs[4] = {_mm256_castps256_ps128(low), _mm256_castps256_ps128(high), _mm256_extractf128_ps(low, 1),
                           _mm256_extractf128_ps(high, 1)};
  for (int i = 0; i < 4; ++i) {
    _mm_storel_pi(reinterpret_cast<__m64 *>(to + 2 * i * stride), pairs[i]);
    _mm_storeh_pi(reinterpret_cast<__m64 *>(to + (2 * i + 1) * stride), pairs[i]);
  }
}

/* A panel of ``Width`` lines, ``depth`` long, as it is read: to[p * Width + i] = from[i * line + p * step]. Missing lines are
 * zeros. */
template <int64_t Width>
inline void pack_panel(const float *from, int64_t line, int64_t step, int64_t lines, int64_t depth, float *to) {
  int64_t p = 0;
  if (lines == Width && line == 1) {
    for (; p < depth; ++p) std::memcpy(to + p * Width, from + p * step, Width * sizeof(float));
  } else if (lines == Width && step == 1) {
    for (; p + 8 <= depth; p += 8) {
      for (int64_t i = 0; i + 4 <= Width; i += 4) transpose_4x8(from + i * line + p, line, to + p * Width + i, Width);
      if constexpr (Width % 4 == 2)
        transpose_2x8(from + (Width - 2) * line + p, line, to + p * Width + Width - 2, Width);
    }
  }
  for (; p < depth; ++p)
    for (int64_t i = 0; i < Width; ++i) to[p * Width + i] = i < lines ? from[i * line + p * step] : 0.0f;
}

/* Rows of a block, so that each thread has as many of about one size. */
inline int64_t tall_of(int64_t m) {
  const int64_t threads = thread_count(), blocks = ((m + kTall - 1) / kTall + threads - 1) / threads * threads;
  const int64_t rows = (m + blocks - 1) / blocks;
  return (rows + kTileRows - 1) / kTileRows * kTileRows;
}

/* Columns from ``column`` on of one product, over the numbers from ``first`` on of its inner dimension. Every thread of a
 * team calls it. */
inline void block_product(const mcc_product &x, int64_t column, int64_t broad, int64_t first, float *b_block, float *a_block) {
  const int64_t columns = std::min(broad, x.n - column), depth = std::min(kDepth, x.k - first);
#pragma omp for schedule(static)
  for (int64_t j = 0; j < columns; j += kTileColumns)
    pack_panel<kTileColumns>(x.b + (column + j) * x.b_column + first * x.b_row, x.b_column, x.b_row,
                             std::min(kTileColumns, columns - j), depth, b_block + j * depth);
  const int64_t tall = tall_of(x.m);
#pragma omp for schedule(dynamic)
  for (int64_t row = 0; row < x.m; row += tall) {
    const int64_t rows = std::min(tall, x.m - row);
    for (int64_t i = 0; i < rows; i += kTileRows)
      pack_panel<kTileRows>(x.a + (row + i) * x.a_row + first * x.a_column, x.a_row, x.a_column,
                            std::min(kTileRows, rows - i), depth, a_block + i * depth);
    for (int64_t j = 0; j < columns; j += kTileColumns)
      for (int64_t i = 0; i < rows; i += kTileRows)
        tile_product(depth, a_block + i * depth, b_block + j * depth, x.c + (row + i) * x.c_row + column + j, x.c_row,
                     std::min(kTileRows, rows - i), std::min(kTileColumns, columns - j), x.add || first > 0);
  }
}

void products(const mcc_context *, const mcc_product *list, int64_t count) {
  int64_t broad = 0, work = 0;
  for (int64_t i = 0; i < count; ++i) {
    broad = std::max(broad, std::min(kBroad, (list[i].n + kTileColumns - 1) / kTileColumns * kTileColumns));
    work += list[i].m * list[i].n * list[i].k;
    if (list[i].k == 0 && !list[i].add)
      for (int64_t row = 0; row < list[i].m; ++row) std::fill_n(list[i].c + row * list[i].c_row, list[i].n, 0.0f);
  }
  const std::unique_ptr<float[]> b_block(new float[size_t(kDepth * broad)]);
#pragma omp parallel if (work > 16 * kSerial)
  {
    const std::unique_ptr<float[]> a_block(new float[size_t(kDepth * kTall)]);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t column = 0; column < list[i].n && list[i].m > 0; column += broad)
        for (int64_t first = 0; first < list[i].k; first += kDepth)
          block_product(list[i], column, broad, first, b_block.get(), a_block.get());
  }
}
