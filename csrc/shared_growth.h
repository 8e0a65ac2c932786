// Trees for which a decoder reads that may be spread over ranks. These read the rows of all
// requests together, and each grows the trees of its own ones.
#pragma once

#include <cstdint>
#include <vector>

#include "forward.h"
#include "growth.h"
#include "parts.h"

namespace outdraft {

// Whose requests are whose; Python fills it (kernels/native/drafting.py).
struct DraftShares {
  int64_t num_requests;       // of all ranks: G
  const int64_t* counts;      // [ranks]: the first counts[0] are rank 0's, and so on
  const int64_t* num_drafts;  // [G], as in DraftTask
};

// As `Growth`, of the requests of all ranks. All ranks call the same; false: another one does not
// answer.
class SharedGrowth {
 public:
  // `task`: of this rank's requests, but for the rules of its stops, which are of all. `shares`:
  // null: all requests are here.
  SharedGrowth(const Decoder& decoder, const DraftTask& task, const DraftShares* shares);

  void take_memory(Parts& parts);  // before it is used

  // From this rank's columns of the logits, [drafting, E, columns].
  bool extend(const float* logits);
  bool copy_newest(int64_t* to);
  void finish() { growth_.finish(); }

  int64_t num_requests() const { return is_shared_ ? shares_.num_requests : task_.num_requests; }
  const int64_t* num_drafts() const { return is_shared_ ? shares_.num_drafts : task_.num_drafts; }
  const std::vector<int64_t>& drafting() const {
    return is_shared_ ? drafting_ : growth_.drafting();
  }
  int64_t num_nodes() const { return growth_.num_nodes(); }
  int64_t first() const { return growth_.first(); }

 private:
  DraftTask own_task() const;
  void count();
  bool turn(const float* logits);
  bool look();

  const DraftTask task_;
  const bool is_shared_;
  const DraftShares shares_;
  RankLink* const ranks_;
  const int64_t columns_, vocabulary_;
  int64_t start_ = 0;  // the first request of this rank
  Growth growth_;
  LiveRules rules_;
  int64_t depth_ = 0;
  std::vector<int64_t> drafting_;
  // How many of these each rank has, the most of them, and the place of this rank's first one.
  std::vector<int64_t> counts_;
  int64_t most_ = 0, place_ = 0;
  std::vector<uint8_t> goes_on_;  // by places
  float *received_, *whole_;      // logits of this rank's rows: by ranks, and [rows, N]
  std::vector<int64_t> told_, heard_;
  std::vector<float> margins_, all_margins_;
};

}  // namespace outdraft
