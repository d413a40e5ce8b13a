/* 8-bit floats: every number is read once, where its group fits into a warp, else a second time from a cache. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

constexpr int kFloat8Threads = 256;
constexpr int64_t kFloat8Block = 1 << 15; /* largest group that one block takes alone */

__device__ __forceinline__ uint32_t float8_largest(const float *v) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t u = bits_of(v[j]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  return most;
}

/* Eight codes to nearest. */
template <int kMantissa>
__device__ __forceinline__ Codes float8_nearest_codes(const float *y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  bool numbers = true; /* the device's conversion may give NaN another code */
#pragma unroll
  for (int j = 0; j < kEach; ++j) numbers = numbers && y[j] == y[j];
  if (numbers) {
    uint16_t pairs[kEach / 2];
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      if (kMantissa == 3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(y[2 * i + 1]), "f"(y[2 * i]));
      else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(y[2 * i + 1]), "f"(y[2 * i]));
    }
    return {pairs[0] | uint32_t(pairs[1]) << 16, pairs[2] | uint32_t(pairs[3]) << 16};
  }
#endif
  Codes codes = {0, 0};
#pragma unroll
  for (int j = 0; j < kEach; ++j) add_code(codes, 8, j, float8_nearest<kMantissa>(y[j]));
  return codes;
}

/* What eight codes stand for. */
template <int kMantissa>
__device__ __forceinline__ void float8_numbers(Codes codes, float *v) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if (j % 2) continue;
    const uint16_t pair = uint16_t(code_at(codes, 8, j)); /* with the next one above it */
    uint32_t halves;
    if (kMantissa == 3)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v[j]) : "h"(uint16_t(halves)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v[j + 1]) : "h"(uint16_t(halves >> 16)));
#else
    v[j] = float8_value<kMantissa>(uint8_t(code_at(codes, 8, j)));
#endif
  }
}

/* Encodes up to eight neighbors, those before ``end``. */
template <int kMantissa>
__device__ __forceinline__ void float8_codes(const mcc_float8 &c, const float *v, float step, int64_t begin, int64_t end) {
  float y[kEach];
  Codes codes = {0, 0};
#pragma unroll
  for (int j = 0; j < kEach; ++j) y[j] = v[j] * step;
  if (!c.stochastic) {
    codes = float8_nearest_codes<kMantissa>(y);
  } else {
    const Noise noise(c.seed);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      add_code(codes, 8, j, float8_stochastic<kMantissa>(y[j], noise.at(uint32_t(begin + j))));
  }
  uint8_t *to = c.codes + begin;
  if (begin + kEach <= end) {
    write_codes(to, 8, codes);
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j < end) to[j] = uint8_t(code_at(codes, 8, j));
}

/* Eight codes; zeros beyond the last. */
__device__ __forceinline__ Codes float8_read(const mcc_float8 &c, int64_t begin) {
  const uint8_t *from = c.codes + begin;
  if (begin + kEach <= c.count) return read_codes(from, 8);
  Codes codes = {0, 0};
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j < c.count) add_code(codes, 8, j, from[j]);
  return codes;
}

/* Groups of 8, 16, ... 256 numbers: neighboring lanes hold one. */
template <int kMantissa>
__global__ void float8_lanes(mcc_float8 c) {
  const int lanes = int(c.group / kEach), shift = __ffs(lanes) - 1;
  const int64_t words = (c.count + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float v[kEach];
    const int64_t begin = w * kEach;
    read_eight(c.x, c.x_dtype, begin, c.count, v);
    uint32_t most = float8_largest(v);
    for (int d = 1; d < lanes; d *= 2) {
      const uint32_t other = __shfl_xor_sync(kAll, most, d);
      most = other > most ? other : most;
    }
    /* The first lane stores the scale, and hands on what it decodes to. */
    float step = 0.0f;
    if (begin < c.count && (w & (lanes - 1)) == 0) step = float8_store<kMantissa>(c, w >> shift, most);
    step = __shfl_sync(kAll, step, int(threadIdx.x % kWarp) & ~(lanes - 1));
    if (begin < c.count) float8_codes<kMantissa>(c, v, step, begin, c.count);
  }
}

/* A block for each group of any size. */
template <int kMantissa>
__global__ void float8_blocks(mcc_float8 c) {
  __shared__ uint32_t room[33];
  __shared__ float shared_step;
  const int64_t groups = (c.count + c.group - 1) / c.group;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t first = group * c.group, end = first + c.group < c.count ? first + c.group : c.count;
    const int64_t stride = int64_t(blockDim.x) * kEach;
    float v[kEach];
    uint32_t most = 0;
    for (int64_t begin = first + threadIdx.x * kEach; begin < end; begin += stride) {
      read_eight(c.x, c.x_dtype, begin, end, v);
      const uint32_t own = float8_largest(v);
      most = own > most ? own : most;
    }
    most = block_max(most, room);
    if (threadIdx.x == 0) shared_step = float8_store<kMantissa>(c, group, most);
    __syncthreads();
    const float step = shared_step;
    for (int64_t begin = first + threadIdx.x * kEach; begin < end; begin += stride) {
      read_eight(c.x, c.x_dtype, begin, end, v);
      float8_codes<kMantissa>(c, v, step, begin, end);
    }
    __syncthreads();
  }
}

/* Groups too large for a block, in pieces: their largest magnitudes, then the groups', then the codes. */
__global__ void float8_measure(mcc_float8 c, int64_t pieces, int64_t piece, uint32_t *most) {
  __shared__ uint32_t room[33];
  const int64_t first = blockIdx.x / pieces * c.group + blockIdx.x % pieces * piece;
  int64_t end = (blockIdx.x / pieces + 1) * c.group;
  end = end < c.count ? end : c.count;
  end = first + piece < end ? first + piece : end;
  uint32_t largest = 0;
  for (int64_t begin = first + threadIdx.x * kEach; begin < end; begin += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    read_eight(c.x, c.x_dtype, begin, end, v);
    const uint32_t own = float8_largest(v);
    largest = own > largest ? own : largest;
  }
  largest = block_max(largest, room);
  if (threadIdx.x == 0) most[blockIdx.x] = largest;
}

template <int kMantissa>
__global__ void float8_combine(mcc_float8 c, int64_t pieces, const uint32_t *most) {
  __shared__ uint32_t room[33];
  uint32_t largest = 0;
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) {
    const uint32_t own = most[blockIdx.x * pieces + p];
    largest = own > largest ? own : largest;
  }
  largest = block_max(largest, room);
  if (threadIdx.x == 0) float8_store<kMantissa>(c, blockIdx.x, largest);
}

template <int kMantissa>
__global__ void float8_pieces(mcc_float8 c, int64_t pieces, int64_t piece) {
  const int64_t first = blockIdx.x / pieces * c.group + blockIdx.x % pieces * piece;
  int64_t end = (blockIdx.x / pieces + 1) * c.group;
  end = end < c.count ? end : c.count;
  end = first + piece < end ? first + piece : end;
  if (first >= end) return;
  const float step = 1.0f / float8_unit<kMantissa>(c, blockIdx.x / pieces);
  for (int64_t begin = first + threadIdx.x * kEach; begin < end; begin += int64_t(blockDim.x) * kEach) {
    float v[kEach];
    read_eight(c.x, c.x_dtype, begin, end, v);
    float8_codes<kMantissa>(c, v, step, begin, end);
  }
}

/* kOne: groups are of whole words, each of which has one scale. */
template <int kMantissa, bool kOne>
__global__ void float8_values(mcc_float8 c) {
  const int64_t words = (c.count + kEach - 1) / kEach;
  const int shift = (c.group & (c.group - 1)) == 0 ? __ffsll(c.group) - 1 : -1;
  for (int64_t w = thread_index(); w < words; w += thread_total()) {
    const int64_t begin = w * kEach;
    float v[kEach];
    float8_numbers<kMantissa>(float8_read(c, begin), v);
    int64_t group = shift >= 0 ? begin >> shift : begin / c.group, next = (group + 1) * c.group - begin;
    float unit = float8_unit<kMantissa>(c, group);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (!kOne && j == next && begin + j < c.count) {
        unit = float8_unit<kMantissa>(c, ++group);
        next += c.group;
      }
      v[j] *= unit;
    }
    if (c.added) {
      float held[kEach];
      read_eight(c.out, MCC_FP32, begin, c.count, held);
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = c.added > 0 ? held[j] + v[j] : held[j] - v[j];
    }
    write_words<1>(c.out, c.out_dtype, begin, c.count, v);
  }
}

static unsigned float8_grid(int64_t count) {
  const int64_t blocks = blocks_for(blocks_for(count, kEach), kFloat8Threads);
  return grid_of(blocks < 16384 ? blocks : 16384);
}

template <int kMantissa>
static void float8_encode_as(const mcc_context *context, const mcc_float8 &c) {
  const int64_t groups = blocks_for(c.count, c.group);
  if (c.group >= kEach && c.group <= kWarp * kEach && (c.group & (c.group - 1)) == 0) {
    MCC_LAUNCH(float8_lanes<kMantissa>, float8_grid(c.count), kFloat8Threads, context, c);
    return;
  }
  if (c.group <= kFloat8Block) {
    const unsigned threads = c.group < 1024 ? 64 : c.group < 4096 ? 128 : kFloat8Threads;
    MCC_LAUNCH(float8_blocks<kMantissa>, grid_of(groups), threads, context, c);
    return;
  }
  const int64_t size = c.group < c.count ? c.group : c.count, piece = 1 << 14, pieces = blocks_for(size, piece);
  uint32_t *most = static_cast<uint32_t *>(context->workspace(context->owner, size_t(groups * pieces * 4)));
  const unsigned blocks = grid_of(groups * pieces);
  MCC_LAUNCH(float8_measure, blocks, kFloat8Threads, context, c, pieces, piece, most);
  MCC_LAUNCH(float8_combine<kMantissa>, grid_of(groups), kFloat8Threads, context, c, pieces, most);
  MCC_LAUNCH(float8_pieces<kMantissa>, blocks, kFloat8Threads, context, c, pieces, piece);
}

void float8_encode(const mcc_context *context, const mcc_float8 *given) {
  if (given->count == 0) return;
  given->mantissa == 3 ? float8_encode_as<3>(context, *given) : float8_encode_as<2>(context, *given);
}

void float8_decode(const mcc_context *context, const mcc_float8 *given) {
  if (given->count == 0) return;
  const bool one = given->group % kEach == 0;
  const auto kernel = given->mantissa == 3 ? one ? float8_values<3, true> : float8_values<3, false>
                      : one                ? float8_values<2, true>
                                           : float8_values<2, false>;
  MCC_LAUNCH(kernel, float8_grid(given->count), kFloat8Threads, context, *given);
}

}  // namespace cuda
}  // namespace mcc
