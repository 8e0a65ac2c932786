// Prompt lookup: what followed the longest ends of a text that have occurred before?
//
// The look-up is a query on the suffix automaton, which knows the newest places of each string. A
// row's path matches some of these places. The probability of a token behind it is that of the
// path, times the share of its places that go on with the token, times the chance that a token of a
// match of this length is right at all, which is measured. The readable twin is
// src/outdraft/kernels/reference/ngram_texts.py.

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <vector>

#include "export.h"
#include "growing_tree.h"
#include "suffix_automaton.h"
#include "text_drafts.h"

namespace outdraft {
namespace {

using PlaceSet = uint64_t;  // a bit for each place that was looked up

// Every match length starts from one token that came true and one that did not.
struct Tally {
  int64_t right = 1;
  int64_t judged = 2;
};

struct NgramRule {
  int64_t min_n, max_n, branching;
};

class NgramText {
 public:
  explicit NgramText(const NgramRule& rule)
      : rule_(rule),
        // The newest place is the text's own end.
        automaton_(SuffixAutomaton::Keeps::kNewestEnds, rule.branching + 1, rule.max_n + 1),
        tallies_(rule.max_n + 1) {}

  void draft(const TextAsk& ask, GrowingTree<PlaceSet>& tree) {
    if (!automaton_.is_continued_by(ask.tokens, ask.num_tokens)) {
      automaton_.clear();
      std::fill(tallies_.begin(), tallies_.end(), Tally());
      places_.clear();
    }
    judge(ask);
    automaton_.read(ask.tokens, ask.num_tokens);
    look_up();
    max_depth_ = ask.max_tokens;
    tree.clear(0.0);
    offer_followers(ask, tree, 0, (PlaceSet{1} << places_.size()) - 1);
    while (tree.can_take(ask.max_tokens)) {
      const int32_t row = tree.take();
      offer_followers(ask, tree, row, tree.row(row).note);
    }
  }
  int64_t num_bytes() const { return automaton_.num_bytes(); }

 private:
  // Compares what was looked up with what the text became: behind a wrong token nothing counts.
  // A token is right if one of the places that were right so far goes on with it, whether there was
  // a row for it or not.
  void judge(const TextAsk& ask) {
    const int64_t seen = automaton_.num_tokens();
    PlaceSet alive = (PlaceSet{1} << places_.size()) - 1;
    for (int64_t at = seen; at < std::min(ask.num_tokens, seen + max_depth_); ++at) {
      bool is_known = false;
      PlaceSet right = 0;
      for (size_t i = 0; i < places_.size(); ++i) {
        const int64_t place = places_[i] + at - seen;
        if (!(alive >> i & 1) || place >= seen) continue;
        is_known = true;
        if (ask.tokens[place] == ask.tokens[at]) right |= PlaceSet{1} << i;
      }
      if (!is_known) break;
      ++tallies_[match_n_].judged;
      if (right == 0) break;
      ++tallies_[match_n_].right;
      alive = right;
    }
  }

  // Finds the longest match, and its newest places.
  void look_up() {
    places_.clear();
    int32_t state = automaton_.context();
    match_n_ = std::min(automaton_.num_tokens(), rule_.max_n);
    while (state != SuffixAutomaton::kRoot && automaton_.state(state).count < 2) {
      state = automaton_.state(state).link;
      match_n_ = automaton_.state(state).length;
    }
    if (state == SuffixAutomaton::kRoot || match_n_ < rule_.min_n) return;
    const int64_t most = std::min<int64_t>(automaton_.state(state).count - 1, rule_.branching);
    for (int64_t age = 1; age <= most; ++age) places_.push_back(automaton_.newest_end(state, age));
  }

  // Offers the tokens that follow a row at some of the places: those of most places first, among
  // equals that of the newest place.
  void offer_followers(const TextAsk& ask, GrowingTree<PlaceSet>& tree, int32_t row,
                       PlaceSet places) const {
    const int32_t depth = tree.row(row).depth;
    PlaceSet known = 0;
    for (PlaceSet rest = places; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (places_[i] + depth < ask.num_tokens) known |= PlaceSet{1} << i;
    }
    const Tally& tally = tallies_[match_n_];
    const double rate = static_cast<double>(tally.right) / tally.judged;
    const int num_known = std::popcount(known);
    while (known) {
      PlaceSet best = 0;
      for (PlaceSet rest = known; rest;) {
        const PlaceSet alike = like_first(ask, rest, depth);
        if (std::popcount(alike) > std::popcount(best)) best = alike;
        rest &= ~alike;
      }
      known &= ~best;
      const int32_t token = ask.tokens[places_[std::countr_zero(best)] + depth];
      tree.offer(row, token, rate * (static_cast<double>(std::popcount(best)) / num_known), best);
    }
  }

  // The places that go on like the first of them.
  PlaceSet like_first(const TextAsk& ask, PlaceSet places, int32_t depth) const {
    const int32_t token = ask.tokens[places_[std::countr_zero(places)] + depth];
    PlaceSet alike = 0;
    for (PlaceSet rest = places; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (ask.tokens[places_[i] + depth] == token) alike |= PlaceSet{1} << i;
    }
    return alike;
  }

  NgramRule rule_;
  SuffixAutomaton automaton_;
  std::vector<Tally> tallies_;   // by match length
  int64_t match_n_ = 0;          // match length of the last look-up
  std::vector<int32_t> places_;  // what followed its matches starts here, the newest first
  int64_t max_depth_ = 0;        // tokens that the last draft could look ahead
};

class NgramTexts : public TextDrafter {
 public:
  explicit NgramTexts(const NgramRule& rule) : rule_(rule) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    texts_.try_emplace(ask.number, rule_).first->second.draft(ask, tree_);
    tree_.write(draft);
    return tree_.score();
  }
  void forget(int64_t number) override { texts_.erase(number); }
  int64_t num_bytes() const override {
    int64_t sum = 0;
    for (const auto& [number, text] : texts_) sum += text.num_bytes();
    return sum;
  }

 private:
  NgramRule rule_;
  std::unordered_map<int64_t, NgramText> texts_;
  GrowingTree<PlaceSet> tree_;
};

}  // namespace
}  // namespace outdraft

// As `ngram_texts` of text_ops.py; `branching` is at most 63.
OUTDRAFT_EXPORT outdraft::TextDrafter* new_ngram_texts(int64_t min_n, int64_t max_n,
                                                       int64_t branching) {
  return new outdraft::NgramTexts({min_n, max_n, branching});
}
