/* The best table that this processor runs. MCC_ISA=baseline|avx2|avx512 in the environment asks for a lesser one. */
#include <cstdlib>
#include <cstring>

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
}  // namespace mcc

namespace {

struct Choice {
  const mcc_table *table;
  const char *name;
};

Choice choose() {
#if defined(__x86_64__)
  const char *asked = std::getenv("MCC_ISA");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool least = asked && std::strcmp(asked, "baseline") == 0, middle = asked && std::strcmp(asked, "avx2") == 0;
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
  return mcc_cpu(nullptr)->products != nullptr && __builtin_cpu_is("amd") && !__builtin_cpu_supports("avx512f");
#else
  return 0;
#endif
}
