/* Unpack and dequantize. */
#include "platform.h"

namespace mcc {
namespace cuda {

#include "words.h"

#include "tiles.h"

constexpr int kThreads = 128;

/* Each lane decodes kWords words of eight, which have one scale unless they have channels. */
template <bool kChannels, bool kRotated, bool kTiled, int kBits, int kWords>
__global__ void dequantize_words(mcc_codec c, Tiling t) {
  static_assert(kWords == 1 || kBits != 0, "more words have one scale, no second tensor and no rotation");
  constexpr int kOwn = kWords * kEach, kScales = kChannels ? kEach : 1;
  assume<kBits>(c);
  const int64_t coded = kRotated ? (c.count + c.grid.rotation - 1) / c.grid.rotation * c.grid.rotation : c.count;
  const int64_t shares = (coded + kOwn - 1) / kOwn, whole = (shares + kWarp - 1) / kWarp * kWarp;
  for (int64_t w = thread_index(); w < (kRotated || kTiled ? whole : shares); w += thread_total()) {
    float v[kOwn], other[kEach];
    Factor units[kScales];
    const int64_t begin = w * kOwn;
    if (!(kRotated || kTiled) || begin < coded) {
      const Part part = kTiled ? part_of(c, t, begin) : Part{c.grid, c.codes, c.scales, begin};
      const mcc_grid &g = kTiled ? part.grid : c.grid;
      const Place place(g, part.at);
#pragma unroll
      for (int j = 0; j < kScales; ++j)
        units[j] = load_factor(g, false, part.scales, c.scale_dtype, kChannels ? place.at(j) : place.first);
#pragma unroll
      for (int u = 0; u < kOwn; u += kEach)
        if (kWords == 1 || begin + u < coded)
          values_of<!kChannels>(g, read_codes(part.codes + (part.at + u) / kEach * g.bits, g.bits), units, v + u);
    }
    if (kRotated) rotate_lanes(v, c.grid.rotation);
    if (kTiled && !kRotated && c.tiles.some) {
      const int64_t number = quotient(begin, c.grid.rotation);
      rotate_some(v, c.grid.rotation, number < quotient(c.count, c.grid.rotation) && bit_of(c.tiles.rotated, number));
    }
    if ((kRotated || kTiled) && begin >= c.count) continue;
    if (c.role == MCC_ADD || c.role == MCC_DELTA) {
      const bool adds = c.role == MCC_ADD;
      read_eight(adds ? c.out : c.other, adds ? MCC_FP32 : c.other_dtype, begin, c.count, other);
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = other[j] + v[j];
    }
    if (c.role == MCC_DELTA) write_words<kWords>(c.other, c.other_dtype, begin, c.count, v);
    if (c.out != nullptr) write_words<kWords>(c.out, c.out_dtype, begin, c.count, v);
  }
}

/* The kernel of a usual codec. Two words of halves are as long as one of fp32 numbers. */
template <int kWords>
auto usual_decoder(int bits) {
  return of_usual_bits(bits, [](auto kBits) { return dequantize_words<false, false, false, kBits, kWords>; });
}

void decode(const mcc_context *context, const mcc_codec &c, const Tiling &t, int64_t coded) {
  const bool tiled = is_tiled(c), rotated = rotates_all(c);
  const int bits = rotated ? 0 : usual_bits(c);
  if (bits != 0 && c.out_dtype != MCC_FP32 && c.grid.group % (2 * kEach) == 0) {
    MCC_LAUNCH(usual_decoder<2>(bits), word_blocks((coded + 1) / 2, kThreads), kThreads, context, c, t);
    return;
  }
  const auto kernel = bits != 0                          ? usual_decoder<1>(bits)
                      : c.grid.layout == MCC_CHANNEL     ? dequantize_words<true, false, false, 0, 1>
                      : rotated                          ? tiled ? dequantize_words<false, true, true, 0, 1>
                                                                 : dequantize_words<false, true, false, 0, 1>
                      : tiled                            ? dequantize_words<false, false, true, 0, 1>
                                                         : dequantize_words<false, false, false, 0, 1>;
  MCC_LAUNCH(kernel, word_blocks(coded, kThreads), kThreads, context, c, t);
}

}  // namespace cuda
}  // namespace mcc
