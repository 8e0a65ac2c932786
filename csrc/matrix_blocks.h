// Blocks of a tile as matrix registers load them: 32 inputs of its 32 outputs, 16 steps of pairs of
// bfloat16. See linear_tiles.cpp and linear_amx.cpp for the tiles.
//
// bfloat16 blocks are read as they lie. Quantised blocks are decoded, each once, some time before
// they are asked for: what was just written cannot be loaded at once.
//
// A core waits for memory on few lines of its nearest cache, so most of what is read has to be
// underway to the second one: the hardware sees to that where lines are asked for shortly before
// they are read. It stops at the end of a page, and a decoder asks for little at a time: it fetches
// what lies behind the page for the second cache, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx.h"
#include "simd.h"
#include "tile_words.h"

namespace outdraft {

constexpr int64_t kBlockInputs = 2 * kMatrixRows;
constexpr int64_t kBlockBytes = kMatrixRows * kStepBytes;  // of bfloat16
constexpr int64_t kBlockLines = kBlockBytes / kLine;
constexpr int64_t kNear = 1024;  // bytes ahead
constexpr int64_t kDecoderNear = 2048, kDecoderFar = 6144;  // for the nearest cache and the second
constexpr int64_t kEarlier = 1;  // blocks between one that is decoded and one that is met

// `at(block)` says where one lies; it is asked for all, in order. `fetch(block, half)` is called
// twice for each: memory is asked for a little at a time.

// Blocks as they lie in a tile.
struct Bf16Blocks {
  const char* tile;
  int64_t num_whole;
  const char* rest;     // a last block, filled with zeros
  int64_t first;        // of those that are met
  const char* ahead;    // what the caches fetch meanwhile, from the first block on
  int64_t ahead_lines;  // for each block
  bool is_soon;         // it goes to the nearest cache

  const char* at(int64_t block) const {
    return block < num_whole ? tile + block * kBlockBytes : rest;
  }

  void fetch(int64_t block, int64_t half) const {
    const char* from = ahead + (block - first) * ahead_lines * kLine;
    const int64_t end = half == 0 ? ahead_lines / 2 : ahead_lines;
    for (int64_t line = half == 0 ? 0 : ahead_lines / 2; line < end; ++line) {
      is_soon ? prefetch(from + line * kLine) : prefetch_far(from + line * kLine);
    }
  }
};

// The numbers of the codes 0 to 15, twice: q - 8.
alignas(64) constexpr uint16_t kInt4Numbers[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};

// The words of a step, see tile_words.h.
struct Int4Words {
  static constexpr int kInputs = 8, kLaneBytes = 4;
  template <int kPair>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    const Words codes = load<Words>(lanes) >> (4 * kPair);
    // By the low five bits of each half; the fifth is the next input's.
    return (Words)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kInt4Numbers));
  }
};

// A decoder makes the 32 words of a pair of inputs from a step of a tile.

// In the order of the outputs.
template <class Decoder>
struct DecodedWords {
  static constexpr int kInputs = Decoder::kInputs;
  static constexpr bool kTurnsOutputs = false;
  template <int kPair>
  OUTDRAFT_INLINE static void decode(const char* step, char* to) {
    for (int v = 0; v < kTile / kWidth; ++v) {
      const char* lanes = step + v * kWidth * Decoder::kLaneBytes;
      outdraft::store(to + v * sizeof(Words), Decoder::template pair<kPair>(lanes));
    }
  }
};

// The low or high bytes of the bfloat16 numbers 0 to 63.
struct ByteTable {
  alignas(64) uint8_t bytes[64] = {};

  constexpr explicit ByteTable(bool is_high) {
    for (int number = 1; number < 64; ++number) {
      int exponent = 0;
      while (number >> (exponent + 1) != 0) ++exponent;
      const int bits = (127 + exponent) << 7 | (number << (7 - exponent) & 0x7F);
      bytes[number] = static_cast<uint8_t>(is_high ? bits >> 8 : bits);
    }
  }
};
constexpr ByteTable kLowBytes{false}, kHighBytes{true};

// int8 codes from -127 on, in fewer instructions than conversions take: sizes below 64 are looked
// up; from there on the high byte is 0x42 and the low one twice the size. Low and high bytes are
// joined within quarters of a vector, so outputs come in another order: `put_in_order` undoes it.
struct DecodedInt8 {
  static constexpr int kInputs = 4;
  static constexpr bool kTurnsOutputs = true;
  template <int kPair>
  OUTDRAFT_INLINE static void decode(const char* step, char* to) {
    const __m512i codes = _mm512_loadu_si512(step + kPair * sizeof(Words));
    const __m512i sizes = _mm512_abs_epi8(codes);
    const __mmask64 is_small = _mm512_movepi8_mask(_mm512_sub_epi8(sizes, _mm512_set1_epi8(64)));
    const __m512i low = _mm512_mask_permutexvar_epi8(_mm512_add_epi8(sizes, sizes), is_small, sizes,
                                                     _mm512_load_si512(kLowBytes.bytes));
    const __m512i high = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8(0x42), is_small, sizes,
                                                      _mm512_load_si512(kHighBytes.bytes));
    constexpr int kFirstOrBoth = 0xF8;  // high | (codes & sign)
    const __m512i signs = _mm512_set1_epi8(-128);
    const __m512i signed_high = _mm512_ternarylogic_epi32(high, codes, signs, kFirstOrBoth);
    outdraft::store(to, _mm512_unpacklo_epi8(low, signed_high));
    outdraft::store(to + sizeof(Words), _mm512_unpackhi_epi8(low, signed_high));
  }
};

// Sums of the 32 outputs of `DecodedInt8`, in the order of the outputs.
inline void put_in_order(Floats& low, Floats& high) {
  const Floats first = low, second = high;
  low = __builtin_shufflevector(first, second, 0, 1, 2, 3, 16, 17, 18, 19,  //
                                4, 5, 6, 7, 20, 21, 22, 23);
  high = __builtin_shufflevector(first, second, 8, 9, 10, 11, 24, 25, 26, 27,  //
                                 12, 13, 14, 15, 28, 29, 30, 31);
}

template <class Decoder>
struct DecodedBlocks {
  static constexpr int64_t kSteps = kBlockInputs / Decoder::kInputs;  // of a block

  const char* tile;
  int64_t num_steps;
  char* decoded;
  int64_t num_kept;  // blocks that `decoded` has room for; a power of two
  int64_t end;       // no block from here on is decoded yet
  int64_t next = 0;  // to be decoded

  const char* at(int64_t block) {
    for (; next < std::min(block + kEarlier + 1, end); ++next) decode(next);
    return place(block);
  }

  void fetch(int64_t, int64_t) const {}

 private:
  static constexpr int64_t kStepDecoded = kBlockBytes / kSteps;

  char* place(int64_t block) const { return decoded + block % num_kept * kBlockBytes; }

  void decode(int64_t block) const {
    const char* from = tile + block * kSteps * kStepBytes;
    char* to = place(block);
    const int64_t steps = std::min(kSteps, num_steps - block * kSteps);
    for (int64_t step = 0; step < steps; ++step, from += kStepBytes) {
      for (int64_t byte = 0; byte < kStepBytes; byte += kLine) {
        prefetch_far(from + kDecoderFar + byte);
        prefetch(from + kDecoderNear + byte);
      }
      decode_step(from, to + step * kStepDecoded, std::make_index_sequence<Decoder::kInputs / 2>());
    }
    if (steps < kSteps) {  // behind the last input are zeros
      std::memset(to + steps * kStepDecoded, 0, (kSteps - steps) * kStepDecoded);
    }
  }

  template <size_t... kPairs>
  OUTDRAFT_INLINE static void decode_step(const char* step, char* to,
                                          std::index_sequence<kPairs...>) {
    (Decoder::template decode<kPairs>(step, to + kPairs * kStepBytes), ...);
  }
};

}  // namespace outdraft
