// What this machine can do at most, for benchmarks/roofline.py: reading memory with all threads,
// and products of numbers that stay in registers.

#include <algorithm>

#include "amx.h"
#include "export.h"
#include "linear.h"
#include "simd.h"
#include "team.h"

namespace outdraft {
namespace {

constexpr int kSums = kWidth == 8 ? 12 : 16;  // none waits for the one before; all in registers
constexpr int kMatrixSums = 4;
constexpr int64_t kStepsOfUnit = 20000;
constexpr int64_t kReadAhead = kHasMatrixRegisters ? 1024 : 4096;  // bytes; what reads fastest

// Sums of words; the units are parts of the memory, one after the other.
struct Reading {
  const char* memory;
  int64_t num_bytes, unit_bytes;
  uint64_t* sums;

  int64_t num_units() const { return num_bytes / unit_bytes; }
  size_t scratch_bytes() const { return sizeof(Words); }
  void compute(int64_t unit, void* scratch) const {
    const char* at = memory + unit * unit_bytes;
    Words sums_of[8] = {};
    for (int64_t byte = 0; byte < unit_bytes; byte += sizeof(sums_of)) {
      for (int i = 0; i < 8; ++i) {
        prefetch(at + byte + i * sizeof(Words) + kReadAhead);
        sums_of[i] += outdraft::load<Words>(at + byte + i * sizeof(Words));
      }
    }
    for (int i = 1; i < 8; ++i) sums_of[0] += sums_of[i];
    outdraft::store(scratch, sums_of[0]);
  }
  void store(int64_t unit, const void* scratch) const {
    sums[unit] = *static_cast<const uint32_t*>(scratch);
  }
};

// Four sums of what never leaves the matrix registers; one number of them.
void multiply_matrices(float* result) {
#if defined(__AMX_BF16__)
  alignas(64) float numbers[kMatrixRows * kMatrixRowBytes / sizeof(float)] = {};
  shape_matrices(kMatrixRows);
  load_matrix<4>(numbers, kMatrixRowBytes);
  load_matrix<5>(numbers, kMatrixRowBytes);
  load_matrix<6>(numbers, kMatrixRowBytes);
  load_matrix<7>(numbers, kMatrixRowBytes);
  for (int64_t step = 0; step < kStepsOfUnit; ++step) {
    add_products_of_matrices<0, 4, 6>();
    add_products_of_matrices<1, 4, 7>();
    add_products_of_matrices<2, 5, 6>();
    add_products_of_matrices<3, 5, 7>();
  }
  store_matrix<0>(numbers, kMatrixRowBytes);
  *result = numbers[0];
#else
  (void)result;
#endif
}

// Operations of a step of a unit, two for each product.
int64_t step_operations(bool is_bf16) {
  if (is_bf16 && kHasMatrixRegisters) return 2 * kMatrixSums * 8192;
  return kSums * kWidth * (is_bf16 ? 4 : 2);
}

struct Multiplying {
  int64_t units;
  bool is_bf16;
  float* results;

  int64_t num_units() const { return units; }
  size_t scratch_bytes() const { return sizeof(Floats); }
  void compute(int64_t, void* scratch) const {
    if (is_bf16 && kHasMatrixRegisters) return multiply_matrices(static_cast<float*>(scratch));
    Floats sums[kSums] = {};
    Floats factor = broadcast(1.0f), number = broadcast(0.5f);
    __asm__ volatile("" : "+m"(factor), "+m"(number));
    for (int64_t step = 0; step < kStepsOfUnit; ++step) {
      for (Floats& sum : sums) {
        sum = is_bf16 ? dot_pairs(sum, (Words)factor, (Words)number) : fused(factor, number, sum);
      }
    }
    for (int i = 1; i < kSums; ++i) sums[0] += sums[i];
    outdraft::store(scratch, sums[0]);
  }
  void store(int64_t unit, const void* scratch) const {
    results[unit] = *static_cast<const float*>(scratch);
  }
};

}  // namespace
}  // namespace outdraft

// Read memory of a multiple of kMaxUnits * 512 bytes; a number that depends on all of it.
OUTDRAFT_EXPORT uint64_t roofline_read(outdraft::Team* team, const void* memory,
                                       int64_t num_bytes) {
  using namespace outdraft;
  static uint64_t sums[kMaxUnits];
  run(team, Reading{static_cast<const char*>(memory), num_bytes, num_bytes / kMaxUnits, sums});
  uint64_t sum = 0;
  for (uint64_t one : sums) sum += one;
  return sum;
}

// Multiply and add in registers; how many operations that were, two for each product. bfloat16
// means its dot products; where there are none it is what float32 does.
OUTDRAFT_EXPORT int64_t roofline_multiply(outdraft::Team* team, int64_t dtype, int64_t num_units) {
  using namespace outdraft;
  static float results[kMaxUnits];
  const bool is_bf16 = kHasBf16Dot && Dtype{dtype} == Dtype::kBfloat16;
  run(team, Multiplying{std::min(num_units, kMaxUnits), is_bf16, results});
  return std::min(num_units, kMaxUnits) * kStepsOfUnit * step_operations(is_bf16);
}

OUTDRAFT_FUNCTIONS(roofline_read, roofline_multiply);
