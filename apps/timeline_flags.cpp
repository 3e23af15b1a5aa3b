#include "apps/timeline_flags.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/units.h"
#include "draw/gantt.h"
#include "train/atomic_file.h"

namespace echelon {

static void refuse_unwritable(const char* flag, const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path parent = std::filesystem::absolute(path).parent_path();
  if (::access(parent.c_str(), W_OK | X_OK) != 0 || std::filesystem::is_directory(path))
    refuse("{} {}: cannot be written: {}", flag, path, std::strerror(errno != 0 ? errno : EISDIR));
}

void TimelineFlags::add_to(CLI::App& app) {
  app.add_option("--trace", trace_, "What every rank did in the last step, for ui.perfetto.dev")
      ->type_name("FILE.json");
  app.add_option("--timeline", timeline_, "The same as a page, the simulated timeline above the measured one")
      ->type_name("FILE.html");
}

void TimelineFlags::check() const {
  refuse_unwritable("--trace", trace_);
  refuse_unwritable("--timeline", timeline_);
}

void TimelineFlags::write(const Timeline& simulated, const Timeline& measured,
                          const std::vector<RankTimeline>& ranks) const {
  const Track ran{"measured", format_seconds(measured.makespan()), measured};
  const Track twin{"simulated with the times measured", format_seconds(simulated.makespan()), simulated};
  if (!trace_.empty()) write_file_atomically(trace_, perfetto_json(ranks));
  if (!timeline_.empty()) write_file_atomically(timeline_, gantt_html({twin, ran}, ranks));
}

}  // namespace echelon
