#include "text/byte_characters.h"
#include "text/text_pattern.h"
#include "text/text_steps.h"
#include "text/unicode.h"

namespace echelon {
namespace {

using nlohmann::json;

enum class Behavior { isolated, removed, contiguous, merged_with_previous, merged_with_next };

Behavior parse_behavior(const std::string& name, const std::string& where) {
  if (name == "Isolated") return Behavior::isolated;
  if (name == "Removed") return Behavior::removed;
  if (name == "Contiguous") return Behavior::contiguous;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  refuse("{}.behavior: {}; legal: Isolated, Removed, Contiguous, MergedWithPrevious, MergedWithNext", where,
         name);
}

// Cuts every piece where `find` finds something.
template <class Find>
void cut(Pieces& pieces, Behavior behavior, bool invert, const Find& find) {
  std::vector<TextRange>& out = pieces.scratch;
  out.clear();
  for (const TextRange& piece : pieces.ranges) {
    const std::size_t first = out.size();
    bool before = false;  // whether what came last is a match
    const auto add = [&](std::size_t begin, std::size_t end, bool match) {
      if (begin == end) return;
      const TextRange part{piece.begin + begin, piece.begin + end};
      match = match != invert;
      const bool some = out.size() > first;
      bool joined = false;
      if (behavior == Behavior::removed && match) return;
      if (behavior == Behavior::contiguous) joined = some && match == before;
      if (behavior == Behavior::merged_with_previous) joined = some && match && !before;
      if (behavior == Behavior::merged_with_next) joined = some && !match && before;
      if (joined)
        out.back().end = part.end;
      else
        out.push_back(part);
      before = match;
    };
    const std::string_view text = std::string_view(pieces.text).substr(piece.begin, piece.end - piece.begin);
    find(text, pieces.found);
    std::size_t done = 0;
    for (const TextRange& match : pieces.found) {
      add(done, match.begin, false);
      add(match.begin, match.end, true);
      done = match.end;
    }
    add(done, text.size(), false);
  }
  // What began the text may be removed.
  const bool any = !out.empty() && !pieces.ranges.empty();
  if (!any || out.front().begin > pieces.ranges.front().begin) pieces.begins_text = false;
  std::swap(pieces.ranges, out);
}

// Every piece's text made anew.
template <class Change>
void rewrite(Pieces& pieces, const Change& change) {
  std::string text;
  text.reserve(pieces.text.size() + pieces.text.size() / 8);
  for (TextRange& piece : pieces.ranges) {
    const std::size_t begin = text.size();
    change(std::string_view(pieces.text).substr(piece.begin, piece.end - piece.begin), text);
    piece = {begin, text.size()};
  }
  std::erase_if(pieces.ranges, [](const TextRange& r) { return r.begin == r.end; });
  pieces.text = std::move(text);
}

class PatternSplit final : public PreTokenizer {
 public:
  PatternSplit(TextPattern pattern, Behavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}
  void split(Pieces& pieces) const override {
    cut(pieces, behavior_, invert_,
        [&](std::string_view text, auto& found) { pattern_.find_all(text, found); });
  }

 private:
  TextPattern pattern_;
  Behavior behavior_;
  bool invert_;
};

class CharacterSplit final : public PreTokenizer {
 public:
  CharacterSplit(bool (*chosen)(char32_t), Behavior behavior) : chosen_(chosen), behavior_(behavior) {}
  void split(Pieces& pieces) const override {
    cut(pieces, behavior_, false, [&](std::string_view text, auto& found) {
      found.clear();
      for (std::size_t i = 0; i < text.size();) {
        const std::size_t begin = i;
        if (chosen_(next_character(text, i))) found.push_back({begin, i});
      }
    });
  }

 private:
  bool (*chosen_)(char32_t);
  Behavior behavior_;
};

constexpr const char* gpt2_words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class ByteLevel final : public PreTokenizer {
 public:
  ByteLevel(bool add_space, bool use_regex, bool map, const std::string& where)
      : add_space_(add_space), map_(map) {
    if (use_regex) regex_.emplace(gpt2_words, where);
  }
  void split(Pieces& pieces) const override {
    if (add_space_)
      rewrite(pieces, [](std::string_view piece, std::string& text) {
        if (!piece.starts_with(' ')) text += ' ';
        text += piece;
      });
    if (regex_)
      cut(pieces, Behavior::isolated, false,
          [&](std::string_view text, auto& found) { regex_->find_all(text, found); });
    if (map_)
      rewrite(pieces, [](std::string_view piece, std::string& text) { text += bytes_as_characters(piece); });
  }

 private:
  bool add_space_, map_;
  std::optional<Regex> regex_;
};

enum class Prepend { always, first, never };

class Metaspace final : public PreTokenizer {
 public:
  Metaspace(std::string mark, Prepend prepend, bool split)
      : mark_(mark), at_mark_(std::move(mark)), prepend_(prepend), split_(split) {}
  void split(Pieces& pieces) const override {
    bool first = pieces.begins_text;
    rewrite(pieces, [&](std::string_view piece, std::string& text) {
      const bool wanted = prepend_ == Prepend::always || (prepend_ == Prepend::first && first);
      first = false;
      if (wanted && !piece.starts_with(' ') && !piece.starts_with(mark_)) text += mark_;
      for (const char c : piece)
        if (c == ' ')
          text += mark_;
        else
          text += c;
    });
    if (split_)
      cut(pieces, Behavior::merged_with_next, false,
          [&](std::string_view text, auto& found) { at_mark_.find_all(text, found); });
  }

 private:
  std::string mark_;
  TextPattern at_mark_;
  Prepend prepend_;
  bool split_;
};

class PreTokenizerSequence final : public PreTokenizer {
 public:
  explicit PreTokenizerSequence(std::vector<std::unique_ptr<const PreTokenizer>> steps)
      : steps_(std::move(steps)) {}
  void split(Pieces& pieces) const override {
    for (const auto& step : steps_) step->split(pieces);
  }

 private:
  std::vector<std::unique_ptr<const PreTokenizer>> steps_;
};

bool is_any_punctuation(char32_t c) {
  return is_punctuation(c) ||
         (c > ' ' && c < 0x7f && !((c | 0x20) >= 'a' && (c | 0x20) <= 'z') && !(c >= '0' && c <= '9'));
}

std::unique_ptr<const PreTokenizer> make(const json& described, const std::string& where, bool last,
                                         bool& raw_bytes) {
  if (described.is_null()) return nullptr;
  const std::string type = JsonFields(described, where).text("type");
  const auto fields = [&](const std::vector<std::string_view>& legal) {
    return JsonFields(described, where, legal);
  };
  if (type == "Sequence") {
    const JsonFields f = fields({"pretokenizers"});
    const json& list = f.list("pretokenizers");
    std::vector<std::unique_ptr<const PreTokenizer>> steps;
    for (std::size_t i = 0; i < list.size(); ++i)
      steps.push_back(make(list[i], fmt::format("{}.pretokenizers[{}]", where, i),
                           last && i + 1 == list.size(), raw_bytes));
    std::erase(steps, nullptr);
    return std::make_unique<PreTokenizerSequence>(std::move(steps));
  }
  if (type == "ByteLevel") {
    const JsonFields f = fields({"add_prefix_space", "trim_offsets", "use_regex"});
    if (last) raw_bytes = true;
    return std::make_unique<ByteLevel>(f.flag("add_prefix_space", true), f.flag("use_regex", true), !last,
                                       where);
  }
  if (type == "Split") {
    const JsonFields f = fields({"pattern", "behavior", "invert"});
    return std::make_unique<PatternSplit>(TextPattern(f.at("pattern"), where + ".pattern"),
                                          parse_behavior(f.text("behavior"), where), f.flag("invert", false));
  }
  if (type == "Metaspace") {
    const JsonFields f = fields({"replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    const std::string scheme =
        f.text("prepend_scheme", f.flag("add_prefix_space", true) ? "always" : "never");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      refuse("{}.prepend_scheme: {}; legal: always, first, never", where, scheme);
    const std::string mark = f.text("replacement", "\u2581");
    if (characters_of(mark).size() != 1) refuse("{}.replacement: {}; legal: one character", where, mark);
    return std::make_unique<Metaspace>(mark,
                                       scheme == "always"  ? Prepend::always
                                       : scheme == "first" ? Prepend::first
                                                           : Prepend::never,
                                       f.flag("split", true));
  }
  if (type == "Whitespace") {
    fields({});
    return std::make_unique<PatternSplit>(
        TextPattern(json{{"Regex", R"([\w\x{200c}\x{200d}]+|[^\w\s\x{200c}\x{200d}]+)"}}, where),
        Behavior::removed, true);
  }
  if (type == "WhitespaceSplit")
    return fields({}), std::make_unique<CharacterSplit>(is_space, Behavior::removed);
  if (type == "Digits")
    return std::make_unique<CharacterSplit>(
        is_number, fields({"individual_digits"}).flag("individual_digits", false) ? Behavior::isolated
                                                                                  : Behavior::contiguous);
  if (type == "Punctuation")
    return std::make_unique<CharacterSplit>(
        is_any_punctuation, parse_behavior(fields({"behavior"}).text("behavior", "Isolated"), where));
  if (type == "CharDelimiterSplit")
    return std::make_unique<PatternSplit>(TextPattern(fields({"delimiter"}).text("delimiter"), where),
                                          Behavior::removed, false);
  if (type == "BertPreTokenizer") {
    fields({});
    std::vector<std::unique_ptr<const PreTokenizer>> steps;
    steps.push_back(std::make_unique<CharacterSplit>(is_space, Behavior::removed));
    steps.push_back(std::make_unique<CharacterSplit>(is_any_punctuation, Behavior::isolated));
    return std::make_unique<PreTokenizerSequence>(std::move(steps));
  }
  refuse(
      "{}: the pre-tokenizer {} is not known; legal: Sequence, ByteLevel, Split, Metaspace, Whitespace, "
      "WhitespaceSplit, Digits, Punctuation, CharDelimiterSplit, BertPreTokenizer",
      where, type);
}

}  // namespace

std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const json& described, const std::string& where,
                                                       bool& raw_bytes) {
  raw_bytes = false;
  return make(described, where, true, raw_bytes);
}

std::unique_ptr<const PreTokenizer> make_isolating_split(const std::string& pattern,
                                                         const std::string& where) {
  return std::make_unique<PatternSplit>(TextPattern(json{{"Regex", pattern}}, where), Behavior::isolated,
                                        false);
}

}  // namespace echelon
