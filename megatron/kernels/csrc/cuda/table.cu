/* The CUDA kernels' table. */
#include "platform.h"

namespace mcc {
namespace cuda {

void quantize(const mcc_context *, const mcc_codec *);
void dequantize(const mcc_context *, const mcc_codec *);
void abs_topk(const mcc_context *, const float *, int64_t, int64_t, int64_t, int64_t *);
void dilate(const mcc_context *, const uint8_t *, int64_t, int64_t, int64_t, uint8_t *);
void gather(const mcc_context *, const float *, int64_t, const int64_t *, int64_t, float *);
void scatter_add(const mcc_context *, float *, int64_t, const int64_t *, int64_t, const float *);
void finite_norm(const mcc_context *, const void *, int, int64_t, double *);
void histogram(const mcc_context *, const void *, int, int64_t, int64_t, int64_t, int64_t *, double *);
void orthonormalize(const mcc_context *, const float *, int64_t, int64_t, int64_t, float *);
void cross_entropy(const mcc_context *, void *, int, int64_t, int64_t, int64_t, const int64_t *, float *, float *,
                   const float *);
void combine_rows(const mcc_context *, const void *, int, int64_t, int64_t, const int64_t *, const float *, int64_t, int64_t,
                  void *);
void combine_rows_back(const mcc_context *, const void *, const void *, int, int64_t, int64_t, const int64_t *, const float *,
                       int64_t, int64_t, void *, float *);
void float8_encode(const mcc_context *, const mcc_float8 *);
void float8_decode(const mcc_context *, const mcc_float8 *);
void tile_errors(const mcc_context *, const mcc_codec *, float *);
void mark_tiles(const mcc_context *, const int64_t *, int64_t, uint8_t *, int64_t);

static const mcc_table table = {
    quantize, dequantize, abs_topk, dilate, gather, scatter_add, finite_norm, histogram, orthonormalize,
    cross_entropy, combine_rows, combine_rows_back, float8_encode, float8_decode, tile_errors, mark_tiles,
    nullptr,
};

}  // namespace cuda
}  // namespace mcc

extern "C" const mcc_table *mcc_cuda(void) { return &mcc::cuda::table; }

extern "C" const char *mcc_cuda_error(void) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
