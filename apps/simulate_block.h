// The flags of simulate --block, which draws the blocks of a model.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace echelon {

struct BlockFlags {
  void add_to(CLI::App& app);
  bool is_asked() const { return !out_.empty(); }
  // RequestError for a flag of another kind of simulation, or for a flag of this kind without --block.
  void refuse_strangers() const;
  void draw() const;

 private:
  const CLI::App* app_ = nullptr;
  std::string out_, sequence_parallel_, recompute_ = "none";
  int tp_ = 1;
};

}  // namespace echelon
