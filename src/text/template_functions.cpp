#include "text/template_functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <functional>

#include "base/error.h"
#include "base/units.h"
#include "text/template_texts.h"
#include "text/unicode.h"

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
  for (const auto& [key, value] : map.items) items.push_back(Value::tuple({key, value}));
  return Value::sequence(std::move(items));
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

std::vector<const TemplateValue*> template_arguments(const std::string& of, const TemplateArguments& given,
                                                     std::initializer_list<const char*> parameters) {
  std::vector<const Value*> values(parameters.size());
  std::string legal;
  for (const char* one : parameters)
    if (*one != '\0') legal += (legal.empty() ? "" : ", ") + std::string(one);
  if (given.list.size() > parameters.size())
    refuse("{} is given {}; legal: up to {}", of, counted(std::ssize(given.list), "argument"),
           parameters.size());
  for (std::size_t i = 0; i < given.list.size(); ++i) values[i] = &given.list[i];
  for (const auto& [name, value] : given.named) {
    const auto* const found = std::find_if(parameters.begin(), parameters.end(),
                                           [&name = name](const char* one) { return name == one; });
    if (found == parameters.end())
      refuse("{} has no argument {}; legal: {}", of, name, legal.empty() ? "none by name" : legal);
    const Value*& place = values[static_cast<std::size_t>(found - parameters.begin())];
    if (place != nullptr) refuse("{} is given {} twice", of, name);
    place = &value;
  }
  return values;
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

TemplateValue template_attribute(const TemplateValue& of, const TemplateValue& path,
                                 const TemplateValue* otherwise) {
  List steps;
  if (const auto* text = path.as<std::string>()) {
    const Value point(".");
    for (const Value& step : split(*text, &point, -1, false)) {
      const std::string& name = step.text();
      const bool is_place =
          !name.empty() && std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
      steps.push_back(is_place ? Value(whole_number_in(name, 10).value()) : step);
    }
  } else {
    steps.push_back(path);
  }
  Value at = of;
  for (const Value& step : steps) {
    at = template_item(at, step);
    if (at.is_undefined() && otherwise != nullptr) at = *otherwise;
  }
  return at;
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
  return is_text ? Value(joined(part, "", nullptr)) : of.is_tuple() ? Value::tuple(part) : Value(part);
}

bool test_template_value(const std::string& name, const TemplateValue& of,
                         const TemplateArguments& arguments) {
  const Value* const compared = template_arguments("the test " + name, arguments, {""})[0];
  const auto other = [&]() -> const Value& {
    if (compared == nullptr) refuse("the test {} has nothing to compare with", name);
    return *compared;
  };
  const auto alone = [&] {
    if (compared != nullptr) refuse("the test {} is given an argument; legal: none", name);
    return true;
  };
  constexpr std::array<const char*, 20> of_one{"defined", "undefined", "none",     "string",   "boolean",
                                               "true",    "false",     "number",   "integer",  "float",
                                               "mapping", "sequence",  "iterable", "callable", "odd",
                                               "even",    "upper",     "lower",    "",         ""};
  if (std::find(of_one.begin(), of_one.end(), name) != of_one.end()) alone();
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
  if (name == "sequence" || name == "iterable")  // which what is undefined is to Jinja, with nothing in it
    return of.list() != nullptr || of.map() != nullptr || is_text || of.is_undefined();
  if (name == "callable") return of.as<Value::Macro>() != nullptr;
  if (name == "odd") return whole_number(of) % 2 != 0;
  if (name == "even") return whole_number(of) % 2 == 0;
  if (name == "divisibleby")
    return whole_number(other()) != 0 && whole_number(of) % whole_number(other()) == 0;
  if (name == "eq" || name == "equalto" || name == "==") return of == other();
  if (name == "sameas") return of.is_same(other());
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
  if (name == "upper" || name == "lower") {
    const std::vector<std::string> all = characters(of.text());
    return std::any_of(all.begin(), all.end(), [](const std::string& one) { return is_cased(one); }) &&
           in_case(of.text(), name == "upper" ? LetterCase::upper : LetterCase::lower) == of.text();
  }
  refuse("the test {} is not known", name);
}

TemplateValue call_template_method(const std::string& name, const TemplateValue& of,
                                   const TemplateArguments& arguments) {
  const auto given = [&](std::initializer_list<const char*> parameters) {
    return template_arguments(name, arguments, parameters);
  };
  if (of.map() != nullptr) {
    if (name == "items") return given({}), template_items(*of.map());
    if (name == "keys") return given({}), Value::sequence(template_elements(of));
    if (name == "values") {
      given({});
      List values;
      for (const auto& [key, value] : of.map()->items) values.push_back(value);
      return Value::sequence(std::move(values));
    }
    if (name == "get") {
      const auto one = given({"", ""});
      if (one[0] == nullptr) refuse("get is told no key");
      const Value found = template_item(of, *one[0]);
      return !found.is_undefined() ? found : one[1] == nullptr ? Value(None{}) : *one[1];
    }
    refuse_of(name, of);
  }
  if (of.is_undefined()) refuse("{} is undefined", of.as<Undefined>()->name);
  const std::string& text = text_of(name, of);
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Value* const what = given({""})[0];
    if (what != nullptr && what->as<std::string>() != nullptr && what->text().empty()) return text;
    return stripped(text, what == nullptr || what->as<None>() != nullptr ? "" : text_of(name, *what),
                    name != "rstrip", name != "lstrip");
  }
  if (name == "split" || name == "rsplit") {
    const auto how = given({"sep", "maxsplit"});
    return split(text, how[0], how[1] == nullptr ? -1 : whole_number(*how[1]), name == "rsplit");
  }
  if (name == "splitlines") {
    const Value* const keep = given({"keepends"})[0];
    return split_lines(text, keep != nullptr && keep->holds());
  }
  if (name == "upper") return given({}), in_case(text, LetterCase::upper);
  if (name == "lower") return given({}), in_case(text, LetterCase::lower);
  if (name == "title") return given({}), titled(text, Words::python);
  if (name == "capitalize") return given({}), titled(text, Words::one);
  if (name == "replace") {
    const auto what = given({"", "", "count"});
    if (what[0] == nullptr || what[1] == nullptr) refuse("replace is told too little");
    return replaced(text, text_of(name, *what[0]), text_of(name, *what[1]),
                    what[2] == nullptr ? -1 : whole_number(*what[2]));
  }
  constexpr std::array<const char*, 8> of_one{"startswith", "endswith", "removeprefix", "removesuffix",
                                              "join",       "find",     "rfind",        "count"};
  if (std::find(of_one.begin(), of_one.end(), name) == of_one.end()) refuse_of(name, of);
  const Value* const first = given({""})[0];
  if (first == nullptr) refuse("{} is told too little", name);
  if (name == "startswith")
    return has_any(name, *first, [&](const std::string& s) { return text.starts_with(s); });
  if (name == "endswith")
    return has_any(name, *first, [&](const std::string& s) { return text.ends_with(s); });
  if (name == "join") return joined(template_elements(*first), text, nullptr);
  const std::string& what = text_of(name, *first);
  if (name == "removeprefix") return text.starts_with(what) ? text.substr(what.size()) : text;
  if (name == "removesuffix") return text.ends_with(what) ? text.substr(0, text.size() - what.size()) : text;
  if (name == "find" || name == "rfind") {  // in characters
    const std::size_t at = name == "find" ? text.find(what) : text.rfind(what);
    if (at == std::string::npos) return std::int64_t{-1};
    return std::int64_t{std::ssize(characters(text.substr(0, at)))};
  }
  if (what.empty()) return std::int64_t{std::ssize(characters(text)) + 1};
  std::int64_t count = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++count;
  return count;
}

bool is_method_of_mappings(const std::string& name) {
  constexpr std::array<const char*, 11> methods{"clear", "copy",    "fromkeys",   "get",    "items", "keys",
                                                "pop",   "popitem", "setdefault", "update", "values"};
  return std::find(methods.begin(), methods.end(), name) != methods.end();
}

bool is_template_function(const std::string& name) {
  return name == "raise_exception" || name == "strftime_now" || name == "range" || name == "namespace" ||
         name == "dict";
}

TemplateValue call_template_function(const std::string& name, const TemplateArguments& arguments,
                                     const std::tm& now) {
  const auto given = [&](std::initializer_list<const char*> parameters) {
    return template_arguments(name, arguments, parameters);
  };
  if (name == "raise_exception") {
    const Value* const message = given({"message"})[0];
    refuse("{}", message == nullptr ? "the template refuses it" : message->text());
  }
  if (name == "strftime_now") {
    const Value* const form = given({"format"})[0];
    if (form == nullptr) refuse("strftime_now is told no format");
    return Value(time_as(form->text(), now));
  }
  if (name == "range") {
    const auto bounds = given({"", "", ""});
    const Value *first = bounds[0], *second = bounds[1], *third = bounds[2];
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
    return Value::sequence(std::move(list));
  }
  if (name == "namespace" || name == "dict") {
    Value::Map map;
    if (arguments.list.size() > 1)
      refuse("{} is given {}; legal: up to 1", name, counted(std::ssize(arguments.list), "argument"));
    if (!arguments.list.empty()) {
      const Value::Map* const from = arguments.list.front().map();
      if (from == nullptr) refuse_of(name, arguments.list.front());
      map.items = from->items;
    }
    for (const auto& [key, value] : arguments.named) map.set(key, value);
    map.is_namespace = name == "namespace";
    return Value(std::move(map));
  }
  refuse("the function {} is not known", name);
}

}  // namespace echelon
