// A whole pass of a decoder: see forward.h.
//
// Residuals and all sums are float32. In a bfloat16 decoder numbers are rounded in these places
// only: inputs of products, cached keys and values, and what is returned. Rows are computed in
// blocks, but for attention, so that what lies between two products stays in the cache of the
// processor. Every row is computed as if it were alone.

#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "export.h"
#include "sampling.h"
#include "simd.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kBlockRows = 256;
constexpr int64_t kHeadRows = 64;  // whose logits are kept at a time

void add(const float* x, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] += x[i];
}

// to = x / rms(x) * weight; without a weight a copy (Zhang, Sennrich 2019).
template <class From, class To>
void normalize(const From* x, const float* weight, int64_t size, float eps, To* to) {
  if (weight == nullptr) return convert(x, size, to);
  Floats sums = {};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const Floats part = numbers(x + i);
    sums = fused(part, part, sums);
  }
  float sum = sum_of(sums);
  for (; i < size; ++i) sum += number(x + i) * number(x + i);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for_numbers(size, [&](int64_t i, auto kind) {
    using Kind = decltype(kind);
    put(to + i, read<Kind>(x + i) * scale * read<Kind>(weight + i));
  });
}

// Each pair (x[i], x[i + C / 2]) turned by its angle (Su et al. 2021).
template <class To>
void rotate(const float* x, const float* cos_sin, int64_t size, To* to) {
  const int64_t half = size / 2;
  const float *high = x + half, *sin = cos_sin + half;
  for_numbers(half, [&](int64_t i, auto kind) {
    using Kind = decltype(kind);
    const Kind a = read<Kind>(x + i), b = read<Kind>(high + i);
    const Kind c = read<Kind>(cos_sin + i), s = read<Kind>(sin + i);
    put(to + i, a * c - b * s);
    put(to + half + i, b * c + a * s);
  });
}

Floats silu_mul(Floats gate, Floats up) { return gate / (exp_of(-gate) + 1.0f) * up; }

// to = silu(gate) * up: the first half of the numbers is the gate (Shazeer 2020).
template <class To>
void gate(const float* gate_up, int64_t size, To* to) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    put(to + i, silu_mul(numbers(gate_up + i), numbers(gate_up + size + i)));
  }
  for (; i < size; ++i) {  // as the first number of a vector: it is the same wherever it stands
    put(to + i, silu_mul(broadcast(gate_up[i]), broadcast(gate_up[size + i]))[0]);
  }
}

// The first of the highest numbers; a NaN is higher than all.
int64_t best_of(const float* x, int64_t size) {
  bool has_nan = false;
  for (int64_t i = 0; i < size; ++i) has_nan |= x[i] != x[i];
  if (!has_nan) return argmax(x, size);
  return std::find_if(x, x + size, [](float number) { return number != number; }) - x;
}

// Gives out parts of one piece of memory. Without memory it only counts.
struct Parts {
  template <class Number>
  Number* take(int64_t count) {
    Number* part = reinterpret_cast<Number*>(memory + num_bytes);
    num_bytes += (static_cast<int64_t>(sizeof(Number)) * count + 63) / 64 * 64;
    return part;
  }

  template <class Number>
  Number* copy(const Number* from, int64_t count) {
    Number* part = take<Number>(count);
    if (memory != nullptr) std::copy_n(from, count, part);
    return part;
  }

  char* memory = nullptr;
  int64_t num_bytes = 0;
};

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
        attention_(spec.team) {
    std::copy_n(spec.layers, spec.num_layers, layers_);
    std::copy_n(caches, spec.num_layers, caches_);
    batch_ = {};
    batch_.num_heads = spec.num_heads;
    batch_.num_kv_heads = spec.num_kv_heads;
    batch_.head_size = spec.head_size;
    batch_.block_size = block_size;
    batch_.q_stride = heads_size_;
    batch_.scale = spec.scale;
    batch_.is_bf16_out = batch_.is_bf16_cache = kDtype == Dtype::kBfloat16;
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
    for_blocks(num_rows, [&](int64_t first, int64_t count) {
      enter(rows, states_TD, first, count);
    });
    tap(0, num_rows, taps, num_taps, tapped);
    for (int64_t i = 0; i < spec_.num_layers; ++i) {
      for_blocks(num_rows, [&](int64_t first, int64_t count) {
        prepare(rows, states_TD, i, first, count);
        read_keys(rows, i, first, count);
      });
      batch_.k = caches_[i].k;
      batch_.v = caches_[i].v;
      batch_.window = layers_[i].window;
      attend(spec_.team, batch_, attention_);
      for_blocks(num_rows, [&](int64_t first, int64_t count) {
        feed_forward(layers_[i], first, count);
      });
      tap(i + 1, num_rows, taps, num_taps, tapped);
    }
    normalize_rows(residual_, spec_.final_norm, num_rows, static_cast<Number*>(out));
    return true;
  }

  void logits(const void* states, int64_t num_rows, float* out) override {
    const auto* states_RD = static_cast<const Number*>(states);
    if (spec_.head_norm != nullptr) {
      Number* normed = normed_.reserve<Number>(num_rows * spec_.hidden);
      normalize_rows(states_RD, spec_.head_norm, num_rows, normed);
      states_RD = normed;
    }
    multiply(*spec_.head, states_RD, out, num_rows);
  }

 private:
  static constexpr Dtype kDtype = sizeof(Number) == 4 ? Dtype::kFloat32 : Dtype::kBfloat16;

  template <class Call>
  void for_blocks(int64_t num_rows, const Call& call) const {
    for (int64_t first = 0; first < num_rows; first += kBlockRows) {
      call(first, std::min(kBlockRows, num_rows - first));
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
    batch_.positions = parts.copy(rows.positions, num_rows);
    batch_.ancestors = parts.copy(rows.ancestors, num_rows);
    batch_.query_start = parts.copy(rows.query_start, rows.num_requests + 1);
    batch_.context_lens = parts.copy(rows.context_lens, rows.num_requests);
    batch_.num_causal = parts.copy(rows.num_causal, rows.num_requests);
    batch_.block_table = parts.copy(rows.block_table, rows.num_requests * rows.table_stride);
    batch_.q = q_ = parts.take<float>(num_rows * heads_size_);
    batch_.out = attended_ = parts.take<Number>(num_rows * heads_size_);
    residual_ = parts.take<float>(num_rows * spec_.hidden);
    x_ = parts.take<Number>(block * 2 * spec_.hidden);
    gated_ = parts.take<Number>(block * spec_.intermediate);
    qkv_ = parts.take<float>(block * (heads_size_ + 2 * kv_size_));
    y_ = parts.take<float>(block * spec_.hidden);
    gate_up_ = parts.take<float>(block * 2 * spec_.intermediate);
    normed_head_ = parts.take<float>(spec_.head_size);
  }

  const Number* embedded(int64_t token) const {
    return static_cast<const Number*>(spec_.embedding) + token * spec_.hidden;
  }

  void multiply(const LinearWeights& weights, const Number* x, float* y, int64_t count) const {
    linear(spec_.team, weights, {x, kDtype, weights.num_inputs},
           {y, Dtype::kFloat32, weights.num_outputs}, count);
  }

  template <class From>
  void normalize_rows(const From* x, const float* weight, int64_t count, Number* to) const {
    for (int64_t r = 0; r < count; ++r) {
      normalize(x + r * spec_.hidden, weight, spec_.hidden, spec_.eps, to + r * spec_.hidden);
    }
  }

  // [rows, 2 D] in x: tokens and states side by side, each normed.
  void pair(const DecoderRows& rows, const Number* states, int64_t first, int64_t count) {
    const int64_t size = spec_.hidden;
    for (int64_t r = 0; r < count; ++r) {
      Number* to = x_ + r * 2 * size;
      const Number* token = embedded(rows.token_ids[first + r]);
      normalize(token, spec_.token_norm, size, spec_.eps, to);
      normalize(states + (first + r) * size, spec_.state_norm, size, spec_.eps, to + size);
    }
  }

  // What the layers add to.
  void enter(const DecoderRows& rows, const Number* states, int64_t first, int64_t count) {
    const int64_t size = spec_.hidden;
    float* residual = residual_ + first * size;
    if (spec_.fc != nullptr) {
      pair(rows, states, first, count);
      return multiply(*spec_.fc, x_, residual, count);
    }
    for (int64_t r = 0; r < count; ++r) {
      if (!spec_.reads_states) {
        convert(embedded(rows.token_ids[first + r]), size, residual + r * size);
      } else {
        const float* norm = spec_.adds_to_normed ? spec_.state_norm : nullptr;
        normalize(states + (first + r) * size, norm, size, spec_.eps, residual + r * size);
      }
    }
  }

  // What the first product of a layer reads, in x.
  void prepare(const DecoderRows& rows, const Number* states, int64_t layer, int64_t first,
               int64_t count) {
    if (layer == 0 && spec_.reads_states && spec_.fc == nullptr) {
      pair(rows, states, first, count);
    } else {
      normalize_rows(residual_ + first * spec_.hidden, layers_[layer].input_norm, count, x_);
    }
  }

  // Queries, turned, and the keys and values of the cache.
  void read_keys(const DecoderRows& rows, int64_t index, int64_t first, int64_t count) {
    const DecoderLayer& layer = layers_[index];
    const int64_t size = spec_.head_size;
    multiply(*layer.qkv, x_, qkv_, count);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = first + r, slot = rows.slots[row];
      const float* heads = qkv_ + r * (heads_size_ + 2 * kv_size_);
      const float* cos_sin = spec_.cos_sin + rows.positions[row] * size;
      for (int64_t at = 0; at < heads_size_; at += size) {
        turn(heads + at, layer.q_norm, cos_sin, q_ + row * heads_size_ + at);
      }
      if (slot < 0) continue;
      Number* k = static_cast<Number*>(caches_[index].k) + slot * kv_size_;
      for (int64_t at = 0; at < kv_size_; at += size) {
        turn(heads + heads_size_ + at, layer.k_norm, cos_sin, k + at);
      }
      Number* v = static_cast<Number*>(caches_[index].v) + slot * kv_size_;
      convert(heads + heads_size_ + kv_size_, kv_size_, v);
    }
  }

  template <class To>
  void turn(const float* head, const float* norm, const float* cos_sin, To* to) {
    if (norm != nullptr) {
      normalize(head, norm, spec_.head_size, spec_.eps, normed_head_);
      head = normed_head_;
    }
    rotate(head, cos_sin, spec_.head_size, to);
  }

  void feed_forward(const DecoderLayer& layer, int64_t first, int64_t count) {
    const int64_t size = spec_.hidden;
    float* residual = residual_ + first * size;
    multiply(*layer.o, attended_ + first * heads_size_, y_, count);
    add(y_, count * size, residual);
    normalize_rows(residual, layer.post_norm, count, x_);
    multiply(*layer.gate_up, x_, gate_up_, count);
    for (int64_t r = 0; r < count; ++r) {
      gate(gate_up_ + r * 2 * spec_.intermediate, spec_.intermediate,
           gated_ + r * spec_.intermediate);
    }
    multiply(*layer.down, gated_, y_, count);
    add(y_, count * size, residual);
  }

  void tap(int64_t num_layers, int64_t num_rows, const int64_t* taps, int64_t num_taps,
           void* tapped) const {
    const int64_t size = num_rows * spec_.hidden;
    for (int64_t k = 0; k < num_taps; ++k) {
      if (taps[k] == num_layers) convert(residual_, size, static_cast<Number*>(tapped) + k * size);
    }
  }

  DecoderLayer* layers_;
  DecoderCache* caches_;
  const int64_t heads_size_, kv_size_;
  KeptMemory kept_, normed_;
  AttentionMemory attention_;
  AttentionBatch batch_;
  float *residual_, *q_;            // of all rows: [T, D], [T, H, C]
  Number* attended_;                // [T, H, C]
  Number *x_, *gated_;              // of a block: [rows, D or 2 D], [rows, I]
  float *qkv_, *y_, *gate_up_;      // of a block: [rows, E], [rows, D], [rows, 2 I]
  float* normed_head_;              // [C]
};

}  // namespace

void Decoder::best_tokens(const void* states, int64_t num_rows, int64_t* ids, bool* are_finite) {
  const int64_t row_bytes = spec_.hidden * size_of(spec_.dtype);
  for (int64_t first = 0; first < num_rows; first += kHeadRows) {
    const int64_t count = std::min(kHeadRows, num_rows - first);
    float* logits_RN = logits_.reserve<float>(count * vocabulary());
    logits(static_cast<const char*>(states) + first * row_bytes, count, logits_RN);
    for (int64_t r = 0; r < count; ++r) {
      const float* row = logits_RN + r * vocabulary();
      const int64_t best = best_of(row, vocabulary());
      ids[first + r] = spec_.draft_ids == nullptr ? best : spec_.draft_ids[best];
      if (are_finite != nullptr) are_finite[first + r] = std::isfinite(row[best]);
    }
  }
}

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

OUTDRAFT_EXPORT void decoder_logits(Decoder* decoder, const void* states, int64_t num_rows,
                                    float* out) {
  decoder->logits(states, num_rows, out);
}

OUTDRAFT_EXPORT void decoder_best_tokens(Decoder* decoder, const void* states, int64_t num_rows,
                                         int64_t* ids, bool* are_finite) {
  decoder->best_tokens(states, num_rows, ids, are_finite);
}

OUTDRAFT_EXPORT int64_t decoder_num_outputs(const Decoder* decoder) {
  return decoder->vocabulary();
}
