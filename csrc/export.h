// What Python calls: plain C names, addresses and numbers. All else stays inside the library.
#pragma once

#include <cstdint>

#define OUTDRAFT_EXPORT extern "C" __attribute__((visibility("default")))
