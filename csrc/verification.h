// Verdicts on drafts: see verification.cpp.
#pragma once

#include <cstdint>

#include "export.h"

// The verdict on a batch; arguments as in `DraftBatch` and `SamplingBatch`, results as in
// `Verdict`.
OUTDRAFT_EXPORT void verify(int64_t num_requests, int64_t width, int64_t size, const float* logits,
                            const int64_t* tokens, const int64_t* parents,
                            const int64_t* num_drafts, const float* probs, const bool* is_sampled,
                            const bool* is_greedy, const bool* draws, const int64_t* seeds,
                            const int64_t* num_tokens, int64_t rule, bool sampled_trees,
                            int64_t* emitted, int64_t* rows, int64_t* num_emitted);

// The request of each flat row; rows past the last request count as its own.
OUTDRAFT_EXPORT void requests_of_rows(int64_t num_requests, const int64_t* num_drafts,
                                      int64_t num_rows, int64_t* requests);

// Walk along the choices of flat rows; arguments as in `DraftBatch`, results as in `Verdict`.
OUTDRAFT_EXPORT void match_choices(int64_t num_requests, int64_t width, const int64_t* choices,
                                   const int64_t* tokens, const int64_t* parents,
                                   const int64_t* num_drafts, int64_t* emitted, int64_t* rows,
                                   int64_t* num_emitted);
