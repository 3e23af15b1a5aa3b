// Colours of text on a terminal, and the flag that says whether there are any: --colour, of every verb that
// has some.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

namespace echelon {

// What is said of a piece of text. Colours repeat what the words say, so that nothing is lost without them.
enum class Tint { strong, faint, good, bad, caution };

class Colours {
 public:
  explicit Colours(bool are_shown) : shown_(are_shown) {}
  bool are_shown() const { return shown_; }
  std::string operator()(Tint tint, const std::string& text) const;
  // Of each line that begins at the margin what is before its first colon, as a heading.
  std::string headed(const std::string& text) const;

 private:
  bool shown_;
};

class ColourFlag {
 public:
  void add_to(CLI::App& app, const char* help = "Colours in the text");
  // RequestError for a value that is none.
  void check() const;
  // As given; by itself where `stream` is a terminal that has colours (nullptr: it is a file), and NO_COLOR
  // (no-color.org) is not set.
  Colours of(std::FILE* stream) const;

 private:
  std::string when_ = "auto";
};

}  // namespace echelon
