// What a training run writes beside its checkpoints: its logs.
#pragma once

#include <cstdint>
#include <fstream>
#include <ios>
#include <string>
#include <vector>

#include "train/log_formats.h"
#include "train/session.h"

namespace echelon {

// A request that is refused leaves no log behind, and an earlier log as it was.
class RunOutputs {
 public:
  // RequestError naming --log where one cannot be written.
  explicit RunOutputs(const TrainRequest& request);
  // Nothing more is refused: earlier logs make room for these, or these go on behind them. (TensorBoard's
  // files stay; each run has one of its own.)
  void start_logs(bool anew, std::int64_t first_step);
  // RunError where a log cannot be written any more.
  void write_log(const LogEntry& entry);
  void remove_new_logs();

 private:
  enum class Form { json_lines, csv, tensorboard };
  struct Log {
    std::string asked, path;  // as it was asked for; the file
    Form form = Form::json_lines;
    bool had_file = false, had_directory = true, has_beginning = false;
    std::ofstream stream{};
  };
  static void open(Log& log, std::ios::openmode mode);
  static void write(Log& log, const std::string& bytes);

  std::vector<Log> logs_;
  std::int64_t first_step_ = 0;
};

}  // namespace echelon
