// The tokens that follow a string: found by token, or one by one, the most frequent first.
//
// A follower is a record with a key, (from, token), and a place in a list. The owner knows where
// each list begins, and puts as many of its first records in order as it asks for. The index is
// linear hashing (Litwin 1980): every record that comes adds a bucket and moves the records of one
// old bucket. Records stay where they are. So there is no moment at which all of them are copied or
// entered again: adding one costs the same however many there are.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace outdraft {

constexpr int32_t kNone = -1;  // no row

// Numbered records that stay where they are while more are added.
template <class Record>
class Rows {
 public:
  Record& operator[](int32_t row) { return chunks_[row >> kShift][row & kMask]; }
  const Record& operator[](int32_t row) const { return chunks_[row >> kShift][row & kMask]; }

  int32_t push(const Record& record) {
    if (size_ == static_cast<int64_t>(chunks_.size()) << kShift) {
      chunks_.emplace_back(new Record[1 << kShift]);
    }
    (*this)[size_] = record;
    return size_++;
  }
  int32_t size() const { return size_; }
  int64_t num_bytes() const { return static_cast<int64_t>(size_ * sizeof(Record)); }

 private:
  static constexpr int kShift = 9, kMask = (1 << kShift) - 1;

  std::vector<std::unique_ptr<Record[]>> chunks_;
  int32_t size_ = 0;
};

struct Follower {
  int32_t from, token;
  int32_t next_in_bucket;
  int32_t next, previous;  // in its list
};

// Each `Record` is a Follower, and perhaps more.
template <class Record>
class Followers {
 public:
  Record& operator[](int32_t row) { return records_[row]; }
  const Record& operator[](int32_t row) const { return records_[row]; }

  // The number of a new record, which is in no list yet and cannot be found.
  int32_t push(const Record& record) { return records_.push(record); }

  int32_t find(int32_t from, int32_t token) const {
    if (num_found_ == 0) return kNone;
    int32_t row = heads_[bucket_of(from, token)];
    while (row != kNone && (records_[row].token != token || records_[row].from != from)) {
      row = records_[row].next_in_bucket;
    }
    return row;
  }

  // Adds a record to the index, and to a list behind `previous`; kNone: as the first.
  void put(int32_t row, int32_t& first, int32_t previous) {
    if (++num_found_ > heads_.size()) split();
    enter(row);
    link(row, first, previous);
  }
  void cut(int32_t row, int32_t& first) {
    int32_t* at = &head_of(row);
    while (*at != row) at = &records_[*at].next_in_bucket;
    *at = records_[row].next_in_bucket;
    --num_found_;
    unlink(row, first);
  }
  void move(int32_t row, int32_t& first, int32_t previous) {
    if (records_[row].previous == previous) return;
    unlink(row, first);
    link(row, first, previous);
  }

  // Where a record belongs that is new or goes before more others than it did: behind the last of
  // the list's `num` first ones, which are in order, that goes before it.
  template <class GoesBefore>
  int32_t place_of(int32_t row, int32_t first, int64_t num, const GoesBefore& goes_before) const {
    int32_t previous = kNone, at = first;
    for (; num > 0 && at != kNone && at != row && goes_before(at, row); --num) {
      previous = at;
      at = records_[at].next;
    }
    return previous;
  }

  // Puts the `num` first of a whole list in order.
  template <class GoesBefore>
  void sort(int32_t& first, int64_t num, const GoesBefore& goes_before) {
    int32_t row = first;
    first = kNone;
    while (row != kNone) {
      const int32_t next = records_[row].next;
      link(row, first, place_of(row, first, num, goes_before));
      row = next;
    }
  }

  int64_t num_bytes() const { return records_.num_bytes() + heads_.num_bytes(); }

 private:
  // Buckets from `half_` on exist for those that have been split only.
  int32_t bucket_of(int32_t from, int32_t token) const {
    uint64_t mixed = static_cast<uint32_t>(from) * 0x1E3779B97F4A7C15u +
                     static_cast<uint32_t>(token) * 0x3F58476D1CE4E5B9u;
    mixed ^= mixed >> 29;
    mixed *= 0x14D049BB133111EBu;
    mixed ^= mixed >> 32;
    const auto bucket = static_cast<int32_t>(mixed & (2 * half_ - 1));
    return bucket < heads_.size() ? bucket : bucket & (half_ - 1);
  }
  int32_t& head_of(int32_t row) {
    return heads_[bucket_of(records_[row].from, records_[row].token)];
  }

  void enter(int32_t row) {
    int32_t& head = head_of(row);
    records_[row].next_in_bucket = head;
    head = row;
  }

  void split() {
    const int32_t added = heads_.push(kNone);
    if (added == 0) return;
    if (added == 2 * half_) half_ *= 2;
    int32_t row = heads_[added - half_];
    heads_[added - half_] = kNone;
    while (row != kNone) {
      const int32_t next = records_[row].next_in_bucket;
      enter(row);
      row = next;
    }
  }

  void link(int32_t row, int32_t& first, int32_t previous) {
    int32_t& place = previous == kNone ? first : records_[previous].next;
    records_[row].previous = previous;
    records_[row].next = place;
    if (place != kNone) records_[place].previous = row;
    place = row;
  }
  void unlink(int32_t row, int32_t& first) {
    const Record& record = records_[row];
    (record.previous == kNone ? first : records_[record.previous].next) = record.next;
    if (record.next != kNone) records_[record.next].previous = record.previous;
  }

  Rows<Record> records_;
  Rows<int32_t> heads_;  // of the buckets
  int32_t num_found_ = 0;
  int32_t half_ = 1;  // a power of two; there are at most twice as many buckets
};

}  // namespace outdraft
