// Types that see images, of which the text model is read.
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// Whether the output matrix is the embedding's, the whole says, whatever is said of its text.
void take_tie(const Config& config, Json& text) {
  if (config.has("tie_word_embeddings"))
    text["tie_word_embeddings"] = config.boolean_or("tie_word_embeddings", false);
}

// Of a Gemma 3 that sees images, which says of its text what is not as usual: with the rest.
Json text_of_gemma3(const Config& config) {
  const Json& text = config.required("text_config");
  if (!text.is_object()) config.wrong("text_config", "an object");
  Json whole = {{"vocab_size", 262208}, {"num_attention_heads", 8}, {"max_position_embeddings", 131072}};
  whole.update(text);
  whole["model_type"] = "gemma3_text";
  whole["tie_word_embeddings"] = config.boolean_or("tie_word_embeddings", true);
  return whole;
}

// Of a Mistral that sees images (Small 3.1, 3.2 and 4, Ministral 3).
Json text_of_mistral3(const Config& config) {
  Json whole = config.required("text_config");
  if (!whole.is_object()) config.wrong("text_config", "an object");
  const Config text(whole, config.where());
  text.only_text("model_type", "mistral", {"mistral", "ministral3", "mistral4"});
  whole["model_type"] = text.text_or("model_type", "mistral");
  take_tie(config, whole);
  return whole;
}

// Of a Qwen that sees images, which older files have beside what they say of images. A text's positions are
// the same in all three directions that images have. `windowed`: what is said of windows is heeded.
Json text_of_qwen(const Config& config, const char* type, bool windowed, double theta, double eps) {
  Json whole = config.has("text_config") ? config.required("text_config") : config.object();
  if (!whole.is_object()) config.wrong("text_config", "an object");
  whole["model_type"] = type;
  take_tie(config, whole);
  whole.emplace("tie_word_embeddings", false);
  if (!windowed)
    for (const char* key : {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
      whole.erase(key);
  whole.emplace("rope_theta", theta);
  whole.emplace("rms_norm_eps", eps);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!whole.contains(key) || !whole[key].is_object()) continue;
    for (const char* named : {"rope_type", "type"})
      if (whole[key].contains(named) && whole[key][named] == "mrope") whole[key][named] = "default";
  }
  return whole;
}

// Of a Qwen2-VL or 2.5, whose output matrix is the embedding's where the text alone says so too.
Json text_of_qwen2(const Config& config) {
  Json whole = text_of_qwen(config, "qwen2", true, 1e6, 1e-5);
  whole.emplace("num_key_value_heads", 8);
  const bool tied =
      config.has("text_config") &&
      Config(config.required("text_config"), config.where()).boolean_or("tie_word_embeddings", false);
  if (tied) whole["tie_word_embeddings"] = true;
  return whole;
}

struct VisionType {
  const char* name;
  Json (*text)(const Config& config);
};
constexpr VisionType all_vision_types[] = {
    {"gemma3", text_of_gemma3},
    {"mistral3", text_of_mistral3},
    {"qwen2_vl", text_of_qwen2},
    {"qwen2_5_vl", text_of_qwen2},
    {"qwen3_vl", [](const Config& config) { return text_of_qwen(config, "qwen3", false, 5e5, 1e-6); }},
    {"qwen3_vl_moe",
     [](const Config& config) { return text_of_qwen(config, "qwen3_vl_moe_text", false, 5e5, 1e-6); }},
    {"qwen3_5", [](const Config& config) { return text_of_qwen(config, "qwen3_5_text", true, 1e4, 1e-6); }},
    {"qwen3_5_moe",
     [](const Config& config) { return text_of_qwen(config, "qwen3_5_moe_text", true, 1e4, 1e-6); }},
};

}  // namespace

std::vector<std::string> vision_type_names() {
  std::vector<std::string> names;
  for (const VisionType& one : all_vision_types) names.emplace_back(one.name);
  return names;
}

Json text_of(const Json& object, const std::string& where) {
  if (!object.is_object()) refuse("{}: not a JSON object", where);
  const Config config(object, where);
  config.required("model_type");
  const std::string type = config.text_or("model_type", "");
  for (const VisionType& one : all_vision_types)
    if (type == one.name) return one.text(config);
  return object;
}

}  // namespace echelon
