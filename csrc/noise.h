// Counter-based noise: a pure function of (seed, position, anchor, purpose, vocabulary id).
//
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), with the key
// and the counter of src/outdraft/kernels/torch/noise.py, and the same bits.
#pragma once

#include <cstdint>

namespace outdraft {

// As `Purpose` of kernels/data/noise.py.
enum class Purpose : int64_t { kDraft = 0, kAccept = 1, kRecover = 2, kSample = 3 };

struct NoiseKey {
  int64_t seed;
  int64_t position;  // of the token that is chosen
  int64_t anchor;    // committed tokens when the step began, for kDraft and kAccept; 0 for others
  Purpose purpose;
};

// Words of noise for the vocabulary ids [first, first + count); `first` is a multiple of 4.
void fill_words(const NoiseKey& key, int64_t first, int64_t count, uint32_t* words);

// In (0, 1): the uniform noise of vocabulary id 0.
float uniform_scalar(const NoiseKey& key);

// Standard Gumbel noise of a word: -log(-log(u)).
float gumbel(uint32_t word);

// Natural logarithm of a normal positive number, to 1e-10, the same bits everywhere.
double log_of(double x);

}  // namespace outdraft
