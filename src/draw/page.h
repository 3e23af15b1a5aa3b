// The page that Echelon draws for a browser: one file that needs nothing else. Its sources are in
// src/draw/page; what they show is one JSON document inside it, which the verbs put together.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "draw/gantt.h"
#include "schedule/over_time.h"
#include "spec/memory.h"

namespace echelon {

// What a rank holds during a step: `kept` throughout, and besides it what its passes keep.
struct RankHolding {
  Memory kept;
  HeldCurve activations;
};

struct PageTrack {
  Track track;
  int step_microbatches = 0;               // of one step; 0: the timeline is of a stream
  std::optional<Timeline> two_steps{};     // two_steps() of the same schedule
  std::vector<RankHolding> memory{};       // by rank; empty: unknown
  std::vector<double> peak_activations{};  // by rank, in activations of a full stage; empty: unknown
};

struct Page {
  // "simulate", "plan", "timeline", "run", "waiting" (for a run's first step): which sections there are, and
  // their order.
  std::string kind;
  std::string title, subtitle;
  std::string command;      // that made it, for a shell; empty: unknown
  std::string time_unit;    // of the tracks: "s", or empty where times have no unit
  std::string memory_unit;  // of what tracks hold: "B", or empty: activations of a full stage
  std::vector<PageTrack> tracks{};
  std::vector<RankTimeline> ranks{};  // what every rank did, in seconds
  // Members of the document that are the verb's own: a name, and JSON.
  std::vector<std::pair<std::string, std::string>> members{};
};

// The document, without the page around it.
std::string page_json(const Page& page);
// A file that loads nothing; or what a server hands out, which asks it for `document.json` again: page_json()
// then, whose member `served` is the server's.
enum class PageUse { file, served };
std::string page_html(const Page& page, PageUse use = PageUse::file);

}  // namespace echelon
