// From the rows of a GGUF file to tiles, and from tiles to numbers: see gguf_tiles.h.

#include <algorithm>
#include <cstring>
#include <vector>

#include "block_packing.h"
#include "export.h"
#include "gguf_tiles.h"
#include "mapped_memory.h"
#include "tile_packing.h"
#include "vector_math.h"

namespace outdraft {
namespace {

void put_nibbles(const uint8_t* bytes, int64_t count, uint8_t* low, uint8_t* high) {
  for (int64_t i = 0; i < count; ++i) low[i] = bytes[i] & 15, high[i] = bytes[i] >> 4;
}

// 32 inputs: nibbles of two halves, and maybe a fifth bit of each.
void read_small(const uint8_t* block, int64_t num_halves, bool has_fifth, Block* to) {
  to->d = block, to->offset = block + 2;
  block += 2 * num_halves;
  put_nibbles(block + (has_fifth ? 4 : 0), 16, to->codes, to->codes + 16);
  for (int64_t i = 0; has_fifth && i < kChunkInputs; ++i) {
    to->codes[i] |= (block[i / 8] >> i % 8 & 1) << 4;
  }
}

// Eight scales and eight minima of 6 bits in 12 bytes.
void read_sixes(const uint8_t* packed, Block* to) {
  for (int64_t i = 0; i < 4; ++i) {
    const uint8_t a = packed[i], b = packed[i + 4], c = packed[i + 8];
    to->scales[i] = a & 63, to->minima[i] = b & 63;
    to->scales[i + 4] = (c & 15) | (a >> 6) << 4, to->minima[i + 4] = c >> 4 | (b >> 6) << 4;
  }
}

// 128 inputs in 32 bytes, 2 bits each: 32 inputs after the other 32.
void read_pairs_of_bits(const uint8_t* bytes, uint8_t* codes) {
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t i = 0; i < 32; ++i) codes[32 * j + i] = bytes[i] >> 2 * j & 3;
  }
}

void read_q2_k(const uint8_t* block, Block* to) {
  to->d = block + 80, to->offset = block + 82;
  std::memcpy(to->scales, block, 16);
  for (int64_t half = 0; half < 2; ++half) {
    read_pairs_of_bits(block + 16 + 32 * half, to->codes + 128 * half);
  }
}

void read_q3_k(const uint8_t* block, Block* to) {
  to->d = block + 108;
  const uint8_t *high = block, *packed = block + 96;
  for (int64_t half = 0; half < 2; ++half) {
    read_pairs_of_bits(block + 32 + 32 * half, to->codes + 128 * half);
  }
  for (int64_t i = 0; i < 256; ++i) to->codes[i] |= (high[i % 32] >> i / 32 & 1) << 2;
  for (int64_t i = 0; i < 16; ++i) {
    const uint8_t low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
    to->scales[i] = (low | (packed[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
  }
}

void read_q45_k(const uint8_t* block, bool has_fifth, Block* to) {
  to->d = block, to->offset = block + 2;
  read_sixes(block + 4, to);
  const uint8_t *fifths = block + 16, *nibbles = fifths + (has_fifth ? 32 : 0);
  for (int64_t i = 0; i < 4; ++i) {
    put_nibbles(nibbles + 32 * i, 32, to->codes + 64 * i, to->codes + 64 * i + 32);
  }
  for (int64_t c = 0; has_fifth && c < 8; ++c) {
    for (int64_t i = 0; i < 32; ++i) to->codes[32 * c + i] |= (fifths[i] >> c & 1) << 4;
  }
}

void read_q6_k(const uint8_t* block, Block* to) {
  to->d = block + 208;
  std::memcpy(to->scales, block + 192, 16);
  for (int64_t half = 0; half < 2; ++half) {
    const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
    uint8_t* codes = to->codes + 128 * half;
    put_nibbles(low, 64, codes, codes + 64);
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t i = 0; i < 32; ++i) codes[32 * j + i] |= (high[i] >> 2 * j & 3) << 4;
    }
  }
}

void read_iq4_xs(const uint8_t* block, Block* to) {
  to->d = block;
  for (int64_t c = 0; c < 8; ++c) {
    const uint8_t low = block[4 + c / 2] >> 4 * (c % 2) & 15, high = block[2 + c / 4] >> 2 * (c % 4) & 3;
    to->scales[c] = (low | high << 4) - 32;
    put_nibbles(block + 8 + 16 * c, 16, to->codes + 32 * c, to->codes + 32 * c + 16);
  }
}

void read_block(GgufKind kind, const uint8_t* block, Block* to) {
  switch (kind) {
    case GgufKind::kQ4_0:
    case GgufKind::kIq4Nl:
      return read_small(block, 1, false, to);
    case GgufKind::kQ4_1:
      return read_small(block, 2, false, to);
    case GgufKind::kQ5_0:
      return read_small(block, 1, true, to);
    case GgufKind::kQ5_1:
      return read_small(block, 2, true, to);
    case GgufKind::kQ8_0:
      to->d = block;
      std::memcpy(to->codes, block + 2, kChunkInputs);
      return;
    case GgufKind::kQ2_K:
      return read_q2_k(block, to);
    case GgufKind::kQ3_K:
      return read_q3_k(block, to);
    case GgufKind::kQ4_K:
      return read_q45_k(block, false, to);
    case GgufKind::kQ5_K:
      return read_q45_k(block, true, to);
    case GgufKind::kQ6_K:
      return read_q6_k(block, to);
    case GgufKind::kIq4Xs:
      return read_iq4_xs(block, to);
    default:
      __builtin_unreachable();  // no file has it
  }
}

// Bits [first, first + kBits) of the codes of a chunk, into a plane.
template <int kBits>
void put_plane(const uint8_t* codes, int64_t first, char* lane) {
  constexpr int kQuads = 8 / kBits;  // of a step
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
  for (int step = 0; step < kBits; ++step, lane += kPlaneStep, codes += 4 * kQuads) {
    uint32_t word = 0;
    for (int q = 0; q < kQuads; ++q) {
      uint32_t quad;
      std::memcpy(&quad, codes + 4 * q, 4);
      word |= (quad >> first & kMask) << kBits * q;
    }
    std::memcpy(lane, &word, 4);
  }
}

void put_plane(const uint8_t* codes, int64_t first, int64_t bits, char* lane) {
  switch (bits) {
    case 1:
      return put_plane<1>(codes, first, lane);
    case 2:
      return put_plane<2>(codes, first, lane);
    case 4:
      return put_plane<4>(codes, first, lane);
    default:
      return put_plane<8>(codes, first, lane);
  }
}

// The rows of a file.
struct FileRows {
  const uint8_t* const* rows;
};

void pack_tile(const LinearWeights& weights, const FileRows& source, int64_t tile) {
  const GgufTile to = gguf_tile(weights, tile);
  const GgufLayout& layout = to.layout();
  const int64_t end = std::min((tile + 1) * kTile, weights.num_outputs);
  for (int64_t block = 0; block < weights.num_inputs / layout.block_inputs; ++block) {
    for (int64_t output = tile * kTile; output < end; ++output) {
      Block read;
      read_block(to.kind, source.rows[output] + block * layout.file_bytes, &read);
      put_block(to, read, block, output % kTile);
    }
  }
}

int32_t code_of(GgufKind kind, const char* chunk, int64_t lane, int64_t input) {
  const GgufLayout& layout = layout_of(kind);
  const auto bits_of = [&](const char* plane, int64_t bits) {
    const int64_t quad = input / 4, quads_of_step = 8 / bits;
    const uint8_t byte = plane[quad / quads_of_step * kPlaneStep + 4 * lane + input % 4];
    return byte >> bits * (quad % quads_of_step) & ((1 << bits) - 1);
  };
  int32_t code = bits_of(chunk, layout.low_bits);
  if (layout.low_bits == 8) return static_cast<int8_t>(code);
  if (kind == GgufKind::kIq4Nl || kind == GgufKind::kIq4Xs) return kIq4Numbers[code];
  if (layout.high_bits == 0) return code;
  const char* high = chunk + layout.low_bits * kPlaneStep;
  return code | bits_of(high, layout.high_bits) << layout.low_bits;
}

// The numbers of one output, float32 [num_inputs].
void read_output(const LinearWeights& weights, int64_t output, float* to) {
  const int64_t lane = output % kTile;
  const GgufTile tile = gguf_tile(weights, output / kTile);
  const GgufLayout& layout = tile.layout();
  for (int64_t b = 0; b < weights.num_inputs / layout.block_inputs; ++b) {
    const char* block = tile.at + b * tile.block_bytes();
    float factors[kMostGroups * kTile], offsets[kMostGroups * kTile];
    const bool adds = gguf_scales(tile, block, factors, offsets);
    for (int64_t i = 0; i < layout.block_inputs; ++i, ++to) {
      const int64_t group = i / layout.group_inputs;
      const char* chunk = block + tile.halves_bytes() + i / kChunkInputs * layout.chunk_bytes();
      const int32_t code = code_of(tile.kind, chunk, lane, i % kChunkInputs) - layout.zero;
      const float product = factors[group * kTile + lane] * static_cast<float>(code);
      *to = adds ? product + offsets[group * kTile + lane] : product;
    }
  }
}

}  // namespace

GgufTile gguf_tile(const LinearWeights& weights, int64_t tile) {
  const GgufPart* part = weights.parts + weights.num_parts - 1;
  while (part->first_tile > tile) --part;
  return {part->kind, part->scale_kind, part->tiles + (tile - part->first_tile) * part->tile_bytes};
}

void put_block(const GgufTile& tile, const Block& block, int64_t number, int64_t lane) {
  const GgufLayout& layout = tile.layout();
  const int64_t size = size_of(tile.scale_kind);
  char* to = tile.at + number * tile.block_bytes();
  std::memcpy(to + size * lane, block.d, size);
  if (layout.has_offset) std::memcpy(to + size * (kTile + lane), block.offset, size);
  to += tile.halves_bytes();
  for (int64_t c = 0; c < layout.block_inputs / kChunkInputs; ++c, to += layout.chunk_bytes()) {
    const uint8_t* codes = block.codes + c * kChunkInputs;
    put_plane(codes, 0, layout.low_bits, to + 4 * lane);
    char* high = to + layout.low_bits * kPlaneStep;
    if (layout.high_bits > 0) put_plane(codes, layout.low_bits, layout.high_bits, high + 4 * lane);
    if (layout.scales == Scales::kNone) continue;
    for (int64_t i = 0; i < layout.groups_of_chunk(); ++i) {
      char* at = to + layout.plane_bytes() + i * kTile + lane;
      const int64_t group = c * layout.groups_of_chunk() + i;
      *at = static_cast<char>(block.scales[group]);
      if (layout.has_minima) at[layout.scale_bytes()] = static_cast<char>(block.minima[group]);
    }
  }
}

LinearWeights* make_blocks(const BlockOutputs* parts, int64_t num_parts, int64_t num_inputs,
                           const float* bias, bool meets_bytes) {
  int64_t total = 0, tiles_bytes = 0;
  const auto tile_bytes = [&](const BlockOutputs& part) {
    const GgufLayout& layout = layout_of(part.kind);
    const int64_t num_blocks = (num_inputs + layout.block_inputs - 1) / layout.block_inputs;
    return num_blocks * layout.tile_block_bytes(part.scale_kind);
  };
  const auto num_tiles = [](const BlockOutputs& part) { return (part.num_outputs + kTile - 1) / kTile; };
  for (int64_t p = 0; p < num_parts; ++p) {
    total += parts[p].num_outputs;
    tiles_bytes += num_tiles(parts[p]) * tile_bytes(parts[p]);
  }
  const int64_t bias_bytes = bias == nullptr ? 0 : (total + 1) / 2 * 8;
  const int64_t parts_bytes = num_parts * sizeof(GgufPart);
  const int64_t num_bytes = tiles_bytes + bias_bytes + parts_bytes + sizeof(LinearWeights);
  char* memory = map_memory(num_bytes);
  if (memory == nullptr) return nullptr;
  char* after = memory + tiles_bytes;
  auto* own_parts = reinterpret_cast<GgufPart*>(after + bias_bytes);
  auto* weights = reinterpret_cast<LinearWeights*>(after + bias_bytes + parts_bytes);
  *weights = {};
  weights->format = Format::kGguf;
  weights->num_inputs = weights->group_inputs = num_inputs;
  weights->num_outputs = total;
  weights->num_groups = 1;
  weights->tiles = memory;
  weights->parts = own_parts;
  weights->num_parts = num_parts;
  weights->meets_bytes = meets_bytes;
  weights->num_bytes = num_bytes;
  if (bias != nullptr) {
    weights->bias = reinterpret_cast<float*>(after);
    std::memcpy(after, bias, 4 * total);
  }
  for (int64_t p = 0, tile = 0; p < num_parts; tile += num_tiles(parts[p]), ++p) {
    const BlockOutputs& part = parts[p];
    own_parts[p] = {part.kind, part.scale_kind, tile, part.num_outputs, tile_bytes(part), memory};
    memory += num_tiles(part) * tile_bytes(part);
  }
  return weights;
}

void read_rows(const LinearWeights& weights, const int64_t* ids, int64_t count, Dtype dtype, void* to) {
  const int64_t size = weights.num_inputs;
  std::vector<float> row(static_cast<size_t>(size));
  for (int64_t i = 0; i < count; ++i) {
    read_output(weights, ids[i], row.data());
    with_numbers(to, dtype == Dtype::kBfloat16,
                 [&](auto* numbers) { convert(row.data(), size, numbers + i * size); });
  }
}

}  // namespace outdraft

using outdraft::LinearWeights;

// Weights of rows that lie anywhere, such as in a mapped file, in parts of some rows, as make_blocks
// has them. Null: no memory.
OUTDRAFT_EXPORT LinearWeights* linear_pack_gguf(outdraft::Team* team, int64_t num_parts,
                                                const int64_t* kinds, const int64_t* num_outputs,
                                                const uint8_t* const* rows, int64_t num_inputs,
                                                const float* bias, bool meets_bytes) {
  using namespace outdraft;
  std::vector<BlockOutputs> parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    parts.push_back({GgufKind{kinds[p]}, ScaleKind::kFloat16, num_outputs[p]});
  }
  LinearWeights* weights = make_blocks(parts.data(), num_parts, num_inputs, bias, meets_bytes);
  if (weights != nullptr) run(team, Packing<FileRows>{*weights, {rows}});
  return weights;
}

// to[i] = the numbers of output ids[i], [count, num_inputs]; ids are in range.
OUTDRAFT_EXPORT void linear_read_rows(const LinearWeights* weights, const int64_t* ids,
                                      int64_t count, int64_t dtype, void* to) {
  outdraft::read_rows(*weights, ids, count, outdraft::Dtype{dtype}, to);
}

OUTDRAFT_FUNCTIONS(linear_pack_gguf, linear_read_rows);
