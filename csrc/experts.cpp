// Mixtures of experts: see experts.h.
//
// Pairs of a row and an expert are sorted by expert, then by row, and computed in chunks of some
// hundred pairs, so that what is between the products stays in the cache of the processor. In each
// chunk rows are copied, expert behind expert, meet the first weights of their expert, then the
// second ones, and are added to what their row has already. So a row's sum runs over its experts in
// ascending order, from zero, in float32.

#include "experts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "export.h"
#include "parts.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kChunkRows = 2 * kBlockRows;  // fewer than these
constexpr int64_t kMixed = 4 * kTile;           // outputs of a row that one thread adds at a time

// Rows of a chunk that meet one expert: [first, first + count).
struct Segment {
  int64_t expert, first, count;
};

// Rows of several experts against all tiles of theirs; a unit is some tiles of a segment.
struct Product {
  const LinearWeights* const* weights;  // of all experts
  const Segment* segments;
  int64_t num_experts, num_segments, num_results, num_rows, most_rows;  // of a segment
  bool is_gated;
  Gate gate;
  InputLayout layout;
  Inputs x;
  Rows y;

  int64_t num_tiles() const { return (num_results + kTile - 1) / kTile; }
  int64_t unit_tiles() const {
    const int64_t most_units = kMaxUnits / num_segments;
    return (num_tiles() + most_units - 1) / most_units;
  }
  int64_t segment_units() const { return (num_tiles() + unit_tiles() - 1) / unit_tiles(); }
  int64_t num_units() const { return num_segments * segment_units(); }
  size_t scratch_bytes() const {
    return sizeof(float) * (unit_tiles() + (is_gated ? 2 : 0)) * most_rows * kTile;
  }

  void compute(int64_t unit, void* scratch) const {
    // A late helper may find anything here.
    const Segment rows = segments[unit / segment_units()];
    if (rows.expert < 0 || rows.expert >= num_experts) return;
    if (rows.count < 1 || rows.count > most_rows) return;
    if (rows.first < 0 || rows.first > num_rows - rows.count) return;
    const LinearWeights& own = *weights[rows.expert];
    const MultiplyTile multiply = kernel_of(own, layout.kind);
    const auto* words = static_cast<const uint32_t*>(x.rows) + rows.first * x.stride;
    Inputs inputs = x;
    inputs.rows = words;
    inputs.sums += rows.first;
    if (inputs.steps != nullptr) inputs.steps += rows.first;
    float *sums = static_cast<float*>(scratch), *up = sums + unit_tiles() * rows.count * kTile;
    for_tiles(unit, [&](int64_t tile) {
      if (is_gated) {
        multiply_gated(multiply, own, inputs, rows.count, tile, gate, sums, up);
      } else {
        multiply(own, inputs, rows.count, tile, sums);
      }
      sums += rows.count * kTile;
    });
  }

  void store(int64_t unit, const void* scratch) const {
    const Segment& rows = segments[unit / segment_units()];
    const float* bias = is_gated ? nullptr : weights[rows.expert]->bias;
    const auto* sums = static_cast<const float*>(scratch);
    auto* to = static_cast<char*>(y.numbers) + rows.first * y.stride * size_of(y.dtype);
    for_tiles(unit, [&](int64_t tile) {
      const int64_t count = std::min(kTile, num_results - tile * kTile);
      store_tile(sums, bias, {to, y.dtype, y.stride}, rows.count, tile * kTile, count);
      sums += rows.count * kTile;
    });
  }

  template <class Call>
  void for_tiles(int64_t unit, const Call& call) const {
    const int64_t first = unit % segment_units() * unit_tiles();
    const int64_t end = std::min(first + unit_tiles(), num_tiles());
    for (int64_t tile = first; tile < end; ++tile) call(tile);
  }
};

// Adds what experts gave, times its weight, to each row's sum. A unit is some outputs of all rows.
// Nothing is to be computed.
struct Mix {
  const float* products;  // [pairs, num_outputs]
  const int64_t* pairs;   // row * num_picked + k
  const float* weights;   // of all pairs
  float* sums;            // [rows, num_outputs]
  Rows y;
  int64_t num_pairs, num_picked, num_outputs, num_rows;
  bool is_first, is_last;  // chunk

  int64_t num_units() const { return (num_outputs + unit_outputs() - 1) / unit_outputs(); }
  int64_t unit_outputs() const {
    return kMixed * ((num_outputs + kMixed * kMaxUnits - 1) / (kMixed * kMaxUnits));
  }
  size_t scratch_bytes() const { return 0; }
  void compute(int64_t, void*) const {}

  void store(int64_t unit, const void*) const {
    const int64_t first = unit * unit_outputs();
    const int64_t count = std::min(unit_outputs(), num_outputs - first);
    for (int64_t r = 0; is_first && r < num_rows; ++r) {
      std::memset(sums + r * num_outputs + first, 0, sizeof(float) * count);
    }
    for (int64_t p = 0; p < num_pairs; ++p) {
      float* to = sums + pairs[p] / num_picked * num_outputs + first;
      const float *from = products + p * num_outputs + first, weight = weights[pairs[p]];
      for_numbers(count, [&](int64_t e, auto kind) {
        using Kind = decltype(kind);
        put(to + e, read<Kind>(to + e) + read<Kind>(from + e) * weight);
      });
    }
    with_numbers(y.numbers, y.dtype == Dtype::kBfloat16, [&](auto* out) {
      for (int64_t r = 0; is_last && r < num_rows; ++r) {
        convert(sums + r * num_outputs + first, count, out + r * y.stride + first);
      }
    });
  }
};

// Where all lies while experts multiply.
struct Workspace {
  int64_t *starts, *pairs, *rows;  // pairs by expert: [starts[e], starts[e + 1]), and their rows
  Segment* segments;
  char *x_block, *h_block;  // for the kernels
  float *x_floats, *h_floats, *products, *sums;
  char* h;  // [chunk rows, num_between], of x's dtype

  Workspace(Parts& parts, const ExpertWeights& experts, const InputLayout& in,
            const InputLayout& between, Dtype dtype, int64_t num_pairs, int64_t num_rows) {
    const LinearWeights& down = **experts.down;
    const int64_t chunk = std::min(num_pairs, kChunkRows);
    starts = parts.take<int64_t>(experts.num_experts + 2);
    pairs = parts.take<int64_t>(num_pairs);
    rows = parts.take<int64_t>(num_pairs);
    segments = parts.take<Segment>(chunk);
    x_block = parts.take<char>(4 * in.stride * chunk);
    x_floats = parts.take<float>(in.group_floats * in.num_groups * chunk);
    h = parts.take<char>(size_of(dtype) * down.num_inputs * chunk);
    h_block = parts.take<char>(4 * between.stride * chunk);
    h_floats = parts.take<float>(between.group_floats * between.num_groups * chunk);
    products = parts.take<float>(down.num_outputs * chunk);
    sums = parts.take<float>(down.num_outputs * num_rows);
  }

  // By counting. Pairs without an expert come last.
  void sort(const Routes& routes, int64_t num_pairs, int64_t num_experts) {
    std::fill_n(starts, num_experts + 2, 0);
    for (int64_t p = 0; p < num_pairs; ++p) ++starts[routes.ids[p] + 1];
    for (int64_t e = 0; e <= num_experts; ++e) starts[e + 1] += starts[e];
    for (int64_t p = 0; p < num_pairs; ++p) pairs[starts[routes.ids[p]]++] = p;
    std::copy_backward(starts, starts + num_experts + 1, starts + num_experts + 2);
    starts[0] = 0;
    for (int64_t p = 0; p < num_pairs; ++p) rows[p] = pairs[p] / routes.num_picked;
  }
};

// Multiplies pairs chunk by chunk.
struct Chunks {
  Team* team;  // of the turn
  const ExpertWeights& experts;
  InputLayout in, between;
  Workspace work;
  ConstRows x;
  const Routes& routes;
  Rows y;
  int64_t num_rows;

  void run() const {
    const int64_t end = work.starts[experts.num_experts];
    int64_t first = 0, expert = 0;
    do {
      int64_t num_segments = 0, num_pairs = 0;
      while (first + num_pairs < end && num_pairs < kBlockRows) {
        while (work.starts[expert + 1] <= first + num_pairs) ++expert;
        const int64_t left = work.starts[expert + 1] - first - num_pairs;
        const int64_t count = std::min(left, kBlockRows);
        work.segments[num_segments++] = {expert, num_pairs, count};
        num_pairs += count;
      }
      if (num_pairs > 0) multiply(first, num_pairs, num_segments);
      mix(first, num_pairs, first == 0, first + num_pairs == end);
      first += num_pairs;
    } while (first < end);
  }

  void multiply(int64_t first, int64_t count, int64_t num_segments) const {
    const LinearWeights &gate_up = **experts.gate_up, &down = **experts.down;
    int64_t most_rows = 0;
    for (int64_t s = 0; s < num_segments; ++s) {
      most_rows = std::max(most_rows, work.segments[s].count);
    }
    run_in_turn(team, Copy{x, work.rows + first, gate_up, count, in, work.x_block, work.x_floats});
    run_in_turn(team, Product{experts.gate_up, work.segments, experts.num_experts, num_segments,
                              down.num_inputs, count, most_rows, true, experts.gate, in,
                              in.inputs(work.x_block, work.x_floats, count),
                              Rows{work.h, x.dtype, down.num_inputs}});
    const ConstRows h = {work.h, x.dtype, down.num_inputs};
    run_in_turn(team, Copy{h, nullptr, down, count, between, work.h_block, work.h_floats});
    run_in_turn(team, Product{experts.down, work.segments, experts.num_experts, num_segments,
                              down.num_outputs, count, most_rows, false, experts.gate, between,
                              between.inputs(work.h_block, work.h_floats, count),
                              Rows{work.products, Dtype::kFloat32, down.num_outputs}});
  }

  void mix(int64_t first, int64_t count, bool is_first, bool is_last) const {
    run_in_turn(team, Mix{work.products, work.pairs + first, routes.weights, work.sums, y, count,
                          routes.num_picked, (*experts.down)->num_outputs, num_rows, is_first,
                          is_last});
  }
};

}  // namespace

bool multiply_experts(Team* team, const ExpertWeights& experts, ConstRows x, const Routes& routes,
                      Rows y, int64_t num_rows) {
  const int64_t num_pairs = num_rows * routes.num_picked;
  for (int64_t p = 0; p < num_pairs; ++p) {
    if (routes.ids[p] < 0 || routes.ids[p] > experts.num_experts) return false;
  }
  const LinearWeights &gate_up = **experts.gate_up, &down = **experts.down;
  const int64_t num_products = num_pairs * gate_up.num_inputs * gate_up.num_outputs;
  const Turn turn(num_products < kMinShared ? nullptr : team);
  const InputLayout in(gate_up, x.dtype), between(down, x.dtype);
  const auto place = [&](char* memory) {
    Parts parts = {memory};
    const Workspace work(parts, experts, in, between, x.dtype, num_pairs, num_rows);
    return std::pair(work, parts.num_bytes);
  };
  const int64_t num_bytes = place(nullptr).second;
  Workspace work = place(static_cast<char*>(input_block(turn.team(), num_bytes))).first;
  work.sort(routes, num_pairs, experts.num_experts);
  Chunks{turn.team(), experts, in, between, work, x, routes, y, num_rows}.run();
  return true;
}

}  // namespace outdraft

using outdraft::Activation;
using outdraft::Dtype;
using outdraft::ExpertWeights;
using outdraft::LinearWeights;

// The weights of each expert, by address, which must outlive what is made: gate and up [2 I, D],
// down [D, I], of the same sizes and, but for unquantised ones, formats.
OUTDRAFT_EXPORT ExpertWeights* experts_make(int64_t num_experts, const LinearWeights* const* gate_up,
                                            const LinearWeights* const* down, int64_t activation,
                                            float alpha, float limit) {
  auto** kept = new const LinearWeights*[2 * num_experts];
  std::copy_n(gate_up, num_experts, kept);
  std::copy_n(down, num_experts, kept + num_experts);
  return new ExpertWeights{
      num_experts, kept, kept + num_experts, {Activation{activation}, alpha, limit}};
}

// `team`: those that multiplied with them, or null.
OUTDRAFT_EXPORT void experts_free(outdraft::Team* team, ExpertWeights* experts) {
  outdraft::wait_until_idle(team);
  delete[] experts->gate_up;
  delete experts;
}

// Whether all ids are in range.
OUTDRAFT_EXPORT bool experts_multiply(outdraft::Team* team, const ExpertWeights* experts,
                                      const void* x, int64_t dtype, int64_t x_stride,
                                      const int64_t* ids, const float* weights, int64_t num_picked,
                                      void* y, int64_t y_stride, int64_t num_rows) {
  const Dtype kind{dtype};
  return outdraft::multiply_experts(team, *experts, {x, kind, x_stride}, {ids, weights, num_picked},
                                    {y, kind, y_stride}, num_rows);
}

OUTDRAFT_FUNCTIONS(experts_make, experts_free, experts_multiply);
