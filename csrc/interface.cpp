// What this library can be asked: the text that Python reads when it opens it.

#include "export.h"

namespace outdraft {

std::string& interface_text() {
  static std::string text;
  return text;
}

}  // namespace outdraft

OUTDRAFT_EXPORT const char* interface() { return outdraft::interface_text().c_str(); }
