// What a family of models has beyond the others: its gradients are the derivatives of its loss, are the same
// on every mesh, and its memory and traffic are predicted to the byte. Each row is a model.
#include "spec/families.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "base/atomic_file.h"
#include "base/philox.h"
#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors.h"
#include "expert_runs.h"
#include "predicted_runs.h"
#include "random_models.h"
#include "refusals.h"
#include "verify/verify.h"

namespace echelon::families_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

struct Row {
  const char* name;
  void (*change)(ModelSpec& model);
  std::vector<std::string> parameters;  // of a layer, that a Llama has not
  const char* type;                     // in transformers; nullptr: it has none
};

ModelSpec model_of(const Row& row) {
  ModelSpec m = odd_llama();
  m.name = row.name;
  row.change(m);
  return m;
}

class Families : public testing::TestWithParam<Row> {};

TEST_P(Families, HaveTheirOwnParameters) {
  const auto names_of = [](const ModelSpec& m) {
    std::set<std::string> names;
    for (const ParamSpec& p : block_parameters(m, 1)) names.insert(p.name);
    return names;
  };
  const std::set<std::string> llama = names_of(odd_llama()), all = names_of(model_of(GetParam()));
  std::set<std::string> own;
  std::set_difference(all.begin(), all.end(), llama.begin(), llama.end(), std::inserter(own, own.end()));
  std::set<std::string> expected;
  for (const std::string& name : GetParam().parameters) expected.insert("model.layers.1." + name);
  EXPECT_EQ(own, expected);
}

// As the same test of Training, which says why these bounds.
void expect_derivatives(ModelSpec model) {
  const double step = std::cbrt(0x1p-52);
  model.init_std = 0.2;
  const Plan plan = odd_plan(model, 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    const SampleSource samples = random_samples(plan);
    // Away from the ones and zeros that norms and biases begin with.
    for (const Parameter& p : trainer.parameters().all()) {
      std::vector<double> noise(static_cast<std::size_t>(p.value.numel()));
      Philox(23, Stream::test, name_hash(p.spec.name.c_str())).fill_normal(0, noise.size(), noise.data());
      for (std::size_t k = 0; k < noise.size(); ++k) p.value.host<double>()[k] += 0.1 * noise[k];
    }
    const double loss = trainer.compute_gradients(0, samples), tolerance = 20 * step * step * (1 + loss);
    each_derivative(trainer, samples, step, [&](const Parameter& p, double measured, double expected) {
      EXPECT_NEAR(measured, expected, tolerance) << p.spec.name;
    });
  });
}

TEST_P(Families, GradientsAreTheDerivativesOfTheLoss) { expect_derivatives(model_of(GetParam())); }

// tp (4: neighbouring ranks hold the same key/value head), sp, cp, pp, ZeRO, what is made again.
std::vector<Plan> plans_of(const ModelSpec& model) {
  std::vector<Plan> plans;
  for (int tp : {2, 4})
    for (bool sp : {false, true}) plans.push_back(odd_plan(model, 1, tp, sp));
  for (int zero : {1, 2, 3}) {
    plans.push_back(odd_plan(model, 2, 2, zero == 2));
    plans.back().zero = zero;
  }
  for (ContextKind kind : {ContextKind::ring, ContextKind::allgather}) {
    plans.push_back(odd_plan(model, 1, 2, kind == ContextKind::ring));
    plans.back().mesh.set(Axis::cp, 2);
    plans.back().context_kind = kind;
    plans.back().seq_len = 12;
  }
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    plans.push_back(odd_plan(model, 1, 2, false));
    plans.back().mesh.set(Axis::pp, 2);
    plans.back().schedule = schedule;
  }
  for (const Recompute& recompute : {Recompute::selective, Recompute::full}) {
    plans.push_back(odd_plan(model, 1, 2, true));
    plans.back().recompute = recompute;
  }
  return plans;
}

TEST_P(Families, VerifyPassesOnEveryAxis) {
  for (const Plan& plan : plans_of(model_of(GetParam()))) {
    if (!is_taken(8)) continue;
    SCOPED_TRACE(to_toml(plan));
    VerifyRequest request;
    request.plan = plan;
    request.optimizer.warmup_steps = 0;
    request.optimizer.total_steps = 10;
    request.run.timeout = patience;
    request.steps = 2;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  }
}

// Memory and traffic.
TEST_P(Families, PredictionsAreExact) {
  for (const Plan& plan : plans_of(model_of(GetParam()))) {
    SCOPED_TRACE(to_toml(plan));
    expect_predicted(plan);
  }
}

TEST_P(Families, TomlSaysThem) {
  const ModelSpec model = model_of(GetParam());
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
  EXPECT_FALSE(differences(model, odd_llama()).empty());
}

// A model in Hugging Face's layout, filled by a formula, comes in and goes out as it was.
TEST_P(Families, TransformersModelsComeInAndGoOut) {
  const ModelSpec model = model_of(GetParam());
  // Whose files have names of their own.
  const bool renamed = model.state_space.is_delta() || model.qk_norm_turned ||
                       model.activation == Activation::xielu || model.short_conv.kernel > 0 ||
                       (model.norm_place == NormPlace::both && !model.norms_less_one);
  if (renamed) {
    ModelSpec meant = model_from_hugging_face(hugging_face_config(model, DType::f32), "x");
    meant.name = model.name;
    meant.state_space.chunk = model.state_space.chunk;  // of cost alone
    EXPECT_TRUE(differences(model, meant).empty());
    return;
  }
  if (model.state_space.heads > 0)  // of channels that are no multiple of hidden
    return expect_refusal([&] { hugging_face_config(model, DType::f32); }, {"transformers", "hidden"});
  if (GetParam().type == nullptr) {
    const std::string field = differences(model, odd_llama()).back().field;
    return expect_refusal([&] { hugging_face_config(model, DType::f32); }, {field, "transformers"});
  }
  const TemporaryDirectory directory;
  const std::string in = directory / "in", out = directory / "out";
  fs::create_directories(in);
  const std::string config = hugging_face_config(model, DType::f64);
  expect_contains(config, {fmt::format("\"model_type\": \"{}\"", GetParam().type)});
  write_file_atomically(in + "/config.json", config);
  std::vector<StoredTensor> declared;
  for (const ParamSpec& p : all_parameters(model)) {
    if (p.name.ends_with(".k_rope_proj.weight")) {
      declared.back().name.replace(declared.back().name.find("kv_a_proj"), 9, "kv_a_proj_with_mqa");
      declared.back().shape.front() += p.shape.front();
    } else {
      declared.push_back({p.name, StoredType::f64, p.shape});
    }
  }
  SafetensorsWriter writer(in + "/model.safetensors", declared, {{"format", "pt"}});
  for (std::size_t i = 0; i < declared.size(); ++i) {
    std::vector<double> values(static_cast<std::size_t>(declared[i].numel()));
    for (std::size_t k = 0; k < values.size(); ++k)
      // Few digits: the weights of Gemma's norms are kept with 1 added.
      values[k] =
          std::round(0x1p20 * std::sin(static_cast<double>(i + 1) + 0.37 * static_cast<double>(k))) / 0x1p20;
    writer.write(declared[i].name, values.data(), values.size() * sizeof values[0]);
  }
  writer.finish();
  const std::string path = import_hugging_face(in, directory / "ck", DType::f64, 1).checkpoint;
  export_hugging_face(path, out, std::int64_t{1} << 30);
  const SafetensorsFile before(in + "/model.safetensors"), after(out + "/model.safetensors");
  ASSERT_EQ(before.tensors().size(), after.tensors().size());
  for (const StoredTensor& tensor : before.tensors())
    EXPECT_EQ(before.bytes(tensor), after.bytes(after.at(tensor.name))) << tensor.name;
  const ModelSpec again = load_model(out);
  EXPECT_EQ(differences(again, model).size(), 1u);  // the name
}

// Values narrower than keys.
void latent(ModelSpec& m) {
  m.num_kv_heads = m.num_heads;
  m.kv_rank = 5;
  m.rotary_dim = 4;
  m.value_head_dim = m.head_dim - 1;
}

// To which every token goes, so that no routing changes with a step of a weight.
void two_experts(ModelSpec& m) {
  m.experts = Experts::deepseek;
  m.num_experts = m.experts_per_token = 2;
  m.expert_hidden = 7;
}

const Row rows[] = {
    {"qwen2",
     [](ModelSpec& m) { m.qkv_bias = true; },
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"},
     "qwen2"},
    {"qwen3",
     [](ModelSpec& m) { m.qk_norm = true; },
     {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     "qwen3"},
    {"both",
     [](ModelSpec& m) { m.qkv_bias = m.qk_norm = true; },
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.q_norm.weight",
      "self_attn.k_norm.weight"},
     nullptr},
    {"llama3",
     [](ModelSpec& m) {
       m.rope.scaling = RopeScaling::llama3;
       m.rope.factor = 8;
       m.rope.original_length = 64;
     },
     {},
     "llama"},
    {"mistral", [](ModelSpec& m) { m.window.size = 3; }, {}, "mistral"},
    {"local",
     [](ModelSpec& m) {
       m.window = {4, 2};
       m.qk_norm = true;
     },
     {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     "qwen3"},
    {"ministral3",
     [](ModelSpec& m) {
       m.rope.scaling = RopeScaling::yarn;
       m.rope.factor = 4;
       m.rope.original_length = 3;
       m.rope.query_growth = 0.7;
     },
     {},
     "ministral3"},
    {"hunyuan",
     [](ModelSpec& m) { m.qk_norm = m.qk_norm_turned = true; },
     {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     nullptr},
    {"smollm3", [](ModelSpec& m) { m.rope.unturned_every = 2; }, {}, "smollm3"},
    {"granite",
     [](ModelSpec& m) {
       m.scales = {3, 0.3, 0.6, 2};
     },
     {},
     "granite"},
    {"after",
     [](ModelSpec& m) { m.norm_place = NormPlace::after; },
     {"post_feedforward_layernorm.weight"},
     nullptr},
    {"olmo2",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::after;
       m.qk_norm = m.qk_norm_whole = true;
     },
     {"post_feedforward_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     "olmo2"},
    {"exaone4",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::after;
       m.qk_norm = true;
       m.window = {4, 2};
       m.rope.unturned_every = 2;
     },
     {"post_feedforward_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     "exaone4"},
    {"gemma2",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::both;
       m.norms_less_one = true;
       m.activation = Activation::geglu;
       m.window = {5, 2};
       m.caps = {0.5, 0.75};
       m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
     },
     {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"},
     "gemma2"},
    {"gemma3",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::both;
       m.norms_less_one = m.qk_norm = true;
       m.activation = Activation::geglu;
       m.window = {5, 2};
       m.rope.local_theta = 300;
       m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
     },
     {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "self_attn.q_norm.weight",
      "self_attn.k_norm.weight"},
     "gemma3_text"},
    {"deepseek",
     [](ModelSpec& m) {
       latent(m);
       m.q_rank = 6;
     },
     {"self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight",
      "self_attn.kv_a_proj.weight", "self_attn.k_rope_proj.weight", "self_attn.kv_a_layernorm.weight",
      "self_attn.kv_b_proj.weight"},
     "deepseek_v3"},
    {"deepseek_lite",
     latent,
     {"self_attn.kv_a_proj.weight", "self_attn.k_rope_proj.weight", "self_attn.kv_a_layernorm.weight",
      "self_attn.kv_b_proj.weight"},
     "deepseek_v3"},
    {"partial", [](ModelSpec& m) { m.rotary_dim = m.head_dim - 2; }, {}, nullptr},
    {"relu2", [](ModelSpec& m) { m.activation = Activation::relu2; }, {}, "arcee"},
    {"arcee",
     [](ModelSpec& m) {
       m.activation = Activation::relu2;
       m.mlp_bias = true;
     },
     {"mlp.up_proj.bias", "mlp.down_proj.bias"},
     "arcee"},
    {"biases",
     [](ModelSpec& m) { m.qkv_bias = m.attention_out_bias = m.mlp_bias = true; },
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias",
      "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"},
     "llama"},
    {"seed_oss",
     [](ModelSpec& m) { m.qkv_bias = m.mlp_bias = true; },
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "mlp.gate_proj.bias",
      "mlp.up_proj.bias", "mlp.down_proj.bias"},
     "seed_oss"},
    {"gemma",
     [](ModelSpec& m) {
       m.norms_less_one = true;
       m.activation = Activation::geglu;
       m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
     },
     {},
     "gemma"},
    {"starcoder2",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu;
       m.qkv_bias = m.attention_out_bias = m.mlp_bias = true;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias", "self_attn.q_proj.bias",
      "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias", "mlp.c_fc.weight",
      "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
     "starcoder2"},
    {"cohere2",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer_weight;
       m.parallel_residual = m.interleaved_rope = true;
       m.window = {4, 2};
       m.rope.unturned_every = 2;
       m.scales.logits_divisor = 3;
     },
     {},
     "cohere2"},
    {"bamba",
     [](ModelSpec& m) { m.state_space = {4, 3, 1, 5, 3, true, 4, {0}}; },
     {"mamba.in_proj.z.weight", "mamba.in_proj.x.weight", "mamba.in_proj.b.weight", "mamba.in_proj.c.weight",
      "mamba.in_proj.dt.weight", "mamba.conv1d.x.weight", "mamba.conv1d.b.weight", "mamba.conv1d.c.weight",
      "mamba.conv1d.x.bias", "mamba.conv1d.b.bias", "mamba.conv1d.c.bias", "mamba.dt_bias", "mamba.A_log",
      "mamba.D", "mamba.norm.weight", "mamba.out_proj.weight"},
     nullptr},
    {"bamba_groups",
     [](ModelSpec& m) { m.state_space = {8, 5, 2, 5, 3, true, 4, {0}}; },
     {"mamba.in_proj.z.weight", "mamba.in_proj.x.weight", "mamba.in_proj.b.weight", "mamba.in_proj.c.weight",
      "mamba.in_proj.dt.weight", "mamba.conv1d.x.weight", "mamba.conv1d.b.weight", "mamba.conv1d.c.weight",
      "mamba.conv1d.x.bias", "mamba.conv1d.b.bias", "mamba.conv1d.c.bias", "mamba.dt_bias", "mamba.A_log",
      "mamba.D", "mamba.norm.weight", "mamba.out_proj.weight"},
     nullptr},
    {"qwen3_next",
     [](ModelSpec& m) {
       m.state_space = {4, 3, 2, 5, 3, false, 4, {0}, StateRule::gated_delta};
       m.attention_gate = m.qk_norm = m.norms_less_one = true;
     },
     {"linear_attn.in_proj.z.weight", "linear_attn.in_proj.v.weight", "linear_attn.in_proj.k.weight",
      "linear_attn.in_proj.q.weight", "linear_attn.in_proj.a.weight", "linear_attn.in_proj.b.weight",
      "linear_attn.conv1d.v.weight", "linear_attn.conv1d.k.weight", "linear_attn.conv1d.q.weight",
      "linear_attn.dt_bias", "linear_attn.A_log", "linear_attn.norm.weight", "linear_attn.out_proj.weight"},
     nullptr},
    {"gate", [](ModelSpec& m) { m.attention_gate = true; }, {"self_attn.gate_proj.weight"}, nullptr},
    {"granite_moe",
     [](ModelSpec& m) {
       m.scales = {3, 0.3, 0.6, 2};
       m.fused_mlp = true;
       m.rope.unturned_every = 1;
       m.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
       m.experts = Experts::deepseek;
       m.num_experts = m.experts_per_token = 2;
       m.expert_hidden = 7;
       m.num_shared_experts = 1;
       m.shared_hidden = 11;
     },
     {"mamba.in_proj.z.weight",
      "mamba.in_proj.x.weight",
      "mamba.in_proj.b.weight",
      "mamba.in_proj.c.weight",
      "mamba.in_proj.dt.weight",
      "mamba.conv1d.x.weight",
      "mamba.conv1d.b.weight",
      "mamba.conv1d.c.weight",
      "mamba.conv1d.x.bias",
      "mamba.conv1d.b.bias",
      "mamba.conv1d.c.bias",
      "mamba.dt_bias",
      "mamba.A_log",
      "mamba.D",
      "mamba.norm.weight",
      "mamba.out_proj.weight",
      "mlp.gate.weight",
      "mlp.experts.0.gate_proj.weight",
      "mlp.experts.0.up_proj.weight",
      "mlp.experts.0.down_proj.weight",
      "mlp.experts.1.gate_proj.weight",
      "mlp.experts.1.up_proj.weight",
      "mlp.experts.1.down_proj.weight",
      "mlp.shared_experts.gate_proj.weight",
      "mlp.shared_experts.up_proj.weight",
      "mlp.shared_experts.down_proj.weight"},
     nullptr},
    {"lfm2",
     [](ModelSpec& m) {
       m.qk_norm = true;
       m.short_conv = {3, {0}};
     },
     {"conv.in_proj.b.weight", "conv.in_proj.c.weight", "conv.in_proj.x.weight", "conv.conv.weight",
      "conv.out_proj.weight"},
     "lfm2"},
    {"olmo", [](ModelSpec& m) { m.norm_kind = NormKind::layer_plain; }, {}, "olmo"},
    {"sinks", [](ModelSpec& m) { m.attention_sinks = true; }, {"self_attn.sinks"}, "granite_swa"},
    {"granite_swa",
     [](ModelSpec& m) {
       m.attention_sinks = true;
       m.window = {4, 2, true};
       m.scales = {3, 0.3, 0.6, 2};
     },
     {"self_attn.sinks"},
     "granite_swa"},
    {"cohere2_moe",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer_weight;
       m.parallel_residual = m.interleaved_rope = true;
       m.window = {4, 2};
       m.rope.unturned_every = 2;
       m.scales.logits_divisor = 3;
       two_experts(m);
       m.mlp_hidden = m.expert_hidden;
       m.num_shared_experts = 1;
     },
     {"mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight",
      "mlp.experts.0.down_proj.weight", "mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight",
      "mlp.experts.1.down_proj.weight", "mlp.shared_experts.gate_proj.weight",
      "mlp.shared_experts.up_proj.weight", "mlp.shared_experts.down_proj.weight"},
     "cohere2_moe"},
    {"cwm",
     [](ModelSpec& m) {
       m.window = {4, 2, true};
     },
     {},
     "cwm"},
    {"apertus",
     [](ModelSpec& m) {
       m.activation = Activation::xielu;
       m.qk_norm = true;
     },
     {"mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n", "self_attn.q_norm.weight", "self_attn.k_norm.weight"},
     "apertus"},
    {"hyperclovax",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::both;
       m.scales = {3, 0.3, 0.6, 2};
     },
     {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"},
     "hyperclovax"},
    {"flex_olmo",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::after;
       m.qk_norm = m.qk_norm_whole = true;
       two_experts(m);
       m.mlp_hidden = m.expert_hidden;
     },
     {"post_feedforward_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
      "mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight",
      "mlp.experts.0.down_proj.weight", "mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight",
      "mlp.experts.1.down_proj.weight"},
     "flex_olmo"},
    {"afmoe",
     [](ModelSpec& m) {
       m.norm_place = NormPlace::both;
       m.attention_gate = m.qk_norm = true;
       m.window = {4, 2};
       m.rope.unturned_every = 2;
       m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
       two_experts(m);
       m.num_shared_experts = m.num_dense_layers = 1;
       m.router.scores = RouterScores::sigmoid;
     },
     {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "self_attn.q_norm.weight",
      "self_attn.k_norm.weight", "self_attn.gate_proj.weight", "mlp.gate.weight",
      "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.0.down_proj.weight",
      "mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight", "mlp.experts.1.down_proj.weight",
      "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
      "mlp.shared_experts.down_proj.weight"},
     "afmoe"},
    {"nanochat",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::rms_plain;
       m.embedding_norm = m.qk_norm = m.qk_norm_turned = true;
       m.activation = Activation::relu2;
       m.caps.logits = 0.75;
     },
     {},
     nullptr},
    {"out_bias", [](ModelSpec& m) { m.attention_out_bias = true; }, {"self_attn.o_proj.bias"}, "seed_oss"},
};
INSTANTIATE_TEST_SUITE_P(Models, Families, testing::ValuesIn(rows),
                         [](const auto& instance) { return std::string(instance.param.name); });

void expect_verified_and_predicted(const Plan& plan) {
  SCOPED_TRACE(to_toml(plan));
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.optimizer.total_steps = 10;
  request.run.timeout = patience;
  request.steps = 2;
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  expect_as_measured(plan);
}

// States and convolutions begin anew with each document. Four ranks share the one group, and two each
// key/value head.
TEST(StateSpaces, KeepDocumentsApart) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, false, 4, {1}};
  for (const int tp : {1, 4}) {
    Plan plan = odd_plan(model, 2, tp, tp > 1);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

// Context parallel ranks that have tokens of a sequence of 24 in every way, documents among them; of the
// layouts one in `some` where not all cases are asked for.
void expect_every_layout_of_tokens(const ModelSpec& model, int some) {
  for (const auto& [kind, balance, cp] : {std::tuple{ContextKind::ring, ContextBalance::zigzag, 2},
                                          {ContextKind::ring, ContextBalance::stripe, 4},
                                          {ContextKind::allgather, ContextBalance::none, 2},
                                          {ContextKind::ulysses, ContextBalance::zigzag, 2},
                                          {ContextKind::hybrid, ContextBalance::zigzag, 4}}) {
    if (some > 1 && !is_taken(some)) continue;
    for (const AttentionMask mask : {AttentionMask::causal, AttentionMask::document}) {
      Plan plan = odd_plan(model, 1, 1, false);
      plan.mesh.set(Axis::cp, cp);
      plan.context_kind = kind;
      plan.context_balance = balance;
      plan.ulysses = kind == ContextKind::hybrid ? 2 : 1;
      plan.seq_len = 24;
      plan.mask = mask;
      plan.document_end = 3;
      expect_verified_and_predicted(plan);
    }
  }
}

// Heads are exchanged over the whole cp group, wherever attention has its tokens: with more and with fewer
// groups than ranks, and documents across ranks. Lengths are no multiple of a chunk.
TEST(StateSpaces, ExchangeHeadsUnderEveryLayoutOfTokens) {  // long
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  for (const std::int64_t groups : {1, 2, 4}) {
    model.state_space = {4, 3, groups, 5, 3, true, 7, {1}};
    expect_every_layout_of_tokens(model, 3);
  }
}

// What is sent: of [z | x | B | C | dt] and of what comes of it, forwards and backwards, all but what stays.
TEST(StateSpaces, SendWhatTheFormulaSays) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  for (const std::int64_t groups : {1, 4}) {
    model.num_layers = 1;
    model.state_space = {4, 3, groups, 5, 3, true, 7, {}};
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, 2);
    plan.seq_len = 24;
    plan.global_batch = plan.micro_batch = 2;
    const std::int64_t tokens = 2 * 12, width = 4 * 3,
                       given = 2 * width + 2 * std::max<std::int64_t>(groups, 2) * 5 + 4;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      const Traffic before = rank.traffic();
      trainer.compute_gradients(0, random_samples(plan));
      EXPECT_EQ((rank.traffic() - before).at(Axis::cp, Verb::all_to_all).bytes,
                8 * 2 * tokens * (given + width) / 2);
    });
  }
}

// Attention's heads decide nothing where no layer has any.
TEST(StateSpaces, WithoutAttentionAreCutByTheirOwnHeads) {
  ModelSpec model = odd_llama();
  model.state_space = {9, 3, 1, 5, 3, true, 4, {}};
  ASSERT_NE(model.num_heads % 3, 0);
  expect_verified_and_predicted(odd_plan(model, 1, 3, false));
}

// Beside experts, with documents: tp ranks that have values of a head of keys share it, and cp ranks.
TEST(StateSpaces, OfTheDeltaRuleHaveTheirAxes) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.state_space = {4, 3, 2, 5, 3, false, 7, {1}, StateRule::gated_delta};
  model.attention_gate = model.qk_norm = true;
  model.experts = Experts::deepseek;
  model.num_experts = 4, model.experts_per_token = 2, model.expert_hidden = 6;
  model.num_shared_experts = 1, model.shared_gate = true;
  for (const auto& [tp, cp] : {std::pair{1, 1}, {4, 1}, {2, 2}, {1, 4}}) {
    if (!is_taken(2)) continue;
    Plan plan = odd_plan(model, 1, tp, tp > 1);
    plan.mesh.set(Axis::cp, cp);
    plan.seq_len = 24;
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
  Plan plan = odd_plan(model, 1, 1, false);
  plan.recompute = Recompute({"gate", "gate_in", "delta_rule", "delta_in"});
  expect_verified_and_predicted(plan);
}

// Whose gradients are sums over all columns, which tp cuts.
TEST(Xielu, UnderInvariantNumericsIsOnOneRank) {
  ModelSpec model = odd_llama();
  model.activation = Activation::xielu;
  Plan plan = odd_plan(model, 1, 2, false);
  plan.numerics = Numerics::invariant;
  plan.seq_len = 16, plan.global_batch = 8;
  expect_refusal([&] { validate(plan); }, {"--tp 2", "xielu", "legal: 1"});
  plan.mesh.set(Axis::tp, 1);
  plan.mesh.set(Axis::dp, 2);
  validate(plan);
  model.mlp_bias = true;
  expect_refusal([&] { validate(model); }, {"mlp_bias", "xielu"});
}

// Both lie side by side, and so do their gradients.
TEST(Xielu, BesideAdaptersAndFrozenParts) {
  Plan plan = odd_plan(odd_llama(), 2, 2, true);
  plan.model.activation = Activation::xielu;
  plan.model.tuning.freeze = {"*.alpha_p"};
  expect_refusal([&] { validate(plan); }, {"alpha_p", "alpha_n", "side by side"});
  plan.model.tuning.freeze = {"*.act_fn.*"};
  expect_verified_and_predicted(plan);
  plan.model.tuning.freeze = {};
  plan.model.tuning.lora = {2, 4, {}};
  expect_verified_and_predicted(plan);
}

TEST(StateSpaces, OfTheDeltaRuleAreRefusedWhereSomethingIsLeftOut) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 2, 5, 3, false, 4, {0}, StateRule::gated_delta};
  validate(model);
  Plan plan = odd_plan(model, 1, 2, false);
  plan.numerics = Numerics::invariant;
  plan.seq_len = 16, plan.global_batch = 8;
  expect_refusal([&] { validate(plan); }, {"--tp 2", "share a norm", "legal: 1"});
  plan.mesh.set(Axis::tp, 1);
  plan.mesh.set(Axis::cp, 2);
  expect_refusal([&] { validate(plan); }, {"--cp 2", "share a norm", "legal: 1"});
  ModelSpec other = model;
  other.experts = Experts::deepseek;
  other.num_experts = 4, other.experts_per_token = 2, other.expert_hidden = 6;
  validate(other);
  other.num_dense_layers = 1;
  expect_refusal([&] { validate(other); }, {"num_dense_layers", "ssm_heads"});
  other = model;
  other.state_space.state = 1;
  expect_refusal([&] { validate(other); }, {"ssm_state = 1", "2 or more"});
  other = model;
  other.layer_pattern = "M-";
  other.state_space.attention_layers = {};
  expect_refusal([&] { validate(other); }, {"layer_pattern", "gated-delta"});
}

// Two ranks hold each key/value head, and four each group: neighbours of both numbers add up.
TEST(StateSpaces, AndKeysMayBeOnDifferentNumbersOfRanks) {  // long
  ModelSpec model = odd_llama();
  model.hidden = 64, model.head_dim = 8, model.num_heads = 8, model.num_kv_heads = 4;
  model.state_space = {8, 3, 2, 5, 3, true, 4, {1}};
  for (const bool sp : {false, true}) expect_verified_and_predicted(odd_plan(model, 1, 8, sp));
}

// What is said to be legal passes, and what is not said does not.
TEST(StateSpaces, NameEveryLegalDegreeOfTensorParallelism) {
  ModelSpec model = odd_llama();
  model.hidden = 64, model.head_dim = 8, model.num_heads = 8, model.num_kv_heads = 4;
  model.mlp_hidden = 32;
  for (const auto& [heads, groups] : {std::pair{4, 1}, {8, 1}, {12, 1}, {12, 4}, {8, 8}, {24, 3}}) {
    model.state_space = {heads, 3, groups, 5, 3, true, 4, {0}};
    std::vector<std::string> legal, said;
    for (int tp = 1; tp <= 16; ++tp) {
      Plan plan = odd_plan(model, 1, tp, false);
      try {
        validate(plan);
        legal.push_back(std::to_string(tp));
      } catch (const PlanRefusal& refusal) {
        ASSERT_EQ(refusal.field(), "tp");
        said.clear();
        for (const Remedy& one : refusal.remedies()) said.push_back(one.value);
      }
    }
    EXPECT_EQ(said, legal) << heads << " heads of " << groups << " groups";
  }
}

// As torch's Conv1d: weights and bias up to 1 / sqrt(kernel).
TEST(StateSpaces, BeginAsTheirConvolutionsDo) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  int seen = 0;
  for (const ParamSpec& p : block_parameters(model, 1))
    if (p.name.find("conv1d") != std::string::npos) {
      ++seen;
      EXPECT_EQ(p.init, Init::uniform) << p.name;
      EXPECT_DOUBLE_EQ(p.init_std, 1.0 / 3) << p.name;
    }
  EXPECT_EQ(seen, 6);
}

TEST(StateSpaces, AreRefusedWhereSomethingIsLeftOut) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  const auto refused_plan = [&](void (*change)(Plan & plan), const std::vector<std::string>& words) {
    Plan plan = odd_plan(model, 1, 2, false);
    change(plan);
    expect_refusal([&] { validate(plan); }, words);
  };
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::cp, 4);
        p.seq_len = 16;
      },
      {"--cp 4", "has 2 heads of 1 group", "legal: 1, 2"});
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::tp, 1);
        p.mesh.set(Axis::cp, 2);
        p.seq_len = 16;
        p.global_batch = 8;
        p.numerics = Numerics::invariant;
      },
      {"--cp 2", "--numerics invariant", "1 group", "legal: 1, or"});
  refused_plan([](Plan& p) { p.numerics = Numerics::invariant; },
               {"--tp 2", "--numerics invariant", "1 block"});
  refused_plan([](Plan& p) { p.model.state_space.heads = 3; }, {"--tp 2", "3 state-space heads", "legal: 1"});
  refused_plan([](Plan& p) { p.precision = recipe("tf32"); }, {"tf32", "state space", "legal: f32"});
  refused_plan([](Plan& p) { p.model.tuning.freeze = {"*norm*"}; }, {"freeze", "state space"});
  model.state_space.attention_layers = {0, 1};
  expect_refusal([&] { validate(model); }, {"attention_layers", "ssm_heads"});
  model.state_space.attention_layers = {1, 0};
  expect_refusal([&] { validate(model); }, {"attention_layers", "rising"});
  model.state_space = {4, 3, 3, 5, 3, true, 4, {0}};
  expect_refusal([&] { validate(model); }, {"ssm_groups = 3", "ssm_heads = 4", "divisor"});
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  model.window.size = 4;
  expect_refusal([&] { validate(model); }, {"window", "ssm_heads"});
}

// Heads that are exchanged have their scores capped where they are computed.
TEST(Gemma2, IsTheSameUnderUlyssesAndItsHybrid) {
  ModelSpec model = odd_llama();
  model.caps = {0.5, 0.75};
  for (ContextKind kind : {ContextKind::ulysses, ContextKind::hybrid}) {
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, kind == ContextKind::hybrid ? 4 : 2);
    plan.context_kind = kind;
    if (kind == ContextKind::hybrid) plan.ulysses = 2;
    plan.seq_len = 16;
    expect_verified_and_predicted(plan);
  }
}

// What is not turned would not grow.
TEST(QueryGrowth, IsOfWholeQueriesOfAllLayers) {
  ModelSpec model = odd_llama();
  model.rope.scaling = RopeScaling::yarn;
  model.rope.factor = 4;
  model.rope.original_length = 3;
  model.rope.query_growth = 0.7;
  validate(model);
  const auto refused = [&](const auto& change) {
    ModelSpec other = model;
    change(other);
    expect_refusal([&] { validate(other); }, {"rope_query_growth = 0.7", "give 0"});
    other.rope.query_growth = 0;
    validate(other);
  };
  refused([](ModelSpec& m) { m.rotary_dim = 2; });
  refused([](ModelSpec& m) { m.rope.unturned_every = 2; });
  refused([](ModelSpec& m) { latent(m); });
}

// Windows and limits so small that they show.
ModelSpec odd_gpt_oss() {
  ModelSpec m = odd_llama();
  m.name = "gpt-oss";
  m.qkv_bias = m.attention_out_bias = m.attention_sinks = true;
  m.window = {4, 2};
  m.rope.scaling = RopeScaling::yarn;
  m.rope.factor = 4;
  m.rope.original_length = 8;
  m.rope.whole_pairs = false;
  m.experts = Experts::gpt_oss;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = m.mlp_hidden = 7;
  m.clamp = {1.5, 0.1};
  return m;
}

// A shared expert of a width of its own, weighed by each token, behind a dense layer.
ModelSpec odd_qwen2_moe() {
  ModelSpec m = odd_llama();
  m.name = "qwen2-moe";
  m.qkv_bias = true;
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.num_shared_experts = 1;
  m.shared_hidden = 11;
  m.shared_gate = true;
  m.num_dense_layers = 1;
  m.router.normalise = false;
  return m;
}

// A small DeepSeek-V3 that predicts one more token, by a layer with experts or without.
ModelSpec odd_predictor(bool experts) {
  ModelSpec m = experts ? odd_deepseek(2) : odd_llama();
  m.name = "predictor";
  latent(m);
  m.q_rank = 6;
  m.num_mtp_layers = 1;
  m.mtp_weight = 0.7;
  return m;
}

// The table is read twice, and so is the output matrix; tied they are one.
TEST(MultiTokenPrediction, GradientsAreTheDerivativesOfBothLosses) {  // long
  for (const bool tied : {false, true}) {
    ModelSpec model = odd_predictor(true);
    model.tied_embedding = tied;
    model.experts_per_token = model.num_experts = 2;
    model.router.groups = model.router.most_groups = 1;
    expect_derivatives(model);
  }
}

TEST(MultiTokenPrediction, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_predictor(true)))
    if (plan.zero <= 1) {
      if (is_taken(8)) expect_verified_and_predicted(plan);
    } else {
      expect_refusal([&] { validate(plan); }, {"--zero", "num_mtp_layers", "1"});
    }
  expect_verified_and_predicted(odd_plan(odd_predictor(false), 1, 2, true));
}

// Both ends of the pipeline on one rank or on two, and on two ranks each.
TEST(MultiTokenPrediction, IsTheSameUnderEverySchedule) {  // long
  for (const auto& [schedule, tied] : {std::pair{"gpipe", true},
                                       {"interleaved", false},
                                       {"zb-v", false},
                                       {"zb-v", true},
                                       {"zb-h2", false},
                                       {"dualpipe", false},
                                       {"dualpipev", true}}) {
    if (!is_taken(3)) continue;
    Plan plan = odd_plan(odd_predictor(true), 1, 1, false);
    plan.model.num_layers = 4;
    plan.model.tied_embedding = tied;
    plan.mesh.set(Axis::pp, 2);
    plan.schedule = schedule;
    plan.global_batch = 4;
    plan.micro_batch = 1;
    expect_verified_and_predicted(plan);
  }
}

TEST(MultiTokenPrediction, IsTheSameWithExpertsElsewhere) {  // long
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_predictor(true), 2, 2, true);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "attention"});
    expect_verified_and_predicted(plan);
  }
}

TEST(MultiTokenPrediction, IsRefusedWhereItIsNotRun) {
  const auto refused = [](const std::function<void(Plan&)>& change, std::vector<std::string> parts) {
    Plan plan = odd_plan(odd_predictor(false), 2, 1, false);
    change(plan);
    parts.emplace_back("num_mtp_layers");
    expect_refusal([&] { check_whole(plan); }, parts);
  };
  refused(
      [](Plan& p) {
        p.mesh.set(Axis::pp, 2);
        p.schedule = "2bw";
      },
      {"--schedule 2bw", "1f1b"});
  ModelSpec model = odd_predictor(false);
  model.num_mtp_layers = 2;
  expect_refusal([&] { validate(model); }, {"num_mtp_layers = 2", "1"});
}

TEST(MultiTokenPrediction, TomlSaysIt) {
  const ModelSpec model = odd_predictor(true);
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
}

// All experts are chosen: where a choice changes, the loss has no derivative.
TEST(GptOss, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_gpt_oss();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(GptOss, TomlSaysIt) {
  const ModelSpec model = odd_gpt_oss();
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
}

TEST(GptOss, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_gpt_oss()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

// What its attention and its experts have that a Llama's plans do not: exchanged heads, documents, groups of
// experts, losses and capacities of routers, biases that are made again.
TEST(GptOss, IsTheSameWithHeadsAndExpertsElsewhere) {  // long
  const auto plan_of = [](int dp, int cp, int tp, int ep) {
    Plan plan = odd_plan(odd_gpt_oss(), dp, tp, tp > 1);
    plan.mesh.set(Axis::cp, cp);
    plan.mesh.ep = ep;
    plan.seq_len = cp > 1 ? 16 : 11;
    return plan;
  };
  std::vector<Plan> plans;
  for (ContextKind kind : {ContextKind::ulysses, ContextKind::hybrid}) {
    plans.push_back(plan_of(1, kind == ContextKind::hybrid ? 4 : 2, 1, 1));
    plans.back().context_kind = kind;
    if (kind == ContextKind::hybrid) plans.back().ulysses = 2;
    plans.back().mask = AttentionMask::document;
    plans.back().document_end = 5;
  }
  plans.push_back(plan_of(1, 2, 1, 1));
  plans.back().context_balance = ContextBalance::stripe;
  plans.push_back(plan_of(2, 1, 2, 2));
  plans.back().balancing = all_losses(false);
  plans.push_back(plan_of(2, 2, 1, 4));
  plans.back().balancing.capacity = 0.9;
  plans.push_back(plan_of(2, 1, 1, 2));
  plans.back().zero = 3;
  plans.back().recompute = Recompute({"experts_in", "attention"});
  for (const Plan& plan : plans) expect_verified_and_predicted(plan);
}

// Of all parameters, one behind the other.
std::vector<double> invariant_gradients(const ModelSpec& model, int dp, int tp, int batch) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.numerics = Numerics::invariant;
  plan.global_batch = 4;
  plan.micro_batch = batch;
  std::vector<double> all;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    trainer.compute_gradients(0, random_samples(plan));
    for (const Parameter& p : trainer.parameters().all()) {
      const auto gradient = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
      if (rank.index() == 0) all.insert(all.end(), gradient.begin(), gradient.end());
    }
  });
  return all;
}

// Sums by sequence, of biases and sinks too.
TEST(GptOss, HasTheSameBitsUnderInvariantNumerics) {
  const auto one = invariant_gradients(odd_gpt_oss(), 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(odd_gpt_oss(), 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(odd_gpt_oss(), 4, 1, 1));
}

TEST(Qwen2Moe, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_qwen2_moe();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(Qwen2Moe, TomlSaysIt) {
  const ModelSpec model = odd_qwen2_moe();
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
}

TEST(Qwen2Moe, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_qwen2_moe()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

// What weighs the shared expert meets what travels, what is made again, and what routers are balanced by.
TEST(Qwen2Moe, IsTheSameWithExpertsElsewhere) {
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_qwen2_moe(), 2, 2, again);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "attention"});
    expect_verified_and_predicted(plan);
  }
}

// The gradient of what weighs it is a sum over hidden units, which tp cuts.
TEST(Qwen2Moe, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_qwen2_moe();
  model.num_heads = model.num_kv_heads = 4;
  model.expert_hidden = model.shared_hidden = model.mlp_hidden = 16;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
}

TEST(Qwen2Moe, IsRefusedWithoutASharedExpert) {
  ModelSpec model = odd_qwen2_moe();
  model.num_shared_experts = 0;
  expect_refusal([&] { validate(model); }, {"shared_gate = true", "num_shared_experts = 1"});
  model.shared_gate = false;
  expect_refusal([&] { validate(model); }, {"shared_hidden = 11", "num_shared_experts = 1"});
  expect_refusal([&] { model_from_toml(to_toml(load_model("llama-tiny")) + "shared_gate = true\n", "x"); },
                 {"shared_gate", "experts is missing"});
}

// Layers of one part each, of all kinds; tokens may be narrower on their way to the experts, beside two
// groups of state-space heads.
ModelSpec odd_nemotron_h(bool narrower) {
  ModelSpec m = odd_llama(false, 2, 5);
  m.name = "nemotron-h";
  m.layer_pattern = "ME*-E";
  m.rope.unturned_every = 1;
  m.activation = Activation::relu2;
  m.state_space = {4, 3, narrower ? 2 : 1, 5, 3, true, 4, {}};
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.expert_latent = narrower ? 10 : 0;
  m.num_shared_experts = 1;
  m.shared_hidden = 11;
  m.router = {.scores = RouterScores::sigmoid, .scale = 2.5, .groups = 2, .most_groups = 1};
  return m;
}

// Of four kinds of layers: attention or a short convolution, an MLP or experts that are chosen by biases.
ModelSpec odd_lfm2_moe() {
  ModelSpec m = odd_llama(true, 2, 4);
  m.name = "lfm2-moe";
  m.qk_norm = true;
  m.short_conv = {4, {1, 2}};
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.num_dense_layers = 2;
  m.router = {.scores = RouterScores::sigmoid, .epsilon = 0.25, .scale = 1.5};
  return m;
}

// Attention and a state space of one normed value, with a factor of everything that has one.
ModelSpec odd_falcon_h1(bool norm) {
  ModelSpec m = odd_llama();
  m.name = "falcon-h1";
  m.state_space = {4, 3, norm ? 2 : 1, 5, 3, true, 4, {}};
  m.state_space.norm = norm;
  m.state_space.beside_attention = true;
  m.scales.embedding = 3;
  m.scales.logits_divisor = 0.5;
  m.scales.attention = 0.3;
  m.scales.attention_out = 0.75;
  m.scales.state_space_out = 1.25;
  m.scales.mlp_out = 0.8;
  m.scales.mlp_gate = 1.5;
  m.scales.state_space = {0.5, 0.75, 1.25, norm ? 1.0 : 0.875, 1.125};
  return m;
}

TEST(FalconH1, GradientsAreTheDerivativesOfTheLoss) {
  for (const bool norm : {false, true}) expect_derivatives(odd_falcon_h1(norm));
}

TEST(FalconH1, TomlSaysIt) {
  for (const bool norm : {false, true}) {
    const ModelSpec model = odd_falcon_h1(norm);
    EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
  }
  expect_contains(to_toml(odd_falcon_h1(false)), {"ssm_beside_attention = true", "ssm_norm = false",
                                                  "ssm_scales = [0.5, 0.75, 1.25, 0.875, 1.125]"});
}

TEST(FalconH1, HasBothPartsInEveryLayer) {
  const ModelSpec model = odd_falcon_h1(false);
  EXPECT_EQ(model.num_attention_layers(), 2);
  EXPECT_EQ(model.num_state_space_layers(), 2);
  ASSERT_EQ(layer_kinds(model).size(), 1u);
  EXPECT_EQ(layer_kinds(model).front().count, 2);
  std::set<std::string> names;
  for (const ParamSpec& p : block_parameters(model, 1)) names.insert(p.name);
  EXPECT_TRUE(names.contains("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_TRUE(names.contains("model.layers.1.mamba.in_proj.dt.weight"));
  EXPECT_FALSE(names.contains("model.layers.1.mamba.norm.weight"));
}

TEST(FalconH1, IsTheSameOnEveryAxis) {
  for (const bool norm : {false, true})
    for (const Plan& plan : plans_of(odd_falcon_h1(norm)))
      if (is_taken(16)) expect_verified_and_predicted(plan);
}

TEST(FalconH1, IsTheSameWithPartsMadeAgain) {
  for (const std::vector<std::string>& ops :
       {std::vector<std::string>{"state_in"}, {"scale", "mlp_in"}, {"attention_in", "state_space"}}) {
    Plan plan = odd_plan(odd_falcon_h1(false), 1, 2, true);
    plan.recompute = Recompute(ops);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

TEST(FalconH1, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_falcon_h1(false);
  model.num_heads = model.num_kv_heads = 4;
  model.mlp_hidden = 16;
  model.state_space = {8, 4, 4, 4, 3, true, 4, {}};
  model.state_space.norm = false;
  model.state_space.beside_attention = true;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
}

TEST(FalconH1, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_falcon_h1(false);
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.state_space.attention_layers = {1}; },
          {"ssm_beside_attention", "attention_layers"});
  refused([](ModelSpec& m) { m.mlp_bias = true; }, {"mlp_bias", "ssm_beside_attention"});
  refused([](ModelSpec& m) { m.state_space.beside_attention = false; },
          {"ssm_scales", "ssm_beside_attention"});
  refused([](ModelSpec& m) { m.scales.state_space[2] = 0; }, {"ssm_scales = 0"});
  refused([](ModelSpec& m) { m.state_space.heads = 0; }, {"ssm_heads"});
  expect_refusal([] { model_from_toml(to_toml(load_model("falcon-h1-tiny")) + "ssm_scales = [1.0]\n", "x"); },
                 {"ssm_scales"});
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 2, 5, 3, false, 4, {0}, StateRule::gated_delta};
  model.state_space.norm = false;
  expect_refusal([&] { validate(model); }, {"ssm_norm", "gated-delta"});
}

TEST(Lfm2, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_lfm2_moe();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(Lfm2, TomlSaysIt) {
  const ModelSpec model = odd_lfm2_moe();
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
  expect_contains(to_toml(model), {"short_conv = 4", "attention_layers = [1, 2]", "router_epsilon = 0.25"});
}

TEST(Lfm2, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_lfm2_moe()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

TEST(Lfm2, IsTheSameWithExpertsElsewhere) {
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_lfm2_moe(), 2, 2, again);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "short_conv", "conv_in"});
    expect_verified_and_predicted(plan);
  }
}

// Convolutions begin anew with each document. 3 ranks have unequal numbers of channels.
TEST(Lfm2, KeepsDocumentsApart) {
  ModelSpec model = odd_llama();
  model.short_conv = {5, {1}};
  for (const int tp : {1, 4}) {
    Plan plan = odd_plan(model, 2, tp, tp > 1);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

// A channel is cut by itself: tp need not divide their number where no layer has attention.
TEST(Lfm2, ConvolutionsAreCutUnevenly) {
  ModelSpec model = odd_llama();
  model.short_conv = {3, {}};
  ASSERT_NE(model.hidden % 5, 0);
  for (const bool sp : {false, true}) expect_verified_and_predicted(odd_plan(model, 1, 5, sp));
}

// What is said to be made again is: the product before, and what cp exchanges, or the product behind alone.
TEST(Lfm2, MakesConvolutionsAgain) {
  ModelSpec model = odd_llama();
  model.short_conv = {3, {1}};
  for (const int cp : {1, 2})
    for (const std::vector<std::string>& ops : {std::vector<std::string>{"conv_in"},
                                                {"conv_out"},
                                                {"short_conv"},
                                                {"conv_out", "residual1"},
                                                {"conv_in", "conv_out", "residual1"}}) {
      if (!is_taken(3)) continue;
      Plan plan = odd_plan(model, 1, 2, true);
      plan.mesh.set(Axis::cp, cp);
      plan.seq_len = 12;
      plan.recompute = Recompute(ops);
      expect_verified_and_predicted(plan);
    }
}

// Channels are exchanged over the whole cp group, wherever attention has its tokens, documents across ranks.
TEST(Lfm2, ExchangesChannelsUnderEveryLayoutOfTokens) {  // long
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.short_conv = {4, {1}};
  expect_every_layout_of_tokens(model, 1);
}

// What is sent: of [B | C | x] and of what they become, forwards and backwards, all but what stays, and the
// latter once more where the backward pass makes it.
TEST(Lfm2, SendsWhatTheFormulaSays) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.num_layers = 1;
  model.short_conv = {3, {}};
  Plan plan = odd_plan(model, 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 24;
  plan.global_batch = plan.micro_batch = 2;
  const std::int64_t tokens = 2 * 12, width = model.hidden;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    const Traffic before = rank.traffic();
    trainer.compute_gradients(0, random_samples(plan));
    EXPECT_EQ((rank.traffic() - before).at(Axis::cp, Verb::all_to_all).bytes,
              8 * tokens * (2 * (3 + 1) + 1) * width / 2);
  });
}

TEST(Lfm2, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_lfm2_moe();
  model.num_heads = model.num_kv_heads = 4;
  model.expert_hidden = model.mlp_hidden = 16;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
  model.experts = Experts::none;
  model.num_dense_layers = 0;
  model.router = {};
  model.num_experts = model.experts_per_token = model.expert_hidden = 0;
  const auto gradients = [&](int cp) {
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, cp);
    plan.numerics = Numerics::invariant;
    plan.global_batch = plan.seq_len = 4;
    plan.micro_batch = 2;
    std::vector<double> all;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      for (const Parameter& p : trainer.parameters().all()) {
        const auto gradient = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
        if (rank.index() == 0) all.insert(all.end(), gradient.begin(), gradient.end());
      }
    });
    return all;
  };
  EXPECT_EQ(gradients(1), gradients(2));
}

TEST(Lfm2, LayersAreOfFourKinds) {
  const ModelSpec model = odd_lfm2_moe();
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  for (const LayerKind& kind : layer_kinds(model)) kinds.emplace_back(kind.name, kind.layer);
  EXPECT_EQ(kinds,
            (std::vector<std::pair<std::string, std::int64_t>>{{"layer with attention and an MLP", 1},
                                                               {"layer with a convolution and an MLP", 0},
                                                               {"layer with attention and experts", 2},
                                                               {"layer with a convolution and experts", 3}}));
  std::int64_t sum = num_parameters(model);
  for (const ParamSpec& p : all_parameters(model)) sum -= p.numel();
  EXPECT_EQ(sum, 0);
  // 1.5 of 8.3 billion numbers meet a token, or are its norms and convolutions.
  const ModelSpec published = load_model("lfm2-8b-a1b");
  EXPECT_NEAR(static_cast<double>(num_active_parameters(published)), 1.56e9, 0.01e9);
}

TEST(Lfm2, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_lfm2_moe();
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.short_conv.kernel = 1; }, {"short_conv = 1", "2 to 64"});
  refused([](ModelSpec& m) { m.short_conv.kernel = 0; }, {"attention_layers", "short_conv above 0"});
  refused([](ModelSpec& m) { m.short_conv.attention_layers = {0, 1, 2, 3}; }, {"all layers", "short_conv"});
  refused([](ModelSpec& m) { m.short_conv.attention_layers = {2, 1}; }, {"attention_layers", "rising"});
  refused([](ModelSpec& m) { m.state_space = {4, 3, 1, 5, 3, true, 4, {1}}; }, {"ssm_heads", "short_conv"});
  refused([](ModelSpec& m) { m.window.size = 4; }, {"a window", "short_conv"});
  refused([](ModelSpec& m) { m.num_mtp_layers = 1; }, {"num_mtp_layers", "short_conv"});
  refused([](ModelSpec& m) { m.router.normalise = false; }, {"router_epsilon", "normalise_weights"});
  expect_refusal([] { model_from_toml(to_toml(load_model("gpt2-tiny")) + "short_conv = 3\n", "x"); },
                 {"short_conv = 3", "family = \"llama\""});
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.short_conv = {3, {1}};
  const auto refused_plan = [&](void (*change)(Plan & plan), const std::vector<std::string>& words) {
    Plan plan = odd_plan(model, 1, 1, false);
    change(plan);
    expect_refusal([&] { validate(plan); }, words);
  };
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::cp, 5);
        p.seq_len = 20;
      },
      {"--cp 5", "24 over --tp 1", "legal: 1, 2"});
  refused_plan(
      [](Plan& p) {
        p.model.short_conv.attention_layers = {};
        p.model.tuning.lora = {2, 2, {}};
      },
      {"--lora rank=2", "no attention", "out_proj"});
}

TEST(NemotronH, GradientsAreTheDerivativesOfTheLoss) {
  for (const bool narrower : {false, true}) {
    ModelSpec model = odd_nemotron_h(narrower);
    model.experts_per_token = model.num_experts;
    model.router.groups = model.router.most_groups = 1;
    expect_derivatives(model);
  }
}

TEST(NemotronH, TomlSaysIt) {
  for (const bool narrower : {false, true}) {
    const ModelSpec model = odd_nemotron_h(narrower);
    EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
  }
}

TEST(NemotronH, IsTheSameOnEveryAxis) {
  for (const bool narrower : {false, true})
    for (const Plan& plan : plans_of(odd_nemotron_h(narrower)))
      if (is_taken(8)) expect_verified_and_predicted(plan);
}

// Weight gradients that are left for later, of products of a rank's own rows too.
TEST(NemotronH, IsTheSameWithExpertsElsewhere) {  // long
  const auto plan_of = [](bool narrower, int dp, int tp, int ep) {
    Plan plan = odd_plan(odd_nemotron_h(narrower), dp, tp, tp > 1);
    plan.mesh.ep = ep;
    return plan;
  };
  std::vector<Plan> plans;
  for (const bool narrower : {false, true}) {
    plans.push_back(plan_of(narrower, 2, 2, 2));
    plans.back().balancing = all_losses();
    plans.push_back(plan_of(narrower, 2, 1, 2));
    plans.back().zero = 3;
    plans.back().recompute = Recompute({"experts_in", "attention", "state_space"});
  }
  plans.push_back(plan_of(true, 4, 1, 4));
  plans.back().balancing.capacity = 0.9;
  plans.push_back(plan_of(true, 1, 2, 1));
  plans.back().mesh.set(Axis::pp, 2);
  plans.back().schedule = "zb-h1";
  for (const Plan& plan : plans) expect_verified_and_predicted(plan);
}

// Nor do attention's heads decide over cp where no layer of a pattern has any.
TEST(NemotronH, WithoutAttentionExchangesTheHeadsOfItsStates) {
  ModelSpec model = odd_nemotron_h(false);
  model.layer_pattern = "ME--E";
  model.state_space = {9, 3, 3, 5, 3, true, 4, {}};
  model.max_seq = 24;
  ASSERT_NE(model.num_heads % 3, 0);
  Plan plan = odd_plan(model, 1, 1, false);
  plan.mesh.set(Axis::cp, 3);
  plan.context_kind = ContextKind::ulysses;
  plan.seq_len = 24;
  expect_verified_and_predicted(plan);
}

// Without a gate too what tp cuts is summed in the same blocks, and what own rows are multiplied with is not
// cut.
TEST(NemotronH, HasTheSameBitsUnderInvariantNumerics) {
  for (const bool narrower : {false, true}) {
    ModelSpec model = odd_nemotron_h(narrower);
    model.layer_pattern = "E*-EM";
    model.state_space = {8, 4, 4, 4, 3, true, 4, {}};
    model.num_heads = model.num_kv_heads = 4;
    model.expert_hidden = model.shared_hidden = model.mlp_hidden = 16;
    const auto one = invariant_gradients(model, 1, 1, 4);
    EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
    EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
  }
}

// What travels to experts is as wide as what they read.
TEST(NemotronH, NarrowerTokensAreLessTraffic) {
  const auto sent = [](const ModelSpec& model) {
    Plan plan = odd_plan(model, 2, 1, false);
    plan.mesh.ep = 2;
    const MovedCopies moved{.forward_sent = 3, .forward_received = 5};
    Traffic traffic;
    add_copies(plan, plan.mesh.coordinates(0), moved, traffic);
    return traffic.at(Axis::ep, Verb::all_to_all).bytes;
  };
  EXPECT_EQ(sent(odd_nemotron_h(false)), 8 * 24 * 8);
  EXPECT_EQ(sent(odd_nemotron_h(true)), 8 * 10 * 8);
}

TEST(NemotronH, LayersHaveTheirOwnParts) {
  const ModelSpec model = odd_nemotron_h(true);
  const auto names_of = [&](std::int64_t layer) {
    std::set<std::string> names;
    for (const ParamSpec& p : block_parameters(model, layer))
      if (p.expert < 1) names.insert(p.name.substr(fmt::format("model.layers.{}.", layer).size()));
    return names;
  };
  EXPECT_EQ(names_of(1),
            (std::set<std::string>{"input_layernorm.weight", "mlp.gate.weight", "mlp.fc1_latent_proj.weight",
                                   "mlp.fc2_latent_proj.weight", "mlp.experts.0.up_proj.weight",
                                   "mlp.experts.0.down_proj.weight", "mlp.shared_experts.up_proj.weight",
                                   "mlp.shared_experts.down_proj.weight"}));
  EXPECT_EQ(names_of(2), (std::set<std::string>{"input_layernorm.weight", "self_attn.q_proj.weight",
                                                "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                                                "self_attn.o_proj.weight"}));
  EXPECT_EQ(names_of(3),
            (std::set<std::string>{"input_layernorm.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}));
  EXPECT_EQ(model.routed_layers(), (std::vector<std::int64_t>{1, 4}));
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  std::int64_t sum = num_parameters(model);
  for (const LayerKind& kind : layer_kinds(model)) kinds.emplace_back(kind.name, kind.count);
  for (const ParamSpec& p : all_parameters(model)) sum -= p.numel();
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(kinds, (std::vector<std::pair<std::string, std::int64_t>>{{"layer with attention", 1},
                                                                      {"layer with an MLP", 1},
                                                                      {"layer with a state space", 1},
                                                                      {"layer with experts", 2}}));
}

TEST(NemotronH, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_nemotron_h(true);
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.layer_pattern = "ME*-X"; },
          {"letter 5 of layer_pattern", "M (a state space)"});
  expect_refusal(
      [] {
        std::string text = to_toml(odd_nemotron_h(true));
        model_from_toml(text.replace(text.find("ME*-E"), 5, ""), "x");
      },
      {"layer_pattern = \"\"", "a letter for each layer"});
  refused([](ModelSpec& m) { m.layer_pattern = "ME*"; }, {"layer_pattern has 3 letters", "num_layers = 5"});
  refused([](ModelSpec& m) { m.layer_pattern = "-E*-E"; }, {"no layer with a state space", "ssm_heads = 4"});
  refused([](ModelSpec& m) { m.layer_pattern = "M-*-*"; }, {"no layer with experts", "deepseek"});
  refused([](ModelSpec& m) { m.state_space.attention_layers = {2}; }, {"attention_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.num_dense_layers = 1; }, {"num_dense_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.norm_place = NormPlace::both; }, {"norm_place"});
  refused([](ModelSpec& m) { m.num_mtp_layers = 1; }, {"num_mtp_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.activation = Activation::gelu; }, {"activation = \"gelu\"", "relu2"});
  refused([](ModelSpec& m) { m.shared_gate = true; }, {"shared_gate", "expert_latent = 10"});
  expect_refusal([] { model_from_toml(to_toml(load_model("mixtral-tiny")) + "expert_latent = 8\n", "x"); },
                 {"expert_latent = 8", "deepseek"});
  Plan plan = odd_plan(odd_nemotron_h(true), 1, 1, false);
  plan.model.layer_pattern = "*E*-E";
  plan.model.state_space = {};
  plan.model.tuning.freeze = {"*norm*"};
  expect_refusal([&] { validate(plan); }, {"freeze", "Nemotron-H"});
}

// Heads of attention are those of layers that have it.
TEST(NemotronH, ExchangesNoHeadsOfAttentionThatNoLayerHas) {
  Plan plan = odd_plan(odd_nemotron_h(true), 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.context_kind = ContextKind::ulysses;
  plan.seq_len = 8;
  plan.model.num_heads = plan.model.num_kv_heads = 3;
  expect_refusal([&] { validate(plan); }, {"3 query and 3 key/value heads", "do not divide"});
  plan.model.layer_pattern = "ME--E";
  validate(plan);
}

TEST(GptOss, IsRefusedWhereItMeansNothing) {
  const auto refused = [](const char* preset, const char* line, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + line, "x"); }, parts);
  };
  refused("gpt2-tiny", "attention_sinks = true\n", {"attention_sinks", "gpt2 family", "give false"});
  refused("deepseek-v3", "attention_out_bias = true\n", {"attention_out_bias", "latent attention"});
  refused("mixtral-tiny", "swiglu_limit = 5.0\n", {"swiglu_limit = 5", "mixtral", "gpt-oss"});
  refused("llama-tiny", "swiglu_limit = 5.0\n", {"swiglu_limit", "experts is missing"});
  ModelSpec model = odd_gpt_oss();
  model.num_shared_experts = 1;
  expect_refusal([&] { validate(model); }, {"num_shared_experts = 1", "gpt-oss", "deepseek"});
  model = odd_gpt_oss();
  model.norm_place = NormPlace::after;
  model.experts = Experts::none;
  model.clamp = {};
  expect_refusal([&] { validate(model); }, {"attention_out_bias", "norm_place"});
  model = odd_gpt_oss();
  model.tuning.freeze = {"*.gate_proj.bias"};
  expect_refusal([&] { validate(odd_plan(model, 1, 1, false)); }, {"gate_proj.bias", "up_proj.bias"});
}

// Its layers in both orders.
TEST(GptNeox, IsTheSameOnEveryAxis) {
  for (bool parallel : {true, false}) {
    ModelSpec model = odd_llama(false, 4);
    model.name = "neox";
    model.family = Family::neox;
    model.parallel_residual = parallel;
    model.rotary_dim = 4;
    EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
    for (const Plan& plan : plans_of(model))
      if (is_taken(8)) expect_verified_and_predicted(plan);
  }
}

TEST(FamilyChoices, OfALayerAreRefusedWhereTheyMeanNothing) {
  const auto refused = [](const char* preset, const std::string& lines, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + lines, "x"); }, parts);
  };
  refused("gpt2-tiny", "norm_kind = \"layer\"\n", {"norm_kind", "gpt2 family", "\"rms\""});
  refused("llama-tiny", "norm_kind = \"layer\"\nnorm_place = \"after\"\n",
          {"norm_kind", "norm_place", "\"before\""});
  refused("gpt2-tiny", "parallel_residual = true\n", {"parallel_residual", "gpt2"});
  refused("llama-tiny", "parallel_residual = true\nnorm_place = \"after\"\n",
          {"parallel_residual", "norm_place"});
  refused("gpt2-tiny", "interleaved_rope = true\n", {"interleaved_rope", "gpt2"});
  refused("deepseek-v3", "interleaved_rope = true\n", {"interleaved_rope", "latent attention"});
  refused("phi-4", "fused_mlp = true\n", {"fused_mlp", "fused_projections"});
  refused("relu2-tiny", "fused_mlp = true\n", {"fused_mlp", "gate"});
}

TEST(FamilyChoices, CapsAreRefusedWhereTheyMeanNothing) {
  const auto refused = [](const char* preset, const char* line, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + line, "x"); }, parts);
  };
  refused("gpt2-tiny", "attention_cap = 50.0\n", {"caps", "gpt2 family"});
  refused("deepseek-v3", "logits_cap = 30.0\n", {"caps", "latent attention"});
  refused("llama-tiny", "attention_cap = -1.0\n", {"attention_cap = -1", "above 0"});
  refused("llama-tiny", "logits_cap = 41.0\n", {"logits_cap = 41", "up to 40"});
}

TEST(FamilyChoices, AreRefusedWhereTheyMeanNothing) {
  const auto text = [](ModelSpec m, const char* key) { return to_toml(m) + key + " = true\n"; };
  for (const char* key : {"qkv_bias", "qk_norm"}) {
    expect_refusal([&] { model_from_toml(text(load_model("gpt2-tiny"), key), "x"); },
                   {key, "gpt2 family", "give false"});
    expect_refusal([&] { model_from_toml(text(load_model("deepseek-v3"), key), "x"); },
                   {key, "latent attention", "give false"});
  }
}

TEST(FamilyChoices, AnActivationIsRefusedWhereItMeansNothing) {
  const auto text = [](const char* preset) {
    return to_toml(load_model(preset)) + "activation = \"relu2\"\n";
  };
  expect_refusal([&] { model_from_toml(text("gpt2-tiny"), "x"); }, {"activation = \"relu2\"", "gpt2 family"});
  expect_refusal([&] { model_from_toml(text("mixtral-tiny"), "x"); }, {"activation = \"relu2\"", "experts"});
  expect_refusal([] { model_from_toml(to_toml(load_model("llama-tiny")) + "activation = \"relu\"\n", "x"); },
                 {"activation = \"relu\"", "\"swiglu\", \"geglu\", \"relu2\", \"gelu\" or \"xielu\""});
}

}  // namespace
}  // namespace echelon::families_test
