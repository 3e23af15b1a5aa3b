// The plan of a measured step, field by field as a file gives them.
#pragma once

#include <map>
#include <string>

#include "plan/measurements.h"

namespace echelon {

// A line of a file, and perhaps a column, to be named in refusals.
struct FilePlace {
  std::string file;
  std::size_t line = 0, column = 0;  // from 1; 0: none
  std::string text() const;
};

// A field's text and where it was read.
struct GivenField {
  std::string value;
  std::string where;
};
using GivenFields = std::map<std::string, GivenField>;  // by flag, without dashes; "gpus" and "precision" too

// Without carriage returns and the escape sequences of terminals, such as colours.
std::string without_escapes(const std::string& line);

// The length of the ranks and times that launchers write before a line: "0: " of srun --label,
// "[1,0]<stdout>:" of mpirun --tag-output, "[prterun-node1-4711@1,0]<stdout>: " of Open MPI 5's,
// "[default0]:" of torchrun --tee, "Mon Nov 30 10:04:00 2026<stdout>:" of mpirun --timestamp-output,
// "2026-11-30T10:04:00.123Z " of kubectl logs --timestamps, "Nov 30 10:04:00 " of ts.
std::size_t launcher_prefix(const std::string& line);

// Reads the fields of a line "# echelon: KEY=VALUE ..."; false if the line is not one.
bool read_remark(const std::string& line, const std::string& where, GivenFields& into);

// The step that these fields and `seconds` describe. RequestError naming the field and its place, or `where`
// for a missing field.
MeasuredStep measured_step(const GivenFields& fields, const std::string& model, double seconds,
                           const std::string& where);

// The step that a training program's log describes; no value if the text is no known log.
std::optional<MeasuredStep> read_log(const std::string& text, const std::string& file,
                                     const std::string& model);

}  // namespace echelon
