// The logs that a training run writes.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "train/log_formats.h"
#include "train/session.h"

namespace echelon {

// A refused request leaves no log behind, and leaves earlier logs unchanged.
class RunOutputs {
 public:
  // RequestError naming --log if a log cannot be written.
  explicit RunOutputs(const TrainRequest& request);
  // Called when nothing can be refused any more: replaces earlier logs, or appends to them. (TensorBoard's
  // files stay; each run has its own.)
  void start_logs(bool anew, std::int64_t first_step);
  // A log that can no longer be written is given up: lost().
  void write_log(const LogEntry& entry);
  // A sentence on the first log that was given up; empty if there is none.
  const std::string& lost() const { return lost_; }
  void remove_new_logs();

 private:
  enum class Form { json_lines, csv, tensorboard };
  struct Log {
    std::string asked, path;  // as given by the user; the file
    Form form = Form::json_lines;
    bool had_file = false, had_directory = true, has_beginning = false, is_lost = false;
    std::ofstream stream{};
  };
  void write(Log& log, const std::string& bytes);

  std::vector<Log> logs_;
  std::string lost_;
  std::int64_t first_step_ = 0;
};

}  // namespace echelon
