// Where the rows of a step stand: text positions, cache slots, what each row sees, and which token
// it reads.
//
// Integers only; the readable twin is src/outdraft/kernels/reference/rows.py.

#include <algorithm>

#include "export.h"

// As `PlaceRows` of ops.py. `starts` is its int32 arrays one behind the other. `placed` is the int64
// ones, with room for as many logits as rows and as many roots as works, and then the number of
// logits. Returns the number of works that sample.
OUTDRAFT_EXPORT int64_t place_rows(int64_t num_works, const int64_t* sizes, const int64_t* parents,
                                   const int32_t* block_table, int64_t table_width,
                                   int64_t block_size, int64_t width, int64_t num_rows,
                                   int32_t* starts, int64_t* placed) {
  const int64_t *context_lens = sizes, *num_causal = context_lens + num_works;
  const int64_t *num_drafts = num_causal + num_works, *text_starts = num_drafts + num_works;
  const int64_t* samples = text_starts + num_works;
  int64_t *ancestors = placed, *positions = ancestors + num_rows, *slots = positions + num_rows;
  int64_t *state_index = slots + num_rows, *draft_index = state_index + num_rows;
  int64_t *logit_rows = draft_index + num_rows, *root_rows = logit_rows + num_rows;
  int64_t* draft_slots = root_rows + num_works;
  int64_t row = 0, num_sampling = 0, num_logits = 0;
  for (int64_t w = 0; w < num_works; ++w) {
    starts[w] = static_cast<int32_t>(row);
    starts[num_works + 1 + w] = static_cast<int32_t>(context_lens[w]);
    starts[2 * num_works + 1 + w] = static_cast<int32_t>(num_causal[w]);
    const int32_t* blocks = block_table + w * table_width;
    const int64_t first_draft = row + num_causal[w], end = first_draft + num_drafts[w];
    for (int64_t k = 0; k < end - row; ++k) {
      const int64_t index = context_lens[w] + k;
      slots[row + k] = blocks[index / block_size] * block_size + index % block_size;
    }
    for (int64_t k = 0; k < num_causal[w]; ++k) {
      positions[row + k] = context_lens[w] + k;
      ancestors[row + k] = 0;
      state_index[row + k] = text_starts[w] + context_lens[w] + k;
      draft_index[row + k] = -1;
    }
    for (int64_t k = 0; k < num_drafts[w]; ++k) {
      const int64_t up = first_draft - 1 + parents[k];  // the root is the last causal row
      positions[first_draft + k] = positions[up] + 1;
      ancestors[first_draft + k] = ancestors[up] | int64_t{1} << k;
      state_index[first_draft + k] = 0;
      draft_index[first_draft + k] = num_sampling * width + k;
    }
    parents += num_drafts[w];
    row = end;
    if (samples[w] == 0) continue;
    root_rows[num_sampling++] = first_draft - 1;
    for (int64_t r = first_draft - 1; r < end; ++r) logit_rows[num_logits++] = r;
    for (int64_t r = first_draft; r < first_draft + width; ++r) {
      *draft_slots++ = r < end ? slots[r] : -1;
    }
  }
  starts[num_works] = static_cast<int32_t>(row);
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

// As `KeepRows` of ops.py.
OUTDRAFT_EXPORT void keep_rows(int64_t num_rows, int64_t num_requests, int64_t width,
                               const int64_t* slots, const int64_t* draft_index,
                               const int64_t* root_rows, const int64_t* draft_slots,
                               const int64_t* kept_rows, int64_t* kept_slots,
                               int64_t* last_rows) {
  for (int64_t row = 0; row < num_rows; ++row) {
    kept_slots[row] = draft_index[row] < 0 ? slots[row] : -1;
  }
  for (int64_t b = 0; b < num_requests; ++b) {
    last_rows[b] = root_rows[b];
    for (int64_t at = b * width; at < (b + 1) * width; ++at) {
      if (kept_rows[at] < 0) continue;
      last_rows[b] = root_rows[b] + 1 + kept_rows[at];
      kept_slots[last_rows[b]] = draft_slots[at];
    }
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
