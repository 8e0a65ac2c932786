// A whole draft of a decoder: all passes, all choices, for all requests, in one call.
//
// The readable twin is src/outdraft/drafting/device/grower.py over the passes of a network. A chain
// is the tree whose levels have one row each. Requests that draw get draws without replacement (see
// drawn_level.cpp), others the likeliest tokens: EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "drafting.h"
#include "forward.h"
#include "sampling.h"

namespace outdraft {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int64_t kFewestCandidates = 8;  // children of a node that are considered at all

enum class Kind : int64_t { kRanked = 0, kDrawn = 1, kRankedWithNoise = 2 };

// What Python fills (kernels/native/drafting.py); columns have a number for each request.
struct DraftTask {
  int64_t num_requests, num_levels, num_rows, size, table_width, block_size;
  const int64_t* levels;
  Worth worth;
  const int64_t *num_tokens, *positions, *contexts, *num_drafts, *seeds, *kinds;
  const bool* is_greedy;
  CutColumns cuts;
  const bool* allowed;  // [B, V]; null: all tokens are
  const float* bias;    // [B, V], added to logits; null: nothing is
  const int32_t* block_table;  // [B, P]
  // Results: [B, K], and [B, K, V]; probs may be null where no request draws.
  int64_t *token_ids, *parents;
  bool* is_drawn;
  float* probs;
};

// The tree of one request while it grows. Rows are numbered level after level.
struct Tree {
  std::vector<int64_t> token_ids, origins, ancestors;
  std::vector<float> weights;  // of the nodes of the newest level
  // Ranked trees: all candidates, and which of them the nodes of the newest level are.
  std::vector<int64_t> candidate_ids, candidate_parents, nodes;
  std::vector<float> candidate_weights;
};

// Places of the `count` largest numbers, the largest first, equal ones in order.
std::vector<int64_t> best_places(const float* numbers, int64_t size, int64_t count) {
  std::vector<int64_t> places;
  places.reserve(static_cast<size_t>(count + 1));
  const auto is_larger = [numbers](int64_t a, int64_t b) { return numbers[a] > numbers[b]; };
  for (int64_t at = 0; at < size; ++at) {
    const bool is_full = static_cast<int64_t>(places.size()) == count;
    if (is_full && !is_larger(at, places.back())) continue;
    places.insert(std::upper_bound(places.begin(), places.end(), at, is_larger), at);
    if (is_full) places.pop_back();
  }
  return places;
}

class Drafting {
 public:
  Drafting(Decoder& decoder, const DraftTask& task)
      : decoder_(decoder),
        task_(task),
        trees_(static_cast<size_t>(task.num_requests)),
        scratch_(static_cast<size_t>(task.size)),
        is_chain_(task.num_levels == task.num_rows) {
    const int64_t widest = *std::max_element(task.levels, task.levels + task.num_levels);
    const int64_t most = task.num_requests * widest, hidden = decoder.spec().hidden;
    const int64_t num_outputs = decoder.vocabulary();
    state_bytes_ = hidden * size_of(decoder.spec().dtype);
    char* memory = decoder.draft_memory.reserve<char>(
        2 * most * state_bytes_ + most * 4 * (num_outputs + task.size) + 4 * kLine);
    states_ = take(memory, most * state_bytes_);
    gathered_ = take(memory, most * state_bytes_);
    logits_ = reinterpret_cast<float*>(take(memory, most * 4 * num_outputs));
    processed_ = reinterpret_cast<float*>(take(memory, most * 4 * task.size));
  }

  bool run(const void* states) {
    std::memcpy(states_, states, static_cast<size_t>(task_.num_requests * state_bytes_));
    int64_t first = 0;
    num_nodes_ = 1;
    for (Tree& tree : trees_) tree.weights = {1.0f}, tree.nodes = {0};
    for (int64_t depth = 0; depth < task_.num_levels; ++depth) {
      if (depth > 0 && !read(depth, first)) return false;
      decoder_.logits(states_, task_.num_requests * num_nodes_, logits_);
      const int64_t first_above = depth == 0 ? 0 : first + 1;
      first += depth == 0 ? 0 : num_nodes_;
      for (int64_t b = 0; b < task_.num_requests; ++b) choose(b, depth, first, first_above);
      num_nodes_ = task_.levels[depth];
    }
    for (int64_t b = 0; b < task_.num_requests; ++b) finish(b);
    return true;
  }

 private:
  static constexpr int64_t kLine = 64;

  static char* take(char*& memory, int64_t bytes) {
    char* part = memory;
    memory += (bytes + kLine - 1) / kLine * kLine;
    return part;
  }

  // The states behind the newest level, whose rows begin at `first`.
  bool read(int64_t depth, int64_t first) {
    const auto num_rows = static_cast<size_t>(task_.num_requests * num_nodes_);
    ids_.resize(num_rows), positions_.resize(num_rows), slots_.resize(num_rows);
    ancestors_.resize(num_rows);
    starts_.assign(1, 0), contexts_.clear();
    zeros_.assign(static_cast<size_t>(task_.num_requests), 0);
    for (int64_t b = 0; b < task_.num_requests; ++b) {
      const Tree& tree = trees_[b];
      for (int64_t f = 0; f < num_nodes_; ++f) {
        ids_[b * num_nodes_ + f] = tree.token_ids[first + f];
        ancestors_[b * num_nodes_ + f] = tree.ancestors[first + f];
      }
      starts_.push_back(static_cast<int32_t>((b + 1) * num_nodes_));
      contexts_.push_back(static_cast<int32_t>(task_.contexts[b]));
    }
    place_level(task_.num_requests, num_nodes_, first, ancestors_.data(), task_.contexts,
                task_.num_drafts, task_.block_table, task_.table_width, task_.block_size,
                ancestors_.data(), positions_.data(), slots_.data());
    gather(depth, first);
    const DecoderRows rows{ids_.data(),       positions_.data(), slots_.data(),
                           starts_.data(),    contexts_.data(),  zeros_.data(),
                           ancestors_.data(), task_.block_table, task_.num_requests * num_nodes_,
                           task_.num_requests, task_.table_width};
    const bool reads_states = decoder_.spec().reads_states != 0;
    return decoder_.forward(rows, reads_states ? gathered_ : nullptr, nullptr, 0, nullptr, states_);
  }

  // The states that the rows of the newest level continue.
  void gather(int64_t depth, int64_t first) {
    if (decoder_.spec().reads_states == 0) return;
    const int64_t num_above = depth == 1 ? 1 : task_.levels[depth - 2];
    for (int64_t b = 0; b < task_.num_requests; ++b) {
      for (int64_t f = 0; f < num_nodes_; ++f) {
        const int64_t above = b * num_above + trees_[b].origins[first + f];
        std::memcpy(gathered_ + (b * num_nodes_ + f) * state_bytes_, states_ + above * state_bytes_,
                    static_cast<size_t>(state_bytes_));
      }
    }
  }

  // The processed logits behind the newest nodes of a request.
  float* processed(int64_t b) {
    const int64_t size = task_.size, num_outputs = decoder_.vocabulary();
    const int64_t* draft_ids = decoder_.spec().draft_ids;
    for (int64_t e = b * num_nodes_; e < (b + 1) * num_nodes_; ++e) {
      const float* row = logits_ + e * num_outputs;
      float* to = processed_ + e * size;
      if (draft_ids == nullptr) {
        std::copy_n(row, size, to);
      } else {
        std::fill_n(to, size, kMasked);
        for (int64_t at = 0; at < num_outputs; ++at) to[draft_ids[at]] = row[at];
      }
      if (task_.allowed != nullptr) keep_allowed(task_.allowed + b * size, to);
      if (task_.bias != nullptr) {
        for (int64_t id = 0; id < size; ++id) to[id] += task_.bias[b * size + id];
      }
      if (!task_.is_greedy[b]) process_row(to, size, task_.cuts.of(b), to);
    }
    return processed_ + b * num_nodes_ * size;
  }

  // Without any allowed token that has mass the best token stays.
  void keep_allowed(const bool* allowed, float* logits) const {
    const int64_t best = argmax(logits, task_.size);
    const float best_logit = logits[best];
    bool has_any = false;
    for (int64_t id = 0; id < task_.size; ++id) {
      if (!allowed[id]) logits[id] = kMasked;
      has_any |= logits[id] > kMasked;
    }
    if (!has_any) logits[best] = best_logit;
  }

  // The next level of a request, whose rows begin at `first`, behind nodes from `first_above` on.
  void choose(int64_t b, int64_t depth, int64_t first, int64_t first_above) {
    Tree& tree = trees_[b];
    const int64_t num_rows = task_.levels[depth];
    float* logits = processed(b);
    tree.token_ids.resize(static_cast<size_t>(first + num_rows));
    tree.origins.resize(tree.token_ids.size());
    tree.ancestors.resize(tree.token_ids.size());
    if (static_cast<Kind>(task_.kinds[b]) == Kind::kDrawn) {
      draw(b, depth, first, first_above, logits);
    } else if (is_chain_) {
      tree.token_ids[first] = static_cast<Kind>(task_.kinds[b]) == Kind::kRanked
                                  ? argmax(logits, task_.size)
                                  : sample_logits(logits, task_.size, shared_noise(b, depth));
    } else {
      rank(b, depth, first, logits);
    }
    for (int64_t row = first; row < first + num_rows; ++row) {
      const int64_t above = depth == 0 ? 0 : tree.ancestors[first_above - 1 + tree.origins[row]];
      tree.ancestors[row] = above | int64_t{1} << row;
    }
  }

  void draw(int64_t b, int64_t depth, int64_t first, int64_t first_above, const float* logits) {
    Tree& tree = trees_[b];
    const int64_t num_rows = task_.levels[depth], at = b * task_.num_rows + first;
    std::vector<float> weights(static_cast<size_t>(num_rows));
    const Nodes nodes{num_nodes_,   task_.size,     logits, tree.weights.data(),
                      first_above,  task_.seeds[b], task_.positions[b] + depth,
                      task_.num_tokens[b]};
    Worth worth = task_.worth;
    worth.num_shares = std::min(num_rows, task_.size) - 1;
    draw_rows(nodes, worth, task_.num_drafts[b] - first,
              {num_rows, tree.token_ids.data() + first, tree.origins.data() + first,
               task_.is_drawn + at, task_.probs + at * task_.size, weights.data()});
    tree.weights.swap(weights);
    for (int64_t row = 0; row < num_rows; ++row) {
      task_.token_ids[at + row] = tree.token_ids[first + row];
      task_.parents[at + row] = tree.origins[first + row] + first_above;
    }
  }

  NoiseKey shared_noise(int64_t b, int64_t depth) const {
    return {task_.seeds[b], task_.positions[b] + depth, 0, Purpose::kSample};
  }

  // Adds the likeliest children of every node to the candidates; the best of them are the level.
  void rank(int64_t b, int64_t depth, int64_t first, float* logits) {
    Tree& tree = trees_[b];
    const int64_t size = task_.size, num_rows = task_.levels[depth];
    const int64_t num_children = std::min(std::max(num_rows, kFewestCandidates), size);
    if (static_cast<Kind>(task_.kinds[b]) == Kind::kRankedWithNoise) add_noise(b, depth, logits);
    const auto num_before = static_cast<int64_t>(tree.candidate_ids.size());
    for (int64_t e = 0; e < num_nodes_; ++e) {
      const float* row = logits + e * size;
      const float best = maximum(row, size);
      exp_below(row, size, best, scratch_.data());
      const auto log_total = static_cast<float>(std::log(total(scratch_.data(), size)));
      for (const int64_t id : best_places(row, size, num_children)) {
        tree.candidate_ids.push_back(id);
        tree.candidate_parents.push_back(tree.nodes[e]);
        tree.candidate_weights.push_back(tree.weights[e] * std::exp(row[id] - best - log_total));
      }
    }
    const auto places = best_places(tree.candidate_weights.data() + num_before,
                                    num_nodes_ * num_children, num_rows);
    tree.nodes.clear(), tree.weights.clear();
    for (int64_t f = 0; f < num_rows; ++f) {
      const int64_t candidate = num_before + places[f];
      tree.token_ids[first + f] = tree.candidate_ids[candidate];
      tree.origins[first + f] = places[f] / num_children;
      tree.nodes.push_back(candidate + 1);
      tree.weights.push_back(tree.candidate_weights[candidate]);
    }
  }

  // The noise of the target's own choice, the same behind all nodes.
  void add_noise(int64_t b, int64_t depth, float* logits) {
    const int64_t size = task_.size;
    std::vector<uint32_t> words(static_cast<size_t>(size));
    fill_words(shared_noise(b, depth), 0, size, words.data());
    for (int64_t id = 0; id < size; ++id) {
      const float noise = gumbel(words[id]);
      for (int64_t e = 0; e < num_nodes_; ++e) logits[e * size + id] += noise;
    }
  }

  // The results of a request: of ranked trees the candidates of the largest weight.
  void finish(int64_t b) {
    const Tree& tree = trees_[b];
    int64_t* ids = task_.token_ids + b * task_.num_rows;
    int64_t* parents = task_.parents + b * task_.num_rows;
    if (static_cast<Kind>(task_.kinds[b]) != Kind::kDrawn) {
      std::fill_n(task_.is_drawn + b * task_.num_rows, task_.num_rows, false);
      if (is_chain_) {
        std::copy_n(tree.token_ids.data(), task_.num_rows, ids);
        std::iota(parents, parents + task_.num_rows, 0);
      } else {
        keep_best(tree, ids, parents);
      }
    }
    for (int64_t row = task_.num_drafts[b]; row < task_.num_rows; ++row) ids[row] = -1;
  }

  void keep_best(const Tree& tree, int64_t* ids, int64_t* parents) const {
    const auto num_candidates = static_cast<int64_t>(tree.candidate_ids.size());
    // The first of equal weights is taken: a parent stands before its children.
    const auto kept = best_places(tree.candidate_weights.data(), num_candidates, task_.num_rows);
    std::vector<int64_t> row_of(static_cast<size_t>(num_candidates + 1));
    for (int64_t row = 0; row < task_.num_rows; ++row) row_of[kept[row] + 1] = row + 1;
    for (int64_t row = 0; row < task_.num_rows; ++row) {
      ids[row] = tree.candidate_ids[kept[row]];
      parents[row] = row_of[tree.candidate_parents[kept[row]]];
    }
  }

  Decoder& decoder_;
  const DraftTask& task_;
  std::vector<Tree> trees_;
  std::vector<float> scratch_;  // [V]
  const bool is_chain_;
  int64_t num_nodes_, state_bytes_;
  char *states_, *gathered_;    // behind the newest level, and what that continues
  float *logits_, *processed_;  // [rows, N] and [rows, V]
  std::vector<int64_t> ids_, positions_, slots_, ancestors_;
  std::vector<int32_t> starts_, contexts_, zeros_;
};

}  // namespace
}  // namespace outdraft

// Grows drafts behind states [B, D]. False: a token or a position is not in its table.
OUTDRAFT_EXPORT int64_t decoder_draft(outdraft::Decoder* decoder, const outdraft::DraftTask* task,
                                      const void* states) {
  return outdraft::Drafting(*decoder, *task).run(states);
}
