// A step of a target in one call: its rows are laid out and read; then, where requests choose by
// their own logits and texts alone, the drafts are verified, what is emitted is written to the
// texts, and it is found where the states of the rows are kept.
//
// Its readable twin is `read_by_parts` of src/outdraft/runner/step_rows.py.

#include <algorithm>
#include <vector>

#include "export.h"
#include "forward.h"
#include "parts.h"
#include "penalties.h"
#include "rows.h"
#include "sampling.h"
#include "verification.h"

namespace outdraft {

// As `StatesOf` of kernels/decoder_ops.py.
enum class StatesOf : int64_t { kNoRow = 0, kRowsWithLogits = 1, kAllRows = 2 };

enum class Chooses : int64_t { kNothing = 0, kLikeliest = 1, kByRule = 2 };

// How requests choose that do not all take the likeliest tokens: as in `SamplingBatch`,
// `DraftBatch` and `Rule`.
struct ChoiceRules {
  CutColumns cuts;
  PenaltyColumns penalties;  // null: nobody wants one
  const bool *is_greedy, *draws;
  const int64_t* seeds;
  const float* probs;
  const bool* is_sampled;
  int64_t rule, sampled_trees;
};

// As `StepTask` of kernels/decoder_ops.py; Python fills it (kernels/native/step.py).
struct StepTask {
  RowCounts counts;
  const int64_t* numbers;       // as `place_rows` takes them
  const int32_t* block_table;
  int64_t* texts;               // [S, L]
  int64_t row_len;
  const int64_t *draft_ids, *draft_parents, *num_drafts;  // [B, N], [B]; null: nobody samples
  int64_t are_shaped;
  Chooses chooses;
  ChoiceRules rules;
  StatesOf states_of;
  const int64_t* taps;
  int64_t num_taps;
  int64_t window;  // of kept states
  // Results. Those from `emitted` on are written if the step chooses: the facts that the rows pass
  // on are then rows of the texts, lengths of these and of their prompts, each [B].
  int64_t* placed;
  void *tapped, *states;  // null: nobody wants them
  int64_t *emitted, *accepted, *num_emitted;  // as in `Verdict`
  bool* are_finite;                           // [R]
  int64_t *state_places, *last_rows, *last_places;  // [T], [W], [W]; null: no states are kept
};

namespace {

class Step {
 public:
  Step(Decoder& decoder, const StepTask& task)
      : decoder_(decoder), task_(task), counts_(task.counts), rows_(task.counts, task.placed) {}

  bool run() {
    place_rows(&counts_, task_.numbers, task_.block_table, task_.placed);
    if (task_.are_shaped != 0) {
      shape_rows(counts_.num_rows, counts_.width, task_.draft_parents, rows_.draft_index,
                 rows_.positions, rows_.ancestors);
    }
    ids_.resize(static_cast<size_t>(std::max(counts_.num_rows, counts_.num_logits)));
    read_token_ids(counts_.num_rows, task_.texts, task_.draft_ids, rows_.state_index,
                   rows_.draft_index, ids_.data());
    return read() && (task_.chooses == Chooses::kNothing || choose());
  }

 private:
  // The states of the rows with logits, in `with_logits_`, and those that are wanted.
  bool read() {
    const DecoderSpec& spec = decoder_.spec();
    const int64_t state_bytes = spec.hidden * size_of(spec.dtype);
    const int64_t num_rows = counts_.num_rows, num_logits = counts_.num_logits;
    // What is tapped behind the last layer is of all rows.
    const bool reads_all =
        task_.states_of == StatesOf::kAllRows ||
        std::find(task_.taps, task_.taps + task_.num_taps, spec.num_layers) !=
            task_.taps + task_.num_taps;
    Parts parts;
    take_memory(parts, reads_all, state_bytes);
    parts = {decoder_.call_memory.reserve<char>(parts.num_bytes), 0};
    take_memory(parts, reads_all, state_bytes);
    const DecoderRows rows{ids_.data(),         rows_.positions,
                           rows_.slots,         rows_.query_start,
                           rows_.context_lens,  rows_.num_causal,
                           rows_.ancestors,     rows_.block_table,
                           num_rows,            counts_.num_works,
                           counts_.table_width, reads_all ? nullptr : rows_.logit_rows,
                           reads_all ? num_rows : num_logits};
    if (!decoder_.forward(rows, nullptr, task_.taps, task_.num_taps, task_.tapped,
                          reads_all ? of_all_ : with_logits_)) {
      return false;
    }
    if (reads_all) {
      copy_rows(num_logits, state_bytes, with_logits_, nullptr, of_all_, rows_.logit_rows);
    }
    return true;
  }

  // States go where they are wanted, others and logits to memory that is taken here.
  void take_memory(Parts& parts, bool reads_all, int64_t state_bytes) {
    auto* wanted = static_cast<char*>(task_.states);
    const bool wants_all = task_.states_of == StatesOf::kAllRows;
    const bool wants_some = task_.states_of == StatesOf::kRowsWithLogits;
    const int64_t num_rows = reads_all ? counts_.num_rows : 0, num_logits = counts_.num_logits;
    const bool by_rule = task_.chooses == Chooses::kByRule;
    of_all_ = wants_all ? wanted : parts.take<char>(num_rows * state_bytes);
    with_logits_ = wants_some ? wanted : parts.take<char>(num_logits * state_bytes);
    logits_ = parts.take<float>(by_rule ? num_logits * decoder_.columns() : 0);
  }

  bool choose() {
    if (task_.chooses == Chooses::kByRule) {
      judge();
    } else if (!match()) {
      return false;
    }
    const int64_t *texts = rows_.extra, *lengths = texts + counts_.num_sampling;
    append_token_ids(counts_.num_sampling, counts_.width + 1, task_.row_len, task_.texts, texts,
                     lengths, task_.emitted);
    if (task_.state_places != nullptr) {
      place_states(counts_.num_works, counts_.num_sampling, counts_.width, task_.row_len,
                   task_.window, rows_.query_start, rows_.context_lens, rows_.num_causal,
                   rows_.state_index, rows_.root_rows, task_.accepted, task_.state_places,
                   task_.last_rows, task_.last_places);
    }
    return true;
  }

  bool match() {
    if (!decoder_.best_tokens(with_logits_, counts_.num_logits, ids_.data(), task_.are_finite)) {
      return false;
    }
    match_choices(counts_.num_sampling, counts_.width, ids_.data(), task_.draft_ids,
                  task_.draft_parents, task_.num_drafts, task_.emitted, task_.accepted,
                  task_.num_emitted);
    return true;
  }

  void judge() {
    const ChoiceRules& rules = task_.rules;
    const CutColumns& cuts = rules.cuts;
    const int64_t num_rows = counts_.num_logits, size = decoder_.columns();
    decoder_.logits(with_logits_, num_rows, logits_);
    finite_rows(num_rows, size, logits_, task_.are_finite);
    const int64_t *texts = rows_.extra, *lengths = texts + counts_.num_sampling;
    if (rules.penalties.repetition != nullptr) {
      const PenalizedTexts penalized{task_.texts, task_.row_len, texts, lengths,
                                     lengths + counts_.num_sampling};
      penalize_trees(rules.penalties, penalized, counts_.num_sampling, counts_.width,
                     task_.draft_ids, task_.draft_parents, task_.num_drafts, size, logits_);
    }
    requests_of_rows(counts_.num_sampling, task_.num_drafts, num_rows, ids_.data());
    process_rows(num_rows, size, logits_, ids_.data(), cuts.temperature, cuts.least, cuts.top_k,
                 cuts.top_p, logits_);
    verify(counts_.num_sampling, counts_.width, size, logits_, task_.draft_ids,
           task_.draft_parents, task_.num_drafts, rules.probs, rules.is_sampled, rules.is_greedy,
           rules.draws, rules.seeds, lengths, rules.rule, rules.sampled_trees != 0, task_.emitted,
           task_.accepted, task_.num_emitted);
  }

  Decoder& decoder_;
  const StepTask& task_;
  const RowCounts& counts_;
  const PlacedRows rows_;
  std::vector<int64_t> ids_;  // of the tokens that are read, then of those that are chosen
  char* of_all_ = nullptr;       // states of all rows, if they are read
  char* with_logits_ = nullptr;  // and of those with logits
  float* logits_ = nullptr;  // [R, V]
};

}  // namespace
}  // namespace outdraft

// 1; 0: as `Decoder::forward`.
OUTDRAFT_EXPORT int64_t decoder_step(outdraft::Decoder* decoder, const outdraft::StepTask* task) {
  return outdraft::Step(*decoder, *task).run();
}

namespace outdraft {

OUTDRAFT_STRUCT(StepTask, counts.num_works, counts.num_rows, counts.num_logits,
                counts.num_sampling, counts.num_extra, counts.table_width, counts.block_size,
                counts.width, numbers, block_table, texts, row_len, draft_ids, draft_parents,
                num_drafts, are_shaped, chooses, rules.cuts.temperature, rules.cuts.least,
                rules.cuts.top_k, rules.cuts.top_p, rules.penalties.repetition,
                rules.penalties.presence, rules.penalties.frequency, rules.is_greedy, rules.draws,
                rules.seeds, rules.probs, rules.is_sampled, rules.rule, rules.sampled_trees,
                states_of, taps, num_taps, window, placed, tapped, states, emitted, accepted,
                num_emitted, are_finite, state_places, last_rows, last_places);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(decoder_step);
