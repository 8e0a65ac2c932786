// A whole draft of a network of blocks: the keys and values of the rest of the texts, one pass over
// the blocks of all requests, and all choices, in one call.
//
// The readable twin is src/outdraft/drafting/device/block_drafter.py. What DSpark adds to the
// logits of a draft depends on the token before it, so it is computed level by level, and not
// rounded on the way.

#include <algorithm>
#include <cstring>
#include <vector>

#include "export.h"
#include "forward.h"
#include "growth.h"
#include "parts.h"
#include "unread_texts.h"

namespace outdraft {

// What Python fills (kernels/native/drafting.py): as `BlockSpec` of kernels/draft_ops.py.
struct BlockSpec {
  int64_t num_rows, first_draft, mask_token, is_causal;
  const LinearWeights* context;
  const void* pair_embedding;      // [V, M]; null: there is no head of pairs
  const LinearWeights* pairs;      // M to N
  const LinearWeights* confidence;  // D, or D + M, to 1; null: there is none
  int64_t confidence_reads_token, pair_rank;
};

namespace {

class BlockDrafting {
 public:
  BlockDrafting(Decoder& decoder, const DraftTask& task, const UnreadTexts& unread,
                const BlockSpec& spec)
      : decoder_(decoder),
        task_(task),
        unread_(unread),
        spec_(spec),
        growth_(task, decoder.spec().draft_ids, decoder.vocabulary()),
        dtype_(decoder.spec().dtype),
        state_bytes_(decoder.spec().hidden * size_of(dtype_)) {
    const int64_t num_requests = task.num_requests, num_outputs = decoder.vocabulary();
    for (int64_t b = 0; b < num_requests; ++b) num_unread_ += unread.spans[b].num_rows;
    const int64_t widest = *std::max_element(task.levels, task.levels + task.num_levels);
    const int64_t num_block_rows = num_requests * spec.num_rows;
    const int64_t most_read = std::max(num_unread_, num_block_rows);
    const int64_t num_drafts = num_requests * task.num_levels, most = num_requests * widest;
    const int64_t most_inputs = most * (decoder.spec().hidden + spec.pair_rank) * size_of(dtype_);
    const auto place = [&](char* memory) {
      Parts parts = {memory};
      states_ = parts.take<char>(most_read * state_bytes_);
      drafts_ = parts.take<char>(num_drafts * state_bytes_);
      inputs_ = parts.take<char>(most_inputs);
      logits_ = parts.take<float>(num_drafts * num_outputs);
      level_ = parts.take<float>(most * num_outputs);
      added_ = parts.take<char>(4 * most * num_outputs);
      return parts.num_bytes;
    };
    place(decoder.call_memory.reserve<char>(place(nullptr)));
  }

  bool run() {
    if (!read_texts() || !read_blocks()) return false;
    decoder_.logits(drafts_, task_.num_levels * task_.num_requests, logits_);
    for (int64_t depth = 0; depth < task_.num_levels && num_drafting() > 0; ++depth) {
      find_nodes(depth);
      const float* odds = task_.stops.price == nullptr ? nullptr : told_odds(depth);
      growth_.extend(level(depth), RowsOf::kDrafting, odds);
    }
    growth_.finish();
    return true;
  }

 private:
  // The keys and values of what was not read of the texts.
  bool read_texts() {
    std::vector<int64_t> positions, slots;
    int64_t row = 0;
    for (int64_t b = 0; b < task_.num_requests; ++b) {
      const UnreadText& span = unread_.spans[b];
      for (int64_t index = span.context_len; index < span.end(); ++index, ++row) {
        positions.push_back(index + span.num_skipped);
        slots.push_back(unread_.slot(b, index));
        copy_state(unread_.features, unread_.places[row], states_, row);
      }
    }
    return decoder_.write_context(*spec_.context, states_, positions.data(), slots.data(), row);
  }

  // The states of the rows that draft: those of all requests for the first draft, then for the next
  // one, ...
  bool read_blocks() {
    const int64_t num_requests = task_.num_requests, size = spec_.num_rows;
    const int64_t num_rows = num_requests * size;
    std::vector<int64_t> columns(static_cast<size_t>(4 * num_rows));
    int64_t *ids = columns.data(), *positions = ids + num_rows;
    int64_t *slots = positions + num_rows, *ancestors = slots + num_rows;
    std::vector<int32_t> starts(1, 0), lens, num_causal(static_cast<size_t>(num_requests), 0);
    int64_t at = 0;
    for (int64_t b = 0; b < num_requests; ++b) {
      const UnreadText& span = unread_.spans[b];
      for (int64_t row = 0; row < size; ++row, ++at) {
        ids[at] = row == 0 ? newest(b) : spec_.mask_token;
        positions[at] = span.end() + span.num_skipped + row;
        slots[at] = unread_.slot(b, span.end() + row);
        const int64_t num_seen = spec_.is_causal != 0 ? row + 1 : size;
        ancestors[at] = (int64_t{1} << num_seen) - 1;
      }
      starts.push_back(static_cast<int32_t>(at));
      lens.push_back(static_cast<int32_t>(span.end()));
    }
    const DecoderRows rows{ids,           positions,           slots,
                           starts.data(), lens.data(),         num_causal.data(),
                           ancestors,     unread_.block_table, num_rows,
                           num_requests,  unread_.table_width, nullptr,
                           num_rows};
    if (!decoder_.forward(rows, nullptr, nullptr, 0, nullptr, states_)) return false;
    for (int64_t depth = 0; depth < task_.num_levels; ++depth) {
      for (int64_t b = 0; b < num_requests; ++b) {
        copy_state(states_, b * size + spec_.first_draft + depth, drafts_,
                   depth * num_requests + b);
      }
    }
    return true;
  }

  int64_t newest(int64_t b) const {
    const UnreadText& span = unread_.spans[b];
    return unread_.texts[span.text_start + span.end() - 1];
  }

  void copy_state(const char* from, int64_t place, char* to, int64_t row) const {
    std::memcpy(to + row * state_bytes_, from + place * state_bytes_,
                static_cast<size_t>(state_bytes_));
  }

  // The tokens behind which a level is drafted, of the requests that still draft.
  void find_nodes(int64_t depth) {
    const auto num_nodes = static_cast<size_t>(num_drafting() * growth_.num_nodes());
    nodes_.resize(3 * num_nodes);
    if (depth > 0) return growth_.copy_newest(nodes_.data(), RowsOf::kDrafting);
    for (size_t place = 0; place < num_nodes; ++place) {
      nodes_[place] = newest(growth_.drafting()[place]);
    }
  }

  // [requests that draft, nodes, N].
  const float* level(int64_t depth) {
    const int64_t num_requests = task_.num_requests, size = decoder_.vocabulary();
    const int64_t num_nodes = growth_.num_nodes(), num_rows = num_drafting() * num_nodes;
    const float* logits = logits_ + depth * num_requests * size;
    if (spec_.pairs == nullptr && num_rows == num_requests) return logits;
    float* to = level_;
    for (const int64_t b : growth_.drafting()) {
      for (int64_t node = 0; node < num_nodes; ++node, to += size) {
        std::copy_n(logits + b * size, size, to);
      }
    }
    if (spec_.pairs != nullptr) add_pairs(num_rows, size);
    return level_;
  }

  // What the head of pairs adds to a level.
  void add_pairs(int64_t num_rows, int64_t size) {
    const int64_t rank = spec_.pair_rank;
    for (int64_t row = 0; row < num_rows; ++row) copy_token(nodes_[row], inputs_, row, rank, 0);
    linear(decoder_.spec().team, *spec_.pairs, {inputs_, dtype_, rank},
           {added_, Dtype::kFloat32, size}, num_rows);
    const auto* added = reinterpret_cast<const float*>(added_);
    for (int64_t at = 0; at < num_rows * size; ++at) level_[at] += added[at];
  }

  // The vector of a token in rows of `width` numbers, behind the first `skipped` of them.
  void copy_token(int64_t token, char* rows, int64_t row, int64_t width, int64_t skipped) const {
    const int64_t bytes = spec_.pair_rank * size_of(dtype_);
    std::memcpy(rows + (row * width + skipped) * size_of(dtype_),
                static_cast<const char*>(spec_.pair_embedding) + token * bytes,
                static_cast<size_t>(bytes));
  }

  // Log-odds of the next draft of each request; null: the network has no such head. Only chains
  // have live rules, so a request has one node.
  const float* told_odds(int64_t depth) {
    if (spec_.confidence == nullptr) return nullptr;
    const int64_t hidden = decoder_.spec().hidden, width = spec_.confidence->num_inputs;
    for (int64_t place = 0; place < num_drafting(); ++place) {
      const int64_t from = depth * task_.num_requests + growth_.drafting()[place];
      std::memcpy(inputs_ + place * width * size_of(dtype_), drafts_ + from * state_bytes_,
                  static_cast<size_t>(state_bytes_));
      if (spec_.confidence_reads_token != 0) {
        copy_token(nodes_[place], inputs_, place, width, hidden);
      }
    }
    linear(decoder_.spec().team, *spec_.confidence, {inputs_, dtype_, width}, {added_, dtype_, 1},
           num_drafting());
    odds_.clear();
    const ConstRows told{added_, dtype_, 1};
    for (int64_t place = 0; place < num_drafting(); ++place) odds_.push_back(told.at(place, 0));
    return odds_.data();
  }

  int64_t num_drafting() const { return static_cast<int64_t>(growth_.drafting().size()); }

  Decoder& decoder_;
  const DraftTask& task_;
  const UnreadTexts& unread_;
  const BlockSpec& spec_;
  Growth growth_;
  const Dtype dtype_;
  const int64_t state_bytes_;
  int64_t num_unread_ = 0;         // rows of all texts
  char *states_, *drafts_;         // of the rows of a pass; of those that draft
  char *inputs_, *added_;          // of the heads, and what they give
  float *logits_, *level_;         // of all drafts; of a level, behind each node
  std::vector<int64_t> nodes_;     // token ids, then other columns of the newest level
  std::vector<float> odds_;
};

}  // namespace
}  // namespace outdraft

// Reads the rest of texts, and drafts behind them. False: a token or a position is not in its table.
OUTDRAFT_EXPORT int64_t block_draft(outdraft::Decoder* decoder, const outdraft::DraftTask* task,
                                    const outdraft::UnreadTexts* unread,
                                    const outdraft::BlockSpec* spec) {
  return outdraft::BlockDrafting(*decoder, *task, *unread, *spec).run();
}

namespace outdraft {

OUTDRAFT_STRUCT(BlockSpec, num_rows, first_draft, mask_token, is_causal, context, pair_embedding,
                pairs, confidence, confidence_reads_token, pair_rank);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(block_draft);
