// What a step's time is predicted from: the parts, the cores, and the peak that MFU is of.
#include "train/rehearsal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "expert_runs.h"
#include "plan/memory.h"
#include "schedule/stage_flops.h"
#include "spec/plan_fields.h"
#include "train/dry_run.h"
#include "train/metrics.h"
#include "train/this_machine.h"

namespace echelon::rehearsal_test {
namespace {

using namespace checks;

Plan with_mesh(ModelSpec model, int dp, int tp, int pp, int cp = 1) {
  Plan plan = odd_plan(std::move(model), dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.mesh.set(Axis::cp, cp);
  plan.seq_len = cp > 1 ? 12 : 11;
  return plan;
}

// Each is a plan that runs, on the ranks that share a layer's work.
TEST(Rehearsal, RunsALayerOnTheRanksThatShareIt) {  // long
  ModelSpec hybrid = odd_llama();
  hybrid.state_space = {4, 3, 1, 5, 3, true, 4, {1}};
  ModelSpec delta = odd_deepseek();  // with experts in all layers
  delta.num_dense_layers = 0;
  delta.state_space = {4, 3, 2, 5, 3, false, 4, {1}, StateRule::gated_delta};
  for (const ModelSpec& model :
       {odd_gpt2(), odd_llama(), odd_mixtral(), odd_deepseek(), even_mixtral(2), hybrid, delta})
    for (const auto& [dp, tp, cp, ep] :
         {std::tuple{1, 1, 1, 1}, {2, 2, 1, 1}, {1, 1, 2, 1}, {1, 2, 2, 2}, {4, 1, 1, 4}}) {
      if (ep > 1 && (model.experts == Experts::none || model.num_experts % ep != 0)) continue;
      const bool is_hybrid = model.state_space.heads > 0;
      if (cp > 1 && is_hybrid) continue;
      Plan plan = with_mesh(model, dp, tp, 1, cp);
      plan.mesh.ep = ep;
      SCOPED_TRACE(describe(plan));
      const bool is_mixtral = model.experts == Experts::mixtral, has_experts = model.experts != Experts::none;
      const RehearsedPlan r =
          rehearsed_plan(plan, rehearsal_on_host(plan), is_mixtral ? 0 : 1, has_experts || is_hybrid);
      EXPECT_NO_THROW(validate(r.plan));
      EXPECT_EQ(r.plan.mesh.num_ranks(), std::max(cp, ep) * tp);
      for (const PartSeconds::Passes& share : r.layer_shares) EXPECT_DOUBLE_EQ(share.forward, 1);
      EXPECT_DOUBLE_EQ(r.head_share, 1);
      const PartSeconds parts = rehearse(plan, rehearsal_on_host(plan), {}, {2, 1});
      for (const PartSeconds::Passes& passes : {parts.dense, parts.others, parts.ends}) {
        EXPECT_GE(passes.forward, 0);
        EXPECT_GE(passes.backward, 0);
      }
      if (is_mixtral) {
        EXPECT_EQ(parts.dense.forward + parts.dense.backward, 0);
      }
      if (!has_experts && !is_hybrid) {
        EXPECT_EQ(parts.others.forward + parts.others.backward, 0);
      }
      EXPECT_GT(parts.element, 0);
      EXPECT_GE(parts.call, 0);
      EXPECT_GE(parts.byte, 0);
    }
}

// Groups of experts over context-parallel ranks that they do not divide.
TEST(Rehearsal, HasWholeGroupsOfExperts) {
  for (const auto& [dp, cp, ep] : {std::tuple{2, 3, 2}, {4, 3, 4}}) {
    Plan plan = with_mesh(even_mixtral(ep), dp, 1, 1, cp);
    plan.mesh.ep = ep;
    SCOPED_TRACE(describe(plan));
    const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), 0, true);
    EXPECT_NO_THROW(validate(r.plan));
    EXPECT_EQ(r.plan.mesh.num_ranks(), std::lcm(cp, ep));
  }
}

// Of layers of one part each the mean of those that count as one kind.
TEST(Rehearsal, RunsLayersOfOnePart) {
  ModelSpec model = odd_llama(false, 2, 5);
  model.layer_pattern = "M*-M*";
  model.activation = Activation::relu2;
  model.state_space = {4, 3, 1, 5, 3, true, 4, {}};
  const Plan plan = with_mesh(model, 1, 2, 1, 1);
  const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), {1, 2, 0});
  EXPECT_NO_THROW(validate(r.plan));
  EXPECT_EQ(r.plan.model.layer_pattern, "*-M");
  const PartSeconds parts = rehearse(plan, rehearsal_on_host(plan), {}, {2, 1});
  for (const PartSeconds::Passes& passes : {parts.dense, parts.others, parts.ends}) {
    EXPECT_GE(passes.forward, 0);
    EXPECT_GE(passes.backward, 0);
  }
}

// Of four kinds of layers, those without experts first.
TEST(Rehearsal, RunsShortConvolutionsOfEveryKind) {
  ModelSpec model = odd_deepseek();
  model.num_layers = 5, model.num_dense_layers = 2;
  model.short_conv = {3, {1, 3}};
  const Plan plan = with_mesh(model, 1, 2, 1, 1);
  const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), {1, 0, 3, 2, 0});
  EXPECT_NO_THROW(validate(r.plan));
  EXPECT_EQ(r.plan.model.num_dense_layers, 3);
  EXPECT_EQ(r.plan.model.short_conv.attention_layers, (std::vector<std::int64_t>{0, 3}));
  const PartSeconds parts = rehearse(plan, rehearsal_on_host(plan), {}, {2, 1});
  for (const PartSeconds::Passes& passes : {parts.dense, parts.others, parts.ends}) {
    EXPECT_GE(passes.forward, 0);
    EXPECT_GE(passes.backward, 0);
  }
}

// All that a plan says of how a layer's passes run is rehearsed.
TEST(Rehearsal, RunsALayerAsThePlanHasIt) {
  Plan plan = with_mesh(even_mixtral(2), 4, 2, 2, 2);
  plan.mesh.ep = 2;
  plan.global_batch = 16;
  plan.seq_len = 16;
  plan.sequence_parallel = true;
  plan.numerics = Numerics::invariant;
  plan.context_kind = ContextKind::allgather;
  plan.context_balance = ContextBalance::stripe;
  plan.mask = AttentionMask::document;
  plan.document_end = 7;
  plan.balancing = {.expert_loss = 0.1, .capacity = 1.5};
  plan.recompute = Recompute::full;
  plan.schedule = "gpipe";
  plan.zero = 2;
  plan.model.mlp_hidden = plan.model.expert_hidden = 16;
  plan.model.vocab = 64;
  ASSERT_NO_THROW(validate(plan));
  const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), 0, 1);
  EXPECT_NO_THROW(validate(r.plan));
  const std::set<std::string> of_other_parts{"pp", "dp", "schedule", "zero", "global-batch"};
  for (const PlanField& field : plan_fields())
    if (!of_other_parts.contains(field.name())) {
      EXPECT_EQ(text_of(field, r.plan), text_of(field, plan)) << field.name();
    }
  const PartSeconds parts = rehearse(plan, rehearsal_on_host(plan), {}, {2, 1});
  const double layer = parts.others.forward + parts.others.backward;
  EXPECT_GT(layer + parts.ends.forward + parts.ends.backward, 0);
  EXPECT_EQ(parts.dense.forward + parts.dense.backward, 0);
}

void expect_passes(const PartSeconds::Passes& actual, const StageTimes& expected, double times) {
  EXPECT_NEAR(actual.forward, expected.forward * times, 1e-9 * expected.forward);
  const double backward = expected.backward_input + expected.backward_weight;
  EXPECT_NEAR(actual.backward, backward * times, 1e-9 * backward);
}

// If passes took a second for each FLOP, so would the parts.
TEST(Rehearsal, TellsLayersFromEnds) {
  ModelSpec hybrid = odd_llama(false, 2, 5);
  hybrid.state_space = {4, 3, 1, 5, 3, true, 4, {1, 3}};
  ModelSpec pattern = odd_llama(false, 2, 5);
  pattern.layer_pattern = "M*-M*";
  pattern.activation = Activation::relu2;
  pattern.state_space = {4, 3, 1, 5, 3, true, 4, {}};
  ModelSpec convolutions = odd_deepseek();
  convolutions.num_layers = 5, convolutions.num_dense_layers = 2;
  convolutions.short_conv = {3, {1, 3}};
  for (const ModelSpec& model : {odd_llama(), odd_mixtral(), odd_deepseek(), hybrid, pattern, convolutions,
                                 load_model("llama-3-8b")}) {
    Plan plan = with_mesh(model, 1, 1, 1, 1);
    plan.global_batch = plan.micro_batch = 2;
    plan.seq_len = 4096;  // is shortened
    SCOPED_TRACE(describe(plan));
    const PartSeconds parts =
        parts_of_passes(plan, rehearsal_on_host(plan), [](const Plan& rehearsed) -> PartSeconds::Passes {
          const StageTimes all = stage_flops(rehearsed, {{0, rehearsed.model.num_layers}, true, true});
          return {all.forward, all.backward_input + all.backward_weight};
        });
    StageTimes dense{0, 0, 0}, others{0, 0, 0};
    std::int64_t num_dense = 0;
    for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
      const StageTimes one = stage_flops(plan, {{layer, layer + 1}, false, false});
      StageTimes& sum = model.is_other(layer) ? others : dense;
      sum.forward += one.forward;
      sum.backward_input += one.backward_input;
      sum.backward_weight += one.backward_weight;
      num_dense += !model.is_other(layer);
    }
    const auto share = [](std::int64_t count) { return count == 0 ? 0 : 1 / static_cast<double>(count); };
    expect_passes(parts.dense, dense, share(num_dense));
    expect_passes(parts.others, others, share(model.num_layers - num_dense));
    expect_passes(parts.ends, stage_flops(plan, {{0, 0}, true, true}), 1);
  }
}

// What other ranks and steps are about is left out, and the end of a document is a token that there is.
TEST(Rehearsal, IsOfOneRankAndOneMicrobatch) {
  Plan plan = with_mesh(odd_llama(false, 2, 6), 2, 1, 3);
  plan.global_batch = 8;
  plan.schedule = "mine";
  plan.schedule_text = "0F0 0F1 0BW0 0BW1\n1F0 1F1 1BW0 1BW1\n2F0 2F1 2BW0 2BW1\n";
  plan.layers_per_stage = {1, 2, 3};
  plan.vocabulary_parallel = true;
  plan.compression.kind = CompressionKind::bf16;
  plan.model.vocab = 20000;
  plan.document_end = 19999;
  const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), 1, 0);
  EXPECT_NO_THROW(validate(r.plan));
  EXPECT_EQ(r.plan.document_end, r.plan.model.vocab - 1);
  EXPECT_EQ(PipelineLayout(r.plan).programs(0).microbatches(), 1);
}

// A large one is rehearsed with fewer tokens, and counted whole.
TEST(Rehearsal, IsShortWhereTheStepIsLong) {
  Plan plan;
  plan.model = load_model("llama-3-8b");
  plan.mesh.set(Axis::tp, 2);
  plan.global_batch = plan.micro_batch = 4;
  plan.seq_len = 4096;
  const RehearsedPlan r = rehearsed_plan(plan, rehearsal_on_host(plan), 1, 0);
  EXPECT_EQ(r.plan.micro_batch, 1);
  EXPECT_LT(r.plan.seq_len, 64);
  EXPECT_GT(r.layer_shares.front().forward * static_cast<double>(r.plan.seq_len),
            4 * 4096);  // attention grows faster
  EXPECT_DOUBLE_EQ(r.head_share * static_cast<double>(r.plan.seq_len * r.plan.model.vocab),
                   4.0 * 4096 * static_cast<double>(plan.model.vocab));

  // A device that does 400,000 times as much a second starts no kernel faster for it.
  const RehearsedPlan on_device = rehearsed_plan(plan, rehearsal_on_device(plan, 800e12, 1), 1, 0);
  EXPECT_EQ(on_device.plan.model.vocab, plan.model.vocab);
  EXPECT_EQ(on_device.plan.micro_batch, 1);
  EXPECT_EQ(on_device.plan.seq_len, 4096);
  EXPECT_DOUBLE_EQ(on_device.layer_shares.front().forward, 4);
  EXPECT_DOUBLE_EQ(on_device.head_share, 4);
  const RehearsalSize one = rehearsal_on_device(plan, 800e12, 1),
                      eighth = rehearsal_on_device(plan, 800e12, 8);
  EXPECT_EQ(one.most_flops, 8 * eighth.most_flops);
  EXPECT_EQ(one.most_elements, 8 * eighth.most_elements);
  EXPECT_EQ(eighth.most_vocab, plan.model.vocab / 8);
}

// Layers, ends, messages and updates of every rank, once each.
TEST(Rehearsal, MakesAStepOfItsParts) {
  PartSeconds parts;
  parts.dense = {2, 4};
  parts.ends = {1, 3};
  for (const auto& [dp, pp] : {std::pair{1, 1}, {2, 2}, {1, 2}}) {
    Plan plan = with_mesh(odd_llama(), dp, 1, pp);
    plan.global_batch = 8;
    const PipelineLayout pipeline(plan);
    const std::vector<Traffic> none(static_cast<std::size_t>(pp));
    const auto step = [&](const PartSeconds& p, double cores, const std::vector<Traffic>& traffic) {
      return predict_step(plan, pipeline, step_work(plan, pipeline, p, traffic), {cores, 1});
    };
    const int ranks = dp * pp;
    const double work = 4 * (2 * (2 + 4) + 1 + 3);  // four microbatches of all ranks together
    EXPECT_NEAR(step(parts, 1, none).seconds, work, 1e-9);
    const double alone = step(parts, 64, none).seconds;
    EXPECT_GT(alone, work / ranks - 1e-9);
    if (pp == 1) {
      EXPECT_NEAR(alone, work / dp, 1e-9);
      EXPECT_NEAR(step(parts, 1, none).bubble_fraction, 0, 1e-9);
    }
    // A second for each element: on one core those of all ranks, one after another.
    PartSeconds updates;
    updates.element = 1;
    double elements = 0;
    for (int r = 0; r < pp; ++r)
      elements +=
          static_cast<double>(predict_memory(plan, pipeline, {.pp = r})[MemoryCategory::parameters] / 8);
    EXPECT_NEAR(step(updates, 1, none).seconds, dp * elements, 1e-6);
    // Calls and bytes, too: of the pipeline in the passes, of dp behind them; those of tp are part of a
    // layer.
    PartSeconds talk;
    talk.call = 1;
    talk.byte = 0.5;
    std::vector<Traffic> traffic(none);
    for (Traffic& t : traffic)
      t.at(Axis::pp, Verb::send) = {3, 10}, t.at(Axis::dp, Verb::all_reduce) = {1, 4};
    EXPECT_NEAR(step(talk, 1, traffic).seconds, ranks * (3 + 5 + 1 + 2), 1e-9);
    EXPECT_GE(step(talk, 64, traffic).seconds, 3 + 5 + 1 + 2 - 1e-9);
    EXPECT_LE(step(talk, 64, traffic).seconds, pp * (3 + 5 + 1 + 2));
  }
}

// A second for each FLOP: of all ranks' matrices one after another, or of the largest of each round that
// ranks make at once.
TEST(Rehearsal, CountsTheMatricesOfMuon) {
  PartSeconds parts;
  parts.muon = 1;
  Plan plan = with_mesh(odd_llama(), 2, 1, 1);
  plan.optimizer = OptimizerKind::muon;
  plan.global_batch = 8;
  double all = 0, most = 0;
  for (const ParamSpec& spec : all_parameters(plan.model))
    if (is_updated_whole(plan.optimizer, spec)) {
      all += muon_flops(spec);
      most = std::max(most, muon_flops(spec));
    }
  const auto alone = [&] {
    const PipelineLayout pipeline(plan);
    return predict_step(plan, pipeline, step_work(plan, pipeline, parts, std::vector<Traffic>(1)), {64, 1})
        .seconds;
  };
  EXPECT_DOUBLE_EQ(alone(), all);
  plan.zero = 1;
  EXPECT_GE(alone(), all / 2);
  EXPECT_LE(alone(), all / 2 + most);
  plan.optimizer = OptimizerKind::adamw;
  EXPECT_EQ(alone(), 0);
}

TEST(ThisMachine, TimesProductsOfNumbersThatAreUnlike) {
  Arena arena;
  const auto kernels = make_reference_kernels();
  for (const auto& [rows, cols] : {std::pair{300, 700}, {2, 100'000}}) {
    const Tensor x(arena, MemoryCategory::other, DType::bf16, {rows, cols});
    fill_with_normals(*kernels, x);
    const std::vector<double> numbers = copy_numbers_to_host(x);
    EXPECT_GT(std::set<double>(numbers.begin(), numbers.end()).size(), 1000u);
    double squares = 0;
    for (const double number : numbers) squares += number * number;
    // Of 65,000 normals or more, whose squares have a variance of 2, each rounded to 8 bits.
    EXPECT_NEAR(squares / static_cast<double>(numbers.size()), 1, 6 * std::sqrt(2.0 / 65'000) + 1.0 / 256);
  }
}

TEST(ThisMachine, KnowsItsQuotaOfCores) {
  const TemporaryDirectory directory;
  const auto mount = directory.path() / "cgroup";
  std::filesystem::create_directories(mount / "a" / "b");
  std::filesystem::create_directories(mount / "cpu" / "old");
  const auto groups = directory / "groups";
  const auto cores = [&](const std::string& list) {
    write_text(groups, list);
    return cores_of_quota(groups, mount);
  };
  EXPECT_TRUE(std::isinf(cores("0::/a/b\n")));
  write_text(mount / "a" / "b" / "cpu.max", "max 100000\n");
  EXPECT_TRUE(std::isinf(cores("0::/a/b\n")));
  write_text(mount / "a" / "cpu.max", "150000 100000\n");
  EXPECT_DOUBLE_EQ(cores("0::/a/b\n"), 1.5);  // of the group around it
  write_text(mount / "a" / "b" / "cpu.max", "50000 100000\n");
  EXPECT_DOUBLE_EQ(cores("0::/a/b\n"), 0.5);
  EXPECT_TRUE(std::isinf(cores("0::/elsewhere\n")));
  write_text(mount / "cpu.max", "400000 100000\n");
  EXPECT_DOUBLE_EQ(cores("0::/elsewhere\n"), 4);
  write_text(mount / "cpu" / "old" / "cpu.cfs_quota_us", "-1\n");
  write_text(mount / "cpu" / "old" / "cpu.cfs_period_us", "100000\n");
  EXPECT_TRUE(std::isinf(cores("7:memory:/a/b\n3:cpu,cpuacct:/old\n")));
  write_text(mount / "cpu" / "old" / "cpu.cfs_quota_us", "250000\n");
  EXPECT_DOUBLE_EQ(cores("7:memory:/a/b\n3:cpu,cpuacct:/old\n"), 2.5);
}

TEST(Utilization, IsNeverAboveOne) {
  Utilization u(100);
  EXPECT_DOUBLE_EQ(u.of(50), 0.5);
  EXPECT_FALSE(u.was_exceeded());
  EXPECT_DOUBLE_EQ(u.of(108.5), 1);  // so the peak had been measured on a busy machine
  EXPECT_TRUE(u.was_exceeded());
  u.raise(200);
  EXPECT_DOUBLE_EQ(u.of(108.5), 0.5425);
  u.raise(150);
  EXPECT_DOUBLE_EQ(u.peak_flops(), 200);
}

}  // namespace
}  // namespace echelon::rehearsal_test
