/* The best table that this processor runs. MCC_ISA=baseline|avx2|avx512 in the environment asks for a lesser one. */
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../mcc.h"

namespace mcc {
namespace baseline {
extern const mcc_table table;
}
namespace avx2 {
extern const mcc_table table;
}
namespace avx512 {
extern const mcc_table table;
}
namespace amx {
extern const decltype(mcc_table::products) products; /* null where the compiler does not know AMX */
}
}  // namespace mcc

namespace {

struct Choice {
  const mcc_table *table;
  const char *name;
};

/* Whether the processor has AMX for bf16 and AVX-512's conversions, and the system lets this process use its tiles. */
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  if (mcc::amx::products == nullptr) return false;
  constexpr unsigned kTiles = 1u << 24 | 1u << 22, kConversions = 1u << 5;
  constexpr long kRequest = 0x1023, kTileData = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kConversions) == 0) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(__x86_64__)
/* The table of AVX-512 with AMX's products. */
const mcc_table *amx_table() {
  static const mcc_table table = [] {
    mcc_table made = mcc::avx512::table;
    made.products = mcc::amx::products;
    return made;
  }();
  return &table;
}
#endif

Choice choose() {
#if defined(__x86_64__)
  const char *asked = std::getenv("MCC_ISA");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool least = asked && std::strcmp(asked, "baseline") == 0, middle = asked && std::strcmp(asked, "avx2") == 0;
  const bool most = asked && std::strcmp(asked, "avx512") == 0;
  if (avx512 && !least && !middle && !most && has_amx()) return {amx_table(), "amx"};
  if (avx512 && !least && !middle) return {&mcc::avx512::table, "avx512"};
  if (avx2 && !least) return {&mcc::avx2::table, "avx2"};
#endif
  return {&mcc::baseline::table, "baseline"};
}

}  // namespace

extern "C" const mcc_table *mcc_cpu(const char **name) {
  static const Choice choice = choose();
  if (name != nullptr) *name = choice.name;
  return choice.table;
}

extern "C" int mcc_cpu_outdoes_mkl(void) {
#if defined(__x86_64__)
  const mcc_table *table = mcc_cpu(nullptr);
  if (table == amx_table()) return 1;
  return table->products != nullptr && __builtin_cpu_is("amd") && !__builtin_cpu_supports("avx512f");
#else
  return 0;
#endif
}

extern "C" int mcc_cpu_smallest_product(void) {
#if defined(__x86_64__)
  if (mcc_cpu(nullptr) == amx_table()) return 256;
#endif
  return 16;
}
