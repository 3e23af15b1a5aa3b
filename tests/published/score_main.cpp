// Prints predicted against published for every table, or, with --fit, answers the fit script: it reads lines
// of assignments (software.fsdp.launch_seconds=5e-6 machine.h100.memory_efficiency=0.8 ...) and writes for
// each line one line of log(predicted / published) of the fitted rows of the tables that are named: of their
// seconds, or with --memory of their bytes. With --intervals it writes the intervals of all programs, for the
// script too.
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <sstream>

#include "base/error.h"
#include "base/median.h"
#include "plan/fit.h"
#include "published/intervals.h"
#include "published/score.h"
#include "spec/toml_text.h"

namespace {

using namespace echelon;
using namespace echelon::published;

// A struct with one key changed, through its own text form.
template <class T, class Write, class Read>
T changed(const T& value, const std::string& key, const std::string& number, Write write, Read read) {
  std::istringstream in(write(value));
  std::string text;
  for (std::string line; std::getline(in, line);)
    text += line.starts_with(key + " = ") ? key + " = " + number + "\n" : line + "\n";
  return read(text, "--set");
}

// One number may be that of several keys: machine.h100-96.gemm_efficiency+gemm_fp8_efficiency=0.5.
void assign(Point& p, const std::string& what) {
  const auto dot = what.find('.'), key = what.find('.', dot + 1), plus = what.find('+', key),
             equals = what.find('=');
  if (plus < equals) {
    assign(p, what.substr(0, plus) + what.substr(equals));
    return assign(p, what.substr(0, key + 1) + what.substr(plus + 1));
  }
  const std::string kind = what.substr(0, dot), name = what.substr(dot + 1, key - dot - 1);
  const std::string field = what.substr(key + 1, equals - key - 1), value = what.substr(equals + 1);
  const bool prefix =
      name.ends_with('*') && p.work.software.name.starts_with(name.substr(0, name.size() - 1));
  if (kind == "software" && (prefix || p.work.software.name == name))
    p.work.software = changed(
        p.work.software, field, value, [](const Software& s) { return to_toml(s); },
        [](const std::string& t, const std::string& w) { return software_from_toml(t, w); });
  const std::string& machine = p.work.machine.name;
  const bool same = name == machine || (name == "a100" && machine.starts_with("a100")) ||
                    (name == "blackwell" && machine.ends_with("b200")) ||
                    (name == "blackwell-ultra" && machine.ends_with("b300"));
  if (kind == "machine" && same) {
    if (field == "node_bandwidth")
      p.work.machine.tiers.front().bandwidth = std::stod(value);
    else
      p.work.machine = changed(
          p.work.machine, field, value, [](const Machine& m) { return to_toml(m); },
          [](const std::string& t, const std::string& w) { return machine_from_toml(t, w); });
  }
}

void answer_fit(const std::vector<Table>& tables, bool memory) {
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<std::string> assignments;
    std::istringstream in(line);
    for (std::string word; in >> word;) assignments.push_back(word);
    for (const Table& table : tables)
      for (const Point& original : table.points) {
        if (!original.fitted || (memory ? original.memory_bytes : original.seconds) <= 0) continue;
        Point p = original;
        for (const std::string& what : assignments) assign(p, what);
        const Prediction predicted = predict(p);
        if (predicted.seconds > 0)
          fmt::print("{:.6f} ", memory ? std::log(predicted.memory_bytes / p.memory_bytes)
                                       : std::log(predicted.seconds / p.seconds));
      }
    fmt::print("\n");
    std::fflush(stdout);
  }
}

// Programs whose numbers another one's file repeats.
std::vector<std::string> relatives(const std::string& name) {
  if (name.starts_with("torchtitan")) return {"torchtitan", "torchtitan-eager"};
  if (name == "fsdp") return {"fsdp", "deepspeed"};
  if (name == "current" || name == "nemo-2024") return {"current", "nemo-2024", "deepseek-v3"};
  return {name};
}

// What three steps of a program that nothing is known of bring: it begins with the facts of its file and the
// numbers that are usual among the other programs. Mean and median error before, and after a fit to three
// rows, of `draws` draws, on the rows that were not drawn.
void print_three(const std::vector<Table>& tables, int draws) {
  for (const Table& table : tables) {
    std::mt19937 draw(1);  // of each table the same, whichever others are asked for
    std::vector<MeasuredStep> steps;
    std::vector<const Point*> points;
    for (const Point& p : table.points) {
      if (p.seconds <= 0 || p.plans.size() != 1 || predict(p).seconds <= 0) continue;
      MeasuredStep step{p.plans.front(), p.work.precision, p.seconds, p.label};
      step.plan.model = p.work.plan.model;
      step.plan.seq_len = p.work.plan.seq_len;
      step.plan.global_batch = p.work.plan.global_batch;
      steps.push_back(std::move(step));
      points.push_back(&p);
    }
    // Of what scans cost no other program knows anything.
    if (steps.size() < 10 || steps.front().plan.model.num_state_space_layers() > 0) continue;
    const std::vector<Knob> knobs = usual_numbers(relatives(points.front()->work.software.name));
    const auto ratio = [&](const Software& software, std::size_t i) {
      Software its = points[i]->work.software;  // facts that its row has of its own
      for (const Knob& knob : knobs) its.*knob.member = software.*knob.member;
      return priced_seconds(its, points[i]->work.machine, steps[i]) / steps[i].seconds;
    };
    std::vector<double> before, after;
    // The first three of `order` are measured, and so many of the others priced.
    const auto price = [&](const std::vector<std::size_t>& order, std::size_t most) {
      const Software start = with_usual_numbers(points[order[0]]->work.software, knobs);
      const Software fit = most_likely_numbers(start, knobs, [&](const Software& software) {
        std::vector<double> errors;
        for (std::size_t k = 0; k < 3; ++k) errors.push_back(std::log(ratio(software, order[k])));
        return errors;
      });
      const std::size_t last = std::min<std::size_t>(order.size(), most + 3);
      for (std::size_t k = 3; k < last; ++k) {
        before.push_back(std::abs(ratio(start, order[k]) - 1));
        after.push_back(std::abs(ratio(fit, order[k]) - 1));
      }
    };
    for (int n = 0; n < draws; ++n) {
      std::vector<std::size_t> order(steps.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), draw);
      price(order, 200);
    }
    const auto mean = [](const std::vector<double>& all) {
      return 100 * std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
    };
    fmt::print("{:<18} {} draws of 3 of {} rows: mean {:.1f}% -> {:.1f}%, median {:.1f}% -> {:.1f}%\n",
               table.name, draws, steps.size(), mean(before), mean(after), 100 * upper_median(before),
               100 * upper_median(after));
    std::fflush(stdout);
    // Those that the planner would ask for, knowing no time.
    const Software start = with_usual_numbers(points.front()->work.software, knobs);
    const auto logs = [&](const Software& software) {
      std::vector<double> all;
      for (std::size_t i = 0; i < steps.size(); ++i)
        all.push_back(std::log(ratio(software, i) * steps[i].seconds));
      return all;
    };
    std::vector<std::size_t> asked;
    for (const StepChoice::Step& one : most_telling_steps(start, knobs, logs, {}, 3).steps)
      asked.push_back(one.step);
    for (std::size_t i = 0; i < steps.size(); ++i)
      if (std::find(asked.begin(), asked.begin() + 3, i) == asked.begin() + 3) asked.push_back(i);
    before.clear();
    after.clear();
    price(asked, steps.size());
    fmt::print("{:<18} 3 of {} rows, chosen: mean {:.1f}% -> {:.1f}%, median {:.1f}% -> {:.1f}%\n",
               table.name, steps.size(), mean(before), mean(after), 100 * upper_median(before),
               100 * upper_median(after));
    std::fflush(stdout);
  }
}

void print_scores(const Table& table, const std::vector<Prediction>& predictions) {
  for (const std::string& line : score_lines(table, predictions)) fmt::print("{}\n", line);
}

// Of each group that has regret the row that is predicted to be the fastest, and the one that was.
void print_regret(const Table& table, const std::vector<Prediction>& predictions) {
  for (const GroupChoice& one : choices(table, predictions)) {
    if (one.regret <= 0) continue;
    fmt::print("  {}: {:.1f}%\n", one.group, 100 * one.regret);
    for (const auto& [what, i] : {std::pair{"chosen", one.chosen}, {"best", one.best}})
      fmt::print("    {:<6} {:<70} {:>9.4f} {:>9.4f} {:>7.1f}%\n", what, table.points[i].label,
                 table.points[i].seconds, predictions[i].seconds,
                 100 * (predictions[i].seconds / table.points[i].seconds - 1));
  }
}

std::vector<Prediction> print(const Table& table, bool rows, bool regret,
                              const std::vector<std::string>& assignments) {
  std::vector<Prediction> predictions;
  Table changed_table = table;
  for (Point& p : changed_table.points) {
    for (const std::string& what : assignments) assign(p, what);
    predictions.push_back(predict(p));
  }
  if (rows)
    for (std::size_t i = 0; i < table.points.size(); ++i) {
      const Point& p = table.points[i];
      fmt::print("  {} {:<70} {:>9.4f} {:>9.4f} {:>7.1f}%  {:6.1f} {:6.1f} GB{}\n", p.fitted ? "f" : " ",
                 p.label, p.seconds, predictions[i].seconds,
                 p.seconds > 0 ? 100 * (predictions[i].seconds / p.seconds - 1) : 0, p.memory_bytes / 1e9,
                 predictions[i].memory_bytes / 1e9,
                 p.out_of_memory       ? " OOM"
                 : predictions[i].fits ? ""
                                       : " rejected");
    }
  print_scores(table, predictions);
  if (regret) print_regret(table, predictions);
  return predictions;
}

// Rows of all tables together, each with the same weight.
void print_all(const std::vector<Table>& tables, const std::vector<std::string>& assignments, bool rows,
               bool regret) {
  Table all{"all", {}};
  std::vector<Prediction> predictions;
  for (const Table& table : tables) {
    const std::vector<Prediction> its = print(table, rows, regret, assignments);
    predictions.insert(predictions.end(), its.begin(), its.end());
    all.points.insert(all.points.end(), table.points.begin(), table.points.end());
  }
  for (Point& p : all.points) p.group.clear();  // names of several tables' groups are the same
  if (tables.size() > 1) print_scores(all, predictions);
}

}  // namespace

int main(int argc, char** argv) {
  bool fit = false, memory = false, rows = false, regret = false, with_intervals = false;
  int three = 0;
  std::vector<std::string> names, assignments;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--fit") == 0)
      fit = true;
    else if (std::strcmp(argv[i], "--memory") == 0)
      memory = true;
    else if (std::strcmp(argv[i], "--rows") == 0)
      rows = true;
    else if (std::strcmp(argv[i], "--regret") == 0)
      regret = true;
    else if (std::strcmp(argv[i], "--intervals") == 0)
      with_intervals = true;
    else if (std::strncmp(argv[i], "--three=", 8) == 0)
      three = std::atoi(argv[i] + 8);
    else if (std::strchr(argv[i], '=') != nullptr)
      assignments.emplace_back(argv[i]);
    else
      names.emplace_back(argv[i]);
  }
  try {
    std::vector<Table> tables;
    for (const Source& source : sources()) {
      if (!names.empty() && std::find(names.begin(), names.end(), source.name) == names.end()) continue;
      if (auto table = read(source))
        tables.push_back(std::move(*table));
      else
        fmt::print(stderr, "{}: {} is not there: set ECHELON_PUBLISHED\n", source.name, source.file);
    }
    if (three > 0) {
      print_three(tables, three);
      return 0;
    }
    if (fit) {
      answer_fit(tables, memory);
      return 0;
    }
    if (with_intervals) {
      const Intervals found = intervals(tables);
      fmt::print("{}", interval_lines(found));
      for (const std::string& line : interval_scores(found)) fmt::print(stderr, "{}\n", line);
      fmt::print(stderr, "a program without rows: 80% within a factor of {:.2f}\n",
                 std::exp(found.unknown_half_width));
      fmt::print(stderr, "of mixtures of experts: within a factor of {:.2f}\n",
                 std::exp(found.unknown_expert_half_width));
      fmt::print(stderr, "and of layers with a state space: within a factor of {:.2f}\n",
                 std::exp(found.unknown_scan_half_width));
      return 0;
    }
    print_all(tables, assignments, rows, regret);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
