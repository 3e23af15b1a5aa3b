#include "published/intervals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "published/score.h"
#include "spec/software.h"

namespace echelon::published {
namespace {

constexpr double held = 0.8;
constexpr std::size_t enough = 12;  // rows, for a half-width of their own
constexpr std::size_t enough_far = 10;
constexpr double near = 2;  // as plan/interval.cpp

enum Kind { on_a_node, on_nodes, of_experts };

struct Row {
  std::string group, on;
  Kind kind = on_a_node;
  std::array<std::int64_t, 3> sizes{};   // GPUs, parameters, sequence length
  double off = 0, off_left_out = 0;      // |log(published / predicted)|
  double error = 0, error_left_out = 0;  // |predicted / published - 1|
  bool fitted = false;
  bool scans = false;  // has layers with a state space
};
using Rows = std::vector<const Row*>;

double half_width(std::vector<double> off) {
  std::sort(off.begin(), off.end());
  const auto n = static_cast<double>(off.size());
  const auto place = static_cast<std::size_t>(std::ceil(held * (n + 1)));
  return off[std::min(place, off.size()) - 1];
}

// Of rows that nothing was fitted on, where there are enough of them.
std::vector<double> off_of(const Rows& rows, const std::set<Kind>& kinds) {
  std::vector<double> others, all;
  for (const Row* row : rows) {
    if (!kinds.contains(row->kind)) continue;
    all.push_back(row->off);
    if (!row->fitted) others.push_back(row->off);
  }
  return others.size() >= enough ? others : all;
}

std::array<double, 3> widths_of(const Rows& rows) {
  std::array<double, 3> widths{};
  const std::vector<double> dense = off_of(rows, {on_a_node, on_nodes});
  for (Kind kind : {on_a_node, on_nodes, of_experts}) {
    const std::vector<double> own = off_of(rows, {kind});
    if (own.empty() && kind != on_a_node) continue;
    const std::vector<double>& used =
        own.size() >= enough || kind == of_experts || dense.empty() ? own : dense;
    if (!used.empty()) widths[static_cast<std::size_t>(kind)] = half_width(used);
  }
  return widths;
}

bool is_far(const Row& row, const Rows& measured) {
  std::array<std::array<std::int64_t, 2>, 3> range{};
  bool on = false, of_kind = false;
  for (const Row* other : measured) {
    on |= other->on == row.on;
    of_kind |= other->kind == row.kind || row.kind == on_a_node;
    for (std::size_t i = 0; i < 3; ++i) {
      auto& [least, most] = range[i];
      least = least == 0 ? other->sizes[i] : std::min(least, other->sizes[i]);
      most = std::max(most, other->sizes[i]);
    }
  }
  bool far = !on || !of_kind;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto size = static_cast<double>(row.sizes[i]);
    far |= size * near < static_cast<double>(range[i][0]) || size > near * static_cast<double>(range[i][1]);
  }
  return far;
}

Rows without(const Rows& rows, const std::string& group) {
  Rows rest;
  for (const Row* row : rows)
    if (row->group != group) rest.push_back(row);
  return rest;
}

// What a group far from all others was off by, with that group's name.
std::vector<std::pair<std::string, double>> far_rows(const Rows& rows, const std::set<std::string>& groups) {
  std::vector<std::pair<std::string, double>> far;
  for (const std::string& group : groups) {
    const Rows rest = without(rows, group);
    for (const Row* row : rows)
      if (row->group == group && !rest.empty() && is_far(*row, rest)) far.emplace_back(group, row->off);
  }
  return far;
}

double far_width(const std::vector<std::pair<std::string, double>>& far, const std::string& left_out,
                 const std::array<double, 3>& widths, double unknown) {
  std::vector<double> off;
  for (const auto& [group, one] : far)
    if (group != left_out) off.push_back(one);
  if (off.size() < enough_far) return unknown;
  return std::max(half_width(off), *std::max_element(widths.begin(), widths.end()));
}

double part_inside(const std::vector<double>& off, double width) {
  return static_cast<double>(
             std::count_if(off.begin(), off.end(), [&](double one) { return one <= width; })) /
         static_cast<double>(off.size());
}

// Numbers that memory depends on, and no time.
bool is_of_memory(const std::string& key) {
  return key == "gradient_bytes" || key == "logit_bytes" || key == "fragmentation" || key == "saved_factor";
}

std::map<std::string, std::string> numbers_of(const Software& software) {
  std::map<std::string, std::string> numbers;
  std::istringstream in(to_toml(software));
  for (std::string line; std::getline(in, line);)
    if (const auto equals = line.find(" = "); equals != std::string::npos)
      numbers[line.substr(0, equals)] = line.substr(equals + 3);
  return numbers;
}

// The program with the means of the others' fitted numbers in place of its own; where no other has one
// fitted, as in a file that says nothing.
Software left_out(const Software& software, const std::string& program) {
  std::map<std::string, std::vector<double>> others;
  for (const std::string& name : software_preset_names()) {
    if (name == program || name == program + "-eager") continue;
    const Software other = load_software(name);
    if (!other.version_of.empty()) continue;  // whose numbers are another's
    const auto numbers = numbers_of(other);
    for (const std::string& key : other.provenance.fitted.value_or(std::vector<std::string>{}))
      others[key].push_back(std::stod(numbers.at(key)));
  }
  auto numbers = numbers_of(software);
  const auto nothing_said = numbers_of(Software());
  for (const std::string& key : software.provenance.fitted.value_or(std::vector<std::string>{})) {
    if (is_of_memory(key)) continue;
    const std::vector<double>& all = others[key];
    double sum = 0;
    for (double one : all) sum += one;
    numbers[key] =
        all.empty() ? nothing_said.at(key) : fmt::format("{}", sum / static_cast<double>(all.size()));
  }
  std::string text;
  for (const auto& [key, value] : numbers) text += fmt::format("{} = {}\n", key, value);
  return software_from_toml(text, software.name);
}

std::string program_of(const Point& p) {
  return p.work.software.name == "torchtitan-eager" ? "torchtitan" : p.work.software.name;
}

}  // namespace

bool is_of_its_program(const std::string& table) { return table != "sc21-zero3" && table != "deepseek-v3"; }

Intervals intervals(const std::vector<Table>& tables) {
  std::map<std::string, std::vector<Row>> rows;
  std::map<std::string, Software> without_own;
  for (const Table& table : tables) {
    if (!is_of_its_program(table.name)) continue;
    for (const Point& p : table.points) {
      const Prediction predicted = predict(p);
      if (p.seconds <= 0 || predicted.seconds <= 0) continue;
      const std::string program = program_of(p);
      const std::string& name = p.work.software.name;
      Row row;
      const Plan& plan = p.plans.front();
      const ModelSpec& model = p.work.plan.model;
      row.fitted = p.fitted;
      row.sizes = {plan.mesh.num_ranks(), num_parameters(model), p.work.plan.seq_len};
      row.group = fmt::format("{} {} {}", row.sizes[1], plan.mesh.num_ranks(), program);
      row.on = fmt::format("{} {}", p.work.machine.name, precision_name(p.work.precision));
      row.scans = model.num_state_space_layers() > 0;
      row.kind = model.num_expert_layers() > 0                   ? of_experts
                 : plan.mesh.num_ranks() > p.work.machine.node() ? on_nodes
                                                                 : on_a_node;
      row.off = std::abs(std::log(p.seconds / predicted.seconds));
      row.error = std::abs(predicted.seconds / p.seconds - 1);
      Point other = p;
      // What a table changes in its program stays.
      if (!without_own.contains(name)) without_own[name] = left_out(load_software(name), program);
      const auto means = numbers_of(without_own.at(name));
      auto numbers = numbers_of(p.work.software);
      for (const std::string& key : p.work.software.provenance.fitted.value_or(std::vector<std::string>{}))
        if (!is_of_memory(key)) numbers[key] = means.at(key);
      std::string text;
      for (const auto& [key, value] : numbers) text += fmt::format("{} = {}\n", key, value);
      other.work.software = software_from_toml(text, name);
      const double seconds_left_out = predict(other).seconds;
      row.off_left_out = std::abs(std::log(p.seconds / seconds_left_out));
      row.error_left_out = std::abs(seconds_left_out / p.seconds - 1);
      rows[program].push_back(std::move(row));
    }
  }
  Intervals result;
  // What experts and scans take one program's rows say: of another all is guessed.
  std::vector<double> off_of_experts, off_of_scans;
  for (const auto& [program, list] : rows) {
    std::vector<double> off;
    ProgramIntervals& p = result.programs[program];
    for (const Row& row : list) {
      (row.scans ? off_of_scans : off).push_back(row.off_left_out);
      if (!row.scans && row.kind == of_experts) off_of_experts.push_back(row.off_left_out);
      if (!row.scans) p.mean_error_left_out += row.error_left_out;
    }
    p.mean_error_left_out /= static_cast<double>(off.size());
    p.half_width_left_out = half_width(off);
    result.unknown_half_width = std::max(result.unknown_half_width, p.half_width_left_out);
  }
  if (!off_of_experts.empty()) result.unknown_expert_half_width = half_width(off_of_experts);
  if (!off_of_scans.empty()) result.unknown_scan_half_width = half_width(off_of_scans);
  for (const auto& [program, list] : rows) {
    ProgramIntervals& p = result.programs[program];
    double widest = 0;  // of the others
    for (const auto& [name, other] : result.programs)
      if (name != program) widest = std::max(widest, other.half_width_left_out);
    Rows all;
    std::set<std::string> groups, on;
    std::vector<double> off_left_out;
    for (const Row& row : list) {
      all.push_back(&row);
      groups.insert(row.group);
      on.insert(row.on);
      // The others were measured with neither, and cannot hold them.
      if (!row.scans && row.kind != of_experts) off_left_out.push_back(row.off_left_out);
      for (const auto& [range, size] :
           {std::pair{&p.gpus, row.sizes[0]}, {&p.parameters, row.sizes[1]}, {&p.seq_len, row.sizes[2]}}) {
        (*range)[0] = (*range)[0] == 0 ? size : std::min((*range)[0], size);
        (*range)[1] = std::max((*range)[1], size);
      }
      p.others += !row.fitted;
      if (!row.fitted) p.mean_error += row.error;
    }
    p.rows = list.size();
    p.mean_error /= static_cast<double>(std::max<std::size_t>(1, p.others));
    p.measured_on.assign(on.begin(), on.end());
    p.inside_left_out = part_inside(off_left_out, widest);
    p.half_width = widths_of(all);
    const auto far = far_rows(all, groups);
    p.far_half_width = far_width(far, "", p.half_width, result.unknown_half_width);
    double inside = 0;
    for (const std::string& group : groups) {
      const Rows rest = without(all, group);
      const auto widths = widths_of(rest);
      const double far_off = far_width(far, group, widths, result.unknown_half_width);
      for (const Row* row : all) {
        if (row->group != group || row->fitted) continue;
        const double own = widths[static_cast<std::size_t>(row->kind)];
        inside += row->off <= (rest.empty() || is_far(*row, rest) || own == 0 ? far_off : own);
      }
    }
    p.inside = inside / static_cast<double>(std::max<std::size_t>(1, p.others));
  }
  return result;
}

std::string interval_lines(const Intervals& intervals) {
  std::string text;
  const auto line = [&](const std::string& program, const char* kind, double width) {
    if (width <= 0) return;
    text += fmt::format("software.{}.{}low = {:.4g}\nsoftware.{}.{}high = {:.4g}\n", program, kind,
                        std::exp(-width), program, kind, std::exp(width));
  };
  for (const auto& [name, p] : intervals.programs)
    for (const std::string& program :
         name == "torchtitan" ? std::vector<std::string>{name, "torchtitan-eager"} : std::vector{name}) {
      line(program, "", p.half_width[0]);
      line(program, "nodes_", p.half_width[1]);
      line(program, "experts_", p.half_width[2]);
      line(program, "far_", p.far_half_width);
      text +=
          fmt::format("software.{}.measured_on = [\"{}\"]\n", program, fmt::join(p.measured_on, "\", \""));
      for (const auto& [key, range] :
           {std::pair{"gpus", p.gpus}, {"parameters", p.parameters}, {"seq_len", p.seq_len}})
        text += fmt::format("software.{}.measured_{} = [{}]\n", program, key, fmt::join(range, ", "));
    }
  return text;
}

std::vector<std::string> interval_scores(const Intervals& intervals) {
  std::vector<std::string> lines;
  for (const auto& [name, p] : intervals.programs)
    lines.push_back(fmt::format(
        "{:<18} {:>4} others  mean {:5.1f}%  inside {:3.0f}%   left out: mean {:5.1f}%  80% within {:5.1f}%  "
        "inside {:3.0f}%",
        name, p.others, 100 * p.mean_error, 100 * p.inside, 100 * p.mean_error_left_out,
        100 * std::expm1(p.half_width_left_out), 100 * p.inside_left_out));
  return lines;
}

}  // namespace echelon::published
