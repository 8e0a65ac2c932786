// Trees that grow level by level: see growth.h.

#include "growth.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "team.h"

namespace outdraft {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int64_t kFewestCandidates = 8;  // children of a node that are considered at all

// Rows of the calling thread; those that it had before stay where there is room for as many.
float* scratch(int64_t num_rows, int64_t size) {
  thread_local KeptMemory memory(nullptr);
  return memory.reserve<float>(num_rows * size);
}

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

}  // namespace

Growth::Growth(const DraftTask& task, const int64_t* draft_ids, int64_t num_outputs)
    : task_(task),
      draft_ids_(draft_ids),
      num_outputs_(num_outputs),
      is_chain_(task.num_levels == task.num_rows),
      drafting_(static_cast<size_t>(task.num_requests)),
      rules_(task.stops, task.num_requests, task.num_levels),
      trees_(static_cast<size_t>(task.num_requests)) {
  std::iota(drafting_.begin(), drafting_.end(), 0);
  for (Tree& tree : trees_) tree.weights = {1.0f}, tree.nodes = {0};
  std::fill_n(task.is_drawn, task.num_requests * task.num_rows, false);
  if (task.stops.price != nullptr) {
    constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(task.stops.margins, task.num_requests * task.num_levels, kNone);
  }
}

void Growth::extend(const float* logits, RowsOf rows, const float* odds, const uint8_t* decided) {
  const int64_t first_above = depth_ == 0 ? 0 : first_ + 1;
  const int64_t first = depth_ == 0 ? 0 : first_ + num_nodes_;
  size_t num_left = 0;
  for (size_t place = 0; place < drafting_.size(); ++place) {
    const int64_t b = drafting_[place];
    const int64_t request = rows == RowsOf::kAll ? b : static_cast<int64_t>(place);
    const float* own = processed(b, logits + request * num_nodes_ * num_outputs_);
    const bool drafts_on = decided != nullptr
                               ? decided[request] != 0
                               : goes_on(b, own, odds == nullptr ? nullptr : odds + request);
    if (!drafts_on) continue;
    choose(b, first, first_above, own);
    if (!is_chain_ || depth_ + 1 < task_.num_drafts[b]) drafting_[num_left++] = b;
  }
  drafting_.resize(num_left);
  first_ = first;
  num_nodes_ = task_.levels[depth_++];
}

void Growth::copy_newest(int64_t* to, RowsOf rows) const {
  using Column = std::vector<int64_t> Tree::*;
  const bool has_all = rows == RowsOf::kAll;
  const auto num_requests = static_cast<int64_t>(has_all ? trees_.size() : drafting_.size());
  if (has_all) std::fill_n(to, 3 * num_requests * num_nodes_, 0);
  for (const Column column : {&Tree::token_ids, &Tree::origins, &Tree::ancestors}) {
    for (size_t place = 0; place < drafting_.size(); ++place) {
      const int64_t b = drafting_[place];
      const int64_t row = (has_all ? b : static_cast<int64_t>(place)) * num_nodes_;
      std::copy_n((trees_[b].*column).begin() + first_, num_nodes_, to + row);
    }
    to += num_requests * num_nodes_;
  }
}

LiveRules::LiveRules(const Stops& stops, int64_t num_requests, int64_t num_levels)
    : stops_(stops),
      num_levels_(num_levels),
      num_rows_(0),
      survival_(stops.price == nullptr ? 0 : static_cast<size_t>(num_requests), 1.0) {}

bool LiveRules::go_on(int64_t b, int64_t depth, float margin) {
  if (stops_.has_rule[b]) {
    const int64_t at = b * num_levels_ + depth;
    const double score = stops_.weights[at] * margin + stops_.biases[at];
    survival_[b] *= 1 / (1 + std::exp(-score));
    if (!(survival_[b] >= stops_.price[b]) || num_rows_ >= stops_.room) return false;
  }
  ++num_rows_;
  return true;
}

void Growth::look(const float* logits, float* margins) {
  for (size_t place = 0; place < drafting_.size(); ++place) {
    const int64_t b = drafting_[place];
    const float* own = logits + static_cast<int64_t>(place) * num_nodes_ * num_outputs_;
    margins[place] = looked(b, processed(b, own), nullptr);
  }
}

// Whether a request drafts the next level, whose processed logits these are.
bool Growth::goes_on(int64_t b, const float* logits, const float* odds) {
  return task_.stops.price == nullptr || rules_.go_on(b, depth_, looked(b, logits, odds));
}

// What the live rule of a request finds at the next level, whose processed logits these are; a
// result. Without a rule nothing.
float Growth::looked(int64_t b, const float* logits, const float* odds) {
  const Stops& stops = task_.stops;
  if (!stops.has_rule[b]) return 0;
  float& found = stops.margins[b * task_.num_levels + depth_];
  found = odds == nullptr ? margin(logits, task_.size) : margin_of_odds(*odds);
  return found;
}

void Growth::finish() {
  for (int64_t b = 0; b < task_.num_requests; ++b) finish(b);
}

// [E, V]: the processed logits behind the newest nodes of a request.
const float* Growth::processed(int64_t b, const float* logits) const {
  const int64_t size = task_.size;
  const bool is_same = draft_ids_ == nullptr && task_.allowed == nullptr && task_.bias == nullptr;
  if (is_same && task_.is_greedy[b]) return logits;
  float* rows = scratch(num_nodes_ + 1, size);
  for (int64_t e = 0; e < num_nodes_; ++e) {
    const float* row = logits + e * num_outputs_;
    float* to = rows + e * size;
    if (draft_ids_ == nullptr) {
      std::copy_n(row, size, to);
    } else {
      std::fill_n(to, size, kMasked);
      for (int64_t at = 0; at < num_outputs_; ++at) to[draft_ids_[at]] = row[at];
    }
    if (task_.allowed != nullptr) keep_allowed(task_.allowed + b * size, to);
    if (task_.bias != nullptr) {
      for (int64_t id = 0; id < size; ++id) to[id] += task_.bias[b * size + id];
    }
    if (!task_.is_greedy[b]) process_row(to, size, task_.cuts.of(b), to);
  }
  if (kind(b) == Kind::kRankedWithNoise && !is_chain_) add_noise(b, rows);
  return rows;
}

// Without any allowed token that has mass the best token stays.
void Growth::keep_allowed(const bool* allowed, float* logits) const {
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
void Growth::choose(int64_t b, int64_t first, int64_t first_above, const float* logits) {
  Tree& tree = trees_[b];
  const int64_t num_rows = task_.levels[depth_];
  tree.token_ids.resize(static_cast<size_t>(first + num_rows));
  tree.origins.resize(tree.token_ids.size());
  tree.ancestors.resize(tree.token_ids.size());
  if (kind(b) == Kind::kDrawn) {
    draw(b, first, first_above, logits);
  } else if (is_chain_) {
    tree.token_ids[first] = kind(b) == Kind::kRanked
                                ? argmax(logits, task_.size)
                                : sample_logits(logits, task_.size, shared_noise(b));
  } else {
    rank(b, first, logits);
  }
  for (int64_t row = first; row < first + num_rows; ++row) {
    const int64_t above = depth_ == 0 ? 0 : tree.ancestors[first_above - 1 + tree.origins[row]];
    tree.ancestors[row] = above | int64_t{1} << row;
  }
}

void Growth::draw(int64_t b, int64_t first, int64_t first_above, const float* logits) {
  Tree& tree = trees_[b];
  const int64_t num_rows = task_.levels[depth_], at = b * task_.num_rows + first;
  std::vector<float> weights(static_cast<size_t>(num_rows));
  const Nodes nodes{num_nodes_,   task_.size,     logits, tree.weights.data(),
                    first_above,  task_.seeds[b], task_.num_tokens[b] + depth_,
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

// Adds the likeliest children of every node to the candidates; the best of them are the level.
void Growth::rank(int64_t b, int64_t first, const float* logits) {
  Tree& tree = trees_[b];
  const int64_t size = task_.size, num_rows = task_.levels[depth_];
  const int64_t num_children = std::min(std::max(num_rows, kFewestCandidates), size);
  float* masses = scratch(num_nodes_ + 1, size) + num_nodes_ * size;  // behind processed logits
  const auto num_before = static_cast<int64_t>(tree.candidate_ids.size());
  for (int64_t e = 0; e < num_nodes_; ++e) {
    const float* row = logits + e * size;
    const float best = maximum(row, size);
    exp_below(row, size, best, masses);
    const auto log_total = static_cast<float>(std::log(total(masses, size)));
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
void Growth::add_noise(int64_t b, float* logits) const {
  const int64_t size = task_.size;
  std::vector<uint32_t> words(static_cast<size_t>(size));
  fill_words(shared_noise(b), 0, size, words.data());
  for (int64_t id = 0; id < size; ++id) {
    const float noise = gumbel(words[id]);
    for (int64_t e = 0; e < num_nodes_; ++e) logits[e * size + id] += noise;
  }
}

// The results of a request: of ranked trees the candidates of the largest weight.
void Growth::finish(int64_t b) {
  const Tree& tree = trees_[b];
  int64_t* ids = task_.token_ids + b * task_.num_rows;
  int64_t* parents = task_.parents + b * task_.num_rows;
  int64_t num_drafted = task_.num_drafts[b];
  if (is_chain_) {
    num_drafted = static_cast<int64_t>(tree.token_ids.size());
    std::copy_n(tree.token_ids.data(), num_drafted, ids);
    std::iota(parents, parents + task_.num_rows, 0);
  } else if (kind(b) != Kind::kDrawn) {
    keep_best(tree, ids, parents);
  }
  std::fill(ids + num_drafted, ids + task_.num_rows, -1);
  if (task_.stops.price != nullptr) task_.stops.num_drafted[b] = num_drafted;
}

void Growth::keep_best(const Tree& tree, int64_t* ids, int64_t* parents) const {
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

}  // namespace outdraft

using outdraft::DraftTask;
using outdraft::Growth;

// Trees whose logits are of all tokens.
OUTDRAFT_EXPORT Growth* growth_create(const DraftTask* task) {
  return new Growth(*task, nullptr, task->size);
}

// Grows a level [B, F] from logits [B, E, V]. `rows`: its token ids, origins and ancestors, one
// behind the other. Returns how many requests draft on.
OUTDRAFT_EXPORT int64_t growth_extend(Growth* growth, const float* logits, int64_t* rows) {
  growth->extend(logits, outdraft::RowsOf::kAll);
  growth->copy_newest(rows, outdraft::RowsOf::kAll);
  return static_cast<int64_t>(growth->drafting().size());
}

// Writes the task's results.
OUTDRAFT_EXPORT void growth_finish(Growth* growth) { growth->finish(); }

OUTDRAFT_EXPORT void growth_destroy(Growth* growth) { delete growth; }

namespace outdraft {

OUTDRAFT_STRUCT(DraftTask, num_requests, num_levels, num_rows, size, levels, worth.rank0_base,
                worth.rank0_slope, worth.own_base, worth.own_slope, worth.side_weight,
                worth.num_shares, worth.side_shares, num_tokens, num_drafts, seeds, kinds,
                is_greedy, cuts.temperature, cuts.least, cuts.top_k, cuts.top_p, allowed, bias,
                token_ids, parents, is_drawn, probs, stops.weights, stops.biases, stops.price,
                stops.has_rule, stops.room, stops.margins, stops.num_drafted);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(growth_create, growth_extend, growth_finish, growth_destroy);
