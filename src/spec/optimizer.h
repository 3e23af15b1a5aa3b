// Which optimizer updates which parameters, and which ranks make whole matrices for it.
#pragma once

#include <cstddef>
#include <vector>

#include "spec/choices.h"
#include "spec/param_spec.h"
#include "spec/shard_layout.h"

namespace echelon {

// adamw: all of them by AdamW (Loshchilov & Hutter 2019). muon: the matrices of layers by Muon (Jordan et al.
// 2024), all others by AdamW (train/muon.h).
enum class OptimizerKind { adamw, muon };
template <>
inline constexpr std::array choice_names<OptimizerKind>{"adamw", "muon"};

// Whether Muon updates it: a matrix that products use, but not the embedding or the output layer, whose rows
// stand for tokens.
bool is_updated_whole(OptimizerKind optimizer, const ParamSpec& spec);

// Newton-Schulz iterations of a step of Muon, and the FLOPs of all of them on a whole matrix.
inline constexpr int muon_iterations = 5;
double muon_flops(const ParamSpec& spec);

// Matrices that ranks make whole at once, one each at most: `matrices[k]` on the rank that is number k %
// shards of those that ZeRO shards it over, and k / shards along tp.
struct MuonRound {
  std::vector<std::size_t> matrices;  // indices of the specs
  int shards = 1;
  int tp = 1;  // 1, too, for matrices that are not cut over tp: each rank makes them
};
// The rounds of a step for what a rank holds, the largest matrices first, so that those of a round are alike:
// of what ZeRO shards over all ranks of a block, and of routed experts.
std::vector<MuonRound> muon_rounds(OptimizerKind optimizer, const std::vector<const ParamSpec*>& specs,
                                   const Shards& shards, int tp);

}  // namespace echelon
