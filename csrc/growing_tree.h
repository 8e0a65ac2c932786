// Grows the draft of a few rows that is expected to be accepted furthest.
//
// A row's probability is that of its whole path. The tree starts as its root. A row may be taken
// when its parent has been taken, and the likeliest of these rows is taken next. So the first K
// rows are the best tree of K rows, for every K. Among rows of equal probability the deepest is
// taken, then the one with the earlier parent, then the one that was offered first. A chain is
// therefore grown to its end before it branches, where that costs nothing.
//
// The caller offers a row together with a note, gets the note back when the row is taken, and then
// offers what may follow that row. Siblings may be offered one by one: the likeliest first, and
// each other one when the sibling before it is taken.
#pragma once

#include <algorithm>
#include <cstdint>

namespace outdraft {

constexpr int64_t kMaxDrafts = 63;  // MAX_DRAFTS of core/draft.py

template <class Note>
class GrowingTree {
 public:
  struct Row {
    double prob;
    int32_t token;
    int32_t parent;
    int32_t depth;
    Note note;
  };

  // Back to the root. What is offered with a lower probability than `min_prob` is left out.
  void clear(double min_prob) {
    rows_[0] = {1.0, 0, 0, 0, {}};
    num_rows_ = num_waiting_ = 0;
    score_ = 0.0;
    min_prob_ = min_prob;
  }

  // Lets a row wait that follows a taken one with the probability `share`.
  void offer(int32_t parent, int32_t token, double share, const Note& note) {
    const double prob = rows_[parent].prob * share;
    if (prob < min_prob_) return;
    waiting_[num_waiting_++] = {prob, token, parent, rows_[parent].depth + 1, note};
  }

  // Whether there is room for one more row, and one that waits.
  bool can_take(int64_t max_rows) const { return num_rows_ < max_rows && num_waiting_ > 0; }

  // Takes the best of the waiting rows; returns its number.
  int32_t take() {
    const auto end = waiting_ + num_waiting_;
    const auto best = std::min_element(waiting_, end, goes_before);
    rows_[++num_rows_] = *best;
    score_ += best->prob;
    std::copy(best + 1, end, best);  // the others stay in the order of their offers
    --num_waiting_;
    return num_rows_;
  }

  const Row& row(int32_t number) const { return rows_[number]; }

  // The expected number of accepted tokens: the sum of all rows' probabilities.
  double score() const { return score_; }

  // Writes the number of rows, their token ids, and their parents, one behind the other.
  void write(int32_t* draft) const {
    draft[0] = num_rows_;
    for (int32_t row = 1; row <= num_rows_; ++row) {
      draft[row] = rows_[row].token;
      draft[num_rows_ + row] = rows_[row].parent;
    }
  }

 private:
  static bool goes_before(const Row& row, const Row& other) {
    if (row.prob != other.prob) return row.prob > other.prob;
    if (row.depth != other.depth) return row.depth > other.depth;
    return row.parent < other.parent;
  }

  Row rows_[kMaxDrafts + 1];
  Row waiting_[kMaxDrafts + 2];  // a row that is taken adds one to them at most
  int32_t num_rows_ = 0;
  int32_t num_waiting_ = 0;
  double score_ = 0.0;
  double min_prob_ = 0.0;
};

}  // namespace outdraft
