// Reads the JSON-lines logs of a run, or of several that continued each other, and combines them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon {

// One JSON object for display: the numbers of each step, in columns; each start, checkpoint, evaluation,
// report of the ranks and fingerprint; loads of the experts; the last summary. Steps that a later start undid
// are left out, and counted. More than `most_points` steps are shown as means of several, and experts in at
// most `most_columns` columns. RequestError naming `flag`, the path and the line if it is no such log.
struct HistoryLimits {
  int most_points = 3000, most_columns = 120;
};
nlohmann::ordered_json run_history(const std::string& path, const std::string& flag,
                                   const HistoryLimits& limits = {});

}  // namespace echelon
