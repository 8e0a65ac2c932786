// The best tokens behind states of a decoder, over all ranks: see forward.h.

#include <algorithm>
#include <cmath>
#include <vector>

#include "forward.h"
#include "sampling.h"

namespace outdraft {
namespace {

constexpr int64_t kHeadRows = 64;  // whose logits are kept at a time

// The first of the highest numbers; a NaN is higher than all.
int64_t best_of(const float* x, int64_t size) {
  bool has_nan = false;
  for (int64_t i = 0; i < size; ++i) has_nan |= x[i] != x[i];
  if (!has_nan) return argmax(x, size);
  return std::find_if(x, x + size, [](float number) { return number != number; }) - x;
}

// The best token of a part of the vocabulary.
struct Best {
  double logit;
  int64_t id;

  // Than that of a part before: of equal ones the first wins, and a NaN is the highest.
  bool is_above(const Best& before) const {
    if (std::isnan(before.logit)) return false;
    return std::isnan(logit) || logit > before.logit;
  }
};

}  // namespace

bool Decoder::best_tokens(const void* states, int64_t num_rows, int64_t* ids, bool* are_finite) {
  const int64_t row_bytes = spec_.hidden * size_of(spec_.dtype);
  const int64_t num_ranks = is_spread() ? spec_.ranks->size : 1;
  const int64_t first_own = is_spread() ? spec_.ranks->rank * columns() : 0;
  std::vector<Best> own(static_cast<size_t>(num_rows)), of_all;
  for (int64_t first = 0; first < num_rows; first += kHeadRows) {
    const int64_t count = std::min(kHeadRows, num_rows - first);
    float* logits_RN = logits_.reserve<float>(count * columns());
    logits(static_cast<const char*>(states) + first * row_bytes, count, logits_RN);
    for (int64_t r = 0; r < count; ++r) {
      const float* row = logits_RN + r * columns();
      const int64_t best = best_of(row, columns());
      own[first + r] = {row[best], first_own + best};
    }
  }
  if (is_spread()) {
    of_all.resize(own.size() * num_ranks);
    if (!spec_.ranks->gather(reinterpret_cast<const char*>(own.data()),
                             num_rows * int64_t{sizeof(Best)},
                             reinterpret_cast<char*>(of_all.data()))) {
      return false;
    }
  } else {
    of_all.swap(own);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    Best best = of_all[r];
    for (int64_t rank = 1; rank < num_ranks; ++rank) {
      const Best& other = of_all[rank * num_rows + r];
      if (other.is_above(best)) best = other;
    }
    ids[r] = spec_.draft_ids == nullptr ? best.id : spec_.draft_ids[best.id];
    if (are_finite != nullptr) are_finite[r] = std::isfinite(best.logit);
  }
  return true;
}

}  // namespace outdraft
