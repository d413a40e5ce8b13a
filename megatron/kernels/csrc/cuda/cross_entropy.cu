/* Cross-entropy of rows of logits and its gradient in their place. One block to a row: the first pass reads it from memory
 * and keeps a running maximum and sum, the second finds it in the L2 cache. Arithmetic in fp32. */
#include "platform.h"

namespace mcc {
namespace cuda {

/* Log-sum-exp of the first ``valid`` numbers of a row, on every thread. */
template <int kPack>
__device__ __forceinline__ float log_sum_exp(const void *logits, int dtype, int64_t at, int64_t valid, float *room) {
  float most = -INFINITY, sum = 0;
  for (int64_t i = int64_t(threadIdx.x) * kPack; i < valid; i += int64_t(blockDim.x) * kPack) {
    float v[kPack];
    read_pack<kPack>(logits, dtype, at + i, v);
    float top = most;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (i + k >= valid) v[k] = -INFINITY;
      top = fmaxf(top, v[k]);
    }
    const float peak = top == -INFINITY ? 0.0f : top;
    sum *= expf(most - peak);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum += expf(v[k] - peak);
    most = top;
  }
  const float whole = block_max(most, room), peak = whole == -INFINITY ? 0.0f : whole;
  return peak + logf(block_sum(sum == 0.0f ? 0.0f : sum * expf(most - peak), room));
}

template <int kPack>
__global__ void __launch_bounds__(1024) cross_entropy_rows(void *logits, int dtype, int64_t columns, int64_t valid,
                                                           const int64_t *labels, float *lse, float *target,
                                                           const float *weights) {
  __shared__ float room[33];
  const int64_t token = blockIdx.x, at = token * columns, label = labels[token];
  float total;
  if (target != nullptr) {
    float chosen = 0.0f;
    if (label >= 0 && threadIdx.x == 0) chosen = label < valid ? read(logits, dtype, at + label) : NAN;
    total = log_sum_exp<kPack>(logits, dtype, at, valid, room);
    if (threadIdx.x == 0) {
      lse[token] = total;
      target[token] = chosen;
    }
  } else {
    total = lse[token];
  }
  if (weights == nullptr) return;
  const float weight = weights[token];
  for (int64_t i = int64_t(threadIdx.x) * kPack; i < columns; i += int64_t(blockDim.x) * kPack) {
    float v[kPack];
    read_pack<kPack>(logits, dtype, at + i, v);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float share = expf(v[k] - total) * weight;
      v[k] = i + k >= valid ? 0.0f : i + k == label ? share - weight : share;
    }
    write_pack<kPack>(logits, dtype, at + i, v);
  }
}

void cross_entropy(const mcc_context *context, void *logits, int dtype, int64_t tokens, int64_t columns, int64_t valid,
                   const int64_t *labels, float *lse, float *target, const float *weights) {
  if (tokens == 0) return;
  const int pack = dtype == MCC_FP32 ? 4 : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0 && columns % pack == 0;
  const unsigned threads = columns > 4096 ? 1024 : 128;
  if (!aligned)
    MCC_LAUNCH(cross_entropy_rows<1>, grid_of(tokens), threads, context, logits, dtype, columns, valid, labels, lse, target,
               weights);
  else if (pack == 4)
    MCC_LAUNCH(cross_entropy_rows<4>, grid_of(tokens), threads, context, logits, dtype, columns, valid, labels, lse, target,
               weights);
  else
    MCC_LAUNCH(cross_entropy_rows<8>, grid_of(tokens), threads, context, logits, dtype, columns, valid, labels, lse, target,
               weights);
}

}  // namespace cuda
}  // namespace mcc
