// Parts of products with weights in tiles, for whoever puts them together: linear.cpp, experts.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "team.h"

namespace outdraft {

// Rows that meet a tile while it is in the cache: a chunk of 256 tokens of a prompt, and 32 requests.
constexpr int64_t kBlockRows = 288;
constexpr int64_t kMinShared = 1 << 16;  // multiplications; below, sharing costs what it saves

// What rows are for a kernel. kShorts: 16-bit integers, each times the step of its group of inputs,
// a power of two: the number of largest size in a group has 15 bits, so that bfloat16 numbers from
// a 128th of it on stay as they are. A group with a number that is not finite becomes NaN.
// kQuads: the same for kGguf, groups of 32, each four inputs in the order 0, 2, 1, 3.
// kBytes: 8-bit integers, as ByteRow says; not finite numbers as above.
enum class InputKind { kFloat32, kBf16Pairs, kShorts, kQuads, kBytes };

constexpr int64_t kQuadGroup = 32;   // inputs that share a step
constexpr int64_t kMostShorts = 128;  // of a group; their products with int8 codes fit 32 bits

// Rows as the kernels read them: [row][inputs], `stride` words apart. For some weights the sums of
// their groups of inputs, or the steps of these: [group][row], `group_stride` apart. Quads have both; their
// sums are of 16 inputs, two for each group, and without steps. `group_inputs`: of a group.
struct Inputs {
  const void* rows;
  int64_t stride;
  const float *sums, *steps;
  int64_t group_stride, group_inputs;
};

// A row of 8-bit integers from -127 to 127, times a step that some inputs share: the largest one is
// 127. After them come the sums of 16 inputs, of 32, and the steps. Sums are of 16 bits, two a word.
struct ByteRow {
  int64_t num_inputs, step_inputs;

  // Words before them.
  int64_t sums_of(int64_t group_inputs) const {
    return num_inputs / 4 + (group_inputs == 16 ? 0 : num_inputs / 32);
  }
  int64_t steps() const { return sums_of(32) + (num_inputs + 63) / 64; }
  int64_t num_words() const { return steps() + num_inputs / step_inputs; }
};
ByteRow byte_row(const LinearWeights& weights);  // of kGguf

// sums[num_rows, kTile] = the products with one tile.
using MultiplyTile = void (*)(const LinearWeights& weights, const Inputs& x, int64_t num_rows,
                              int64_t tile, float* sums);

// For bfloat16 rows on machines that have matrix registers (linear_amx.cpp); null elsewhere.
MultiplyTile matrix_kernel_of(const LinearWeights& weights);

MultiplyTile kernel_of(const LinearWeights& weights, InputKind kind);

// How rows of a dtype lie for the kernels of a weight.
struct InputLayout {
  InputKind kind;
  int64_t stride;  // words: a float32 number or a pair
  int64_t group_inputs, num_groups;
  int64_t group_sums;    // that a row has for each group,
  int64_t group_floats;  // and its step, too

  InputLayout(const LinearWeights& weights, Dtype dtype);

  // `floats`: group_floats of each group of each of num_rows rows.
  Inputs inputs(const void* rows, const float* floats, int64_t num_rows) const {
    return {rows, stride, floats, floats + group_sums * num_groups * num_rows, num_rows, group_inputs};
  }

  // Those of a row, its floats included.
  int64_t row_words() const { return stride + group_floats * num_groups; }

  // Whether rows lie so already.
  bool is_of(const LinearWeights& weights, const ConstRows& x) const;
};

// What two products become.
enum class Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClamped = 3 };

// kClamped: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, `up` between -limit
// and limit. The others: act(gate) * up, with silu or a gelu.
struct Gate {
  Activation activation = Activation::kSilu;
  float alpha = 1, limit = 0;
};

// gates[num_rows, kTile] = what outputs [first, first + kTile) of the first half of a weight become
// with those of the second half. `up`: scratch memory for 2 * num_rows * kTile numbers.
void multiply_gated(MultiplyTile multiply, const LinearWeights& weights, const Inputs& x,
                    int64_t num_rows, int64_t tile, const Gate& gate, float* gates, float* up);

// y[row, first + e] = sums[row, e] (+ bias), for `count` outputs; a tile lies behind each row's.
void store_tile(const float* sums, const float* bias, Rows y, int64_t num_rows, int64_t first,
                int64_t count);

// Copies rows for the kernels, zeros behind the last input. A unit is some rows. Nothing is to be
// computed: who stores a unit copies it.
struct Copy {
  ConstRows x;
  const int64_t* picked;  // which rows, or null: all in order
  LinearWeights weights;
  int64_t num_rows;
  InputLayout layout;
  char* block;
  float* floats;  // [group][num_rows], group_floats times

  static constexpr int64_t kUnitRows = 4;

  int64_t num_units() const { return (num_rows + kUnitRows - 1) / kUnitRows; }
  size_t scratch_bytes() const { return 0; }
  void compute(int64_t, void*) const {}
  void store(int64_t unit, const void*) const;

 private:
  void copy_row(int64_t row) const;
  template <class Number>
  void round_group(int64_t row, int64_t group, const Number* from) const;
  void order_quads(int64_t row, int64_t group) const;
  template <class Number>
  void round_bytes(int64_t row, const Number* from) const;
  void sum_group(int64_t row, int64_t group) const;
};

// The products of all rows, block by block: `work` makes the job of `count` rows from `first` on,
// from the kernel and the rows that it meets. `team` is not of a turn, and one of few numbers none.
template <class MakeWork>
void run_products(Team* team, const LinearWeights& weights, ConstRows x, int64_t num_rows,
                  const MakeWork& work) {
  const int64_t num_products = num_rows * weights.num_inputs * weights.num_outputs;
  const Turn turn(num_products < kMinShared ? nullptr : team);
  const InputLayout layout(weights, x.dtype);
  const int64_t most_rows = std::min(num_rows, kBlockRows);
  const bool is_copied = !layout.is_of(weights, x);
  auto* block = static_cast<char*>(input_block(
      turn.team(), is_copied ? most_rows * 4 * layout.row_words() : 0));
  for (int64_t first = 0; first < num_rows; first += kBlockRows) {
    const int64_t count = std::min(kBlockRows, num_rows - first);
    const auto* from = static_cast<const char*>(x.numbers) + first * x.stride * size_of(x.dtype);
    Inputs inputs = layout.inputs(from, nullptr, 0);
    if (is_copied) {
      auto* floats = reinterpret_cast<float*>(block) + count * layout.stride;
      inputs = layout.inputs(block, floats, count);
      const ConstRows rows = {from, x.dtype, x.stride};
      run_in_turn(turn.team(), Copy{rows, nullptr, weights, count, layout, block, floats});
    }
    run_in_turn(turn.team(), work(kernel_of(weights, layout.kind), inputs, first, count));
  }
}

}  // namespace outdraft
