// A whole draft of a decoder: it reads the rest of the texts, then come all passes and all choices,
// for all requests, in one call. A request whose chain has ended has no rows in later passes. Ranks
// over which the decoder is spread read the rows of all their requests.
//
// The readable twin is src/outdraft/drafting/device/grower.py over the passes of a network, behind
// texts that src/outdraft/drafting/device/text_reader.py reads.

#include <algorithm>
#include <cstring>
#include <vector>

#include "export.h"
#include "forward.h"
#include "parts.h"
#include "shared_growth.h"
#include "unread_texts.h"

namespace outdraft {

namespace {

class Drafting {
 public:
  Drafting(Decoder& decoder, const DraftTask& task, const UnreadTexts& unread,
           const DraftShares* shares)
      : decoder_(decoder),
        task_(task),
        unread_(unread),
        growth_(decoder, task, shares),
        num_requests_(growth_.num_requests()),
        zeros_(static_cast<size_t>(num_requests_)) {
    const int64_t widest = *std::max_element(task.levels, task.levels + task.num_levels);
    const int64_t most_nodes = num_requests_ * widest, num_columns = decoder.columns();
    for (int64_t b = 0; b < num_requests_; ++b) num_unread_ += unread.spans[b].num_rows;
    const int64_t most = std::max(most_nodes, num_unread_);
    state_bytes_ = decoder.spec().hidden * size_of(decoder.spec().dtype);
    const auto place = [&](char* memory) {
      Parts parts = {memory};
      states_ = parts.take<char>(most * state_bytes_);
      gathered_ = parts.take<char>(most * state_bytes_);
      logits_ = parts.take<float>(most_nodes * num_columns);
      growth_.take_memory(parts);
      return parts.num_bytes;
    };
    place(decoder.call_memory.reserve<char>(place(nullptr)));
  }

  bool run() {
    if (!read_texts()) return false;
    for (int64_t depth = 0; depth < task_.num_levels && num_drafting() > 0; ++depth) {
      if (depth > 0 && !read(depth)) return false;
      decoder_.draft_logits(states_, num_drafting() * growth_.num_nodes(), logits_);
      before_ = growth_.drafting();
      if (!growth_.extend(logits_)) return false;
    }
    growth_.finish();
    return true;
  }

 private:
  // The states behind the texts.
  bool read_texts() {
    rows_.resize(static_cast<size_t>(4 * num_unread_));
    int64_t *ids = rows_.data(), *ancestors = ids + num_unread_;
    int64_t *positions = ancestors + num_unread_, *slots = positions + num_unread_;
    std::fill_n(ancestors, num_unread_, 0);
    starts_.assign(1, 0), lens_.clear();
    std::vector<int32_t> num_causal;
    std::vector<int64_t> last_rows;  // each request has one at least
    int64_t row = 0;
    for (int64_t b = 0; b < num_requests_; ++b) {
      const UnreadText& span = unread_.spans[b];
      for (int64_t index = span.context_len; index < span.end(); ++index, ++row) {
        ids[row] = unread_.texts[span.text_start + index];
        positions[row] = index + span.num_skipped;
        slots[row] = unread_.slot(b, index);
      }
      starts_.push_back(static_cast<int32_t>(row));
      last_rows.push_back(row - 1);
      lens_.push_back(static_cast<int32_t>(span.context_len));
      num_causal.push_back(static_cast<int32_t>(span.num_rows));
    }
    const DecoderRows rows{ids,          positions,          slots,
                           starts_.data(), lens_.data(),     num_causal.data(),
                           ancestors,    unread_.block_table, num_unread_,
                           num_requests_, unread_.table_width, last_rows.data(),
                           num_requests_};
    const char* features = unread_.features;
    for (row = 0; features != nullptr && row < num_unread_; ++row) {
      copy_state(features, unread_.places[row], gathered_, row);
    }
    const void* states = features == nullptr ? nullptr : gathered_;
    return decoder_.forward(rows, states, nullptr, 0, nullptr, states_);
  }

  void copy_state(const char* from, int64_t place, char* to, int64_t row) const {
    std::memcpy(to + row * state_bytes_, from + place * state_bytes_,
                static_cast<size_t>(state_bytes_));
  }

  // The states behind the newest level.
  bool read(int64_t depth) {
    const int64_t num_nodes = growth_.num_nodes(), num_rows = num_drafting() * num_nodes;
    rows_.resize(static_cast<size_t>(5 * num_rows));
    int64_t *ids = rows_.data(), *origins = ids + num_rows, *ancestors = origins + num_rows;
    int64_t *positions = ancestors + num_rows, *slots = positions + num_rows;
    if (!growth_.copy_newest(ids)) return false;
    gather_columns();
    place_level(num_drafting(), num_nodes, growth_.first(), ancestors, contexts_.data(),
                num_drafts_.data(), table_.data(), unread_.table_width, unread_.block_size,
                ancestors, positions, slots);
    for (int64_t row = 0; row < num_rows; ++row) positions[row] += num_skipped_[row / num_nodes];
    const DecoderRows rows{ids,           positions,          slots,     starts_.data(),
                           lens_.data(),  zeros_.data(),      ancestors, table_.data(),
                           num_rows,      num_drafting(),     unread_.table_width,
                           nullptr,       num_rows};
    const bool reads_states = decoder_.spec().reads_states != 0;
    if (reads_states) gather(depth, origins);
    return decoder_.forward(rows, reads_states ? gathered_ : nullptr, nullptr, 0, nullptr, states_);
  }

  // What the requests that still draft have in the columns of the task.
  void gather_columns() {
    const int64_t num_nodes = growth_.num_nodes(), width = unread_.table_width;
    starts_.assign(1, 0);
    contexts_.clear(), lens_.clear(), num_drafts_.clear(), table_.clear(), num_skipped_.clear();
    for (const int64_t b : growth_.drafting()) {
      starts_.push_back(starts_.back() + static_cast<int32_t>(num_nodes));
      contexts_.push_back(unread_.spans[b].end());
      lens_.push_back(static_cast<int32_t>(contexts_.back()));
      num_drafts_.push_back(growth_.num_drafts()[b]);
      num_skipped_.push_back(unread_.spans[b].num_skipped);
      const int32_t* blocks = unread_.block_table + b * width;
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
        copy_state(states_, place * num_above + origins[row], gathered_, row);
      }
    }
  }

  int64_t num_drafting() const { return static_cast<int64_t>(growth_.drafting().size()); }

  Decoder& decoder_;
  const DraftTask& task_;
  const UnreadTexts& unread_;
  SharedGrowth growth_;
  const int64_t num_requests_;
  int64_t num_unread_ = 0;  // rows of all texts
  int64_t state_bytes_;
  char *states_, *gathered_;  // behind the newest level, and what that continues
  float* logits_;             // [rows, columns]
  std::vector<int64_t> rows_;    // of a pass: ids, origins, ancestors, positions, slots
  std::vector<int64_t> before_;  // the requests of the pass before
  std::vector<int64_t> contexts_, num_drafts_, num_skipped_;
  std::vector<int32_t> starts_, lens_, zeros_, table_;
};

// What is read may be drafted.
void learn(const UnreadTexts& unread, int64_t num_requests, Decoder* decoder) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const UnreadText& span = unread.spans[b];
    const int64_t* text = unread.texts + span.text_start;
    for (int64_t index = span.context_len; index < span.end(); ++index) {
      decoder->draft_tokens.learn(text[index]);
    }
  }
}

}  // namespace
}  // namespace outdraft

// Reads the rest of texts, and grows drafts behind them. `shares`: of a decoder that is spread over
// ranks; else null. False: as `forward`.
OUTDRAFT_EXPORT int64_t decoder_draft(outdraft::Decoder* decoder, const outdraft::DraftTask* task,
                                      const outdraft::UnreadTexts* unread,
                                      const outdraft::DraftShares* shares) {
  if (!decoder->draft_tokens.are_all()) outdraft::learn(*unread, task->num_requests, decoder);
  return outdraft::Drafting(*decoder, *task, *unread, shares).run();
}

namespace outdraft {

OUTDRAFT_STRUCT(UnreadTexts, spans, places, texts, features, block_table, table_width,
                block_size);

OUTDRAFT_STRUCT(DraftShares, num_requests, counts, num_drafts);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(decoder_draft);
