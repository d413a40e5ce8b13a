/* Quantizers and dequantizers, with the rotation of blocks that do not fit into a warp. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

#include "tiles.h"

constexpr int kBlock = 1024; /* numbers that a block takes at a time */

/* Which blocks of a chunk of kBlock numbers are rotated: all, or those that are found here or that the map tells. Every thread
 * calls it. */
__device__ __forceinline__ void turns_of_chunk(const mcc_codec &c, const Tiling &t, bool finds, int64_t begin, const float *v,
                                               uint8_t *turned) {
  const int block = c.grid.rotation, lane = threadIdx.x % kWarp;
  const int64_t blocks = c.count / block;
  __syncthreads();
  for (int b = threadIdx.x / kWarp; b < kBlock / block; b += blockDim.x / kWarp) {
    const int64_t number = begin / block + b;
    const bool whole = number < blocks;
    bool found = !c.tiles.some || (!finds && whole && bit_of(c.tiles.rotated, number));
    if (finds) {
      uint32_t most = 0;
      int near = 0;
      for (int j = lane; j < block; j += kWarp) {
        const uint32_t u = bits_of(v[b * block + j]) & 0x7fffffffu;
        most = u > most ? u : most;
      }
      for (int d = kWarp / 2; d > 0; d /= 2) {
        const uint32_t other = __shfl_xor_sync(kAll, most, d);
        most = other > most ? other : most;
      }
      for (int j = lane; j < block; j += kWarp) near += fabsf(v[b * block + j]) * c.tiles.ratio >= float_of(most) ? 1 : 0;
      for (int d = kWarp / 2; d > 0; d /= 2) near += __shfl_xor_sync(kAll, near, d);
      found = whole && near == 1 && most < 0x7f800000u;
      if (whole && lane == 0) t.flags[number] = found;
    }
    if (lane == 0) turned[b] = found;
  }
}

/* Rotates the blocks of a chunk that are told, in shared memory; every thread calls it. */
__device__ __forceinline__ void rotate_chunk(float *v, int block, const uint8_t *turned) {
  for (int h = 1; h < block; h *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < kBlock / 2; pair += blockDim.x) {
      const int i = pair / h * 2 * h + pair % h;
      if (!turned[i / block]) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf(float(block));
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (turned[i / block]) v[i] *= scale;
  __syncthreads();
}

/* Rotated numbers as fp32, padded to whole blocks: a copy, from which the other kernels go on. */
__global__ void rotate_to(mcc_codec c, Tiling t, int64_t total, float *out) {
  __shared__ float v[kBlock];
  __shared__ uint8_t turned[kBlock / kEach];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < c.count ? given_at(c, begin + i) : 0.0f;
  turns_of_chunk(c, t, t.flags != nullptr, begin, v, turned);
  rotate_chunk(v, c.grid.rotation, turned);
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x)
    if (begin + i < total) out[begin + i] = v[i];
}

/* What a decoder does with decoded numbers, which are rotated back first. */
__global__ void rotate_from(mcc_codec c, Tiling t, int64_t total, const float *decoded) {
  __shared__ float v[kBlock];
  __shared__ uint8_t turned[kBlock / kEach];
  const int64_t begin = int64_t(blockIdx.x) * kBlock;
  for (int i = threadIdx.x; i < kBlock; i += blockDim.x) v[i] = begin + i < total ? decoded[begin + i] : 0.0f;
  turns_of_chunk(c, t, false, begin, v, turned);
  rotate_chunk(v, c.grid.rotation, turned);
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

/* A codec of rotated numbers that lie in memory. */
mcc_codec without_rotation(const mcc_codec &c, float *rotated) {
  mcc_codec plain = c;
  plain.role = MCC_PLAIN;
  plain.count = coded_count(c);
  plain.grid.rotation = 0;
  plain.tiles.some = 0;
  plain.x = plain.out = rotated;
  plain.x_dtype = plain.out_dtype = MCC_FP32;
  return plain;
}

mcc_codec rotated_codec(const mcc_context *context, const mcc_codec &c, const Tiling &t) {
  const int64_t total = coded_count(c);
  float *rotated = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  MCC_LAUNCH(rotate_to, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, rotated);
  write_blocks(context, c, t);
  return without_rotation(c, rotated);
}

void quantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  if (c.count == 0 && c.grid.layout == MCC_GROUP) return;
  if (c.count == 0) c.grid.rotation = c.tiles.some = 0;
  const int64_t total = coded_count(c);
  const Tiling t = tiling_of(context, c, total);
  if (!c.grid.rotation || (c.grid.rotation <= kInWarp && group_in_warp(c.grid))) {
    encode(context, c, t, total);
    write_blocks(context, c, t);
    return;
  }
  mcc_codec plain = rotated_codec(context, c, t);
  encode(context, plain, t, total);
  if (c.role == MCC_PLAIN) return;
  plain.x = nullptr;
  decode(context, plain, t, total);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, static_cast<const float *>(plain.out));
}

void dequantize(const mcc_context *context, const mcc_codec *codec) {
  mcc_codec c = *codec;
  c.x = nullptr;
  if (c.count == 0) return;
  const int64_t total = coded_count(c);
  const Tiling t = tiling_of(context, c, total);
  if (c.grid.rotation <= kInWarp) {
    decode(context, c, t, total);
    return;
  }
  float *decoded = static_cast<float *>(context->workspace(context->owner, size_t(total * 4)));
  mcc_codec plain = without_rotation(c, decoded);
  plain.x = nullptr;
  decode(context, plain, t, total);
  MCC_LAUNCH(rotate_from, grid_of(blocks_for(total, kBlock)), 256, context, c, t, total, static_cast<const float *>(decoded));
}

}  // namespace cuda
}  // namespace mcc
