// The steps of a tile of bfloat16 or quantised weights, as pairs of bfloat16 inputs or as float32:
// see linear_tiles.cpp for the layout.
#pragma once

#include <cstdint>
#include <utility>

#include "linear.h"
#include "simd.h"
#include "vector_math.h"

namespace outdraft {

constexpr int64_t kStepBytes = 128;  // of a tile
constexpr int64_t kLine = 64;        // bytes that memory gives at once
constexpr int64_t kAhead = 8192;     // bytes; hardware alone does not look beyond a page

// A call in the innermost loop would put the sums into memory.
#define OUTDRAFT_INLINE [[gnu::always_inline]] inline

#if defined(__AVX512BW__)
// The numbers of the codes 0 to 15, twice: q - 8.
alignas(64) constexpr uint16_t kInt4Numbers[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
#endif

// The words of a step for a vector of outputs, and the even and the odd input of a pair as float32.
// kInputs: of a step; kLaneBytes: of an output in it.

struct Bf16Words {
  static constexpr bool kIsQuantised = false;
  static constexpr int kInputs = 2, kLaneBytes = 4;
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    return load<Words>(lanes);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats even(const char* lanes) {
    return low_halves(load<Words>(lanes));
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats odd(const char* lanes) {
    return high_halves(load<Words>(lanes));
  }
};

struct Int8Words {
  static constexpr bool kIsQuantised = true;
  static constexpr int kInputs = 4, kLaneBytes = 2;
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    const char* bytes = lanes + kPair * kTile * kLaneBytes;
    return pairs_of(floats_of(bytes), floats_of(bytes + kWidth),
                    std::make_integer_sequence<int, 2 * kWidth>());
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats even(const char* lanes) {
    return __builtin_convertvector(both<kPair>(lanes) << 24 >> 24, Floats);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats odd(const char* lanes) {
    return __builtin_convertvector(both<kPair>(lanes) >> 8, Floats);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Ints both(const char* lanes) {
    return widened(load<Shorts>(lanes + kPair * kTile * kLaneBytes));
  }
  OUTDRAFT_INLINE static Floats floats_of(const char* bytes) {
    return __builtin_convertvector(widened(load<Bytes>(bytes)), Floats);
  }
  template <int... kPlaces>
  OUTDRAFT_INLINE static Words pairs_of(Floats a, Floats b,
                                        std::integer_sequence<int, kPlaces...>) {
    typedef uint16_t PairHalves __attribute__((vector_size(4 * kWidth)));
    return (Words)__builtin_shufflevector((PairHalves)a, (PairHalves)b, (2 * kPlaces + 1)...);
  }
};

struct Int4Words {
  static constexpr bool kIsQuantised = true;
  static constexpr int kInputs = 8, kLaneBytes = 4;
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
#if defined(__AVX512BW__)
    const Words codes = load<Words>(lanes) >> (4 * kPair);
    // By the low five bits of each half; the fifth is the next input's.
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kInt4Numbers));
#else
    return (Words)even<kPair>(lanes) >> 16 | (Words)odd<kPair>(lanes);
#endif
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats even(const char* lanes) {
    return __builtin_convertvector(flipped(lanes) << (28 - 4 * kPair) >> 28, Floats);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Floats odd(const char* lanes) {
    return __builtin_convertvector(flipped(lanes) << (12 - 4 * kPair) >> 28, Floats);
  }
  // With the highest bit of each flipped, codes are signed.
  static_assert(kInt4Zero == 8);
  OUTDRAFT_INLINE static Ints flipped(const char* lanes) {
    return (Ints)(load<Words>(lanes) ^ 0x8888'8888);
  }
};

// Scales or shifts of a vector of outputs.
OUTDRAFT_INLINE Floats scale_numbers(const char* at, int64_t scale_bytes, int v) {
  if (scale_bytes == 4) return load<Floats>(at + v * kWidth * 4);
  return numbers(reinterpret_cast<const uint16_t*>(at) + v * kWidth);
}

}  // namespace outdraft
