// The parameters that one rank holds: values, gradients, first and second moments, and the views of them that
// layers and optimizer use. Where ZeRO cuts them over ranks, the layers still see whole tensors.
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
  // As the layers see them, in local shapes. The memory behind `gradient` comes and goes, that behind `value`
  // in ZeRO 3. What is frozen has no gradient, and no moments.
  Tensor value, gradient;
  std::vector<Tensor> waiting;  // see Weight
  bool value_stays = true;      // not in ZeRO 3
  // What this rank updates: elements [own.begin, own.end) of the local tensor, everything without ZeRO. The
  // sum of the gradients over dp is here, and nowhere else, until the next update begins. What is frozen is
  // cut in ZeRO 3 alone.
  Range own;
  Tensor own_value, own_gradient, exp_avg, exp_avg_sq;  // flat; no moments where these are elsewhere
  // What own_value is rounded off by, where the optimizer updates wider weights (base/split_weight.h).
  Tensor own_remainder;
  std::vector<std::int64_t> shard_sizes;  // of `own` on each rank that it is cut over
  Communicator* shard_group = nullptr;    // these ranks; nullptr where it is not cut
};

// What the optimizer updates of a parameter, flat: own_value, or f32 (category other) made of it and of what
// it is rounded off by.
Tensor own_weights(const Rank& rank, const Parameter& parameter);
// What a rank holds of elements `part` of a parameter's local tensor becomes these. F is what its optimizer
// updates: f32 where it holds bf16 and what that is rounded off by, else what it holds.
template <class F>
void store_values(std::span<const F> values, Range part, const Parameter& parameter);

// Elements of a local tensor.
struct ParameterPiece {
  const Parameter* parameter;
  Range part;
};
// What a rank holds of it, in pieces that threads fill each by itself.
void add_pieces(const Parameter& parameter, std::vector<ParameterPiece>& pieces);

// Whether a rank's optimizer is its own. Elsewhere, on parameter servers: it has no moments.
enum class Moments { here, elsewhere };

// What values are at first: drawn from the seed, or read from files by whoever asks for that, before anything
// else is done with them. Adapters are drawn in any case, since files of weights may have none.
enum class FirstValues { drawn, read };

class ParameterStore {
 public:
  // What the layout gives this rank. Values that are drawn are so from (seed, name, logical element) alone.
  ParameterStore(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline, std::uint64_t seed,
                 const Faults& faults = {}, Moments moments = Moments::here,
                 FirstValues first_values = FirstValues::drawn);

  const std::vector<Parameter>& all() const { return parameters_; }  // of this rank, group by group
  const std::vector<ParamSpec>& model() const { return model_->parameters; }  // see HeldModel
  // This rank's in the order of the model.
  std::vector<const Parameter*> in_model_order() const;
  const Parameter* find_here(const std::string& name) const;  // nullptr on a rank that does not hold it
  const Parameter& find(const std::string& name) const;
  // The pipeline rank that counts and saves a parameter of the model.
  int owner_of(const std::string& name) const;
  Weight weight(const std::string& name) const;
  // Adjacent (out, in) parameters used as one matrix, rows stacked: q, k, v; gate, up. Or their biases, as
  // one vector.
  Weight stacked(const std::vector<std::string>& names) const;
  // The matrix of the output layer. Where a tied table is looked up on the same rank and there are several
  // microbatches, what the lookups add is kept apart from what the output layer does until
  // add_tied_gradient(), so that the sum is grouped as on two pipeline ranks: the same bits. Where they are
  // fewer bytes than the table has, the rows of the lookups wait; else this gradient is a table of its own.
  Weight output_weight() const;
  // The embedding's table where a module behind the last layer looks next tokens up: its gradient as there.
  Weight next_table() const;

  const Tensor& values() const { return values_; }  // flat, everything that is trained; undefined in ZeRO 3
  // Of that flat order a range that is reduced as one, or a part of such a range. Not from ZeRO 2 on.
  Tensor gradient_range(Range range) const;
  // Flat: this rank's shards, unit after unit, in ZeRO 3, and everything without ZeRO. Not in stages 1 and 2.
  const Tensor& own_values() const { return zero_ == 3 ? own_values_ : values_; }
  // For each unit its gradient's shard, where that is not empty, with memory, which stays until an update
  // begins.
  std::vector<Tensor> keep_own_gradients() const;
  // The gradients of all parameters that each tp rank holds whole.
  const Tensor& whole_gradients() const { return units_[trained_units_ - 1].gradient; }
  // Of those the ones that are partial whatever the plan, at their end (ParamSpec::tp_partial).
  Tensor partial_gradients() const {
    const Tensor& whole = whole_gradients();
    return whole.flat_range(whole.numel() - layout_.partial_range.size(), whole.numel());
  }
  const FlatLayout& layout() const { return layout_; }
  std::uint64_t seed() const { return seed_; }  // of initial values, and of what is rounded at random
  // Ranks of a block over which state is cut.
  int shards() const { return shards_.all; }

  // An update's gradients begin, and those of the one before go. Each comes, as zeros, when it is needed:
  // until then activations have the memory.
  void begin_gradients() const;
  // Between steps, where nobody reads them any more: their memory goes before the next step begins.
  void drop_gradients() const;
  // A layer group's gradients, or those of the output layer's matrix and of next_table(), are about to be
  // added to.
  void need_gradients(int group) const;
  void need_output_gradient() const;
  // All that no pass has needed, as on a rank whose batch is padding, before they are summed over ranks.
  void need_all_gradients() const;
  void add_tied_gradient() const;
  // What a microbatch adds to the embedding's table, rows dy of these ids; the table begins with first_id. Of
  // a tied table it may wait for add_tied_gradient(): then this keeps it.
  bool lookups_wait() const { return lookups_wait_; }
  void add_lookups(Tensor ids, Tensor dy, std::int64_t first_id) const;
  // From now on gradients stay where they are, and what waits is added up in memory of its own: for passes
  // that run again as graphs, which have their addresses, and whose memory is not to be kept.
  void keep_gradients();
  // What is summed over dp, in the order in which the backward pass completes it.
  const std::vector<GradientBucket>& gradient_buckets() const { return buckets_; }
  // In a layer group: ranges that have their gradients when its backward passes are over.
  std::vector<Range> gradient_ranges(int group) const;
  std::vector<BucketTensors> bucket_tensors() const;
  // update(range of p.own, first, second moments) where kernels find them: once, or for one piece after
  // another.
  void with_moments(const Parameter& p, const OffloadedMoments::Update& update) const;
  bool offloads_moments() const { return offloaded_ != nullptr; }
  // What is this rank's own is read on another stream of its device until then; begin_update() lets what is
  // queued behind it wait for that: before anything changes it.
  void read_until(std::shared_ptr<DeviceEvent> event) const { reads_.push_back(std::move(event)); }
  void begin_update() const;
  // Every rank has updated what is its own: the values go to all that hold them whole.
  void share_values() const;

  // Whether values are gathered for their uses (ZeRO 3). Then a run of uses begins with the layer groups that
  // will be used, in order, and all ranks of a block go through the same ones. Without it all this does
  // nothing.
  bool gathers() const { return gather_ != nullptr; }
  void begin_uses(std::vector<int> groups) const;
  void end_uses() const;
  // The layers of a group may read its values while what this returns lives.
  class Use;
  [[nodiscard]] Use use(int group) const;
  // Under invariant numerics; else nullptr.
  const SequenceTree* sequence_tree() const { return tree_.get(); }
  // A layer group's gradients, or those of the whole parameters, have been added up: no sum waits any more.
  void end_gradients(int group) const;
  void end_whole_gradients() const;
  // The part of a tied table's gradient that is kept apart; undefined where there is none.
  const Tensor& tied_gradient() const { return tied_gradient_; }
  // Of that part, or of the gradient on the other end of the pipeline, what looking next tokens up adds: kept
  // apart under invariant numerics.
  const Tensor& next_gradient() const { return next_gradient_; }
  const std::string& shared_name() const { return shared_name_; }
  int output_group() const { return find(output_name_).group; }
  const ParameterGather* gather() const { return gather_.get(); }

 private:
  // Gradients whose memory comes and goes as one: of a bucket, which under ZeRO is a unit.
  struct GradientMemory {
    Range range;
    Tensor gradient;              // flat
    std::vector<Tensor> waiting;  // beside it: see Weight
    int units = 0;
    // In this update: whether it is there, or was; and how many units' gradients are added up.
    bool has_begun = false;
    int ended = 0;
  };
  // A unit of the shard layout; `value` and `gradient` are what the layers see.
  struct Unit {
    ShardUnit cut;
    Tensor value, gradient, own_value, own_gradient;
    std::vector<Tensor> waiting;  // of its gradient's memory
    std::int64_t own_begin;       // where its shard lies in flat tensors of this rank's shards
  };
  void make_gradient_memory(Range range, bool experts);
  GradientMemory& memory_of(Range range) const;
  void acquire(const Tensor& gradient, const std::vector<Tensor>& waiting) const;
  void need_apart() const;  // tied_gradient() and next_gradient(), where they are kept
  void make_units();
  int levels_waiting(bool experts = false) const;
  // As the shared table's, with what waits beside it.
  Tensor gradient_apart(std::vector<Tensor>& waiting) const;
  Unit make_unit(const ShardUnit& cut, std::int64_t own_begin, bool frozen);
  void make_moments(const Plan& plan, std::int64_t own_size);
  void make_gather(int ahead);
  void place(Parameter& parameter, std::size_t index, const Faults& faults);
  void draw_initial_values(std::uint64_t seed, FirstValues first_values);
  const Unit& unit_of(const Parameter& parameter) const;
  Communicator& group_of(const ShardUnit& cut) const;
  ShardedUnit sharded(const Unit& unit) const;
  // A flat range that begins with a parameter, in that parameter's unit.
  Weight view(const Parameter& first, Range range, const std::vector<std::int64_t>& shape) const;
  void add_waiting_lookups() const;
  void begin_unit(std::size_t index) const;
  void end_unit(std::size_t index) const;

  const Rank* rank_;
  int zero_;
  std::uint64_t seed_;
  Shards shards_, shard_;                              // how many, and which one this rank has
  Tensor values_, frozen_values_;                      // whole and flat, where they stay in memory
  Tensor own_values_, remainder_, exp_avg_, exp_avg_sq_;  // this rank's shards, unit after unit
  std::unique_ptr<OffloadedMoments> offloaded_;        // behind the moments, where they are offloaded
  mutable std::vector<std::shared_ptr<DeviceEvent>> reads_;
  Tensor tied_gradient_;                               // defined where it is kept apart: of shared_name_
  Tensor next_gradient_;                               // see next_gradient()
  std::vector<Tensor> tied_waiting_, next_waiting_;
  struct Lookups {
    Tensor ids, dy;
    std::int64_t first_id = 0;
  };
  bool gradients_stay_ = false;
  bool looks_next_up_ = false;  // behind the last layer: see next_table()
  bool lookups_wait_ = false;
  mutable std::vector<Lookups> lookups_;  // of the microbatches so far, in order
  Tensor lookup_gradient_;                // or their sum: see keep_gradients()
  std::unique_ptr<SequenceTree> tree_;    // under invariant numerics
  std::string output_name_;
  std::string shared_name_;  // of the table that both ends of the pipeline use, where they do
  std::vector<Parameter> parameters_;
  std::shared_ptr<const HeldModel> model_;
  std::unordered_map<std::string, std::size_t> here_;  // index in parameters_
  FlatLayout layout_;
  std::unique_ptr<ParameterGather> gather_;  // in ZeRO 3
  std::vector<GradientBucket> buckets_;
  std::vector<Unit> units_;          // see shard_units(); behind them those of frozen_units()
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
