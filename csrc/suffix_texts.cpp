// Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): draft what usually followed a text's end,
// in that text and in finished ones.
//
// For every suffix of the text that occurred before, a tree of its most probable continuations is
// grown. The probability of a token is count(string + token) / count(string); that of a row is the
// product along its path. The sum of a tree's probabilities is the expected number of accepted
// tokens. The tree with the largest sum is drafted; of equal sums that of the longest suffix.
// Suffixes that occurred at the same places have the same continuations. They count as one suffix,
// which may draft as deep as the one of them that may draft deepest. The readable twin is
// src/outdraft/kernels/reference/suffix_texts.py.

#include <algorithm>
#include <vector>

#include "export.h"
#include "finished_texts.h"
#include "growing_tree.h"
#include "suffix_automaton.h"
#include "text_drafts.h"

namespace outdraft {
namespace {

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

// Grows the continuations of a match, which has occurred `num_more` times more than it is counted.
template <class Texts, class Place>
void grow(Texts& texts, const Place& match, int32_t num_more, int64_t max_depth,
          int64_t max_tokens, GrowingTree<Place>& tree) {
  const auto offer_followers = [&](int32_t row, const Place& place, double num_seen) {
    texts.visit_followers(place, [&](int32_t token, const Place& next) {
      tree.offer(row, token, texts.count_of(next) / num_seen, next);
    });
  };
  offer_followers(0, match, texts.count_of(match) + num_more);
  while (tree.can_take(max_tokens)) {
    const int32_t row = tree.take();
    const Place place = tree.row(row).note;
    if (tree.row(row).depth < max_depth) offer_followers(row, place, texts.count_of(place));
  }
}

// Writes the best draft behind the matches, the longest first, if its score is above `best`;
// returns the score of what is written then.
template <class Texts, class Place>
double draft_best(Texts& texts, const std::vector<Match<Place>>& matches, int32_t num_more,
                  const SuffixRule& rule, int64_t max_tokens, double best, int32_t* draft) {
  thread_local GrowingTree<Place> tree;
  for (const auto& [place, shortest, longest] : matches) {
    const int64_t limit = rule.limit(shortest, longest, max_tokens);
    if (limit <= best) continue;  // the rows of each depth add up to one at most
    tree.clear(rule.min_token_prob);
    grow(texts, place, num_more, limit, max_tokens, tree);
    if (tree.score() <= best) continue;
    best = tree.score();
    tree.write(draft);
  }
  return best;
}

class SuffixText : public Text {
 public:
  SuffixText(FinishedTexts& finished, const SuffixRule& rule)
      : finished_(&finished), rule_(rule), own_(rule.branching, 0, rule.max_depth) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    if (!own_.is_continued_by(ask.tokens, ask.num_tokens)) *this = SuffixText(*finished_, rule_);
    own_.read(ask.tokens, ask.num_tokens);
    draft[0] = 0;
    const double best = draft_best(own_, own_.matches(), 0, rule_, ask.max_tokens, 0.0, draft);
    // The text's own occurrence of a match counts as one more, without continuation.
    const auto matches = finished_->matches(ask.tokens + ask.num_tokens, ask.num_tokens);
    return draft_best(*finished_, matches, 1, rule_, ask.max_tokens, best, draft);
  }
  int64_t num_bytes() const override { return own_.num_bytes(); }

 private:
  FinishedTexts* finished_;
  SuffixRule rule_;
  SuffixAutomaton own_;
};

}  // namespace
}  // namespace outdraft

using outdraft::FinishedTexts;

// As `suffix_texts` of text_ops.py: the finished texts, which a request's text outlives in no case.
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

OUTDRAFT_EXPORT outdraft::Text* new_suffix_text(FinishedTexts* finished, int64_t max_depth,
                                                double max_spec_factor, double min_token_prob,
                                                int64_t branching) {
  return new outdraft::SuffixText(*finished,
                                  {max_depth, max_spec_factor, min_token_prob, branching});
}
