// Activation recomputation (Chen et al. 2016; Korthikanti et al. 2022): a list of a block's ops whose outputs
// are freed after their last reader in the forward pass, and recomputed in the backward pass.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace echelon {

struct BlockOp;
struct ModelSpec;

class Recompute {
 public:
  // Outputs of norms and activations are always recomputed: it costs less than keeping them.
  static const Recompute none;
  static const Recompute selective;  // attention's core: its output and log-sum-exp
  static const Recompute full;       // whole layers: only a layer's input is kept

  Recompute() = default;
  // Names or kinds of ops, in any order.
  explicit Recompute(const std::vector<std::string>& ops);

  bool everything() const { return everything_; }
  bool contains(const BlockOp& op) const;
  bool operator==(const Recompute&) const = default;

  const std::vector<std::string>& ops() const { return ops_; }

 private:
  bool everything_ = false;
  std::vector<std::string> ops_;  // sorted, without those that are always recomputed
};

// One for all pipeline ranks, or one for each: the first ranks of 1F1B hold more microbatches than the last.
class PipelineRecompute {
 public:
  PipelineRecompute(const Recompute& all = {}) : kinds_{all} {}
  explicit PipelineRecompute(std::vector<Recompute> kinds) : kinds_(std::move(kinds)) {}

  const Recompute& of(int pp_rank) const {
    return kinds_.size() == 1 ? kinds_.front() : kinds_.at(static_cast<std::size_t>(pp_rank));
  }
  const std::vector<Recompute>& kinds() const { return kinds_; }
  bool operator==(const PipelineRecompute&) const = default;

 private:
  std::vector<Recompute> kinds_;  // one for all ranks, or one per rank
};

std::string recompute_name(const Recompute& recompute);
std::string recompute_name(const PipelineRecompute& recompute);  // "full*2/none*2"
// Parses one list for all ranks, or one per rank separated by `/`, where `*n` repeats a list for n
// neighbours: full*2/none. Megatron's module names are accepted too. RequestError naming `field` if it is no
// such list; whether a model has these ops is checked separately (not_in_model()).
Recompute parse_recompute(const std::string& text, const std::string& field);
PipelineRecompute parse_pipeline_recompute(const std::string& text, const std::string& field);
// The names and kinds of a model's ops that a list may contain.
std::vector<std::string> recompute_names(const ModelSpec& model);
// The first entry that no layer of the model has; empty if there is none.
std::string not_in_model(const Recompute& recompute, const ModelSpec& model);

}  // namespace echelon
