// Jinja's filters.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "text/template_functions.h"
#include "text/template_texts.h"
#include "text/unicode.h"

namespace echelon {
namespace {

using Value = TemplateValue;
using List = Value::List;
using Given = std::vector<const Value*>;

bool holds(const Value* value) { return value != nullptr && value->holds(); }
bool is_given(const Value* value) { return value != nullptr && value->as<None>() == nullptr; }

// What is behind the first `count` arguments, for a filter or a test.
TemplateArguments without_first(const TemplateArguments& arguments, std::size_t count) {
  TemplateArguments rest;
  for (std::size_t i = count; i < arguments.list.size(); ++i) rest.list.push_back(arguments.list[i]);
  rest.named = arguments.named;
  return rest;
}

// The elements that a test holds of (select, reject), or holds of an attribute of (selectattr, rejectattr).
Value chosen(const std::string& name, const Value& of, const TemplateArguments& arguments) {
  const bool by_attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  const std::size_t at = by_attribute ? 1 : 0;
  if (by_attribute && arguments.list.empty()) refuse("{} names no attribute", name);
  const bool has_test = at < arguments.list.size();
  const std::string test = has_test ? text_of(name, arguments.list[at]) : std::string();
  const TemplateArguments rest = without_first(arguments, at + 1);
  if (!has_test && !rest.named.empty()) refuse("{} has no argument {}", name, rest.named.front().first);
  List list;
  for (const Value& one : template_elements(of)) {
    const Value tested = by_attribute ? template_attribute(one, arguments.list.front()) : one;
    if ((has_test ? test_template_value(test, tested, rest) : tested.holds()) == wanted) list.push_back(one);
  }
  return Value::sequence(std::move(list));
}

Value mapped(const Value& of, const TemplateArguments& arguments) {
  List list;
  if (!arguments.list.empty()) {
    const std::string& filter = text_of("map", arguments.list.front());
    const TemplateArguments rest = without_first(arguments, 1);
    for (const Value& one : template_elements(of)) list.push_back(filter_template_value(filter, one, rest));
  } else {
    const Given how = template_arguments("map", arguments, {"attribute", "default"});
    if (how[0] == nullptr) refuse("map names neither a filter nor an attribute");
    for (const Value& one : template_elements(of))
      list.push_back(template_attribute(one, *how[0], is_given(how[1]) ? how[1] : nullptr));
  }
  return Value::sequence(std::move(list));
}

Value to_whole(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("int", arguments, {"default", "base"});
  const Value otherwise = how[0] == nullptr ? Value(std::int64_t{0}) : *how[0];
  double value = of.number();
  if (const auto* text = of.as<std::string>()) {
    if (const auto whole = whole_number_in(*text, how[1] == nullptr ? 10 : whole_number(*how[1])))
      return *whole;
    const auto real = number_in(*text);
    if (!real) return otherwise;
    value = *real;
  } else if (!of.is_number()) {
    return otherwise;
  } else if (of.as<double>() == nullptr) {
    return whole_number(of);
  }
  if (!std::isfinite(value)) return otherwise;
  if (std::abs(value) >= 9.2e18) refuse("{} is too large a number", of.text());
  return static_cast<std::int64_t>(value);
}

Value to_real(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("float", arguments, {"default"});
  if (of.is_number()) return of.number();
  const auto* text = of.as<std::string>();
  const auto read = text == nullptr ? std::nullopt : number_in(*text);
  return read ? Value(*read) : how[0] == nullptr ? Value(0.0) : *how[0];
}

Value rounded(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("round", arguments, {"precision", "method"});
  if (!of.is_number()) refuse_of("round", of);
  const std::string method = how[1] == nullptr ? "common" : text_of("round", *how[1]);
  const std::int64_t places = how[0] == nullptr ? 0 : whole_number(*how[0]);
  if (method != "common" && method != "ceil" && method != "floor")
    refuse("round: method {} is not known; legal: common, ceil, floor", method);
  if (places < -300 || places > 300) refuse("round: precision {} is not known; legal: -300 to 300", places);
  const double value = of.number();
  if (method != "common") {
    const double scale = std::pow(10.0, static_cast<double>(places));
    return (method == "ceil" ? std::ceil(value * scale) : std::floor(value * scale)) / scale;
  }
  if (of.as<double>() == nullptr && places >= 0) return whole_number(of);
  if (of.as<double>() == nullptr || places < 0)
    refuse("round: precision {} is not known of {}", places, of.text());
  if (!std::isfinite(value)) return value;
  // The decimal number that is nearest, to even between two, as Python's.
  std::string text(400 + static_cast<std::size_t>(places), ' ');
  text.resize(static_cast<std::size_t>(
      std::snprintf(text.data(), text.size(), "%.*f", static_cast<int>(places), value)));
  return number_in(text).value();
}

std::string indented(const std::string& text, const TemplateArguments& arguments) {
  const Given how = template_arguments("indent", arguments, {"width", "first", "blank"});
  const std::string by =
      how[0] == nullptr ? std::string(4, ' ')
      : how[0]->as<std::string>() != nullptr
          ? how[0]->text()
          : std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(whole_number(*how[0]), 0, 1 << 10)),
                        ' ');
  const List lines = split_lines(text + "\n", false);
  std::string out = holds(how[1]) ? by : "";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i].text();
    if (i > 0) out += "\n" + (holds(how[2]) || !line.empty() ? by : "");
    out += line;
    if (out.size() > largest_template_text) refuse("a text is too long");
  }
  return out;
}

// As transformers has it: Python's json.dumps(), with characters as they are.
std::string to_json(const Value& of, const TemplateArguments& arguments) {
  const Given how =
      template_arguments("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  if (of.is_undefined()) refuse("{} is undefined", of.as<Undefined>()->name);
  TemplateJson form;
  form.ascii = holds(how[0]);
  form.sorted = holds(how[3]);
  form.lines = is_given(how[1]);
  if (form.lines) {
    form.between = ",";
    form.indent =
        how[1]->as<std::string>() != nullptr
            ? how[1]->text()
            : std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(whole_number(*how[1]), 0, 64)),
                          ' ');
  }
  if (is_given(how[2])) {
    const List two = template_elements(*how[2]);
    if (two.size() != 2) refuse("tojson: separators are {} values; legal: two texts", two.size());
    form.between = text_of("a separator", two[0]);
    form.behind_key = text_of("a separator", two[1]);
  }
  return of.json(form);
}

// What is compared of elements: of their attributes, where some are named, without the case of letters.
List keys_of(const Value& one, const Value* attribute, bool case_matters) {
  List keys;
  if (!is_given(attribute)) {
    keys.push_back(one);
  } else if (const auto* names = attribute->as<std::string>()) {
    const Value comma(",");
    for (const Value& name : split(*names, &comma, -1, false)) keys.push_back(template_attribute(one, name));
  } else {
    keys.push_back(template_attribute(one, *attribute));
  }
  for (Value& key : keys)
    if (const auto* text = key.as<std::string>(); text != nullptr && !case_matters)
      key = in_case(*text, LetterCase::lower);
  return keys;
}

bool less_by(const List& a, const List& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(a[i] == b[i])) return template_less(a[i], b[i]);
  return false;
}

// Those with the same keys stay in their order, the other way round too.
List sorted_by(const List& list, bool reverse, const std::vector<List>& keys) {
  std::vector<std::size_t> order(list.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return reverse ? less_by(keys[b], keys[a]) : less_by(keys[a], keys[b]);
  });
  List sorted;
  for (const std::size_t i : order) sorted.push_back(list[i]);
  return sorted;
}

Value sorted(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  const List list = template_elements(of);
  std::vector<List> keys;
  for (const Value& one : list) keys.push_back(keys_of(one, how[2], holds(how[1])));
  return sorted_by(list, holds(how[0]), keys);
}

Value sorted_items(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  if (of.map() == nullptr) refuse_of("dictsort", of);
  const std::string by = how[1] == nullptr ? "key" : text_of("dictsort", *how[1]);
  if (by != "key" && by != "value") refuse("dictsort: by {} is not known; legal: key, value", by);
  const List items = template_elements(template_items(*of.map()));
  std::vector<List> keys;
  for (const auto& [key, value] : of.map()->items)
    keys.push_back(keys_of(by == "key" ? Value(key) : value, nullptr, holds(how[0])));
  return sorted_by(items, holds(how[2]), keys);
}

Value unique(const Value& of, const TemplateArguments& arguments) {
  const Given how = template_arguments("unique", arguments, {"case_sensitive", "attribute"});
  List list;
  std::vector<List> seen;
  for (const Value& one : template_elements(of)) {
    List keys = keys_of(one, how[1], holds(how[0]));
    if (std::find(seen.begin(), seen.end(), keys) != seen.end()) continue;
    seen.push_back(std::move(keys));
    list.push_back(one);
  }
  return Value::sequence(std::move(list));
}

}  // namespace

TemplateValue filter_template_value(const std::string& name, const TemplateValue& of,
                                    const TemplateArguments& arguments) {
  const auto given = [&](std::initializer_list<const char*> parameters) {
    return template_arguments(name, arguments, parameters);
  };
  if (name == "default" || name == "d") {
    const Given how = given({"default_value", "boolean"});
    const bool taken = of.is_undefined() || (holds(how[1]) && !of.holds());
    return !taken ? of : how[0] == nullptr ? Value("") : *how[0];
  }
  if (name == "tojson") return to_json(of, arguments);
  if (name == "indent") return indented(of.text(), arguments);
  if (name == "sort") return sorted(of, arguments);
  if (name == "unique") return unique(of, arguments);
  if (name == "dictsort") return sorted_items(of, arguments);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return chosen(name, of, arguments);
  if (name == "map") return mapped(of, arguments);
  if (name == "int") return to_whole(of, arguments);
  if (name == "float") return to_real(of, arguments);
  if (name == "round") return rounded(of, arguments);
  if (name == "trim") {
    const Value* const what = given({"chars"})[0];
    if (is_given(what) && what->text().empty()) return of.text();
    return stripped(of.text(), is_given(what) ? what->text() : "", true, true);
  }
  if (name == "replace") {
    const Given what = given({"old", "new", "count"});
    if (what[0] == nullptr || what[1] == nullptr) refuse("replace is told too little");
    return replaced(of.text(), what[0]->text(), what[1]->text(),
                    is_given(what[2]) ? whole_number(*what[2]) : -1);
  }
  if (name == "join") {
    const Given how = given({"d", "attribute"});
    return joined(template_elements(of), how[0] == nullptr ? "" : how[0]->text(),
                  is_given(how[1]) ? how[1] : nullptr);
  }
  constexpr std::array<const char*, 14> alone{"string", "safe",    "length",     "count", "upper",
                                              "lower",  "title",   "capitalize", "list",  "first",
                                              "last",   "reverse", "items",      "abs"};
  if (std::find(alone.begin(), alone.end(), name) == alone.end()) refuse("the filter {} is not known", name);
  given({});
  if (name == "string") return of.text();
  if (name == "safe") return of;
  if (name == "length" || name == "count") {
    if (of.map() != nullptr) return std::int64_t{std::ssize(of.map()->items)};
    if (of.is_number() || of.as<None>() != nullptr) refuse_of(name, of);
    return std::int64_t{std::ssize(template_elements(of))};
  }
  if (name == "upper") return in_case(of.text(), LetterCase::upper);
  if (name == "lower") return in_case(of.text(), LetterCase::lower);
  if (name == "title") return titled(of.text(), Words::jinja);
  if (name == "capitalize") return titled(of.text(), Words::one);
  if (name == "list") return template_elements(of);
  if (name == "first" || name == "last") {
    const List list = template_elements(of);
    return list.empty() ? Value(Undefined{name}) : name == "first" ? list.front() : list.back();
  }
  if (name == "reverse") {
    List list = template_elements(of);
    std::reverse(list.begin(), list.end());
    return of.as<std::string>() != nullptr ? Value(joined(list, "", nullptr))
                                           : Value::sequence(std::move(list));
  }
  if (name == "items") {
    if (of.is_undefined()) return Value::sequence({});
    if (of.map() == nullptr) refuse_of(name, of);
    return template_items(*of.map());
  }
  if (!of.is_number()) refuse_of(name, of);
  if (const double* real = of.as<double>()) return std::abs(*real);
  if (whole_number(of) == std::numeric_limits<std::int64_t>::min())
    refuse("{} is too large a number", of.text());
  return std::abs(whole_number(of));
}

}  // namespace echelon
