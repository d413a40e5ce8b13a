/* Matrix products in fp32 for processors with AMX (Sapphire Rapids and later), whose tiles multiply numbers of 8 bits and add in
 * fp32.
 *
 * A number is the sum of three such parts: its first 8 bits, the next ones and the rest. Of the nine products of two numbers' parts
 * the six large ones are added up; the other three are at most some 2^-23 of the whole, where a multiply-add rounds by 2^-24. Sums
 * are rounded less often than those of multiply-adds: once for a part's 32 numbers of the inner dimension. What is less than 2^-126
 * in a factor, a part or a sum is taken for 0; what is infinite or overflows may make NaN.
 *
 * Each thread computes parts of the products alone, from blocks of both factors that it has packed for its caches. Each number is
 * summed over k in one order, whatever the other sizes and the number of threads. */
#if defined(__x86_64__)
#include "standard.h"

namespace mcc {
namespace amx {
extern const decltype(mcc_table::products) products; /* null where the compiler does not know AMX */
}
}  // namespace mcc

#ifndef MCC_HAS_AMX
#if defined(__clang__)
#define MCC_HAS_AMX (__clang_major__ >= 13)
#else
#define MCC_HAS_AMX (__GNUC__ >= 11)
#endif
#endif

#if !MCC_HAS_AMX
namespace mcc {
namespace amx {
const decltype(mcc_table::products) products = nullptr;
}
}  // namespace mcc
#else
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
/* GCC 12 says it of its own intrinsics' headers. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")
#endif

namespace mcc {
namespace amx {
namespace {

using Number = uint16_t;                             /* bf16 */
constexpr int64_t kParts = 3, kStep = 32;            /* of a number; of the inner dimension in a tile */
constexpr int64_t kTile = 16 * kStep;                /* numbers of a tile */
constexpr int64_t kRows = 32, kColumns = 32;         /* of the product, in two by two tiles */
constexpr int64_t kDepth = 512, kTall = 64, kBroad = 256; /* of the blocks in L2 */
constexpr int64_t kHigh = 1024;                      /* rows that are multiplied by one packed block of columns */
constexpr double kSmall = 1 << 17;                   /* numbers of the product that are cut no further but for idle threads */
constexpr double kSerial = 1 << 19;                  /* multiply-adds below which starting threads costs more than it saves */

inline int64_t ceiling(int64_t x, int64_t by) { return (x + by - 1) / by; }

/* Packed numbers of a line that is so deep. */
inline int64_t room_of(int64_t depth) { return ceiling(depth, kStep) * kStep * kParts; }

/* The tiles of this thread, whose settings others may count on finding again. */
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(before_);
    Settings settings{};
    settings.palette = 1;
    for (int i = 0; i < 8; ++i) settings.bytes[i] = 64, settings.rows[i] = 16;
    __asm__ volatile("" ::"r"(&settings) : "memory"); /* some compilers don't know that the next line reads it all */
    _tile_loadconfig(&settings);
  }
  ~Tiles() {
    if (before_[0] != 0)
      _tile_loadconfig(before_);
    else
      _tile_release();
  }

 private:
  struct alignas(64) Settings {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  alignas(64) uint8_t before_[64];
};

/* Sixteen numbers' parts. */
struct Parts {
  __m256i part[kParts];
};

inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __m512 widened(__m256i part) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16)); }

inline Parts split(__m512 x) {
  Parts found;
  found.part[0] = rounded(x);
  x = _mm512_sub_ps(x, widened(found.part[0]));
  found.part[1] = rounded(x);
  found.part[2] = rounded(_mm512_sub_ps(x, widened(found.part[1])));
  return found;
}

/* Sixteen rows of sixteen, in place. */
inline void transpose(__m512i *r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      t[8 * j + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + 4 + i], 0x88);
      t[8 * j + 4 + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + 4 + i], 0xDD);
    }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
  }
}

/* Sixteen lines, 32 deep, as tiles of which each row is a line (``by_line``) or a pair of consecutive numbers of each line; the
 * tiles of the parts lie two tiles apart. */
inline void pack_tile(const float *from, int64_t line, int64_t step, int64_t lines, int64_t depth, bool by_line, Number *to) {
  __m512i rows[kParts][16];
  const bool along = step == 1 || line != 1; /* read line by line */
  if (along) {
    float copy[kStep];
    const __mmask16 low = __mmask16((1u << std::min<int64_t>(depth, 16)) - 1),
                    high = __mmask16((1u << std::max<int64_t>(std::min<int64_t>(depth - 16, 16), 0)) - 1);
    for (int64_t i = 0; i < 16; ++i) {
      const float *at = from + i * line;
      _mm_prefetch(reinterpret_cast<const char *>(at + 2 * kStep), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char *>(at + 2 * kStep + 16), _MM_HINT_T0);
      if (i >= lines) {
        for (auto &part : rows) part[i] = _mm512_setzero_si512();
        continue;
      }
      if (step != 1) {
        for (int64_t p = 0; p < depth; ++p) copy[p] = at[p * step];
        at = copy;
      }
      const Parts first = split(_mm512_maskz_loadu_ps(low, at)), second = split(_mm512_maskz_loadu_ps(high, at + 16));
      for (int k = 0; k < kParts; ++k)
        rows[k][i] = _mm512_inserti64x4(_mm512_castsi256_si512(first.part[k]), second.part[k], 1);
    }
  } else {
    const __mmask16 there = __mmask16((1u << std::min<int64_t>(lines, 16)) - 1);
    for (int64_t r = 0; r < 16; ++r) {
      const float *at = from + 2 * r * step;
      _mm_prefetch(reinterpret_cast<const char *>(at + kStep * step), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char *>(at + (kStep + 1) * step), _MM_HINT_T0);
      const Parts even = split(2 * r < depth ? _mm512_maskz_loadu_ps(there, at) : _mm512_setzero_ps());
      const Parts odd = split(2 * r + 1 < depth ? _mm512_maskz_loadu_ps(there, at + step) : _mm512_setzero_ps());
      for (int k = 0; k < kParts; ++k)
        rows[k][r] = _mm512_or_si512(_mm512_cvtepu16_epi32(even.part[k]), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd.part[k]), 16));
    }
  }
  for (int k = 0; k < kParts; ++k) {
    if (along != by_line) transpose(rows[k]);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 2 * k * kTile + 32 * i, rows[k][i]);
  }
}

/* A panel of 32 lines: for every 32 numbers of the depth, two tiles of each part. */
template <bool ByLine>
inline void pack_panel(const float *from, int64_t line, int64_t step, int64_t lines, int64_t depth, Number *to) {
  for (int64_t p = 0; p < depth; p += kStep, to += 2 * kParts * kTile)
    for (int64_t half = 0; half < 2; ++half)
      pack_tile(from + 16 * half * line + p * step, line, step, std::max<int64_t>(lines - 16 * half, 0),
                std::min(kStep, depth - p), ByLine, to + half * kTile);
}

/* Two tiles of one part, and the product of two such pairs. Intrinsics want the tiles' numbers as constants. */
#define MCC_ROWS(part)                       \
  _tile_loadd(4, a + 2 * (part)*kTile, 64); \
  _tile_loadd(5, a + (2 * (part) + 1) * kTile, 64)
#define MCC_COLUMNS(part)                    \
  _tile_loadd(6, b + 2 * (part)*kTile, 64); \
  _tile_loadd(7, b + (2 * (part) + 1) * kTile, 64)
#define MCC_MULTIPLY()      \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)

inline void tile_product(int64_t depth, const Number *a, const Number *b, float *c, int64_t c_row, int64_t rows, int64_t columns,
                         bool add) {
  for (int64_t i = 0; i < rows; ++i) {
    _mm_prefetch(reinterpret_cast<const char *>(c + i * c_row), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(c + i * c_row + columns - 1), _MM_HINT_T0);
  }
  __asm__ volatile("" ::: "memory"); /* the intrinsics of some compilers don't say that they read */
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t p = 0; p < depth; p += kStep, a += 2 * kParts * kTile, b += 2 * kParts * kTile) {
    /* The first parts' product comes last: of the first 32 numbers the others are added while the sum is small. */
    MCC_ROWS(1);
    MCC_COLUMNS(1);
    MCC_MULTIPLY();
    MCC_ROWS(0);
    MCC_MULTIPLY();
    MCC_COLUMNS(2);
    MCC_MULTIPLY();
    MCC_ROWS(2);
    MCC_COLUMNS(0);
    MCC_MULTIPLY();
    MCC_ROWS(1);
    MCC_MULTIPLY();
    MCC_ROWS(0);
    MCC_MULTIPLY();
  }
  alignas(64) float sums[kRows * kColumns];
  _tile_stored(0, sums, kColumns * 4);
  _tile_stored(1, sums + 16, kColumns * 4);
  _tile_stored(2, sums + 16 * kColumns, kColumns * 4);
  _tile_stored(3, sums + 16 * kColumns + 16, kColumns * 4);
  const uint32_t wanted = columns == 32 ? ~0u : (1u << columns) - 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int half = 0; half < 2; ++half) {
      const __mmask16 there = __mmask16(wanted >> (16 * half));
      float *to = c + i * c_row + 16 * half;
      __m512 sum = _mm512_load_ps(sums + i * kColumns + 16 * half);
      if (add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), sum);
      _mm512_mask_storeu_ps(to, there, sum);
    }
}

/* A part of one product, which one thread computes alone: it reads nothing that another core has packed. */
struct Region {
  const mcc_product *of;
  int64_t row, column, rows, columns;
};

void region_product(const Region &region, Number *a_block, Number *b_block) {
  const mcc_product &x = *region.of;
  for (int64_t first = 0; first < x.k; first += kDepth) {
    const int64_t depth = std::min(kDepth, x.k - first), room = room_of(depth);
    for (int64_t j = 0; j < region.columns; j += kColumns)
      pack_panel<false>(x.b + (region.column + j) * x.b_column + first * x.b_row, x.b_column, x.b_row,
                        std::min(kColumns, region.columns - j), depth, b_block + j * room);
    for (int64_t top = 0; top < region.rows; top += kTall) {
      const int64_t rows = std::min(kTall, region.rows - top), row = region.row + top;
      for (int64_t i = 0; i < rows; i += kRows)
        pack_panel<true>(x.a + (row + i) * x.a_row + first * x.a_column, x.a_row, x.a_column, std::min(kRows, rows - i), depth,
                         a_block + i * room);
      for (int64_t j = 0; j < region.columns; j += kColumns)
        for (int64_t i = 0; i < rows; i += kRows)
          tile_product(depth, a_block + i * room, b_block + j * room, x.c + (row + i) * x.c_row + region.column + j, x.c_row,
                       std::min(kRows, rows - i), std::min(kColumns, region.columns - j), x.add || first > 0);
    }
  }
}

/* The size of equal pieces, of at most ``most``, that ``whole`` is cut into; a multiple of 32. */
inline int64_t piece_of(int64_t whole, int64_t most) { return ceiling(ceiling(whole, ceiling(whole, most)), kRows) * kRows; }

/* The regions of all products: as large as the caches allow, but one for each thread, and three where they are not small. Each
 * packs its own factors, so small ones would pack more than they multiply. */
std::vector<Region> regions_of(const mcc_product *list, int64_t count, int64_t threads) {
  double numbers = 0;
  for (int64_t i = 0; i < count; ++i) numbers += double(list[i].m) * double(list[i].n);
  const double most = std::max(numbers / double(3 * threads), std::min(numbers / double(threads), kSmall));
  std::vector<Region> regions;
  for (int64_t i = 0; i < count; ++i) {
    const mcc_product &x = list[i];
    if (x.m == 0 || x.n == 0) continue;
    int64_t high = std::min(kHigh, x.m), broad = std::min(kBroad, x.n);
    while (double(high) * double(broad) > most && std::max(high, broad) > 2 * kRows) {
      int64_t &longer = high > broad ? high : broad;
      longer = ceiling(longer, 2);
    }
    high = piece_of(x.m, high);
    broad = piece_of(x.n, broad);
    for (int64_t column = 0; column < x.n; column += broad)
      for (int64_t row = 0; row < x.m; row += high)
        regions.push_back({&x, row, column, std::min(high, x.m - row), std::min(broad, x.n - column)});
  }
  return regions;
}

/* The first cache line that begins there. */
inline Number *from_line(Number *memory) {
  return reinterpret_cast<Number *>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

void multiply(const mcc_context *, const mcc_product *list, int64_t count) {
  int64_t deep = 0;
  double work = 0;
  for (int64_t i = 0; i < count; ++i) {
    const mcc_product &x = list[i];
    deep = std::max(deep, std::min(kDepth, x.k));
    work += double(x.m) * double(x.n) * double(x.k);
    if (x.k == 0 && !x.add)
      for (int64_t row = 0; row < x.m; ++row) std::fill_n(x.c + row * x.c_row, x.n, 0.0f);
  }
  const bool together = work > kSerial;
  const std::vector<Region> regions = regions_of(list, count, together ? thread_count() : 1);
#pragma omp parallel if (together)
  {
    const Tiles tiles;
    const std::unique_ptr<Number[]> memory(new Number[size_t(room_of(deep) * (kTall + kBroad) + kStep)]);
    Number *const a_block = from_line(memory.get()), *const b_block = a_block + room_of(deep) * kTall;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < int64_t(regions.size()); ++i) region_product(regions[size_t(i)], a_block, b_block);
  }
}

}  // namespace

const decltype(mcc_table::products) products = multiply;

}  // namespace amx
}  // namespace mcc
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif /* MCC_HAS_AMX */
#endif
