/* The kernels' C interface: what the bindings call, on the CPU and on CUDA devices.
 *
 * Pointers are to contiguous memory, but for those of a product; counts are in elements. The meaning of every argument,
 * and of every bit of the results, is that of the pure-torch twin of the same name in reference.py.
 */
#ifndef MCC_H
#define MCC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum mcc_dtype { MCC_FP32 = 0, MCC_BF16 = 1, MCC_FP16 = 2, MCC_E8M0 = 3 /* of scales alone: powers of two */ };
enum mcc_layout { MCC_GROUP = 0, MCC_CHANNEL = 1, MCC_TENSOR = 2 };
/* The levels: k/(2^(b-1) - 1) of the scale, k/2^(b-1), (k + 1/2)/2^(b-1), from the least number to the greatest, or
 * k/2^(b-1) of a scale with a sign. */
enum mcc_kind { MCC_SYMMETRIC = 0, MCC_ASYMMETRIC = 1, MCC_MIDRISE = 2, MCC_MINMAX = 3, MCC_SIGNED = 4 };
enum mcc_method { MCC_MAX = 0, MCC_L2 = 1 };
/* What the second tensor of an encoder is, and what a decoder does with its numbers. */
enum mcc_role { MCC_PLAIN = 0, MCC_DELTA = 1, MCC_FEEDBACK = 2, MCC_ADD = 3 };

/* How numbers become codes. */
typedef struct {
  int bits;         /* 1 to 8 */
  int layout;       /* mcc_layout */
  int kind;         /* mcc_kind */
  int method;       /* mcc_method */
  int rotation;     /* block of the Hadamard rotation, a power of two; 0 for none */
  int stochastic;   /* round by noise instead of to nearest */
  int64_t group;    /* numbers that share a scale, a multiple of 8; channels when layout is MCC_CHANNEL */
  uint64_t seed;    /* of the noise */
} mcc_grid;

/* What a message decides block by block and tile by tile. Maps have one bit each, the first in a byte's lowest. */
typedef struct {
  int some;                 /* 1: only those blocks of grid.rotation numbers are rotated that the map tells */
  float ratio;              /* encoders: such blocks are found, where the largest magnitude is finite and more than this
                             * times the second-largest, and the map is written; 0: the map is there already */
  uint8_t *rotated;
  const uint8_t *marked;    /* tiles that are coded by ``wide``; null where none are */
  int64_t tile;             /* numbers of a tile: whole groups, whole blocks of a rotation of all */
  int64_t more;             /* tiles that ``wide_codes`` has room for; were more marked, the last ones are coded as others */
  mcc_grid wide;
  uint8_t *wide_codes;
  void *wide_scales;
} mcc_tiles;

typedef struct {
  mcc_grid grid;
  mcc_tiles tiles;
  const void *x;    /* numbers to encode; unused by decoders */
  void *other;      /* MCC_DELTA: the reference; MCC_FEEDBACK: the residual; updated in place */
  void *out;        /* decoders: where the numbers go; may be null for MCC_DELTA */
  uint8_t *codes;
  void *scales;     /* two for each group when kind is MCC_MINMAX, the least number and the greatest */
  int64_t count;    /* numbers */
  int role;         /* mcc_role */
  int x_dtype, other_dtype, out_dtype, scale_dtype;
} mcc_codec;

/* 8-bit floats with a scale for every ``group`` of consecutive numbers. */
typedef struct {
  const void *x;    /* numbers to encode; unused by decoders */
  void *out;        /* decoders: where the numbers go */
  uint8_t *codes;
  void *scales;
  int64_t count;    /* numbers */
  int64_t group;    /* at least 1 */
  uint64_t seed;    /* of the noise */
  int mantissa;     /* bits of it: 3 (e4m3) or 2 (e5m2) */
  int stochastic;   /* round by noise instead of to nearest */
  int added;        /* decoders: 0 writes, 1 adds to out in fp32, -1 subtracts */
  int x_dtype, out_dtype, scale_dtype;
} mcc_float8;

/* c (m x n, rows c_row apart) = or += a (m x k) times b (k x n), in fp32. Element (i, j) of a factor lies at i * row + j *
 * column. */
typedef struct {
  const float *a, *b;
  float *c;
  int64_t m, n, k, a_row, a_column, b_row, b_column, c_row;
  int add;
} mcc_product;

/* What a call runs in. CPU kernels use none of it. */
typedef struct {
  void *stream;                                     /* CUDA's */
  void *(*workspace)(void *owner, size_t bytes);    /* device memory until the call's work is done; 256-byte aligned */
  void *owner;
} mcc_context;

typedef struct {
  void (*quantize)(const mcc_context *, const mcc_codec *);
  void (*dequantize)(const mcc_context *, const mcc_codec *);
  /* Largest magnitudes of each of k rows of n: ascending indices (k x count). */
  void (*abs_topk)(const mcc_context *, const float *x, int64_t k, int64_t n, int64_t count, int64_t *indices);
  void (*dilate)(const mcc_context *, const uint8_t *mask, int64_t k, int64_t n, int64_t radius, uint8_t *out);
  /* At places of x, n long; those outside are left out on CUDA, and have been refused on CPUs. */
  void (*gather)(const mcc_context *, const float *x, int64_t n, const int64_t *indices, int64_t count, float *packed);
  void (*scatter_add)(const mcc_context *, float *x, int64_t n, const int64_t *indices, int64_t count, const float *packed);
  /* out[0]: sum of squares; out[1]: 1 when all are finite, else 0. */
  void (*finite_norm)(const mcc_context *, const void *x, int dtype, int64_t count, double *out);
  /* Finite elements 0, stride, 2 stride, ... : range (low, high; inf, -inf when none) and counts of equal bins. */
  void (*histogram)(const mcc_context *, const void *x, int dtype, int64_t count, int64_t stride, int64_t bins, int64_t *counts,
                    double *range);
  /* k matrices n x r -> orthonormal bases of their columns, n >= r. */
  void (*orthonormalize)(const mcc_context *, const float *x, int64_t k, int64_t n, int64_t r, float *q);
  /* Rows of logits (tokens x columns), of which the first ``valid`` columns count. target not null: writes the log-sum-exp and the
   * logit of the label (0 for a negative one) of every row, else lse is read. weights not null: overwrites the logits by
   * weight * (e^(logit - lse) - 1 where the label is), and those that do not count by 0. */
  void (*cross_entropy)(const mcc_context *, void *logits, int dtype, int64_t tokens, int64_t columns, int64_t valid,
                        const int64_t *labels, float *lse, float *target, const float *weights);
  /* Rows of ``width`` numbers to tokens of k places each: out[t] = the sum over j of weights[t, j] * rows[places[t, j]], in
   * that order, in fp32. Places that are none of ``count`` rows are left out; weights null: ones. */
  void (*combine_rows)(const mcc_context *, const void *rows, int dtype, int64_t count, int64_t width, const int64_t *places,
                       const float *weights, int64_t tokens, int64_t k, void *out);
  /* Its gradients, where a row has one place: grad_rows[places[t, j]] = weights[t, j] * grad[t], and grad_weights[t, j] =
   * grad[t] . rows[places[t, j]], or 0 without a row. */
  void (*combine_rows_back)(const mcc_context *, const void *grad, const void *rows, int dtype, int64_t count, int64_t width,
                            const int64_t *places, const float *weights, int64_t tokens, int64_t k, void *grad_rows,
                            float *grad_weights);
  void (*float8_encode)(const mcc_context *, const mcc_float8 *);
  void (*float8_decode)(const mcc_context *, const mcc_float8 *);
  /* The sum of squares of what each whole tile loses to nearest with scales in fp32; finds the blocks to rotate as an encoder
   * does. Codes, scales and the second tensor of the codec are unused and stay. */
  void (*tile_errors)(const mcc_context *, const mcc_codec *, float *errors);
  /* A map of ``bytes`` with the bits of ascending indices. */
  void (*mark_tiles)(const mcc_context *, const int64_t *indices, int64_t count, uint8_t *map, int64_t bytes);
  /* Products one after another, of processors with AVX2; else null. */
  void (*products)(const mcc_context *, const mcc_product *list, int64_t count);
} mcc_table;

/* The table for this processor, chosen once; "baseline" etc. in *name. */
const mcc_table *mcc_cpu(const char **name);

/* Whether its products are faster than MKL's, which torch multiplies with: with AMX, and on AMD's processors before Zen 4. */
int mcc_cpu_outdoes_mkl(void);

/* The size of each dimension from which on its products are worth the packing of their factors. */
int mcc_cpu_smallest_product(void);

/* The table for CUDA devices. */
const mcc_table *mcc_cuda(void);

/* What went wrong in starting kernels since the last call, in words; null for nothing. */
const char *mcc_cuda_error(void);

#ifdef __cplusplus
}
#endif

#endif
