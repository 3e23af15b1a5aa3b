// The log of a run, in the formats that other programs read. Pure functions: run_outputs.h writes the bytes.
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
// Entries that only JSON lines have: the begin and end of a run as JSON objects, its checkpoints, and
// corruptions.
struct RunBegin {
  std::int64_t step = 0;  // the last step before it
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

// One JSON object and a newline.
std::string json_line(const LogEntry& entry);

// A row for the columns of csv_header(), and a newline; cells without a value are empty, and so is the result
// for an entry without columns. Values by layer or rank are left out, except the largest load of an expert
// over the average, the fraction of choices that was dropped, and the slowest rank with its seconds of work.
std::string csv_header();
std::string csv_row(const LogEntry& entry);

// TensorBoard event files: TFRecords of tensorflow.Event messages (tensorflow/core/util/event.proto).
// `wall_seconds`: since 1970. tensorboard_beginning() starts a file; from `first_step` on, the file
// supersedes earlier ones in the directory.
std::string tensorboard_beginning(std::int64_t first_step, double wall_seconds);
// The entry's numbers as scalars; empty if it has none.
std::string tensorboard_event(const LogEntry& entry, double wall_seconds);

}  // namespace echelon
