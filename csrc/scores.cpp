// Log-probabilities of raw logits: of one chosen token of each row, and of its best ones. The
// readable twin is src/outdraft/kernels/torch/sampling.py.
//
// The best tokens are kept in a heap whose first one is the least: a row is read once for them, and
// few of its numbers are more than a comparison. Sums run in float64, a thousand exponentials after
// the other, each thousand as sampling.cpp says.

#include <algorithm>
#include <cmath>
#include <limits>

#include "export.h"
#include "row_steps.h"
#include "sampling.h"
#include "simd.h"

namespace outdraft {
namespace {

constexpr int64_t kChunk = 1024;  // exponentials that stay in the nearest cache
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Logits [.., size]; what of them is wanted, and where it goes: [R] and [R, num_top].
struct ScoreTask {
  const float* logits;
  const int64_t *rows, *chosen;
  int64_t size, num_top;
  float* logprobs;
  int64_t* ranks;
  int64_t* top_ids;
  float* top_logprobs;
};

struct Token {
  float logit;
  int32_t id;

  // Before another one: better, or of the same logit with a lower id.
  bool operator<(const Token& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

struct Score {
  float logprob, log_total;
  int64_t rank;
};

// The best tokens of a row, best first; NaN counts as the least.
void find_best(const float* logits, int64_t size, int64_t num_top, Token* best) {
  Token* end = best + num_top;
  int64_t at = 0;
  for (; at < num_top; ++at) {
    best[at] = {logits[at] > kNone ? logits[at] : kNone, static_cast<int32_t>(at)};
  }
  std::make_heap(best, end);
  const auto add = [&](int64_t id) {
    if (!(logits[id] > best->logit)) return;  // of ties the first ones stay
    std::pop_heap(best, end);
    end[-1] = {logits[id], static_cast<int32_t>(id)};
    std::push_heap(best, end);
  };
  for (; at + kWidth <= size; at += kWidth) {
    if (!any(load<Floats>(logits + at) > broadcast(best->logit))) continue;
    for (int64_t lane = 0; lane < kWidth; ++lane) add(at + lane);
  }
  for (; at < size; ++at) add(at);
  std::sort_heap(best, end);
}

float log_of_total(const float* logits, int64_t size, float best) {
  float exponentials[kChunk];
  double sum = 0;
  for (int64_t first = 0; first < size; first += kChunk) {
    const int64_t count = std::min(kChunk, size - first);
    exp_below(logits + first, count, best, exponentials);
    sum += total(exponentials, count);
  }
  return static_cast<float>(best + std::log(sum));
}

// What happens to one row, as row_steps.h describes it: the scratch memory is its score, and its
// best tokens.
struct ScoreRow {
  ScoreTask task;

  int64_t row_bytes() const { return sizeof(Score) + sizeof(Token) * task.num_top; }

  void compute(int64_t row, char* scratch) const {
    const float* logits = task.logits + task.rows[row] * task.size;
    const float chosen = logits[task.chosen[row]];
    const float log_total = log_of_total(logits, task.size, maximum(logits, task.size));
    int64_t rank = 1;
    for (int64_t id = 0; id < task.size; ++id) rank += logits[id] > chosen;
    const Score score{chosen - log_total, log_total, rank};
    std::memcpy(scratch, &score, sizeof(Score));
    if (task.num_top == 0) return;
    find_best(logits, task.size, task.num_top, reinterpret_cast<Token*>(scratch + sizeof(Score)));
  }

  void store(int64_t row, const char* scratch) const {
    Score score;
    std::memcpy(&score, scratch, sizeof(Score));
    const auto* best = reinterpret_cast<const Token*>(scratch + sizeof(Score));
    task.logprobs[row] = score.logprob;
    task.ranks[row] = score.rank;
    for (int64_t nth = 0; nth < task.num_top; ++nth) {
      task.top_ids[row * task.num_top + nth] = best[nth].id;
      task.top_logprobs[row * task.num_top + nth] = best[nth].logit - score.log_total;
    }
  }
};

}  // namespace
}  // namespace outdraft

// As `score_tokens` of kernels/torch/sampling.py. When it returns, no helper reads the logits any
// more.
OUTDRAFT_EXPORT void score_tokens(outdraft::Team* team, int64_t num_rows,
                                  const outdraft::ScoreTask* task) {
  outdraft::run_rows(team, outdraft::ScoreRow{*task}, num_rows, task->size);
  outdraft::wait_until_idle(team);
}

namespace outdraft {

OUTDRAFT_STRUCT(ScoreTask, logits, rows, chosen, size, num_top, logprobs, ranks, top_ids,
                top_logprobs);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(score_tokens);
