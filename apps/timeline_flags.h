// --trace and --timeline: where train and verify draw what their ranks did.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "draw/page.h"
#include "schedule/timeline.h"

namespace echelon {

// Above one another: simulated with the times measured, and measured.
std::vector<PageTrack> timeline_tracks(const Timeline& simulated, const Timeline& measured);

class TimelineFlags {
 public:
  void add_to(CLI::App& app);
  // RequestError where a file cannot be written.
  void check() const;
  // Whether every rank's timeline is wanted.
  bool asked() const { return !trace_.empty() || !timeline_.empty(); }
  // Simulated and measured of the first pipeline, and what every rank did.
  void write(const Timeline& simulated, const Timeline& measured,
             const std::vector<RankTimeline>& ranks) const;

 private:
  const CLI::App* app_ = nullptr;
  std::string trace_, timeline_;
};

}  // namespace echelon
