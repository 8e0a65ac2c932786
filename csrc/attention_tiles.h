// Tiles of attention: some query rows of one request that one kv head serves together, what they
// see, and how much memory their sums take.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention.h"
#include "tile_products.h"

namespace outdraft {

constexpr int64_t kPart = 2048;  // cache indices from one of its multiples to the next
constexpr int64_t kPiece = 64;   // keys
// What zeros fill: the numbers of a row, and keys that dot products read as inputs.
constexpr int64_t kFilled = kHasMatrixRegisters ? 2 * kMatrixRows : kWidth;
constexpr int64_t kFilledKeys = kHasMatrixRegisters ? kFilled : 1;
constexpr float kHidden = -1e30f;  // a score that is not to be seen; finite, so that x - x is 0

inline int64_t round_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

struct Tile {
  int64_t start;               // flat row = start + row
  int64_t first_row, end_row;  // of the request
  int64_t context_len, num_causal;
  int64_t first_key, end_key;        // keys outside are seen by no row
  int64_t first_common, end_common;  // keys inside are seen by every row
  uint64_t bits;                     // of the drafted tokens that any of its rows sees
  bool is_tree;                      // between the drafted tokens that a row sees, there are others
  const int32_t* blocks;
  int64_t num_parts;
  int64_t first_job;  // a job is the tile for some kv heads, or one part of it

  int64_t first_draft() const { return context_len + num_causal; }
};

// `tile_rows`: the most of a tile; `job_heads`: kv heads of a job.
struct Sizes {
  Sizes(const AttentionBatch& batch, int64_t tile_rows, int64_t job_heads)
      : heads_per_kv(batch.num_heads / batch.num_kv_heads),
        tile_rows(tile_rows),
        job_heads(job_heads),
        key_size(round_up(batch.key_size, kFilled)),
        value_size(round_up(batch.value_size, kWidth)),
        max_lanes(tile_rows * heads_per_kv * job_heads),
        sums_size(max_lanes * (value_size + kWidth + 1)) {}

  int64_t heads_per_kv, tile_rows, job_heads;
  int64_t key_size, value_size;  // with their padding
  int64_t max_lanes, sums_size;
};

// Where its keys and values lie, from the first kv head of the job on; zeros fill the last vector.
struct Piece {
  const void *k[kPiece], *v[kPiece];
  int64_t num_keys = 0;
};

// How many positions a row at this one sees at most, up to its own.
inline int64_t reach(const AttentionBatch& batch, int64_t position) {
  if (batch.chunk == kNoLimit) return batch.window;
  return std::min<int64_t>(batch.window, position % batch.chunk + 1);
}

// The `count` highest of the bits: the rank of an ancestor is its distance in the text.
inline uint64_t nearest(uint64_t bits, int64_t count) {
  for (int64_t spare = std::popcount(bits) - count; spare > 0; --spare) bits &= bits - 1;
  return bits;
}

// What these rows of a request see.
inline Tile make_tile(const AttentionBatch& batch, int64_t request, int64_t first_row,
                      int64_t end_row) {
  Tile tile = {};
  tile.start = batch.query_start[request];
  tile.first_row = first_row;
  tile.end_row = end_row;
  tile.context_len = batch.context_lens[request];
  tile.num_causal = batch.num_causal[request];
  tile.blocks = batch.block_table + request * batch.table_stride;
  int64_t lowest = kNoLimit, highest = 0;  // of the first positions that rows see
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t position = batch.positions[tile.start + row];
    const int64_t first_seen = position - reach(batch, position) + 1;
    lowest = std::min(lowest, first_seen);
    highest = std::max(highest, first_seen);
    if (row < tile.num_causal) continue;
    const uint64_t bits = static_cast<uint64_t>(batch.ancestors[tile.start + row]);
    tile.bits |= bits;
    tile.is_tree |= (bits & (bits + 1)) != 0;
  }
  tile.end_key = tile.context_len + std::min(end_row, tile.num_causal) + std::bit_width(tile.bits);
  tile.end_common = tile.context_len + std::min(first_row + 1, tile.num_causal);
  // Where a drafted key lies in the text is another question for every row.
  tile.first_key = std::clamp<int64_t>(lowest, 0, tile.first_draft());
  tile.first_common = highest;
  const int64_t end_part = (tile.end_key + kPart - 1) / kPart;
  tile.num_parts = std::max<int64_t>(1, end_part - tile.first_key / kPart);
  return tile;
}

}  // namespace outdraft
