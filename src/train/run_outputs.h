// What a training run writes beside its checkpoints: the log.
#pragma once

#include <fstream>
#include <ios>
#include <string>

#include "train/session.h"

namespace echelon {

// A request that is refused leaves no log behind, and an earlier log as it was.
class RunOutputs {
 public:
  // RequestError naming --log where it cannot be written.
  explicit RunOutputs(const TrainRequest& request);
  // Nothing more is refused: an earlier log makes room for this one.
  void start_log_anew();
  // RunError where the log cannot be written any more.
  void write_log(const std::string& line);
  void remove_new_log();

 private:
  void open_log(std::ios::openmode mode);

  std::string log_path_;
  bool had_log_ = false;
  std::ofstream log_;
};

}  // namespace echelon
