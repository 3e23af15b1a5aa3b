#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

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

// One command: what is asked, what is found, and how that is said.
class PlanCommand {
 public:
  explicit PlanCommand(const PlanSearchFlags& f) : f_(f), line_("plan", f.json) {}

  int run() {
    f_.colour.check();
    request_ = f_.request();
    life_ = f_.life(request_);
    check_outputs();
    gpus_ = request_.gpus;
    request_.progress = line_.progress();
    if (!f_.sweep.empty()) return sweep();
    request_.remembers = !f_.html.empty();
    if (!find()) return reaches_no_target();
    if (!f_.against_text.empty()) find_against();
    find_near();
    line_.clear();
    const bool any = !result_.plans.empty();
    std::vector<LaunchFile> launch;
    if (any && !f_.launch_for.empty()) launch = launch_files(f_.launch_for, best(), request_.work);
    show_plans();
    if (any) {
      show_life();
      if (f_.explain) explain();
      show_near();
      if (!f_.against_text.empty()) show_against();
      if (!f_.out.empty()) write_plan(f_.out, best(), request_.work);
      if (!launch.empty()) write_launch(f_.launch_out, launch);
    }
    write_answer();
    return any ? 0 : 1;
  }

 private:
  const Estimate& best() const { return result_.plans.front(); }
  template <class... Args>
  void print(fmt::format_string<Args...> form, Args&&... args) const {
    fmt::print(out_, form, std::forward<Args>(args)...);
  }
  std::string fit(const std::string& text) const { return fitted(text, columns_); }

  void check_outputs() const {
    for (const auto& [flag, path] :
         {std::pair{"--out", f_.out}, {"--sweep-out", f_.sweep_out}, {"--html", f_.html}})
      if (!path.empty()) check_output(flag, path);
    check_kind("--out", f_.out, {"a plan for train and verify", ".toml", "--html", ".html"});
    check_kind("--html", f_.html, {"a page", ".html", "--out", ".toml"});
    if (!f_.sweep.empty() && !f_.sweep_out.empty() && !f_.sweep_out.ends_with(".svg") &&
        !f_.sweep_out.ends_with(".csv"))
      refuse("--sweep-out {}: must end in .csv, a table, or in .svg, a chart", f_.sweep_out);
  }

  int sweep() {
    const Sweep sweep = run_sweep(request_, f_.sweep, life_);
    line_.clear();
    if (!f_.sweep_out.empty())
      write_output("--sweep-out", f_.sweep_out,
                   f_.sweep_out.ends_with(".svg") ? sweep_svg(sweep) : sweep_csv(sweep));
    const std::string table = sweep_table(sweep);
    const std::size_t head = table.find('\n') + 1;
    print("{}{}", colours_(Tint::faint, fit(table.substr(0, head))), fit(table.substr(head)));
    if (f_.json) fmt::print("{}\n", sweep_json(sweep));
    return sweep.any_fits() ? 0 : 1;
  }

  // Whether there is anything to show: with --objective gpus, a number of GPUs that reaches the target.
  bool find() {
    if (f_.target_seconds <= 0) {
      result_ = search(request_);
      return true;
    }
    std::optional<LeastGpus> least = least_gpus(request_, f_.target_seconds);
    if (!least) return false;
    gpus_ = least->gpus;
    result_ = std::move(least->result);
    return true;
  }

  int reaches_no_target() {
    const std::optional<NearSize> best = fastest(request_);
    line_.clear();
    const std::string found =
        best ? fmt::format("; the fastest that was found takes {:.4g} s, on {}: {}", best->best.seconds,
                           counted(best->gpus, "GPU"), summary(best->best.plan))
             : "";
    print("{}",
          colours_(Tint::bad, fit(fmt::format("no number of GPUs up to --gpus {} reaches {} s a step{}\n",
                                              request_.gpus, f_.target_seconds, found))));
    if (!f_.html.empty())
      fmt::print(stderr, "echelon: {} is not written: there is no plan to draw\n", f_.html);
    if (best) near_.push_back(*best);
    if (f_.json) fmt::print("{}\n", plans_json(result_, request_.work, {}, near_));
    return 1;
  }

  void find_against() {
    SearchRequest against = f_.against(request_);
    against.gpus = gpus_;
    against.remembers = false;
    other_ = search(against);
    for (auto& [pin, one] : f_.against_alone(request_)) {
      if (result_.plans.empty() || other_.plans.empty()) break;
      one.gpus = gpus_;
      try {
        alone_ += explain_alone(pin, best(), search(one));
      } catch (const RequestError& error) {  // it needs the other pins
        alone_ += fmt::format("  {} alone: {}\n", pin, error.what());
      }
    }
  }

  void find_near() {
    if (result_.plans.empty()) {
      if (!result_.nearest) near_ = near_sizes(request_);
      return;
    }
    if (f_.target_seconds > 0 || request_.objective != Objective::time) return;
    for (auto* look : {fewer_gpus, with_offload})
      if (auto one = look(request_, best())) near_.push_back(std::move(*one));
  }

  void show_plans() const {
    const Plan& asked = request_.work.plan;
    print("{}",
          colours_(Tint::strong,
                   fit(fmt::format("{} on {} {} ({}), {} of {} a step, {}\n", asked.model.name, gpus_,
                                   request_.work.machine.name, request_.work.software.name,
                                   counted(asked.global_batch, "sequence"), counted(asked.seq_len, "token"),
                                   precision_name(request_.work.precision)))));
    print("{}", shown_table(colours_, columns_, plans_table(result_, request_.work, columns_)));
    if (!result_.plans.empty()) return;
    print("{}\n", colours_(Tint::bad, fit(explain_nothing(result_, request_, near_))));
    if (f_.explain) print("{}", colours_.headed(fit(explain_winner(result_, request_.work))));
  }

  void show_life() {
    if (!life_) return;
    cost_ = run_cost(best(), request_.work, *life_);
    print("{}", run_text(*cost_, *life_));
  }

  void explain() const {
    print("{}", colours_.headed(fit(explain_winner(result_, request_.work))));
    if (request_.work.software.is_this_trainer) return;
    SearchRequest same = request_;
    same.gpus = gpus_;
    same.remembers = false;
    const std::string others = explain_programs(other_programs(same, best()), best(), request_.work);
    print("{}", colours_.headed(fit(others)));
  }

  void show_near() const {
    for (const NearSize& one : near_) {
      const bool is_smaller = one.gpus != gpus_;
      if (!is_smaller && f_.explain) continue;  // said of what the program itself would gain
      print("{}", colours_.headed(fit((is_smaller ? explain_fewer : explain_offload)(one, best()))));
    }
  }

  void show_against() const {
    const std::string why = other_.plans.empty() ? explain_nothing(other_, gpus_) + "\n"
                                                 : explain_loser(best(), other_.plans.front());
    const std::string question = fmt::format("why not {}:", f_.against_text);
    const std::string text = fit(question + " " + why + alone_);
    print("\n{}{}{}", colours_(Tint::strong, text.substr(0, question.size())), text.substr(question.size()),
          colours_(Tint::caution, priced_beyond(other_, request_.work)));
  }

  void write_answer() {
    const std::string answer = plans_json(result_, request_.work, cost_, near_);
    if (!f_.html.empty()) {
      request_.gpus = gpus_;
      const std::string page = plan_page(result_, request_, near_, answer, f_.app());
      line_.clear();
      write_output("--html", f_.html, page);
    }
    if (f_.json) fmt::print("{}\n", answer);
  }

  const PlanSearchFlags& f_;
  ProgressLine line_;
  // People read standard output; with --json it has only the object.
  std::FILE* const out_ = f_.json ? stderr : stdout;
  const Colours colours_ = f_.colour.of(out_);
  const int columns_ = line_columns(out_);
  SearchRequest request_;
  std::optional<RunRequest> life_;
  int gpus_ = 0;  // those asked for, or the fewest that reach the target
  SearchResult result_, other_;
  std::string alone_;  // the cost of each pin of --against by itself
  std::vector<NearSize> near_;
  std::optional<RunCost> cost_;
};

}  // namespace

void add_plan(CLI::App& program, int& status) {
  auto flags = std::make_shared<PlanSearchFlags>();
  CLI::App& app = *program.add_subcommand("plan", "Find the fastest configuration that fits, and say why");
  flags->add_to(app);
  app.callback([flags, &status] { status = PlanCommand(*flags).run(); });
}

}  // namespace echelon
