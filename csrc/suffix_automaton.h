// Every string that has occurred in one growing text, and how often; integers only.
//
// A suffix automaton (Blumer et al. 1985) of the whole text, grown token by token. A state stands
// for strings that end at exactly the same places; its link leads to the class of their longest
// suffix that occurs in more places. The automaton keeps, of strings of less than `max_depth` tokens,
//
// - the number of occurrences: a new token adds one to the classes of the text's last suffixes,
//   which are the link chain from the longest of them, hence at most max_depth steps a token;
// - updated on the same walk, the `branching` most frequent continuations, the latest first among
//   equals, and the `num_newest` newest places where the strings ended.
//
// Longer strings are never asked for, and their counts are not maintained. A text of T tokens has
// at most 2T states and 3T edges; a token costs amortised constant time, however long the text is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "followers.h"

namespace outdraft {

// Ends of a text that occurred at the same places, of all lengths from `shortest` to `longest`.
template <class Place>
struct Match {
  Place place;  // where the shortest ends
  int64_t shortest, longest;
};

class SuffixAutomaton {
 public:
  using Place = int32_t;  // the state of the string that ends there

  SuffixAutomaton(int64_t branching, int64_t num_newest, int64_t max_depth)
      : branching_(branching), num_newest_(num_newest), max_depth_(max_depth) {
    new_state({0, kNone, 0, kNone});
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
    return states_.num_bytes() + newest_ends_.num_bytes() + edges_.num_bytes();
  }

  // The text's ends of less than max_depth tokens, the longest first.
  std::vector<Match<Place>> matches() const {
    std::vector<Match<Place>> found;
    for (int32_t state = context_; state != kRoot; state = states_[state].link) {
      const int64_t longest = std::min<int64_t>(states_[state].length, max_depth_ - 1);
      found.push_back({state, states_[states_[state].link].length + 1, longest});
    }
    return found;
  }
  int32_t count_of(Place place) const { return states_[place].count; }

  // Calls visit(token, place behind it) for the most frequent continuations, in order.
  template <class Visit>
  void visit_followers(Place place, const Visit& visit) const {
    int32_t edge = states_[place].first_edge;
    for (int64_t rank = 0; rank < branching_ && edge != kNone; ++rank) {
      visit(edges_[edge].token, edges_[edge].target);
      edge = edges_[edge].next;
    }
  }

  // The token behind an occurrence of this age: 0 is the newest; age < min(count, num_newest).
  int32_t newest_end(Place place, int64_t age) const {
    return newest_ends_[first_end(place) + (states_[place].count - 1 - age) % num_newest_];
  }

 private:
  struct State {
    int32_t length;  // of its longest string
    int32_t link;    // kNone: the root has none
    int32_t count;
    int32_t first_edge;
  };
  struct Edge : Follower {
    int32_t target;
  };

  static constexpr int32_t kRoot = 0;

  int32_t first_end(int32_t state) const { return state * static_cast<int32_t>(num_newest_); }

  int32_t new_state(const State& state) {
    for (int64_t i = 0; i < num_newest_; ++i) newest_ends_.push(kNone);
    return states_.push(state);
  }

  int32_t new_edge(int32_t from, int32_t token, int32_t target) {
    return edges_.push({{from, token, kNone, kNone, kNone}, target});
  }
  // Where an edge belongs in the list of its state: the most frequent first, the latest of equals.
  int32_t place_of(int32_t edge) const {
    const auto goes_before = [&](int32_t other, int32_t moved) {
      return states_[edges_[other].target].count > states_[edges_[moved].target].count;
    };
    return edges_.place_of(edge, states_[edges_[edge].from].first_edge, branching_, goes_before);
  }

  // Adds the suffixes that end with a new token: the textbook construction.
  void extend(int32_t token) {
    const int32_t whole = new_state({++num_tokens_, kRoot, 0, kNone});
    int32_t state = whole_;
    int32_t edge = kNone;
    whole_ = whole;
    while (state != kNone && (edge = edges_.find(state, token)) == kNone) {
      edge = new_edge(state, token, whole);
      edges_.put(edge, states_[state].first_edge, place_of(edge));
      state = states_[state].link;
    }
    if (state == kNone) return;
    const int32_t target = edges_[edge].target;
    const int32_t length = states_[state].length + 1;
    if (states_[target].length == length) {
      states_[whole].link = target;
      return;
    }
    const int32_t shorter = clone(target, length);
    states_[target].link = states_[whole].link = shorter;
    while (state != kNone) {
      edge = edges_.find(state, token);
      if (edges_[edge].target != target) break;
      edges_[edge].target = shorter;
      state = states_[state].link;
    }
  }

  // A new class for the shorter strings of a state: the same past, but a different future.
  int32_t clone(int32_t state, int32_t length) {
    const int32_t copy = new_state({length, states_[state].link, states_[state].count, kNone});
    for (int32_t i = 0; i < num_newest_; ++i) {
      newest_ends_[first_end(copy) + i] = newest_ends_[first_end(state) + i];
    }
    int32_t last = kNone;
    for (int32_t edge = states_[state].first_edge; edge != kNone; edge = edges_[edge].next) {
      const int32_t added = new_edge(copy, edges_[edge].token, edges_[edge].target);
      edges_.put(added, states_[copy].first_edge, last);
      last = added;
    }
    return copy;
  }

  // Counts the new suffixes of less than max_depth tokens, each a continuation of an old one.
  void count_ends(int32_t token) {
    // Where the token has split this class, the token follows both halves: start with the longer.
    const int32_t longest = edges_[edges_.find(context_, token)].target;
    for (int32_t state = longest; state != kRoot; state = states_[state].link) {
      const int64_t nth = states_[state].count++;
      if (num_newest_ > 0) newest_ends_[first_end(state) + nth % num_newest_] = num_tokens_;
    }
    for (int32_t old = context_; branching_ > 0 && old != kRoot; old = states_[old].link) {
      const int32_t edge = edges_.find(old, token);
      edges_.move(edge, states_[old].first_edge, place_of(edge));
    }
    const int32_t link = states_[longest].link;
    const bool is_longer = num_tokens_ >= max_depth_ && states_[link].length >= max_depth_ - 1;
    context_ = is_longer ? link : longest;
  }

  int64_t branching_, num_newest_, max_depth_;
  Rows<State> states_;
  Rows<int32_t> newest_ends_;  // `num_newest` of each state, which take turns
  Followers<Edge> edges_;
  int32_t num_tokens_ = 0;
  int32_t newest_ = 0;
  int32_t whole_ = kRoot;    // the state of the whole text
  int32_t context_ = kRoot;  // that of its longest suffix of less than max_depth tokens
};

}  // namespace outdraft
