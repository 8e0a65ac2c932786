// Trees that grow level by level, for a batch of requests, from logits behind the newest level.
//
// Its readable twin is src/outdraft/drafting/device/grower.py. A chain is a tree whose levels have
// one row each. Requests that draw get draws without replacement (see drawn_level.cpp), others the
// likeliest tokens: EAGLE-2 (Li et al. 2024, arXiv 2406.16858).
#pragma once

#include <cstdint>
#include <vector>

#include "drafting.h"
#include "sampling.h"

namespace outdraft {

enum class Kind : int64_t { kRanked = 0, kDrawn = 1, kRankedWithNoise = 2 };

// Where chains end before all their levels: as `StopRules` of kernels/draft_ops.py. Null columns:
// nowhere.
struct Stops {
  const double *weights, *biases;  // [B, L]
  const double* price;
  const bool* has_rule;
  int64_t room;
  // Results: of each level that a rule looked at, [B, L]; how many drafts each request has.
  float* margins;
  int64_t* num_drafted;
};

// What Python fills (kernels/native/drafting.py); columns have a number for each request.
struct DraftTask {
  int64_t num_requests, num_levels, num_rows, size;
  const int64_t* levels;
  Worth worth;
  const int64_t *num_tokens, *num_drafts, *seeds, *kinds;
  const bool* is_greedy;
  CutColumns cuts;
  const bool* allowed;  // [B, V]; null: all tokens are
  const float* bias;    // [B, V], added to logits; null: nothing is
  // Results: [B, K], and [B, K, V]; probs may be null where no request draws.
  int64_t *token_ids, *parents;
  bool* is_drawn;
  float* probs;
  Stops stops;
};

// Which requests the rows of a level belong to.
enum class RowsOf { kAll, kDrafting };

// The tree of one request while it grows. Rows are numbered level after level.
struct Tree {
  std::vector<int64_t> token_ids, origins, ancestors;
  std::vector<float> weights;  // of the nodes of the newest level
  // Ranked trees: all candidates, and which of them the nodes of the newest level are.
  std::vector<int64_t> candidate_ids, candidate_parents, nodes;
  std::vector<float> candidate_weights;
};

// Where chains end: a row is counted for each request that goes on, in the order in which they are
// asked for.
class LiveRules {
 public:
  LiveRules(const Stops& stops, int64_t num_requests, int64_t num_levels);

  // Whether a request drafts a level at which its rule finds this margin.
  bool go_on(int64_t b, int64_t depth, float margin);

 private:
  const Stops stops_;
  const int64_t num_levels_;
  int64_t num_rows_;              // of the step's drafts so far
  std::vector<double> survival_;  // of each request's chain, by its live rule
};

// All requests' trees.
class Growth {
 public:
  // The logits are of the tokens `draft_ids` [num_outputs]; null: of all tokens.
  Growth(const DraftTask& task, const int64_t* draft_ids, int64_t num_outputs);

  // The next level, from float32 logits [requests, E, num_outputs] behind the newest one; the first
  // time behind the last token before the drafts. The logits are of all requests, or of `drafting`.
  // odds [requests]: what live rules look at in the place of margins, log-odds that a drafter tells
  // of this level; null: it tells none. decided [requests]: whether each drafts on; null: its live
  // rule decides.
  void extend(const float* logits, RowsOf rows, const float* odds = nullptr,
              const uint8_t* decided = nullptr);

  // margins [drafting]: what live rules will find at the next level, from the logits of `drafting`.
  void look(const float* logits, float* margins);

  // The results of all requests, once all levels are there.
  void finish();

  // Token ids, origins and ancestors of the newest level, each [requests, F], one behind the other;
  // zeros of requests that draft no more.
  void copy_newest(int64_t* to, RowsOf rows) const;

  // The requests whose newest level will be continued, in order. A chain leaves when it has all
  // its drafts, and where a live rule ends it.
  const std::vector<int64_t>& drafting() const { return drafting_; }

  int64_t num_nodes() const { return num_nodes_; }  // of the newest level of each request
  int64_t first() const { return first_; }          // its first row

 private:
  const float* processed(int64_t b, const float* logits) const;
  bool goes_on(int64_t b, const float* logits, const float* odds);
  float looked(int64_t b, const float* logits, const float* odds);
  void keep_allowed(const bool* allowed, float* logits) const;
  void choose(int64_t b, int64_t first, int64_t first_above, const float* logits);
  void draw(int64_t b, int64_t first, int64_t first_above, const float* logits);
  void rank(int64_t b, int64_t first, const float* logits);
  void add_noise(int64_t b, float* logits) const;
  void finish(int64_t b);
  void keep_best(const Tree& tree, int64_t* ids, int64_t* parents) const;

  Kind kind(int64_t b) const { return static_cast<Kind>(task_.kinds[b]); }
  // That of the target's own choice.
  NoiseKey shared_noise(int64_t b) const {
    return {task_.seeds[b], task_.num_tokens[b] + depth_, 0, Purpose::kSample};
  }

  const DraftTask task_;
  const int64_t* draft_ids_;
  const int64_t num_outputs_;
  const bool is_chain_;
  int64_t depth_ = 0, num_nodes_ = 1, first_ = 0;
  std::vector<int64_t> drafting_;
  LiveRules rules_;
  std::vector<Tree> trees_;
};

}  // namespace outdraft
