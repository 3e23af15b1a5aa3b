#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "spec/config_rope.h"

namespace echelon {

namespace {

// What `rope`, an object of `config`, says.
void read_scaling(const Config& rope, const Config& config, ModelSpec& m) {
  const std::string& where = rope.where();
  RopeSpec& r = m.rope;
  r.theta = rope.real_or("rope_theta", r.theta);
  const char* named = rope.has("rope_type") ? "rope_type" : "type";
  rope.only_text(named, "default", {"default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"});
  std::string type = rope.text_or(named, "default");
  if (type == "su" || (type == "yarn" && m.fused_projections)) type = "longrope";  // of Phi-3
  if (type == "default") return;
  r.scaling = parse_choice<RopeScaling>(type, where + ": rope_type");
  if (r.scaling == RopeScaling::dynamic) {
    r.original_length = m.max_seq;  // whatever else is named
  } else if (r.scaling > RopeScaling::linear) {
    const Config& origin = config.has("original_max_position_embeddings") ? config : rope;
    r.original_length = origin.integer_or("original_max_position_embeddings", m.max_seq);
  }
  if (rope.has("factor") || r.scaling != RopeScaling::longrope) {
    rope.required("factor");
    r.factor = rope.real_or("factor", 1);
  } else {
    r.factor = static_cast<double>(m.max_seq) / static_cast<double>(r.original_length);
  }
  if (r.scaling == RopeScaling::llama3) {
    rope.required("low_freq_factor");
    rope.required("high_freq_factor");
    r.low_frequency = rope.real_or("low_freq_factor", 1);
    r.high_frequency = rope.real_or("high_freq_factor", 4);
  }
  if (r.scaling < RopeScaling::yarn) return;
  r.attention_factor =
      rope.real_or("attention_factor",
                   default_attention_factor(r, rope.real_or("mscale", 0), rope.real_or("mscale_all_dim", 0)));
  if (r.scaling == RopeScaling::yarn) {
    r.beta_fast = rope.real_or("beta_fast", r.beta_fast);
    r.beta_slow = rope.real_or("beta_slow", r.beta_slow);
    r.whole_pairs = rope.boolean_or("truncate", true);
  } else {
    r.short_factors = numbers(rope, "short_factor");
    r.long_factors = numbers(rope, "long_factor");
  }
}

// `config` names them below `key`, where transformers 4 has rope_scaling beside rope_theta and transformers 5
// all of them in rope_parameters.
void read_rope_scaling(const Config& config, const char* key, ModelSpec& m) {
  const Json& object = config.required(key);
  if (!object.is_object()) config.wrong(key, "an object");
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const Config rope(object, where);
  read_scaling(rope, config, m);
  rope.refuse_misspelt(object);
}

constexpr const char* rotary_key = "partial_rotary_factor";

// The part of a head that is turned: only some families of transformers heed it, which have `otherwise` where
// none is named.
double rotary_part_of(const Config& config, std::optional<double> otherwise) {
  if (!otherwise) {
    config.only_real(rotary_key, 1.0);
    return 1;
  }
  const double part = config.real_or(rotary_key, *otherwise);
  if (!(part > 0) || part > 1) config.wrong(rotary_key, "a number above 0 and up to 1");
  return part;
}

void turn_part(const Config& config, double part, ModelSpec& m) {
  m.rotary_dim = part < 1 ? static_cast<std::int64_t>(static_cast<double>(m.head_dim) * part) : 0;
  if (part < 1 && (m.rotary_dim == 0 || m.rotary_dim % 2 != 0))
    refuse("{}: {} = {} turns {} of a head's {} elements: only an even number, at least 2, can be turned",
           config.where(), rotary_key, part, m.rotary_dim, m.head_dim);
}

}  // namespace

const char* rope_key(const Config& config) {
  const char* const older = "rope_scaling";
  return config.has(older) && !config.required(older).empty() ? older : "rope_parameters";
}

void read_rope(const Config& config, double theta, std::optional<double> rotary_part, bool heeded,
               ModelSpec& m) {
  m.rope.theta = config.real_or("rope_theta", theta);
  double part = heeded ? rotary_part_of(config, rotary_part) : *rotary_part;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    // Where both are there transformers takes the former alone, or mixes them where layers have their own.
    if (key == std::string_view("rope_parameters") && key != std::string_view(rope_key(config))) {
      if (m.rope.local_theta > 0) config.only_null("rope_scaling");
      continue;
    }
    const std::string where = fmt::format("{}, {}", config.where(), key);
    const Config rope(config.required(key), where);
    if (m.rope.local_theta > 0 && key == std::string_view("rope_scaling"))
      rope.required("rope_type");  // transformers would not heed "type"
    if (m.rope.local_theta > 0 && config.required(key).contains("full_attention")) {  // by type of layer
      read_rope_scaling(rope, "full_attention", m);
      const Config local(rope.required("sliding_attention"), where);
      local.only_text("rope_type", "default", {"default"});
      for (const char* kind : {"full_attention", "sliding_attention"})
        rotary_part_of(Config(rope.required(kind), where), rotary_part);
      m.rope.local_theta = local.real_or("rope_theta", m.rope.local_theta);
      continue;
    }
    if (m.rope.local_theta > 0 && key == std::string_view("rope_parameters"))
      config.wrong(key, "what has full_attention and sliding_attention");  // transformers heeds nothing else
    read_rope_scaling(config, key, m);
    if (rope.has(rotary_key)) part = rotary_part_of(rope, rotary_part);
  }
  if (rotary_part) turn_part(config, part, m);
  if (m.rope.local_theta > 0 && !m.rope.whole_pairs)
    refuse(
        "{}: truncate = false is not supported where layers have positions of their own: only true is, as "
        "transformers has it there",
        config.where());
  // Of this kind max_position_embeddings is the original length; the factor says how much longer it may get.
  if (m.rope.scaling == RopeScaling::dynamic && m.rope.factor >= 1)
    m.max_seq =
        std::llround(std::min(std::floor(m.rope.factor * static_cast<double>(m.max_seq)), 0x1p31 - 1));
}

double read_query_growth(const Config& config, const ModelSpec& m) {
  const char* const key = rope_key(config);
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const Config rope(config.required(key), where);
  rope.required("llama_4_scaling_beta");
  const double growth = rope.real_or("llama_4_scaling_beta", 0);
  if (growth != 0 && m.rope.scaling != RopeScaling::yarn) rope.only_text("rope_type", "default", {"yarn"});
  return growth;
}

}  // namespace echelon
