// The stages of a plan: their layers and times, and what each pipeline rank runs and holds of them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/footprint.h"
#include "plan/layer_seconds.h"
#include "plan/packed_attention.h"
#include "plan/schedule_shelf.h"
#include "plan/state_seconds.h"
#include "plan/workload.h"
#include "schedule/balance.h"
#include "schedule/simulate.h"

namespace echelon {

// The time and the memory of one microbatch in each layer, for a mesh and one kind of recomputation.
struct LayerPrices {
  ModelSeconds seconds;
  SavedBytes saved;
  ParameterCounts counts;
};

// What bounds read of LayerPrices, of the whole model.
struct ModelTotals {
  double passes = 0;     // seconds of all passes of a microbatch
  double exchanged = 0;  // of these, the experts' exchanges
  double working = 0;    // bytes of the kind of layer that needs least at work
};

// What each pipeline rank runs and holds: does not depend on sharding over dp.
struct StageHoldings {
  const ScheduleFacts* facts = nullptr;
  std::vector<std::int64_t> layers;
  std::vector<PerKind> by_kind;            // the same by kind
  std::vector<const LayerPrices*> prices;  // of each rank
  std::vector<RankShare> ranks;
  std::vector<ShareCounts> counts;
};

// The same, with times.
struct StageShape : StageHoldings {
  std::vector<LayerSeconds> stages;
  std::optional<LayerSeconds> part;  // of the output layer, if each rank has a part of it
  double part_sharing = 0;           // like `sharing`, for V
  std::vector<double> sharing;  // seconds that gathers and sums along dp add to a microbatch, for each stage
  std::vector<double> to_host;  // seconds that transfers to the host and back add to it
  std::vector<double> saved;    // bytes that a microbatch keeps in each stage's layers
  std::optional<SimulationCosts> costs;
  std::vector<double> least_end;  // of each rank: its last instruction ends no earlier
  double least_pipeline = 0;      // nor does the pipeline
};

class Stages {
 public:
  // The workload must outlive this.
  Stages(const Workload& work, std::shared_ptr<ScheduleShelf> shelf);

  const StateSeconds& state() const { return state_; }
  const LayersByKind& by_kind() const { return programs_.by_kind; }
  // Why the schedule does not fit; empty if it does. Shapes must be legal (shape_problem()).
  std::string schedule_problem(const Plan& c);
  // Whether balancing its layers gives the even split.
  bool splits_evenly(const Plan& c);
  // If the output layer is cut, includes the parts' instructions, in this trainer's order for these stages.
  const Schedule& schedule(const Plan& c);
  // Whether pipeline ranks hold the same layers, and equally many of each in flight.
  bool same_holdings(const Plan& a, const Plan& b) const;
  // The same, and whether their passes are equal.
  bool same_passes(const Plan& a, const Plan& b) const;
  const LayerPrices& prices(const Plan& c, const Recompute& recompute) {
    return *priced(c, recompute).prices;
  }
  ModelTotals totals(const Plan& c, const Recompute& recompute) { return priced(c, recompute).totals; }
  const ScheduleFacts& facts(const Plan& c);
  // Both references are valid until the next call with another plan.
  const StageHoldings& holdings(const Plan& c);
  const StageShape& shape(const Plan& c);
  // Bytes that a rank sends to the next stage, per microbatch.
  double message_bytes(const Plan& c);
  // Seconds of a pipeline rank's data-parallel communication that nothing hides.
  double exposed(const Plan& c, const StageShape& shape, std::size_t rank) const;
  // The sums of gradients over pipeline ranks with the same parameters: a part of exposed().
  StateSeconds::Copies in_pipeline(const Plan& c, const StageShape& shape, std::size_t rank) const;
  // The effect of packed documents on attention; null if there are none.
  const PackedAttention* packed(const Plan& c);
  // Seconds that a pipeline waits because its microbatches have different amounts of attention.
  double uneven_microbatches(const Plan& c, const StageShape& shape);

 private:
  // Everything of a plan that its prices depend on, besides micro-batch and recomputation.
  using MeshKey = std::tuple<int, int, int, int, int, int, bool, PackedDocuments::Key>;

  struct Priced {
    std::int64_t micro_batch = 1;
    std::size_t recompute = 0;  // its place in `recomputed_`
    ModelTotals totals;
    std::unique_ptr<LayerPrices> prices;
  };
  // In order of micro-batches and recomputation. Of most a search reads the totals alone, mesh by mesh:
  // beside each other they are in few cache lines, of which it would otherwise wait for one at each.
  using OfMesh = std::vector<Priced>;
  // Valid until the next call.
  const Priced& priced(const Plan& c, const Recompute& recompute);
  ModelTotals totals_of(const Plan& c, const LayerPrices& prices) const;
  StageHoldings make_holdings(const Plan& c);
  StageShape make_shape(const Plan& c);
  // For each rank; shared by many plans.
  const std::vector<std::vector<RankShare::InFlight>>& in_flight(const ScheduleFacts& facts,
                                                                 const StageHoldings& s);
  void bound(const Plan& c, StageShape& shape) const;
  // `prices`: of each rank.
  std::vector<std::int64_t> layers(const Plan& c, const ScheduleFacts& facts,
                                   const std::vector<const LayerPrices*>& prices);
  // In a V, the sum of a rank's two stages counts: ranks are balanced as in this trainer. `extra`: seconds of
  // each stage besides its layers.
  const std::vector<std::int64_t>& balanced_v(const ScheduleFacts& facts,
                                              const std::vector<const LayerPrices*>& prices,
                                              const std::vector<double>& extra);
  std::vector<const LayerPrices*> rank_prices(const Plan& c);
  LayerSeconds stage_seconds(const Plan& c, const LayerPrices& p, const std::vector<std::int64_t>& layers,
                             const PerKind& by_kind, std::size_t stage) const;
  double message_seconds(const Plan& c);
  bool hands_over_parts(const Plan& c) const;

  const Workload& work_;
  OpSeconds ops_, wide_ops_;
  StateSeconds state_;
  ModelPrograms programs_;
  std::optional<PackedDocuments> documents_;
  std::shared_ptr<ScheduleShelf> shelf_;
  std::vector<Recompute> recomputed_;  // kinds priced so far; keys have an index into this
  std::map<MeshKey, OfMesh> prices_;
  std::pair<const MeshKey, OfMesh>* last_priced_ = nullptr;
  std::map<int, ParameterCounts> counts_;
  // By the prices of each rank, and its stages.
  std::map<std::pair<std::vector<const LayerPrices*>, std::vector<std::vector<StagePart>>>,
           std::vector<std::int64_t>>
      balanced_v_;
  std::map<std::pair<const ScheduleFacts*, std::vector<std::int64_t>>,
           std::vector<std::vector<RankShare::InFlight>>>
      in_flight_;
  Plan last_held_, last_shaped_;
  std::unique_ptr<StageHoldings> last_holdings_;
  std::unique_ptr<StageShape> last_shape_;
  Plan last_cut_;
  std::optional<Schedule> last_cut_schedule_;
};

}  // namespace echelon
