// Weights in tiles, from rows of numbers that may lie anywhere, such as in a mapped file: see
// linear.cpp for the layouts.
//
// int8: an output has one scale, the largest size / 127. int4: a group of an output has one, by
// which its number of largest size becomes -8; or, with a zero point, the smallest and the largest
// number (zero among them) become 0 and 15. Scales are rounded to bfloat16, so that those of small
// groups are not long to read. Numbers are divided by the scale and rounded to the
// nearest code, ties to even; src/outdraft/kernels/torch/linear.py has the same rules.
// Codes that come with their scales are kept as they are. int4 lies in blocks (gguf_tiles.h), but where
// matrix registers meet it: there as linear_amx.cpp says.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "amx.h"
#include "block_packing.h"
#include "export.h"
#include "linear.h"
#include "mapped_memory.h"
#include "simd.h"
#include "tile_packing.h"

namespace outdraft {
namespace {

// How codes are to lie.
struct CodeLayout {
  Format format;         // kInt8 or kInt4
  int64_t group_inputs;  // that share a scale
  bool has_zero;
  ScaleKind scale_kind;
};

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

Group group_of(const Source& source, const CodeLayout& layout, int64_t output, int64_t first,
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
  const bool is_int8 = layout.format == Format::kInt8;
  const float size = is_int8           ? std::fabs(largest) / 127
                     : layout.has_zero ? (high - low) / 15
                                       : largest / -8;
  Group group = {widen(to_bf16(is_nan ? NAN : size)), 0, is_int8 ? -127 : -8, is_int8 ? 127 : 7};
  if (layout.has_zero && group.scale > 0) {
    group.shift = kInt4Zero - std::nearbyint(-low / group.scale);
  }
  return group;
}

// Codes of an output, and of each group of its inputs a scale, and a shift or null.
struct OutputCodes {
  const int8_t* codes;
  const float *scales, *shifts;
};

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

void put_scale(ScaleKind kind, float number, char* to) {
  const uint16_t rounded = kind == ScaleKind::kFloat16 ? to_half(number) : to_bf16(number);
  const void* from = &rounded;
  if (kind == ScaleKind::kFloat32) from = &number;
  std::memcpy(to, from, size_of(kind));
}

void keep_in_steps(const LinearWeights& weights, const OutputCodes& codes, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  for (int64_t k = 0; k < weights.num_inputs; ++k) {
    put_code(weights.format, tile, output % kTile, k, codes.codes[k]);
  }
  for (int64_t g = 0; g < weights.num_groups; ++g) {
    const int64_t place = (output / kTile * weights.num_groups + g) * kTile + output % kTile;
    const int64_t at = place * size_of(weights.scale_kind);
    put_scale(weights.scale_kind, codes.scales[g], weights.scales + at);
    if (codes.shifts == nullptr) continue;
    put_scale(weights.scale_kind, codes.shifts[g], weights.shifts + at);
  }
}

void keep_in_blocks(const LinearWeights& weights, const CodeLayout& layout,
                    const OutputCodes& codes, int64_t output) {
  const GgufTile tile = gguf_tile(weights, output / kTile);
  const int64_t block_inputs = tile.layout().block_inputs;
  for (int64_t first = 0; first < weights.num_inputs; first += block_inputs) {
    const int64_t count = std::min(block_inputs, weights.num_inputs - first);
    Block block = {};
    for (int64_t i = 0; i < count; ++i) {
      block.codes[i] = static_cast<uint8_t>(codes.codes[first + i] + tile.layout().zero);
    }
    const int64_t group = first / layout.group_inputs;
    char scale[4], shift[4];
    put_scale(tile.scale_kind, codes.scales[group], scale);
    if (codes.shifts != nullptr) put_scale(tile.scale_kind, codes.shifts[group], shift);
    block.d = scale, block.offset = shift;
    put_block(tile, block, first / block_inputs, output % kTile);
  }
}

void keep_output(const LinearWeights& weights, const CodeLayout& layout, const OutputCodes& codes,
                 int64_t output) {
  weights.format == Format::kGguf ? keep_in_blocks(weights, layout, codes, output)
                                  : keep_in_steps(weights, codes, output);
}

int64_t num_groups(const CodeLayout& layout, int64_t num_inputs) {
  return (num_inputs + layout.group_inputs - 1) / layout.group_inputs;
}

// Rows that become codes.
struct Rounding {
  Source source;
  CodeLayout layout;
};

void pack_tile(const LinearWeights& weights, const Rounding& from, int64_t tile) {
  const int64_t num_inputs = weights.num_inputs;
  const int64_t groups = num_groups(from.layout, num_inputs), size = from.layout.group_inputs;
  std::vector<int8_t> codes(static_cast<size_t>(num_inputs));
  std::vector<float> scales(static_cast<size_t>(groups)), shifts(static_cast<size_t>(groups));
  const int64_t end_output = std::min((tile + 1) * kTile, weights.num_outputs);
  for (int64_t output = tile * kTile; output < end_output; ++output) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * size, end = std::min(first + size, num_inputs);
      const Group group = group_of(from.source, from.layout, output, first, end);
      scales[g] = group.scale, shifts[g] = group.shift;
      for (int64_t k = first; k < end; ++k) {
        codes[k] = static_cast<int8_t>(group.code(from.source.at(output, k)));
      }
    }
    const float* own_shifts = from.layout.has_zero ? shifts.data() : nullptr;
    keep_output(weights, from.layout, {codes.data(), scales.data(), own_shifts}, output);
  }
}

// Codes [E, D] with scales [E, groups], and shifts or null.
struct Codes {
  OutputCodes first;  // output
  CodeLayout layout;
};

void pack_tile(const LinearWeights& weights, const Codes& from, int64_t tile) {
  const int64_t groups = num_groups(from.layout, weights.num_inputs);
  const int64_t end = std::min((tile + 1) * kTile, weights.num_outputs);
  for (int64_t output = tile * kTile; output < end; ++output) {
    const float* shifts = from.first.shifts;
    const OutputCodes own = {from.first.codes + output * weights.num_inputs,
                             from.first.scales + output * groups,
                             shifts == nullptr ? nullptr : shifts + output * groups};
    keep_output(weights, from.layout, own, output);
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
void pack_tile(const LinearWeights& weights, const Source& source, int64_t tile) {
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

// Inputs of a step of 32 words.
constexpr int64_t kStepInputs[] = {1, 2, 4, 8};  // by Format

// Tiles of zeros, and a bias [E] or null; null: no memory. `codes`: null for weights that are none.
LinearWeights* make_weights(Format format, const CodeLayout* codes, int64_t num_outputs,
                            int64_t num_inputs, const float* bias) {
  const int64_t step_inputs = kStepInputs[static_cast<int64_t>(format)];
  const int64_t num_tiles = (num_outputs + kTile - 1) / kTile;
  const int64_t tile_bytes = kTile * 4 * ((num_inputs + step_inputs - 1) / step_inputs);
  const int64_t tiles_bytes = num_tiles * tile_bytes;
  const bool has_shifts = codes != nullptr && codes->has_zero;
  int64_t scales_bytes = 0;
  if (codes != nullptr) {
    scales_bytes = num_tiles * num_groups(*codes, num_inputs) * kTile * size_of(codes->scale_kind);
  }
  const int64_t shifts_bytes = has_shifts ? scales_bytes : 0;
  const int64_t bias_bytes = bias == nullptr ? 0 : (num_outputs + 1) / 2 * 8;
  const int64_t num_bytes =
      tiles_bytes + scales_bytes + shifts_bytes + bias_bytes + sizeof(LinearWeights);
  char* memory = map_memory(num_bytes);
  if (memory == nullptr) return nullptr;
  char *scales = memory + tiles_bytes, *shifts = scales + scales_bytes;
  char* after = shifts + shifts_bytes;
  auto* weights = reinterpret_cast<LinearWeights*>(after + bias_bytes);
  *weights = {};
  weights->format = format;
  weights->num_inputs = weights->group_inputs = num_inputs;
  weights->num_outputs = num_outputs;
  weights->num_groups = 1;
  weights->tile_bytes = tile_bytes;
  weights->tiles = memory;
  weights->is_symmetric = true;
  weights->num_bytes = num_bytes;
  if (codes != nullptr) {
    weights->group_inputs = codes->group_inputs;
    weights->num_groups = num_groups(*codes, num_inputs);
    weights->scales = scales;
    weights->shifts = has_shifts ? shifts : nullptr;
    weights->scale_kind = codes->scale_kind;
  }
  if (bias != nullptr) {
    weights->bias = reinterpret_cast<float*>(after);
    std::memcpy(after, bias, 4 * num_outputs);
  }
  return weights;
}

// The same for codes, which `dtype` of rows meets.
LinearWeights* make_coded(const CodeLayout& layout, Dtype dtype, int64_t num_outputs,
                          int64_t num_inputs, const float* bias, bool meets_bytes) {
  const bool meets_matrices = kHasMatrixRegisters && dtype == Dtype::kBfloat16;
  if (layout.format == Format::kInt8 || meets_matrices) {
    return make_weights(layout.format, &layout, num_outputs, num_inputs, bias);
  }
  const bool is_by_32 = std::min(layout.group_inputs, num_inputs) <= kChunkInputs;
  GgufKind kind = is_by_32 ? GgufKind::kInt4By32 : GgufKind::kInt4By128;
  if (layout.has_zero) kind = is_by_32 ? GgufKind::kInt4ZeroBy32 : GgufKind::kInt4ZeroBy128;
  const BlockOutputs all = {kind, layout.scale_kind, num_outputs};
  return make_blocks(&all, 1, num_inputs, bias, meets_bytes);
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
// null: no memory. bfloat16 tiles round what bfloat16 does not hold. `dtype`: of weights, and of the rows
// that they meet. For codes: `group_inputs` share a scale, 0: all, else 32 or 128; `has_zero`: int4 with a zero
// point; `meets_bytes`: rows that meet blocks become integers of 8 bits, else of 16.
OUTDRAFT_EXPORT LinearWeights* linear_pack(outdraft::Team* team, int64_t format,
                                           int64_t group_inputs, int64_t has_zero,
                                           const void* const* rows, int64_t dtype,
                                           int64_t num_outputs, int64_t num_inputs,
                                           const float* bias, bool meets_bytes) {
  using namespace outdraft;
  const Source source = {rows, Dtype{dtype}};
  if (Format{format} < Format::kInt8) {
    LinearWeights* weights = make_weights(Format{format}, nullptr, num_outputs, num_inputs, bias);
    if (weights != nullptr) run(team, Packing<Source>{*weights, source});
    return weights;
  }
  const CodeLayout layout = {Format{format}, group_inputs == 0 ? num_inputs : group_inputs,
                             has_zero != 0, ScaleKind::kBfloat16};
  LinearWeights* weights =
      make_coded(layout, Dtype{dtype}, num_outputs, num_inputs, bias, meets_bytes);
  if (weights != nullptr) run(team, Packing<Rounding>{*weights, {source, layout}});
  return weights;
}

// The same of weights scale * (code + shift), codes int8 [E, D], scales and shifts float32
// [E, groups], kept as `scale_kind`, which holds them; shifts are null for codes without them.
OUTDRAFT_EXPORT LinearWeights* linear_pack_codes(outdraft::Team* team, int64_t format,
                                                 int64_t group_inputs, int64_t scale_kind,
                                                 const int8_t* codes, const float* scales,
                                                 const float* shifts, int64_t dtype,
                                                 int64_t num_outputs, int64_t num_inputs,
                                                 const float* bias, bool meets_bytes) {
  using namespace outdraft;
  const CodeLayout layout = {Format{format}, group_inputs == 0 ? num_inputs : group_inputs,
                             shifts != nullptr, ScaleKind{scale_kind}};
  LinearWeights* weights =
      make_coded(layout, Dtype{dtype}, num_outputs, num_inputs, bias, meets_bytes);
  if (weights == nullptr) return nullptr;
  weights->is_symmetric = *std::min_element(codes, codes + num_outputs * num_inputs) > -128;
  run(team, Packing<Codes>{*weights, {{codes, scales, shifts}, layout}});
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

OUTDRAFT_FUNCTIONS(linear_fits_bf16, linear_pack, linear_pack_codes, linear_free, linear_bytes);
