// Jinja's filters.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "text/template_functions.h"
#include "text/template_texts.h"

namespace echelon {
namespace {

using Value = TemplateValue;
using List = Value::List;

// The elements that a test holds of (select, reject), or holds of an attribute of (selectattr, rejectattr).
List chosen(const std::string& name, const Value& of, const TemplateArguments& arguments) {
  const bool by_attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  std::size_t at = by_attribute ? 1 : 0;
  if (by_attribute && arguments.list.empty()) refuse("{} names no attribute", name);
  const std::string test =
      at < arguments.list.size() ? text_of(name, arguments.list[at++]) : std::string("true value");
  TemplateArguments rest;
  for (; at < arguments.list.size(); ++at) rest.list.push_back(arguments.list[at]);
  List list;
  for (const Value& one : template_elements(of)) {
    const Value tested = by_attribute ? template_item(one, arguments.list.front()) : one;
    const bool holds = test == "true value" ? tested.holds() : test_template_value(test, tested, rest);
    if (holds == wanted) list.push_back(one);
  }
  return list;
}

List mapped(const Value& of, const TemplateArguments& arguments) {
  List list;
  const Value* attribute = arguments.get(99, "attribute");
  if (attribute == nullptr && arguments.list.empty()) refuse("map names no filter");
  TemplateArguments rest;
  for (std::size_t i = 1; i < arguments.list.size(); ++i) rest.list.push_back(arguments.list[i]);
  for (const Value& one : template_elements(of))
    list.push_back(attribute != nullptr
                       ? template_item(one, *attribute)
                       : filter_template_value(text_of("map", arguments.list.front()), one, rest));
  return list;
}

Value number_filter(const std::string& name, const Value& of, const TemplateArguments& arguments) {
  double value = of.number();
  if (const auto* text = of.as<std::string>()) {
    const std::string digits = stripped(*text, "", true, true);
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (read.ec != std::errc{} || read.ptr != digits.data() + digits.size()) value = 0;
  }
  if (name == "float") return value;
  if (name == "int") return static_cast<std::int64_t>(std::clamp(value, -9e18, 9e18));
  if (!of.is_number()) refuse_of(name, of);
  if (name == "abs")
    return of.as<double>() != nullptr ? Value(std::abs(value)) : Value(std::abs(whole_number(of)));
  const Value* places = arguments.get(0, "precision");
  const double scale = std::pow(10.0, places == nullptr ? 0.0 : places->number());
  return std::nearbyint(value * scale) / scale;
}

std::string indented(const std::string& text, const TemplateArguments& arguments) {
  const Value* width = arguments.get(0, "width");
  const Value* first = arguments.get(1, "first");
  const std::string by =
      width == nullptr ? std::string(4, ' ')
      : width->as<std::string>() != nullptr
          ? width->text()
          : std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(whole_number(*width), 0, 64)), ' ');
  std::string out = first != nullptr && first->holds() ? by : "";
  for (std::size_t i = 0; i < text.size(); ++i) {
    out += text[i];
    if (text[i] == '\n' && i + 1 < text.size() && text[i + 1] != '\n') out += by;
  }
  return out;
}

}  // namespace

TemplateValue filter_template_value(const std::string& name, const TemplateValue& of,
                                    const TemplateArguments& arguments) {
  const auto* text = of.as<std::string>();
  if (name == "default" || name == "d") {
    const Value *otherwise = arguments.get(0, "default_value"), *falsy = arguments.get(1, "boolean");
    const bool taken = of.is_undefined() || (falsy != nullptr && falsy->holds() && !of.holds());
    return !taken ? of : otherwise == nullptr ? Value("") : *otherwise;
  }
  if (name == "tojson") {
    const Value* indent = arguments.get(1, "indent");
    if (of.is_undefined()) refuse("{} is undefined", of.as<Undefined>()->name);
    return of.json(indent == nullptr || indent->as<None>() != nullptr
                       ? -1
                       : std::clamp<std::int64_t>(whole_number(*indent), 0, 64));
  }
  if (name == "string") return of.text();
  if (name == "safe") return of;
  if (name == "trim") {
    const Value* what = arguments.get(0, "chars");
    return stripped(of.text(), what == nullptr ? "" : what->text(), true, true);
  }
  if (name == "length" || name == "count") {
    if (of.map() != nullptr) return std::int64_t{std::ssize(of.map()->items)};
    if (of.is_number() || of.as<None>() != nullptr) refuse_of(name, of);
    return std::int64_t{std::ssize(template_elements(of))};
  }
  if (name == "upper") return in_case(of.text(), std::toupper);
  if (name == "lower") return in_case(of.text(), std::tolower);
  if (name == "title") return titled(of.text(), true);
  if (name == "capitalize") return titled(of.text(), false);
  if (name == "indent") return indented(of.text(), arguments);
  if (name == "replace") {
    const Value *from = arguments.get(0, "old"), *to = arguments.get(1, "new");
    if (from == nullptr || to == nullptr) refuse("replace is told too little");
    return replaced(of.text(), from->text(), to->text(), -1);
  }
  if (name == "join") {
    const Value* by = arguments.get(0, "d");
    return joined(template_elements(of), by == nullptr ? "" : by->text(), arguments.get(1, "attribute"));
  }
  if (name == "list") return template_elements(of);
  if (name == "first" || name == "last") {
    const List list = template_elements(of);
    return list.empty() ? Value(Undefined{name}) : name == "first" ? list.front() : list.back();
  }
  if (name == "reverse") {
    List list = template_elements(of);
    std::reverse(list.begin(), list.end());
    return text != nullptr ? Value(joined(list, "", nullptr)) : Value(list);
  }
  if (name == "unique") {
    List list;
    for (const Value& one : template_elements(of))
      if (std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
    return list;
  }
  if (name == "sort") {
    List list = template_elements(of);
    const Value* by = arguments.get(99, "attribute");
    std::stable_sort(list.begin(), list.end(), [&](const Value& a, const Value& b) {
      return by == nullptr ? template_less(a, b)
                           : template_less(template_item(a, *by), template_item(b, *by));
    });
    return list;
  }
  if (name == "items")
    return of.is_undefined()     ? Value(List{})
           : of.map() == nullptr ? (refuse_of(name, of), of)
                                 : template_items(*of.map());
  if (name == "dictsort") {
    if (of.map() == nullptr) refuse_of(name, of);
    Value::Map map = *of.map();
    std::stable_sort(map.items.begin(), map.items.end(), [](const auto& a, const auto& b) {
      return in_case(a.first, std::tolower) < in_case(b.first, std::tolower);
    });
    return template_items(map);
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return chosen(name, of, arguments);
  if (name == "map") return mapped(of, arguments);
  if (name == "int" || name == "float" || name == "abs" || name == "round")
    return number_filter(name, of, arguments);
  refuse("the filter {} is not known", name);
}

}  // namespace echelon
