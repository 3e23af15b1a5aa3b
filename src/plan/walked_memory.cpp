#include "plan/walked_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/in_parallel.h"
#include "base/real.h"
#include "spec/plan_fields.h"

namespace echelon {

void WalkedRanks::set(int rank, double bytes) {
  const auto r = static_cast<std::size_t>(rank);
  gaps_[r] = bytes - counted_[r];
}

// Linear interpolation between the nearest walked ranks; constant beyond them.
double WalkedRanks::likely(int rank) const {
  const int ranks = static_cast<int>(gaps_.size());
  int before = rank, behind = rank;
  while (before >= 0 && !is_walked(before)) --before;
  while (behind < ranks && !is_walked(behind)) ++behind;
  const double counted = counted_[static_cast<std::size_t>(rank)];
  if (before < 0 && behind == ranks) return counted;
  if (before < 0) return counted + *gaps_[static_cast<std::size_t>(behind)];
  const double first = *gaps_[static_cast<std::size_t>(before)];
  if (behind == ranks || before == behind) return counted + first;
  return counted + std::lerp(first, *gaps_[static_cast<std::size_t>(behind)],
                             real(rank - before) / real(behind - before));
}

std::vector<int> WalkedRanks::first() const {
  const auto most = static_cast<int>(std::max_element(counted_.begin(), counted_.end()) - counted_.begin());
  std::vector<int> ranks{most};
  for (int end : {static_cast<int>(counted_.size()) - 1, 0})
    if (std::find(ranks.begin(), ranks.end(), end) == ranks.end()) ranks.push_back(end);
  return ranks;
}

int WalkedRanks::next() const {
  int next = -1;
  double bytes = 0;
  for (int r : not_walked())
    if (next < 0 || likely(r) > bytes) next = r, bytes = likely(r);
  return next;
}

int WalkedRanks::between(double most_bytes) const {
  int last = -1;  // the last walked rank
  for (int r = 0; r < static_cast<int>(gaps_.size()); ++r) {
    if (!is_walked(r)) continue;
    if (last >= 0 && r - last > 1 && (likely(last) > most_bytes) != (likely(r) > most_bytes))
      return std::midpoint(last, r);
    last = r;
  }
  return -1;
}

std::vector<int> WalkedRanks::not_walked() const {
  std::vector<int> ranks;
  for (int r = 0; r < static_cast<int>(gaps_.size()); ++r)
    if (!is_walked(r)) ranks.push_back(r);
  return ranks;
}

std::string WalkedMemory::shared_key(const Plan& c) { return text_but({"recompute", "layers-per-stage"}, c); }

std::string WalkedMemory::own_key(const Plan& c, const StageShape& s, int rank) {
  std::string key = fmt::format("rank {} ", rank);
  for (const StageUse& use : s.facts->uses[static_cast<std::size_t>(rank)]) {
    const auto stage = s.layers.begin() + use.stage;
    key += fmt::format("{} from {} ", *stage, std::accumulate(s.layers.begin(), stage, std::int64_t{0}));
  }
  return key + recompute_name(c.recompute.of(rank));
}

void WalkedMemory::lay_out(const Plan& c, const StageShape& s, const std::string& shared) {
  const std::string whole =
      fmt::format("{}{} {}", shared, fmt::join(s.layers, ","), recompute_name(c.recompute));
  if (last_layout_ && whole == last_) return;
  last_layout_.reset();
  last_plan_ = c;
  last_plan_->precision = trained_recipe(work_.precision);
  last_plan_->layers_per_stage = s.layers;
  last_plan_->balance_layers = false;
  last_layout_.emplace(*last_plan_, StepLength::steady);
  last_ = whole;
}

std::vector<StepMemory> WalkedMemory::of(const Plan& c, const StageShape& s, const std::vector<int>& ranks) {
  if (!work_.exact_memory)
    refuse(
        "software {}: is priced with what its ranks hold, and Workload::exact_memory is not set; legal: "
        "exact_memory() of train/dry_run.h",
        work_.software.name);
  const std::string shared = shared_key(c);
  std::vector<std::string> keys;
  std::vector<std::size_t> unknown;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    keys.push_back(shared + own_key(c, s, ranks[i]));
    if (!known_.contains(keys[i])) unknown.push_back(i);
  }
  if (!unknown.empty()) lay_out(c, s, shared);
  std::vector<StepMemory> memories(ranks.size());
  in_parallel("walking the ranks of a plan", static_cast<int>(std::thread::hardware_concurrency()),
              unknown.size(), [&](std::size_t i) {
                memories[unknown[i]] = work_.exact_memory(*last_plan_, *last_layout_,
                                                          {.pp = ranks[unknown[i]]}, work_.machine.device());
              });
  for (std::size_t i : unknown) known_.emplace(keys[i], memories[i]);
  for (std::size_t i = 0; i < ranks.size(); ++i) memories[i] = known_.at(keys[i]);
  return memories;
}

}  // namespace echelon
