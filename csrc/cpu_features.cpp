// Which of the libraries this processor runs. Compiled for the oldest processor of its kind.

#include "export.h"

namespace {

enum Level { kNone = 0, kBasic = 1, kWide = 2, kWideBf16 = 3 };

#if defined(__x86_64__)
Level level() {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  if (!v3) return kNone;
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (!v4) return kBasic;
  const bool bf16 =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return bf16 ? kWideBf16 : kWide;
}
#else
Level level() { return kBasic; }
#endif

}  // namespace

// The last instruction set of `INSTRUCTION_SETS` (kernels/native/library.py) that it has; 0: none.
OUTDRAFT_EXPORT int32_t instruction_level() { return level(); }
