#include "apps/timeline_flags.h"

#include "base/output_file.h"
#include "base/units.h"
#include "draw/gantt.h"

namespace echelon {

void TimelineFlags::add_to(CLI::App& app) {
  app.add_option("--trace", trace_, "What every rank did in the last step, for ui.perfetto.dev")
      ->type_name("FILE.json");
  app.add_option("--timeline", timeline_, "The same as a page, the simulated timeline above the measured one")
      ->type_name("FILE.html");
}

void TimelineFlags::check() const {
  if (!trace_.empty()) check_output("--trace", trace_);
  if (!timeline_.empty()) check_output("--timeline", timeline_);
}

void TimelineFlags::write(const Timeline& simulated, const Timeline& measured,
                          const std::vector<RankTimeline>& ranks) const {
  const Track ran{"measured", format_seconds(measured.makespan()), measured};
  const Track twin{"simulated with the times measured", format_seconds(simulated.makespan()), simulated};
  if (!trace_.empty()) write_output("--trace", trace_, perfetto_json(ranks));
  if (!timeline_.empty()) write_output("--timeline", timeline_, gantt_html({twin, ran}, ranks));
}

}  // namespace echelon
