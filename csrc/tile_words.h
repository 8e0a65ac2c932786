// The steps of a tile of bfloat16 or int8 weights, as pairs of bfloat16 inputs; int8 as pairs of 16-bit
// integers, too: see linear_tiles.cpp for the layout. And scales.
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

// The words of a step for a vector of outputs. kInputs: of a step; kLaneBytes: of an output in it.

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
  static constexpr int kInputs = 4, kLaneBytes = 2;
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

// Scales or shifts of a vector of outputs.
OUTDRAFT_INLINE Floats scale_numbers(const char* at, ScaleKind kind, int v) {
  if (kind == ScaleKind::kFloat32) return load<Floats>(at + v * kWidth * 4);
  if (kind == ScaleKind::kFloat16) return halves(at + v * kWidth * 2);
  return numbers(reinterpret_cast<const uint16_t*>(at) + v * kWidth);
}

}  // namespace outdraft
