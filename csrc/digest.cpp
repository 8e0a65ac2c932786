// What this library was made from: build_kernels.py and the tests notice a stale one by it.

#include "export.h"

// Hexadecimal SHA-256 of sources and flags, as `source_digest` of build_kernels.py.
OUTDRAFT_EXPORT const char* source_digest() { return OUTDRAFT_DIGEST; }
