// Which plans a request leaves to look at, of those that its program runs: meshes, and for each of them
// micro-batches, pipelines and shardings.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/search_request.h"
#include "spec/recompute.h"

namespace echelon {

// What a plan is beside its mesh, micro-batch and recomputation.
struct PipelineChoice {
  std::string schedule;
  int chunks = 0;
  bool balanced = false;

  void place_in(Plan& plan) const;
};
struct ShardingChoice {
  int zero = 0, hsdp = 1;

  void place_in(Plan& plan) const;
};

// Every mesh that has the devices, its expert groups and its kind of context parallelism.
void each_mesh(const SearchRequest& request, const std::function<void(const Plan&)>& visit);
std::vector<std::int64_t> micro_batches(const SearchRequest& request, const Plan& plan);
// None where lacks_pipeline().
std::vector<PipelineChoice> pipelines(const SearchRequest& request, const Plan& plan);
// A schedule is asked for, other than what one rank runs.
bool lacks_pipeline(const SearchRequest& request, const Plan& plan);
std::vector<ShardingChoice> shardings(const SearchRequest& request, const Mesh& mesh);
// Of these names of recomputation those that the model has ops for.
std::vector<Recompute> recompute_kinds(const std::vector<std::string>& names, const ModelSpec& model);

// Meshes that the program does not run beside the stage of ZeRO that is given: they are left out, where any
// other is legal.
class MeshesBesideZero {
 public:
  explicit MeshesBesideZero(const SearchRequest& request);
  bool leave_out(const Plan& plan) const { return others_ && !runs(plan); }

 private:
  bool runs(const Plan& plan) const;

  const Software& software_;
  bool others_ = false;
};

// Further experts that a rank has room for: it needs none twice.
std::int64_t most_replicas(const ModelSpec& model, int ep);
inline bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

}  // namespace echelon
