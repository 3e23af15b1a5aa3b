#include "plan/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "base/error.h"
#include "base/median.h"
#include "plan/least_squares.h"
#include "plan/op_seconds.h"
#include "plan/step_model.h"

namespace echelon {
namespace {

// Standard errors of predicted times, of single operations and of steps. Programs all of whose numbers are
// fitted are off by 2 to 11%, so a few measured steps must not move their numbers further than such errors
// justify.
constexpr double operation_error = 0.03, step_error = 0.08;
constexpr std::size_t fewest_to_leave_out = 4, most_to_leave_out = 20;

// A machine's number that is fitted: its member, the standard deviation of its logarithm, and its bounds.
struct MachineKnob {
  std::function<double&(Machine&)> of;
  double spread, least, most;
};

template <class Knobs>
Machine moved(Machine m, const Knobs& knobs, const std::vector<double>& u) {
  for (std::size_t k = 0; k < knobs.size(); ++k) {
    double& value = knobs[k].of(m);
    // 0 has no logarithm: such a number starts at its lower bound.
    value = std::clamp(std::max(value, knobs[k].least) * std::exp(u[k] * knobs[k].spread), knobs[k].least,
                       knobs[k].most);
  }
  return m;
}

// The negative log-likelihood of the machine and the rows, as in most_likely().
template <class Row, class Price>
double unlikeliness(const Machine& start, const Machine& machine, const std::vector<MachineKnob>& knobs,
                    const std::vector<Row>& rows, const Price& price) {
  Machine from = start, to = machine;
  std::vector<double> u, residuals;
  for (const MachineKnob& knob : knobs)
    u.push_back(std::log(knob.of(to) / std::max(knob.of(from), knob.least)) / knob.spread);
  for (const Row& row : rows) residuals.push_back(std::log(price(machine, row) / row.seconds));
  return loss_of(residuals, u, operation_error);
}

// Fits a machine to the rows, and prices each row on it; and on a machine that was fitted without the row's
// part, if there are enough parts.
template <class Row, class Price, class PartOf>
Machine fit_rows(const Machine& start, const std::vector<MachineKnob>& knobs, const std::vector<Row>& rows,
                 const Price& price, const PartOf& part_of, std::vector<FitRow>& into) {
  const auto fitted_without = [&](const std::string& part) {
    const Residuals residuals = [&](const std::vector<double>& u) {
      const Machine m = moved(start, knobs, u);
      std::vector<double> r;
      for (const Row& row : rows)
        if (part.empty() || part_of(row) != part) r.push_back(std::log(price(m, row) / row.seconds));
      return r;
    };
    return moved(start, knobs, most_likely(residuals, knobs.size(), operation_error));
  };
  const Machine machine = fitted_without("");
  std::set<std::string> parts;
  for (const Row& row : rows) parts.insert(part_of(row));
  std::map<std::string, Machine> without;
  if (parts.size() >= fewest_to_leave_out)
    for (const std::string& part : parts) {
      if (without.size() == most_to_leave_out) break;
      without.emplace(part, fitted_without(part));
    }
  for (const Row& row : rows) {
    FitRow& one = into.emplace_back();
    one.measured_seconds = row.seconds;
    one.before_seconds = price(start, row);
    one.fitted_seconds = price(machine, row);
    if (const auto found = without.find(part_of(row)); found != without.end())
      one.left_out_seconds = price(found->second, row);
  }
  return machine;
}

Software plain_program() {
  Software plain;
  plain.name = "measured";
  return plain;
}

double product_seconds(const Machine& machine, const MeasuredProduct& p) {
  const Software plain = plain_program();
  return OpSeconds(machine, plain, p.precision).product(p.rows, p.depth, p.cols, p.count);
}

double collective_seconds(const Machine& machine, const MeasuredCollective& c) {
  const Software plain = plain_program();
  Machine m = machine;
  // Ranks of each host, rounded up.
  m.tiers.front().ranks = std::max<std::int64_t>(1, (c.ranks + c.hosts - 1) / c.hosts);
  return OpSeconds(m, plain, Precision::bf16).collective(c.verb, c.bytes, {c.ranks});
}

// RequestError for a rate that the machine cannot reach; `question` asks what may be wrong.
void check_peak(const Machine& machine, Precision precision, double flops_per_second,
                const std::string& where, const char* question) {
  constexpr double boost = 1.1;  // of clock rates beyond the data sheet's
  const double plain = machine.peak(precision),
               peak = precision == Precision::f32 ? std::max(plain, machine.peak_tf32) : plain;
  if (peak > 0 && flops_per_second > boost * peak)
    refuse("{}: {:.4g} TFLOP/s are above the peak of {}, {:.4g} in {}; {}", where, flops_per_second / 1e12,
           machine.name, peak / 1e12, precision_name(precision), question);
}

// RequestError for a product so slow that its time must be in another unit. Products that could take next to
// no time are not checked: most of their time is the launch.
void check_slowness(const Machine& machine, const MeasuredProduct& p) {
  constexpr double far = 1000, next_to_none = 1e-5;  // seconds
  const double peak = machine.peak(p.precision),
               elements = p.rows * p.depth + p.depth * p.cols + p.rows * p.cols;
  if (peak <= 0 || machine.memory_bandwidth <= 0) return;
  const double least =
                   std::max(2 * p.rows * p.depth * p.cols / peak, 2 * elements / machine.memory_bandwidth),
               each = p.seconds / p.count;
  if (least < next_to_none || each <= far * least) return;
  refuse(
      "{}: {:.4g} s a product are {:.4g} times what {} needs at least; is the time in the unit that its "
      "column says?",
      p.where, each, each / least, machine.name);
}

std::vector<MachineKnob> product_knobs(const std::vector<MeasuredProduct>& products) {
  std::vector<MachineKnob> knobs{
      {[](Machine& m) -> double& { return m.gemm_half_depth; }, 1, 1, 5000},
      {[](Machine& m) -> double& { return m.gemm_wave_rounding; }, 0.7, 0.02, 1},
      {[](Machine& m) -> double& { return m.gemm_medium_tile; }, 0.2, 0.1, 1},
      {[](Machine& m) -> double& { return m.gemm_small_tile; }, 0.3, 0.1, 1},
      {[](Machine& m) -> double& { return m.memory_efficiency; }, 0.2, 0.1, 1},
      {[](Machine& m) -> double& { return m.launch_seconds; }, 1, 1e-7, 1e-3},
  };
  std::set<Precision> measured;
  for (const MeasuredProduct& p : products) measured.insert(p.precision);
  if (measured.contains(Precision::bf16) || measured.contains(Precision::f32))
    knobs.push_back({[](Machine& m) -> double& { return m.gemm_efficiency; }, 0.5, 1e-3, 1});
  if (measured.contains(Precision::fp8))
    knobs.push_back({[](Machine& m) -> double& { return m.gemm_fp8_efficiency; }, 0.5, 1e-3, 1});
  if (measured.contains(Precision::fp4))
    knobs.push_back({[](Machine& m) -> double& { return m.gemm_fp4_efficiency; }, 0.5, 1e-3, 1});
  return knobs;
}

std::vector<MachineKnob> link_knobs(bool inside, bool across) {
  std::vector<MachineKnob> knobs{
      {[](Machine& m) -> double& { return m.collective_seconds; }, 0.7, 1e-7, 1e-2}};
  if (inside) {
    knobs.push_back({[](Machine& m) -> double& { return m.tiers.front().bandwidth; }, 0.7, 1e6, 1e15});
    knobs.push_back({[](Machine& m) -> double& { return m.tiers.front().latency_seconds; }, 0.7, 1e-8, 1});
    knobs.push_back({[](Machine& m) -> double& { return m.small_group_loss; }, 0.7, 1e-3, 10});
  }
  if (across) {
    knobs.push_back({[](Machine& m) -> double& { return m.tiers.back().bandwidth; }, 0.7, 1e6, 1e15});
    knobs.push_back({[](Machine& m) -> double& { return m.tiers.back().latency_seconds; }, 0.7, 1e-8, 1});
  }
  return knobs;
}

// Widens the intervals so that they contain the left-out steps, except for the lowest and the highest tenth.
void widen(Software& s, const std::vector<FitRow>& steps) {
  std::vector<double> ratios;
  for (const FitRow& row : steps)
    if (row.left_out_seconds) ratios.push_back(row.measured_seconds / *row.left_out_seconds);
  if (ratios.empty()) return;
  std::sort(ratios.begin(), ratios.end());
  const std::size_t out = ratios.size() / 10;
  const double low = ratios[out], high = ratios[ratios.size() - 1 - out];
  for (double Software::*one :
       {&Software::low, &Software::nodes_low, &Software::experts_low, &Software::far_low})
    if (s.*one > 0) s.*one = std::min(s.*one, low);
  for (double Software::*one :
       {&Software::high, &Software::nodes_high, &Software::experts_high, &Software::far_high})
    if (s.*one > 0) s.*one = std::max(s.*one, high);
}

// Adds these steps to what was measured of the program.
void add_measured(Software& s, const Machine& machine, const std::vector<MeasuredStep>& steps) {
  const auto extend = [](std::optional<std::vector<std::int64_t>>& range, std::int64_t value) {
    if (!range) return;
    range->front() = std::min(range->front(), value);
    range->back() = std::max(range->back(), value);
  };
  for (const MeasuredStep& step : steps) {
    const std::string on = fmt::format("{} {}", machine.name, precision_name(step.precision));
    if (s.measured_on && std::find(s.measured_on->begin(), s.measured_on->end(), on) == s.measured_on->end())
      s.measured_on->push_back(on);
    extend(s.measured_gpus, step.plan.mesh.num_ranks());
    extend(s.measured_parameters, num_parameters(step.plan.model));
    extend(s.measured_seq_len, step.plan.seq_len);
  }
}

// Below this a number counts as 0.
constexpr double floor_of(double most) { return 1e-4 * most; }

double moved_value(const Knob& knob, double value, double u) {
  const double begin = std::max(value, floor_of(knob.most));
  return u == 0 ? value : std::clamp(begin * std::exp(u * knob.spread), knob.least, knob.most);
}

Software moved(Software s, const std::vector<Knob>& knobs, const std::vector<double>& u) {
  for (std::size_t k = 0; k < knobs.size(); ++k)
    s.*knobs[k].member = moved_value(knobs[k], s.*knobs[k].member, u[k]);
  return s;
}

// With default values, which apply to numbers that too few programs have.
std::vector<Knob> all_knobs() {
  return {{"product_efficiency", &Software::product_efficiency, 0.2, 1.1, 1},
          {"elementwise_passes", &Software::elementwise_passes, 0.3, 10, 1.5},
          {"attention_efficiency", &Software::attention_efficiency, 0.1, 1.5, 0.9},
          {"launch_seconds", &Software::launch_seconds, 0, 1e-3, 2e-5},
          {"collective_launch_seconds", &Software::collective_launch_seconds, 0, 1e-2, 5e-5},
          {"tensor_overlap", &Software::tensor_overlap, 0, 0.95, 0.1},
          {"network_efficiency", &Software::network_efficiency, 0.05, 1.5, 1},
          {"step_seconds", &Software::step_seconds, 0, 1, 5e-3},
          {"message_seconds", &Software::message_seconds, 0, 0.05, 5e-4},
          {"optimizer_passes", &Software::optimizer_passes, 0.3, 10, 1},
          {"straggling", &Software::straggling, 0, 0.3, 2e-3},
          {"overlap_slowdown", &Software::overlap_slowdown, 1, 3, 1.1},
          {"expert_efficiency", &Software::expert_efficiency, 0.05, 1.5, 0.7},
          {"expert_passes", &Software::expert_passes, 0.1, 20, 1},
          {"expert_launch_seconds", &Software::expert_launch_seconds, 0, 0.05, 1e-3},
          {"expert_pair_seconds", &Software::expert_pair_seconds, 0, 0.05, 2e-3}};
}

std::vector<double> seconds_of(const Software& software, const Machine& machine,
                               const std::vector<MeasuredStep>& steps) {
  std::vector<double> seconds;
  for (const MeasuredStep& step : steps) seconds.push_back(priced_seconds(software, machine, step));
  return seconds;
}

Software fitted(const Software& start, const std::vector<Knob>& all, const Machine& machine,
                const std::vector<MeasuredStep>& steps) {
  const bool has_experts = std::any_of(steps.begin(), steps.end(), [](const MeasuredStep& step) {
    return step.plan.model.experts != Experts::none;
  });
  std::vector<Knob> knobs = all;
  // Only one program's scan efficiency is known.
  constexpr double unknown_spread = 1;
  if (std::any_of(steps.begin(), steps.end(),
                  [](const MeasuredStep& step) { return step.plan.model.num_state_space_layers() > 0; }))
    knobs.push_back({"scan_efficiency", &Software::scan_efficiency, 0.05, 1.5, 1, unknown_spread});
  if (!has_experts) std::erase_if(knobs, [](const Knob& knob) { return knob.name.starts_with("expert_"); });
  return most_likely_numbers(start, knobs, [&](const Software& s) {
    std::vector<double> r = seconds_of(s, machine, steps);
    for (std::size_t i = 0; i < r.size(); ++i) r[i] = std::log(r[i] / steps[i].seconds);
    return r;
  });
}

}  // namespace

double mean_error(const std::vector<FitRow>& rows, double FitRow::*predicted) {
  double sum = 0;
  for (const FitRow& row : rows) sum += std::abs(row.*predicted / row.measured_seconds - 1);
  return rows.empty() ? 0 : sum / static_cast<double>(rows.size());
}

double mean_left_out_error(const std::vector<FitRow>& rows) {
  double sum = 0, count = 0;
  for (const FitRow& row : rows)
    if (row.left_out_seconds) sum += std::abs(*row.left_out_seconds / row.measured_seconds - 1), ++count;
  return count > 0 ? sum / count : 0;
}

MachineFit fit_machine(const Machine& start, const std::vector<MeasuredProduct>& products,
                       const std::vector<MeasuredCollective>& collectives) {
  MachineFit fit{start, {}, {}};
  for (const MeasuredProduct& p : products) {
    check_peak(start, p.precision, 2 * p.rows * p.depth * p.cols * p.count / p.seconds, p.where,
               "is the time in the unit that its column says?");
    check_slowness(start, p);
  }
  if (!products.empty()) {
    fit.machine = fit_rows(
        fit.machine, product_knobs(products), products, product_seconds,
        [](const MeasuredProduct& p) { return fmt::format("{}x{}x{}", p.rows, p.depth, p.cols); },
        fit.products);
    for (std::size_t i = 0; i < products.size(); ++i) {
      const MeasuredProduct& p = products[i];
      fit.products[i].what =
          fmt::format("{} x {} by {} x {}{}, {}", p.rows, p.depth, p.depth, p.cols,
                      p.count > 1 ? fmt::format(", {} of them", p.count) : "", precision_name(p.precision));
    }
  }
  if (collectives.empty()) return fit;
  bool inside = false, across = false;
  for (const MeasuredCollective& c : collectives) {
    if (c.ranks % c.hosts != 0)
      refuse("{}: {} ranks on {} hosts: give measurements of hosts that have as many ranks each", c.where,
             c.ranks, c.hosts);
    if (c.ranks > start.tiers.back().ranks)
      refuse("{}: {} ranks, and machine {} joins {}", c.where, c.ranks, start.name, start.tiers.back().ranks);
    if (c.hosts > 1 && start.tiers.size() < 2)
      refuse("{}: is of {} hosts, and machine {} has one [[tier]]; give it a second", c.where, c.hosts,
             start.name);
    inside |= c.ranks > c.hosts, across |= c.hosts > 1;
  }
  const std::vector<MachineKnob> knobs = link_knobs(inside, across);
  const auto fit_links = [&](const Machine& from, std::vector<FitRow>& rows) {
    return fit_rows(
        from, knobs, collectives, collective_seconds,
        [](const MeasuredCollective& c) { return fmt::format("{}", c.bytes); }, rows);
  };
  const Machine before = fit.machine;
  fit.machine = fit_links(before, fit.collectives);
  if (inside && across) {
    // Also tries the opposite setting of whole_rings for collectives over nodes, and takes it if it is
    // likelier. A setting is not taken if it makes links between nodes much faster than the machine's: these
    // would compensate for rings that use all links at once.
    constexpr double beyond = 1.25;
    const auto is_too_fast = [&](const Machine& m) {
      return m.tiers.back().bandwidth > beyond * before.tiers.back().bandwidth;
    };
    Machine turned = before;
    turned.whole_rings = !turned.whole_rings;
    std::vector<FitRow> rows;
    const Machine other = fit_links(turned, rows);
    const bool is_likelier = unlikeliness(turned, other, knobs, collectives, collective_seconds) <
                             unlikeliness(before, fit.machine, knobs, collectives, collective_seconds);
    if (is_too_fast(fit.machine) != is_too_fast(other) ? is_too_fast(fit.machine) : is_likelier) {
      fit.machine = other;
      fit.collectives = std::move(rows);
      for (std::size_t i = 0; i < collectives.size(); ++i)
        fit.collectives[i].before_seconds = collective_seconds(before, collectives[i]);
    }
  }
  for (std::size_t i = 0; i < collectives.size(); ++i) {
    const MeasuredCollective& c = collectives[i];
    fit.collectives[i].what = fmt::format("{} of {:.4g} MB, {} ranks{}", verb_name(c.verb), c.bytes / 1e6,
                                          c.ranks, c.hosts > 1 ? fmt::format(" on {} hosts", c.hosts) : "");
  }
  return fit;
}

std::vector<Knob> usual_numbers(const std::vector<std::string>& without) {
  std::vector<Software> programs;
  for (const std::string& name : software_preset_names()) {
    Software s = load_software(name);
    // A version has the numbers of its program.
    if (!s.version_of.empty()) continue;
    if (s.is_this_trainer || std::find(without.begin(), without.end(), name) != without.end()) continue;
    programs.push_back(std::move(s));
  }
  std::vector<Knob> knobs = all_knobs();
  for (Knob& knob : knobs) {
    // 0 means that it was not examined, since every program has some of it: such values are left out.
    double sum = 0, squares = 0, n = 0;
    for (const Software& s : programs)
      if (const double value = s.*knob.member; value > floor_of(knob.most))
        sum += std::log(value), squares += std::log(value) * std::log(value), ++n;
    // A few programs may agree by chance, so the spread has a lower bound.
    constexpr double fewest = 3, least_spread = 0.1, unknown_spread = 1;
    if (n < fewest) {
      knob.spread = unknown_spread;
      continue;
    }
    knob.middle = std::exp(sum / n);
    knob.spread = std::max(least_spread, std::sqrt(std::max(0.0, squares / n - sum / n * sum / n)));
  }
  return knobs;
}

Software with_usual_numbers(Software s, const std::vector<Knob>& knobs) {
  for (const Knob& knob : knobs) s.*knob.member = knob.middle;
  return s;
}

Software most_likely_numbers(const Software& start, const std::vector<Knob>& knobs,
                             const StepErrors& errors) {
  const Residuals residuals = [&](const std::vector<double>& u) { return errors(moved(start, knobs, u)); };
  return moved(start, knobs, most_likely(residuals, knobs.size(), step_error));
}

StepChoice most_telling_steps(const Software& start, const std::vector<Knob>& knobs, const StepErrors& logs,
                              const std::vector<std::size_t>& measured, std::size_t count) {
  // covariance[i][j] of the logarithms of the times of steps i and j: each number adds the product of its
  // slopes, a slope being the change over one standard deviation of the number (central difference).
  std::vector<std::vector<double>> covariance;
  for (std::size_t k = 0; k < knobs.size(); ++k) {
    std::vector<double> u(knobs.size(), 0.0);
    u[k] = 1;
    std::vector<double> slope = logs(moved(start, knobs, u));
    u[k] = -1;
    const std::vector<double> down = logs(moved(start, knobs, u));
    covariance.resize(slope.size(), std::vector<double>(slope.size(), 0.0));
    for (std::size_t i = 0; i < slope.size(); ++i) slope[i] = (slope[i] - down[i]) / 2;
    for (std::size_t i = 0; i < slope.size(); ++i)
      for (std::size_t j = 0; j < slope.size(); ++j) covariance[i][j] += slope[i] * slope[j];
  }
  const std::size_t steps = covariance.size();
  constexpr double off = step_error * step_error;
  std::vector<bool> is_known(steps, false);
  // A measurement reduces the variances of the other steps by what they have in common with it.
  const auto measure = [&](std::size_t step) {
    const std::vector<double> common = covariance[step];
    is_known[step] = true;
    for (std::size_t i = 0; i < steps; ++i)
      for (std::size_t j = 0; j < steps; ++j)
        covariance[i][j] -= common[i] * common[j] / (common[step] + off);
  };
  const auto open = [&] {
    double sum = 0;
    for (std::size_t i = 0; i < steps; ++i) sum += std::max(0.0, covariance[i][i]);
    return steps > 0 ? std::sqrt(sum / static_cast<double>(steps)) : 0;
  };
  for (std::size_t step : measured) measure(step);
  StepChoice choice{open(), {}};
  while (choice.steps.size() < count) {
    std::size_t best = steps;
    double most = -1;
    for (std::size_t i = 0; i < steps; ++i) {
      if (is_known[i]) continue;
      double told = 0;
      for (double common : covariance[i]) told += common * common;
      told /= covariance[i][i] + off;
      if (told > most) most = told, best = i;
    }
    if (best == steps) break;
    measure(best);
    choice.steps.push_back({best, open()});
  }
  return choice;
}

static Workload work_of(const Software& software, const Machine& machine, const MeasuredStep& step) {
  Workload work;
  work.plan = step.plan;
  work.precision = step.precision;
  work.machine = machine;
  work.software = software;
  return work;
}

static Estimate priced(const Software& software, const Machine& machine, const MeasuredStep& step) {
  StepModel model(work_of(software, machine, step));
  if (const std::string problem = model.schedule_problem(step.plan); !problem.empty())
    refuse("{}: {}", step.where, problem);
  return model.estimate_seconds(step.plan);
}

// Fields whose defaults need the most memory.
static std::string fields_in_doubt(const Plan& plan) {
  std::vector<std::string> fields;
  if (plan.zero < 3 && plan.mesh.dp_cp_size() > 1) fields.push_back("zero");
  if (plan.recompute == Recompute::none) fields.push_back("recompute");
  if (plan.offload == Offload::none) fields.push_back("offload");
  if (plan.micro_batch > 1) fields.push_back("micro-batch");
  fields.push_back("the number of devices");
  std::string text = fields.front();
  for (std::size_t i = 1; i < fields.size(); ++i)
    text += (i + 1 < fields.size() ? ", " : " and ") + fields[i];
  return text;
}

std::vector<TooLargeStep> leave_out_too_large(const Software& software, const Machine& machine,
                                              std::vector<MeasuredStep>& steps) {
  constexpr double far = 1.5;
  std::vector<TooLargeStep> found;
  std::erase_if(steps, [&](const MeasuredStep& step) {
    StepModel model(work_of(software, machine, step));
    if (!model.schedule_problem(step.plan).empty()) return false;  // refused when it is priced
    const std::vector<double> ranks = model.rank_bytes(step.plan);
    const double bytes = *std::max_element(ranks.begin(), ranks.end());
    if (bytes <= model.usable_bytes()) return false;
    const bool is_left_out = bytes > far * machine.memory_bytes;
    found.push_back(
        {is_left_out, fmt::format("{}: is counted to need {:.1f} GB of {:.1f} GB of {}{}; are its {} right?",
                                  step.where, bytes / 1e9, machine.memory_bytes / 1e9, machine.name,
                                  is_left_out ? ", and is left out" : "", fields_in_doubt(step.plan))});
    return is_left_out;
  });
  return found;
}

double priced_seconds(const Software& software, const Machine& machine, const MeasuredStep& step) {
  return priced(software, machine, step).seconds;
}

SoftwareFit fit_software(const Software& start, const std::vector<Knob>& knobs, const Machine& machine,
                         const std::vector<MeasuredStep>& steps) {
  for (const MeasuredStep& step : steps) {
    const Estimate e = priced(start, machine, step);
    // A job of small layers may be far slower than priced, but not by so much.
    constexpr double far = 1000, next_to_none = 1e-3;  // seconds
    if (step.seconds > far * std::max(e.seconds, next_to_none))
      refuse("{}: {:.4g} s a step are {:.4g} times what {} says; are they seconds?", step.where, step.seconds,
             step.seconds / e.seconds, start.name);
    check_peak(machine, step.precision, 1e12 * e.model_tflops_per_gpu * e.seconds / step.seconds, step.where,
               "are its seconds, its batch and its number of devices right?");
  }
  SoftwareFit fit{fitted(start, knobs, machine, steps), {}};
  const std::vector<double> before = seconds_of(start, machine, steps),
                            after = seconds_of(fit.software, machine, steps);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    fit.steps.push_back({fmt::format("{}: {}", steps[i].where, summary(steps[i].plan)), steps[i].seconds,
                         before[i], after[i]});
    if (steps.size() < fewest_to_leave_out || i >= most_to_leave_out) continue;
    std::vector<MeasuredStep> others = steps;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    fit.steps.back().left_out_seconds =
        priced_seconds(fitted(start, knobs, machine, others), machine, steps[i]);
  }
  widen(fit.software, fit.steps);
  // With fewer steps it is unknown how far off predictions for others are.
  if (steps.size() >= fewest_to_leave_out) add_measured(fit.software, machine, steps);
  return fit;
}

}  // namespace echelon
