// The page of train --report, and of view.
#pragma once

#include <string>
#include <vector>

#include "draw/page.h"

namespace echelon {

// A report is drawn from the run's own log in JSON lines: one that is asked for, or one that is made for it
// and goes with this.
class ReportedLog {
 public:
  ReportedLog() = default;
  ReportedLog(const ReportedLog&) = delete;
  ReportedLog& operator=(const ReportedLog&) = delete;
  ~ReportedLog();
  // Adds one to `logs` where none of them can be read again. RequestError naming TMPDIR where that cannot be.
  void choose(std::vector<std::string>& logs);
  const std::string& path() const { return path_; }

 private:
  std::string path_, directory_;
};

// Of the log in JSON lines at `path`. RequestError naming `flag` for what is none. The page's tracks and
// ranks are the caller's to add.
Page run_page(const std::string& path, const std::string& flag, const std::string& command);

}  // namespace echelon
