#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <vector>

#include "apps/command_text.h"
#include "apps/help.h"
#include "apps/run_page.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "base/output_file.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

struct ViewFlags {
  std::string log, out;
};

// The log itself, or the only one of a directory.
std::string log_at(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return path;
  std::vector<std::string> logs;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.path().extension() == ".jsonl") logs.push_back(entry.path().string());
  std::sort(logs.begin(), logs.end());
  if (error) refuse("view {}: {}", path, error.message());
  if (logs.empty())
    refuse("view {}: has no log whose name ends in .jsonl; legal: a file that train --log wrote as JSON lines",
           path);
  if (logs.size() > 1) refuse("view {}: has {} logs; legal: {}", path, logs.size(), fmt::join(logs, ", "));
  return logs.front();
}

}  // namespace

void add_view(CLI::App& program, int& status) {
  auto flags = std::make_shared<ViewFlags>();
  CLI::App& app = *program.add_subcommand("view", "Draw the log of a training run as a page");
  heading(app, common_flags);
  app.add_option("log", flags->log, "What train --log wrote as JSON lines, or a directory with one such file")
      ->type_name("LOG|DIR")
      ->required();
  app.add_option("--out", flags->out, "Where the page goes (required)")->type_name("FILE.html");
  app.callback([flags, &app, &status] {
    if (flags->out.empty()) refuse("view: --out FILE.html is missing");
    check_output("--out", flags->out);
    write_output("--out", flags->out, page_html(run_page(log_at(flags->log), "view", command_text(app))));
    status = 0;
  });
}

}  // namespace echelon
