/* What the .cu files stand on: CUDA, or with MCC_EMULATED a header that runs their blocks on a CPU (a test's). */
#ifndef MCC_CUDA_PLATFORM_H
#define MCC_CUDA_PLATFORM_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef MCC_EMULATED
#include "cuda_emulator.h"
#else
#include <cuda_runtime.h>
#define MCC_LAUNCH(kernel, blocks, threads, context, ...) \
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>((context)->stream)>>>(__VA_ARGS__)
#endif

#include "../mcc.h"

namespace mcc {
namespace cuda {

#define MCC_FN __host__ __device__ __forceinline__
#include "../numbers.h"
#include "../float8.h"

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

inline int64_t blocks_for(int64_t items, int64_t each) { return (items + each - 1) / each; }
inline unsigned grid_of(int64_t blocks) { return unsigned(blocks < 1 ? 1 : blocks > 0x7fffffff ? 0x7fffffff : blocks); }

__device__ __forceinline__ int64_t thread_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t thread_total() { return int64_t(gridDim.x) * blockDim.x; }

__device__ __forceinline__ float read(const void *p, int dtype, int64_t i) {
  if (dtype == MCC_FP32) return static_cast<const float *>(p)[i];
  const uint16_t h = static_cast<const uint16_t *>(p)[i];
  return dtype == MCC_BF16 ? bf16_to_float(h) : fp16_to_float(h);
}

__device__ __forceinline__ void write(void *p, int dtype, int64_t i, float x) {
  if (dtype == MCC_FP32)
    static_cast<float *>(p)[i] = x;
  else
    static_cast<uint16_t *>(p)[i] = dtype == MCC_BF16 ? float_to_bf16(x) : float_to_fp16(x);
}

/* Pairs of numbers in a half-precision dtype, as ``write`` rounds them, the first of a pair in the lower half of its word. */
template <int kPairs>
__device__ __forceinline__ void pack_halves(int dtype, const float *v, uint32_t *words) {
#ifdef __CUDA_ARCH__
  bool numbers = true; /* the device's conversions give NaN another payload */
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) numbers = numbers && v[i] == v[i];
  if (numbers) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (dtype == MCC_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
      else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    }
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float low = v[2 * i], high = v[2 * i + 1];
    words[i] = dtype == MCC_BF16 ? float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16
                                 : float_to_fp16(low) | uint32_t(float_to_fp16(high)) << 16;
  }
}

/* kPack numbers at once: 16 bytes, or one. */
template <int kPack>
__device__ __forceinline__ void read_pack(const void *p, int dtype, int64_t at, float *v) {
  if (kPack == 1) {
    v[0] = read(p, dtype, at);
    return;
  }
  const uint4 raw = *reinterpret_cast<const uint4 *>(static_cast<const char *>(p) + at * (16 / kPack));
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const uint32_t word = words[i * 4 / kPack];
    const uint16_t half = uint16_t(i % 2 ? word >> 16 : word);
    v[i] = kPack == 4 ? float_of(word) : dtype == MCC_BF16 ? bf16_to_float(half) : fp16_to_float(half);
  }
}

template <int kPack>
__device__ __forceinline__ void write_pack(void *p, int dtype, int64_t at, const float *v) {
  if constexpr (kPack == 1) {
    write(p, dtype, at, v[0]);
  } else {
    uint32_t words[4];
    if constexpr (kPack == 8) {
      pack_halves<4>(dtype, v, words);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = bits_of(v[i]);
    }
    *reinterpret_cast<uint4 *>(static_cast<char *>(p) + at * (16 / kPack)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/* Sums over a block of up to 1024 threads, on every thread; ``room`` holds 33 numbers. Lanes add in a fixed order. */
template <class T>
__device__ __forceinline__ T block_sum(T x, T *room) {
  for (int d = kWarp / 2; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = (blockDim.x + kWarp - 1) / kWarp;
  if (lane == 0) room[warp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    T total = room[0];
    for (int i = 1; i < warps; ++i) total += room[i];
    room[32] = total;
  }
  __syncthreads();
  const T total = room[32];
  __syncthreads();
  return total;
}

template <class T>
__device__ __forceinline__ T block_max(T x, T *room) {
  for (int d = kWarp / 2; d > 0; d /= 2) {
    const T other = __shfl_xor_sync(kAll, x, d);
    x = other > x ? other : x;
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = (blockDim.x + kWarp - 1) / kWarp;
  if (lane == 0) room[warp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    T most = room[0];
    for (int i = 1; i < warps; ++i) most = room[i] > most ? room[i] : most;
    room[32] = most;
  }
  __syncthreads();
  const T most = room[32];
  __syncthreads();
  return most;
}

/* The sum over a block's earlier threads, and over all in ``total``; ``room`` holds 33 numbers. */
template <class T>
__device__ __forceinline__ T block_scan(T x, T *room, T &total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = (blockDim.x + kWarp - 1) / kWarp;
  T sum = x;
  for (int d = 1; d < kWarp; d *= 2) {
    const T lower = __shfl_up_sync(kAll, sum, d);
    if (lane >= d) sum += lower;
  }
  if (lane == kWarp - 1) room[warp] = sum;
  __syncthreads();
  T before = 0;
  for (int i = 0; i < warp; ++i) before += room[i];
  total = before;
  for (int i = warp; i < warps; ++i) total += room[i];
  __syncthreads();
  return before + sum - x;
}

/* Whether this is the last of ``blocks`` blocks to come here, on every thread, so that what needs them all takes no launch of
 * its own. The last one finds what the others wrote before; it reads by __ldcg, past its processor's own cache. What they read
 * after this call it must not write: they may still be running. ``ticket`` is zero before, and again after the kernel. */
__device__ __forceinline__ bool last_block(uint32_t *ticket, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads(); /* the fences of the first thread are for all the block's accesses */
  if (threadIdx.x == 0) {
    __threadfence(); /* they come before the ticket ... */
    last = atomicAdd(ticket, 1u) == blocks - 1;
    if (last) {
      *ticket = 0; /* all have theirs */
      __threadfence(); /* ... and the last block's further ones after everybody's */
    }
  }
  __syncthreads();
  return last;
}

}  // namespace cuda
}  // namespace mcc

#endif
