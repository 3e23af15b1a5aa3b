// --offload activations is where what layers keep lies, not what is computed: the bits of the run without it
// on every axis, memory and bytes moved as the dry run says, and less memory by what is counted by hand.
#include "model/offloaded_activations.h"

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "expert_runs.h"
#include "pipeline_runs.h"
#include "temporary_directory.h"
#include "train/dry_run.h"
#include "train/trainer.h"

namespace echelon::activation_offload_test {
namespace {

using namespace checks;

Plan offloaded(Plan plan, Offload what = Offload::activations) {
  plan.offload = what;
  return plan;
}

// Losses, norms, values and moments of every rank.
std::vector<Outcome> outcomes_of(const Plan& plan) {
  return run_steps(plan, clipping(), 2, random_samples(plan));
}

// In the second step every rank holds, and moves, what the dry run says.
void expect_as_predicted(const Plan& plan) {
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, clipping(), 1);
    for (std::int64_t step : {0, 1}) {
      rank.arena().reset_peak();
      (void)trainer.take_offloaded();
      trainer.compute_gradients(step, random_samples(plan));
      trainer.apply_gradients(step);
    }
    const DryRun dry = dry_run(plan, trainer.pipeline(), rank.coordinates());
    const HostActivations moved = trainer.take_offloaded();
    for (const MemoryCategory category :
         {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer,
          MemoryCategory::activations, MemoryCategory::communication})
      EXPECT_EQ(rank.arena().peak()[category], dry.peak[category]) << memory_category_name(category);
    EXPECT_EQ(moved.out, dry.host.out);
    EXPECT_EQ(moved.back, dry.host.back);
    EXPECT_EQ(moved.most, dry.host.most);
    EXPECT_EQ(moved.out, moved.back);
  });
}

void expect_same_bits(const Plan& plan, bool as_predicted = true) {
  if (!is_taken()) return;
  SCOPED_TRACE(fmt::format("{} {}", plan.schedule, describe(plan)));
  EXPECT_EQ(outcomes_of(offloaded(plan)), outcomes_of(plan));
  if (as_predicted) expect_as_predicted(offloaded(plan));
}

TEST(ActivationOffload, GivesTheBitsOfEveryMesh) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    expect_same_bits(odd_plan(odd_gpt2(), 1, 1, false, dtype));
    expect_same_bits(odd_plan(odd_llama(), 3, 1, false, dtype));
    expect_same_bits(odd_plan(odd_gpt2(false), 1, 2, true, dtype));
    expect_same_bits(odd_plan(odd_llama(), 2, 2, false, dtype));
  }
  for (const int zero : {1, 2, 3}) {
    Plan plan = odd_plan(odd_llama(), 2, 1, false);
    plan.zero = zero;
    expect_same_bits(plan);
  }
}

TEST(ActivationOffload, GivesTheBitsOfEverySchedule) {
  for (const std::string& schedule : flushing_schedules())
    expect_same_bits(pipeline_plan(odd_llama(false, 2, 8), schedule, 2, 1, 1, 4));
  Plan plan = pipeline_plan(odd_gpt2(true, 4), "interleaved", 2, 2, 2, 4);
  expect_same_bits(plan);
}

TEST(ActivationOffload, GivesTheBitsOfContextsExpertsAndRecomputation) {
  for (const ContextKind kind : {ContextKind::ring, ContextKind::allgather, ContextKind::ulysses}) {
    Plan plan = odd_plan(odd_llama(false, 2), 1, 1, false);
    plan.seq_len = 12;
    plan.mesh.set(Axis::cp, 2);
    plan.context_kind = kind;
    expect_same_bits(plan);
  }
  for (const char* recompute : {"selective", "full", "mlp_in"}) {
    Plan plan = odd_plan(odd_llama(), 2, 2, true);
    plan.recompute = parse_recompute(recompute, "--recompute");
    expect_same_bits(plan);
  }
  // How much travels to experts is the data's, and so is what is kept of it.
  for (const int tp : {1, 2}) {
    Plan plan = odd_plan(even_mixtral(2), 2, tp, tp > 1);
    plan.mesh.ep = 2;
    expect_same_bits(plan, false);
  }
  Plan mixture = pipeline_plan(even_deepseek(3, 4), "dualpipe", 2, 2, 1, 4);
  mixture.mesh.ep = 2;
  expect_same_bits(mixture, false);
}

// Of a pipeline that does not flush, of guessed steps that are taken back, and of invariant numerics.
TEST(ActivationOffload, GivesTheBitsOfRunsThatGoOn) {
  const auto losses_of = [](const Plan& plan, bool distrusts) {
    std::vector<double> losses;
    TrainerHooks hooks;
    if (distrusts) hooks.distrusts_guess = [](std::int64_t step) { return step == 1; };
    OptimizerOptions options = clipping();
    options.clip = 0;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, options, 1, hooks);
      for (std::int64_t step = 0; step < 4; ++step)
        for (const StepResult& result : trainer.step(step, random_samples(plan), 4 - step))
          if (rank.index() == 0) losses.push_back(result.loss);
    });
    return losses;
  };
  for (const char* schedule : {"pipedream", "2bw"}) {
    const Plan plan = pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 4);
    EXPECT_EQ(losses_of(offloaded(plan), false), losses_of(plan, false)) << schedule;
  }
  Plan plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4);
  plan.optimizer_barrier = false;
  EXPECT_EQ(losses_of(offloaded(plan), true), losses_of(plan, true));
  plan.offload = Offload::both;
  EXPECT_EQ(losses_of(plan, true), losses_of(offloaded(plan), true));
  Plan invariant = odd_plan(odd_llama(false, 2), 2, 2, true);
  invariant.global_batch = 8;
  invariant.numerics = Numerics::invariant;
  EXPECT_EQ(outcomes_of(offloaded(invariant)), outcomes_of(invariant));
}

// GPipe with every microbatch in flight: L layers of M microbatches lie on the host but for the one that the
// first backward pass begins with, which comes while the last forward pass runs. In backward passes two are
// here.
TEST(ActivationOffload, TwoLayersStayOfAllThatAreInFlight) {
  constexpr std::int64_t microbatches = 6, layers = 8;
  Plan plan = pipeline_plan(odd_llama(false, 2, 2 * layers), "gpipe", 2, 1, 1, microbatches);
  plan.seq_len = 16;
  plan.recompute = parse_recompute("full", "--recompute");  // a layer keeps its input alone
  const PipelineLayout pipeline(plan);
  const DryRun kept = dry_run(plan, pipeline, {.pp = 0}),
               gone = dry_run(offloaded(plan), pipeline, {.pp = 0});
  const std::int64_t input = plan.seq_len * plan.model.hidden * element_bytes(plan.precision.activations);
  EXPECT_EQ(kept.host, HostActivations{});
  EXPECT_EQ(gone.host.out, input * layers * microbatches);  // the embedding keeps nothing
  EXPECT_EQ(gone.host.back, gone.host.out);
  EXPECT_EQ(gone.host.most, gone.host.out - input);
  EXPECT_EQ(kept.peak[MemoryCategory::activations] - gone.peak[MemoryCategory::activations],
            input * (layers * microbatches - 2));
}

TEST(ActivationOffload, VerifyAcceptsIt) {
  expect_bits_of_one_rank(offloaded(pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4)));
  expect_passes(offloaded(odd_plan(odd_gpt2(), 2, 2, true)));
  Plan cut = offloaded(pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4));
  cut.vocabulary_parallel = true;
  expect_passes(cut);
  expect_as_predicted(cut);
  expect_passes(offloaded(odd_plan(odd_llama(), 2, 1, false), Offload::both));
}

// Files are made where it is said, have no names, and steps after the first ask for no more of them.
TEST(ActivationOffload, ItsFilesAreUsedAgainAndGo) {
  const TemporaryDirectory directory;
  Plan plan = offloaded(odd_plan(odd_llama(), 1, 1, false));
  plan.offload_directory = directory.path();
  on_mesh(plan, [&](const Rank& rank) {
    const auto mapped = [] {
      std::ifstream maps("/proc/self/maps");
      std::int64_t count = 0;
      for (std::string line; std::getline(maps, line);)
        count += line.find("echelon-scratch") != std::string::npos;
      return count;
    };
    const std::int64_t before = mapped();
    {
      Trainer trainer(rank, plan, {}, 1);
      trainer.step(0, random_samples(plan), 3);
      const std::int64_t first = mapped();
      EXPECT_GT(first, before);
      EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
      for (std::int64_t step : {1, 2}) trainer.step(step, random_samples(plan), 3 - step);
      EXPECT_EQ(mapped(), first);
    }
    EXPECT_EQ(mapped(), before);
  });
}

TEST(ActivationOffload, ADirectoryWhereNothingCanBeMadeIsRefused) {
  Plan plan = offloaded(odd_plan(odd_gpt2(), 1, 1, false));
  plan.offload_directory = "/no/such/directory";
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--offload-dir /no/such/directory", "No such file"});
}

TEST(ActivationOffload, AShortStreamMovesAsMuchInAStepAsALongOne) {
  Plan plan = offloaded(pipeline_plan(odd_llama(false, 2), "2bw", 2, 1, 1, 4));
  const PipelineLayout pipeline(plan);
  const HostActivations few = predict_memory(plan, pipeline, {}, {.steps = 3}).host,
                        many = predict_memory(plan, pipeline).host;
  EXPECT_GT(few.out, 0);
  EXPECT_EQ(few.out, many.out);
  EXPECT_EQ(few.back, many.back);
}

// The first and last steps of a stream differ: a whole one that is short is walked whole.
TEST(ActivationOffload, AShortStreamIsPredictedAsItIs) {
  for (const auto& [schedule, pp, batch] :
       {std::tuple{"pipedream", 2, 1}, {"pipedream", 4, 1}, {"pipedream", 4, 2}, {"2bw", 2, 4}})
    for (int steps : {1, 2, 3, 6}) {
      const Plan plan = offloaded(pipeline_plan(odd_llama(false, 2, 4), schedule, pp, 1, 1, batch));
      const PipelineLayout pipeline(plan);
      const HostActivations predicted = predict_memory(plan, pipeline, {}, {.steps = steps}).host;
      HostActivations measured;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        HostActivations all;
        for (int step = 0; step < steps; ++step) {
          trainer.step(step, random_samples(plan), steps - step);
          const HostActivations moved = trainer.take_offloaded();
          all = {all.out + moved.out, all.back + moved.back, std::max(all.most, moved.most)};
        }
        if (rank.index() == 0) measured = {all.out / steps, all.back / steps, all.most};
      });
      EXPECT_EQ(predicted, measured) << schedule << " " << pp << ", " << batch << ", " << steps << " steps";
    }
}

// Of this process, in its scratch files.
std::int64_t scratch_bytes_mapped() {
  std::ifstream maps("/proc/self/maps");
  std::int64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    if (line.find("echelon-scratch") != std::string::npos &&
        std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &begin, &end) == 2)
      bytes += static_cast<std::int64_t>(end - begin);
  }
  return bytes;
}

// As experts' are, whose sizes differ from step to step.
TEST(ActivationOffload, RoomForOtherSizesIsNotKeptForEver) {
  const Plan plan = offloaded(odd_plan(odd_llama(), 1, 1, false, DType::f64));
  on_mesh(plan, [&](const Rank& rank) {
    const OffloadedActivations offloaded(rank, plan);
    std::int64_t largest = 0;
    for (std::int64_t elements = 1 << 20; elements > 1 << 12; elements -= elements / 4) {
      BlockState state;
      state.values = {rank.activation({elements})};
      largest = std::max(largest, state.values[0].bytes());
      offloaded.put_away(state);
      offloaded.bring(state);
      offloaded.wait_for(state);
      EXPECT_LE(scratch_bytes_mapped(), largest + largest / 4 + (1 << 14));
    }
  });
}

}  // namespace
}  // namespace echelon::activation_offload_test
