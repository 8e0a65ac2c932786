// Records that stay where they are while more are added: none is ever copied to make room, so
// adding one costs the same however many there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace outdraft {

constexpr int32_t kNone = -1;  // no row

// Each record is followed by `num_extra` int32 of its own.
template <class Record>
class Rows {
 public:
  explicit Rows(int64_t num_extra = 0) {
    constexpr int64_t kAlign = alignof(Record);
    stride_ = (sizeof(Record) + num_extra * sizeof(int32_t) + kAlign - 1) / kAlign * kAlign;
  }

  Record& operator[](int32_t row) { return *reinterpret_cast<Record*>(at(row)); }
  const Record& operator[](int32_t row) const { return *reinterpret_cast<const Record*>(at(row)); }
  int32_t* extra(int32_t row) { return reinterpret_cast<int32_t*>(at(row) + sizeof(Record)); }
  const int32_t* extra(int32_t row) const {
    return reinterpret_cast<const int32_t*>(at(row) + sizeof(Record));
  }

  // The number of a new row; nothing is written into it.
  int32_t push() {
    if (size_ == static_cast<int64_t>(chunks_.size()) << kShift) {
      chunks_.emplace_back(new std::byte[stride_ << kShift]);
    }
    return size_++;
  }
  void clear() { size_ = 0; }
  int32_t size() const { return size_; }
  int64_t num_bytes() const { return size_ * stride_; }

 private:
  static constexpr int kShift = 9;

  std::byte* at(int32_t row) const {
    return chunks_[row >> kShift].get() + (row & ((1 << kShift) - 1)) * stride_;
  }

  std::vector<std::unique_ptr<std::byte[]>> chunks_;
  int64_t stride_;
  int32_t size_ = 0;
};

// Moves a row that was counted just now before all of the `num` first ones that do not count more.
// `ranked` ends with kNone where there are fewer.
template <class CountOf>
void promote(int32_t* ranked, int64_t num, int32_t row, const CountOf& count_of) {
  int64_t rank = 0;
  while (rank < num && ranked[rank] != kNone && ranked[rank] != row &&
         count_of(ranked[rank]) > count_of(row)) {
    ++rank;
  }
  for (int32_t moved = row; rank < num && moved != kNone; ++rank) {
    std::swap(moved, ranked[rank]);
    if (moved == row) break;
  }
}

}  // namespace outdraft
