#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "train/calibrate.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

struct CalibrateFlags {
  std::string out = "cpu.toml";
  int threads = 1;
  bool json = false;
};

int run_calibrate(const CalibrateFlags& f) {
  if (f.threads < 1 || f.threads > available_cores())
    refuse("--threads {}: must be from 1 to {}, the cores of this process", f.threads, available_cores());
  check_output("--out", f.out);  // before the minute that measuring takes
  const Calibration c = with_progress(
      "calibrate", f.json, [&](const Progress& progress) { return calibrate(f.threads, progress); });
  write_output("--out", f.out,
               fmt::format("# This machine, as `echelon calibrate --threads {}` measured it.\n{}", f.threads,
                           to_toml(c.machine)));
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{:<34}{:>12}{:>12}{:>9}\n", "", "measured", "described", "off by");
  for (const CalibrationSample& s : c.samples)
    fmt::print(out, "{:<34}{:>9.1f} us{:>9.1f} us{:>8.0f}%\n", s.what, 1e6 * s.measured_seconds,
               1e6 * s.described_seconds, 100 * (s.described_seconds / s.measured_seconds - 1));
  fmt::print(
      out,
      "{:.1f} GFLOP/s in f32, {:.1f} in bf16, memory {:.1f} GB/s; written to {}: plan with --machine {} "
      "--software echelon --precision f32 or bf16\n",
      c.machine.peak(Precision::f32) / 1e9, c.machine.peak(Precision::bf16) / 1e9,
      c.machine.memory_bandwidth / 1e9, f.out, f.out);
  if (f.json) {
    nlohmann::ordered_json samples = nlohmann::ordered_json::array();
    for (const CalibrationSample& s : c.samples)
      samples.push_back({{"what", s.what},
                         {"measured_seconds", s.measured_seconds},
                         {"described_seconds", s.described_seconds}});
    fmt::print("{}\n", json_text(nlohmann::ordered_json{{"machine", f.out}, {"samples", samples}}));
  }
  return 0;
}

}  // namespace

void add_calibrate(CLI::App& program, int& status) {
  auto flags = std::make_shared<CalibrateFlags>();
  CLI::App& app = *program.add_subcommand("calibrate", "Measure this machine for the planner");
  heading(app, common_flags);
  app.add_option("--out", flags->out, "Machine file to write, for plan --machine")
      ->type_name("FILE")
      ->capture_default_str();
  add_number(app, "--threads", flags->threads, "Compute threads per rank");
  app.add_flag("--json", flags->json, "One JSON object on standard output");
  app.callback([flags, &status] { status = run_calibrate(*flags); });
}

}  // namespace echelon
