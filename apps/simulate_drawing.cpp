#include "apps/simulate_drawing.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "apps/terminal.h"
#include "base/error.h"

namespace echelon {
namespace {

int width(const SimulateFlags& f) { return f.width > 0 ? f.width : terminal_columns(stdout, 100); }

bool is_colour(const SimulateFlags& f) {
  const char* terminal = std::getenv("TERM");
  return f.colour == "always" ||
         (f.colour == "auto" && f.out.empty() && is_terminal(stdout) && std::getenv("NO_COLOR") == nullptr &&
          terminal != nullptr && std::strcmp(terminal, "dumb") != 0);
}

}  // namespace

TextOptions text_options(const SimulateFlags& flags) { return {width(flags), is_colour(flags)}; }

void check_text_options(const SimulateFlags& f) {
  if (f.colour != "auto" && f.colour != "always" && f.colour != "never")
    refuse("--colour {}: legal: auto, always, never", f.colour);
  if (f.width < 0 || (f.width > 0 && f.width < 20) || f.width > 100000)
    refuse("--width {}: must be from 20 to 100000 columns", f.width);
}

void write_drawing(const SimulateFlags& f, const std::string& text) {
  if (f.out.empty()) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  std::ofstream out(f.out, std::ios::binary);
  if (!out) refuse("--out {}: {}", f.out, std::strerror(errno));
  out << text << std::flush;
  if (!out) fail("--out {}: {}", f.out, std::strerror(errno));
}

}  // namespace echelon
