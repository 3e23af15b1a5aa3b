// ZeRO is where state lives, not what is computed: every stage gives the bits of plain data parallelism.
#include "parallel/zero.h"

#include <gtest/gtest.h>

#include <numeric>

#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "mesh_runs.h"
#include "plan/memory.h"
#include "schedule/schedules.h"
#include "spec/shard_layout.h"
#include "train/dry_run.h"
#include "train/generate.h"
#include "verify/verify.h"

namespace echelon::zero_test {
namespace {

using namespace checks;

constexpr std::array stages{1, 2, 3};

std::vector<Outcome> outcomes_of(const Plan& plan) {
  return run_steps(plan, clipping(), 2, random_samples(plan));
}

void expect_bits_of_plain_data_parallelism(const Plan& plain, const std::vector<int>& of_stages) {
  if (!is_taken()) return;
  const std::vector<Outcome> expected = outcomes_of(plain);
  for (const Outcome& rank : expected)
    for (double norm : rank.norms) EXPECT_GT(norm, clipping().clip);
  for (int zero : of_stages) {
    Plan plan = plain;
    plan.zero = zero;
    EXPECT_EQ(outcomes_of(plan), expected) << "zero " << zero << " pp " << plan.mesh.size(Axis::pp) << " "
                                           << plan.schedule << " hsdp " << plan.hsdp << " " << describe(plan);
  }
}
void expect_bits_of_plain_data_parallelism(const Plan& plain) {
  expect_bits_of_plain_data_parallelism(plain, {stages.begin(), stages.end()});
}

VerifyReport verified(const Plan& plan, const Faults& faults = {}) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer = clipping();
  request.optimizer.lr = 1e-3;
  request.run.timeout = patience;
  request.steps = 2;
  request.faults = faults;
  return verify(request);
}

// Seven samples in microbatches of two: several on some ranks, and one more on some than on others.
TEST(Zero, GivesTheBitsOfPlainDataParallelism) {
  for (int dp : {2, 3, 4})
    for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false), odd_llama(true, 4)}) {
      expect_bits_of_plain_data_parallelism(odd_plan(model, dp, 1, false));
      expect_bits_of_plain_data_parallelism(odd_plan(model, dp, 2, true));
    }
}

TEST(Zero, GivesTheBitsOfPlainDataParallelismInPipelines) {
  for (int dp : {2, 3, 4})
    for (const char* schedule : {"1f1b", "zb-v"})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
        Plan plan = odd_plan(model, dp, 1, false);
        plan.mesh.set(Axis::pp, 2);
        plan.schedule = schedule;
        plan.micro_batch = 1;
        expect_bits_of_plain_data_parallelism(plan);
      }
}

TEST(Zero, GivesTheBitsUnderEverySchedule) {
  for (const std::string& schedule : schedule_names()) {
    if (schedule == "pipedream" || schedule == "2bw") continue;
    Plan plan = odd_plan(odd_gpt2(true, 4), 2, schedule == "interleaved" ? 2 : 1, true);
    plan.mesh.set(Axis::pp, 2);
    plan.schedule = schedule;
    plan.micro_batch = 1;
    plan.seq_len = 5;
    plan.global_batch = schedule.starts_with("dualpipe") ? 8 : 7;
    expect_bits_of_plain_data_parallelism(plan);
  }
}

// A sum over ranks is grouped as a halving tree, so that a sum inside blocks of neighbours and then across
// them is the same sum where the number of blocks is a power of two.
TEST(Hsdp, GivesTheBitsOfPlainDataParallelism) {  // long
  for (auto [dp, hsdp] : {std::pair{4, 2}, {4, 4}, {6, 2}})
    for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false)})
      for (int tp : {1, 2}) {
        if (dp * tp > 8) continue;
        Plan plan = odd_plan(model, dp, tp, tp > 1);
        Plan plain = plan;
        plan.hsdp = hsdp;
        const std::vector<Outcome> expected = outcomes_of(plain);
        for (int zero : stages) {
          plan.zero = zero;
          EXPECT_EQ(outcomes_of(plan), expected)
              << "zero " << zero << " hsdp " << hsdp << " " << describe(plan);
        }
      }
}

// HSDP with blocks of one rank is plain data parallelism. Otherwise the sum over the blocks of the sums
// inside them may be grouped in another way than the sum over all ranks: equal to the bound.
TEST(Hsdp, Verifies) {  // long
  for (auto [dp, tp, hsdp] : {std::tuple{4, 2, 2}, {6, 1, 3}, {6, 1, 2}})
    for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false)})
      for (int zero : stages) {
        Plan plan = odd_plan(model, dp, tp, tp > 1);
        plan.zero = zero;
        plan.hsdp = hsdp;
        const VerifyReport report = verified(plan);
        EXPECT_TRUE(report.pass) << "zero " << zero << " hsdp " << hsdp << to_json(report, plan);
      }
  for (int zero : stages) {
    Plan plain = odd_plan(odd_llama(), 3, 1, false), plan = plain;
    plan.zero = zero;
    plan.hsdp = 3;
    EXPECT_EQ(outcomes_of(plan), outcomes_of(plain)) << "zero " << zero;
  }
}

TEST(Zero, GivesTheBitsInF32OnCpuKernels) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (ModelSpec model : {odd_gpt2(), odd_llama()}) {
    model.hidden = 44;  // no multiple of a vector
    model.head_dim = 11;
    if (model.family == Family::llama) model.hidden = 40, model.head_dim = 10;
    expect_bits_of_plain_data_parallelism(odd_plan(model, 3, 2, true, DType::f32));
  }
}

TEST(Zero, RunsWithMoreRanksThanAUnitHasBlocks) {
  ModelSpec model = odd_llama();
  model.hidden = 8;
  model.head_dim = 2;
  model.mlp_hidden = 5;
  Plan plan = odd_plan(model, 7, 1, false);
  ASSERT_LT(num_parameters(model), 7 * norm_block);
  expect_bits_of_plain_data_parallelism(plan);
}

// ---- how things are cut

FlatLayout layout_of(const ModelSpec& model, int tp = 1) {
  std::vector<std::vector<ParamSpec>> groups{embedding_parameters(model)};
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
    groups.push_back(block_parameters(model, layer));
  groups.push_back(head_parameters(model));
  return flat_layout(groups, tp, tp - 1);
}

TEST(Shards, CoverTheirUnitsInWholeNormBlocksAsEvenlyAsTheseAllow) {
  ModelSpec wide = odd_gpt2(true, 3);
  wide.hidden = 96;
  wide.head_dim = 24;
  wide.mlp_hidden = 401;
  for (const ModelSpec& model : {wide, odd_gpt2(), odd_llama(false), odd_llama(true)})
    for (int tp : {1, 2})
      for (int shards : {1, 2, 3, 4, 7, 64}) {
        const FlatLayout layout = layout_of(model, tp);
        std::set<std::int64_t> bounds;  // of all norm blocks
        for (std::size_t i = 0; i < layout.offsets.size(); ++i)
          for (std::int64_t at = 0; at < layout.sizes[i]; at += norm_block)
            bounds.insert(layout.offsets[i] + at);
        bounds.insert(layout.size());
        std::int64_t next = 0, sum = 0;
        const std::vector<ShardUnit> units = shard_units(layout, {shards, shards});
        ASSERT_EQ(units.size(), 2 * layout.cut_ranges.size() + 1);
        for (const ShardUnit& unit : units) {
          ASSERT_EQ(unit.bounds.size(), static_cast<std::size_t>(shards) + 1);
          EXPECT_EQ(unit.range.begin, next);
          EXPECT_EQ(unit.bounds.front(), unit.range.begin);
          EXPECT_EQ(unit.bounds.back(), unit.range.end);
          for (int i = 0; i < shards; ++i) {
            EXPECT_LE(unit.shard(i).begin, unit.shard(i).end);
            EXPECT_TRUE(bounds.contains(unit.shard(i).begin)) << unit.shard(i).begin;
            const std::int64_t even = unit.range.begin + split_range(unit.range.size(), shards, i).begin;
            for (std::int64_t bound : bounds) {  // none is nearer
              EXPECT_LE(std::abs(unit.shard(i).begin - even), std::abs(bound - even));
            }
            EXPECT_LE(std::abs(unit.shard(i).begin - even), norm_block / 2);
            EXPECT_EQ(unit.counts()[static_cast<std::size_t>(i)], unit.shard(i).size());
          }
          next = unit.range.end;
        }
        EXPECT_EQ(next, layout.size());
        for (int i = 0; i < shards; ++i) sum += shard_size(units, {i, i});
        EXPECT_EQ(sum, layout.size());
      }
}

// The lower one of two bounds that are equally near.
TEST(Shards, TiesGoDown) {
  FlatLayout layout;
  layout.offsets = {0};
  layout.sizes = {3 * norm_block};
  layout.cut_ranges = {{0, 3 * norm_block}};
  layout.expert_ranges = {{3 * norm_block, 3 * norm_block}};
  layout.whole_range = {3 * norm_block, 3 * norm_block};
  EXPECT_EQ(shard_units(layout, {2, 2})[0].bounds,
            (std::vector<std::int64_t>{0, norm_block, 3 * norm_block}));
  EXPECT_EQ(shard_units(layout, {2, 2})[1].counts(), (std::vector<std::int64_t>{0, 0}));
}

// ---- what it costs

// Figure 1 of the paper: 7.5 billion parameters on 64 ranks, mixed-precision Adam.
TEST(ZeroMemory, TheFormulaGivesThePapersFigures) {
  const std::int64_t whole = 7'500'000'000, own = whole / 64;
  const auto gigabytes = [&](int zero) {
    return static_cast<double>(kept_state(whole, own, zero, mixed_precision_adam).total()) / 1e9;
  };
  EXPECT_NEAR(gigabytes(0), 120, 0.05);
  EXPECT_NEAR(gigabytes(1), 31.4, 0.05);
  EXPECT_NEAR(gigabytes(2), 16.6, 0.05);
  EXPECT_NEAR(gigabytes(3), 1.9, 0.05);
}

// A 7B model with mixed-precision Adam does not fit into 80 GB; cut over 8 ranks it does. The weights of a
// 70B model in 16 bits alone need some 140 GB.
TEST(ZeroMemory, TheTextbooksModels) {
  const auto gigabytes = [](const char* model, int zero, int shards) {
    const std::int64_t whole = num_parameters(load_model(model));
    return static_cast<double>(kept_state(whole, whole / shards, zero, mixed_precision_adam).total()) / 1e9;
  };
  EXPECT_NEAR(gigabytes("llama-2-7b", 0, 1), 107.8, 0.05);
  EXPECT_NEAR(gigabytes("llama-2-7b", 1, 8), 37.1, 0.05);
  EXPECT_NEAR(gigabytes("llama-2-7b", 2, 8), 25.3, 0.05);
  EXPECT_NEAR(gigabytes("llama-2-7b", 3, 8), 13.5, 0.05);
  EXPECT_NEAR(static_cast<double>(num_parameters(load_model("llama-2-70b"))) * 2 / 1e9, 138.0, 0.05);
}

// What is alive between two steps, by category, on every rank.
TEST(ZeroMemory, BetweenStepsIsTheFormulaToTheByte) {
  for (int zero : {0, 1, 2, 3})
    for (auto [dp, tp, hsdp] : {std::tuple{2, 1, 1}, {3, 2, 1}, {4, 1, 1}, {4, 2, 2}})
      for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false)}) {
        if (zero == 0 && hsdp > 1) continue;
        Plan plan = odd_plan(model, dp, tp, tp > 1);
        plan.micro_batch = 4;  // one microbatch: no part of a tied gradient is kept apart
        plan.zero = zero;
        plan.hsdp = hsdp;
        const PipelineLayout pipeline(plan);
        on_mesh(plan, [&](const Rank& rank) {
          Trainer trainer(rank, plan, {}, 1);
          for (std::int64_t step : {0, 1}) {
            trainer.compute_gradients(step, random_samples(plan));
            trainer.apply_gradients(step);
          }
          const FlatLayout layout = flat_layout(pipeline.groups_of(0, 0), tp, rank.coordinate(Axis::tp));
          const int shards = dp / hsdp;
          const std::int64_t own = zero == 0 ? 0
                                             : shard_size(shard_units(layout, plan.all_shards()),
                                                          plan.shard_index(rank.coordinates()));
          const Memory expected = kept_state(layout.size(), own, zero, {8, 8, 16});
          for (MemoryCategory c : {MemoryCategory::parameters, MemoryCategory::gradients,
                                   MemoryCategory::optimizer, MemoryCategory::activations})
            EXPECT_EQ(rank.arena().live()[c], expected[c]) << memory_category_name(c) << " zero " << zero;
          // Uneven by one norm block a unit at most.
          if (zero > 0) {
            EXPECT_LE(std::abs(own - layout.size() / shards),
                      norm_block * static_cast<std::int64_t>(layout.cut_ranges.size() + 1));
          }
        });
      }
}

// ---- optimizer state in a file

TEST(Offload, GivesTheSameBitsWithoutMemoryForTheOptimizer) {
  const TemporaryDirectory directory;
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (int zero : {0, 1, 3}) {
      Plan plan = odd_plan(odd_gpt2(), 3, 2, true, dtype);
      plan.zero = zero;
      Plan offloaded = plan;
      offloaded.offload = Offload::optimizer;
      offloaded.offload_directory = directory.path();
      EXPECT_EQ(outcomes_of(offloaded), outcomes_of(plan)) << zero;
      on_mesh(offloaded, [&](const Rank& rank) {
        Trainer trainer(rank, offloaded, {}, 1);
        trainer.step(0, random_samples(offloaded), 1);
        EXPECT_EQ(rank.arena().peak()[MemoryCategory::optimizer], 0);
        EXPECT_EQ(
            predict_memory(offloaded, trainer.pipeline(), rank.coordinates())[MemoryCategory::optimizer], 0);
        // Nothing is left behind, however the process ends.
        EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
      });
    }
  }
}

// In memory for values, gradients and activations, but not for two moments more, a step is possible with
// these in a file, and only then.
TEST(Offload, AModelThatDoesNotFitSteps) {
  Plan plan = odd_plan(odd_llama(), 1, 1, false);
  const auto step_in = [&](std::int64_t bytes) {
    ThreadWorld world(1, patience);
    run_ranks(world, [&](int index) {
      Arena arena(Device::cpu, static_cast<std::size_t>(bytes));
      const auto kernels = make_kernels(arena, plan.precision, 1);
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      Trainer trainer(rank, plan, {}, 1);
      trainer.step(0, random_samples(plan), 1);
    });
  };
  const Memory predicted = predict_memory(plan, PipelineLayout(plan));
  const std::int64_t limit = predicted.total() - 1;
  EXPECT_NO_THROW(step_in(limit + 100'000));  // with some room for what is counted as other
  expect_contains(message_of<RunError>([&] { step_in(limit); }), {"memory limit"});
  plan.offload = Offload::optimizer;
  EXPECT_NO_THROW(step_in(limit - predicted[MemoryCategory::optimizer] + 100'000));
}

TEST(Offload, ADirectoryWhereNothingCanBeMadeIsRefused) {
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  plan.offload = Offload::optimizer;
  plan.offload_directory = "/no/such/directory";
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--offload-dir /no/such/directory", "No such file"});
}

// ---- what else holds parameters

// Saved under one stage, loaded under another: the same tensors, and the same bits from there on.
TEST(Zero, CheckpointsKnowNoStage) {
  const ModelSpec model = odd_gpt2(true, 2);
  const auto plan_of = [&](int zero, int dp, int tp, int hsdp = 1) {
    Plan plan = odd_plan(model, dp, tp, tp > 1);
    plan.zero = zero;
    plan.hsdp = hsdp;
    return plan;
  };
  struct State {
    LogicalTensors values, exp_avg, exp_avg_sq;
    bool operator==(const State&) const = default;
  };
  const auto state_of = [](const Rank& rank, const Trainer& trainer) {
    return State{gather(rank, trainer, ParameterTensor::value),
                 gather(rank, trainer, ParameterTensor::exp_avg),
                 gather(rank, trainer, ParameterTensor::exp_avg_sq)};
  };
  for (int zero : {1, 2, 3}) {
    const TemporaryDirectory directory;
    State saved;
    std::string path;
    const Plan from = plan_of(zero, 4, 2, 2);
    on_mesh(from, [&](const Rank& rank) {
      Trainer trainer(rank, from, clipping(), 1);
      for (std::int64_t step : {0, 1}) {
        trainer.compute_gradients(step, random_samples(from));
        trainer.apply_gradients(step);
      }
      const State mine = state_of(rank, trainer);
      CheckpointInfo info;
      info.step = info.updates = 2;
      info.seed = 1;
      info.dtype = from.precision.master;
      info.model = from.model;
      const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
      if (rank.index() == 0) saved = mine, path = where;
    });
    const CheckpointInfo info = read_checkpoint_info(path);
    EXPECT_NE(saved.exp_avg.begin()->second, std::vector<double>(saved.exp_avg.begin()->second.size(), 0.0));
    for (const Plan& to : {plan_of(0, 1, 1), plan_of(0, 3, 2), plan_of(1, 2, 1), plan_of(2, 3, 2),
                           plan_of(3, 4, 1), plan_of(3, 4, 2, 2)})
      on_mesh(to, [&](const Rank& rank) {
        Trainer trainer(rank, to, clipping(), 99);  // another seed: nothing is right by chance
        load_checkpoint(rank, trainer.parameters(), info, false);
        EXPECT_EQ(state_of(rank, trainer), saved) << "from zero " << zero << " to " << to.zero;
      });
  }
}

TEST(Zero, EvaluatesAndVerifies) {
  for (int zero : stages) {
    Plan plan = odd_plan(odd_llama(), 3, 2, true);
    plan.zero = zero;
    Plan plain = plan;
    plain.zero = 0;
    const auto losses = [&](const Plan& p) {
      std::vector<double> result(static_cast<std::size_t>(p.mesh.num_ranks()));
      on_mesh(p, [&](const Rank& rank) {
        Trainer trainer(rank, p, clipping(), 1);
        trainer.step(0, random_samples(p), 1);
        // Fewer samples than ranks, too: some have none.
        result[static_cast<std::size_t>(rank.index())] =
            trainer.evaluate(7, random_samples(p)) + 1e3 * trainer.evaluate(2, random_samples(p));
      });
      return result;
    };
    EXPECT_EQ(losses(plan), losses(plain));
    const VerifyReport report = verified(plan);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
  }
}

// Text is generated from parameters that are gathered layer by layer, too.
TEST(Zero, GeneratesTheSameText) {
  for (int pp : {1, 2}) {
    Plan plan = odd_plan(odd_llama(false, 2, 4), 2, 2, true);
    plan.mesh.set(Axis::pp, pp);
    std::vector<std::vector<std::int32_t>> texts;
    for (int zero : {0, 3}) {
      plan.zero = zero;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, clipping(), 1);
        trainer.step(0, random_samples(plan), 1);
        GenerateOptions options;
        options.max_tokens = 9;
        const auto text = generate(rank, plan, trainer.parameters(), {}, {3, 1, 4}, options);
        if (rank.index() == 0) texts.push_back(text);
      });
    }
    EXPECT_EQ(texts[0].size(), 9u);
    EXPECT_EQ(texts[0], texts[1]);
  }
}

// ---- gathering ahead

TEST(GatherWindow, HoldsTheUseAndTheNextOnes) {
  using Units = std::vector<int>;
  GatherWindow none({0, 1, 1, 0}, 0);
  EXPECT_EQ(none.begin(), Units{});
  for (int unit : {0, 1, 1, 0}) {
    EXPECT_EQ(none.use(unit), Units{unit});
    EXPECT_EQ(none.done(), Units{unit});
  }
  EXPECT_TRUE(none.finished());

  // Forward 0 1 2, the head 3, backward 2 1.
  GatherWindow one({0, 1, 2, 3, 2, 1}, 1);
  EXPECT_EQ(one.begin(), Units{0});
  EXPECT_EQ(one.use(0), Units{1});
  EXPECT_THROW(one.use(2), InvariantError);
  EXPECT_EQ(one.done(), Units{0});
  EXPECT_EQ(one.use(1), Units{2});
  EXPECT_EQ(one.done(), Units{1});
  EXPECT_EQ(one.use(2), Units{3});
  EXPECT_EQ(one.done(), Units{2});
  EXPECT_EQ(one.use(3), Units{2});
  EXPECT_EQ(one.done(), Units{3});
  EXPECT_EQ(one.use(2), Units{1});
  EXPECT_FALSE(one.finished());
  EXPECT_EQ(one.done(), Units{2});
  EXPECT_EQ(one.use(1), Units{});
  EXPECT_EQ(one.done(), Units{1});
  EXPECT_TRUE(one.finished());
  EXPECT_THROW(one.use(1), InvariantError);

  // What is wanted again soon stays.
  GatherWindow two({0, 1, 2, 3, 2, 1}, 2);
  EXPECT_EQ(two.begin(), (Units{0, 1}));
  EXPECT_EQ(two.use(0), Units{2});
  EXPECT_EQ(two.done(), Units{0});
  EXPECT_EQ(two.use(1), Units{3});
  EXPECT_EQ(two.done(), Units{1});
  EXPECT_EQ(two.use(2), Units{});
  EXPECT_EQ(two.done(), Units{});
  EXPECT_EQ(two.use(3), Units{1});
}

// The layers' gathers are asked for before the layer ahead of them computes, whatever the distance; with none
// ahead each waits for its own. The bits are the same.
TEST(Zero3, GathersAheadOfUse) {
  const Plan plain = odd_plan(odd_gpt2(true, 5), 2, 1, false);
  const std::vector<Outcome> expected = outcomes_of(plain);
  for (int ahead : {0, 1, 2, 3, 50}) {
    Plan plan = plain;
    plan.zero = 3;
    plan.zero_prefetch = ahead;
    EXPECT_EQ(outcomes_of(plan), expected) << ahead;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, clipping(), 1);
      trainer.compute_gradients(0, random_samples(plan));
      const ParameterGather::Measures& measured = trainer.parameters().gather()->measures();
      // A microbatch: embedding, five blocks, the tied table again, five blocks.
      const int uses = 2 * (1 + 5 + 1 + 5);
      if (ahead == 0) {
        EXPECT_EQ(measured.gathers, uses + 1);  // and once what is whole
        EXPECT_EQ(measured.ahead, 0);
      } else if (ahead == 1) {
        EXPECT_EQ(measured.gathers, uses + 1);  // block 4 is let go of while the table is used
        EXPECT_EQ(measured.ahead, uses);
        EXPECT_GT(measured.beside_seconds, 0);
      } else if (ahead == 50) {
        EXPECT_EQ(measured.gathers, 6 + 1);  // everything stays
      }
    });
  }
}

TEST(Zero3, ReadingAParameterThatIsNotThereIsAnError) {
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  plan.zero = 3;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, clipping(), 1);
    trainer.compute_gradients(0, random_samples(plan));
    const Parameter& p = trainer.parameters().find("model.layers.1.mlp.down_proj.weight");
    EXPECT_THROW(p.value.host<double>(), InvariantError);
    EXPECT_THROW(p.gradient.host<double>(), InvariantError);
    EXPECT_NO_THROW(p.own_value.host<double>());
  });
}

TEST(Zero, NamesTheTensorThatIsNotFinite) {
  Plan plan = odd_plan(odd_gpt2(), 3, 1, false);
  plan.zero = 2;
  const std::string name = "transformer.h.1.mlp.c_fc.weight";
  expect_contains(message_of<RunError>([&] {
                    on_mesh(plan, [&](const Rank& rank) {
                      Trainer trainer(rank, plan, clipping(), 1);
                      trainer.compute_gradients(0, random_samples(plan));
                      const Tensor& mine = trainer.parameters().find(name).own_gradient;
                      if (mine.numel() > 0) mine.host<double>()[mine.numel() - 1] = std::nan("");
                      trainer.apply_gradients(0);
                    });
                  }),
                  {"step 1", name, "not finite"});
}

TEST(Zero, IsPartOfAPlanFile) {
  Plan plan = odd_plan(odd_llama(), 4, 1, false);
  plan.zero = 3;
  plan.hsdp = 2;
  plan.zero_prefetch = 5;
  plan.offload = Offload::optimizer;
  plan.offload_directory = "/some/where";
  const std::string text = to_toml(plan);
  const Plan read = plan_from_toml(text, "plan.toml");
  EXPECT_EQ(read.zero, 3);
  EXPECT_EQ(read.hsdp, 2);
  EXPECT_EQ(read.zero_prefetch, 5);
  EXPECT_EQ(read.offload, Offload::optimizer);
  EXPECT_EQ(read.offload_directory, "/some/where");
  EXPECT_EQ(read.shards(), 2);
  expect_contains(message_of<RequestError>(
                      [] { plan_from_toml("model = \"gpt2-tiny\"\noffload = \"all\"\n", "plan.toml"); }),
                  {"plan.toml: offload all", "none, optimizer"});
  expect_contains(
      message_of<RequestError>([] { plan_from_toml("model = \"gpt2-tiny\"\nzero = true\n", "plan.toml"); }),
      {"zero = true", "whole number"});
}

TEST(Zero, RefusesWhatItCannotDo) {
  const auto refusal = [](const std::function<void(Plan&)>& change) {
    Plan plan = odd_plan(odd_llama(), 4, 1, false);
    change(plan);
    return message_of<RequestError>([&] {
      validate(plan);
      const PipelineLayout checked(plan);
    });
  };
  expect_contains(refusal([](Plan& p) { p.zero = 4; }), {"--zero 4", "0, 1, 2, 3"});
  expect_contains(refusal([](Plan& p) { p.zero = -1; }), {"--zero -1", "0, 1, 2, 3"});
  expect_contains(refusal([](Plan& p) { p.hsdp = 2; }), {"--hsdp 2", "--zero 1, 2 or 3"});
  expect_contains(refusal([](Plan& p) { p.zero = 1, p.hsdp = 3; }), {"--hsdp 3", "legal: 1, 2, 4"});
  expect_contains(refusal([](Plan& p) { p.zero = 1, p.hsdp = 0; }), {"--hsdp 0", "from 1"});
  expect_contains(refusal([](Plan& p) { p.zero = 3, p.zero_prefetch = -1; }),
                  {"--zero-prefetch -1", "from 0"});
  for (const char* schedule : {"pipedream", "2bw"})
    expect_contains(refusal([&](Plan& p) {
                      p.zero = 1;
                      p.schedule = schedule;
                      p.mesh.set(Axis::pp, 2);
                      p.global_batch = 16;
                    }),
                    {"--zero 1", schedule, "legal: 0"});
}

}  // namespace
}  // namespace echelon::zero_test
