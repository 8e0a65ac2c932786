// What the drafters of texts have in common; see text_ops.py for what they promise.
#pragma once

#include <cstdint>

namespace outdraft {

class Text;

// One request of a step, as Python packs it: four numbers of 64 bits.
struct TextAsk {
  Text* text;  // what is remembered of it
  const int32_t* tokens;
  int64_t num_tokens;
  int64_t max_tokens;  // of the draft
};

class Text {
 public:
  virtual ~Text() = default;
  // Reads the tokens that are new and writes a draft, as GrowingTree does; returns its score.
  virtual double draft(const TextAsk& ask, int32_t* draft) = 0;
  virtual int64_t num_bytes() const = 0;
};

}  // namespace outdraft
