// Paged tree attention over the blocks where keys and values lie; the readable twin is
// src/outdraft/kernels/reference/attention.py.
//
// A tile is some query rows of one request that one kv head serves together; every (row, query
// head) pair of it is a lane. Keys and values meet all lanes in pieces of 64. The softmax runs
// online over the pieces, in base 2: log2(e) is part of the scale (Milakov, Gimelshein 2018; Dao et
// al. 2022).
//
// A long context has parts of 2048 keys, which threads may share, as in flash-decoding (Dao,
// Haziza, Massa, Sizov 2023). Sums of parts are added in the order of the parts, whoever made them.
// So the order of a lane's sums depends neither on the other lanes nor on the number of threads. So
// that this holds in trees too, each row of a tree meets its own drafted keys in the order of its
// text, as if they were committed; only the pieces before them are read for all rows.
//
// A late helper may read while the next call changes what it reads. So it copies what addresses are
// made of, and goes on only if the version says that the copy is whole.

#include "attention.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "export.h"
#include "simd.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kPart = 2048;    // cache indices from one of its multiples to the next
constexpr int64_t kPiece = 64;     // keys
constexpr int64_t kMaxLanes = 64;  // of one tile
constexpr int kLanes = 2;          // of one call of `dots`: their sums fill half the registers
constexpr int kKeys = kWidth / kLanes;
constexpr int64_t kFewLanes = 4;   // read bfloat16 where it lies; more share a wide copy
constexpr int64_t kEvenJobs = 4;   // for each thread; prefill has more, and large partial sums
constexpr int64_t kMinShared = 1 << 16;  // multiply-adds below which sharing costs what it saves
constexpr float kHidden = -1e30f;  // a score that is not to be seen; finite, so that x - x is 0

int64_t round_up(int64_t count, int64_t multiple) {
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
  int64_t first_job;  // a job is the tile for one kv head, or one part of it

  int64_t first_draft() const { return context_len + num_causal; }
};

struct Sizes {
  explicit Sizes(const AttentionBatch& batch)
      : heads_per_kv(batch.num_heads / batch.num_kv_heads),
        tile_rows(std::max<int64_t>(1, kMaxLanes / heads_per_kv)),
        head_size(round_up(batch.head_size, kWidth)),
        max_lanes(round_up(tile_rows * heads_per_kv, kLanes)),
        sums_size(max_lanes * (head_size + 2)) {}

  int64_t heads_per_kv, tile_rows;
  int64_t head_size;  // with its padding
  int64_t max_lanes, sums_size;
};

// What the lanes of a tile have summed over some keys.
struct Sums {
  Sums(float* memory, const Sizes& sizes)
      : out(memory), top(memory + sizes.max_lanes * sizes.head_size), total(top + sizes.max_lanes) {}

  float* out;    // [L, C]; the values by their weights
  float* top;    // [L]; the highest score
  float* total;  // [L]; the weights, relative to it
};

// out[lane, key] = q[lane] . k[key] for kLanes lanes and kKeys keys.
template <typename Number>
void dots(const float* q, int64_t size, const void* const* k, float* out) {
  Floats sums[kLanes * kKeys] = {};
  for (int64_t c = 0; c < size; c += kWidth) {
    Floats parts[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) parts[lane] = numbers(q + lane * size + c);
    for (int key = 0; key < kKeys; ++key) {
      const Floats k_part = numbers(static_cast<const Number*>(k[key]) + c);
      for (int lane = 0; lane < kLanes; ++lane) {
        Floats& sum = sums[lane * kKeys + key];
        sum = fused(parts[lane], k_part, sum);
      }
    }
  }
  float both[kWidth];
  store(both, sums_of(sums));
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(out + lane * kPiece, both + lane * kKeys, sizeof(float) * kKeys);
  }
}

// One step of a lane's online softmax: scores become weights relative to the new top. Returns what
// the rise of the top does to everything that was summed under the old one.
float weigh(float* scores, int64_t num_keys, float& top, float& total) {
  Floats highest = broadcast(top);
  for (int64_t key = 0; key < num_keys; key += kWidth) {
    const Floats score = numbers(scores + key);
    highest = score > highest ? score : highest;
  }
  const float new_top = max_of(highest);
  Floats summed = Floats{};
  for (int64_t key = 0; key < num_keys; key += kWidth) {
    const Floats weight = exp2_of(numbers(scores + key) - broadcast(new_top));
    store(scores + key, weight);
    summed = summed + weight;
  }
  const float shrink = exp2_of(broadcast(top - new_top))[0];
  total = total * shrink + sum_of(summed);
  top = new_top;
  return shrink;
}

// out[lane] = shrink[lane] * out[lane] + sum over keys of weights[lane, key] * v[key], for kLanes
// lanes and kVectors vectors of each.
template <int kVectors, typename Number>
void accumulate(float* out, int64_t size, const float* weights, const float* shrink,
                const void* const* v, int64_t offset, int64_t num_keys) {
  Floats sums[kLanes][kVectors];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kVectors; ++i) {
      sums[lane][i] = numbers(out + lane * size + i * kWidth) * broadcast(shrink[lane]);
    }
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    const Number* row = static_cast<const Number*>(v[key]) + offset;
    Floats values[kVectors];
    for (int i = 0; i < kVectors; ++i) values[i] = numbers(row + i * kWidth);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Floats weight = broadcast(weights[lane * kPiece + key]);
      for (int i = 0; i < kVectors; ++i) sums[lane][i] = fused(weight, values[i], sums[lane][i]);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kVectors; ++i) store(out + lane * size + i * kWidth, sums[lane][i]);
  }
}

// The `count` highest of the bits: the rank of an ancestor is its distance in the text.
uint64_t nearest(uint64_t bits, int64_t count) {
  for (int64_t spare = std::popcount(bits) - count; spare > 0; --spare) bits &= bits - 1;
  return bits;
}

// One thread's work on one tile for one kv head. It lies in the scratch memory of a unit.
class TileWork {
 public:
  static size_t bytes(const AttentionBatch& batch) {
    const Sizes sizes(batch);
    const int64_t floats = 2 * sizes.sums_size + (sizes.max_lanes + 2 * kPiece + 1) * sizes.head_size +
                           sizes.max_lanes * (kPiece + 1);
    return round_up(sizeof(TileWork), 64) + round_up(4 * floats, 64) + 16 * sizes.tile_rows +
           4 * batch.table_stride;
  }

  // `memory`: bytes(batch) from the end of this object on.
  TileWork(const AttentionBatch& batch, const Tile& tile, int64_t kv_head)
      : batch_(batch),
        tile_(tile),
        sizes_(batch),
        first_head_(kv_head * sizes_.heads_per_kv),
        kv_offset_(kv_head * batch.head_size),
        num_lanes_((tile.end_row - tile.first_row) * sizes_.heads_per_kv) {
    const int64_t size = sizes_.head_size, lanes = sizes_.max_lanes;
    char* memory = reinterpret_cast<char*>(this) + round_up(sizeof(TileWork), 64);
    sums_ = reinterpret_cast<float*>(memory);
    next_sums_ = sums_ + sizes_.sums_size;
    q_ = next_sums_ + sizes_.sums_size;
    wide_k_ = q_ + lanes * size;
    wide_v_ = wide_k_ + kPiece * size;
    zeros_ = wide_v_ + kPiece * size;
    scores_ = zeros_ + size;
    shrink_ = scores_ + lanes * kPiece;
    positions_ = reinterpret_cast<int64_t*>(memory + round_up(4 * (shrink_ + lanes - sums_), 64));
    ancestors_ = reinterpret_cast<uint64_t*>(positions_ + sizes_.tile_rows);
    blocks_ = reinterpret_cast<int32_t*>(ancestors_ + sizes_.tile_rows);
  }

  // Copy what addresses are made of.
  void copy_rows() {
    const int64_t num_rows = tile_.end_row - tile_.first_row, flat = tile_.start + tile_.first_row;
    const int64_t num_blocks = (tile_.end_key + batch_.block_size - 1) / batch_.block_size;
    std::memcpy(positions_, batch_.positions + flat, 8 * num_rows);
    std::memcpy(ancestors_, batch_.ancestors + flat, 8 * num_rows);
    std::memcpy(blocks_, tile_.blocks, 4 * num_blocks);
  }

  // The sums over parts [first_part, end_part) of what the tile sees.
  void attend_parts(int64_t first_part, int64_t end_part) {
    load_queries();
    const Sums sums = this->sums(), next(next_sums_, sizes_);
    attend_part(first_part, sums);
    for (int64_t part = first_part + 1; part < end_part; ++part) {
      attend_part(part, next);
      fold(sums, next);
    }
  }

  Sums sums() const { return Sums(sums_, sizes_); }
  const Sizes& sizes() const { return sizes_; }

  // Add what the lanes have summed over a later part.
  void fold(const Sums& sums, const Sums& next) const {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const float highest = std::max(sums.top[lane], next.top[lane]);
      const float shrink = exp2_of(broadcast(sums.top[lane] - highest))[0];
      const float next_shrink = exp2_of(broadcast(next.top[lane] - highest))[0];
      sums.top[lane] = highest;
      sums.total[lane] = sums.total[lane] * shrink + next.total[lane] * next_shrink;
      float* out = sums.out + lane * sizes_.head_size;
      const float* next_out = next.out + lane * sizes_.head_size;
      for (int64_t c = 0; c < sizes_.head_size; ++c) {
        out[c] = out[c] * shrink + next_out[c] * next_shrink;
      }
    }
  }

  // Write the results of the lanes, from their sums over all parts.
  void store_results(const Sums& sums) const {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t row = tile_.start + tile_.first_row + lane / sizes_.heads_per_kv;
      const int64_t head = first_head_ + lane % sizes_.heads_per_kv;
      const int64_t at = (row * batch_.num_heads + head) * batch_.head_size;
      const float total = sums.total[lane];
      const float inverse = total != 0 ? 1.0f / total : 0.0f;  // 0: it sees nothing
      const float* from = sums.out + lane * sizes_.head_size;
      with_numbers(batch_.out, batch_.is_bf16_out, [&](auto* out) {
        for (int64_t c = 0; c < batch_.head_size; ++c) put(out + at + c, from[c] * inverse);
      });
    }
  }

 private:
  // Scaled queries, and zeros for the lanes that fill the last kLanes.
  void load_queries() {
    const float scale = batch_.scale * 1.4426950408889634f;  // log2(e)
    const int64_t size = sizes_.head_size;
    // Whole vectors are read where they lie, unless many lanes would widen them again and again.
    const bool is_padded = size != batch_.head_size;
    is_in_place_ = !is_padded && (!batch_.is_bf16_cache || num_lanes_ <= kFewLanes);
    std::fill_n(zeros_, size, 0.0f);
    if (is_padded) std::fill_n(wide_k_, 2 * kPiece * size, 0.0f);
    std::fill_n(q_, round_up(num_lanes_, kLanes) * size, 0.0f);
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t row = tile_.start + tile_.first_row + lane / sizes_.heads_per_kv;
      const int64_t head = first_head_ + lane % sizes_.heads_per_kv;
      const int64_t at = row * batch_.q_stride + head * batch_.head_size;
      float* q = q_ + lane * size;
      with_numbers(batch_.q, batch_.is_bf16_query, [&](const auto* from) {
        for (int64_t c = 0; c < batch_.head_size; ++c) q[c] = number(from + at + c) * scale;
      });
    }
  }

  void attend_part(int64_t part, const Sums& sums) {
    std::fill_n(sums.out, round_up(num_lanes_, kLanes) * sizes_.head_size, 0.0f);
    std::fill_n(sums.top, sizes_.max_lanes, kHidden);
    std::fill_n(sums.total, sizes_.max_lanes, 0.0f);
    int64_t start = (tile_.first_key / kPart + part) * kPart;
    const int64_t end = std::min(start + kPart, tile_.end_key);
    // A window begins inside of a piece: where pieces begin must not depend on the tile's rows.
    start = std::max(start, tile_.first_key / kPiece * kPiece);
    int64_t first_own = end;
    if (tile_.is_tree) first_own = std::min(end, first_draft() / kPiece * kPiece);
    for (int64_t first_key = start; first_key < first_own; first_key += kPiece) {
      const int64_t end_key = std::min(first_key + kPiece, first_own);
      find_keys(first_key, end_key);
      score(end_key - first_key, 0, num_lanes_);
      if (first_key < tile_.first_common || tile_.end_common < end_key) hide(first_key, end_key);
      sum_values(end_key - first_key, 0, num_lanes_, sums);
    }
    if (!tile_.is_tree) return;
    for (int64_t row = 0; row < tile_.end_row - tile_.first_row; ++row) {
      attend_row(row, std::max(start, first_own), end, sums);
    }
  }

  // One row's keys [start, end): their indices are positions in the row's text.
  void attend_row(int64_t row, int64_t start, int64_t end, const Sums& sums) {
    const int64_t position = positions_[row], lane = row * sizes_.heads_per_kv;
    const int64_t lowest = position - batch_.window + 1;
    // A row whose result nobody wants may have fewer ancestors than its position says.
    end = std::min({end, position + 1, first_draft() + std::popcount(ancestors_[row])});
    for (int64_t first_key = start; first_key < end; first_key += kPiece) {
      const int64_t num_keys = std::min(first_key + kPiece, end) - first_key;
      find_text(row, first_key, num_keys);
      score(num_keys, lane, lane + sizes_.heads_per_kv);
      for (int64_t head = 0; head < sizes_.heads_per_kv; ++head) {
        const int64_t num_hidden = std::clamp<int64_t>(lowest - first_key, 0, num_keys);
        std::fill_n(scores_ + (lane + head) * kPiece, num_hidden, kHidden);
      }
      sum_values(num_keys, lane, lane + sizes_.heads_per_kv, sums);
    }
  }

  void find_keys(int64_t first_key, int64_t end_key) {
    for (int64_t key = first_key; key < end_key; ++key) put_key(key - first_key, key);
    fill_keys(end_key - first_key);
  }

  // As `find_keys`, for keys by their positions in the text of one row.
  void find_text(int64_t row, int64_t first_key, int64_t num_keys) {
    uint64_t bits = ancestors_[row];
    for (int64_t i = first_draft(); i < first_key; ++i) bits &= bits - 1;
    for (int64_t place = 0; place < num_keys; ++place) {
      int64_t key = first_key + place;
      if (key >= first_draft()) {
        key = first_draft() + std::countr_zero(bits);
        bits &= bits - 1;
      }
      put_key(place, key);
    }
    fill_keys(num_keys);
  }

  void put_key(int64_t place, int64_t key) {
    const int64_t slot =
        blocks_[key / batch_.block_size] * batch_.block_size + key % batch_.block_size;
    const int64_t at = slot * batch_.num_kv_heads * batch_.head_size + kv_offset_;
    k_rows_[place] = row_at(batch_.k, at, wide_k_ + place * sizes_.head_size);
    v_rows_[place] = row_at(batch_.v, at, wide_v_ + place * sizes_.head_size);
  }

  // Where numbers of the cache are read: where they lie, or in a copy.
  const void* row_at(const void* cached, int64_t at, float* copy) const {
    const void* row = copy;
    with_numbers(cached, batch_.is_bf16_cache, [&](const auto* from) {
      if (is_in_place_) {
        row = from + at;
      } else {
        convert(from + at, batch_.head_size, copy);
      }
    });
    return row;
  }

  // The keys that fill the last kKeys repeat one.
  void fill_keys(int64_t num_keys) {
    std::fill(k_rows_ + num_keys, k_rows_ + round_up(num_keys, kKeys), k_rows_[num_keys - 1]);
  }

  bool reads_halves() const { return is_in_place_ && batch_.is_bf16_cache; }

  int64_t first_draft() const { return tile_.first_draft(); }

  // scores = q . k; the lowest score for what fills the last vector.
  void score(int64_t num_keys, int64_t first_lane, int64_t end_lane) {
    const int64_t size = sizes_.head_size;
    first_lane = first_lane / kLanes * kLanes;
    end_lane = round_up(end_lane, kLanes);
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      for (int64_t lane = first_lane; lane < end_lane; lane += kLanes) {
        float* out = scores_ + lane * kPiece + key;
        if (reads_halves()) {
          dots<uint16_t>(q_ + lane * size, size, k_rows_ + key, out);
        } else {
          dots<float>(q_ + lane * size, size, k_rows_ + key, out);
        }
      }
    }
    const int64_t num_filled = round_up(num_keys, kWidth) - num_keys;
    for (int64_t lane = first_lane; num_filled && lane < end_lane; ++lane) {
      std::fill_n(scores_ + lane * kPiece + num_keys, num_filled, kHidden);
    }
  }

  // The lowest score for what a row does not see, and zeros for the values that none sees.
  void hide(int64_t first_key, int64_t end_key) {
    for (int64_t row = tile_.first_row; row < tile_.end_row; ++row) {
      const int64_t own = row - tile_.first_row;
      const int64_t last_seen = tile_.context_len + std::min(row, tile_.num_causal - 1);
      const bool is_draft = row >= tile_.num_causal;
      const uint64_t bits = is_draft ? nearest(ancestors_[own], batch_.window) : 0;
      const int64_t lowest = positions_[own] - batch_.window + 1;
      float* scores = scores_ + own * sizes_.heads_per_kv * kPiece;
      for (int64_t key = first_key; key < end_key; ++key) {
        const bool is_seen = key < first_draft() ? lowest <= key && key <= last_seen
                                                : bits >> (key - first_draft()) & 1;
        if (is_seen) continue;
        for (int64_t head = 0; head < sizes_.heads_per_kv; ++head) {
          scores[head * kPiece + key - first_key] = kHidden;
        }
      }
    }
    for (int64_t key = std::max(first_key, first_draft()); key < end_key; ++key) {
      if (tile_.bits >> (key - first_draft()) & 1) continue;
      v_rows_[key - first_key] = zeros_;  // nobody may have written it
    }
  }

  // Turn scores into weights, and take in the values they weigh. Lanes beside these that share a
  // call with them keep what they have.
  void sum_values(int64_t num_keys, int64_t first_lane, int64_t end_lane, const Sums& sums) {
    const int64_t size = sizes_.head_size;
    const int64_t first = first_lane / kLanes * kLanes, end = round_up(end_lane, kLanes);
    for (int64_t lane = first; lane < end; ++lane) {
      float* scores = scores_ + lane * kPiece;
      if (lane < first_lane || lane >= end_lane) {
        std::fill_n(scores, num_keys, 0.0f);
        shrink_[lane] = 1;
      } else {
        shrink_[lane] = weigh(scores, num_keys, sums.top[lane], sums.total[lane]);
      }
    }
    for (int64_t lane = first; lane < end; lane += kLanes) {
      float* out = sums.out + lane * size;
      const float* weights = scores_ + lane * kPiece;
      if (reads_halves()) {
        accumulate_all<uint16_t>(out, weights, shrink_ + lane, num_keys);
      } else {
        accumulate_all<float>(out, weights, shrink_ + lane, num_keys);
      }
    }
  }

  template <typename Number>
  void accumulate_all(float* out, const float* weights, const float* shrink, int64_t num_keys) {
    const int64_t size = sizes_.head_size;
    int64_t c = 0;
    for (; c + 4 * kWidth <= size; c += 4 * kWidth) {
      accumulate<4, Number>(out + c, size, weights, shrink, v_rows_, c, num_keys);
    }
    for (; c < size; c += kWidth) {
      accumulate<1, Number>(out + c, size, weights, shrink, v_rows_, c, num_keys);
    }
  }

  const AttentionBatch batch_;
  const Tile tile_;
  const Sizes sizes_;
  const int64_t first_head_, kv_offset_, num_lanes_;
  bool is_in_place_ = false;
  float *sums_, *next_sums_;
  float* q_;                   // [L, C]
  float *wide_k_, *wide_v_;    // [K, C]; what is not read where it lies
  float* zeros_;               // [C]
  float* scores_;              // [L, K]
  float* shrink_;              // [L]; what a rising top does to earlier sums
  int64_t* positions_;         // by the rows of the tile
  uint64_t* ancestors_;
  int32_t* blocks_;
  const void *k_rows_[kPiece], *v_rows_[kPiece];
};

// What these rows of a request see.
Tile make_tile(const AttentionBatch& batch, int64_t request, int64_t first_row, int64_t end_row) {
  Tile tile = {};
  tile.start = batch.query_start[request];
  tile.first_row = first_row;
  tile.end_row = end_row;
  tile.context_len = batch.context_lens[request];
  tile.num_causal = batch.num_causal[request];
  tile.blocks = batch.block_table + request * batch.table_stride;
  int64_t lowest = batch.positions[tile.start + first_row], highest = lowest;
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t position = batch.positions[tile.start + row];
    lowest = std::min(lowest, position);
    highest = std::max(highest, position);
    if (row < tile.num_causal) continue;
    const uint64_t bits = static_cast<uint64_t>(batch.ancestors[tile.start + row]);
    tile.bits |= bits;
    tile.is_tree |= (bits & (bits + 1)) != 0;
  }
  tile.end_key = tile.context_len + std::min(end_row, tile.num_causal) + std::bit_width(tile.bits);
  tile.end_common = tile.context_len + std::min(first_row + 1, tile.num_causal);
  if (batch.window != kNoWindow) {
    // Where a drafted key lies in the text is another question for every row.
    tile.first_key = std::clamp<int64_t>(lowest - batch.window + 1, 0, tile.first_draft());
    tile.first_common = std::max<int64_t>(0, highest - batch.window + 1);
  }
  tile.num_parts = std::max<int64_t>(1, (tile.end_key + kPart - 1) / kPart - tile.first_key / kPart);
  return tile;
}

// At most kMaxUnits jobs, each a unit, as team.h describes it.
struct AttentionWork {
  AttentionBatch batch;
  const Tile* tiles;
  int64_t num_tiles, first_job, num_jobs;
  float* partial;  // the sums of every job; null: a job has all parts, and stores results
  const std::atomic<int64_t>* current_version;
  int64_t version;

  int64_t num_units() const { return num_jobs; }
  size_t scratch_bytes() const { return TileWork::bytes(batch); }

  void compute(int64_t unit, void* scratch) const {
    const int64_t job = first_job + unit;
    const Tile* behind = std::upper_bound(
        tiles + 1, tiles + num_tiles, job,
        [](int64_t number, const Tile& tile) { return number < tile.first_job; });
    const Tile tile = behind[-1];
    if (is_over()) return;
    const int64_t place = job - tile.first_job;
    TileWork* work = new (scratch) TileWork(batch, tile, place % batch.num_kv_heads);
    work->copy_rows();
    if (is_over()) return;
    const int64_t part = place / batch.num_kv_heads;
    if (partial == nullptr) {
      work->attend_parts(0, tile.num_parts);
    } else {
      work->attend_parts(part, part + 1);
    }
  }

  void store(int64_t unit, const void* scratch) const {
    const TileWork* work = static_cast<const TileWork*>(scratch);
    if (partial == nullptr) {
      work->store_results(work->sums());
    } else {
      const int64_t size = work->sizes().sums_size;
      std::memcpy(partial + (first_job + unit) * size, work->sums().out, sizeof(float) * size);
    }
  }

  bool is_over() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return current_version->load(std::memory_order_relaxed) != version;
  }
};

// The results of all tiles, from the sums of their parts.
void merge(const AttentionWork& all) {
  void* scratch = own_scratch(all.scratch_bytes());
  for (const Tile* tile = all.tiles; tile < all.tiles + all.num_tiles; ++tile) {
    for (int64_t head = 0; head < all.batch.num_kv_heads; ++head) {
      const TileWork* work = new (scratch) TileWork(all.batch, *tile, head);
      const auto part_sums = [&](int64_t part) {
        const int64_t job = tile->first_job + part * all.batch.num_kv_heads + head;
        return Sums(all.partial + job * work->sizes().sums_size, work->sizes());
      };
      for (int64_t part = 1; part < tile->num_parts; ++part) work->fold(part_sums(0), part_sums(part));
      work->store_results(part_sums(0));
    }
  }
}

void clear_padding(const AttentionBatch& batch) {
  const int64_t row_bytes = batch.num_heads * batch.head_size * (batch.is_bf16_out ? 2 : 4);
  const int64_t first = batch.query_start[batch.num_requests];
  std::memset(static_cast<char*>(batch.out) + first * row_bytes, 0,
              (batch.num_rows - first) * row_bytes);
}

}  // namespace

void attend(Team* team, const AttentionBatch& batch, AttentionMemory& memory) {
  const int64_t version = memory.version.fetch_add(1) + 1;
  std::atomic_thread_fence(std::memory_order_release);
  const Sizes sizes(batch);
  clear_padding(batch);
  const int64_t most_tiles = batch.num_rows / sizes.tile_rows + batch.num_requests;
  Tile* tiles = memory.tiles.reserve<Tile>(most_tiles);
  int64_t num_tiles = 0, num_parts = 0, work = 0;
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    const int64_t num_rows = batch.query_start[b + 1] - batch.query_start[b];
    for (int64_t row = 0; row < num_rows; row += sizes.tile_rows) {
      const Tile& tile = tiles[num_tiles++] =
          make_tile(batch, b, row, std::min(row + sizes.tile_rows, num_rows));
      num_parts += tile.num_parts;
      work += (tile.end_row - row) * batch.num_heads * batch.head_size * (tile.end_key - tile.first_key);
    }
  }
  const Turn turn(work < kMinShared ? nullptr : team);
  // Jobs that are too few to be even among the threads become parts.
  const bool is_split = num_parts > num_tiles &&
                        num_tiles * batch.num_kv_heads < kEvenJobs * num_threads(turn.team());
  int64_t num_jobs = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    tiles[i].first_job = num_jobs;
    num_jobs += batch.num_kv_heads * (is_split ? tiles[i].num_parts : 1);
  }
  float* partial = is_split ? memory.partial.reserve<float>(num_jobs * sizes.sums_size) : nullptr;
  AttentionWork all = {batch, tiles, num_tiles, 0, 0, partial, &memory.version, version};
  for (; all.first_job < num_jobs; all.first_job += kMaxUnits) {
    all.num_jobs = std::min(kMaxUnits, num_jobs - all.first_job);
    run_in_turn(turn.team(), all);
  }
  if (is_split) merge(all);
}

}  // namespace outdraft

using outdraft::AttentionBatch;
using outdraft::AttentionMemory;
using outdraft::Team;

OUTDRAFT_EXPORT AttentionMemory* attention_create(Team* team) { return new AttentionMemory(team); }

OUTDRAFT_EXPORT void attention_destroy(AttentionMemory* memory) { delete memory; }

// When it returns, no helper reads the batch any more.
OUTDRAFT_EXPORT void attention_attend(Team* team, const AttentionBatch* batch,
                                      AttentionMemory* memory) {
  outdraft::attend(team, *batch, *memory);
  outdraft::wait_until_idle(team);
}

// cached[slots[t]] = rows[t] for slots that are not negative, converted where the dtypes differ.
OUTDRAFT_EXPORT void attention_write(const void* rows, int64_t row_stride, int64_t is_bf16_rows,
                                     void* cached, int64_t is_bf16_cached, const int64_t* slots,
                                     int64_t num_rows, int64_t row_size) {
  using namespace outdraft;
  with_numbers(rows, is_bf16_rows, [&](const auto* from) {
    with_numbers(cached, is_bf16_cached, [&](auto* to) {
      for (int64_t t = 0; t < num_rows; ++t) {
        if (slots[t] >= 0) convert(from + t * row_stride, row_size, to + slots[t] * row_size);
      }
    });
  });
}
