/* For any processor. */
#include "standard.h"

#define MCC_ISA baseline
#define MCC_PEXT 0
#define MCC_FMA(a, b, c) ((a) * (b) + (c))
#define MCC_AVX512 0
#include "kernels.h"
