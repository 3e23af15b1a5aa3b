#include "apps/simulate_experts.h"

#include <fmt/core.h>

#include "apps/progress_line.h"
#include "apps/simulate_drawing.h"
#include "apps/simulate_experts_report.h"
#include "apps/terminal.h"
#include "base/json_text.h"

namespace echelon {

int simulate_experts(SimulateFlags& shared, const ExpertsFlags& flags) {
  const ExpertsFlags::Request request = flags.read(shared);
  const auto reports = with_progress("simulate", shared.json, [&](const Progress& progress) {
    return simulate_routing(request.routing, request.methods, progress);
  });
  const auto draw = [&] {
    const auto drawing = [&] {
      if (shared.format == "csv") return to_csv(request, reports);
      const std::vector<HeatMap> maps = heat_maps(request, reports);
      if (shared.format == "svg") return heat_map_svg(maps);
      const std::string text = heat_map_text(maps, text_options(shared));
      return shared.out.empty() ? "\n" + text : text;
    };
    // An object is the answer; a drawing is added only on request.
    if (!shared.out.empty() || !shared.json) write_drawing(shared, drawing());
  };
  // The file first: if it cannot be written, nothing has been printed yet.
  if (!shared.out.empty()) draw();
  if (shared.json)
    fmt::print("{}\n", json_text(to_json(request, reports)));
  else {
    std::FILE* const out = shared.out.empty() && shared.format != "text" ? stderr : stdout;
    fmt::print(out, "{}", fitted(describe(request, reports), line_columns(out)));
  }
  if (shared.out.empty()) draw();
  return 0;
}

}  // namespace echelon
