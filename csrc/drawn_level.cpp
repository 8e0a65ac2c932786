// Levels of growing trees: their draws, and where their rows stand. The readable twin is
// `draw_level` in src/outdraft/kernels/torch/drawn_level.py. It draws tokens for all ranks of
// every node; here they are drawn only for ranks that get a row.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "drafting.h"
#include "sampling.h"

namespace outdraft {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int kParentShift = 24;  // an anchor is committed tokens + (row of the parent << this)

// How many more accepted rows each rank of a node is expected to bring.
void fill_gains(const float* logits, int64_t size, float weight, const Worth& worth, float* buffer,
                float* gains) {
  const int64_t num_ranks = worth.num_shares + 1;
  int64_t num_with_mass = 0;
  for (int64_t at = 0; at < size && num_with_mass < num_ranks; ++at) {
    num_with_mass += logits[at] > kMasked;
  }
  exp_below(logits, size, maximum(logits, size), buffer);
  const double first = worth.rank0_base + worth.rank0_slope / total(buffer, size);
  gains[0] = static_cast<float>(weight * std::sqrt(first));
  for (int64_t rank = 1; rank < num_ranks; ++rank) {
    const float share = rank < num_with_mass ? worth.side_shares[rank - 1] : 0.0f;
    gains[rank] = static_cast<float>(weight * (1 - first) * share);
  }
}

// The lowest id that is none of these.
int64_t lowest_other(const std::vector<int64_t>& ids) {
  int64_t id = 0;
  while (std::find(ids.begin(), ids.end(), id) != ids.end()) ++id;
  return id;
}

}  // namespace

void draw_rows(const Nodes& nodes, const Worth& worth, int64_t num_kept, const NewRows& rows) {
  const int64_t size = nodes.size;
  const int64_t num_ranks = worth.num_shares + 1;
  std::vector<float> gains(static_cast<size_t>(nodes.num_nodes * num_ranks));
  std::vector<float> left(static_cast<size_t>(size));
  std::vector<std::vector<int64_t>> drawn(static_cast<size_t>(nodes.num_nodes));
  std::vector<int64_t> next(static_cast<size_t>(nodes.num_nodes));
  if (nodes.num_nodes > 1 || rows.num_rows > 1) {
    for (int64_t e = 0; e < nodes.num_nodes; ++e) {
      fill_gains(nodes.logits + e * size, size, nodes.weight[e], worth, left.data(),
                 gains.data() + e * num_ranks);
    }
  }
  for (int64_t f = 0; f < rows.num_rows; ++f) {
    int64_t best = -1;
    const auto gain = [&](int64_t e) { return gains[e * num_ranks + next[e]]; };
    for (int64_t e = 0; e < nodes.num_nodes; ++e) {
      if (next[e] < num_ranks && (best < 0 || gain(e) > gain(best))) best = e;
    }
    const int64_t rank = next[best]++;
    rows.origins[f] = best;
    rows.token_ids[f] = 0;
    rows.is_drawn[f] = false;
    rows.weight[f] = 0;
    if (f >= num_kept) continue;
    std::copy_n(nodes.logits + best * size, size, left.data());
    for (const int64_t id : drawn[best]) left[id] = kMasked;
    // All ranks share the noise of the node: the next best token is the next draw.
    const int64_t anchor = nodes.num_tokens + ((nodes.first_row + best) << kParentShift);
    const NoiseKey key{nodes.seed, nodes.position, anchor, Purpose::kDraft};
    int64_t id = sample_logits(left.data(), size, key);
    if (left[id] > kMasked) {
      float* probs = rows.probs + f * size;
      softmax(left.data(), size, probs);
      const double own = worth.own_base + worth.own_slope * std::sqrt(probs[id]);
      rows.is_drawn[f] = true;
      rows.weight[f] = static_cast<float>(
          rank == 0 ? nodes.weight[best] * std::sqrt(own)
                    : worth.side_weight * gains[best * num_ranks + rank]);
    } else {
      id = lowest_other(drawn[best]);
    }
    rows.token_ids[f] = id;
    drawn[best].push_back(id);
  }
}

}  // namespace outdraft

// As `draw_level` of kernels/torch/drawn_level.py: logits [B, E, V], weight [B, E], rows [B, F].
OUTDRAFT_EXPORT void draw_level(int64_t num_requests, int64_t num_nodes, int64_t size,
                                int64_t num_rows, int64_t first_above, const outdraft::Worth* worth,
                                const float* logits, const float* weight, const int64_t* num_kept,
                                const int64_t* positions, const int64_t* num_tokens,
                                const int64_t* seeds, const bool* draws, int64_t* token_ids,
                                int64_t* origins, bool* is_drawn, float* probs,
                                float* new_weight) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t row = b * num_rows;
    if (!draws[b]) continue;
    const int64_t node = b * num_nodes;
    const outdraft::Nodes nodes{num_nodes,   size,     logits + node * size, weight + node,
                                first_above, seeds[b], positions[b],         num_tokens[b]};
    outdraft::draw_rows(nodes, *worth, num_kept[b],
                        {num_rows, token_ids + row, origins + row, is_drawn + row,
                         probs + row * size, new_weight + row});
  }
}

// Its readable twin is `place_level` in src/outdraft/kernels/torch/rows.py.
OUTDRAFT_EXPORT void place_level(int64_t num_requests, int64_t width, int64_t first_row,
                                 const int64_t* ancestors, const int64_t* contexts,
                                 const int64_t* num_drafts, const int32_t* block_table,
                                 int64_t table_width, int64_t block_size, int64_t* own_ancestors,
                                 int64_t* positions, int64_t* slots) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t own_bits = (int64_t{1} << num_drafts[b]) - 1;
    const int32_t* blocks = block_table + b * table_width;
    for (int64_t f = 0; f < width; ++f) {
      const int64_t row = b * width + f;
      const int64_t place = first_row + f;
      const int64_t index = contexts[b] + place;
      own_ancestors[row] = ancestors[row] & own_bits;
      positions[row] = contexts[b] - 1 + std::popcount(static_cast<uint64_t>(own_ancestors[row]));
      slots[row] = -1;
      if (place < num_drafts[b]) {
        slots[row] = blocks[index / block_size] * block_size + index % block_size;
      }
    }
  }
}

namespace outdraft {

OUTDRAFT_STRUCT(Worth, rank0_base, rank0_slope, own_base, own_slope, side_weight, num_shares,
                side_shares);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(draw_level, place_level);
