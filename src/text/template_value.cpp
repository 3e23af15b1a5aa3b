#include "text/template_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/template_texts.h"
#include "text/unicode.h"

namespace echelon {

const TemplateValue* TemplateValue::Map::find(const std::string& key) const {
  const auto found =
      std::find_if(items.begin(), items.end(), [&](const auto& item) { return item.first == key; });
  return found == items.end() ? nullptr : &found->second;
}

void TemplateValue::Map::set(const std::string& key, TemplateValue value) {
  for (auto& [name, held] : items)
    if (name == key) {
      held = std::move(value);
      return;
    }
  items.emplace_back(key, std::move(value));
}

const TemplateValue::List* TemplateValue::list() const {
  const auto* held = as<std::shared_ptr<List>>();
  return held == nullptr ? nullptr : held->get();
}

const TemplateValue::Map* TemplateValue::map() const {
  const auto* held = as<std::shared_ptr<Map>>();
  return held == nullptr ? nullptr : held->get();
}

TemplateValue::Map* TemplateValue::map_to_set() const {
  const auto* held = as<std::shared_ptr<Map>>();
  return held == nullptr || !(*held)->is_namespace ? nullptr : held->get();
}

double TemplateValue::number() const {
  if (const bool* b = as<bool>()) return *b ? 1 : 0;
  if (const auto* i = as<std::int64_t>()) return static_cast<double>(*i);
  const double* d = as<double>();
  return d == nullptr ? 0 : *d;
}

bool TemplateValue::holds() const {
  if (is_number()) return number() != 0;
  if (const auto* text = as<std::string>()) return !text->empty();
  if (list() != nullptr) return !list()->empty();
  if (map() != nullptr) return map()->is_namespace || !map()->items.empty();
  return as<Macro>() != nullptr;
}

static std::string real_text(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", d);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string TemplateValue::text() const {
  if (is_undefined()) return "";
  if (const auto* text = as<std::string>()) return *text;
  return shown();
}

static std::uint32_t code_point(const std::string& character) {
  const auto first = static_cast<unsigned char>(character.front());
  std::uint32_t point = character.size() == 1 ? first : first & (0xffu >> (character.size() + 1));
  for (std::size_t i = 1; i < character.size(); ++i)
    point = point << 6 | (static_cast<unsigned char>(character[i]) & 0x3fu);
  return point;
}

// As Python quotes a text.
static std::string quoted(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const std::string& character : characters(text)) {
    const char c = character.front();
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) {
      const std::uint32_t point = code_point(character);
      out += is_printable(character) ? character
             : point <= 0xff         ? fmt::format("\\x{:02x}", point)
             : point <= 0xffff       ? fmt::format("\\u{:04x}", point)
                                     : fmt::format("\\U{:08x}", point);
    } else if (c == quote || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned>(byte));
    } else {
      out += c;
    }
  }
  return out + quote;
}

std::string TemplateValue::shown() const {
  if (as<None>() != nullptr) return "None";
  if (const bool* b = as<bool>()) return *b ? "True" : "False";
  if (const auto* i = as<std::int64_t>()) return fmt::format("{}", *i);
  if (const double* d = as<double>()) return real_text(*d);
  if (const auto* text = as<std::string>()) return quoted(*text);
  std::string out;
  if (list() != nullptr) {
    if (is_sequence()) refuse("a sequence is printed that is no list; legal: | list");
    for (const TemplateValue& one : *list()) out += (out.empty() ? "" : ", ") + one.shown();
    if (is_tuple()) return "(" + out + (list()->size() == 1 ? ",)" : ")");
    return "[" + out + "]";
  }
  if (map() != nullptr) {
    for (const auto& [key, value] : map()->items)
      out += (out.empty() ? "" : ", ") + quoted(key) + ": " + value.shown();
    return map()->is_namespace ? "<Namespace {" + out + "}>" : "{" + out + "}";
  }
  if (as<Macro>() != nullptr) refuse("a macro or a function is printed");
  return "Undefined";
}

static std::string json_text(const std::string& text, bool ascii) {
  return nlohmann::json(text).dump(-1, ' ', ascii, nlohmann::json::error_handler_t::replace);
}

static void write_json(const TemplateValue& value, const TemplateJson& form, std::size_t depth,
                       std::string& out) {
  const auto line = [&](std::size_t levels) {
    if (!form.lines) return;
    out += '\n';
    for (std::size_t i = 0; i < levels; ++i) out += form.indent;
  };
  const auto* list = value.list();
  const auto* map = value.map();
  if (list == nullptr && map == nullptr) {
    if (const auto* text = value.as<std::string>())
      out += json_text(*text, form.ascii);
    else if (const bool* b = value.as<bool>())
      out += *b ? "true" : "false";
    else if (const double* d = value.as<double>(); d != nullptr && !std::isfinite(*d))
      out += std::isnan(*d) ? "NaN" : *d > 0 ? "Infinity" : "-Infinity";
    else if (value.is_number())
      out += value.text();
    else if (value.as<None>() != nullptr)
      out += "null";
    else
      refuse("{} has no JSON", value.kind());
    return;
  }
  if (value.is_sequence()) refuse("a sequence that is no list has no JSON; legal: | list");
  if (map != nullptr && map->is_namespace) refuse("a namespace has no JSON");
  const std::size_t count = list != nullptr ? list->size() : map->items.size();
  std::vector<const std::pair<std::string, TemplateValue>*> items;
  if (map != nullptr)
    for (const auto& item : map->items) items.push_back(&item);
  if (form.sorted)
    std::sort(items.begin(), items.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
  out += list != nullptr ? '[' : '{';
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) out += form.between;
    line(depth + 1);
    if (map != nullptr) out += json_text(items[i]->first, form.ascii) + form.behind_key;
    write_json(list != nullptr ? (*list)[i] : items[i]->second, form, depth + 1, out);
    if (out.size() > largest_template_text) refuse("a text is too long");
  }
  if (count > 0) line(depth);
  out += list != nullptr ? ']' : '}';
}

std::string TemplateValue::json(const TemplateJson& form) const {
  std::string out;
  write_json(*this, form, 0, out);
  return out;
}

const char* TemplateValue::kind() const {
  if (is_undefined()) return "undefined";
  if (as<None>() != nullptr) return "none";
  if (is_number()) return "a number";
  if (as<std::string>() != nullptr) return "a text";
  if (list() != nullptr) return "a list";
  return map() != nullptr ? "a mapping" : "a macro";
}

bool TemplateValue::operator==(const TemplateValue& other) const {
  if (is_number() && other.is_number()) {
    const auto *i = as<std::int64_t>(), *j = other.as<std::int64_t>();
    return i != nullptr && j != nullptr ? *i == *j : number() == other.number();
  }
  if (const auto* text = as<std::string>())
    return other.as<std::string>() != nullptr && *text == *other.as<std::string>();
  if (list() != nullptr)
    return other.list() != nullptr && is_tuple() == other.is_tuple() && *list() == *other.list();
  if (map() != nullptr) {
    if (other.map() == nullptr || map()->items.size() != other.map()->items.size()) return false;
    return std::all_of(map()->items.begin(), map()->items.end(), [&](const auto& item) {
      const TemplateValue* there = other.map()->find(item.first);
      return there != nullptr && item.second == *there;
    });
  }
  return value_.index() == other.value_.index() && as<Macro>() == nullptr;
}

bool TemplateValue::is_same(const TemplateValue& other) const {
  if (value_.index() != other.value_.index()) return false;
  if (list() != nullptr) return list() == other.list();
  return map() != nullptr ? map() == other.map() : *this == other;
}

template <class Json>
static TemplateValue value_of(const Json& json) {
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.template get<bool>();
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return json.template get<std::int64_t>();
    case Json::value_t::number_float:
      return json.template get<double>();
    case Json::value_t::string:
      return json.template get<std::string>();
    case Json::value_t::array: {
      TemplateValue::List list;
      for (const auto& one : json) list.push_back(value_of(one));
      return list;
    }
    case Json::value_t::object: {
      TemplateValue::Map map;
      for (const auto& [key, value] : json.items()) map.items.emplace_back(key, value_of(value));
      return map;
    }
    default:
      return None{};
  }
}

TemplateValue template_value(const nlohmann::json& json) { return value_of(json); }
TemplateValue template_value(const nlohmann::ordered_json& json) { return value_of(json); }

}  // namespace echelon
