// Every string that has occurred in one growing text, and how often; integers only.
//
// A suffix automaton (Blumer et al. 1985) of the whole text, grown token by token. A state stands
// for strings that end at exactly the same places; its link leads to the class of their longest
// suffix that occurs in more places. For strings of up to `max_depth` tokens the automaton keeps
//
// - the number of occurrences: a new token adds one to the classes of the text's last suffixes,
//   which are the link chain from the longest of them, hence at most max_depth steps a token;
// - updated on the same walk, either the few most frequent continuations, the latest first among
//   equals, or the newest places where the strings ended.
//
// Longer strings are never asked for, and their counts are not maintained. A text of T tokens has
// at most 2T states and 3T edges; a token costs amortised constant time, however long the text is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pair_index.h"
#include "rows_of_records.h"

namespace outdraft {

class SuffixAutomaton {
 public:
  enum class Keeps { kFrequentEdges, kNewestEnds };

  struct State {
    int32_t length;  // of its longest string
    int32_t link;    // kNone: the root has none
    int32_t count;
    int32_t first_edge;
  };

  struct Edge {
    int32_t from;
    int32_t token;
    int32_t next_in_bucket;
    int32_t target;
    int32_t next_edge;  // of the same state
  };

  static constexpr int32_t kRoot = 0;

  SuffixAutomaton(Keeps keeps, int64_t num_kept, int64_t max_depth)
      : keeps_(keeps), num_kept_(num_kept), max_depth_(max_depth), states_(num_kept) {
    clear();
  }

  // Back to the empty text.
  void clear() {
    states_.clear();
    edges_.clear();
    index_.clear();
    num_tokens_ = 0;
    whole_ = context_ = new_state(0);
  }

  // Whether a text can be the one that was read, grown: judged by one token.
  bool is_continued_by(const int32_t* text, int64_t num_tokens) const {
    return num_tokens_ == 0 || (num_tokens_ <= num_tokens && text[num_tokens_ - 1] == newest_);
  }

  // Goes on with the tokens that are new.
  void read(const int32_t* text, int64_t num_tokens) {
    while (num_tokens_ < num_tokens) {
      newest_ = text[num_tokens_];
      extend(newest_);
      count_ends(newest_);
    }
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_bytes() const {
    return states_.num_bytes() + edges_.num_bytes() + index_.num_bytes();
  }

  // The state of the text's longest suffix of at most max_depth - 1 tokens.
  int32_t context() const { return context_; }
  const State& state(int32_t number) const { return states_[number]; }

  // A place is a state: that of the string that ends there.
  using Place = int32_t;
  int32_t count_of(Place place) const { return states_[place].count; }
  // The continuation of this rank, the most frequent first; kNone: there are not so many.
  Place follow(Place place, int32_t rank, int32_t* token) const {
    const int32_t edge = rank < num_kept_ ? states_.extra(place)[rank] : kNone;
    if (edge == kNone) return kNone;
    *token = edges_[edge].token;
    return edges_[edge].target;
  }
  // The token behind an occurrence of this age: 0 is the newest; age < min(count, num_kept).
  int32_t newest_end(int32_t state, int64_t age) const {
    return states_.extra(state)[(states_[state].count - 1 - age) % num_kept_];
  }

 private:
  int32_t new_state(int32_t length) {
    const int32_t state = states_.push();
    states_[state] = {length, kNone, 0, kNone};
    std::fill_n(states_.extra(state), num_kept_, kNone);
    return state;
  }

  void add_edge(int32_t from, int32_t token, int32_t target) {
    const int32_t edge = edges_.push();
    edges_[edge] = {from, token, kNone, target, states_[from].first_edge};
    states_[from].first_edge = edge;
    index_.put(edges_, edge);
  }

  // Adds the suffixes that end with a new token: the textbook construction.
  void extend(int32_t token) {
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
  int32_t clone(int32_t state, int32_t length) {
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
  void count_ends(int32_t token) {
    int32_t old = context_;
    // Where the token has split this class, the token follows both halves: start with the longer.
    const int32_t longest = edges_[index_.find(edges_, old, token)].target;
    for (int32_t state = longest; state != kRoot; state = states_[state].link) {
      const int32_t place = states_[state].count++ % num_kept_;
      if (keeps_ == Keeps::kNewestEnds) states_.extra(state)[place] = num_tokens_;
    }
    if (keeps_ == Keeps::kFrequentEdges) {
      const auto count_of = [&](int32_t edge) { return states_[edges_[edge].target].count; };
      for (; old != kRoot; old = states_[old].link) {
        promote(states_.extra(old), num_kept_, index_.find(edges_, old, token), count_of);
      }
    }
    const int32_t link = states_[longest].link;
    const bool is_longer = num_tokens_ >= max_depth_ && states_[link].length >= max_depth_ - 1;
    context_ = is_longer ? link : longest;
  }

  Keeps keeps_;
  int64_t num_kept_;
  int64_t max_depth_;
  Rows<State> states_;
  Rows<Edge> edges_;
  PairIndex<Edge> index_;
  int32_t num_tokens_ = 0;
  int32_t newest_ = 0;
  int32_t whole_ = kRoot;  // the state of the whole text
  int32_t context_ = kRoot;
};

}  // namespace outdraft
