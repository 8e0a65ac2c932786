// How far the drafts of a request survive, by the target's processed logits. A walk looks at a row
// of the target only when it comes to it; sums run as sampling.cpp says. The readable twin is
// src/outdraft/kernels/torch/verification.py.
//
// The rules are matching with the target's own choices, token-level rejection (Leviathan et al.
// 2023, arXiv 2211.17192, algorithm 1), and traversal verification (Weng et al. 2025, arXiv
// 2505.12398), which is block verification (Sun et al. 2025, arXiv 2403.10444) of trees.

#include "verification.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "sampling.h"

namespace outdraft {
namespace {

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

constexpr int64_t kMostRows = 64;  // a request has at most 63 drafts
constexpr double kTiny = std::numeric_limits<double>::min();

// Numbers that a walk changes, at each depth.
float* scratch(int64_t depth, int64_t size) {
  thread_local std::vector<float> rows[kMostRows];
  rows[depth].resize(size);
  return rows[depth].data();
}

const float* row_of(const Judge& judge, int64_t row) { return judge.logits + row * judge.size; }

int64_t draw(const Judge& judge, int64_t row, int64_t depth, Purpose purpose) {
  return sample_logits(row_of(judge, row), judge.size,
                       {judge.seed, judge.num_tokens + depth, 0, purpose});
}

// A token of what is left of the target at a row; of the target itself where nothing is left.
int64_t recover(const Judge& judge, int64_t row, int64_t depth, const float* rest) {
  if (!(maximum(rest, judge.size) > 0)) return draw(judge, row, depth, Purpose::kRecover);
  return sample_weights(rest, judge.size,
                        {judge.seed, judge.num_tokens + depth, 0, Purpose::kRecover});
}

float coin(const Judge& judge, int64_t draft) {
  return uniform_scalar(
      {judge.seed, judge.num_tokens + draft, judge.num_tokens, Purpose::kAccept});
}

// What the proposer's probability of a draft is; NaN where the drafter is broken.
double own_probability(const Tree& tree, int64_t draft, int64_t size) {
  return tree.is_sampled[draft] ? tree.probs[draft * size + tree.tokens[draft]] : 1.0;
}

// rest = max(weight * rest - q, 0), where q is what a draft was drawn from; the sum of the rest.
double subtract(float* rest, int64_t size, float weight, const Tree& tree, int64_t draft) {
  if (tree.is_sampled[draft]) {
    const float* q = tree.probs + draft * size;
    for (int64_t at = 0; at < size; ++at) {
      const float left = weight * rest[at] - q[at];
      rest[at] = left > 0 ? left : 0.0f;
    }
  } else {
    rest[tree.tokens[draft]] = 0;
    for (int64_t at = 0; at < size; ++at) rest[at] *= weight;
  }
  return total(rest, size);
}

// The first draft from `first` on that continues `row`, -1 if there is none. A parent precedes its
// children.
int64_t next_child(const Tree& tree, int64_t row, int64_t first) {
  for (int64_t draft = first; draft < tree.num_drafts; ++draft) {
    if (tree.parents[draft] == row) return draft;
  }
  return -1;
}

// A row of the path on which a traversal is.
struct Node {
  int64_t row = 0;
  int64_t next = 0;    // the draft from which on to look for children
  double weight = 1;   // the probability with which its subtree is accepted
  double factor = 1;   // times the rest as it stands: the rest times the weight
};

// -1 behind what was emitted and accepted.
void pad(const Path& path, int64_t num_emitted, int64_t width) {
  std::fill(path.tokens + num_emitted, path.tokens + width + 1, -1);
  std::fill(path.drafts + num_emitted - 1, path.drafts + width, -1);
}

int64_t finish(const Tree& tree, const Path& path, int64_t num_accepted, int64_t last) {
  for (int64_t at = 0; at < num_accepted; ++at) path.tokens[at] = tree.tokens[path.drafts[at]];
  path.tokens[num_accepted] = last;
  return num_accepted + 1;
}

// The path of the choices: choose(row, depth). The first of siblings with the same token is taken.
template <class Choose>
int64_t match_tree(const Tree& tree, const Path& path, const Choose& choose) {
  for (int64_t row = 0, depth = 0;; ++depth) {
    const int64_t choice = path.tokens[depth] = choose(row, depth);
    int64_t child = next_child(tree, row, row);
    while (child >= 0 && tree.tokens[child] != choice) child = next_child(tree, row, child + 1);
    if (child < 0) return depth + 1;
    path.drafts[depth] = child;
    row = child + 1;
  }
}

// Traversal verification (Weng et al. 2025, arXiv 2505.12398); block verification of chains. Goes
// down to the first leaf, and back as long as coins refuse.
int64_t traverse(const Judge& judge, const Tree& tree, const Path& path) {
  const int64_t size = judge.size;
  Node nodes[kMostRows];
  int64_t depth = 0;
  while (true) {
    Node& node = nodes[depth];
    float* rest = scratch(depth, size);
    const int64_t child = node.weight > 0 ? next_child(tree, node.row, node.next) : -1;
    if (child >= 0) {
      if (node.next == node.row) softmax(row_of(judge, node.row), size, rest);
      node.next = child + 1;
      const double q = own_probability(tree, child, size), p = rest[tree.tokens[child]];
      const double weight = q >= 0 ? std::min(1.0, node.factor * p / std::max(q, kTiny)) : 0.0;
      path.drafts[depth++] = child;
      nodes[depth] = {child + 1, child + 1, weight, weight};
    } else if (depth == 0 || coin(judge, node.row - 1) < node.weight) {
      const bool is_refused = node.next != node.row;
      const int64_t last = is_refused ? recover(judge, node.row, depth, rest)
                                      : draw(judge, node.row, depth, Purpose::kSample);
      return finish(tree, path, depth, last);
    } else {
      Node& parent = nodes[--depth];
      const auto factor = static_cast<float>(parent.factor);
      const double left = subtract(scratch(depth, size), size, factor, tree, node.row - 1);
      const double whole = left + (1.0 - parent.weight);
      parent.factor = whole > 0 ? 1.0 / whole : 0.0;
      parent.weight = left * parent.factor;
    }
  }
}

// Token-level rejection of a chain (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).
int64_t reject_tokens(const Judge& judge, const Tree& chain, const Path& path) {
  float* p = scratch(0, judge.size);
  for (int64_t draft = 0; draft < chain.num_drafts; ++draft) {
    softmax(row_of(judge, draft), judge.size, p);
    const double q = own_probability(chain, draft, judge.size);
    if (!(coin(judge, draft) * q < p[chain.tokens[draft]])) {
      subtract(p, judge.size, 1.0f, chain, draft);
      return finish(chain, path, draft, recover(judge, draft, draft, p));
    }
    path.drafts[draft] = draft;
  }
  const int64_t last = draw(judge, chain.num_drafts, chain.num_drafts, Purpose::kSample);
  return finish(chain, path, chain.num_drafts, last);
}

}  // namespace
}  // namespace outdraft

using outdraft::Rule;

OUTDRAFT_EXPORT void verify(int64_t num_requests, int64_t width, int64_t size, const float* logits,
                            const int64_t* tokens, const int64_t* parents,
                            const int64_t* num_drafts, const float* probs, const bool* is_sampled,
                            const bool* is_greedy, const bool* draws, const int64_t* seeds,
                            const int64_t* num_tokens, int64_t rule, bool sampled_trees,
                            int64_t* emitted, int64_t* rows, int64_t* num_emitted) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t start = b * width;
    const outdraft::Tree tree{num_drafts[b], tokens + start, parents + start, is_sampled + start,
                              probs + start * size};
    const outdraft::Judge judge{logits, size, seeds[b], num_tokens[b], is_greedy[b]};
    const outdraft::Path path{emitted + b * (width + 1), rows + start};
    const bool has_sampled = is_sampled != nullptr &&
                             std::any_of(tree.is_sampled, tree.is_sampled + tree.num_drafts,
                                         [](bool one) { return one; });
    if (rule == static_cast<int64_t>(Rule::kMatch) || !draws[b] || !has_sampled) {
      num_emitted[b] = match_tree(tree, path, [&](int64_t row, int64_t depth) {
        return judge.is_greedy ? outdraft::argmax(row_of(judge, row), size)
                               : draw(judge, row, depth, outdraft::Purpose::kSample);
      });
    } else if (rule == static_cast<int64_t>(Rule::kToken) && !sampled_trees) {
      num_emitted[b] = reject_tokens(judge, tree, path);
    } else {
      num_emitted[b] = traverse(judge, tree, path);
    }
    pad(path, num_emitted[b], width);
    logits += (num_drafts[b] + 1) * size;
  }
}

OUTDRAFT_EXPORT void match_choices(int64_t num_requests, int64_t width, const int64_t* choices,
                                   const int64_t* tokens, const int64_t* parents,
                                   const int64_t* num_drafts, int64_t* emitted, int64_t* rows,
                                   int64_t* num_emitted) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const outdraft::Tree tree{num_drafts[b], tokens + b * width, parents + b * width, nullptr,
                              nullptr};
    const outdraft::Path path{emitted + b * (width + 1), rows + b * width};
    num_emitted[b] = match_tree(tree, path, [&](int64_t row, int64_t) { return choices[row]; });
    pad(path, num_emitted[b], width);
    choices += num_drafts[b] + 1;
  }
}

OUTDRAFT_EXPORT void requests_of_rows(int64_t num_requests, const int64_t* num_drafts,
                                      int64_t num_rows, int64_t* requests) {
  int64_t row = 0;
  for (int64_t b = 0; b < num_requests; ++b) {
    const bool is_last = b == num_requests - 1;
    const int64_t end = is_last ? num_rows : std::min(row + num_drafts[b] + 1, num_rows);
    while (row < end) requests[row++] = b;
  }
}

OUTDRAFT_FUNCTIONS(verify, match_choices, requests_of_rows);
