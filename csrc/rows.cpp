// Where the rows of a step stand: text positions, cache slots, what each row sees, and which token
// it reads.
//
// Integers only; the readable twin is src/outdraft/kernels/reference/rows.py.

#include <algorithm>

#include "export.h"

// As `PlaceRows` of ops.py; `placed` is ancestors, positions and slots, one behind the other.
OUTDRAFT_EXPORT void place_rows(int64_t num_requests, const int32_t* sizes, const int64_t* parents,
                                const int32_t* block_table, int64_t table_width,
                                int64_t block_size, int64_t num_rows, int32_t* query_start,
                                int64_t* placed) {
  const int32_t* context_lens = sizes;
  const int32_t* num_causal = sizes + num_requests;
  const int32_t* num_drafts = num_causal + num_requests;
  int64_t* ancestors = placed;
  int64_t* positions = ancestors + num_rows;
  int64_t* slots = positions + num_rows;
  int64_t row = 0;
  for (int64_t b = 0; b < num_requests; ++b) {
    query_start[b] = static_cast<int32_t>(row);
    const int32_t* blocks = block_table + b * table_width;
    const int64_t first_draft = row + num_causal[b];
    for (int64_t k = 0; k < num_causal[b] + num_drafts[b]; ++k) {
      const int64_t index = context_lens[b] + k;
      slots[row + k] = blocks[index / block_size] * block_size + index % block_size;
    }
    for (int64_t k = 0; k < num_causal[b]; ++k) {
      positions[row + k] = context_lens[b] + k;
      ancestors[row + k] = 0;
    }
    for (int64_t k = 0; k < num_drafts[b]; ++k) {
      const int64_t up = first_draft - 1 + parents[k];  // the root is the last causal row
      positions[first_draft + k] = positions[up] + 1;
      ancestors[first_draft + k] = ancestors[up] | int64_t{1} << k;
    }
    parents += num_drafts[b];
    row = first_draft + num_drafts[b];
  }
  query_start[num_requests] = static_cast<int32_t>(row);
}

// As `IndexRows` of ops.py. `found` is its arrays one behind the other, with room for as many
// logits as rows and as many roots as works, and then the number of logits. Returns the number of
// works that sample.
OUTDRAFT_EXPORT int64_t index_rows(int64_t num_works, int64_t num_rows, const int32_t* query_start,
                                   const int32_t* num_causal, const uint8_t* samples,
                                   const int64_t* state_rows, const int64_t* positions,
                                   const int64_t* slots, int64_t row_len, int64_t width,
                                   int64_t* found) {
  int64_t* state_index = found;
  int64_t* draft_index = state_index + num_rows;
  int64_t* logit_rows = draft_index + num_rows;
  int64_t* root_rows = logit_rows + num_rows;
  int64_t* draft_slots = root_rows + num_works;
  int64_t num_sampling = 0, num_logits = 0;
  for (int64_t w = 0; w < num_works; ++w) {
    const int64_t first_draft = query_start[w] + num_causal[w], end = query_start[w + 1];
    for (int64_t row = query_start[w]; row < first_draft; ++row) {
      state_index[row] = state_rows[w] * row_len + positions[row];
      draft_index[row] = -1;
    }
    for (int64_t row = first_draft; row < end; ++row) {
      state_index[row] = 0;
      draft_index[row] = num_sampling * width + row - first_draft;
    }
    if (!samples[w]) continue;
    root_rows[num_sampling] = first_draft - 1;
    for (int64_t row = first_draft - 1; row < end; ++row) logit_rows[num_logits++] = row;
    for (int64_t row = first_draft; row < first_draft + width; ++row) {
      *draft_slots++ = row < end ? slots[row] : -1;
    }
    ++num_sampling;
  }
  root_rows[num_works + num_works * width] = num_logits;
  return num_sampling;
}

// As `ShapeRows` of ops.py; positions and ancestors change in place.
OUTDRAFT_EXPORT void shape_rows(int64_t num_rows, int64_t width, const int64_t* parents,
                                const int64_t* draft_index, int64_t* positions,
                                int64_t* ancestors) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (draft_index[row] < 0) continue;
    const int64_t place = draft_index[row] % width, up = parents[draft_index[row]];
    const int64_t above = row - place - 1 + up;
    positions[row] = positions[above] + 1;
    ancestors[row] = (up > 0 ? ancestors[above] : 0) | int64_t{1} << place;
  }
}

// As `ReadTokenIds` of ops.py.
OUTDRAFT_EXPORT void read_token_ids(int64_t num_rows, const int64_t* texts, const int64_t* drafts,
                                    const int64_t* state_index, const int64_t* draft_index,
                                    int64_t* ids) {
  for (int64_t row = 0; row < num_rows; ++row) {
    ids[row] = draft_index[row] < 0 ? texts[state_index[row]]
                                    : std::max<int64_t>(drafts[draft_index[row]], 0);
  }
}

// As `AppendTokenIds` of ops.py.
OUTDRAFT_EXPORT void append_token_ids(int64_t num_requests, int64_t width, int64_t row_len,
                                      int64_t* texts, const int64_t* state_rows,
                                      const int64_t* starts, const int64_t* token_ids) {
  for (int64_t b = 0; b < num_requests; ++b) {
    int64_t* text = texts + state_rows[b] * row_len + starts[b];
    for (int64_t k = 0; k < width; ++k) {
      if (token_ids[b * width + k] >= 0) text[k] = token_ids[b * width + k];
    }
  }
}
