/* Softmax under a causal mask, bias and GELU, residual and normalisation. One block to a row; arithmetic in fp32. */
#include "platform.h"

namespace mcc {
namespace cuda {

constexpr int kThreads = 128;

__global__ void softmax_rows(const void *x, void *y, int dtype, int64_t rows, int64_t columns, float scale) {
  __shared__ float room[33];
  const int64_t row = blockIdx.x, at = row * columns;
  int64_t seen = row % rows + 1 + (columns > rows ? columns - rows : 0);
  seen = seen < columns ? seen : columns;
  float most = -INFINITY;
  for (int64_t i = threadIdx.x; i < seen; i += blockDim.x) most = fmaxf(most, read(x, dtype, at + i) * scale);
  most = block_max(most, room);
  const float peak = most == -INFINITY ? 0.0f : most;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < seen; i += blockDim.x) sum += expf(read(x, dtype, at + i) * scale - peak);
  const float factor = 1.0f / block_sum(sum, room);
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x)
    write(y, dtype, at + i, i < seen ? expf(read(x, dtype, at + i) * scale - peak) * factor : 0.0f);
}

void causal_softmax(const mcc_context *context, const void *x, void *y, int dtype, int64_t matrices, int64_t rows,
                    int64_t columns, float scale) {
  if (matrices * rows * columns == 0) return;
  MCC_LAUNCH(softmax_rows, grid_of(matrices * rows), kThreads, context, x, y, dtype, rows, columns, scale);
}

__global__ void softmax_grad_rows(const void *y, const void *dy, void *dx, int dtype, int64_t columns, float scale) {
  __shared__ float room[33];
  const int64_t at = int64_t(blockIdx.x) * columns;
  float dot = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) dot += read(y, dtype, at + i) * read(dy, dtype, at + i);
  dot = block_sum(dot, room);
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x)
    write(dx, dtype, at + i, scale * (read(y, dtype, at + i) * (read(dy, dtype, at + i) - dot)));
}

void causal_softmax_grad(const mcc_context *context, const void *y, const void *dy, void *dx, int dtype,
                         int64_t matrices, int64_t rows, int64_t columns, float scale) {
  if (matrices * rows * columns == 0) return;
  MCC_LAUNCH(softmax_grad_rows, grid_of(matrices * rows), kThreads, context, y, dy, dx, dtype, columns, scale);
}

constexpr float kGeluScale = 0.7978845608028654f, kGeluCube = 0.044715f;

__global__ void gelu_rows(const void *x, const void *bias, void *y, int dtype, int64_t total, int64_t columns) {
  for (int64_t i = thread_index(); i < total; i += thread_total()) {
    const float z = read(x, dtype, i) + read(bias, dtype, i % columns);
    write(y, dtype, i, 0.5f * z * (1.0f + tanhf(kGeluScale * (z + kGeluCube * z * z * z))));
  }
}

void bias_gelu(const mcc_context *context, const void *x, const void *bias, void *y, int dtype, int64_t rows,
               int64_t columns) {
  if (rows * columns == 0) return;
  const unsigned blocks = grid_of(blocks_for(rows * columns, kThreads * 4));
  MCC_LAUNCH(gelu_rows, blocks, kThreads, context, x, bias, y, dtype, rows * columns, columns);
}

__global__ void gelu_grad_rows(const void *x, const void *bias, const void *dy, void *dx, int dtype, int64_t total,
                               int64_t columns) {
  for (int64_t i = thread_index(); i < total; i += thread_total()) {
    const float z = read(x, dtype, i) + read(bias, dtype, i % columns);
    const float t = tanhf(kGeluScale * (z + kGeluCube * z * z * z));
    const float slope = kGeluScale * (1.0f + 3.0f * kGeluCube * z * z);
    write(dx, dtype, i, read(dy, dtype, i) * (0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * slope));
  }
}

void bias_gelu_grad(const mcc_context *context, const void *x, const void *bias, const void *dy, void *dx, int dtype,
                    int64_t rows, int64_t columns) {
  if (rows * columns == 0) return;
  const unsigned blocks = grid_of(blocks_for(rows * columns, kThreads * 4));
  MCC_LAUNCH(gelu_grad_rows, blocks, kThreads, context, x, bias, dy, dx, dtype, rows * columns, columns);
}

__global__ void norm_rows(const void *x, const void *residual, const void *weight, const void *bias, void *sum, void *y,
                          float *mean, float *rstd, int dtype, int64_t columns, float eps) {
  __shared__ double room[33];
  const int64_t at = int64_t(blockIdx.x) * columns;
  double total = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    write(sum, dtype, at + i, read(x, dtype, at + i) + read(residual, dtype, at + i));
    total += double(read(sum, dtype, at + i));
  }
  total = block_sum(total, room);
  const float center = bias != nullptr ? float(total / double(columns)) : 0.0f;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    const double away = double(read(sum, dtype, at + i) - center);
    squares += away * away;
  }
  squares = block_sum(squares, room);
  const float inverse = float(1.0 / sqrt(squares / double(columns) + double(eps)));
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = center;
    rstd[blockIdx.x] = inverse;
  }
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    float v = (read(sum, dtype, at + i) - center) * inverse * read(weight, dtype, i);
    if (bias != nullptr) v += read(bias, dtype, i);
    write(y, dtype, at + i, v);
  }
}

void add_norm(const mcc_context *context, const void *x, const void *residual, const void *weight, const void *bias,
              void *sum, void *y, float *mean, float *rstd, int dtype, int64_t rows, int64_t columns, float eps) {
  if (rows * columns == 0) return;
  MCC_LAUNCH(norm_rows, grid_of(rows), kThreads, context, x, residual, weight, bias, sum, y, mean, rstd, dtype, columns,
             eps);
}

__global__ void norm_grad_rows(const void *sum, const void *weight, const float *mean, const float *rstd, const void *dy,
                               const void *dsum, void *dx, int dtype, int rms, int64_t columns) {
  __shared__ float room[33];
  const int64_t at = int64_t(blockIdx.x) * columns;
  const float center = mean[blockIdx.x], inverse = rstd[blockIdx.x];
  float plain = 0, along = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    const float hat = (read(sum, dtype, at + i) - center) * inverse;
    const float own = read(dy, dtype, at + i) * read(weight, dtype, i);
    plain += own;
    along += own * hat;
  }
  plain = block_sum(plain, room) / float(columns);
  along = block_sum(along, room) / float(columns);
  if (rms) plain = 0.0f;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    const float hat = (read(sum, dtype, at + i) - center) * inverse;
    const float own = read(dy, dtype, at + i) * read(weight, dtype, i);
    write(dx, dtype, at + i, read(dsum, dtype, at + i) + inverse * (own - plain - hat * along));
  }
}

/* 32 columns to a block of 32 x 8 threads, which take the rows in turn. */
__global__ void norm_grad_columns(const void *sum, const float *mean, const float *rstd, const void *dy, float *dweight,
                                  float *dbias, int dtype, int64_t rows, int64_t columns) {
  __shared__ float weights[8][33], biases[8][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x) * 32 + x;
  float w = 0, b = 0;
  if (column < columns)
    for (int64_t row = y; row < rows; row += 8) {
      const float g = read(dy, dtype, row * columns + column);
      w += g * ((read(sum, dtype, row * columns + column) - mean[row]) * rstd[row]);
      b += g;
    }
  weights[y][x] = w;
  biases[y][x] = b;
  __syncthreads();
  if (y != 0 || column >= columns) return;
  for (int i = 1; i < 8; ++i) {
    w += weights[i][x];
    b += biases[i][x];
  }
  dweight[column] = w;
  if (dbias != nullptr) dbias[column] = b;
}

void add_norm_grad(const mcc_context *context, const void *sum, const void *weight, const float *mean, const float *rstd,
                   const void *dy, const void *dsum, void *dx, float *dweight, float *dbias, int dtype, int rms,
                   int64_t rows, int64_t columns) {
  if (columns == 0) return;
  MCC_LAUNCH(norm_grad_columns, grid_of(blocks_for(columns, 32)), 256, context, sum, mean, rstd, dy, dweight, dbias, dtype,
             rows, columns);
  if (rows == 0) return;
  MCC_LAUNCH(norm_grad_rows, grid_of(rows), kThreads, context, sum, weight, mean, rstd, dy, dsum, dx, dtype, rms, columns);
}

}  // namespace cuda
}  // namespace mcc
