// Every string that has occurred in one growing text, and how often.
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
  void clear();

  // Whether a text can be the one that was read, grown: judged by one token.
  bool is_continued_by(const int32_t* text, int64_t num_tokens) const {
    return num_tokens_ == 0 || (num_tokens_ <= num_tokens && text[num_tokens_ - 1] == newest_);
  }

  // Goes on with the tokens that are new.
  void read(const int32_t* text, int64_t num_tokens);

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_bytes() const {
    return states_.num_bytes() + edges_.num_bytes() + index_.num_bytes();
  }

  // The state of the text's longest suffix of at most max_depth - 1 tokens.
  int32_t context() const { return context_; }
  const State& state(int32_t number) const { return states_[number]; }
  const Edge& edge(int32_t number) const { return edges_[number]; }

  // The edge to the continuation of this rank, kNone: there are not so many.
  int32_t frequent_edge(int32_t state, int64_t rank) const {
    return rank < num_kept_ ? states_.extra(state)[rank] : kNone;
  }
  // The token behind an occurrence of this age: 0 is the newest; age < min(count, num_kept).
  int32_t newest_end(int32_t state, int64_t age) const {
    return states_.extra(state)[(states_[state].count - 1 - age) % num_kept_];
  }

 private:
  int32_t new_state(int32_t length);
  void add_edge(int32_t from, int32_t token, int32_t target);
  void extend(int32_t token);
  int32_t clone(int32_t state, int32_t length);
  void count(int32_t token);
  void promote(int32_t state, int32_t edge);

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
