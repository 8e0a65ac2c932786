// What happens to rows before and behind products with tiles: see linear_tiles.h.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "gguf_tiles.h"
#include "linear_tiles.h"
#include "vector_math.h"

namespace outdraft {
namespace {

Floats highest(Floats x, float limit) { return x > limit ? broadcast(limit) : x; }  // keeps NaN

Floats gated(const Gate& gate, Floats x, Floats up) {
  switch (gate.activation) {
    case Activation::kGelu:
      return gelu_of(x) * up;
    case Activation::kGeluTanh:  // (1 + tanh(y)) / 2 = sigmoid(2 y)
      return x / (exp_of(x * (x * x * 0.044715f + 1.0f) * -1.5957691216f) + 1.0f) * up;
    case Activation::kClamped:
      x = highest(x, gate.limit);
      up = -highest(-highest(up, gate.limit), gate.limit);
      return x / (exp_of(x * -gate.alpha) + 1.0f) * (up + 1.0f);
    default:
      return x / (exp_of(-x) + 1.0f) * up;
  }
}

// As the first number of a vector: it is the same wherever it stands.
float gated(const Gate& gate, float x, float up) {
  return gated(gate, broadcast(x), broadcast(up))[0];
}

// As a vector, zeros after the last of `count`.
template <class Number>
Floats numbers_up_to(const Number* from, int64_t count) {
  if (count >= kWidth) return numbers(from);
  float rest[kWidth] = {};
  for (int64_t k = 0; k < count; ++k) rest[k] = number(from + k);
  return load<Floats>(rest);
}

}  // namespace

ByteRow byte_row(const LinearWeights& weights) {
  int64_t step_inputs = kChunkInputs;
  for (int64_t p = 0; p < weights.num_parts; ++p) {
    step_inputs = std::max(step_inputs, layout_of(weights.parts[p].kind).block_inputs);
  }
  return {(weights.num_inputs + step_inputs - 1) / step_inputs * step_inputs, step_inputs};
}

int64_t padded_inputs(const LinearWeights& weights) { return byte_row(weights).num_inputs; }

// Whole steps fill lines.
InputLayout::InputLayout(const LinearWeights& weights, Dtype dtype)
    : kind(InputKind::kFloat32),
      group_inputs(weights.group_inputs),
      num_groups(weights.num_groups),
      group_sums(weights.shifts != nullptr),
      group_floats(group_sums) {
  if (weights.format == Format::kGguf && weights.meets_bytes) {
    kind = InputKind::kBytes;
    stride = kept_stride(byte_row(weights).num_words(), Dtype::kFloat32);
    return;
  }
  if (weights.format == Format::kGguf) {
    kind = InputKind::kQuads;
    group_inputs = kQuadGroup;
    num_groups = padded_inputs(weights) / group_inputs;
    group_sums = 2, group_floats = 3;
  } else if (kHasBf16Dot && dtype == Dtype::kBfloat16 && weights.format != Format::kFloat32) {
    kind = InputKind::kBf16Pairs;
  } else if (weights.format == Format::kInt8) {
    kind = InputKind::kShorts;
    group_inputs = std::min(group_inputs, kMostShorts);
    num_groups = (weights.num_inputs + group_inputs - 1) / group_inputs;
    group_floats = 1;
  }
  const Dtype as_large = kind == InputKind::kFloat32 ? Dtype::kFloat32 : Dtype::kBfloat16;
  const int64_t row_inputs = kind == InputKind::kQuads ? padded_inputs(weights) : weights.num_inputs;
  stride = kept_stride(row_inputs, as_large) * size_of(as_large) / 4;
}

bool InputLayout::is_of(const LinearWeights& weights, const ConstRows& x) const {
  const bool is_read = x.dtype == Dtype::kBfloat16 ? kind == InputKind::kBf16Pairs
                                                   : kind == InputKind::kFloat32;
  return x.is_kept && is_read && group_floats == 0 &&
         weights.num_inputs * size_of(x.dtype) % kLineBytes == 0;
}

// What gates meet may lie in two tiles.
void multiply_gated(MultiplyTile multiply, const LinearWeights& weights, const Inputs& x,
                    int64_t num_rows, int64_t tile, const Gate& gate, float* gates, float* up) {
  const int64_t num_results = weights.num_outputs / 2, first = tile * kTile;
  const int64_t count = std::min(kTile, num_results - first), second = num_results + first;
  const int64_t shift = second % kTile, tile_sums = num_rows * kTile;
  multiply(weights, x, num_rows, tile, gates);
  multiply(weights, x, num_rows, second / kTile, up);
  const bool is_cut = shift + count > kTile;
  if (is_cut) multiply(weights, x, num_rows, second / kTile + 1, up + tile_sums);
  for (int64_t r = 0; r < num_rows; ++r, gates += kTile, up += kTile) {
    float both[2 * kTile];
    std::memcpy(both, up, sizeof(float) * kTile);
    if (is_cut) std::memcpy(both + kTile, up + tile_sums, sizeof(float) * kTile);
    for_numbers(count, [&](int64_t e, auto kind) {
      using Kind = decltype(kind);
      Kind a = read<Kind>(gates + e), b = read<Kind>(both + shift + e);
      if (weights.bias != nullptr) {
        a += read<Kind>(weights.bias + first + e);
        b += read<Kind>(weights.bias + second + e);
      }
      put(gates + e, gated(gate, a, b));
    });
  }
}

// A core waits for few lines to which it stores, so rows are asked for some rows before.
void store_tile(const float* sums, const float* bias, Rows y, int64_t num_rows, int64_t first,
                int64_t count) {
  constexpr int64_t kRowsAhead = 6;
  with_numbers(y.numbers, y.dtype == Dtype::kBfloat16, [&](auto* to) {
    for (int64_t r = 0; r < num_rows; ++r) {
      if (r + kRowsAhead < num_rows) {
        const auto* ahead = to + (r + kRowsAhead) * y.stride + first;
        for (int64_t e = 0; e < count; e += kLineBytes / sizeof(*to)) prefetch_to_store(ahead + e);
      }
      for_numbers(count, [&](int64_t e, auto sum) {
        using Kind = decltype(sum);
        sum = read<Kind>(sums + r * kTile + e);
        if (bias != nullptr) sum += read<Kind>(bias + first + e);
        put(to + r * y.stride + first + e, sum);
      });
    }
  });
}

void Copy::store(int64_t unit, const void*) const {
  const int64_t end = std::min((unit + 1) * kUnitRows, num_rows);
  for (int64_t r = unit * kUnitRows; r < end; ++r) {
    copy_row(r);
    for (int64_t group = 0; weights.shifts != nullptr && group < layout.num_groups; ++group) {
      sum_group(r, group);
    }
  }
}

void Copy::copy_row(int64_t row) const {
  if (layout.kind == InputKind::kBytes) {
    const int64_t at = (picked == nullptr ? row : picked[row]) * x.stride;
    with_numbers(x.numbers, x.dtype == Dtype::kBfloat16,
                 [&](const auto* from) { round_bytes(row, from + at); });
    return;
  }
  char* to = block + 4 * layout.stride * row;
  const int64_t count = weights.num_inputs;
  const int64_t bytes = (layout.kind == InputKind::kFloat32 ? 4 : 2) * count;
  const int64_t at = (picked == nullptr ? row : picked[row]) * x.stride;
  std::memset(to + bytes, 0, 4 * layout.stride - bytes);
  with_numbers(x.numbers, x.dtype == Dtype::kBfloat16, [&](const auto* from) {
    if (layout.kind == InputKind::kBf16Pairs) {
      std::memcpy(to, from + at, bytes);
    } else if (layout.kind == InputKind::kFloat32) {
      convert(from + at, count, reinterpret_cast<float*>(to));
    } else {
      for (int64_t group = 0; group < layout.num_groups; ++group) {
        round_group(row, group, from + at);
        if (layout.kind == InputKind::kQuads) order_quads(row, group);
      }
    }
  });
}

// To the nearest integers, ties to even; what would be 32,768 becomes 32,767.
template <class Number>
void Copy::round_group(int64_t row, int64_t group, const Number* from) const {
  constexpr int32_t kMost = 32767;
  constexpr uint32_t kInfinity = 0x7F800000, kLeastExponent = 15;
  const int64_t first = group * layout.group_inputs;
  const int64_t count = std::min(layout.group_inputs, weights.num_inputs - first);
  from += first;
  auto* to = reinterpret_cast<int16_t*>(block + 4 * layout.stride * row) + first;
  const auto load_vector = [&](int64_t i) { return numbers_up_to(from + i, count - i); };
  Ints largest = {};  // sizes compare as their bits do, those of NaN above all
  for (int64_t i = 0; i < count; i += kWidth) {
    const Ints size = (Ints)load_vector(i) & 0x7FFFFFFF;
    largest = size > largest ? size : largest;
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits = std::max<uint32_t>(bits, largest[lane]);
  const uint32_t exponent = std::max(bits >> 23, kLeastExponent);  // steps below have no inverse
  const Floats inverse = (Floats)broadcast_word((268 - exponent) << 23);
  for (int64_t i = 0; i < count; i += kWidth) {
    Ints shorts = rounded(bits < kInfinity ? load_vector(i) * inverse : Floats{});
    shorts = shorts > kMost ? Ints{} + kMost : shorts;
    shorts = shorts < -kMost ? Ints{} - kMost : shorts;
    const Shorts packed = __builtin_convertvector(shorts, Shorts);
    std::memcpy(to + i, &packed, 2 * std::min<int64_t>(kWidth, count - i));
  }
  floats[(layout.group_sums * layout.num_groups + group) * num_rows + row] =
      bits < kInfinity ? ((Floats)broadcast_word((exponent - 14) << 23))[0] : NAN;
}

// Also the sums of both halves of the group.
void Copy::order_quads(int64_t row, int64_t group) const {
  auto* shorts = reinterpret_cast<int16_t*>(block + 4 * layout.stride * row) + group * kQuadGroup;
  for (int64_t half = 0; half < 2; ++half) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kQuadGroup / 2; ++i) sum += shorts[i];
    floats[(2 * group + half) * num_rows + row] = static_cast<float>(sum);
    for (int64_t i = 0; i < kQuadGroup / 2; i += 4, shorts += 4) std::swap(shorts[1], shorts[2]);
  }
}

template <class Number>
void Copy::round_bytes(int64_t row, const Number* from) const {
  constexpr float kMost = 127, kLeast = 1e-30f;  // smaller ones have no inverse
  const ByteRow own = byte_row(weights);
  uint32_t* words = reinterpret_cast<uint32_t*>(block) + layout.stride * row;
  auto* bytes = reinterpret_cast<int8_t*>(words);
  auto* sums16 = reinterpret_cast<int16_t*>(words + own.sums_of(16));
  auto* sums32 = reinterpret_cast<int16_t*>(words + own.sums_of(32));
  auto* steps = reinterpret_cast<float*>(words + own.steps());
  const auto load_vector = [&](int64_t i) { return numbers_up_to(from + i, weights.num_inputs - i); };
  for (int64_t first = 0; first < own.num_inputs; first += own.step_inputs) {
    Ints largest = {};  // sizes compare as their bits do, those of NaN above all
    for (int64_t i = first; i < first + own.step_inputs; i += kWidth) {
      const Ints size = (Ints)load_vector(i) & 0x7FFFFFFF;
      largest = size > largest ? size : largest;
    }
    int32_t bits = 0;
    for (int lane = 0; lane < kWidth; ++lane) bits = std::max(bits, largest[lane]);
    const bool is_finite = bits < 0x7F800000;
    const float most = ((Floats)(Ints{} + bits))[0];
    const float inverse = is_finite && most >= kLeast ? kMost / most : 0;
    for (int64_t i = first; i < first + own.step_inputs; i += kWidth) {
      const Ints codes = is_finite ? rounded(load_vector(i) * inverse) : Ints{};
      const Bytes packed = __builtin_convertvector(codes, Bytes);
      std::memcpy(bytes + i, &packed, kWidth);
    }
    *steps++ = is_finite ? most / kMost : NAN;
  }
  for (int64_t i = 0; i < own.num_inputs; i += 32) {
    int32_t halves[2] = {};
    for (int64_t k = 0; k < 32; ++k) halves[k / 16] += bytes[i + k];
    *sums16++ = static_cast<int16_t>(halves[0]);
    *sums16++ = static_cast<int16_t>(halves[1]);
    *sums32++ = static_cast<int16_t>(halves[0] + halves[1]);
  }
}

// In order, of the numbers that are multiplied.
void Copy::sum_group(int64_t row, int64_t group) const {
  const int64_t from = picked == nullptr ? row : picked[row];
  const int64_t first = group * weights.group_inputs;
  const int64_t end = std::min(first + weights.group_inputs, weights.num_inputs);
  float sum = 0;
  for (int64_t k = first; k < end; ++k) sum += x.at(from, k);
  floats[group * num_rows + row] = sum;
}

}  // namespace outdraft
