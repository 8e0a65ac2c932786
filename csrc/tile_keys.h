// Where the keys lie that a tile of attention sees, and which of them a row of it sees.
//
// A late helper may read while the next call changes what it reads. So what addresses are made of
// is copied, and read only if the version says that the copy is whole.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "attention_tiles.h"

namespace outdraft {

// One tile's, for the kv heads from `first_kv_head` on. Batch and tile stay where they are.
class TileKeys {
 public:
  TileKeys(const AttentionBatch& batch, const Tile& tile, int64_t first_kv_head)
      : batch_(batch),
        tile_(tile),
        first_kv_head_(first_kv_head),
        number_bytes_(batch.is_bf16_cache ? 2 : 4),
        k_row_bytes_(batch.num_kv_heads * batch.key_size * number_bytes_),
        v_row_bytes_(batch.num_kv_heads * batch.value_size * number_bytes_) {}

  static int64_t bytes(const AttentionBatch& batch, const Sizes& sizes) {
    return 16 * sizes.tile_rows + 4 * batch.table_stride;
  }

  // `memory`: bytes(batch, sizes); `zeros`: a row of keys or of values.
  void put_into(char* memory, const float* zeros, int64_t tile_rows) {
    positions_ = reinterpret_cast<int64_t*>(memory);
    ancestors_ = reinterpret_cast<uint64_t*>(positions_ + tile_rows);
    blocks_ = reinterpret_cast<int32_t*>(ancestors_ + tile_rows);
    zeros_ = zeros;
  }

  // Copy what addresses are made of.
  void copy_rows() {
    const int64_t num_rows = tile_.end_row - tile_.first_row, flat = tile_.start + tile_.first_row;
    const int64_t num_blocks = (tile_.end_key + batch_.block_size - 1) / batch_.block_size;
    std::memcpy(positions_, batch_.positions + flat, 8 * num_rows);
    std::memcpy(ancestors_, batch_.ancestors + flat, 8 * num_rows);
    std::memcpy(blocks_, tile_.blocks, 4 * num_blocks);
  }

  // By the rows of the tile.
  int64_t position(int64_t own) const { return positions_[own]; }
  int64_t num_ancestors(int64_t own) const { return std::popcount(ancestors_[own]); }

  int64_t number_bytes() const { return number_bytes_; }
  // From one key of the cache to the next.
  int64_t k_row_bytes() const { return k_row_bytes_; }

  // The piece of keys [first_key, end_key).
  void find(int64_t first_key, int64_t end_key, Piece& piece) const {
    for (int64_t key = first_key; key < end_key;) {
      put(key, piece, key - first_key);
      const int64_t place = key - first_key, in_block = key % batch_.block_size;
      const int64_t count = std::min(batch_.block_size - in_block, end_key - key);
      for (int64_t i = 1; i < count; ++i) {
        piece.k[place + i] = static_cast<const char*>(piece.k[place]) + i * k_row_bytes_;
        piece.v[place + i] = static_cast<const char*>(piece.v[place]) + i * v_row_bytes_;
      }
      key += count;
    }
    fill(piece, std::max<int64_t>(0, end_key - first_key));
  }

  // As `find`, for keys by their positions in the text of one row.
  void find_text(int64_t own, int64_t first_key, int64_t num_keys, Piece& piece) const {
    const int64_t first_draft = tile_.first_draft();
    uint64_t bits = ancestors_[own];
    for (int64_t i = first_draft; i < first_key; ++i) bits &= bits - 1;
    for (int64_t place = 0; place < num_keys; ++place) {
      int64_t key = first_key + place;
      if (key >= first_draft) {
        key = first_draft + std::countr_zero(bits);
        bits &= bits - 1;
      }
      put(key, piece, place);
    }
    fill(piece, num_keys);
  }

  // The lowest score for what a row of the tile does not see.
  void hide(int64_t own, int64_t first_key, int64_t end_key, float* scores) const {
    const auto place = [&](int64_t key) {
      return std::clamp<int64_t>(key - first_key, 0, end_key - first_key);
    };
    const int64_t num_keys = end_key - first_key, row = tile_.first_row + own;
    const int64_t end_seen = place(tile_.context_len + std::min(row + 1, tile_.num_causal));
    const int64_t position = positions_[own], num_seen = reach(batch_, position);
    std::fill_n(scores, std::min(end_seen, place(position - num_seen + 1)), kHidden);
    if (row < tile_.num_causal) return std::fill(scores + end_seen, scores + num_keys, kHidden);
    const uint64_t bits = nearest(ancestors_[own], num_seen);
    for (int64_t at = end_seen; at < num_keys; ++at) {
      if (!(bits >> (first_key + at - tile_.first_draft()) & 1)) scores[at] = kHidden;
    }
  }

  // Nobody may have written the values that no row of the tile sees: zeros stand for them.
  void drop_unseen_values(int64_t first_key, int64_t end_key, Piece& piece) const {
    for (int64_t key = std::max(first_key, tile_.first_draft()); key < end_key; ++key) {
      if (tile_.bits >> (key - tile_.first_draft()) & 1) continue;
      piece.v[key - first_key] = zeros_;
    }
  }

 private:
  void put(int64_t key, Piece& piece, int64_t place) const {
    const int64_t slot =
        blocks_[key / batch_.block_size] * batch_.block_size + key % batch_.block_size;
    piece.k[place] = static_cast<const char*>(batch_.k) + slot * k_row_bytes_ +
                     first_kv_head_ * number_bytes_ * batch_.key_size;
    piece.v[place] = static_cast<const char*>(batch_.v) + slot * v_row_bytes_ +
                     first_kv_head_ * number_bytes_ * batch_.value_size;
  }

  // Zeros behind the last key.
  void fill(Piece& piece, int64_t num_keys) const {
    piece.num_keys = num_keys;
    std::fill(piece.k + num_keys, piece.k + round_up(num_keys, kFilled), zeros_);
    std::fill(piece.v + num_keys, piece.v + round_up(num_keys, kFilled), zeros_);
  }

  const AttentionBatch& batch_;
  const Tile& tile_;
  const int64_t first_kv_head_, number_bytes_, k_row_bytes_, v_row_bytes_;
  const float* zeros_;
  int64_t* positions_;  // by the rows of the tile
  uint64_t* ancestors_;
  int32_t* blocks_;
};

}  // namespace outdraft
