// The page of train --report, and of view.
#pragma once

#include <string>
#include <vector>

#include "draw/page.h"

namespace echelon {

// A report is drawn from the run's own log in JSON lines: a requested one, or a temporary one that this
// creates and removes.
class ReportedLog {
 public:
  ReportedLog() = default;
  ReportedLog(const ReportedLog&) = delete;
  ReportedLog& operator=(const ReportedLog&) = delete;
  ~ReportedLog();
  // Adds a log to `logs` if none of them can be read later. RequestError naming TMPDIR if that is impossible.
  void choose(std::vector<std::string>& logs);
  const std::string& path() const { return path_; }

 private:
  std::string path_, directory_;
};

// The page for the log in JSON lines at `path`. RequestError naming `flag` if it is no such log. The caller
// adds the page's tracks and ranks.
Page run_page(const std::string& path, const std::string& flag, const std::string& command);

}  // namespace echelon
