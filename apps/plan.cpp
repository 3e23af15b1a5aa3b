#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "apps/file_kind.h"
#include "apps/plan_flags.h"
#include "apps/plan_page.h"
#include "apps/plan_sweep.h"
#include "apps/progress_line.h"
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "base/output_file.h"
#include "base/units.h"
#include "plan/explain.h"
#include "plan/launch.h"
#include "plan/near_sizes.h"
#include "schedule/pipeline_layout.h"

namespace echelon {
namespace {

// Plans for other programs may be what this trainer does not run: they are written all the same.
void write_plan(const std::string& path, const Estimate& best, const Workload& work) {
  write_output("--out", path, plan_file(best, work));
  try {
    check_with_remedies(trained_plan(best, work),
                        [](const Plan& plan, const std::string&) { check_whole(plan); });
  } catch (const RequestError& error) {
    fmt::print(stderr, "echelon: {} is a plan for {}; train and verify refuse it: {}\n", path,
               work.software.name, error.what());
    return;
  }
  const std::string& run_in = recipe_name(trained_recipe(work.precision));
  if (run_in != precision_name(work.precision))
    fmt::print(stderr, "echelon: {} is priced in {}; train and verify run it in {}\n", path,
               precision_name(work.precision), run_in);
}

void write_launch(const std::string& directory, const std::vector<LaunchFile>& files) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) refuse("--launch-out {}: {}", directory, error.message());
  for (const LaunchFile& file : files) {
    const std::string path = (std::filesystem::path(directory) / file.name).string();
    check_output("--launch-out", path);
    write_output("--launch-out", path, file.text);
  }
}

std::string shown_table(const Colours& colours, int columns, const PlansTable& table) {
  return colours(Tint::faint, fitted(table.head, columns)) +
         colours(Tint::strong, fitted(table.best, columns)) + fitted(table.others + table.counts, columns) +
         colours(Tint::caution, fitted(table.beyond, columns));
}

// The fastest plan with the most devices, half as many, and so on: more devices than the batch can be divided
// over may take longer.
std::optional<NearSize> fastest(SearchRequest request) {
  const std::int64_t step = std::max<std::int64_t>(1, request.given_ranks()),
                     fewest = request.gives_mesh() ? step : 1;
  std::optional<NearSize> found;
  for (std::int64_t most = request.gives_mesh() ? step : request.gpus; most >= fewest; most /= 2) {
    request.gpus = static_cast<int>(most / step * step);
    if (request.gpus == 0) break;
    if (auto best = best_within(request, found ? found->best.seconds / (1 + tie) : 1e300))
      found = NearSize{request.gpus, request.work.plan.global_batch, std::move(*best)};
  }
  return found;
}

int run_plan(const PlanSearchFlags& f) {
  f.colour.check();
  SearchRequest request = f.request();
  const std::optional<RunRequest> life = f.life(request);
  for (const auto& [flag, path] :
       {std::pair{"--out", f.out}, {"--sweep-out", f.sweep_out}, {"--html", f.html}})
    if (!path.empty()) check_output(flag, path);
  check_kind("--out", f.out, {"a plan for train and verify", ".toml", "--html", ".html"});
  check_kind("--html", f.html, {"a page", ".html", "--out", ".toml"});
  ProgressLine line("plan", f.json);
  request.progress = line.progress();
  // People read standard output; with --json it has only the object.
  std::FILE* out = f.json ? stderr : stdout;
  const Colours colours = f.colour.of(out);
  const int columns = line_columns(out);
  const bool is_against = !f.against_text.empty();
  if (!f.sweep.empty()) {
    if (!f.sweep_out.empty() && !f.sweep_out.ends_with(".svg") && !f.sweep_out.ends_with(".csv"))
      refuse("--sweep-out {}: must end in .csv, a table, or in .svg, a chart", f.sweep_out);
    const Sweep sweep = run_sweep(request, f.sweep, life);
    line.clear();
    if (f.sweep_out.ends_with(".svg"))
      write_output("--sweep-out", f.sweep_out, sweep_svg(sweep));
    else if (!f.sweep_out.empty())
      write_output("--sweep-out", f.sweep_out, sweep_csv(sweep));
    const std::string table = sweep_table(sweep);
    const std::size_t head = table.find('\n') + 1;
    fmt::print(out, "{}{}", colours(Tint::faint, fitted(table.substr(0, head), columns)),
               fitted(table.substr(head), columns));
    if (f.json) fmt::print("{}\n", sweep_json(sweep));
    return sweep.any_fits() ? 0 : 1;
  }
  request.remembers = !f.html.empty();
  SearchResult result, other;
  std::string alone;  // the cost of each pin of --against by itself
  int gpus = request.gpus;
  if (f.target_seconds > 0) {
    std::optional<LeastGpus> least = least_gpus(request, f.target_seconds);
    line.clear();
    if (!least) {
      const std::optional<NearSize> best = fastest(request);
      line.clear();
      const std::string found =
          best ? fmt::format("; the fastest that was found takes {:.4g} s, on {}: {}", best->best.seconds,
                             counted(best->gpus, "GPU"), summary(best->best.plan))
               : "";
      fmt::print(
          out, "{}",
          colours(Tint::bad, fitted(fmt::format("no number of GPUs up to --gpus {} reaches {} s a step{}\n",
                                                request.gpus, f.target_seconds, found),
                                    columns)));
      if (!f.html.empty())
        fmt::print(stderr, "echelon: {} is not written: there is no plan to draw\n", f.html);
      if (f.json) {
        std::vector<NearSize> near;
        if (best) near.push_back(*best);
        fmt::print("{}\n", plans_json(result, request.work, {}, near));
      }
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
    against.remembers = false;
    other = search(against);
    for (auto& [pin, one] : f.against_alone(request)) {
      if (result.plans.empty() || other.plans.empty()) break;
      one.gpus = gpus;
      try {
        alone += explain_alone(pin, result.plans.front(), search(one));
      } catch (const RequestError& error) {  // it needs the other pins
        alone += fmt::format("  {} alone: {}\n", pin, error.what());
      }
    }
  }
  std::vector<NearSize> near;
  if (result.plans.empty() && !result.nearest) {
    near = near_sizes(request);
  } else if (!result.plans.empty() && f.target_seconds <= 0 && request.objective == Objective::time) {
    for (auto* look : {fewer_gpus, with_offload})
      if (auto one = look(request, result.plans.front())) near.push_back(std::move(*one));
  }
  line.clear();
  std::vector<LaunchFile> launch;
  if (!f.launch_for.empty() && !result.plans.empty())
    launch = launch_files(f.launch_for, result.plans.front(), request.work);
  const Plan& asked = request.work.plan;
  fmt::print(
      out, "{}",
      colours(Tint::strong,
              fitted(fmt::format("{} on {} {} ({}), {} of {} a step, {}\n", asked.model.name, gpus,
                                 request.work.machine.name, request.work.software.name,
                                 counted(asked.global_batch, "sequence"), counted(asked.seq_len, "token"),
                                 precision_name(request.work.precision)),
                     columns)));
  fmt::print(out, "{}", shown_table(colours, columns, plans_table(result, request.work, columns)));
  if (result.plans.empty())
    fmt::print(out, "{}\n", colours(Tint::bad, fitted(explain_nothing(result, request, near), columns)));
  std::optional<RunCost> cost;
  if (life && !result.plans.empty()) {
    cost = run_cost(result.plans.front(), request.work, *life);
    fmt::print(out, "{}", run_text(*cost, *life));
  }
  if (f.explain) fmt::print(out, "{}", colours.headed(fitted(explain_winner(result, request.work), columns)));
  if (f.explain && !result.plans.empty() && !request.work.software.is_this_trainer) {
    SearchRequest same = request;
    same.gpus = gpus;
    same.remembers = false;
    const Estimate& best = result.plans.front();
    const std::string others = explain_programs(other_programs(same, best), best, request.work);
    fmt::print(out, "{}", colours.headed(fitted(others, columns)));
  }
  if (!result.plans.empty())
    for (const NearSize& one : near) {
      const bool is_smaller = one.gpus != gpus;
      if (!is_smaller && f.explain) continue;  // said of what the program itself would gain
      const std::string said = (is_smaller ? explain_fewer : explain_offload)(one, result.plans.front());
      fmt::print(out, "{}", colours.headed(fitted(said, columns)));
    }
  if (is_against && !result.plans.empty()) {
    const std::string why = other.plans.empty() ? explain_nothing(other, gpus) + "\n"
                                                : explain_loser(result.plans.front(), other.plans.front());
    const std::string question = fmt::format("why not {}:", f.against_text);
    const std::string text = fitted(question + " " + why + alone, columns);
    fmt::print(out, "\n{}{}{}", colours(Tint::strong, text.substr(0, question.size())),
               text.substr(question.size()), colours(Tint::caution, priced_beyond(other, request.work)));
  }
  if (!result.plans.empty()) {
    if (!f.out.empty()) write_plan(f.out, result.plans.front(), request.work);
    if (!launch.empty()) write_launch(f.launch_out, launch);
  }
  const std::string answer = plans_json(result, request.work, cost, near);
  if (!f.html.empty()) {
    request.gpus = gpus;
    const std::string page = plan_page(result, request, near, answer, f.app());
    line.clear();
    write_output("--html", f.html, page);
  }
  if (f.json) fmt::print("{}\n", answer);
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
