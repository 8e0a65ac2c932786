// How far the drafts of a request survive, by the target's processed logits. A walk looks at a row
// of the target only when it comes to it. The readable twin is
// src/outdraft/kernels/reference/verification.py.
#pragma once

#include <cstdint>

namespace outdraft {

// As `Rule` of kernels/data/drafts.py.
enum class Rule : int64_t { kMatch = 0, kToken = 1, kTraversal = 2 };

// One request's tree, as in `DraftBatch`.
struct Tree {
  int64_t num_drafts;
  const int64_t* tokens;
  const int64_t* parents;  // the row that each draft continues: 0 = root, j + 1 = draft j
  const bool* is_sampled;
  const float* probs;  // [num_drafts, size]; read where a draft is sampled
};

// What the request knows, and the target's rows [num_drafts + 1, size], the root's first.
struct Judge {
  const float* logits;
  int64_t size;
  int64_t seed;
  int64_t num_tokens;  // committed
  bool is_greedy;
};

// Where the emitted tokens are written, and the accepted drafts: room for num_drafts + 1 and for
// num_drafts. Returned is how many tokens are emitted.
struct Path {
  int64_t* tokens;
  int64_t* drafts;
};

// The path of the target's own choices.
int64_t match_tree(const Judge& judge, const Tree& tree, const Path& path);

// Traversal verification (Weng et al. 2025, arXiv 2505.12398); block verification of chains.
int64_t traverse(const Judge& judge, const Tree& tree, const Path& path);

// Token-level rejection of a chain (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).
int64_t reject_tokens(const Judge& judge, const Tree& chain, const Path& path);

}  // namespace outdraft
