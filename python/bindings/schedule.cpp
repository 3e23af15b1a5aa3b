// Schedules as data, their simulation and their drawings.
#include "schedule/schedule.h"

#include <algorithm>
#include <memory>

#include "apps/simulate_flags.h"
#include "apps/simulate_report.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "bindings/bindings.h"
#include "bindings/words.h"
#include "draw/page.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "schedule/validate.h"

namespace echelon::python {
namespace {

constexpr Op all_ops[] = {Op::F,  Op::B,    Op::W,    Op::BW,   Op::V,
                          Op::VW, Op::send, Op::recv, Op::step, Op::validate};
constexpr int most = 1 << 20;  // of stages, microbatches and ranks: whatever is larger is a mistake

int checked(const char* field, int value, int least) {
  if (value < least || value > most) refuse("--{} {}: must be from {} to {}", field, value, least, most);
  return value;
}

Op op_of(const std::string& name) {
  for (Op op : all_ops)
    if (name == op_name(op) && op != Op::send && op != Op::recv && op != Op::validate) return op;
  refuse("--op {}: legal: F, B, W, BW, V, VW, step (messages are what lower() adds)", name);
}

Instruction instruction(const std::string& op, int stage, int microbatch, int version, bool overlaps_next) {
  Instruction i;
  i.op = op_of(op);
  i.stage = checked("stage", stage, 0);
  i.microbatch = checked("microbatch", microbatch, 0);
  i.version = checked("version", version, 0);
  i.overlaps_next = overlaps_next;
  return i;
}

Schedule schedule_of(std::vector<std::vector<Instruction>> ranks, std::optional<int> stages,
                     std::optional<int> microbatches, const std::string& name, int vocabulary_parts) {
  Schedule schedule;
  schedule.name = name;
  for (const auto& rank : ranks)
    for (const Instruction& i : rank) {
      if (!is_of_head(i.op)) schedule.num_stages = std::max(schedule.num_stages, i.stage + 1);
      schedule.num_microbatches = std::max(schedule.num_microbatches, i.microbatch + 1);
    }
  if (stages) schedule.num_stages = checked("num-stages", *stages, 1);
  if (microbatches) schedule.num_microbatches = checked("num-microbatches", *microbatches, 1);
  schedule.vocabulary_parts = checked("vocabulary-parts", vocabulary_parts, 0);
  if (ranks.empty() || schedule.num_stages == 0)
    refuse("--ranks: a list of instructions for each rank; there are none");
  schedule.ranks = std::move(ranks);
  return schedule;
}

// Everything that the simulation of one schedule found, with its timeline.
struct SimulationAnswer {
  SimulationReport report;

  // What only a schedule that fits its numbers has: a makespan of 0 would be the least of several.
  const SimulationReport& found() const {
    if (!report.unfit.empty()) refuse("{}", report.unfit);
    return report;
  }

  std::vector<Track> tracks() const {
    std::vector<SimulationReport> copies{report};
    return tracks_of(copies);
  }
};

struct SimulationQuestion {
  CLI::App app{"", "simulate"};
  SimulateFlags flags;

  SimulationQuestion(const Words& words, const Names& hidden) {
    flags.add_to(app);
    read_words(app, words, hidden);
    flags.json = true;  // nothing is drawn
    flags.read(app);
  }
};

Names without(Names names, const std::string& name) {
  names.erase(name);
  return names;
}

std::vector<SimulationAnswer> simulated(const Words& words, const Names& hidden) {
  const SimulationQuestion asked(words, hidden);
  std::vector<SimulationAnswer> answers;
  run_apart([&](const Progress& progress) {
    for (SimulationReport& report : simulation_reports(asked.flags, asked.app, progress))
      answers.push_back({std::move(report)});
  });
  return answers;
}

SimulationAnswer simulated(const Schedule& schedule, const Words& words) {
  Names hidden = not_of_simulate;
  hidden.insert({"schedule", "pp", "microbatches", "chunks", "group-size", "steps", "stage-memory",
                 "activation-limit"});
  const SimulationQuestion asked(words, hidden);
  const nb::gil_scoped_release release;
  return {simulation_report(asked.flags, asked.app, schedule)};
}

void bind_instructions(nb::module_& m) {
  nb::class_<Instruction>(
      m, "Instruction",
      "One instruction of a rank: an op of a stage for a microbatch. Ops: F forward, B "
      "gradient of the input, W gradient of the weights, BW both at once, V and VW of a "
      "part of the output layer, step the optimizer's step of a stage (of a schedule that "
      "does not flush); send and recv in lowered programs.")
      .def(
          "__init__",
          [](Instruction* at, const std::string& op, int stage, int microbatch, int version,
             bool overlaps_next) {
            new (at) Instruction(instruction(op, stage, microbatch, version, overlaps_next));
          },
          "op"_a, "stage"_a, "microbatch"_a = 0, "version"_a = 0, "overlaps_next"_a = false)
      .def_prop_ro("op", [](const Instruction& i) { return std::string(op_name(i.op)); })
      .def_ro("stage", &Instruction::stage)
      .def_ro("microbatch", &Instruction::microbatch)
      .def_ro("version", &Instruction::version, "Of the stage's weights that are read.")
      .def_ro("overlaps_next", &Instruction::overlaps_next, "Runs together with the next one of the list.")
      .def_prop_ro(
          "peer",
          [](const Instruction& i) {
            return i.op == Op::send || i.op == Op::recv ? std::optional<int>(i.peer) : std::nullopt;
          },
          "The other rank of a message; None for all else.")
      .def(
          "__eq__", [](const Instruction& a, const Instruction& b) { return a == b; }, nb::is_operator(),
          compared_with_anything)
      .def("__hash__", [](const Instruction& i) { return hash_of(to_string(i)); })
      .def("__str__", [](const Instruction& i) { return to_string(i); })
      .def("__repr__", [](const Instruction& i) { return fmt::format("<Instruction {}>", to_string(i)); });
}

void bind_timeline(nb::module_& m) {
  nb::class_<Span>(m, "Span", "When an instruction ran.")
      .def_ro("instruction", &Span::instruction)
      .def_ro("begin", &Span::begin)
      .def_ro("end", &Span::end)
      .def("__repr__", [](const Span& s) {
        return fmt::format("<Span {} from {:.6g} to {:.6g}>", to_string(s.instruction), s.begin, s.end);
      });
  nb::class_<Timeline>(m, "Timeline",
                       "When each rank ran what: simulated, in the unit of the times given, or measured, in "
                       "seconds. Drawn where a notebook shows it.")
      .def_ro("ranks", &Timeline::ranks)
      .def_prop_ro("makespan", &Timeline::makespan)
      .def_prop_ro("bubble_fraction", &Timeline::bubble_fraction, "Idle time over ranks times makespan.")
      .def_prop_ro("local_bubble", &Timeline::local_bubble,
                   "Idle time between a rank's first and last computation, the largest over ranks.")
      .def(
          "busy",
          [](const Timeline& t, int rank) {
            if (rank < 0 || static_cast<std::size_t>(rank) >= t.ranks.size())
              throw nb::index_error(fmt::format("rank {} of {}", rank, t.ranks.size()).c_str());
            return t.busy(rank);
          },
          "rank"_a, "Time that a rank computes.")
      .def(
          "to_text",
          [](const Timeline& t, int width) {
            if (width < 20 || width > 100000) refuse("--width {}: must be from 20 to 100000 columns", width);
            return gantt_text(track("", t), {width, false});
          },
          "width"_a = 100, "A row for each rank, as in the textbooks.")
      .def(
          "to_svg", [](const Timeline& t, const std::string& title) { return gantt_svg(track(title, t)); },
          "title"_a = "")
      .def(
          "to_html",
          [](const Timeline& t, const std::string& title) {
            Page page;
            page.kind = "timeline";
            page.title = title.empty() ? "Timeline" : title;
            page.tracks.emplace_back().track = track(title, t).front();
            return page_html(page);
          },
          "title"_a = "", "A page that needs nothing else, with zoom and hover.")
      .def(
          "to_perfetto",
          [](const Timeline& t, double microseconds) {
            if (!(microseconds > 0 && microseconds <= 1e12))
              refuse("--microseconds-per-unit {}: must be above 0, up to 1e12", microseconds);
            return perfetto_json(track("timeline", t), microseconds);
          },
          "microseconds_per_unit"_a = 1000.0, "For ui.perfetto.dev.")
      .def("_repr_svg_", [](const Timeline& t) { return gantt_svg(track("", t)); })
      .def("__repr__", [](const Timeline& t) {
        return fmt::format("<Timeline of {}, makespan {:.6g}>",
                           counted(static_cast<std::int64_t>(t.ranks.size()), "rank"), t.makespan());
      });
}

void bind_schedules(nb::module_& m) {
  nb::class_<Schedule>(m, "Schedule",
                       "A pipeline schedule as data: for each rank the instructions that it runs, in order.")
      .def(
          "__init__",
          [](Schedule* at, std::vector<std::vector<Instruction>> ranks, std::optional<int> stages,
             std::optional<int> microbatches, const std::string& name, int parts) {
            new (at) Schedule(schedule_of(std::move(ranks), stages, microbatches, name, parts));
          },
          "ranks"_a, nb::kw_only(), "num_stages"_a.none() = nb::none(),
          "num_microbatches"_a.none() = nb::none(), "name"_a = "mine", "vocabulary_parts"_a = 0,
          "Of one's own: a list of instructions for each rank. Numbers of stages and microbatches that are "
          "not given are as many as the instructions have.")
      .def_static(
          "named",
          [](const std::string& name, int pp, int microbatches, int chunks, int steps) {
            check_request(name, pp, microbatches, chunks, steps);
            check_size(pp, microbatches, chunks, steps);
            return make_schedule(name, pp, microbatches, chunks, steps);
          },
          "name"_a, "pp"_a, "microbatches"_a, nb::kw_only(), "chunks"_a = 0, "steps"_a = 1,
          "A published one; Schedule.names() lists them. RequestError for numbers that it does not have.")
      .def_static("names", &schedule_names)
      .def_static(
          "from_text", [](const std::string& text, const std::string& name) { return from_text(text, name); },
          "text"_a, nb::kw_only(), "name"_a = "mine",
          "Rows of instructions as 0F0 0F1 0B0 0W0, a row for each rank; or torch.distributed.pipelining's "
          "CSV.")
      .def_rw("name", &Schedule::name)
      .def_ro("ranks", &Schedule::ranks)
      .def_prop_ro("num_ranks", &Schedule::num_ranks)
      .def_ro("num_stages", &Schedule::num_stages)
      .def_ro("num_microbatches", &Schedule::num_microbatches)
      .def_ro("vocabulary_parts", &Schedule::vocabulary_parts)
      .def(
          "check", [](const Schedule& s) { validate(s); },
          "RequestError naming rank, instruction and what is missing, unless this computes whole training "
          "steps and, with its messages, finishes on every rank.")
      .def(
          "lower",
          [](const Schedule& s) {
            validate(s);
            return lower(s);
          },
          "The program that ranks run: with sends and receives.")
      .def("to_text", [](const Schedule& s) { return to_text(s); })
      .def(
          "to_csv", [](const Schedule& s) { return to_csv(s); }, "As torch.distributed.pipelining reads it.")
      .def(
          "_simulate", [](const Schedule& s, const Words& words) { return simulated(s, words); }, "words"_a)
      .def("_repr_svg_",
           [](const Schedule& s) -> std::optional<std::string> {
             const auto is_message = [](const Instruction& i) {
               return i.op == Op::send || i.op == Op::recv;
             };
             for (const auto& list : s.ranks)
               if (std::any_of(list.begin(), list.end(), is_message))
                 return std::nullopt;  // lowered: a notebook shows its repr
             return gantt_svg(simulated(s, {}).tracks());
           })
      .def(
          "__eq__",
          [](const Schedule& a, const Schedule& b) {
            return a.ranks == b.ranks && a.num_stages == b.num_stages &&
                   a.num_microbatches == b.num_microbatches && a.vocabulary_parts == b.vocabulary_parts;
          },
          nb::is_operator(), compared_with_anything)
      .def("__hash__", [](const Schedule& s) { return hash_of(to_text(s)); })
      .def("__str__", [](const Schedule& s) { return to_text(s); })
      .def("__repr__", [](const Schedule& s) {
        return fmt::format("<Schedule {}: {}, {}, {}>", s.name, counted(s.num_ranks(), "rank"),
                           counted(s.num_stages, "stage"), counted(s.num_microbatches, "microbatch"));
      });
}

void bind_simulation(nb::module_& m) {
  const auto numbers = [](const SimulationAnswer& a) { return from_json(json_text(to_json(a.report))); };
  nb::class_<SimulationAnswer>(m, "Simulation", "What a schedule comes to. Drawn where a notebook shows it.")
      .def_prop_ro("name", [](const SimulationAnswer& a) { return a.report.name; })
      .def_prop_ro("valid", [](const SimulationAnswer& a) { return a.report.unfit.empty(); })
      .def_prop_ro(
          "reason", [](const SimulationAnswer& a) { return in_pythons_words(a.report.unfit); },
          "Of compare(): why these numbers do not fit the schedule. What it comes to is then a RequestError "
          "that says so.")
      .def_prop_ro("makespan", [](const SimulationAnswer& a) { return a.found().makespan; })
      .def_prop_ro(
          "bubble_time", [](const SimulationAnswer& a) { return a.found().bubble(); },
          "Idle time of a rank, in the mean over ranks.")
      .def_prop_ro("bubble_fraction", [](const SimulationAnswer& a) { return a.found().bubble_fraction; })
      .def_prop_ro("local_bubble_time", [](const SimulationAnswer& a) { return a.found().local_bubble; })
      .def_prop_ro(
          "peak_activations", [](const SimulationAnswer& a) { return a.found().simulation.peak_activations; },
          "Of each rank, in activations of one full stage.")
      .def_prop_ro("weight_versions",
                   [](const SimulationAnswer& a) { return a.found().simulation.weight_versions; })
      .def_prop_ro("parameter_copies",
                   [](const SimulationAnswer& a) { return a.found().simulation.parameter_copies; })
      .def_prop_ro("messages", [](const SimulationAnswer& a) { return a.found().simulation.messages; })
      .def_prop_ro("timeline", [](const SimulationAnswer& a) { return a.found().simulation.timeline; })
      .def_prop_ro(
          "schedule", [](const SimulationAnswer& a) { return a.found().schedule; }, nb::rv_policy::copy)
      .def("to_dict", numbers, "As `echelon simulate --json`.")
      .def("to_svg", [](const SimulationAnswer& a) { return gantt_svg(a.tracks()); })
      .def("to_html",
           [](const SimulationAnswer& a) {
             std::vector<SimulationReport> one{a.report};
             return page_html(page_of(one, false));
           })
      .def("_repr_svg_", [](const SimulationAnswer& a) { return gantt_svg(a.tracks()); })
      .def("__repr__", [](const SimulationAnswer& a) {
        const SimulationReport& r = a.report;
        return r.unfit.empty() ? fmt::format("<Simulation {}: makespan {:.6g}, bubble {:.1f}%>", r.name,
                                             r.makespan, 100 * r.bubble_fraction)
                               : fmt::format("<Simulation {}: {}>", r.name, in_pythons_words(r.unfit));
      });
  m.def(
      "_simulate", [](const Words& words) { return std::move(simulated(words, not_of_simulate).front()); },
      "words"_a);
  m.def(
      "_compare",
      [](const Words& words) {
        Names hidden = without(not_of_simulate, "compare");
        hidden.insert("schedule");
        return simulated(words, hidden);
      },
      "words"_a);
  m.def(
      "_draw_together",
      [](const std::vector<SimulationAnswer>& answers, bool as_page) {
        std::vector<SimulationReport> copies;
        for (const SimulationAnswer& a : answers) copies.push_back(a.report);
        return as_page ? page_html(page_of(copies, true)) : gantt_svg(tracks_of(copies));
      },
      "simulations"_a, "as_page"_a);
}

}  // namespace

void bind_schedule(nb::module_& m) {
  bind_instructions(m);
  bind_timeline(m);
  bind_schedules(m);
  bind_simulation(m);
}

}  // namespace echelon::python
