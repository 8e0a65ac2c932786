// What the drafters of texts have in common; see text_ops.py for what they promise.
#pragma once

#include <cstdint>

namespace outdraft {

// One request of a step, as Python packs it: four numbers of 64 bits.
struct TextAsk {
  int64_t number;  // of the request's text
  const int32_t* tokens;
  int64_t num_tokens;
  int64_t max_tokens;  // of the draft
};

class TextDrafter {
 public:
  virtual ~TextDrafter() = default;
  // Reads the new tokens of a text and writes a draft, as GrowingTree does; returns its score.
  virtual double draft(const TextAsk& ask, int32_t* draft) = 0;
  virtual void forget(int64_t number) = 0;
  virtual int64_t num_bytes() const = 0;
};

}  // namespace outdraft
