#include "train/rehearsal.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <limits>
#include <mutex>
#include <numeric>

#include "base/philox.h"
#include "comm/threads.h"
#include "plan/layers_by_kind.h"
#include "tensor/host.h"
#include "train/muon.h"
#include "train/random_tokens.h"
#include "train/this_machine.h"
#include "train/trainer.h"

namespace echelon {
namespace {

constexpr auto patience = std::chrono::hours(1);

constexpr int tries = 4;
constexpr std::int64_t fewest_elements = 1 << 16;

// Meshes of the rehearsal, one behind the other: as many ranks as the job has, where they are not too many.
struct Stand {
  int meshes = 1, ranks = 1;
  double cores_each = 1;  // that a rank has of those that it wants, when all compute
};
Stand stand_of(const Mesh& mesh, int job_ranks, const JobCores& cores) {
  constexpr int most_ranks = 16;
  Stand stand;
  stand.meshes = std::max(1, std::min(job_ranks, most_ranks) / mesh.num_ranks());
  stand.ranks = stand.meshes * mesh.num_ranks();
  stand.cores_each = std::min(1.0, cores.cores / (stand.ranks * cores.wanted));
  return stand;
}

// Ranks whose work is rehearsed beside each other. Of processes the first rehearses for all, on its own
// device: as many as share that one.
int job_ranks(const Plan& plan, const RunOptions& options) {
  const int ranks = plan.mesh.num_ranks();
  const bool on_own_device = options.driver != nullptr && options.processes != nullptr;
  return on_own_device ? options.most_ranks_on_a_device(ranks) : ranks;
}

// From the first rank's beginning to the last one's end: which rank that is, where they share cores, the
// operating system says.
class SharedStopwatch {
 public:
  // By one rank, between two barriers.
  void reset() {
    begin_ = Clock::time_point::max();
    end_ = Clock::time_point::min();
  }
  void ran(Clock::time_point begin) {
    const auto end = Clock::now();
    const std::lock_guard lock(mutex_);
    begin_ = std::min(begin_, begin);
    end_ = std::max(end_, end);
  }
  double seconds() const { return std::chrono::duration<double>(end_ - begin_).count(); }

 private:
  std::mutex mutex_;
  Clock::time_point begin_, end_;
};

// A few tries of `once` by all ranks of `all` together; rank 0 is told what each took.
template <class Once, class Tell>
void time_together(Communicator& all, SharedStopwatch& watch, const Once& once, const Tell& tell) {
  for (int k = 0; k < tries; ++k) {
    if (all.rank() == 0) watch.reset();
    all.barrier().wait();
    const auto begin = Clock::now();
    once();
    watch.ran(begin);
    all.barrier().wait();
    if (all.rank() == 0) tell(watch.seconds());
    all.barrier().wait();
  }
}

// Runs body(rank, meet) on all ranks of so many meshes at once; meet() is a barrier of them all.
template <class Body>
void on_meshes(const Stand& stand, const Mesh& mesh, const PrecisionRecipe& precision, Numerics numerics,
               const RunOptions& options, const Body& body) {
  ThreadWorld world(stand.ranks, patience);
  run_ranks(world, [&](int index) {
    const auto all = world.join(index, everyone(stand.ranks), "rehearsal");
    Arena arena(options.driver.get(), options.own_device(index));
    const auto kernels = make_kernels(arena, precision, options.threads_per_rank, numerics);
    const int size = mesh.num_ranks();
    body(
        Rank(world, mesh, index % size, precision, arena, *kernels, Collectives::direct, index / size * size),
        *all);
  });
}

// Work of a rank in the passes of one microbatch. The time of all ranks together is measured, since one that
// shares its core may run early or late in it.
PartSeconds::Passes timed_passes(const Plan& plan, const Stand& stand, const RunOptions& options) {
  struct Try {
    double all = std::numeric_limits<double>::max(), forward = 0, passes = 0;
  };
  Try best, now;
  std::mutex mutex;
  SharedStopwatch watch;
  on_meshes(stand, plan.mesh, plan.precision, plan.numerics, options,
            [&](const Rank& rank, Communicator& all) {
              Trainer trainer(rank, plan, {}, 1, {}, nullptr, Moments::elsewhere);
              trainer.set_data_parallel_sums(DataParallelSums::none);
              if (options.cuda_graphs) trainer.replay_passes();  // as the last tries do
              const SampleSource samples = random_tokens(plan, 1);
              const auto once = [&] {
                trainer.compute_gradients(0, samples);
                rank.arena().synchronize();
                const std::lock_guard lock(mutex);
                for (const Span& span : trainer.last_run().spans) {
                  now.passes += span.end - span.begin;
                  if (span.instruction.op == Op::F) now.forward += span.end - span.begin;
                }
              };
              time_together(all, watch, once, [&](double seconds) {
                now.all = seconds;
                if (now.all < best.all) best = now;
                now = {};
              });
            });
  const double work = best.all * stand.cores_each, forward = best.forward / best.passes;
  return {forward * work, (1 - forward) * work};
}

PartSeconds::Passes operator-(const PartSeconds::Passes& a, const PartSeconds::Passes& b) {
  return {std::max(0.0, a.forward - b.forward), std::max(0.0, a.backward - b.backward)};
}

PartSeconds::Passes operator*(const PartSeconds::Passes& a, const PartSeconds::Passes& b) {
  return {a.forward * b.forward, a.backward * b.backward};
}

// Zeroing, norm and update of one element.
double element_seconds(const Plan& plan, const RehearsalSize& size, const Stand& stand,
                       const RunOptions& options) {
  const std::int64_t elements = std::clamp(num_parameters(plan.model), fewest_elements, size.most_elements);
  double best = std::numeric_limits<double>::max();
  SharedStopwatch watch;
  on_meshes(stand, Mesh{}, plan.precision, plan.numerics, options, [&](const Rank& rank, Communicator& all) {
    const auto tensor = [&](DType dtype, std::int64_t count) {
      return Tensor(rank.arena(), MemoryCategory::other, dtype, {count});
    };
    const PrecisionRecipe& r = plan.precision;
    const Tensor value = tensor(r.parameters, elements), gradient = tensor(r.gradients, elements),
                 first = tensor(r.moments, elements), second = tensor(r.moments, elements);
    const Tensor remainder = r.has_master() ? tensor(DType::i16, elements) : Tensor();
    if (remainder.defined())
      copy_from_host(std::vector<std::int16_t>(static_cast<std::size_t>(elements)), remainder);
    const Tensor sums = tensor(DType::f64, norm_blocks(elements));
    for (const Tensor& t : {value, first, second}) rank.kernels().fill(t, 0.5);
    AdamWStep step;
    step.lr = 1e-3;
    ParamSpec spec;
    spec.shape = {elements};
    const std::vector<LogicalRun> runs = logical_runs(spec, 1, 0, {0, elements});
    const StochasticRounding rounding{weight_rounding(0, spec.name, 0), runs};
    if (r.rounds_stochastically()) step.rounding = &rounding;
    const auto once = [&] {
      rank.kernels().fill(gradient, 0.0);
      rank.kernels().sum_squares(gradient, norm_block, sums);
      rank.kernels().adamw(value, gradient, first, second, step, remainder);
      rank.arena().synchronize();
    };
    time_together(all, watch, once, [&](double seconds) { best = std::min(best, seconds); });
  });
  return best * stand.cores_each / static_cast<double>(elements);
}

// Of each FLOP by which Muon makes matrices orthogonal: those of the model's largest, or of one of its shape.
double muon_seconds(const Plan& plan, const RehearsalSize& size, const Stand& stand,
                    const RunOptions& options) {
  ParamSpec matrix;
  double flops = 0;
  for (const ParamSpec& spec : all_parameters(plan.model))
    if (is_updated_whole(plan.optimizer, spec) && muon_flops(spec) > flops) {
      matrix = spec;
      flops = muon_flops(spec);
    }
  if (flops == 0) return 0;
  while (muon_flops(matrix) > size.most_flops && std::min(matrix.shape[0], matrix.shape[1]) > 16)
    for (std::int64_t& side : matrix.shape) side = (side + 1) / 2;
  double best = std::numeric_limits<double>::max();
  SharedStopwatch watch;
  on_meshes(stand, Mesh{}, plan.precision, plan.numerics, options, [&](const Rank& rank, Communicator& all) {
    Tensor x(rank.arena(), MemoryCategory::other, plan.precision.activations, matrix.shape);
    fill_with_normals(rank.kernels(), x);
    const auto once = [&] {
      orthogonalize(rank.kernels(), x);
      rank.arena().synchronize();
    };
    time_together(all, watch, once, [&](double seconds) { best = std::min(best, seconds); });
  });
  return best * stand.cores_each / muon_flops(matrix);
}

// Computes for so long: by the thread's own clock, so that waits for a core do not count.
void compute_for(double seconds) {
  const auto used = [] {
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  for (const double end = used() + seconds; used() < end;) {
  }
}

// What an all_reduce of `count` elements costs each of so many ranks, in groups of neighbours, that compute
// between one call and the next for as long as small layers do, none just as long as another: ranks that
// wait fall asleep and are woken, or give their core to others. What they compute, and where each has a core
// what the longest of a group computes, is taken off.
double call_seconds(const Plan& plan, const RunOptions& options, int ranks, int group_size,
                    const JobCores& cores, std::int64_t count) {
  constexpr int row = 8;
  constexpr double shortest = 70e-6, longest = 130e-6;
  const int groups = ranks / group_size, all_ranks = groups * group_size;
  const bool shared = cores.are_shared(all_ranks);
  const auto computes = [](int rank, int call) {
    const Philox draw(1, Stream::test, static_cast<std::uint64_t>(rank));
    return shortest + (longest - shortest) * 1e-3 *
                          static_cast<double>(draw.below(static_cast<std::uint64_t>(call), 1000));
  };
  double computed = 0;  // in a row, by each rank on average or by the group that takes longest
  for (int group = 0; group < groups; ++group) {
    double by_longest = 0;
    for (int call = 0; call < row; ++call) {
      double most = 0;
      for (int r = group * group_size; r < (group + 1) * group_size; ++r) {
        most = std::max(most, computes(r, call));
        if (shared) computed += computes(r, call) / all_ranks;
      }
      by_longest += most;
    }
    if (!shared) computed = std::max(computed, by_longest);
  }
  double best = std::numeric_limits<double>::max();
  SharedStopwatch watch;
  ThreadWorld world(all_ranks, patience);
  run_ranks(world, [&](int index) {
    std::vector<int> group(static_cast<std::size_t>(group_size));
    std::iota(group.begin(), group.end(), index / group_size * group_size);
    const auto all = world.join(index, everyone(all_ranks), "rehearsal");
    const auto few = world.join(index, group, "rehearsal's group");
    Arena arena(options.driver.get(), options.own_device(index));
    const Tensor x(arena, MemoryCategory::communication, plan.precision.activations, {count});
    copy_bytes_from_host(std::vector<std::byte>(static_cast<std::size_t>(x.bytes())), x);
    const auto once = [&] {
      for (int call = 0; call < row; ++call) {
        compute_for(computes(index, call));
        few->all_reduce(x).wait();
      }
      arena.synchronize();
    };
    time_together(*all, watch, once, [&](double seconds) { best = std::min(best, seconds); });
  });
  return std::max(0.0, best * std::min(1.0, cores.cores / (all_ranks * cores.wanted)) - computed) / row;
}

RehearsedPlan rehearsed_with(const Plan& plan, const RehearsalSize& size, ModelSpec layers) {
  constexpr std::int64_t fewest_tokens = 16;
  // All of the plan but what is not of a layer's passes.
  RehearsedPlan r{plan};
  Plan& p = r.plan;
  p.model = std::move(layers);
  p.model.tuning.freeze.clear();  // layers are told apart by their FLOPs (plan/cost)
  const int tp = plan.mesh.size(Axis::tp), cp = plan.mesh.size(Axis::cp), ep = plan.mesh.ep;
  p.model.vocab = std::min(p.model.vocab, tp * size.most_vocab);
  p.document_end = std::min(p.document_end, static_cast<int>(p.model.vocab - 1));
  // One pipeline rank, and of data-parallel ranks the fewest in which whole groups of experts fit.
  p.mesh.set(Axis::pp, 1);
  p.mesh.set(Axis::dp, ep / std::gcd(ep, cp));
  const Plan one_rank;
  p.schedule = one_rank.schedule;
  p.schedule_text = one_rank.schedule_text;
  p.chunks = one_rank.chunks;
  p.layers_per_stage = one_rank.layers_per_stage;
  p.balance_layers = one_rank.balance_layers;
  p.vocabulary_parallel = one_rank.vocabulary_parallel;
  p.recompute = plan.recompute.of(0);
  // Gradients are neither added up over ranks nor applied.
  p.optimizer_barrier = one_rank.optimizer_barrier;
  p.zero = one_rank.zero;
  p.hsdp = one_rank.hsdp;
  p.compression = one_rank.compression;
  p.offload = plan.offloads_activations() ? Offload::activations : Offload::none;
  const std::int64_t sequences = microbatches(plan, 0).front().size();
  p.micro_batch = std::max<std::int64_t>(1, sequences);
  const auto flops = [](const Plan& of) { return stage_flops(of, {{0, 1}, false, false}).forward; };
  const auto fit_batch = [&] { p.global_batch = p.micro_batch * p.mesh.size(Axis::dp); };
  fit_batch();
  // Lengths divide by what the ring and its balance ask for.
  while (flops(p) > size.most_flops && p.seq_len % (4 * cp * tp) == 0 &&
         p.seq_len / cp >= 2 * fewest_tokens) {
    if (p.micro_batch > 1)
      p.micro_batch = 1;
    else
      p.seq_len /= 2;
    fit_batch();
  }
  Plan whole = plan;
  whole.model = p.model;  // whose layers may be of other kinds
  for (std::int64_t layer = 0; layer < p.model.num_layers; ++layer) {
    const auto of = [&](const Plan& one) { return stage_flops(one, {{layer, layer + 1}, false, false}); };
    const StageTimes there = of(whole), here = of(p);
    const auto share = [&](double more, double less) {
      return sequences == 0 || less == 0 ? 0 : more / less;
    };
    r.layer_shares.push_back(
        {share(there.forward, here.forward),
         share(there.backward_input + there.backward_weight, here.backward_input + here.backward_weight)});
  }
  r.head_share = static_cast<double>(sequences * plan.seq_len) /
                 static_cast<double>(p.micro_batch * p.seq_len) * static_cast<double>(plan.model.vocab) /
                 static_cast<double>(p.model.vocab);
  return r;
}

// Layers of both kinds.
PartSeconds parts_of_layers(const Plan& plan, const RehearsalSize& size, const TimePasses& passes_of) {
  const ModelSpec& m = plan.model;
  PartSeconds parts;
  std::int64_t of_others = 0;
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer) of_others += m.is_other(layer);
  const bool has_others = of_others > 0, has_dense = of_others < m.num_layers;
  const std::int64_t dense = has_dense ? 1 : 0, others = has_others ? 1 : 0;
  const RehearsedPlan r = rehearsed_plan(plan, size, dense, others);
  const auto passes = [&](std::int64_t more_dense, std::int64_t more_others) {
    return passes_of(rehearsed_plan(plan, size, dense + more_dense, others + more_others).plan);
  };
  // One layer more: what it adds is a layer's, and what is left without any is that of both ends.
  const PartSeconds::Passes base = passes(0, 0);
  if (has_dense) parts.dense = passes(1, 0) - base;
  if (has_others) parts.others = passes(0, 1) - base;
  parts.ends = base - parts.dense - parts.others;
  if (has_dense) parts.dense = parts.dense * r.layer_shares.front();
  if (has_others) parts.others = parts.others * r.layer_shares.back();
  parts.ends *= r.head_share;
  return parts;
}

// More than two kinds of layers, each by itself: the mean of those that PartSeconds has as one.
PartSeconds parts_of_kinds(const Plan& plan, const RehearsalSize& size, const TimePasses& passes_of) {
  const ModelSpec& m = plan.model;
  std::vector<std::int64_t> one_of_each;
  for (const LayerKind& kind : layer_kinds(m)) one_of_each.push_back(kind.layer);
  const RehearsedPlan r = rehearsed_plan(plan, size, one_of_each);
  const PartSeconds::Passes base = passes_of(r.plan);
  PartSeconds parts;
  parts.ends = base;
  std::int64_t num_dense = 0, num_others = 0;
  for (const LayerKind& kind : layer_kinds(m)) {
    std::vector<std::int64_t> one_more = one_of_each;
    one_more.push_back(kind.layer);
    const RehearsedPlan with = rehearsed_plan(plan, size, one_more);
    PartSeconds::Passes one = passes_of(with.plan) - base;
    parts.ends = parts.ends - one;
    std::int64_t like = 0;
    while (layer_parts(with.plan.model, like) != layer_parts(m, kind.layer)) ++like;
    one = one * with.layer_shares[static_cast<std::size_t>(like)];
    const bool is_other = m.is_other(kind.layer);
    (is_other ? num_others : num_dense) += kind.count;
    one *= static_cast<double>(kind.count);
    PartSeconds::Passes& sum = is_other ? parts.others : parts.dense;
    sum = {sum.forward + one.forward, sum.backward + one.backward};
  }
  if (num_dense > 0) parts.dense *= 1 / static_cast<double>(num_dense);
  if (num_others > 0) parts.others *= 1 / static_cast<double>(num_others);
  parts.ends *= r.head_share;
  return parts;
}

}  // namespace

RehearsalSize rehearsal_on_host(const Plan& plan, double peak_flops, int ranks_together) {
  // With few tokens products are slow: their matrices are packed as for many.
  constexpr double seconds = 16e-3;
  const double few = has_fast_kernels(plan.precision) ? 2e9 : 3e7;
  return {std::max(few, seconds * peak_flops / ranks_together), 8192, fewest_elements};
}

RehearsalSize rehearsal_on_device(const Plan& plan, double peak_flops, int ranks_together) {
  constexpr double seconds = 4e-3;
  constexpr std::int64_t most_elements = 1 << 25;
  const RehearsalSize host = rehearsal_on_host(plan);
  return {std::max(host.most_flops, seconds * peak_flops / ranks_together),
          std::max(host.most_vocab, plan.model.vocab / ranks_together),
          std::max(host.most_elements, most_elements / ranks_together)};
}

RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::int64_t dense,
                             std::int64_t others) {
  ModelSpec m = plan.model;
  m.num_layers = dense + others;
  if (m.experts == Experts::deepseek && m.state_space.heads == 0) m.num_dense_layers = dense;
  if (StateSpaceSpec& s = m.state_space; s.heads > 0) {
    s.attention_layers.clear();
    for (std::int64_t layer = 0; layer < dense; ++layer) s.attention_layers.push_back(layer);
    if (others == 0) s = {};
  }
  return rehearsed_with(plan, size, std::move(m));
}

RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::vector<std::int64_t> like) {
  const ModelSpec& all = plan.model;
  // Those without experts come first where that is how a model tells them.
  if (all.layer_pattern.empty())
    std::stable_partition(like.begin(), like.end(),
                          [&all](std::int64_t layer) { return !all.has_experts(layer); });
  ModelSpec m = all;
  m.num_layers = std::ssize(like);
  m.layer_pattern.clear();
  m.num_dense_layers = 0;
  m.short_conv.attention_layers.clear();
  for (std::int64_t i = 0; i < m.num_layers; ++i) {
    const std::int64_t layer = like[static_cast<std::size_t>(i)];
    if (!all.layer_pattern.empty()) {
      m.layer_pattern += all.layer_pattern[static_cast<std::size_t>(layer)];
      continue;
    }
    if (all.experts != Experts::none && !all.has_experts(layer)) ++m.num_dense_layers;
    if (all.has_attention(layer)) m.short_conv.attention_layers.push_back(i);
  }
  return rehearsed_with(plan, size, std::move(m));
}

PartSeconds parts_of_passes(const Plan& plan, const RehearsalSize& size, const TimePasses& passes_of) {
  const bool of_kinds = !plan.model.layer_pattern.empty() || plan.model.short_conv.kernel > 0;
  return of_kinds ? parts_of_kinds(plan, size, passes_of) : parts_of_layers(plan, size, passes_of);
}

PartSeconds rehearse(const Plan& plan, const RehearsalSize& size, const RunOptions& options,
                     const JobCores& cores) {
  const int ranks = job_ranks(plan, options);
  PartSeconds parts = parts_of_passes(plan, size, [&](const Plan& rehearsed) {
    return timed_passes(rehearsed, stand_of(rehearsed.mesh, ranks, cores), options);
  });
  const Stand alone = stand_of(Mesh{}, ranks, cores);
  parts.element = element_seconds(plan, size, alone, options);
  parts.muon = muon_seconds(plan, size, alone, options);
  const int group = std::max(plan.mesh.dp_cp_size(), plan.mesh.size(Axis::pp));
  if (group == 1) return parts;
  constexpr int most_ranks = 32;
  const int world = std::max(group, std::min(ranks, most_ranks) / group * group);
  constexpr std::int64_t few = 16, many = 1 << 16;
  parts.call = call_seconds(plan, options, world, group, cores, few);
  const double large = call_seconds(plan, options, world, group, cores, many);
  parts.byte =
      std::max(0.0, large - parts.call) /
      static_cast<double>(all_reduce_bytes_sent(many, group, 0, element_bytes(plan.precision.activations)));
  return parts;
}

}  // namespace echelon
