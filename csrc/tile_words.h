// The steps of a tile of bfloat16 or quantised weights, as pairs of bfloat16 inputs; quantised
// ones as pairs of 16-bit integers, too: see linear_tiles.cpp for the layout.
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

// The words of a step for a vector of outputs. kInputs: of a step; kLaneBytes: of an output in it;
// kZero: what the codes of `codes` are above those that they stand for.

struct Bf16Words {
  static constexpr bool kIsQuantised = false;
  static constexpr int kInputs = 2, kLaneBytes = 4;
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    return load<Words>(lanes);
  }
};

struct Int8Words {
  static constexpr bool kIsQuantised = true;
  static constexpr int kInputs = 4, kLaneBytes = 2, kZero = 0;
  template <int kPair>
  OUTDRAFT_INLINE static Words codes(const char* lanes) {
    return widened_bytes(lanes + kPair * kTile * kLaneBytes);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    const char* bytes = lanes + kPair * kTile * kLaneBytes;
    return pairs_of(floats_of(bytes), floats_of(bytes + kWidth),
                    std::make_integer_sequence<int, 2 * kWidth>());
  }
  OUTDRAFT_INLINE static Floats floats_of(const char* bytes) {
    return __builtin_convertvector(widened(load<Bytes>(bytes)), Floats);
  }
  template <int... kPlaces>
  OUTDRAFT_INLINE static Words pairs_of(Floats a, Floats b,
                                        std::integer_sequence<int, kPlaces...>) {
    return (Words)__builtin_shufflevector((WordHalves)a, (WordHalves)b, (2 * kPlaces + 1)...);
  }
};

struct Int4Words {
  static constexpr bool kIsQuantised = true;
  static constexpr int kInputs = 8, kLaneBytes = 4, kZero = kInt4Zero;
  template <int kPair>
  OUTDRAFT_INLINE static Words codes(const char* lanes) {
    const WordHalves all = load<WordHalves>(lanes) >> (4 * kPair);
    return (Words)(kPair == 3 ? all : all & 15);
  }
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
#if defined(__AVX512BW__)
    const Words codes = load<Words>(lanes) >> (4 * kPair);
    // By the low five bits of each half; the fifth is the next input's.
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kInt4Numbers));
#else
    // With the highest bit of each flipped, codes are signed.
    static_assert(kInt4Zero == 8);
    const Ints flipped = (Ints)(load<Words>(lanes) ^ 0x8888'8888);
    const Floats even = __builtin_convertvector(flipped << (28 - 4 * kPair) >> 28, Floats);
    const Floats odd = __builtin_convertvector(flipped << (12 - 4 * kPair) >> 28, Floats);
    return (Words)even >> 16 | (Words)odd;
#endif
  }
};

// Scales or shifts of a vector of outputs.
OUTDRAFT_INLINE Floats scale_numbers(const char* at, ScaleKind kind, int v) {
  if (kind == ScaleKind::kFloat32) return load<Floats>(at + v * kWidth * 4);
  if (kind == ScaleKind::kFloat16) return halves(at + v * kWidth * 2);
  return numbers(reinterpret_cast<const uint16_t*>(at) + v * kWidth);
}

}  // namespace outdraft
