// The versions of a rank's weights that a schedule without a flush keeps: weight stashing (PipeDream,
// Narayanan et al. 2019, https://arxiv.org/abs/1806.03377) and double buffering (2BW, Narayanan et al. 2021,
// https://arxiv.org/abs/2006.09503). Layers keep their views; the contents of that memory change.
#pragma once

#include <map>
#include <vector>

#include "comm/rank.h"

namespace echelon {

class WeightVersions {
 public:
  // `values`: what layers view; version 0 at first. `count`: the most versions at once, including that one.
  WeightVersions(const Rank& rank, Tensor values, int count);

  // Begins a stream: what layers see becomes version 0, the only one.
  void restart();
  // Layers see this version until the next call.
  void use(int version);
  // keep(): a microbatch's forward pass used this version, which stays until drop() after its backward pass.
  void keep(int version) { ++readers_[version]; }
  void drop(int version) { --readers_[version]; }
  // The newest version becomes `version` + 1, which layers see and the optimizer changes. The old one stays
  // if there is memory for it; otherwise it must have no readers.
  void advance(int version);

 private:
  struct Stash {
    Tensor memory;
    int version = -1;  // none
  };
  Kernels* kernels_;
  Tensor values_;
  int present_ = 0;  // the version that layers see
  std::vector<Stash> stash_;
  std::map<int, int> readers_;
};

}  // namespace echelon
