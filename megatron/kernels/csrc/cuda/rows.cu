/* Rows of tokens: their weighted sums, one block to a token, and the gradients of these, one block to a row. Every number is
 * read from memory once and nothing is kept between; arithmetic in fp32. */
#include "platform.h"

namespace mcc {
namespace cuda {

template <int kPack>
__global__ void __launch_bounds__(256) combine(const void *rows, int dtype, int64_t count, int64_t width,
                                               const int64_t *places, const float *weights, int64_t k, void *out) {
  const int64_t token = blockIdx.x;
  places += token * k;
  if (weights != nullptr) weights += token * k;
  for (int64_t i = int64_t(threadIdx.x) * kPack; i < width; i += int64_t(blockDim.x) * kPack) {
    float sum[kPack] = {};
    for (int64_t j = 0; j < k; ++j) {
      const int64_t place = places[j];
      if (place < 0 || place >= count) continue;
      const float weight = weights != nullptr ? weights[j] : 1.0f;
      float v[kPack];
      read_pack<kPack>(rows, dtype, place * width + i, v);
#pragma unroll
      for (int p = 0; p < kPack; ++p) sum[p] += weight * v[p];
    }
    write_pack<kPack>(out, dtype, token * width + i, sum);
  }
}

template <int kPack>
__global__ void __launch_bounds__(256) combine_back(const void *grad, const void *rows, int dtype, int64_t count,
                                                    int64_t width, const int64_t *places, const float *weights, int64_t k,
                                                    void *grad_rows, float *grad_weights) {
  __shared__ float room[33];
  const int64_t choice = blockIdx.x, place = places[choice];
  if (place < 0 || place >= count) {
    if (threadIdx.x == 0) grad_weights[choice] = 0.0f;
    return;
  }
  const float weight = weights[choice];
  const int64_t from = choice / k * width, at = place * width;
  float dot = 0;
  for (int64_t i = int64_t(threadIdx.x) * kPack; i < width; i += int64_t(blockDim.x) * kPack) {
    float g[kPack], v[kPack];
    read_pack<kPack>(grad, dtype, from + i, g);
    read_pack<kPack>(rows, dtype, at + i, v);
#pragma unroll
    for (int p = 0; p < kPack; ++p) {
      dot += g[p] * v[p];
      g[p] *= weight;
    }
    write_pack<kPack>(grad_rows, dtype, at + i, g);
  }
  const float total = block_sum(dot, room);
  if (threadIdx.x == 0) grad_weights[choice] = total;
}

/* Numbers that threads take at once: 16 bytes where all rows begin at a multiple of them. */
static int pack_of(int dtype, int64_t width, const void *a, const void *b, const void *c) {
  const int pack = dtype == MCC_FP32 ? 4 : 8;
  const uintptr_t places = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
  return places % 16 == 0 && width % pack == 0 ? pack : 1;
}

static unsigned threads_for(int64_t width, int pack) { return width / pack > 128 ? 256 : 128; }

void combine_rows(const mcc_context *context, const void *rows, int dtype, int64_t count, int64_t width, const int64_t *places,
                  const float *weights, int64_t tokens, int64_t k, void *out) {
  if (tokens == 0 || width == 0) return;
  const int pack = pack_of(dtype, width, rows, out, nullptr);
  const auto kernel = pack == 1 ? combine<1> : pack == 4 ? combine<4> : combine<8>;
  MCC_LAUNCH(kernel, grid_of(tokens), threads_for(width, pack), context, rows, dtype, count, width, places, weights, k, out);
}

void combine_rows_back(const mcc_context *context, const void *grad, const void *rows, int dtype, int64_t count, int64_t width,
                       const int64_t *places, const float *weights, int64_t tokens, int64_t k, void *grad_rows,
                       float *grad_weights) {
  if (tokens == 0 || k == 0) return;
  const int pack = pack_of(dtype, width, grad, rows, grad_rows);
  const auto kernel = pack == 1 ? combine_back<1> : pack == 4 ? combine_back<4> : combine_back<8>;
  MCC_LAUNCH(kernel, grid_of(tokens * k), threads_for(width, pack), context, grad, rows, dtype, count, width, places, weights,
             k, grad_rows, grad_weights);
}

}  // namespace cuda
}  // namespace mcc
