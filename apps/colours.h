// Colours for text on a terminal, and the flag --colour that turns them on or off, for every verb that uses
// them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

namespace echelon {

// The meaning of a piece of text. Colours only repeat what the words say, so that nothing is lost without
// them.
enum class Tint { strong, faint, good, bad, caution };

class Colours {
 public:
  explicit Colours(bool are_shown) : shown_(are_shown) {}
  bool are_shown() const { return shown_; }
  std::string operator()(Tint tint, const std::string& text) const;
  // In each line that begins at the margin, the part before the first colon becomes a heading.
  std::string headed(const std::string& text) const;

 private:
  bool shown_;
};

class ColourFlag {
 public:
  void add_to(CLI::App& app, const char* help = "Colours in the text");
  // RequestError for an illegal value.
  void check() const;
  // As the flag says; by default on if `stream` is a terminal with colours (nullptr: a file) and NO_COLOR
  // (no-color.org) is not set.
  Colours of(std::FILE* stream) const;

 private:
  std::string when_ = "auto";
};

}  // namespace echelon
