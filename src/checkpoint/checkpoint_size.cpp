#include "checkpoint/checkpoint_size.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"
#include "checkpoint/checkpoint_carried.h"
#include "spec/optimizer.h"

namespace echelon {

std::int64_t checkpoint_bytes(const Plan& plan) {
  std::vector<ParamSpec> model;
  for (const auto& group : parameter_groups(plan.model))
    model.insert(model.end(), group.begin(), group.end());
  std::int64_t numbers = 0;
  for (const ParamSpec& spec : model) {
    const int moments = spec.frozen ? 0 : is_updated_whole(plan.optimizer, spec) ? 1 : 2;
    numbers += spec.numel() * (1 + moments);
  }
  const std::int64_t biases =
      plan.balancing.bias_rate > 0 ? plan.model.num_routed_layers() * plan.model.num_experts : 0;
  return numbers * element_bytes(plan.precision.master) + biases * element_bytes(DType::f64) +
         carried_bytes(plan, model);
}

std::int64_t CheckpointDemand::most() const {
  return keep > 0 ? std::min(written, keep + 1 - std::min(there, keep)) : written;
}

std::string small_disk_note(const std::string& directory, double free, std::int64_t one,
                            const CheckpointDemand& demand) {
  const auto bytes = static_cast<double>(one);
  const std::int64_t most = demand.most();
  if (free >= bytes * static_cast<double>(most)) return "";
  const auto fit = static_cast<std::int64_t>(free / bytes);
  std::string note = fmt::format("--checkpoint {}: the disk has {} left, ", directory, format_bytes(free));
  if (fit == 0) return note + fmt::format("and a checkpoint takes {}", format_bytes(bytes));
  note += fmt::format("for {} of {}, and ", counted(fit, "checkpoint"), format_bytes(bytes));
  note += demand.keep == 0 ? fmt::format("this run writes {}", most)
                           : fmt::format("--keep {} needs {} more", demand.keep, most);
  const std::int64_t keep = fit + demand.there - 1;
  return keep < 1 ? note : note + fmt::format("; --keep {} has room", keep);
}

}  // namespace echelon
