// Float32 numbers side by side, as many as a register of the processor holds, with the compiler's
// vector types. Elementwise operations give the same bits for any number of lanes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outdraft {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

template <class Vector, class Number>
inline Vector load(const Number* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Number, class Vector>
inline void store(Number* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// The first `count` lanes of a vector; the others hold `filling`.
template <class Vector, class Number>
inline Vector load_some(const Number* from, int64_t count, Number filling) {
  Vector vector = Vector{} + filling;
  std::memcpy(&vector, from, static_cast<size_t>(count) * sizeof(Number));
  return vector;
}

template <class Number, class Vector>
inline void store_some(Number* to, Vector vector, int64_t count) {
  std::memcpy(to, &vector, static_cast<size_t>(count) * sizeof(Number));
}

// Whether any lane of a comparison holds.
inline bool any(Ints is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256((__m256i)is_true, (__m256i)is_true) == 0;
#else
  int32_t all = 0;
  for (int lane = 0; lane < kLanes; ++lane) all |= is_true[lane];
  return all != 0;
#endif
}

}  // namespace outdraft
