#include "apps/colours.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "apps/terminal.h"
#include "base/error.h"

namespace echelon {
namespace {

// SGR parameters (ECMA-48, 8.3.117) from the sixteen colours, which a terminal's own scheme keeps legible.
const char* parameters_of(Tint tint) {
  switch (tint) {
    case Tint::strong:
      return "1";
    case Tint::faint:
      return "2";
    case Tint::good:
      return "1;32";
    case Tint::bad:
      return "1;31";
    case Tint::caution:
      return "33";
  }
  return "";
}

bool has_colours(std::FILE* stream) {
  const char *const terminal = std::getenv("TERM"), *const refused = std::getenv("NO_COLOR");
  return stream != nullptr && is_terminal(stream) && (refused == nullptr || *refused == '\0') &&
         terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
}

}  // namespace

std::string Colours::operator()(Tint tint, const std::string& text) const {
  if (!shown_ || text.empty()) return text;
  // The line's end stays outside, so that a pager that shows single lines finds no colour left on.
  const std::size_t end = text.find_last_not_of('\n') + 1;
  const std::string begin = std::string("\033[") + parameters_of(tint) + "m";
  return begin + text.substr(0, end) + "\033[0m" + text.substr(end);
}

std::string Colours::headed(const std::string& text) const {
  if (!shown_) return text;
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    const std::size_t colon = line.starts_with(' ') ? std::string::npos : line.find(':');
    const std::size_t head = colon == std::string::npos ? 0 : colon + 1;
    out += (*this)(Tint::strong, line.substr(0, head)) + line.substr(head);
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return out;
}

void ColourFlag::add_to(CLI::App& app, const char* help) {
  app.add_option("--colour,--color", when_, help)->type_name("auto|always|never")->default_str("auto");
}

void ColourFlag::check() const {
  if (when_ != "auto" && when_ != "always" && when_ != "never")
    refuse("--colour {}: legal: auto, always, never", when_);
}

Colours ColourFlag::of(std::FILE* stream) const {
  return Colours(when_ == "always" || (when_ == "auto" && has_colours(stream)));
}

}  // namespace echelon
