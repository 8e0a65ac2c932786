// The matrix registers of Intel's AMX: eight, of up to 16 rows of 64 bytes. One instruction adds to
// 16 by 16 sums what 16 rows of 32 bfloat16 inputs give with 16 outputs, 8192 products.
//
// A sum of these 32 products has two parts, of the even and of the odd inputs, each added up in
// order, from zero, with products that are fused; then the parts are added, then their sum joins
// what the register had. Numbers below 2 ** -126 are zero. No other row or output matters (Intel,
// Architecture Instruction Set Extensions, TDPBF16PS).
//
// The instructions are written out: the intrinsics of some compilers do not say which memory they
// read.
#pragma once

#include <cstdint>
#include <cstring>

namespace outdraft {

#if defined(__AMX_BF16__)
constexpr bool kHasMatrixRegisters = true;
#else
constexpr bool kHasMatrixRegisters = false;
#endif

constexpr int64_t kMatrixRows = 16, kMatrixRowBytes = 64;

#if defined(__AMX_BF16__)

// Shapes of the registers, as the instructions that load and store them have it: 0 to 3 are sums, 4
// and 5 rows, 6 and 7 weights. Register 5 may have a number of rows of its own.
struct MatrixShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  MatrixShapes(int64_t num_rows, int64_t rows_of_5) {
    for (int i = 0; i < 5; ++i) rows[i] = static_cast<uint8_t>(num_rows);
    rows[5] = static_cast<uint8_t>(rows_of_5);
    rows[6] = rows[7] = kMatrixRows;
  }
};

// Sums and rows get so many rows. To set shapes takes ten times as long as to see that they are
// set, and other libraries may have changed them meanwhile.
inline void shape_matrices(int64_t num_rows, int64_t rows_of_5) {
  const MatrixShapes wanted(num_rows, rows_of_5);
  alignas(64) char is_set[sizeof(MatrixShapes)];
  __asm__ volatile("sttilecfg %0" : "=m"(is_set));
  if (std::memcmp(is_set, &wanted, sizeof(wanted)) == 0) return;
  __asm__ volatile("ldtilecfg %0" : : "m"(wanted));
}

inline void shape_matrices(int64_t num_rows) { shape_matrices(num_rows, num_rows); }

template <int kRegister>
inline void zero_matrix() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

// Rows lie `stride` bytes apart.
template <int kRegister>
inline void load_matrix(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0"
                   :
                   : "i"(kRegister), "r"(from), "r"(stride)
                   : "memory");
}

template <int kRegister>
inline void store_matrix(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)"
                   :
                   : "i"(kRegister), "r"(to), "r"(stride)
                   : "memory");
}

// sums += rows times weights, whose row i has inputs 2i and 2i + 1 of all outputs.
template <int kSums, int kRows, int kWeights>
inline void add_products_of_matrices() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   :
                   : "i"(kSums), "i"(kRows), "i"(kWeights));
}

#endif

}  // namespace outdraft
