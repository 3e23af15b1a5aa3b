#include "train/run_history.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"

namespace echelon {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::array history_columns{"loss", "grad_norm", "lr", "tokens_per_second", "mfu", "step_seconds"};

template <class Visit>
void each_line(const OpenFile& file, const Visit& visit) {
  std::vector<std::byte> chunk(1 << 20);
  std::string line;
  std::int64_t at = 0;
  for (std::size_t got = 0; (got = file.read_some(at, chunk)) > 0; at += static_cast<std::int64_t>(got)) {
    const std::string_view text(reinterpret_cast<const char*>(chunk.data()), got);
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string_view::npos; begin = end + 1) {
      line += text.substr(begin, end - begin);
      visit(line);
      line.clear();
    }
    line += text.substr(begin);
  }
  // What a run that was killed was about to write ends without the end of its line.
}

// Steps that one point or column of a drawing stands for.
struct Part {
  std::size_t first = 0, last = 0;  // of the list of steps
};
std::vector<Part> parts_of(std::size_t steps, int most) {
  const auto width = std::max<std::size_t>(1, (steps + static_cast<std::size_t>(most) - 1) /
                                                  static_cast<std::size_t>(most));
  std::vector<Part> parts;
  for (std::size_t first = 0; first < steps; first += width)
    parts.push_back({first, std::min(steps, first + width) - 1});
  return parts;
}

class History {
 public:
  void add(json entry, const std::string& where) {
    if (!entry.is_object() || !entry.contains(entry.contains("first_step") ? "last_step" : "step"))
      refuse("{}: is no entry of a training's log, which has a step", where);
    const bool is_spread = entry.contains("rank_seconds");
    const json& step_of = entry[is_spread ? "last_step" : "step"];
    if (!step_of.is_number_integer()) refuse("{}: step {}: must be a whole number", where, step_of.dump());
    const auto step = step_of.get<std::int64_t>();
    if (entry.contains("start")) {
      repaired_until_ = -1;
      take_back(step);
      starts_.push_back(std::move(entry));
    } else if (entry.contains("loss")) {
      if (!steps_.empty() && steps_.back()["step"].get<std::int64_t>() >= step) {
        // What was corrupted, and is said again.
        const bool repaired = step <= repaired_until_;
        take_back(step - 1, !repaired);
        if (repaired) return steps_.push_back(std::move(entry));
        if (starts_.empty() || starts_.back()["step"].get<std::int64_t>() != step - 1)
          starts_.push_back({{"step", step - 1}, {"start", json::object()}});
      }
      steps_.push_back(std::move(entry));
    } else if (entry.contains("corruption")) {
      repaired_until_ = step;
    } else if (is_spread) {
      spreads_.push_back(std::move(entry));
    } else if (entry.contains("validation_loss")) {
      evaluations_.push_back(std::move(entry));
    } else if (entry.contains("checkpoint")) {
      checkpoints_.push_back(std::move(entry));
    } else if (entry.contains("fingerprint")) {
      fingerprints_.push_back(std::move(entry));
    } else if (entry.contains("summary")) {
      summary_ = std::move(entry["summary"]);
    }
  }

  ordered_json object(const HistoryLimits& limits) const {
    ordered_json all{{"starts", starts_},           {"taken_back", taken_back_},
                     {"evaluations", evaluations_}, {"checkpoints", checkpoints_},
                     {"spreads", spreads_},         {"fingerprints", fingerprints_}};
    const std::vector<Part> points = parts_of(steps_.size(), limits.most_points);
    ordered_json& steps = all["steps"];
    steps["count"] = steps_.size();
    steps["each_point"] = points.empty() ? 1 : points.front().last + 1;
    steps["step"] = ordered_json::array();
    for (const char* column : history_columns) steps[column] = ordered_json::array();
    for (const Part& part : points) {
      steps["step"].push_back(step_at(part.last));
      for (const char* column : history_columns) steps[column].push_back(mean(part, column));
    }
    all["skipped"] = ordered_json::array();
    for (const json& step : steps_)
      if (step.contains("skipped"))
        all["skipped"].push_back({{"step", step["step"]}, {"why", step["skipped"]}});
    if (!steps_.empty() && steps_.back().contains("experts")) all["experts"] = experts(limits);
    if (!summary_.is_null()) all["summary"] = summary_;
    return all;
  }

 private:
  static void erase_after(std::vector<json>& list, const char* name, std::int64_t step) {
    std::erase_if(list, [&](const json& entry) { return entry[name].get<std::int64_t>() > step; });
  }
  void take_back(std::int64_t step, bool counts = true) {
    const std::size_t before = steps_.size();
    erase_after(steps_, "step", step);
    if (counts) taken_back_ += static_cast<std::int64_t>(before - steps_.size());
    for (std::vector<json>* list : {&evaluations_, &fingerprints_}) erase_after(*list, "step", step);
    erase_after(spreads_, "last_step", step);
  }

  std::int64_t step_at(std::size_t i) const { return steps_[i]["step"].get<std::int64_t>(); }

  // Of what is finite; null where nothing is.
  ordered_json mean(const Part& part, const char* column) const {
    double sum = 0;
    std::int64_t count = 0;
    for (std::size_t i = part.first; i <= part.last; ++i)
      if (steps_[i].contains(column) && steps_[i][column].is_number()) {
        sum += steps_[i][column].get<double>();
        ++count;
      }
    return count == 0 ? ordered_json() : ordered_json(sum / static_cast<double>(count));
  }

  // For each layer, of each expert in each column: its tokens over those of an even load.
  ordered_json experts(const HistoryLimits& limits) const {
    const std::vector<Part> parts = parts_of(steps_.size(), limits.most_columns);
    ordered_json ends = ordered_json::array(), layers = ordered_json::array();
    for (const Part& part : parts)
      ends.push_back({step_at(part.first), step_at(part.last)});
    for (std::size_t l = 0; l < steps_.back()["experts"].size(); ++l) {
      const json& last = steps_.back()["experts"][l];
      const std::size_t num_experts = last.at("tokens").size();
      std::vector<std::vector<double>> loads(num_experts);
      std::vector<double> drops;
      for (const Part& part : parts) {
        std::vector<double> tokens(num_experts);
        double all = 0, dropped = 0;
        for (std::size_t i = part.first; i <= part.last; ++i) {
          if (!steps_[i].contains("experts") || steps_[i]["experts"].size() <= l) continue;
          const json& layer = steps_[i]["experts"][l];
          for (std::size_t e = 0; e < std::min(num_experts, layer.at("tokens").size()); ++e) {
            tokens[e] += layer["tokens"][e].get<double>();
            all += layer["tokens"][e].get<double>();
          }
          dropped += layer.at("drop_rate").get<double>();
        }
        for (std::size_t e = 0; e < num_experts; ++e)
          loads[e].push_back(all > 0 ? tokens[e] * static_cast<double>(num_experts) / all : 0);
        drops.push_back(dropped / static_cast<double>(part.last - part.first + 1));
      }
      layers.push_back({{"layer", last.at("layer")}, {"loads", loads}, {"drop_rate", drops}});
    }
    return {{"columns", ends}, {"layers", layers}};
  }

  std::vector<json> steps_, starts_, evaluations_, spreads_, checkpoints_, fingerprints_;
  json summary_;
  std::int64_t taken_back_ = 0, repaired_until_ = -1;
};

}  // namespace

ordered_json run_history(const std::string& path, const std::string& flag, const HistoryLimits& limits) {
  const OpenFile file(path, flag);
  History history;
  std::int64_t number = 0;
  const char* other = "is not what train --log writes as JSON lines: ";  // until a line has been
  each_line(file, [&](const std::string& line) {
    ++number;
    if (line.empty()) return;
    const std::string where = fmt::format("{} {}: {}line {}", flag, path, other, number);
    try {
      history.add(parse_json(line, where), where);
    } catch (const json::exception& error) {
      refuse("{}: is no entry of a training's log: {}", where, error.what());
    }
    other = "";
  });
  try {
    return history.object(limits);
  } catch (const json::exception& error) {
    refuse("{} {}: is no training's log: {}", flag, path, error.what());
  }
}

}  // namespace echelon
