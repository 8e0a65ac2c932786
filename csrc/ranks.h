// What calls into the library tell other ranks on their way: see ranks.cpp.
#pragma once

#include <cstdint>

namespace outdraft {

// How often, and how many bytes left this rank.
struct Sent {
  int64_t calls, bytes;
};

// One rank's end of a group, and what went through it since Python looked, which fills it
// (kernels/native/ranks.py). The operations are those of RankGroup in distributed/group.py; all
// ranks call the same ones. False: another rank does not answer; `failure` says why.
struct RankLink {
  char* memory;
  int64_t rank, size, timeout_us;
  Sent sums, turns, joins, gathers;
  int64_t failure;

  // total [count] = the sum of the numbers of all ranks, in rank order, in float32; `Number`s and
  // `Total`s are float, or uint16_t for bfloat16. `total` may be `part`.
  template <class Number, class Total>
  bool sum(const Number* part, int64_t count, Total* total);

  // out [received] = what is for this rank of the data of all. sent, received [size]: bytes for and
  // from each.
  bool turn(const char* data, const int64_t* sent, const int64_t* received, char* out);

  // out [size, bytes] = the data of all ranks: rows of each of them, or what all have alike.
  bool join(const char* data, int64_t bytes, char* out);
  bool gather(const char* data, int64_t bytes, char* out);
};

}  // namespace outdraft
