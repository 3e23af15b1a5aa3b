#include "apps/timeline_flags.h"

#include "apps/command_text.h"
#include "apps/file_kind.h"
#include "base/error.h"
#include "base/output_file.h"
#include "draw/page.h"

namespace echelon {

void TimelineFlags::add_to(CLI::App& app) {
  app_ = &app;
  app.add_option("--trace", trace_, "What every rank did in the last step, for ui.perfetto.dev")
      ->type_name("FILE.json");
  app.add_option("--timeline", timeline_, "The same as a page, the simulated timeline above the measured one")
      ->type_name("FILE.html");
}

void TimelineFlags::check() const {
  check_kind("--trace", trace_, {"JSON for ui.perfetto.dev", ".json", "--timeline", ".html"});
  check_kind("--timeline", timeline_, {"a page", ".html", "--trace", ".json"});
  if (!trace_.empty()) check_output("--trace", trace_);
  if (!timeline_.empty()) check_output("--timeline", timeline_);
}

std::vector<PageTrack> timeline_tracks(const Timeline& simulated, const Timeline& measured) {
  std::vector<PageTrack> tracks(2);
  tracks[0].track = {"simulated with the times measured", "", simulated};
  tracks[1].track = {"measured", "", measured};
  return tracks;
}

void TimelineFlags::write(const Timeline& simulated, const Timeline& measured,
                          const std::vector<RankTimeline>& ranks) const {
  if (!trace_.empty()) write_output("--trace", trace_, perfetto_json(ranks));
  if (timeline_.empty()) return;
  Page page;
  page.kind = "timeline";
  page.title = "What every rank did";
  page.subtitle = "the last step, and what came after it";
  page.command = command_text(*app_);
  page.time_unit = "s";
  page.tracks = timeline_tracks(simulated, measured);
  page.ranks = ranks;
  write_output("--timeline", timeline_, page_html(page));
}

}  // namespace echelon
