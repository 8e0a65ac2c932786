// Ranks of one machine exchange bytes through memory that all of them see, zeros at first.
//
// It begins with a line that says whether the group has ended, and a line for each rank with the
// number of rounds that it has written; two buffers for each rank follow. A message crosses in
// rounds. In each of them every rank fills its buffer, says so, waits until all have said so, and
// reads what is for it. No rank needs to say that it has read: whoever has written round n has read
// round n - 1, so whoever has seen that all wrote round n may write round n + 1 where round n - 1
// was. The word that counts is stored with release order behind those reads and writes, and loaded
// with acquire order before others follow.

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <type_traits>

#include "export.h"
#include "ranks.h"
#include "vector_math.h"

namespace outdraft {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free, "processes share words, but no locks");

constexpr int64_t kCapacity = 1 << 18;  // bytes of a message that a buffer holds
constexpr int kSpins = 100;             // some microseconds
constexpr auto kYielding = std::chrono::milliseconds(1);
constexpr timespec kSleep = {0, 50'000};

enum Result : int32_t { kOk, kEnded, kTimedOut, kDiffers };  // kernels/native/ranks.py knows them

// What all ranks of an operation do alike.
struct Label {
  int64_t kind, bytes;
  bool operator==(const Label&) const = default;
};
enum Kind : int64_t { kGather, kExchange, kSumFloat, kSumBf16 };

struct alignas(64) Line {
  Word word;
};

struct alignas(64) Buffer {
  Label label;
  int64_t num_rounds;  // that its writer needs
  alignas(64) char bytes[kCapacity];
};

struct Group {
  char* memory;
  int64_t rank, size, timeout_us;

  Word& ended() const { return lines()[0].word; }
  Word& written(int64_t of) const { return lines()[1 + of].word; }
  Buffer& buffer(int64_t of, uint64_t round) const {
    return reinterpret_cast<Buffer*>(lines() + 1 + size)[2 * of + round % 2];
  }

 private:
  Line* lines() const { return reinterpret_cast<Line*>(memory); }
};

// Who gives up ends the group: nobody shall wait for it.
Result give_up(const Group& group, Result why) {
  group.ended().store(1, std::memory_order_release);
  return why;
}

Result wait_for(const Group& group, const Word& word, uint64_t count) {
  const auto is_there = [&] { return word.load(std::memory_order_acquire) >= count; };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (is_there()) return kOk;
    pause_core();
  }
  const auto start = Clock::now();
  const auto limit = std::chrono::microseconds(group.timeout_us);
  while (!is_there()) {
    if (group.ended().load(std::memory_order_acquire) != 0) return kEnded;
    const auto waited = Clock::now() - start;
    if (waited > limit) return give_up(group, kTimedOut);
    waited < kYielding ? (void)sched_yield() : (void)nanosleep(&kSleep, nullptr);
  }
  return kOk;
}

// The caller has filled its buffer of a round: say so, and wait for the buffers of all.
Result meet(const Group& group, uint64_t round, Label label, int64_t num_rounds) {
  if (group.ended().load(std::memory_order_acquire) != 0) return kEnded;
  Buffer& own = group.buffer(group.rank, round);
  own.label = label;
  own.num_rounds = num_rounds;
  group.written(group.rank).store(round + 1, std::memory_order_release);
  for (int64_t other = 0; other < group.size; ++other) {
    const Result result = wait_for(group, group.written(other), round + 1);
    if (result != kOk) return result;
    if (group.buffer(other, round).label != label) return give_up(group, kDiffers);
  }
  return kOk;
}

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// `data`, of as many bytes on all ranks, crosses to all; take(round, offset, bytes) reads a part.
template <class Take>
Result spread(const Group& group, Kind kind, const char* data, int64_t bytes, const Take& take) {
  int64_t offset = 0;
  do {
    const uint64_t round = group.written(group.rank).load(std::memory_order_relaxed);
    const int64_t part = std::min(kCapacity, bytes - offset);
    copy(group.buffer(group.rank, round).bytes, data + offset, part);
    const Result result = meet(group, round, {kind, bytes}, 0);
    if (result != kOk) return result;
    take(round, offset, part);
    offset += part;
  } while (offset < bytes);
  return kOk;
}

// out [size, bytes] = the data of all ranks.
Result gather(const Group& group, const char* data, int64_t bytes, char* out) {
  return spread(group, kGather, data, bytes, [&](uint64_t round, int64_t offset, int64_t part) {
    for (int64_t of = 0; of < group.size; ++of) {
      copy(out + of * bytes + offset, group.buffer(of, round).bytes, part);
    }
  });
}

// total = ((part 0 + part 1) + part 2) + ..., in float32.
template <class Number, class Total>
void add(const Group& group, uint64_t round, int64_t size, Total* total) {
  for_numbers(size, [&](int64_t i, auto kind) {
    auto sum = kind;
    for (int64_t of = 0; of < group.size; ++of) {
      const auto* part = reinterpret_cast<const Number*>(group.buffer(of, round).bytes);
      const auto term = read<decltype(kind)>(part + i);
      sum = of == 0 ? term : sum + term;
    }
    put(total + i, sum);
  });
}

template <class Number, class Total>
Result sum(const Group& group, const Number* data, int64_t count, Total* total) {
  constexpr int64_t kBytes = sizeof(Number);
  constexpr Kind kKind = kBytes == 2 ? kSumBf16 : kSumFloat;
  const auto* from = reinterpret_cast<const char*>(data);
  return spread(group, kKind, from, count * kBytes, [&](uint64_t round, int64_t at, int64_t part) {
    add<Number>(group, round, part / kBytes, total + at / kBytes);
  });
}

// out = what is for this rank of the data of all. sent, received [size]: bytes for and from each.
Result exchange(const Group& group, const char* data, const int64_t* sent,
                const int64_t* received, char* out) {
  const int64_t rank = group.rank, size = group.size;
  const int64_t room = kCapacity / size;  // of a buffer, for each rank
  const auto part = [&](int64_t bytes, int64_t i) {
    return std::clamp<int64_t>(bytes - i * room, 0, room);
  };
  int64_t num_rounds = (*std::max_element(sent, sent + size) + room - 1) / room;
  for (int64_t i = 0; i == 0 || i < num_rounds; ++i) {
    const uint64_t round = group.written(rank).load(std::memory_order_relaxed);
    const char* from = data;
    for (int64_t to = 0; to < size; from += sent[to++]) {
      copy(group.buffer(rank, round).bytes + to * room, from + i * room, part(sent[to], i));
    }
    const Result result = meet(group, round, {kExchange, 0}, num_rounds);
    if (result != kOk) return result;
    char* into = out;
    for (int64_t of = 0; of < size; into += received[of++]) {
      const Buffer& buffer = group.buffer(of, round);
      copy(into + i * room, buffer.bytes + rank * room, part(received[of], i));
      num_rounds = std::max(num_rounds, buffer.num_rounds);
    }
  }
  return kOk;
}

Group group_of(const RankLink& link) {
  return {link.memory, link.rank, link.size, link.timeout_us};
}

bool settle(RankLink& link, Sent& sent, int64_t bytes, Result result) {
  sent.calls += 1;
  sent.bytes += bytes;
  link.failure = result;
  return result == kOk;
}

}  // namespace

template <class Number, class Total>
bool RankLink::sum(const Number* part, int64_t count, Total* total) {
  const int64_t bytes = (size - 1) * count * int64_t{sizeof(Number)};
  return settle(*this, sums, bytes, outdraft::sum(group_of(*this), part, count, total));
}

template bool RankLink::sum(const float*, int64_t, float*);
template bool RankLink::sum(const uint16_t*, int64_t, float*);
template bool RankLink::sum(const uint16_t*, int64_t, uint16_t*);

bool RankLink::turn(const char* data, const int64_t* sent, const int64_t* received, char* out) {
  const int64_t bytes = std::accumulate(sent, sent + size, int64_t{0}) - sent[rank];
  return settle(*this, turns, bytes, exchange(group_of(*this), data, sent, received, out));
}

bool RankLink::join(const char* data, int64_t bytes, char* out) {
  return settle(*this, joins, (size - 1) * bytes,
                outdraft::gather(group_of(*this), data, bytes, out));
}

bool RankLink::gather(const char* data, int64_t bytes, char* out) {
  return settle(*this, gathers, (size - 1) * bytes,
                outdraft::gather(group_of(*this), data, bytes, out));
}

}  // namespace outdraft

using namespace outdraft;

// Bytes of memory that a group needs.
OUTDRAFT_EXPORT int64_t ranks_bytes(int64_t size) {
  return (1 + size) * int64_t{sizeof(Line)} + 2 * size * int64_t{sizeof(Buffer)};
}

// How many rounds a rank has written; while it does, another thread may ask.
OUTDRAFT_EXPORT int64_t ranks_num_rounds(char* memory, int64_t rank) {
  return static_cast<int64_t>(Group{memory, 0, 0, 0}.written(rank).load(std::memory_order_relaxed));
}

// End the group: whoever waits stops at once, and whoever comes is refused.
OUTDRAFT_EXPORT void ranks_end(char* memory) {
  Group{memory, 0, 0, 0}.ended().store(1, std::memory_order_release);
}

OUTDRAFT_EXPORT int32_t ranks_gather(char* memory, int64_t rank, int64_t size, int64_t timeout_us,
                                     const char* data, int64_t bytes, char* out) {
  return gather({memory, rank, size, timeout_us}, data, bytes, out);
}

// out [count] = the sum of the numbers of all ranks, in rank order, rounded once.
OUTDRAFT_EXPORT int32_t ranks_sum(char* memory, int64_t rank, int64_t size, int64_t timeout_us,
                                  const char* data, int64_t count, char* out, int32_t is_bf16) {
  const Group group{memory, rank, size, timeout_us};
  Result result = kOk;
  with_numbers(out, is_bf16, [&](auto* total) {
    using Number = std::remove_pointer_t<decltype(total)>;
    result = sum(group, reinterpret_cast<const Number*>(data), count, total);
  });
  return result;
}

OUTDRAFT_EXPORT int32_t ranks_exchange(char* memory, int64_t rank, int64_t size, int64_t timeout_us,
                                       const char* data, const int64_t* sent,
                                       const int64_t* received, char* out) {
  return exchange({memory, rank, size, timeout_us}, data, sent, received, out);
}

namespace outdraft {

OUTDRAFT_STRUCT(RankLink, memory, rank, size, timeout_us, sums, turns, joins, gathers, failure);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(ranks_bytes, ranks_num_rounds, ranks_end, ranks_gather, ranks_sum,
                   ranks_exchange);
