// Paged tree attention: what src/outdraft/attention/base.py states, for float32 and bfloat16.
#pragma once

#include <atomic>
#include <cstdint>

#include "team.h"

namespace outdraft {

// Addresses of the tensors of attention/base.py, then numbers. Python has it too
// (kernels/native/attention.py).
struct AttentionBatch {
  const void* q;  // [T, H, C], rows q_stride numbers apart
  void* out;      // [T, H, E] contiguous
  const void* k;  // [P, S, G, C] contiguous
  const void* v;  // [P, S, G, E] contiguous
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* num_causal;
  const int64_t* ancestors;
  const int64_t* positions;
  const int32_t* block_table;  // [B, P], rows table_stride numbers apart
  const float* sinks;          // [H]; null: none
  int64_t num_requests, num_rows, num_heads, num_kv_heads, block_size;
  int64_t q_stride, table_stride;
  int32_t key_size, value_size;
  int32_t window, chunk;  // kNoLimit: none
  float scale;
  float soft_cap;  // 0: none
  int32_t is_bf16_query, is_bf16_out, is_bf16_cache;
};

constexpr int32_t kNoLimit = 1 << 30;  // longer than any text

// What `attend` needs between calls. A late helper may read it after a call, and so it may what a
// batch points to: when that changes, `version` has to rise before.
struct AttentionMemory {
  explicit AttentionMemory(Team* team) : tiles(team), partial(team) {}

  KeptMemory tiles, partial;
  std::atomic<int64_t> version = 0;
};

// out = softmax(scale * q k^T) v over what each row sees, in the form of a layer (AttentionForm in
// attention/base.py); 0 for rows behind the last request.
// `team` is not of a turn. With a team, what `batch` points to must be kept memory.
void attend(Team* team, const AttentionBatch& batch, AttentionMemory& memory);

}  // namespace outdraft
