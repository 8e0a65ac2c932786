// What Python calls: plain C names, addresses and numbers. All else stays inside the library.
//
// The library describes it: each file names its functions and its structs at its end, and from that
// Python has the types of arguments and the places of fields (kernels/native/library.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#define OUTDRAFT_EXPORT extern "C" __attribute__((visibility("default")))

// The functions that a file exports.
#define OUTDRAFT_FUNCTIONS(...)                      \
  [[maybe_unused]] static const bool are_described = \
      outdraft::describe_functions(#__VA_ARGS__, __VA_ARGS__)

// The fields of a struct that Python fills, by their places in it. A struct inside of it is one field,
// or its fields are named, and each counts by the last part of its name.
#define OUTDRAFT_STRUCT(Kind, ...)                                                         \
  struct Described##Kind : Kind {                                                          \
    bool describe() const {                                                                \
      return describe_struct(#Kind, sizeof(Kind), this, #__VA_ARGS__, __VA_ARGS__);        \
    }                                                                                      \
  };                                                                                       \
  [[maybe_unused]] static const bool is_##Kind##_described = Described##Kind{}.describe()

namespace outdraft {

// A line for the functions of each file, and one for each struct, see interface.cpp.
std::string& interface_text();

template <class Type>
void append_type(std::string& text) {
  if constexpr (std::is_pointer_v<Type>) {
    using To = std::remove_pointer_t<Type>;
    using Numbers = std::remove_const_t<To>;
    if (std::is_const_v<To>) text += "const ";
    if constexpr (std::is_arithmetic_v<Numbers> && !std::is_same_v<Numbers, char>) {
      append_type<Numbers>(text);
    } else {
      text += "any";
    }
    text += "*";
  } else if constexpr (std::is_void_v<Type>) {
    text += "none";
  } else if constexpr (std::is_enum_v<Type>) {
    append_type<std::underlying_type_t<Type>>(text);
  } else if constexpr (std::is_same_v<Type, bool>) {
    text += "bool";
  } else if constexpr (std::is_arithmetic_v<Type>) {
    text += std::is_floating_point_v<Type> ? "float" : std::is_signed_v<Type> ? "int" : "uint";
    text += std::to_string(8 * sizeof(Type));
  } else {
    static_assert(sizeof(Type) % sizeof(int64_t) == 0);
    text += "int64[";
    text += std::to_string(sizeof(Type) / sizeof(int64_t));
    text += "]";
  }
}

// Types of the result and of all arguments.
template <class Result, class... Arguments>
void append_signature(std::string& text, Result (*)(Arguments...)) {
  text += ";";
  append_type<Result>(text);
  ((text += ",", append_type<Arguments>(text)), ...);
}

template <class... Functions>
bool describe_functions(const char* names, Functions... functions) {
  std::string& text = interface_text();
  text += "functions;";
  text += names;
  (append_signature(text, functions), ...);
  text += "\n";
  return true;
}

template <class Field>
void append_field(std::string& text, const void* start, const Field& field) {
  text += ";";
  append_type<Field>(text);
  text += ",";
  text += std::to_string(reinterpret_cast<const char*>(&field) - static_cast<const char*>(start));
}

template <class... Fields>
bool describe_struct(const char* kind, size_t size, const void* start, const char* names,
                     const Fields&... fields) {
  std::string& text = interface_text();
  text += kind;
  text += ",";
  text += std::to_string(size);
  text += ";";
  text += names;
  (append_field(text, start, fields), ...);
  text += "\n";
  return true;
}

}  // namespace outdraft
