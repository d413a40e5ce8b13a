/* Haswell, Zen and later. */
#if defined(__x86_64__)
#include "standard.h"

#define MCC_ISA avx2
#define MCC_PEXT 1
#define MCC_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define MCC_AVX512 0
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c"))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,f16c")
#include "kernels.h"
#pragma GCC pop_options
#endif
#endif
