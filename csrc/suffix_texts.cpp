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
#include <unordered_map>

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

bool is_none(SuffixAutomaton::Place place) { return place == kNone; }
bool is_none(const FinishedTexts::Place& place) { return place.node == kNone; }

// Grows the continuations of a match; `Texts` knows what follows a place, and how often.
template <class Texts>
class Continuations {
 public:
  using Place = typename Texts::Place;

  Continuations(Texts& texts, const SuffixRule& rule, int32_t num_more)
      : texts_(texts), rule_(rule), num_more_(num_more) {}

  // Returns the score. A match has occurred `num_more` times more than it is counted.
  double grow(const Place& match, int64_t max_depth, int64_t max_tokens) {
    tree_.clear(rule_.min_token_prob);
    offer(0, match, 0);
    while (tree_.can_take(max_tokens)) {
      const int32_t number = tree_.take();
      const auto& row = tree_.row(number);
      if (row.depth < max_depth) offer(number, row.note.next, 0);
      offer(row.parent, row.note.before, row.note.rank + 1);
    }
    return tree_.score();
  }
  void write(int32_t* draft) const { tree_.write(draft); }

 private:
  struct Note {
    Place before, next;
    int32_t rank;
  };

  // Offers the continuation of this rank behind a row.
  void offer(int32_t row, const Place& before, int32_t rank) {
    int32_t token = 0;
    const Place next = texts_.follow(before, rank, &token);
    if (is_none(next)) return;
    const int32_t seen = texts_.count_of(before) + (row == 0 ? num_more_ : 0);
    tree_.offer(row, token, static_cast<double>(texts_.count_of(next)) / seen,
                {before, next, rank});
  }

  Texts& texts_;
  const SuffixRule& rule_;
  int32_t num_more_;
  GrowingTree<Note> tree_;
};

// Writes the best draft from the text's own past; returns its score.
double draft_own(SuffixAutomaton& text, const SuffixRule& rule, int64_t max_tokens,
                 int32_t* draft) {
  Continuations continuations(text, rule, 0);
  draft[0] = 0;
  double best_score = 0.0;
  const int64_t longest = std::min(text.num_tokens(), rule.max_depth - 1);
  int32_t state = text.context();
  while (state != SuffixAutomaton::kRoot) {
    const int32_t link = text.state(state).link;
    const int64_t shortest = text.state(link).length + 1;
    const int64_t length = std::min<int64_t>(longest, text.state(state).length);
    const int64_t limit = rule.limit(shortest, length, max_tokens);
    // The rows of each depth add up to less than one.
    if (limit > best_score) {
      const double score = continuations.grow(state, limit, max_tokens);
      if (score > best_score) {
        continuations.write(draft);
        best_score = score;
      }
    }
    state = link;
  }
  return best_score;
}

// What of a text may match in finished ones: its last tokens.
struct Context {
  const int32_t* end;
  int64_t length;

  FinishedTexts::Place locate(const FinishedTexts& texts, int64_t num_last) const {
    return texts.locate(end - num_last, num_last);
  }
};

struct Alike {
  int64_t longest;
  FinishedTexts::Place longer;  // of the match of one token more
};

// The longest match that occurs as often as a shorter one, hence at the same places. Matches that
// occur at the same places are continued alike: one tree serves them all.
Alike longest_alike(const FinishedTexts& texts, const Context& context, int64_t length,
                    const FinishedTexts::Place& place) {
  const int32_t count = texts.count_of(place);
  const int64_t before = texts.length_before(place, context.end, context.length);
  const int64_t furthest = std::max(length, before);
  FinishedTexts::Place longer = {kNone, 0};
  int64_t most = furthest, tried = furthest;  // where phrases come again, this is it
  while (length < most) {
    const auto found = context.locate(texts, tried);
    if (!is_none(found) && texts.count_of(found) == count) {
      length = tried;
    } else {
      most = tried - 1;
      longer = found;
    }
    // Where it is not, one token more is too many most often.
    tried = tried == furthest ? length + 1 : (length + most + 1) / 2;
  }
  if (most == furthest && furthest < context.length) longer = context.locate(texts, furthest + 1);
  return {length, longer};
}

// Writes the best draft from finished texts if its score is above `least`; returns the score of
// what is written then. The context's own occurrence counts as one without continuation.
double draft_finished(FinishedTexts& texts, const SuffixRule& rule, const Context& context,
                      int64_t max_tokens, double least, int32_t* draft) {
  Continuations continuations(texts, rule, 1);
  double best_score = 0.0;
  int64_t shortest = 1;
  auto place = context.length > 0 ? context.locate(texts, 1) : FinishedTexts::Place{kNone, 0};
  while (!is_none(place)) {
    const auto [longest, longer] = longest_alike(texts, context, shortest, place);
    const int64_t limit = rule.limit(shortest, longest, max_tokens);
    if (limit > std::max(least, best_score)) {
      const double score = continuations.grow(place, limit, max_tokens);
      if (score > least && score >= best_score) {
        continuations.write(draft);
        best_score = score;
      }
    }
    shortest = longest + 1;
    place = longer;
  }
  return std::max(least, best_score);
}

class SuffixTexts : public TextDrafter {
 public:
  explicit SuffixTexts(const SuffixRule& rule)
      : rule_(rule), finished_(rule.max_depth, rule.branching) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    const auto keeps = SuffixAutomaton::Keeps::kFrequentEdges;
    auto& text =
        texts_.try_emplace(ask.number, keeps, rule_.branching, rule_.max_depth).first->second;
    if (!text.is_continued_by(ask.tokens, ask.num_tokens)) text.clear();
    text.read(ask.tokens, ask.num_tokens);
    const double own = draft_own(text, rule_, ask.max_tokens, draft);
    const Context context = {ask.tokens + ask.num_tokens,
                             std::min(ask.num_tokens, rule_.max_depth - 1)};
    return draft_finished(finished_, rule_, context, ask.max_tokens, own, draft);
  }
  void forget(int64_t number) override { texts_.erase(number); }
  int64_t num_bytes() const override {
    int64_t sum = finished_.num_bytes();
    for (const auto& [number, text] : texts_) sum += text.num_bytes();
    return sum;
  }
  FinishedTexts& finished() { return finished_; }

 private:
  SuffixRule rule_;
  std::unordered_map<int64_t, SuffixAutomaton> texts_;
  FinishedTexts finished_;
};

}  // namespace
}  // namespace outdraft

using outdraft::SuffixTexts;
using outdraft::TextDrafter;

namespace {

outdraft::FinishedTexts& finished(TextDrafter* texts) {
  return static_cast<SuffixTexts*>(texts)->finished();
}

}  // namespace

// As `suffix_texts` of text_ops.py; the functions of text_drafts.cpp serve it, too.
OUTDRAFT_EXPORT TextDrafter* new_suffix_texts(int64_t max_depth, double max_spec_factor,
                                              double min_token_prob, int64_t branching) {
  return new SuffixTexts({max_depth, max_spec_factor, min_token_prob, branching});
}

OUTDRAFT_EXPORT void add_finished(TextDrafter* texts, const int32_t* tokens, int64_t num_tokens) {
  finished(texts).add(tokens, num_tokens);
}

OUTDRAFT_EXPORT int64_t count_finished(TextDrafter* texts, int64_t max_tokens) {
  return finished(texts).count(max_tokens);
}

OUTDRAFT_EXPORT int64_t remove_finished(TextDrafter* texts, int64_t max_tokens) {
  return finished(texts).remove_oldest(max_tokens);
}
