// Where the rows of a step stand: text positions, cache slots, what each row sees, and which token
// it reads.
//
// Integers only; the readable twin is src/outdraft/kernels/torch/rows.py.

#include "rows.h"

#include <algorithm>
#include <cstring>

namespace outdraft {

PlacedRows::PlacedRows(const RowCounts& counts, int64_t* memory)
    : ancestors(memory),
      positions(ancestors + counts.num_rows),
      slots(positions + counts.num_rows),
      state_index(slots + counts.num_rows),
      draft_index(state_index + counts.num_rows),
      logit_rows(draft_index + counts.num_rows),
      root_rows(logit_rows + counts.num_logits),
      draft_slots(root_rows + counts.num_sampling),
      extra(draft_slots + counts.num_sampling * counts.width),
      query_start(reinterpret_cast<int32_t*>(extra + counts.num_extra)),
      context_lens(query_start + counts.num_works + 1),
      num_causal(context_lens + counts.num_works),
      block_table(num_causal + counts.num_works) {}

}  // namespace outdraft

using outdraft::PlacedRows;
using outdraft::RowCounts;
using outdraft::StepWork;

OUTDRAFT_EXPORT void place_rows(const RowCounts* counts, const int64_t* numbers,
                                const int32_t* block_table, int64_t* placed) {
  const auto [num_works, num_rows, num_logits, num_sampling, num_extra, table_width, block_size,
              width] = *counts;
  const auto* works = reinterpret_cast<const StepWork*>(numbers);
  const auto* parents = reinterpret_cast<const int64_t*>(works + num_works);
  auto [ancestors, positions, slots, state_index, draft_index, logit_rows, root_rows, draft_slots,
        extra, query_start, context_lens, num_causal, table] = PlacedRows(*counts, placed);
  int64_t row = 0, num_placed = 0;  // of those that sample
  for (int64_t w = 0; w < num_works; ++w) {
    const StepWork& work = works[w];
    query_start[w] = static_cast<int32_t>(row);
    context_lens[w] = static_cast<int32_t>(work.context_len);
    num_causal[w] = static_cast<int32_t>(work.num_causal);
    const int32_t* blocks = block_table + w * table_width;
    const int64_t first_draft = row + work.num_causal, end = first_draft + work.num_drafts;
    for (int64_t k = 0; k < end - row; ++k) {
      const int64_t index = work.context_len + k;
      slots[row + k] = blocks[index / block_size] * block_size + index % block_size;
    }
    for (int64_t k = 0; k < work.num_causal; ++k) {
      positions[row + k] = work.context_len + k;
      ancestors[row + k] = 0;
      state_index[row + k] = work.text_start + work.context_len + k;
      draft_index[row + k] = -1;
    }
    for (int64_t k = 0; k < work.num_drafts; ++k) {
      const int64_t up = first_draft - 1 + parents[k];  // the root is the last causal row
      positions[first_draft + k] = positions[up] + 1;
      ancestors[first_draft + k] = ancestors[up] | int64_t{1} << k;
      state_index[first_draft + k] = 0;
      draft_index[first_draft + k] = num_placed * width + k;
    }
    parents += work.num_drafts;
    row = end;
    if (work.samples == 0) continue;
    root_rows[num_placed++] = first_draft - 1;
    for (int64_t r = first_draft - 1; r < end; ++r) *logit_rows++ = r;
    for (int64_t r = first_draft; r < first_draft + width; ++r) {
      *draft_slots++ = r < end ? slots[r] : -1;
    }
  }
  query_start[num_works] = static_cast<int32_t>(row);
  std::copy_n(parents, num_extra, extra);  // after the parents
  std::copy_n(block_table, num_works * table_width, table);
}

OUTDRAFT_EXPORT void copy_rows(int64_t num_rows, int64_t row_bytes, char* to,
                               const int64_t* places, const char* from, const int64_t* rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t place = places == nullptr ? r : places[r], row = rows == nullptr ? r : rows[r];
    if (place < 0 || row < 0) continue;
    std::memcpy(to + place * row_bytes, from + row * row_bytes, static_cast<size_t>(row_bytes));
  }
}

namespace outdraft {

void shape_rows(int64_t num_rows, int64_t width, const int64_t* parents, const int64_t* draft_index,
                int64_t* positions, int64_t* ancestors) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (draft_index[row] < 0) continue;
    const int64_t place = draft_index[row] % width, up = parents[draft_index[row]];
    const int64_t above = row - place - 1 + up;
    positions[row] = positions[above] + 1;
    ancestors[row] = (up > 0 ? ancestors[above] : 0) | int64_t{1} << place;
  }
}

// As `place_states` of kernels/torch/rows.py.
void place_states(int64_t num_works, int64_t num_sampling, int64_t width, int64_t row_len,
                  int64_t window, const int32_t* query_start, const int32_t* context_lens,
                  const int32_t* num_causal, const int64_t* state_index, const int64_t* root_rows,
                  const int64_t* kept_rows, int64_t* places, int64_t* last_rows,
                  int64_t* last_places) {
  int64_t num_seen = 0;  // of the works that sample
  for (int64_t w = 0; w < num_works; ++w) {
    const int64_t first = query_start[w], end = query_start[w + 1];
    const int64_t start = state_index[first] / row_len * window;
    for (int64_t row = first; row < end; ++row) {
      const int64_t left = first + num_causal[w] - row;  // causal rows from this one on
      const bool is_kept = left > 0 && left <= window;
      places[row] = is_kept ? start + (context_lens[w] + row - first) % window : -1;
    }
    last_rows[w] = end - 1;
    if (num_seen < num_sampling && root_rows[num_seen] < end) {
      const int64_t root = last_rows[w] = root_rows[num_seen];
      const int64_t num_tokens = context_lens[w] + num_causal[w];
      const int64_t* kept = kept_rows + num_seen++ * width;
      for (int64_t at = 0; at < width; ++at) {
        if (kept[at] < 0) continue;
        last_rows[w] = root + 1 + kept[at];
        places[last_rows[w]] = start + (num_tokens + at) % window;
      }
    }
    last_places[w] = places[last_rows[w]];
  }
}

void read_token_ids(int64_t num_rows, const int64_t* texts, const int64_t* drafts,
                    const int64_t* state_index, const int64_t* draft_index, int64_t* ids) {
  for (int64_t row = 0; row < num_rows; ++row) {
    ids[row] = draft_index[row] < 0 ? texts[state_index[row]]
                                    : std::max<int64_t>(drafts[draft_index[row]], 0);
  }
}

void append_token_ids(int64_t num_requests, int64_t width, int64_t row_len, int64_t* texts,
                      const int64_t* state_rows, const int64_t* starts, const int64_t* token_ids) {
  for (int64_t b = 0; b < num_requests; ++b) {
    int64_t* text = texts + state_rows[b] * row_len + starts[b];
    for (int64_t k = 0; k < width; ++k) {
      if (token_ids[b * width + k] >= 0) text[k] = token_ids[b * width + k];
    }
  }
}

OUTDRAFT_STRUCT(RowCounts, num_works, num_rows, num_logits, num_sampling, num_extra, table_width,
                block_size, width);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(place_rows, copy_rows);
