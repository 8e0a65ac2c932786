// Penalties on tokens that a text has already: for repetition (Keskar et al. 2019, arXiv
// 1909.05858), and for frequency and presence, as OpenAI's API has them. The readable twin is
// `penalize` of src/outdraft/kernels/torch/sampling.py.
#pragma once

#include <cstdint>

#include "export.h"

namespace outdraft {

// Those of all requests; fields as in `SamplingBatch`.
struct PenaltyColumns {
  const float *repetition, *presence, *frequency;

  // Whether a request has one that changes logits.
  bool are_used_by(int64_t request) const {
    return repetition[request] != 1 || presence[request] != 0 || frequency[request] != 0;
  }
};

// The texts of all requests.
struct PenalizedTexts {
  const int64_t* texts;  // [S, row_len]; ids below 0 are no tokens
  int64_t row_len;
  const int64_t *rows, *num_tokens, *prompt_lens;  // which texts, of each: [B]
};

// The trees of all requests, as in `DraftBatch`: the rows of their logits [R, vocab_size] change.
// Each row sees its text, and the drafts on the path to it.
void penalize_trees(const PenaltyColumns& penalties, const PenalizedTexts& texts,
                    int64_t num_requests, int64_t width, const int64_t* tokens,
                    const int64_t* parents, const int64_t* num_drafts, int64_t vocab_size,
                    float* logits);

}  // namespace outdraft

// As `penalize` of kernels/torch/sampling.py: history [B, history_len], paths [num_rows, path_len].
OUTDRAFT_EXPORT void penalize_rows(int64_t num_rows, int64_t size, int64_t history_len,
                                   int64_t path_len, const float* logits, const int64_t* requests,
                                   const int64_t* history, const int64_t* prompt_lens,
                                   const int64_t* num_tokens, const int64_t* paths,
                                   const float* repetition, const float* presence,
                                   const float* frequency, float* penalized);
