// Trees of requests that several ranks draft for: see shared_growth.h.
//
// Its readable twin is what src/outdraft/drafting/device/grower.py does with RequestShares. A level
// costs a turn of its logits; three integers of each row are joined before it is read. Where live
// rules look, their margins are joined too: each rank decides for all.

#include "shared_growth.h"

#include <algorithm>
#include <numeric>

namespace outdraft {

SharedGrowth::SharedGrowth(const Decoder& decoder, const DraftTask& task,
                           const DraftShares* shares)
    : task_(task),
      is_shared_(shares != nullptr),
      shares_(is_shared_ ? *shares : DraftShares{}),
      ranks_(decoder.spec().ranks),
      columns_(decoder.columns()),
      vocabulary_(decoder.vocabulary()),
      start_(is_shared_ ? std::accumulate(shares->counts, shares->counts + ranks_->rank, int64_t{0})
                        : 0),
      growth_(own_task(), decoder.drafted_ids(), decoder.num_drafted()),
      rules_(task.stops, num_requests(), task.num_levels) {
  if (!is_shared_) return;
  drafting_.resize(static_cast<size_t>(num_requests()));
  std::iota(drafting_.begin(), drafting_.end(), 0);
  count();
}

// With the rules of its own requests.
DraftTask SharedGrowth::own_task() const {
  DraftTask own = task_;
  if (!is_shared_ || own.stops.price == nullptr) return own;
  own.stops.weights += start_ * task_.num_levels;
  own.stops.biases += start_ * task_.num_levels;
  own.stops.price += start_;
  own.stops.has_rule += start_;
  return own;
}

void SharedGrowth::take_memory(Parts& parts) {
  if (!is_shared_) return;
  const int64_t widest = *std::max_element(task_.levels, task_.levels + task_.num_levels);
  const int64_t most_rows = task_.num_requests * widest;
  received_ = parts.take<float>(most_rows * columns_ * ranks_->size);
  whole_ = parts.take<float>(most_rows * vocabulary_);
}

bool SharedGrowth::extend(const float* logits) {
  if (!is_shared_) {
    growth_.extend(logits, RowsOf::kDrafting);
    return true;
  }
  if (!turn(logits)) return false;
  goes_on_.assign(drafting_.size(), 1);
  if (task_.stops.price != nullptr && !look()) return false;
  growth_.extend(whole_, RowsOf::kDrafting, nullptr, goes_on_.data() + place_);
  const bool is_chain = task_.num_levels == task_.num_rows;
  size_t num_left = 0;
  for (size_t place = 0; place < drafting_.size(); ++place) {
    const int64_t g = drafting_[place];
    const bool has_all = is_chain && depth_ + 1 >= shares_.num_drafts[g];
    if (goes_on_[place] && !has_all) drafting_[num_left++] = g;
  }
  drafting_.resize(num_left);
  ++depth_;
  count();
  return true;
}

// [3, drafting, F], from what each rank has of it.
bool SharedGrowth::copy_newest(int64_t* to) {
  if (!is_shared_) {
    growth_.copy_newest(to, RowsOf::kDrafting);
    return true;
  }
  const int64_t width = num_nodes(), told = 3 * most_ * width;
  told_.resize(static_cast<size_t>(told));
  heard_.resize(static_cast<size_t>(told * ranks_->size));
  growth_.copy_newest(told_.data(), RowsOf::kDrafting);
  const int64_t bytes = told * int64_t{sizeof(int64_t)};
  if (!ranks_->join(reinterpret_cast<const char*>(told_.data()), bytes,
                    reinterpret_cast<char*>(heard_.data()))) {
    return false;
  }
  for (int64_t column = 0; column < 3; ++column) {
    for (int64_t rank = 0; rank < ranks_->size; ++rank) {
      const int64_t count = counts_[rank] * width;
      to = std::copy_n(heard_.data() + rank * told + column * count, count, to);
    }
  }
  return true;
}

void SharedGrowth::count() {
  counts_.assign(static_cast<size_t>(ranks_->size), 0);
  auto request = drafting_.begin();
  for (int64_t rank = 0, end = 0; rank < ranks_->size; ++rank) {
    if (rank == ranks_->rank) place_ = request - drafting_.begin();
    end += shares_.counts[rank];
    for (; request != drafting_.end() && *request < end; ++request) ++counts_[rank];
  }
  most_ = *std::max_element(counts_.begin(), counts_.end());
}

// Whole rows of this rank's requests that draft.
bool SharedGrowth::turn(const float* logits) {
  const int64_t num_own = counts_[ranks_->rank] * num_nodes(), part = num_own * columns_;
  std::vector<int64_t> sent = counts_, received(counts_.size(), part * int64_t{sizeof(float)});
  for (int64_t& bytes : sent) bytes *= num_nodes() * columns_ * int64_t{sizeof(float)};
  if (!ranks_->turn(reinterpret_cast<const char*>(logits), sent.data(), received.data(),
                    reinterpret_cast<char*>(received_))) {
    return false;
  }
  for (int64_t row = 0; row < num_own; ++row) {
    for (int64_t rank = 0; rank < ranks_->size; ++rank) {
      const int64_t first = rank * columns_;  // the last rank may have fewer
      const int64_t count = std::min(columns_, vocabulary_ - first);
      const float* from = received_ + rank * part + row * columns_;
      std::copy_n(from, count, whole_ + row * vocabulary_ + first);
    }
  }
  return true;
}

// Whether the rules of all requests let them draft on.
bool SharedGrowth::look() {
  margins_.resize(static_cast<size_t>(most_));
  all_margins_.resize(static_cast<size_t>(most_ * ranks_->size));
  growth_.look(whole_, margins_.data());
  const int64_t bytes = most_ * int64_t{sizeof(float)};
  if (!ranks_->join(reinterpret_cast<const char*>(margins_.data()), bytes,
                    reinterpret_cast<char*>(all_margins_.data()))) {
    return false;
  }
  size_t place = 0;
  for (int64_t rank = 0; rank < ranks_->size; ++rank) {
    for (int64_t i = 0; i < counts_[rank]; ++i, ++place) {
      const float margin = all_margins_[rank * most_ + i];
      goes_on_[place] = rules_.go_on(drafting_[place], depth_, margin);
    }
  }
  return true;
}

}  // namespace outdraft
