// What Python calls on texts, whatever drafts from them.

#include "text_drafts.h"

#include "export.h"

using outdraft::Text;

OUTDRAFT_EXPORT void free_text(Text* text) { delete text; }
OUTDRAFT_EXPORT int64_t text_bytes(const Text* text) { return text->num_bytes(); }

// One draft behind the other, and the scores; returns how many numbers the drafts take.
OUTDRAFT_EXPORT int64_t draft_texts(int64_t num_asks, const outdraft::TextAsk* asks,
                                    int32_t* drafts, double* scores) {
  int64_t end = 0;
  for (int64_t i = 0; i < num_asks; ++i) {
    scores[i] = asks[i].text->draft(asks[i], drafts + end);
    end += 1 + 2 * drafts[end];
  }
  return end;
}
