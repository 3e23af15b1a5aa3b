// --trace and --timeline: where train and verify draw what their pipeline did.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "draw/gantt.h"
#include "schedule/timeline.h"

namespace echelon {

class TimelineFlags {
 public:
  void add_to(CLI::App& app);
  // RequestError where a file cannot be written.
  void check() const;
  // `more`: other measured tracks, for --trace.
  void write(const Timeline& simulated, const Timeline& measured, const std::vector<Track>& more = {}) const;

 private:
  std::string trace_, timeline_;
};

}  // namespace echelon
