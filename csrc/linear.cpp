// Products with weights in tiles: see linear.h, and linear_tiles.cpp for the layouts.

#include "linear.h"

#include <algorithm>

#include "export.h"
#include "linear_tiles.h"

namespace outdraft {
namespace {

// One block of rows against all tiles; a unit is some tiles of results.
struct Product {
  MultiplyTile multiply;
  LinearWeights weights;
  Inputs x;
  Rows y;
  int64_t num_rows;
  bool is_gated;
  const std::vector<int64_t>* tiles;  // null: all

  int64_t num_results() const {
    if (tiles != nullptr) return static_cast<int64_t>(tiles->size()) * kTile;
    return is_gated ? weights.num_outputs / 2 : weights.num_outputs;
  }
  int64_t num_tiles() const { return (num_results() + kTile - 1) / kTile; }
  int64_t unit_tiles() const { return (num_tiles() + kMaxUnits - 1) / kMaxUnits; }
  int64_t num_units() const { return (num_tiles() + unit_tiles() - 1) / unit_tiles(); }
  int64_t tile_sums() const { return num_rows * kTile; }
  size_t scratch_bytes() const {
    return sizeof(float) * (unit_tiles() + (is_gated ? 2 : 0)) * tile_sums();
  }

  void compute(int64_t unit, void* scratch) const {
    float *sums = static_cast<float*>(scratch), *up = sums + unit_tiles() * tile_sums();
    const int64_t first = unit * unit_tiles(), end = std::min(first + unit_tiles(), num_tiles());
    for (int64_t tile = first; tile < end; ++tile, sums += tile_sums()) {
      if (is_gated) {
        multiply_gated(multiply, weights, x, num_rows, tile, Gate{}, sums, up);
      } else {
        multiply(weights, x, num_rows, tiles == nullptr ? tile : (*tiles)[tile], sums);
      }
    }
  }

  void store(int64_t unit, const void* scratch) const {
    const float* sums = static_cast<const float*>(scratch);
    const int64_t first = unit * unit_tiles(), end = std::min(first + unit_tiles(), num_tiles());
    for (int64_t tile = first; tile < end; ++tile, sums += tile_sums()) {
      const int64_t output = tile * kTile, count = std::min(kTile, num_results() - output);
      store_tile(sums, is_gated || tiles != nullptr ? nullptr : weights.bias, y, num_rows, output, count);
    }
  }
};

void multiply(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows,
              bool is_gated, const std::vector<int64_t>* tiles = nullptr) {
  run_products(team, weights, x, num_rows,
               [&](MultiplyTile kernel, const Inputs& inputs, int64_t first, int64_t count) {
                 auto* to = static_cast<char*>(y.numbers) + first * y.stride * size_of(y.dtype);
                 return Product{kernel,   weights, inputs, Rows{to, y.dtype, y.stride}, count,
                                is_gated, tiles};
               });
}

}  // namespace

void linear(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows) {
  multiply(team, weights, x, y, num_rows, false);
}

void linear_tiles(Team* team, const LinearWeights& weights, const std::vector<int64_t>& tiles,
                  ConstRows x, Rows y, int64_t num_rows) {
  multiply(team, weights, x, y, num_rows, false, &tiles);
}

void linear_gated(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows) {
  multiply(team, weights, x, y, num_rows, true);
}

}  // namespace outdraft

// Whether it multiplies bfloat16 rows as they are; else they become float32 first, or integers where they
// meet codes. Those that meet blocks always do.
OUTDRAFT_EXPORT int32_t linear_keeps_bf16() { return outdraft::kHasBf16Dot; }

OUTDRAFT_EXPORT void linear_multiply(outdraft::Team* team, const outdraft::LinearWeights* weights,
                                     const void* x, int64_t x_dtype, int64_t x_stride, void* y,
                                     int64_t y_dtype, int64_t y_stride, int64_t num_rows) {
  using outdraft::Dtype;
  outdraft::linear(team, *weights, {x, Dtype{x_dtype}, x_stride}, {y, Dtype{y_dtype}, y_stride},
                   num_rows);
}

OUTDRAFT_FUNCTIONS(linear_keeps_bf16, linear_multiply);
