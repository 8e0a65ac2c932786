// y[T, E] = x[T, D] W[E, D]^T + b, for weights in tiles and any number of rows.
//
// A row's bits depend neither on the rows beside it nor on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"
#include "team.h"

namespace outdraft {

enum class Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1 };
constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

constexpr int64_t kTile = 32;     // outputs that lie together
constexpr int64_t kLineBytes = 64;

// From row to row where products read them, in numbers. They fill lines, an odd number of them, as
// rows at even distances share parts of a cache.
constexpr int64_t kept_stride(int64_t num_inputs, Dtype dtype) {
  return ((size_of(dtype) * num_inputs + kLineBytes - 1) / kLineBytes | 1) * kLineBytes /
         size_of(dtype);
}
constexpr int32_t kInt4Zero = 8;  // the code of zero

// How weights lie in a tile: see linear_tiles.cpp; kInt4: for matrix registers alone, see linear_amx.cpp;
// kGguf: in blocks of codes, see gguf_tiles.h.
enum class Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kGguf = 4 };

// What a scale or a shift is.
enum class ScaleKind : int64_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };
constexpr int64_t size_of(ScaleKind kind) { return kind == ScaleKind::kFloat32 ? 4 : 2; }

struct GgufPart;  // gguf_tiles.h

// Weights of one product; made by `linear_pack`, freed by `linear_free` (linear_pack.cpp).
struct LinearWeights {
  Format format;
  int64_t num_inputs, num_outputs;
  int64_t group_inputs, num_groups;  // that share a scale; without scales one group of all
  int64_t tile_bytes;                // of one tile, all inputs
  char* tiles;
  char* scales;         // [tile][group][kTile], or null
  char* shifts;         // the same of weights with a zero point
  ScaleKind scale_kind;  // of scales and shifts
  float* bias;          // [E], or null
  bool is_symmetric;    // no int8 code is -128; of kInt8
  int64_t num_bytes;    // of the mapping that holds all
  const GgufPart* parts;  // of kGguf, which has no scales of its own here
  int64_t num_parts;
  bool meets_bytes = false;  // rows become integers of 8 bits, else of 16; of kGguf
};

struct ConstRows {
  const void* numbers;
  Dtype dtype;
  int64_t stride;        // elements from row to row
  bool is_kept = false;  // in kept memory, `kept_stride` apart: a product may read them there

  float at(int64_t row, int64_t k) const {
    const int64_t place = row * stride + k;
    return dtype == Dtype::kFloat32 ? static_cast<const float*>(numbers)[place]
                                    : widen(static_cast<const uint16_t*>(numbers)[place]);
  }
};

struct Rows {
  void* numbers;
  Dtype dtype;
  int64_t stride;
};

// Products of all rows. bfloat16 rows and weights are multiplied by the machine's bfloat16 dot
// products if it has them. Else rows that meet codes become integers (linear_tiles.h), and all others
// are multiplied in float32. Sums are float32. Inputs that are not kept are
// copied first, so x may be freed when this returns; y may not overlap x. `team` is not of a turn: a product takes its
// own, and one of few numbers none.
void linear(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows);

// The same of some tiles, which have kTile outputs each and no bias: y [num_rows, kTile * tiles].
void linear_tiles(Team* team, const LinearWeights& weights, const std::vector<int64_t>& tiles,
                  ConstRows x, Rows y, int64_t num_rows);

// The same of all, then y = silu(gate) * up, where the gate is the first half of the products and `up` the
// second (Shazeer 2020).
void linear_gated(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows);

// to[i] = the numbers of output ids[i], [count, num_inputs], as the kernels read them. Only of kGguf.
void read_rows(const LinearWeights& weights, const int64_t* ids, int64_t count, Dtype dtype, void* to);

}  // namespace outdraft
