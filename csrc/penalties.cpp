// Penalties, as penalties.h says. A text is read once; each of its rows then costs as many numbers
// as the text has different tokens.

#include "penalties.h"

#include <algorithm>
#include <vector>

namespace outdraft {
namespace {

// Which tokens a text has, and how often each is output. The path to a row is pushed and popped.
class SeenTokens {
 public:
  void read(int64_t vocab_size, const int64_t* text, int64_t prompt_len, int64_t num_tokens) {
    for (const int64_t id : seen_) marks_[id] = 0;
    seen_.clear();
    marks_.resize(static_cast<size_t>(vocab_size));
    for (int64_t at = 0; at < std::min(prompt_len, num_tokens); ++at) see(text[at]);
    for (int64_t at = prompt_len; at < num_tokens; ++at) push(text[at]);
    num_in_text_ = seen_.size();
  }

  // One more output.
  void push(int64_t id) {
    see(id);
    if (is_token(id)) ++marks_[id];
  }

  // The newest output is gone.
  void pop(int64_t id) {
    if (!is_token(id) || --marks_[id] > 1) return;
    if (seen_.size() == num_in_text_ || seen_.back() != id) return;
    seen_.pop_back();
    marks_[id] = 0;
  }

  void penalize(const PenaltyColumns& penalties, int64_t request, float* logits) const {
    const float repetition = penalties.repetition[request];
    const float frequency = penalties.frequency[request], presence = penalties.presence[request];
    for (const int64_t id : seen_) {
      const auto count = static_cast<float>(marks_[id] - 1);
      float x = logits[id];
      x = x > 0 ? x / repetition : x * repetition;
      x -= frequency * count;
      x -= presence * (count > 0 ? 1.0f : 0.0f);
      logits[id] = x;
    }
  }

 private:
  bool is_token(int64_t id) const { return static_cast<uint64_t>(id) < marks_.size(); }

  void see(int64_t id) {
    if (!is_token(id) || marks_[id] != 0) return;
    marks_[id] = 1;
    seen_.push_back(id);
  }

  std::vector<int32_t> marks_;  // of all tokens: 0, or 1 + how often it is output
  std::vector<int64_t> seen_;   // those with a mark, the newest last
  size_t num_in_text_ = 0;      // of them; the others are of the path
};

SeenTokens& seen_tokens() {
  thread_local SeenTokens seen;
  return seen;
}

}  // namespace

void penalize_trees(const PenaltyColumns& penalties, const PenalizedTexts& texts,
                    int64_t num_requests, int64_t width, const int64_t* tokens,
                    const int64_t* parents, const int64_t* num_drafts, int64_t vocab_size,
                    float* logits) {
  SeenTokens& seen = seen_tokens();
  std::vector<int64_t> path;
  for (int64_t b = 0; b < num_requests; ++b, tokens += width, parents += width) {
    if (!penalties.are_used_by(b)) {
      logits += (num_drafts[b] + 1) * vocab_size;
      continue;
    }
    seen.read(vocab_size, texts.texts + texts.rows[b] * texts.row_len, texts.prompt_lens[b],
              texts.num_tokens[b]);
    for (int64_t row = 0; row <= num_drafts[b]; ++row, logits += vocab_size) {
      path.clear();
      for (int64_t at = row; at > 0; at = parents[at - 1]) path.push_back(tokens[at - 1]);
      for (size_t at = path.size(); at > 0; --at) seen.push(path[at - 1]);
      seen.penalize(penalties, b, logits);
      for (const int64_t id : path) seen.pop(id);
    }
  }
}

}  // namespace outdraft

OUTDRAFT_EXPORT void penalize_rows(int64_t num_rows, int64_t size, int64_t history_len,
                                   int64_t path_len, const float* logits, const int64_t* requests,
                                   const int64_t* history, const int64_t* prompt_lens,
                                   const int64_t* num_tokens, const int64_t* paths,
                                   const float* repetition, const float* presence,
                                   const float* frequency, float* penalized) {
  auto& seen = outdraft::seen_tokens();
  const outdraft::PenaltyColumns penalties{repetition, presence, frequency};
  int64_t newest = -1;
  std::copy_n(logits, num_rows * size, penalized);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t request = requests[row], *path = paths + row * path_len;
    if (!penalties.are_used_by(request)) continue;
    if (request != newest) {
      seen.read(size, history + request * history_len, prompt_lens[request],
                std::min(num_tokens[request], history_len));
      newest = request;
    }
    for (int64_t at = 0; at < path_len; ++at) seen.push(path[at]);
    seen.penalize(penalties, request, penalized + row * size);
    for (int64_t at = path_len - 1; at >= 0; --at) seen.pop(path[at]);
  }
}

OUTDRAFT_FUNCTIONS(penalize_rows);
