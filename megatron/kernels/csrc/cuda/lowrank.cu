/* Orthonormal bases by Cholesky-QR in fp64, all matrices of a stack at once. */
#include "platform.h"

namespace mcc {
namespace cuda {

constexpr int kTile = 32, kThreads = 256, kRowsEach = kTile * kTile / kThreads;
constexpr int kFactor = 1024; /* threads that factor a matrix */
constexpr int64_t kSplits = 16;

/* How a matrix's factorisation went: the first factor was good; there is none; or what it gave is factored once more. See
 * cpu/lowrank.inl for the shares. */
enum Status { kGood = 0, kNone = 1, kAgain = 2 };
constexpr double kFailed = 1e-10, kWeak = 1e-4;

/* Partial Gram matrices: one block to a tile of 32 x 32 columns, a split of the rows, and a matrix. */
__global__ void gram_tiles(const float *x, int64_t n, int64_t r, int64_t tiles, const int *status, double *partial) {
  __shared__ double left[kTile][kTile + 1], right[kTile][kTile + 1];
  int64_t b = blockIdx.x;
  const int64_t tj = b % tiles, ti = (b /= tiles) % tiles, split = (b /= tiles) % kSplits, matrix = b / kSplits;
  if (tj < ti || (status != nullptr && status[matrix] != kAgain)) return;
  const int64_t share = (n + kSplits - 1) / kSplits;
  const int64_t end = (split + 1) * share < n ? (split + 1) * share : n;
  const int column = threadIdx.x % kTile, first = threadIdx.x / kTile * kRowsEach;
  double sums[kRowsEach] = {0};
  const float *own = x + matrix * n * r;
  for (int64_t row = split * share; row < end; row += kTile) {
    for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
      const int64_t at = row + i / kTile, a = ti * kTile + i % kTile, c = tj * kTile + i % kTile;
      left[i / kTile][i % kTile] = at < end && a < r ? double(own[at * r + a]) : 0.0;
      right[i / kTile][i % kTile] = at < end && c < r ? double(own[at * r + c]) : 0.0;
    }
    __syncthreads();
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kRowsEach; ++j) sums[j] = fma(left[i][first + j], right[i][column], sums[j]);
    __syncthreads();
  }
  for (int j = 0; j < kRowsEach; ++j) {
    const int64_t i = ti * kTile + first + j, c = tj * kTile + column;
    if (i < r && c < r) partial[((matrix * kSplits + split) * r + i) * r + c] = sums[j];
  }
}

__global__ void sum_splits(const double *partial, int64_t k, int64_t r, double *gram) {
  for (int64_t at = thread_index(); at < k * r * r; at += thread_total()) {
    const int64_t matrix = at / (r * r), i = at / r % r, j = at % r;
    double sum = 0;
    if (j >= i)
      for (int64_t s = 0; s < kSplits; ++s) sum += partial[((matrix * kSplits + s) * r + i) * r + j];
    gram[at] = sum;
  }
}

/* Whether a column has too small a part outside the ones before it; or one so small that another round is due. */
__device__ __forceinline__ bool fails(double pivot, double length) {
  return !(pivot > kFailed * length) || !(pivot < INFINITY);
}
__device__ __forceinline__ bool is_weak(double pivot, double length) { return pivot < kWeak * length; }

/* One block to a matrix: the inverse of its Cholesky factor L, in the lower triangle, and its status.
 *
 * The row operations that eliminate the columns of G = L U turn the identity into L^-1, whose rows grow into the part of
 * the matrix that is eliminated. Each step subtracts multiples of one scaled row, which is held in ``row``, from all rows
 * below it: columns up to the pivot's hold the inverse, columns from a row's own diagonal on what is left of G. Since that
 * is symmetric, ``row`` has what is left of the pivot's column, too. */
__global__ void __launch_bounds__(kFactor) invert_factors(double *grams, int64_t r, double *rows, int round, int *status) {
  __shared__ int bad, weak;
  if (round == 1 && status[blockIdx.x] != kAgain) return;
  double *g = grams + int64_t(blockIdx.x) * r * r, *length = rows + int64_t(blockIdx.x) * 2 * r, *row = length + r;
  if (threadIdx.x == 0) bad = weak = 0;
  for (int64_t i = threadIdx.x; i < r; i += blockDim.x) length[i] = g[i * r + i];
  __syncthreads();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int64_t k = 0; k < r; ++k) {
    const double pivot = g[k * r + k];
    if (threadIdx.x == 0) {
      if (fails(pivot, length[k])) bad = 1;
      if (is_weak(pivot, length[k])) weak = 1;
    }
    const double inverse = 1.0 / sqrt(pivot);
    for (int64_t c = threadIdx.x; c < r; c += blockDim.x) row[c] = c == k ? inverse : g[k * r + c] * inverse;
    __syncthreads();
    if (bad) break;
    for (int64_t c = threadIdx.x; c <= k; c += blockDim.x) g[k * r + c] = row[c];
    for (int64_t i = k + 1 + warp; i < r; i += warps) {
      const double factor = row[i];
      double *own = g + i * r;
      for (int64_t c = lane; c < r; c += kWarp)
        if (c < k || c >= i)
          own[c] -= factor * row[c];
        else if (c == k)
          own[c] = -(factor * inverse);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) status[blockIdx.x] = bad ? kNone : weak || round == 1 ? kAgain : kGood;
}

/* A step's scaled row, and whether it is of no use. */
template <int kOwn>
struct Step {
  double row[kOwn * kWarp];
  bool bad;
};

/* A warp's row in a part of 32 rows is done: scaled, it is the inverse's up to the diagonal, and what its step needs. */
template <int kOwn>
__device__ __forceinline__ void publish(const double (&own)[kOwn], int part, double length, double *inverse_row,
                                        Step<kOwn> &step, int &weak) {
  const int lane = threadIdx.x % kWarp, diagonal = threadIdx.x / kWarp;
  const double pivot = __shfl_sync(kAll, own[part], diagonal), inverse = 1.0 / sqrt(pivot);
#pragma unroll
  for (int b = 0; b < kOwn; ++b) {
    const double x = b == part && lane == diagonal ? inverse : own[b] * inverse;
    step.row[lane + b * kWarp] = x;
    if (b < part || (b == part && lane <= diagonal)) inverse_row[lane + b * kWarp] = x;
  }
  if (lane != 0) return;
  step.bad = fails(pivot, length);
  if (is_weak(pivot, length)) weak = 1;
}

/* The same up to the bit for r in (32 kOwn - 32, 32 kOwn], with the matrix in registers: warp w has rows w, w + 32, ..., and
 * its lanes columns likewise. The warp of the next pivot's row publishes it as soon as it can, while the others are at their
 * rows: a step waits once, for nothing beyond the processor.
 *
 * Columns after the pivot's and before a row's own diagonal count for nothing. They are left out by 32s; elsewhere they get
 * what nobody reads before their own step puts the inverse there. */
template <int kOwn>
__global__ void __launch_bounds__(kFactor, 1) invert_small_factors(double *grams, int r, int round, int *status) {
  __shared__ Step<kOwn> steps[2]; /* in turn: one is written while slower warps still read the other */
  __shared__ double lengths[kOwn * kWarp];
  __shared__ int weak;
  if (round == 1 && status[blockIdx.x] != kAgain) return;
  double *g = grams + int64_t(blockIdx.x) * r * r, own[kOwn][kOwn];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int a = 0; a < kOwn; ++a) {
    const int i = warp + a * kWarp;
#pragma unroll
    for (int b = 0; b < kOwn; ++b) own[a][b] = i < r && lane + b * kWarp < r ? g[i * r + lane + b * kWarp] : 0.0;
    if (lane == warp) lengths[i] = own[a][a];
  }
  if (threadIdx.x == 0) weak = 0;
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kOwn; ++part) {
    const int first = part * kWarp, i = first + warp;
    const auto hand_on = [&] { publish(own[part], part, lengths[i], g + i * r, steps[i % 2], weak); };
    if (warp == 0) hand_on();
    __syncthreads();
    for (int k = first; k < r && k < first + kWarp; ++k) {
      const Step<kOwn> &step = steps[k % 2];
      if (step.bad) {
        if (threadIdx.x == 0) status[blockIdx.x] = kNone;
        return; /* with all other threads */
      }
      double row[kOwn];
      const auto read_row = [&] {
#pragma unroll
        for (int b = 0; b < kOwn; ++b) row[b] = step.row[lane + b * kWarp];
      };
      const auto subtract = [&](int a, double factor) {
#pragma unroll
        for (int b = 0; b < kOwn; ++b) {
          if (part < b && b < a) continue;
          const double x = factor * row[b];
          own[a][b] = b == part && lane + first == k ? -x : own[a][b] - x;
        }
      };
      read_row();
      if (i > k && i < r) subtract(part, step.row[i]);
      if (i == k + 1 && i < r) {
        hand_on();
        read_row(); /* rather than keep it meanwhile: registers are short */
      }
#pragma unroll
      for (int a = part + 1; a < kOwn; ++a)
        if (warp + a * kWarp < r) subtract(a, step.row[warp + a * kWarp]);
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) status[blockIdx.x] = weak || round == 1 ? kAgain : kGood;
}

/* q = x L^-T */
__global__ void multiply(const float *x, const double *inverses, int64_t n, int64_t r, int64_t row_tiles,
                         int64_t tiles, int round, const int *status, float *q) {
  __shared__ double left[kTile][kTile + 1], right[kTile][kTile + 1];
  int64_t b = blockIdx.x;
  const int64_t tj = b % tiles, ti = (b /= tiles) % row_tiles, matrix = b / row_tiles;
  if (status[matrix] == kNone || (round == 1 && status[matrix] != kAgain)) return;
  const float *own = x + matrix * n * r;
  const double *inverse = inverses + matrix * r * r;
  const int column = threadIdx.x % kTile, first = threadIdx.x / kTile * kRowsEach;
  double sums[kRowsEach] = {0};
  for (int64_t depth = 0; depth <= tj * kTile; depth += kTile) {
    for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
      const int64_t row = ti * kTile + i / kTile, d = depth + i % kTile;
      left[i / kTile][i % kTile] = row < n && d < r ? double(own[row * r + d]) : 0.0;
      const int64_t c2 = tj * kTile + i / kTile, d2 = depth + i % kTile;
      right[i % kTile][i / kTile] = c2 < r && d2 <= c2 ? inverse[c2 * r + d2] : 0.0;
    }
    __syncthreads();
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kRowsEach; ++j) sums[j] = fma(left[first + j][i], right[i][column], sums[j]);
    __syncthreads();
  }
  for (int j = 0; j < kRowsEach; ++j) {
    const int64_t row = ti * kTile + first + j, c = tj * kTile + column;
    if (row < n && c < r) q[(matrix * n + row) * r + c] = float(sums[j]);
  }
}

__global__ void copy_good(const float *first, int64_t total, int64_t size, const int *status, float *q) {
  for (int64_t i = thread_index(); i < total; i += thread_total())
    if (status[i / size] == kGood) q[i] = first[i];
}

/* One block to a matrix without a factor: Gram-Schmidt, each column twice, with sums in fp64. A column that the ones before it
 * hold already is replaced by the first unit vector that they do not; one that is not finite, and all after it, by NaN. */
__global__ void gram_schmidt(const float *x, int64_t n, int64_t r, const int *status, float *q) {
  __shared__ double room[33];
  if (status[blockIdx.x] != kNone) return;
  const float *given = x + int64_t(blockIdx.x) * n * r;
  float *own = q + int64_t(blockIdx.x) * n * r;
  int64_t unit = 0;
  for (int64_t j = 0; j < r; ++j) {
    for (bool first = true;; first = false) {
      const int64_t place = first ? -1 : unit++ % n;
      double square = 0, meets = 0;
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const float v = first ? given[i * r + j] : float(i == place);
        own[i * r + j] = v;
        square += double(v) * double(v);
      }
      const double before = sqrt(block_sum(square, room));
      if (before == 0) continue;
      if (!first) {
        for (int64_t k = threadIdx.x; k < j; k += blockDim.x) meets += own[place * r + k] != 0.0f;
        if (block_sum(meets, room) == 0) break; /* orthogonal as it is: all of a matrix of zeros are */
      }
      /* In units of its length: sums of fp32 numbers neither overflow nor vanish then. */
      const double scale = 1.0 / before;
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) own[i * r + j] = float(double(own[i * r + j]) * scale);
      __syncthreads();
      for (int pass = 0; pass < 2; ++pass) {
        for (int64_t k = 0; k < j; ++k) {
          double dot = 0;
          for (int64_t i = threadIdx.x; i < n; i += blockDim.x) dot += double(own[i * r + j]) * double(own[i * r + k]);
          dot = block_sum(dot, room);
          for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            own[i * r + j] = float(double(own[i * r + j]) - dot * double(own[i * r + k]));
        }
      }
      double left = 0;
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) left += double(own[i * r + j]) * double(own[i * r + j]);
      const double after = sqrt(block_sum(left, room));
      if (after > (first ? 1e-5 : 1e-3) || !(after < INFINITY)) {
        const double length = after < INFINITY ? after : NAN;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) own[i * r + j] = float(double(own[i * r + j]) / length);
        __syncthreads();
        break;
      }
    }
  }
}

/* Small factors' blocks have a warp for each row up to 32. */
void invert(const mcc_context *context, int64_t k, int64_t r, int round, double *gram, int *status) {
  const unsigned blocks = grid_of(k), threads = unsigned(r < kWarp ? r : kWarp) * kWarp;
  if (r <= kWarp) {
    MCC_LAUNCH(invert_small_factors<1>, blocks, threads, context, gram, int(r), round, status);
  } else if (r <= 2 * kWarp) {
    MCC_LAUNCH(invert_small_factors<2>, blocks, threads, context, gram, int(r), round, status);
  } else if (r <= 3 * kWarp) {
    MCC_LAUNCH(invert_small_factors<3>, blocks, threads, context, gram, int(r), round, status);
  } else if (r <= 4 * kWarp) {
    MCC_LAUNCH(invert_small_factors<4>, blocks, threads, context, gram, int(r), round, status);
  } else {
    double *rows = static_cast<double *>(context->workspace(context->owner, size_t(k * r) * 2 * 8));
    MCC_LAUNCH(invert_factors, blocks, kFactor, context, gram, r, rows, round, status);
  }
}

void orthonormalize(const mcc_context *context, const float *x, int64_t k, int64_t n, int64_t r, float *q) {
  if (k == 0 || n == 0 || r == 0) return;
  const int64_t tiles = blocks_for(r, kTile), row_tiles = blocks_for(n, kTile);
  void *owner = context->owner;
  double *partial = static_cast<double *>(context->workspace(owner, size_t(k * kSplits * r * r) * 8));
  double *gram = static_cast<double *>(context->workspace(owner, size_t(k * r * r) * 8));
  int *status = static_cast<int *>(context->workspace(owner, size_t(k) * 4));
  float *first = static_cast<float *>(context->workspace(owner, size_t(k * n * r) * 4));
  const unsigned grams = grid_of(k * kSplits * tiles * tiles), sums = grid_of(blocks_for(k * r * r, kThreads));
  const unsigned products = grid_of(k * row_tiles * tiles);
  MCC_LAUNCH(gram_tiles, grams, kThreads, context, x, n, r, tiles, static_cast<const int *>(nullptr), partial);
  MCC_LAUNCH(sum_splits, sums, kThreads, context, partial, k, r, gram);
  invert(context, k, r, 0, gram, status);
  MCC_LAUNCH(multiply, products, kThreads, context, x, gram, n, r, row_tiles, tiles, 0, status, first);
  MCC_LAUNCH(copy_good, grid_of(blocks_for(k * n * r, kThreads)), kThreads, context, first, k * n * r, n * r, status, q);
  MCC_LAUNCH(gram_tiles, grams, kThreads, context, first, n, r, tiles, status, partial);
  MCC_LAUNCH(sum_splits, sums, kThreads, context, partial, k, r, gram);
  invert(context, k, r, 1, gram, status);
  MCC_LAUNCH(multiply, products, kThreads, context, first, gram, n, r, row_tiles, tiles, 1, status, q);
  MCC_LAUNCH(gram_schmidt, grid_of(k), kThreads, context, x, n, r, status, q);
}

}  // namespace cuda
}  // namespace mcc
