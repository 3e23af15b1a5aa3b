// The parameters that one rank holds: values, gradients, first and second moments, and the views of them that
// layers and the optimizer use. If ZeRO shards them, layers still see whole tensors.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/rank.h"
#include "model/offloaded_moments.h"
#include "parallel/data_parallel.h"
#include "parallel/faults.h"
#include "parallel/zero.h"
#include "schedule/pipeline_layout.h"
#include "spec/shard_layout.h"
#include "tensor/sequence_sums.h"
#include "tensor/weight.h"

namespace echelon {

struct Parameter {
  ParamSpec spec;
  std::size_t index = 0;  // in ParameterStore::model()
  int group = 0;
  std::vector<int> holders;  // pipeline ranks that hold it; the first one counts and saves it
  // As layers see them, in local shapes. The memory of `gradient`, and in ZeRO 3 that of `value`, is
  // allocated and freed as needed. Frozen parameters have no gradient and no moments.
  Tensor value, gradient;
  std::vector<Tensor> waiting;  // see Weight
  bool value_stays = true;      // false in ZeRO 3
  // What this rank updates: elements [own.begin, own.end) of the local tensor; all of it without ZeRO. The
  // gradient summed over dp is only here, until the next update begins. Frozen parameters are sharded only in
  // ZeRO 3.
  Range own;
  Tensor own_value, own_gradient, exp_avg, exp_avg_sq;  // flat; moments are undefined if they are elsewhere
  bool is_updated_whole = false;                        // by Muon, which has no second moment
  // The rounding error of own_value, if the optimizer updates wider weights (base/split_weight.h).
  Tensor own_remainder;
  std::vector<std::int64_t> shard_sizes;  // size of `own` on each rank that it is sharded over
  Communicator* shard_group = nullptr;    // these ranks; nullptr if it is not sharded
};

// The weights that the optimizer updates, flat: own_value, or f32 (category other) reconstructed from it and
// its rounding error.
Tensor own_weights(const Rank& rank, const Parameter& parameter);
// Sets elements `part` of a parameter's local tensor, as far as this rank updates them. F is the optimizer's
// dtype: f32 for bf16 with rounding errors, else the parameter's own.
template <class F>
void store_values(std::span<const F> values, Range part, const Parameter& parameter);

// A range of a local tensor.
struct ParameterPiece {
  const Parameter* parameter;
  Range part;
};
// Appends what a rank holds of a parameter, in pieces that threads can fill independently.
void add_pieces(const Parameter& parameter, std::vector<ParameterPiece>& pieces);

// Whether the rank has the optimizer's moments; with parameter servers it has none.
enum class Moments { here, elsewhere };

// Initial values: drawn from the seed, or read from files by the caller before any other use. Adapters are
// always drawn, since weight files may lack them.
enum class FirstValues { drawn, read };

class ParameterStore {
 public:
  // Holds what the layout gives this rank. Drawn values depend on (seed, name, logical element) alone.
  ParameterStore(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline, std::uint64_t seed,
                 const Faults& faults = {}, Moments moments = Moments::here,
                 FirstValues first_values = FirstValues::drawn);

  const std::vector<Parameter>& all() const { return parameters_; }  // of this rank, group by group
  const std::vector<ParamSpec>& model() const { return model_->parameters; }  // see HeldModel
  // This rank's parameters, in the model's order.
  std::vector<const Parameter*> in_model_order() const;
  const Parameter* find_here(const std::string& name) const;  // nullptr on a rank that does not hold it
  const Parameter& find(const std::string& name) const;
  // The pipeline rank that counts and saves a parameter of the model.
  int owner_of(const std::string& name) const;
  Weight weight(const std::string& name) const;
  // Adjacent (out, in) parameters as one matrix with stacked rows (q, k, v; gate, up); or their biases as one
  // vector.
  Weight stacked(const std::vector<std::string>& names) const;
  // The output layer's matrix, and its bias. If a tied table is also looked up on this rank and a step has
  // several microbatches, gradients of lookups are kept apart from the output layer's until
  // add_tied_gradient(), so that the sum is grouped as on two pipeline ranks and gives the same bits. If the
  // lookups take fewer bytes than the table, their rows wait; otherwise this gradient is a table of its own.
  OutputWeights output_weights() const;
  // The embedding's table as used by multi-token prediction; its gradient is kept likewise.
  Weight next_table() const;

  const Tensor& values() const { return values_; }  // flat, all trained values; undefined in ZeRO 3
  // A range of that flat order that is reduced as one, or part of such a range. Not from ZeRO 2 on.
  Tensor gradient_range(Range range) const;
  // Flat: in ZeRO 3 this rank's shards, unit after unit; without ZeRO everything. Not in stages 1 and 2.
  const Tensor& own_values() const { return zero_ == 3 ? own_values_ : values_; }
  // Each unit's non-empty gradient shard, with memory that stays until an update begins.
  std::vector<Tensor> keep_own_gradients() const;
  // The gradients of all parameters that each tp rank holds whole.
  const Tensor& whole_gradients() const { return units_[trained_units_ - 1].gradient; }
  // Those of them that are partial in every plan, at their end (ParamSpec::tp_partial).
  Tensor partial_gradients() const {
    const Tensor& whole = whole_gradients();
    return whole.flat_range(whole.numel() - layout_.partial_range.size(), whole.numel());
  }
  const FlatLayout& layout() const { return layout_; }
  std::uint64_t seed() const { return seed_; }  // of initial values and stochastic rounding
  // How many ranks state is sharded over.
  int shards() const { return shards_.all; }
  const Shards& all_shards() const { return shards_; }
  OptimizerKind optimizer() const { return optimizer_; }

  // Begins an update: the previous gradients are freed. Each new one is allocated, as zeros, when it is
  // needed; until then activations can use the memory.
  void begin_gradients() const;
  // Frees the gradients before the next step begins; for use between steps, when nobody reads them any more.
  void drop_gradients() const;
  // Called before a layer group's gradients, or those of the output matrix and of next_table(), are added to.
  void need_gradients(int group) const;
  void need_output_gradient() const;
  // Allocates those that no pass has needed, as on a rank whose batch is padding, before they are summed over
  // ranks.
  void need_all_gradients() const;
  void add_tied_gradient() const;
  // The rows dy that a microbatch adds to the embedding table's gradient at these ids; the table begins with
  // first_id. For a tied table they may wait until add_tied_gradient(), and are kept here.
  bool lookups_wait() const { return lookups_wait_; }
  void add_lookups(Tensor ids, Tensor dy, std::int64_t first_id) const;
  // From now on gradients keep their addresses, and waiting lookups are summed in memory of their own: for
  // passes that are replayed as graphs.
  void keep_gradients();
  // The buckets that are summed over dp, in the order in which the backward pass completes them.
  const std::vector<GradientBucket>& gradient_buckets() const { return buckets_; }
  // The ranges of a layer group whose gradients are complete when its backward passes are over.
  std::vector<Range> gradient_ranges(int group) const;
  std::vector<BucketTensors> bucket_tensors() const;
  // Calls update(range of p.own, first, second moments) with moments that kernels can access: once, or piece
  // by piece.
  void with_moments(const Parameter& p, const OffloadedMoments::Update& update) const;
  bool offloads_moments() const { return offloaded_ != nullptr; }
  // Announces that another stream of the device reads this rank's own values until `event`; begin_update()
  // makes later work wait for it before anything changes them.
  void read_until(std::shared_ptr<DeviceEvent> event) const { reads_.push_back(std::move(event)); }
  void begin_update() const;
  // All-gathers the values that each rank has updated to all ranks that hold them whole.
  void share_values() const;

  // Whether values are gathered for their uses (ZeRO 3). A run of uses then begins with the layer groups that
  // will be used, in order, and all ranks of a block use the same ones. Otherwise the calls below do nothing.
  bool gathers() const { return gather_ != nullptr; }
  void begin_uses(std::vector<int> groups) const;
  void end_uses() const;
  // A group's layers may read its values as long as the result lives.
  class Use;
  [[nodiscard]] Use use(int group) const;
  // nullptr unless numerics are invariant.
  const SequenceTree* sequence_tree() const { return tree_.get(); }
  // Announces that a layer group's gradients, or those of the whole parameters, are summed: no partial sum
  // waits any more.
  void end_gradients(int group) const;
  void end_whole_gradients() const;
  // The part of a tied table's gradient that is kept apart; undefined if there is none.
  const Tensor& tied_gradient() const { return tied_gradient_; }
  // The lookups' share of multi-token prediction in that part, or in the gradient at the other end of the
  // pipeline: kept apart under invariant numerics.
  const Tensor& next_gradient() const { return next_gradient_; }
  const std::string& shared_name() const { return shared_name_; }
  int output_group() const { return find(output_name_).group; }
  const ParameterGather* gather() const { return gather_.get(); }

 private:
  // Gradients whose memory is allocated and freed together: a bucket, which under ZeRO is a unit.
  struct GradientMemory {
    Range range;
    Tensor gradient;              // flat
    std::vector<Tensor> waiting;  // beside it: see Weight
    int units = 0;
    // In this update: whether it was allocated; and how many units' gradients are complete.
    bool has_begun = false;
    int ended = 0;
  };
  // A unit of the shard layout; layers see `value` and `gradient`.
  struct Unit {
    ShardUnit cut;
    Tensor value, gradient, own_value, own_gradient;
    std::vector<Tensor> waiting;  // of its gradient's memory
    std::int64_t own_begin;       // where its shard begins in flat tensors of this rank's shards
  };
  void make_gradient_memory(Range range, bool experts);
  GradientMemory& memory_of(Range range) const;
  void acquire(const Tensor& gradient, const std::vector<Tensor>& waiting) const;
  void need_apart() const;  // tied_gradient() and next_gradient(), if kept
  void make_units();
  int levels_waiting(bool experts = false) const;
  // Allocates a gradient like the shared table's, with what waits beside it.
  Tensor gradient_apart(std::vector<Tensor>& waiting) const;
  Unit make_unit(const ShardUnit& cut, std::int64_t own_begin, bool frozen);
  void make_moments(const Plan& plan, std::int64_t own_size);
  Range own_range(std::size_t index) const;
  void make_gather(int ahead);
  void place(Parameter& parameter, std::size_t index, const Faults& faults);
  void draw_initial_values(std::uint64_t seed, FirstValues first_values);
  const Unit& unit_of(const Parameter& parameter) const;
  Communicator& group_of(const ShardUnit& cut) const;
  ShardedUnit sharded(const Unit& unit) const;
  // A view of a flat range that begins with a parameter, in that parameter's unit.
  Weight view(const Parameter& first, Range range, const std::vector<std::int64_t>& shape) const;
  void add_waiting_lookups() const;
  void begin_unit(std::size_t index) const;
  void end_unit(std::size_t index) const;

  const Rank* rank_;
  OptimizerKind optimizer_;
  int zero_;
  std::uint64_t seed_;
  Shards shards_, shard_;                              // how many, and which one this rank has
  Tensor values_, frozen_values_;                      // whole and flat, if they stay in memory
  Tensor own_values_, remainder_, exp_avg_;            // this rank's shards, unit after unit
  Tensor exp_avg_sq_;                                  // parameter after parameter, of those that have it
  std::int64_t squares_placed_ = 0;
  std::unique_ptr<OffloadedMoments> offloaded_;           // holds the moments if they are offloaded
  mutable std::vector<std::shared_ptr<DeviceEvent>> reads_;
  Tensor tied_gradient_;                               // of shared_name_, if kept apart
  Tensor next_gradient_;                               // see next_gradient()
  std::vector<Tensor> tied_waiting_, next_waiting_;
  struct Lookups {
    Tensor ids, dy;
    std::int64_t first_id = 0;
  };
  bool gradients_stay_ = false;
  bool looks_next_up_ = false;  // has multi-token prediction: see next_table()
  bool lookups_wait_ = false;
  mutable std::vector<Lookups> lookups_;  // of the microbatches so far, in order
  Tensor lookup_gradient_;                // or their sum: see keep_gradients()
  std::unique_ptr<SequenceTree> tree_;    // under invariant numerics
  std::string output_name_, output_bias_name_;  // the latter is empty if there is none
  std::string shared_name_;  // the table that both ends of the pipeline use, if any
  std::vector<Parameter> parameters_;
  std::shared_ptr<const HeldModel> model_;
  std::unordered_map<std::string, std::size_t> here_;  // index in parameters_
  FlatLayout layout_;
  std::unique_ptr<ParameterGather> gather_;  // in ZeRO 3
  std::vector<GradientBucket> buckets_;
  std::vector<Unit> units_;          // see shard_units(); then those of frozen_units()
  std::size_t trained_units_ = 0;    // the first ones
  mutable std::vector<GradientMemory> memories_;
};

class ParameterStore::Use {
 public:
  Use(const ParameterStore& parameters, int group) : gather_(parameters.gather_.get()) {
    if (gather_ != nullptr) gather_->use(group);
  }
  ~Use() {
    if (gather_ != nullptr) gather_->done();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  ParameterGather* gather_;
};
inline ParameterStore::Use ParameterStore::use(int group) const { return {*this, group}; }

}  // namespace echelon
