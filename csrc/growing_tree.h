// Grows the draft of a few rows that is expected to be accepted furthest.
//
// A row's probability is that of its whole path. The tree starts as its root. A row may be taken
// when its parent has been taken, and the likeliest of these rows is taken next. So the first K
// rows are the best tree of K rows, for every K. Among rows of equal probability the deepest is
// taken, then the one with the earlier parent, then the one that was offered first. A chain is
// therefore grown to its end before it branches, where that costs nothing.
//
// The caller offers a row together with a note, gets the note back when the row is taken, and then
// offers what may follow that row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace outdraft {

template <class Note>
class GrowingTree {
 public:
  // Grows a new tree from its root. `offer_followers(row, note)` offers what may follow that row;
  // what is offered with a lower probability than `min_prob` is left out.
  template <class OfferFollowers>
  void grow(double min_prob, int64_t max_rows, const Note& root,
            const OfferFollowers& offer_followers) {
    rows_.assign(1, {1.0, 0, 0, 0, 0, root});
    waiting_.clear();
    num_offered_ = 0;
    score_ = 0.0;
    min_prob_ = min_prob;
    offer_followers(0, root);
    for (int32_t row = 1; row <= max_rows && !waiting_.empty(); ++row) {
      std::pop_heap(waiting_.begin(), waiting_.end(), goes_behind);
      rows_.push_back(waiting_.back());
      waiting_.pop_back();
      score_ += rows_.back().prob;
      offer_followers(row, rows_.back().note);
    }
  }

  // Lets a row wait that follows a taken one with the probability `share`.
  void offer(int32_t parent, int32_t token, double share, const Note& note) {
    const double prob = rows_[parent].prob * share;
    if (prob < min_prob_) return;
    waiting_.push_back({prob, token, parent, rows_[parent].depth + 1, num_offered_++, note});
    std::push_heap(waiting_.begin(), waiting_.end(), goes_behind);
  }

  int32_t depth_of(int32_t row) const { return rows_[row].depth; }

  // The expected number of accepted tokens: the sum of all rows' probabilities.
  double score() const { return score_; }

  // Writes the number of rows, their token ids, and their parents, one behind the other.
  void write(int32_t* draft) const {
    const auto num_rows = static_cast<int32_t>(rows_.size()) - 1;
    draft[0] = num_rows;
    for (int32_t row = 1; row <= num_rows; ++row) {
      draft[row] = rows_[row].token;
      draft[num_rows + row] = rows_[row].parent;
    }
  }

 private:
  struct Row {
    double prob;
    int32_t token, parent, depth;
    int32_t age;  // how many were offered before it
    Note note;
  };

  static bool goes_behind(const Row& row, const Row& other) {
    if (row.prob != other.prob) return row.prob < other.prob;
    if (row.depth != other.depth) return row.depth < other.depth;
    if (row.parent != other.parent) return row.parent > other.parent;
    return row.age > other.age;
  }

  std::vector<Row> rows_;
  std::vector<Row> waiting_;  // a heap
  int32_t num_offered_ = 0;
  double score_ = 0.0;
  double min_prob_ = 0.0;
};

}  // namespace outdraft
