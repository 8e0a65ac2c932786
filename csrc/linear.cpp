// Products with weights in tiles: see linear.h.
//
// A tile holds 32 outputs, and of all inputs, step by step, what one instruction meets:
//   float32    a step is one input: 32 numbers
//   bfloat16   a step is two neighbouring inputs: 32 words, the even input in the low half
// Rows are copied to pieces of 128 inputs: [piece][row][128], so that a piece of a tile and the rows
// it meets stay in the nearest cache. The sum of an output runs over the inputs of a piece in order,
// in one register that begins with zero; the pieces are added in order; then comes the bias. Long
// sums in float32 lose digits, short ones that are added lose fewer. That order is the same for any
// number of rows, of threads, and any instruction set, but bfloat16 dot products round as the
// machine does.
//
// Tiles of outputs by pairs of inputs are the layout of oneDNN's and llama.cpp's bfloat16 products.

#include "linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "export.h"
#include "simd.h"

namespace outdraft {
namespace {

constexpr int64_t kTile = 32;        // outputs
constexpr int64_t kPiece = 128;      // inputs
constexpr int64_t kBlockRows = 256;  // rows that meet a tile while it is in the cache
constexpr int64_t kStepBytes = 128;  // of a tile
constexpr int64_t kLine = 64;        // bytes that memory gives at once
constexpr int64_t kAhead = 8192;     // bytes; hardware alone does not look beyond a page
constexpr int64_t kMinShared = 1 << 16;  // multiplications; below, sharing costs what it saves
constexpr int64_t kHugePage = 1 << 21;

// Sums that fit the registers: kVectors of outputs by kMaxRows.
#if defined(__AVX512F__)
constexpr int kVectors = 2, kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int kVectors = 2, kMaxRows = 5;
#else
constexpr int kVectors = 4, kMaxRows = 5;
#endif
constexpr int kStrip = kVectors * kWidth;  // outputs that are computed together

template <int R>
using Sums = Floats[R][kVectors];

// Each kernel adds one step, for the outputs of a strip, to the sums of R rows.

struct Float32Kernel {
  using Number = float;  // of a row
  static constexpr int kInputs = 1, kRowNumbers = 1;
  template <int R>
  static inline void add(const char* weights, const float* x, Sums<R>& sums) {
    Floats w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load<Floats>(weights + v * sizeof(Floats));
    for (int r = 0; r < R; ++r) {
      const Floats a = broadcast(x[r * kPiece]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fused(w[v], a, sums[r][v]);
    }
  }
};

struct WideBf16Kernel {
  using Number = float;
  static constexpr int kInputs = 2, kRowNumbers = 2;
  template <int R>
  static inline void add(const char* weights, const float* x, Sums<R>& sums) {
    Words pairs[kVectors];
    for (int v = 0; v < kVectors; ++v) pairs[v] = load<Words>(weights + v * sizeof(Words));
    for (int r = 0; r < R; ++r) {
      const Floats a = broadcast(x[r * kPiece]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fused(low_halves(pairs[v]), a, sums[r][v]);
    }
    for (int r = 0; r < R; ++r) {
      const Floats b = broadcast(x[r * kPiece + 1]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fused(high_halves(pairs[v]), b, sums[r][v]);
    }
  }
};

struct Bf16DotKernel {
  using Number = uint32_t;  // two inputs
  static constexpr int kInputs = 2, kRowNumbers = 1;
  template <int R>
  static inline void add(const char* weights, const uint32_t* x, Sums<R>& sums) {
    Words w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load<Words>(weights + v * sizeof(Words));
    for (int r = 0; r < R; ++r) {
      const Words a = broadcast_word(x[r * kPiece / 2]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_pairs(sums[r][v], w[v], a);
    }
  }
};

// out[R, kTile] += one piece of a strip. Meanwhile the cache fetches kLines lines a step.
template <class Kernel, int R, int kLines>
void add_piece(const char* weights, const char* ahead, const typename Kernel::Number* x,
               int64_t num_steps, float* out) {
  Sums<R> sums;
  for (auto& of_row : sums) {
    for (Floats& sum : of_row) sum = Floats{};
  }
  int64_t step = 0;
  do {  // at least once: else the compiler keeps the sums in memory, too
    for (int line = 0; line < kLines; ++line) prefetch(ahead + (step * kLines + line) * kLine);
    Kernel::template add<R>(weights + step * kStepBytes, x + step * Kernel::kRowNumbers, sums);
  } while (++step < num_steps);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* at = out + r * kTile + v * kWidth;
      store(at, load<Floats>(at) + sums[r][v]);
    }
  }
}

template <class Kernel, int kLines, int R = kMaxRows>
void add_rows(int64_t num_rows, const char* weights, const char* ahead,
              const typename Kernel::Number* x, int64_t num_steps, float* out) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      return add_rows<Kernel, kLines, R - 1>(num_rows, weights, ahead, x, num_steps, out);
    }
  }
  add_piece<Kernel, R, kLines>(weights, ahead, x, num_steps, out);
}

// sums[num_rows, kTile] += the products with one piece of a tile.
template <class Kernel>
void add_tile_piece(const char* weights, const typename Kernel::Number* x, int64_t num_rows,
                    int64_t num_steps, float* sums) {
  constexpr int64_t kPieceNumbers = kPiece / Kernel::kInputs * Kernel::kRowNumbers;
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t num_calls = num_blocks * (kTile / kStrip);
  // Who is alone fetches all that the next tiles need, else the first two half of it each: a block
  // that waits for memory leaves nothing to do for it while the next one computes.
  const char* ahead = weights + kAhead;
  for (int64_t block = 0, r = 0, call = 0; block < num_blocks; ++block) {
    const int64_t end = num_rows * (block + 1) / num_blocks;  // blocks of about equal size
    for (int64_t e = 0; e < kTile; e += kStrip, ++call) {
      const auto add = num_calls == 1 ? add_rows<Kernel, 2>
                       : call < 2     ? add_rows<Kernel, 1>
                                      : add_rows<Kernel, 0>;
      add(end - r, weights + 4 * e, ahead + call * num_steps * kLine, x + r * kPieceNumbers,
          num_steps, sums + r * kTile + e);
    }
    r = end;
  }
}

// sums[num_rows, kTile] = the products with one tile.
template <class Kernel>
void multiply_tile(const LinearWeights& weights, const void* x, int64_t num_rows, int64_t tile,
                   float* sums) {
  constexpr int64_t kSteps = kPiece / Kernel::kInputs;
  const char* tile_at = weights.tiles + tile * weights.tile_bytes;
  const auto* rows = static_cast<const typename Kernel::Number*>(x);
  const int64_t num_steps = (weights.num_inputs + Kernel::kInputs - 1) / Kernel::kInputs;
  std::memset(sums, 0, sizeof(float) * num_rows * kTile);
  for (int64_t step = 0; step < num_steps; step += kSteps) {
    add_tile_piece<Kernel>(tile_at + step * kStepBytes, rows + step * Kernel::kRowNumbers * num_rows,
                           num_rows, std::min(kSteps, num_steps - step), sums);
  }
}

using MultiplyTile = void (*)(const LinearWeights&, const void*, int64_t, int64_t, float*);

MultiplyTile kernel_of(Format format, Dtype rows) {
  if (format == Format::kFloat32) return multiply_tile<Float32Kernel>;
  if (kHasBf16Dot && rows == Dtype::kBfloat16) return multiply_tile<Bf16DotKernel>;
  return multiply_tile<WideBf16Kernel>;
}

// One block of rows against all tiles; a unit is some tiles.
struct Product {
  MultiplyTile multiply;
  LinearWeights weights;
  const void* x;
  Rows y;
  int64_t num_rows, unit_tiles;

  int64_t num_tiles() const { return (weights.num_outputs + kTile - 1) / kTile; }
  int64_t num_units() const { return (num_tiles() + unit_tiles - 1) / unit_tiles; }
  size_t scratch_bytes() const { return sizeof(float) * unit_tiles * num_rows * kTile; }

  void compute(int64_t unit, void* scratch) const {
    float* sums = static_cast<float*>(scratch);
    for (int64_t i = 0; i < unit_tiles && unit * unit_tiles + i < num_tiles(); ++i) {
      multiply(weights, x, num_rows, unit * unit_tiles + i, sums + i * num_rows * kTile);
    }
  }

  void store(int64_t unit, const void* scratch) const {
    const float* sums = static_cast<const float*>(scratch);
    for (int64_t i = 0; i < unit_tiles && unit * unit_tiles + i < num_tiles(); ++i) {
      const int64_t first = (unit * unit_tiles + i) * kTile;
      const int64_t count = std::min(kTile, weights.num_outputs - first);
      for (int64_t r = 0; r < num_rows; ++r) {
        store_outputs(sums + (i * num_rows + r) * kTile, r * y.stride + first, first, count);
      }
    }
  }

  void store_outputs(const float* sums, int64_t at, int64_t first, int64_t count) const {
    float* floats = static_cast<float*>(y.numbers) + at;
    uint16_t* halves = static_cast<uint16_t*>(y.numbers) + at;
    int64_t e = 0;
    for (; e + kWidth <= count; e += kWidth) {
      Floats sum = load<Floats>(sums + e);
      if (weights.bias != nullptr) sum += load<Floats>(weights.bias + first + e);
      if (y.dtype == Dtype::kFloat32) {
        outdraft::store(floats + e, sum);
      } else {
        outdraft::store(halves + e, to_bf16(sum));
      }
    }
    for (; e < count; ++e) {
      const float sum = weights.bias != nullptr ? sums[e] + weights.bias[first + e] : sums[e];
      if (y.dtype == Dtype::kFloat32) {
        floats[e] = sum;
      } else {
        halves[e] = to_bf16(sum);
      }
    }
  }
};

void copy_as_float(const void* from, Dtype dtype, int64_t at, int64_t count, float* to) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(to, static_cast<const float*>(from) + at, 4 * count);
    return;
  }
  const uint16_t* bf16 = static_cast<const uint16_t*>(from) + at;
  int64_t k = 0;
  for (; k + kWidth <= count; k += kWidth) store(to + k, widen(load<Halves>(bf16 + k)));
  for (; k < count; ++k) to[k] = widen(bf16[k]);
}

// Rows as the kernels read them: [piece][row][kPiece], zeros behind the last input.
void copy_rows(ConstRows x, int64_t num_rows, int64_t num_inputs, bool keeps_bf16, void* block) {
  const int64_t item = keeps_bf16 ? 2 : 4;
  char* to = static_cast<char*>(block);
  for (int64_t first = 0; first < num_inputs; first += kPiece) {
    const int64_t count = std::min(kPiece, num_inputs - first);
    for (int64_t r = 0; r < num_rows; ++r, to += item * kPiece) {
      const int64_t at = r * x.stride + first;
      if (keeps_bf16) {
        std::memcpy(to, static_cast<const uint16_t*>(x.numbers) + at, 2 * count);
      } else {
        copy_as_float(x.numbers, x.dtype, at, count, reinterpret_cast<float*>(to));
      }
      std::memset(to + item * count, 0, item * (kPiece - count));
    }
  }
}

}  // namespace

void linear(Team* team, const LinearWeights& weights, ConstRows x, Rows y, int64_t num_rows) {
  const int64_t num_inputs = weights.num_inputs;
  const int64_t num_products = num_rows * num_inputs * weights.num_outputs;
  const Turn turn(num_products < kMinShared ? nullptr : team);
  const bool keeps_bf16 =
      kHasBf16Dot && x.dtype == Dtype::kBfloat16 && weights.format == Format::kBfloat16;
  const int64_t item = keeps_bf16 ? 2 : 4;
  const int64_t padded_inputs = (num_inputs + kPiece - 1) / kPiece * kPiece;
  const int64_t num_tiles = (weights.num_outputs + kTile - 1) / kTile;
  const int64_t unit_tiles = (num_tiles + kMaxUnits - 1) / kMaxUnits;
  void* block = input_block(turn.team(), item * std::min(num_rows, kBlockRows) * padded_inputs);
  for (int64_t first = 0; first < num_rows; first += kBlockRows) {
    const int64_t block_rows = std::min(kBlockRows, num_rows - first);
    const auto* from = static_cast<const char*>(x.numbers) + first * x.stride * size_of(x.dtype);
    copy_rows({from, x.dtype, x.stride}, block_rows, num_inputs, keeps_bf16, block);
    auto* to = static_cast<char*>(y.numbers) + first * y.stride * size_of(y.dtype);
    run_in_turn(turn.team(), Product{kernel_of(weights.format, x.dtype), weights, block,
                                     Rows{to, y.dtype, y.stride}, block_rows, unit_tiles});
  }
}

namespace {

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

float number_at(const void* numbers, Dtype dtype, int64_t at) {
  return dtype == Dtype::kFloat32 ? static_cast<const float*>(numbers)[at]
                                  : widen(static_cast<const uint16_t*>(numbers)[at]);
}

void pack_output(const LinearWeights& weights, ConstRows from, int64_t output) {
  char* tile = weights.tiles + output / kTile * weights.tile_bytes;
  const int64_t lane = output % kTile;
  for (int64_t k = 0; k < weights.num_inputs; ++k) {
    const float number = number_at(from.numbers, from.dtype, output * from.stride + k);
    if (weights.format == Format::kFloat32) {
      reinterpret_cast<float*>(tile)[k * kTile + lane] = number;
    } else {
      reinterpret_cast<uint16_t*>(tile)[(k / 2 * kTile + lane) * 2 + k % 2] = to_bf16(number);
    }
  }
}

}  // namespace
}  // namespace outdraft

using outdraft::Dtype;
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
// null: no memory. bfloat16 tiles round what bfloat16 does not hold.
OUTDRAFT_EXPORT LinearWeights* linear_pack(int64_t format, const void* weight, int64_t dtype,
                                           int64_t stride, int64_t num_outputs,
                                           int64_t num_inputs, const float* bias) {
  using namespace outdraft;
  const int64_t num_tiles = (num_outputs + kTile - 1) / kTile;
  const bool is_float = Format{format} == Format::kFloat32;
  const int64_t tile_bytes = kTile * (is_float ? 4 * num_inputs : (num_inputs + 1) / 2 * 4);
  const int64_t tiles_bytes = num_tiles * tile_bytes;
  const int64_t bias_bytes = bias == nullptr ? 0 : (num_outputs + 1) / 2 * 8;
  const int64_t num_bytes = tiles_bytes + bias_bytes + sizeof(LinearWeights);
  auto* memory = static_cast<char*>(map_memory(num_bytes));
  if (memory == nullptr) return nullptr;
  auto* out_bias = reinterpret_cast<float*>(memory + tiles_bytes);
  auto* weights = reinterpret_cast<LinearWeights*>(memory + tiles_bytes + bias_bytes);
  *weights = {Format{format}, num_inputs, num_outputs, tile_bytes,
              memory,         bias == nullptr ? nullptr : out_bias,
              num_bytes};
  if (bias != nullptr) std::memcpy(out_bias, bias, 4 * num_outputs);
  for (int64_t output = 0; output < num_outputs; ++output) {
    pack_output(*weights, {weight, Dtype{dtype}, stride}, output);
  }
  return weights;
}

// `team`: those that multiplied with them, or null.
OUTDRAFT_EXPORT void linear_free(outdraft::Team* team, LinearWeights* weights) {
  outdraft::wait_until_idle(team);
  munmap(weights->tiles, weights->num_bytes);
}

// Of the tiles.
OUTDRAFT_EXPORT int64_t linear_bytes(const LinearWeights* weights) {
  const int64_t num_tiles = (weights->num_outputs + outdraft::kTile - 1) / outdraft::kTile;
  return num_tiles * weights->tile_bytes;
}

OUTDRAFT_EXPORT const void* linear_tiles(const LinearWeights* weights) { return weights->tiles; }
OUTDRAFT_EXPORT const void* linear_bias(const LinearWeights* weights) { return weights->bias; }

OUTDRAFT_EXPORT void linear_multiply(outdraft::Team* team, const LinearWeights* weights,
                                     const void* x, int64_t x_dtype, int64_t x_stride, void* y,
                                     int64_t y_dtype, int64_t y_stride, int64_t num_rows) {
  outdraft::linear(team, *weights, {x, Dtype{x_dtype}, x_stride}, {y, Dtype{y_dtype}, y_stride},
                   num_rows);
}
