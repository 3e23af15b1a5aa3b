#include "text/text_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/units.h"
#include "text/template_functions.h"
#include "text/template_parse.h"
#include "text/template_texts.h"

namespace echelon {
namespace {

using Node = TemplateNode;
using Kind = Node::Kind;
using Value = TemplateValue;

constexpr std::int64_t most_steps = 4'000'000, steps_of_loop = 16;  // nodes: a template may loop in loops
constexpr int deepest_run = 1000;  // nodes within nodes, macros that call each other among them

enum class Flow { on, broken, continued };

class Run {
 public:
  Run(const std::string& where, const Value::Map& variables, const std::tm& now) : where_(where), now_(now) {
    scopes_.emplace_back();
    for (const auto& [name, value] : variables.items) scopes_.front()[name] = value;
  }

  std::string whole(const Node& root) {
    std::string out;
    statements(root, out);
    return out;
  }

 private:
  using Scope = std::map<std::string, Value>;

  // Of a node that is looked at.
  class Step {
   public:
    Step(Run& run, const Node& node) : run_(run) {
      if (++run_.steps_ > most_steps) refuse("{}: takes more than {} steps", run_.where_, most_steps);
      if (++run_.depth_ > deepest_run)
        refuse("{}: line {}: more than {} levels", run_.where_, node.line, deepest_run);
    }
    ~Step() { --run_.depth_; }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    Run& run_;
  };
  void write(std::string& out, const std::string& text) const {
    if (out.size() + text.size() > largest_template_text) refuse("{}: writes too much", where_);
    out += text;
  }
  // What is wrong inside is said with where it is.
  template <class Body>
  auto told(const Node& node, const Body& body) const {
    try {
      return body();
    } catch (const RequestError& error) {
      if (std::string(error.what()).starts_with(where_)) throw;
      refuse("{}: line {}: {}", where_, node.line, error.what());
    }
  }

  // ---- statements

  Flow statements(const Node& block, std::string& out) {
    for (const auto& child : block.children)
      if (const Flow flow = statement(*child, out); flow != Flow::on) return flow;
    return Flow::on;
  }
  Flow statement(const Node& node, std::string& out) {
    const Step step(*this, node);
    switch (node.kind) {
      case Kind::block:
        return statements(node, out);
      case Kind::raw:
        write(out, node.text);
        return Flow::on;
      case Kind::output:
        write(out, told(node, [&] { return value(*node.children.front()).text(); }));
        return Flow::on;
      case Kind::branch: {
        std::size_t i = 0;
        for (; i + 1 < node.children.size(); i += 2)
          if (value(*node.children[i]).holds()) return statements(*node.children[i + 1], out);
        return i < node.children.size() ? statements(*node.children[i], out) : Flow::on;
      }
      case Kind::loop:
        return loop(node, out);
      case Kind::assign:
        assign(node, value(*node.children.front()));
        return Flow::on;
      case Kind::assign_block: {
        std::string text;
        const Flow flow = inner(*node.children.front(), text);
        assign(node, node.children[1] ? filtered(*node.children[1], text) : Value(text));
        return flow;
      }
      case Kind::macro:
        scopes_.back()[node.text] = Value::Macro{&node, scopes_.size()};
        return Flow::on;
      case Kind::filtered: {
        std::string text;
        const Flow flow = inner(*node.children.front(), text);
        write(out, told(node, [&] { return filtered(*node.children[1], text).text(); }));
        return flow;
      }
      case Kind::break_loop:
        return Flow::broken;
      case Kind::continue_loop:
        return Flow::continued;
      default:
        check(false, "a statement of a template is an expression");
        return Flow::on;
    }
  }
  Flow inner(const Node& block, std::string& out) {
    scopes_.emplace_back();
    const Flow flow = statements(block, out);
    scopes_.pop_back();
    return flow;
  }
  void bind(const std::vector<std::string>& names, const Value& to) {
    if (names.size() == 1) {
      scopes_.back()[names.front()] = to;
      return;
    }
    const Value::List list = template_elements(to);
    if (list.size() != names.size()) refuse("{} values stand for {} names", list.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) scopes_.back()[names[i]] = list[i];
  }
  void assign(const Node& node, const Value& to) {
    told(node, [&] {
      if (!node.flag) return bind(node.names, to);
      const Value held = lookup(node.names[0]);
      Value::Map* const map = held.map_to_set();
      if (map == nullptr) refuse("{} is no namespace, whose fields alone can be set", node.names[0]);
      map->set(node.names[1], to);
    });
  }
  Flow loop(const Node& node, std::string& out) {
    Value::List list = told(node, [&] { return template_elements(value(*node.children[0])); });
    if (node.children[1]) {
      Value::List kept;
      scopes_.emplace_back();
      for (Value& one : list) {
        told(node, [&] { bind(node.names, one); });
        if (value(*node.children[1]).holds()) kept.push_back(std::move(one));
      }
      scopes_.pop_back();
      list = std::move(kept);
    }
    if (list.empty()) return node.children[3] ? inner(*node.children[3], out) : Flow::on;
    const std::int64_t size = std::ssize(list);
    for (std::int64_t i = 0; i < size; ++i) {
      const auto at = static_cast<std::size_t>(i);
      scopes_.emplace_back();
      told(node, [&] { bind(node.names, list[at]); });
      steps_ += steps_of_loop;
      if (node.flag) scopes_.back()["loop"] = about_loop(list, i);
      const Flow flow = statements(*node.children[2], out);
      scopes_.pop_back();
      if (flow == Flow::broken) break;
    }
    return Flow::on;
  }

  static Value about_loop(const Value::List& list, std::int64_t i) {
    const std::int64_t size = std::ssize(list);
    const auto at = static_cast<std::size_t>(i);
    Value::Map about;
    about.items = {{"index", i + 1},
                   {"index0", i},
                   {"first", i == 0},
                   {"last", i + 1 == size},
                   {"length", size},
                   {"revindex", size - i},
                   {"revindex0", size - i - 1},
                   {"depth", std::int64_t{1}},  // of loops that call themselves
                   {"depth0", std::int64_t{0}},
                   {"previtem", i > 0 ? list[at - 1] : Value(Undefined{"loop.previtem"})},
                   {"nextitem", i + 1 < size ? list[at + 1] : Value(Undefined{"loop.nextitem"})}};
    return about;
  }

  // ---- expressions

  Value lookup(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    if (is_template_function(name)) return Value::Macro{};
    if (name == "varargs" || name == "kwargs" || name == "caller") refuse("{} of a macro is not known", name);
    return Undefined{name};
  }
  TemplateArguments arguments(const Node& node) {
    TemplateArguments given;
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      Value one = value(*node.children[i + 1]);
      if (node.names[i].empty())
        given.list.push_back(std::move(one));
      else
        given.named.emplace_back(node.names[i], std::move(one));
    }
    return given;
  }
  // Of a text in place of the innermost value, which the tree has not.
  Value filtered(const Node& filter, const Value& text) {
    const Value of = filter.children.front() ? filtered(*filter.children.front(), text) : text;
    const TemplateArguments given = arguments(filter);
    return told(filter, [&] { return filter_template_value(filter.text, of, given); });
  }
  Value value(const Node& node) {
    const Step step(*this, node);
    switch (node.kind) {
      case Kind::constant:
        return node.constant;
      case Kind::name:
        return told(node, [&] { return lookup(node.text); });
      case Kind::list: {
        Value::List list;
        for (const auto& child : node.children) list.push_back(value(*child));
        return node.flag ? Value::tuple(std::move(list)) : Value(std::move(list));
      }
      case Kind::dictionary: {
        Value::Map map;
        for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
          const Value key = value(*node.children[i]);
          told(node, [&] { text_of("a key", key); });  // other keys are not kept
          map.set(key.text(), value(*node.children[i + 1]));
        }
        return map;
      }
      case Kind::attribute: {
        const Value of = value(*node.children.front());
        // As Python has it, whatever the keys are.
        if (of.map() != nullptr && !of.map()->is_namespace && is_method_of_mappings(node.text))
          return Value::Macro{};
        return told(node, [&] { return template_item(of, node.text); });
      }
      case Kind::item: {
        const Value of = value(*node.children[0]), index = value(*node.children[1]);
        return told(node, [&] { return template_item(of, index); });
      }
      case Kind::slice: {
        const Value of = value(*node.children[0]), from = value(*node.children[1]),
                    to = value(*node.children[2]), by = value(*node.children[3]);
        return told(node, [&] { return template_slice(of, from, to, by); });
      }
      case Kind::call:
        return call(node);
      case Kind::filter: {
        const Value of = value(*node.children.front());
        const TemplateArguments given = arguments(node);
        return told(node, [&] { return filter_template_value(node.text, of, given); });
      }
      case Kind::test: {
        const Value of = value(*node.children.front());
        const TemplateArguments given = arguments(node);
        return told(node, [&] { return test_template_value(node.text, of, given) != node.flag; });
      }
      case Kind::unary: {
        const Value of = value(*node.children.front());
        if (node.text == "not") return !of.holds();
        return told(node, [&] { return arithmetic(node.text, std::int64_t{0}, of); });
      }
      case Kind::binary: {
        const Value left = value(*node.children[0]);
        if (node.text == "and") return left.holds() ? value(*node.children[1]) : left;
        if (node.text == "or") return left.holds() ? left : value(*node.children[1]);
        const Value right = value(*node.children[1]);
        return told(node, [&] { return arithmetic(node.text, left, right); });
      }
      case Kind::compare: {
        Value left = value(*node.children.front());
        for (std::size_t i = 0; i < node.names.size(); ++i) {
          Value right = value(*node.children[i + 1]);
          const std::string& op = node.names[i];
          const bool holds = told(node, [&] {
            TemplateArguments other;
            other.list.push_back(right);
            return op == "not in" ? !test_template_value("in", left, other)
                                  : test_template_value(op, left, other);
          });
          if (!holds) return false;
          left = std::move(right);
        }
        return true;
      }
      case Kind::conditional:
        return value(*node.children[value(*node.children[0]).holds() ? 1 : 2]);
      default:
        check(false, "an expression of a template is a statement");
        return {};
    }
  }
  static Value arithmetic(const std::string& op, const Value& left, const Value& right) {
    if (op == "~") return joined(left.text(), right.text());
    if (op == "+" && left.as<std::string>() != nullptr && right.as<std::string>() != nullptr)
      return joined(left.text(), right.text());
    if (op == "+" && left.list() != nullptr && right.list() != nullptr) {
      Value::List list = *left.list();
      if (left.is_tuple() != right.is_tuple()) refuse("a list and a tuple have no +");
      list.insert(list.end(), right.list()->begin(), right.list()->end());
      if (list.size() > largest_template_list) refuse("a list is too long");
      return left.is_tuple() ? Value::tuple(std::move(list)) : Value(std::move(list));
    }
    if (op == "*" && left.as<std::string>() != nullptr && right.as<std::int64_t>() != nullptr) {
      const std::int64_t times = std::max<std::int64_t>(0, *right.as<std::int64_t>());
      const std::string& text = *left.as<std::string>();
      if (!text.empty() && times > static_cast<std::int64_t>(largest_template_text / text.size()))
        refuse("a text is too long");
      std::string out;
      for (std::int64_t i = 0; i < times && !text.empty(); ++i) out += text;
      return out;
    }
    if (!left.is_number() || !right.is_number())
      refuse("{} and {} have no {}",
             left.is_undefined() ? left.as<Undefined>()->name + ", undefined," : left.kind(),
             right.is_undefined() ? right.as<Undefined>()->name + ", undefined," : right.kind(), op);
    const double a = left.number(), b = right.number();
    const bool whole = left.as<double>() == nullptr && right.as<double>() == nullptr;
    if ((op == "/" || op == "//" || op == "%") && b == 0) refuse("a number is divided by 0");
    if (op == "/") return a / b;
    if (whole && !(op == "**" && b < 0)) return whole_result(op, whole_number(left), whole_number(right));
    if (op == "+") return a + b;
    if (op == "-") return a - b;
    if (op == "*") return a * b;
    if (op == "//") return std::floor(a / b);
    if (op == "%") return a - b * std::floor(a / b);
    if (op == "**") return std::pow(a, b);
    refuse("{} is not known of numbers", op);
  }
  // Of whole numbers, which Python has of any size.
  static Value whole_result(const std::string& op, std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    bool over = false;
    if (op == "+") over = __builtin_add_overflow(a, b, &result);
    if (op == "-") over = __builtin_sub_overflow(a, b, &result);
    if (op == "*") over = __builtin_mul_overflow(a, b, &result);
    if (op == "//" || op == "%") {
      over = b == -1 && a == std::numeric_limits<std::int64_t>::min();
      if (!over) {
        const bool less = a % b != 0 && (a % b < 0) != (b < 0);  // down, not towards 0
        result = op == "//" ? a / b - (less ? 1 : 0) : a % b + (less ? b : 0);
      }
    }
    if (op == "**") {
      result = 1;
      for (std::int64_t i = 0; i < b && !over && (std::abs(a) > 1 || i < 2); ++i)
        over = __builtin_mul_overflow(result, a, &result);
      if (a == -1 && b > 0) result = b % 2 == 0 ? 1 : -1;
    }
    if (over) refuse("{} {} {} is too large a number", a, op, b);
    return result;
  }
  static Value joined(const std::string& left, const std::string& right) {
    if (left.size() + right.size() > largest_template_text) refuse("a text is too long");
    return left + right;
  }
  Value call(const Node& node) {
    const Node& callee = *node.children.front();
    if (callee.kind == Kind::attribute) {
      const Value of = value(*callee.children.front());
      const Value* held = of.map() != nullptr ? of.map()->find(callee.text) : nullptr;
      const auto* macro = held == nullptr ? nullptr : held->as<Value::Macro>();
      if (macro != nullptr && macro->node != nullptr) return call_macro(*macro, arguments(node));
      const TemplateArguments given = arguments(node);
      return told(node, [&] { return call_template_method(callee.text, of, given); });
    }
    if (callee.kind == Kind::name) {
      const Value held = lookup(callee.text);
      const TemplateArguments given = arguments(node);
      if (const auto* macro = held.as<Value::Macro>()) {
        if (macro->node != nullptr) return call_macro(*macro, given);
        return told(node, [&] { return call_template_function(callee.text, given, now_); });
      }
      refuse("{}: line {}: {} is no function", where_, node.line, callee.text);
    }
    refuse("{}: line {}: what is called is no function", where_, node.line);
  }
  // It sees what the template has where it stands, and its parameters.
  Value call_macro(const Value::Macro& made, const TemplateArguments& given) {
    const Node& macro = *made.node;
    const std::size_t plain = macro.names.size() - (macro.children.size() - 1);
    if (given.list.size() > macro.names.size())
      refuse("{}: line {}: the macro {} is given {}; legal: up to {}", where_, macro.line, macro.text,
             counted(std::ssize(given.list), "argument"), macro.names.size());
    for (const auto& [name, value] : given.named)
      if (std::find(macro.names.begin(), macro.names.end(), name) == macro.names.end())
        refuse("{}: line {}: the macro {} has no argument {}", where_, macro.line, macro.text, name);
    const std::size_t depth = std::min(made.depth, scopes_.size());
    std::vector<Scope> outside(std::make_move_iterator(scopes_.begin() + static_cast<std::ptrdiff_t>(depth)),
                               std::make_move_iterator(scopes_.end()));
    scopes_.resize(depth);
    scopes_.emplace_back();
    for (std::size_t i = 0; i < macro.names.size(); ++i) {
      const Value* one = given.get(i, macro.names[i].c_str());
      scopes_.back()[macro.names[i]] = one != nullptr ? *one
                                       : i >= plain   ? value(*macro.children[1 + i - plain])
                                                      : Value(Undefined{macro.names[i]});
    }
    std::string out;
    statements(*macro.children.front(), out);
    scopes_.resize(depth);
    scopes_.insert(scopes_.end(), std::make_move_iterator(outside.begin()),
                   std::make_move_iterator(outside.end()));
    return out;
  }

  const std::string& where_;
  const std::tm& now_;
  std::vector<Scope> scopes_;
  std::int64_t steps_ = 0;
  int depth_ = 0;
};

}  // namespace

TextTemplate::TextTemplate(const std::string& source, std::string where)
    : where_(std::move(where)), root_(parse_template(source, where_)) {}
TextTemplate::~TextTemplate() = default;
TextTemplate::TextTemplate(TextTemplate&&) noexcept = default;
TextTemplate& TextTemplate::operator=(TextTemplate&&) noexcept = default;

std::string TextTemplate::render(const TemplateValue::Map& variables, const std::tm& now) const {
  return Run(where_, variables, now).whole(*root_);
}

}  // namespace echelon
