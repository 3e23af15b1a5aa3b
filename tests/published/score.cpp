#include "published/score.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/median.h"
#include "plan/footprint.h"
#include "plan/step_model.h"

namespace echelon::published {
namespace {

// Equal ones share the mean of their ranks.
std::vector<double> ranks_of(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (std::size_t i = 0, end = 0; i < order.size(); i = end) {
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    for (std::size_t k = i; k < end; ++k) ranks[order[k]] = static_cast<double>(i + end - 1) / 2;
  }
  return ranks;
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto n = static_cast<double>(a.size());
  const double ma = std::accumulate(a.begin(), a.end(), 0.0) / n,
               mb = std::accumulate(b.begin(), b.end(), 0.0) / n;
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - ma) * (b[i] - mb);
    aa += (a[i] - ma) * (a[i] - ma);
    bb += (b[i] - mb) * (b[i] - mb);
  }
  return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
}

std::string configuration_of(const Point& p) {
  const Plan& plan = p.work.plan;
  const Software& s = p.work.software;
  return fmt::format("{} {} {} {} {} {} {}", p.work.machine.name, precision_name(p.work.precision),
                     plan.seq_len, plan.global_batch, summary(p.plans.front()), s.sends_tokens_once,
                     s.overlaps_experts);
}

}  // namespace

Prediction predict(const Point& point) {
  StepModel model(point.work);
  Prediction best;
  for (Plan c : point.plans) {
    c.model = point.work.plan.model;
    c.seq_len = point.work.plan.seq_len;
    c.global_batch = point.work.plan.global_batch;
    if (!model.schedule_problem(c).empty()) continue;
    const Estimate e = model.estimate(c);
    const double offloaded = point.offloaded_layers *
                             saved_bytes(model.workload(), c, c.recompute.of(0)).layer.front() *
                             (1 + model.workload().software.fragmentation);
    const double bytes = static_cast<double>(e.memory.total()) - offloaded;
    const bool fits = bytes <= model.usable_bytes();
    const bool better =
        best.seconds == 0 || (fits && !best.fits) || (fits == best.fits && e.seconds < best.seconds);
    if (better) best = {e.seconds, e.low, e.high, bytes, fits};
  }
  return best;
}

Score score(const Table& table, const std::vector<Prediction>& predictions, bool fitted) {
  Score s;
  std::vector<double> errors;
  std::size_t inside = 0;
  for (std::size_t i = 0; i < table.points.size(); ++i) {
    const Point& p = table.points[i];
    if (p.fitted != fitted || p.seconds <= 0 || predictions[i].seconds <= 0) continue;
    const double relative = predictions[i].seconds / p.seconds - 1;
    errors.push_back(std::abs(relative));
    s.bias += relative;
    inside += predictions[i].low <= p.seconds && p.seconds <= predictions[i].high;
  }
  s.rows = errors.size();
  if (errors.empty()) return s;
  const auto n = static_cast<double>(errors.size());
  s.bias /= n;
  s.mean_error = std::accumulate(errors.begin(), errors.end(), 0.0) / n;
  s.inside = static_cast<double>(inside) / n;
  s.median_error = upper_median(errors);
  std::sort(errors.begin(), errors.end());
  s.p90_error = errors[errors.size() * 9 / 10];
  return s;
}

std::vector<GroupChoice> choices(const Table& table, const std::vector<Prediction>& predictions) {
  std::map<std::string, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < table.points.size(); ++i)
    if (table.points[i].seconds > 0 && predictions[i].seconds > 0 && !table.points[i].group.empty())
      groups[table.points[i].group].push_back(i);
  std::vector<GroupChoice> all;
  for (const auto& [name, rows] : groups) {
    if (rows.size() < 5) continue;
    const auto of_token = [&](std::size_t i, double seconds) {
      const Plan& plan = table.points[i].work.plan;
      return seconds / static_cast<double>(plan.global_batch * plan.seq_len);
    };
    std::vector<double> measured, predicted;
    std::map<std::string, std::vector<std::size_t>> configurations;
    for (std::size_t i : rows) {
      measured.push_back(of_token(i, table.points[i].seconds));
      predicted.push_back(of_token(i, predictions[i].seconds));
      configurations[configuration_of(table.points[i])].push_back(i);
    }
    GroupChoice one{name, 0, 0, correlation(ranks_of(measured), ranks_of(predicted)), 0};
    // A configuration that was measured several times is one, with the medians. Chosen is what is predicted
    // to fit, where anything is.
    const auto fits = [&](std::size_t i) { return predictions[i].fits; };
    const bool any_fits = std::any_of(rows.begin(), rows.end(), fits);
    double least_predicted = 1e300, least = 1e300, of_chosen = 0;
    for (const auto& [configuration, runs] : configurations) {
      std::vector<double> its_measured, its_predicted;
      for (std::size_t i : runs) {
        its_measured.push_back(of_token(i, table.points[i].seconds));
        its_predicted.push_back(of_token(i, predictions[i].seconds));
      }
      if (const double its = upper_median(its_measured); its < least) least = its, one.best = runs.front();
      if (any_fits && std::none_of(runs.begin(), runs.end(), fits)) continue;
      if (const double its = upper_median(its_predicted); its < least_predicted)
        least_predicted = its, of_chosen = upper_median(its_measured), one.chosen = runs.front();
    }
    one.regret = of_chosen / least - 1;
    all.push_back(one);
  }
  return all;
}

Choice choice(const Table& table, const std::vector<Prediction>& predictions) {
  std::vector<double> correlations, regrets;
  for (const GroupChoice& one : choices(table, predictions)) {
    correlations.push_back(one.correlation);
    regrets.push_back(one.regret);
  }
  if (regrets.empty()) return {};
  std::sort(regrets.begin(), regrets.end());
  return {regrets.size(),
          upper_median(correlations),
          upper_median(regrets),
          std::accumulate(regrets.begin(), regrets.end(), 0.0) / static_cast<double>(regrets.size()),
          regrets[regrets.size() * 9 / 10],
          regrets.back()};
}

Fitting fitting(const Table& table, const std::vector<Prediction>& predictions) {
  Fitting f;
  for (std::size_t i = 0; i < table.points.size(); ++i) {
    const bool fits = predictions[i].fits;
    if (predictions[i].memory_bytes == 0) continue;  // not priced
    if (table.points[i].out_of_memory)
      ++f.failed, f.missed += fits;
    else
      ++f.ran, f.rejected += !fits;
  }
  return f;
}

std::vector<std::string> score_lines(const Table& table, const std::vector<Prediction>& predictions) {
  std::vector<std::string> lines;
  for (bool fitted : {true, false}) {
    const Score s = score(table, predictions, fitted);
    if (s.rows > 0)
      lines.push_back(fmt::format(
          "{:<18} {:<8} {:>4} rows  mean {:5.1f}%  median {:5.1f}%  p90 {:5.1f}%  bias {:+5.1f}%  "
          "inside {:3.0f}%",
          table.name, fitted ? "fitted" : "others", s.rows, 100 * s.mean_error, 100 * s.median_error,
          100 * s.p90_error, 100 * s.bias, 100 * s.inside));
  }
  const Choice c = choice(table, predictions);
  if (c.groups > 0)
    lines.push_back(fmt::format(
        "{:<18} {} groups: rank correlation {:.3f}, regret median {:.1f}%, mean {:.1f}%, p90 {:.1f}%, "
        "worst {:.1f}%",
        table.name, c.groups, c.correlation, 100 * c.median_regret, 100 * c.mean_regret, 100 * c.p90_regret,
        100 * c.worst_regret));
  const Fitting f = fitting(table, predictions);
  std::string line = fmt::format("{:<18} memory: {} of {} runs rejected", table.name, f.rejected, f.ran);
  if (f.failed > 0) line += fmt::format(", {} of {} out of memory accepted", f.missed, f.failed);
  lines.push_back(line);
  return lines;
}

}  // namespace echelon::published
