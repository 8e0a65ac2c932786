// Every short string of the texts of finished requests, and how often it has occurred.
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

#include <cstdint>
#include <deque>
#include <vector>

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

  FinishedTexts(int64_t max_depth, int64_t branching);

  // Keeps a text of one token or more; the text before must be counted whole.
  void add(const int32_t* text, int64_t num_tokens);
  // Counts the substrings of the newest text that start at its next tokens; returns how many tokens
  // these were, 0 if the text is counted whole.
  int64_t count(int64_t max_tokens);
  // Takes back substrings of the oldest text as `count` adds them, at last the text itself.
  int64_t remove_oldest(int64_t max_tokens);

  Place locate(const int32_t* string, int64_t length) const;
  // How many of a string's last tokens stand before the end of a place's newest occurrence.
  // No match there is longer; what stands there may begin in another text, though.
  int64_t length_before(const Place& place, const int32_t* string_end, int64_t most) const;

  const Node& node(int32_t number) const { return nodes_[number]; }
  int32_t token_at(int32_t node, int32_t used) const { return ring(nodes_[node].label_start + used); }
  // The child of this rank, the most frequent first and the latest among equals; kNone: no more.
  int32_t frequent_child(int32_t node, int64_t rank) {
    if (rank == branching_) return kNone;
    if (nodes_.extra(node)[0] == kStale) find_frequent_children(node);
    return nodes_.extra(node)[rank];
  }
  int64_t num_bytes() const {
    return nodes_.num_bytes() + index_.num_bytes() + ring_.size() * sizeof(int32_t);
  }

 private:
  struct Text {
    int64_t start, stop;  // in tokens ever added
  };
  static constexpr int32_t kStale = -2;  // the frequent children are to be found again

  int32_t ring(int64_t at) const { return ring_[at & (ring_.size() - 1)]; }
  void grow_ring(int64_t num_tokens);
  void add_window(int64_t first, int64_t stop);
  void remove_window(int64_t first, int64_t stop);
  int32_t new_node(int64_t label_start, int32_t length, int32_t count);
  void free_node(int32_t node);
  void hang(int32_t child, int32_t parent, int32_t token);
  void cut(int32_t child);
  int32_t split(int32_t lower, int32_t length);
  void join(int32_t upper);
  void promote(int32_t node, int32_t child);
  void replace(int32_t node, int32_t old_child, int32_t child);
  void find_frequent_children(int32_t node);
  bool is_less(int32_t child, int32_t other) const;

  int64_t max_depth_;
  int64_t branching_;
  std::vector<int32_t> ring_;  // of the texts' tokens; a power of two
  std::deque<Text> texts_;
  int64_t num_removed_ = 0;  // windows of the oldest text that were taken back
  int64_t num_coming_ = 0;   // tokens of the newest text whose windows are not counted yet
  Rows<Node> nodes_;
  PairIndex<Node> index_;
  int32_t free_ = kNone;
};

}  // namespace outdraft
