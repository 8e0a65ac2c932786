// Weights in blocks of codes, in tiles that hold the same codes and scales.
//
// A file has, for each output, blocks of 32 or 256 inputs: codes of 2 to 8 bits, a half-precision
// scale d, and in larger blocks a second level of scales, one for every 16 or 32 inputs (a group):
//   w = d * scale * (code - zero) - dmin * minimum, or d * (code - zero) + m
// Layouts of the files: ggml-org/ggml, ggml-common.h and ggml-quants.c. Codes of 4 bits of other
// checkpoints, and weights that are rounded to such here, make blocks of 32 or 128 inputs:
//   w = scale * (code + shift)
//
// A tile holds the same of kTile outputs, block by block:
//   the halves d of all outputs, then their halves m or dmin where the kind has such; scales and shifts
//   of codes are of any ScaleKind,
//   then for every 32 inputs a chunk: planes of bits, then the bytes of the groups' scales, and of
//   their minima, for each group one for each output.
// A plane of b bits consists of steps of 128 bytes. Bytes 4 e to 4 e + 3 of a step are output e's for
// inputs 4 q to 4 q + 3, for 8 / b neighbouring quads q at once: the first in the lowest bits. Such
// quads are what instructions for 8-bit products read, and each second byte is a 16-bit number.
#pragma once

#include <cstdint>

#include "linear.h"
#include "linear_tiles.h"

namespace outdraft {

constexpr int64_t kChunkInputs = 32;
constexpr int64_t kMostGroups = 16;  // of a block
constexpr int64_t kPlaneStep = 4 * kTile;

// WeightFormat of Python has them in this order.
enum class GgufKind : int64_t {
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs,
  // Codes with scales of their own, by the inputs of a block.
  kInt4By32, kInt4By128, kInt4ZeroBy32, kInt4ZeroBy128
};
constexpr int64_t kNumGgufKinds = 16;
constexpr bool is_codes(GgufKind kind) { return kind >= GgufKind::kInt4By32; }

enum class Scales : int64_t { kNone, kBytes, kSignedBytes, kNibblesBesideMinima };

// How a kind lies in files and tiles.
struct GgufLayout {
  int64_t block_inputs, file_bytes;  // of a block
  int64_t low_bits, high_bits;       // of the two planes; 0: there is no second one
  int64_t group_inputs;
  Scales scales;
  bool has_minima;  // in bytes of their own
  bool has_offset;  // m, or dmin, or a shift
  int32_t zero;

  constexpr int64_t groups_of_chunk() const { return kChunkInputs / group_inputs; }
  constexpr int64_t scale_bytes() const {  // of a chunk, without minima
    return scales == Scales::kNone ? 0 : groups_of_chunk() * kTile;
  }
  constexpr int64_t plane_bytes() const { return (low_bits + high_bits) * kPlaneStep; }
  constexpr int64_t chunk_bytes() const {
    return plane_bytes() + scale_bytes() * (has_minima ? 2 : 1);
  }
  constexpr int64_t halves_bytes(ScaleKind kind = ScaleKind::kFloat16) const {
    return (has_offset ? 2 : 1) * size_of(kind) * kTile;
  }
  constexpr int64_t tile_block_bytes(ScaleKind kind = ScaleKind::kFloat16) const {
    return halves_bytes(kind) + block_inputs / kChunkInputs * chunk_bytes();
  }
};

constexpr GgufLayout kGgufLayouts[kNumGgufKinds] = {
    {32, 18, 4, 0, 32, Scales::kNone, false, false, 8},
    {32, 20, 4, 0, 32, Scales::kNone, false, true, 0},
    {32, 22, 4, 1, 32, Scales::kNone, false, false, 16},
    {32, 24, 4, 1, 32, Scales::kNone, false, true, 0},
    {32, 34, 8, 0, 32, Scales::kNone, false, false, 0},
    {256, 84, 2, 0, 16, Scales::kNibblesBesideMinima, false, true, 0},
    {256, 110, 2, 1, 16, Scales::kSignedBytes, false, false, 4},
    {256, 144, 4, 0, 32, Scales::kBytes, true, true, 0},
    {256, 176, 4, 1, 32, Scales::kBytes, true, true, 0},
    {256, 210, 4, 2, 16, Scales::kSignedBytes, false, false, 32},
    {32, 18, 4, 0, 32, Scales::kNone, false, false, 0},
    {256, 136, 4, 0, 32, Scales::kSignedBytes, false, false, 0},
    {32, 0, 4, 0, 32, Scales::kNone, false, false, kInt4Zero},
    {128, 0, 4, 0, 32, Scales::kNone, false, false, kInt4Zero},
    {32, 0, 4, 0, 32, Scales::kNone, false, true, kInt4Zero},
    {128, 0, 4, 0, 32, Scales::kNone, false, true, kInt4Zero},
};
constexpr const GgufLayout& layout_of(GgufKind kind) {
  return kGgufLayouts[static_cast<int64_t>(kind)];
}

// The numbers that codes of 4 bits stand for in kIq4Nl and kIq4Xs.
constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};

// The numbers of nibbles, each in a byte.
[[gnu::always_inline]] inline Words iq4_numbers(Words codes) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_maskz_broadcast_i32x4(__mmask16(-1), load<__m128i>(kIq4Numbers));
  return (Words)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(kIq4Numbers));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_s8(load<int8x16_t>(kIq4Numbers), (uint8x16_t)codes);
#endif
}

// Outputs of a weight in blocks of one kind. All parts but the last one fill tiles.
struct GgufPart {
  GgufKind kind;
  ScaleKind scale_kind;
  int64_t first_tile, num_outputs;
  int64_t tile_bytes;
  char* tiles;
};

// The kind of a tile, and where it lies.
struct GgufTile {
  GgufKind kind;
  ScaleKind scale_kind;
  char* at;

  const GgufLayout& layout() const { return layout_of(kind); }
  int64_t halves_bytes() const { return layout().halves_bytes(scale_kind); }
  int64_t block_bytes() const { return layout().tile_block_bytes(scale_kind); }
};
GgufTile gguf_tile(const LinearWeights& weights, int64_t tile);

// The inputs of a weight's blocks, zeros after the last input included.
int64_t padded_inputs(const LinearWeights& weights);

// What a block of a tile multiplies the codes of each group with, [groups][kTile], and what it adds
// for each unit of input: 0, or m, or -dmin * minimum, or scale * shift. False: nothing is to be added.
bool gguf_scales(const GgufTile& tile, const char* block, float* factors, float* offsets);

// sums[num_rows, kTile] = the products with one tile, of rows in quads (InputKind::kQuads). Sums over
// a group are exact; groups are added in order.
void multiply_gguf(const LinearWeights& weights, const Inputs& x, int64_t num_rows, int64_t tile,
                   float* sums);

// The same of rows in bytes (InputKind::kBytes). Sums over a block are exact; blocks are added in order.
void multiply_gguf_bytes(const LinearWeights& weights, const Inputs& x, int64_t num_rows,
                         int64_t tile, float* sums);

}  // namespace outdraft
