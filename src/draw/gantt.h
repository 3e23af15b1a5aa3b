// Timelines as pictures: simulated or measured, one alone or several on one time axis (schedules compared, or
// a prediction above what was measured).
#pragma once

#include <string>
#include <vector>

#include "schedule/timeline.h"

namespace echelon {

struct Track {
  std::string title;  // "zb-v", or "predicted"
  std::string note;   // printed beside it: "makespan 37.5, bubble 4.0%"
  Timeline timeline;
};

struct TextOptions {
  int width = 100;         // columns of the terminal; a drawing that is wider is folded
  bool is_colour = false;  // of the terminal, 256 of them
};

// As in the textbooks: a row for each rank, a cell for each unit of time, the microbatch's number in the
// cell. A drawing that would fold into very many parts is squeezed into one, without numbers.
std::string gantt_text(const std::vector<Track>& tracks, const TextOptions& options = {});

std::string gantt_svg(const std::vector<Track>& tracks);

// Chrome's trace events, for ui.perfetto.dev: a process for each track, a thread for each rank.
std::string perfetto_json(const std::vector<Track>& tracks, double microseconds_per_unit);
// The same of all that ranks did: a process for each rank, a thread for each of its rows (rank_rows.h), and
// arrows from a message's sender to its receiver.
std::string perfetto_json(const std::vector<RankTimeline>& ranks);

}  // namespace echelon
