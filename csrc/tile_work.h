// One thread's work on a tile of attention, as attention.cpp describes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention_softmax.h"
#include "attention_tiles.h"
#include "simd.h"
#include "tile_keys.h"
#include "tile_products.h"
#include "vector_math.h"

namespace outdraft {

// Lanes that meet a piece together at most: of dot products, and of any.
constexpr int64_t kDotLanes = kHasMatrixRegisters ? kMatrixRows : kGroupRows;
constexpr int64_t kMostLanes = std::max<int64_t>(kDotLanes, kGroupRows);
constexpr int64_t kGroupKeys = kGroupVectors * kWidth;  // that meet some lanes at once
constexpr int64_t kKeysAhead = 16;  // that the cache fetches before they are read in order
// The next piece's; twice for a register of keys in place.
[[maybe_unused]] constexpr int64_t kFetchedLines = 16;

// The products with keys and with values.
struct MultiplyCalls {
  void (*scores)(const TileProduct&);
  void (*values)(const TileProduct&);
};
template <Products kProducts>
inline constexpr MultiplyCalls kMultiply = {multiply_rows<kProducts, Start::kZero>,
                                            multiply_rows<kProducts, Start::kShrunk>};
#if defined(__AMX_BF16__)
template <>
inline constexpr MultiplyCalls kMultiply<Products::kDots> = {
    multiply_rows_in_matrices<Start::kZero>, multiply_rows_in_matrices<Start::kShrunk>};
#endif

// One thread's work on one tile for some kv heads: their lanes are one head's behind the other's.
// Keys of all heads lie side by side, so the cache fetches a piece row by row for all of them.
// It lies in the scratch memory of a unit.
class TileWork {
 public:
  static size_t bytes(const AttentionBatch& batch, const Sizes& sizes) {
    const int64_t floats = 2 * sizes.sums_size + num_scores(sizes) +
                           (sizes.max_lanes + kPiece) * sizes.key_size +
                           kPiece * sizes.value_size + num_zeros(sizes) + turned_size(sizes);
    return round_up(sizeof(TileWork), 64) + round_up(4 * floats, 64) +
           TileKeys::bytes(batch, sizes);
  }

  static int64_t num_zeros(const Sizes& sizes) {
    return sizes.job_heads * std::max(sizes.key_size, sizes.value_size);
  }

  static int64_t num_scores(const Sizes& sizes) {
    return std::max(kMostLanes, std::min(sizes.max_lanes, sizes.job_heads * kInOrderLanes)) * kPiece;
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
        are_dots_(kHasBf16Dot && batch.is_bf16_cache && batch.is_bf16_query),
        meets_keys_in_place_(kHasMatrixRegisters && are_dots_ && num_lanes_ <= kMatrixRows &&
                             batch.key_size % (2 * kMatrixRows) == 0 &&
                             batch.block_size % kMatrixRows == 0),
        reads_in_order_(reads_in_order(batch, num_lanes_)),
        places_(batch_, tile_, first_kv_head_),
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
    zeros_ = scores_ + num_scores(sizes_);
    turned_q_ = zeros_ + num_zeros(sizes_);
    const int64_t num_floats = turned_q_ + turned_size(sizes_) - sums_;
    places_.put_into(memory + round_up(4 * num_floats, 64), zeros_, sizes_.tile_rows);
  }

  void copy_rows() { places_.copy_rows(); }

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
      const float shrink = power_of(sums.top[lane] - highest);
      const float next_shrink = power_of(next.top[lane] - highest);
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
    const float shrink = power_of(top - highest);
    return shrink / (total * shrink + power_of(sink - highest));
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
    const Parts parts = parts_of(batch_);
    const int64_t number = parts.of(tile_.first_key) + part;
    int64_t start = parts.start(number);
    const int64_t end = std::min(parts.start(number + 1), tile_.end_key);
    // A window begins inside of a piece: where pieces begin must not depend on the tile's rows.
    start = std::max(start, tile_.first_key / kPiece * kPiece);
    int64_t first_own = end;
    if (tile_.is_tree) first_own = std::min(end, first_draft() / kPiece * kPiece);
    places_.find(start, std::min(start + kPiece, first_own), next_);
    for (int64_t first_key = start; first_key < first_own; first_key += kPiece) {
      const int64_t end_key = std::min(first_key + kPiece, first_own);
      keys_ = next_;
      places_.find(end_key, std::min(end_key + kPiece, first_own), next_);
      const bool hides = first_key < tile_.first_common || tile_.end_common < end_key;
      if (hides) places_.drop_unseen_values(first_key, end_key, keys_);
      // The rows before these keys are left out.
      const int64_t end_causal = std::min(tile_.end_row, tile_.num_causal);
      const int64_t first_row = std::max(std::min(first_key - tile_.context_len, end_causal),
                                         tile_.first_row);
      const int64_t first_lane = (first_row - tile_.first_row) * sizes_.heads_per_kv;
      const bool in_place = meets_keys_in_place_;
      attend_keys(first_lane, num_lanes_, sums, in_place, [&](int64_t lane, float* scores) {
        if (hides) places_.hide(lane / sizes_.heads_per_kv, first_key, end_key, scores);
      });
    }
    if (!tile_.is_tree) return;
    for (int64_t row = 0; row < tile_.end_row - tile_.first_row; ++row) {
      attend_row(row, std::max(start, first_own), end, sums);
    }
  }

  // One row's keys [start, end): their indices are positions in the row's text.
  void attend_row(int64_t row, int64_t start, int64_t end, const Sums& sums) {
    const int64_t position = places_.position(row), lane = row * sizes_.heads_per_kv;
    const int64_t lowest = position - reach(batch_, position) + 1;
    // A row whose result nobody wants may have fewer ancestors than its position says.
    end = std::min({end, position + 1, first_draft() + places_.num_ancestors(row)});
    for (int64_t first_key = start; first_key < end; first_key += kPiece) {
      const int64_t num_keys = std::min(first_key + kPiece, end) - first_key;
      places_.find_text(row, first_key, num_keys, next_);
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
    if (reads_in_order_) return attend_in_order(first, end, sums, hide);
    const int64_t head_bytes = sizes_.job_heads * places_.number_bytes();
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
    for (int64_t head = 0; head < sizes_.job_heads; ++head) {
      TileProduct keys = {};
      if (!in_place) keys = lay_out_keys(head, 0, round_up(keys_.num_keys, kWidth), k);
      TileProduct values = lay_out_values(head, v);
      for_blocks(first, end, most_lanes, [&](int64_t from, int64_t to) {
        shape(to - from, in_place);
        if (in_place) {
          score_in_place(head, from, to, k);
        } else {
          score(head, from, to, keys, scores_);
        }
        attend_block(head, from, to, sums, values, hide);
      });
    }
  }

  // Blocks of lanes of about equal size, at most so many.
  template <class Meet>
  static void for_blocks(int64_t first, int64_t end, int64_t most_lanes, const Meet& meet) {
    const int64_t num_blocks = (end - first + most_lanes - 1) / most_lanes;
    for (int64_t block = 0; block < num_blocks; ++block) {
      meet(first + (end - first) * block / num_blocks,
           first + (end - first) * (block + 1) / num_blocks);
    }
  }

  // As attend_keys, with the same sums, for few lanes, where memory is what takes time: a few keys
  // of all heads, then the next ones, and values where they lie. So little has to stay in the caches.
  template <class Hide>
  void attend_in_order(int64_t first, int64_t end, const Sums& sums, const Hide& hide) {
    const int64_t num_keys = keys_.num_keys, num_ahead = std::min(kKeysAhead, num_keys);
    const int64_t head_bytes = sizes_.job_heads * places_.number_bytes();
    const int64_t k_bytes = head_bytes * batch_.key_size, v_bytes = head_bytes * batch_.value_size;
    const Fetch next_k = {next_.k, next_.k + std::min(kKeysAhead, next_.num_keys), k_bytes};
    const Fetch v = {keys_.v, keys_.v + num_keys, v_bytes, 0, &next_k};
    Fetch fetch = {keys_.k + num_ahead, keys_.k + num_keys, k_bytes, 0, &v};
    const auto scores_of = [&](int64_t head, int64_t lane) {
      return scores_ + (head * num_lanes_ + lane) * kPiece;
    };
    for (int64_t key = 0; key < num_keys; key += kGroupKeys) {
      const int64_t count = round_up(std::min(kGroupKeys, num_keys - key), kWidth);
      for (int64_t head = 0; head < sizes_.job_heads; ++head) {
        TileProduct keys = lay_out_keys(head, key, count, fetch);
        for_blocks(first, end, kGroupRows, [&](int64_t from, int64_t to) {
          score(head, from, to, keys, scores_of(head, from) + key);
        });
      }
    }
    float shrink[kMaxLanes];
    for (int64_t head = 0; head < sizes_.job_heads; ++head) {
      for_blocks(first, end, kGroupRows, [&](int64_t from, int64_t to) {
        weigh_lanes(head, from, to, sums, scores_of(head, from), shrink + head * num_lanes_ + from,
                    hide);
      });
    }
    for (int64_t key = 0; key < num_keys; key += kGroupKeys) {
      for (int64_t head = 0; head < sizes_.job_heads; ++head) {
        for_blocks(first, end, kGroupRows, [&](int64_t from, int64_t to) {
          const int64_t lane = head * num_lanes_ + from;
          TileProduct values = {};
          values.rows = keys_.v + key;
          values.first_number = head * batch_.value_size;
          values.fetch = &fetch;
          values.num_steps = std::min(kGroupKeys, num_keys - key);
          values.num_outputs = values.out_stride = sizes_.value_size;
          values.num_rows = to - from;
          values.x = words(scores_of(head, from) + key);
          values.x_stride = kPiece;
          values.out = sums.out + lane * sizes_.value_size;
          values.shrink = shrink + lane;
          multiply_in_place(values);
        });
      }
      std::fill_n(shrink, sizes_.job_heads * num_lanes_, 1.0f);  // the sums have shrunk
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

  void score(int64_t head, int64_t from, int64_t to, TileProduct& keys, float* scores) {
    keys.out = scores;
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
        load_matrix<6>(rows + step * kMatrixRowBytes, places_.k_row_bytes());
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
    weigh_lanes(head, from, to, sums, scores_, shrink, hide);
    values.out = sums.out + (head * num_lanes_ + from) * values.out_stride;
    values.shrink = shrink;
    values.num_rows = to - from;
    multiply_.values(values);
  }

  // Their scores become weights.
  template <class Hide>
  void weigh_lanes(int64_t head, int64_t from, int64_t to, const Sums& sums, float* scores,
                   float* shrink, const Hide& hide) {
    const int64_t num_keys = keys_.num_keys, lane = head * num_lanes_ + from;
    if (batch_.soft_cap != 0) bend(scores, to - from, round_up(num_keys, kWidth), batch_.soft_cap);
    for (int64_t i = 0; i < to - from; ++i) {
      float* of_lane = scores + i * kPiece;
      hide(from + i, of_lane);
      std::fill(of_lane + num_keys, of_lane + kPiece, kHidden);
    }
    const auto& weigh_them = are_dots_ ? weigh<true> : weigh<false>;
    weigh_them(scores, to - from, sums.top + lane, sums.total + lane * kWidth, shrink);
  }

  int64_t first_draft() const { return tile_.first_draft(); }

  int64_t q_stride() const { return are_dots_ ? sizes_.key_size / 2 : sizes_.key_size; }

  // Scores are in base 2, or parts of the cap.
  float score_scale() const {
    return batch_.soft_cap != 0 ? batch_.scale / batch_.soft_cap : batch_.scale * kLog2E;
  }

  // scores = scale * q . k, of some lanes, for keys [first, first + num_keys): what fills the last
  // vector, too.
  TileProduct lay_out_keys(int64_t head, int64_t first, int64_t num_keys, Fetch& fetch) {
    const int64_t size = batch_.key_size;
    TileProduct product = {};
    with_numbers(batch_.k, batch_.is_bf16_cache, [&](const auto* cached) {
      using Number = std::remove_cvref_t<decltype(*cached)>;
      product.matrix_steps = lay_out_columns<Number>(keys_.k + first, num_keys, head * size,
                                                     size, words(key_matrix_), fetch);
      product.num_steps = num_steps<Number>(size);
    });
    product.matrix = words(key_matrix_);
    product.num_outputs = num_keys;
    product.x_stride = q_stride();
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

  const AttentionBatch batch_;
  const Tile tile_;
  const Sizes sizes_;
  const int64_t first_kv_head_, num_lanes_;  // lanes of one kv head
  const bool are_dots_, meets_keys_in_place_, reads_in_order_;
  TileKeys places_;
  const MultiplyCalls& multiply_;
  float *sums_, *next_sums_;
  float* q_;                            // [L, C], of the cache's dtype in dot products
  float *key_matrix_, *value_matrix_;   // [K, C], [K, E]; a piece, laid out
  float* scores_;                       // [lanes, K], then weights as the products read them
  float* zeros_;                        // a row of keys or of values
  float* turned_q_;                     // queries that meet keys in place, by head
  Piece keys_, next_;  // that are read, and that the cache should fetch
  [[maybe_unused]] int64_t shaped_rows_ = 0;  // of matrix registers
  [[maybe_unused]] bool is_shaped_in_place_ = false;
};

}  // namespace outdraft
