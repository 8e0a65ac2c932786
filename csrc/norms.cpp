// Rows of one root mean square, each row by itself. Statistics and all numbers
// on the way are float32; what is stored is rounded once. The only sums are those of squares, in
// the order of `inverse_rms` (vector_math.h). The readable twin is
// src/outdraft/kernels/torch/pointwise.py.

#include <type_traits>

#include "export.h"
#include "linear.h"
#include "vector_math.h"

namespace outdraft {
namespace {

// to = compute(read), where read(from) gives the numbers of `from` that belong to a vector of `to`.
// What is left behind the vectors is computed as the first number of one: it is the same wherever
// it stands.
template <class Number, class Compute>
void for_row(int64_t size, Number* to, const Compute& compute) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    put(to + i, compute([i](const auto* from) { return numbers(from + i); }));
  }
  for (; i < size; ++i) {
    put(to + i, compute([i](const auto* from) { return broadcast(number(from + i)); })[0]);
  }
}

}  // namespace
}  // namespace outdraft

using outdraft::Floats;

// As `scale_to_rms` of kernels/torch/pointwise.py: rows [R, S].
OUTDRAFT_EXPORT void scale_to_rms(int64_t num_rows, int64_t size, bool is_bf16, float rms,
                                  float eps, const void* x, void* to) {
  using namespace outdraft;
  with_numbers(to, is_bf16, [&](auto* out) {
    using Number = std::remove_pointer_t<decltype(out)>;
    const auto* from = static_cast<const Number*>(x);
    for (int64_t at = 0; at < num_rows * size; at += size) {
      const Floats scale = broadcast(rms * inverse_rms(from + at, size, eps));
      for_row(size, out + at, [&](const auto& read) -> Floats { return read(from + at) * scale; });
    }
  });
}

OUTDRAFT_FUNCTIONS(scale_to_rms);
