// Jinja's grammar (its parser.py), by recursive descent.
#include "text/template_parse.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <string_view>

#include "base/error.h"
#include "text/template_tokens.h"

namespace echelon {
namespace {

using Node = TemplateNode;
using NodePtr = std::unique_ptr<Node>;
using Kind = Node::Kind;
using Word = TemplateToken::Kind;

constexpr int deepest = 200;  // of nesting, and of what hangs in a chain: the stack is finite

class Parser {
 public:
  Parser(std::vector<TemplateToken> tokens, const std::string& where)
      : tokens_(std::move(tokens)), where_(where) {}

  NodePtr whole() {
    NodePtr root = block({});
    if (now().kind != Word::end) wrong("a tag ends nothing");
    return root;
  }

 private:
  // Of a level of nesting.
  class Depth {
   public:
    explicit Depth(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > deepest) parser_.wrong(fmt::format("more than {} levels", deepest));
    }
    ~Depth() { --parser_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    Parser& parser_;
  };

  const TemplateToken& now() const { return tokens_[at_]; }
  const TemplateToken& behind() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  [[noreturn]] void wrong(const std::string& what) const {
    refuse("{}: line {}: {}", where_, now().line, what);
  }
  bool is(Word kind, std::string_view text) const { return now().kind == kind && now().text == text; }
  bool is_symbol(std::string_view text) const { return is(Word::symbol, text); }
  bool is_name(std::string_view text) const { return is(Word::name, text); }
  bool take(Word kind, std::string_view text) {
    if (!is(kind, text)) return false;
    ++at_;
    return true;
  }
  bool take_symbol(std::string_view text) { return take(Word::symbol, text); }
  bool take_name(std::string_view text) { return take(Word::name, text); }
  void need(std::string_view symbol) {
    if (!take_symbol(symbol)) wrong(fmt::format("\"{}\" stands where {} should", shown(), symbol));
  }
  std::string need_name() {
    if (now().kind != Word::name) wrong(fmt::format("\"{}\" stands where a name should", shown()));
    return tokens_[at_++].text;
  }
  void need_end() {
    if (now().kind != Word::tag_end) wrong(fmt::format("\"{}\" stands where %}} should", shown()));
    ++at_;
  }
  std::string shown() const {
    switch (now().kind) {
      case Word::end:
        return "the end";
      case Word::tag_end:
        return "%}";
      case Word::output_end:
        return "}}";
      default:
        return now().text;
    }
  }
  NodePtr node(Kind kind, std::string text = "") const {
    auto made = std::make_unique<Node>();
    made->kind = kind;
    made->text = std::move(text);
    made->line = now().line;
    return made;
  }
  template <class... Children>
  NodePtr node(Kind kind, std::string text, Children... children) const {
    NodePtr made = node(kind, std::move(text));
    (adopt(*made, std::move(children)), ...);
    return made;
  }
  void adopt(Node& parent, NodePtr child) const {
    if (child) parent.height = std::max(parent.height, child->height + 1);
    if (parent.height > deepest) wrong(fmt::format("more than {} levels", deepest));
    parent.children.push_back(std::move(child));
  }

  // ---- statements

  // Up to the tag of one of these names, which is next then; or to the end, where there are none.
  NodePtr block(std::initializer_list<std::string_view> ends) {
    const Depth depth(*this);
    NodePtr made = node(Kind::block);
    for (;;) {
      switch (now().kind) {
        case Word::end:
          if (ends.size() > 0) wrong(fmt::format("there is no {}", fmt::join(ends, ", ")));
          return made;
        case Word::raw:
          adopt(*made, node(Kind::raw, now().text));
          ++at_;
          break;
        case Word::output_begin: {
          ++at_;
          NodePtr out = node(Kind::output);
          adopt(*out, tuple());
          if (now().kind != Word::output_end) wrong(fmt::format("\"{}\" stands where }}}} should", shown()));
          ++at_;
          adopt(*made, std::move(out));
          break;
        }
        default: {
          if (std::find(ends.begin(), ends.end(), behind().text) != ends.end()) return made;
          ++at_;
          if (NodePtr one = statement()) adopt(*made, std::move(one));
        }
      }
    }
  }
  // The tag that block() stopped at.
  std::string end_tag() {
    ++at_;
    return need_name();
  }

  NodePtr statement() {
    const std::string name = need_name();
    if (name == "if") return branch();
    if (name == "for") return loop();
    if (name == "set") return assign();
    if (name == "macro") return macro();
    if (name == "filter") return filtered();
    if (name == "generation") {  // what transformers marks as said by the assistant
      need_end();
      NodePtr body = block({"endgeneration"});
      end_tag();
      need_end();
      return body;
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) wrong(name + " stands in no loop");
      NodePtr made = node(name == "break" ? Kind::break_loop : Kind::continue_loop);
      need_end();
      return made;
    }
    wrong(fmt::format(
        "the tag {} is not known; legal: if, for, set, macro, filter, generation, break, continue", name));
  }
  NodePtr branch() {
    NodePtr made = node(Kind::branch);
    for (;;) {
      adopt(*made, tuple());
      need_end();
      adopt(*made, block({"elif", "else", "endif"}));
      const std::string tag = end_tag();
      if (tag == "elif") continue;
      need_end();
      if (tag == "else") {
        adopt(*made, block({"endif"}));
        end_tag();
        need_end();
      }
      return made;
    }
  }
  std::vector<std::string> targets() {
    const bool bracket = take_symbol("(");
    std::vector<std::string> names{need_name()};
    while (take_symbol(",")) names.push_back(need_name());
    if (bracket) need(")");
    return names;
  }
  NodePtr loop() {
    NodePtr made = node(Kind::loop);
    made->names = targets();
    if (!take_name("in")) wrong(fmt::format("\"{}\" stands where in should", shown()));
    adopt(*made, tuple(false));
    adopt(*made, take_name("if") ? expression() : nullptr);
    if (is_name("recursive")) wrong("recursive loops are not known");
    need_end();
    ++loops_;
    const int before = about_loops_;
    adopt(*made, block({"else", "endfor"}));
    made->flag = about_loops_ != before;
    --loops_;
    const bool has_else = end_tag() == "else";
    need_end();
    adopt(*made, has_else ? block({"endfor"}) : nullptr);
    if (!has_else) return made;
    end_tag();
    need_end();
    return made;
  }
  NodePtr assign() {
    NodePtr made = node(Kind::assign);
    made->names.push_back(need_name());
    if (take_symbol(".")) {
      made->names.push_back(need_name());
      made->flag = true;
    } else {
      while (take_symbol(",")) made->names.push_back(need_name());
    }
    if (take_symbol("=")) {
      adopt(*made, tuple());
      need_end();
      return made;
    }
    made->kind = Kind::assign_block;
    NodePtr filters = is_symbol("|") ? filters_of(nullptr) : nullptr;
    need_end();
    adopt(*made, block({"endset"}));
    adopt(*made, std::move(filters));
    end_tag();
    need_end();
    return made;
  }
  NodePtr macro() {
    NodePtr made = node(Kind::macro, need_name());
    std::vector<NodePtr> otherwise;
    need("(");
    while (!take_symbol(")")) {
      made->names.push_back(need_name());
      if (take_symbol("="))
        otherwise.push_back(expression());
      else if (!otherwise.empty())
        wrong("a parameter without a value stands behind one with it");
      if (!is_symbol(")")) need(",");
    }
    need_end();
    const int loops = std::exchange(loops_, 0);
    adopt(*made, block({"endmacro"}));
    loops_ = loops;
    for (NodePtr& one : otherwise) adopt(*made, std::move(one));
    end_tag();
    if (now().kind == Word::name) ++at_;
    need_end();
    return made;
  }
  NodePtr filtered() {
    NodePtr made = node(Kind::filtered);
    NodePtr filters = filter_of(nullptr);
    while (is_symbol("|")) filters = filters_of(std::move(filters));
    need_end();
    adopt(*made, block({"endfilter"}));
    adopt(*made, std::move(filters));
    end_tag();
    need_end();
    return made;
  }

  // ---- expressions

  // Several with commas between them are a tuple.
  NodePtr tuple(bool conditional = true) {
    NodePtr first = conditional ? expression() : either();
    if (!is_symbol(",")) return first;
    NodePtr made = node(Kind::list);
    made->flag = true;
    adopt(*made, std::move(first));
    while (take_symbol(",")) {
      if (now().kind == Word::tag_end || now().kind == Word::output_end || is_symbol(")")) break;
      adopt(*made, conditional ? expression() : either());
    }
    return made;
  }
  NodePtr expression() {
    const Depth depth(*this);
    NodePtr value = either();
    while (take_name("if")) {
      NodePtr condition = either();
      NodePtr other = take_name("else") ? expression() : node(Kind::name, "");
      value = node(Kind::conditional, "", std::move(condition), std::move(value), std::move(other));
    }
    return value;
  }
  NodePtr either() {
    NodePtr left = both();
    while (take_name("or")) left = node(Kind::binary, "or", std::move(left), both());
    return left;
  }
  NodePtr both() {
    NodePtr left = negation();
    while (take_name("and")) left = node(Kind::binary, "and", std::move(left), negation());
    return left;
  }
  NodePtr negation() {
    const Depth depth(*this);
    if (is_name("not") && behind().text != "in") {
      ++at_;
      return node(Kind::unary, "not", negation());
    }
    return comparison();
  }
  NodePtr comparison() {
    NodePtr left = sum();
    NodePtr made;
    for (;;) {
      std::string op;
      if (now().kind == Word::symbol)
        for (const char* one : {"==", "!=", "<", "<=", ">", ">="})
          if (now().text == one) op = one;
      if (is_name("in")) op = "in";
      if (is_name("not") && behind().text == "in") op = "not in";
      if (op.empty()) return made ? std::move(made) : std::move(left);
      at_ += op == "not in" ? 2 : 1;
      if (!made) made = node(Kind::compare, "", std::move(left));
      made->names.push_back(op);
      adopt(*made, sum());
    }
  }
  NodePtr chain(std::initializer_list<const char*> symbols, NodePtr (Parser::*part)()) {
    NodePtr left = (this->*part)();
    for (;;) {
      const auto* const found =
          std::find_if(symbols.begin(), symbols.end(), [this](const char* one) { return is_symbol(one); });
      if (found == symbols.end()) return left;
      ++at_;
      left = node(Kind::binary, *found, std::move(left), (this->*part)());
    }
  }
  NodePtr sum() { return chain({"+", "-"}, &Parser::joined); }
  NodePtr joined() { return chain({"~"}, &Parser::product); }
  NodePtr product() { return chain({"*", "//", "/", "%"}, &Parser::power); }
  NodePtr power() { return chain({"**"}, &Parser::filtered_unary); }
  NodePtr filtered_unary() { return unary(true); }
  NodePtr unary(bool filters) {
    const Depth depth(*this);
    NodePtr made;
    if (is_symbol("-") || is_symbol("+")) {
      const std::string sign = tokens_[at_++].text;
      made = node(Kind::unary, sign, unary(false));
    } else {
      made = primary();
    }
    made = postfix(std::move(made));
    for (;;) {
      if (filters && is_symbol("|"))
        made = filters_of(std::move(made));
      else if (filters && is_name("is"))
        made = test_of(std::move(made));
      else if (filters && is_symbol("("))
        made = call_of(std::move(made));
      else
        return made;
    }
  }
  NodePtr constant(TemplateValue value) {
    NodePtr made = node(Kind::constant);
    made->constant = std::move(value);
    return made;
  }
  NodePtr primary() {
    const TemplateToken token = now();
    if (token.kind == Word::name) {
      ++at_;
      const std::string& name = token.text;
      about_loops_ += name == "loop";
      if (name == "true" || name == "True") return constant(true);
      if (name == "false" || name == "False") return constant(false);
      if (name == "none" || name == "None") return constant(None{});
      return node(Kind::name, name);
    }
    if (token.kind == Word::text) {
      std::string text;
      while (now().kind == Word::text) text += tokens_[at_++].text;
      return constant(text);
    }
    if (token.kind == Word::integer || token.kind == Word::real) {
      ++at_;
      const char *begin = token.text.data(), *end = begin + token.text.size();
      std::int64_t whole = 0;
      double real = 0;
      const auto read = token.kind == Word::integer ? std::from_chars(begin, end, whole)
                                                    : std::from_chars(begin, end, real);
      if (read.ec != std::errc{} || read.ptr != end) wrong(fmt::format("{} is no number", token.text));
      return token.kind == Word::integer ? constant(whole) : constant(real);
    }
    if (take_symbol("(")) {
      if (take_symbol(")")) {
        NodePtr none = node(Kind::list);
        none->flag = true;
        return none;
      }
      NodePtr made = tuple();
      need(")");
      return made;
    }
    if (take_symbol("[")) {
      NodePtr made = node(Kind::list);
      while (!take_symbol("]")) {
        adopt(*made, expression());
        if (!is_symbol("]")) need(",");
      }
      return made;
    }
    if (take_symbol("{")) {
      NodePtr made = node(Kind::dictionary);
      while (!take_symbol("}")) {
        adopt(*made, expression());
        need(":");
        adopt(*made, expression());
        if (!is_symbol("}")) need(",");
      }
      return made;
    }
    wrong(fmt::format("\"{}\" stands where a value should", shown()));
  }
  NodePtr postfix(NodePtr of) {
    for (;;) {
      if (take_symbol(".")) {
        if (now().kind == Word::integer) {
          const std::string digits = tokens_[at_++].text;
          of = node(Kind::item, "", std::move(of), constant(std::int64_t{std::stoll(digits.substr(0, 9))}));
        } else {
          std::string name = need_name();
          of = node(Kind::attribute, std::move(name), std::move(of));
        }
      } else if (take_symbol("[")) {
        of = subscript(std::move(of));
      } else if (is_symbol("(")) {
        of = call_of(std::move(of));
      } else {
        return of;
      }
    }
  }
  NodePtr subscript(NodePtr of) {
    NodePtr parts[3];
    bool sliced = false;
    for (int i = 0; i < 3; ++i) {
      if (!is_symbol(":") && !is_symbol("]")) parts[i] = expression();
      if (i == 2 || !take_symbol(":")) break;
      sliced = true;
    }
    need("]");
    if (!sliced) {
      if (!parts[0]) wrong("[] has no index");
      return node(Kind::item, "", std::move(of), std::move(parts[0]));
    }
    for (NodePtr& part : parts)
      if (!part) part = constant(None{});
    return node(Kind::slice, "", std::move(of), std::move(parts[0]), std::move(parts[1]),
                std::move(parts[2]));
  }
  void arguments(Node& of) {
    need("(");
    while (!take_symbol(")")) {
      std::string name;
      if (now().kind == Word::name && behind().kind == Word::symbol && behind().text == "=") {
        name = need_name();
        ++at_;
      } else if (!of.names.empty() && !of.names.back().empty()) {
        wrong("an argument without a name stands behind one with it");
      }
      of.names.push_back(std::move(name));
      adopt(of, expression());
      if (!is_symbol(")")) need(",");
    }
  }
  NodePtr call_of(NodePtr of) {
    NodePtr made = node(Kind::call, "", std::move(of));
    arguments(*made);
    return made;
  }
  NodePtr filter_of(NodePtr of) {
    NodePtr made = node(Kind::filter, need_name());
    adopt(*made, std::move(of));
    if (is_symbol("(")) arguments(*made);
    return made;
  }
  NodePtr filters_of(NodePtr of) {
    while (take_symbol("|")) of = filter_of(std::move(of));
    return of;
  }
  NodePtr test_of(NodePtr of) {
    ++at_;
    const bool negated = take_name("not");
    NodePtr made = node(Kind::test, need_name());
    made->flag = negated;
    adopt(*made, std::move(of));
    const Word kind = now().kind;
    if (is_symbol("(")) {
      arguments(*made);
    } else if (kind == Word::text || kind == Word::integer || kind == Word::real || is_symbol("[") ||
               is_symbol("{") ||
               (kind == Word::name && !is_name("else") && !is_name("or") && !is_name("and") &&
                !is_name("is") && !is_name("if"))) {
      made->names.emplace_back();
      adopt(*made, postfix(primary()));
    }
    return made;
  }

  std::vector<TemplateToken> tokens_;
  const std::string& where_;
  std::size_t at_ = 0;
  int depth_ = 0, loops_ = 0, about_loops_ = 0;
};

}  // namespace

std::unique_ptr<TemplateNode> parse_template(const std::string& source, const std::string& where) {
  return Parser(template_tokens(source, where), where).whole();
}

}  // namespace echelon
