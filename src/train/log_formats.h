// What a run logs, in the forms that other programs read. Pure functions: where the bytes go is
// run_outputs.h.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "train/metrics.h"

namespace echelon {

struct Evaluation {
  std::int64_t step = 0;
  double validation_loss = 0;
};
struct Fingerprint {
  std::int64_t step = 0;
  std::string text;
};
// What JSON lines have alone: what a run begins with and ends with, as objects of JSON, its checkpoints, and
// what was corrupted.
struct RunBegin {
  std::int64_t step = 0;  // the last one behind it
  std::string json;
};
struct RunEnd {
  std::int64_t step = 0;
  std::string json;  // the summary
};
struct SavedCheckpoint {
  std::int64_t step = 0;
  std::string path;
};
using LogEntry = std::variant<StepRecord, Evaluation, WorkSpread, Fingerprint, RunBegin, RunEnd,
                              SavedCheckpoint, Corruption>;

// One object and the end of its line.
std::string json_line(const LogEntry& entry);

// A row under the columns of csv_header(), and the end of its line; cells that the entry says nothing of are
// empty, and so is the row of one that no column is of. What belongs to layers or ranks is left out, but for the largest load of an expert over the average,
// the part of the choices that was dropped, and the slowest rank with its seconds of work.
std::string csv_header();
std::string csv_row(const LogEntry& entry);

// TensorBoard's event files: TFRecords of tensorflow.Event messages (tensorflow/core/util/event.proto).
// `wall_seconds`: since 1970. The beginning is for the start of a file; from `first_step` on it takes the
// place of what earlier files in the directory say.
std::string tensorboard_beginning(std::int64_t first_step, double wall_seconds);
// The same numbers as scalars; empty for an entry that has none.
std::string tensorboard_event(const LogEntry& entry, double wall_seconds);

}  // namespace echelon
