// Products of rows with one tile of weights: see linear_tiles.h.
//
// A tile holds 32 outputs, and of all inputs, step by step, what one instruction meets:
//   float32    a step is one input: 32 numbers
//   bfloat16   a step is two neighbouring inputs: 32 words, the even input in the low half
//   int8       a step is four inputs: twice 32 pairs of bytes
// int8 becomes bfloat16 pairs for dot products, exactly, before it is multiplied; else it is multiplied
// as integers of 16 bits, and rows are rounded to such (linear_tiles.h): the sums over a group of inputs,
// which share a scale, are exact. Rows of 8 bits would bring nothing: their products with codes of 8 bits
// take as many instructions without VNNI, and memory is the limit with it. Codes of 4 bits lie in blocks
// (gguf_tiles.h), or as matrix registers want them (linear_amx.cpp).
// Rows are copied one behind the other, and meet a tile in blocks whose sums fit the registers. With
// AVX2 a few blocks meet it piece by piece. The sum of an output runs over the inputs of a group, or
// over all, in order, in one register that begins with zero, or with what the pieces before left in
// memory, where a sum keeps all bits; groups, each times its scale, are added in order; then comes
// the bias. That order is the same for any number of rows, of threads, and any instruction set, but
// bfloat16 dot products round as the machine does, and matrix registers have an order of their own
// (linear_amx.cpp).
//
// Tiles of outputs by pairs of inputs are the layout of oneDNN's and llama.cpp's bfloat16 products.

#include "linear_tiles.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gguf_tiles.h"
#include "simd.h"
#include "tile_words.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kFetchingCalls = 8;  // that fetch a part of what comes each

// Sums that fit the registers: vectors of outputs by kMaxRows. With AVX2 one or two rows meet all
// outputs of a tile at once, so that memory is read in order.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
constexpr int vectors_of(int64_t) { return 2; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;
constexpr int vectors_of(int64_t num_rows) { return num_rows <= 2 ? 4 : 2; }
#else
constexpr int kMaxRows = 5;
constexpr int vectors_of(int64_t) { return 4; }
#endif

// A piece of a tile stays in the nearest cache, 8 KiB of its 32, while several calls meet it one
// after the other. They fetch what lies a few pieces ahead: memory is read in order, all the time.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kHasPieces = true;
constexpr int64_t kAheadAlone = 1024;  // bytes; hardware fetches what comes later
#else
constexpr bool kHasPieces = false;
constexpr int64_t kAheadAlone = kAhead;
#endif
constexpr int64_t kPieceSteps = 64;
constexpr int64_t kPieceAhead = 128;  // steps from the end of a piece to what is fetched
constexpr int64_t kPieceCalls = 24;  // at most: sums of more rows would push the piece out

template <class Sum, int R>
using Sums = Sum[R][vectors_of(R)];

// Adds one input, which has the weights `w`.
template <int R>
OUTDRAFT_INLINE void add_input(const Floats (&w)[vectors_of(R)], const float* x, int64_t stride,
                               Sums<Floats, R>& sums) {
  for (int r = 0; r < R; ++r) {
    const Floats a = broadcast(x[r * stride]);
    for (int v = 0; v < vectors_of(R); ++v) sums[r][v] = added(sums[r][v], w[v], a);
  }
}

// Each kernel adds one step, for the outputs of a strip, to the sums of R rows.

struct Float32Kernel {
  static constexpr bool kIsQuantised = false;
  using Number = float;  // of a row
  using Sum = Floats;
  static constexpr int kInputs = 1, kLaneBytes = 4, kRowNumbers = 1;
  template <int R>
  OUTDRAFT_INLINE static void add(const char* step, const float* x, int64_t stride,
                                  Sums<Floats, R>& sums) {
    Floats w[vectors_of(R)];
    for (int v = 0; v < vectors_of(R); ++v) w[v] = load<Floats>(step + v * sizeof(Floats));
    add_input<R>(w, x, stride, sums);
  }
};

// bfloat16 weights and float32 rows.
struct Bf16Kernel {
  static constexpr bool kIsQuantised = false;
  using Number = float;
  using Sum = Floats;
  static constexpr int kInputs = 2, kLaneBytes = 4, kRowNumbers = 2;
  template <int R>
  OUTDRAFT_INLINE static void add(const char* step, const float* x, int64_t stride,
                                  Sums<Floats, R>& sums) {
    constexpr int kVectors = vectors_of(R);
    Floats w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = low_halves(load<Words>(step + v * sizeof(Words)));
    add_input<R>(w, x, stride, sums);
    for (int v = 0; v < kVectors; ++v) w[v] = high_halves(load<Words>(step + v * sizeof(Words)));
    add_input<R>(w, x + 1, stride, sums);
  }
};

// Pairs of inputs: of bfloat16, for the machine's dot products, or of shorts.
template <class Decoder, bool kShorts>
struct PairKernel {
  static constexpr bool kIsQuantised = Decoder::kIsQuantised;
  using Number = uint32_t;
  using Sum = std::conditional_t<kShorts, Ints, Floats>;
  static constexpr int kInputs = Decoder::kInputs, kLaneBytes = Decoder::kLaneBytes;
  static constexpr int kRowNumbers = kInputs / 2;

  template <int R>
  OUTDRAFT_INLINE static void add(const char* step, const uint32_t* x, int64_t stride,
                                  Sums<Sum, R>& sums) {
    add_pairs<R>(step, x, stride, sums, std::make_index_sequence<kInputs / 2>());
  }
  template <int R, size_t... kPairs>
  OUTDRAFT_INLINE static void add_pairs(const char* step, const uint32_t* x, int64_t stride,
                                        Sums<Sum, R>& sums, std::index_sequence<kPairs...>) {
    (add_pair<R, kPairs>(step, x + kPairs, stride, sums), ...);
  }
  template <int R, size_t kPair>
  OUTDRAFT_INLINE static void add_pair(const char* step, const uint32_t* x, int64_t stride,
                                       Sums<Sum, R>& sums) {
    Words pairs[vectors_of(R)];
    for (int v = 0; v < vectors_of(R); ++v) {
      const char* lanes = step + v * kWidth * kLaneBytes;
      if constexpr (kShorts) {
        pairs[v] = Decoder::template codes<kPair>(lanes);
      } else {
        pairs[v] = Decoder::template pair<kPair>(lanes);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Words a = broadcast_word(x[r * stride]);
      for (int v = 0; v < vectors_of(R); ++v) {
        if constexpr (kShorts) {
          sums[r][v] = dot_shorts(sums[r][v], pairs[v], a);
        } else {
          sums[r][v] = dot_pairs(sums[r][v], pairs[v], a);
        }
      }
    }
  }
};

// Whether sums go on from what is in memory, where several calls meet a tile.
template <class Kernel>
constexpr bool kAddsToSums = kHasPieces && !Kernel::kIsQuantised;

template <class Kernel>
int64_t steps_of_piece(int64_t num_calls, int64_t num_steps) {
  const bool is_whole = !kAddsToSums<Kernel> || num_calls == 1 || num_calls > kPieceCalls;
  return is_whole ? num_steps : std::min(kPieceSteps, num_steps);
}

// Steps of a group of inputs, whose sum is taken by itself.
template <class Kernel>
int64_t group_steps(const Inputs& x, int64_t num_steps) {
  if (!Kernel::kIsQuantised) return num_steps;
  return std::min((x.group_inputs + Kernel::kInputs - 1) / Kernel::kInputs, num_steps);
}

// A strip of a tile and the rows that it meets. Null: the weights have none.
template <class Kernel>
struct Strip {
  const char* weights;
  const char* ahead;   // what the cache fetches meanwhile,
  int64_t next_ahead;  // and how many bytes behind it in the next step
  int64_t num_steps, group_steps;
  const typename Kernel::Number* x;
  int64_t x_stride;
  const char* scales;  // of the first group
  ScaleKind scale_kind;
  int64_t next_scales;   // bytes from those of a group of inputs to those of the next
  const float* x_steps;  // of each row's group: see Inputs
  int64_t x_group_stride;
  float* out;  // [rows, kTile]
};

// What a group of inputs adds to an output, from its sum.
template <class Kernel>
OUTDRAFT_INLINE Floats in_numbers(typename Kernel::Sum sum, const float* steps, int row) {
  if constexpr (std::is_same_v<typename Kernel::Sum, Ints>) {
    return __builtin_convertvector(sum, Floats) * steps[row];
  } else {
    return sum;
  }
}

// out[R, kTile] = the products; the next piece adds to them. Meanwhile the cache fetches kLines lines
// a step, or parts of one.
template <class Kernel, int R, int kLines>
void multiply_strip(const Strip<Kernel>& strip) {
  constexpr int kVectors = vectors_of(R);
  const char *weights = strip.weights, *ahead = strip.ahead;
  const char* scales = strip.scales;
  const auto* x = strip.x;
  const float* x_steps = strip.x_steps;
  const int64_t x_stride = strip.x_stride, next_ahead = strip.next_ahead;
  for (int64_t first = 0; first < strip.num_steps; first += strip.group_steps) {
    Sums<typename Kernel::Sum, R> sums;
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (std::is_same_v<typename Kernel::Sum, Ints>) {
          sums[r][v] = Ints{};
        } else {
          const float* at = strip.out + r * kTile + v * kWidth;
          sums[r][v] = kAddsToSums<Kernel> && kLines < 2 ? load<Floats>(at) : Floats{};
        }
      }
    }
    int64_t left = std::min(strip.group_steps, strip.num_steps - first);
    do {  // at least once: else the compiler keeps the sums in memory, too
      for (int line = 0; line < kLines; ++line) {
        // It comes soon, or a piece later.
        kLines == 2 ? prefetch(ahead + line * kLine) : prefetch_far(ahead);
      }
      if constexpr (kLines > 0) ahead += next_ahead;
      Kernel::template add<R>(weights, x, x_stride, sums);
      weights += kStepBytes;
      x += Kernel::kRowNumbers;
    } while (--left > 0);
    // What follows needs more registers. As it has sums of its own, those of the loop above stay in
    // some.
    Sums<typename Kernel::Sum, R> found;
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) found[r][v] = apart(sums[r][v]);
    }
    // Read once for all rows: for all that the compiler knows, what is stored changes them.
    Floats factors[kVectors] = {};
    for (int v = 0; Kernel::kIsQuantised && v < kVectors; ++v) {
      factors[v] = scale_numbers(scales, strip.scale_kind, v);
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        float* at = strip.out + r * kTile + v * kWidth;
        Floats sum = in_numbers<Kernel>(found[r][v], x_steps, r);
        if constexpr (Kernel::kIsQuantised) {
          sum = fused(factors[v], sum, first == 0 ? Floats{} : load<Floats>(at));
        }
        store(at, sum);
      }
    }
    if constexpr (Kernel::kIsQuantised) {
      scales += strip.next_scales;
      if (x_steps != nullptr) x_steps += strip.x_group_stride;
    }
  }
}

// By the number of rows less one.
template <class Kernel, int kLines, int... kRows>
constexpr auto strip_calls(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_strip<Kernel, kRows + 1, kLines>...};
}
template <class Kernel, int kLines>
constexpr auto kStripCalls =
    strip_calls<Kernel, kLines>(std::make_integer_sequence<int, kMaxRows>());

// sums[num_rows, kTile] = the products with one tile.
template <class Kernel>
void multiply_tile(const LinearWeights& weights, const Inputs& x, int64_t num_rows, int64_t tile,
                   float* sums) {
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t num_strips = kTile / (vectors_of(num_rows) * kWidth);
  const int64_t num_calls = num_blocks * num_strips;
  const bool is_alone = num_calls == 1;
  // Who is alone fetches all that comes soon, else several fetch a part each of what comes a few pieces
  // later. One that fetched it all would wait for memory, which had nothing to do while others compute.
  const int64_t num_fetching = std::min(num_calls, kFetchingCalls);
  const int64_t num_steps = (weights.num_inputs + Kernel::kInputs - 1) / Kernel::kInputs;
  const int64_t piece_steps = steps_of_piece<Kernel>(num_calls, num_steps);
  const int64_t steps_ahead = piece_steps + (piece_steps < num_steps ? kPieceAhead : 0);
  const int64_t scale = tile * weights.num_groups * kTile;
  const int64_t scale_bytes = size_of(weights.scale_kind);
  Strip<Kernel> all;
  all.next_ahead = (kStepBytes + num_fetching - 1) / num_fetching;
  all.x_stride = x.stride;
  all.x_group_stride = x.group_stride;
  all.scale_kind = weights.scale_kind;
  all.next_scales = weights.num_groups > 1 ? kTile * scale_bytes : 0;
  if (kAddsToSums<Kernel> && !is_alone) std::memset(sums, 0, sizeof(float) * num_rows * kTile);
  for (int64_t step = 0; step < num_steps; step += piece_steps) {
    const char* piece = weights.tiles + tile * weights.tile_bytes + step * kStepBytes;
    const char* ahead = piece + (is_alone ? kAheadAlone : steps_ahead * kStepBytes);
    all.num_steps = std::min(piece_steps, num_steps - step);
    all.group_steps = group_steps<Kernel>(x, all.num_steps);
    for (int64_t block = 0, r = 0, call = 0; block < num_blocks; ++block) {
      const int64_t end = num_rows * (block + 1) / num_blocks;  // blocks of about equal size
      for (int64_t e = 0; e < kTile; e += kTile / num_strips, ++call) {
        const int64_t at = (scale + e) * scale_bytes;
        all.ahead = ahead + call * all.num_steps * all.next_ahead;
        all.weights = piece + e * Kernel::kLaneBytes;
        all.x = static_cast<const typename Kernel::Number*>(x.rows) + r * x.stride +
                step * Kernel::kRowNumbers;
        all.scales = weights.scales == nullptr ? nullptr : weights.scales + at;
        all.x_steps = x.steps == nullptr ? nullptr : x.steps + r;
        all.out = sums + r * kTile + e;
        const auto& calls = is_alone              ? kStripCalls<Kernel, 2>
                            : call < num_fetching ? kStripCalls<Kernel, 1>
                                                  : kStripCalls<Kernel, 0>;
        calls[end - r - 1](all);
      }
      r = end;
    }
  }
}

template <class Decoder>
MultiplyTile kernel_of(InputKind kind) {
  if constexpr (kHasBf16Dot) {
    if (kind == InputKind::kBf16Pairs) return multiply_tile<PairKernel<Decoder, false>>;
  }
  if constexpr (Decoder::kIsQuantised) return multiply_tile<PairKernel<Decoder, true>>;
  return multiply_tile<Bf16Kernel>;
}

}  // namespace

MultiplyTile kernel_of(const LinearWeights& weights, InputKind kind) {
  const bool may_be_matrices = kind == InputKind::kBf16Pairs;
  if (const MultiplyTile kernel = may_be_matrices ? matrix_kernel_of(weights) : nullptr) {
    return kernel;
  }
  switch (weights.format) {
    case Format::kFloat32:
      return multiply_tile<Float32Kernel>;
    case Format::kBfloat16:
      return kernel_of<Bf16Words>(kind);
    case Format::kInt8:
      return kernel_of<Int8Words>(kind);
    case Format::kInt4:
      break;  // of matrix registers alone
    case Format::kGguf:
      return kind == InputKind::kBytes ? multiply_gguf_bytes : multiply_gguf;
  }
  __builtin_unreachable();
}

}  // namespace outdraft
