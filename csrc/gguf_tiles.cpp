// Products of rows of 16-bit integers with weights in blocks: see gguf_tiles.h.
//
// All rows meet a piece of a tile, of 128 or 256 inputs, while it is in the nearest cache. Kernels differ by how codes lie
// (planes, signs, the size of groups), not by kind: factors and offsets of the groups are computed
// for a piece first, in float32, the same on every machine.

#include "gguf_tiles.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tile_words.h"

namespace outdraft {
namespace {

// Sums that fit the registers beside the codes: vectors of outputs by rows.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
constexpr int vectors_of(int64_t) { return 2; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 4;
constexpr int vectors_of(int64_t num_rows) { return num_rows <= 2 ? 4 : 2; }
#else
constexpr int kMaxRows = 5;
constexpr int vectors_of(int64_t) { return 4; }
#endif

// How codes lie in a chunk; what numbers they are.
enum class Codes { kUnsigned, kSigned, kIq4 };
template <int kLow, int kHigh, int kGroup, Codes kCodes>
struct Planes {
  static constexpr int kLowBits = kLow, kHighBits = kHigh, kGroupInputs = kGroup;
  static constexpr int kGroupQuads = kGroup / 4;

  // The numbers of two inputs of a quad, its first and third one or, if `kOdd`, the two others: pairs
  // of 16-bit integers for a vector of outputs. `lanes`: of the chunk.
  template <int kQuad, bool kOdd>
  OUTDRAFT_INLINE static Words pair(const char* lanes) {
    if constexpr (kLow == 8) {
      return signed_pair<kOdd>(load<Words>(lanes + kQuad * kPlaneStep));
    } else if constexpr (kCodes == Codes::kIq4) {
      const Words codes = bits_of<kLow, kQuad, false, 0>(lanes) | bits_of<kLow, kQuad, true, 8>(lanes);
      return signed_pair<kOdd>(iq4_numbers(codes));
    } else {
      Words codes = bits_of<kLow, kQuad, kOdd, 0>(lanes);
      if constexpr (kHigh > 0) {
        codes |= bits_of<kHigh, kQuad, kOdd, kLow>(lanes + kLow * kPlaneStep);
      }
      return codes;
    }
  }

 private:
  // The bits of a plane, each pair's moved up to bit `kTo`.
  template <int kBits, int kQuad, bool kOdd, int kTo>
  OUTDRAFT_INLINE static Words bits_of(const char* plane) {
    constexpr int kQuads = 8 / kBits, kFrom = kBits * (kQuad % kQuads) + (kOdd ? 8 : 0);
    constexpr uint16_t kMask = ((1 << kBits) - 1) << kTo;
    const auto all = load<WordHalves>(plane + kQuad / kQuads * kPlaneStep);
    if constexpr (kFrom >= kTo) {
      return (Words)(all >> (kFrom - kTo) & kMask);
    } else {
      return (Words)(all << (kTo - kFrom) & kMask);
    }
  }

  template <bool kOdd>
  OUTDRAFT_INLINE static Words signed_pair(Words bytes) {
    typedef int16_t WordShorts __attribute__((vector_size(4 * kWidth)));
    if constexpr (kOdd) return (Words)((WordShorts)bytes >> 8);
    return (Words)((WordShorts)((WordHalves)bytes << 8) >> 8);
  }
};

constexpr int64_t kPieceInputs = 256;

// Some outputs of a piece and the rows that meet them.
struct Strip {
  const char* lanes;  // of the first chunk
  int64_t num_chunks, chunk_bytes;
  const char* ahead;  // what the cache fetches meanwhile
  int64_t ahead_bytes;  // a chunk; 0: nothing
  const uint32_t* x;
  int64_t x_stride;
  const float *x_sums, *x_steps;  // of each row's groups
  int64_t x_group_stride;
  const float *factors, *offsets;  // null: no offsets
  int32_t zero;
  float* out;  // [rows, kTile]; the products are added
};

template <int R>
using Sums = Ints[R][vectors_of(R)];

template <class Planes, int R, int kFirst, int... kQuads>
OUTDRAFT_INLINE void add_quads(const char* lanes, const uint32_t* x, int64_t stride, Sums<R>& sums,
                               std::integer_sequence<int, kQuads...>) {
  const auto add = [&](auto quad, auto odd) {
    constexpr int kQuad = kFirst + decltype(quad)::value, kOdd = decltype(odd)::value;
    Words pairs[vectors_of(R)];
    for (int v = 0; v < vectors_of(R); ++v) {
      pairs[v] = Planes::template pair<kQuad, kOdd>(lanes + v * 4 * kWidth);
    }
    for (int r = 0; r < R; ++r) {
      const Words a = broadcast_word(x[r * stride + 2 * kQuad + kOdd]);
      for (int v = 0; v < vectors_of(R); ++v) sums[r][v] = dot_shorts(sums[r][v], pairs[v], a);
    }
  };
  ((add(std::integral_constant<int, kQuads>(), std::integral_constant<int, 0>()),
    add(std::integral_constant<int, kQuads>(), std::integral_constant<int, 1>())),
   ...);
}

// The sum of a row's inputs over group `group` of the chunk, in steps.
template <class Planes>
OUTDRAFT_INLINE float group_sum(const float* x_sums, int64_t stride, int group, int row) {
  if constexpr (Planes::kGroupInputs == 16) return x_sums[group * stride + row];
  return x_sums[row] + x_sums[stride + row];
}

template <class Planes, int R, int kGroup>
OUTDRAFT_INLINE void add_group(const Strip& strip, const char* lanes, const uint32_t* x,
                               const float* x_sums, const float* x_steps, const float* factors,
                               const float* offsets) {
  constexpr int kVectors = vectors_of(R);
  Sums<R> sums;
  for (int r = 0; r < R; ++r) {
    const float sum = group_sum<Planes>(x_sums, strip.x_group_stride, kGroup, r);
    const Ints start = Ints{} - strip.zero * static_cast<int32_t>(sum);
    for (int v = 0; v < kVectors; ++v) sums[r][v] = start;
  }
  add_quads<Planes, R, kGroup * Planes::kGroupQuads>(
      lanes, x, strip.x_stride, sums, std::make_integer_sequence<int, Planes::kGroupQuads>());
  for (int r = 0; r < R; ++r) {
    const float step = x_steps[r];
    const float x_sum = group_sum<Planes>(x_sums, strip.x_group_stride, kGroup, r) * step;
    for (int v = 0; v < kVectors; ++v) {
      float* at = strip.out + r * kTile + v * kWidth;
      const Floats found = __builtin_convertvector(sums[r][v], Floats) * step;
      Floats total = fused(load<Floats>(factors + v * kWidth), found, load<Floats>(at));
      if (offsets != nullptr) {
        total = fused(load<Floats>(offsets + v * kWidth), broadcast(x_sum), total);
      }
      store(at, total);
    }
  }
}

template <class Planes, int R>
void multiply_strip(const Strip& strip) {
  const char *lanes = strip.lanes, *ahead = strip.ahead;
  const uint32_t* x = strip.x;
  const float *x_sums = strip.x_sums, *x_steps = strip.x_steps;
  const float *factors = strip.factors, *offsets = strip.offsets;
  for (int64_t c = 0; c < strip.num_chunks; ++c) {
    for (int64_t at = 0; at < strip.ahead_bytes; at += kLine) prefetch(ahead + at);
    add_group<Planes, R, 0>(strip, lanes, x, x_sums, x_steps, factors, offsets);
    factors += kTile;
    if (offsets != nullptr) offsets += kTile;
    if constexpr (Planes::kGroupInputs == 16) {
      add_group<Planes, R, 1>(strip, lanes, x, x_sums, x_steps, factors, offsets);
      factors += kTile;
      if (offsets != nullptr) offsets += kTile;
    }
    lanes += strip.chunk_bytes;
    ahead += strip.ahead_bytes;
    x += kChunkInputs / 2;
    x_sums += 2 * strip.x_group_stride;
    x_steps += strip.x_group_stride;
  }
}

// By the number of rows less one.
using StripCalls = std::array<void (*)(const Strip&), kMaxRows>;
template <class Planes, int... kRows>
constexpr StripCalls strip_calls(std::integer_sequence<int, kRows...>) {
  return {multiply_strip<Planes, kRows + 1>...};
}
template <int kLow, int kHigh, int kGroup, Codes kCodes = Codes::kUnsigned>
constexpr StripCalls kCalls = strip_calls<Planes<kLow, kHigh, kGroup, kCodes>>(
    std::make_integer_sequence<int, kMaxRows>());

const StripCalls& calls_of(GgufKind kind) {
  switch (kind) {
    case GgufKind::kQ4_0:
    case GgufKind::kQ4_1:
    case GgufKind::kQ4_K:
    case GgufKind::kInt4By32:
    case GgufKind::kInt4By128:
    case GgufKind::kInt4ZeroBy32:
    case GgufKind::kInt4ZeroBy128:
      return kCalls<4, 0, 32>;
    case GgufKind::kQ5_0:
    case GgufKind::kQ5_1:
    case GgufKind::kQ5_K:
      return kCalls<4, 1, 32>;
    case GgufKind::kQ8_0:
      return kCalls<8, 0, 32, Codes::kSigned>;
    case GgufKind::kQ2_K:
      return kCalls<2, 0, 16>;
    case GgufKind::kQ3_K:
      return kCalls<2, 1, 16>;
    case GgufKind::kQ6_K:
      return kCalls<4, 2, 16>;
    case GgufKind::kIq4Nl:
    case GgufKind::kIq4Xs:
      return kCalls<4, 0, 32, Codes::kIq4>;
  }
  __builtin_unreachable();
}

// Small integers of a vector of outputs.
Floats bytes_at(const char* from, bool is_signed) {
  const Ints numbers = widened(load<Bytes>(from));
  return __builtin_convertvector(is_signed ? numbers : numbers & 255, Floats);
}

}  // namespace

bool gguf_scales(const GgufTile& tile, const char* block, float* factors, float* offsets) {
  const GgufLayout& layout = tile.layout();
  const char* chunk = block + tile.halves_bytes() + layout.plane_bytes();
  const char* second = block + kTile * size_of(tile.scale_kind);
  const bool is_signed = layout.scales == Scales::kSignedBytes;
  const bool has_nibbles = layout.scales == Scales::kNibblesBesideMinima;
  for (int64_t first = 0; first < layout.block_inputs; first += kChunkInputs) {
    for (int64_t i = 0; i < layout.groups_of_chunk(); ++i, factors += kTile, offsets += kTile) {
      for (int64_t e = 0; e < kTile; e += kWidth) {
        const Floats d = scale_numbers(block, tile.scale_kind, e / kWidth);
        Floats m = {};
        if (layout.has_offset) m = scale_numbers(second, tile.scale_kind, e / kWidth);
        if (layout.scales == Scales::kNone) {
          store(factors + e, d);
          store(offsets + e, is_codes(tile.kind) ? d * m : m);
          continue;
        }
        const char* at = chunk + i * kTile + e;
        if (has_nibbles) {
          const Ints both = widened(load<Bytes>(at)) & 255;
          store(factors + e, d * __builtin_convertvector(both & 15, Floats));
          store(offsets + e, -(m * __builtin_convertvector(both >> 4, Floats)));
          continue;
        }
        store(factors + e, d * bytes_at(at, is_signed));
        if (layout.has_minima) store(offsets + e, -(m * bytes_at(at + layout.scale_bytes(), false)));
      }
    }
    chunk += layout.chunk_bytes();
  }
  return layout.has_offset;
}

void multiply_gguf(const LinearWeights& weights, const Inputs& x, int64_t num_rows, int64_t tile,
                   float* sums) {
  const GgufTile own = gguf_tile(weights, tile);
  const GgufLayout& layout = own.layout();
  const StripCalls& calls = calls_of(own.kind);
  const int64_t row_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const bool is_small = layout.block_inputs == kChunkInputs;
  const int64_t piece_inputs = is_small ? kPieceInputs : layout.block_inputs;
  const int64_t end_input = padded_inputs(weights);
  float factors[kMostGroups * kTile], offsets[kMostGroups * kTile];
  std::memset(sums, 0, sizeof(float) * num_rows * kTile);
  Strip strip;
  strip.chunk_bytes = is_small ? own.block_bytes() : layout.chunk_bytes();
  strip.x_stride = x.stride;
  strip.x_group_stride = x.group_stride;
  strip.zero = layout.zero;
  const char* block = own.at;
  for (int64_t first = 0; first < end_input; first += piece_inputs) {
    const int64_t num_inputs = std::min(piece_inputs, end_input - first);
    const int64_t chunk = first / kChunkInputs;
    strip.num_chunks = num_inputs / kChunkInputs;
    strip.ahead = block + kAhead;
    const char* lanes = block + own.halves_bytes();
    bool adds = false;
    for (int64_t at = 0; at < num_inputs; at += layout.block_inputs) {
      const int64_t group = at / layout.group_inputs * kTile;
      adds = gguf_scales(own, block, factors + group, offsets + group);
      block += own.block_bytes();
    }
    for (int64_t rows = 0, r = 0; rows < row_blocks; ++rows) {
      const int64_t end = num_rows * (rows + 1) / row_blocks;  // of about equal size
      const int64_t strip_outputs = vectors_of(end - r) * kWidth;
      strip.x = static_cast<const uint32_t*>(x.rows) + r * x.stride + first / 2;
      strip.x_sums = x.sums + 2 * chunk * x.group_stride + r;
      strip.x_steps = x.steps + chunk * x.group_stride + r;
      // Each strip fetches its share: memory never stands still.
      strip.ahead_bytes = r == 0 ? strip.chunk_bytes * strip_outputs / kTile : 0;
      for (int64_t e = 0; e < kTile; e += strip_outputs) {
        strip.lanes = lanes + 4 * e;
        strip.factors = factors + e;
        strip.offsets = adds ? offsets + e : nullptr;
        strip.out = sums + r * kTile + e;
        calls[end - r - 1](strip);
        strip.ahead += strip.ahead_bytes * strip.num_chunks;
      }
      r = end;
    }
  }
}

}  // namespace outdraft
