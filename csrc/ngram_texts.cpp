// Prompt lookup: what followed the longest ends of a text that have occurred before?
//
// The look-up is a query on the suffix automaton, which knows the newest places of each string. A
// row's path matches some of these places. The probability of a token behind it is that of the
// path, times the share of its places that go on with the token, times the chance that a token of a
// match of this length is right at all, which is measured. The readable twin is
// src/outdraft/kernels/reference/ngram_texts.py.

#include <algorithm>
#include <bit>
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
  int64_t right = 1, judged = 2;
};

struct NgramRule {
  int64_t min_n, max_n, branching;
};

class NgramText : public Text {
 public:
  explicit NgramText(const NgramRule& rule)
      : rule_(rule),
        automaton_(0, rule.branching + 1, rule.max_n + 1),  // the newest place is the text's end
        tallies_(rule.max_n + 1) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    if (!automaton_.is_continued_by(ask.tokens, ask.num_tokens)) *this = NgramText(rule_);
    judge(ask);
    automaton_.read(ask.tokens, ask.num_tokens);
    look_up();
    max_depth_ = ask.max_tokens;
    thread_local GrowingTree<PlaceSet> tree;
    tree.clear(0.0);
    offer_followers(ask, tree, 0, (PlaceSet{1} << places_.size()) - 1);
    while (tree.can_take(ask.max_tokens)) {
      const int32_t row = tree.take();
      offer_followers(ask, tree, row, tree.row(row).note);
    }
    tree.write(draft);
    return tree.score();
  }
  int64_t num_bytes() const override { return automaton_.num_bytes(); }

 private:
  // Compares what was looked up with what the text became: behind a wrong token nothing counts. A
  // token is right if one of the places that were right so far goes on with it, whether there was a
  // row for it or not.
  void judge(const TextAsk& ask) {
    const int64_t seen = automaton_.num_tokens();
    Tally& tally = tallies_[match_n_];
    for (int64_t at = seen; at < std::min(ask.num_tokens, seen + max_depth_); ++at) {
      std::erase_if(places_, [&](int64_t place) { return place >= seen; });
      if (places_.empty()) return;
      ++tally.judged;
      std::erase_if(places_, [&](int64_t place) { return ask.tokens[place] != ask.tokens[at]; });
      if (places_.empty()) return;
      ++tally.right;
      for (int64_t& place : places_) ++place;
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

  // Offers the tokens that follow a row at some of the places, that of the newest place first.
  void offer_followers(const TextAsk& ask, GrowingTree<PlaceSet>& tree, int32_t row,
                       PlaceSet places) const {
    struct Followed {
      int32_t token;
      PlaceSet places;
    } followed[64];
    int num_followed = 0, num_places = 0;
    const int32_t depth = tree.row(row).depth;
    for (; places != 0; places &= places - 1) {
      const int64_t at = places_[std::countr_zero(places)] + depth;
      if (at >= ask.num_tokens) continue;
      const auto alike = std::find_if(followed, followed + num_followed, [&](const Followed& one) {
        return one.token == ask.tokens[at];
      });
      if (alike == followed + num_followed) followed[num_followed++] = {ask.tokens[at], 0};
      alike->places |= places & -places;
      ++num_places;
    }
    const Tally& tally = tallies_[match_n_];
    const double rate = static_cast<double>(tally.right) / tally.judged;
    for (int i = 0; i < num_followed; ++i) {
      const double share = static_cast<double>(std::popcount(followed[i].places)) / num_places;
      tree.offer(row, followed[i].token, rate * share, followed[i].places);
    }
  }

  NgramRule rule_;
  SuffixAutomaton automaton_;
  std::vector<Tally> tallies_;   // by match length
  int64_t match_n_ = 0;          // match length of the last look-up
  std::vector<int64_t> places_;  // what followed its matches starts here, the newest first
  int64_t max_depth_ = 0;        // tokens that the last draft could look ahead
};

}  // namespace
}  // namespace outdraft

// As `ngram_texts` of text_ops.py; `branching` is at most 63.
OUTDRAFT_EXPORT outdraft::Text* new_ngram_text(int64_t min_n, int64_t max_n, int64_t branching) {
  return new outdraft::NgramText({min_n, max_n, branching});
}
