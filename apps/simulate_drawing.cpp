#include "apps/simulate_drawing.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/terminal.h"
#include "base/error.h"
#include "base/output_file.h"

namespace echelon {
namespace {

int width(const SimulateFlags& f) { return f.width > 0 ? f.width : terminal_columns(stdout, 100); }

// A file has colours only on request.
bool is_colour(const SimulateFlags& f) { return f.colour.of(f.out.empty() ? stdout : nullptr).are_shown(); }

// The formats that a file of this name may have, the default first; empty if the name does not tell.
std::vector<std::string> formats_of(const std::string& path) {
  const std::string end = std::filesystem::path(path).extension().string();
  if (end == ".svg" || end == ".csv") return {end.substr(1)};
  if (end == ".html" || end == ".htm") return {"html"};
  if (end == ".json") return {"perfetto"};
  if (end == ".txt") return {"text", "rows", "lowered"};
  if (contains({".pdf", ".png", ".jpg", ".jpeg", ".gif"}, end))
    refuse(
        "--out {}: no drawing is made of that kind; legal: names that end in .svg, .html, .json, .csv, .txt",
        path);
  return {};
}

}  // namespace

void read_format(SimulateFlags& f, const std::vector<std::string>& legal) {
  const auto is_legal = [&](const std::string& one) { return contains(legal, one); };
  std::vector<std::string> by_name = formats_of(f.out);
  if (!f.is_format_given && !by_name.empty()) {
    if (!is_legal(by_name.front()))
      refuse("--out {}: would be {}; legal here: names for {}", f.out, by_name.front(),
             fmt::join(legal, ", "));
    f.format = by_name.front();
  }
  if (!is_legal(f.format)) refuse("--format {}: legal: {}", f.format, fmt::join(legal, ", "));
  if (by_name.empty() || contains(by_name, f.format)) return;
  std::erase_if(by_name, [&](const std::string& one) { return !is_legal(one); });
  refuse("--format {}: --out {} is a name of another; legal: {}", f.format, f.out,
         by_name.empty() ? "another name" : fmt::format("{}, or another name", fmt::join(by_name, ", ")));
}

void refuse_idle_drawing(const SimulateFlags& f, const CLI::App& app, bool is_drawn) {
  const std::string undrawn =
      f.json ? "with --json and without --out" : "with --compare and without --format";
  const std::vector<Remedy> file{advice("--out", "FILE")};
  const bool is_text = f.format == "text";
  const std::string format = fmt::format("with --format {}", f.format);
  refuse_idle(app, {{"--format", is_drawn, undrawn, file},
                    {"--width", is_drawn, undrawn, file},
                    {"--colour", is_drawn, undrawn, file},
                    {"--heat", is_drawn, undrawn, file},
                    {"--heat", f.format != "csv", format, {advice("--format", "text")}},
                    {"--width", is_text, format, {advice("--format", "text")}},
                    {"--colour", is_text, format, {advice("--format", "text")}}});
}

TextOptions text_options(const SimulateFlags& flags) { return {width(flags), is_colour(flags)}; }

void check_text_options(const SimulateFlags& f) {
  f.colour.check();
  if (f.width < 0 || (f.width > 0 && f.width < 20) || f.width > 100000)
    refuse("--width {}: must be from 20 to 100000 columns", f.width);
}

void write_drawing(const SimulateFlags& f, const std::string& text) {
  if (f.out.empty()) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  check_output("--out", f.out);
  write_output("--out", f.out, text);
}

}  // namespace echelon
