// What a network has not read of the texts that it drafts behind. Python fills these
// (kernels/native/drafting.py): as `UnreadTexts` of kernels/draft_ops.py.
#pragma once

#include <cstdint>

namespace outdraft {

// The rows of one text that are read first, where the text begins in `texts`, and how much further
// on a row stands in the text than in the table of blocks.
struct UnreadText {
  int64_t context_len, num_rows, text_start, num_skipped;

  int64_t end() const { return context_len + num_rows; }
};

struct UnreadTexts {
  const UnreadText* spans;     // [B]
  const int64_t* places;       // of each row's state; unused where the network reads none
  const int64_t* texts;        // [S, L]
  const char* features;        // [N, D]; null: the network reads none
  const int32_t* block_table;  // [B, P]
  int64_t table_width, block_size;

  // Where the cache has a token of a request.
  int64_t slot(int64_t b, int64_t index) const {
    return block_table[b * table_width + index / block_size] * block_size + index % block_size;
  }
};

}  // namespace outdraft
