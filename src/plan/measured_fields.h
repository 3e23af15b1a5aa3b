// The plan of a measured step, field by field as a file gives them.
#pragma once

#include <map>
#include <string>

#include "plan/measurements.h"

namespace echelon {

// Where a file's line, and perhaps a column, is: for refusals.
struct FilePlace {
  std::string file;
  std::size_t line = 0, column = 0;  // from 1; 0: none
  std::string text() const;
};

// A field's text and where it stands.
struct GivenField {
  std::string value;
  std::string where;
};
using GivenFields = std::map<std::string, GivenField>;  // by flag, without dashes; "gpus" and "precision" too

// How many characters of a line are the rank that a launcher writes before it: "0: " of srun --label,
// "[1,0]<stdout>:" of mpirun --tag-output.
std::size_t rank_prefix(const std::string& line);

// Those of a line "# echelon: KEY=VALUE ..."; false: it is none.
bool read_remark(const std::string& line, const std::string& where, GivenFields& into);

// The step that these fields and `seconds` describe. RequestError naming the field and where it stands, or
// `where` for one that is missing.
MeasuredStep measured_step(const GivenFields& fields, const std::string& model, double seconds,
                           const std::string& where);

// The step of a log of a training program; no value where the text is none that is known.
std::optional<MeasuredStep> read_log(const std::string& text, const std::string& file,
                                     const std::string& model);

}  // namespace echelon
