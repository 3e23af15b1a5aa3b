// Hugging Face's config.json as a ModelSpec. A missing key has the default that transformers gives it. What
// would make transformers compute something else than Echelon does is refused. The one exception is the
// dropout of GPT-2, StarCoder2, Granite and Seed-OSS, which published ones carry: it belongs to that training
// run rather than to the model, and Echelon has none.
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

std::string model_name(const std::string& where, const std::string& type) {
  const std::string directory = std::filesystem::path(where).parent_path().filename().string();
  const bool is_name = !directory.empty() && directory != "." && directory != ".." && is_utf8(directory);
  return is_name ? directory : type;
}

const ModelType& type_of(const Config& config) {
  const std::string type = config.text_or("model_type", "");
  const auto found = std::find_if(model_types().begin(), model_types().end(),
                                  [&type](const ModelType& one) { return one.name == type; });
  if (found == model_types().end()) refuse_model_type(config.where(), type);
  return *found;
}

ModelSpec model_of(const Json& object, const std::string& where) {
  const Config config(object, where);
  const ModelType& type = type_of(config);
  ModelSpec m;
  m.name = model_name(where, type.name);
  config.only_boolean("is_causal", true);
  type.read(config, m);
  m.init_std = config.real_or("initializer_range", 0.02);
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

}  // namespace

const TransformersType& transformers_type_of(const std::string& config_json, const std::string& where) {
  const Json text = text_of(parse_python_json(config_json, where), where);
  return type_of(Config(text, where));
}

ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where) {
  return model_of(text_of(parse_python_json(config_json, where), where), where);
}

}  // namespace echelon
