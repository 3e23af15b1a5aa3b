#include "schedule/simulate.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "apps/flags.h"
#include "apps/simulate_report.h"
#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/text.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t most_cells = 1 << 23;  // ranks times chunks times microbatches: a gigabyte or two

struct SimulateFlags {
  std::string schedule, compare, times = "1,1,1", stage_times, format = "text", out, colour = "auto";
  std::optional<int> ranks, microbatches;
  int chunks = 0, steps = 1, width = 0;
  double message = 0, overlap_factor = 1;
  bool is_format_given = false, json = false;
};

std::vector<std::string> split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, begin), text.size());
    std::string part = text.substr(begin, end - begin);
    part.erase(0, part.find_first_not_of(" \t\r"));
    part.erase(part.find_last_not_of(" \t\r") + 1);
    parts.push_back(part);
    begin = end + 1;
  }
  return parts;
}

std::string read_file(const char* flag, const std::string& path) {
  if (!fs::is_regular_file(path)) refuse("{} {}: must be a regular file", flag, path);
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) refuse("{} {}: cannot be read: {}", flag, path, std::strerror(errno));
  return text.str();
}

StageTimes parse_times(const std::string& flag, const std::string& text) {
  const auto parts = split(text, ",");
  double t[3];
  if (parts.size() != 3) refuse("{} {}: must be three times F,B,W, e.g. 1,1,1", flag, text);
  for (std::size_t k = 0; k < 3; ++k) {
    t[k] = parse_number<double>(flag, parts[k]);
    if (!(t[k] >= 0) || t[k] > 1e12) refuse("{} {}: {} must be from 0 to 1e12", flag, text, parts[k]);
  }
  return {t[0], t[1], t[2]};
}

class Simulate {
 public:
  explicit Simulate(const SimulateFlags& flags) : f_(flags) {}

  int run() {
    check_flags();
    std::vector<SimulationReport> reports;
    if (f_.compare.empty()) {
      const std::string name = f_.schedule.empty() ? "1f1b" : f_.schedule;
      Schedule schedule = make("--schedule", name, f_.chunks, f_.steps);
      const SimulationCosts costs = costs_of(schedule);
      reports.push_back(report_on(std::move(schedule), costs));
    } else {
      for (const std::string& name : split(f_.compare, ",")) reports.push_back(compared(name));
    }
    // Into a file first: if that cannot be, nothing was said yet.
    if (!f_.out.empty()) draw(reports);
    print_numbers(reports);
    if (f_.out.empty()) draw(reports);
    const bool any =
        std::any_of(reports.begin(), reports.end(), [](const auto& r) { return r.unfit.empty(); });
    return any ? 0 : 1;
  }

 private:
  void check_flags() {
    if (!f_.schedule.empty() && !f_.compare.empty())
      refuse("--schedule excludes --compare; give one of the two");
    const std::vector<std::string> formats{"text", "svg", "html", "perfetto", "rows", "csv", "lowered"};
    if (std::find(formats.begin(), formats.end(), f_.format) == formats.end())
      refuse("--format {}: legal: {}", f_.format, fmt::join(formats, ", "));
    if (f_.colour != "auto" && f_.colour != "always" && f_.colour != "never")
      refuse("--colour {}: legal: auto, always, never", f_.colour);
    if (f_.width < 0 || (f_.width > 0 && f_.width < 20) || f_.width > 100000)
      refuse("--width {}: must be from 20 to 100000 columns", f_.width);
    if (!(f_.message >= 0) || f_.message > 1e12) refuse("--comm-time {}: must be from 0 to 1e12", f_.message);
    if (!(f_.overlap_factor > 0) || f_.overlap_factor > 1)
      refuse("--overlap-factor {}: must be above 0 and at most 1", f_.overlap_factor);
    if (f_.steps < 1) refuse("--steps {}: must be at least 1", f_.steps);
    const auto at_least_1 = [](const char* flag, int value) {
      if (value < 1) refuse("{} {}: must be at least 1", flag, value);
    };
    at_least_1("--pp", ranks());
    at_least_1("--microbatches", microbatches());
    if (f_.chunks < 0) refuse("--chunks {}: must be at least 1", f_.chunks);
    double cells = f_.steps;
    for (int factor : {ranks(), microbatches(), std::max(f_.chunks, 2)}) cells *= factor;
    if (cells > most_cells)
      refuse("--pp {} x --microbatches {}: with their chunks and steps {} pieces of work; legal: up to {}",
             ranks(), microbatches(), cells, most_cells);
    base_ = parse_times("--times", f_.times);
    if (f_.stage_times.empty()) return;
    const bool is_inline = f_.stage_times.find(',') != std::string::npos;
    const std::string text = is_inline ? f_.stage_times : read_file("--stage-times", f_.stage_times);
    for (const std::string& stage : split(text, ";\n"))
      if (!stage.empty() && stage[0] != '#') stages_.push_back(parse_times("--stage-times", stage));
    if (stages_.empty())
      refuse("--stage-times {}: holds no times; legal: F,B,W of each stage", f_.stage_times);
  }

  int ranks() const { return f_.ranks.value_or(4); }
  int microbatches() const { return f_.microbatches.value_or(8); }

  static bool is_name(const std::string& name) {
    const auto& names = schedule_names();
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  static bool keeps_going(const std::string& name) { return name == "pipedream" || name == "2bw"; }

  Schedule make(const char* flag, const std::string& name, int chunks, int steps) const {
    if (is_name(name)) {
      if (steps != 1 && !keeps_going(name))
        refuse("--steps {}: {} flushes after every step, so one shows all; legal: 1", steps, name);
      return make_schedule(name, ranks(), microbatches(), chunks, steps);
    }
    if (!fs::exists(name))
      refuse("{} {}: no such schedule or file; legal: {}, or a file with rows of instructions", flag, name,
             fmt::join(schedule_names(), ", "));
    Schedule schedule = from_text(read_file(flag, name), name);
    schedule.name = fs::path(name).stem().string();
    if (f_.ranks && *f_.ranks != schedule.num_ranks())
      refuse("--pp {}: {} has rows for {} ranks", *f_.ranks, name, schedule.num_ranks());
    if (f_.microbatches && *f_.microbatches != schedule.num_microbatches)
      refuse("--microbatches {}: {} has {}", *f_.microbatches, name, schedule.num_microbatches);
    return schedule;
  }

  // A wrong name is a wrong request; a schedule that these numbers do not fit is a row that says so.
  SimulationReport compared(const std::string& name) const {
    if (!is_name(name) && !fs::exists(name)) make("--compare", name, 0, 1);
    try {
      Schedule schedule =
          make("--compare", name, name == "interleaved" ? f_.chunks : 0, keeps_going(name) ? f_.steps : 1);
      const SimulationCosts costs = costs_of(schedule);
      return report_on(std::move(schedule), costs);
    } catch (const RequestError& error) {
      SimulationReport report;
      report.name = name;
      report.ranks = ranks();
      report.microbatches = microbatches();
      report.unfit = error.what();
      return report;
    }
  }

  SimulationCosts costs_of(const Schedule& schedule) const {
    SimulationCosts costs;
    costs.message = f_.message;
    costs.overlap_factor = f_.overlap_factor;
    costs.stages = stages_;
    if (stages_.empty()) {
      const double part = schedule.stage_fraction();
      costs.stages = {{base_.forward * part, base_.backward_input * part, base_.backward_weight * part}};
    } else if (stages_.size() != static_cast<std::size_t>(schedule.num_stages)) {
      refuse("--stage-times: has {} stages, and {} {}", stages_.size(), schedule.name, schedule.num_stages);
    }
    return costs;
  }

  bool is_drawing_on_stdout() const { return f_.out.empty() && f_.format != "text"; }

  void print_numbers(const std::vector<SimulationReport>& reports) const {
    if (f_.json) {
      if (f_.compare.empty()) {
        fmt::print("{}\n", to_json(reports[0]).dump());
      } else {
        nlohmann::ordered_json rows = nlohmann::ordered_json::array();
        for (const SimulationReport& r : reports) rows.push_back(to_json(r));
        fmt::print("{}\n", nlohmann::ordered_json{{"schedules", rows}}.dump());
      }
      return;
    }
    std::FILE* out = is_drawing_on_stdout() ? stderr : stdout;
    fmt::print(out, "{} ranks, {} microbatches{}\n{}", reports[0].ranks, reports[0].microbatches,
               f_.steps > 1 ? fmt::format(", {} steps of those that do not flush", f_.steps) : "",
               table(reports));
  }

  int width() const {
    if (f_.width > 0) return f_.width;
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 20) return size.ws_col;
    const char* columns = std::getenv("COLUMNS");
    const int given = columns == nullptr ? 0 : std::atoi(columns);
    return given >= 20 && given <= 100000 ? given : 100;
  }
  bool is_colour() const {
    const char* terminal = std::getenv("TERM");
    return f_.colour == "always" ||
           (f_.colour == "auto" && f_.out.empty() && ::isatty(STDOUT_FILENO) == 1 &&
            std::getenv("NO_COLOR") == nullptr && terminal != nullptr && std::strcmp(terminal, "dumb") != 0);
  }

  std::string drawing(std::vector<SimulationReport>& reports) const {
    if (f_.format == "rows" || f_.format == "csv" || f_.format == "lowered") {
      if (reports.size() != 1 || !reports[0].unfit.empty())
        refuse("--format {}: writes one schedule; use --schedule instead of --compare", f_.format);
      const Schedule& schedule = reports[0].schedule;
      return f_.format == "csv" ? to_csv(schedule)
                                : to_text(f_.format == "rows" ? schedule : lower(schedule));
    }
    const std::vector<Track> tracks = tracks_of(reports);
    if (f_.format == "svg") return gantt_svg(tracks);
    if (f_.format == "html") return gantt_html(tracks);
    if (f_.format == "perfetto") return perfetto_json(tracks, 1000);
    std::string text = gantt_text(tracks, {width(), is_colour()});
    return f_.out.empty() ? "\n" + text : text;
  }

  void draw(std::vector<SimulationReport>& reports) const {
    // A table or an object is the answer; a drawing is added where it was asked for.
    if (f_.out.empty() && (f_.json || (!f_.compare.empty() && !f_.is_format_given))) return;
    const std::string text = drawing(reports);
    if (f_.out.empty()) {
      std::fwrite(text.data(), 1, text.size(), stdout);
      return;
    }
    std::ofstream out(f_.out, std::ios::binary);
    if (!out) refuse("--out {}: {}", f_.out, std::strerror(errno));
    out << text << std::flush;
    if (!out) fail("--out {}: {}", f_.out, std::strerror(errno));
  }

  const SimulateFlags& f_;
  StageTimes base_;                 // of a full stage
  std::vector<StageTimes> stages_;  // of each stage, where given
};

}  // namespace

void add_simulate(CLI::App& program, int& status) {
  auto flags = std::make_shared<SimulateFlags>();
  CLI::App& app = *program.add_subcommand(
      "simulate", "Run a pipeline schedule on paper: makespan, bubble, memory, messages, and its drawing");
  app.add_option("--schedule", flags->schedule, "One of the published ones, or a file of rows or torch's CSV")
      ->type_name("NAME|FILE")
      ->default_str("1f1b");
  app.add_option("--compare", flags->compare, "Several, in one table and one drawing")->type_name("A,B,...");
  add_number(app, "--pp", flags->ranks, "Pipeline ranks (default: 4, or the file's)");
  add_number(app, "--microbatches", flags->microbatches, "Of one step (default: 8, or the file's)");
  add_number(app, "--chunks", flags->chunks, "Model chunks of a rank; 0: the schedule's own number");
  add_number(app, "--steps", flags->steps, "Steps run through by pipedream and 2bw, which do not flush");
  app.add_option("--times", flags->times, "Forward, input gradient, weight gradient of one full stage")
      ->type_name("F,B,W")
      ->default_str("1,1,1");
  app.add_option("--stage-times", flags->stage_times, "Those of each stage by itself, from stage 0 on")
      ->type_name("F,B,W;...|FILE");
  add_number(app, "--comm-time", flags->message, "Of one message between two ranks");
  add_number(app, "--overlap-factor", flags->overlap_factor,
             "Time of a pair run together over the sum of its two");
  const CLI::Option* format =
      app.add_option("--format", flags->format,
                     "Drawing, or the instructions (rows, torch's csv, with messages)")
          ->type_name("text|svg|html|perfetto|rows|csv|lowered")
          ->default_str("text");
  app.add_option("--out", flags->out, "Where the drawing goes (default: standard output)")->type_name("FILE");
  add_number(app, "--width", flags->width, "Columns of the text drawing; 0: the terminal's");
  app.add_option("--colour", flags->colour, "Of the text drawing")
      ->type_name("auto|always|never")
      ->default_str("auto");
  app.add_flag("--json", flags->json, "Report as one JSON object on standard output");
  app.callback([flags, format, &status] {
    flags->is_format_given = format->count() > 0;
    status = Simulate(*flags).run();
  });
}

}  // namespace echelon
