// Reads the keys of a config.json of transformers: a missing key gets its default or is refused by name, and
// so is a value that is not supported.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"

namespace echelon {

using Json = nlohmann::json;

class Config {
 public:
  Config(const Json& object, const std::string& where) : object_(object), where_(where) {}

  // The same file with other values: what is asked of it counts as asked of this one (refuse_misspelt).
  Config with(const Json& object) const { return Config(object, where_, asked_); }

  bool has(const char* key) const { return names(key) && !object_.at(key).is_null(); }

  // The key may be null.
  bool names(const char* key) const {
    asked_->emplace(key);
    return object_.contains(key);
  }

  std::int64_t integer(const char* key) const {
    // So that sums of products of sizes stay in range until validate().
    constexpr std::int64_t largest = 2147483647;
    const Json& value = required(key);
    const bool whole = value.is_number_integer();
    const bool fits =
        whole && value.get<double>() >= 1 && value.get<double>() <= static_cast<double>(largest);
    if (!fits) wrong(key, fmt::format("a whole number from 1 to {}", largest));
    return value.get<std::int64_t>();
  }
  std::int64_t integer_or(const char* key, std::int64_t otherwise) const {
    return has(key) ? integer(key) : otherwise;
  }
  double real_or(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    if (!required(key).is_number()) wrong(key, "a number");
    return required(key).get<double>();
  }
  // null counts as false, as in transformers.
  bool boolean_or(const char* key, bool otherwise) const {
    if (!has(key)) return !names(key) && otherwise;
    if (!required(key).is_boolean()) wrong(key, "true or false");
    return required(key).get<bool>();
  }
  std::string text_or(const char* key, const char* otherwise) const {
    if (!has(key)) return otherwise;
    if (!required(key).is_string()) wrong(key, "a text");
    return required(key).get<std::string>();
  }

  void only_boolean(const char* key, bool supported) const {
    if (boolean_or(key, supported) != supported) wrong(key, supported ? "true" : "false");
  }
  void only_text(const char* key, const char* otherwise, std::initializer_list<const char*> supported) const {
    const std::string value = text_or(key, otherwise);
    for (const char* one : supported) {
      if (value == one) return;
    }
    wrong(key, fmt::format("{}", fmt::join(supported, " or ")));
  }
  void only_real(const char* key, double supported) const {
    if (real_or(key, supported) < supported || real_or(key, supported) > supported) {
      wrong(key, fmt::format("{}", supported));
    }
  }
  void only_null(const char* key) const {
    if (has(key)) wrong(key, "null");
  }
  [[noreturn]] void wrong(const char* key, const std::string& supported) const {
    const Json& given = names(key) ? object_.at(key) : required(key);  // may be null
    const std::string value = given.dump(-1, ' ', false, Json::error_handler_t::replace);
    refuse("{}: {} = {} is not supported: only {} is", where_, key, value, supported);
  }
  // A missing key is refused with the one that is probably meant by it, as by refuse_misspelt().
  const Json& required(const char* key) const {
    if (!has(key)) missing(key);
    return object_.at(key);
  }
  // The key must be there; null is a value of it.
  void require_name(const char* key) const {
    if (!names(key)) required(key);
  }
  // Refuses a key of `given`, the file as it is written, that nothing has asked for and that means one that
  // was asked for in vain: it is nearly the same, or other programs call it so. Other unknown keys are left
  // alone, as in transformers: files have many.
  void refuse_misspelt(const Json& given) const;

  const std::string& where() const { return where_; }
  const Json& object() const { return object_; }

 private:
  using Keys = std::set<std::string, std::less<>>;
  Config(const Json& object, const std::string& where, std::shared_ptr<Keys> asked)
      : object_(object), where_(where), asked_(std::move(asked)) {}

  [[noreturn]] void missing(const char* key) const;
  // Refuses `key`, which nothing has asked for, if it means `asked`.
  void refuse_if_meant(const std::string& key, const Json& value, const std::string& asked) const;

  const Json& object_;
  const std::string& where_;
  std::shared_ptr<Keys> asked_ = std::make_shared<Keys>();
};

// The width of one head: `width_key` divided by `heads_key`, which must divide it.
std::int64_t even_head_dim(const Config& config, const char* heads_key, const char* width_key);

// A list of numbers.
std::vector<double> numbers(const Config& config, const char* key);

// A list of layer numbers, sorted and without duplicates; transformers accepts them in any order and
// repeated.
std::vector<std::int64_t> listed_layers(const Config& config, const char* key, const std::string& legal,
                                        std::int64_t num_layers);

// A list with one entry for each layer.
const Json& one_for_each_layer(const Config& config, const char* key, std::int64_t num_layers);

// A number for all layers, given once or as a list of equal entries.
std::int64_t same_in_all(const Config& config, const char* key);

// Whichever of two keys is there: some versions of transformers use the other name.
const char* one_of(const Config& config, const char* name, const char* other);

}  // namespace echelon
