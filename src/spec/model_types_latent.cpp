// Types with multi-head latent attention, in layers with MLPs or experts.
#include <fmt/format.h>

#include <cmath>

#include "spec/config_experts.h"
#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// By which YaRN sharpens DeepSeek's scores, beside what it does to positions: the square of a temperature.
void read_sharpening(const Config& config, ModelSpec& m) {
  const char* const key = rope_key(config);
  if (!config.has(key) || m.rope.scaling == RopeScaling::none) return;
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const double by = Config(config.required(key), where).real_or("mscale_all_dim", 0);
  if (by == 0) return;
  const double sharper = m.rope.factor <= 1 ? 1 : 0.1 * by * std::log(m.rope.factor) + 1;
  m.scales.attention = sharper * sharper / std::sqrt(static_cast<double>(m.head_dim));
}

// Multi-head latent attention, in layers that are a Llama's otherwise.
void read_latent(const Config& config, LlamaDefaults defaults, ModelSpec& m) {
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
    config.required(key);
  m.rotary_dim = config.integer("qk_rope_head_dim");
  defaults.head_dim = config.integer("qk_nope_head_dim") + m.rotary_dim;
  read_llama(config, defaults, m);
  m.kv_rank = config.integer("kv_lora_rank");
  config.require_name("q_lora_rank");  // null says that there is none
  m.q_rank = config.integer_or("q_lora_rank", 0);
  m.value_head_dim = config.integer("v_head_dim");
  config.only_boolean("rope_interleave", true);
  read_sharpening(config, m);
}

// By which transformers makes the angles of these types.
void only_turned_head_dim(const Config& config, const ModelSpec& m) {
  if (config.has("head_dim") && config.integer("head_dim") != m.rotary_dim)
    config.wrong("head_dim", fmt::format("qk_rope_head_dim = {}", m.rotary_dim));
}

}  // namespace

void read_deepseek2(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 0);
  read_latent(config, {}, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 1, m);
  config.only_text("scoring_func", "softmax", {"softmax"});
  config.only_text("topk_method", "greedy", {"greedy", "group_limited_greedy"});
  config.only_boolean("norm_topk_prob", false);  // transformers does not heed it
  m.router.normalise = false;
  if (config.text_or("topk_method", "greedy") != "greedy") read_groups(config, 1, 1, 1, m);
}

// DeepSeek-V3, and Kimi K2 with it. It may have a module that predicts one more token.
void read_deepseek3(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 3);
  read_latent(config, {}, m);
  only_turned_head_dim(config, m);
  read_module(config, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 2.5, m);
  read_sigmoid_routing(config, true, 8, 4, m);
}

// Mistral 4: DeepSeek's layers with a softmax router, and queries that grow with their position.
void read_mistral4(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 0), turned = config.integer("qk_rope_head_dim"),
                     whole = turned + config.integer("qk_nope_head_dim");
  read_latent(config, {.rotary_part = static_cast<double>(turned) / static_cast<double>(whole)}, m);
  if (config.has("head_dim") && config.integer("head_dim") != whole)
    config.wrong("head_dim", fmt::format("qk_nope_head_dim + qk_rope_head_dim = {}", whole));
  if (m.turned_width() != turned)
    config.wrong("partial_rotary_factor",
                 fmt::format("what makes qk_rope_head_dim = {} of {}", turned, whole));
  m.rotary_dim = turned;
  m.rope.query_growth = read_query_growth(config, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 1, m);
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
  read_groups(config, 1, 1, 2, m);
}

// GLM-4.7-Flash: DeepSeek-V3's layers without groups of experts.
void read_glm4_moe_lite(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_kinds(config, 1);
  read_latent(config, {.norm_eps = 1e-5}, m);
  read_module(config, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 1.8, m);
  read_sigmoid_routing(config, true, 1, 1, m);
}

// Youtu-LLM: DeepSeek-V3's attention alone. New weights are spread by their number of inputs.
void read_youtu(const Config& config, ModelSpec& m) {
  read_latent(config, {.tied = true}, m);
  only_turned_head_dim(config, m);
  m.init_std = 2 / std::sqrt(5 * static_cast<double>(m.hidden));
}

}  // namespace echelon
