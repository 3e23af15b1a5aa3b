#include "train/planted_flip.h"

#include <array>

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {
namespace {

constexpr std::array<std::pair<const char*, FlipWhere>, 5> flip_places{
    {{"weights", FlipWhere::weights},
     {"moments", FlipWhere::moments},
     {"gradients", FlipWhere::gradients},
     {"activations", FlipWhere::activations},
     {"messages", FlipWhere::messages}}};

std::uint64_t bits_of(const Tensor& tensor) {
  return tensor.defined() ? 8 * static_cast<std::uint64_t>(tensor.bytes()) : 0;
}

std::uint64_t bits_of(const std::vector<Tensor>& all) {
  std::uint64_t bits = 0;
  for (const Tensor& tensor : all) bits += bits_of(tensor);
  return bits;
}

}  // namespace

const char* name_of(FlipWhere where) {
  for (const auto& [name, value] : flip_places)
    if (value == where) return name;
  return "?";
}

std::optional<FlipWhere> parse_flip_where(const std::string& text) {
  for (const auto& [name, value] : flip_places)
    if (text == name) return value;
  return {};
}

std::string text_of(const PlantedFlip& flip) {
  return fmt::format("--flip {}:{}:{}:{}", flip.rank, flip.step, flip.bit, name_of(flip.where));
}

void FlipPlanter::add_to(TrainerHooks& hooks) {
  switch (flip_.where) {
    case FlipWhere::weights:
    case FlipWhere::moments:
      hooks.before_instruction = [this, before = hooks.before_instruction](std::int64_t step,
                                                                           const Instruction& i) {
        if (before) before(step, i);
        if (due_) strike_state();
      };
      return;
    case FlipWhere::gradients:
      hooks.before_sum = [this](int group) {
        if (due_) strike_gradients(group);
      };
      hooks.after_sums = [this] {
        if (due_) strike_gradients({});
      };
      return;
    case FlipWhere::activations:
      hooks.after_forward = [this](const Stage::Saved& saved) {
        if (due_) strike_kept(saved);
      };
      return;
    case FlipWhere::messages:
      return;  // the witness knows them
  }
}

void FlipPlanter::begin_step(std::int64_t step) {
  if (flip_.where == FlipWhere::messages) {
    if (step == flip_.step && (!due_ || flip_.lasting)) {
      due_ = true;
      witness_.plant(flip_.bit);
    }
    return;
  }
  due_ = step == flip_.step && (flip_.lasting || !struck_);
}

void FlipPlanter::strike(const std::vector<Tensor>& all) {
  const std::uint64_t bits = bits_of(all);
  if (bits == 0) return;
  std::uint64_t at = flip_.bit % bits;
  for (const Tensor& tensor : all) {
    if (at < bits_of(tensor)) return strike(tensor, at);
    at -= bits_of(tensor);
  }
}

void FlipPlanter::strike(const Tensor& tensor, std::uint64_t bit) {
  const HostBytes bytes(tensor, true);
  change_bit(bytes.data(), bit);
  bytes.store();
  struck_ = true;
  due_ = false;
}

void FlipPlanter::strike_state() {
  due_ = false;
  parameters_->begin_update();
  std::vector<Tensor> all;
  for (const Parameter& p : parameters_->all()) {
    if (flip_.where == FlipWhere::weights) {
      all.push_back(p.value_stays ? p.value : p.own_value);
      if (p.own_remainder.defined()) all.push_back(p.own_remainder);
    } else if (!p.spec.frozen) {
      all.push_back(p.exp_avg);
      if (!p.is_updated_whole) all.push_back(p.exp_avg_sq);
    }
  }
  strike(all);
}

void FlipPlanter::strike_gradients(std::optional<int> group) {
  std::uint64_t bits = 0;
  for (const Parameter& p : parameters_->all())
    if (!p.spec.frozen) bits += bits_of(p.gradient) + bits_of(p.own_gradient);
  if (bits == 0) return;
  std::uint64_t at = flip_.bit % bits;
  for (const bool summed : {false, true})
    for (const Parameter& p : parameters_->all()) {
      if (p.spec.frozen) continue;
      const Tensor& tensor = summed ? p.own_gradient : p.gradient;
      if (at >= bits_of(tensor)) {
        at -= bits_of(tensor);
        continue;
      }
      if (summed == !group.has_value() && (summed || p.group == *group)) strike(tensor, at);
      return;
    }
}

// Numbers alone: what counts and places what follows may end the process, which is found too.
void FlipPlanter::strike_kept(const Stage::Saved& saved) {
  std::vector<Tensor> all;
  for (const BlockState& block : saved)
    for (const Tensor& value : block.values)
      if (value.defined() && value.has_memory() && value.contiguous() && value.dtype() != DType::i32)
        all.push_back(value);
  strike(all);
}

}  // namespace echelon
