// Weights packed into tiles by all threads: `pack_tile(weights, source, tile)` fills one.
#pragma once

#include <algorithm>

#include "linear.h"
#include "team.h"

namespace outdraft {

// A unit is some tiles. Nothing is to be computed: who stores a unit packs it.
template <class From>
struct Packing {
  LinearWeights weights;
  From source;

  int64_t num_tiles() const { return (weights.num_outputs + kTile - 1) / kTile; }
  int64_t unit_tiles() const { return (num_tiles() + kMaxUnits - 1) / kMaxUnits; }
  int64_t num_units() const { return (num_tiles() + unit_tiles() - 1) / unit_tiles(); }
  size_t scratch_bytes() const { return 0; }
  void compute(int64_t, void*) const {}

  void store(int64_t unit, const void*) const {
    const int64_t end = std::min((unit + 1) * unit_tiles(), num_tiles());
    for (int64_t tile = unit * unit_tiles(); tile < end; ++tile) {
      pack_tile(weights, source, tile);
    }
  }
};

}  // namespace outdraft
