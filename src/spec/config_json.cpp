#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/edits.h"
#include "spec/config_json.h"

namespace echelon {
namespace {

// What other programs and their files call keys of transformers.
constexpr std::pair<std::string_view, std::string_view> names_elsewhere[] = {
    {"dim", "hidden_size"},
    {"d_model", "hidden_size"},
    {"n_embd", "hidden_size"},
    {"n_layer", "num_hidden_layers"},
    {"n_layers", "num_hidden_layers"},
    {"num_layers", "num_hidden_layers"},
    {"n_head", "num_attention_heads"},
    {"n_heads", "num_attention_heads"},
    {"num_heads", "num_attention_heads"},
    {"n_kv_heads", "num_key_value_heads"},
    {"num_kv_heads", "num_key_value_heads"},
    {"num_query_groups", "num_key_value_heads"},
    {"ffn_dim", "intermediate_size"},
    {"hidden_dim", "intermediate_size"},
    {"ffn_hidden_size", "intermediate_size"},
    {"norm_eps", "rms_norm_eps"},
    {"max_seq_len", "max_position_embeddings"},
};

bool is_name_elsewhere(std::string_view key, std::string_view of) {
  return std::find(std::begin(names_elsewhere), std::end(names_elsewhere), std::pair(key, of)) !=
         std::end(names_elsewhere);
}

}  // namespace

void Config::refuse_if_meant(const std::string& key, const Json& value, const std::string& asked) const {
  constexpr std::size_t letters_of_an_edit = 8;  // v_head_dim is a key of its own, and not head_dim misspelt
  if (asked_->contains(key) || key.starts_with('_')) return;  // such ones transformers keeps for itself
  const auto most = static_cast<int>(std::max<std::size_t>(1, asked.size() / letters_of_an_edit));
  if (edits(key, asked) <= most || is_name_elsewhere(key, asked))
    refuse("{}: {} = {} is not read (did you mean {}?)", where_, key,
           value.dump(-1, ' ', false, Json::error_handler_t::replace), asked);
}

void Config::missing(const char* key) const {
  for (const auto& [other, value] : object_.items()) refuse_if_meant(other, value, key);
  refuse("{}: the key {} is missing", where_, key);
}

void Config::refuse_misspelt(const Json& given) const {
  for (const auto& [key, value] : given.items())
    for (const std::string& asked : *asked_)
      if (!given.contains(asked)) refuse_if_meant(key, value, asked);
}

std::int64_t even_head_dim(const Config& config, const char* heads_key, const char* width_key) {
  const std::int64_t heads = config.integer(heads_key), width = config.integer(width_key);
  if (heads < 1 || width % heads != 0) {
    refuse("{}: {} = {} does not divide {} = {}", config.where(), heads_key, heads, width_key, width);
  }
  return width / heads;
}

std::vector<double> numbers(const Config& config, const char* key) {
  std::vector<double> values;
  const Json& list = config.required(key);
  if (!list.is_array()) config.wrong(key, "a list of numbers");
  for (const Json& value : list) {
    if (!value.is_number()) config.wrong(key, "a list of numbers");
    values.push_back(value.get<double>());
  }
  return values;
}

std::vector<std::int64_t> listed_layers(const Config& config, const char* key, const std::string& legal,
                                        std::int64_t num_layers) {
  const Json& list = config.required(key);
  if (!list.is_array()) config.wrong(key, legal);
  std::vector<std::int64_t> layers;
  for (const Json& layer : list) {
    if (!layer.is_number_integer() || layer < 0 || layer >= num_layers) config.wrong(key, legal);
    layers.push_back(layer.get<std::int64_t>());
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

const Json& one_for_each_layer(const Config& config, const char* key, std::int64_t num_layers) {
  const Json& list = config.required(key);
  if (!list.is_array() || std::ssize(list) != num_layers) config.wrong(key, "a list of one for each layer");
  return list;
}

std::int64_t same_in_all(const Config& config, const char* key) {
  const Json& list = config.required(key);
  if (!list.is_array()) return config.integer(key);
  if (list.empty() || !list.front().is_number_unsigned() ||
      std::any_of(list.begin(), list.end(), [&list](const Json& one) { return one != list.front(); }))
    config.wrong(key, "a number, or a list of the same one for each layer,");
  return list.front().get<std::int64_t>();
}

const char* one_of(const Config& config, const char* name, const char* other) {
  return config.has(other) ? other : name;
}

}  // namespace echelon
