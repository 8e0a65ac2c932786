// How much of a row's attention each block of its text gets. The readable twin is
// src/outdraft/kernels/torch/attention.py.
//
// A long text has parts of some blocks, which threads share. A part's keys meet all heads in
// pieces, laid out for products as tile_work.h does it. Its weights are relative to its own highest
// score; the sums of all parts then become shares of the whole, in the order of the parts.

#include <algorithm>
#include <cmath>
#include <vector>

#include "export.h"
#include "team.h"
#include "tile_products.h"

namespace outdraft {
namespace {

constexpr int64_t kPartKeys = 512;  // about so many
constexpr int64_t kPiece = 64;      // keys
constexpr float kLog2E = 1.44269504f;

// What Python fills (kernels/native/attention.py).
struct MassTask {
  const float* q;              // [B, H, C]
  const void* k;               // [P, S, G, C]
  const int32_t* block_table;  // [B, P]
  const int64_t* num_keys;     // [B]
  float* mass;                 // [B, P], zeros: added to
  int64_t num_requests, num_heads, num_kv_heads, head_size, block_size;
  int64_t table_width;
  float scale;
  int32_t is_bf16, is_bf16_query;  // such queries have no more digits than bfloat16
};

int64_t round_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Some blocks of one text.
struct Part {
  int64_t request, first_block, num_keys;
};

// How large things are, in numbers.
struct MassSizes {
  explicit MassSizes(const MassTask& task)
      : blocks(std::max<int64_t>(1, kPartKeys / task.block_size)),
        lane_keys(round_up(blocks * task.block_size, kPiece)),
        lane_sums(2 + blocks),
        key_row(task.num_kv_heads * task.head_size),
        // A vector of pairs is the most that a row is padded to.
        matrix_row(round_up(task.head_size, 2 * kWidth)) {}

  int64_t blocks;      // of a part
  int64_t lane_keys;   // scores of a head
  int64_t lane_sums;   // of a head: the highest score, all weights, those of each block
  int64_t key_row, matrix_row;
};

// The sum of `count` weights.
float sum_over(const float* weights, int64_t count) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums = sums + numbers(weights + i);
  float sum = i > 0 ? sum_of(sums) : 0.0f;
  for (; i < count; ++i) sum += weights[i];
  return sum;
}

// One thread's work on one part, in scratch memory: [sums of all heads, scores, queries, a piece of
// keys, zeros].
class PartWork {
 public:
  static size_t bytes(const MassTask& task, const MassSizes& sizes) {
    return sizeof(float) * (task.num_heads * (sizes.lane_sums + sizes.lane_keys + sizes.matrix_row) +
                            kPiece * sizes.matrix_row + sizes.key_row + 5 * kWidth);
  }

  PartWork(const MassTask& task, const MassSizes& sizes, const Part& part, void* memory)
      : task_(task), sizes_(sizes), part_(part) {
    const auto take = [&](int64_t count) {
      float* from = static_cast<float*>(memory);
      memory = from + round_up(count, kWidth);
      return from;
    };
    sums_ = take(task.num_heads * sizes.lane_sums);
    scores_ = take(task.num_heads * sizes.lane_keys);
    q_ = take(task.num_heads * sizes.matrix_row);
    matrix_ = take(kPiece * sizes.matrix_row);
    zeros_ = take(sizes.key_row);
  }

  const float* sums() const { return sums_; }

  void compute() {
    if (!task_.is_bf16) {
      fill_scores<float, Products::kFloat32>();
    } else if (kHasBf16Dot && task_.is_bf16_query) {
      fill_scores<uint16_t, Products::kDots>();
    } else {
      fill_scores<uint16_t, Products::kWidened>();
    }
    for (int64_t head = 0; head < task_.num_heads; ++head) weigh(head);
  }

 private:
  template <class Number, Products kProducts>
  void fill_scores() {
    std::fill_n(zeros_, sizes_.key_row, 0.0f);
    const float* q = task_.q + part_.request * task_.num_heads * task_.head_size;
    std::fill_n(q_, task_.num_heads * sizes_.matrix_row, 0.0f);
    for (int64_t head = 0; head < task_.num_heads; ++head) {
      float* to = q_ + head * sizes_.matrix_row;
      if constexpr (kProducts == Products::kDots) {
        convert(q + head * task_.head_size, task_.head_size, reinterpret_cast<uint16_t*>(to));
      } else {
        convert(q + head * task_.head_size, task_.head_size, to);
      }
    }
    const void *keys[kPiece], *next[kPiece];
    int64_t count = find_keys<Number>(0, next);
    for (int64_t first = 0; first < part_.num_keys; first += kPiece) {
      std::copy_n(next, kPiece, keys);
      const int64_t num_keys = count;
      count = find_keys<Number>(first + kPiece, next);
      multiply<Number, kProducts>(keys, num_keys, Fetch{next, next + count, row_bytes<Number>()},
                                  scores_ + first);
    }
  }

  template <class Number>
  int64_t row_bytes() const {
    return sizes_.key_row * static_cast<int64_t>(sizeof(Number));
  }

  // Where up to a piece of keys lies, and zeros behind; returns how many there are.
  template <class Number>
  int64_t find_keys(int64_t first, const void** rows) const {
    const int32_t* blocks =
        task_.block_table + part_.request * task_.table_width + part_.first_block;
    const int64_t count = std::clamp<int64_t>(part_.num_keys - first, 0, kPiece);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = first + i, block = blocks[key / task_.block_size];
      const int64_t slot = block * task_.block_size + key % task_.block_size;
      rows[i] = static_cast<const Number*>(task_.k) + slot * sizes_.key_row;
    }
    std::fill(rows + count, rows + kPiece, zeros_);
    return count;
  }

  // The scores, in base 2, of all heads with these keys.
  template <class Number, Products kProducts>
  void multiply(const void* const* keys, int64_t num_keys, Fetch fetch, float* scores) {
    for (int64_t key = 0; key < num_keys; ++key) touch(keys[key], row_bytes<Number>());
    const int64_t heads_per_kv = task_.num_heads / task_.num_kv_heads;
    auto* matrix = reinterpret_cast<uint32_t*>(matrix_);
    for (int64_t group = 0; group < task_.num_kv_heads; ++group) {
      TileProduct product = {};
      product.num_outputs = round_up(num_keys, kWidth);
      product.matrix = matrix;
      product.matrix_steps =
          lay_out_columns<Number>(keys, product.num_outputs, group * task_.head_size,
                                  task_.head_size, matrix, fetch);
      product.num_steps = num_steps<Number>(task_.head_size);
      product.x_stride = sizes_.matrix_row;
      product.out_stride = sizes_.lane_keys;
      product.scale = task_.scale * kLog2E;
      const int64_t end = (group + 1) * heads_per_kv;
      for (int64_t head = group * heads_per_kv; head < end; head += product.num_rows) {
        product.num_rows = std::min<int64_t>(kGroupRows, end - head);
        product.x = reinterpret_cast<const uint32_t*>(q_ + head * sizes_.matrix_row);
        product.out = scores + head * sizes_.lane_keys;
        multiply_rows<kProducts, Start::kZero>(product);
      }
    }
  }

  // Scores of a head become weights relative to the highest one, and sums of these.
  void weigh(int64_t head) {
    float* scores = scores_ + head * sizes_.lane_keys;
    float* sums = sums_ + head * sizes_.lane_sums;
    const int64_t end = round_up(part_.num_keys, kWidth);
    std::fill(scores + part_.num_keys, scores + end, -INFINITY);
    Floats highest = numbers(scores);
    for (int64_t key = kWidth; key < end; key += kWidth) {
      const Floats score = numbers(scores + key);
      highest = score > highest ? score : highest;
    }
    sums[0] = max_of(highest);
    for (int64_t key = 0; key < end; key += kWidth) {
      store(scores + key, exp2_of(numbers(scores + key) - sums[0]));
    }
    sums[1] = 0;
    for (int64_t block = 0; block < sizes_.blocks; ++block) {
      const int64_t first = block * task_.block_size;
      const int64_t count = std::clamp<int64_t>(part_.num_keys - first, 0, task_.block_size);
      sums[2 + block] = sum_over(scores + first, count);
      sums[1] += sums[2 + block];
    }
  }

  const MassTask& task_;
  const MassSizes& sizes_;
  const Part part_;
  float *sums_, *scores_, *q_, *matrix_, *zeros_;
};

// At most kMaxUnits parts, each a unit, as team.h describes it.
struct MassWork {
  MassTask task;
  const Part* parts;
  int64_t num_parts;
  float* sums;  // of every part

  int64_t num_units() const { return num_parts; }
  size_t scratch_bytes() const { return PartWork::bytes(task, MassSizes(task)); }
  int64_t sums_size() const { return task.num_heads * MassSizes(task).lane_sums; }

  void compute(int64_t unit, void* scratch) const {
    const MassSizes sizes(task);
    PartWork(task, sizes, parts[unit], scratch).compute();
  }

  void store(int64_t unit, const void* scratch) const {
    std::copy_n(static_cast<const float*>(scratch), sums_size(), sums + unit * sums_size());
  }
};

// What the parts [first, end), of one text, have of its attention.
void add_shares(const MassTask& task, const Part* parts, int64_t num_parts, const float* sums) {
  const MassSizes sizes(task);
  const int64_t part_size = task.num_heads * sizes.lane_sums;
  float* mass = task.mass + parts->request * task.table_width;
  for (int64_t head = 0; head < task.num_heads; ++head) {
    const float* lane = sums + head * sizes.lane_sums;
    float top = -INFINITY, total = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
      top = std::max(top, lane[part * part_size]);
    }
    for (int64_t part = 0; part < num_parts; ++part) {
      total += lane[part * part_size + 1] * std::exp2(lane[part * part_size] - top);
    }
    for (int64_t part = 0; part < num_parts; ++part) {
      const float* own = lane + part * part_size;
      const float share = std::exp2(own[0] - top) / total;
      const int64_t first = parts[part].first_block;
      const int64_t count = std::min(sizes.blocks, task.table_width - first);
      for (int64_t block = 0; block < count; ++block) mass[first + block] += own[2 + block] * share;
    }
  }
}

}  // namespace
}  // namespace outdraft

// As `block_mass` of kernels/torch/attention.py, of one layer. When it returns, no helper reads
// the task any more.
OUTDRAFT_EXPORT void block_mass(outdraft::Team* team, const outdraft::MassTask* of) {
  using namespace outdraft;
  const MassTask& task = *of;
  const MassSizes sizes(task);
  const int64_t part_keys = sizes.blocks * task.block_size;
  std::vector<Part> parts;
  std::vector<size_t> starts;  // of the texts, and the end
  for (int64_t b = 0; b < task.num_requests; ++b) {
    starts.push_back(parts.size());
    for (int64_t first = 0; first < task.num_keys[b]; first += part_keys) {
      const int64_t count = std::min(part_keys, task.num_keys[b] - first);
      parts.push_back({b, first / task.block_size, count});
    }
  }
  starts.push_back(parts.size());
  const auto part_size = static_cast<size_t>(task.num_heads * sizes.lane_sums);
  std::vector<float> sums(parts.size() * part_size);
  for (size_t first = 0; first < parts.size(); first += kMaxUnits) {
    const auto count = std::min<size_t>(kMaxUnits, parts.size() - first);
    run(team, MassWork{task, parts.data() + first, static_cast<int64_t>(count),
                       sums.data() + first * part_size});
  }
  for (size_t b = 0; b + 1 < starts.size(); ++b) {
    const size_t first = starts[b];
    add_shares(task, parts.data() + first, static_cast<int64_t>(starts[b + 1] - first),
               sums.data() + first * part_size);
  }
  wait_until_idle(team);
}

namespace outdraft {

OUTDRAFT_STRUCT(MassTask, q, k, block_table, num_keys, mass, num_requests, num_heads,
                num_kv_heads, head_size, block_size, table_width, scale, is_bf16, is_bf16_query);

}  // namespace outdraft

OUTDRAFT_FUNCTIONS(block_mass);
