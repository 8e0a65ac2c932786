// Threads of our own that share work of microseconds.
//
// A job is cut into units. The caller and its helpers claim units; whoever has claimed one computes
// it into memory of its own, and stores it. The caller never waits for a helper that lost its core:
// after its patience it takes the unit back, computes it again, and works alone for a while. What
// the late helper computed is thrown away: it may store a unit only while the unit is still its
// own. So results never depend on how the threads run, and a process that was forked, which has no
// helpers, computes correctly.
//
// It is fork and join, as of a loop in OpenMP. That the caller computes a late helper's unit again
// is as with the backup tasks of MapReduce (Dean, Ghemawat 2004); how both settle whose result
// counts is our own.
//
// A `Work` is trivially copyable. It is copied into the team, so that a late helper reads no dead
// object:
//   int64_t num_units() const;       at most kMaxUnits
//   size_t scratch_bytes() const;    what `compute` may write
//   void compute(int64_t unit, void* scratch) const;
//   void store(int64_t unit, const void* scratch) const;   short: the caller waits for it
// NOTE: a late helper still reads what its `Work` points to, although nobody wants the result. So
// that memory may be written after `run` (this is the one race here, and its outcome is discarded:
// `compute` must end for any numbers), but it is given back to the system only after
// `wait_until_idle`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace outdraft {

constexpr int64_t kMaxUnits = 1024;
constexpr size_t kMaxWorkBytes = 320;

class Team;

void wait_until_idle(Team* team);       // no helper still reads inputs of a job that is over
int64_t num_threads(const Team* team);  // the caller included; 1 for a null team

// Memory that only grows. A late helper of the team may still read it: it is given back only when
// no helper can. Without a team nobody else reads it.
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
      size_ = bytes + bytes / 2;
      memory_ = allocate(size_);
    }
    return static_cast<Number*>(memory_);
  }

 private:
  // Much memory lies in huge pages where the system has them: its parts meet different lines of a
  // cache. `bytes` is rounded up.
  static void* allocate(size_t& bytes);

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

// The right to share jobs with the helpers, held until its end. Who comes while another turn lasts,
// or soon after a helper was late, works alone: then `team` is null.
class Turn {
 public:
  explicit Turn(Team* team);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  Team* team() const { return team_; }

 private:
  Team* team_;
};

// Memory of the team for the inputs of jobs, contents lost when it grows; a late helper may read it
// at any time. Only for who has the turn. Without a team: memory of the calling thread.
void* input_block(Team* team, size_t bytes);
void* own_scratch(size_t bytes);  // of the calling thread, for `compute`

namespace detail {

struct Calls {
  void (*compute)(const void* work, int64_t unit, void* scratch);
  void (*store)(const void* work, int64_t unit, const void* scratch);
};

template <class Work>
inline constexpr Calls kCalls = {
    [](const void* work, int64_t unit, void* scratch) {
      static_cast<const Work*>(work)->compute(unit, scratch);
    },
    [](const void* work, int64_t unit, const void* scratch) {
      static_cast<const Work*>(work)->store(unit, scratch);
    }};

void run_shared(Team* team, const Calls& calls, const void* work, size_t work_bytes,
                int64_t num_units, size_t scratch_bytes);

}  // namespace detail

// Compute and store all units; `team`: of the caller's turn, or null.
template <class Work>
void run_in_turn(Team* team, const Work& work) {
  static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) <= kMaxWorkBytes);
  const int64_t num_units = work.num_units();
  if (team != nullptr && num_units > 1 && num_units <= kMaxUnits) {
    detail::run_shared(team, detail::kCalls<Work>, &work, sizeof(Work), num_units,
                       work.scratch_bytes());
    return;
  }
  void* scratch = own_scratch(work.scratch_bytes());
  for (int64_t unit = 0; unit < num_units; ++unit) {
    work.compute(unit, scratch);
    work.store(unit, scratch);
  }
}

// The same for one job, with a turn of its own.
template <class Work>
void run(Team* team, const Work& work) {
  const Turn turn(team);
  run_in_turn(turn.team(), work);
}

}  // namespace outdraft
