#include "apps/plan_sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/flag_values.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "draw/chart.h"
#include "plan/explain.h"

namespace echelon {
namespace {

constexpr const char* legal_sweeps = "legal: gpus=, seq-len= or global-batch=, then A..B or A,B,C";

std::vector<std::int64_t> sweep_values(const std::string& text) {
  const std::string flag = "--sweep";
  std::vector<std::int64_t> values;
  const auto dots = text.find("..");
  if (text.empty() || text.starts_with(",") || text.ends_with(",") || text.ends_with(".") ||
      text.starts_with(".") || text.find(",,") != std::string::npos)
    refuse("--sweep {}: a value is missing; {}", text, legal_sweeps);
  if (dots != std::string::npos) {
    const auto first = parse_number<std::int64_t>(flag, text.substr(0, dots)),
               last = parse_number<std::int64_t>(flag, text.substr(dots + 2));
    constexpr std::int64_t most = 1'000'000'000;
    if (first < 1 || last < first || last > most)
      refuse("--sweep {}: must go from at least 1 upwards, to at most {}", text, most);
    for (std::int64_t v = first; v <= last; v *= 2) values.push_back(v);
  } else {
    std::istringstream in(text);
    for (std::string one; std::getline(in, one, ',');)
      values.push_back(parse_number<std::int64_t>(flag, one));
  }
  return values;
}

// Tokens per second and device, if its step took this long.
double per_second(const Estimate& e, double step_seconds) {
  return e.tokens_per_second_per_gpu * e.seconds / step_seconds;
}

}  // namespace

bool Sweep::any_fits() const {
  return std::any_of(points.begin(), points.end(), [](const SweepPoint& p) { return p.best.has_value(); });
}

Sweep run_sweep(const SearchRequest& request, const std::string& text,
                const std::optional<RunRequest>& life) {
  const auto equals = text.find('=');
  Sweep sweep;
  sweep.life = life;
  sweep.key = text.substr(0, equals);
  if (equals == std::string::npos ||
      (sweep.key != "gpus" && sweep.key != "seq-len" && sweep.key != "global-batch"))
    refuse("--sweep {}: {}", text, legal_sweeps);
  for (std::int64_t value : sweep_values(text.substr(equals + 1))) {
    SearchRequest r = request;
    r.top = 1;
    if (sweep.key == "gpus") r.gpus = static_cast<int>(std::clamp<std::int64_t>(value, -1, 2'000'000'000));
    if (sweep.key == "seq-len") r.work.plan.seq_len = value;
    if (sweep.key == "global-batch") r.work.plan.global_batch = value;
    SearchResult result = search(r);
    for (const std::string& note : {omitted_of_machine(r.work), priced_beyond(result, r.work)})
      if (sweep.notes.find(note) == std::string::npos) sweep.notes += note;
    SweepPoint point{value, r.gpus, {}, {}};
    if (result.plans.empty())
      point.why_not = explain_nothing(result, r.gpus);
    else
      point.best = std::move(result.plans.front());
    try {
      if (point.best && life) point.run = run_cost(*point.best, r.work, *life);
    } catch (const RequestError& error) {  // so many devices fail too often
      point.best.reset();
      point.why_not = error.what();
    }
    sweep.points.push_back(std::move(point));
  }
  return sweep;
}

std::string sweep_table(const Sweep& sweep) {
  const auto run_columns = [&](const std::string& days, const std::string& hours, const std::string& cost) {
    if (!sweep.life) return std::string();
    return fmt::format(" {:>8} {:>10}", days, hours) +
           (sweep.life->price > 0 ? fmt::format(" {:>10}", cost) : "");
  };
  std::string text = fmt::format("{:>12} {:>10} {:>12} {:>7} {:>9}{}  plan\n", sweep.key, "step s",
                                 "tokens/s/GPU", "MFU", "memory", run_columns("days", "GPU-hours", "cost"));
  for (const SweepPoint& p : sweep.points) {
    if (!p.best) {
      text += fmt::format("{:>12} {}\n", p.value, p.why_not);
      continue;
    }
    const Estimate& e = *p.best;
    const RunCost run = p.run.value_or(RunCost());
    text += fmt::format("{:>12} {:>10.3f} {:>12.0f} {:>6.1f}% {:>9}{}  {}\n", p.value, e.seconds,
                        e.tokens_per_second_per_gpu, 100 * e.mfu,
                        format_device_memory(static_cast<double>(e.memory.total())),
                        run_columns(fmt::format("{:.4g}", run.wall_seconds / seconds_a_day),
                                    fmt::format("{:.4g}", run.gpu_hours), fmt::format("{:.4g}", run.money)),
                        summary(e.plan));
  }
  return text + sweep.notes;
}

std::string sweep_csv(const Sweep& sweep) {
  std::string text = sweep.key +
                     ",step_seconds,step_seconds_p10,step_seconds_p90,tokens_per_second_per_gpu,mfu,memory_"
                     "bytes,dp,tp,pp,cp,ep,zero,"
                     "schedule,chunks,micro_batch,recompute" +
                     (sweep.life ? ",days,gpu_hours,cost\n" : "\n");
  for (const SweepPoint& p : sweep.points) {
    if (!p.best) {
      text += fmt::format("{},,,,,,,,,,,,,,,,{}\n", p.value, sweep.life ? ",,," : "");
      continue;
    }
    const Estimate& e = *p.best;
    const Plan& c = e.plan;
    text += fmt::format("{},{:.6g},{:.6g},{:.6g},{:.6g},{:.4f},{},{},{},{},{},{},{},{},{},{},{}", p.value,
                        e.seconds, e.low, e.high, e.tokens_per_second_per_gpu, e.mfu, e.memory.total(),
                        c.mesh.dp(), c.mesh.tp(), c.mesh.pp(), c.mesh.cp(), c.mesh.ep, c.zero, c.schedule,
                        std::max(1, c.chunks), c.micro_batch, recompute_name(c.recompute));
    if (p.run) {
      text += fmt::format(",{:.6g},{:.6g},", p.run->wall_seconds / seconds_a_day, p.run->gpu_hours);
      if (sweep.life->price > 0) text += fmt::format("{:.6g}", p.run->money);
    }
    text += "\n";
  }
  return text;
}

std::string sweep_json(const Sweep& sweep) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const SweepPoint& p : sweep.points) {
    nlohmann::ordered_json object{{sweep.key, p.value}};
    if (p.best)
      object.update({{"step_seconds", p.best->seconds},
                     {"step_seconds_p10", p.best->low},
                     {"step_seconds_p90", p.best->high},
                     {"tokens_per_second_per_gpu", p.best->tokens_per_second_per_gpu},
                     {"mfu", p.best->mfu},
                     {"memory_bytes", p.best->memory.total()},
                     {"plan", summary(p.best->plan)}});
    else
      object["why_not"] = p.why_not;
    if (p.run) object["run"] = run_json(*p.run);
    list.push_back(object);
  }
  nlohmann::ordered_json object{{"sweep", list}};
  if (!sweep.notes.empty()) object["notes"] = sweep.notes;
  return json_text(object);
}

std::string sweep_svg(const Sweep& sweep) {
  Chart chart{"tokens/s of a GPU, best plan",
              sweep.key,
              "tokens/s/GPU",
              true,
              {{"best plan", {}}},
              {{"P10 - P90", {}}}};
  std::vector<std::pair<double, double>> back;
  for (const SweepPoint& p : sweep.points) {
    if (!p.best) continue;
    const auto x = static_cast<double>(p.value);
    chart.lines[0].points.emplace_back(x, p.best->tokens_per_second_per_gpu);
    chart.bands[0].points.emplace_back(x, per_second(*p.best, p.best->high));
    back.emplace_back(x, per_second(*p.best, p.best->low));
  }
  chart.bands[0].points.insert(chart.bands[0].points.end(), back.rbegin(), back.rend());
  return chart_svg(chart);
}

}  // namespace echelon
