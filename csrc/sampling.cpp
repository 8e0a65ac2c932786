// Rows of logits, as sampling.h says: one number after the other where order matters, else several
// side by side.
//
// Sums run in float64 over sixteen columns, which are added in order at the end. Nothing is sorted
// but one bucket of a histogram: the one in which the border of the nucleus lies, of the tokens that
// top_k left. A sample takes noise and logarithms only where a bound on them leaves a chance to win,
// which is a handful of tokens.

#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <vector>

#include "simd.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 1024;     // words of noise that stay in the nearest cache
constexpr float kMostNoise = 23.0f;  // of any word: -log(-log(1 - 2**-33)) is 22.9

constexpr float kLn2 = 0.6931471805599453f;
// exp(x) of numbers up to 0; 0 of NaN, and of what would not be a normal number.
inline Floats exp_or_zero(Floats x) { return x >= -87.0f ? exp_of(x) : Floats{}; }

// x * (number of ones in 2**-23) of a float32's bits is its base-2 logarithm, to 0.0861 from below.
constexpr float kBitsToLog = kLn2 * 0x1p-23f;

// No Gumbel noise of these words is larger. -log(-log(u)) < -log(1 - u).
inline Floats noise_bound(Words words) {
  const auto rest = __builtin_convertvector((Ints)(~words >> 1), Floats);
  const auto log = __builtin_convertvector((Ints)rest, Floats) * kBitsToLog;
  constexpr float kSlack = 1e-3f;  // covers every rounding above
  return (127 + 31) * kLn2 + kSlack - log;
}

struct Logits {
  static float exact(float x) { return x; }
  static Floats bound(Floats x) { return x; }
};

struct Weights {
  static float exact(float x) {
    return x > 0 ? static_cast<float>(log_of(static_cast<double>(x))) : kMasked;
  }
  static Floats bound(Floats x) {
    constexpr float kHighest = (0.0861f - 127) * kLn2;
    return __builtin_convertvector((Ints)x, Floats) * kBitsToLog + kHighest;
  }
};

template <class Kind>
int64_t sample(const float* numbers, int64_t size, const NoiseKey& key) {
  uint32_t words[kChunk];
  int64_t best_id = argmax(numbers, size);
  fill_words(key, best_id / 4 * 4, best_id % 4 + 1, words);
  float best = Kind::exact(numbers[best_id]) + gumbel(words[best_id % 4]);
  if (!(best > kMasked)) best = kMasked, best_id = 0;
  for (int64_t first = 0; first < size; first += kChunk) {
    const int64_t num = std::min(kChunk, size - first);
    const Floats most = Floats{} + maximum(numbers + first, num);
    if (Kind::bound(most)[0] + kMostNoise < best) continue;  // whatever its noise is
    fill_words(key, first, num, words);
    for (int64_t at = 0; at < num; at += kWidth) {
      const int64_t count = std::min<int64_t>(kWidth, num - at);
      const float* some = numbers + first + at;
      const bool is_full = count == kWidth;
      const auto x = is_full ? load<Floats>(some) : load_some<Floats>(some, count, 0.0f);
      const Floats bound = Kind::bound(x) + noise_bound(load<Words>(words + at));
      if (!any(bound >= best)) continue;
      for (int64_t lane = 0; lane < count; ++lane) {
        if (!(bound[lane] >= best)) continue;
        const float total = Kind::exact(some[lane]) + gumbel(words[at + lane]);
        const int64_t id = first + at + lane;
        if (total > best || (total == best && id < best_id)) best = total, best_id = id;
      }
    }
  }
  return best_id;
}

// A scaled logit x <= 0 falls into a bucket by the leading bits of |x|: 32 buckets for every
// doubling from 2**-8 to 2**16. Smaller ones share the first bucket, larger ones the last. Later
// buckets hold smaller numbers.
constexpr int32_t kBucketShift = 18, kFirstBucket = (127 - 8) << 5, kNumBuckets = 24 << 5;

int32_t bucket_of(float x) {
  const int32_t leading = (std::bit_cast<int32_t>(x) & 0x7FFFFFFF) >> kBucketShift;
  return std::clamp(leading - kFirstBucket, 0, kNumBuckets - 1);
}

// The numbers of one bucket, ascending; -inf and NaN are in none.
std::vector<float>& sorted_bucket(const float* x, int64_t size, int32_t bucket) {
  thread_local std::vector<float> members;
  members.clear();
  for (int64_t at = 0; at < size; ++at) {
    if (x[at] > kMasked && bucket_of(x[at]) == bucket) members.push_back(x[at]);
  }
  std::sort(members.begin(), members.end());
  return members;
}

// The k-th largest number; -inf where there are fewer. That of the largest ones of parts is a lower
// bound, so only parts that have one above it are looked at again.
float kth_largest(const float* x, int64_t size, int64_t k) {
  constexpr int64_t kPart = 64;
  thread_local std::vector<float> largest, bounds, left;
  largest.clear(), left.clear();
  for (int64_t first = 0; first < size; first += kPart) {
    largest.push_back(maximum(x + first, std::min(kPart, size - first)));
  }
  float bound = kMasked;
  if (k <= static_cast<int64_t>(largest.size())) {
    bounds = largest;
    std::nth_element(bounds.begin(), bounds.begin() + (k - 1), bounds.end(), std::greater<>());
    bound = bounds[k - 1];
  }
  for (size_t part = 0; part < largest.size(); ++part) {
    if (largest[part] < bound) continue;
    const int64_t first = static_cast<int64_t>(part) * kPart;
    std::copy_if(x + first, x + std::min(first + kPart, size), std::back_inserter(left),
                 [bound](float one) { return one > kMasked && one >= bound; });
  }
  if (static_cast<int64_t>(left.size()) < k) return kMasked;
  std::nth_element(left.begin(), left.begin() + (k - 1), left.end(), std::greater<>());
  return left[k - 1];
}

// Where numbers are that are not masked.
void find_kept(const float* x, int64_t size, std::vector<int64_t>* places) {
  places->clear();
  for (int64_t first = 0; first < size; first += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, size - first);
    if (count == kWidth && !any(load<Floats>(x + first) > kMasked)) continue;
    for (int64_t at = first; at < first + count; ++at) {
      if (x[at] > kMasked) places->push_back(at);
    }
  }
}

void mask_below(float* x, int64_t size, float border) {
  for (int64_t at = 0; at < size; ++at) x[at] = x[at] < border ? kMasked : x[at];
}

// Mask what is below ascending[place], and of its ties the last as many as are before it.
void mask_below_place(float* x, int64_t size, const std::vector<float>& ascending, int64_t place) {
  const auto tied = std::equal_range(ascending.begin(), ascending.end(), ascending[place]);
  const float border = ascending[place];
  int64_t num_kept = tied.second - ascending.begin() - place;
  mask_below(x, size, border);
  if (tied.first - ascending.begin() == place) return;
  for (int64_t at = 0; at < size; ++at) {
    if (x[at] == border && --num_kept < 0) x[at] = kMasked;
  }
}

// Mask the smallest logits whose mass together is at most 1 - top_p. Walks down from the best one,
// which is 0, and stops where what is left is small enough. Masses are float32, their sums float64,
// rounded before they are compared: as torch's cumsum does it.
void mask_outside_nucleus(float* x, int64_t size, float top_p) {
  thread_local std::vector<float> mass;
  mass.resize(static_cast<size_t>(size));
  exp_below(x, size, 0.0f, mass.data());
  const auto whole = static_cast<float>(total(mass.data(), size));
  double masses[kNumBuckets] = {};
  for (int64_t at = 0; at < size; ++at) {
    if (mass[at] > 0) masses[bucket_of(x[at])] += mass[at] / whole;
  }
  const float rest = 1.0f - top_p;
  double left = 0;
  for (const double one : masses) left += one;
  int32_t bucket = 0;
  while (bucket < kNumBuckets - 1 && static_cast<float>(left - masses[bucket]) > rest) {
    left -= masses[bucket++];
  }
  const auto& ascending = sorted_bucket(x, size, bucket);
  if (ascending.empty()) return;  // a row of NaN
  exp_below(ascending.data(), static_cast<int64_t>(ascending.size()), 0.0f, mass.data());
  auto place = static_cast<int64_t>(ascending.size()) - 1;
  left -= mass[place] / whole;
  while (place > 0 && static_cast<float>(left) > rest) left -= mass[--place] / whole;
  mask_below_place(x, size, ascending, place);
}

}  // namespace

void process_row(const float* logits, int64_t size, const Cuts& cuts, float* processed) {
  thread_local std::vector<int64_t> places;  // that are kept, where not all are
  thread_local std::vector<float> kept;
  const float best = maximum(logits, size);
  float least = cuts.least;
  if (cuts.top_k < size) {
    least = std::max(least, (kth_largest(logits, size, cuts.top_k) - best) / cuts.temperature);
  }
  for (int64_t at = 0; at < size; ++at) {
    const float x = (logits[at] - best) / cuts.temperature;
    processed[at] = x < least ? kMasked : x;
  }
  if (cuts.top_p == 1) return;
  if (least == kMasked) return mask_outside_nucleus(processed, size, cuts.top_p);
  find_kept(processed, size, &places);
  kept.clear();
  for (const int64_t place : places) kept.push_back(processed[place]);
  mask_outside_nucleus(kept.data(), static_cast<int64_t>(kept.size()), cuts.top_p);
  for (size_t i = 0; i < places.size(); ++i) processed[places[i]] = kept[i];
}

float maximum(const float* numbers, int64_t size) {
  Floats best = Floats{} + kMasked;
  int64_t at = 0;
  for (; at + kWidth <= size; at += kWidth) {
    const auto x = load<Floats>(numbers + at);
    best = x > best ? x : best;
  }
  const auto last = load_some<Floats>(numbers + at, size - at, kMasked);
  return max_of(last > best ? last : best);
}

int64_t argmax(const float* numbers, int64_t size) {
  const float best = maximum(numbers, size);
  int64_t at = 0;
  while (at + kWidth <= size && !any(load<Floats>(numbers + at) == best)) at += kWidth;
  while (at < size && numbers[at] != best) ++at;
  return at < size ? at : 0;
}

float margin(const float* numbers, int64_t size) {
  Floats best = Floats{} + kMasked, second = best;
  const auto add = [&best, &second](Floats x) {
    const Floats lower = x > best ? best : x;  // NaN falls through to the next line
    second = lower > second ? lower : second;
    best = x > best ? x : best;
  };
  int64_t at = 0;
  for (; at + kWidth <= size; at += kWidth) add(load<Floats>(numbers + at));
  add(load_some<Floats>(numbers + at, size - at, kMasked));
  float first = kMasked, next = kMasked;
  for (int lane = 0; lane < kWidth; ++lane) {
    for (const float x : {best[lane], second[lane]}) {
      if (x > first) {
        next = first, first = x;
      } else if (x > next) {
        next = x;
      }
    }
  }
  const float distance = first - next;  // NaN of two infinities
  return distance >= 0 ? std::min(distance, kWidestMargin) : 0.0f;
}

float margin_of_odds(float odds) {
  if (std::isnan(odds)) odds = 0;
  return std::clamp(odds + kWidestMargin / 2, 0.0f, kWidestMargin);
}

double total(const float* numbers, int64_t size) {
  constexpr int64_t kColumns = 16;
  double sums[kColumns] = {};
  int64_t at = 0;
  for (; at + kColumns <= size; at += kColumns) {
    for (int64_t column = 0; column < kColumns; ++column) sums[column] += numbers[at + column];
  }
  for (int64_t column = 0; at < size; ++at, ++column) sums[column] += numbers[at];
  double sum = 0;
  for (const double one : sums) sum += one;
  return sum;
}

void exp_below(const float* numbers, int64_t size, float best, float* out) {
  int64_t at = 0;
  for (; at + kWidth <= size; at += kWidth) {
    store(out + at, exp_or_zero(load<Floats>(numbers + at) - best));
  }
  const Floats last = load_some<Floats>(numbers + at, size - at, kMasked);
  store_some(out + at, exp_or_zero(last - best), size - at);
}

void softmax(const float* logits, int64_t size, float* out) {
  exp_below(logits, size, maximum(logits, size), out);
  const auto whole = static_cast<float>(total(out, size));
  for (int64_t at = 0; at < size; ++at) out[at] /= whole;
}

int64_t sample_logits(const float* logits, int64_t size, const NoiseKey& key) {
  return sample<Logits>(logits, size, key);
}

int64_t sample_weights(const float* weights, int64_t size, const NoiseKey& key) {
  return sample<Weights>(weights, size, key);
}

}  // namespace outdraft

OUTDRAFT_EXPORT void finite_rows(int64_t num_rows, int64_t size, const float* logits,
                                 bool* are_finite) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* row = logits + r * size;
    bool has_nan = false;
    for (int64_t at = 0; at < size; ++at) has_nan |= row[at] != row[at];
    are_finite[r] = !has_nan && std::isfinite(outdraft::maximum(row, size));
  }
}

// masked = logits [num_rows, size] where the bit of a token is 1, -inf elsewhere; the masks
// [num_rows, num_words] have one bit per token.
OUTDRAFT_EXPORT void mask_forbidden(int64_t num_rows, int64_t size, int64_t num_words,
                                    const float* logits, const uint32_t* masks, float* masked) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t id = 0; id < size; ++id) {
      const bool is_allowed = masks[id / 32] >> id % 32 & 1;
      masked[id] = is_allowed ? logits[id] : outdraft::kMasked;
    }
    logits += size, masked += size, masks += num_words;
  }
}

OUTDRAFT_EXPORT void process_rows(int64_t num_rows, int64_t size, const float* logits,
                                  const int64_t* requests, const float* temperature,
                                  const float* least, const int64_t* top_k, const float* top_p,
                                  float* processed) {
  const outdraft::CutColumns cuts{temperature, least, top_k, top_p};
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t start = row * size;
    outdraft::process_row(logits + start, size, cuts.of(requests[row]), processed + start);
  }
}

OUTDRAFT_FUNCTIONS(finite_rows, mask_forbidden, process_rows);
