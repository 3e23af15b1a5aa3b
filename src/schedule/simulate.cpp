#include "schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/median.h"
#include "schedule/per_peer.h"
#include "schedule/validate.h"

namespace echelon {
namespace {

constexpr double not_yet = std::numeric_limits<double>::infinity();

// Each rank advances in its own order; a rank that waits for a value is woken when the value arrives.
class Simulator {
 public:
  Simulator(const Schedule& schedule, const SimulationCosts& costs)
      : schedule_(schedule), costs_(costs), ranks_(static_cast<std::size_t>(schedule.num_ranks())) {
    cells_.resize(static_cast<std::size_t>(value_rows(schedule)) *
                  static_cast<std::size_t>(schedule.num_microbatches));
    channel_free_.resize(ranks_.size());
    result_.timeline.ranks.resize(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      result_.timeline.ranks[r].reserve(schedule.ranks[r].size());
      for (const Instruction& i : schedule.ranks[r])
        each_read(schedule, i, [&](const Value& v) {
          if (travels(v)) cell(v).reader[column(v)] = static_cast<int>(r);
        });
    }
  }

  Simulation run() {
    std::vector<std::size_t> ready(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) ready[ranks_.size() - 1 - r] = r;
    while (!ready.empty()) {
      const std::size_t r = ready.back();
      ready.pop_back();
      while (advance(r)) {
      }
      for (std::size_t woken : woken_) ready.push_back(woken);
      woken_.clear();
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (ranks_[r].next < schedule_.ranks[r].size()) refuse_stuck();
    return std::move(result_);
  }

 private:
  struct RankState {
    std::size_t next = 0;
    double free = 0;
    bool waiting = false;
    std::map<int, int> newest_weights;  // by stage
  };
  struct Part {
    double begin, end;
  };
  // Values are ordered by microbatch and then by stage, so that an instruction touches neighbouring entries,
  // close to those that its neighbours touched shortly before.
  struct Cell {
    double arrival[2] = {not_yet, not_yet};  // of what travels: of a stage its activation and the gradient
    int reader[2] = {-1, -1};                // rank that reads them
    int holder = -1;                         // rank that keeps something for the backward pass
    bool has_weight_input = false;           // kept by B for W
  };

  int column(const Value& v) const { return value_place(schedule_, v).column; }
  Cell& cell(const Value& v) {
    return cells_[static_cast<std::size_t>(value_place(schedule_, v).row) *
                      static_cast<std::size_t>(schedule_.num_microbatches) +
                  static_cast<std::size_t>(v.microbatch)];
  }

  // When the value is on the rank; not_yet if that is unknown so far.
  double available(std::size_t r, const Value& v) {
    const auto at_once_if = [](bool is_there) { return is_there ? 0 : not_yet; };
    if (travels(v)) return cell(v).arrival[column(v)];
    switch (v.kind) {
      case ValueKind::saved:
      case ValueKind::head_saved:
        return at_once_if(cell(v).holder == static_cast<int>(r));
      case ValueKind::weight_input:
        return at_once_if(cell(v).holder == static_cast<int>(r) && cell(v).has_weight_input);
      case ValueKind::weights:
        return at_once_if(v.version == 0 || v.version <= ranks_[r].newest_weights[v.stage]);
      default:
        return not_yet;
    }
  }

  // Runs the rank's next instruction, or the next ones that run together; false if it must wait or has ended.
  bool advance(std::size_t r) {
    RankState& rank = ranks_[r];
    const auto& list = schedule_.ranks[r];
    if (rank.next == list.size()) return false;
    parts_.clear();
    double time = rank.free, late = 0;
    std::size_t k = rank.next;
    do {
      const double done = time;
      each_read(schedule_, list[k], [&](const Value& v) { time = std::max(time, available(r, v)); });
      if (time == not_yet) {
        rank.waiting = true;
        return false;
      }
      if (!parts_.empty()) late += time - done;
      const bool is_alone = parts_.empty() && !list[k].overlaps_next;
      parts_.push_back({time, time + costs_.of(list[k]) * (is_alone ? 1 : costs_.overlap_factor)});
      time = parts_.back().end;
    } while (list[k++].overlaps_next && k < list.size());
    rank.waiting = false;
    rank.free = time;
    // Instructions that run together form one span, unless a part had to wait in it.
    const bool in_turns = late > 1e-9 * time;
    for (const Part& part : parts_) {
      const Instruction& i = list[rank.next++];
      result_.timeline.ranks[r].push_back(
          {i, in_turns ? part.begin : parts_[0].begin, in_turns ? part.end : time});
      finish(r, i, part.end);
    }
    return true;
  }

  void finish(std::size_t r, const Instruction& i, double end) {
    RankState& rank = ranks_[r];
    each_write(schedule_, i, [&](const Value& v) {
      if (v.kind == ValueKind::weights) {
        rank.newest_weights[v.stage] = v.version;
        return;
      }
      Cell& c = cell(v);
      if (v.kind == ValueKind::saved || v.kind == ValueKind::head_saved) {
        c.holder = static_cast<int>(r);
        c.has_weight_input = false;
      }
      if (v.kind == ValueKind::weight_input) c.has_weight_input = true;
      if (travels(v)) hand_over(r, c.reader[column(v)], end, c.arrival[column(v)]);
    });
    each_release(i, [&](const Value& v) { cell(v).holder = -1; });
  }

  void hand_over(std::size_t r, int reader, double end, double& arrival) {
    arrival = ranks_[r].free;  // no earlier than the end of what runs together
    if (reader < 0) return;
    if (reader != static_cast<int>(r)) {
      double& channel = channel_free_[r][reader];
      channel = std::max(end, channel) + costs_.message;
      arrival = std::max(arrival, channel);
      ++result_.messages;
    }
    if (ranks_[static_cast<std::size_t>(reader)].waiting) woken_.push_back(static_cast<std::size_t>(reader));
  }

  [[noreturn]] void refuse_stuck() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const auto& list = schedule_.ranks[r];
      for (std::size_t k = ranks_[r].next; k < list.size(); ++k) {
        each_read(schedule_, list[k], [&](const Value& v) {
          if (available(r, v) == not_yet)
            refuse("schedule {}: rank {} waits for ever at instruction {} ({}) for {}", schedule_.name, r, k,
                   to_string(list[k]), to_string(v));
        });
        if (!list[k].overlaps_next) break;
      }
    }
    throw InvariantError("a schedule is stuck without a missing value");
  }

  const Schedule& schedule_;
  const SimulationCosts& costs_;
  std::vector<RankState> ranks_;
  std::vector<Cell> cells_;
  std::vector<PerPeer<double>> channel_free_;  // by sender
  std::vector<std::size_t> woken_;
  std::vector<Part> parts_;  // of what runs next
  Simulation result_;
};

}  // namespace

std::vector<double> peak_activations(const Schedule& schedule) {
  std::vector<double> peaks;
  for (const auto& list : schedule.ranks) {
    std::int64_t held = 0, peak = 0;
    for (const Instruction& i : list) {
      each_write(schedule, i, [&](const Value& v) { held += v.kind == ValueKind::saved; });
      peak = std::max(peak, held);
      each_release(i, [&](const Value& v) { held -= v.kind == ValueKind::saved; });
    }
    peaks.push_back(static_cast<double>(peak) * schedule.stage_fraction());
  }
  return peaks;
}

bool covers(const HeldByStage& a, const HeldByStage& b) {
  return std::equal(a.begin(), a.end(), b.begin(), [](const HeldOfStage& x, const HeldOfStage& y) {
    return x.whole >= y.whole && x.weight_input >= y.weight_input && x.gradients >= y.gradients;
  });
}

std::vector<std::vector<HeldByStage>> held_at_peaks(const Schedule& schedule) {
  std::vector<std::vector<HeldByStage>> all;
  for (const auto& list : schedule.ranks) {
    // Of each stage, among those that the rank runs.
    std::vector<std::size_t> place(static_cast<std::size_t>(schedule.num_stages));
    for (const Instruction& i : list)
      if (i.op == Op::F) place[static_cast<std::size_t>(i.stage)] = 1;
    std::size_t stages = 0;
    for (std::size_t& at : place)
      if (at == 1) at = stages++;
    HeldByStage held(stages);
    std::vector<HeldByStage>& peaks = all.emplace_back();
    bool grew = false;
    const auto note = [&] {
      if (!std::exchange(grew, false)) return;
      if (std::any_of(peaks.begin(), peaks.end(), [&](const auto& peak) { return covers(peak, held); }))
        return;
      std::erase_if(peaks, [&](const auto& peak) { return covers(held, peak); });
      peaks.push_back(held);
    };
    for (const Instruction& i : list) {
      each_write(schedule, i, [&](const Value& v) {
        if (v.kind != ValueKind::saved && v.kind != ValueKind::weight_input) return;
        HeldOfStage& of_stage = held[place[static_cast<std::size_t>(v.stage)]];
        if (v.kind == ValueKind::weight_input) note(), --of_stage.whole;
        ++(v.kind == ValueKind::saved ? of_stage.whole : of_stage.weight_input);
        grew = true;
      });
      each_release(i, [&](const Value& v) {
        if (v.kind != ValueKind::saved && v.kind != ValueKind::weight_input) return;
        note();
        HeldOfStage& of_stage = held[place[static_cast<std::size_t>(v.stage)]];
        if (v.kind == ValueKind::weight_input) --of_stage.weight_input, ++of_stage.whole;
        if (v.kind == ValueKind::saved) --of_stage.whole;
      });
      if (i.op != Op::W && i.op != Op::BW) continue;
      HeldOfStage& of_stage = held[place[static_cast<std::size_t>(i.stage)]];
      grew |= std::exchange(of_stage.gradients, 1) == 0;
    }
    note();
  }
  return all;
}

std::vector<int> weight_versions(const Schedule& schedule) {
  std::vector<int> most;
  for (const auto& list : schedule.ranks) {
    most.push_back(list.empty() ? 0 : 1);
    const auto is_step = [](const Instruction& i) { return i.op == Op::step; };
    if (std::none_of(list.begin(), list.end(), is_step)) continue;
    std::map<std::pair<int, int>, std::size_t> last_read;  // of (stage, version)
    for (std::size_t k = 0; k < list.size(); ++k)
      for (const Value& v : reads(schedule, list[k]))
        if (v.kind == ValueKind::weights) last_read[{v.stage, v.version}] = k;
    struct Versions {
      int newest = 0, alive = 1;
    };
    std::map<int, Versions> of_stage;
    for (std::size_t k = 0; k < list.size(); ++k) {
      // A version is freed after its last reader, unless it is the newest; a step updates in place if it can.
      Versions& versions = of_stage[list[k].stage];
      for (const Value& v : writes(schedule, list[k]))
        if (v.kind == ValueKind::weights) {
          const auto read = last_read.find({v.stage, versions.newest});
          if (read != last_read.end() && read->second > k) ++versions.alive;
          versions.newest = v.version;
        }
      for (const Value& v : reads(schedule, list[k]))
        if (v.kind == ValueKind::weights && list[k].op != Op::step && v.version != versions.newest &&
            last_read.at({v.stage, v.version}) == k)
          --versions.alive;
      most.back() = std::max(most.back(), versions.alive);
    }
  }
  return most;
}

int parameter_copies(const Schedule& schedule) {
  std::vector<std::set<int>> holders(static_cast<std::size_t>(schedule.num_stages));
  for (int r = 0; r < schedule.num_ranks(); ++r)
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)])
      if (!is_of_head(i.op)) holders[static_cast<std::size_t>(i.stage)].insert(r);
  std::size_t most = 1;
  for (const auto& ranks : holders) most = std::max(most, ranks.size());
  return static_cast<int>(most);
}

namespace {

using Part = std::pair<int, Op>;  // of a stage

struct MeasuredPair {
  Part a, b;
  double seconds = 0;  // from the first beginning to the last end
};

// A rank's computations by start time: those that ran alone, and those that ran together with the next one.
void part_spans(std::vector<Span> spans, std::map<Part, std::vector<double>>& alone,
                std::vector<MeasuredPair>& pairs) {
  std::erase_if(spans, [](const Span& span) { return !is_compute(span.instruction.op); });
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const auto part = [](const Span& span) { return Part{span.instruction.stage, span.instruction.op}; };
  for (std::size_t k = 0; k < spans.size(); ++k) {
    const Span& a = spans[k];
    if (k + 1 == spans.size() || spans[k + 1].begin >= a.end) {
      alone[part(a)].push_back(a.end - a.begin);
      continue;
    }
    const Span& b = spans[++k];
    pairs.push_back({part(a), part(b), std::max(a.end, b.end) - a.begin});
  }
}

}  // namespace

double SimulationCosts::of(const Instruction& instruction) const {
  if (is_of_head(instruction.op))
    return instruction.op == Op::V ? vocabulary_part.forward : vocabulary_part.backward_weight;
  const StageTimes& t = of(instruction.stage);
  switch (instruction.op) {
    case Op::F:
      return t.forward;
    case Op::B:
      return t.backward_input;
    case Op::W:
      return t.backward_weight;
    case Op::BW:
      return t.backward_input + t.backward_weight;
    default:
      return 0;
  }
}

SimulationCosts measured_costs(const Timeline& timeline) {
  std::map<Part, std::vector<double>> times;
  std::vector<MeasuredPair> pairs;
  for (const auto& spans : timeline.ranks) part_spans(spans, times, pairs);
  SimulationCosts costs;
  costs.stages.clear();
  // A part that never ran alone counts as half of a pair.
  std::vector<double> factors;
  for (const MeasuredPair& pair : pairs) {
    for (const Part& part : {pair.a, pair.b})
      if (times[part].empty()) times[part].push_back(pair.seconds / 2);
    factors.push_back(pair.seconds / (median(times[pair.a]) + median(times[pair.b])));
  }
  if (!factors.empty()) costs.overlap_factor = median(factors);
  std::vector<double> forwards, weights;  // of parts of the output layer
  std::erase_if(times, [&](const auto& of_part) {
    const auto& [part, seconds] = of_part;
    if (!is_of_head(part.second)) return false;
    auto& list = part.second == Op::V ? forwards : weights;
    list.insert(list.end(), seconds.begin(), seconds.end());
    return true;
  });
  costs.vocabulary_part = {median(forwards), 0, median(weights)};
  const int stages = times.empty() ? 0 : times.rbegin()->first.first + 1;
  for (int s = 0; s < stages; ++s) {
    const double fused = median(times[{s, Op::BW}]), split = median(times[{s, Op::B}]),
                 weight = median(times[{s, Op::W}]);
    costs.stages.push_back(
        {median(times[{s, Op::F}]), split > 0 ? split : fused - std::min(weight, fused), weight});
  }
  return costs;
}

static void check_times(const Schedule& schedule, const SimulationCosts& costs) {
  const auto check = [&](const char* of, double time) {
    if (!(time >= 0 && std::isfinite(time)))
      refuse("schedule {}: {} {}; legal: 0 or more", schedule.name, of, time);
  };
  for (const StageTimes& stage : costs.stages) {
    check("time of F", stage.forward);
    check("time of B", stage.backward_input);
    check("time of W", stage.backward_weight);
  }
  check("time of V", costs.vocabulary_part.forward);
  check("time of VW", costs.vocabulary_part.backward_weight);
  check("time of a message", costs.message);
  check("overlap factor", costs.overlap_factor);
}

Simulation simulate(const Schedule& schedule, const SimulationCosts& costs) {
  check_shape(schedule);
  check_times(schedule, costs);
  if (costs.stages.size() != 1 && costs.stages.size() != static_cast<std::size_t>(schedule.num_stages))
    refuse("schedule {}: times of {} stages; legal: of {}, or one entry for all", schedule.name,
           costs.stages.size(), schedule.num_stages);
  Simulation result = Simulator(schedule, costs).run();
  result.peak_activations = peak_activations(schedule);
  result.weight_versions = weight_versions(schedule);
  result.parameter_copies = parameter_copies(schedule);
  return result;
}

}  // namespace echelon
