// What this library was made from: build_kernels.py and the tests notice a stale one by it, and
// whoever opens it one that belongs to other Python files.

#include "export.h"

// Hexadecimal SHA-256 of sources and flags, as `source_digest` of build_kernels.py.
OUTDRAFT_EXPORT const char* source_digest() { return OUTDRAFT_DIGEST; }

// The same of the Python files that call the library, as its `caller_digest`.
OUTDRAFT_EXPORT const char* caller_digest() { return OUTDRAFT_CALLER_DIGEST; }
