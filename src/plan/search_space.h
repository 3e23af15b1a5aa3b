// Enumerates the plans that a request leaves open and its program runs: meshes, and for each of them
// micro-batches, pipelines and shardings.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/search_request.h"
#include "spec/recompute.h"

namespace echelon {

// What the search varies of a plan besides its micro-batch and recomputation. Each choice says all of its own
// fields.
struct MeshChoice {
  Mesh mesh;
  ContextKind context_kind{};
  ContextBalance context_balance{};

  static MeshChoice of(const Plan& plan) { return {plan.mesh, plan.context_kind, plan.context_balance}; }
  void place_in(Plan& plan) const;
};
struct PipelineChoice {
  std::string schedule;
  int chunks = 0;
  bool balanced = false;

  void place_in(Plan& plan) const;
  auto operator<=>(const PipelineChoice&) const = default;
};
struct ShardingChoice {
  int zero = 0, hsdp = 1;

  static ShardingChoice of(const Plan& plan) { return {plan.zero, plan.hsdp}; }
  void place_in(Plan& plan) const;
  auto operator<=>(const ShardingChoice&) const = default;
};

// The plan that these choices are placed in: what all plans of the search have.
Plan open_plan(const SearchRequest& request);
// Visits every mesh with these devices, with its expert groups and its kind of context parallelism: as
// open_plan() with a MeshChoice. Ends early if `visit` returns false.
void each_mesh(const SearchRequest& request, const std::function<bool(const Plan&)>& visit);
std::vector<std::int64_t> micro_batches(const SearchRequest& request, const Plan& plan);
// Empty if lacks_pipeline().
std::vector<PipelineChoice> pipelines(const SearchRequest& request, const Plan& plan);
// Whether a schedule is given that one pipeline rank cannot run.
bool lacks_pipeline(const SearchRequest& request, const Plan& plan);
std::vector<ShardingChoice> shardings(const SearchRequest& request, const Mesh& mesh);
// The recomputations of these names for which the model has ops.
std::vector<Recompute> recompute_kinds(const std::vector<std::string>& names, const ModelSpec& model);

// Meshes with which the program does not run the given ZeRO stage: they are left out if another mesh is
// legal.
class MeshesBesideZero {
 public:
  explicit MeshesBesideZero(const SearchRequest& request);
  bool leave_out(const Plan& plan) const { return others_ && !runs(plan); }

 private:
  bool runs(const Plan& plan) const;

  const Software& software_;
  bool others_ = false;
};

// The most additional experts that a rank can hold: it needs none of them twice.
std::int64_t most_replicas(const ModelSpec& model, int ep);
inline bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

}  // namespace echelon
