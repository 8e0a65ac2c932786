// Where the rows of a step stand: text positions, cache slots, and what each row sees.
//
// Integers only; the readable twin is src/outdraft/kernels/reference/rows.py.

#include "export.h"

// As `place_rows` of ops.py.
OUTDRAFT_EXPORT void place_rows(int64_t num_requests, const int32_t* context_lens,
                                const int32_t* num_causal, const int32_t* num_drafts,
                                const int64_t* parents, const int32_t* block_table,
                                int64_t table_width, int64_t block_size, int32_t* query_start,
                                int64_t* ancestors, int64_t* positions, int64_t* slots) {
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
