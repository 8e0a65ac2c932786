// Products that become heads of queries, keys and values, and go where attention reads them.
//
// A unit is some whole heads, which fill whole tiles: who has multiplied them norms and turns them
// while their sums are in the nearest caches. Written as float32 and read by others, those of a long
// prompt took 5 % more of its time.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "forward.h"
#include "linear_tiles.h"
#include "vector_math.h"

namespace outdraft {

// to = x / rms(x) * weight; without a weight a copy (Zhang, Sennrich 2019).
template <class From, class To>
void normalize(const From* x, const float* weight, int64_t size, float eps, To* to) {
  if (weight == nullptr) return convert(x, size, to);
  const float scale = inverse_rms(x, size, eps);
  for_numbers(size, [&](int64_t i, auto kind) {
    using Kind = decltype(kind);
    put(to + i, read<Kind>(x + i) * scale * read<Kind>(weight + i));
  });
}

// Each pair (x[i], x[i + C / 2]) turned by its angle (Su et al. 2021).
template <class To>
void rotate(const float* x, const float* cos_sin, int64_t size, To* to) {
  const int64_t half = size / 2;
  const float *high = x + half, *sin = cos_sin + half;
  for_numbers(half, [&](int64_t i, auto kind) {
    using Kind = decltype(kind);
    const Kind a = read<Kind>(x + i), b = read<Kind>(high + i);
    const Kind c = read<Kind>(cos_sin + i), s = read<Kind>(sin + i);
    put(to + i, a * c - b * s);
    put(to + half + i, b * c + a * s);
  });
}

// Outputs are, layer by layer, heads of queries, of keys and of values.
template <class Number>
struct HeadPlaces {
  const DecoderLayer* layers;
  const DecoderCache* caches;
  const float* cos_sin;
  const int64_t *positions, *slots;
  int64_t num_positions, num_q, num_kv, size;  // numbers of a row, and of a head
  float eps;
  Number* q;

  int64_t layer_size() const { return num_q + 2 * num_kv; }
};

// All heads of a block of rows; `Number`: float, or uint16_t for bfloat16.
template <class Number>
struct HeadProducts {
  MultiplyTile multiply;
  LinearWeights weights;
  Inputs x;
  int64_t num_rows;
  HeadPlaces<Number> places;

  int64_t unit_size() const {
    const int64_t whole = std::lcm(places.size, kTile), most = whole * kMaxUnits;
    return (weights.num_outputs + most - 1) / most * whole;
  }
  int64_t num_units() const { return (weights.num_outputs + unit_size() - 1) / unit_size(); }
  size_t scratch_bytes() const {
    const int64_t num_floats = (num_rows + 1) * unit_size() + places.size;
    return sizeof(float) * num_floats + sizeof(Number) * num_rows * unit_size();
  }

  void compute(int64_t unit, void* scratch) const {
    float *sums = static_cast<float*>(scratch), *row_sums = sums + num_rows * unit_size();
    float* normed = row_sums + unit_size();
    Number* to = heads_in(scratch);
    const int64_t first = unit * unit_size(), end = first + count_of(unit);
    for (int64_t at = first; at < end; at += kTile) {
      multiply(weights, x, num_rows, at / kTile, sums + (at - first) * num_rows);
    }
    for (int64_t row = 0; row < num_rows; ++row, to += unit_size()) {
      // A late helper may find any number where the position was.
      const int64_t position = static_cast<const volatile int64_t*>(places.positions)[row];
      if (position < 0 || position >= places.num_positions) return;
      for (int64_t at = first; at < end; at += kTile) {
        const float* bias = weights.bias == nullptr ? nullptr : weights.bias + at;
        const float* from = sums + (at - first) * num_rows + row * kTile;
        for_numbers(std::min(kTile, end - at), [&](int64_t e, auto sum) {
          using Kind = decltype(sum);
          sum = read<Kind>(from + e);
          if (bias != nullptr) sum += read<Kind>(bias + e);
          put(row_sums + at - first + e, sum);
        });
      }
      const float* angles = places.cos_sin + position * places.size;
      for (int64_t at = first; at < end; at += places.size) {
        finish(at, row_sums + at - first, angles, normed, to + at - first);
      }
    }
  }

  void store(int64_t unit, const void* scratch) const {
    const Number* from = heads_in(const_cast<void*>(scratch));
    const int64_t first = unit * unit_size(), end = first + count_of(unit);
    for (int64_t row = 0; row < num_rows; ++row, from += unit_size()) {
      for (int64_t at = first; at < end; at += places.size) {
        if (Number* to = place_of(row, at)) std::copy_n(from + at - first, places.size, to);
      }
    }
  }

 private:
  Number* heads_in(void* scratch) const {
    float* behind_sums = static_cast<float*>(scratch) + (num_rows + 1) * unit_size();
    return reinterpret_cast<Number*>(behind_sums + places.size);
  }

  int64_t count_of(int64_t unit) const {
    return std::min(unit_size(), weights.num_outputs - unit * unit_size());
  }

  // The head at output `at`, from its sums.
  void finish(int64_t at, const float* head, const float* angles, float* normed, Number* to) const {
    const DecoderLayer& layer = places.layers[at / places.layer_size()];
    const int64_t place = at % places.layer_size(), size = places.size;
    if (place >= places.num_q + places.num_kv) return convert(head, size, to);
    if (const float* norm = place < places.num_q ? layer.q_norm : layer.k_norm; norm != nullptr) {
      normalize(head, norm, size, places.eps, normed);
      head = normed;
    }
    rotate(head, angles, size, to);
  }

  // Where a head of a row goes; null: nowhere.
  Number* place_of(int64_t row, int64_t at) const {
    const DecoderCache& cache = places.caches[at / places.layer_size()];
    const int64_t place = at % places.layer_size(), in_kv = place - places.num_q;
    if (in_kv < 0) return places.q + row * places.num_q + place;
    const int64_t slot = places.slots[row];
    if (slot < 0) return nullptr;
    if (in_kv < places.num_kv) return static_cast<Number*>(cache.k) + slot * places.num_kv + in_kv;
    return static_cast<Number*>(cache.v) + slot * places.num_kv + in_kv - places.num_kv;
  }
};

}  // namespace outdraft
