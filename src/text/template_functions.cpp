#include "text/template_functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>
#include <functional>

#include "base/error.h"
#include "text/template_texts.h"

namespace echelon {
namespace {

using Value = TemplateValue;
using List = Value::List;

bool has_any(const std::string& name, const Value& of, const std::function<bool(const std::string&)>& has) {
  if (of.list() == nullptr) return has(text_of(name, of));
  return std::any_of(of.list()->begin(), of.list()->end(),
                     [&](const Value& one) { return has(text_of(name, one)); });
}

std::string time_as(const std::string& form, const std::tm& now) {
  std::array<char, 512> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), form.c_str(), &now);
  return {text.data(), size};
}

}  // namespace

Value template_items(const Value::Map& map) {
  List items;
  for (const auto& [key, value] : map.items) items.emplace_back(List{key, value});
  return items;
}

bool template_less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return a.number() < b.number();
  if (a.as<std::string>() != nullptr && b.as<std::string>() != nullptr) return a.text() < b.text();
  refuse("{} and {} have no order", a.kind(), b.kind());
}

const TemplateValue* TemplateArguments::get(std::size_t place, const char* name) const {
  for (const auto& [given, value] : named)
    if (given == name) return &value;
  return place < list.size() ? &list[place] : nullptr;
}

TemplateValue::List template_elements(const TemplateValue& of) {
  if (of.list() != nullptr) return *of.list();
  List list;
  if (of.map() != nullptr) {
    for (const auto& [key, value] : of.map()->items) list.emplace_back(key);
  } else if (const auto* text = of.as<std::string>()) {
    for (std::string& character : characters(*text)) list.emplace_back(std::move(character));
  } else if (!of.is_undefined()) {
    refuse("{} has no elements", of.kind());
  }
  return list;
}

TemplateValue template_item(const TemplateValue& of, const TemplateValue& index) {
  if (of.is_undefined()) refuse("{} is undefined", of.as<Undefined>()->name);
  if (of.map() != nullptr) {
    const auto* key = index.as<std::string>();
    const TemplateValue* found = key == nullptr ? nullptr : of.map()->find(*key);
    return found != nullptr ? *found : Value(Undefined{index.text()});
  }
  const bool has_place = index.as<std::int64_t>() != nullptr;
  if (!has_place || (of.list() == nullptr && of.as<std::string>() == nullptr)) return Undefined{index.text()};
  const List list = template_elements(of);
  std::int64_t at = whole_number(index);
  if (at < 0) at += std::ssize(list);
  return at < 0 || at >= std::ssize(list) ? Value(Undefined{index.text()})
                                          : list[static_cast<std::size_t>(at)];
}

TemplateValue template_slice(const TemplateValue& of, const TemplateValue& from, const TemplateValue& to,
                             const TemplateValue& step) {
  const bool is_text = of.as<std::string>() != nullptr;
  if (!is_text && of.list() == nullptr) refuse_of("a slice", of);
  const List list = template_elements(of);
  const std::int64_t size = std::ssize(list), by = step.as<None>() != nullptr ? 1 : whole_number(step);
  if (by == 0) refuse("a slice has a step of 0");
  const auto bound = [&](const Value& value, std::int64_t otherwise) {
    if (value.as<None>() != nullptr) return otherwise;
    const std::int64_t at = whole_number(value) < 0 ? whole_number(value) + size : whole_number(value);
    return by > 0 ? std::clamp<std::int64_t>(at, 0, size) : std::clamp<std::int64_t>(at, -1, size - 1);
  };
  const std::int64_t begin = bound(from, by > 0 ? 0 : size - 1), end = bound(to, by > 0 ? size : -1);
  List part;
  for (std::int64_t i = begin; by > 0 ? i < end : i > end; i += by)
    part.push_back(list[static_cast<std::size_t>(i)]);
  return is_text ? Value(joined(part, "", nullptr)) : Value(part);
}

bool test_template_value(const std::string& name, const TemplateValue& of,
                         const TemplateArguments& arguments) {
  const auto other = [&]() -> const Value& {
    const Value* found = arguments.get(0);
    if (found == nullptr) refuse("the test {} has nothing to compare with", name);
    return *found;
  };
  const bool is_text = of.as<std::string>() != nullptr;
  if (name == "defined") return !of.is_undefined();
  if (name == "undefined") return of.is_undefined();
  if (name == "none") return of.as<None>() != nullptr;
  if (name == "string") return is_text;
  if (name == "boolean") return of.as<bool>() != nullptr;
  if (name == "true") return of.as<bool>() != nullptr && of.holds();
  if (name == "false") return of.as<bool>() != nullptr && !of.holds();
  if (name == "number") return of.is_number();
  if (name == "integer") return of.as<std::int64_t>() != nullptr;
  if (name == "float") return of.as<double>() != nullptr;
  if (name == "mapping") return of.map() != nullptr;
  if (name == "sequence") return of.list() != nullptr || of.map() != nullptr || is_text;
  if (name == "iterable") return of.list() != nullptr || of.map() != nullptr || is_text;
  if (name == "callable") return of.as<Value::Macro>() != nullptr;
  if (name == "odd") return whole_number(of) % 2 != 0;
  if (name == "even") return whole_number(of) % 2 == 0;
  if (name == "divisibleby")
    return whole_number(other()) != 0 && whole_number(of) % whole_number(other()) == 0;
  if (name == "eq" || name == "equalto" || name == "==" || name == "sameas") return of == other();
  if (name == "ne" || name == "!=") return !(of == other());
  if (name == "lt" || name == "<" || name == "lessthan") return template_less(of, other());
  if (name == "gt" || name == ">" || name == "greaterthan") return template_less(other(), of);
  if (name == "le" || name == "<=") return !template_less(other(), of);
  if (name == "ge" || name == ">=") return !template_less(of, other());
  if (name == "in") {
    if (const auto* text = other().as<std::string>()) return text->find(of.text()) != std::string::npos;
    const List list = template_elements(other());
    return std::find(list.begin(), list.end(), of) != list.end();
  }
  if (name == "upper") return is_text && in_case(of.text(), std::toupper) == of.text();
  if (name == "lower") return is_text && in_case(of.text(), std::tolower) == of.text();
  refuse("the test {} is not known", name);
}

TemplateValue call_template_method(const std::string& name, const TemplateValue& of,
                                   const TemplateArguments& arguments) {
  const Value *first = arguments.get(0), *second = arguments.get(1);
  if (of.map() != nullptr) {
    if (name == "items") return template_items(*of.map());
    if (name == "keys") return template_elements(of);
    if (name == "values") {
      List values;
      for (const auto& [key, value] : of.map()->items) values.push_back(value);
      return values;
    }
    if (name == "get" && first != nullptr) {
      const Value found = template_item(of, *first);
      return !found.is_undefined() ? found : second == nullptr ? Value(None{}) : *second;
    }
    refuse_of(name, of);
  }
  if (of.is_undefined()) refuse("{} is undefined", of.as<Undefined>()->name);
  const std::string& text = text_of(name, of);
  if (name == "strip" || name == "lstrip" || name == "rstrip")
    return stripped(text, first == nullptr || first->as<None>() != nullptr ? "" : text_of(name, *first),
                    name != "rstrip", name != "lstrip");
  if (name == "split" || name == "rsplit") {
    const Value* most = arguments.get(1, "maxsplit");
    return split(text, arguments.get(0, "sep"), most == nullptr ? -1 : whole_number(*most), name == "rsplit");
  }
  if (name == "splitlines") {
    const Value newline("\n");
    const List lines =
        split(text.ends_with('\n') ? text.substr(0, text.size() - 1) : text, &newline, -1, false);
    return text.empty() ? List{} : lines;
  }
  if (name == "upper") return in_case(text, std::toupper);
  if (name == "lower") return in_case(text, std::tolower);
  if (name == "title") return titled(text, true);
  if (name == "capitalize") return titled(text, false);
  if (first == nullptr) refuse_of(name, of);
  if (name == "startswith")
    return has_any(name, *first, [&](const std::string& s) { return text.starts_with(s); });
  if (name == "endswith")
    return has_any(name, *first, [&](const std::string& s) { return text.ends_with(s); });
  if (name == "removeprefix")
    return text.starts_with(first->text()) ? text.substr(first->text().size()) : text;
  if (name == "removesuffix")
    return text.ends_with(first->text()) ? text.substr(0, text.size() - first->text().size()) : text;
  if (name == "replace" && second != nullptr) {
    const Value* most = arguments.get(2, "count");
    return replaced(text, text_of(name, *first), text_of(name, *second),
                    most == nullptr ? -1 : whole_number(*most));
  }
  if (name == "join") return joined(template_elements(*first), text, nullptr);
  if (name == "find" || name == "rfind") {  // in characters
    const std::size_t at = name == "find" ? text.find(first->text()) : text.rfind(first->text());
    if (at == std::string::npos) return std::int64_t{-1};
    return std::int64_t{std::ssize(characters(text.substr(0, at)))};
  }
  if (name == "count") {
    std::int64_t count = 0;
    const std::string& what = text_of(name, *first);
    for (std::size_t at = 0; !what.empty() && (at = text.find(what, at)) != std::string::npos;
         at += what.size())
      ++count;
    return count;
  }
  refuse_of(name, of);
}

bool is_template_function(const std::string& name) {
  return name == "raise_exception" || name == "strftime_now" || name == "range" || name == "namespace" ||
         name == "dict";
}

TemplateValue call_template_function(const std::string& name, const TemplateArguments& arguments,
                                     const std::tm& now) {
  if (name == "raise_exception")
    refuse("{}", arguments.get(0, "message") == nullptr ? "the template refuses it"
                                                        : arguments.get(0, "message")->text());
  if (name == "strftime_now")
    return Value(arguments.get(0, "format") == nullptr ? ""
                                                       : time_as(arguments.get(0, "format")->text(), now));
  if (name == "range") {
    const Value *first = arguments.get(0), *second = arguments.get(1), *third = arguments.get(2);
    if (first == nullptr) refuse("range has no end");
    const std::int64_t begin = second == nullptr ? 0 : whole_number(*first),
                       end = whole_number(second == nullptr ? *first : *second),
                       by = third == nullptr ? 1 : whole_number(*third);
    if (by == 0) refuse("range has a step of 0");
    List list;
    for (std::int64_t i = begin; by > 0 ? i < end : i > end; i += by) {
      if (list.size() >= largest_template_list) refuse("a range is too long");
      list.emplace_back(i);
    }
    return Value(list);
  }
  if (name == "namespace" || name == "dict") {
    Value::Map map;
    if (const Value* from = arguments.get(0); from != nullptr && from->map() != nullptr)
      map.items = from->map()->items;
    for (const auto& [key, value] : arguments.named) map.set(key, value);
    map.is_namespace = name == "namespace";
    return Value(std::move(map));
  }
  refuse("the function {} is not known", name);
}

}  // namespace echelon
