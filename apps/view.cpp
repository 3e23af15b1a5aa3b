#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <vector>

#include "apps/command_text.h"
#include "apps/file_kind.h"
#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/run_page.h"
#include "apps/verbs.h"
#include "apps/view_server.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "train/run_history.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

struct ViewFlags {
  std::string log, out;
  int port = 0;
};

// The files of a directory, by name; RequestError if it cannot be listed.
std::vector<fs::path> files_of(const std::string& directory) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
    files.push_back(at->path());
  if (error) refuse("view {}: {}", directory, error.message());
  std::sort(files.begin(), files.end());
  return files;
}

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

// The log itself, or the only one of a directory; empty if there is none yet.
std::string log_at(const std::string& path) {
  if (!is_directory(path)) return path;
  std::vector<std::string> logs;
  for (const fs::path& file : files_of(path))
    if (file.extension() == ".jsonl") logs.push_back(file.string());
  if (logs.size() > 1) refuse("view {}: has {} logs; legal: {}", path, logs.size(), fmt::join(logs, ", "));
  return logs.empty() ? "" : logs.front();
}

// The traces that train and verify --trace wrote there. Links are ignored.
std::vector<ServedTrace> traces_at(const std::string& path) {
  std::vector<ServedTrace> traces;
  if (!is_directory(path)) return traces;
  for (const fs::path& file : files_of(path)) {
    std::error_code error;
    if (file.extension() != ".json" || fs::symlink_status(file, error).type() != fs::file_type::regular)
      continue;
    std::array<char, 256> room{};
    std::ifstream in(file, std::ios::binary);
    in.read(room.data(), room.size());
    const std::string_view begin(room.data(), static_cast<std::size_t>(in.gcount()));
    if (!begin.starts_with('{') || begin.find("\"traceEvents\"") == begin.npos) continue;
    const auto bytes = fs::file_size(file, error);
    if (!error) traces.push_back({file.filename().string(), file.string(), static_cast<std::int64_t>(bytes)});
  }
  return traces;
}

// The page of a run that may not have begun, and whose log may be incomplete or missing.
Page page_now(const std::string& path, const std::string& command) {
  Page page;
  page.kind = "waiting";
  page.title = "No run to show yet";
  page.command = command;
  try {
    const std::string log = log_at(path);
    if (!log.empty()) return run_page(log, "view", command);
    page.subtitle = fmt::format("{} has no log whose name ends in .jsonl yet (train --log).", path);
  } catch (const RequestError& error) {
    page.subtitle = error.what();
  }
  return page;
}

// Sizes and times of the files that are shown.
std::string tag_now(const std::string& path) {
  std::string state;
  const auto add = [&](const fs::path& file) {
    std::error_code error;
    const auto bytes = fs::file_size(file, error);
    const auto written = fs::last_write_time(file, error).time_since_epoch().count();
    state += fmt::format("{} {} {};", file.string(), bytes, written);
  };
  try {
    add(log_at(path));
    for (const ServedTrace& trace : traces_at(path)) add(trace.path);
  } catch (const RequestError& error) {
    state += error.what();
  }
  return fmt::format("\"{:016x}\"", std::hash<std::string>()(state));
}

// The page with the member that its script reads (src/draw/page/served/live.js). Making the page of a long
// log takes time: the script polls so seldom that the server is mostly idle.
Page served_page(const std::string& path, const std::string& command, const std::string& tag) {
  const auto begin = std::chrono::steady_clock::now();
  Page page = page_now(path, command);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  nlohmann::ordered_json traces = nlohmann::ordered_json::array();
  for (const ServedTrace& trace : traces_at(path))
    traces.push_back({{"name", trace.name}, {"bytes", trace.bytes}});
  const nlohmann::ordered_json served{{"tag", tag},
                                      {"wait_seconds", std::max(1.0, 10 * took.count())},
                                      {"perfetto", "https://ui.perfetto.dev"},
                                      {"traces", traces}};
  page.members.emplace_back("served", json_text(served));
  return page;
}

void serve(const ViewFlags& flags, const std::string& command) {
  std::error_code error;
  if (!fs::exists(flags.log, error))
    refuse("view {}: {}", flags.log, error ? error.message() : "No such file or directory");
  // Refuses what is not a log; a log without steps may get some later.
  if (const std::string log = log_at(flags.log); !log.empty()) run_history(log, "view");
  serve_view({[&] { return tag_now(flags.log); },
              [&](const std::string& tag) { return served_page(flags.log, command, tag); },
              [&] { return traces_at(flags.log); }},
             flags.port, [&](const std::string& address) {
               fmt::print("{}: {} (Ctrl-C ends)\n", flags.log, address);
               std::fflush(stdout);
             });
}

}  // namespace

void add_view(CLI::App& program, int& status) {
  auto flags = std::make_shared<ViewFlags>();
  CLI::App& app =
      *program.add_subcommand("view", "Show the log of a training run as a page, while it goes on too");
  heading(app, common_flags);
  app.add_option("log", flags->log, "What train --log wrote as JSON lines, or a directory with one such file")
      ->type_name("LOG|DIR")
      ->required();
  app.add_option("--out", flags->out, "Write the page, and serve none")->type_name("FILE.html");
  add_number(app, "--port", flags->port,
             "Port of 127.0.0.1 that the page is served at; 0: the system chooses");
  app.callback([flags, &app, &status] {
    refuse_idle(app, {{"--port", flags->out.empty(), "with --out", {}}});
    constexpr int most_ports = 65535;
    if (flags->port < 0 || flags->port > most_ports)
      refuse("--port {}: must be from 0 to {}", flags->port, most_ports);
    status = 0;
    if (flags->out.empty()) return serve(*flags, command_text(app));
    check_output("--out", flags->out);
    check_kind("--out", flags->out, {"a page", ".html"});
    const std::string log = log_at(flags->log);
    if (log.empty())
      refuse(
          "view {}: has no log whose name ends in .jsonl; legal: a file that train --log wrote as JSON lines",
          flags->log);
    write_output("--out", flags->out, page_html(run_page(log, "view", command_text(app))));
    fmt::print("written to {}\n", flags->out);
  });
}

}  // namespace echelon
