#include "apps/run_page.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"
#include "base/private_directory.h"
#include "base/units.h"
#include "train/run_history.h"

namespace echelon {

namespace fs = std::filesystem;

void ReportedLog::choose(std::vector<std::string>& logs) {
  for (const std::string& log : logs) {
    std::error_code error;
    const fs::file_status there = fs::status(log, error);
    const bool is_file = !fs::exists(there) || fs::is_regular_file(there);
    if (is_file && !log.ends_with('/') && !log.ends_with(".csv")) {
      path_ = log;
      return;
    }
  }
  directory_ = make_private_directory("", "echelon-report", "--report");
  path_ = directory_ + "/log.jsonl";
  logs.push_back(path_);
}

ReportedLog::~ReportedLog() {
  std::error_code error;
  if (!directory_.empty()) fs::remove_all(directory_, error);
}

Page run_page(const std::string& path, const std::string& flag, const std::string& command) {
  nlohmann::ordered_json history = run_history(path, flag);
  const auto steps = history["steps"]["count"].get<std::int64_t>();
  if (steps == 0)
    refuse("{} {}: has no step of a training; legal: what train --log wrote as JSON lines", flag, path);
  Page page;
  page.kind = "run";
  page.title = "Training run";
  if (!history["starts"].empty()) {
    const auto& start = history["starts"].back()["start"];
    if (start.contains("model") && start["model"].is_string() && start.contains("mesh") &&
        start["mesh"].is_string())
      page.title =
          fmt::format("{} on {}", start["model"].get<std::string>(), start["mesh"].get<std::string>());
  }
  page.subtitle = fmt::format("{}, to step {}", counted(steps, "step"),
                              history["steps"]["step"].back().get<std::int64_t>());
  page.command = command;
  page.time_unit = "s";
  page.memory_unit = "B";
  if (history.contains("summary")) {
    page.members.emplace_back("answer", json_text(history["summary"]));
    history.erase("summary");
  }
  page.members.emplace_back("history", json_text(history));
  return page;
}

}  // namespace echelon
