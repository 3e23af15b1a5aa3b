// Models as TOML text, the presets among them, and the search for what --model names.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "base/edits.h"
#include "base/error.h"
#include "base/open_file.h"
#include "base/utf8.h"
#include "spec/embedded.h"
#include "spec/model_spec.h"
#include "spec/toml_text.h"

namespace echelon {

namespace {

constexpr const char* toml_keys[] = {"name",
                                     "family",
                                     "num_layers",
                                     "hidden",
                                     "num_heads",
                                     "num_kv_heads",
                                     "head_dim",
                                     "mlp_hidden",
                                     "vocab",
                                     "max_seq",
                                     "norm_eps",
                                     "rope_theta",
                                     "rope_local_theta",
                                     "rope_scaling",
                                     "rope_factor",
                                     "rope_original_length",
                                     "rope_attention_factor",
                                     "rope_low_frequency",
                                     "rope_high_frequency",
                                     "rope_beta_fast",
                                     "rope_beta_slow",
                                     "rope_whole_pairs",
                                     "rope_query_growth",
                                     "rope_short_factors",
                                     "rope_long_factors",
                                     "unturned_every",
                                     "norm_kind",
                                     "norm_place",
                                     "learned_positions",
                                     "position_offset",
                                     "embedding_norm",
                                     "qk_norm_whole",
                                     "qk_norm_turned",
                                     "window",
                                     "window_full_every",
                                     "window_full_first",
                                     "window_full_layers",
                                     "embedding_scale",
                                     "attention_scale",
                                     "residual_scale",
                                     "logits_divisor",
                                     "attention_out_scale",
                                     "ssm_out_scale",
                                     "mlp_out_scale",
                                     "mlp_gate_scale",
                                     "ssm_scales",
                                     "alibi",
                                     "attention_cap",
                                     "logits_cap",
                                     "fused_projections",
                                     "fused_mlp",
                                     "interleaved_rope",
                                     "parallel_residual",
                                     "parallel_norms",
                                     "norms_less_one",
                                     "init_std",
                                     "layer_pattern",
                                     "tied_embedding",
                                     "activation",
                                     "qkv_bias",
                                     "attention_out_bias",
                                     "mlp_bias",
                                     "output_bias",
                                     "attention_sinks",
                                     "attention_gate",
                                     "qk_norm",
                                     "experts",
                                     "num_experts",
                                     "experts_per_token",
                                     "expert_hidden",
                                     "num_shared_experts",
                                     "shared_hidden",
                                     "shared_gate",
                                     "expert_latent",
                                     "num_dense_layers",
                                     "num_mtp_layers",
                                     "mtp_weight",
                                     "router_scores",
                                     "normalise_weights",
                                     "router_epsilon",
                                     "routed_scale",
                                     "router_groups",
                                     "router_most_groups",
                                     "router_group_best",
                                     "swiglu_alpha",
                                     "swiglu_limit",
                                     "kv_rank",
                                     "q_rank",
                                     "rotary_dim",
                                     "value_head_dim",
                                     "ssm_rule",
                                     "ssm_heads",
                                     "ssm_head_dim",
                                     "ssm_groups",
                                     "ssm_state",
                                     "ssm_kernel",
                                     "ssm_conv_bias",
                                     "ssm_chunk",
                                     "ssm_norm",
                                     "ssm_beside_attention",
                                     "short_conv",
                                     "attention_layers",
                                     "freeze",
                                     "lora"};

// What transformers' config.json calls some of them.
constexpr std::pair<std::string_view, const char*> keys_of_transformers[] = {
    {"num_hidden_layers", "num_layers"},
    {"hidden_size", "hidden"},
    {"num_attention_heads", "num_heads"},
    {"num_key_value_heads", "num_kv_heads"},
    {"intermediate_size", "mlp_hidden"},
    {"vocab_size", "vocab"},
    {"max_position_embeddings", "max_seq"},
    {"hidden_act", "activation"},
    {"sliding_window", "window"},
    {"initializer_range", "init_std"},
    {"n_routed_experts", "num_experts"},
    {"num_local_experts", "num_experts"},
    {"num_experts_per_tok", "experts_per_token"},
    {"moe_intermediate_size", "expert_hidden"}};

std::string meant_by(std::string_view key) {
  for (const auto& [theirs, ours] : keys_of_transformers)
    if (key == theirs) return fmt::format(" (did you mean {}?)", ours);
  return did_you_mean(key, {std::begin(toml_keys), std::end(toml_keys)});
}

// Typed access to a flat TOML table; every error names the file, the key, the value and what is legal.
class Reader {
 public:
  Reader(const toml::table& table, const std::string& where) : table_(table), where_(where) {}

  bool has(const char* key) const { return table_.contains(key); }

  std::int64_t integer(const char* key) const {
    const toml::node& node = required(key);
    if (!node.is_integer()) wrong(key, node, "a whole number");
    return node.as_integer()->get();
  }
  std::int64_t integer_or(const char* key, std::int64_t otherwise) const {
    return has(key) ? integer(key) : otherwise;
  }
  double real_or(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    const toml::node& node = required(key);
    if (node.is_integer()) return static_cast<double>(node.as_integer()->get());
    if (!node.is_floating_point()) wrong(key, node, "a number");
    return node.as_floating_point()->get();
  }
  bool boolean_or(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    const toml::node& node = required(key);
    if (!node.is_boolean()) wrong(key, node, "true or false");
    return node.as_boolean()->get();
  }
  std::vector<std::int64_t> integers(const char* key) const {
    const toml::array* array = required(key).as_array();
    std::vector<std::int64_t> values;
    for (std::size_t i = 0; array != nullptr && i < array->size(); ++i)
      if (array->at(i).is_integer()) values.push_back(array->at(i).as_integer()->get());
    if (array == nullptr || values.size() != array->size())
      wrong(key, required(key), "a list of whole numbers");
    return values;
  }
  std::vector<double> reals(const char* key) const {
    const toml::array* array = required(key).as_array();
    std::vector<double> values;
    for (std::size_t i = 0; array != nullptr && i < array->size(); ++i)
      if (const auto value = array->at(i).value<double>(); value && !array->at(i).is_boolean())
        values.push_back(*value);
    if (array == nullptr || values.size() != array->size()) wrong(key, required(key), "a list of numbers");
    return values;
  }
  std::string text(const char* key, const char* legal) const {
    const toml::node& node = required(key);
    if (!node.is_string()) wrong(key, node, legal);
    return node.as_string()->get();
  }

  std::string shown_value(const char* key) const { return shown(required(key)); }

  void refuse_unknown_keys() const {
    for (const auto& [key, value] : table_) {
      const bool known = std::any_of(std::begin(toml_keys), std::end(toml_keys),
                                     [&k = key](const char* legal) { return k.str() == legal; });
      if (!known) {
        refuse("{}: unknown key {} = {}{}; see docs/families.md for the keys of a model", where_, key.str(),
               shown(value), meant_by(key.str()));
      }
    }
  }

 private:
  const toml::node& required(const char* key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) refuse("{}: the key {} is missing", where_, key);
    return *node;
  }
  [[noreturn]] void wrong(const char* key, const toml::node& node, const char* legal) const {
    refuse("{}: {} = {} is not legal: give {}", where_, key, shown(node), legal);
  }

  const toml::table& table_;
  const std::string& where_;
};

void read_experts(const Reader& reader, const std::string& where, ModelSpec& m) {
  if (!reader.has("experts")) {
    for (const char* key :
         {"num_experts", "experts_per_token", "expert_hidden", "num_shared_experts", "shared_hidden",
          "shared_gate", "expert_latent", "num_dense_layers", "router_scores", "normalise_weights",
          "router_epsilon", "routed_scale", "router_groups", "router_most_groups", "router_group_best",
          "swiglu_alpha", "swiglu_limit"})
      if (reader.has(key))
        refuse("{}: {} = {}: the key experts is missing", where, key, reader.shown_value(key));
    return;
  }
  const char* kinds = "\"mixtral\", \"deepseek\" or \"gpt-oss\"";
  const std::string kind = reader.text("experts", kinds);
  if (kind != "mixtral" && kind != "deepseek" && kind != "gpt-oss")
    refuse("{}: experts = \"{}\" is not legal: give {}", where, kind, kinds);
  m.experts = parse_choice<Experts>(kind, where);
  m.num_experts = reader.integer("num_experts");
  m.experts_per_token = reader.integer("experts_per_token");
  m.expert_hidden = reader.integer_or("expert_hidden", m.mlp_hidden);
  m.num_shared_experts = reader.integer_or("num_shared_experts", 0);
  m.shared_hidden = reader.integer_or("shared_hidden", 0);
  m.shared_gate = reader.boolean_or("shared_gate", false);
  m.expert_latent = reader.integer_or("expert_latent", 0);
  m.num_dense_layers = reader.integer_or("num_dense_layers", 0);
  if (reader.has("router_scores")) {
    const char* legal = "\"softmax\" or \"sigmoid\"";
    const std::string scores = reader.text("router_scores", legal);
    if (scores != "softmax" && scores != "sigmoid")
      refuse("{}: router_scores = \"{}\" is not legal: give {}", where, scores, legal);
    m.router.scores = scores == "softmax" ? RouterScores::softmax : RouterScores::sigmoid;
  }
  m.router.normalise = reader.boolean_or("normalise_weights", true);
  m.router.epsilon = reader.real_or("router_epsilon", 0);
  m.router.scale = reader.real_or("routed_scale", 1);
  m.router.groups = reader.integer_or("router_groups", 1);
  m.router.most_groups = reader.integer_or("router_most_groups", m.router.groups);
  m.router.group_best = reader.integer_or("router_group_best", 0);
  m.clamp.alpha = reader.real_or("swiglu_alpha", m.clamp.alpha);
  m.clamp.limit = reader.real_or("swiglu_limit", m.clamp.limit);
}

// Keys of the scalings that have them.
struct RopeKey {
  const char* key;
  double RopeSpec::*number;
  std::vector<RopeScaling> of;
};
const std::vector<RopeKey>& rope_keys() {
  using enum RopeScaling;
  static const std::vector<RopeKey> keys{
      {"rope_factor", &RopeSpec::factor, {linear, dynamic, llama3, yarn, longrope}},
      {"rope_low_frequency", &RopeSpec::low_frequency, {llama3}},
      {"rope_high_frequency", &RopeSpec::high_frequency, {llama3}},
      {"rope_attention_factor", &RopeSpec::attention_factor, {yarn, longrope}},
      {"rope_beta_fast", &RopeSpec::beta_fast, {yarn}},
      {"rope_beta_slow", &RopeSpec::beta_slow, {yarn}}};
  return keys;
}
bool has(const RopeKey& key, RopeScaling scaling) {
  return std::find(key.of.begin(), key.of.end(), scaling) != key.of.end();
}

void read_rope(const Reader& reader, const std::string& where, ModelSpec& m) {
  RopeSpec& r = m.rope;
  r.theta = reader.real_or("rope_theta", r.theta);
  r.local_theta = reader.real_or("rope_local_theta", 0);
  r.unturned_every = reader.integer_or("unturned_every", 0);
  if (reader.has("rope_scaling"))
    r.scaling = parse_choice<RopeScaling>(reader.text("rope_scaling", "a text"),
                                          fmt::format("{}: rope_scaling", where));
  const auto belongs = [&](const char* key, bool here) {
    if (reader.has(key) && !here)
      refuse("{}: {} = {} means nothing with rope_scaling = \"{}\"", where, key, reader.shown_value(key),
             name_of(r.scaling));
    return reader.has(key);
  };
  for (const RopeKey& key : rope_keys())
    if (belongs(key.key, has(key, r.scaling))) r.*key.number = reader.real_or(key.key, 0);
  const bool is_long = r.scaling == RopeScaling::longrope;
  if (belongs("rope_original_length", r.scaling > RopeScaling::linear))
    r.original_length = reader.integer("rope_original_length");
  if (belongs("rope_whole_pairs", r.scaling == RopeScaling::yarn))
    r.whole_pairs = reader.boolean_or("rope_whole_pairs", true);
  if (belongs("rope_query_growth", r.scaling == RopeScaling::yarn))
    r.query_growth = reader.real_or("rope_query_growth", 0);
  if (belongs("rope_short_factors", is_long)) r.short_factors = reader.reals("rope_short_factors");
  if (belongs("rope_long_factors", is_long)) r.long_factors = reader.reals("rope_long_factors");
}

template <class Line>
void write_rope(const RopeSpec& r, const Line& line) {
  line("rope_theta", r.theta);
  if (r.local_theta != 0) line("rope_local_theta", r.local_theta);
  if (r.unturned_every != 0) line("unturned_every", r.unturned_every);
  if (r.scaling == RopeScaling::none) return;
  line("rope_scaling", quoted(name_of(r.scaling)));
  for (const RopeKey& key : rope_keys())
    if (has(key, r.scaling)) line(key.key, r.*key.number);
  if (r.scaling > RopeScaling::linear) line("rope_original_length", r.original_length);
  if (r.scaling == RopeScaling::yarn) line("rope_whole_pairs", r.whole_pairs);
  if (r.query_growth != 0) line("rope_query_growth", r.query_growth);
  if (r.scaling != RopeScaling::longrope) return;
  line("rope_short_factors", fmt::format("[{}]", fmt::join(r.short_factors, ", ")));
  line("rope_long_factors", fmt::format("[{}]", fmt::join(r.long_factors, ", ")));
}

constexpr std::pair<const char*, double ScaleSpec::*> scale_keys[] = {
    {"embedding_scale", &ScaleSpec::embedding},
    {"attention_scale", &ScaleSpec::attention},
    {"residual_scale", &ScaleSpec::residual},
    {"logits_divisor", &ScaleSpec::logits_divisor},
    {"attention_out_scale", &ScaleSpec::attention_out},
    {"ssm_out_scale", &ScaleSpec::state_space_out},
    {"mlp_out_scale", &ScaleSpec::mlp_out},
    {"mlp_gate_scale", &ScaleSpec::mlp_gate}};

// What only a llama has, and only where queries, keys and values are projected straight from the input.
bool llama_choice(const Reader& reader, const std::string& where, const char* key, const ModelSpec& m) {
  const bool chosen = reader.boolean_or(key, false);
  if (chosen && m.family != Family::llama)
    refuse("{}: {} = true is not legal for the {} family; give false, or family = \"llama\"", where, key,
           name_of(m.family));
  if (chosen && m.latent_attention())
    refuse("{}: {} = true is not legal with latent attention (kv_rank = {}); give false", where, key,
           m.kv_rank);
  return chosen;
}

Activation read_activation(const Reader& reader, const std::string& where, const ModelSpec& m) {
  const char* legal = "\"swiglu\", \"geglu\", \"relu\", \"relu2\", \"gelu\", \"gelu_erf\" or \"xielu\"";
  if (!reader.has("activation")) return usual_activation(m.family);
  const std::string name = reader.text("activation", legal);
  if (name != "swiglu" && name != "geglu" && name != "relu" && name != "relu2" && name != "gelu" &&
      name != "gelu_erf" && name != "xielu")
    refuse("{}: activation = \"{}\" is not legal: give {}", where, name, legal);
  return parse_choice<Activation>(name, where);
}

void read_state_space(const Reader& reader, const std::string& where, StateSpaceSpec& s) {
  if (reader.has("ssm_rule"))
    s.rule = parse_choice<StateRule>(reader.text("ssm_rule", "a text"), fmt::format("{}: ssm_rule", where));
  s.heads = reader.integer_or("ssm_heads", 0);
  s.head_dim = reader.integer_or("ssm_head_dim", 0);
  s.groups = reader.integer_or("ssm_groups", s.groups);
  s.state = reader.integer_or("ssm_state", s.state);
  s.kernel = reader.integer_or("ssm_kernel", s.kernel);
  s.conv_bias = reader.boolean_or("ssm_conv_bias", s.conv_bias);
  s.chunk = reader.integer_or("ssm_chunk", s.chunk);
  s.norm = reader.boolean_or("ssm_norm", s.norm);
  s.beside_attention = reader.boolean_or("ssm_beside_attention", s.beside_attention);
}

// Layers that have attention among those that have it not.
void read_other_mixers(const Reader& reader, const std::string& where, ModelSpec& m) {
  read_state_space(reader, where, m.state_space);
  m.short_conv.kernel = reader.integer_or("short_conv", 0);
  if (!reader.has("attention_layers")) return;
  (m.short_conv.kernel != 0 ? m.short_conv.attention_layers : m.state_space.attention_layers) =
      reader.integers("attention_layers");
}

void write_state_space(const ModelSpec& m, std::string& text) {
  const StateSpaceSpec& s = m.state_space;
  if (s.is_delta()) text += fmt::format("ssm_rule = \"{}\"\n", name_of(s.rule));
  text += fmt::format(
      "ssm_heads = {}\nssm_head_dim = {}\nssm_groups = {}\nssm_state = {}\nssm_kernel = {}\nssm_conv_bias = "
      "{}\nssm_chunk = {}\n",
      s.heads, s.head_dim, s.groups, s.state, s.kernel, s.conv_bias, s.chunk);
  if (!s.norm) text += "ssm_norm = false\n";
  if (s.beside_attention)
    text += "ssm_beside_attention = true\n";
  else if (m.layer_pattern.empty())
    text += fmt::format("attention_layers = [{}]\n", fmt::join(s.attention_layers, ", "));
}

}  // namespace

ModelSpec model_from_toml(const std::string& text, const std::string& where) {
  const toml::table table = parse_toml(text, where);
  const Reader reader(table, where);
  reader.refuse_unknown_keys();
  ModelSpec m;
  const std::string file = std::filesystem::path(where).stem().string();
  m.name = reader.has("name") ? reader.text("name", "a text") : is_utf8(file) ? file : "model";
  const char* families = "\"gpt2\", \"llama\" or \"neox\"";
  const std::string family = reader.text("family", families);
  if (family != "gpt2" && family != "llama" && family != "neox")
    refuse("{}: family = \"{}\" is not legal: give {}", where, family, families);
  m.family = parse_choice<Family>(family, where);
  m.num_layers = reader.integer("num_layers");
  m.hidden = reader.integer("hidden");
  m.num_heads = reader.integer("num_heads");
  m.num_kv_heads = reader.integer_or("num_kv_heads", m.num_heads);
  if (reader.has("head_dim")) {
    m.head_dim = reader.integer("head_dim");
  } else if (m.num_heads < 1 || m.hidden % m.num_heads != 0) {
    refuse("{}: num_heads = {} does not divide hidden = {}; give a divisor, or head_dim", where, m.num_heads,
           m.hidden);
  } else {
    m.head_dim = m.hidden / m.num_heads;
  }
  m.mlp_hidden = reader.integer("mlp_hidden");
  m.vocab = reader.integer("vocab");
  m.max_seq = reader.integer("max_seq");
  m.tied_embedding = reader.boolean_or("tied_embedding", m.family == Family::gpt2);
  m.norm_eps = reader.real_or("norm_eps", m.norm_eps);
  if (m.family == Family::gpt2 && reader.has("rope_theta")) {
    refuse("{}: rope_theta is not legal for the gpt2 family, whose positions are learned", where);
  }
  read_rope(reader, where, m);
  m.window = {reader.integer_or("window", 0), reader.integer_or("window_full_every", 0),
              reader.boolean_or("window_full_first", false)};
  if (reader.has("window_full_layers")) m.window.full_layers = reader.integers("window_full_layers");
  for (const auto& [key, member] : scale_keys) m.scales.*member = reader.real_or(key, m.scales.*member);
  if (reader.has("ssm_scales")) {
    const std::vector<double> scales = reader.reals("ssm_scales");
    if (scales.size() != m.scales.state_space.size())
      refuse("{}: ssm_scales has {} numbers: give five, of z, x, B, C and dt", where, scales.size());
    std::copy(scales.begin(), scales.end(), m.scales.state_space.begin());
  }
  m.caps = {reader.real_or("attention_cap", 0), reader.real_or("logits_cap", 0)};
  m.fused_projections = reader.boolean_or("fused_projections", false);
  m.fused_mlp = reader.boolean_or("fused_mlp", false);
  m.interleaved_rope = reader.boolean_or("interleaved_rope", false);
  m.parallel_residual = reader.boolean_or("parallel_residual", false);
  m.parallel_norms = reader.boolean_or("parallel_norms", false);
  m.norms_less_one = reader.boolean_or("norms_less_one", false);
  m.qk_norm_whole = reader.boolean_or("qk_norm_whole", false);
  m.qk_norm_turned = reader.boolean_or("qk_norm_turned", false);
  if (reader.has("norm_kind"))
    m.norm_kind =
        parse_choice<NormKind>(reader.text("norm_kind", "a text"), fmt::format("{}: norm_kind", where));
  if (reader.has("norm_place"))
    m.norm_place =
        parse_choice<NormPlace>(reader.text("norm_place", "a text"), fmt::format("{}: norm_place", where));
  m.learned_positions = reader.boolean_or("learned_positions", false);
  m.position_offset = reader.integer_or("position_offset", 0);
  m.alibi = reader.boolean_or("alibi", false);
  m.embedding_norm = reader.boolean_or("embedding_norm", false);
  m.init_std = reader.real_or("init_std", m.init_std);
  if (reader.has("layer_pattern")) {
    const char* legal = "a letter for each layer, as \"MEM*\"";
    m.layer_pattern = reader.text("layer_pattern", legal);
    if (m.layer_pattern.empty()) refuse("{}: layer_pattern = \"\" is not legal: give {}", where, legal);
  }
  read_experts(reader, where, m);
  m.kv_rank = reader.integer_or("kv_rank", 0);
  m.activation = read_activation(reader, where, m);
  m.qkv_bias = llama_choice(reader, where, "qkv_bias", m);
  m.qk_norm = llama_choice(reader, where, "qk_norm", m);
  m.attention_out_bias = llama_choice(reader, where, "attention_out_bias", m);
  m.mlp_bias = llama_choice(reader, where, "mlp_bias", m);
  m.output_bias = reader.boolean_or("output_bias", false);
  m.attention_sinks = llama_choice(reader, where, "attention_sinks", m);
  m.attention_gate = llama_choice(reader, where, "attention_gate", m);
  m.q_rank = reader.integer_or("q_rank", 0);
  m.rotary_dim = reader.integer_or("rotary_dim", 0);
  m.value_head_dim = reader.integer_or("value_head_dim", 0);
  m.num_mtp_layers = reader.integer_or("num_mtp_layers", 0);
  m.mtp_weight = reader.real_or("mtp_weight", m.mtp_weight);
  read_other_mixers(reader, where, m);
  if (reader.has("lora"))
    m.tuning.lora = parse_lora(reader.text("lora", "a text"), fmt::format("{}: lora", where));
  if (reader.has("freeze")) m.tuning.freeze = parse_freeze(reader.text("freeze", "a text"));
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

std::string to_toml(const ModelSpec& m) {
  const bool gpt2 = m.family == Family::gpt2;
  std::string text = fmt::format("name = {}\nfamily = \"{}\"\n", quoted(m.name), name_of(m.family));
  const auto line = [&text](const char* key, const auto& value) {
    text += fmt::format("{} = {}\n", key, value);
  };
  line("num_layers", m.num_layers);
  line("hidden", m.hidden);
  line("num_heads", m.num_heads);
  line("num_kv_heads", m.num_kv_heads);
  line("head_dim", m.head_dim);
  line("mlp_hidden", m.mlp_hidden);
  line("vocab", m.vocab);
  line("max_seq", m.max_seq);
  line("tied_embedding", m.tied_embedding);
  line("norm_eps", m.norm_eps);
  if (!gpt2) write_rope(m.rope, line);
  if (m.window.size != 0) line("window", m.window.size);
  if (m.window.full_every != 0) line("window_full_every", m.window.full_every);
  if (m.window.full_first) line("window_full_first", m.window.full_first);
  if (!m.window.full_layers.empty())
    text += fmt::format("window_full_layers = [{}]\n", fmt::join(m.window.full_layers, ", "));
  for (const auto& [key, member] : scale_keys)
    if (m.scales.*member != ScaleSpec{}.*member) line(key, m.scales.*member);
  if (m.scales.state_space != ScaleSpec{}.state_space)
    line("ssm_scales", fmt::format("[{}]", fmt::join(m.scales.state_space, ", ")));
  if (m.caps.attention != 0) line("attention_cap", m.caps.attention);
  if (m.caps.logits != 0) line("logits_cap", m.caps.logits);
  if (m.fused_projections) line("fused_projections", m.fused_projections);
  if (m.fused_mlp) line("fused_mlp", m.fused_mlp);
  if (m.interleaved_rope) line("interleaved_rope", m.interleaved_rope);
  if (m.parallel_residual) line("parallel_residual", m.parallel_residual);
  if (m.parallel_norms) line("parallel_norms", m.parallel_norms);
  if (m.norms_less_one) line("norms_less_one", m.norms_less_one);
  if (m.norm_kind != NormKind::rms) line("norm_kind", quoted(name_of(m.norm_kind)));
  if (m.norm_place != NormPlace::before) line("norm_place", quoted(name_of(m.norm_place)));
  if (m.learned_positions) line("learned_positions", m.learned_positions);
  if (m.position_offset != 0) line("position_offset", m.position_offset);
  if (m.alibi) line("alibi", m.alibi);
  if (m.embedding_norm) line("embedding_norm", m.embedding_norm);
  if (m.qk_norm_whole) line("qk_norm_whole", m.qk_norm_whole);
  if (m.qk_norm_turned) line("qk_norm_turned", m.qk_norm_turned);
  line("init_std", m.init_std);
  if (!m.layer_pattern.empty()) line("layer_pattern", quoted(m.layer_pattern));
  if (m.activation != usual_activation(m.family)) line("activation", quoted(name_of(m.activation)));
  if (m.qkv_bias) line("qkv_bias", m.qkv_bias);
  if (m.attention_out_bias) line("attention_out_bias", m.attention_out_bias);
  if (m.mlp_bias) line("mlp_bias", m.mlp_bias);
  if (m.output_bias) line("output_bias", m.output_bias);
  if (m.attention_sinks) line("attention_sinks", m.attention_sinks);
  if (m.attention_gate) line("attention_gate", m.attention_gate);
  if (m.qk_norm) line("qk_norm", m.qk_norm);
  if (m.experts != Experts::none) {
    line("experts", quoted(name_of(m.experts)));
    line("num_experts", m.num_experts);
    line("experts_per_token", m.experts_per_token);
    line("expert_hidden", m.expert_hidden);
    line("num_shared_experts", m.num_shared_experts);
    if (m.shared_hidden > 0) line("shared_hidden", m.shared_hidden);
    if (m.shared_gate) line("shared_gate", m.shared_gate);
    if (m.expert_latent > 0) line("expert_latent", m.expert_latent);
    line("num_dense_layers", m.num_dense_layers);
    text += fmt::format("router_scores = \"{}\"\n",
                        m.router.scores == RouterScores::softmax ? "softmax" : "sigmoid");
    line("normalise_weights", m.router.normalise);
    if (m.router.epsilon != 0) line("router_epsilon", m.router.epsilon);
    line("routed_scale", m.router.scale);
    line("router_groups", m.router.groups);
    line("router_most_groups", m.router.most_groups);
    if (m.router.group_best > 0) line("router_group_best", m.router.group_best);
    if (m.experts == Experts::gpt_oss) {
      line("swiglu_alpha", m.clamp.alpha);
      line("swiglu_limit", m.clamp.limit);
    }
  }
  if (m.latent_attention()) {
    line("kv_rank", m.kv_rank);
    line("q_rank", m.q_rank);
    line("value_head_dim", m.value_head_dim);
  }
  if (m.rotary_dim != 0) line("rotary_dim", m.rotary_dim);
  if (m.num_mtp_layers != 0) {
    line("num_mtp_layers", m.num_mtp_layers);
    line("mtp_weight", m.mtp_weight);
  }
  if (m.state_space.heads > 0) write_state_space(m, text);
  if (m.short_conv.kernel > 0) {
    line("short_conv", m.short_conv.kernel);
    text += fmt::format("attention_layers = [{}]\n", fmt::join(m.short_conv.attention_layers, ", "));
  }
  if (m.tuning.lora.rank > 0) line("lora", quoted(lora_text(m.tuning.lora)));
  if (!m.tuning.freeze.empty()) line("freeze", quoted(freeze_text(m.tuning)));
  return text;
}

std::vector<FieldDifference> differences(const ModelSpec& first, const ModelSpec& second) {
  const auto value_in = [](const toml::table& table, const char* key) {
    const toml::node* node = table.get(key);
    if (node == nullptr || !node->is_array()) return node == nullptr ? std::string() : shown(*node);
    std::ostringstream whole;
    whole << *node->as_array();
    return whole.str();
  };
  const toml::table a = parse_toml(to_toml(first), first.name), b = parse_toml(to_toml(second), second.name);
  const bool no_mlps = first.num_mlp_layers() == 0 && second.num_mlp_layers() == 0;
  std::vector<FieldDifference> all;
  for (const char* key : toml_keys)
    if (no_mlps && std::string_view(key) == "mlp_hidden")
      continue;  // of nothing
    else if (const std::string mine = value_in(a, key), other = value_in(b, key); mine != other)
      all.push_back({key, mine, other});
  return all;
}

std::vector<std::string> model_preset_names() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_embedded_models; ++i) names.emplace_back(embedded_models[i].name);
  return names;
}

// The preset that a model is a variant of, as Llama-3.1-8B-Instruct is of llama-3.1-8b: the longest name that
// the model's has in it, from dash to dash. Empty if there is none.
static std::string preset_of_variant(std::string_view model) {
  const std::string padded = "-" + in_small_letters(model) + "-";
  std::string longest;
  for (const std::string& name : model_preset_names())
    if (name.size() > longest.size() && padded.find("-" + name + "-") != std::string::npos) longest = name;
  return longest;
}

// For a name on the Hugging Face hub: the preset that was made of that model's configuration, which its file
// says. For any other name or path, by its last part: the preset that it is a variant of, or what is nearest.
static std::string preset_meant_by(const std::string& name_or_path) {
  const std::string source = "https://huggingface.co/" + name_or_path + "/blob/";
  std::vector<std::string> made_of_it;
  for (std::size_t i = 0; i < num_embedded_models; ++i)
    if (std::string_view(embedded_models[i].text).find(source) != std::string_view::npos)
      made_of_it.emplace_back(embedded_models[i].name);
  if (made_of_it.size() == 1) return fmt::format(" (did you mean {}?)", made_of_it.front());
  const std::string model = name_or_path.substr(name_or_path.rfind('/') + 1);
  if (const std::string preset = preset_of_variant(model); !preset.empty())
    return fmt::format(" (did you mean {}?)", preset);
  return did_you_mean(model, model_preset_names());
}

ModelSpec load_model(const std::string& name_or_path) {
  for (std::size_t i = 0; i < num_embedded_models; ++i) {
    const EmbeddedFile& file = embedded_models[i];
    if (name_or_path == file.name)
      return model_from_toml(file.text, fmt::format("configs/models/{}.toml", file.name));
  }
  std::error_code error;
  const std::filesystem::path path(name_or_path);
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::is_directory(status)) {
    const std::filesystem::path config = path / "config.json";
    if (!std::filesystem::exists(config, error))
      refuse("--model {}: the directory has no config.json", name_or_path);
    return model_from_hugging_face(read_text(config.string(), "--model"), config.string());
  }
  if (status.type() != std::filesystem::file_type::not_found) {
    const std::string text = read_text(name_or_path, "--model");
    return path.extension() == ".json" ? model_from_hugging_face(text, name_or_path)
                                       : model_from_toml(text, name_or_path);
  }
  refuse("--model {}: neither a preset nor a file or directory{}; `echelon help models` lists the presets",
         name_or_path, preset_meant_by(name_or_path));
}

}  // namespace echelon
