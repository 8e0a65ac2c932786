// Products of bfloat16 rows with one tile of weights, in matrix registers: see linear_tiles.h, and
// linear_tiles.cpp for the layout.
//
// A block of a tile, 32 inputs of its 32 outputs, fills two registers. bfloat16 blocks are read as
// they lie; of quantised weights a strip of blocks at a time is decoded first. Rows make groups of
// at most 16, all of the same size; the last one begins earlier where they do not fill it, so a few
// rows are computed twice. Two groups meet a block at a time. Strips stay in the nearest cache until
// all pairs of groups have met them; between strips the sums lie in memory, where they keep all
// bits.
//
// The sum of an output runs over the blocks in order, in a register that begins with zero; amx.h
// has the order within a block. It is the same for any number of rows. Scales, shifts and groups of
// inputs: w = scale * (code + shift), and a group's sum, times its scale, joins those of the groups before.
//
// A step of int4 is eight inputs: 32 words, even inputs in the four nibbles of the low half, 8 above what they
// stand for.

#include "linear_tiles.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>
#include <utility>

#include "amx.h"
#include "matrix_blocks.h"
#include "simd.h"
#include "tile_words.h"

namespace outdraft {
namespace {

constexpr int64_t kStripBlocks = 8;  // a third of the nearest cache
constexpr int64_t kStripBytes = kStripBlocks * kBlockBytes;
constexpr int64_t kMostBlocks = 16, kFewBlocks = 2;  // decoded, for several pairs and for one
constexpr int64_t kAwakeBlocks = 4;
constexpr int64_t kGroupSums = kMatrixRows * kTile;

// Which blocks of a tile are met.
template <class Blocks>
struct Strip {
  Blocks& blocks;
  int64_t first, end;
  bool is_first;  // sums begin with zero, else they are in memory
  bool is_long;   // it takes more than half a microsecond
};

// Some rows.
struct Group {
  int64_t first_row, num_rows;
  const char* x;  // where their inputs lie
  int64_t x_stride;
  float* sums;    // of the registers
  float* totals;  // of everything; may be the same
};

template <int kSums>
void begin_sums(const Group& group, bool is_first) {
  if (is_first) {
    zero_matrix<kSums>();
    zero_matrix<kSums + 1>();
  } else {
    load_matrix<kSums>(group.sums, 4 * kTile);
    load_matrix<kSums + 1>(group.sums + kTile / 2, 4 * kTile);
  }
}

template <int kSums>
void store_sums(const Group& group) {
  store_matrix<kSums>(group.sums, 4 * kTile);
  store_matrix<kSums + 1>(group.sums + kTile / 2, 4 * kTile);
}

template <int kGroups, class Blocks>
void add_block(Blocks& blocks, int64_t number, const Group& first, const Group& second) {
  const char* block = blocks.at(number);
  const int64_t at = number * kMatrixRowBytes;
  load_matrix<4>(first.x + at, first.x_stride);
  load_matrix<6>(block, kStepBytes);
  blocks.fetch(number, 0);
  add_products_of_matrices<0, 4, 6>();
  load_matrix<7>(block + kStepBytes / 2, kStepBytes);
  blocks.fetch(number, 1);
  add_products_of_matrices<1, 4, 7>();
  if constexpr (kGroups == 2) {
    load_matrix<5>(second.x + at, second.x_stride);
    add_products_of_matrices<2, 5, 6>();
    add_products_of_matrices<3, 5, 7>();
  }
}

// After most of a microsecond without one, a register takes a quarter of a microsecond to be stored
// (measured on Sapphire Rapids), as long as half a tile of int4: long strips store one now and then.
template <int kGroups, class Blocks>
void multiply_strip(const Strip<Blocks>& strip, const Group& first, const Group& second) {
  alignas(64) char nowhere[kMatrixRows * kMatrixRowBytes];
  begin_sums<0>(first, strip.is_first);
  if constexpr (kGroups == 2) begin_sums<2>(second, strip.is_first);
  for (int64_t block = strip.first; block < strip.end; ++block) {
    add_block<kGroups>(strip.blocks, block, first, second);
    if (strip.is_long && block % kAwakeBlocks == 0) store_matrix<4>(nowhere, kMatrixRowBytes);
  }
  store_sums<0>(first);
  if constexpr (kGroups == 2) store_sums<2>(second);
}

// All rows; the registers get their shapes.
class Groups {
 public:
  Groups(const Inputs& x, int64_t num_rows, float* sums)
      : x_(x),
        num_rows_(num_rows),
        count_((num_rows + kMatrixRows - 1) / kMatrixRows),
        group_rows_((num_rows + count_ - 1) / count_),
        sums_(sums),
        overlap_(count_ * group_rows_ != num_rows) {
    shape_matrices(group_rows_);
  }

  int64_t num_pairs() const { return (count_ + 1) / 2; }

  // Two groups, or the last one, meet blocks; then each goes to `next`. `parts`: where registers put
  // their sums instead of adding to those before; or null.
  template <class Blocks, class Next>
  void multiply(const Strip<Blocks>& strip, int64_t pair, float* parts, const Next& next) {
    const bool is_one = 2 * pair + 1 == count_;
    Group groups[2] = {at(2 * pair), at(2 * pair + !is_one)};
    for (int i = 0; i < 2 && parts != nullptr; ++i) groups[i].sums = parts + i * kGroupSums;
    is_one ? multiply_strip<1>(strip, groups[0], groups[1])
           : multiply_strip<2>(strip, groups[0], groups[1]);
    for (int i = 0; i < 2 - is_one; ++i) next(groups[i]);
  }

  void finish() {
    const Group last = at(count_ - 1);
    if (overlap_) std::memcpy(sums_ + last.first_row * kTile, last_, 4 * kTile * group_rows_);
  }

 private:
  // What overlaps would be added twice: sums of the last group are apart until all is done.
  Group at(int64_t number) {
    const int64_t row = std::min(number * group_rows_, num_rows_ - group_rows_);
    float* sums = overlap_ && number == count_ - 1 ? last_ : sums_ + row * kTile;
    const char* x = static_cast<const char*>(x_.rows) + row * 4 * x_.stride;
    return {row, group_rows_, x, 4 * x_.stride, sums, sums};
  }

  const Inputs& x_;
  const int64_t num_rows_, count_, group_rows_;
  float* const sums_;
  const bool overlap_;
  alignas(64) float last_[kGroupSums];
};

// The scales or shifts of a tile's outputs.
struct TileNumbers {
  Floats vectors[kTile / kWidth] = {};

  TileNumbers(const char* at, ScaleKind kind) {
    for (int v = 0; at != nullptr && v < kTile / kWidth; ++v) {
      vectors[v] = scale_numbers(at, kind, v);
    }
  }
};

// What a group of inputs gives joins the totals.
template <bool kTurnsOutputs>
void add_scaled(const LinearWeights& weights, const Inputs& x, int64_t tile, int64_t number,
                const Group& group) {
  const int64_t at = (tile * weights.num_groups + number) * kTile * size_of(weights.scale_kind);
  const bool has_shifts = weights.shifts != nullptr;
  const TileNumbers scales(weights.scales + at, weights.scale_kind);
  const TileNumbers shifts(has_shifts ? weights.shifts + at : nullptr, weights.scale_kind);
  const float* x_sums = x.sums + number * x.group_stride + group.first_row;
  for (int64_t r = 0; r < group.num_rows; ++r) {
    Floats sums[kTile / kWidth];
    for (int v = 0; v < kTile / kWidth; ++v) sums[v] = numbers(group.sums + r * kTile + v * kWidth);
    if constexpr (kTurnsOutputs) put_in_order(sums[0], sums[1]);
    for (int v = 0; v < kTile / kWidth; ++v) {
      float* to = group.totals + r * kTile + v * kWidth;
      if (has_shifts) sums[v] = fused(shifts.vectors[v], broadcast(x_sums[r]), sums[v]);
      const Floats total = number == 0 ? Floats{} : numbers(to);
      outdraft::store(to, fused(scales.vectors[v], sums[v], total));
    }
  }
}

void multiply_bf16(const LinearWeights& weights, const Inputs& x, int64_t num_rows, int64_t tile,
                   float* sums) {
  Groups groups(x, num_rows, sums);
  const char* tile_at = weights.tiles + tile * weights.tile_bytes;
  const int64_t num_whole = weights.tile_bytes / kBlockBytes, num_pairs = groups.num_pairs();
  const int64_t rest_bytes = weights.tile_bytes % kBlockBytes;
  alignas(64) char rest[kBlockBytes];
  if (rest_bytes > 0) {
    std::memcpy(rest, tile_at + num_whole * kBlockBytes, rest_bytes);
    std::memset(rest + rest_bytes, 0, kBlockBytes - rest_bytes);
  }
  // Who is alone fetches what comes soon; several pairs fetch a part each of the next strip. The next
  // tile would push long rows out of the second cache before it is met.
  const bool is_alone = num_pairs == 1;
  const int64_t lines = (kBlockLines + num_pairs - 1) / num_pairs;
  const int64_t distance = is_alone ? kNear : kStripBytes;
  const int64_t num_blocks = num_whole + (rest_bytes > 0);
  const int64_t num_strips = is_alone ? 1 : num_blocks / kStripBlocks + 1;
  for (int64_t strip = 0; strip < num_strips; ++strip) {
    const int64_t first = num_blocks * strip / num_strips;
    const int64_t end = num_blocks * (strip + 1) / num_strips;
    const char* ahead = tile_at + first * kBlockBytes + distance;
    for (int64_t pair = 0; pair < num_pairs; ++pair, ahead += (end - first) * lines * kLine) {
      Bf16Blocks blocks = {tile_at, num_whole, rest, first, ahead, lines, is_alone};
      groups.multiply(Strip<Bf16Blocks>{blocks, first, end, strip == 0, is_alone}, pair, nullptr,
                      [](const Group&) {});
    }
  }
  groups.finish();
}

template <class Decoder>
void multiply_quantised(const LinearWeights& weights, const Inputs& x, int64_t num_rows,
                        int64_t tile, float* sums) {
  using Blocks = DecodedBlocks<Decoder>;
  Groups groups(x, num_rows, sums);
  alignas(64) char decoded[kMostBlocks * kBlockBytes];
  alignas(64) float parts[2 * kGroupSums];
  const bool is_grouped = weights.num_groups > 1, is_alone = groups.num_pairs() == 1;
  const int64_t num_blocks = (weights.num_inputs + kBlockInputs - 1) / kBlockInputs;
  const int64_t strip_blocks = is_grouped ? weights.group_inputs / kBlockInputs
                               : is_alone ? num_blocks
                                          : kMostBlocks;
  Blocks blocks = {weights.tiles + tile * weights.tile_bytes, weights.tile_bytes / kStepBytes,
                   decoded, is_alone ? kFewBlocks : kMostBlocks, num_blocks};
  for (int64_t first = 0; first < num_blocks; first += strip_blocks) {
    const int64_t end = std::min(first + strip_blocks, num_blocks);
    // Where a strip fills the room, other pairs still need all of it.
    if (!is_grouped && !is_alone) blocks.end = end;
    for (int64_t pair = 0; pair < groups.num_pairs(); ++pair) {
      const bool is_first = is_grouped || first == 0;
      groups.multiply(Strip<Blocks>{blocks, first, end, is_first, is_alone}, pair,
                      is_grouped ? parts : nullptr, [&](const Group& group) {
                        if (!is_grouped && end < num_blocks) return;
                        const int64_t number = is_grouped ? first / strip_blocks : 0;
                        add_scaled<Decoder::kTurnsOutputs>(weights, x, tile, number, group);
                      });
    }
  }
  groups.finish();
}

void multiply_int8(const LinearWeights& weights, const Inputs& x, int64_t num_rows, int64_t tile,
                   float* sums) {
  weights.is_symmetric
      ? multiply_quantised<DecodedInt8>(weights, x, num_rows, tile, sums)
      : multiply_quantised<DecodedWords<Int8Words>>(weights, x, num_rows, tile, sums);
}

}  // namespace

MultiplyTile matrix_kernel_of(const LinearWeights& weights) {
  switch (weights.format) {
    case Format::kBfloat16:
      return multiply_bf16;
    case Format::kInt8:
      return multiply_int8;
    case Format::kInt4:
      return multiply_quantised<DecodedWords<Int4Words>>;
    default:
      return nullptr;
  }
}

}  // namespace outdraft

#else

namespace outdraft {

MultiplyTile matrix_kernel_of(const LinearWeights&) { return nullptr; }

}  // namespace outdraft

#endif
