// Products of the rows of an attention tile with keys or values, which are laid out for that first:
// the layout and the loops of linear.cpp, for matrices that are read once. Or with values where they
// lie, where so few rows meet them that a copy is not worth it.
//
// A laid-out matrix has its outputs in groups of vectors; a group has, step by step, what one
// instruction meets: one input in float32, a pair of inputs in bfloat16. The sum of an output runs
// over the steps in order, in one register that begins with zero, for any number of rows. Matrix
// registers have an order of their own (amx.h), which is the same for any number of rows, too.
#pragma once

#include <algorithm>
#include <utility>

#include "amx.h"
#include "simd.h"
#include "vector_math.h"

namespace outdraft {

// float32; pairs of bfloat16 by float32 rows; pairs of bfloat16 by pairs of bfloat16.
enum class Products { kFloat32, kWidened, kDots };

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kGroupVectors = 2, kGroupRows = 5;  // their sums fit the registers
#else
constexpr int kGroupVectors = 4, kGroupRows = 6;
#endif

// Where sums start: out[row] = scale * x[row] . matrix, or x[row] . matrix + shrink[row] * out[row]
enum class Start { kZero, kShrunk };

// What the cache fetches meanwhile: rows, line by line, and what follows them.
struct Fetch {
  const void* const *row, *const *end;
  int64_t row_bytes, at = 0;
  const Fetch* next = nullptr;

  void lines(int64_t count) {
    for (; count > 0; --count) {
      if (row == end) {
        if (next == nullptr) return;
        *this = *next;
        continue;
      }
      prefetch_far(static_cast<const char*>(*row) + at);
      at += 64;
      if (at >= row_bytes) at = 0, ++row;
    }
  }
};

// For outputs that fill vectors and at most kGroupRows rows.
struct TileProduct {
  const uint32_t* matrix;
  int64_t matrix_steps;  // from one vector of outputs to the next, in vectors
  int64_t num_steps, num_outputs, num_rows;
  const uint32_t* x;  // words: a float32 number or a pair
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  float scale;          // of sums that start with zero
  const float* shrink;  // of the others
  // Instead of a matrix: rows where they lie, from one of their numbers on.
  const void* const* rows;
  int64_t first_number;
  Fetch* fetch;
};

namespace detail {

template <Products kProducts>
inline Floats add_products(Floats sum, Words matrix, const uint32_t* x) {
  if constexpr (kProducts == Products::kDots) return dot_pairs(sum, matrix, broadcast_word(*x));
  const Floats first = (Floats)broadcast_word(x[0]);
  if constexpr (kProducts == Products::kFloat32) return fused((Floats)matrix, first, sum);
  sum = fused(low_halves(matrix), first, sum);
  return fused(high_halves(matrix), (Floats)broadcast_word(x[1]), sum);
}

// The words of a laid-out matrix, step by step, for outputs from `first` on.
class LaidOut {
 public:
  LaidOut(const TileProduct& p, int64_t first) : at_(p.matrix + first * p.matrix_steps) {}

  template <int V>
  void read(Words* words) {
    for (int v = 0; v < V; ++v) words[v] = load<Words>(at_ + v * kWidth);
    at_ += V * kWidth;
  }

 private:
  const uint32_t* at_;
};

// The same of rows of float32 numbers where they lie; what `fetch` names is fetched meanwhile.
class InPlace {
 public:
  InPlace(const TileProduct& p, int64_t first)
      : row_(p.rows), at_(p.first_number + first), fetch_(*p.fetch) {}

  template <int V>
  void read(Words* words) {
    const float* row = static_cast<const float*>(*row_++) + at_;
    for (int v = 0; v < V; ++v) words[v] = load<Words>(row + v * kWidth);
    fetch_.lines(V * sizeof(Words) / 64);
  }

 private:
  const void* const* row_;
  const int64_t at_;
  Fetch& fetch_;
};

// `p.num_rows` is R; outputs [first, first + V vectors).
template <Products kProducts, Start kStart, class Source, int V, int R>
void multiply_group(const TileProduct& p, int64_t first) {
  constexpr int kStepWords = kProducts == Products::kWidened ? 2 : 1;  // of a row
  Source source(p, first);
  const uint32_t* x = p.x;
  const int64_t x_stride = p.x_stride, out_stride = p.out_stride;
  float* out = p.out + first;
  Floats sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v] = Floats{};
      if constexpr (kStart == Start::kShrunk) {
        sums[r][v] = numbers(out + r * out_stride + v * kWidth) * p.shrink[r];
      }
    }
  }
  for (int64_t left = p.num_steps; left > 0; --left, x += kStepWords) {
    Words words[V];
    source.template read<V>(words);
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) {
        sums[r][v] = add_products<kProducts>(sums[r][v], words[v], x + r * x_stride);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (kStart == Start::kZero) sums[r][v] = sums[r][v] * p.scale;
      store(out + r * out_stride + v * kWidth, sums[r][v]);
    }
  }
}

template <Products kProducts, Start kStart, class Source, int V, int R = kGroupRows>
void multiply_outputs(const TileProduct& p, int64_t first) {
  if constexpr (R > 1) {
    if (p.num_rows < R) return multiply_outputs<kProducts, kStart, Source, V, R - 1>(p, first);
  }
  multiply_group<kProducts, kStart, Source, V, R>(p, first);
}

#if defined(__AMX_BF16__)

// Outputs [first, first + as many vectors as there are kVectors); each has a register.
template <Start kStart, int... kVectors>
void multiply_group_in_matrices(const TileProduct& p, int64_t first,
                                std::integer_sequence<int, kVectors...>) {
  constexpr int64_t kStepWords = sizeof...(kVectors) * kWidth;
  const uint32_t* matrix = p.matrix + first * p.matrix_steps;
  float* out = p.out + first;
  if constexpr (kStart == Start::kShrunk) {
    (load_matrix<kVectors>(out + kVectors * kWidth, 4 * p.out_stride), ...);
  } else {
    (zero_matrix<kVectors>(), ...);
  }
  for (int64_t step = 0; step < p.num_steps; step += kMatrixRows) {
    load_matrix<4>(p.x + step, 4 * p.x_stride);
    (
        [&] {
          load_matrix<6 + kVectors % 2>(matrix + kVectors * kWidth, 4 * kStepWords);
          add_products_of_matrices<kVectors, 4, 6 + kVectors % 2>();
        }(),
        ...);
    matrix += kMatrixRows * kStepWords;
  }
  (store_matrix<kVectors>(out + kVectors * kWidth, 4 * p.out_stride), ...);
}

// out[row] *= factors(row)
template <class Factors>
void scale_rows(const TileProduct& p, const Factors& factors) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const float factor = factors(r);
    if (factor == 1.0f) continue;
    for (float* at = p.out + r * p.out_stride; at < p.out + r * p.out_stride + p.num_outputs;) {
      outdraft::store(at, numbers(at) * factor);
      at += kWidth;
    }
  }
}

#endif

}  // namespace detail

// Vectors of outputs that stand together from output `first` on.
inline int64_t group_vectors(int64_t first, int64_t num_outputs) {
  return num_outputs - first >= kGroupVectors * kWidth ? kGroupVectors : 1;
}

template <Products kProducts, Start kStart, class Source = detail::LaidOut>
void multiply_rows(const TileProduct& p) {
  for (int64_t first = 0; first < p.num_outputs;) {
    const int64_t vectors = group_vectors(first, p.num_outputs);
    if (vectors == kGroupVectors) {
      detail::multiply_outputs<kProducts, kStart, Source, kGroupVectors>(p, first);
    } else {
      detail::multiply_outputs<kProducts, kStart, Source, 1>(p, first);
    }
    first += vectors * kWidth;
  }
}

// Values of float32 where they lie, by their weights: the same sums as of values that are laid out.
inline void multiply_in_place(const TileProduct& p) {
  multiply_rows<Products::kFloat32, Start::kShrunk, detail::InPlace>(p);
}

#if defined(__AMX_BF16__)

// As multiply_rows, of pairs by pairs, for up to kMatrixRows rows, in matrix registers, which have
// the shape of these rows: amx.h has the order of the sums. Rows and matrix have zeros behind their
// last step, to a multiple of 16 steps.
template <Start kStart>
void multiply_rows_in_matrices(const TileProduct& p) {
  if constexpr (kStart == Start::kShrunk) {
    detail::scale_rows(p, [&](int64_t row) { return p.shrink[row]; });
  }
  for (int64_t first = 0; first < p.num_outputs;) {
    const int64_t vectors = group_vectors(first, p.num_outputs);
    if (vectors == kGroupVectors) {
      using Vectors = std::make_integer_sequence<int, kGroupVectors>;
      detail::multiply_group_in_matrices<kStart>(p, first, Vectors());
    } else {
      detail::multiply_group_in_matrices<kStart>(p, first, std::integer_sequence<int, 0>());
    }
    first += vectors * kWidth;
  }
  if constexpr (kStart == Start::kZero) {
    detail::scale_rows(p, [&](int64_t) { return p.scale; });
  }
}

#endif

namespace detail {

template <int kDistance, int... kPlaces>
[[gnu::always_inline]] inline void exchange(Words& a, Words& b,
                                            std::integer_sequence<int, kPlaces...>) {
  const Words low = __builtin_shufflevector(
      a, b, (kPlaces & kDistance ? kPlaces - kDistance + kWidth : kPlaces)...);
  b = __builtin_shufflevector(
      a, b, (kPlaces & kDistance ? kPlaces + kWidth : kPlaces + kDistance)...);
  a = low;
}

// Word j of vector i becomes word i of vector j. Inlined and without loops it runs in registers.
template <int kDistance = 1>
[[gnu::always_inline]] inline void transpose(Words* vectors) {
  if constexpr (kDistance < kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (!(i & kDistance)) exchange<kDistance>(vectors[i], vectors[i + kDistance], Places{});
    }
    transpose<2 * kDistance>(vectors);
  }
}

// The first `count` numbers, then zeros.
template <class Vector, class Number>
inline Vector load_up_to(const Number* from, int64_t count) {
  if (count * sizeof(Number) >= sizeof(Vector)) return load<Vector>(from);
  Vector vector = {};
  std::memcpy(&vector, from, static_cast<size_t>(count) * sizeof(Number));
  return vector;
}

// A vector's words of as many rows become outputs: `to` gets them step by step, `next` words apart.
// `count`: the numbers of a row from `at` on; `kIsWhole`: they fill the vector.
template <bool kIsWhole, class Number>
void turn_block(const void* const* rows, int64_t at, int64_t count, uint32_t* to, int64_t next) {
  Words words[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    const Number* row = static_cast<const Number*>(rows[i]) + at;
    words[i] = kIsWhole ? load<Words>(row) : load_up_to<Words>(row, count);
  }
  transpose(words);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) store(to + i * next, words[i]);
}

// Word i is half kFirst + i of `even`, and above it that of `odd`.
template <int kFirst, int... kPlaces>
inline Words pairs(WordHalves even, WordHalves odd, std::integer_sequence<int, kPlaces...>) {
  return (Words)__builtin_shufflevector(
      even, odd, (kFirst + kPlaces / 2 + kPlaces % 2 * 2 * kWidth)...);
}

// One vector of pairs from two rows, or two.
inline void pair_rows(const uint16_t* even, const uint16_t* odd, int64_t count, int64_t vectors,
                      uint32_t* to) {
  using AllPlaces = std::make_integer_sequence<int, 2 * kWidth>;
  const auto low = load_up_to<WordHalves>(even, count), high = load_up_to<WordHalves>(odd, count);
  store(to, pairs<0>(low, high, AllPlaces()));
  if (vectors > 1) store(to + kWidth, pairs<kWidth>(low, high, AllPlaces()));
}

}  // namespace detail

// The steps of a matrix whose inputs are numbers of this kind.
template <class Number>
constexpr int64_t num_steps(int64_t num_inputs) {
  return sizeof(Number) == 4 ? num_inputs : (num_inputs + 1) / 2;
}

// Numbers [offset, offset + size) of rows become inputs, rows outputs; `num_rows` fills vectors.
// Returns matrix_steps, which fills vectors too.
template <class Number>
int64_t lay_out_columns(const void* const* rows, int64_t num_rows, int64_t offset, int64_t size,
                        uint32_t* matrix, Fetch& fetch) {
  constexpr int64_t kNumbers = 4 / sizeof(Number) * kWidth;  // of a vector
  const int64_t matrix_steps = (size + kNumbers - 1) / kNumbers * kWidth;
  for (int64_t first = 0; first < num_rows;) {
    const int64_t vectors = group_vectors(first, num_rows);
    uint32_t* to = matrix + first * matrix_steps;
    for (int64_t v = 0; v < vectors; ++v, first += kWidth) {
      for (int64_t step = 0; step < matrix_steps; step += kWidth) {
        const int64_t at = step * kNumbers / kWidth, count = size - at;
        const auto& turn = count >= kNumbers ? detail::turn_block<true, Number>
                                             : detail::turn_block<false, Number>;
        fetch.lines(kWidth * sizeof(Words) / 64);
        turn(rows + first, offset + at, count, to + (step * vectors + v) * kWidth,
             vectors * kWidth);
      }
    }
  }
  return matrix_steps;
}

// Rows become inputs, their numbers [offset, offset + size) outputs; where steps are pairs, there
// is one row behind the last. Returns matrix_steps.
template <class Number>
int64_t lay_out_rows(const void* const* rows, int64_t num_rows, int64_t offset, int64_t size,
                     uint32_t* matrix, Fetch& fetch) {
  const int64_t matrix_steps = num_steps<Number>(num_rows);
  const int64_t num_outputs = (size + kWidth - 1) / kWidth * kWidth;
  for (int64_t first = 0; first < num_outputs;) {
    const int64_t vectors = group_vectors(first, num_outputs);
    for (int64_t step = 0; step < matrix_steps; ++step) {
      fetch.lines(vectors);
      if constexpr (sizeof(Number) == 4) {
        const auto* row = static_cast<const Number*>(rows[step]) + offset;
        for (int64_t at = first; at < first + vectors * kWidth; at += kWidth, matrix += kWidth) {
          store(matrix, detail::load_up_to<Words>(row + at, size - at));
        }
      } else {
        const auto* even = static_cast<const Number*>(rows[2 * step]) + offset;
        const auto* odd = static_cast<const Number*>(rows[2 * step + 1]) + offset;
        for (int64_t v = 0; v < vectors; v += 2) {
          const int64_t at = first + v * kWidth;
          detail::pair_rows(even + at, odd + at, size - at, vectors - v, matrix + v * kWidth);
        }
        matrix += vectors * kWidth;
      }
    }
    first += vectors * kWidth;
  }
  return matrix_steps;
}

}  // namespace outdraft
