// y[t] = sum over k of weights[t, k] * down_e(gate(gate_up_e(x[t]))), e = ids[t, k]: a mixture of
// experts (Shazeer et al. 2017), each with a gated feed-forward block. Its readable twin is
// src/outdraft/kernels/torch/experts.py.
//
// A row's bits depend neither on the rows beside it nor on the number of threads.
#pragma once

#include <cstdint>

#include "linear_tiles.h"

namespace outdraft {

// Those of one layer; all have the same sizes. Made by `experts_make`, freed by `experts_free`.
struct ExpertWeights {
  int64_t num_experts;
  const LinearWeights **gate_up, **down;  // [experts]
  Gate gate;
};

// Which experts a row goes to; ids from 0 to their number, which stands for none.
struct Routes {
  const int64_t* ids;    // [rows, num_picked]
  const float* weights;  // the same
  int64_t num_picked;
};

// Each tile of an expert that has rows is read once for every kBlockRows of them. What is between
// the two products is of x's dtype, all else float32. False, and nothing is done: an id is out of
// range. y may not overlap x. `team` as in `linear`.
bool multiply_experts(Team* team, const ExpertWeights& experts, ConstRows x, const Routes& routes,
                      Rows y, int64_t num_rows);

}  // namespace outdraft
