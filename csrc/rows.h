// Where the rows of a step stand, and what they read: see rows.cpp.
#pragma once

#include <cstdint>

#include "export.h"

namespace outdraft {

// How much there is of what `place_rows` is given. `width`: places of each request's drafts.
struct RowCounts {
  int64_t num_works, num_rows, num_logits, num_sampling, num_extra, table_width, block_size, width;
};

// As `RowBatch` of attention/rows.py, all arrays in one piece of memory, those of int32 last.
struct PlacedRows {
  int64_t *ancestors, *positions, *slots, *state_index, *draft_index;  // [T]
  int64_t* logit_rows;                                                 // [R]
  int64_t* root_rows;                                                  // [B]
  int64_t* draft_slots;                                                // [B, N]
  int64_t* extra;
  int32_t *query_start, *context_lens, *num_causal, *block_table;  // of W works

  PlacedRows(const RowCounts& counts, int64_t* memory);
};

// One work as Python hands it over (kernels/native/step.py).
struct StepWork {
  int64_t context_len, num_causal, num_drafts, text_start, samples;
};

// As `shape_rows` of kernels/torch/rows.py; positions and ancestors change in place.
void shape_rows(int64_t num_rows, int64_t width, const int64_t* parents, const int64_t* draft_index,
                int64_t* positions, int64_t* ancestors);

// As `place_states` of kernels/torch/rows.py.
void place_states(int64_t num_works, int64_t num_sampling, int64_t width, int64_t row_len,
                  int64_t window, const int32_t* query_start, const int32_t* context_lens,
                  const int32_t* num_causal, const int64_t* state_index, const int64_t* root_rows,
                  const int64_t* kept_rows, int64_t* places, int64_t* last_rows,
                  int64_t* last_places);

// As `read_token_ids` of kernels/torch/rows.py.
void read_token_ids(int64_t num_rows, const int64_t* texts, const int64_t* drafts,
                    const int64_t* state_index, const int64_t* draft_index, int64_t* ids);

// As `append_token_ids` of kernels/torch/rows.py.
void append_token_ids(int64_t num_requests, int64_t width, int64_t row_len, int64_t* texts,
                      const int64_t* state_rows, const int64_t* starts, const int64_t* token_ids);

}  // namespace outdraft

// As `place_rows` of kernels/torch/rows.py. `numbers` is the works, the parents of all drafted
// rows, and what is passed on.
OUTDRAFT_EXPORT void place_rows(const outdraft::RowCounts* counts, const int64_t* numbers,
                                const int32_t* block_table, int64_t* placed);

// As `copy_rows` of kernels/torch/rows.py; rows of `row_bytes`.
OUTDRAFT_EXPORT void copy_rows(int64_t num_rows, int64_t row_bytes, char* to,
                               const int64_t* places, const char* from, const int64_t* rows);
