#include "text/template_tokens.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "base/error.h"

namespace echelon {
namespace {

using Word = TemplateToken::Kind;

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_white(char c) { return std::string_view(" \t\n\r\v\f").find(c) != std::string_view::npos; }

void append_utf8(std::string& out, unsigned code) {
  const auto byte = [&](unsigned bits) { out += static_cast<char>(bits); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      byte(0xe0 | code >> 12);
    } else {
      byte(0xf0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3f));
    }
    byte(0x80 | (code >> 6 & 0x3f));
  }
  byte(0x80 | (code & 0x3f));
}

class Lexer {
 public:
  Lexer(std::string source, const std::string& where) : source_(std::move(source)), where_(where) {
    // As Jinja: lines end with \n, and the last end of a line is none.
    std::string lines;
    for (std::size_t i = 0; i < source_.size(); ++i) {
      if (source_[i] == '\r') {
        lines += '\n';
        if (i + 1 < source_.size() && source_[i + 1] == '\n') ++i;
      } else {
        lines += source_[i];
      }
    }
    if (lines.ends_with('\n')) lines.pop_back();
    source_ = std::move(lines);
  }

  std::vector<TemplateToken> tokens() {
    bool begins_line = true;
    while (at_ < source_.size()) {
      std::size_t tag = at_;
      for (;; ++tag) {
        tag = source_.find('{', tag);
        if (tag == std::string::npos || tag + 1 >= source_.size()) tag = source_.size();
        if (tag == source_.size() || std::string_view("{%#").find(source_[tag + 1]) != std::string_view::npos)
          break;
      }
      std::string text = source_.substr(at_, tag - at_);
      const std::size_t line = line_;
      line_ += static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
      at_ = tag;
      const bool last = tag == source_.size();
      const char kind = last ? '\0' : source_[tag + 1];
      if (!last) at_ += 2;
      if (take('-')) {
        while (!text.empty() && is_white(text.back())) text.pop_back();
      } else if (!take('+') && (kind == '%' || kind == '#')) {
        const std::size_t newline = text.rfind('\n'), begin = newline == std::string::npos ? 0 : newline + 1;
        if ((begin > 0 || begins_line) && std::all_of(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                                      text.end(), [](char c) { return is_white(c); }))
          text.resize(begin);
      }
      if (!text.empty()) tokens_.push_back({Word::raw, text, line});
      begins_line = false;
      if (last) break;
      if (kind == '#')
        begins_line = comment();
      else
        begins_line = inside(kind == '{');
    }
    tokens_.push_back({Word::end, "", line_});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const { refuse("{}: line {}: {}", where_, line_, what); }
  bool take(char c) {
    if (at_ >= source_.size() || source_[at_] != c) return false;
    ++at_;
    return true;
  }
  void skip_spaces() {
    while (at_ < source_.size() && is_white(source_[at_])) line_ += source_[at_++] == '\n';
  }
  // Behind a tag; `sign`: what stands before its end. Whether a line begins then.
  bool behind(char sign, bool trims) {
    if (sign == '-') {
      skip_spaces();
    } else if (sign != '+' && trims && take('\n')) {
      ++line_;
      return true;
    }
    return false;
  }
  bool comment() {
    const std::size_t end = source_.find("#}", at_);
    if (end == std::string::npos) wrong("a comment does not end");
    line_ += static_cast<std::size_t>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                                 source_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
    const char sign = end > at_ ? source_[end - 1] : '\0';
    at_ = end + 2;
    return behind(sign, true);
  }
  // {{ or {%, up to its end. Whether a line begins behind it.
  bool inside(bool output) {
    const std::string_view end = output ? "}}" : "%}";
    tokens_.push_back({output ? Word::output_begin : Word::tag_begin, "", line_});
    std::string brackets;
    for (;;) {
      skip_spaces();
      if (at_ >= source_.size()) wrong(output ? "{{ has no }}" : "{% has no %}");
      const std::string_view rest = std::string_view(source_).substr(at_);
      const bool signed_end =
          (rest[0] == '-' || (rest[0] == '+' && !output)) && rest.substr(1).starts_with(end);
      if (brackets.empty() && (signed_end || rest.starts_with(end))) {
        const char sign = signed_end ? rest[0] : '\0';
        at_ += signed_end ? 3 : 2;
        tokens_.push_back({output ? Word::output_end : Word::tag_end, "", line_});
        return behind(sign, !output);
      }
      next(brackets);
    }
  }
  void next(std::string& brackets) {
    const char c = source_[at_];
    if (c == '\'' || c == '"') return text(c);
    if (is_digit(c)) return number();
    if (is_letter(c)) {
      const std::size_t begin = at_;
      while (at_ < source_.size() && (is_letter(source_[at_]) || is_digit(source_[at_]))) ++at_;
      tokens_.push_back({Word::name, source_.substr(begin, at_ - begin), line_});
      return;
    }
    constexpr std::array<std::string_view, 6> pairs{"==", "!=", "<=", ">=", "//", "**"};
    const std::string_view rest = std::string_view(source_).substr(at_);
    const auto pair =
        std::find_if(pairs.begin(), pairs.end(), [&](std::string_view one) { return rest.starts_with(one); });
    const std::string symbol(pair != pairs.end() ? *pair : rest.substr(0, 1));
    if (std::string_view("+-*/%~<>=.,:|()[]{}!").find(c) == std::string_view::npos || symbol == "!")
      wrong(fmt::format("{} is not understood", symbol));
    if (std::string_view("([{").find(c) != std::string_view::npos) brackets += c;
    if (std::string_view(")]}").find(c) != std::string_view::npos) {
      const char opens = c == ')' ? '(' : c == ']' ? '[' : '{';
      if (brackets.empty() || brackets.back() != opens) wrong(fmt::format("{} closes nothing", c));
      brackets.pop_back();
    }
    at_ += symbol.size();
    tokens_.push_back({Word::symbol, symbol, line_});
  }
  void number() {
    const std::size_t begin = at_;
    const auto digits = [&] {
      while (at_ < source_.size() && (is_digit(source_[at_]) || source_[at_] == '_')) ++at_;
    };
    digits();
    bool real = false;
    if (at_ + 1 < source_.size() && source_[at_] == '.' && is_digit(source_[at_ + 1])) {
      real = true;
      ++at_;
      digits();
    }
    if (at_ + 1 < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
      const std::size_t sign = source_[at_ + 1] == '-' || source_[at_ + 1] == '+' ? 1 : 0;
      if (at_ + 1 + sign < source_.size() && is_digit(source_[at_ + 1 + sign])) {
        real = true;
        at_ += 1 + sign;
        digits();
      }
    }
    std::string text = source_.substr(begin, at_ - begin);
    std::erase(text, '_');
    tokens_.push_back({real ? Word::real : Word::integer, text, line_});
  }
  void text(char quote) {
    const std::size_t line = line_;
    std::string out;
    for (++at_;; ++at_) {
      if (at_ >= source_.size()) wrong("a text has no end");
      const char c = source_[at_];
      if (c == quote) break;
      if (c == '\n') ++line_;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (++at_ >= source_.size()) wrong("a text has no end");
      escape(out);
    }
    ++at_;
    tokens_.push_back({Word::text, out, line});
  }
  // Python's.
  void escape(std::string& out) {
    const char c = source_[at_];
    constexpr std::string_view names = "ntrabfv0\\'\"", values{"\n\t\r\a\b\f\v\0\\'\"", 11};
    if (const auto at = names.find(c); at != std::string_view::npos) {
      out += values[at];
      return;
    }
    if (c == '\n') return;
    const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0) {
      out += {'\\', c};
      return;
    }
    unsigned code = 0;
    for (std::size_t i = 0; i < digits; ++i) {
      if (++at_ >= source_.size() || std::isxdigit(static_cast<unsigned char>(source_[at_])) == 0)
        wrong(fmt::format("\\{} has {} digits", c, digits));
      const char digit = source_[at_];
      code = code * 16 + static_cast<unsigned>(is_digit(digit) ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) wrong("a text has a character that is none");
    append_utf8(out, code);
  }

  std::string source_;
  const std::string& where_;
  std::size_t at_ = 0, line_ = 1;
  std::vector<TemplateToken> tokens_;
};

}  // namespace

std::vector<TemplateToken> template_tokens(const std::string& source, const std::string& where) {
  return Lexer(source, where).tokens();
}

}  // namespace echelon
