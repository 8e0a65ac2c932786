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

// Drafts from the text's own past.
class OwnPast {
 public:
  OwnPast(const SuffixAutomaton& automaton, const SuffixRule& rule)
      : automaton_(automaton), rule_(rule) {}

  // Writes the best draft; returns its score.
  double draft(int64_t max_tokens, int32_t* draft) {
    draft[0] = 0;
    double best_score = 0.0;
    const int64_t longest = std::min(automaton_.num_tokens(), rule_.max_depth - 1);
    int32_t state = automaton_.context();
    while (state != SuffixAutomaton::kRoot) {
      const auto& [length, link, count, edges] = automaton_.state(state);
      const int64_t shortest = automaton_.state(link).length + 1;
      const int64_t limit =
          rule_.limit(shortest, std::min<int64_t>(longest, length), max_tokens);
      if (limit > best_score) {  // the rows of each depth add up to less than one
        grow(state, limit, max_tokens);
        if (tree_.score() > best_score) {
          tree_.write(draft);
          best_score = tree_.score();
        }
      }
      state = link;
    }
    return best_score;
  }

 private:
  struct Continuation {
    int32_t state;  // of the string before
    int32_t rank;
    int32_t target;
  };

  void grow(int32_t state, int64_t max_depth, int64_t max_tokens) {
    tree_.clear(rule_.min_token_prob);
    offer(0, state, 0);
    while (tree_.can_take(max_tokens)) {
      const int32_t number = tree_.take();
      const auto& row = tree_.row(number);
      if (row.depth < max_depth) offer(number, row.note.target, 0);
      offer(row.parent, row.note.state, row.note.rank + 1);
    }
  }

  // Offers the continuation of this rank behind the row that led to a state.
  void offer(int32_t row, int32_t state, int32_t rank) {
    const int32_t edge = automaton_.frequent_edge(state, rank);
    if (edge == kNone) return;
    const auto& to = automaton_.edge(edge);
    const double count = automaton_.state(to.target).count;
    tree_.offer(row, to.token, count / automaton_.state(state).count, {state, rank, to.target});
  }

  const SuffixAutomaton& automaton_;
  const SuffixRule& rule_;
  GrowingTree<Continuation> tree_;
};

// Drafts from finished texts.
class OthersPast {
 public:
  OthersPast(FinishedTexts& texts, const SuffixRule& rule) : texts_(texts), rule_(rule) {}

  // Writes the best draft if its score is above `least`; returns the score of what is written then.
  // `context` is what may match, and ends the text.
  double draft(const int32_t* context, int64_t num_context, int64_t max_tokens, double least,
               int32_t* draft) {
    context_end_ = context + num_context;
    num_context_ = num_context;
    double best_score = 0.0;
    int64_t shortest = 1;
    Place place = num_context > 0 ? locate_last(1) : kNowhere;
    while (place.node != kNone) {
      const auto [longest, longer] = longest_alike(shortest, place);
      const int64_t limit = rule_.limit(shortest, longest, max_tokens);
      if (limit > std::max(least, best_score)) {
        grow(place, limit, max_tokens);
        if (tree_.score() > least && tree_.score() >= best_score) {
          tree_.write(draft);
          best_score = tree_.score();
        }
      }
      shortest = longest + 1;
      place = longer;
    }
    return std::max(least, best_score);
  }

 private:
  using Place = FinishedTexts::Place;
  static constexpr Place kNowhere = {kNone, 0};

  struct Continuation {
    Place place;   // before the token
    int32_t rank;  // among the children, where the token begins a label
  };
  struct Alike {
    int64_t longest;
    Place longer;  // of the match of one token more
  };

  Place locate_last(int64_t length) const { return texts_.locate(context_end_ - length, length); }

  // The longest match that occurs as often as a shorter one, hence at the same places. Matches that
  // occur at the same places are continued alike: one walk serves them all.
  Alike longest_alike(int64_t length, const Place& place) const {
    const int32_t count = texts_.node(place.node).count;
    const int64_t before = texts_.length_before(place, context_end_, num_context_);
    const int64_t furthest = std::max(length, before);
    Place longer = kNowhere;
    int64_t most = furthest, tried = furthest;  // where phrases come again, this is it
    while (length < most) {
      const Place found = locate_last(tried);
      if (found.node != kNone && texts_.node(found.node).count == count) {
        length = tried;
      } else {
        most = tried - 1;
        longer = found;
      }
      // Where it is not, one token more is too many most often.
      tried = tried == furthest ? length + 1 : (length + most + 1) / 2;
    }
    if (most == furthest && furthest < num_context_) longer = locate_last(furthest + 1);
    return {length, longer};
  }

  // As from the own text; the context's own occurrence counts as one without continuation.
  void grow(const Place& place, int64_t max_depth, int64_t max_tokens) {
    tree_.clear(rule_.min_token_prob);
    offer_next(0, place);
    while (tree_.can_take(max_tokens)) {
      const int32_t number = tree_.take();
      const auto& row = tree_.row(number);
      const auto [node, used] = row.note.place;
      if (row.depth < max_depth) offer_next(number, {node, used + 1});
      if (used == 0) offer_child(row.parent, texts_.node(node).from, row.note.rank + 1);
    }
  }

  // Offers what follows a place: the next token of the label, or the most frequent child.
  void offer_next(int32_t row, const Place& place) {
    const auto& node = texts_.node(place.node);
    if (place.used == node.length) {
      offer_child(row, place.node, 0);
    } else {
      offer_token(row, texts_.token_at(place.node, place.used), node.count, {place, 0});
    }
  }

  void offer_child(int32_t row, int32_t node, int32_t rank) {
    const int32_t child = texts_.frequent_child(node, rank);
    if (child == kNone) return;
    offer_token(row, texts_.node(child).token, texts_.node(node).count, {{child, 0}, rank});
  }

  // Offers a token behind a row whose string the finished texts hold `seen` times.
  void offer_token(int32_t row, int32_t token, int32_t seen, const Continuation& note) {
    const double count = texts_.node(note.place.node).count;
    tree_.offer(row, token, count / (row == 0 ? seen + 1 : seen), note);
  }

  FinishedTexts& texts_;
  const SuffixRule& rule_;
  const int32_t* context_end_ = nullptr;
  int64_t num_context_ = 0;
  GrowingTree<Continuation> tree_;
};

class SuffixTexts : public TextDrafter {
 public:
  explicit SuffixTexts(const SuffixRule& rule)
      : rule_(rule), finished_(rule.max_depth, rule.branching), others_(finished_, rule_) {}

  double draft(const TextAsk& ask, int32_t* draft) override {
    const auto keeps = SuffixAutomaton::Keeps::kFrequentEdges;
    auto& text =
        texts_.try_emplace(ask.number, keeps, rule_.branching, rule_.max_depth).first->second;
    if (!text.is_continued_by(ask.tokens, ask.num_tokens)) text.clear();
    text.read(ask.tokens, ask.num_tokens);
    const double own = OwnPast(text, rule_).draft(ask.max_tokens, draft);
    const int64_t length = std::min(ask.num_tokens, rule_.max_depth - 1);
    const int32_t* context = ask.tokens + ask.num_tokens - length;
    return others_.draft(context, length, ask.max_tokens, own, draft);
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
  OthersPast others_;
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
