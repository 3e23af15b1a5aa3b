// Stages of a configuration: their layers and times, and what each pipeline rank runs and holds of them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "plan/configuration.h"
#include "plan/footprint.h"
#include "plan/layer_seconds.h"
#include "plan/schedule_shelf.h"
#include "plan/state_seconds.h"
#include "schedule/simulate.h"

namespace echelon {

// What one microbatch takes and keeps in each layer of a mesh.
struct LayerPrices {
  ModelSeconds seconds;
  SavedBytes saved;
  ParameterCounts counts;
};

struct StageShape {
  const ScheduleFacts* facts = nullptr;
  std::vector<std::int64_t> layers;
  std::vector<LayerSeconds> stages;
  std::vector<double> sharing;  // seconds that gathers and sums along dp add to a microbatch, of each stage
  std::vector<RankShare> ranks;
  std::vector<ShareCounts> counts;
  std::optional<SimulationCosts> costs;
  std::vector<double> least_end;  // of each rank: its last instruction ends no earlier
  double least_pipeline = 0;      // nor the pipeline
};

class Stages {
 public:
  // The workload outlives this.
  explicit Stages(const Workload& work);

  const StateSeconds& state() const { return state_; }
  // Why the schedule does not fit; empty where it does. Shapes must be legal (shape_problem()).
  std::string schedule_problem(const Configuration& c);
  // Whether balancing its layers gives the even split.
  bool splits_evenly(const Configuration& c);
  const Schedule& schedule(const Configuration& c);
  // What of the configuration the passes of the pipeline depend on: those that are the same run the same.
  Configuration of_passes(const Configuration& c) const;
  // Both stay until the next call with another configuration.
  const LayerPrices& prices(const Configuration& c);
  const StageShape& shape(const Configuration& c);
  // That a rank hands to the next stage, of a microbatch.
  double message_bytes(const Configuration& c);
  // Seconds of data-parallel traffic of a pipeline rank that nothing hides.
  double exposed(const Configuration& c, const StageShape& shape, std::size_t rank) const;

 private:
  using PriceKey = std::tuple<int, int, int, int, int, bool, std::string, std::int64_t>;

  const ScheduleFacts& facts(const Configuration& c);
  StageShape make_shape(const Configuration& c);
  void bound(const Configuration& c, StageShape& shape) const;
  std::vector<std::int64_t> layers(const Configuration& c, const ScheduleFacts& facts);
  LayerSeconds stage_seconds(const Configuration& c, const LayerPrices& p,
                             const std::vector<std::int64_t>& layers, std::size_t stage) const;
  double message_seconds(const Configuration& c);
  bool hands_over_parts(const Configuration& c) const;

  const Workload& work_;
  Plan plan_;  // of the configuration that is looked at
  OpSeconds ops_;
  StateSeconds state_;
  ScheduleShelf shelf_;
  std::map<PriceKey, LayerPrices> prices_;
  std::map<int, ParameterCounts> counts_;
  Configuration last_shaped_;
  std::unique_ptr<StageShape> last_shape_;
};

}  // namespace echelon
