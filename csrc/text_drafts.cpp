// Drafts from texts: what followed when a text ended like this before? What they promise is in
// src/outdraft/kernels/ops.py; the readable twins are in src/outdraft/kernels/torch/texts.py.
//
// Prompt lookup (Saxena 2023) asks the suffix automaton for the newest places of the longest end.
// A row's path matches some of these places. The probability of a token behind it is that of the
// path, times the share of its places that go on with the token, times the chance that a token of a
// match of this length is right at all, which is measured.
//
// Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) asks it, and finished texts, what followed
// each end of the text how often. The probability of a token is count(string + token) /
// count(string); that of a row is the product along its path. The sum of a tree's probabilities is
// the expected number of accepted tokens. The tree with the largest sum is drafted; of equal sums
// that of the longest end. Ends that occurred at the same places have the same continuations. They
// count as one, which may draft as deep as the one of them that may draft deepest.

#include <algorithm>
#include <bit>
#include <vector>

#include "export.h"
#include "finished_texts.h"
#include "growing_tree.h"
#include "suffix_automaton.h"

namespace outdraft {

class Text;

// One request of a step, as Python packs it: four numbers of 64 bits.
struct TextAsk {
  Text* text;  // what is remembered of it
  const int32_t* tokens;
  int64_t num_tokens;
  int64_t max_tokens;  // of the draft
};

class Text {
 public:
  explicit Text(SuffixAutomaton automaton) : automaton_(std::move(automaton)) {}
  Text& operator=(Text&&) = default;
  virtual ~Text() = default;

  // Reads the tokens that are new and writes a draft, as GrowingTree does; returns its score.
  virtual double draft(const TextAsk& ask, int32_t* draft) = 0;
  // Tokens that the text's end and the places behind which it was drafted have in common.
  int64_t match_length() const { return match_n_; }
  int64_t num_bytes() const { return automaton_.num_bytes(); }

 protected:
  SuffixAutomaton automaton_;
  int64_t match_n_ = 0;  // match length of the last draft
};

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
      : Text({0, rule.branching + 1, rule.max_n + 1}),  // the newest place is the text's own end
        rule_(rule),
        tallies_(rule.max_n + 1) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    if (!automaton_.is_continued_by(ask.tokens, ask.num_tokens)) *this = NgramText(rule_);
    judge(ask);
    automaton_.read(ask.tokens, ask.num_tokens);
    look_up();
    max_depth_ = ask.max_tokens;
    thread_local GrowingTree<PlaceSet> tree;
    const PlaceSet all = (PlaceSet{1} << places_.size()) - 1;
    tree.grow(0.0, ask.max_tokens, all, [&](int32_t row, PlaceSet places) {
      offer_followers(ask, tree, row, places);
    });
    tree.write(draft);
    return tree.score();
  }

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
    for (const auto& [place, shortest, longest] : automaton_.matches()) {
      const int64_t num_before = automaton_.count_of(place) - 1;
      if (num_before == 0) continue;
      match_n_ = longest;
      if (match_n_ < rule_.min_n) return;
      for (int64_t age = 1; age <= std::min(num_before, rule_.branching); ++age) {
        places_.push_back(automaton_.newest_end(place, age));
      }
      return;
    }
  }

  // Offers the tokens that follow a row at some of the places, that of the newest place first.
  void offer_followers(const TextAsk& ask, GrowingTree<PlaceSet>& tree, int32_t row,
                       PlaceSet places) const {
    struct Followed {
      int32_t token;
      PlaceSet places;
    } followed[64];
    int num_followed = 0, num_places = 0;
    const int32_t depth = tree.depth_of(row);
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
  std::vector<Tally> tallies_;   // by match length
  std::vector<int64_t> places_;  // what followed its matches starts here, the newest first
  int64_t max_depth_ = 0;        // tokens that the last draft could look ahead
};

struct SuffixRule {
  int64_t max_depth;
  double max_spec_factor;
  double min_token_prob;
  int64_t branching;

  // How deep the matches of these lengths may draft: match and draft together fit in max_depth.
  int64_t limit(int64_t shortest, int64_t longest, int64_t max_tokens) const {
    int64_t most = 0;
    for (int64_t length = shortest; length <= longest; ++length) {
      const double by_factor = std::min<double>(max_tokens, max_spec_factor * length);
      most = std::max(most, std::min(static_cast<int64_t>(by_factor), max_depth - length));
    }
    return most;
  }
};

// Writes the best draft behind the matches, the longest first, if its score is above `best`;
// returns the score of what is written then, and sets its match length. A match has occurred
// `num_more` times more than it is counted.
template <class Texts, class Place>
double draft_best(Texts& texts, const std::vector<Match<Place>>& matches, int32_t num_more,
                  const SuffixRule& rule, int64_t max_tokens, double best, int32_t* draft,
                  int64_t& match_n) {
  thread_local GrowingTree<Place> tree;
  for (const auto& [place, shortest, longest] : matches) {
    const int64_t limit = rule.limit(shortest, longest, max_tokens);
    if (limit <= best) continue;  // the rows of each depth add up to one at most
    tree.grow(rule.min_token_prob, max_tokens, place, [&](int32_t row, const Place& end) {
      if (tree.depth_of(row) == limit) return;
      const double num_seen = texts.count_of(end) + (row == 0 ? num_more : 0);
      texts.visit_followers(end, [&](int32_t token, const Place& next) {
        tree.offer(row, token, texts.count_of(next) / num_seen, next);
      });
    });
    if (tree.score() <= best) continue;
    best = tree.score();
    match_n = longest;
    tree.write(draft);
  }
  return best;
}

class SuffixText : public Text {
 public:
  SuffixText(FinishedTexts& finished, const SuffixRule& rule)
      : Text({rule.branching, 0, rule.max_depth}), finished_(&finished), rule_(rule) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    if (!automaton_.is_continued_by(ask.tokens, ask.num_tokens)) {
      *this = SuffixText(*finished_, rule_);
    }
    automaton_.read(ask.tokens, ask.num_tokens);
    draft[0] = 0;
    const double best = draft_best(automaton_, automaton_.matches(), 0, rule_, ask.max_tokens,
                                   0.0, draft, match_n_);
    // The text's own occurrence of a match counts as one more, without continuation.
    const auto matches = finished_->matches(ask.tokens + ask.num_tokens, ask.num_tokens);
    return draft_best(*finished_, matches, 1, rule_, ask.max_tokens, best, draft, match_n_);
  }

 private:
  FinishedTexts* finished_;
  SuffixRule rule_;
};

}  // namespace
}  // namespace outdraft

using outdraft::FinishedTexts;
using outdraft::Text;

// The texts of `NgramTexts` of kernels/ops.py; `branching` is at most 63.
OUTDRAFT_EXPORT Text* new_ngram_text(int64_t min_n, int64_t max_n, int64_t branching) {
  return new outdraft::NgramText({min_n, max_n, branching});
}

// The texts of `SuffixTexts` of kernels/ops.py; the finished texts are freed last.
OUTDRAFT_EXPORT FinishedTexts* new_finished(int64_t max_depth, int64_t branching) {
  return new FinishedTexts(max_depth, branching);
}
OUTDRAFT_EXPORT void free_finished(FinishedTexts* texts) { delete texts; }
OUTDRAFT_EXPORT int64_t finished_bytes(const FinishedTexts* texts) { return texts->num_bytes(); }

OUTDRAFT_EXPORT void add_finished(FinishedTexts* texts, const int32_t* tokens,
                                  int64_t num_tokens) {
  texts->add(tokens, num_tokens);
}
OUTDRAFT_EXPORT int64_t count_finished(FinishedTexts* texts, int64_t max_tokens) {
  return texts->count(max_tokens);
}
OUTDRAFT_EXPORT int64_t remove_finished(FinishedTexts* texts, int64_t max_tokens) {
  return texts->remove_oldest(max_tokens);
}

OUTDRAFT_EXPORT Text* new_suffix_text(FinishedTexts* finished, int64_t max_depth,
                                                double max_spec_factor, double min_token_prob,
                                                int64_t branching) {
  return new outdraft::SuffixText(*finished,
                                  {max_depth, max_spec_factor, min_token_prob, branching});
}

OUTDRAFT_EXPORT void free_text(Text* text) { delete text; }
OUTDRAFT_EXPORT int64_t text_bytes(const Text* text) { return text->num_bytes(); }

// One draft behind the other, their scores and match lengths; returns how many numbers the drafts
// take.
OUTDRAFT_EXPORT int64_t draft_texts(int64_t num_asks, const outdraft::TextAsk* asks,
                                    int32_t* drafts, double* scores, int64_t* match_lengths) {
  int64_t end = 0;
  for (int64_t i = 0; i < num_asks; ++i) {
    scores[i] = asks[i].text->draft(asks[i], drafts + end);
    match_lengths[i] = asks[i].text->match_length();
    end += 1 + 2 * drafts[end];
  }
  return end;
}

OUTDRAFT_FUNCTIONS(new_ngram_text, new_finished, free_finished, finished_bytes, add_finished,
                   count_finished, remove_finished, new_suffix_text, free_text, text_bytes,
                   draft_texts);
