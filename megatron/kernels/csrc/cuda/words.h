/* Eight neighbors at a time: how a thread reads, writes, measures, codes and rotates them. Included inside a namespace. */

constexpr int kEach = 8;

/* In as few loads as their alignment allows; zeros beyond ``count``. */
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
    } else if (dtype == MCC_BF16) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = bf16_to_float(uint16_t(words[j / 2] >> (16 * (j % 2))));
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = fp16_to_float(uint16_t(words[j / 2] >> (16 * (j % 2))));
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
      return;
    }
    uint32_t words[4];
    if (dtype == MCC_BF16) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = uint32_t(float_to_bf16(v[2 * j])) | (uint32_t(float_to_bf16(v[2 * j + 1])) << 16);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = uint32_t(float_to_fp16(v[2 * j])) | (uint32_t(float_to_fp16(v[2 * j + 1])) << 16);
    }
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j < count) write(p, dtype, begin + j, v[j]);
}

/* The same for a warp whose lanes have neighboring eights, each lane from ``begin``. Of 32 bytes of fp32 numbers a lane would
 * write 16 at a time, and every other 16 of memory with its warp: so two lanes swap halves, and write 32 bytes together. */
__device__ __forceinline__ void write_eights(void *p, int dtype, int64_t begin, int64_t count, const float *v) {
  const int64_t first = begin - int64_t(threadIdx.x % kWarp) * kEach;
  if (dtype != MCC_FP32 || first + kWarp * kEach > count || reinterpret_cast<uintptr_t>(p) % 16 != 0) {
    write_eight(p, dtype, begin, count, v);
    return;
  }
  const bool odd = threadIdx.x % 2 != 0;
  uint32_t mine[4], got[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    mine[j] = bits_of(odd ? v[4 + j] : v[j]);
    got[j] = __shfl_xor_sync(kAll, bits_of(odd ? v[j] : v[4 + j]), 1);
  }
  /* The even lane's 32 bytes first, of which it has the lower half itself; then the odd one's. */
  uint4 *to = reinterpret_cast<uint4 *>(static_cast<float *>(p) + begin) - (odd ? 1 : 0);
  to[0] = odd ? make_uint4(got[0], got[1], got[2], got[3]) : make_uint4(mine[0], mine[1], mine[2], mine[3]);
  to[2] = odd ? make_uint4(mine[0], mine[1], mine[2], mine[3]) : make_uint4(got[0], got[1], got[2], got[3]);
}

/* Eight codes behind each other, ``bits`` bytes. Widths that fill a machine word are one access where their place allows
 * it. Four codes fit into 32 bits, which are cheaper to shift than 64. */
__device__ __forceinline__ void write_codes(uint8_t *to, int bits, const uint8_t *codes) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int j = 0; j < kEach / 2; ++j) {
    low |= uint32_t(codes[j]) << (j * bits);
    high |= uint32_t(codes[j + kEach / 2]) << (j * bits);
  }
  const uint64_t packed = low | (uint64_t(high) << (4 * bits));
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  if (bits == 4 && address % 4 == 0)
    *reinterpret_cast<uint32_t *>(to) = uint32_t(packed);
  else if (bits == 8 && address % 8 == 0)
    *reinterpret_cast<uint64_t *>(to) = packed;
  else if (bits == 2 && address % 2 == 0)
    *reinterpret_cast<uint16_t *>(to) = uint16_t(packed);
  else
#pragma unroll 1
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
#pragma unroll 1
    for (int b = 0; b < bits; ++b) packed |= uint64_t(from[b]) << (8 * b);
  const uint32_t low = uint32_t(packed), high = uint32_t(packed >> (4 * bits)), mask = (1u << bits) - 1;
#pragma unroll
  for (int j = 0; j < kEach / 2; ++j) {
    codes[j] = uint8_t((low >> (j * bits)) & mask);
    codes[j + kEach / 2] = uint8_t((high >> (j * bits)) & mask);
  }
}

/* The Walsh-Hadamard transform of blocks of 8 to 256 numbers, eight to a lane: additions in the order of its twin's. All
 * lanes of a warp call it. */
__device__ __forceinline__ void rotate_lanes(float *v, int block) {
#pragma unroll
  for (int h = 1; h < kEach; h *= 2) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j & h) continue;
      const float a = v[j], b = v[j + h];
      v[j] = a + b;
      v[j + h] = a - b;
    }
  }
  for (int d = 1; d * kEach < block; d *= 2) {
    const bool upper = (threadIdx.x & d) != 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float other = __shfl_xor_sync(kAll, v[j], d);
      v[j] = upper ? other - v[j] : v[j] + other;
    }
  }
  const float scale = 1.0f / sqrtf(float(block));
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] *= scale;
}

/* Adds ``count`` numbers to the extent of their set, of which ``valid`` count. */
template <int kCount>
__device__ __forceinline__ void measure(const mcc_grid &g, const float *v, int64_t valid, Extent &e) {
  if (takes_range(g)) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= valid) continue;
      const uint32_t k = ordered(bits_of(v[j]));
      e.least = k < e.least ? k : e.least;
      e.greatest = k > e.greatest ? k : e.greatest;
    }
  }
  /* The others are zeros, which change neither a sum nor the largest magnitude. */
  if (takes_sum(g)) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) e.sum += sums_squares(g) ? double(v[j]) * double(v[j]) : double(fabsf(v[j]));
  }
  if (takes_most(g)) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t u = bits_of(v[j]) & 0x7fffffffu;
      e.most = u > e.most ? u : e.most;
    }
  }
}

/* What scales are made of. */
struct Needs {
  bool range, sum, most;
  __device__ __forceinline__ explicit Needs(const mcc_grid &g) : range(takes_range(g)), sum(takes_sum(g)), most(takes_most(g)) {}
};

/* Joins the extents of two lanes, on both. All lanes of a warp call it, with the same needs. */
__device__ __forceinline__ void join_lanes(const Needs &needs, Extent &e, int distance) {
  if (needs.range) {
    const uint32_t least = __shfl_xor_sync(kAll, e.least, distance), greatest = __shfl_xor_sync(kAll, e.greatest, distance);
    e.least = least < e.least ? least : e.least;
    e.greatest = greatest > e.greatest ? greatest : e.greatest;
  }
  if (needs.most) {
    const uint32_t other = __shfl_xor_sync(kAll, e.most, distance);
    e.most = other > e.most ? other : e.most;
  }
  if (needs.sum) e.sum += __shfl_xor_sync(kAll, e.sum, distance);
}

/* Joins the extents of a block, on every thread; each calls it. */
__device__ __forceinline__ void join_block(const mcc_grid &g, Extent &e, uint32_t *room, double *sums) {
  if (takes_range(g)) {
    e.greatest = block_max(e.greatest, room);
    e.least = ~block_max(~e.least, room);
  }
  if (takes_most(g)) e.most = block_max(e.most, room);
  if (takes_sum(g)) e.sum = block_sum(e.sum, sums);
}

/* Which scale a word of eight numbers has: one, or eight in turn by channels. Groups are of whole words. */
struct Place {
  int64_t first, channels;
  __device__ __forceinline__ Place(const mcc_grid &g, int64_t begin) : first(0), channels(0) {
    if (g.layout == MCC_GROUP) {
      first = (g.group & (g.group - 1)) == 0 ? begin >> (__ffsll(g.group) - 1) : begin / g.group;
    } else if (g.layout == MCC_CHANNEL) {
      channels = g.group;
      first = begin % channels;
    }
  }
  __device__ __forceinline__ int64_t at(int j) const {
    const int64_t channel = first + j;
    return channel < channels ? channel : channels >= kEach ? channel - channels : channel % channels;
  }
};

/* Eight codes by the steps of their scales (all equal without channels). ``begin`` counts for the noise. */
template <bool kOne>
__device__ __forceinline__ void codes_of(const mcc_grid &g, const float *v, const Factor *steps, int64_t begin,
                                         uint8_t *codes) {
  const float low = lowest(g), high = highest(g), shift = shift_of(g);
  const int32_t offset = offset_of(g);
  if (is_sign(g)) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) codes[j] = v[j] >= 0.0f;
    return;
  }
  float y[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) y[j] = (v[j] - steps[kOne ? 0 : j].base) * steps[kOne ? 0 : j].by - shift;
  if (!g.stochastic) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) codes[j] = nearest_code(y[j], low, high, offset);
    return;
  }
  const Noise noise(g.seed);
#pragma unroll
  for (int j = 0; j < kEach; ++j) codes[j] = stochastic_code(y[j], low, high, offset, noise.at(uint32_t(begin + j)));
}

/* Eight numbers by the units of their scales. */
template <bool kOne>
__device__ __forceinline__ void values_of(const mcc_grid &g, const uint8_t *codes, const Factor *units, float *v) {
  const float factor = is_sign(g) ? 2.0f : 1.0f, zero = is_sign(g) ? 1.0f : float(offset_of(g)) - shift_of(g);
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    v[j] = (float(int32_t(codes[j])) * factor - zero) * units[kOne ? 0 : j].by + units[kOne ? 0 : j].base;
}

/* The codes of places after the last number are zeros. */
__device__ __forceinline__ void clear_tail(int64_t begin, int64_t coded, uint8_t *codes) {
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j >= coded) codes[j] = 0;
}
