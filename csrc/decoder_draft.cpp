// A whole draft of a decoder: all passes, all choices, for all requests, in one call. A request whose
// chain has ended has no rows in later passes.
//
// The readable twin is src/outdraft/drafting/device/grower.py over the passes of a network.

#include <algorithm>
#include <cstring>
#include <vector>

#include "export.h"
#include "forward.h"
#include "growth.h"

namespace outdraft {
namespace {

class Drafting {
 public:
  Drafting(Decoder& decoder, const DraftTask& task)
      : decoder_(decoder),
        task_(task),
        growth_(task, decoder.spec().draft_ids, decoder.vocabulary()),
        zeros_(static_cast<size_t>(task.num_requests)) {
    const int64_t widest = *std::max_element(task.levels, task.levels + task.num_levels);
    const int64_t most = task.num_requests * widest, num_outputs = decoder.vocabulary();
    state_bytes_ = decoder.spec().hidden * size_of(decoder.spec().dtype);
    char* memory = decoder.draft_memory.reserve<char>(2 * most * state_bytes_ +
                                                      most * 4 * num_outputs + 3 * kLine);
    states_ = take(memory, most * state_bytes_);
    gathered_ = take(memory, most * state_bytes_);
    logits_ = reinterpret_cast<float*>(take(memory, most * 4 * num_outputs));
  }

  bool run(const void* states) {
    std::memcpy(states_, states, static_cast<size_t>(task_.num_requests * state_bytes_));
    for (int64_t depth = 0; depth < task_.num_levels && num_drafting() > 0; ++depth) {
      if (depth > 0 && !read(depth)) return false;
      decoder_.logits(states_, num_drafting() * growth_.num_nodes(), logits_);
      before_ = growth_.drafting();
      growth_.extend(logits_, RowsOf::kDrafting);
    }
    growth_.finish();
    return true;
  }

 private:
  static constexpr int64_t kLine = 64;

  static char* take(char*& memory, int64_t bytes) {
    char* part = memory;
    memory += (bytes + kLine - 1) / kLine * kLine;
    return part;
  }

  // The states behind the newest level.
  bool read(int64_t depth) {
    const int64_t num_nodes = growth_.num_nodes(), num_rows = num_drafting() * num_nodes;
    rows_.resize(static_cast<size_t>(5 * num_rows));
    int64_t *ids = rows_.data(), *origins = ids + num_rows, *ancestors = origins + num_rows;
    int64_t *positions = ancestors + num_rows, *slots = positions + num_rows;
    growth_.copy_newest(ids, RowsOf::kDrafting);
    gather_columns();
    place_level(num_drafting(), num_nodes, growth_.first(), ancestors, contexts_.data(),
                num_drafts_.data(), table_.data(), task_.table_width, task_.block_size, ancestors,
                positions, slots);
    const DecoderRows rows{ids,           positions,          slots,     starts_.data(),
                           lens_.data(),  zeros_.data(),      ancestors, table_.data(),
                           num_rows,      num_drafting(),     task_.table_width};
    const bool reads_states = decoder_.spec().reads_states != 0;
    if (reads_states) gather(depth, origins);
    return decoder_.forward(rows, reads_states ? gathered_ : nullptr, nullptr, 0, nullptr, states_);
  }

  // What the requests that still draft have in the columns of the task.
  void gather_columns() {
    const int64_t num_nodes = growth_.num_nodes(), width = task_.table_width;
    starts_.assign(1, 0);
    contexts_.clear(), lens_.clear(), num_drafts_.clear(), table_.clear();
    for (const int64_t b : growth_.drafting()) {
      starts_.push_back(starts_.back() + static_cast<int32_t>(num_nodes));
      contexts_.push_back(task_.contexts[b]);
      lens_.push_back(static_cast<int32_t>(task_.contexts[b]));
      num_drafts_.push_back(task_.num_drafts[b]);
      const int32_t* blocks = task_.block_table + b * width;
      table_.insert(table_.end(), blocks, blocks + width);
    }
  }

  // The states that the rows of the newest level continue.
  void gather(int64_t depth, const int64_t* origins) {
    const int64_t num_above = depth == 1 ? 1 : task_.levels[depth - 2];
    int64_t row = 0, place = 0;  // of the request in the pass before
    for (const int64_t b : growth_.drafting()) {
      while (before_[place] != b) ++place;
      for (int64_t node = 0; node < growth_.num_nodes(); ++node, ++row) {
        const int64_t above = place * num_above + origins[row];
        std::memcpy(gathered_ + row * state_bytes_, states_ + above * state_bytes_,
                    static_cast<size_t>(state_bytes_));
      }
    }
  }

  int64_t num_drafting() const { return static_cast<int64_t>(growth_.drafting().size()); }

  Decoder& decoder_;
  const DraftTask& task_;
  Growth growth_;
  int64_t state_bytes_;
  char *states_, *gathered_;  // behind the newest level, and what that continues
  float* logits_;             // [rows, N]
  std::vector<int64_t> rows_;    // of a pass: ids, origins, ancestors, positions, slots
  std::vector<int64_t> before_;  // the requests of the pass before
  std::vector<int64_t> contexts_, num_drafts_;
  std::vector<int32_t> starts_, lens_, zeros_, table_;
};

}  // namespace
}  // namespace outdraft

// Grows drafts behind states [B, D]. False: a token or a position is not in its table.
OUTDRAFT_EXPORT int64_t decoder_draft(outdraft::Decoder* decoder, const outdraft::DraftTask* task,
                                      const void* states) {
  return outdraft::Drafting(*decoder, *task).run(states);
}
