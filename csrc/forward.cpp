// A whole pass of a decoder: see forward.h.
//
// Residuals and all sums are float32. In a bfloat16 decoder numbers are rounded in these places
// only: inputs of products, queries, cached keys and values, and what is returned. Rows are
// computed in blocks, but for attention, so that what lies between two products stays in the cache
// of the processor; threads share its rows. Every row is computed as if it were alone.

#include "forward.h"

#include <algorithm>
#include <limits>

#include "export.h"
#include "layer_heads.h"
#include "parts.h"
#include "row_steps.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// From row to row of a product: rows whose distance is a power of two share few lines of a cache.
constexpr int64_t stride_of(int64_t num_outputs) { return num_outputs + 16; }

// `Number`: float, or uint16_t for bfloat16.
template <class Number>
class DecoderOf final : public Decoder {
 public:
  DecoderOf(const DecoderSpec& spec, const DecoderCache* caches, int64_t block_size)
      : Decoder(spec),
        layers_(new DecoderLayer[spec.num_layers]),
        caches_(new DecoderCache[spec.num_layers]),
        heads_size_(spec.num_heads * spec.head_size),
        kv_size_(spec.num_kv_heads * spec.head_size),
        kept_(spec.team),
        normed_(spec.team),
        context_(spec.team),
        attention_(spec.team) {
    std::copy_n(spec.layers, spec.num_layers, layers_);
    std::copy_n(caches, spec.num_layers, caches_);
    batch_ = {};
    batch_.num_heads = spec.num_heads;
    batch_.num_kv_heads = spec.num_kv_heads;
    batch_.key_size = batch_.value_size = spec.head_size;
    batch_.chunk = kNoLimit;
    batch_.block_size = block_size;
    batch_.q_stride = heads_size_;
    batch_.scale = spec.scale;
    batch_.is_bf16_query = batch_.is_bf16_out = batch_.is_bf16_cache = kDtype == Dtype::kBfloat16;
  }

  ~DecoderOf() override {
    wait_until_idle(spec_.team);
    delete[] caches_;
    delete[] layers_;
  }

  bool forward(const DecoderRows& rows, const void* states, const int64_t* taps, int64_t num_taps,
               void* tapped, void* out) override {
    if (!is_valid(rows)) return false;
    keep(rows);
    const int64_t num_rows = rows.num_rows;
    const auto* states_TD = static_cast<const Number*>(states);
    if (is_embedded() && !embed(rows)) return false;
    for_blocks(num_rows, [&](int64_t first, int64_t count) {
      enter(rows, states_TD, first, count);
    });
    tap(0, num_rows, taps, num_taps, tapped);
    for_blocks(num_rows, [&](int64_t first, int64_t count) {
      prepare(rows, states_TD, first, count);
      read_keys(0, first, count);
    });
    for (int64_t i = 0; i < spec_.num_layers; ++i) {
      batch_.k = caches_[i].k;
      batch_.v = caches_[i].v;
      batch_.window = static_cast<int32_t>(layers_[i].window);
      const bool is_last = i + 1 == spec_.num_layers;
      // Behind the keys of the last layer nobody reads the other rows.
      if (is_last && rows.num_wanted < num_rows) leave_wanted(rows);
      attend(spec_.team, batch_, attention_);
      bool is_summed = true;
      for_blocks(batch_.num_rows, [&](int64_t first, int64_t count) {
        is_summed = is_summed && feed_forward(layers_[i], first, count);
        if (!is_summed) return;
        const float* next_norm = is_last ? spec_.final_norm : layers_[i + 1].input_norm;
        Number* next = is_last ? static_cast<Number*>(out) + first * spec_.hidden : x_;
        add_and_normalize(residual_ + first * spec_.hidden, y_, next_norm, count, next,
                          is_last ? spec_.hidden : kept_size(spec_.hidden));
        if (!is_last) read_keys(i + 1, first, count);
      });
      if (!is_summed) return false;
      tap(i + 1, num_rows, taps, num_taps, tapped);
    }
    return true;
  }

  bool write_context(const LinearWeights& products, const void* features,
                     const int64_t* positions, const int64_t* slots, int64_t num_rows) override {
    for (int64_t t = 0; t < num_rows; ++t) {
      if (positions[t] < 0 || positions[t] >= spec_.num_positions) return false;
    }
    const int64_t* kept_positions = nullptr;  // a late helper may read them
    const int64_t* kept_slots = nullptr;
    const auto lay_out_context = [&](Parts& parts) {
      kept_positions = parts.copy(positions, num_rows);
      kept_slots = parts.copy(slots, num_rows);
    };
    Parts parts;
    lay_out_context(parts);
    parts = {context_.reserve<char>(parts.num_bytes), 0};
    lay_out_context(parts);
    const auto* features_TD = static_cast<const Number*>(features);
    for_blocks(num_rows, [&](int64_t first, int64_t count) {
      multiply_heads(products, rows_of(products, features_TD + first * spec_.hidden), count,
                     places(0, kept_positions + first, kept_slots + first, 0, nullptr));
    });
    return true;
  }

  void draft_logits(const void* states, int64_t num_rows, float* out) override {
    if (draft_tokens.are_all()) return logits(states, num_rows, out);
    const Rows to = {out, Dtype::kFloat32, num_drafted()};
    const ConstRows from = rows_of(*spec_.head, normed(states, num_rows));
    linear_tiles(spec_.team, *spec_.head, draft_tokens.tiles(), from, to, num_rows);
  }

  void logits(const void* states, int64_t num_rows, float* out) override {
    const Number* states_RD = normed(states, num_rows);
    multiply(*spec_.head, rows_of(*spec_.head, states_RD), out, num_rows, columns());
    const int64_t num_own = spec_.head->num_outputs, num_missing = columns() - num_own;
    for (int64_t r = 0; num_missing > 0 && r < num_rows; ++r) {
      std::fill_n(out + r * columns() + num_own, num_missing, kMasked);
    }
  }

 private:
  // States as the head reads them.
  const Number* normed(const void* states, int64_t num_rows) {
    const auto* states_RD = static_cast<const Number*>(states);
    if (spec_.head_norm == nullptr) return states_RD;
    Number* out = normed_.template reserve<Number>(num_rows * spec_.hidden);
    normalize_rows(states_RD, spec_.head_norm, num_rows, out, spec_.hidden);
    return out;
  }

  static constexpr Dtype kDtype = sizeof(Number) == 4 ? Dtype::kFloat32 : Dtype::kBfloat16;

  template <class Call>
  void for_blocks(int64_t num_rows, const Call& call) const {
    const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    for (int64_t block = 0; block < num_blocks; ++block) {  // of about equal size: all read weights
      const int64_t first = num_rows * block / num_blocks;
      call(first, num_rows * (block + 1) / num_blocks - first);
    }
  }

  bool is_valid(const DecoderRows& rows) const {
    for (int64_t t = 0; t < rows.num_rows; ++t) {
      const int64_t token = rows.token_ids[t], position = rows.positions[t];
      if (token < 0 || token >= spec_.num_tokens) return false;
      if (position < 0 || position >= spec_.num_positions) return false;
    }
    return true;
  }

  // Memory for the rows, and a copy of what attention reads of them: late helpers may read it.
  void keep(const DecoderRows& rows) {
    attention_.version.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_release);
    batch_.num_rows = rows.num_rows;
    batch_.num_requests = rows.num_requests;
    batch_.table_stride = rows.table_stride;
    Parts parts;
    lay_out(rows, parts);
    parts = {kept_.reserve<char>(parts.num_bytes), 0};
    lay_out(rows, parts);
  }

  void lay_out(const DecoderRows& rows, Parts& parts) {
    const int64_t num_rows = rows.num_rows, block = std::min(num_rows, kBlockRows);
    batch_.positions = positions_ = parts.copy(rows.positions, num_rows);
    slots_ = parts.copy(rows.slots, num_rows);
    batch_.ancestors = ancestors_ = parts.copy(rows.ancestors, num_rows);
    batch_.query_start = query_start_ = parts.copy(rows.query_start, rows.num_requests + 1);
    batch_.context_lens = context_lens_ = parts.copy(rows.context_lens, rows.num_requests);
    batch_.num_causal = num_causal_ = parts.copy(rows.num_causal, rows.num_requests);
    batch_.block_table = parts.copy(rows.block_table, rows.num_requests * rows.table_stride);
    batch_.q = q_ = parts.take<Number>(num_rows * heads_size_);
    batch_.out = attended_ = parts.take<Number>(num_rows * heads_size_);
    residual_ = parts.take<float>(num_rows * spec_.hidden);
    x_ = parts.take<Number>(block * kept_size(2 * spec_.hidden));
    gated_ = parts.take<Number>(block * kept_size(spec_.intermediate));
    y_ = parts.take<float>(block * stride_of(spec_.hidden));
    if (!is_embedded()) return;
    embedded_ = parts.take<Number>(num_rows * spec_.hidden);
    part_ = parts.take<Number>(block * spec_.hidden);
  }

  // From now on the rows are the wanted ones: what they hold moves to the front. The causal rows
  // that a request loses belong to its context.
  void leave_wanted(const DecoderRows& rows) {
    attention_.version.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_release);
    batch_.num_rows = rows.num_wanted;
    int64_t row = 0;
    for (int64_t b = 0; b < rows.num_requests; ++b) {
      const int64_t first = row, end = rows.query_start[b + 1];
      while (row < rows.num_wanted && rows.wanted[row] < end) ++row;
      const int64_t num_lost = end - rows.query_start[b] - (row - first);
      const int32_t num_read = std::min<int32_t>(num_lost, rows.num_causal[b]);
      query_start_[b + 1] = static_cast<int32_t>(row);
      context_lens_[b] += num_read;
      num_causal_[b] -= num_read;
    }
    for (int64_t to = 0; to < rows.num_wanted; ++to) {
      const int64_t from = rows.wanted[to];
      positions_[to] = rows.positions[from];
      ancestors_[to] = rows.ancestors[from];
      if (from == to) continue;
      std::copy_n(q_ + from * heads_size_, heads_size_, q_ + to * heads_size_);
      std::copy_n(residual_ + from * spec_.hidden, spec_.hidden, residual_ + to * spec_.hidden);
    }
  }

  // Whether vectors of tokens do not lie in one table of numbers.
  bool is_embedded() const { return is_spread() || spec_.embedding == nullptr; }

  // The vectors of the rows' tokens.
  bool embed(const DecoderRows& rows) {
    const int64_t size = spec_.hidden;
    for (int64_t t = 0; t < rows.num_rows; ++t) {
      const int64_t own = rows.token_ids[t] - spec_.first_token;
      Number* to = embedded_ + t * size;
      if (own < 0 || own >= spec_.num_own_tokens) {
        std::fill_n(to, size, Number{});
      } else if (spec_.embedding == nullptr) {
        read_rows(*spec_.embedding_codes, &own, 1, kDtype, to);
      } else {
        std::copy_n(static_cast<const Number*>(spec_.embedding) + own * size, size, to);
      }
    }
    return !is_spread() || spec_.ranks->sum(embedded_, rows.num_rows * size, embedded_);
  }

  const Number* embedded(const DecoderRows& rows, int64_t row) const {
    if (is_embedded()) return embedded_ + row * spec_.hidden;
    return static_cast<const Number*>(spec_.embedding) + rows.token_ids[row] * spec_.hidden;
  }

  static int64_t kept_size(int64_t num_inputs) { return kept_stride(num_inputs, kDtype); }

  // What a product reads: rows one behind the other, or those of a block.
  ConstRows rows_of(const LinearWeights& weights, const Number* x) const {
    return {x, kDtype, weights.num_inputs};
  }
  ConstRows kept_rows(const LinearWeights& weights, const Number* x) const {
    return {x, kDtype, kept_size(weights.num_inputs), true};
  }

  void multiply(const LinearWeights& weights, ConstRows x, float* y, int64_t count) const {
    multiply(weights, x, y, count, stride_of(weights.num_outputs));
  }

  void multiply(const LinearWeights& weights, ConstRows x, float* y, int64_t count,
                int64_t stride) const {
    linear(spec_.team, weights, x, {y, Dtype::kFloat32, stride}, count);
  }

  template <class From>
  void normalize_rows(const From* x, const float* weight, int64_t count, Number* to,
                      int64_t to_stride) const {
    add_and_normalize(const_cast<From*>(x), nullptr, weight, count, to, to_stride);
  }

  template <class From>
  void add_and_normalize(From* residual, const float* y, const float* weight, int64_t count,
                         Number* to, int64_t to_stride) const {
    const int64_t size = spec_.hidden;
    run_rows(spec_.team,
             AddAndNormalize<From, Number>{residual, y, y_stride(), weight, size, spec_.eps, to,
                                           to_stride},
             count, size);
  }

  // [rows, 2 D] in x: tokens and states side by side, each normed.
  void pair(const DecoderRows& rows, const Number* states, int64_t first, int64_t count) {
    const int64_t size = spec_.hidden;
    for (int64_t r = 0; r < count; ++r) {
      Number* to = x_ + r * kept_size(2 * size);
      if (spec_.leaves_out_first && rows.positions[first + r] == 0) {
        std::fill_n(to, size, Number{});
      } else {
        const Number* token = embedded(rows, first + r);
        normalize(token, spec_.token_norm, size, spec_.eps, to);
      }
      normalize(states + (first + r) * size, spec_.state_norm, size, spec_.eps, to + size);
    }
  }

  // What the layers add to.
  void enter(const DecoderRows& rows, const Number* states, int64_t first, int64_t count) {
    const int64_t size = spec_.hidden;
    float* residual = residual_ + first * size;
    if (spec_.fc != nullptr) {
      pair(rows, states, first, count);
      return multiply(*spec_.fc, kept_rows(*spec_.fc, x_), residual, count, size);
    }
    for (int64_t r = 0; r < count; ++r) {
      if (!spec_.reads_states) {
        convert(embedded(rows, first + r), size, residual + r * size);
      } else {
        const float* norm = spec_.adds_to_normed ? spec_.state_norm : nullptr;
        normalize(states + (first + r) * size, norm, size, spec_.eps, residual + r * size);
      }
    }
  }

  // What layer 0 reads, in x.
  void prepare(const DecoderRows& rows, const Number* states, int64_t first, int64_t count) {
    if (spec_.reads_states && spec_.fc == nullptr) {
      pair(rows, states, first, count);
    } else {
      normalize_rows(residual_ + first * spec_.hidden, layers_[0].input_norm, count, x_,
                     kept_size(spec_.hidden));
    }
  }

  HeadPlaces<Number> places(int64_t index, const int64_t* positions, const int64_t* slots,
                            int64_t num_q, Number* q) const {
    return {layers_ + index, caches_ + index,     spec_.cos_sin, positions,
            slots,           spec_.num_positions, num_q,         kv_size_,
            spec_.head_size, spec_.eps,           q};
  }

  void multiply_heads(const LinearWeights& weights, ConstRows x, int64_t count,
                      const HeadPlaces<Number>& places) const {
    run_products(spec_.team, weights, x, count,
                 [&](MultiplyTile kernel, const Inputs& inputs, int64_t first, int64_t block) {
                   HeadPlaces<Number> own = places;
                   own.positions += first;
                   own.slots += first;
                   own.q += first * own.num_q;
                   return HeadProducts<Number>{kernel, weights, inputs, block, own};
                 });
  }

  // From the normed input of a layer, in x, to what its attention reads.
  void read_keys(int64_t index, int64_t first, int64_t count) {
    const LinearWeights& qkv = *layers_[index].qkv;
    multiply_heads(qkv, kept_rows(qkv, x_), count,
                   places(index, batch_.positions + first, slots_ + first, heads_size_,
                          q_ + first * heads_size_));
  }

  // From row to row of y; sums over ranks lie one behind the other.
  int64_t y_stride() const { return is_spread() ? spec_.hidden : stride_of(spec_.hidden); }

  // The product, in y. Where a network is spread over ranks each has a part of the inputs, and
  // rounds its part of the sum to the network's dtype.
  bool multiply_all(const LinearWeights& weights, const float* bias, ConstRows x, int64_t count) {
    if (!is_spread()) {
      multiply(weights, x, y_, count);
      return true;
    }
    const int64_t size = spec_.hidden;
    linear(spec_.team, weights, x, {part_, kDtype, size}, count);
    if (!spec_.ranks->sum(part_, count * size, y_)) return false;
    for (int64_t r = 0; bias != nullptr && r < count; ++r) {
      for (int64_t i = 0; i < size; ++i) y_[r * size + i] += bias[i];
    }
    return true;
  }

  // From attention to what the residual stream gets, in y.
  bool feed_forward(const DecoderLayer& layer, int64_t first, int64_t count) {
    const ConstRows attended = rows_of(*layer.o, attended_ + first * heads_size_);
    if (!multiply_all(*layer.o, layer.o_bias, attended, count)) return false;
    add_and_normalize(residual_ + first * spec_.hidden, y_, layer.post_norm, count, x_,
                      kept_size(spec_.hidden));
    linear_gated(spec_.team, *layer.gate_up, kept_rows(*layer.gate_up, x_),
                 {gated_, kDtype, kept_size(spec_.intermediate)}, count);
    return multiply_all(*layer.down, layer.down_bias, kept_rows(*layer.down, gated_), count);
  }

  void tap(int64_t num_layers, int64_t num_rows, const int64_t* taps, int64_t num_taps,
           void* tapped) const {
    const int64_t size = spec_.hidden;
    for (int64_t k = 0; k < num_taps; ++k) {
      if (taps[k] != num_layers) continue;
      for (int64_t t = 0; t < num_rows; ++t) {
        Number* to = static_cast<Number*>(tapped) + (t * num_taps + k) * size;
        convert(residual_ + t * size, size, to);
      }
    }
  }

  DecoderLayer* layers_;
  DecoderCache* caches_;
  const int64_t heads_size_, kv_size_;
  KeptMemory kept_, normed_, context_;
  AttentionMemory attention_;
  AttentionBatch batch_;
  int64_t *positions_, *slots_, *ancestors_;            // [T]
  int32_t *query_start_, *context_lens_, *num_causal_;  // by requests
  float* residual_;                 // of all rows: [T, D]
  Number *q_, *attended_;           // [T, H, C]
  Number *x_, *gated_;              // of a block: [rows, D or 2 D], [rows, I]
  float* y_;                        // of a block: [rows, D]
  Number* embedded_;                // of all rows, if is_embedded: [T, D]
  Number* part_;                    // of a block, of a sum over ranks: [rows, D]
};

}  // namespace
}  // namespace outdraft

using outdraft::Decoder;
using outdraft::DecoderRows;

// `spec->layers` and `caches` are copied.
OUTDRAFT_EXPORT Decoder* decoder_create(const outdraft::DecoderSpec* spec,
                                        const outdraft::DecoderCache* caches, int64_t block_size) {
  using namespace outdraft;
  if (spec->dtype == Dtype::kFloat32) return new DecoderOf<float>(*spec, caches, block_size);
  return new DecoderOf<uint16_t>(*spec, caches, block_size);
}

OUTDRAFT_EXPORT void decoder_destroy(Decoder* decoder) { delete decoder; }

// 1; 0: as `forward`.
OUTDRAFT_EXPORT int64_t decoder_forward(Decoder* decoder, const DecoderRows* rows,
                                        const void* states, const int64_t* taps, int64_t num_taps,
                                        void* tapped, void* out) {
  return decoder->forward(*rows, states, taps, num_taps, tapped, out);
}

// 1; 0: as `write_context`.
OUTDRAFT_EXPORT int64_t decoder_write_context(Decoder* decoder,
                                              const outdraft::LinearWeights* products,
                                              const void* features, const int64_t* positions,
                                              const int64_t* slots, int64_t num_rows) {
  return decoder->write_context(*products, features, positions, slots, num_rows);
}

OUTDRAFT_EXPORT void decoder_logits(Decoder* decoder, const void* states, int64_t num_rows,
                                    float* out) {
  decoder->logits(states, num_rows, out);
}

// 1; 0: as `best_tokens`.
OUTDRAFT_EXPORT int64_t decoder_best_tokens(Decoder* decoder, const void* states, int64_t num_rows,
                                            int64_t* ids, bool* are_finite) {
  return decoder->best_tokens(states, num_rows, ids, are_finite);
}

OUTDRAFT_EXPORT int64_t decoder_num_columns(const Decoder* decoder) { return decoder->columns(); }

namespace outdraft {

OUTDRAFT_STRUCT(DecoderLayer, input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down,
                o_bias, down_bias, window);

OUTDRAFT_STRUCT(DecoderSpec, team, hidden, intermediate, num_heads, num_kv_heads, head_size,
                num_layers, num_positions, num_tokens, dtype, eps, scale, embedding,
                embedding_codes, cos_sin, final_norm, layers, reads_states, adds_to_normed,
                leaves_out_first, token_norm, state_norm, fc, head, head_norm, draft_ids, ranks,
                first_token, num_own_tokens, num_columns, num_outputs, num_first_drafts);

OUTDRAFT_STRUCT(DecoderRows, token_ids, positions, slots, query_start, context_lens, num_causal,
                ancestors, block_table, num_rows, num_requests, table_stride, wanted, num_wanted);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(decoder_create, decoder_destroy, decoder_forward, decoder_write_context,
                   decoder_logits, decoder_best_tokens, decoder_num_columns);
