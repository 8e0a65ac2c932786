// Paged tree attention over the blocks where keys and values lie; the readable twin is
// src/outdraft/kernels/torch/attention.py.
//
// A tile is some query rows of one request that one kv head serves together; every (row, query
// head) pair of it is a lane. Keys and values meet all lanes in pieces of 64, which are first laid
// out for products (tile_products.h); then a few lanes at a time, whose scores and sums stay in the
// nearest cache, meet both. The softmax runs online over the pieces, in base 2: log2(e) is part of
// the scale (Milakov, Gimelshein 2018; Dao et al. 2022). Where queries and cache are
// bfloat16 and the machine has dot products of it, weights are rounded to bfloat16, too; they are
// divided by the sum of the rounded ones. A sink joins the sum when it is complete.
//
// Where few lanes meet a piece, to lay it out takes longer than to multiply it. So matrix registers
// load keys where they lie, as rows, and queries are what they meet. In float32 values are met where
// they lie, and rows are read in the order of memory, of all heads. The sums are the same ones.
//
// A long context has parts, which threads may share, as in flash-decoding (Dao, Haziza, Massa,
// Sizov 2023): of 2048 keys, in float32 shorter ones first. Sums of parts are added in the order of
// the parts, whoever made them. So the order of a lane's sums depends neither on the other lanes nor
// on the number of threads. So that this holds in trees too, each row of a tree meets its own
// drafted keys in the order of its text, as if they were committed; only the pieces before them are
// read for all rows.
//
// attention_tiles.h says what a tile is, tile_keys.h where its keys lie, attention_softmax.h has
// the softmax, and tile_work.h puts them together.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "attention_tiles.h"
#include "export.h"
#include "tile_work.h"
#include "vector_math.h"

namespace outdraft {
namespace {

constexpr int64_t kFewJobs = 2;    // for each thread: more are joined, to read longer rows
constexpr int64_t kEvenJobs = 4;   // for each thread; prefill has more, and large partial sums
constexpr int64_t kTileJobs = 2;   // that a tile read in order counts as: all of its heads at once
constexpr int64_t kMinShared = 1 << 16;  // multiply-adds below which sharing costs what it saves

// At most kMaxUnits jobs, each a unit, as team.h describes it.
struct AttentionWork {
  AttentionBatch batch;
  int64_t tile_rows, job_heads;
  const Tile* tiles;
  int64_t num_tiles, first_job, num_jobs;
  float* partial;  // the sums of every job; null: a job has all parts, and stores results
  const std::atomic<int64_t>* current_version;
  int64_t version;

  int64_t num_units() const { return num_jobs; }
  size_t scratch_bytes() const { return TileWork::bytes(batch, sizes()); }
  Sizes sizes() const { return Sizes(batch, tile_rows, job_heads); }
  int64_t num_groups() const { return batch.num_kv_heads / job_heads; }

  void compute(int64_t unit, void* scratch) const {
    const int64_t job = first_job + unit;
    const Tile* behind = std::upper_bound(
        tiles + 1, tiles + num_tiles, job,
        [](int64_t number, const Tile& tile) { return number < tile.first_job; });
    const Tile tile = behind[-1];
    if (is_over()) return;
    const int64_t place = job - tile.first_job;
    TileWork* work = new (scratch) TileWork(batch, sizes(), tile, place % num_groups());
    work->copy_rows();
    if (is_over()) return;
    const int64_t part = tile.part_at(place / num_groups());
    if (partial == nullptr) {
      work->attend_parts(0, tile.num_parts);
    } else {
      work->attend_parts(part, part + 1);
    }
  }

  void store(int64_t unit, const void* scratch) const {
    const TileWork* work = static_cast<const TileWork*>(scratch);
    if (partial == nullptr) {
      work->store_results(work->sums());
    } else {
      const int64_t size = work->sizes().sums_size;
      std::memcpy(partial + (first_job + unit) * size, work->sums().out, sizeof(float) * size);
    }
  }

  bool is_over() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return current_version->load(std::memory_order_relaxed) != version;
  }
};

// The results of all tiles, from the sums of their parts.
void merge(const AttentionWork& all) {
  void* scratch = own_scratch(all.scratch_bytes());
  for (const Tile* tile = all.tiles; tile < all.tiles + all.num_tiles; ++tile) {
    for (int64_t group = 0; group < all.num_groups(); ++group) {
      const TileWork* work = new (scratch) TileWork(all.batch, all.sizes(), *tile, group);
      const auto part_sums = [&](int64_t part) {
        const int64_t place = tile->part_at(part);  // it is its own inverse
        const int64_t job = tile->first_job + place * all.num_groups() + group;
        return Sums(all.partial + job * work->sizes().sums_size, work->sizes());
      };
      for (int64_t part = 1; part < tile->num_parts; ++part) {
        work->fold(part_sums(0), part_sums(part));
      }
      work->store_results(part_sums(0));
    }
  }
}

void clear_padding(const AttentionBatch& batch) {
  const int64_t row_bytes = batch.num_heads * batch.value_size * (batch.is_bf16_out ? 2 : 4);
  const int64_t first = batch.query_start[batch.num_requests];
  std::memset(static_cast<char*>(batch.out) + first * row_bytes, 0,
              (batch.num_rows - first) * row_bytes);
}

// Whether jobs would be too few to be even among the threads, so that they become parts. Who reads in
// order should read whole rows: all heads of them.
bool should_split(const AttentionBatch& batch, int64_t num_tiles, int64_t threads, bool in_order) {
  if (threads == 1) return false;
  if (in_order) {
    return num_tiles * std::min(kTileJobs, batch.num_kv_heads) < kEvenJobs * threads;
  }
  // Parts that grow are many, and so are their sums.
  return num_tiles * batch.num_kv_heads < (parts_of(batch).grow ? 1 : kEvenJobs) * threads;
}

// kv heads of a job: as many as leave enough jobs that are even enough.
int64_t heads_of_job(const AttentionBatch& batch, const Tile* tiles, int64_t num_tiles,
                     int64_t threads, bool is_split, bool in_order, int64_t lanes) {
  int64_t num_parts = 0, num_keys = 0, longest = 0;
  for (const Tile* tile = tiles; tile < tiles + num_tiles; ++tile) {
    num_parts += tile->num_parts;
    num_keys += tile->num_keys();
    longest = std::max(longest, tile->longest_part);
  }
  const int64_t num_pieces = is_split ? num_parts : num_tiles;  // of work, each for all heads
  const auto are_even = [&](int64_t job_heads) {
    if (in_order && threads == 1) return true;
    if (in_order && is_split) {
      return 2 * longest * job_heads * threads <= 3 * num_keys * batch.num_kv_heads;
    }
    return num_pieces * batch.num_kv_heads / job_heads >= kFewJobs * threads;
  };
  int64_t job_heads = 1;
  while (batch.num_kv_heads % (2 * job_heads) == 0 && 2 * job_heads * lanes <= kMaxLanes &&
         are_even(2 * job_heads)) {
    job_heads *= 2;
  }
  return job_heads;
}

}  // namespace

void attend(Team* team, const AttentionBatch& batch, AttentionMemory& memory) {
  const int64_t version = memory.version.fetch_add(1) + 1;
  std::atomic_thread_fence(std::memory_order_release);
  clear_padding(batch);
  const int64_t heads_per_kv = batch.num_heads / batch.num_kv_heads;
  int64_t most_rows = 1;
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    most_rows = std::max<int64_t>(most_rows, batch.query_start[b + 1] - batch.query_start[b]);
  }
  const int64_t tile_rows = std::clamp<int64_t>(kMaxLanes / heads_per_kv, 1, most_rows);
  Tile* tiles = memory.tiles.reserve<Tile>(batch.num_rows / tile_rows + batch.num_requests);
  int64_t num_tiles = 0, num_parts = 0, work = 0;
  for (int64_t b = 0; b < batch.num_requests; ++b) {
    const int64_t num_rows = batch.query_start[b + 1] - batch.query_start[b];
    for (int64_t row = 0; row < num_rows; row += tile_rows) {
      const Tile& tile = tiles[num_tiles++] =
          make_tile(batch, b, row, std::min(row + tile_rows, num_rows));
      num_parts += tile.num_parts;
      const int64_t size = (batch.key_size + batch.value_size) / 2;
      work += (tile.end_row - row) * batch.num_heads * size * tile.num_keys();
    }
  }
  const Turn turn(work < kMinShared ? nullptr : team);
  const int64_t threads = num_threads(turn.team());
  const bool in_order = reads_in_order(batch, tile_rows * heads_per_kv);
  const bool is_split = num_parts > num_tiles && should_split(batch, num_tiles, threads, in_order);
  const int64_t job_heads = heads_of_job(batch, tiles, num_tiles, threads, is_split, in_order,
                                         tile_rows * heads_per_kv);
  if (is_split) {
    std::sort(tiles, tiles + num_tiles,
              [](const Tile& a, const Tile& b) { return a.longest_part > b.longest_part; });
  }
  int64_t num_jobs = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    tiles[i].first_job = num_jobs;
    num_jobs += batch.num_kv_heads / job_heads * (is_split ? tiles[i].num_parts : 1);
  }
  const Sizes sizes(batch, tile_rows, job_heads);
  float* partial = is_split ? memory.partial.reserve<float>(num_jobs * sizes.sums_size) : nullptr;
  AttentionWork all = {batch, tile_rows, job_heads, tiles,           num_tiles,
                       0,     0,         partial,   &memory.version, version};
  for (; all.first_job < num_jobs; all.first_job += kMaxUnits) {
    all.num_jobs = std::min(kMaxUnits, num_jobs - all.first_job);
    run_in_turn(turn.team(), all);
  }
  if (is_split) merge(all);
}

}  // namespace outdraft

using outdraft::AttentionBatch;
using outdraft::AttentionMemory;
using outdraft::Team;

OUTDRAFT_EXPORT AttentionMemory* attention_create(Team* team) { return new AttentionMemory(team); }

OUTDRAFT_EXPORT void attention_destroy(AttentionMemory* memory) { delete memory; }

// When it returns, no helper reads the batch any more.
OUTDRAFT_EXPORT void attention_attend(Team* team, const AttentionBatch* batch,
                                      AttentionMemory* memory) {
  outdraft::attend(team, *batch, *memory);
  outdraft::wait_until_idle(team);
}

// cached[slots[t]] = rows[t] for slots that are not negative, converted where the dtypes differ.
OUTDRAFT_EXPORT void attention_write(const void* rows, int64_t row_stride, int64_t is_bf16_rows,
                                     void* cached, int64_t is_bf16_cached, const int64_t* slots,
                                     int64_t num_rows, int64_t row_size) {
  using namespace outdraft;
  with_numbers(rows, is_bf16_rows, [&](const auto* from) {
    with_numbers(cached, is_bf16_cached, [&](auto* to) {
      for (int64_t t = 0; t < num_rows; ++t) {
        if (slots[t] >= 0) convert(from + t * row_stride, row_size, to + slots[t] * row_size);
      }
    });
  });
}

namespace outdraft {

OUTDRAFT_STRUCT(AttentionBatch, q, out, k, v, query_start, context_lens, num_causal, ancestors,
                positions, block_table, sinks, num_requests, num_rows, num_heads, num_kv_heads,
                block_size, q_stride, table_stride, key_size, value_size, window, chunk, scale,
                soft_cap, is_bf16_query, is_bf16_out, is_bf16_cache);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(attention_create, attention_destroy, attention_attend, attention_write);
