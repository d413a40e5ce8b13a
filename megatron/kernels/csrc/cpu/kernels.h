/* All CPU kernels, for the instruction set that MCC_ISA names. Each instruction set's file includes this once, after
 * switching the compiler to it; the standard headers come before that, so that what they define stays portable. */

namespace mcc {
namespace MCC_ISA {

#define MCC_FN __attribute__((always_inline)) inline /* callers know much of a grid */
#include "../numbers.h"
#include "../float8.h"

#include "portable.h"

#include "lanes512.inl"

#include "tiles.inl"

#include "quantize.inl"

#include "tile_errors.inl"

#include "float8.inl"

#include "topk.inl"

#include "reduce.inl"

#include "lowrank.inl"

#include "cross_entropy.inl"

#include "rows.inl"

#ifdef MCC_PRODUCTS /* those of another instruction set, or none */
constexpr auto products = MCC_PRODUCTS;
#else
#include "products.inl"
#endif

extern const mcc_table table;
const mcc_table table = {
    quantize, dequantize, abs_topk, dilate, gather, scatter_add, finite_norm, histogram, orthonormalize,
    cross_entropy, combine_rows, combine_rows_back, float8_encode, float8_decode, tile_errors, mark_tiles,
    products,
};

}  // namespace MCC_ISA
}  // namespace mcc
