/* Skylake servers, Zen 4 and later. */
#if defined(__x86_64__)
#include "standard.h"

#define MCC_ISA avx512
#define MCC_PEXT 1
#define MCC_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define MCC_AVX512 1
#define MCC_PRODUCTS &avx2::products

namespace mcc {
namespace avx2 {
void products(const mcc_context *, const mcc_product *list, int64_t count);
}
}  // namespace mcc
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c"))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
/* GCC 12 says it of its own intrinsics' headers. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c,prefer-vector-width=512")
#include "kernels.h"
#pragma GCC pop_options
#endif
#endif
