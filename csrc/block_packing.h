// Weights in blocks of codes, as they are put into tiles: see gguf_tiles.h.
#pragma once

#include <cstdint>

#include "gguf_tiles.h"

namespace outdraft {

// A block of one output, its codes without the second level of scales.
struct Block {
  uint8_t codes[256];  // as the planes have them; of 8 bits signed
  uint8_t scales[kMostGroups], minima[kMostGroups];
  const void *d = nullptr, *offset = nullptr;  // as the tile has them
};

// Block `number` of an output, which has place `lane` in its tile.
void put_block(const GgufTile& tile, const Block& block, int64_t number, int64_t lane);

// Outputs of a weight that have blocks of one kind.
struct BlockOutputs {
  GgufKind kind;
  ScaleKind scale_kind;
  int64_t num_outputs;
};

// Tiles of zeros for parts, all but the last of whole tiles, and a bias [all outputs] of float32 or null.
// `meets_bytes`: rows become integers of 8 bits, else of 16. Null: no memory.
LinearWeights* make_blocks(const BlockOutputs* parts, int64_t num_parts, int64_t num_inputs,
                           const float* bias, bool meets_bytes);

}  // namespace outdraft
