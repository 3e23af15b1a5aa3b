#include "verify/routing_decisions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/least_shift.h"
#include "comm/host_group.h"
#include "tensor/host.h"

namespace echelon {

using Integers = std::vector<std::int32_t>;

RoutingDecisions::RoutingDecisions(const Plan& plan)
    : layers_(plan.model.routed_layers()),
      samples_(plan.global_batch),
      positions_(plan.seq_len),
      k_(plan.model.experts_per_token),
      codes_(layers_.size() * static_cast<std::size_t>(samples_ * positions_ * k_), -1) {}

std::int32_t* RoutingDecisions::at(std::int64_t layer, std::int64_t sample, std::int64_t position) {
  const auto place = std::lower_bound(layers_.begin(), layers_.end(), layer) - layers_.begin();
  return codes_.data() + ((place * samples_ + sample) * positions_ + position) * k_;
}

void RoutingRecorder::on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids,
                              const Tensor&, const Tensor& kept, const Keep&) {
  RoutingDecisions& decisions = steps_.try_emplace(tokens.step, plan_).first->second;
  const std::int64_t rows = ids.rows(), k = ids.cols(), of_each = rows / tokens.sequences;
  const auto experts = static_cast<std::int32_t>(plan_.model.num_experts);
  const Integers id = copy_to_host<std::int32_t>(ids), stays = copy_to_host<std::int32_t>(kept),
                 positions = copy_to_host<std::int32_t>(tokens.positions);
  std::size_t j = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int32_t* codes =
        decisions.at(layer, tokens.first_sample + row / of_each, positions[static_cast<std::size_t>(row)]);
    for (std::int64_t of_row = 0; of_row < k; ++of_row, ++j)
      *codes++ = stays[j] < 0 ? id[j] + experts : id[j];
  }
}

RoutingRecorder::Gathered RoutingRecorder::gather(const Rank& rank, std::int64_t step) {
  Gathered result{RoutingDecisions(plan_), {}};
  std::vector<std::int32_t>& codes = result.decisions.codes();
  if (codes.empty()) return result;
  if (auto mine = steps_.extract(step); !mine.empty()) codes = mine.mapped().codes();
  // The largest and the smallest number that any rank has: where they are not the same, ranks disagree.
  constexpr std::int32_t none = std::numeric_limits<std::int32_t>::min();
  const std::size_t n = codes.size(), of_layer = n / result.decisions.layers().size();
  std::vector<std::int32_t> both = codes;
  for (std::int32_t code : codes) both.push_back(code < 0 ? none : -code);
  for (Axis axis : all_axes) both = HostGroup(rank.along(axis)).max(both);
  for (std::size_t i = 0; i < n; ++i) {
    codes[i] = both[i];
    if (both[i] < 0 || both[i] != -both[n + i]) ++result.disputed[result.decisions.layers()[i / of_layer]];
  }
  return result;
}

void RoutingJudge::impose(std::int64_t step, RoutingRecorder::Gathered gathered) {
  steps_.insert_or_assign(step, std::move(gathered));
}

void RoutingJudge::forget_before(std::int64_t step) {
  steps_.erase(steps_.begin(), steps_.lower_bound(step));
  const Place first{step, 0, -1, 0};
  choices_.erase(choices_.begin(), choices_.lower_bound(first));
  drops_.erase(drops_.begin(), drops_.lower_bound(first));
}

RoutingJudge::Place RoutingJudge::place(std::int64_t layer, const RoutedTokens& tokens,
                                        const Integers& positions, std::int64_t row,
                                        std::int64_t rows) const {
  std::int64_t sample = tokens.first_sample + row / (rows / tokens.sequences);
  if (!samples_.empty())  // behind the last one: of a smaller last microbatch, which the mesh does not have
    sample = sample < std::ssize(samples_) ? samples_[static_cast<std::size_t>(sample)] : -1;
  return {tokens.step, layer, sample, positions[static_cast<std::size_t>(row)]};
}

const std::int32_t* RoutingJudge::mesh_codes(const Place& place) {
  const auto found = steps_.find(place.step);
  if (found == steps_.end() || place.sample < 0) return nullptr;
  const std::int32_t* codes = found->second.decisions.at(place.layer, place.sample, place.position);
  return *codes < 0 ? nullptr : codes;
}

void RoutingJudge::Flip::add_trial(const std::vector<double>& moved) {
  ++trials;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const double d = moved[places[i]] - numbers[i];
    squares[i] += d * d;
  }
}

// With what the double precision of the decision itself may add.
double RoutingJudge::Flip::allowed(double factor) const {
  double largest = 0, magnitude = 0;
  for (double square : squares) largest = std::max(largest, square);
  for (double number : numbers) magnitude = std::max(magnitude, std::abs(number));
  return factor * (std::sqrt(largest / std::max(trials, 1)) + 0x1p-52 * magnitude);
}

void RoutingJudge::on_choice(std::int64_t layer, const RoutedTokens& tokens, const TokenRouter& router,
                             const Tensor& logits, std::span<const double> bias, const Tensor& ids) {
  const auto k = static_cast<std::size_t>(ids.cols());
  const auto experts = static_cast<std::int32_t>(router.num_experts());
  TokenRouter::Row row;
  std::vector<double> values;
  std::vector<std::int32_t> own(k), theirs(k);
  Integers chosen = copy_to_host<std::int32_t>(ids);
  const Integers positions = copy_to_host<std::int32_t>(tokens.positions);
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    const Place at = place(layer, tokens, positions, i, ids.rows());
    const std::int32_t* codes = mesh_codes(at);
    if (codes == nullptr) continue;
    std::int32_t* id = chosen.data() + i * ids.cols();
    std::transform(codes, codes + k, theirs.begin(), [&](std::int32_t c) { return c % experts; });
    const auto wanted = [&] {
      values = copy_numbers_to_host(logits.row_range(i, i + 1));
      router.score(values, row);
      router.want(row, bias);
    };
    auto flip = choices_.find(at);
    if (is_trial_) {
      if (flip != choices_.end()) {
        wanted();
        flip->second.add_trial(row.wanted);
      }
    } else if (!is_wide_) {
      std::copy_n(id, k, own.begin());
      std::sort(own.begin(), own.end());
      std::vector<std::int32_t> sorted = theirs;
      std::sort(sorted.begin(), sorted.end());
      if (own != sorted) {
        wanted();
        Flip f;
        const bool is_choice = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
        f.shift = is_choice ? router.shift_to_choose(row, theirs) : std::numeric_limits<double>::infinity();
        f.numbers = row.wanted;
        f.squares.assign(f.numbers.size(), 0.0);
        for (std::size_t e = 0; e < f.numbers.size(); ++e) f.places.push_back(e);
        flip = choices_.insert_or_assign(at, std::move(f)).first;
      }
    }
    if (flip == choices_.end() || flip->second.is_imposed()) std::copy(theirs.begin(), theirs.end(), id);
  }
  copy_from_host(chosen, ids);
}

void RoutingJudge::on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids,
                           const Tensor& weights, const Tensor& kept, const Keep& keep) {
  const std::int64_t rows = ids.rows(), k = ids.cols();
  const Integers id = copy_to_host<std::int32_t>(ids), stays = copy_to_host<std::int32_t>(kept),
                 positions = copy_to_host<std::int32_t>(tokens.positions);
  // As the mesh has it, where it chose the same experts.
  Integers theirs = stays;
  std::vector<std::size_t> differing;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t* codes = mesh_codes(place(layer, tokens, positions, i, rows));
    for (std::int64_t j = i * k; codes != nullptr && j < (i + 1) * k; ++j, ++codes) {
      const auto c = static_cast<std::size_t>(j);
      theirs[c] = *codes == id[c] ? id[c] : -1;
      if (theirs[c] != stays[c]) differing.push_back(c);
    }
  }
  const std::vector<double> values = copy_numbers_to_host(weights);
  const Place at = place(layer, tokens, positions, 0, rows);
  auto flip = drops_.find(at);
  if (is_trial_) {
    if (flip != drops_.end()) flip->second.add_trial(values);
  } else if (!is_wide_ && !differing.empty()) {
    Flip f;
    f.count = std::ssize(differing);
    f.places = differing;
    f.squares.assign(differing.size(), 0.0);
    double magnitude = 0;
    for (std::size_t c : differing) {
      f.numbers.push_back(values[c]);
      magnitude = std::max(magnitude, std::abs(values[c]));
    }
    const Tensor moved = weights.beside(MemoryCategory::other, weights.dtype(), weights.shape());
    f.shift = kept.begins_with(ids)  // nothing may be dropped
                  ? std::numeric_limits<double>::infinity()
                  : least_shift(magnitude, [&](double shift) {
                      std::vector<double> shifted = values;
                      for (std::size_t c = 0; c < values.size(); ++c)
                        shifted[c] += theirs[c] < 0 ? -shift : shift;
                      copy_numbers_from_host(shifted, moved);
                      return copy_to_host<std::int32_t>(keep(moved)) == theirs;
                    });
    flip = drops_.insert_or_assign(at, std::move(f)).first;
  }
  if (!kept.begins_with(ids) && (flip == drops_.end() || flip->second.is_imposed()))
    copy_from_host(theirs, kept);
}

bool RoutingJudge::has_differences(std::int64_t first_step, std::int64_t last_step) const {
  const auto any = [&](const std::map<Place, Flip>& flips) {
    const auto first = flips.lower_bound({first_step, 0, -1, 0});
    return first != flips.end() && first->first.step <= last_step;
  };
  return any(choices_) || any(drops_) ||
         std::any_of(steps_.lower_bound(first_step), steps_.upper_bound(last_step),
                     [](const auto& step) { return !step.second.disputed.empty(); });
}

std::vector<RoutingDifference> RoutingJudge::differences(std::int64_t step, double factor) const {
  std::map<std::pair<std::int64_t, std::string>, RoutingDifference> found;
  const auto add = [&](std::int64_t layer, const char* kind, std::int64_t count, double shift,
                       double allowed) {
    RoutingDifference& d =
        found.try_emplace({layer, kind}, RoutingDifference{step, layer, kind}).first->second;
    if (d.tokens == 0 || shift * d.allowed > d.shift * allowed || std::isinf(shift)) {
      d.shift = shift;
      d.allowed = allowed;
    }
    d.tokens += count;
  };
  const auto add_all = [&](const std::map<Place, Flip>& flips, const char* kind) {
    for (const auto& [at, flip] : flips)
      if (at.step == step) add(at.layer, kind, flip.count, flip.shift, flip.allowed(factor));
  };
  if (const auto known = steps_.find(step); known != steps_.end())
    for (const auto& [layer, places] : known->second.disputed)
      add(layer, "choice", places, std::numeric_limits<double>::infinity(), 0);
  add_all(choices_, "choice");
  add_all(drops_, "drop");
  std::vector<RoutingDifference> result;
  for (auto& [key, difference] : found) result.push_back(std::move(difference));
  return result;
}

}  // namespace echelon
