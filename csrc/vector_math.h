// Functions and sums of whole vectors, in one order for each width.
//
// Numbers of a long row are added vector by vector, number i of each vector to sum i. These kWidth
// sums are joined last: those one place apart, then pairs two apart, four apart, and so on. What
// fills no vector is added behind that, one number after the other.
#pragma once

#include <cmath>
#include <utility>

#include "simd.h"

namespace outdraft {

// Numbers as float32, from where they lie.
inline Floats numbers(const float* from) { return load<Floats>(from); }
inline Floats numbers(const uint16_t* from) { return widen(load<Halves>(from)); }

inline float number(const float* from) { return *from; }
inline float number(const uint16_t* from) { return widen(*from); }
template <class Kind, class Number>
inline Kind read(const Number* from) {
  if constexpr (sizeof(Kind) == sizeof(Floats)) {
    return numbers(from);
  } else {
    return number(from);
  }
}

// step(i, kind) for whole vectors from place i on, then for each number that is left; `kind` is a
// Floats or a float.
template <class Step>
inline void for_numbers(int64_t size, const Step& step) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) step(i, Floats{});
  for (; i < size; ++i) step(i, 0.0f);
}

// They are rounded to bfloat16 where they go to it.
inline void put(float* to, float number) { *to = number; }
inline void put(uint16_t* to, float number) { *to = to_bf16(number); }
inline void put(float* to, Floats vector) { store(to, vector); }
inline void put(uint16_t* to, Floats vector) { store(to, to_bf16(vector)); }

template <class From, class To>
inline void convert(const From* from, int64_t size, To* to) {
  if constexpr (sizeof(From) == sizeof(To)) {
    std::memcpy(to, from, sizeof(To) * static_cast<size_t>(size));
  } else {
    for_numbers(size, [&](int64_t i, auto kind) { put(to + i, read<decltype(kind)>(from + i)); });
  }
}

// Calls with the address of numbers, as what they are.
template <class Call>
inline void with_numbers(const void* from, bool is_bf16, const Call& call) {
  is_bf16 ? call(static_cast<const uint16_t*>(from)) : call(static_cast<const float*>(from));
}
template <class Call>
inline void with_numbers(void* to, bool is_bf16, const Call& call) {
  is_bf16 ? call(static_cast<uint16_t*>(to)) : call(static_cast<float*>(to));
}

// 2 ** x to about 1e-7 for x <= 127, exactly 0 below -126.5; a NaN stays one (Cephes' exp2f).
inline Floats exp2_of(Floats x) {
  const Floats lowest = broadcast(-127.0f);
  const Floats bounded = lowest > x ? lowest : x;  // one instruction, as it is written
  const Ints whole = __builtin_convertvector(bounded - 0.5f, Ints);
  const Floats fraction = bounded - __builtin_convertvector(whole, Floats);
  Floats power = broadcast(1.535336188319500e-4f);
  for (const float factor : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                             2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f}) {
    power = fused(power, fraction, broadcast(factor));
  }
  return power * (Floats)((whole + 127) << 23);  // of -127 it is 0
}

// The same to 3e-6, exactly 1 for 0, for numbers that become bfloat16: a polynomial of degree 4
// with the least relative error from -1/2 to 1/2, times a power of two.
inline Floats rough_exp2_of(Floats x) {
#if defined(__AVX512F__)
  const Floats whole = _mm512_maskz_roundscale_ps(__mmask16(-1), x, _MM_FROUND_TO_NEAREST_INT);
  const Floats fraction = x - whole;
  Floats power = broadcast(9.582852945e-3f);
  for (const float factor : {5.590642616e-2f, 2.402409911e-1f, 6.931241751e-1f, 1.0f}) {
    power = fused(power, fraction, broadcast(factor));
  }
  return _mm512_maskz_scalef_ps(__mmask16(-1), power, whole);
#else
  return exp2_of(x);
#endif
}

// e ** x within 2e-7 of relative error, for x from -87 to 88, which others become; a NaN stays one
// (Cephes' expf). x = n ln(2) + r with |r| <= ln(2) / 2; the small multiples of the first part of
// ln(2), which has few bits, are exact.
inline Floats exp_of(Floats x) {
  constexpr float kRounding = 12582912.0f;  // 1.5 * 2 ** 23: what is added to it loses its fraction
  const Floats lowest = broadcast(-87.0f), highest = broadcast(88.0f);
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  const Floats whole = (x * 1.44269504f + kRounding) - kRounding;
  const Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats series = broadcast(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f}) {
    series = fused(series, r, broadcast(factor));
  }
  series = fused(series * r, r, r) + 1.0f;
  return series * (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
}

inline Floats magnitude(Floats x) { return x < 0.0f ? -x : x; }

// erf within 2e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline Floats erf_of(Floats x) {
  const Floats size = magnitude(x), t = 1.0f / (size * 0.3275911f + 1.0f);
  Floats series = broadcast(1.061405429f);
  for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.0f}) {
    series = fused(series, t, broadcast(factor));
  }
  const Floats positive = 1.0f - series * exp_of(-size * size);
  return x < 0.0f ? -positive : positive;
}

// x times the normal distribution's share below x (Hendrycks, Gimpel 2016).
inline Floats gelu_of(Floats x) { return x * 0.5f * (erf_of(x * 0.70710678f) + 1.0f); }

// tanh within 3e-7 of relative error; a NaN stays one (Cephes' tanhf).
inline Floats tanh_of(Floats x) {
  const Floats square = x * x;
  Floats series = broadcast(-5.70498872745e-3f);
  for (const float factor :
       {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) {
    series = fused(series, square, broadcast(factor));
  }
  const Floats size = magnitude(x), far = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
  return size < 0.625f ? fused(series * square, x, x) : x < 0.0f ? -far : far;
}

namespace detail {

// Number i of the result comes from the one or the other, as bit `kDistance` of i says.
template <int kDistance, int... kPlaces>
Floats pair_sum(Floats a, Floats b, std::integer_sequence<int, kPlaces...>) {
  const Floats own =
      __builtin_shufflevector(a, b, (kPlaces + (kPlaces & kDistance ? kWidth : 0))...);
  const Floats other = __builtin_shufflevector(
      a, b, ((kPlaces ^ kDistance) + (kPlaces & kDistance ? kWidth : 0))...);
  return own + other;
}

template <int kDistance, int... kPlaces>
Floats turned(Floats a, std::integer_sequence<int, kPlaces...>) {
  return __builtin_shufflevector(a, a, (kPlaces ^ kDistance)...);
}

using Places = std::make_integer_sequence<int, kWidth>;

}  // namespace detail

// A vector whose number i is the sum of vectors[i], which are overwritten.
template <int kDistance = 1>
inline Floats sums_of(Floats* vectors) {
  if constexpr (kDistance == kWidth) {
    return vectors[0];
  } else {
    for (int i = 0; i < kWidth / kDistance; i += 2) {
      vectors[i / 2] = detail::pair_sum<kDistance>(vectors[i], vectors[i + 1], detail::Places{});
    }
    return sums_of<2 * kDistance>(vectors);
  }
}

// All numbers as one: pairs at growing distances are joined.
template <int kDistance = 1, class Join>
inline float joined(Floats vector, const Join& join) {
  if constexpr (kDistance == kWidth) {
    return vector[0];
  } else {
    const Floats other = detail::turned<kDistance>(vector, detail::Places{});
    return joined<2 * kDistance>(join(vector, other), join);
  }
}

inline float sum_of(Floats vector) {
  return joined(vector, [](Floats a, Floats b) { return a + b; });
}

// The highest number; of a NaN and a number one of them.
inline float max_of(Floats vector) {
  return joined(vector, [](Floats a, Floats b) { return a > b ? a : b; });
}

// 1 / rms(x) (Zhang, Sennrich 2019).
template <class Number>
inline float inverse_rms(const Number* x, int64_t size, float eps) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const Floats part = numbers(x + i);
    sums = fused(part, part, sums);
  }
  float sum = sum_of(sums);
  for (; i < size; ++i) sum += number(x + i) * number(x + i);
  return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

}  // namespace outdraft
