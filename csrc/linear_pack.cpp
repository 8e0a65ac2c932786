// Weights in tiles, from rows of numbers: see linear.cpp for the layouts.
//
// int8: an output has one scale, the largest size / 127. int4: a group of an output has one, by
// which its number of largest size becomes -8; or, with a zero point, the smallest and the largest
// number (zero among them) become 0 and 15. Scales are rounded to bfloat16, so that those of small
// groups are not long to read. Numbers are divided by the scale and rounded to the
// nearest code, ties to even; src/outdraft/kernels/reference/linear.py has the same rules.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "export.h"
#include "linear.h"
#include "simd.h"

namespace outdraft {
namespace {

constexpr int64_t kHugePage = 1 << 21;

// Memory in huge pages where the system has them; zeros.
void* map_memory(int64_t num_bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  if (num_bytes >= kHugePage) madvise(memory, num_bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

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

Group group_of(const ConstRows& source, const LinearWeights& weights, int64_t output, int64_t first,
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

void quantize_output(const LinearWeights& weights, const ConstRows& source, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  for (int64_t g = 0; g < weights.num_groups; ++g) {
    const int64_t first = g * weights.group_inputs;
    const int64_t end = std::min(first + weights.group_inputs, weights.num_inputs);
    const Group group = group_of(source, weights, output, first, end);
    const int64_t at = (output / kTile * weights.num_groups + g) * kTile + output % kTile;
    weights.scales[at] = to_bf16(group.scale);
    if (weights.shifts != nullptr) weights.shifts[at] = to_bf16(group.shift);
    for (int64_t k = first; k < end; ++k) {
      put_code(weights.format, tile, output % kTile, k, group.code(source.at(output, k)));
    }
  }
}

void pack_output(const LinearWeights& weights, const ConstRows& source, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  const int64_t lane = output % kTile;
  for (int64_t k = 0; k < weights.num_inputs; ++k) {
    const float number = source.at(output, k);
    if (weights.format == Format::kFloat32) {
      reinterpret_cast<float*>(tile)[k * kTile + lane] = number;
    } else {
      reinterpret_cast<uint16_t*>(tile)[(k / 2 * kTile + lane) * 2 + k % 2] = to_bf16(number);
    }
  }
}

// Inputs of a step of 32 words.
constexpr int64_t kStepInputs[] = {1, 2, 4, 8};

}  // namespace
}  // namespace outdraft

using outdraft::Dtype;
using outdraft::Format;
using outdraft::LinearWeights;

// Whether every number is the same in bfloat16; a NaN is not.
OUTDRAFT_EXPORT int64_t linear_fits_bf16(const void* weight, int64_t dtype, int64_t stride,
                                         int64_t num_outputs, int64_t num_inputs) {
  if (Dtype{dtype} == Dtype::kBfloat16) return 1;
  for (int64_t output = 0; output < num_outputs; ++output) {
    const auto* numbers = static_cast<const float*>(weight) + output * stride;
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

// Weights [E, D] with rows `stride` elements apart, and a bias [E] of float32 or null, in tiles;
// null: no memory. bfloat16 tiles round what bfloat16 does not hold. Of quantised formats:
// `group_inputs` share a scale, 0: all, for int4 32 or 128; `has_zero`: int4 with a zero point.
OUTDRAFT_EXPORT LinearWeights* linear_pack(int64_t format, int64_t group_inputs, int64_t has_zero,
                                           const void* weight, int64_t dtype, int64_t stride,
                                           int64_t num_outputs, int64_t num_inputs,
                                           const float* bias) {
  using namespace outdraft;
  const bool is_quantised = format >= static_cast<int64_t>(Format::kInt8);
  const int64_t step_inputs = kStepInputs[format];
  const int64_t num_tiles = (num_outputs + kTile - 1) / kTile;
  const int64_t of_group = group_inputs == 0 ? num_inputs : group_inputs;
  const int64_t num_groups = (num_inputs + of_group - 1) / of_group;
  const int64_t tile_bytes = kTile * 4 * ((num_inputs + step_inputs - 1) / step_inputs);
  const int64_t tiles_bytes = num_tiles * tile_bytes;
  const int64_t scale_bytes = is_quantised ? num_tiles * num_groups * kTile * 2 : 0;
  const int64_t shift_bytes = has_zero ? scale_bytes : 0;
  const int64_t bias_bytes = bias == nullptr ? 0 : (num_outputs + 1) / 2 * 8;
  const int64_t num_bytes =
      tiles_bytes + scale_bytes + shift_bytes + bias_bytes + sizeof(LinearWeights);
  auto* memory = static_cast<char*>(map_memory(num_bytes));
  if (memory == nullptr) return nullptr;
  auto* scales = reinterpret_cast<uint16_t*>(memory + tiles_bytes);
  auto* shifts = reinterpret_cast<uint16_t*>(memory + tiles_bytes + scale_bytes);
  char* behind = memory + tiles_bytes + scale_bytes + shift_bytes;
  auto* weights = reinterpret_cast<LinearWeights*>(behind + bias_bytes);
  *weights = {Format{format},
              num_inputs,
              num_outputs,
              of_group,
              num_groups,
              tile_bytes,
              memory,
              is_quantised ? scales : nullptr,
              has_zero ? shifts : nullptr,
              bias == nullptr ? nullptr : reinterpret_cast<float*>(behind),
              num_bytes};
  if (bias != nullptr) std::memcpy(behind, bias, 4 * num_outputs);
  const ConstRows source = {weight, Dtype{dtype}, stride};
  for (int64_t output = 0; output < num_outputs; ++output) {
    is_quantised ? quantize_output(*weights, source, output)
                 : pack_output(*weights, source, output);
  }
  return weights;
}

// `team`: those that multiplied with them, or null.
OUTDRAFT_EXPORT void linear_free(outdraft::Team* team, LinearWeights* weights) {
  outdraft::wait_until_idle(team);
  munmap(weights->tiles, weights->num_bytes);
}

// Of the tiles and their scales.
OUTDRAFT_EXPORT int64_t linear_bytes(const LinearWeights* weights) {
  const int64_t num_tiles = (weights->num_outputs + outdraft::kTile - 1) / outdraft::kTile;
  const int64_t of_scales = num_tiles * weights->num_groups * outdraft::kTile * 2;
  const int64_t kinds = (weights->scales != nullptr) + (weights->shifts != nullptr);
  return num_tiles * weights->tile_bytes + kinds * of_scales;
}
