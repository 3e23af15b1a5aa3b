// Training of a part of a model: what is frozen stays as it is and costs nothing but its value, on every
// axis.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/open_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/starting_weights.h"
#include "expert_runs.h"
#include "predicted_runs.h"
#include "refusals.h"
#include "spec/block_passes.h"
#include "train/asynchronous.h"
#include "train/refuse_request.h"
#include "transformers_tensors.h"
#include "verify/verify.h"

namespace echelon::fine_tuning_test {
namespace {

using namespace checks;

ModelSpec frozen(ModelSpec model, const std::string& patterns) {
  model.tuning.freeze = parse_freeze(patterns);
  return model;
}

ModelSpec adapted(ModelSpec model, const std::string& lora, const std::string& freeze = "none") {
  model.tuning.lora = parse_lora(lora, "--lora");
  return frozen(std::move(model), freeze);
}

// A part of each: one of several stacked matrices, some of a layer's parameters, a whole layer, the table.
const std::string some_of_llama =
    "*.q_proj.weight,*.norm.weight,model.layers.0.mlp.*,model.embed_tokens.weight";
const std::string some_of_gpt2 = "*.ln_?.weight,*.attn.c_attn.bias,transformer.h.1.*,transformer.wpe.*";

// f64 on the reference kernels, and bf16 with its master weights.
std::vector<PrecisionRecipe> precisions() {
  std::vector<PrecisionRecipe> all{parse_recipe("f64", "it")};
  if (has_cpu_kernels()) all.push_back(parse_recipe("bf16", "it"));
  return all;
}

struct Case {
  std::string name;
  Plan plan;
};

// A short convolution, and attention.
ModelSpec odd_convolved() {
  ModelSpec m = odd_llama();
  m.name = "odd-convolved";
  m.qk_norm = true;
  m.short_conv = {3, {1}};
  return m;
}

// Every axis, alone and beside others.
std::vector<Case> frozen_cases(const PrecisionRecipe& precision) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const ModelSpec& model, int dp, int tp, const auto& change) {
    Plan plan = odd_plan(model, dp, tp, tp > 1);
    plan.precision = precision;
    change(plan);
    all.push_back({name, plan});
  };
  const auto nothing = [](Plan&) {};
  const ModelSpec llama = frozen(odd_llama(), some_of_llama), gpt2 = frozen(odd_gpt2(), some_of_gpt2);
  add("dp", llama, 3, 1, nothing);
  add("dp gpt2", gpt2, 2, 1, nothing);
  add("tp", llama, 1, 2, nothing);
  add("tp without sp", llama, 1, 4, [](Plan& p) { p.sequence_parallel = false; });
  add("tp gpt2", gpt2, 1, 2, nothing);
  add("tied table", frozen(odd_gpt2(), "transformer.wte.weight"), 2, 2, nothing);
  for (int zero : {1, 2, 3}) {
    add(fmt::format("zero {}", zero), llama, 3, 1, [&](Plan& p) { p.zero = zero; });
    add(fmt::format("zero {} x tp", zero), gpt2, 2, 2, [&](Plan& p) { p.zero = zero; });
  }
  add("hsdp", llama, 4, 1, [](Plan& p) { p.zero = 3, p.hsdp = 2; });
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "dualpipe", "interleaved"})
    add(schedule, frozen(odd_llama(false, 2, 4), some_of_llama), 1, 1, [&](Plan& p) {
      p.mesh.set(Axis::pp, 2);
      p.schedule = schedule;
      p.global_batch = 8;
    });
  add("tied over pp", frozen(odd_gpt2(true, 2), "*.wte.*,*.c_fc.*"), 1, 2,
      [](Plan& p) { p.mesh.set(Axis::pp, 2); });
  add("a stage without training", frozen(odd_llama(), "model.layers.0.*,*embed*"), 1, 1,
      [](Plan& p) { p.mesh.set(Axis::pp, 2), p.schedule = "gpipe"; });
  for (int zero : {0, 1, 3})
    for (int pp : {1, 2})
      for (const char* schedule : {"1f1b", "zb-v"})
        add(fmt::format("idle layers, {}", schedule),
            frozen(odd_llama(false, 2, 4), "*embed*,model.layers.[012].*"), 2, 1, [&](Plan& p) {
              p.zero = zero;
              p.mesh.set(Axis::pp, pp);
              p.schedule = pp > 1 ? schedule : "1f1b";
              p.global_batch = 8;
            });
  add("idle layers of gpt2",
      frozen(odd_gpt2(true, 3), "transformer.wte.*,transformer.wpe.*,transformer.h.[01].*"), 1, 2, nothing);
  add("no barrier", frozen(odd_llama(), some_of_llama), 1, 1,
      [](Plan& p) { p.mesh.set(Axis::pp, 2), p.optimizer_barrier = false; });
  add("cp", llama, 1, 1, [](Plan& p) { p.mesh.set(Axis::cp, 2), p.seq_len = 12; });
  for (const char* patterns :
       {"*.experts.*", "*.gate.weight,*.experts.?.w2.weight", "*.experts.[0-3].*", "*.self_attn.*"})
    add(fmt::format("ep {}", patterns), frozen(even_mixtral(3), patterns), 2, 1,
        [](Plan& p) { p.mesh.ep = 2; });
  add("ep zero 3", frozen(even_deepseek(3), "*.experts.[0-3].*,*.shared_experts.*,*norm*"), 4, 1,
      [](Plan& p) { p.mesh.ep = 2, p.zero = 3, p.global_batch = 8; });
  for (const char* patterns : {"*.conv.conv.*", "*.in_proj.*,*.out_proj.*", "*.out_proj.*,*.in_proj.c.*"})
    for (const int cp : {1, 2})
      add(fmt::format("short convolution {}", patterns), frozen(odd_convolved(), patterns), 1, 2,
          [&](Plan& p) { p.mesh.set(Axis::cp, cp), p.seq_len = 12; });
  add("recompute", llama, 1, 2, [](Plan& p) { p.recompute = Recompute::full; });
  add("recompute some", gpt2, 1, 1, [](Plan& p) { p.recompute = Recompute({"linear"}); });
  add("compressed", llama, 2, 1, [](Plan& p) { p.compression = parse_compression("topk:1", "it"); });
  return all;
}

std::vector<Case> adapted_cases(const PrecisionRecipe& precision) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const ModelSpec& model, int dp, int tp, const auto& change) {
    Plan plan = odd_plan(model, dp, tp, tp > 1);
    plan.precision = precision;
    change(plan);
    all.push_back({name, plan});
  };
  const auto nothing = [](Plan&) {};
  const ModelSpec llama = adapted(odd_llama(), "rank=3,alpha=6"),
                  whole =
                      adapted(odd_llama(), "rank=2,alpha=5,targets=q_proj,v_proj,o_proj,up_proj,down_proj"),
                  gpt2 = adapted(odd_gpt2(), "rank=2,targets=c_attn,c_proj,c_fc");
  add("one rank", whole, 1, 1, nothing);
  add("dp", llama, 3, 1, nothing);
  add("dp gpt2", gpt2, 2, 1, nothing);
  for (bool sp : {false, true}) {
    add("tp", whole, 1, 2, [&](Plan& p) { p.sequence_parallel = sp; });
    add("tp gpt2", gpt2, 1, 4, [&](Plan& p) { p.sequence_parallel = sp; });
    // Two ranks for each head of keys and values.
    add("tp beyond heads", llama, 1, 4, [&](Plan& p) { p.sequence_parallel = sp; });
  }
  add("first factors alone", adapted(odd_llama(), "rank=2", "*lora_B*"), 1, 2, nothing);
  add("second factors alone", adapted(odd_llama(), "rank=2", "*lora_A*"), 1, 2, nothing);
  for (int zero : {1, 2, 3}) {
    add(fmt::format("zero {}", zero), whole, 3, 1, [&](Plan& p) { p.zero = zero; });
    add(fmt::format("zero {} x tp", zero), gpt2, 2, 2, [&](Plan& p) { p.zero = zero; });
  }
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "dualpipe"})
    for (int tp : {1, 2})
      add(schedule, adapted(odd_llama(true, 2, 4), "rank=2,targets=v_proj,gate_proj,o_proj"), 1, tp,
          [&](Plan& p) {
            p.mesh.set(Axis::pp, 2);
            p.schedule = schedule;
            p.global_batch = 8;
          });
  add("zb zero 3", whole, 2, 1, [](Plan& p) {
    p.mesh.set(Axis::pp, 2);
    p.schedule = "zb-h1";
    p.zero = 3;
    p.global_batch = 8;
  });
  add("cp", llama, 1, 2, [](Plan& p) { p.mesh.set(Axis::cp, 2), p.seq_len = 12; });
  add("ep", adapted(even_mixtral(3), "rank=2"), 2, 1, [](Plan& p) { p.mesh.ep = 2; });
  for (const char* lora :
       {"rank=2", "rank=2,targets=in_proj.b,x,out_proj,q_proj", "rank=2,targets=in_proj.c"})
    for (const int cp : {1, 2})
      add(fmt::format("short convolution {}", lora), adapted(odd_convolved(), lora), 1, 2,
          [&](Plan& p) { p.mesh.set(Axis::cp, cp), p.seq_len = 12; });
  for (const char* ops : {"linear", "attention_in", "mlp_out,attention"})
    add(ops, whole, 1, 2, [&](Plan& p) { p.recompute = parse_recompute(ops, "it"); });
  add("recompute", llama, 1, 2, [](Plan& p) { p.recompute = Recompute::full; });
  add("compressed", llama, 2, 1, [](Plan& p) { p.compression = parse_compression("topk:1", "it"); });
  return all;
}

std::vector<Case> cases(const PrecisionRecipe& precision) {
  std::vector<Case> all = frozen_cases(precision);
  for (Case& one : adapted_cases(precision)) all.push_back(std::move(one));
  return all;
}

TEST(Frozen, TheMeshTrainsAsOneRankDoes) {
  for (const auto& [name, plan] : cases(DType::f64)) {
    if (!is_taken()) continue;
    SCOPED_TRACE(name + " " + describe(plan));
    VerifyRequest request;
    request.plan = plan;
    request.optimizer.warmup_steps = 0;
    request.optimizer.total_steps = 10;
    request.optimizer.clip = 0.1;
    request.run.timeout = patience;
    request.steps = 2;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
    EXPECT_LE(report.param_max_rel_diff, 1e-10);
  }
}

TEST(Frozen, MemoryAndTrafficArePredicted) {
  for (const auto& [name, plan] : cases(DType::f64)) {
    if (!plan.optimizer_barrier) continue;
    SCOPED_TRACE(name);
    expect_predicted(plan);
  }
  if (!has_cpu_kernels()) return;
  for (const auto& [name, plan] : cases(parse_recipe("bf16", "it"))) {
    if (!plan.optimizer_barrier || !is_taken(6) || !memory_assumptions(plan).empty()) continue;
    SCOPED_TRACE(name);
    const std::vector<Measured> measured = measure(plan);
    const PipelineLayout pipeline(plan);
    for (int rank = 0; rank < plan.mesh.num_ranks(); ++rank) {
      const Coordinates at = plan.mesh.coordinates(rank);
      Memory predicted = predict_memory(plan, pipeline, at);
      predicted[MemoryCategory::other] += kernel_scratch_bytes(plan.precision, 1);
      expect_same(predicted, measured[static_cast<std::size_t>(rank)].peak);
    }
  }
}

// Two steps on one rank: what moved, and what the first gradients were.
struct Trained {
  LogicalTensors before, after, gradients;
  double norm = 0;
};
Trained train(const ModelSpec& model) {
  Trained t;
  const Plan plan = odd_plan(model, 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    OptimizerOptions options;
    options.warmup_steps = 0;
    Trainer trainer(rank, plan, options, 1);
    t.before = gather(rank, trainer, ParameterTensor::value);
    for (std::int64_t step : {0, 1}) {
      trainer.compute_gradients(step, random_samples(plan));
      if (step == 0)
        for (const Parameter& p : trainer.parameters().all())
          if (!p.spec.frozen)
            t.gradients[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
      const double norm = trainer.apply_gradients(step).gradient_norm;
      if (step == 0) t.norm = norm;
    }
    t.after = gather(rank, trainer, ParameterTensor::value);
  });
  return t;
}

TEST(Frozen, StaysAsItIsWhileTheRestHasTheSameGradients) {
  for (const auto& [model, patterns] : {std::pair{odd_llama(), some_of_llama},
                                        {odd_gpt2(), some_of_gpt2},
                                        {odd_gpt2(), std::string("*.weight")},
                                        {odd_gpt2(), std::string("*.bias")},
                                        {odd_mixtral(), std::string("*.experts.[024].*,*.gate.weight")},
                                        {odd_deepseek(), std::string("*.shared_experts.*,*.k_proj.*")}}) {
    SCOPED_TRACE(model.name + " " + patterns);
    const ModelSpec part = frozen(model, patterns);
    const Trained whole = train(model), some = train(part);
    std::set<std::string> still;
    double squares = 0;
    for (const ParamSpec& spec : all_parameters(part)) {
      SCOPED_TRACE(spec.name);
      EXPECT_EQ(some.before.at(spec.name), whole.before.at(spec.name));
      EXPECT_EQ(some.gradients.contains(spec.name), !spec.frozen);
      EXPECT_EQ(some.after.at(spec.name) == some.before.at(spec.name), spec.frozen);
      if (spec.frozen) continue;
      EXPECT_LE(relative_difference(whole.gradients.at(spec.name), some.gradients.at(spec.name)), 1e-12);
      for (double g : some.gradients.at(spec.name)) squares += g * g;
    }
    EXPECT_NEAR(some.norm, std::sqrt(squares), 1e-12 * some.norm);
    EXPECT_LT(some.norm, whole.norm);
  }
}

// To the byte: values of all, the rest of what is trained alone.
TEST(Frozen, HasAValueAndNothingElse) {
  const ModelSpec part = frozen(odd_llama(), some_of_llama);
  std::int64_t all = 0, trained = 0;
  for (const ParamSpec& spec : all_parameters(part)) {
    all += spec.numel();
    trained += spec.frozen ? 0 : spec.numel();
  }
  EXPECT_EQ(num_trained_parameters(part), trained);
  EXPECT_LT(trained, all);
  for (const auto& [name, value, gradient, optimizer] : {std::tuple{"f64", 8, 8, 16}, {"bf16", 2, 4, 10}}) {
    Plan plan = odd_plan(part, 1, 1, false);
    plan.precision = parse_recipe(name, "it");
    const Memory memory = predict_memory(plan, PipelineLayout(plan));
    EXPECT_EQ(memory[MemoryCategory::parameters], value * all);
    EXPECT_EQ(memory[MemoryCategory::gradients], gradient * trained);
    EXPECT_EQ(memory[MemoryCategory::optimizer], optimizer * trained);
  }
  // Data parallelism in two parts sends what is trained once over, but for the counts and the norm's sums.
  const auto sent = [](const ModelSpec& model) {
    const Plan plan = odd_plan(model, 2, 1, false);
    return predict_traffic(plan, PipelineLayout(plan)).at(Axis::dp, Verb::all_reduce).bytes;
  };
  EXPECT_EQ(sent(odd_llama()) - sent(part), 8 * (all - trained));
  EXPECT_LT(model_flops_per_token(part, 11), model_flops_per_token(odd_llama(), 11));
}

// An input that is read for the gradient of a frozen matrix alone is not made again.
TEST(Frozen, MakesLessAgainForItsBackwardPass) {
  const auto made_again = [](const ModelSpec& model) {
    std::size_t ops = 0;
    for (const OpSequence& sequence : block_passes(layer_program(model, 0), Recompute::none).again)
      ops += sequence.ops.size();
    return ops;
  };
  EXPECT_EQ(made_again(odd_llama()), 2u);  // the norms' outputs
  EXPECT_EQ(made_again(frozen(odd_llama(), "*.q_proj.weight,*.mlp.*")), 1u);
  EXPECT_EQ(made_again(frozen(odd_llama(), "*_proj.weight")), 0u);
}

// Gradients go no further down than to the first layer that is trained.
TEST(Frozen, HasNoBackwardPassBelowWhatIsTrained) {
  const ModelSpec upper = frozen(odd_llama(false, 2, 4), "*embed*,model.layers.[012].*"),
                  but_for_a_bias = frozen(odd_gpt2(false, 4),
                                          "*.wte.*,*.wpe.*,transformer.h.0.*,transformer.h.1.*.weight");
  EXPECT_EQ(idle_blocks(upper), 4);
  EXPECT_EQ(idle_blocks(but_for_a_bias), 2);
  EXPECT_EQ(idle_blocks(frozen(odd_llama(), "model.layers.0.*")), 0);  // the table before it is trained
  EXPECT_EQ(idle_blocks(frozen(odd_mixtral(), "*embed*,model.layers.*")), 1);  // routers are counted
  EXPECT_EQ(idle_blocks(adapted(odd_llama(), "rank=2")), 1);
  const auto memory = [](const ModelSpec& model) {
    const Plan plan = odd_plan(model, 1, 1, false);
    return predict_memory(plan, PipelineLayout(plan))[MemoryCategory::activations];
  };
  EXPECT_LT(memory(upper), memory(frozen(odd_llama(false, 2, 4), "model.layers.[012].*")));
  // A layer of four has a backward pass.
  const Plan plan = odd_plan(upper, 1, 1, false), all = odd_plan(odd_llama(false, 2, 4), 1, 1, false);
  const PipelineLayout layout(plan), whole(all);
  StageSlice layers = layout.slices().front(), whole_layers = whole.slices().front();
  layers.head = whole_layers.head = false;
  const auto flops = [](const ModelSpec& model) { return model_flops_per_token(model, 11); };
  EXPECT_LT(flops(upper), flops(frozen(odd_llama(false, 2, 4), "model.layers.[012].*")));
  const StageTimes part = stage_flops(plan, layers), full = stage_flops(all, whole_layers);
  EXPECT_EQ(part.forward, full.forward);
  EXPECT_EQ(4 * part.backward_input, full.backward_input);
  EXPECT_EQ(4 * part.backward_weight, full.backward_weight);
}

struct State {
  LogicalTensors values, exp_avg;
  bool operator==(const State&) const = default;
};
State state_of(const Rank& rank, const Trainer& trainer) {
  State state{gather(rank, trainer, ParameterTensor::value), {}};
  for (const Parameter& p : trainer.parameters().all())
    if (!p.spec.frozen)
      state.exp_avg[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::exp_avg));
  return state;
}

TEST(Frozen, IsInCheckpointsThatLoadOnAnyMesh) {
  const ModelSpec model = frozen(odd_llama(), some_of_llama);
  for (const PrecisionRecipe& precision : precisions())
    for (int zero : {0, 1, 3}) {
      const TemporaryDirectory directory;
      Plan plan = odd_plan(model, 2, 2, true);
      plan.precision = precision;
      plan.zero = zero;
      State saved;
      std::string path;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        for (std::int64_t step : {0, 1}) {
          trainer.compute_gradients(step, random_samples(plan));
          trainer.apply_gradients(step);
        }
        CheckpointInfo info;
        info.step = 2;
        info.seed = 1;
        info.dtype = plan.precision.master;
        info.model = plan.model;
        const State mine = state_of(rank, trainer);
        const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
        if (rank.index() == 0) saved = mine, path = where;
      });
      const CheckpointInfo info = read_checkpoint_info(path);
      EXPECT_EQ(info.model.tuning, model.tuning);
      for (const auto& [dp, tp, stage] : {std::tuple{1, 1, 0}, {3, 1, 3}, {1, 4, 0}, {2, 1, 2}}) {
        Plan other = odd_plan(model, dp, tp, tp > 1);
        other.precision = precision;
        other.zero = stage;
        SCOPED_TRACE(describe(other));
        on_mesh(other, [&](const Rank& rank) {
          Trainer trainer(rank, other, {}, 99);
          load_checkpoint(rank, trainer.parameters(), info, false);
          EXPECT_EQ(state_of(rank, trainer), saved);
        });
      }
    }
}

TEST(Frozen, PatternsThatMatchNothingAreRefusedWithNearNames) {
  const auto refused = [](const std::string& patterns, const std::vector<std::string>& words) {
    expect_refusal([&] { validate(odd_plan(frozen(odd_llama(), patterns), 1, 1, false)); }, words);
  };
  refused("*.q_prj.weight", {"--freeze *.q_prj.weight", "no parameter of odd-llama",
                             "legal: model.layers.0.self_attn.q_proj.weight"});
  refused("lm_head.weigth", {"legal: lm_head.weight"});
  refused("*norm*,lm_head", {"a name like lm_head", "lm_head.weight"});
  refused("*norm*,", {"an empty one"});
  refused("*", {"--freeze *", "nothing of odd-llama would be trained", "legal: none"});
  expect_refusal([&] { validate(odd_plan(frozen(odd_mixtral(), "*.experts.1.w1.weight"), 1, 1, false)); },
                 {"experts.1.w1.weight and ", "experts.1.w3.weight are one matrix"});
  expect_refusal([&] { refuse_asynchronous(odd_plan(frozen(odd_llama(), "*norm*"), 2, 1, false), {}); },
                 {"--staleness", "--freeze none"});
}

// ---- adapters

// Parameters of one rank by name, and values for the second factors, which start as zero.
std::map<std::string, std::vector<double>> values_of(const Trainer& trainer) {
  std::map<std::string, std::vector<double>> values;
  for (const Parameter& p : trainer.parameters().all()) values[p.spec.name] = as_doubles(p.value);
  return values;
}

void move_second_factors(const Trainer& trainer) {
  for (const Parameter& p : trainer.parameters().all()) {
    if (!p.spec.adapter || p.spec.init != Init::zeros) continue;
    const Philox random(5, Stream::test, name_hash(p.spec.name.c_str()));
    for (std::int64_t k = 0; k < p.value.numel(); ++k)
      p.value.host<double>()[k] = 0.1 * random.normal(static_cast<std::uint64_t>(k));
  }
}

// At step 0 nothing has changed, and then a model with adapters is the one with B A added: the loss is the
// same, and by the chain rule dB = s dW A^T and dA = s B^T dW.
TEST(Adapters, AreWhatTheyAddToTheirMatrices) {
  ModelSpec without_gate = odd_llama();
  without_gate.activation = Activation::relu2;
  for (const ModelSpec& plain : {odd_llama(), without_gate, odd_gpt2(), odd_mixtral()}) {
    const bool gpt2 = plain.family == Family::gpt2;
    const ModelSpec model =
        adapted(plain, gpt2                             ? "rank=2,alpha=3,targets=c_attn,c_proj,c_fc"
                       : plain.experts != Experts::none ? "rank=2,alpha=3"
                                                        : "rank=2,alpha=3,targets=q_proj,v_proj,o_proj,"
                                                          "up_proj,down_proj");
    SCOPED_TRACE(model.name);
    const Plan plan = odd_plan(model, 1, 1, false), merged_plan = odd_plan(plain, 1, 1, false);
    const SampleSource samples = random_samples(plan);
    const std::vector<AdaptedMatrix> matrices = adapted_matrices(model);
    EXPECT_EQ(std::ssize(matrices), (gpt2 ? 4 : plain.experts != Experts::none ? 4 : 5) * plain.num_layers);
    on_mesh(plan, [&](const Rank& rank) {
      Trainer with(rank, plan, {}, 1), without(rank, merged_plan, {}, 1);
      EXPECT_EQ(with.compute_gradients(0, samples), without.compute_gradients(0, samples));
      move_second_factors(with);
      const auto values = values_of(with);
      for (const AdaptedMatrix& m : matrices) {
        const std::int64_t r = m.a.shape[0], in = m.a.shape[1], out = m.b.shape[0];
        const std::vector<double>&a = values.at(m.a.name), &b = values.at(m.b.name);
        double* const w = without.parameters().find(m.weight.name).value.host<double>();
        for (std::int64_t o = 0; o < out; ++o)
          for (std::int64_t i = 0; i < in; ++i)
            for (std::int64_t k = 0; k < r; ++k)
              w[m.order == WeightOrder::in_out ? i * out + o : o * in + i] +=
                  1.5 * b[static_cast<std::size_t>(o * r + k)] * a[static_cast<std::size_t>(k * in + i)];
      }
      const double loss = with.compute_gradients(0, samples), merged = without.compute_gradients(0, samples);
      EXPECT_NEAR(loss, merged, 1e-13 * merged);
      for (const AdaptedMatrix& m : matrices) {
        SCOPED_TRACE(m.weight.name);
        const std::int64_t r = m.a.shape[0], in = m.a.shape[1], out = m.b.shape[0];
        const std::vector<double>&a = values.at(m.a.name), &b = values.at(m.b.name);
        const std::vector<double> dw = as_doubles(without.parameters().find(m.weight.name).gradient);
        std::vector<double> da(a.size()), db(b.size());
        for (std::int64_t o = 0; o < out; ++o)
          for (std::int64_t i = 0; i < in; ++i)
            for (std::int64_t k = 0; k < r; ++k) {
              const double d =
                  1.5 *
                  dw[static_cast<std::size_t>(m.order == WeightOrder::in_out ? i * out + o : o * in + i)];
              const auto at_b = static_cast<std::size_t>(o * r + k),
                         at_a = static_cast<std::size_t>(k * in + i);
              db[at_b] += d * a[at_a];
              da[at_a] += d * b[at_b];
            }
        EXPECT_LE(relative_difference(da, as_doubles(with.parameters().find(m.a.name).gradient)), 1e-11);
        EXPECT_LE(relative_difference(db, as_doubles(with.parameters().find(m.b.name).gradient)), 1e-11);
      }
    });
  }
}

TEST(Adapters, StartAsPeftDoes) {
  const Plan plan = odd_plan(adapted(odd_llama(), "rank=20"), 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    for (const Parameter& p : trainer.parameters().all()) {
      EXPECT_EQ(p.spec.frozen, !p.spec.adapter) << p.spec.name;
      if (!p.spec.adapter) continue;
      double largest = 0, sum = 0, squares = 0;
      for (double x : as_doubles(p.value))
        largest = std::max(largest, std::abs(x)), sum += x, squares += x * x;
      if (p.spec.name.ends_with("lora_B.weight")) {
        EXPECT_EQ(largest, 0);
        continue;
      }
      const double bound = 1 / std::sqrt(static_cast<double>(p.spec.shape[1]));
      const auto count = static_cast<double>(p.value.numel());
      EXPECT_LE(largest, bound);
      EXPECT_GT(largest, 0.95 * bound);
      EXPECT_NEAR(sum / count, 0, 5 * bound / std::sqrt(3 * count));
      EXPECT_NEAR(squares / count, bound * bound / 3, 0.2 * bound * bound);
    }
  });
}

TEST(Adapters, AreNamedAndRefusedByTheirTargets) {
  const auto names = [](const ModelSpec& model) {
    std::set<std::string> all;
    for (const AdaptedMatrix& m : adapted_matrices(model)) all.insert(m.a.name);
    return all;
  };
  EXPECT_EQ(names(adapted(odd_gpt2(true, 1), "rank=2")),
            (std::set<std::string>{"transformer.h.0.attn.c_attn.lora_A.weight",
                                   "transformer.h.0.attn.c_proj.lora_A.weight"}));
  EXPECT_EQ(names(adapted(odd_gpt2(true, 1), "rank=2,targets=mlp.c_proj")),
            (std::set<std::string>{"transformer.h.0.mlp.c_proj.lora_A.weight"}));
  EXPECT_EQ(names(adapted(odd_llama(false, 2, 2), "rank=2,targets=layers.1.mlp.up_proj")),
            (std::set<std::string>{"model.layers.1.mlp.up_proj.lora_A.weight"}));
  const auto refused = [](const ModelSpec& model, const std::string& lora,
                          const std::vector<std::string>& words) {
    expect_refusal([&] { validate(odd_plan(adapted(model, lora), 1, 1, false)); }, words);
  };
  refused(odd_llama(), "rank=2,targets=q_proj,w1",
          {"--lora rank=2,alpha=2,targets=q_proj,w1", "is called w1", "q_proj"});
  refused(odd_llama(), "rank=2,targets=proj", {"is called proj"});
  refused(odd_llama(false, 2, 2), "rank=2,targets=layers.2.mlp.up_proj", {"is called layers.2.mlp.up_proj"});
  refused(odd_llama(), "rank=2,targets=lm_head", {"the output layer have no adapters"});
  refused(odd_mixtral(), "rank=2,targets=w1", {"routed experts"});
  refused(odd_llama(), "rank=100", {"24 columns", "legal: rank=8"});
  for (const char* text : {"16", "rank=0", "rank=-1", "rank=2,alpha=0", "rank=2,alpha=nan", "alpha=2",
                           "rank=2,rank=3", "rank=2,dropout=0.1", "rank=x", "targets=q_proj"})
    expect_refusal([&] { (void)parse_lora(text, "--lora"); }, {std::string("--lora ")});
  expect_refusal([&] { (void)parse_lora("rank=4,alpha=x", "--lora"); },
                 {"--lora rank=4,alpha=x: alpha = x: "});
}

// The files have other names for LFM2's matrices, and one for what is projected to be convolved.
TEST(Adapters, AreExportedUnderTheNamesOfTheFiles) {
  const auto exported = [](const std::string& lora, std::set<std::string>& tensors) {
    const TemporaryDirectory directory;
    const Plan plan = odd_plan(adapted(odd_convolved(), lora), 1, 1, false);
    std::string path;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      CheckpointInfo info;
      info.seed = 1;
      info.dtype = plan.precision.master;
      info.model = plan.model;
      path = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
    });
    export_adapters(path, directory / "out", {});
    const SafetensorsFile file(directory / "out/adapter_model.safetensors");
    for (const StoredTensor& tensor : file.tensors())
      if (tensor.name.ends_with("lora_A.weight"))
        tensors.insert(tensor.name.substr(17, tensor.name.size() - 31));
    return nlohmann::json::parse(read_text(directory / "out/adapter_config.json"))["target_modules"];
  };
  std::set<std::string> tensors;
  const auto modules = exported("rank=2,targets=o_proj,out_proj,down_proj", tensors);
  EXPECT_EQ(tensors,
            (std::set<std::string>{"model.layers.0.conv.out_proj", "model.layers.0.feed_forward.w2",
                                   "model.layers.1.self_attn.out_proj", "model.layers.1.feed_forward.w2"}));
  EXPECT_EQ(modules.get<std::set<std::string>>(),
            (std::set<std::string>{"conv.out_proj", "self_attn.out_proj", "feed_forward.w2"}));
  // PEFT would adapt what has such a name in every layer.
  tensors.clear();
  EXPECT_EQ(exported("rank=2,targets=layers.1.mlp.down_proj,self_attn.o_proj", tensors)
                .get<std::set<std::string>>(),
            (std::set<std::string>{"model.layers.1.feed_forward.w2", "self_attn.out_proj"}));
  expect_refusal([&] { exported("rank=2,targets=in_proj.c", tensors); },
                 {"--adapters", "convolved", "one matrix"});
}

// Written in parts by any mesh, and with their moments.
TEST(Adapters, AreInCheckpointsWithWhatTheyAreFor) {
  const ModelSpec model = adapted(odd_llama(), "rank=2,targets=q_proj,o_proj,up_proj");
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(model, 2, 2, true);
  State saved;
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step : {0, 1}) {
      trainer.compute_gradients(step, random_samples(plan));
      trainer.apply_gradients(step);
    }
    CheckpointInfo info;
    info.step = 2;
    info.seed = 1;
    info.dtype = plan.precision.master;
    info.model = plan.model;
    const State mine = state_of(rank, trainer);
    const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
    if (rank.index() == 0) saved = mine, path = where;
  });
  const CheckpointInfo info = read_checkpoint_info(path);
  EXPECT_EQ(info.model.tuning, model.tuning);
  EXPECT_EQ(std::ssize(saved.exp_avg), 2 * 3 * model.num_layers);
  for (const auto& [dp, tp, stage] : {std::tuple{1, 1, 0}, {3, 1, 3}, {1, 4, 0}}) {
    Plan other = odd_plan(model, dp, tp, tp > 1);
    other.zero = stage;
    on_mesh(other, [&](const Rank& rank) {
      Trainer trainer(rank, other, {}, 99);
      load_checkpoint(rank, trainer.parameters(), info, false);
      EXPECT_EQ(state_of(rank, trainer), saved);
    });
  }
}

// ---- PEFT, whose numbers are in fixtures/lora (make_fixtures.py says how)

const std::filesystem::path peft_fixtures = std::filesystem::path(ECHELON_SOURCE_DIR) / "tests/fixtures/lora",
                            models =
                                std::filesystem::path(ECHELON_SOURCE_DIR) / "tests/fixtures/hugging_face";

struct OfPeft {
  const char *name, *lora;
  double error;  // transformers has f32 in a Llama, whatever its type
};
const OfPeft of_peft[] = {{"llama", "rank=3,alpha=6,targets=q_proj,v_proj,o_proj,down_proj", 1e-6},
                          {"gpt2", "rank=3,alpha=6,targets=attn.c_attn,attn.c_proj,c_fc", 1e-12}};

class Peft {
 public:
  static constexpr std::int64_t steps = 4, batch = 3, length = 8;

  explicit Peft(const OfPeft& one)
      : one_(one),
        base_(models / one.name),
        expected_((peft_fixtures / one.name / "expected.safetensors").string()),
        weights_(base_.string()) {}

  Plan plan() const {
    Plan p;
    p.model = load_model(base_.string());
    p.model.tuning.lora = parse_lora(one_.lora, "--lora");
    p.precision = DType::f64;
    p.sequence_parallel = true;
    p.global_batch = batch;
    p.seq_len = length;
    return p;
  }
  // The base's weights, and the adapters as PEFT's training began with them.
  void start(const Rank& rank, const Trainer& trainer) const {
    weights_.load(rank, trainer.parameters());
    for (const Parameter& p : trainer.parameters().all()) {
      if (!p.spec.adapter) continue;
      const Tensor logical(rank.arena(), MemoryCategory::other, DType::f64, p.spec.shape);
      copy_numbers_from_host(expected("start." + p.spec.name), logical);
      scatter_logical(rank, logical, p, ParameterTensor::value);
    }
  }
  SampleSource samples() const {
    return [tokens = expected("tokens")](std::int64_t step, std::int64_t sample, std::int32_t* ids,
                                         std::int32_t* targets) {
      const auto first = static_cast<std::size_t>((step * batch + sample) * (length + 1));
      for (std::int64_t t = 0; t < length; ++t) {
        ids[t] = static_cast<std::int32_t>(tokens[first + static_cast<std::size_t>(t)]);
        targets[t] = static_cast<std::int32_t>(tokens[first + static_cast<std::size_t>(t) + 1]);
      }
    };
  }
  std::vector<double> expected(const std::string& name) const { return checks::values_of(expected_, name); }

 private:
  OfPeft one_;
  std::filesystem::path base_;
  SafetensorsFile expected_;
  HuggingFaceWeights weights_;
};

OptimizerOptions options_of_peft() {
  OptimizerOptions o;
  o.lr = o.min_lr = 0.01;
  o.warmup_steps = 0;
  o.total_steps = Peft::steps;
  return o;
}

TEST(Adapters, LearnWhatPeftsDoOnEveryAxis) {
  for (const OfPeft& one : of_peft) {
    const Peft peft(one);
    const auto train = [&](const std::string& name, const auto& change) {
      Plan plan = peft.plan();
      change(plan);
      SCOPED_TRACE(std::string(one.name) + " " + name);
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, options_of_peft(), 1);
        peft.start(rank, trainer);
        const std::vector<double> losses = peft.expected("losses");
        for (std::int64_t step = 0; step < Peft::steps; ++step) {
          EXPECT_NEAR(trainer.compute_gradients(step, peft.samples()), losses[static_cast<std::size_t>(step)],
                      5 * one.error);
          trainer.apply_gradients(step);
        }
        for (const Parameter& p : trainer.parameters().all())
          if (p.spec.adapter) {
            EXPECT_LE(relative_difference(peft.expected("end." + p.spec.name),
                                          as_doubles(gather_logical(rank, p, ParameterTensor::value))),
                      100 * one.error)
                << p.spec.name;
          }
      });
    };
    train("one rank", [](Plan&) {});
    train("tp", [](Plan& p) { p.mesh.set(Axis::tp, 2); });
    train("pp", [](Plan& p) { p.mesh.set(Axis::pp, 2), p.micro_batch = 2; });
    train("cp", [](Plan& p) { p.mesh.set(Axis::cp, 2); });
    train("zero 3", [](Plan& p) { p.mesh.set(Axis::dp, 3), p.zero = 3; });
  }
}

// Merged it is a model of transformers; apart it is PEFT's.
TEST(Adapters, AreExportedAsPeftHasThem) {
  for (const OfPeft& one : of_peft) {
    SCOPED_TRACE(one.name);
    const Peft peft(one);
    Plan plan = peft.plan();
    plan.mesh.set(Axis::tp, 2);
    const TemporaryDirectory directory;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, options_of_peft(), 1);
      peft.start(rank, trainer);
      for (std::int64_t step = 0; step < Peft::steps; ++step) {
        trainer.compute_gradients(step, peft.samples());
        trainer.apply_gradients(step);
      }
      CheckpointInfo info;
      info.step = Peft::steps;
      info.dtype = DType::f64;
      info.model = plan.model;
      save_checkpoint(rank, trainer.parameters(), directory / "run", info);
    });
    export_hugging_face(directory / "run", directory / "merged", 1 << 30);
    export_adapters(directory / "run", directory / "apart");
    const SafetensorsFile merged(directory / "merged/model.safetensors"),
        apart(directory / "apart/adapter_model.safetensors"),
        theirs((peft_fixtures / one.name / "adapter_model.safetensors").string());
    for (const AdaptedMatrix& m : adapted_matrices(plan.model))
      EXPECT_LE(relative_difference(peft.expected("merged." + m.weight.name),
                                    checks::values_of(merged, m.weight.name)),
                100 * one.error)
          << m.weight.name;
    EXPECT_EQ(merged.tensors().size(), all_parameters(load_model((models / one.name).string())).size());
    ASSERT_EQ(apart.tensors().size(), theirs.tensors().size());
    for (const StoredTensor& tensor : theirs.tensors()) {
      EXPECT_EQ(apart.at(tensor.name).shape, tensor.shape);
      EXPECT_LE(
          relative_difference(checks::values_of(theirs, tensor.name), checks::values_of(apart, tensor.name)),
          100 * one.error)
          << tensor.name;
    }
    const auto config = [](const std::filesystem::path& at) {
      return nlohmann::json::parse(read_text((at / "adapter_config.json").string()));
    };
    const nlohmann::json ours = config(directory / "apart"), expected = config(peft_fixtures / one.name);
    for (const auto& [key, value] : ours.items())
      if (key != "base_model_name_or_path" && key != "target_modules") {
        EXPECT_EQ(value, expected.at(key)) << key;
      }
    EXPECT_EQ(ours.at("target_modules").size(), expected.at("target_modules").size());
    expect_refusal([&] { export_adapters(directory / "run", directory / "merged"); }, {"--out", "not empty"});
  }
}

TEST(Adapters, AreNotExportedWhereThereAreNone) {
  const TemporaryDirectory directory;
  import_hugging_face((models / "llama").string(), directory / "run", DType::f32, 1);
  expect_refusal([&] { export_adapters(directory / "run", directory / "out"); },
                 {"--adapters", "has none", "train --lora"});
  const auto save = [&](const char* model, const char* lora, const std::string& to) {
    Plan plan;
    plan.model = adapted(load_model((models / model).string()), lora);
    plan.precision = DType::f64;
    on_mesh(plan, [&](const Rank& rank) {
      const ParameterStore parameters(rank, plan, PipelineLayout(plan), 1);
      CheckpointInfo info;
      info.dtype = DType::f64;
      info.model = plan.model;
      save_checkpoint(rank, parameters, to, info);
    });
    return to;
  };
  for (const auto& [model, lora] :
       {std::pair{"phi3", "rank=2"}, {"glm4", "rank=2,targets=q_proj,up_proj"}, {"gpt-neox", "rank=2"}})
    expect_refusal(
        [&, from = save(model, lora, directory / model)] { export_adapters(from, directory / "out"); },
        {"one matrix", "without --adapters"});
  // PEFT would give these to the experts, and lose them.
  expect_refusal([&, from = save("glm4-moe", "rank=2,targets=down_proj",
                                 directory / "dense")] { export_adapters(from, directory / "out"); },
                 {"routed experts", "without --adapters"});
  export_adapters(save("glm4-moe", "rank=2", directory / "mixture"), directory / "of mixture");
  export_adapters(save("glm4", "rank=2", directory / "attention"), directory / "out");
  export_adapters(save("gpt-neox", "rank=2,targets=dense_h_to_4h", directory / "mlp"), directory / "of neox");
}

// From weights that have none they begin; from a checkpoint that has some they go on.
TEST(Adapters, StartFromWeights) {
  const TemporaryDirectory directory;
  const std::string base = (models / "llama").string();
  const StartingWeights weights(base);
  Plan plan;
  plan.model = adapted(weights.model(), "rank=2");
  plan.precision = DType::f64;
  EXPECT_NO_THROW(weights.refuse_other_model(plan.model));
  LogicalTensors first;
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 4);
    weights.load(rank, trainer.parameters());
    first = gather(rank, trainer, ParameterTensor::value);
    CheckpointInfo info;
    info.dtype = DType::f64;
    info.model = plan.model;
    save_checkpoint(rank, trainer.parameters(), directory / "run", info);
  });
  const SafetensorsFile file(base + "/model.safetensors");
  EXPECT_EQ(first.at("model.layers.1.self_attn.q_proj.weight"),
            checks::values_of(file, "model.layers.1.self_attn.q_proj.weight"));
  EXPECT_EQ(first.at("model.layers.1.self_attn.q_proj.lora_B.weight"),
            std::vector<double>(first.at("model.layers.1.self_attn.q_proj.lora_B.weight").size()));
  const StartingWeights learned(directory / "run");
  EXPECT_EQ(learned.model().tuning, plan.model.tuning);
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 77);
    learned.load(rank, trainer.parameters());
    EXPECT_EQ(gather(rank, trainer, ParameterTensor::value), first);
  });
  expect_refusal([&] { learned.refuse_other_model(adapted(weights.model(), "rank=3")); },
                 {"--lora rank=3,alpha=3", "adapters of --lora rank=2,alpha=2"});
  expect_refusal([&] { learned.refuse_other_model(weights.model()); }, {"--lora none", "leave out --lora"});
  // What the resumed run is told to do instead is no other refusal.
  const CheckpointInfo run = read_checkpoint_info(learned.path());
  expect_refusal([&] { refuse_other_model(run, adapted(weights.model(), "rank=3")); },
                 {"--lora rank=3,alpha=3", "with --lora rank=2,alpha=2; legal: that, or leave it out"});
  CheckpointInfo plain = run;
  plain.model = weights.model();
  expect_refusal([&] { refuse_other_model(plain, plan.model); },
                 {"--lora rank=2,alpha=2", "with --lora none; legal: that, or --from instead of --resume"});
}

}  // namespace
}  // namespace echelon::fine_tuning_test
