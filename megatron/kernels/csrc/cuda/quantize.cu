/* Quantise and pack, unpack and dequantise: every number is read once, where its scale's group fits into a block. */
#include "platform.h"

namespace mcc {
namespace cuda {

constexpr int kThreads = 128, kEach = 8, kBlock = kThreads * kEach; /* numbers that a block takes at a time */

/* What is encoded at element i. */
__device__ __forceinline__ float given_at(const mcc_codec &c, int64_t i) {
  const float x = read(c.x, c.x_dtype, i);
  if (c.role == MCC_DELTA) return x - read(c.other, c.other_dtype, i);
  if (c.role == MCC_FEEDBACK) return x + read(c.other, c.other_dtype, i);
  return x;
}

/* Eight neighbours in as few loads as their alignment allows. */
__device__ __forceinline__ void read_eight(const void *p, int dtype, int64_t begin, int64_t count, float *v) {
  const int size = dtype == MCC_FP32 ? 4 : 2;
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + uintptr_t(begin) * size;
  if (begin + kEach <= count && address % 16 == 0) {
    uint32_t words[8];
    const uint4 *from = reinterpret_cast<const uint4 *>(address);
    const uint4 a = from[0];
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    if (dtype == MCC_FP32) {
      const uint4 b = from[1];
      words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = float_of(words[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint16_t h = uint16_t(words[j / 2] >> (16 * (j % 2)));
        v[j] = dtype == MCC_BF16 ? bf16_to_float(h) : fp16_to_float(h);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = begin + j < count ? read(p, dtype, begin + j) : 0.0f;
}

__device__ __forceinline__ void write_eight(void *p, int dtype, int64_t begin, int64_t count, const float *v) {
  const int size = dtype == MCC_FP32 ? 4 : 2;
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + uintptr_t(begin) * size;
  if (begin + kEach <= count && address % 16 == 0) {
    uint4 *to = reinterpret_cast<uint4 *>(address);
    if (dtype == MCC_FP32) {
      to[0] = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      to[1] = make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7]));
    } else {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t low = dtype == MCC_BF16 ? float_to_bf16(v[2 * j]) : float_to_fp16(v[2 * j]);
        const uint32_t high = dtype == MCC_BF16 ? float_to_bf16(v[2 * j + 1]) : float_to_fp16(v[2 * j + 1]);
        words[j] = low | (high << 16);
      }
      to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j < count) write(p, dtype, begin + j, v[j]);
}

/* Eight codes behind each other: ``bits`` bytes. */
__device__ __forceinline__ void write_codes(uint8_t *to, int bits, const uint8_t *codes) {
  uint64_t packed = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) packed |= uint64_t(codes[j]) << (j * bits);
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  if (bits == 4 && address % 4 == 0)
    *reinterpret_cast<uint32_t *>(to) = uint32_t(packed);
  else if (bits == 8 && address % 8 == 0)
    *reinterpret_cast<uint64_t *>(to) = packed;
  else if (bits == 2 && address % 2 == 0)
    *reinterpret_cast<uint16_t *>(to) = uint16_t(packed);
  else
    for (int b = 0; b < bits; ++b) to[b] = uint8_t(packed >> (8 * b));
}

__device__ __forceinline__ void read_codes(const uint8_t *from, int bits, uint8_t *codes) {
  uint64_t packed = 0;
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  if (bits == 4 && address % 4 == 0)
    packed = *reinterpret_cast<const uint32_t *>(from);
  else if (bits == 8 && address % 8 == 0)
    packed = *reinterpret_cast<const uint64_t *>(from);
  else if (bits == 2 && address % 2 == 0)
    packed = *reinterpret_cast<const uint16_t *>(from);
  else
    for (int b = 0; b < bits; ++b) packed |= uint64_t(from[b]) << (8 * b);
#pragma unroll
  for (int j = 0; j < kEach; ++j) codes[j] = uint8_t((packed >> (j * bits)) & ((1u << bits) - 1));
}

__device__ __forceinline__ uint8_t code_at(const mcc_grid &g, float v, float step, int64_t index) {
  if (is_sign(g)) return v >= 0.0f;
  const int32_t offset = 1 << (g.bits - 1);
  if (!g.stochastic) return nearest_code(v * step, lowest(g), highest(g), offset);
  return stochastic_code(v * step, lowest(g), highest(g), offset, Noise(g.seed).at(uint32_t(index)));
}

__device__ __forceinline__ int64_t scale_index(const mcc_grid &g, int64_t i) {
  return g.layout == MCC_TENSOR ? 0 : g.layout == MCC_CHANNEL ? i % g.group : i / g.group;
}

/* Largest magnitude's bits and sum of a set of numbers, as its grid's scale needs them. */
struct Extent {
  uint32_t most;
  double sum;
};

__device__ __forceinline__ void measure(const mcc_grid &g, float v, Extent &e) {
  const uint32_t u = bits_of(v) & 0x7fffffffu;
  if (g.method == MCC_L2)
    e.sum += double(v) * double(v);
  else if (is_sign(g))
    e.sum += double(float_of(u));
  else
    e.most = u > e.most ? u : e.most;
}

__device__ __forceinline__ float scale_of(const mcc_grid &g, const Extent &e, int64_t n) {
  if (n == 0) return 0.0f;
  if (g.method == MCC_L2) return float(sqrt(e.sum / double(n)) * 2.0);
  return is_sign(g) ? float(e.sum / double(n)) : float_of(e.most);
}

/* Eight codes, written, and the second tensor, moved. */
__device__ __forceinline__ void encode_eight(const mcc_codec &c, int64_t begin, const float *v, const float *factors,
                                             const float *units) {
  uint8_t codes[kEach];
  float moved[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) codes[j] = begin + j < c.count ? code_at(c.grid, v[j], factors[j], begin + j) : 0;
  write_codes(c.codes + begin / 8 * c.grid.bits, c.grid.bits, codes);
  if (c.role == MCC_PLAIN) return;
  if (c.role == MCC_DELTA) read_eight(c.other, c.other_dtype, begin, c.count, moved);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float decoded = value_of(c.grid, codes[j], units[j]);
    moved[j] = c.role == MCC_DELTA ? moved[j] + decoded : v[j] - decoded;
  }
  write_eight(c.other, c.other_dtype, begin, c.count, moved);
}

__device__ __forceinline__ void given_eight(const mcc_codec &c, int64_t begin, float *v) {
  read_eight(c.x, c.x_dtype, begin, c.count, v);
  if (c.role == MCC_PLAIN) return;
  float other[kEach];
  read_eight(c.other, c.other_dtype, begin, c.count, other);
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = c.role == MCC_DELTA ? v[j] - other[j] : v[j] + other[j];
}

/* Groups of 8, 16, ... 256 numbers: neighbouring lanes hold one, and nothing leaves their registers. */
__global__ void quantize_lanes(mcc_codec c) {
  const mcc_grid &g = c.grid;
  const int lanes = int(g.group / kEach);
  const int64_t words = (c.count + kEach - 1) / kEach, whole = (words + kWarp - 1) / kWarp * kWarp;
  for (int64_t w = thread_index(); w < whole; w += thread_total()) {
    float v[kEach], factors[kEach], units[kEach];
    const int64_t begin = w * kEach;
    if (begin < c.count)
      given_eight(c, begin, v);
    else
      for (int j = 0; j < kEach; ++j) v[j] = 0.0f;
    Extent e = {0, 0.0};
#pragma unroll
    for (int j = 0; j < kEach; ++j) measure(g, v[j], e);
    for (int d = 1; d < lanes; d *= 2) {
      const uint32_t other = __shfl_xor_sync(kAll, e.most, d);
      e.most = other > e.most ? other : e.most;
      if (g.method == MCC_L2 || is_sign(g)) e.sum += __shfl_xor_sync(kAll, e.sum, d);
    }
    if (begin >= c.count) continue;
    float scale = scale_of(g, e, g.group);
    if (w % lanes == 0)
      scale = store_scale(c.scales, c.scale_dtype, begin / g.group, scale);
    else if (c.scale_dtype != MCC_FP32)
      scale = bf16_to_float(float_to_bf16(scale));
    const float step = step_of(g, scale), unit = unit_of(g, scale);
#pragma unroll
    for (int j = 0; j < kEach; ++j) factors[j] = step, units[j] = unit;
    encode_eight(c, begin, v, factors, units);
  }
}

/* With scales that lie there already. */
__global__ void quantize_words(mcc_codec c) {
  const int64_t words = (c.count + kEach - 1) / kEach;
  for (int64_t w = thread_index(); w < words; w += thread_total()) {
    float v[kEach], factors[kEach], units[kEach];
    const int64_t begin = w * kEach;
    given_eight(c, begin, v);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t at = begin + j < c.count ? begin + j : c.count - 1;
      const float scale = load_scale(c.scales, c.scale_dtype, scale_index(c.grid, at));
      factors[j] = step_of(c.grid, scale);
      units[j] = unit_of(c.grid, scale);
    }
    encode_eight(c, begin, v, factors, units);
  }
}

/* One block of threads for each piece of a group: partial extents, in an order that does not depend on the launch. */
__global__ void measure_pieces(mcc_codec c, int64_t size, int64_t pieces, int64_t piece, uint32_t *most, double *sum) {
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  const int64_t group = blockIdx.x / pieces, part = blockIdx.x % pieces;
  const int64_t end = (group + 1) * size < c.count ? (group + 1) * size : c.count;
  int64_t begin = group * size + part * piece;
  const int64_t stop = begin + piece < end ? begin + piece : end;
  Extent e = {0, 0.0};
  for (begin += threadIdx.x; begin < stop; begin += blockDim.x) measure(c.grid, given_at(c, begin), e);
  const uint32_t whole = block_max(e.most, room);
  const double total = block_sum(e.sum, sums);
  if (threadIdx.x == 0) {
    most[blockIdx.x] = whole;
    sum[blockIdx.x] = total;
  }
}

__global__ void combine_pieces(mcc_codec c, int64_t size, int64_t pieces, const uint32_t *most, const double *sum) {
  const int64_t group = blockIdx.x;
  __shared__ uint32_t room[33];
  __shared__ double sums[33];
  Extent e = {0, 0.0};
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) {
    const uint32_t own = most[group * pieces + p];
    e.most = own > e.most ? own : e.most;
    e.sum += sum[group * pieces + p];
  }
  e.most = block_max(e.most, room);
  e.sum = block_sum(e.sum, sums);
  if (threadIdx.x == 0) store_scale(c.scales, c.scale_dtype, group, scale_of(c.grid, e, size));
}

/* 32 columns to a block of 32 x 8 threads, which take the rows in turn. */
__global__ void measure_channels(mcc_codec c) {
  __shared__ uint32_t most[8][33];
  __shared__ double sum[8][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x) * 32 + x, rows = c.count / c.grid.group;
  Extent e = {0, 0.0};
  if (column < c.grid.group)
    for (int64_t row = y; row < rows; row += 8) measure(c.grid, given_at(c, row * c.grid.group + column), e);
  most[y][x] = e.most;
  sum[y][x] = e.sum;
  __syncthreads();
  if (y != 0 || column >= c.grid.group) return;
  for (int i = 1; i < 8; ++i) {
    e.most = most[i][x] > e.most ? most[i][x] : e.most;
    e.sum += sum[i][x];
  }
  store_scale(c.scales, c.scale_dtype, column, scale_of(c.grid, e, rows));
}

/* Rotated numbers of a chunk of kBlock, in shared memory; every thread calls it. */
__device__ __forceinline__ void rotate_chunk(float *v, int block) {
  for (int h = 1; h < block; h *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < kBlock / 2; pair += blockDim.x) {
      const int i = pair / h * 2 * h + pair % h;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf(float(block));
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] *= scale;
  __syncthreads();
}

/* Rotated numbers as fp32, padded to whole blocks: a copy, from which the other kernels go on. */
__global__ void rotate_to(mcc_codec c, int64_t total, float *out) {
  __shared__ float v[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < c.count ? given_at(c, begin + i) : 0.0f;
  rotate_chunk(v, c.grid.rotation);
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (begin + i < total) out[begin + i] = v[i];
}

/* What a decoder does with decoded numbers, which are rotated back first. */
__global__ void rotate_from(mcc_codec c, int64_t total, const float *decoded) {
  __shared__ float v[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < total ? decoded[begin + i] : 0.0f;
  rotate_chunk(v, c.grid.rotation);
  for (int64_t i = begin + threadIdx.x; i < begin + kBlock && i < c.count; i += blockDim.x) {
    float y = v[i - begin];
    if (c.x != nullptr) { /* an encoder's second tensor */
      const float given = c.role == MCC_DELTA ? read(c.other, c.other_dtype, i) : given_at(c, i);
      write(c.other, c.other_dtype, i, c.role == MCC_DELTA ? given + y : given - y);
      continue;
    }
    if (c.role == MCC_ADD) {
      static_cast<float *>(c.out)[i] += y;
      continue;
    }
    if (c.role == MCC_DELTA) {
      y = read(c.other, c.other_dtype, i) + y;
      write(c.other, c.other_dtype, i, y);
    }
    if (c.out != nullptr) write(c.out, c.out_dtype, i, y);
  }
}

__global__ void dequantize_words(mcc_codec c) {
  const int64_t words = (c.count + kEach - 1) / kEach;
  for (int64_t w = thread_index(); w < words; w += thread_total()) {
    uint8_t codes[kEach];
    float v[kEach], other[kEach];
    const int64_t begin = w * kEach;
    read_codes(c.codes + w * c.grid.bits, c.grid.bits, codes);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t at = begin + j < c.count ? begin + j : c.count - 1;
      const float scale = load_scale(c.scales, c.scale_dtype, scale_index(c.grid, at));
      v[j] = value_of(c.grid, codes[j], unit_of(c.grid, scale));
    }
    if (c.role == MCC_ADD || c.role == MCC_DELTA) {
      const bool adds = c.role == MCC_ADD;
      read_eight(adds ? c.out : c.other, adds ? MCC_FP32 : c.other_dtype, begin, c.count, other);
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = other[j] + v[j];
    }
    if (c.role == MCC_DELTA) write_eight(c.other, c.other_dtype, begin, c.count, v);
    if (c.out != nullptr) write_eight(c.out, c.out_dtype, begin, c.count, v);
  }
}

void write_scales(const mcc_context *context, const mcc_codec &c) {
  const mcc_grid &g = c.grid;
  if (g.layout == MCC_CHANNEL) {
    MCC_LAUNCH(measure_channels, grid_of(blocks_for(g.group, 32)), 256, context, c);
    return;
  }
  const int64_t size = g.layout == MCC_TENSOR ? c.count : g.group;
  const int64_t groups = g.layout == MCC_TENSOR ? 1 : blocks_for(c.count, size);
  const int64_t piece = 1 << 14, pieces = blocks_for(size < 1 ? 1 : size, piece);
  uint32_t *most = static_cast<uint32_t *>(context->workspace(context->owner, size_t(groups * pieces * 4)));
  double *sum = static_cast<double *>(context->workspace(context->owner, size_t(groups * pieces * 8)));
  MCC_LAUNCH(measure_pieces, grid_of(groups * pieces), 256, context, c, size, pieces, piece, most, sum);
  MCC_LAUNCH(combine_pieces, grid_of(groups), 256, context, c, size, pieces, most, sum);
}

unsigned word_blocks(int64_t count) {
  const int64_t blocks = blocks_for(blocks_for(count, kEach), kThreads);
  return grid_of(blocks < 16384 ? blocks : 16384);
}

void quantize_plain(const mcc_context *context, const mcc_codec &c) {
  const mcc_grid &g = c.grid;
  if (g.layout == MCC_GROUP && g.group <= 256 && (g.group & (g.group - 1)) == 0) {
    MCC_LAUNCH(quantize_lanes, word_blocks(c.count), kThreads, context, c);
    return;
  }
  write_scales(context, c);
  if (c.count > 0) MCC_LAUNCH(quantize_words, word_blocks(c.count), kThreads, context, c);
}

void quantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  if (c.count == 0 && c.grid.layout == MCC_GROUP) return;
  if (!c.grid.rotation || c.count == 0) {
    c.grid.rotation = 0;
    quantize_plain(context, c);
    return;
  }
  const int64_t total = blocks_for(c.count, c.grid.rotation) * c.grid.rotation;
  float *rotated = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  const unsigned chunks = grid_of(blocks_for(total, kBlock));
  MCC_LAUNCH(rotate_to, chunks, 256, context, c, total, rotated);
  mcc_codec plain = c;
  plain.x = rotated;
  plain.x_dtype = MCC_FP32;
  plain.role = MCC_PLAIN;
  plain.count = total;
  plain.grid.rotation = 0;
  quantize_plain(context, plain);
  if (c.role == MCC_PLAIN) return;
  plain.x = nullptr;
  plain.out = rotated;
  plain.out_dtype = MCC_FP32;
  MCC_LAUNCH(dequantize_words, word_blocks(total), kThreads, context, plain);
  MCC_LAUNCH(rotate_from, chunks, 256, context, c, total, rotated);
}

void dequantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  c.x = nullptr;
  if (c.count == 0) return;
  if (!c.grid.rotation) {
    MCC_LAUNCH(dequantize_words, word_blocks(c.count), kThreads, context, c);
    return;
  }
  const int64_t total = blocks_for(c.count, c.grid.rotation) * c.grid.rotation;
  float *decoded = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  mcc_codec plain = c;
  plain.role = MCC_PLAIN;
  plain.count = total;
  plain.grid.rotation = 0;
  plain.out = decoded;
  plain.out_dtype = MCC_FP32;
  MCC_LAUNCH(dequantize_words, word_blocks(total), kThreads, context, plain);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, total, decoded);
}

}  // namespace cuda
}  // namespace mcc
