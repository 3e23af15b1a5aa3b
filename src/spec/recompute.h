// What the backward pass makes again instead of keeping it (Chen et al. 2016; Korthikanti et al. 2022): a
// list of a block's ops, whose outputs go when their last reader in the forward pass has read them.
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
  // A norm's output and an activation's are always made again: it costs less than to keep them.
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
  std::vector<std::string> ops_;  // sorted, without those that always are
};

// The same on all pipeline ranks, or one for each: 1F1B's first ranks hold more microbatches than its last.
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
  std::vector<Recompute> kinds_;  // one for all, or by rank
};

std::string recompute_name(const Recompute& recompute);
std::string recompute_name(const PipelineRecompute& recompute);  // "full*2/none*2"
// One for all ranks, or for each with `/` between, those of as many neighbours as stand behind a `*`:
// full*2/none. Also Megatron's names of modules. RequestError naming `field` where it is no list; whether a
// model has such ops is a question of its own.
Recompute parse_recompute(const std::string& text, const std::string& field);
PipelineRecompute parse_pipeline_recompute(const std::string& text, const std::string& field);
// Names and kinds of a model's ops that a list may have.
std::vector<std::string> recompute_names(const ModelSpec& model);
// The first of a list that no layer of the model has; empty where there is none.
std::string not_in_model(const Recompute& recompute, const ModelSpec& model);

}  // namespace echelon
