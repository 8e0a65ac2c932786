// Tiles of attention: some query rows of one request that one kv head serves together, what they
// see, and how much memory their sums take.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention.h"
#include "tile_products.h"

namespace outdraft {

// Lanes of one job at most: where products are fast, what is laid out for them serves more.
constexpr int64_t kMaxLanes = kHasMatrixRegisters ? 256 : 128;
constexpr int64_t kPart = 2048;  // keys of a part, or the most where parts grow:
constexpr int64_t kFirstPart = 64, kFirstParts = 4;  // of the first ones, which are as long,
constexpr int64_t kGrown = 2 * kPart;                // and where the first whole one begins
constexpr int64_t kPiece = 64;   // keys
// What zeros fill: the numbers of a row, and keys that dot products read as inputs.
constexpr int64_t kFilled = kHasMatrixRegisters ? 2 * kMatrixRows : kWidth;
constexpr int64_t kFilledKeys = kHasMatrixRegisters ? kFilled : 1;
constexpr float kHidden = -1e30f;  // a score that is not to be seen; finite, so that x - x is 0

inline int64_t round_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// The parts of a context: by cache indices alone, so that the order of a row's sums is its own.
struct Parts {
  // Whether short contexts have parts, too: behind the first ones two from each power of two to the
  // next.
  bool grow;

  int64_t of(int64_t index) const {
    if (!grow) return index / kPart;
    if (index < kFirstParts * kFirstPart) return index / kFirstPart;
    if (index >= kGrown) return of(kGrown - 1) + 1 + (index - kGrown) / kPart;
    const int64_t power = std::bit_width(static_cast<uint64_t>(index)) - 1;
    return kFirstParts + 2 * (power - kFirstPower) + (index >> (power - 1) & 1);
  }

  int64_t start(int64_t part) const {
    if (!grow) return part * kPart;
    if (part < kFirstParts) return part * kFirstPart;
    const int64_t num_growing = of(kGrown - 1) + 1;
    if (part >= num_growing) return kGrown + (part - num_growing) * kPart;
    const int64_t power = kFirstPower + (part - kFirstParts) / 2;
    return (int64_t{2} + (part - kFirstParts) % 2) << (power - 1);
  }

 private:
  static constexpr int64_t kFirstPower = std::bit_width(uint64_t{kFirstParts * kFirstPart}) - 1;
};

struct Tile {
  int64_t start;               // flat row = start + row
  int64_t first_row, end_row;  // of the request
  int64_t context_len, num_causal;
  int64_t first_key, end_key;        // keys outside are seen by no row
  int64_t first_common, end_common;  // keys inside are seen by every row
  uint64_t bits;                     // of the drafted tokens that any of its rows sees
  bool is_tree;                      // between the drafted tokens that a row sees, there are others
  const int32_t* blocks;
  int64_t num_parts, longest_part;  // in keys
  bool ends_short;                  // its last part is shorter than the one before
  int64_t first_job;  // a job is the tile for some kv heads, or one part of it

  int64_t first_draft() const { return context_len + num_causal; }
  int64_t num_keys() const { return end_key - first_key; }

  // The parts in the order in which threads should begin them: a long one first. Who waits for
  // others takes what it had itself for what they have.
  int64_t part_at(int64_t place) const {
    if (!ends_short) return num_parts - 1 - place;
    return place == num_parts - 1 ? place : num_parts - 2 - place;
  }
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

// Lanes of a kv head that may read in order; for more, values are worth a copy.
constexpr int64_t kInOrderLanes = 4 * kGroupRows;

// Where its keys and values lie, from the first kv head of the job on; zeros fill the last vector.
struct Piece {
  const void *k[kPiece], *v[kPiece];
  int64_t num_keys = 0;
};

// Whether so many lanes of a kv head read rows in the order of memory, and values where they lie.
inline bool reads_in_order(const AttentionBatch& batch, int64_t num_lanes) {
  return !batch.is_bf16_cache && batch.value_size % kWidth == 0 && num_lanes <= kInOrderLanes;
}

inline Parts parts_of(const AttentionBatch& batch) { return {!batch.is_bf16_cache}; }

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
  const Parts parts = parts_of(batch);
  const int64_t first = parts.of(tile.first_key);
  const int64_t last = parts.of(std::max(tile.first_key, tile.end_key - 1));
  tile.num_parts = last - first + 1;
  tile.longest_part = tile.num_keys();
  if (last > first) {
    const int64_t start = parts.start(last), end_length = tile.end_key - start;
    const int64_t before = start - std::max(parts.start(last - 1), tile.first_key);
    tile.ends_short = end_length < before;
    tile.longest_part = std::max(end_length, before);
  }
  return tile;
}

}  // namespace outdraft
