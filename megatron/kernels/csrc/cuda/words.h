/* Eight neighbors at a time: how a thread reads, writes, measures, codes and rotates them. Included inside a namespace. */

constexpr int kEach = 8;

/* In as few loads as their alignment allows; zeros beyond ``count``. */
__device__ __forceinline__ void read_eight(const void *p, int dtype, int64_t begin, int64_t count, float *v) {
  const char *at = static_cast<const char *>(p) + begin * (dtype == MCC_FP32 ? 4 : 2);
  if (begin + kEach <= count && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    uint32_t words[8];
    const uint4 *from = reinterpret_cast<const uint4 *>(at);
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

/* Eight numbers of a half-precision dtype. */
__device__ __forceinline__ uint4 packed_eight(int dtype, const float *v) {
  uint32_t words[4];
  pack_halves<4>(dtype, v, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void write_eight(void *p, int dtype, int64_t begin, int64_t count, const float *v) {
  char *at = static_cast<char *>(p) + begin * (dtype == MCC_FP32 ? 4 : 2);
  if (begin + kEach <= count && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    uint4 *to = reinterpret_cast<uint4 *>(at);
    if (dtype == MCC_FP32) {
      to[0] = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      to[1] = make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7]));
    } else {
      to[0] = packed_eight(dtype, v);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (begin + j < count) write(p, dtype, begin + j, v[j]);
}

/* 32 bytes of each lane of a warp, one lane's behind another's, to where a lane's begin. A lane would write 16 bytes at a time, and
 * every other 16 of memory with its warp: so two lanes swap halves, and write 32 bytes together. */
__device__ __forceinline__ void write_sectors(uint4 *at, uint4 low, uint4 high) {
  const bool odd = threadIdx.x % 2 != 0;
  const uint4 given = odd ? low : high, mine = odd ? high : low;
  const uint4 got = make_uint4(__shfl_xor_sync(kAll, given.x, 1), __shfl_xor_sync(kAll, given.y, 1),
                               __shfl_xor_sync(kAll, given.z, 1), __shfl_xor_sync(kAll, given.w, 1));
  /* The even lane's 32 bytes first, of which it has the lower half itself; then the odd one's. */
  uint4 *to = at - (odd ? 1 : 0);
  to[0] = odd ? got : mine;
  to[2] = odd ? mine : got;
}

/* Writes kWords times eight numbers of each lane of a warp, one lane's behind another's, each from ``begin``. */
template <int kWords>
__device__ __forceinline__ void write_words(void *p, int dtype, int64_t begin, int64_t count, const float *v) {
  constexpr int kOwn = kWords * kEach;
  const int64_t first = begin - int64_t(threadIdx.x % kWarp) * kOwn;
  const bool whole = first + kWarp * kOwn <= count && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  if (kWords == 1 && dtype == MCC_FP32 && whole) {
    const uint4 low = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
    const uint4 high = make_uint4(bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7]));
    write_sectors(reinterpret_cast<uint4 *>(static_cast<float *>(p) + begin), low, high);
  } else if (kWords == 2 && dtype != MCC_FP32 && whole) {
    write_sectors(reinterpret_cast<uint4 *>(static_cast<uint16_t *>(p) + begin), packed_eight(dtype, v),
                  packed_eight(dtype, v + kOwn - kEach));
  } else {
#pragma unroll
    for (int u = 0; u < kOwn; u += kEach) write_eight(p, dtype, begin + u, count, v + u);
  }
}

/* Eight codes, four to a word, the first in the lowest bits. */
struct Codes {
  uint32_t low, high;
};

/* Code j in the lowest bits, and the ones behind it in its word above. */
__device__ __forceinline__ uint32_t code_at(const Codes &codes, int bits, int j) {
  return (j < kEach / 2 ? codes.low : codes.high) >> (j % (kEach / 2) * bits);
}

/* Sets code j, which was zero. */
__device__ __forceinline__ void add_code(Codes &codes, int bits, int j, uint32_t code) {
  (j < kEach / 2 ? codes.low : codes.high) |= code << (j % (kEach / 2) * bits);
}

template <int kBytes>
__device__ __forceinline__ void write_bytes(uint8_t *to, uint64_t packed) {
#pragma unroll
  for (int b = 0; b < kBytes; ++b) to[b] = uint8_t(packed >> (8 * b));
}

template <int kBytes>
__device__ __forceinline__ uint64_t read_bytes(const uint8_t *from) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int b = 0; b < kBytes; ++b) words[b / 4] |= uint32_t(from[b]) << (8 * (b % 4));
  return words[0] | (uint64_t(words[1]) << 32);
}

/* Eight codes behind each other, ``bits`` bytes. Widths that fill a machine word are one access where their place allows it. */
__device__ __forceinline__ void write_codes(uint8_t *to, int bits, Codes codes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  const uint64_t packed = codes.low | (uint64_t(codes.high) << (4 * bits));
  switch (bits) {
    case 1: return write_bytes<1>(to, packed);
    case 2:
      if (address % 2 != 0) return write_bytes<2>(to, packed);
      *reinterpret_cast<uint16_t *>(to) = uint16_t(packed);
      return;
    case 3: return write_bytes<3>(to, packed);
    case 4:
      if (address % 4 != 0) return write_bytes<4>(to, packed);
      *reinterpret_cast<uint32_t *>(to) = uint32_t(packed);
      return;
    case 5: return write_bytes<5>(to, packed);
    case 6: return write_bytes<6>(to, packed);
    case 7: return write_bytes<7>(to, packed);
    default:
      if (address % 4 != 0) return write_bytes<8>(to, packed);
      if (address % 8 == 0) {
        *reinterpret_cast<uint64_t *>(to) = packed;
        return;
      }
      reinterpret_cast<uint32_t *>(to)[0] = codes.low;
      reinterpret_cast<uint32_t *>(to)[1] = codes.high;
  }
}

__device__ __forceinline__ uint64_t read_packed(const uint8_t *from, int bits) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  switch (bits) {
    case 1: return read_bytes<1>(from);
    case 2: return address % 2 != 0 ? read_bytes<2>(from) : *reinterpret_cast<const uint16_t *>(from);
    case 3: return read_bytes<3>(from);
    case 4: return address % 4 != 0 ? read_bytes<4>(from) : *reinterpret_cast<const uint32_t *>(from);
    case 5: return read_bytes<5>(from);
    case 6: return read_bytes<6>(from);
    case 7: return read_bytes<7>(from);
    default:
      if (address % 4 != 0) return read_bytes<8>(from);
      if (address % 8 == 0) return *reinterpret_cast<const uint64_t *>(from);
      const uint32_t *words = reinterpret_cast<const uint32_t *>(from);
      return words[0] | (uint64_t(words[1]) << 32);
  }
}

__device__ __forceinline__ Codes read_codes(const uint8_t *from, int bits) {
  const uint64_t packed = read_packed(from, bits);
  return {uint32_t(packed), uint32_t(packed >> (4 * bits))};
}

/* Codes after the first ``valid`` become zeros. */
__device__ __forceinline__ uint32_t first_codes(uint32_t word, int bits, int64_t valid) {
  return valid >= kEach / 2 ? word : valid <= 0 ? 0u : word & ((1u << (int(valid) * bits)) - 1u);
}

__device__ __forceinline__ Codes first_codes(Codes codes, int bits, int64_t valid) {
  return {first_codes(codes.low, bits, valid), first_codes(codes.high, bits, valid - kEach / 2)};
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

/* What scales are made of. */
struct Needs {
  bool range, sum, squares, most;
  __device__ __forceinline__ explicit Needs(const mcc_grid &g)
      : range(takes_range(g)), sum(takes_sum(g)), squares(sums_squares(g)), most(takes_most(g)) {}
};

/* Adds ``count`` numbers to the extent of their set, of which ``valid`` count. */
template <int kCount>
__device__ __forceinline__ void measure(const Needs &needs, const float *v, int64_t valid, Extent &e) {
  if (needs.range) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= valid) continue;
      const uint32_t k = ordered(bits_of(v[j]));
      e.least = k < e.least ? k : e.least;
      e.greatest = k > e.greatest ? k : e.greatest;
    }
  }
  /* The others are zeros, which change neither a sum nor the largest magnitude. */
  if (needs.sum) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) e.sum += needs.squares ? double(v[j]) * double(v[j]) : double(fabsf(v[j]));
  }
  if (needs.most) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t u = bits_of(v[j]) & 0x7fffffffu;
      e.most = u > e.most ? u : e.most;
    }
  }
}

/* Joins the extents of groups of ``lanes`` neighbors, a power of two, on each of them. All lanes of a warp call it, with the
 * same needs. Distances beyond a group are read in vain: that costs less than a branch. */
__device__ __forceinline__ void join_group(const Needs &needs, Extent &e, int lanes) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    if (needs.range) {
      const uint32_t least = __shfl_xor_sync(kAll, e.least, d), greatest = __shfl_xor_sync(kAll, e.greatest, d);
      e.least = d < lanes && least < e.least ? least : e.least;
      e.greatest = d < lanes && greatest > e.greatest ? greatest : e.greatest;
    }
    if (needs.most) {
      const uint32_t most = __shfl_xor_sync(kAll, e.most, d);
      e.most = d < lanes && most > e.most ? most : e.most;
    }
    if (needs.sum) {
      const double sum = __shfl_xor_sync(kAll, e.sum, d);
      e.sum = d < lanes ? e.sum + sum : e.sum;
    }
  }
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
__device__ __forceinline__ Codes codes_of(const mcc_grid &g, const float *v, const Factor *steps, int64_t begin) {
  if (is_sign(g)) {
    Codes signs = {0, 0};
#pragma unroll
    for (int j = 0; j < kEach; ++j) add_code(signs, 1, j, v[j] >= 0.0f);
    return signs;
  }
  const float low = lowest(g), high = highest(g), shift = shift_of(g);
  float y[kEach];
  uint32_t level[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) y[j] = (v[j] - steps[kOne ? 0 : j].base) * steps[kOne ? 0 : j].by - shift;
  if (g.stochastic) {
    const Noise noise(g.seed);
#pragma unroll
    for (int j = 0; j < kEach; ++j) level[j] = stochastic_level(y[j], low, high, noise.at(uint32_t(begin + j)));
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) level[j] = nearest_level(y[j], low, high);
  }
  /* What all levels have more than their codes is subtracted once from a word, modulo 2^32. */
  const uint32_t base = 1u << g.bits, excess = uint32_t(kMagicBits - offset_of(g)) * (((base + 1) * base + 1) * base + 1);
  return {((level[3] * base + level[2]) * base + level[1]) * base + level[0] - excess,
          ((level[7] * base + level[6]) * base + level[5]) * base + level[4] - excess};
}

/* Eight numbers by the units of their scales. */
template <bool kOne>
__device__ __forceinline__ void values_of(const mcc_grid &g, Codes codes, const Factor *units, float *v) {
  const float factor = is_sign(g) ? 2.0f : 1.0f, zero = is_sign(g) ? 1.0f : float(offset_of(g)) - shift_of(g);
  const uint32_t mask = (1u << g.bits) - 1;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t code = code_at(codes, g.bits, j) & mask;
    /* The code as a number, without a conversion, of which a GPU makes few at a time; the level is exact. */
    const float number = float_of(0x4b000000u | code) - 8388608.0f;
    const float value = fmaf(number, factor, -zero) * units[kOne ? 0 : j].by;
    v[j] = is_minmax(g) ? value + units[kOne ? 0 : j].base : value; /* -0 + 0 would be another zero */
  }
}
