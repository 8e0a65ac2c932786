// Memory straight from the system, zeros, for weights.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace outdraft {

constexpr int64_t kHugePage = 1 << 21;

// Much memory begins with a huge page where the system has them. Null: there is none.
inline char* map_memory(int64_t num_bytes) {
  const int64_t spare = num_bytes >= kHugePage ? kHugePage : 0;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, num_bytes + spare, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* memory = static_cast<char*>(mapped);
  if (spare == 0) return memory;
  const int64_t before = -reinterpret_cast<intptr_t>(memory) & (kHugePage - 1);
  const int64_t page = sysconf(_SC_PAGESIZE), kept = (num_bytes + page - 1) / page * page;
  const int64_t after = (num_bytes + spare + page - 1) / page * page - before - kept;
  if (before > 0) munmap(memory, before);
  if (after > 0) munmap(memory + before + kept, after);
#if defined(MADV_HUGEPAGE)
  madvise(memory + before, kept, MADV_HUGEPAGE);
#endif
  return memory + before;
}

}  // namespace outdraft
