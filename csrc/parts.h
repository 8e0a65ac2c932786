// Parts of one piece of memory, each from a line of the cache on.

#pragma once

#include <algorithm>
#include <cstdint>

namespace outdraft {

constexpr int64_t kPartBytes = 64;  // what the length of a part is rounded up to

// Without memory it only counts: `num_bytes` is how much it takes.
struct Parts {
  template <class Number>
  Number* take(int64_t count) {
    auto* part = reinterpret_cast<Number*>(memory + num_bytes);
    const int64_t bytes = static_cast<int64_t>(sizeof(Number)) * count;
    num_bytes += (bytes + kPartBytes - 1) / kPartBytes * kPartBytes;
    return part;
  }

  template <class Number>
  Number* copy(const Number* from, int64_t count) {
    Number* part = take<Number>(count);
    if (memory != nullptr) std::copy_n(from, count, part);
    return part;
  }

  char* memory = nullptr;
  int64_t num_bytes = 0;
};

}  // namespace outdraft
