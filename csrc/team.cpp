// Threads that share work of microseconds: see team.h.
//
// Who may touch what. A job is published as a sequence lock (Boehm 2012 has them in C++): its
// number is cleared, its fields are written, its number is set. A helper that read the same number
// before and after the fields has the fields of that job. The word of a unit is 4 * job + a state;
// a word of an older job is free. Only the exchange of a whole word claims a unit, stores it or
// takes it back, so a thread that comes late finds another word and gives up. All fields are atomic
// words: nothing is torn, and nobody needs a lock to read them.

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>

#include "export.h"
#include "simd.h"

namespace outdraft {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint64_t>;

enum State : uint64_t { kClaimed = 1, kStoring = 2, kDone = 3 };
constexpr uint64_t word_of(uint64_t job, State state) { return 4 * job + state; }

constexpr uint64_t kStop = ~uint64_t{0};  // as a job
constexpr auto kLooking = std::chrono::microseconds(100);  // what lies between two jobs of a pass
constexpr auto kYielding = std::chrono::microseconds(400);  // and between two passes
constexpr auto kPatience = std::chrono::microseconds(20);  // beside what the unit should take
// After a helper was late, the cores are busy: so many turns go on alone, but not for long. A look at
// a helper that is still away costs some 30 us, and weights are read at half the speed without it.
constexpr int kBackOff = 64;
constexpr auto kLongestBackOff = std::chrono::microseconds(500);
constexpr int kSpins = 32;    // between two looks at the clock
constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = 1 << 21;
constexpr size_t kWorkWords = kMaxWorkBytes / 8;

struct alignas(kAlignment) Helper {
  Team* team;
  int64_t index;
  pthread_t thread;
  alignas(kAlignment) std::atomic<uint64_t> works_on{0};  // a job, 0: none
  alignas(kAlignment) std::atomic<int> is_asleep{0};
};

}  // namespace

class Team {
 public:
  // Words that threads wait for have a line of their own.
  alignas(kAlignment) Word job{0};
  Word calls{0}, num_units{0}, scratch_bytes{0};
  Word work[kWorkWords] = {};
  alignas(kAlignment) std::atomic<int> is_taken{0};
  alignas(kAlignment) Word units[kMaxUnits] = {};

  // These belong to who has the turn.
  uint64_t last_job = 0;
  int turns_alone = 0;
  Clock::time_point alone_until{};
  bool loses_next_unit = false;
  std::atomic<int64_t> num_shared{0}, num_late{0};

  pid_t process = getpid();
  int64_t num_helpers = 0;
  Helper* helpers = nullptr;
  KeptMemory inputs{this};  // the last: its end looks at the helpers
};

namespace {

// Whether a unit of a job was free, and is now the caller's.
bool claim(Team& team, int64_t unit, uint64_t job) {
  uint64_t word = team.units[unit].load(std::memory_order_relaxed);
  return word < 4 * job && team.units[unit].compare_exchange_strong(
                               word, word_of(job, kClaimed), std::memory_order_acq_rel,
                               std::memory_order_relaxed);
}

bool exchange(Team& team, int64_t unit, uint64_t job, State from, State to) {
  uint64_t word = word_of(job, from);
  return team.units[unit].compare_exchange_strong(
      word, word_of(job, to), std::memory_order_acq_rel, std::memory_order_relaxed);
}

// Units of one job, beginning far from where the others begin.
void help(Team& team, const Helper& helper, uint64_t job, KeptMemory& scratch) {
  alignas(kAlignment) uint64_t work[kWorkWords];
  const auto calls = team.calls.load(std::memory_order_relaxed);
  const auto num_units = static_cast<int64_t>(team.num_units.load(std::memory_order_relaxed));
  const auto scratch_bytes = team.scratch_bytes.load(std::memory_order_relaxed);
  for (size_t i = 0; i < kWorkWords; ++i) work[i] = team.work[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (team.job.load(std::memory_order_relaxed) != job) return;  // another job: these are no fields
  const auto& call = *reinterpret_cast<const detail::Calls*>(calls);
  const int64_t start = num_units * (helper.index + 1) / (team.num_helpers + 1);
  for (int64_t i = 0; i < num_units; ++i) {
    const int64_t unit = start + i < num_units ? start + i : start + i - num_units;
    if (!claim(team, unit, job)) continue;
    void* memory = scratch.reserve<char>(scratch_bytes);
    call.compute(work, unit, memory);
    if (!exchange(team, unit, job, kClaimed, kStoring)) return;  // taken back: this job is over
    call.store(work, unit, memory);
    team.units[unit].store(word_of(job, kDone), std::memory_order_release);
  }
}

void sleep_until_woken(Team& team, Helper& helper, uint64_t last) {
  helper.is_asleep.store(1, std::memory_order_seq_cst);
  while (team.job.load(std::memory_order_seq_cst) == last &&
         helper.is_asleep.load(std::memory_order_seq_cst) == 1) {
    helper.is_asleep.wait(1, std::memory_order_seq_cst);
  }
  helper.is_asleep.store(0, std::memory_order_seq_cst);
}

void* serve(void* argument) {
  Helper& helper = *static_cast<Helper*>(argument);
  Team& team = *helper.team;
  KeptMemory scratch(nullptr);
  uint64_t last = 0;
  auto since = Clock::now();
  for (int spins = 0;; ++spins) {
    const uint64_t job = team.job.load(std::memory_order_acquire);
    if (job == kStop) return nullptr;
    if (job != last && job != 0) {
      // Set before any unit is claimed: who sees the job's end sees who still works on it.
      helper.works_on.store(job, std::memory_order_seq_cst);
      help(team, helper, job, scratch);
      helper.works_on.store(0, std::memory_order_release);
      last = job;
      since = Clock::now();
    } else if (const auto idle = spins % kSpins == 0 ? Clock::now() - since : Clock::duration();
               idle < kLooking) {
      pause_core();
    } else if (idle < kYielding) {
      sched_yield();  // whoever else wants the core may have it
    } else {
      sleep_until_woken(team, helper, job);
      since = Clock::now();
    }
  }
}

void wake_helpers(Team& team) {
  for (int64_t i = 0; i < team.num_helpers; ++i) {
    std::atomic<int>& is_asleep = team.helpers[i].is_asleep;
    if (is_asleep.load(std::memory_order_seq_cst) == 1 &&
        is_asleep.exchange(0, std::memory_order_seq_cst) == 1) {
      is_asleep.notify_one();
    }
  }
}

// Helpers get no signals: those are for the threads of the program.
void start_helpers(Team& team, int64_t num_helpers) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  team.helpers = new (std::align_val_t{kAlignment}) Helper[num_helpers];
  for (int64_t i = 0; i < num_helpers; ++i) {
    team.helpers[i].team = &team;
    team.helpers[i].index = i;
  }
  team.num_helpers = num_helpers;
  for (int64_t i = 0; i < num_helpers; ++i) {
    // Where the system gives no more threads, the others have more to do.
    if (pthread_create(&team.helpers[i].thread, nullptr, serve, &team.helpers[i]) != 0) {
      team.helpers[i].team = nullptr;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void publish(Team& team, uint64_t job, const detail::Calls& calls, const void* work,
             size_t work_bytes, int64_t num_units, size_t scratch_bytes) {
  team.job.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  team.calls.store(reinterpret_cast<uint64_t>(&calls), std::memory_order_relaxed);
  team.num_units.store(static_cast<uint64_t>(num_units), std::memory_order_relaxed);
  team.scratch_bytes.store(scratch_bytes, std::memory_order_relaxed);
  for (size_t at = 0; at < work_bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(work) + at,
                work_bytes - at < 8 ? work_bytes - at : 8);
    team.work[at / 8].store(word, std::memory_order_relaxed);
  }
  if (team.loses_next_unit) {
    team.loses_next_unit = false;
    team.units[num_units - 1].store(word_of(job, kClaimed), std::memory_order_relaxed);
  }
  team.job.store(job, std::memory_order_seq_cst);
  wake_helpers(team);
}

// Wait for a unit until a moment; false: it was taken back from a late helper.
bool is_done_in_time(Team& team, int64_t unit, uint64_t job, Clock::time_point until) {
  for (int spins = 1;; ++spins) {
    const uint64_t word = team.units[unit].load(std::memory_order_acquire);
    if (word == word_of(job, kDone)) return true;
    if (spins % kSpins == 0 && Clock::now() > until) {
      if (exchange(team, unit, job, kClaimed, kDone)) return false;
      sched_yield();  // it is storing, which is short
    }
    pause_core();
  }
}

}  // namespace

namespace detail {

void run_shared(Team* shared, const Calls& calls, const void* work, size_t work_bytes,
                int64_t num_units, size_t scratch_bytes) {
  Team& team = *shared;
  const uint64_t job = ++team.last_job;
  publish(team, job, calls, work, work_bytes, num_units, scratch_bytes);
  team.num_shared.fetch_add(1, std::memory_order_relaxed);
  void* scratch = own_scratch(scratch_bytes);
  auto before = Clock::now();
  auto longest = Clock::duration();
  for (int64_t unit = 0; unit < num_units; ++unit) {
    if (!claim(team, unit, job)) continue;
    calls.compute(work, unit, scratch);
    calls.store(work, unit, scratch);
    team.units[unit].store(word_of(job, kDone), std::memory_order_release);
    const auto after = Clock::now();
    longest = std::max(longest, after - before);
    before = after;
  }
  // Units may be uneven, but a helper's takes hardly longer than the longest of ours.
  const auto until = Clock::now() + kPatience + 2 * longest;
  for (int64_t unit = 0; unit < num_units; ++unit) {
    if (is_done_in_time(team, unit, job, until)) continue;
    team.turns_alone = kBackOff;
    team.alone_until = Clock::now() + kLongestBackOff;
    team.num_late.fetch_add(1, std::memory_order_relaxed);
    calls.compute(work, unit, scratch);
    calls.store(work, unit, scratch);
  }
}

}  // namespace detail

void* KeptMemory::allocate(size_t& bytes) {
  const size_t page = bytes >= kHugePage / 4 ? kHugePage : kAlignment;
  bytes = (bytes + page) / page * page;
  void* memory = std::aligned_alloc(page, bytes);
  if (memory == nullptr) std::abort();
#if defined(MADV_HUGEPAGE)
  if (page == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

constexpr int kIdleTurns = 500;  // some 10 us

void wait_until_idle(Team* team) {
  if (team == nullptr || getpid() != team->process) return;  // forked: the helpers are not here
  for (int64_t i = 0; i < team->num_helpers; ++i) {
    const std::atomic<uint64_t>& works_on = team->helpers[i].works_on;
    const uint64_t job = works_on.load(std::memory_order_seq_cst);
    // A helper that has just stored a unit is idle in a moment; one that lost its core is not.
    for (int turn = 0; job != 0 && works_on.load(std::memory_order_acquire) == job; ++turn) {
      turn < kIdleTurns ? pause_core() : static_cast<void>(usleep(50));
    }
  }
}

int64_t num_threads(const Team* team) { return team == nullptr ? 1 : team->num_helpers + 1; }

Turn::Turn(Team* team) : team_(nullptr) {
  int is_taken = 0;
  if (team == nullptr || team->num_helpers == 0 ||
      !team->is_taken.compare_exchange_strong(is_taken, 1, std::memory_order_acquire)) {
    return;
  }
  if (team->turns_alone > 0 && Clock::now() < team->alone_until) {
    --team->turns_alone;
    team->is_taken.store(0, std::memory_order_release);
    return;
  }
  team->turns_alone = 0;
  team_ = team;
}

Turn::~Turn() {
  if (team_ != nullptr) team_->is_taken.store(0, std::memory_order_release);
}

void* input_block(Team* team, size_t bytes) {
  thread_local KeptMemory own(nullptr);
  return (team == nullptr ? own : team->inputs).reserve<char>(bytes);
}

void* own_scratch(size_t bytes) {
  thread_local KeptMemory own(nullptr);
  return own.reserve<char>(bytes);
}

}  // namespace outdraft

// `num_threads`: the caller included. Never null.
OUTDRAFT_EXPORT outdraft::Team* team_create(int64_t num_threads) {
  using namespace outdraft;
  Team* team = new (std::align_val_t{kAlignment}) Team;
  if (num_threads > 1) start_helpers(*team, num_threads - 1);
  return team;
}

// Ends its helpers; nobody may be in `run`.
OUTDRAFT_EXPORT void team_destroy(outdraft::Team* team) {
  using namespace outdraft;
  if (getpid() == team->process && team->helpers != nullptr) {
    team->job.store(kStop, std::memory_order_seq_cst);
    wake_helpers(*team);
    for (int64_t i = 0; i < team->num_helpers; ++i) {
      if (team->helpers[i].team != nullptr) pthread_join(team->helpers[i].thread, nullptr);
    }
    ::operator delete[](team->helpers, std::align_val_t{kAlignment});
    team->num_helpers = 0;
  }
  team->~Team();
  ::operator delete(team, std::align_val_t{kAlignment});
}

// Jobs that were shared, and units that were taken back from late helpers, since the start.
OUTDRAFT_EXPORT int64_t team_num_shared(const outdraft::Team* team) {
  return team->num_shared.load(std::memory_order_relaxed);
}
OUTDRAFT_EXPORT int64_t team_num_late(const outdraft::Team* team) {
  return team->num_late.load(std::memory_order_relaxed);
}

// For tests: the last unit of the next job is claimed by nobody, as by a helper without its core.
OUTDRAFT_EXPORT void team_lose_next_unit(outdraft::Team* team) { team->loses_next_unit = true; }

// For tests: whether a helper that has claimed the last unit of a job may still store it.
OUTDRAFT_EXPORT int32_t team_may_store(outdraft::Team* team, int64_t unit) {
  return exchange(*team, unit, team->last_job, outdraft::kClaimed, outdraft::kStoring);
}

OUTDRAFT_FUNCTIONS(team_create, team_destroy, team_num_shared, team_num_late, team_lose_next_unit,
                   team_may_store);
