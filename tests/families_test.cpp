// What a family of models has beyond the others: its gradients are the derivatives of its loss, are the same
// on every mesh, and its memory and traffic are predicted to the byte. Each row is a model.
#include "spec/families.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "base/atomic_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors.h"
#include "family_runs.h"
#include "refusals.h"

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

TEST_P(Families, GradientsAreTheDerivativesOfTheLoss) { expect_derivatives(model_of(GetParam())); }

TEST_P(Families, VerifyPassesOnEveryAxis) {
  for (const Plan& plan : plans_of(model_of(GetParam()))) {
    if (!is_taken(16)) continue;
    SCOPED_TRACE(to_toml(plan));
    expect_verified(plan);
  }
}

// Memory and traffic.
TEST_P(Families, PredictionsAreExact) {
  for (const Plan& plan : plans_of(model_of(GetParam()))) {
    if (!is_taken(3)) continue;
    SCOPED_TRACE(to_toml(plan));
    expect_predicted(plan);
  }
}

TEST_P(Families, TomlSaysThem) {
  const ModelSpec model = model_of(GetParam());
  expect_toml_says(model);
  EXPECT_FALSE(differences(model, odd_llama()).empty());
}

// A model in Hugging Face's layout, filled by a formula, comes in and goes out as it was.
TEST_P(Families, TransformersModelsComeInAndGoOut) {
  const ModelSpec model = model_of(GetParam());
  // Whose files have names of their own.
  const bool renamed = model.state_space.is_delta() || model.qk_norm_turned ||
                       model.activation == Activation::xielu || model.learned_positions || model.alibi ||
                       model.short_conv.kernel > 0 || (model.output_bias && GetParam().type != nullptr) ||
                       model.activation == Activation::gelu_erf ||
                       (model.latent_attention() && model.experts != Experts::none) ||
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
    {"listed_windows",
     [](ModelSpec& m) {
       m.num_layers = 3;
       m.window.size = 4;
       m.window.full_layers = {0, 1};
     },
     {},
     "ministral"},
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
    {"mistral4",
     [](ModelSpec& m) {
       latent(m);
       m.q_rank = 6;
       m.rope.scaling = RopeScaling::yarn;
       m.rope.factor = 4;
       m.rope.original_length = 3;
       m.rope.query_growth = 0.7;
       two_experts(m);
       m.num_shared_experts = 1;
     },
     {"self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight",
      "self_attn.kv_a_proj.weight", "self_attn.k_rope_proj.weight", "self_attn.kv_a_layernorm.weight",
      "self_attn.kv_b_proj.weight", "mlp.gate.weight", "mlp.experts.0.gate_proj.weight",
      "mlp.experts.0.up_proj.weight", "mlp.experts.0.down_proj.weight", "mlp.experts.1.gate_proj.weight",
      "mlp.experts.1.up_proj.weight", "mlp.experts.1.down_proj.weight", "mlp.shared_experts.gate_proj.weight",
      "mlp.shared_experts.up_proj.weight", "mlp.shared_experts.down_proj.weight"},
     "mistral4"},
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
    {"phi",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu;
       m.rotary_dim = m.head_dim - 2;
       m.parallel_residual = m.qkv_bias = m.attention_out_bias = m.mlp_bias = m.output_bias = true;
     },
     {"input_layernorm.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
      "self_attn.o_proj.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
     "phi"},
    {"gptj",
     [](ModelSpec& m) {
       m.tied_embedding = true;
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu;
       m.num_kv_heads = m.num_heads;
       m.rotary_dim = m.head_dim - 2;
       m.parallel_residual = m.interleaved_rope = m.mlp_bias = m.output_bias = true;
     },
     {"input_layernorm.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
     "gptj"},
    {"falcon",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu_erf;
       m.parallel_residual = m.parallel_norms = true;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias"},
     "falcon"},
    {"bloom",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu;
       m.num_kv_heads = m.num_heads;
       m.mlp_hidden = 4 * m.hidden;
       m.alibi = m.embedding_norm = m.qkv_bias = m.attention_out_bias = m.mlp_bias = true;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias", "self_attn.q_proj.bias",
      "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias", "mlp.c_fc.weight",
      "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
     "bloom"},
    {"mpt",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer_weight;
       m.activation = Activation::gelu_erf;
       m.num_kv_heads = m.num_heads;
       m.mlp_hidden = 4 * m.hidden;
       m.alibi = true;
     },
     {},
     "mpt"},
    {"output_bias",
     [](ModelSpec& m) {
       m.output_bias = true;
       m.scales.logits_divisor = 3;
     },
     {},
     nullptr},
    {"gpt_neo",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.activation = Activation::gelu;
       m.num_kv_heads = m.num_heads;
       m.learned_positions = m.attention_out_bias = m.mlp_bias = true;
       m.window = {4, 2, true};
       m.scales.attention = 1;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias", "self_attn.o_proj.bias", "mlp.c_fc.weight",
      "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"},
     "gpt_neo"},
    {"opt",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.norm_eps = 1e-5;
       m.activation = Activation::relu;
       m.num_kv_heads = m.num_heads;
       m.learned_positions = m.qkv_bias = m.attention_out_bias = m.mlp_bias = true;
       m.position_offset = 2;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias", "self_attn.q_proj.bias",
      "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias", "mlp.up_proj.bias",
      "mlp.down_proj.bias"},
     "opt"},
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
    {"biased_gate",
     [](ModelSpec& m) { m.attention_gate = m.qkv_bias = true; },
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.gate_proj.weight",
      "self_attn.gate_proj.bias"},
     nullptr},
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
    {"embedding_norm",
     [](ModelSpec& m) {
       m.norm_kind = NormKind::layer;
       m.embedding_norm = true;
     },
     {"input_layernorm.bias", "post_attention_layernorm.bias"},
     nullptr},
    {"out_bias", [](ModelSpec& m) { m.attention_out_bias = true; }, {"self_attn.o_proj.bias"}, "seed_oss"},
};

INSTANTIATE_TEST_SUITE_P(Models, Families, testing::ValuesIn(rows),
                         [](const auto& instance) { return std::string(instance.param.name); });

// Its layers in both orders, and with scaled positions.
TEST(GptNeox, IsTheSameOnEveryAxis) {
  for (bool parallel : {true, false}) {
    ModelSpec model = odd_llama(false, 4);
    model.name = "neox";
    model.family = Family::neox;
    model.activation = usual_activation(model.family);
    model.parallel_residual = parallel;
    model.rotary_dim = 4;
    if (parallel) {
      model.rope.scaling = RopeScaling::yarn;
      model.rope.factor = 4;
      model.rope.original_length = 4;
      model.rope.attention_factor = 1.25;
    }
    expect_toml_says(model);
    for (const Plan& plan : plans_of(model))
      if (is_taken(8)) expect_verified_and_predicted(plan);
  }
}

}  // namespace
}  // namespace echelon::families_test
