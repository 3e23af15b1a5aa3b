// The versions of a rank's weights that a schedule without a flush keeps: weight stashing (PipeDream,
// Narayanan et al. 2019, https://arxiv.org/abs/1806.03377) and double buffering (2BW, Narayanan et al. 2021,
// https://arxiv.org/abs/2006.09503). The layers keep their views; the memory behind them changes.
#pragma once

#include <map>
#include <vector>

#include "comm/rank.h"

namespace echelon {

class WeightVersions {
 public:
  // `values`: what the layers view; version 0 at first. `count` versions at once, that one included.
  WeightVersions(const Rank& rank, Tensor values, int count);

  // A stream begins: what the layers see is version 0, and there is no other.
  void restart();
  // The layers see this version until the next call.
  void use(int version);
  // A microbatch has been forward with a version, which is kept until the microbatch has been backward.
  void keep(int version) { ++readers_[version]; }
  void drop(int version) { --readers_[version]; }
  // The newest version becomes `version` + 1, and is what the layers see and the optimizer changes. The old
  // one stays if there is room for it; it must not have readers if there is none.
  void advance(int version);

 private:
  struct Stash {
    Tensor memory;
    int version = -1;  // none
  };
  Kernels* kernels_;
  Tensor values_;
  int present_ = 0;  // version behind the layers' views
  std::vector<Stash> stash_;
  std::map<int, int> readers_;
};

}  // namespace echelon
