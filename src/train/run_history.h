// What a run, or several that went on from one another, has logged in JSON lines: read again and put together.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon {

// One object for people's eyes: of each step its numbers, in columns; each start, checkpoint, evaluation,
// report of the ranks and fingerprint; loads of the experts; the last summary. Steps that a later start took
// back are left out, and counted. More than `most_points` steps are shown as means of several, and experts in
// at most `most_columns` columns.
// RequestError naming `flag`, the path and the line for what is no such log.
struct HistoryLimits {
  int most_points = 3000, most_columns = 120;
};
nlohmann::ordered_json run_history(const std::string& path, const std::string& flag,
                                   const HistoryLimits& limits = {});

}  // namespace echelon
