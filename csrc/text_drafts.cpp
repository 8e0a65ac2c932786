// What Python calls on the drafters of texts, whatever their kind.

#include "text_drafts.h"

#include "export.h"

using outdraft::TextDrafter;

OUTDRAFT_EXPORT void free_texts(TextDrafter* texts) { delete texts; }

// One draft behind the other, and the scores; returns how many numbers the drafts take.
OUTDRAFT_EXPORT int64_t draft_texts(TextDrafter* texts, int64_t num_asks,
                                    const outdraft::TextAsk* asks, int32_t* drafts,
                                    double* scores) {
  int64_t end = 0;
  for (int64_t i = 0; i < num_asks; ++i) {
    scores[i] = texts->draft(asks[i], drafts + end);
    end += 1 + 2 * drafts[end];
  }
  return end;
}

OUTDRAFT_EXPORT void forget_text(TextDrafter* texts, int64_t number) { texts->forget(number); }

OUTDRAFT_EXPORT int64_t texts_bytes(const TextDrafter* texts) { return texts->num_bytes(); }
