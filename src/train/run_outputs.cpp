#include "train/run_outputs.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace echelon {

namespace fs = std::filesystem;

namespace {

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard reads the files of a directory that have "tfevents" in their names, in the order of these.
std::string events_file() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = 0;
  return fmt::format("events.out.tfevents.{:010}.{}.{}", static_cast<std::int64_t>(wall_seconds()),
                     host.data(), ::getpid());
}

// What a run that was stopped while it wrote has left of its last line: nobody could read what is added to
// it.
void drop_cut_line(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  std::ifstream in(path, std::ios::binary);
  if (error || !in) return;
  std::uintmax_t whole = size;
  for (char c = 0; whole > 0; --whole) {
    in.seekg(static_cast<std::streamoff>(whole - 1));
    if (!in.get(c)) return;
    if (c == '\n') break;
  }
  if (whole < size) fs::resize_file(path, whole, error);
}

}  // namespace

RunOutputs::RunOutputs(const TrainRequest& request) {
  for (const std::string& asked : request.log_paths) {
    std::error_code error;
    Log log{asked, asked};
    if (asked.ends_with('/') || fs::is_directory(asked, error)) {
      log.form = Form::tensorboard;
      log.had_directory = fs::exists(asked, error);
      fs::create_directory(asked, error);  // else opening the file says why not
      log.path = (fs::path(asked) / events_file()).string();
    } else if (asked.ends_with(".csv")) {
      log.form = Form::csv;
    }
    log.had_file = fs::exists(log.path, error);
    logs_.push_back(std::move(log));
    // Appends, so that there is no hole where another program empties the file meanwhile (logrotate).
    errno = 0;
    std::ofstream& stream = logs_.back().stream;
    stream.open(logs_.back().path, std::ios::binary | std::ios::app);
    if (stream) continue;
    const int reason = errno;
    remove_new_logs();
    refuse("--log {}: cannot be written: {}", asked, std::strerror(reason));
  }
}

void RunOutputs::start_logs(bool anew, std::int64_t first_step) {
  first_step_ = first_step;
  for (Log& log : logs_) {
    if (log.form == Form::tensorboard) continue;
    if (!anew) {
      drop_cut_line(log.path);
      continue;
    }
    std::error_code error;
    if (fs::is_regular_file(log.path, error)) fs::resize_file(log.path, 0, error);
    if (error) fail("--log {}: cannot be emptied: {}", log.asked, error.message());
  }
}

void RunOutputs::write(Log& log, const std::string& bytes) {
  if (log.is_lost) return;
  log.stream << bytes << std::flush;  // a run that is killed keeps its log
  log.is_lost = !log.stream;
  if (log.is_lost && lost_.empty())
    lost_ = fmt::format("--log {}: cannot be written any more: {}", log.asked, std::strerror(errno));
}

void RunOutputs::write_log(const LogEntry& entry) {
  for (Log& log : logs_) {
    const bool is_first = !std::exchange(log.has_beginning, true);
    std::error_code error;
    switch (log.form) {
      case Form::json_lines:
        write(log, json_line(entry));
        break;
      case Form::csv:
        if (is_first && fs::file_size(log.path, error) == 0) write(log, csv_header());
        write(log, csv_row(entry));
        break;
      case Form::tensorboard:
        if (is_first) write(log, tensorboard_beginning(first_step_, wall_seconds()));
        write(log, tensorboard_event(entry, wall_seconds()));
        break;
    }
  }
}

void RunOutputs::remove_new_logs() {
  std::error_code error;
  for (const Log& log : logs_) {
    if (!log.had_file && fs::file_size(log.path, error) == 0) fs::remove(log.path, error);
    if (!log.had_directory) fs::remove(log.asked, error);  // which is empty but for that file
  }
}

}  // namespace echelon
