// Finds the record with a given pair of numbers: linear hashing (Litwin 1980).
//
// Every record that comes adds a bucket and moves the records of one old bucket: there is no moment
// at which all are entered again.
#pragma once

#include <cstdint>

#include "rows_of_records.h"

namespace outdraft {

// A record has a key, `from` and `token`, and a `next_in_bucket` for the index.
template <class Record>
class PairIndex {
 public:
  // The row of the record with this pair, or kNone.
  int32_t find(const Rows<Record>& records, int32_t from, int32_t token) const {
    if (num_records_ == 0) return kNone;
    int32_t row = heads_[bucket_of(mix(from, token))];
    while (row != kNone && (records[row].token != token || records[row].from != from)) {
      row = records[row].next_in_bucket;
    }
    return row;
  }

  // Adds a record whose pair is not there yet.
  void put(Rows<Record>& records, int32_t row) {
    if (++num_records_ > heads_.size()) split(records);
    push(records, bucket_of(mix(records[row].from, records[row].token)), row);
  }

  void remove(Rows<Record>& records, int32_t row) {
    int32_t* at = &heads_[bucket_of(mix(records[row].from, records[row].token))];
    while (*at != row) at = &records[*at].next_in_bucket;
    *at = records[row].next_in_bucket;
    --num_records_;
  }

  void clear() {
    heads_.clear();
    num_records_ = 0;
    half_ = 1;
  }
  int64_t num_bytes() const { return heads_.num_bytes(); }

 private:
  static uint64_t mix(int32_t from, int32_t token) {
    uint64_t mixed = static_cast<uint32_t>(from) * 0x1E3779B97F4A7C15u +
                     static_cast<uint32_t>(token) * 0x3F58476D1CE4E5B9u;
    mixed ^= mixed >> 29;
    mixed *= 0x14D049BB133111EBu;
    return mixed ^ mixed >> 32;
  }

  // Buckets from `half_` on exist for those that have been split only.
  int32_t bucket_of(uint64_t mixed) const {
    const auto bucket = static_cast<int32_t>(mixed & (2 * half_ - 1));
    return bucket < heads_.size() ? bucket : bucket & (half_ - 1);
  }

  void push(Rows<Record>& records, int32_t bucket, int32_t row) {
    records[row].next_in_bucket = heads_[bucket];
    heads_[bucket] = row;
  }

  void split(Rows<Record>& records) {
    const int32_t added = heads_.push();
    heads_[added] = kNone;
    if (added == 0) return;
    if (added == 2 * half_) half_ *= 2;
    int32_t row = heads_[added - half_];
    heads_[added - half_] = kNone;
    while (row != kNone) {
      const int32_t next = records[row].next_in_bucket;
      push(records, bucket_of(mix(records[row].from, records[row].token)), row);
      row = next;
    }
  }

  Rows<int32_t> heads_;
  int32_t num_records_ = 0;
  int32_t half_ = 1;  // a power of two; there are at most twice as many buckets
};

}  // namespace outdraft
