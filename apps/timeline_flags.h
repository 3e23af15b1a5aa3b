// --trace and --timeline: drawings of what the ranks of train and verify did.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "draw/page.h"
#include "schedule/timeline.h"

namespace echelon {

// One above the other: simulated with the measured times, and measured.
std::vector<PageTrack> timeline_tracks(const Timeline& simulated, const Timeline& measured);

class TimelineFlags {
 public:
  void add_to(CLI::App& app);
  // RequestError if a file cannot be written.
  void check() const;
  // Whether every rank's timeline is needed.
  bool asked() const { return !trace_.empty() || !timeline_.empty(); }
  // The first pipeline's simulated and measured timelines, and what every rank did.
  void write(const Timeline& simulated, const Timeline& measured,
             const std::vector<RankTimeline>& ranks) const;

 private:
  const CLI::App* app_ = nullptr;
  std::string trace_, timeline_;
};

}  // namespace echelon
