// Tokens from rows of float32 logits: processing, argmax, softmax, and samples by the Gumbel-max
// trick (Gumbel 1954; Maddison, Tarlow, Minka 2014). The nucleus is that of Holtzman et al. 2020.
// What a row gives depends on that row alone. The readable twin is
// src/outdraft/kernels/torch/sampling.py.
#pragma once

#include <cstdint>

#include "export.h"
#include "noise.h"

namespace outdraft {

// How a request wants its tokens chosen; fields as in `SamplingBatch`.
struct Cuts {
  float temperature;
  float least;    // the logarithm of min_p; -inf: off
  int64_t top_k;  // the size of the vocabulary, or more: off
  float top_p;    // 1: off
};

// The cuts of all requests.
struct CutColumns {
  const float* temperature;
  const float* least;
  const int64_t* top_k;
  const float* top_p;

  Cuts of(int64_t request) const {
    return {temperature[request], least[request], top_k[request], top_p[request]};
  }
};

// Temperature, with the best logit moved to 0, then min_p, top_k and top_p: -inf is masked.
// `processed` may be `logits`.
void process_row(const float* logits, int64_t size, const Cuts& cuts, float* processed);

// The largest number; NaN are passed over.
float maximum(const float* numbers, int64_t size);

// The lowest place of the largest number; 0 where there is none.
int64_t argmax(const float* numbers, int64_t size);

// The distance between the two largest numbers, at most kWidestMargin; NaN are passed over. 0 where
// two are infinite; kWidestMargin where all others are -inf.
constexpr float kWidestMargin = 10;  // MAX_MARGIN of core/draft.py
float margin(const float* numbers, int64_t size);

// Log-odds in the place of a margin, even ones in the middle: `margins_of_odds` of live_stop.py.
float margin_of_odds(float odds);

// The sum, in float64.
double total(const float* numbers, int64_t size);

// out = exp(x - best) to about 1e-7, for x <= best. `out` may be `numbers`.
void exp_below(const float* numbers, int64_t size, float best, float* out);

// out = softmax(logits); `out` may be `logits`.
void softmax(const float* logits, int64_t size, float* out);

// argmax(logits + Gumbel noise), the lowest id of a tie: a sample of softmax(logits).
int64_t sample_logits(const float* logits, int64_t size, const NoiseKey& key);

// The same of the logarithms of weights, none of them negative, that need not sum to 1.
int64_t sample_weights(const float* weights, int64_t size, const NoiseKey& key);

}  // namespace outdraft

// As `finite_rows` of kernels/torch/sampling.py: logits [R, V].
OUTDRAFT_EXPORT void finite_rows(int64_t num_rows, int64_t size, const float* logits,
                                 bool* are_finite);

// `process_row` of rows [num_rows, size]; `requests`: whose each of them is.
OUTDRAFT_EXPORT void process_rows(int64_t num_rows, int64_t size, const float* logits,
                                  const int64_t* requests, const float* temperature,
                                  const float* least, const int64_t* top_k, const float* top_p,
                                  float* processed);
