// How the trie of finished texts takes up a text, and gives it back; integers only.

#include "finished_texts.h"

#include <algorithm>

namespace outdraft {

FinishedTexts::FinishedTexts(int64_t max_depth, int64_t branching)
    : max_depth_(max_depth), branching_(branching), ring_(1024), nodes_(branching) {
  new_node(0, 0, 0);
}

void FinishedTexts::add(const int32_t* text, int64_t num_tokens) {
  const int64_t start = texts_.empty() ? 0 : texts_.back().stop;
  const int64_t oldest = texts_.empty() ? start : texts_.front().start;
  if (start + num_tokens - oldest > static_cast<int64_t>(ring_.size())) {
    grow_ring(start + num_tokens - oldest);
  }
  texts_.push_back({start, start + num_tokens});
  num_coming_ = num_tokens;
  for (int64_t i = 0; i < num_tokens; ++i) ring_[(start + i) & (ring_.size() - 1)] = text[i];
}

void FinishedTexts::grow_ring(int64_t num_tokens) {
  size_t places = ring_.size();
  while (static_cast<int64_t>(places) < num_tokens) places *= 2;
  std::vector<int32_t> grown(places);
  if (!texts_.empty()) {
    for (int64_t at = texts_.front().start; at < texts_.back().stop; ++at) {
      grown[at & (places - 1)] = ring(at);
    }
  }
  ring_.swap(grown);
}

int64_t FinishedTexts::count(int64_t max_tokens) {
  const int64_t num_tokens = std::min(max_tokens, num_coming_);
  if (num_tokens == 0) return 0;
  const int64_t stop = texts_.back().stop;
  const int64_t start = stop - num_coming_;
  for (int64_t first = start; first < start + num_tokens; ++first) add_window(first, stop);
  num_coming_ -= num_tokens;
  return num_tokens;
}

int64_t FinishedTexts::remove_oldest(int64_t max_tokens) {
  const int64_t stop = texts_.front().stop;
  const int64_t start = texts_.front().start + num_removed_;
  const int64_t end = std::min(start + max_tokens, stop);
  for (int64_t first = start; first < end; ++first) remove_window(first, stop);
  num_removed_ += end - start;
  if (end == stop) {
    texts_.pop_front();
    num_removed_ = 0;
  }
  return end - start;
}

void FinishedTexts::add_window(int64_t first, int64_t stop) {
  stop = std::min(first + max_depth_, stop);
  int32_t node = kRoot;
  for (int64_t at = first; at < stop;) {
    int32_t child = index_.find(nodes_, node, ring(at));
    int32_t shared = 1;
    if (child == kNone) {
      shared = static_cast<int32_t>(stop - at);
      child = new_node(at, shared, 0);
      hang(child, node, ring(at));
    } else {
      const int64_t limit = std::min<int64_t>(nodes_[child].length, stop - at);
      while (shared < limit && token_at(child, shared) == ring(at + shared)) ++shared;
      if (shared < nodes_[child].length) child = split(child, shared);
    }
    ++nodes_[child].count;
    nodes_[child].label_start = at;
    promote(node, child);
    node = child;
    at += shared;
  }
}

void FinishedTexts::remove_window(int64_t first, int64_t stop) {
  stop = std::min(first + max_depth_, stop);
  int32_t node = kRoot;
  for (int64_t at = first; at < stop;) {
    int32_t child = index_.find(nodes_, node, ring(at));
    at += nodes_[child].length;
    int32_t* frequent = nodes_.extra(node);
    if (std::find(frequent, frequent + branching_, child) < frequent + branching_) {
      frequent[0] = kStale;
    }
    if (--nodes_[child].count == 0) {  // no window passes: a leaf, and the end of this one
      cut(child);
      free_node(child);
      child = kNone;
    }
    join(node);
    node = child;
  }
  if (node != kNone) join(node);
}

int32_t FinishedTexts::new_node(int64_t label_start, int32_t length, int32_t count) {
  int32_t node = free_;
  if (node == kNone) {
    node = nodes_.push();
  } else {
    free_ = nodes_[node].next;
  }
  nodes_[node] = {label_start, kNone, kNone, kNone, length, count, kNone, kNone, kNone};
  std::fill_n(nodes_.extra(node), branching_, kNone);
  return node;
}

void FinishedTexts::free_node(int32_t node) {
  nodes_[node].next = free_;
  free_ = node;
}

// Makes a node the first child of another one.
void FinishedTexts::hang(int32_t child, int32_t parent, int32_t token) {
  Node& hung = nodes_[child];
  hung.from = parent;
  hung.token = token;
  hung.previous = kNone;
  hung.next = nodes_[parent].first_child;
  if (hung.next != kNone) nodes_[hung.next].previous = child;
  nodes_[parent].first_child = child;
  index_.put(nodes_, child);
}

// Takes a node away from its parent.
void FinishedTexts::cut(int32_t child) {
  index_.remove(nodes_, child);
  const Node& gone = nodes_[child];
  if (gone.previous == kNone) {
    nodes_[gone.from].first_child = gone.next;
  } else {
    nodes_[gone.previous].next = gone.next;
  }
  if (gone.next != kNone) nodes_[gone.next].previous = gone.previous;
}

// Puts a new node, with the first tokens of the label, above an old one; returns the new one.
int32_t FinishedTexts::split(int32_t lower, int32_t length) {
  const Node old = nodes_[lower];
  const int32_t upper = new_node(old.label_start, length, old.count);
  nodes_.extra(upper)[0] = lower;
  cut(lower);
  hang(upper, old.from, old.token);
  nodes_[lower].length -= length;
  nodes_[lower].label_start += length;
  hang(lower, upper, token_at(lower, 0));
  replace(old.from, lower, upper);
  return upper;
}

// Undoes a split that nothing needs any more: every window goes on to the only child.
void FinishedTexts::join(int32_t upper) {
  const Node old = nodes_[upper];
  const int32_t lower = old.first_child;
  if (upper == kRoot || lower == kNone || nodes_[lower].count != old.count) return;
  cut(lower);
  cut(upper);
  nodes_[lower].length += old.length;
  nodes_[lower].label_start -= old.length;
  hang(lower, old.from, old.token);
  replace(old.from, upper, lower);
  free_node(upper);
}

// Moves the child that was counted just now before all that do not count more.
void FinishedTexts::promote(int32_t node, int32_t child) {
  int32_t* frequent = nodes_.extra(node);
  if (frequent[0] == kStale) return;
  int64_t rank = 0;
  while (rank < branching_ && frequent[rank] != kNone && frequent[rank] != child &&
         nodes_[frequent[rank]].count > nodes_[child].count) {
    ++rank;
  }
  for (int32_t moved = child; rank < branching_ && moved != kNone; ++rank) {
    std::swap(moved, frequent[rank]);
    if (moved == child) break;
  }
}

// Puts a child in the place of another one that counts as much.
void FinishedTexts::replace(int32_t node, int32_t old_child, int32_t child) {
  int32_t* frequent = nodes_.extra(node);
  std::replace(frequent, frequent + branching_, old_child, child);
}

bool FinishedTexts::is_less(int32_t child, int32_t other) const {
  const Node &one = nodes_[child], &two = nodes_[other];
  return one.count != two.count ? one.count < two.count : one.label_start < two.label_start;
}

// Finds them again where a removal has touched them.
void FinishedTexts::find_frequent_children(int32_t node) {
  int32_t* frequent = nodes_.extra(node);
  std::fill_n(frequent, branching_, kNone);
  for (int32_t child = nodes_[node].first_child; child != kNone; child = nodes_[child].next) {
    int32_t moved = child;
    for (int64_t rank = 0; rank < branching_ && moved != kNone; ++rank) {
      if (frequent[rank] == kNone || is_less(frequent[rank], moved)) {
        std::swap(moved, frequent[rank]);
      }
    }
  }
}

int64_t FinishedTexts::length_before(const Place& place, const int32_t* string_end,
                                     int64_t most) const {
  const int64_t end = nodes_[place.node].label_start + place.used;
  int64_t length = 0;
  while (length < most && ring(end - 1 - length) == string_end[-1 - length]) ++length;
  return length;
}

FinishedTexts::Place FinishedTexts::locate(const int32_t* string, int64_t length) const {
  Place place = {kRoot, 0};
  for (int64_t at = 0; at < length; at += place.used) {
    const int32_t best = nodes_.extra(place.node)[0];
    const bool is_best = best >= 0 && nodes_[best].token == string[at];
    const int32_t node = is_best ? best : index_.find(nodes_, place.node, string[at]);
    if (node == kNone) return {kNone, 0};
    const auto used = static_cast<int32_t>(std::min<int64_t>(nodes_[node].length, length - at));
    for (int32_t offset = 1; offset < used; ++offset) {
      if (token_at(node, offset) != string[at + offset]) return {kNone, 0};
    }
    place = {node, used};
  }
  return place;
}

}  // namespace outdraft
