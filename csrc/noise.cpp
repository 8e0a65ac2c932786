// Philox and Gumbel noise: integers, and float64 operations that IEEE 754 fixes.
//
// Eight (or four, or two) blocks of Philox run side by side, one in each 64-bit lane. A lane keeps
// its word in the lower half; the product reads that half alone, so nothing is masked in between.

#include "noise.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "export.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outdraft {
namespace {

constexpr uint64_t kLow = 0xFFFFFFFF;
constexpr uint64_t kMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kWeyl[2] = {0x9E3779B9, 0xBB67AE85};
constexpr int kRounds = 10;

constexpr double kLn2 = 0.6931471805599453;
constexpr double kSqrt2 = 1.4142135623730951;
constexpr int kFractionBits = 52;
constexpr uint64_t kFraction = (uint64_t{1} << kFractionBits) - 1;
constexpr uint64_t kOneBits = uint64_t{1023} << kFractionBits;
constexpr uint64_t kTwo52Bits = uint64_t{1023 + 52} << kFractionBits;  // its low bits count ones

// The lower halves of the lanes times a number of 32 bits: whole products.
#if defined(__AVX512F__)
using Longs = uint64_t __attribute__((vector_size(64)));
inline Longs product(Longs x, uint64_t number) {
  const __m512i numbers = _mm512_set1_epi64(static_cast<int64_t>(number));
  return (Longs)_mm512_maskz_mul_epu32(0xFF, (__m512i)x, numbers);  // unmasked: gcc 12 warns
}
#elif defined(__AVX2__)
using Longs = uint64_t __attribute__((vector_size(32)));
inline Longs product(Longs x, uint64_t number) {
  return (Longs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(static_cast<int64_t>(number)));
}
#else
using Longs = uint64_t __attribute__((vector_size(16)));
inline Longs product(Longs x, uint64_t number) { return (x & kLow) * number; }
#endif
constexpr int64_t kBlocks = sizeof(Longs) / sizeof(uint64_t);
constexpr int64_t kWords = 4 * kBlocks;

// Writes the lanes of both in turn.
template <int... kLanes>
void store_in_turn(Longs a, Longs b, uint32_t* words, std::integer_sequence<int, kLanes...>) {
  const Longs in_turn[2] = {
      __builtin_shufflevector(a, b, (kLanes / 2 + kLanes % 2 * kBlocks)...),
      __builtin_shufflevector(a, b, ((kLanes + kBlocks) / 2 + kLanes % 2 * kBlocks)...)};
  std::memcpy(words, in_turn, sizeof in_turn);
}

// The words of kBlocks blocks, in the order of their ids.
void fill_blocks(const NoiseKey& key, int64_t block, uint32_t* words) {
  Longs x0, x1 = Longs{} + static_cast<uint64_t>(key.position);
  for (int64_t lane = 0; lane < kBlocks; ++lane) x0[lane] = static_cast<uint64_t>(block + lane);
  Longs x2 = Longs{} + static_cast<uint64_t>(key.anchor);
  Longs x3 = Longs{} + static_cast<uint64_t>(key.purpose);
  auto k0 = static_cast<uint32_t>(key.seed);
  auto k1 = static_cast<uint32_t>(static_cast<uint64_t>(key.seed) >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const Longs product0 = product(x0, kMultipliers[0]), product1 = product(x2, kMultipliers[1]);
    x0 = (product1 >> 32) ^ x1 ^ uint64_t{k0};
    x2 = (product0 >> 32) ^ x3 ^ uint64_t{k1};
    x1 = product1;
    x3 = product0;
    k0 += kWeyl[0];
    k1 += kWeyl[1];
  }
  store_in_turn((x0 & kLow) | (x1 << 32), (x2 & kLow) | (x3 << 32), words,
                std::make_integer_sequence<int, kBlocks>{});
}

// Written without branches and conversions from integers, so that loops over it vectorise.
inline double logarithm(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  auto fraction = std::bit_cast<double>((bits & kFraction) | kOneBits);
  auto exponent = std::bit_cast<double>((bits >> kFractionBits) | kTwo52Bits) - (0x1p52 + 1023.0);
  const bool is_large = fraction > kSqrt2;
  exponent = is_large ? exponent + 1.0 : exponent;
  fraction = is_large ? fraction * 0.5 : fraction;
  // log((1 + s) / (1 - s)) / s as a series in s * s, for |s| < 0.172.
  const double s = (fraction - 1.0) / (fraction + 1.0);
  const double square = s * s;
  double series = 2.0 / 13;
  for (int divisor = 11; divisor > 0; divisor -= 2) {
    series = series * square;
    series = series + 2.0 / divisor;
  }
  return exponent * kLn2 + s * series;
}

// All 32 bits, in float64, so that even the rarest token of a large vocabulary gets its share.
inline float noise_of(uint32_t word) {
  const double u = (std::bit_cast<double>(word | kTwo52Bits) - 0x1p52 + 0.5) * 0x1p-32;
  return static_cast<float>(-logarithm(-logarithm(u)));
}

}  // namespace

void fill_words(const NoiseKey& key, int64_t first, int64_t count, uint32_t* words) {
  const int64_t block = first / 4;
  int64_t at = 0;
  for (; at + kWords <= count; at += kWords) fill_blocks(key, block + at / 4, words + at);
  if (at == count) return;
  uint32_t last[kWords];
  fill_blocks(key, block + at / 4, last);
  std::memcpy(words + at, last, static_cast<size_t>(count - at) * sizeof(uint32_t));
}

float uniform_scalar(const NoiseKey& key) {
  uint32_t word;
  fill_words(key, 0, 1, &word);
  // 23 bits and a half fit into float32's 24, so that nothing rounds to 1.
  return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
}

double log_of(double x) { return logarithm(x); }

float gumbel(uint32_t word) { return noise_of(word); }

}  // namespace outdraft

// Gumbel noise of whole rows [num_rows, size]; the keys are those of kernels/torch/noise.py.
OUTDRAFT_EXPORT void fill_gumbel(int64_t num_rows, int64_t size, const int64_t* seeds,
                                 const int64_t* positions, const int64_t* anchors,
                                 const int64_t* purposes, float* noise) {
  constexpr int64_t kChunk = 1024;  // words that stay in the nearest cache
  uint32_t words[kChunk];
  for (int64_t row = 0; row < num_rows; ++row) {
    const outdraft::NoiseKey key{seeds[row], positions[row], anchors[row],
                                 static_cast<outdraft::Purpose>(purposes[row])};
    for (int64_t first = 0; first < size; first += kChunk) {
      const int64_t count = std::min(kChunk, size - first);
      outdraft::fill_words(key, first, count, words);
      for (int64_t at = 0; at < count; ++at) *noise++ = outdraft::noise_of(words[at]);
    }
  }
}

OUTDRAFT_FUNCTIONS(fill_gumbel);
