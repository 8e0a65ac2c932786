// Memory that a late helper may still read: it is given back only when no helper can.
#pragma once

#include <cstdlib>

#include "team.h"

namespace outdraft {

class KeptMemory {
 public:
  explicit KeptMemory(Team* team) : team_(team) {}
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() { give_back(); }

  // At least so many numbers, from the start of a cache line on; what was there is lost where the
  // memory grows.
  template <class Number>
  Number* reserve(int64_t count) {
    const size_t bytes = sizeof(Number) * static_cast<size_t>(count);
    if (bytes > size_) {
      give_back();
      size_ = (bytes + bytes / 2 + kLine) / kLine * kLine;
      memory_ = std::aligned_alloc(kLine, size_);
    }
    return static_cast<Number*>(memory_);
  }

 private:
  static constexpr size_t kLine = 64;

  void give_back() {
    if (memory_ == nullptr) return;
    if (team_ != nullptr) wait_until_idle(team_);
    std::free(memory_);
    memory_ = nullptr;
  }

  Team* team_;
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace outdraft
