#include "train/state_copy.h"

#include <fmt/format.h>

#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"
#include "data/checksum.h"
#include "tensor/host.h"

namespace echelon {
namespace {

std::uint64_t key_of(const std::string& text) { return checksum(std::as_bytes(std::span(text))); }

std::uint64_t fingerprint_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return checksum({});
  const HostBytes bytes(tensor, true);
  return checksum({bytes.data(), static_cast<std::size_t>(tensor.bytes())});
}

void move_bytes(const Tensor& from, const Tensor& to) {
  if (from.device() == Device::none || from.numel() == 0) return;
  const HostBytes source(from, true), target(to, false);
  std::memcpy(target.data(), source.data(), static_cast<std::size_t>(from.bytes()));
  target.store();
}

}  // namespace

std::vector<HeldState> held_state(const Rank& rank, const Trainer& trainer) {
  std::vector<HeldState> state;
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  for (const Parameter& p : trainer.parameters().all()) {
    const int slice = p.spec.shard_dim >= 0 ? index / tp_replicas(p.spec, tp) : 0;
    const auto add = [&](const char* role, const Tensor& tensor, Range part) {
      if (!tensor.defined()) return;
      std::string what = fmt::format("{} of {}", role, p.spec.name);
      const std::uint64_t key =
          key_of(fmt::format("{} {} {} {} {}", what, p.spec.part, slice, part.begin, part.end));
      state.push_back({std::move(what), key, tensor});
    };
    if (p.value_stays)
      add("weights", p.value, {0, p.value.numel()});
    else
      add("weights", p.own_value, p.own);
    if (p.spec.frozen) continue;
    add("remainder of the weights", p.own_remainder, p.own);
    add("first moment", p.exp_avg, p.own);
    add("second moment", p.exp_avg_sq, p.own);
  }
  for (const CarriedTensor& carried : trainer.carried()) {
    std::string what = fmt::format("{} of {}, slice {}", carried.what, carried.parameter, carried.slice);
    const std::uint64_t key = key_of(fmt::format("{} of rank {}", what, rank.index()));
    state.push_back({std::move(what), key, carried.tensor});
  }
  return state;
}

StateFingerprints fingerprints_of(const std::vector<HeldState>& state, const RouterBiases& biases) {
  StateFingerprints all;
  const auto add = [&](std::string what, std::uint64_t key, std::uint64_t fingerprint) {
    all.what.push_back(std::move(what));
    all.keys.push_back(key);
    all.fingerprints.push_back(fingerprint);
  };
  for (const HeldState& held : state) add(held.what, held.key, fingerprint_of(held.tensor));
  for (const auto& [layer, numbers] : biases) {
    std::string what = fmt::format("router biases of layer {}", layer);
    const std::uint64_t key = key_of(what);
    add(std::move(what), key, checksum(std::as_bytes(std::span(numbers))));
  }
  return all;
}

StateCopy::StateCopy(const Rank& rank, Trainer& trainer)
    : rank_(rank), trainer_(trainer), state_(held_state(rank, trainer)) {
  for (const HeldState& held : state_) {
    copies_.push_back(
        {held.what, held.key,
         Tensor(rank.arena(), MemoryCategory::other, held.tensor.dtype(), {held.tensor.numel()})});
  }
}

void StateCopy::keep(std::int64_t step, StateFingerprints fingerprints) {
  for (std::size_t i = 0; i < state_.size(); ++i) move_bytes(state_[i].tensor, copies_[i].tensor);
  biases_ = trainer_.stages().router_biases();
  fingerprints_ = std::move(fingerprints);
  step_ = step;
  updates_ = trainer_.updates(step);
}

void StateCopy::restore() const {
  const StateFingerprints now = fingerprints_of(copies_, biases_);
  for (std::size_t i = 0; i < now.fingerprints.size(); ++i)
    if (now.fingerprints[i] != fingerprints_.fingerprints[i])
      fail(
          "rank {}: its copy of the {}, which a step would be run again from, is not what was copied after "
          "step {}",
          rank_.index(), now.what[i], step_);
  trainer_.parameters().begin_update();
  for (std::size_t i = 0; i < state_.size(); ++i) move_bytes(copies_[i].tensor, state_[i].tensor);
  trainer_.stages().set_router_biases(biases_);
  trainer_.resume(step_, updates_);
}

}  // namespace echelon
