// How a suffix automaton grows by one token; integers only.

#include "suffix_automaton.h"

#include <algorithm>

namespace outdraft {

void SuffixAutomaton::clear() {
  states_.clear();
  edges_.clear();
  index_.clear();
  num_tokens_ = 0;
  whole_ = context_ = new_state(0);
}

void SuffixAutomaton::read(const int32_t* text, int64_t num_tokens) {
  while (num_tokens_ < num_tokens) {
    newest_ = text[num_tokens_];
    extend(newest_);
    count(newest_);
  }
}

int32_t SuffixAutomaton::new_state(int32_t length) {
  const int32_t state = states_.push();
  states_[state] = {length, kNone, 0, kNone};
  std::fill_n(states_.extra(state), num_kept_, kNone);
  return state;
}

void SuffixAutomaton::add_edge(int32_t from, int32_t token, int32_t target) {
  const int32_t edge = edges_.push();
  edges_[edge] = {from, token, kNone, target, states_[from].first_edge};
  states_[from].first_edge = edge;
  index_.put(edges_, edge);
}

// Adds the suffixes that end with a new token: the textbook construction.
void SuffixAutomaton::extend(int32_t token) {
  const int32_t whole = new_state(++num_tokens_);
  int32_t state = whole_;
  int32_t edge = kNone;
  whole_ = whole;
  while (state != kNone && (edge = index_.find(edges_, state, token)) == kNone) {
    add_edge(state, token, whole);
    state = states_[state].link;
  }
  if (state == kNone) {
    states_[whole].link = kRoot;
    return;
  }
  const int32_t target = edges_[edge].target;
  const int32_t length = states_[state].length + 1;
  if (states_[target].length == length) {
    states_[whole].link = target;
    return;
  }
  const int32_t shorter = clone(target, length);
  states_[target].link = states_[whole].link = shorter;
  while (state != kNone) {
    edge = index_.find(edges_, state, token);
    if (edges_[edge].target != target) break;
    edges_[edge].target = shorter;
    state = states_[state].link;
  }
}

// A new class for the shorter strings of a state: the same past, but a different future.
int32_t SuffixAutomaton::clone(int32_t state, int32_t length) {
  const int32_t copy = new_state(length);
  states_[copy].link = states_[state].link;
  states_[copy].count = states_[state].count;
  const int32_t* kept = states_.extra(state);
  std::copy_n(kept, num_kept_, states_.extra(copy));
  for (int32_t edge = states_[state].first_edge; edge != kNone; edge = edges_[edge].next_edge) {
    add_edge(copy, edges_[edge].token, edges_[edge].target);
    if (keeps_ == Keeps::kNewestEnds) continue;
    const auto rank = std::find(kept, kept + num_kept_, edge) - kept;
    if (rank < num_kept_) states_.extra(copy)[rank] = states_[copy].first_edge;
  }
  return copy;
}

// Counts the new suffixes of at most max_depth tokens, each a continuation of an old one.
void SuffixAutomaton::count(int32_t token) {
  int32_t old = context_;
  // Where the token has split this class, the token follows both halves: start with the longer.
  const int32_t longest = edges_[index_.find(edges_, old, token)].target;
  for (int32_t state = longest; state != kRoot; state = states_[state].link) {
    const int32_t place = states_[state].count++ % num_kept_;
    if (keeps_ == Keeps::kNewestEnds) states_.extra(state)[place] = num_tokens_;
  }
  if (keeps_ == Keeps::kFrequentEdges) {
    for (; old != kRoot; old = states_[old].link) promote(old, index_.find(edges_, old, token));
  }
  const int32_t link = states_[longest].link;
  const bool is_longer = num_tokens_ >= max_depth_ && states_[link].length >= max_depth_ - 1;
  context_ = is_longer ? link : longest;
}

// Moves the edge that was counted just now before all that do not count more.
void SuffixAutomaton::promote(int32_t state, int32_t edge) {
  int32_t* kept = states_.extra(state);
  const int32_t times = states_[edges_[edge].target].count;
  int64_t rank = 0;
  while (rank < num_kept_ && kept[rank] != kNone && kept[rank] != edge &&
         states_[edges_[kept[rank]].target].count > times) {
    ++rank;
  }
  for (int32_t moved = edge; rank < num_kept_ && moved != kNone; ++rank) {
    std::swap(moved, kept[rank]);
    if (moved == edge) break;
  }
}

}  // namespace outdraft
