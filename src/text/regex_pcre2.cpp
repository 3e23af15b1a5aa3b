#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "text/regex.h"
#include "text/unicode.h"

namespace echelon {
namespace {

// Between Oniguruma and PCRE2 these differ: \s in one character, \w in marks, \h in everything, a script in
// what several scripts share, and what [:name:] of some names is.
constexpr std::string_view space_class = R"(\t-\r\x{85}\p{Z})";
constexpr std::string_view word_class =
    R"(\p{L}\p{M}\p{Nl}\p{Nd}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
// Of \w that is in no class.
constexpr std::string_view more_words = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr std::pair<std::string_view, std::string_view> named_classes[] = {
    {"alpha", R"(\p{Alphabetic})"}, {"alnum", R"(\p{Alphabetic}\p{Nd})"},
    {"lower", R"(\p{Lowercase})"},  {"upper", R"(\p{Uppercase})"},
    {"punct", R"(\p{P}\p{S})"},     {"digit", R"(\p{Nd})"},
    {"space", space_class},         {"word", word_class}};

// \p{Han}, \p{^Han}, \P{Letter} from the brace on, of which `end` is the last: as PCRE2 says it. Since 10.40
// it takes a script with what others share with it, unless sc: says otherwise.
std::string property(std::string_view text) {
  const bool inverted = text.size() > 2 && text[1] == '^';
  const std::string name(text.substr(inverted ? 2 : 1, text.size() - (inverted ? 3 : 2)));
  const bool shares = PCRE2_MAJOR > 10 || PCRE2_MINOR >= 40;
  const std::string meant = is_script(name) ? (shares ? "sc:" : "") + name : short_category(name);
  return fmt::format("{{{}{}}}", inverted ? "^" : "", meant);
}

std::string translated(const std::string& pattern, const std::string& where) {
  std::string result;
  bool in_class = false;
  std::size_t class_begin = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      const auto say = [&](const std::string& set, bool inverted) {
        if (in_class && inverted)
          (result += '\\') += next;
        else if (in_class)
          result += set;
        else
          ((result += inverted ? "[^" : "[") += set) += ']';
      };
      if (next == 's' || next == 'S') {
        say(std::string(space_class), next == 'S');
      } else if (next == 'w' || next == 'W') {
        say(std::string(word_class) + std::string(in_class ? "" : more_words), next == 'W');
      } else if ((next == 'p' || next == 'P') && pattern.compare(i + 1, 1, "{") == 0 &&
                 pattern.find('}', i) != std::string::npos) {
        const std::size_t end = pattern.find('}', i);
        ((result += '\\') += next) += property(std::string_view(pattern).substr(i + 1, end - i));
        i = end;
      } else if (next == 'u' && i + 4 < pattern.size()) {
        result += "\\x{" + pattern.substr(i + 1, 4) + "}";
        i += 4;
      } else if (std::string_view("hHRXKOyYNCGQEvVg").find(next) != std::string_view::npos) {
        refuse(
            "{}: the expression {} has \\{}, which is not read here; legal: \\s \\S \\w \\W \\d \\D \\p \\P "
            "\\b "
            "\\n \\r \\t \\u \\x",
            where, pattern, next);
      } else {
        (result += '\\') += next;
      }
      continue;
    }
    if (in_class) {
      if (c == '[' && pattern.compare(i, 2, "[:") != 0)
        refuse("{}: the expression {} has a class within a class; legal: classes side by side", where,
               pattern);
      if (c == '&' && pattern.compare(i, 2, "&&") == 0)
        refuse("{}: the expression {} has && in a class; legal: classes without it", where, pattern);
      if (c == '[') {  // [:name:]
        const std::size_t end = pattern.find(":]", i);
        if (end == std::string::npos) refuse("{}: the expression {} has [: without :]", where, pattern);
        const std::string_view whole = std::string_view(pattern).substr(i, end + 2 - i),
                               name = whole.substr(2, whole.size() - 4);
        const auto* known = std::find_if(std::begin(named_classes), std::end(named_classes),
                                         [name](const auto& one) { return name.ends_with(one.first); });
        if (known != std::end(named_classes) && name.starts_with('^'))
          refuse("{}: the expression {} has {}; legal: [:{}:]", where, pattern, whole, known->first);
        result += known != std::end(named_classes) && name == known->first ? known->second : whole;
        i = end + 1;
        continue;
      }
      if (c == ']' && i > class_begin) in_class = false;
    } else if (c == '[') {
      in_class = true;
      class_begin = i + (pattern.compare(i, 2, "[^") == 0 ? 2 : 1);
    }
    result += c;
  }
  return result;
}

struct FreeMatch {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

}  // namespace

struct Regex::Compiled {
  pcre2_code* code = nullptr;
  std::string pattern;
  ~Compiled() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern, const std::string& where) {
  auto compiled = std::make_unique<Compiled>();
  compiled->pattern = pattern;
  const std::string meant = translated(pattern, where);
  int error = 0;
  PCRE2_SIZE at = 0;
  compiled->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(meant.data()), meant.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  if (compiled->code == nullptr) {
    PCRE2_UCHAR message[256];
    pcre2_get_error_message(error, message, sizeof message);
    refuse("{}: {} is no regular expression: {}", where, pattern, reinterpret_cast<const char*>(message));
  }
  pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE);  // without it the same, slowly
  compiled_ = std::move(compiled);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

void Regex::find_all(std::string_view text, std::vector<TextRange>& found) const {
  found.clear();
  const std::unique_ptr<pcre2_match_data, FreeMatch> match(pcre2_match_data_create(1, nullptr));
  if (match == nullptr) throw std::bad_alloc();
  const auto* bytes = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (std::size_t at = 0; at <= text.size();) {
    int matched =
        pcre2_match(compiled_->code, bytes, text.size(), at, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (matched == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter keeps what it has tried on the heap
      matched = pcre2_match(compiled_->code, bytes, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                            match.get(), nullptr);
    if (matched == PCRE2_ERROR_NOMATCH) return;
    if (matched < 0)
      fail("the expression {} needs too many steps on a text of {} bytes", compiled_->pattern, text.size());
    const PCRE2_SIZE* where = pcre2_get_ovector_pointer(match.get());
    // \K in a lookahead could end before it began; it is not read.
    if (where[1] > where[0]) found.push_back({where[0], where[1]});
    at = where[1];
    if (where[1] == where[0]) {  // empty: go on behind the next character
      ++at;
      while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u) ++at;
    }
  }
}

}  // namespace echelon
