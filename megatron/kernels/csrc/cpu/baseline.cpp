/* For any processor. */
#include "standard.h"

#define MCC_ISA baseline
#define MCC_PEXT 0
#define MCC_FMA(a, b, c) ((a) * (b) + (c))
#define MCC_AVX512 0
#define MCC_PRODUCTS decltype(mcc_table::products)(nullptr)
#include "kernels.h"
