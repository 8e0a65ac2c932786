// Vectors of the machine's width, and the few things that a compiler's vector types cannot say.
//
// `+`, `-`, `*`, comparisons and `?:` of these types are the compiler's. A product is fused with a
// sum only where `fused` is written, so that every library has the same bits for the same formula.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outdraft {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // numbers of 32 bits in a vector
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
typedef uint16_t WordHalves __attribute__((vector_size(4 * kWidth)));
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(Vector));
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(Vector));
}

// The first `count` lanes; the others hold `filling`.
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

// Whether a comparison holds in any lane.
inline bool any(Ints is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256((__m256i)is_true, (__m256i)is_true) == 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)is_true) != 0;
#endif
}

inline Floats broadcast(float number) { return number - Floats{}; }  // keeps -0
inline Words broadcast_word(uint32_t word) { return Words{} + word; }

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#endif
}

// The same for a sum in a loop of many: it keeps its register, which compilers choose anew for each
// product, until sums are copied between registers and memory.
inline Floats added(Floats sum, Floats a, Floats b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return fused(a, b, sum);
#endif
}

// The same vector, for the compiler another one: it may be in memory though the first one is not.
template <class Vector>
inline Vector apart(Vector vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
  return vector;
}

// sums + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of bfloat16 pairs, rounded as the machine does.
inline Floats dot_pairs(Floats sums, Words a, Words b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vbfdotq_f32(sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  (void)a, (void)b;
  return sums;
#endif
}

// sums + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of pairs of 16-bit integers, not all of them -32768.
// Where that is two instructions, they are named: compilers take many sums of one step apart, and
// the parts do not fit the registers.
inline Ints dot_shorts(Ints sums, Words a, Words b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  Ints products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(products) : "v"(a), "v"(b));
  return sums;
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return sums + (Ints)vpaddq_s32(low, vmull_high_s16(x, y));
#endif
}

// Pairs of the bfloat16 number 1, for `dot_pairs`.
inline Words bf16_ones() {
  Words ones = broadcast_word(0x3F803F80);
#if defined(__aarch64__)
  // gcc 12 writes a constant that is known to be bfloat16 with the bits of float16.
  asm("" : "+w"(ones));
#endif
  return ones;
}

// The two bfloat16 numbers of every word, as float32.
inline Floats low_halves(Words pairs) { return (Floats)(pairs << 16); }
inline Floats high_halves(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }

// Small integers, widened (the compilers' own conversions take them apart).
inline Words widened(Halves numbers) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(__mmask16(-1), (__m256i)numbers);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)numbers);
#elif defined(__aarch64__)
  return (Words)vmovl_u16((uint16x4_t)numbers);
#endif
}
inline Ints widened(Shorts numbers) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepi16_epi32(__mmask16(-1), (__m256i)numbers);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi16_epi32((__m128i)numbers);
#elif defined(__aarch64__)
  return (Ints)vmovl_s16((int16x4_t)numbers);
#endif
}
inline Ints widened(Bytes numbers) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepi8_epi32(__mmask16(-1), (__m128i)numbers);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)numbers));
#elif defined(__aarch64__)
  return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)numbers))));
#endif
}

// Twice as many bytes as words, as 16-bit integers.
inline Words widened_bytes(const void* from) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_cvtepi8_epi16(__mmask32(-1), load<__m256i>(from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepi8_epi16(load<__m128i>(from));
#elif defined(__aarch64__)
  return (Words)vmovl_s8(load<int8x8_t>(from));
#endif
}

// To the nearest integer, ties to even.
inline Ints rounded(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(__mmask16(-1), x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32(x);
#elif defined(__aarch64__)
  return (Ints)vcvtnq_s32_f32(x);
#endif
}

// A vector of half-precision numbers.
inline Floats halves(const void* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(__mmask16(-1), load<__m256i>(from));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
  return vcvt_f32_f16(load<float16x4_t>(from));
#endif
}

// The half-precision number that is `x`, exactly; others become one of its neighbours.
inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const __fp16 half = static_cast<__fp16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#endif
}

inline Floats widen(Halves bf16) { return (Floats)(widened(bf16) << 16); }
inline float widen(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// To nearest, ties to even, as PyTorch does; every NaN becomes the same one.
inline Halves to_bf16(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Words is_nan = (Words)(x != x);
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0u), Halves);
}
// The same of numbers from 2 ** -126 on, and of 0.
inline Halves to_bf16_unless_tiny(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh(x);
#else
  return to_bf16(x);
#endif
}
// The numbers of both, one vector behind the other.
inline Words to_bf16_unless_tiny(Floats first, Floats second) {
#if defined(__AVX512BF16__)
  return (Words)_mm512_cvtne2ps_pbh(second, first);
#else
  const Halves both[] = {to_bf16_unless_tiny(first), to_bf16_unless_tiny(second)};
  return load<Words>(both);
#endif
}
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
inline void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }  // not nearest

inline void prefetch_to_store(const void* address) { __builtin_prefetch(address, 1, 3); }

// Wait for these bytes, line by line.
inline void touch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    asm volatile("" : : "r"(static_cast<const char*>(from)[at]));
  }
}

// Let some cycles go by while waiting for another thread.
inline void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb");  // `yield` does nothing on most processors
#endif
}

}  // namespace outdraft
