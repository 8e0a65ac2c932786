// The tokens that a drafter with a large vocabulary chooses among. Its head is a large part of what
// a pass reads, and a tokenizer gives the tokens of frequent pieces the first ids: so these are the
// first ids, and those of the texts that were read (as FR-Spec, arXiv 2502.14856, picks them by
// counting). They come tile by tile of the head, so a token brings its neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"

namespace outdraft {

class DraftTokens {
 public:
  // `num_first`: ids from 0 on, a multiple of kTile; 0: all tokens are chosen among.
  DraftTokens(int64_t num_first, int64_t num_tokens)
      : num_first_tiles_(num_first / kTile),
        is_chosen_(num_first == 0 ? 0 : static_cast<size_t>(num_tokens / kTile)) {
    for (int64_t tile = 0; tile < num_first_tiles_; ++tile) choose(tile, tile);
  }

  bool are_all() const { return num_first_tiles_ == 0; }
  const std::vector<int64_t>& tiles() const { return tiles_; }
  // [kTile * tiles], of their outputs.
  const std::vector<int64_t>& ids() const { return ids_; }

  // A text has the token. Beside the first ones half as many have room; then the ones that
  // came first leave. A last tile that is not full is never chosen.
  void learn(int64_t id) {
    const int64_t tile = id / kTile;
    if (tile >= static_cast<int64_t>(is_chosen_.size()) || is_chosen_[tile]) return;
    const int64_t room = std::max<int64_t>(num_first_tiles_ / 2, 1);
    choose(tile, num_first_tiles_ + num_learned_++ % room);
  }

 private:
  void choose(int64_t tile, int64_t place) {
    if (place < static_cast<int64_t>(tiles_.size())) {
      is_chosen_[tiles_[place]] = false;
    } else {
      tiles_.push_back(0);
      ids_.resize(kTile * tiles_.size());
    }
    is_chosen_[tile] = true;
    tiles_[place] = tile;
    for (int64_t lane = 0; lane < kTile; ++lane) ids_[place * kTile + lane] = tile * kTile + lane;
  }

  int64_t num_first_tiles_, num_learned_ = 0;
  std::vector<int64_t> tiles_, ids_;
  std::vector<bool> is_chosen_;
};

}  // namespace outdraft
