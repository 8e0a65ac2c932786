// Weights in tiles, from rows of numbers that may lie anywhere, such as in a mapped file: see
// linear.cpp for the layouts.
//
// int8: an output has one scale, the largest size / 127. int4: a group of an output has one, by
// which its number of largest size becomes -8; or, with a zero point, the smallest and the largest
// number (zero among them) become 0 and 15. Scales are rounded to bfloat16, so that those of small
// groups are not long to read. Numbers are divided by the scale and rounded to the
// nearest code, ties to even; src/outdraft/kernels/reference/linear.py has the same rules.
// Codes that come with their scales are kept as they are.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "export.h"
#include "gguf_tiles.h"
#include "linear.h"
#include "mapped_memory.h"
#include "simd.h"
#include "tile_packing.h"

namespace outdraft {
namespace {

// The rows of a weight.
struct Source {
  const void* const* rows;
  Dtype dtype;

  float at(int64_t row, int64_t k) const {
    return dtype == Dtype::kFloat32 ? static_cast<const float*>(rows[row])[k]
                                    : widen(static_cast<const uint16_t*>(rows[row])[k]);
  }
};

// How a group of one output is kept.
struct Group {
  float scale, shift;
  int32_t least, most;  // codes

  int32_t code(float number) const {
    const float ratio = std::nearbyint(number / scale) - shift;  // a scale of zero gives a NaN
    if (!(ratio >= static_cast<float>(least))) return scale == 0 || ratio != ratio ? 0 : least;
    return ratio > static_cast<float>(most) ? most : static_cast<int32_t>(ratio);
  }
};

Group group_of(const Source& source, const LinearWeights& weights, int64_t output, int64_t first,
               int64_t end) {
  float low = 0, high = 0;
  bool is_nan = false;
  for (int64_t k = first; k < end; ++k) {
    const float number = source.at(output, k);
    low = std::min(low, number);
    high = std::max(high, number);
    is_nan |= number != number;
  }
  const float largest = -low > high ? low : high;
  const bool is_int8 = weights.format == Format::kInt8, has_zero = weights.shifts != nullptr;
  const float size = is_int8    ? std::fabs(largest) / 127
                     : has_zero ? (high - low) / 15
                                : largest / -8;
  Group group = {widen(to_bf16(is_nan ? NAN : size)), 0, is_int8 ? -127 : -8, is_int8 ? 127 : 7};
  if (has_zero && group.scale > 0) group.shift = kInt4Zero - std::nearbyint(-low / group.scale);
  return group;
}

void put_code(Format format, char* tile, int64_t lane, int64_t input, int32_t code) {
  if (format == Format::kInt8) {
    tile[(input / 2 * kTile + lane) * 2 + input % 2] = static_cast<char>(code);
    return;
  }
  uint32_t word;
  char* at = tile + input / 8 * kTile * 4 + lane * 4;
  std::memcpy(&word, at, 4);
  const int64_t pair = input % 8 / 2, half = input % 2;
  word |= static_cast<uint32_t>(code + kInt4Zero) << (16 * half + 4 * pair);
  std::memcpy(at, &word, 4);
}

void put_scale(const LinearWeights& weights, char* scales, int64_t at, float number) {
  const int64_t size = size_of(weights.scale_kind);
  uint16_t rounded = to_bf16(number);
  if (weights.scale_kind == ScaleKind::kFloat16) rounded = to_half(number);
  const void* from = &number;
  if (size == 2) from = &rounded;
  std::memcpy(scales + at * size, from, size);
}

void quantize_output(const LinearWeights& weights, const Source& source, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  for (int64_t g = 0; g < weights.num_groups; ++g) {
    const int64_t first = g * weights.group_inputs;
    const int64_t end = std::min(first + weights.group_inputs, weights.num_inputs);
    const Group group = group_of(source, weights, output, first, end);
    const int64_t at = (output / kTile * weights.num_groups + g) * kTile + output % kTile;
    put_scale(weights, weights.scales, at, group.scale);
    if (weights.shifts != nullptr) put_scale(weights, weights.shifts, at, group.shift);
    for (int64_t k = first; k < end; ++k) {
      put_code(weights.format, tile, output % kTile, k, group.code(source.at(output, k)));
    }
  }
}

void quantize_tile(const LinearWeights& weights, const Source& source, int64_t tile) {
  const int64_t end = std::min((tile + 1) * kTile, weights.num_outputs);
  for (int64_t output = tile * kTile; output < end; ++output) {
    quantize_output(weights, source, output);
  }
}

// Words of a row: pairs of bfloat16 numbers, or float32 numbers. A last half pair has a zero.
void read_words(Format format, const Source& source, int64_t row, int64_t first, int64_t count,
                int64_t num_inputs, uint32_t* words) {
  const int64_t inputs = format == Format::kFloat32 ? 1 : 2;
  const int64_t at = first * inputs, end = std::min(at + count * inputs, num_inputs);
  const auto* from = static_cast<const char*>(source.rows[row]) + at * size_of(source.dtype);
  const bool is_kept = (source.dtype == Dtype::kFloat32) == (format == Format::kFloat32);
  if (end - at < count * inputs) words[count - 1] = 0;
  if (is_kept) {
    std::memcpy(words, from, (end - at) * size_of(source.dtype));
    return;
  }
  for (int64_t k = at; k < end; ++k) {
    const float number = source.at(row, k);
    if (format == Format::kFloat32) {
      std::memcpy(words + (k - at), &number, 4);
    } else {
      reinterpret_cast<uint16_t*>(words)[k - at] = to_bf16(number);
    }
  }
}

// A row is read in pieces of whole cache lines, which then lie in a tile some words apart.
void place_tile(const LinearWeights& weights, const Source& source, int64_t tile) {
  constexpr int64_t kPieceWords = 64;
  auto* to = reinterpret_cast<uint32_t*>(weights.tiles + tile * weights.tile_bytes);
  const int64_t num_words = weights.tile_bytes / (4 * kTile), first_row = tile * kTile;
  const int64_t num_rows = std::min(kTile, weights.num_outputs - first_row);
  for (int64_t first = 0; first < num_words; first += kPieceWords) {
    const int64_t count = std::min(kPieceWords, num_words - first);
    for (int64_t lane = 0; lane < num_rows; ++lane) {
      uint32_t words[kPieceWords];
      read_words(weights.format, source, first_row + lane, first, count, weights.num_inputs, words);
      for (int64_t i = 0; i < count; ++i) to[(first + i) * kTile + lane] = words[i];
    }
  }
}

// Codes [E, D] with scales [E, groups], and shifts or null.
struct Codes {
  const int8_t* numbers;
  const float *scales, *shifts;
};

void keep_output(const LinearWeights& weights, const Codes& codes, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  const int8_t* numbers = codes.numbers + output * weights.num_inputs;
  for (int64_t k = 0; k < weights.num_inputs; ++k) {
    put_code(weights.format, tile, output % kTile, k, numbers[k]);
  }
  for (int64_t g = 0; g < weights.num_groups; ++g) {
    const int64_t at = (output / kTile * weights.num_groups + g) * kTile + output % kTile;
    const int64_t from = output * weights.num_groups + g;
    put_scale(weights, weights.scales, at, codes.scales[from]);
    if (weights.shifts != nullptr) put_scale(weights, weights.shifts, at, codes.shifts[from]);
  }
}

void pack_tile(const LinearWeights& weights, const Source& source, int64_t tile) {
  weights.scales == nullptr ? place_tile(weights, source, tile)
                            : quantize_tile(weights, source, tile);
}

void pack_tile(const LinearWeights& weights, const Codes& codes, int64_t tile) {
  const int64_t end = std::min((tile + 1) * kTile, weights.num_outputs);
  for (int64_t output = tile * kTile; output < end; ++output) keep_output(weights, codes, output);
}

// Inputs of a step of 32 words.
constexpr int64_t kStepInputs[] = {1, 2, 4, 8};  // by Format

// How weights are to lie.
struct Layout {
  Format format;
  int64_t group_inputs;  // 0: all
  bool has_zero;
  ScaleKind scale_kind;
};

// Tiles of zeros, and a bias [E] or null; null: no memory.
LinearWeights* make_weights(Layout layout, int64_t num_outputs, int64_t num_inputs,
                            const float* bias) {
  const bool is_quantised = layout.format >= Format::kInt8;
  const int64_t step_inputs = kStepInputs[static_cast<int64_t>(layout.format)];
  const int64_t num_tiles = (num_outputs + kTile - 1) / kTile;
  const int64_t of_group = layout.group_inputs == 0 ? num_inputs : layout.group_inputs;
  const int64_t num_groups = (num_inputs + of_group - 1) / of_group;
  const int64_t tile_bytes = kTile * 4 * ((num_inputs + step_inputs - 1) / step_inputs);
  const int64_t tiles_bytes = num_tiles * tile_bytes;
  const int64_t scales_bytes =
      is_quantised ? num_tiles * num_groups * kTile * size_of(layout.scale_kind) : 0;
  const int64_t shifts_bytes = layout.has_zero ? scales_bytes : 0;
  const int64_t bias_bytes = bias == nullptr ? 0 : (num_outputs + 1) / 2 * 8;
  const int64_t num_bytes =
      tiles_bytes + scales_bytes + shifts_bytes + bias_bytes + sizeof(LinearWeights);
  char* memory = map_memory(num_bytes);
  if (memory == nullptr) return nullptr;
  char *scales = memory + tiles_bytes, *shifts = scales + scales_bytes;
  char* behind = shifts + shifts_bytes;
  auto* weights = reinterpret_cast<LinearWeights*>(behind + bias_bytes);
  *weights = {layout.format,
              num_inputs,
              num_outputs,
              of_group,
              num_groups,
              tile_bytes,
              memory,
              is_quantised ? scales : nullptr,
              layout.has_zero ? shifts : nullptr,
              layout.scale_kind,
              bias == nullptr ? nullptr : reinterpret_cast<float*>(behind),
              true,
              num_bytes,
              nullptr,
              0};
  if (bias != nullptr) std::memcpy(behind, bias, 4 * num_outputs);
  return weights;
}

}  // namespace
}  // namespace outdraft

using outdraft::Dtype;
using outdraft::Format;
using outdraft::LinearWeights;

// Whether every number is the same in bfloat16; a NaN is not.
OUTDRAFT_EXPORT int64_t linear_fits_bf16(const void* const* rows, int64_t dtype,
                                         int64_t num_outputs, int64_t num_inputs) {
  if (Dtype{dtype} == Dtype::kBfloat16) return 1;
  for (int64_t output = 0; output < num_outputs; ++output) {
    const auto* numbers = static_cast<const float*>(rows[output]);
    uint32_t lost = 0, is_nan = 0;
    for (int64_t k = 0; k < num_inputs; ++k) {
      uint32_t bits;
      std::memcpy(&bits, numbers + k, 4);
      lost |= bits & 0xFFFF;
      is_nan |= (bits & 0x7FFFFFFF) > 0x7F800000;
    }
    if (lost != 0 || is_nan != 0) return 0;
  }
  return 1;
}

// Weights [E, D], given by the address of each row, and a bias [E] of float32 or null, in tiles;
// null: no memory. bfloat16 tiles round what bfloat16 does not hold. For quantised formats:
// `group_inputs` share a scale, 0: all, else 32 or 128; `has_zero`: int4 with a zero point.
OUTDRAFT_EXPORT LinearWeights* linear_pack(outdraft::Team* team, int64_t format,
                                           int64_t group_inputs, int64_t has_zero,
                                           const void* const* rows, int64_t dtype,
                                           int64_t num_outputs, int64_t num_inputs,
                                           const float* bias) {
  using namespace outdraft;
  LinearWeights* weights = make_weights({Format{format}, group_inputs, has_zero != 0, ScaleKind::kBfloat16},
                                        num_outputs, num_inputs, bias);
  if (weights == nullptr) return nullptr;
  run(team, Packing<Source>{*weights, {rows, Dtype{dtype}}});
  return weights;
}

// The same of weights scale * (code + shift), codes int8 [E, D], scales and shifts float32
// [E, groups], kept as `scale_kind`, which holds them; shifts are null for codes without them.
OUTDRAFT_EXPORT LinearWeights* linear_pack_codes(outdraft::Team* team, int64_t format,
                                                 int64_t group_inputs, int64_t scale_kind,
                                                 const int8_t* codes, const float* scales,
                                                 const float* shifts, int64_t num_outputs,
                                                 int64_t num_inputs, const float* bias) {
  using namespace outdraft;
  LinearWeights* weights =
      make_weights({Format{format}, group_inputs, shifts != nullptr, ScaleKind{scale_kind}}, num_outputs,
                   num_inputs, bias);
  if (weights == nullptr) return nullptr;
  weights->is_symmetric = *std::min_element(codes, codes + num_outputs * num_inputs) > -128;
  run(team, Packing<Codes>{*weights, {codes, scales, shifts}});
  return weights;
}

// `team`: those that multiplied with them, or null.
OUTDRAFT_EXPORT void linear_free(outdraft::Team* team, LinearWeights* weights) {
  outdraft::wait_until_idle(team);
  munmap(weights->tiles, weights->num_bytes);
}

// Bytes of the tiles and their scales.
OUTDRAFT_EXPORT int64_t linear_bytes(const LinearWeights* weights) {
  if (weights->format == Format::kGguf) {
    const outdraft::GgufPart* last = weights->parts + weights->num_parts - 1;
    const int64_t last_tiles = (last->num_outputs + outdraft::kTile - 1) / outdraft::kTile;
    return last->tiles - weights->tiles + last_tiles * last->tile_bytes;
  }
  const int64_t num_tiles = (weights->num_outputs + outdraft::kTile - 1) / outdraft::kTile;
  const int64_t num_scales = num_tiles * weights->num_groups * outdraft::kTile;
  const int64_t kinds = (weights->scales != nullptr) + (weights->shifts != nullptr);
  return num_tiles * weights->tile_bytes + kinds * num_scales * size_of(weights->scale_kind);
}
