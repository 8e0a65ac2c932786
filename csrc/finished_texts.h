// Every short string of the texts of finished requests, and how often it occurred; integers only.
//
// A path-compressed trie of every window of max_depth tokens (the windows at the end of a text are
// shorter), with the number of windows that pass through each node. All prefixes of windows are all
// substrings of up to max_depth tokens, so the counts are exact numbers of occurrences.
//
// A node's label points into some text, and always into the newest window that passed: texts leave
// in the order they came, so a node that still counts something never points into a text that has
// left. Removing a text walks its windows again and takes back what adding it did, down to the
// shape: after each removal the trie is the one that the remaining texts alone would have built.
//
// Windows are added and removed one by one, so both can be done a few tokens at a time: a long text
// does not delay other requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "pair_index.h"
#include "rows_of_records.h"

namespace outdraft {

class FinishedTexts {
 public:
  struct Node {
    int64_t label_start;  // in tokens ever added
    int32_t from;         // its parent
    int32_t token;        // first of its label
    int32_t next_in_bucket;
    int32_t length;  // of its label
    int32_t count;
    int32_t first_child;
    int32_t next;  // sibling, or the next free row
    int32_t previous;
  };

  // Where a string ends: on the label of a node, of which it uses some tokens.
  struct Place {
    int32_t node;  // kNone: the string has not occurred
    int32_t used;
  };

  static constexpr int32_t kRoot = 0;

  FinishedTexts(int64_t max_depth, int64_t branching)
      : max_depth_(max_depth), branching_(branching), nodes_(branching) {
    new_node(0, 0, 0);
  }

  // Keeps a text of one token or more; the text before must be counted whole.
  void add(const int32_t* text, int64_t num_tokens) {
    tokens_.insert(tokens_.end(), text, text + num_tokens);
    lengths_.push_back(num_tokens);
    num_coming_ = num_tokens;
  }
  // Counts the substrings of the newest text that start at its next tokens; returns how many tokens
  // these were, 0 if the text is counted whole.
  int64_t count(int64_t max_tokens) {
    const int64_t num_tokens = std::min(max_tokens, num_coming_);
    const int64_t stop = num_gone_ + static_cast<int64_t>(tokens_.size());
    for (int64_t i = 0; i < num_tokens; ++i) add_window(stop - num_coming_--, stop);
    return num_tokens;
  }
  // Takes back substrings of the oldest text as `count` adds them, at last the text itself.
  int64_t remove_oldest(int64_t max_tokens) {
    const int64_t length = lengths_.front();
    const int64_t num_tokens = std::min(max_tokens, length - num_removed_);
    for (int64_t i = 0; i < num_tokens; ++i) {
      remove_window(num_gone_ + num_removed_++, num_gone_ + length);
    }
    if (num_removed_ == length) {
      tokens_.erase(tokens_.begin(), tokens_.begin() + length);
      num_gone_ += length;
      lengths_.pop_front();
      num_removed_ = 0;
    }
    return num_tokens;
  }

  Place locate(const int32_t* string, int64_t length) const {
    Place place = {kRoot, 0};
    for (int64_t at = 0; at < length; at += place.used) {
      const int32_t best = nodes_.extra(place.node)[0];
      const bool is_best = best >= 0 && nodes_[best].token == string[at];
      const int32_t node = is_best ? best : index_.find(nodes_, place.node, string[at]);
      if (node == kNone) return {kNone, 0};
      const auto used = static_cast<int32_t>(std::min<int64_t>(nodes_[node].length, length - at));
      for (int32_t offset = 1; offset < used; ++offset) {
        if (label(node, offset) != string[at + offset]) return {kNone, 0};
      }
      place = {node, used};
    }
    return place;
  }
  // How many of a string's last tokens stand before the end of a place's newest occurrence.
  // No match there is longer; what stands there may begin in another text, though.
  int64_t length_before(const Place& place, const int32_t* string_end, int64_t most) const {
    const int64_t end = nodes_[place.node].label_start + place.used;
    most = std::min(most, end - num_gone_);
    int64_t length = 0;
    while (length < most && text(end - 1 - length) == string_end[-1 - length]) ++length;
    return length;
  }

  int32_t count_of(const Place& place) const { return nodes_[place.node].count; }
  // The continuation of this rank, the most frequent first and the latest among equals.
  Place follow(const Place& place, int32_t rank, int32_t* token) {
    const int32_t node = place.node;
    if (place.used < nodes_[node].length) {  // the label goes on
      if (rank > 0) return {kNone, 0};
      *token = text(nodes_[node].label_start + place.used);
      return {node, place.used + 1};
    }
    if (rank == branching_) return {kNone, 0};
    if (nodes_.extra(node)[0] == kStale) find_frequent_children(node);
    const int32_t child = nodes_.extra(node)[rank];
    if (child != kNone) *token = nodes_[child].token;
    return {child, 1};
  }
  int64_t num_bytes() const {
    return nodes_.num_bytes() + index_.num_bytes() + tokens_.size() * sizeof(int32_t);
  }

 private:
  static constexpr int32_t kStale = -2;  // the frequent children are to be found again

  // A token of the texts, by its number among all that were ever added.
  int32_t text(int64_t at) const { return tokens_[at - num_gone_]; }
  int32_t label(int32_t node, int64_t used) const { return text(nodes_[node].label_start + used); }

  void add_window(int64_t first, int64_t stop) {
    stop = std::min(first + max_depth_, stop);
    int32_t node = kRoot;
    for (int64_t at = first; at < stop;) {
      int32_t child = index_.find(nodes_, node, text(at));
      int32_t shared = 1;
      if (child == kNone) {
        shared = static_cast<int32_t>(stop - at);
        child = new_node(at, shared, 0);
        hang(child, node, text(at));
      } else {
        const int64_t limit = std::min<int64_t>(nodes_[child].length, stop - at);
        while (shared < limit && label(child, shared) == text(at + shared)) ++shared;
        if (shared < nodes_[child].length) child = split(child, shared);
      }
      ++nodes_[child].count;
      nodes_[child].label_start = at;
      int32_t* ranked = nodes_.extra(node);
      const auto count_of = [&](int32_t each) { return nodes_[each].count; };
      if (ranked[0] != kStale) promote(ranked, branching_, child, count_of);
      node = child;
      at += shared;
    }
  }

  void remove_window(int64_t first, int64_t stop) {
    stop = std::min(first + max_depth_, stop);
    int32_t node = kRoot;
    for (int64_t at = first; at < stop;) {
      int32_t child = index_.find(nodes_, node, text(at));
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

  int32_t new_node(int64_t label_start, int32_t length, int32_t count) {
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

  void free_node(int32_t node) {
    nodes_[node].next = free_;
    free_ = node;
  }

  // Makes a node the first child of another one.
  void hang(int32_t child, int32_t parent, int32_t token) {
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
  void cut(int32_t child) {
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
  int32_t split(int32_t lower, int32_t length) {
    const Node old = nodes_[lower];
    const int32_t upper = new_node(old.label_start, length, old.count);
    nodes_.extra(upper)[0] = lower;
    cut(lower);
    hang(upper, old.from, old.token);
    nodes_[lower].length -= length;
    nodes_[lower].label_start += length;
    hang(lower, upper, label(lower, 0));
    replace(old.from, lower, upper);
    return upper;
  }

  // Undoes a split that nothing needs any more: every window goes on to the only child.
  void join(int32_t upper) {
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

  // Puts a child in the place of another one that counts as much.
  void replace(int32_t node, int32_t old_child, int32_t child) {
    int32_t* frequent = nodes_.extra(node);
    std::replace(frequent, frequent + branching_, old_child, child);
  }

  bool is_less(int32_t child, int32_t other) const {
    const Node &one = nodes_[child], &two = nodes_[other];
    return one.count != two.count ? one.count < two.count : one.label_start < two.label_start;
  }

  // Finds them again where a removal has touched them.
  void find_frequent_children(int32_t node) {
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

  int64_t max_depth_;
  int64_t branching_;
  std::deque<int32_t> tokens_;   // of all texts, one behind the other
  std::deque<int64_t> lengths_;  // of the texts
  int64_t num_gone_ = 0;         // tokens of texts that have left
  int64_t num_removed_ = 0;  // windows of the oldest text that were taken back
  int64_t num_coming_ = 0;   // tokens of the newest text whose windows are not counted yet
  Rows<Node> nodes_;
  PairIndex<Node> index_;
  int32_t free_ = kNone;
};

}  // namespace outdraft
