// What a pass does to rows between two products, row by row: threads share the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "layer_heads.h"
#include "team.h"
#include "vector_math.h"

namespace outdraft {

constexpr int64_t kMinSharedNumbers = 1 << 14;  // below, sharing costs what it saves
constexpr int64_t kEvenUnits = 4;               // for each thread

// What happens to rows between two products. `Step` has compute(row, scratch), store(row, scratch),
// and row_bytes() of scratch memory. A unit is some rows.
template <class Step>
struct RowsWork {
  Step step;
  int64_t num_rows, unit_rows;

  int64_t num_units() const { return (num_rows + unit_rows - 1) / unit_rows; }
  size_t scratch_bytes() const { return unit_rows * step.row_bytes(); }
  void compute(int64_t unit, void* scratch) const {
    for_rows(unit, [&](int64_t row, int64_t at) {
      step.compute(row, static_cast<char*>(scratch) + at);
    });
  }
  void store(int64_t unit, const void* scratch) const {
    for_rows(unit, [&](int64_t row, int64_t at) {
      step.store(row, static_cast<const char*>(scratch) + at);
    });
  }

  template <class Call>
  void for_rows(int64_t unit, const Call& call) const {
    const int64_t first = unit * unit_rows, count = std::min(unit_rows, num_rows - first);
    for (int64_t i = 0; i < count; ++i) call(first + i, i * step.row_bytes());
  }
};

template <class Step>
void run_rows(Team* team, const Step& step, int64_t num_rows, int64_t row_numbers) {
  if (num_rows == 0) return;
  const Turn turn(num_rows * row_numbers < kMinSharedNumbers ? nullptr : team);
  const int64_t most_units = std::min(kEvenUnits * num_threads(turn.team()), kMaxUnits);
  run_in_turn(turn.team(),
              RowsWork<Step>{step, num_rows, (num_rows + most_units - 1) / most_units});
}

// residual += y, unless y is null; to = the normed sum.
template <class From, class To>
struct AddAndNormalize {
  From* residual;
  const float* y;
  int64_t y_stride;
  const float* weight;
  int64_t size;
  float eps;
  To* to;
  int64_t to_stride;

  int64_t row_bytes() const { return (sizeof(From) + sizeof(To)) * size; }
  void compute(int64_t row, char* scratch) const {
    const From* from = residual + row * size;
    To* normed = reinterpret_cast<To*>(scratch + sizeof(From) * size);
    if (y != nullptr) {
      From* sum = reinterpret_cast<From*>(scratch);
      const float* added = y + row * y_stride;
      for_numbers(size, [&](int64_t i, auto kind) {
        using Kind = decltype(kind);
        put(sum + i, read<Kind>(from + i) + read<Kind>(added + i));
      });
      from = sum;
    }
    normalize(from, weight, size, eps, normed);
  }
  void store(int64_t row, const char* scratch) const {
    if (y != nullptr) std::memcpy(residual + row * size, scratch, sizeof(From) * size);
    std::memcpy(to + row * to_stride, scratch + sizeof(From) * size, sizeof(To) * size);
  }
};

}  // namespace outdraft
