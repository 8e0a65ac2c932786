// How much of a row's attention each block of its text gets. The readable twin is
// src/outdraft/kernels/reference/block_mass.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "export.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr float kLog2E = 1.44269504f;

// What Python fills (kernels/native/block_mass.py).
struct MassTask {
  const float* q;              // [B, H, C]
  const void* k;               // [P, S, G, C]
  const int32_t* block_table;  // [B, P]
  const int64_t* num_keys;     // [B]
  float* mass;                 // [B, M]: added to
  int64_t num_requests, num_heads, num_kv_heads, head_size, block_size;
  int64_t table_width, mass_width;
  float scale;
  int32_t is_bf16;
};

// The product of a query and a key.
template <class Number>
float dot(const float* q, const Number* k, int64_t size) {
  Floats sums = {};
  int64_t c = 0;
  for (; c + kWidth <= size; c += kWidth) sums = fused(numbers(q + c), numbers(k + c), sums);
  float sum = sum_of(sums);
  for (; c < size; ++c) sum += q[c] * number(k + c);
  return sum;
}

// The scores of one query, in base 2; returns the highest one.
template <class Number>
float fill_scores(const MassTask& task, const float* q, const Number* k, const int32_t* blocks,
                  int64_t num_keys, float* scores) {
  const int64_t stride = task.num_kv_heads * task.head_size;
  float top = -INFINITY;
  for (int64_t key = 0; key < num_keys; ++key) {
    const int64_t slot = blocks[key / task.block_size] * task.block_size + key % task.block_size;
    scores[key] = dot(q, k + slot * stride, task.head_size) * task.scale * kLog2E;
    top = std::max(top, scores[key]);
  }
  return top;
}

// Scores become weights; returns their sum. The memory reaches to a whole vector.
float weigh(float* scores, int64_t num_keys, float top) {
  const int64_t end = (num_keys + kWidth - 1) / kWidth * kWidth;
  std::fill(scores + num_keys, scores + end, -INFINITY);
  Floats total = {};
  for (int64_t key = 0; key < end; key += kWidth) {
    const Floats weights = exp2_of(numbers(scores + key) - top);
    store(scores + key, weights);
    total = total + weights;
  }
  return sum_of(total);
}

}  // namespace
}  // namespace outdraft

// As `BlockMass` of ops.py, of one layer.
OUTDRAFT_EXPORT void block_mass(const outdraft::MassTask* of) {
  using namespace outdraft;
  const MassTask& task = *of;
  const int64_t heads_per_kv = task.num_heads / task.num_kv_heads;
  std::vector<float> scores;
  for (int64_t b = 0; b < task.num_requests; ++b) {
    const int64_t num_keys = task.num_keys[b];
    const int32_t* blocks = task.block_table + b * task.table_width;
    float* mass = task.mass + b * task.mass_width;
    scores.resize(static_cast<size_t>(num_keys + kWidth));
    for (int64_t head = 0; head < task.num_heads; ++head) {
      const float* q = task.q + (b * task.num_heads + head) * task.head_size;
      const int64_t offset = head / heads_per_kv * task.head_size;
      float top = 0;
      with_numbers(task.k, task.is_bf16 != 0, [&](const auto* k) {
        top = fill_scores(task, q, k + offset, blocks, num_keys, scores.data());
      });
      const float share = 1.0f / weigh(scores.data(), num_keys, top);
      for (int64_t key = 0; key < num_keys; ++key) {
        mass[key / task.block_size] += scores[static_cast<size_t>(key)] * share;
      }
    }
  }
}
