// What the expressions of a template are of: Python's values, as far as Jinja has them.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace echelon {

struct TemplateNode;

struct Undefined {
  std::string name;  // of what is not there
};
struct None {};

// As json.dumps() of Python has it.
struct TemplateJson {
  bool lines = false;  // one for each element, `indent` deeper
  std::string indent;
  std::string between = ", ", behind_key = ": ";
  bool sorted = false, ascii = false;
};

class TemplateValue {
 public:
  using List = std::vector<TemplateValue>;
  // In the order in which they were set.
  struct Map {
    std::vector<std::pair<std::string, TemplateValue>> items;
    bool is_namespace = false;  // its fields can be set
    const TemplateValue* find(const std::string& key) const;
    void set(const std::string& key, TemplateValue value);
  };
  struct Macro {
    const TemplateNode* node = nullptr;  // or one of the functions that are there
    std::size_t depth = 0;               // of the scopes that it sees
  };

  TemplateValue() : value_(Undefined{}) {}
  TemplateValue(Undefined undefined) : value_(std::move(undefined)) {}
  TemplateValue(None none) : value_(none) {}
  TemplateValue(bool b) : value_(b) {}
  TemplateValue(std::int64_t i) : value_(i) {}
  TemplateValue(double d) : value_(d) {}
  TemplateValue(std::string text) : value_(std::move(text)) {}
  TemplateValue(const char* text) : value_(std::string(text)) {}
  TemplateValue(List list) : value_(std::make_shared<List>(std::move(list))) {}
  TemplateValue(Map map) : value_(std::make_shared<Map>(std::move(map))) {}
  TemplateValue(Macro macro) : value_(macro) {}
  // Lists to all but what prints them; what Python makes as it is asked for prints as nothing that is
  // written.
  static TemplateValue tuple(List list) { return of_kind(std::move(list), Kind::tuple); }
  static TemplateValue sequence(List list) { return of_kind(std::move(list), Kind::sequence); }
  bool is_tuple() const { return kind_ == Kind::tuple; }
  bool is_sequence() const { return kind_ == Kind::sequence; }

  template <class T>
  const T* as() const {
    return std::get_if<T>(&value_);
  }
  const List* list() const;
  const Map* map() const;
  Map* map_to_set() const;  // of a namespace; null otherwise
  bool is_undefined() const { return as<Undefined>() != nullptr; }
  bool is_number() const { return as<std::int64_t>() || as<double>() || as<bool>(); }
  double number() const;  // of one

  bool holds() const;                                // Python's bool()
  std::string text() const;                          // its str()
  std::string shown() const;                         // its repr()
  std::string json(const TemplateJson& form = {}) const;
  const char* kind() const;                          // for messages
  bool operator==(const TemplateValue& other) const;
  bool is_same(const TemplateValue& other) const;  // Python's `is`

 private:
  enum class Kind { list, tuple, sequence };
  static TemplateValue of_kind(List list, Kind kind) {
    TemplateValue value(std::move(list));
    value.kind_ = kind;
    return value;
  }

  std::variant<Undefined, None, bool, std::int64_t, double, std::string, std::shared_ptr<List>,
               std::shared_ptr<Map>, Macro>
      value_;
  Kind kind_ = Kind::list;
};

TemplateValue template_value(const nlohmann::json& json);
TemplateValue template_value(const nlohmann::ordered_json& json);

}  // namespace echelon
