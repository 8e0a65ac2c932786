// Drafts that grow level by level: see src/outdraft/drafting/device/grower.py for what grows, and
// drawn_tree.py there for why drawn trees are exact.
#pragma once

#include "export.h"

namespace outdraft {

// What decides where drawn rows go, as in kernels/draft_ops.py.
struct Worth {
  double rank0_base, rank0_slope, own_base, own_slope, side_weight;
  int64_t num_shares;
  const float* side_shares;  // of the ranks from 1 on
};

// One request's part of a level.
struct NewRows {
  int64_t num_rows;
  int64_t* token_ids;
  int64_t* origins;  // places of the parents in the level above
  bool* is_drawn;
  float* probs;   // [rows, size]
  float* weight;  // of each row to the rows below it
};

// The nodes above it, and the noise of its draws.
struct Nodes {
  int64_t num_nodes, size;
  const float* logits;  // [nodes, size]
  const float* weight;
  int64_t first_row;  // of the first node; the others follow it
  int64_t seed, position, num_tokens;
};

// Draw rows behind nodes, the first `num_kept` of them: as `draw_level` of
// kernels/torch/drawn_level.py.
void draw_rows(const Nodes& nodes, const Worth& worth, int64_t num_kept, const NewRows& rows);

}  // namespace outdraft

// Where the rows of a level of growing trees stand: as `place_level` of kernels/torch/rows.py.
// `ancestors` may be `own_ancestors`.
OUTDRAFT_EXPORT void place_level(int64_t num_requests, int64_t width, int64_t first_row,
                                 const int64_t* ancestors, const int64_t* contexts,
                                 const int64_t* num_drafts, const int32_t* block_table,
                                 int64_t table_width, int64_t block_size, int64_t* own_ancestors,
                                 int64_t* positions, int64_t* slots);
