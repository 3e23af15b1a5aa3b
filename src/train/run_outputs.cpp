#include "train/run_outputs.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace echelon {

namespace fs = std::filesystem;

RunOutputs::RunOutputs(const TrainRequest& request) : log_path_(request.log_path) {
  std::error_code error;
  if (!log_path_.empty()) {
    had_log_ = fs::exists(log_path_, error);
    open_log(std::ios::app);
  }
}

void RunOutputs::open_log(std::ios::openmode mode) {
  errno = 0;
  log_.open(log_path_, std::ios::out | mode);
  if (!log_) refuse("--log {}: cannot be written: {}", log_path_, std::strerror(errno));
}

void RunOutputs::start_log_anew() {
  if (log_path_.empty()) return;
  log_.close();
  open_log(std::ios::trunc);
}

void RunOutputs::write_log(const std::string& line) {
  if (log_path_.empty()) return;
  log_ << line << std::endl;  // flushed: a run that is killed keeps its log
  if (!log_) fail("--log {}: cannot be written any more: {}", log_path_, std::strerror(errno));
}

void RunOutputs::remove_new_log() {
  std::error_code error;
  if (!log_path_.empty() && !had_log_ && fs::file_size(log_path_, error) == 0) fs::remove(log_path_, error);
}

}  // namespace echelon
