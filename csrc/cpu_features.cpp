// Which of the libraries this processor runs. Compiled for the oldest processor of its kind.
//
// The processor is asked itself: the `__builtin_cpu_supports` of some compilers (zig's) finds
// nothing in a shared library. Bits as in Intel's manual, volume 2A, CPUID, and in Linux' and
// Apple's names for those of Arm.

#include "export.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// Registers that the operating system saves when it switches threads.
uint32_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

// A process asks Linux before it uses matrix registers, as signals then need larger stacks; the
// answer holds for all of its threads. Nobody else is asked.
bool may_use_matrices() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kMatrixData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kMatrixData) == 0;
#else
  return false;
#endif
}

constexpr uint32_t bit(int place, bool is_set) { return static_cast<uint32_t>(is_set) << place; }

uint32_t instruction_set_bits() {
  constexpr uint32_t kFma = 1u << 12, kXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr uint32_t kBmi1 = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  constexpr uint32_t kF = 1u << 16, kDq = 1u << 17, kCd = 1u << 28, kBw = 1u << 30, kVl = 1u << 31;
  constexpr uint32_t kVbmi = 1u << 1, kVnni = 1u << 11, kBf16 = 1u << 5;
  constexpr uint32_t kAvxVnni = 1u << 4, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr uint32_t kMatrixState = 0x60000, kWideState = 0xe6, kState = 0x6;  // of tmm, zmm, ymm

  const Registers basic = cpuid(1, 0), more = cpuid(7, 0);
  const uint32_t newer = cpuid(7, 1).a;
  if (!has(basic.c, kFma | kXsave | kAvx | kF16c) || !has(more.b, kBmi1 | kAvx2 | kBmi2)) return 0;
  const uint32_t saved = saved_registers();
  if (!has(saved, kState)) return 0;
  const bool has_v4 = has(saved, kWideState) && has(more.b, kF | kDq | kCd | kBw | kVl);
  const bool has_vnni = has_v4 && has(more.c, kVnni), has_bf16 = has_vnni && has(newer, kBf16);
  const bool has_amx = has_bf16 && has(more.c, kVbmi) && has(more.d, kAmxBf16 | kAmxTile) &&
                       has(saved, kMatrixState) && may_use_matrices();
  return bit(0, true) | bit(1, has(newer, kAvxVnni)) | bit(2, has_v4) | bit(3, has_vnni) |
         bit(4, has_bf16) | bit(5, has_amx);
}

#elif defined(__APPLE__)

bool has(const char* name) {
  int32_t value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

uint32_t instruction_set_bits() { return has("hw.optional.arm.FEAT_BF16") ? 3 : 1; }

#else

uint32_t instruction_set_bits() {
  constexpr unsigned long kDotProducts = 1ul << 20, kAtomics = 1ul << 8, kBf16 = 1ul << 14;
  const unsigned long basic = getauxval(AT_HWCAP);
  if ((basic & kDotProducts) == 0 || (basic & kAtomics) == 0) return 0;
  return (getauxval(AT_HWCAP2) & kBf16) != 0 ? 3 : 1;
}

#endif

}  // namespace

// Which of `INSTRUCTION_SETS` (kernels/native/library.py) it has: the first one is the lowest bit.
OUTDRAFT_EXPORT uint32_t usable_instruction_sets() { return instruction_set_bits(); }
