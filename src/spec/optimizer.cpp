#include "spec/optimizer.h"

#include <algorithm>

namespace echelon {

bool is_updated_whole(OptimizerKind optimizer, const ParamSpec& spec) {
  return optimizer == OptimizerKind::muon && spec.shape.size() == 2 && spec.multiplies &&
         !spec.is_vocabulary && !spec.frozen;
}

double muon_flops(const ParamSpec& spec) {
  const auto shorter = static_cast<double>(std::min(spec.shape[0], spec.shape[1])),
             longer = static_cast<double>(std::max(spec.shape[0], spec.shape[1]));
  return muon_iterations * shorter * shorter * (4 * longer + 2 * shorter);
}

std::vector<MuonRound> muon_rounds(OptimizerKind optimizer, const std::vector<const ParamSpec*>& specs,
                                   const Shards& shards, int tp) {
  std::vector<MuonRound> rounds;
  if (optimizer != OptimizerKind::muon) return rounds;
  for (const bool experts : {false, true})
    for (const bool is_cut : {true, false}) {
      std::vector<std::size_t> all;
      for (std::size_t i = 0; i < specs.size(); ++i)
        if (is_updated_whole(optimizer, *specs[i]) && (specs[i]->expert >= 0) == experts &&
            (tp > 1 && specs[i]->shard_dim >= 0) == is_cut)
          all.push_back(i);
      std::stable_sort(all.begin(), all.end(), [&](std::size_t i, std::size_t j) {
        return muon_flops(*specs[i]) > muon_flops(*specs[j]);
      });
      const int along_tp = is_cut ? tp : 1;
      const int of_state = experts ? shards.experts : shards.all;
      const auto at_once = static_cast<std::size_t>(of_state) * static_cast<std::size_t>(along_tp);
      for (std::size_t begin = 0; begin < all.size(); begin += at_once) {
        const std::size_t end = std::min(begin + at_once, all.size());
        rounds.push_back({{all.begin() + static_cast<std::ptrdiff_t>(begin),
                           all.begin() + static_cast<std::ptrdiff_t>(end)},
                          of_state,
                          along_tp});
      }
    }
  return rounds;
}

}  // namespace echelon
