#include <fmt/core.h>
#include <fmt/ranges.h>

#include <fstream>
#include <memory>

#include "apps/plan_flags.h"
#include "apps/plan_pages.h"
#include "apps/progress_line.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "plan/explain.h"

namespace echelon {
namespace {

void write_file(const char* flag, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) refuse("{} {}: cannot be written", flag, path);
}

// Other programs train what this one does not.
void write_plan(const std::string& path, const Estimate& best, const Workload& work) {
  write_file("--out", path, plan_file(best, work));
  try {
    validate(as_plan(work, best.configuration, best.layers));
    if (best.configuration.ep > 1 && best.configuration.etp != best.configuration.tp)
      refuse("--etp {}: experts are cut over --tp {} here, as MLPs are", best.configuration.etp,
             best.configuration.tp);
  } catch (const RequestError& error) {
    fmt::print(stderr, "echelon: {} is a plan for {}; train and verify refuse it: {}\n", path,
               work.software.name, error.what());
  }
}

int run_plan(const PlanSearchFlags& f) {
  SearchRequest request = f.request();
  ProgressLine line("plan", f.json);
  request.progress = line.progress();
  // People read standard output; with --json it holds the object alone.
  std::FILE* out = f.json ? stderr : stdout;
  const bool is_against = !f.against_text.empty();
  if (!f.sweep.empty()) {
    for (const auto& [flag, text] : {std::pair{"--out", &f.out}, {"--html", &f.html}})
      if (!text->empty())
        refuse("{} {}: is of the best plan, and --sweep has one of each value; leave one of them out", flag,
               *text);
    if (is_against || f.explain)
      refuse("{}: explains one plan, and --sweep has one of each value; leave one of them out",
             is_against ? "--against " + f.against_text : "--explain");
    if (!f.sweep_out.empty() && !f.sweep_out.ends_with(".svg") && !f.sweep_out.ends_with(".csv"))
      refuse("--sweep-out {}: must end in .csv, a table, or in .svg, a chart", f.sweep_out);
    const Sweep sweep = run_sweep(request, f.sweep);
    line.clear();
    if (f.sweep_out.ends_with(".svg"))
      write_file("--sweep-out", f.sweep_out, sweep_svg(sweep));
    else if (!f.sweep_out.empty())
      write_file("--sweep-out", f.sweep_out, sweep_csv(sweep));
    fmt::print(out, "{}", sweep_table(sweep));
    if (f.json) fmt::print("{}\n", sweep_json(sweep));
    return sweep.any_fits() ? 0 : 1;
  }
  if (!f.sweep_out.empty()) refuse("--sweep-out {}: there is no --sweep", f.sweep_out);
  SearchResult result, other;
  int gpus = request.gpus;
  if (f.target_seconds > 0) {
    std::optional<LeastGpus> least = least_gpus(request, f.target_seconds);
    line.clear();
    if (!least) {
      fmt::print(out, "no number of GPUs up to {} reaches {} s a step\n", request.gpus, f.target_seconds);
      if (f.json) fmt::print("{}\n", plans_json(result, request.work));
      return 1;
    }
    gpus = least->gpus;
    result = std::move(least->result);
  } else {
    result = search(request);
  }
  if (is_against) {
    SearchRequest against = f.against(request);
    against.gpus = gpus;
    other = search(against);
  }
  line.clear();
  fmt::print(out, "{} on {} {} ({}), {} sequences of {} tokens a step, {}\n", request.work.model.name, gpus,
             request.work.machine.name, request.work.software.name, request.work.global_batch,
             request.work.seq_len, precision_name(request.work.precision));
  fmt::print(out, "{}", plans_table(result));
  if (result.plans.empty()) fmt::print(out, "{}", explain_nothing(result, gpus));
  if (f.explain) fmt::print(out, "{}", explain_winner(result, request.work));
  if (is_against && !result.plans.empty())
    fmt::print(out, "\nwhy not {}: {}", f.against_text,
               other.plans.empty() ? explain_nothing(other, gpus)
                                   : explain_loser(result.plans.front(), other.plans.front()));
  if (!result.plans.empty()) {
    if (!f.out.empty()) write_plan(f.out, result.plans.front(), request.work);
    if (!f.html.empty()) write_file("--html", f.html, plan_page(result, request));
  }
  if (f.json) fmt::print("{}\n", plans_json(result, request.work));
  return result.plans.empty() ? 1 : 0;
}

}  // namespace

void add_plan(CLI::App& program, int& status) {
  auto flags = std::make_shared<PlanSearchFlags>();
  CLI::App& app = *program.add_subcommand("plan", "Find the fastest configuration that fits, and say why");
  flags->add_to(app);
  app.callback([flags, &status] { status = run_plan(*flags); });
}

}  // namespace echelon
