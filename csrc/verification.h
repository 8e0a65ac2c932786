// Verdicts on drafts: see verification.cpp.
#pragma once

#include <cstdint>

#include "export.h"

// Walk along the choices of flat rows; arguments as in `DraftBatch`, results as in `Verdict`.
OUTDRAFT_EXPORT void match_choices(int64_t num_requests, int64_t width, const int64_t* choices,
                                   const int64_t* tokens, const int64_t* parents,
                                   const int64_t* num_drafts, int64_t* emitted, int64_t* rows,
                                   int64_t* num_emitted);
