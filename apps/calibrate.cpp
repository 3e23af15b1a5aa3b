#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/calibrate_from.h"
#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "base/shell_word.h"
#include "tensor/kernels.h"
#include "train/calibrate.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

struct CalibrateFlags {
  std::string out;
  int threads = 1;
  std::string device = "cpu";
  bool json = false;
  CalibrateFromFlags measured;
};

int run_from(const CLI::App& app, const CalibrateFlags& f) {
  CalibrateFromFlags from = f.measured;
  if (is_given(app, "--choose") && from.choose < 1) refuse("--choose {}: must be at least 1", from.choose);
  from.json = f.json;
  from.gives_software = is_given(app, "--software");
  from.gives_model = is_given(app, "--model");
  from.out = f.out;
  return run_calibrate_from(from);
}

int run_calibrate(const CLI::App& app, const CalibrateFlags& f) {
  if (!has_cpu_kernels())
    refuse(
        "calibrate: this build has no kernels to measure with; legal: --from FILE, or a build that has them");
  if (f.threads < 1 || f.threads > available_cores())
    refuse("--threads {}: must be from 1 to {}, the cores of this process", f.threads, available_cores());
  const auto driver = driver_of(f.device);
  if (driver && is_given(app, "--threads"))
    refuse("--threads {}: has no effect on a device; leave it out", f.threads);
  const std::string file = is_given(app, "--out") ? f.out : driver ? "cuda.toml" : "cpu.toml";
  check_output("--out", file);  // before measuring, which takes a minute
  const Calibration c = with_progress("calibrate", f.json, [&](const Progress& progress) {
    return calibrate(f.threads, progress, driver.get());
  });
  write_output(
      "--out", file,
      fmt::format("# {}, as `echelon calibrate {}` measured it.\n{}",
                  driver ? c.machine.name : "This machine",
                  driver ? "--device cuda" : fmt::format("--threads {}", f.threads), to_toml(c.machine)));
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{:<34}{:>12}{:>12}{:>9}\n", "", "measured", "described", "off by");
  for (const CalibrationSample& s : c.samples)
    fmt::print(out, "{:<34}{:>9.1f} us{:>9.1f} us{:>8.0f}%\n", s.what, 1e6 * s.measured_seconds,
               1e6 * s.described_seconds, 100 * (s.described_seconds / s.measured_seconds - 1));
  const std::string found = fmt::format(
      "{:.1f} GFLOP/s in f32, {:.1f} in bf16, memory {:.1f} GB/s; written to {}: plan with --machine {} "
      "--software echelon --precision f32 or bf16\n",
      c.machine.peak(Precision::f32) / 1e9, c.machine.peak(Precision::bf16) / 1e9,
      c.machine.memory_bandwidth / 1e9, file, shell_word(file));
  fmt::print(out, "{}", fitted(found, line_columns(out)));
  if (f.json) {
    nlohmann::ordered_json samples = nlohmann::ordered_json::array();
    for (const CalibrationSample& s : c.samples)
      samples.push_back({{"what", s.what},
                         {"measured_seconds", s.measured_seconds},
                         {"described_seconds", s.described_seconds}});
    fmt::print("{}\n", json_text(nlohmann::ordered_json{{"machine", file}, {"samples", samples}}));
  }
  return 0;
}

}  // namespace

void add_calibrate(CLI::App& program, int& status) {
  auto flags = std::make_shared<CalibrateFlags>();
  CLI::App& app = *program.add_subcommand("calibrate",
                                          "Measure this machine for the planner, or fit one to measurements");
  heading(app, common_flags);
  app.add_option("--out", flags->out,
                 "Machine file to write, for plan --machine (default: cpu.toml, or cuda.toml of a device)")
      ->type_name("FILE");
  add_number(app, "--threads", flags->threads, "Compute threads per rank");
  add_device(app, flags->device);
  app.add_flag("--json", flags->json, "One JSON object on standard output");
  heading(app, "From what was measured elsewhere");
  const auto text = [&](const char* name, std::string& value, const char* description, const char* type) {
    return app.add_option(name, value, description)->type_name(type);
  };
  app.add_option("--from", flags->measured.from,
                 "Fit to files instead: nccl-tests' output, a CSV of products or of steps, logs of Megatron, "
                 "torchtitan "
                 "or nanotron")
      ->type_name("FILE");
  text("--machine", flags->measured.machine, "What the machine is like: preset or TOML file", "NAME|FILE")
      ->capture_default_str();
  text("--software", flags->measured.software, "What the program is like: preset or TOML file", "NAME|FILE")
      ->capture_default_str();
  text("--model", flags->measured.model, "Of steps whose file names none", "NAME|DIR|FILE");
  text("--software-out", flags->measured.software_out, "Program file to write, for plan --software", "FILE");
  add_number(app, "--choose", flags->measured.choose,
             "Say which so many of the steps whose seconds are left empty to measure first");
  app.callback([flags, &app, &status] {
    const bool from = is_given(app, "--from");
    const std::vector<Remedy> with_from{advice("--from", "FILE")};
    refuse_idle(app, {{"--threads", !from, "with --from", {}},
                      {"--device", !from, "with --from", {}},
                      {"--machine", from, "without --from", with_from},
                      {"--software", from, "without --from", with_from},
                      {"--model", from, "without --from", with_from},
                      {"--software-out", from, "without --from", with_from},
                      {"--choose", from, "without --from", with_from}});
    status = from ? run_from(app, *flags) : run_calibrate(app, *flags);
  });
}

}  // namespace echelon
