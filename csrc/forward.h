// A whole pass of a decoder over rows, and what follows from its states: logits and best tokens.
// Its readable twin is src/outdraft/kernels/torch/decoder.py.
//
// Dimension key: T rows, R rows whose logits are wanted, D hidden, X inputs of layer 0, K
// tapped layers, N the head's own vocabulary, M positions.
#pragma once

#include <cstdint>

#include "attention.h"
#include "draft_tokens.h"
#include "linear.h"
#include "ranks.h"

namespace outdraft {

// Weights of norms are float32; null where there is no norm. Python fills these three
// (kernels/native/decoder.py) and keeps alive what they point to.
struct DecoderLayer {
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  const LinearWeights *qkv, *o, *gate_up, *down;
  const float *o_bias, *down_bias;  // of sums over ranks, [D] float32; null: none
  int64_t window;
};

struct DecoderSpec {
  Team* team;
  int64_t hidden, intermediate, num_heads, num_kv_heads, head_size, num_layers;
  int64_t num_positions, num_tokens;  // in the tables, of all ranks
  Dtype dtype;                        // of the embedding, states, caches, and inputs of products
  float eps, scale;
  const void* embedding;   // [tokens of this rank, D]; null: the outputs of `embedding_codes`
  const LinearWeights* embedding_codes;
  const float* cos_sin;    // [M, C]: cos of all frequencies, then sin
  const float* final_norm;
  const DecoderLayer* layers;
  // For a network that reads states beside tokens; without an `fc` layer 0 reads both side by side.
  int32_t reads_states, adds_to_normed, leaves_out_first;
  const float *token_norm, *state_norm;
  const LinearWeights* fc;
  // From states to logits.
  const LinearWeights* head;
  const float* head_norm;
  const int64_t* draft_ids;  // [N], the target's ids of the outputs; null: the same ids
  // For a network that is spread over ranks. Heads, `intermediate` and products are this rank's:
  // `o` and `down` give parts of sums, and `head` the outputs of this rank, of `num_columns` that
  // each rank has, but the last ones. Null: the network is whole.
  RankLink* ranks;
  int64_t first_token, num_own_tokens;  // in this rank's embedding
  int64_t num_columns, num_outputs;     // of a rank, and of all ranks: N
  int64_t num_first_drafts;  // as in DraftTokens, of a network that is whole and has no draft_ids
};

// One layer's cache, [P, S, G, C] each.
struct DecoderCache {
  void *k, *v;
};

// The rows of a pass: addresses as in AttentionMetadata, then numbers.
struct DecoderRows {
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* num_causal;
  const int64_t* ancestors;
  const int32_t* block_table;
  int64_t num_rows, num_requests, table_stride;
  const int64_t* wanted;  // [R], rising: each request's last rows, or none; may be null if R is T
  int64_t num_wanted;     // R
};

// A decoder with one engine's caches, and the memory that its passes reuse. One thread at a time.
// States and residual streams are of the spec's dtype.
class Decoder {
 public:
  explicit Decoder(const DecoderSpec& spec)
      : call_memory(spec.team),
        draft_tokens(spec.num_first_drafts, spec.head == nullptr ? 0 : spec.head->num_outputs),
        spec_(spec),
        logits_(spec.team) {}
  virtual ~Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // out [R, D] = the states of the wanted rows; keys and values of all go to the caches. `states`
  // [T, D], null for a network that does not read them, may be `out`. tapped [T, K, D]: its part k
  // = the residual stream behind the first taps[k] layers; with taps R is T. False: a token or a
  // position is not in its table, and nothing is done; or another rank does not answer.
  virtual bool forward(const DecoderRows& rows, const void* states, const int64_t* taps,
                       int64_t num_taps, void* tapped, void* out) = 0;

  // Keys and values that are made of features [T, D], not of what layers read: `products` gives
  // those of all layers, [T, L, 2, G, C]; they are normed and turned as the layers' own, and go to
  // the caches. False, and nothing is done: a position is not in its table.
  virtual bool write_context(const LinearWeights& products, const void* features,
                             const int64_t* positions, const int64_t* slots, int64_t num_rows) = 0;

  // float32 [R, columns] behind states [R, D]; -inf where this rank has no output.
  virtual void logits(const void* states, int64_t num_rows, float* out) = 0;

  // The same of the tokens that it drafts: [R, num_drafted()], of `drafted_ids()`.
  virtual void draft_logits(const void* states, int64_t num_rows, float* out) = 0;

  // The tokens with the highest logits, as the target numbers them; whether that logit is finite.
  // A NaN counts as the highest; of equal ones the first wins. False: another rank does not answer.
  bool best_tokens(const void* states, int64_t num_rows, int64_t* ids, bool* are_finite);

  const DecoderSpec& spec() const { return spec_; }
  bool is_spread() const { return spec_.ranks != nullptr; }
  int64_t vocabulary() const { return is_spread() ? spec_.num_outputs : spec_.head->num_outputs; }
  int64_t columns() const { return is_spread() ? spec_.num_columns : spec_.head->num_outputs; }

  int64_t num_drafted() const {
    return draft_tokens.are_all() ? vocabulary() : static_cast<int64_t>(draft_tokens.ids().size());
  }
  const int64_t* drafted_ids() const {
    return draft_tokens.are_all() ? spec_.draft_ids : draft_tokens.ids().data();
  }

  KeptMemory call_memory;  // of a whole draft or a whole step, see decoder_draft.cpp and step.cpp
  DraftTokens draft_tokens;

 protected:
  const DecoderSpec spec_;

 private:
  KeptMemory logits_;
};

}  // namespace outdraft
