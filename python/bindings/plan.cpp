// The search over plans.
#include <algorithm>
#include <memory>

#include "apps/plan_flags.h"
#include "apps/plan_page.h"
#include "apps/plan_sweep.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/words.h"
#include "plan/explain.h"
#include "plan/launch.h"
#include "train/account_json.h"

namespace echelon::python {
namespace {

// What was asked, and what was found; estimates keep it.
struct Found {
  CLI::App app{"", "plan"};
  PlanSearchFlags flags;
  SearchRequest request;
  std::optional<RunRequest> life;
  int gpus = 0;  // of the answer: fewer than asked for, with objective gpus
  SearchResult result;
  std::optional<RunCost> cost;

  explicit Found(const Words& words, const Names& hidden) {
    flags.add_to(app);
    read_words(app, words, hidden);
    request = flags.request();
    life = flags.life(request);
    gpus = request.gpus;
  }
};

// The search's own thread ends it where it reports its progress.
void search_apart(SearchRequest& request, const std::function<void()>& work) {
  run_apart([&](const Progress& progress) {
    request.progress = progress;
    work();
  });
  request.progress = {};
}

struct Answer {
  std::shared_ptr<Found> found;
  std::string json() const { return plans_json(found->result, found->request.work, found->cost); }
};
struct PlannedStep {
  std::shared_ptr<Found> found;
  std::size_t index = 0;
  const Estimate& estimate() const { return found->result.plans[index]; }
  const Place& place() const { return found->result.places[index]; }
};

Answer planned(const Words& words) {
  const auto found = std::make_shared<Found>(words, not_of_plan);
  search_apart(found->request, [&] {
    Found& f = *found;
    if (f.flags.target_seconds > 0) {
      if (auto least = least_gpus(f.request, f.flags.target_seconds)) {
        f.gpus = least->gpus;
        f.result = std::move(least->result);
      }
    } else {
      f.result = search(f.request);
    }
    if (f.life && !f.result.plans.empty()) f.cost = run_cost(f.result.plans.front(), f.request.work, *f.life);
  });
  return {found};
}

std::string why_not(const Answer& answer, const std::string& pins) {
  Found& f = *answer.found;
  if (f.result.plans.empty()) refuse("--against {}: nothing was found that it could lose against", pins);
  f.flags.against_text = pins;
  SearchRequest other = f.flags.against(f.request);
  other.gpus = f.gpus;
  SearchResult result;
  search_apart(other, [&] { result = search(other); });
  return (result.plans.empty() ? explain_nothing(result, f.gpus) + "\n"
                               : explain_loser(f.result.plans.front(), result.plans.front())) +
         priced_beyond(result, f.request.work);
}

const Estimate& best_of(const Answer& answer) {
  const Found& f = *answer.found;
  if (f.result.plans.empty())
    refuse("--gpus {}: {}", f.gpus,
           explain_nothing(f.result, f.request,
                           f.result.nearest ? std::vector<NearSize>() : near_sizes(f.request)));
  return f.result.plans.front();
}

std::vector<PlannedStep> plans_of(const Answer& answer) {
  std::vector<PlannedStep> plans;
  for (std::size_t i = 0; i < answer.found->result.plans.size(); ++i) plans.push_back({answer.found, i});
  return plans;
}

void bind_estimate(nb::module_& m) {
  nb::class_<PlannedStep>(m, "PlannedStep", "A plan of the ranking, and what a step of it comes to.")
      .def_prop_ro("plan", [](const PlannedStep& p) { return p.estimate().plan; })
      .def_prop_ro("summary", [](const PlannedStep& p) { return summary(p.estimate().plan); })
      .def_prop_ro(
          "rank", [](const PlannedStep& p) { return p.place().rank; },
          "Plans that take at most a hundredth longer than the fastest of their rank share it.")
      .def_prop_ro("rank_is_shared", [](const PlannedStep& p) { return p.place().is_shared; })
      .def_prop_ro("step_seconds", [](const PlannedStep& p) { return p.estimate().seconds; })
      .def_prop_ro("step_seconds_p10", [](const PlannedStep& p) { return p.estimate().low; })
      .def_prop_ro("step_seconds_p90", [](const PlannedStep& p) { return p.estimate().high; })
      .def_prop_ro("tokens_per_second_per_gpu",
                   [](const PlannedStep& p) { return p.estimate().tokens_per_second_per_gpu; })
      .def_prop_ro("model_tflops_per_gpu",
                   [](const PlannedStep& p) { return p.estimate().model_tflops_per_gpu; })
      .def_prop_ro(
          "mfu", [](const PlannedStep& p) { return p.estimate().mfu; }, "From 0 to 1.")
      .def_prop_ro("bubble_fraction", [](const PlannedStep& p) { return p.estimate().bubble_fraction; })
      .def_prop_ro("microbatches", [](const PlannedStep& p) { return p.estimate().microbatches; })
      .def_prop_ro("layers_per_stage", [](const PlannedStep& p) { return p.estimate().layers; })
      .def_prop_ro(
          "memory", [](const PlannedStep& p) { return p.estimate().memory; },
          "Of the pipeline rank that holds most.")
      .def_prop_ro(
          "rank_memory", [](const PlannedStep& p) { return p.estimate().rank_memory; },
          "Of each pipeline rank.")
      .def_prop_ro(
          "traffic_bytes_per_gpu",
          [](const PlannedStep& p) {
            const AxisBytes& t = p.estimate().traffic;
            return std::map<std::string, double>{
                {"dp", t.dp}, {"tp", t.tp}, {"pp", t.pp}, {"cp", t.cp}, {"ep", t.ep}};
          },
          "Sent in a step along each axis, by the rank that sends most along it.")
      .def_prop_ro(
          "time_seconds",
          [](const PlannedStep& p) {
            const nlohmann::json all = nlohmann::json::parse(Answer{p.found}.json());
            return all["plans"][p.index]["time_seconds"].get<std::map<std::string, double>>();
          },
          "Where the seconds of a step go; they add up to it.")
      .def(
          "timeline",
          [](const PlannedStep& p) {
            const nb::gil_scoped_release release;
            StepModel model(p.found->request.work);
            return model.timeline(p.estimate().plan);
          },
          "The pipeline's step as it was simulated, in seconds.")
      .def(
          "to_toml", [](const PlannedStep& p) { return plan_file(p.estimate(), p.found->request.work); },
          "As `echelon plan --out` writes it, for train and verify.")
      .def(
          "launch_files",
          [](const PlannedStep& p, const std::string& program) {
            if (std::find(launched_programs().begin(), launched_programs().end(), program) ==
                launched_programs().end())
              refuse("--program {}: no such program; legal: {}", program,
                     fmt::join(launched_programs(), ", "));
            std::map<std::string, std::string> files;
            for (const LaunchFile& file : launch_files(program, p.estimate(), p.found->request.work))
              files[file.name] = file.text;
            return files;
          },
          "program"_a, "What another program is started with for this plan: texts by file name.")
      .def("to_dict",
           [](const PlannedStep& p) {
             return JsonObject(nb::cast<nb::dict>(from_json(Answer{p.found}.json())["plans"][p.index]));
           })
      .def("__repr__", [](const PlannedStep& p) {
        return fmt::format("<PlannedStep {}: {:.4g} s, MFU {:.1f}%>", summary(p.estimate().plan),
                           p.estimate().seconds, 100 * p.estimate().mfu);
      });
}

void bind_run_cost(nb::module_& m) {
  nb::class_<RunCost>(m, "RunCost", "What the steps of a whole training come to, with its failures.")
      .def_ro("steps", &RunCost::steps)
      .def_ro("training_seconds", &RunCost::training_seconds, "Were nothing to fail.")
      .def_ro("goodput", &RunCost::goodput)
      .def_ro("checkpoint_seconds", &RunCost::checkpoint_seconds, "Between two.")
      .def_ro("failures", &RunCost::failures, "How many are expected.")
      .def_ro("wall_seconds", &RunCost::wall_seconds)
      .def_ro("gpu_hours", &RunCost::gpu_hours)
      .def_ro("money", &RunCost::money)
      .def_ro("joules", &RunCost::joules, "0: not known.")
      .def_ro("low", &RunCost::low, "Factor of times, money and energy at the step's 10th percentile.")
      .def_ro("high", &RunCost::high, "At its 90th.")
      .def("__repr__", [](const RunCost& cost) {
        return fmt::format("<RunCost: {} steps, {:.4g} hours, {:.4g} GPU hours>", cost.steps,
                           cost.wall_seconds / 3600, cost.gpu_hours);
      });
}

void bind_sweep(nb::module_& m) {
  nb::class_<Sweep>(m, "Sweep", "The best plan for each value of a quantity.")
      .def_ro("key", &Sweep::key)
      .def_prop_ro("values",
                   [](const Sweep& s) {
                     std::vector<std::int64_t> values;
                     for (const SweepPoint& p : s.points) values.push_back(p.value);
                     return values;
                   })
      .def_prop_ro(
          "tokens_per_second_per_gpu",
          [](const Sweep& s) {
            std::vector<std::optional<double>> values;
            for (const SweepPoint& p : s.points)
              values.push_back(p.best ? std::optional(p.best->tokens_per_second_per_gpu) : std::nullopt);
            return values;
          },
          "None where nothing fits.")
      .def("to_csv", [](const Sweep& s) { return sweep_csv(s); })
      .def("to_svg", [](const Sweep& s) { return sweep_svg(s); })
      .def(
          "to_dict", [](const Sweep& s) { return from_json(sweep_json(s)); },
          "As `echelon plan --sweep ... --json`.")
      .def("_repr_svg_", [](const Sweep& s) { return sweep_svg(s); })
      .def("__str__", [](const Sweep& s) { return sweep_table(s); })
      .def("__repr__",
           [](const Sweep& s) { return fmt::format("<Sweep of {}: {} values>", s.key, s.points.size()); });
  m.def(
      "_sweep",
      [](const Words& words) {
        Names hidden = not_of_plan;
        hidden.erase("sweep");
        const auto found = std::make_shared<Found>(words, hidden);
        Sweep sweep;
        search_apart(found->request,
                     [&] { sweep = run_sweep(found->request, found->flags.sweep, found->life); });
        return sweep;
      },
      "words"_a);
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_estimate(m);
  bind_run_cost(m);
  nb::class_<Answer>(m, "PlanAnswer", "The ranking of plans, and what was left out of it.")
      .def_prop_ro("plans", &plans_of, "Best first.")
      .def_prop_ro(
          "best",
          [](const Answer& a) {
            return a.found->result.plans.empty() ? std::optional<PlannedStep>() : PlannedStep{a.found, 0};
          },
          "None where nothing fits.")
      .def_prop_ro(
          "gpus", [](const Answer& a) { return a.found->gpus; },
          "Devices that were planned for; with objective=\"gpus\" the fewest that reach the time.")
      .def_prop_ro("considered", [](const Answer& a) { return a.found->result.considered; })
      .def_prop_ro("feasible", [](const Answer& a) { return a.found->result.feasible; })
      .def_prop_ro("simulated", [](const Answer& a) { return a.found->result.simulated; })
      .def_prop_ro("search_seconds", [](const Answer& a) { return a.found->result.seconds; })
      .def_prop_ro(
          "rejected",
          [](const Answer& a) {
            std::map<std::string, std::int64_t> counts;
            for (const auto& [reason, one] : a.found->result.rejected) counts[reason] = one.count;
            return counts;
          },
          "How many, by reason.")
      .def_prop_ro(
          "examples",
          [](const Answer& a) {
            std::map<std::string, std::vector<std::string>> examples;
            for (const auto& [reason, one] : a.found->result.rejected)
              if (!one.examples.empty()) examples[reason] = one.examples;
            return examples;
          },
          "A few of those, with why.")
      .def_prop_ro(
          "run", [](const Answer& a) { return a.found->cost; },
          "The life of the best plan's run, where tokens= was given.")
      .def("table",
           [](const Answer& a) {
             std::string text = plans_table(a.found->result, a.found->request.work).text();
             if (a.found->result.plans.empty())
               text += explain_nothing(a.found->result, a.found->gpus) + "\n";
             return text;
           })
      .def(
          "explain", [](const Answer& a) { return explain_winner(a.found->result, a.found->request.work); },
          "Where each second goes, what each rank holds, and why not the others.")
      .def("_why_not", &why_not, "pins"_a)
      .def(
          "to_html",
          [](const Answer& a) {
            (void)best_of(a);
            SearchRequest request = a.found->request;
            request.gpus = a.found->gpus;
            std::string html;
            search_apart(request,
                         [&] { html = plan_page(a.found->result, request, {}, a.json(), a.found->app); });
            return html;
          },
          "The best plans as one page. RequestError where nothing fits.")
      .def(
          "to_dict", [](const Answer& a) { return from_json(a.json()); }, "As `echelon plan --json`.")
      .def("__len__", [](const Answer& a) { return a.found->result.plans.size(); })
      .def("__str__",
           [](const Answer& a) { return plans_table(a.found->result, a.found->request.work).text(); })
      .def("__repr__", [](const Answer& a) {
        return a.found->result.plans.empty()
                   ? fmt::format("<PlanAnswer: {}>", explain_nothing(a.found->result, a.found->gpus))
                   : fmt::format("<PlanAnswer: {} plans, best {}>", a.found->result.plans.size(),
                                 summary(a.found->result.plans.front().plan));
      });
  m.def("_plan", &planned, "words"_a);
  bind_sweep(m);
}

}  // namespace echelon::python
