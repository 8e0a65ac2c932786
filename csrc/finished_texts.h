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
// does not delay other requests. What is counted then are the strings that start at these tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "followers.h"
#include "suffix_automaton.h"

namespace outdraft {

class FinishedTexts {
 public:
  // Where a string ends: on the label of a node, of which it uses some tokens.
  struct Place {
    int32_t node, used;
  };

  FinishedTexts(int64_t max_depth, int64_t branching)
      : max_depth_(max_depth), branching_(branching) {
    nodes_.push({{}, 0, 0, kNone, 0, true});
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

  // The ends of a text that have occurred here, the longest first.
  //
  // Every occurrence of a string holds one of each of its ends. So ends that occur equally often
  // occur at the same places. While the newest text is counted in part, ends of its last counted
  // strings start behind them, where nothing is counted: then those of the same count and the same
  // newest place occur at the same places.
  std::vector<Match<Place>> matches(const int32_t* text_end, int64_t num_tokens) const {
    const int64_t most = std::min(num_tokens, max_depth_ - 1);
    std::vector<Match<Place>> found;
    for (int64_t length = 1; length <= most; ++length) {
      const Place place = locate(text_end - length, length);
      if (place.node == kNone && num_coming_ == 0) break;
      if (place.node == kNone) continue;
      if (found.empty() || count_of(place) != count_of(found.back().place) ||
          newest_end(place) != newest_end(found.back().place)) {
        found.push_back({place, length, length});
      }
      if (num_coming_ == 0) length = longest_alike(place, length, text_end, most);
      found.back().longest = length;
    }
    std::reverse(found.begin(), found.end());
    return found;
  }
  int32_t count_of(const Place& place) const { return nodes_[place.node].count; }

  // Calls visit(token, place behind it) for the most frequent continuations, in order: the latest
  // first among equals.
  template <class Visit>
  void visit_followers(const Place& place, const Visit& visit) {
    Node& node = nodes_[place.node];
    if (place.used < node.length) {  // the label goes on
      visit(text(node.label_start + place.used), Place{place.node, place.used + 1});
      return;
    }
    if (!node.is_ordered) {
      nodes_.sort(node.first_child, branching_,
                  [this](int32_t one, int32_t two) { return goes_before(one, two); });
    }
    node.is_ordered = true;
    int32_t child = node.first_child;
    for (int64_t rank = 0; rank < branching_ && child != kNone; ++rank) {
      visit(nodes_[child].token, Place{child, 1});
      child = nodes_[child].next;
    }
  }

  int64_t num_bytes() const { return nodes_.num_bytes() + tokens_.size() * sizeof(int32_t); }

 private:
  struct Node : Follower {  // of its parent; `next` of an unused row is the next unused one
    int32_t length;         // of its label
    int32_t count;
    int32_t first_child;
    int64_t label_start;  // in tokens ever added
    bool is_ordered;      // whether its first `branching` children are the most frequent ones
  };

  static constexpr int32_t kRoot = 0;

  // A token of the texts, by its number among all that were ever added.
  int32_t text(int64_t at) const { return tokens_[at - num_gone_]; }
  int64_t newest_end(const Place& place) const {
    return nodes_[place.node].label_start + place.used;
  }

  // Where a string ends; the node is kNone if it has not occurred.
  Place locate(const int32_t* string, int64_t length) const {
    Place place = {kRoot, 0};
    for (int64_t at = 0; at < length; at += place.used) {
      int32_t node = nodes_[place.node].first_child;  // most often it is this one
      if (node == kNone || nodes_[node].token != string[at]) {
        node = nodes_.find(place.node, string[at]);
      }
      if (node == kNone) return {kNone, 0};
      const Node& found = nodes_[node];
      const auto used = static_cast<int32_t>(std::min<int64_t>(found.length, length - at));
      const auto label = tokens_.begin() + (found.label_start - num_gone_);
      if (!std::equal(label, label + used, string + at)) return {kNone, 0};
      place = {node, used};
    }
    return place;
  }

  // The length of the longest end that occurs as often as a shorter one. It stands before the
  // shorter one's newest occurrence, where phrases come again as far as this text's end goes.
  int64_t longest_alike(const Place& place, int64_t length, const int32_t* text_end,
                        int64_t most) const {
    const int64_t newest = newest_end(place);
    most = std::min(most, newest - num_gone_);
    int64_t last = length;
    while (last < most && text(newest - 1 - last) == text_end[-1 - last]) ++last;
    for (int64_t tried = last; length < last; tried = (length + last + 1) / 2) {
      const Place found = locate(text_end - tried, tried);
      if (found.node != kNone && count_of(found) == count_of(place)) {
        length = tried;
      } else {
        last = tried - 1;
      }
    }
    return length;
  }

  void add_window(int64_t first, int64_t stop) {
    stop = std::min(first + max_depth_, stop);
    int32_t node = kRoot;
    for (int64_t at = first; at < stop; at += nodes_[node].length) {
      int32_t child = nodes_.find(node, text(at));
      if (child == kNone) {
        const auto length = static_cast<int32_t>(stop - at);
        child = new_node({{node, text(at), kNone, kNone, kNone}, length, 0, kNone, at, true});
        nodes_.put(child, nodes_[node].first_child, place_of(child));
      } else {
        const int64_t limit = std::min<int64_t>(nodes_[child].length, stop - at);
        const int64_t label = nodes_[child].label_start;
        int32_t shared = 1;
        while (shared < limit && text(label + shared) == text(at + shared)) ++shared;
        if (shared < nodes_[child].length) child = split(child, shared);
      }
      ++nodes_[child].count;
      nodes_[child].label_start = at;
      if (nodes_[node].is_ordered) nodes_.move(child, nodes_[node].first_child, place_of(child));
      node = child;
    }
  }

  void remove_window(int64_t first, int64_t stop) {
    stop = std::min(first + max_depth_, stop);
    int32_t node = kRoot;
    for (int64_t at = first; at < stop;) {
      int32_t child = nodes_.find(node, text(at));
      at += nodes_[child].length;
      if (is_frequent(child)) nodes_[node].is_ordered = false;
      if (--nodes_[child].count == 0) {  // no window passes: a leaf, and the end of this one
        nodes_.cut(child, nodes_[node].first_child);
        free_node(child);
        child = kNone;
      }
      join(node);
      node = child;
    }
    if (node != kNone) join(node);
  }

  int32_t new_node(const Node& node) {
    if (unused_ == kNone) return nodes_.push(node);
    const int32_t row = unused_;
    unused_ = nodes_[row].next;
    nodes_[row] = node;
    return row;
  }
  void free_node(int32_t node) {
    nodes_[node].next = unused_;
    unused_ = node;
  }

  // Puts a new node, with the first tokens of the label, above an old one; returns the new one.
  int32_t split(int32_t lower, int32_t length) {
    Node& node = nodes_[lower];
    int32_t& first = nodes_[node.from].first_child;
    const int32_t upper = new_node({node, length, node.count, kNone, node.label_start, true});
    nodes_.put(upper, first, lower);
    nodes_.cut(lower, first);
    node.from = upper;
    node.token = text(node.label_start + length);
    node.length -= length;
    node.label_start += length;
    nodes_.put(lower, nodes_[upper].first_child, kNone);
    return upper;
  }

  // Undoes a split that nothing needs any more: every window goes on to the only child.
  void join(int32_t upper) {
    Node& above = nodes_[upper];
    const int32_t lower = above.first_child;
    if (upper == kRoot || lower == kNone || nodes_[lower].count != above.count) return;
    Node& node = nodes_[lower];
    nodes_.cut(lower, above.first_child);
    node.from = above.from;
    node.token = above.token;
    node.length += above.length;
    node.label_start -= above.length;
    int32_t& first = nodes_[above.from].first_child;
    nodes_.put(lower, first, upper);
    nodes_.cut(upper, first);
    free_node(upper);
  }

  bool goes_before(int32_t child, int32_t other) const {
    const Node &one = nodes_[child], &two = nodes_[other];
    return one.count != two.count ? one.count > two.count : one.label_start > two.label_start;
  }
  int32_t place_of(int32_t child) const {
    const int32_t first = nodes_[nodes_[child].from].first_child;
    return nodes_.place_of(child, first, branching_,
                           [this](int32_t one, int32_t two) { return goes_before(one, two); });
  }
  // Whether it is one of the first `branching` children of its parent.
  bool is_frequent(int32_t child) const {
    int32_t at = nodes_[nodes_[child].from].first_child;
    for (int64_t rank = 1; rank < branching_ && at != child && at != kNone; ++rank) {
      at = nodes_[at].next;
    }
    return at == child;
  }

  int64_t max_depth_, branching_;
  std::deque<int32_t> tokens_;   // of all texts, one behind the other
  std::deque<int64_t> lengths_;  // of the texts
  int64_t num_gone_ = 0;         // tokens of texts that have left
  int64_t num_removed_ = 0;      // windows of the oldest text that were taken back
  int64_t num_coming_ = 0;       // tokens of the newest text whose windows are not counted yet
  Followers<Node> nodes_;
  int32_t unused_ = kNone;
};

}  // namespace outdraft
