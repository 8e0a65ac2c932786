// Products of rows of 8-bit integers with weights in blocks: see gguf_tiles.h.
//
// A block of 256 inputs adds integers until its end: the products of codes, times the scales of their
// groups, and the sums of the row's groups, times their minima. These sums are exact. Only d and dmin
// are float32 numbers, and meet them once a block. So every machine has the same bits. Smaller blocks,
// of 32 or 128 inputs, have d and m, or a scale and a shift, but no scales of groups and no minima.
//
// Machines differ by the instruction that multiplies bytes. Some add the products of four to a sum
// of 32 bits; others those of two to one of 16 bits, in which so many quads are added as fit.

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gguf_tiles.h"
#include "tile_words.h"

namespace outdraft {
namespace {

constexpr int64_t kPieceInputs = 256;
constexpr int32_t kMostByte = 127;  // of a row

// Sums that fit the registers: vectors of outputs by rows.
constexpr int kMaxRows = 8;
#if defined(__AVX512F__)
constexpr int vectors_of(int64_t num_rows) { return num_rows <= 4 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int vectors_of(int64_t num_rows) { return num_rows <= 2 ? 4 : num_rows <= 4 ? 2 : 1; }
#else
constexpr int vectors_of(int64_t num_rows) { return num_rows <= 4 ? 4 : 2; }
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasByteDots = true;
#else
constexpr bool kHasByteDots = false;
#endif
// Instructions that multiply unsigned codes only meet signed ones with 128 added.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int32_t kSignedZero = 128;
#else
constexpr int32_t kSignedZero = 0;
#endif

// The sums of a group, or of a part of one: 32-bit integers, or pairs of 16-bit ones.
using QuadSums = std::conditional_t<kHasByteDots, Ints, Words>;

// sums + the products of the bytes of each quad; without sums where kIsFirst. 16-bit sums are those
// of two bytes each.
template <bool kIsSigned, bool kIsFirst>
OUTDRAFT_INLINE QuadSums add_quads(QuadSums sums, Words codes, Words x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#elif defined(__AVX512BW__)
  __m512i a = (__m512i)codes, b = (__m512i)x;
  if constexpr (kIsSigned) {
    b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), __m512i{}, b);
    a = _mm512_abs_epi8(a);
  }
  return (Words)((WordHalves)sums + (WordHalves)_mm512_maddubs_epi16(a, b));
#elif defined(__AVX2__)
  if constexpr (kIsSigned) {
    x = (Words)_mm256_sign_epi8((__m256i)x, (__m256i)codes);
    codes = (Words)_mm256_abs_epi8((__m256i)codes);
  }
  // A compiler would add products to each other first, and put them into memory until then.
  Words products;
  if constexpr (kIsFirst) {
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(codes), "x"(x));
    return products;
  }
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sums), "=&x"(products)
      : "x"(codes), "x"(x));
  return sums;
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)x);
#endif
}

// total + scales * sums. 16-bit sums meet 16-bit scales, each twice.
OUTDRAFT_INLINE Ints add_scaled(Ints total, QuadSums sums, Ints scales) {
  if constexpr (kHasByteDots) {
    return total + (Ints)sums * scales;
  } else {
    return dot_shorts(total, (Words)sums, (Words)scales);
  }
}

// Two small integers of each output, as halves of its word.
OUTDRAFT_INLINE Ints pairs_of(Ints low, Ints high) { return (low & 0xFFFF) | high << 16; }

constexpr int32_t most_code(GgufKind kind) {
  if (kind == GgufKind::kQ8_0) return 128;
  if (kind == GgufKind::kIq4Nl || kind == GgufKind::kIq4Xs) return 127;
  return (1 << (layout_of(kind).low_bits + layout_of(kind).high_bits)) - 1;
}

template <GgufKind kKind>
struct Blocks {
  static constexpr GgufLayout kLayout = layout_of(kKind);
  static constexpr int kChunks = kLayout.block_inputs / kChunkInputs;
  static constexpr int kGroupsOfChunk = kLayout.groups_of_chunk();
  static constexpr int kGroupQuads = kLayout.group_inputs / 4;
  static constexpr bool kIsIq4 = kKind == GgufKind::kIq4Nl || kKind == GgufKind::kIq4Xs;
  static constexpr bool kIsSigned = kIsIq4 || kKind == GgufKind::kQ8_0;
  static constexpr bool kIsCodes = is_codes(kKind);
  static constexpr int32_t kZero = kIsSigned ? kSignedZero : kLayout.zero;
  // That are added before a sum meets its scale.
  static constexpr int kSumQuads =
      kHasByteDots ? kGroupQuads
                   : std::min<int>(kGroupQuads, 32767 / (2 * kMostByte * most_code(kKind)));
  static constexpr int kSums = kGroupQuads / kSumQuads;

  // The codes of a vector of outputs, as bytes. `lanes`: theirs of the chunk's first plane.
  template <int kQuad>
  OUTDRAFT_INLINE static Words codes(const char* lanes) {
    Words codes = bits_of<kLayout.low_bits, kQuad, 0>(lanes);
    if constexpr (kLayout.high_bits > 0) {
      codes |= bits_of<kLayout.high_bits, kQuad, kLayout.low_bits>(
          lanes + kLayout.low_bits * kPlaneStep);
    }
    if constexpr (kIsIq4) codes = iq4_numbers(codes);
    if constexpr (kIsSigned && kSignedZero != 0) codes ^= 0x80808080;
    return codes;
  }

  // The scales of a group, for a vector of outputs. `at`: theirs after the planes of its chunk.
  OUTDRAFT_INLINE static Ints scales(const char* at, int group) {
    const Ints bytes = widened(load<Bytes>(at + group * kTile));
    if constexpr (kLayout.scales == Scales::kNibblesBesideMinima) return bytes & 15;
    return kLayout.scales == Scales::kBytes ? bytes & 255 : bytes;
  }

  // What meets the sums of a row's groups: minima, or the scales of codes above a zero.
  OUTDRAFT_INLINE static Ints minima(const char* at, int group) {
    if constexpr (kLayout.scales == Scales::kNibblesBesideMinima) {
      return widened(load<Bytes>(at + group * kTile)) >> 4 & 15;
    }
    if constexpr (kLayout.has_minima) {
      return widened(load<Bytes>(at + kLayout.scale_bytes() + group * kTile)) & 255;
    }
    return scales(at, group);
  }

 private:
  template <int kBits, int kQuad, int kTo>
  OUTDRAFT_INLINE static Words bits_of(const char* plane) {
    constexpr int kQuads = 8 / kBits, kFrom = kBits * (kQuad % kQuads);
    const Words all = load<Words>(plane + kQuad / kQuads * kPlaneStep);
    if constexpr (kBits == 8) return all;
    constexpr uint32_t kMask = 0x01010101u * (((1u << kBits) - 1) << kTo);
    return (kFrom >= kTo ? all >> (kFrom - kTo) : all << (kTo - kFrom)) & kMask;
  }
};

// Some outputs of a piece and the rows that meet them.
struct Strip {
  const char* block;    // the first one of the tile
  int64_t block_bytes, halves_bytes, block_chunks;
  ScaleKind scale_kind;
  int64_t first;        // output
  int64_t num_chunks;
  const char* ahead;    // what the cache fetches meanwhile
  int64_t ahead_bytes;  // a chunk; 0: nothing
  const uint32_t *x, *x_sums;  // a row's quads; the sums of its groups, two a word
  int64_t x_stride;
  const float* x_steps;
  int64_t step_chunks;
  float* out;  // [rows, kTile]; the products are added
};

template <int R>
using Totals = Ints[R][vectors_of(R)];

template <class Blocks, int R, int kFirst, int... kQuads>
OUTDRAFT_INLINE void sum_quads(const char* lanes, const uint32_t* x, int64_t stride,
                               QuadSums (&sums)[R][vectors_of(R)],
                               std::integer_sequence<int, kQuads...>) {
  const auto add = [&](auto quad) __attribute__((always_inline)) {
    constexpr int kQuad = kFirst + decltype(quad)::value;
    Words codes[vectors_of(R)];
    for (int v = 0; v < vectors_of(R); ++v) {
      codes[v] = Blocks::template codes<kQuad>(lanes + v * 4 * kWidth);
    }
    for (int r = 0; r < R; ++r) {
      const Words a = broadcast_word(x[r * stride + kQuad]);
      for (int v = 0; v < vectors_of(R); ++v) {
        sums[r][v] =
            add_quads<Blocks::kIsSigned, decltype(quad)::value == 0>(sums[r][v], codes[v], a);
      }
    }
  };
  (add(std::integral_constant<int, kQuads>()), ...);
}

// totals += the products of a group. `scales`: of the chunk, or null: there are none.
template <class Blocks, int R, int kGroup, int... kSums>
OUTDRAFT_INLINE void add_group(const char* lanes, const char* scales, const uint32_t* x,
                               int64_t stride, Totals<R>& totals,
                               std::integer_sequence<int, kSums...>) {
  constexpr int kVectors = vectors_of(R);
  Ints factors[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const Ints own = scales == nullptr ? Ints{} + 1 : Blocks::scales(scales + v * kWidth, kGroup);
    factors[v] = kHasByteDots ? own : pairs_of(own, own);
  }
  const auto add = [&](auto part) __attribute__((always_inline)) {
    constexpr int kFirst = kGroup * Blocks::kGroupQuads + decltype(part)::value * Blocks::kSumQuads;
    QuadSums sums[R][kVectors] = {};
    sum_quads<Blocks, R, kFirst>(lanes, x, stride, sums,
                                 std::make_integer_sequence<int, Blocks::kSumQuads>());
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        totals[r][v] = add_scaled(totals[r][v], sums[r][v], factors[v]);
      }
    }
  };
  (add(std::integral_constant<int, kSums>()), ...);
}

// A block of 256 inputs.
template <class Blocks, int R>
void multiply_large(const Strip& strip) {
  constexpr int kVectors = vectors_of(R);
  constexpr GgufLayout kLayout = Blocks::kLayout;
  constexpr auto kSums = std::make_integer_sequence<int, Blocks::kSums>();
  constexpr bool kHasTwoGroups = Blocks::kGroupsOfChunk == 2;
  const char* const first_chunk = strip.block + kLayout.halves_bytes();
  const char *chunk = first_chunk, *ahead = strip.ahead;
  const uint32_t* x = strip.x;
  Totals<R> totals = {}, below = {};
  for (int c = 0; c < Blocks::kChunks; ++c) {
    for (int64_t at = 0; at < strip.ahead_bytes; at += kLine) prefetch(ahead + at);
    const char *lanes = chunk + 4 * strip.first, *scales = chunk + kLayout.plane_bytes() + strip.first;
    add_group<Blocks, R, 0>(lanes, scales, x, strip.x_stride, totals, kSums);
    if constexpr (kHasTwoGroups) {
      add_group<Blocks, R, 1>(lanes, scales, x, strip.x_stride, totals, kSums);
    }
    chunk += kLayout.chunk_bytes();
    ahead += strip.ahead_bytes;
    x += kChunkInputs / 4;
  }
  if constexpr (kLayout.has_offset || Blocks::kZero != 0) {
    const char* at = first_chunk + kLayout.plane_bytes() + strip.first;
    constexpr int kPairs = Blocks::kChunks * Blocks::kGroupsOfChunk / 2;
    for (int pair = 0; pair < kPairs; ++pair) {
      const char* second = kHasTwoGroups ? at + kTile : at + kLayout.chunk_bytes();
      Words minima[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        minima[v] = (Words)pairs_of(Blocks::minima(at + v * kWidth, 0),
                                    Blocks::minima(second + v * kWidth, 0));
      }
      for (int r = 0; r < R; ++r) {
        const Words sums = broadcast_word(strip.x_sums[r * strip.x_stride + pair]);
        for (int v = 0; v < kVectors; ++v) below[r][v] = dot_shorts(below[r][v], minima[v], sums);
      }
      at += (kHasTwoGroups ? 1 : 2) * kLayout.chunk_bytes();
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t output = strip.first + v * kWidth;
    const Floats d = halves(strip.block + 2 * output);
    Floats offsets = {};
    if constexpr (kLayout.has_offset) offsets = -halves(strip.block + 2 * (kTile + output));
    for (int r = 0; r < R; ++r) {
      const float step = strip.x_steps[r * strip.x_stride];
      float* to = strip.out + r * kTile + v * kWidth;
      Ints total = totals[r][v];
      if constexpr (Blocks::kZero != 0) total -= below[r][v] * Blocks::kZero;
      Floats sum = fused(d, __builtin_convertvector(total, Floats) * step, load<Floats>(to));
      if constexpr (kLayout.has_offset) {
        sum = fused(offsets, __builtin_convertvector(below[r][v], Floats) * step, sum);
      }
      store(to, sum);
    }
  }
}

// Blocks of 32 inputs; those of codes have 32 or 128.
template <class Blocks, int R>
void multiply_small(const Strip& strip) {
  constexpr int kVectors = vectors_of(R);
  constexpr GgufLayout kLayout = Blocks::kLayout;
  constexpr bool kIsCodes = Blocks::kIsCodes;
  constexpr uint32_t kFactor = Blocks::kZero == 0 || kLayout.has_offset ? 1 : Blocks::kZero;
  const int64_t block_chunks = kIsCodes ? strip.block_chunks : 1;
  const int64_t halves_bytes = kIsCodes ? strip.halves_bytes : kLayout.halves_bytes();
  const int64_t block_bytes = kIsCodes ? strip.block_bytes : kLayout.tile_block_bytes();
  const ScaleKind scale_kind = kIsCodes ? strip.scale_kind : ScaleKind::kFloat16;
  const int64_t scale_bytes = size_of(scale_kind);
  const char *block = strip.block, *ahead = strip.ahead;
  const uint32_t* x = strip.x;
  const float* x_steps = strip.x_steps;
  for (int64_t c = 0; c < strip.num_chunks; c += block_chunks) {
    const char* lanes = block + halves_bytes + 4 * strip.first;
    Totals<R> totals = {};
    for (int64_t chunk = 0; chunk < block_chunks; ++chunk) {
      for (int64_t at = 0; at < strip.ahead_bytes; at += kLine) prefetch(ahead + at);
      add_group<Blocks, R, 0>(lanes, nullptr, x, strip.x_stride, totals,
                              std::make_integer_sequence<int, Blocks::kSums>());
      lanes += kLayout.chunk_bytes();
      ahead += strip.ahead_bytes;
      x += kChunkInputs / 4;
    }
    // A row's sums lie in pairs; one alone is beside that of a neighbour. They are multiplied by 1 or by
    // the zero.
    const Words place = broadcast_word(block_chunks == 1 ? kFactor << (c % 2 * 16) : kFactor * 0x10001);
    Floats d[kVectors], offsets[kVectors];
    const char* scales = block + strip.first * scale_bytes;
    for (int v = 0; v < kVectors; ++v) {
      d[v] = scale_numbers(scales, scale_kind, v);
      if constexpr (kLayout.has_offset) {
        offsets[v] = scale_numbers(scales + kTile * scale_bytes, scale_kind, v);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Floats step = broadcast(x_steps[r * strip.x_stride]);
      const uint32_t* x_sums = strip.x_sums + r * strip.x_stride + c / 2;
      Ints x_sum = dot_shorts(Ints{}, broadcast_word(x_sums[0]), place);
      for (int64_t pair = 1; pair < block_chunks / 2; ++pair) {
        x_sum = dot_shorts(x_sum, broadcast_word(x_sums[pair]), place);
      }
      for (int v = 0; v < kVectors; ++v) {
        float* to = strip.out + r * kTile + v * kWidth;
        Ints total = totals[r][v];
        if constexpr (Blocks::kZero != 0) total -= x_sum * static_cast<int32_t>(Blocks::kZero / kFactor);
        Floats product = __builtin_convertvector(total, Floats);
        if constexpr (kLayout.has_offset && kIsCodes) {
          product = d[v] * fused(offsets[v], __builtin_convertvector(x_sum, Floats), product);
        } else {
          product = d[v] * product;
        }
        if constexpr (kLayout.has_offset && !kIsCodes) {
          product = fused(offsets[v], __builtin_convertvector(x_sum, Floats), product);
        }
        store(to, fused(product, step, load<Floats>(to)));
      }
    }
    if (strip.step_chunks == block_chunks) ++x_steps;  // else all have one
    block += block_bytes;
  }
}

// By the number of rows less one.
using StripCalls = std::array<void (*)(const Strip&), kMaxRows>;
template <GgufKind kKind, int... kRows>
constexpr StripCalls strip_calls(std::integer_sequence<int, kRows...>) {
  if constexpr (is_codes(kKind) && layout_of(kKind).block_inputs > kChunkInputs) {
    constexpr auto kBy32 = static_cast<GgufKind>(static_cast<int64_t>(kKind) - 1);
    return {multiply_small<Blocks<kBy32>, kRows + 1>...};  // they lie alike
  } else if constexpr (layout_of(kKind).block_inputs == kChunkInputs) {
    return {multiply_small<Blocks<kKind>, kRows + 1>...};
  } else {
    return {multiply_large<Blocks<kKind>, kRows + 1>...};
  }
}
template <int... kKinds>
constexpr std::array<StripCalls, kNumGgufKinds> all_calls(std::integer_sequence<int, kKinds...>) {
  return {strip_calls<GgufKind{kKinds}>(std::make_integer_sequence<int, kMaxRows>())...};
}
constexpr auto kCalls = all_calls(std::make_integer_sequence<int, kNumGgufKinds>());

}  // namespace

void multiply_gguf_bytes(const LinearWeights& weights, const Inputs& x, int64_t num_rows,
                         int64_t tile, float* sums) {
  const GgufTile own = gguf_tile(weights, tile);
  const GgufLayout& layout = own.layout();
  const StripCalls& calls = kCalls[static_cast<size_t>(own.kind)];
  const ByteRow row = byte_row(weights);
  const auto* rows = static_cast<const uint32_t*>(x.rows);
  const int64_t row_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  std::memset(sums, 0, sizeof(float) * num_rows * kTile);
  Strip strip;
  strip.x_stride = x.stride;
  strip.step_chunks = row.step_inputs / kChunkInputs;
  strip.block = own.at;
  strip.block_bytes = own.block_bytes();
  strip.halves_bytes = own.halves_bytes();
  strip.block_chunks = layout.block_inputs / kChunkInputs;
  strip.scale_kind = own.scale_kind;
  const int64_t chunk_bytes = strip.block_bytes * kChunkInputs / layout.block_inputs;
  for (int64_t first = 0; first < row.num_inputs; first += kPieceInputs) {
    const int64_t num_inputs = std::min(kPieceInputs, row.num_inputs - first);
    strip.num_chunks = num_inputs / kChunkInputs;
    strip.ahead = strip.block + kAhead;
    for (int64_t block = 0, r = 0; block < row_blocks; ++block) {
      const int64_t end = num_rows * (block + 1) / row_blocks;  // of about equal size
      const uint32_t* from = rows + r * x.stride;
      strip.x = from + first / 4;
      strip.x_sums = from + row.sums_of(layout.group_inputs) + first / (2 * layout.group_inputs);
      strip.x_steps = reinterpret_cast<const float*>(from + row.steps()) + first / row.step_inputs;
      const int64_t strip_outputs = vectors_of(end - r) * kWidth;
      // Each strip fetches its share: memory never stands still.
      strip.ahead_bytes = r == 0 ? chunk_bytes * strip_outputs / kTile : 0;
      for (strip.first = 0; strip.first < kTile; strip.first += strip_outputs) {
        strip.out = sums + r * kTile + strip.first;
        calls[end - r - 1](strip);
        strip.ahead += strip.ahead_bytes * strip.num_chunks;
      }
      r = end;
    }
    strip.block += num_inputs / layout.block_inputs * strip.block_bytes;
  }
}

}  // namespace outdraft
