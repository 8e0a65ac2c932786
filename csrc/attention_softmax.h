// The online softmax of the lanes of an attention tile, in base 2: log2(e) is part of the scale
// (Milakov, Gimelshein 2018; Dao et al. 2022).
//
// A lane's weights are summed vector by vector in the order of the keys, and a vector's numbers
// last (sum_of in vector_math.h).
#pragma once

#include <cstdint>

#include "attention_tiles.h"
#include "simd.h"
#include "vector_math.h"

namespace outdraft {

constexpr float kLog2E = 1.4426950408889634f;

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

// 2 to the power of a difference of tops: mostly the top stays, and 2 ** 0 is 1.
inline float power_of(float difference) {
  return difference == 0 ? 1.0f : exp2_of(broadcast(difference))[0];
}

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
    shrink[lane] = power_of(shrink[lane]);
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
inline void bend(float* scores, int64_t num_lanes, int64_t num_keys, float cap) {
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    for (float* at = scores + lane * kPiece; at < scores + lane * kPiece + num_keys; at += kWidth) {
      store(at, tanh_of(numbers(at)) * (cap * kLog2E));
    }
  }
}

}  // namespace outdraft
