// Paged tree attention over the blocks where keys and values lie; the readable twin is
// src/outdraft/kernels/reference/attention.py.
//
// A tile is some query rows of one request that one kv head serves together; every (row, query
// head) pair of it is a lane. Keys and values meet all lanes in pieces of 64, which are first laid
// out for products (tile_products.h); then a few lanes at a time, whose scores and sums stay in the
// nearest cache, meet both. The softmax runs online over the pieces, in base 2: log2(e) is part of
// the scale (Milakov, Gimelshein 2018; Dao et al. 2022). Where queries and cache are
// bfloat16 and the machine has dot products of it, weights are rounded to bfloat16, too; they are
// divided by the sum of the rounded ones. A sink joins the sum when it is complete.
//
// Where few lanes meet a piece, to lay it out takes longer than to multiply it. So matrix registers
// load keys where they lie, as rows, and queries are what they meet: the sums are the same ones.
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
#include "tile_products.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kPart = 2048;    // cache indices from one of its multiples to the next
constexpr int64_t kPiece = 64;     // keys
// Lanes of one job at most: where products are fast, what is laid out for them serves more.
constexpr int64_t kMaxLanes = kHasMatrixRegisters ? 256 : 128;
constexpr int64_t kFewJobs = 2;    // for each thread: more are joined, to read longer rows
constexpr int64_t kEvenJobs = 4;   // for each thread; prefill has more, and large partial sums
constexpr int64_t kMinShared = 1 << 16;  // multiply-adds below which sharing costs what it saves
// Lanes that meet a piece together at most: of dot products, and of any.
constexpr int64_t kDotLanes = kHasMatrixRegisters ? kMatrixRows : kGroupRows;
constexpr int64_t kMostLanes = std::max<int64_t>(kDotLanes, kGroupRows);
// What zeros fill: the numbers of a row, and keys that dot products read as inputs.
constexpr int64_t kFilled = kHasMatrixRegisters ? 2 * kMatrixRows : kWidth;
constexpr int64_t kFilledKeys = kHasMatrixRegisters ? kFilled : 1;
// The next piece's; twice for a register of keys in place.
[[maybe_unused]] constexpr int64_t kFetchedLines = 16;
constexpr float kLog2E = 1.4426950408889634f;
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

// What the lanes of a tile have summed over some keys.
struct Sums {
  Sums(float* memory, const Sizes& sizes)
      : out(memory),
        total(out + sizes.max_lanes * sizes.value_size),
        top(total + sizes.max_lanes * kWidth) {}

  float* out;    // [L, E]; the values by their weights
  float* total;  // [L, kWidth]; the weights, by their places in a vector
  float* top;    // [L]; the highest score, which weights are relative to
};

// One step of the online softmax of some lanes: scores of a piece become weights relative to the
// new tops, as float32 or bfloat16. `shrink`: what the rise of a top does to everything that was
// summed under the old one. First come all tops, then all weights: what is short waits for nothing
// long.
template <bool kAreBf16>
void weigh(float* scores, int64_t num_lanes, float* tops, float* totals, float* shrink) {
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    Floats highest = broadcast(tops[lane]);
    for (int64_t key = 0; key < kPiece; key += kWidth) {
      const Floats score = numbers(scores + lane * kPiece + key);
      highest = score > highest ? score : highest;
    }
    const float top = max_of(highest);
    shrink[lane] = tops[lane] - top;
    tops[lane] = top;
  }
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    // 2 ** 0 is 1, and mostly the top stays.
    shrink[lane] = shrink[lane] == 0 ? 1.0f : exp2_of(broadcast(shrink[lane]))[0];
    float* of_lane = scores + lane * kPiece;
    const Floats top = broadcast(tops[lane]);
    Floats total = numbers(totals + lane * kWidth) * shrink[lane];
    if constexpr (kAreBf16) {
      const Words ones = bf16_ones();
      for (int64_t key = 0; key < kPiece; key += 2 * kWidth) {
        const Floats first = rough_exp2_of(numbers(of_lane + key) - top);
        const Floats second = rough_exp2_of(numbers(of_lane + key + kWidth) - top);
        const Words weights = to_bf16_unless_tiny(first, second);
        store(of_lane + key / 2, weights);
        total = dot_pairs(total, weights, ones);
      }
    } else {
      for (int64_t key = 0; key < kPiece; key += kWidth) {
        const Floats weight = exp2_of(numbers(of_lane + key) - top);
        store(of_lane + key, weight);
        total = total + weight;
      }
    }
    store(totals + lane * kWidth, total);
  }
}

// Scores, which are parts of a cap, bend towards it: cap * tanh(score), in base 2.
void bend(float* scores, int64_t num_lanes, int64_t num_keys, float cap) {
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    for (float* at = scores + lane * kPiece; at < scores + lane * kPiece + num_keys; at += kWidth) {
      store(at, tanh_of(numbers(at)) * (cap * kLog2E));
    }
  }
}

// How many positions a row at this one sees at most, up to its own.
int64_t reach(const AttentionBatch& batch, int64_t position) {
  if (batch.chunk == kNoLimit) return batch.window;
  return std::min<int64_t>(batch.window, position % batch.chunk + 1);
}

// The `count` highest of the bits: the rank of an ancestor is its distance in the text.
uint64_t nearest(uint64_t bits, int64_t count) {
  for (int64_t spare = std::popcount(bits) - count; spare > 0; --spare) bits &= bits - 1;
  return bits;
}

// The products with keys and with values.
struct MultiplyCalls {
  void (*scores)(const TileProduct&);
  void (*values)(const TileProduct&);
};
template <Products kProducts>
constexpr MultiplyCalls kMultiply = {multiply_rows<kProducts, Start::kZero>,
                                          multiply_rows<kProducts, Start::kShrunk>};
#if defined(__AMX_BF16__)
template <>
constexpr MultiplyCalls kMultiply<Products::kDots> = {multiply_rows_in_matrices<Start::kZero>,
                                                      multiply_rows_in_matrices<Start::kShrunk>};
#endif

// One thread's work on one tile for some kv heads: their lanes are one head's behind the other's.
// Keys of all heads lie side by side, so the cache fetches a piece row by row for all of them.
// It lies in the scratch memory of a unit.
class TileWork {
 public:
  static size_t bytes(const AttentionBatch& batch, const Sizes& sizes) {
    const int64_t floats = 2 * sizes.sums_size + kMostLanes * kPiece +
                           (sizes.max_lanes + kPiece) * sizes.key_size +
                           kPiece * sizes.value_size + num_zeros(sizes) + turned_size(sizes);
    return round_up(sizeof(TileWork), 64) + round_up(4 * floats, 64) + 16 * sizes.tile_rows +
           4 * batch.table_stride;
  }

  static int64_t num_zeros(const Sizes& sizes) {
    return sizes.job_heads * std::max(sizes.key_size, sizes.value_size);
  }

  // What queries take that meet keys where they lie, in words.
  static int64_t turned_size(const Sizes& sizes) {
    return kHasMatrixRegisters ? sizes.job_heads * sizes.key_size / 2 * kMatrixRows : 0;
  }

  // `memory`: bytes(batch, sizes) from the start of this object on.
  TileWork(const AttentionBatch& batch, const Sizes& sizes, const Tile& tile, int64_t group)
      : batch_(batch),
        tile_(tile),
        sizes_(sizes),
        first_kv_head_(group * sizes.job_heads),
        num_lanes_((tile.end_row - tile.first_row) * sizes_.heads_per_kv),
        k_row_bytes_(batch.num_kv_heads * batch.key_size * number_bytes()),
        v_row_bytes_(batch.num_kv_heads * batch.value_size * number_bytes()),
        are_dots_(kHasBf16Dot && batch.is_bf16_cache && batch.is_bf16_query),
        meets_keys_in_place_(kHasMatrixRegisters && are_dots_ && num_lanes_ <= kMatrixRows &&
                             batch.key_size % (2 * kMatrixRows) == 0 &&
                             batch.block_size % kMatrixRows == 0),
        multiply_(!batch.is_bf16_cache ? kMultiply<Products::kFloat32>
                  : are_dots_          ? kMultiply<Products::kDots>
                                       : kMultiply<Products::kWidened>) {
    char* memory = reinterpret_cast<char*>(this) + round_up(sizeof(TileWork), 64);
    sums_ = reinterpret_cast<float*>(memory);
    next_sums_ = sums_ + sizes_.sums_size;
    q_ = next_sums_ + sizes_.sums_size;
    key_matrix_ = q_ + sizes_.max_lanes * sizes_.key_size;
    value_matrix_ = key_matrix_ + kPiece * sizes_.key_size;
    scores_ = value_matrix_ + kPiece * sizes_.value_size;
    zeros_ = scores_ + kMostLanes * kPiece;
    turned_q_ = zeros_ + num_zeros(sizes_);
    const int64_t num_floats = turned_q_ + turned_size(sizes_) - sums_;
    positions_ = reinterpret_cast<int64_t*>(memory + round_up(4 * num_floats, 64));
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
    for (int64_t lane = 0; lane < sizes_.job_heads * num_lanes_; ++lane) {
      const float highest = std::max(sums.top[lane], next.top[lane]);
      const float shrink = exp2_of(broadcast(sums.top[lane] - highest))[0];
      const float next_shrink = exp2_of(broadcast(next.top[lane] - highest))[0];
      sums.top[lane] = highest;
      const auto add = [&](float* numbers, const float* more, int64_t size) {
        for (int64_t c = lane * size; c < (lane + 1) * size; ++c) {
          numbers[c] = numbers[c] * shrink + more[c] * next_shrink;
        }
      };
      add(sums.out, next.out, sizes_.value_size);
      add(sums.total, next.total, kWidth);
    }
  }

  // Write the results of the lanes, from their sums over all parts.
  void store_results(const Sums& sums) const {
    for (int64_t lane = 0; lane < sizes_.job_heads * num_lanes_; ++lane) {
      const int64_t at = (row_of(lane) * batch_.num_heads + head_of(lane)) * batch_.value_size;
      const float total = sum_of(numbers(sums.total + lane * kWidth));
      float inverse = total != 0 ? 1.0f / total : 0.0f;  // 0: it sees nothing
      if (batch_.sinks != nullptr) inverse = inverse_with_sink(lane, sums.top[lane], total);
      const float* from = sums.out + lane * sizes_.value_size;
      with_numbers(batch_.out, batch_.is_bf16_out, [&](auto* out) {
        for_numbers(batch_.value_size, [&](int64_t c, auto kind) {
          put(out + at + c, read<decltype(kind)>(from + c) * inverse);
        });
      });
    }
  }

 private:
  int64_t row_of(int64_t lane) const {
    return tile_.start + tile_.first_row + lane % num_lanes_ / sizes_.heads_per_kv;
  }

  int64_t head_of(int64_t lane) const {
    const int64_t kv_head = first_kv_head_ + lane / num_lanes_;
    return kv_head * sizes_.heads_per_kv + lane % sizes_.heads_per_kv;
  }

  // What divides a lane's sums, once more, if its sink joins their total.
  float inverse_with_sink(int64_t lane, float top, float total) const {
    const float sink = batch_.sinks[head_of(lane)] * kLog2E, highest = std::max(top, sink);
    const float shrink = exp2_of(broadcast(top - highest))[0];
    return shrink / (total * shrink + exp2_of(broadcast(sink - highest))[0]);
  }

  // Queries as the products read them, padded with zeros.
  void load_queries() {
    const int64_t size = batch_.key_size;
    std::fill_n(zeros_, num_zeros(sizes_), 0.0f);
    for (int64_t lane = 0; lane < sizes_.job_heads * num_lanes_; ++lane) {
      const int64_t at = row_of(lane) * batch_.q_stride + head_of(lane) * size;
      float* q = q_ + lane * q_stride();
      std::fill_n(q, q_stride(), 0.0f);
      with_numbers(batch_.q, batch_.is_bf16_query, [&](const auto* from) {
        if (are_dots_) {
          std::memcpy(q, from + at, sizeof(*from) * size);
        } else {
          convert(from + at, size, q);
        }
      });
    }
    if (meets_keys_in_place_) turn_queries();
  }

  // Queries as keys meet them that are rows of matrix registers: those of a head are outputs.
  void turn_queries() {
    const void* lanes[kMatrixRows];
    for (int64_t head = 0; head < sizes_.job_heads; ++head) {
      std::fill_n(lanes, kMatrixRows, zeros_);
      for (int64_t i = 0; i < num_lanes_; ++i) lanes[i] = q_ + (head * num_lanes_ + i) * q_stride();
      Fetch nothing = {};
      lay_out_columns<uint16_t>(lanes, kMatrixRows, 0, batch_.key_size, turned_queries(head),
                                nothing);
    }
  }

  uint32_t* turned_queries(int64_t head) const {
    return words(turned_q_) + head * batch_.key_size / 2 * kMatrixRows;
  }

  void attend_part(int64_t part, const Sums& sums) {
    const int64_t num_lanes = sizes_.job_heads * num_lanes_;
    std::fill_n(sums.out, num_lanes * sizes_.value_size, 0.0f);
    std::fill_n(sums.top, num_lanes, kHidden);
    std::fill_n(sums.total, num_lanes * kWidth, 0.0f);
    int64_t start = (tile_.first_key / kPart + part) * kPart;
    const int64_t end = std::min(start + kPart, tile_.end_key);
    // A window begins inside of a piece: where pieces begin must not depend on the tile's rows.
    start = std::max(start, tile_.first_key / kPiece * kPiece);
    int64_t first_own = end;
    if (tile_.is_tree) first_own = std::min(end, first_draft() / kPiece * kPiece);
    find_keys(start, std::min(start + kPiece, first_own));
    for (int64_t first_key = start; first_key < first_own; first_key += kPiece) {
      const int64_t end_key = std::min(first_key + kPiece, first_own);
      keys_ = next_;
      find_keys(end_key, std::min(end_key + kPiece, first_own));
      const bool hides = first_key < tile_.first_common || tile_.end_common < end_key;
      if (hides) drop_unseen_values(first_key, end_key);
      // The rows before these keys are left out.
      const int64_t end_causal = std::min(tile_.end_row, tile_.num_causal);
      const int64_t first_row = std::max(std::min(first_key - tile_.context_len, end_causal),
                                         tile_.first_row);
      const int64_t first_lane = (first_row - tile_.first_row) * sizes_.heads_per_kv;
      const bool in_place = meets_keys_in_place_;
      attend_keys(first_lane, num_lanes_, sums, in_place, [&](int64_t lane, float* scores) {
        if (hides) hide(lane / sizes_.heads_per_kv, first_key, end_key, scores);
      });
    }
    if (!tile_.is_tree) return;
    for (int64_t row = 0; row < tile_.end_row - tile_.first_row; ++row) {
      attend_row(row, std::max(start, first_own), end, sums);
    }
  }

  // One row's keys [start, end): their indices are positions in the row's text.
  void attend_row(int64_t row, int64_t start, int64_t end, const Sums& sums) {
    const int64_t position = positions_[row], lane = row * sizes_.heads_per_kv;
    const int64_t lowest = position - reach(batch_, position) + 1;
    // A row whose result nobody wants may have fewer ancestors than its position says.
    end = std::min({end, position + 1, first_draft() + std::popcount(ancestors_[row])});
    for (int64_t first_key = start; first_key < end; first_key += kPiece) {
      const int64_t num_keys = std::min(first_key + kPiece, end) - first_key;
      find_text(row, first_key, num_keys);
      keys_ = next_;
      next_.num_keys = 0;
      const int64_t end_lane = lane + sizes_.heads_per_kv;
      attend_keys(lane, end_lane, sums, false, [&](int64_t, float* scores) {
        std::fill_n(scores, std::clamp<int64_t>(lowest - first_key, 0, num_keys), kHidden);
      });
    }
  }

  // Lanes [first, end) of every head meet the keys, where those lie if they are `in_place`; `hide`
  // changes the scores of a lane.
  template <class Hide>
  void attend_keys(int64_t first, int64_t end, const Sums& sums, bool in_place, const Hide& hide) {
    const int64_t head_bytes = sizes_.job_heads * number_bytes();
    const int64_t k_bytes = head_bytes * batch_.key_size, v_bytes = head_bytes * batch_.value_size;
    Fetch k = {next_.k, next_.k + next_.num_keys, k_bytes};
    Fetch v = {next_.v, next_.v + next_.num_keys, v_bytes};
    // Rows that were not fetched yet come faster in the order in which they lie than as they are
    // laid out, head by head. Matrix registers ask for 16 of them at once.
    if (!in_place) {
      for (int64_t key = 0; key < keys_.num_keys; ++key) touch(keys_.k[key], k_bytes);
      for (int64_t key = 0; key < keys_.num_keys; ++key) touch(keys_.v[key], v_bytes);
    }
    const int64_t most_lanes = are_dots_ ? kDotLanes : kGroupRows;
    const int64_t num_blocks = (end - first + most_lanes - 1) / most_lanes;
    for (int64_t head = 0; head < sizes_.job_heads; ++head) {
      TileProduct keys = {};
      if (!in_place) keys = lay_out_keys(head, k);
      TileProduct values = lay_out_values(head, v);
      for (int64_t block = 0; block < num_blocks; ++block) {  // of about equal size
        const int64_t from = first + (end - first) * block / num_blocks;
        const int64_t to = first + (end - first) * (block + 1) / num_blocks;
        shape(to - from, in_place);
        if (in_place) {
          score_in_place(head, from, to, k);
        } else {
          score(head, from, to, keys);
        }
        attend_block(head, from, to, sums, values, hide);
      }
    }
  }

  // Matrix registers get so many rows, where there are any.
  void shape([[maybe_unused]] int64_t num_rows, [[maybe_unused]] bool in_place) {
#if defined(__AMX_BF16__)
    if (!are_dots_ || (shaped_rows_ == num_rows && is_shaped_in_place_ == in_place)) return;
    shape_matrices(num_rows, in_place ? kMatrixRows : num_rows);
    shaped_rows_ = num_rows, is_shaped_in_place_ = in_place;
#endif
  }

  void score(int64_t head, int64_t from, int64_t to, TileProduct& keys) {
    keys.x = words(q_ + (head * num_lanes_ + from) * q_stride());
    keys.num_rows = to - from;
    multiply_.scores(keys);
  }

  // The same products, and the same sums, as `score` of keys that are laid out: keys are the rows.
  void score_in_place([[maybe_unused]] int64_t head, [[maybe_unused]] int64_t from,
                      [[maybe_unused]] int64_t to, [[maybe_unused]] Fetch& fetch) {
#if defined(__AMX_BF16__)
    alignas(64) float by_key[kPiece * kMatrixRows];
    const int64_t num_steps = batch_.key_size / (2 * kMatrixRows);
    const uint32_t* queries = turned_queries(head);
    for (int64_t first = 0; first < keys_.num_keys; first += kMatrixRows) {
      const char* rows = static_cast<const char*>(keys_.k[first]) + head * 2 * batch_.key_size;
      zero_matrix<5>();
      for (int64_t step = 0; step < num_steps; ++step) {
        load_matrix<6>(rows + step * kMatrixRowBytes, k_row_bytes_);
        load_matrix<7>(queries + step * kMatrixRows * kMatrixRows, kMatrixRowBytes);
        add_products_of_matrices<5, 6, 7>();
      }
      store_matrix<5>(by_key + first * kMatrixRows, kMatrixRowBytes);
      fetch.lines(kFetchedLines);
    }
    for (int64_t first = 0; first < keys_.num_keys; first += kMatrixRows) {
      Words scores[kMatrixRows];
#pragma GCC unroll 16
      for (int i = 0; i < kMatrixRows; ++i) {
        scores[i] = load<Words>(by_key + (first + i) * kMatrixRows);
      }
      detail::transpose(scores);
#pragma GCC unroll 16
      for (int i = 0; i < kMatrixRows; ++i) {
        if (i < from || i >= to) continue;
        store(scores_ + (i - from) * kPiece + first, (Floats)scores[i] * score_scale());
      }
      fetch.lines(kFetchedLines);
    }
#endif
  }

  // Lanes [from, to) of a head, whose scores are known.
  template <class Hide>
  void attend_block(int64_t head, int64_t from, int64_t to, const Sums& sums, TileProduct& values,
                    const Hide& hide) {
    float shrink[kMostLanes];
    const int64_t num_keys = keys_.num_keys, lane = head * num_lanes_ + from;
    values.out = sums.out + lane * values.out_stride;
    values.shrink = shrink;
    values.num_rows = to - from;
    if (batch_.soft_cap != 0) bend(scores_, to - from, round_up(num_keys, kWidth), batch_.soft_cap);
    for (int64_t i = 0; i < to - from; ++i) {
      float* scores = scores_ + i * kPiece;
      hide(from + i, scores);
      std::fill(scores + num_keys, scores + kPiece, kHidden);
    }
    const auto& weigh_lanes = are_dots_ ? weigh<true> : weigh<false>;
    weigh_lanes(scores_, to - from, sums.top + lane, sums.total + lane * kWidth, shrink);
    multiply_.values(values);
  }

  void find_keys(int64_t first_key, int64_t end_key) {
    for (int64_t key = first_key; key < end_key;) {
      put_key(key - first_key, key);
      const int64_t place = key - first_key, in_block = key % batch_.block_size;
      const int64_t count = std::min(batch_.block_size - in_block, end_key - key);
      for (int64_t i = 1; i < count; ++i) {
        next_.k[place + i] = static_cast<const char*>(next_.k[place]) + i * k_row_bytes_;
        next_.v[place + i] = static_cast<const char*>(next_.v[place]) + i * v_row_bytes_;
      }
      key += count;
    }
    fill_keys(std::max<int64_t>(0, end_key - first_key));
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
    next_.k[place] = static_cast<const char*>(batch_.k) + slot * k_row_bytes_ +
                     first_kv_head_ * number_bytes() * batch_.key_size;
    next_.v[place] = static_cast<const char*>(batch_.v) + slot * v_row_bytes_ +
                     first_kv_head_ * number_bytes() * batch_.value_size;
  }

  int64_t number_bytes() const { return batch_.is_bf16_cache ? 2 : 4; }

  // Zeros behind the last key.
  void fill_keys(int64_t num_keys) {
    next_.num_keys = num_keys;
    std::fill(next_.k + num_keys, next_.k + round_up(num_keys, kFilled), zeros_);
    std::fill(next_.v + num_keys, next_.v + round_up(num_keys, kFilled), zeros_);
  }

  int64_t first_draft() const { return tile_.first_draft(); }

  int64_t q_stride() const { return are_dots_ ? sizes_.key_size / 2 : sizes_.key_size; }

  // Scores are in base 2, or parts of the cap.
  float score_scale() const {
    return batch_.soft_cap != 0 ? batch_.scale / batch_.soft_cap : batch_.scale * kLog2E;
  }

  // scores = scale * q . k, of some lanes, and of what fills the last vector.
  TileProduct lay_out_keys(int64_t head, Fetch& fetch) {
    const int64_t size = batch_.key_size, num_keys = round_up(keys_.num_keys, kWidth);
    TileProduct product = {};
    with_numbers(batch_.k, batch_.is_bf16_cache, [&](const auto* cached) {
      using Number = std::remove_cvref_t<decltype(*cached)>;
      product.matrix_steps = lay_out_columns<Number>(keys_.k, num_keys, head * size, size,
                                                     words(key_matrix_), fetch);
      product.num_steps = num_steps<Number>(size);
    });
    product.matrix = words(key_matrix_);
    product.num_outputs = num_keys;
    product.x_stride = q_stride();
    product.out = scores_;
    product.out_stride = kPiece;
    product.scale = score_scale();
    return product;
  }

  // The sums of some lanes, shrunk, and the values by their weights.
  TileProduct lay_out_values(int64_t head, Fetch& fetch) {
    const int64_t size = batch_.value_size;
    TileProduct product = {};
    with_numbers(batch_.v, batch_.is_bf16_cache, [&](const auto* cached) {
      using Number = std::remove_cvref_t<decltype(*cached)>;
      const int64_t num_keys = round_up(keys_.num_keys, are_dots_ ? kFilledKeys : 1);
      product.num_steps =
          lay_out_rows<Number>(keys_.v, num_keys, head * size, size, words(value_matrix_), fetch);
    });
    product.matrix = words(value_matrix_);
    product.matrix_steps = product.num_steps;
    product.num_outputs = product.out_stride = sizes_.value_size;
    product.x = words(scores_);
    product.x_stride = kPiece;
    return product;
  }

  static uint32_t* words(float* numbers) { return reinterpret_cast<uint32_t*>(numbers); }

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
      if (!(bits >> (first_key + at - first_draft()) & 1)) scores[at] = kHidden;
    }
  }

  void drop_unseen_values(int64_t first_key, int64_t end_key) {
    for (int64_t key = std::max(first_key, first_draft()); key < end_key; ++key) {
      if (tile_.bits >> (key - first_draft()) & 1) continue;
      keys_.v[key - first_key] = zeros_;  // nobody may have written it
    }
  }

  const AttentionBatch batch_;
  const Tile tile_;
  const Sizes sizes_;
  const int64_t first_kv_head_, num_lanes_;  // lanes of one kv head
  const int64_t k_row_bytes_, v_row_bytes_;  // from one key of the cache to the next
  const bool are_dots_, meets_keys_in_place_;
  const MultiplyCalls& multiply_;
  float *sums_, *next_sums_;
  float* q_;                            // [L, C], of the cache's dtype in dot products
  float *key_matrix_, *value_matrix_;   // [K, C], [K, E]; a piece, laid out
  float* scores_;                       // [lanes, K], then weights as the products read them
  float* zeros_;                        // a row of keys or of values
  float* turned_q_;                     // queries that meet keys in place, by head
  int64_t* positions_;         // by the rows of the tile
  uint64_t* ancestors_;
  int32_t* blocks_;
  Piece keys_, next_;  // that are read, and that the cache should fetch
  [[maybe_unused]] int64_t shaped_rows_ = 0;  // of matrix registers
  [[maybe_unused]] bool is_shaped_in_place_ = false;
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

// At most kMaxUnits jobs, each a unit, as team.h describes it.
struct AttentionWork {
  AttentionBatch batch;
  int64_t tile_rows, job_heads;
  const Tile* tiles;
  int64_t num_tiles, first_job, num_jobs;
  float* partial;  // the sums of every job; null: a job has all parts, and stores results
  const std::atomic<int64_t>* current_version;
  int64_t version;

  int64_t num_units() const { return num_jobs; }
  size_t scratch_bytes() const { return TileWork::bytes(batch, sizes()); }
  Sizes sizes() const { return Sizes(batch, tile_rows, job_heads); }
  int64_t num_groups() const { return batch.num_kv_heads / job_heads; }

  void compute(int64_t unit, void* scratch) const {
    const int64_t job = first_job + unit;
    const Tile* behind = std::upper_bound(
        tiles + 1, tiles + num_tiles, job,
        [](int64_t number, const Tile& tile) { return number < tile.first_job; });
    const Tile tile = behind[-1];
    if (is_over()) return;
    const int64_t place = job - tile.first_job;
    TileWork* work = new (scratch) TileWork(batch, sizes(), tile, place % num_groups());
    work->copy_rows();
    if (is_over()) return;
    const int64_t part = place / num_groups();
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
    for (int64_t group = 0; group < all.num_groups(); ++group) {
      const TileWork* work = new (scratch) TileWork(all.batch, all.sizes(), *tile, group);
      const auto part_sums = [&](int64_t part) {
        const int64_t job = tile->first_job + part * all.num_groups() + group;
        return Sums(all.partial + job * work->sizes().sums_size, work->sizes());
      };
      for (int64_t part = 1; part < tile->num_parts; ++part) {
        work->fold(part_sums(0), part_sums(part));
      }
      work->store_results(part_sums(0));
    }
  }
}

void clear_padding(const AttentionBatch& batch) {
  const int64_t row_bytes = batch.num_heads * batch.value_size * (batch.is_bf16_out ? 2 : 4);
  const int64_t first = batch.query_start[batch.num_requests];
  std::memset(static_cast<char*>(batch.out) + first * row_bytes, 0,
              (batch.num_rows - first) * row_bytes);
}

}  // namespace

void attend(Team* team, const AttentionBatch& batch, AttentionMemory& memory) {
  const int64_t version = memory.version.fetch_add(1) + 1;
  std::atomic_thread_fence(std::memory_order_release);
  clear_padding(batch);
  const int64_t heads_per_kv = batch.num_heads / batch.num_kv_heads;
  int64_t most_rows = 1;
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    most_rows = std::max<int64_t>(most_rows, batch.query_start[b + 1] - batch.query_start[b]);
  }
  const int64_t tile_rows = std::clamp<int64_t>(kMaxLanes / heads_per_kv, 1, most_rows);
  Tile* tiles = memory.tiles.reserve<Tile>(batch.num_rows / tile_rows + batch.num_requests);
  int64_t num_tiles = 0, num_parts = 0, work = 0;
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    const int64_t num_rows = batch.query_start[b + 1] - batch.query_start[b];
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const Tile& tile = tiles[num_tiles++] =
          make_tile(batch, b, row, std::min(row + tile_rows, num_rows));
      num_parts += tile.num_parts;
      const int64_t num_keys = tile.end_key - tile.first_key;
      const int64_t size = (batch.key_size + batch.value_size) / 2;
      work += (tile.end_row - row) * batch.num_heads * size * num_keys;
    }
  }
  const Turn turn(work < kMinShared ? nullptr : team);
  // Jobs that are too few to be even among the threads become parts; many have several heads.
  const int64_t threads = num_threads(turn.team());
  const bool is_split =
      num_parts > num_tiles && num_tiles * batch.num_kv_heads < kEvenJobs * threads;
  const int64_t num_pieces = is_split ? num_parts : num_tiles;  // of work, each for all heads
  int64_t job_heads = 1;
  while (batch.num_kv_heads % (2 * job_heads) == 0 &&
         2 * job_heads * tile_rows * heads_per_kv <= kMaxLanes &&
         num_pieces * batch.num_kv_heads / (2 * job_heads) >= kFewJobs * threads) {
    job_heads *= 2;
  }
  int64_t num_jobs = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    tiles[i].first_job = num_jobs;
    num_jobs += batch.num_kv_heads / job_heads * (is_split ? tiles[i].num_parts : 1);
  }
  const Sizes sizes(batch, tile_rows, job_heads);
  float* partial = is_split ? memory.partial.reserve<float>(num_jobs * sizes.sums_size) : nullptr;
  AttentionWork all = {batch, tile_rows, job_heads, tiles,           num_tiles,
                       0,     0,         partial,   &memory.version, version};
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
