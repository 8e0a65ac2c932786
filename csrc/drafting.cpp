// Drafts: where the rows of a level of growing trees stand.
//
// The readable twin is `place_level` in src/outdraft/kernels/reference/rows.py.

#include <bit>

#include "export.h"

// As `place_level` of ops.py.
OUTDRAFT_EXPORT void place_level(int64_t num_requests, int64_t width, int64_t first_row,
                                 const int64_t* ancestors, const int64_t* contexts,
                                 const int64_t* num_drafts, const int32_t* block_table,
                                 int64_t table_width, int64_t block_size, int64_t* own_ancestors,
                                 int64_t* positions, int64_t* slots) {
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t own_bits = (int64_t{1} << num_drafts[b]) - 1;
    const int32_t* blocks = block_table + b * table_width;
    for (int64_t f = 0; f < width; ++f) {
      const int64_t row = b * width + f;
      const int64_t place = first_row + f;
      const int64_t index = contexts[b] + place;
      own_ancestors[row] = ancestors[row] & own_bits;
      positions[row] = contexts[b] - 1 + std::popcount(static_cast<uint64_t>(own_ancestors[row]));
      slots[row] = -1;
      if (place < num_drafts[b]) {
        slots[row] = blocks[index / block_size] * block_size + index % block_size;
      }
    }
  }
}
