#include <cstring>
#include <functional>

#include "text/base64.h"
#include "text/byte_characters.h"
#include "text/text_pattern.h"
#include "text/text_steps.h"
#include "text/unicode.h"

namespace echelon {
namespace {

using nlohmann::json;

class Function final : public Normalizer {
 public:
  using Change = std::function<std::string(std::string_view text, bool& begins)>;
  explicit Function(Change change) : change_(std::move(change)) {}
  std::string apply(std::string_view text, bool& begins) const override { return change_(text, begins); }

 private:
  Change change_;
};

class NormalizerSequence final : public Normalizer {
 public:
  explicit NormalizerSequence(std::vector<std::unique_ptr<const Normalizer>> steps)
      : steps_(std::move(steps)) {}
  std::string apply(std::string_view text, bool& begins) const override {
    std::string result(text);
    for (const auto& step : steps_) result = step->apply(result, begins);
    return result;
  }

 private:
  std::vector<std::unique_ptr<const Normalizer>> steps_;
};

std::string without(std::string_view text, bool (*unwanted)(char32_t), bool& begins) {
  std::string kept;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t begin = i;
    if (!unwanted(next_character(text, i)))
      kept += text.substr(begin, i - begin);
    else if (begin == 0)
      begins = false;
  }
  return kept;
}

std::string stripped(std::string_view text, bool left, bool right, bool& begins) {
  std::size_t begin = 0, end = 0;
  bool inside = !left;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t at = i;
    const bool space = is_space(next_character(text, i));
    if (!inside && space) continue;
    if (!inside) begin = at;
    inside = true;
    if (!space || !right) end = i;
  }
  if (begin > 0) begins = false;
  return inside ? std::string(text.substr(begin, std::max(begin, end) - begin)) : "";
}

bool is_chinese(char32_t c) {
  return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x20000 && c <= 0x2a6df) ||
         (c >= 0x2a700 && c <= 0x2b73f) || (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
         (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

std::string bert_clean(std::string_view text, bool& begins) {
  std::string clean;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t begin = i;
    const char32_t c = next_character(text, i);
    const bool blank = c == '\t' || c == '\n' || c == '\r';
    if (c == 0 || c == 0xfffd || (is_other(c) && !blank)) {
      begins = begins && begin > 0;
      continue;
    }
    if (blank || is_space(c))
      clean += ' ';
    else
      append_character(clean, c);
  }
  return clean;
}

std::string bert_spaced(std::string_view text) {
  std::string spaced;
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = next_character(text, i);
    if (is_chinese(c)) spaced += ' ';
    append_character(spaced, c);
    if (is_chinese(c)) spaced += ' ';
  }
  return spaced;
}

// SentencePiece's table: a double-array trie (darts-clone) of what is replaced, and the replacements, each
// ending with a zero.
class Charsmap final : public Normalizer {
 public:
  Charsmap(const std::string& bytes, const std::string& where) {
    std::uint32_t size = 0;
    if (bytes.size() >= 4) std::memcpy(&size, bytes.data(), 4);
    if (bytes.size() < 4 || size % 4 != 0 || size > bytes.size() - 4)
      refuse("{}.precompiled_charsmap: is cut short: {} bytes", where, bytes.size());
    units_.resize(size / 4);
    std::memcpy(units_.data(), bytes.data() + 4, size);
    replacements_ = bytes.substr(4 + size);
  }

  std::string apply(std::string_view text, bool& begins) const override {
    std::string result;
    std::size_t begin = 0;
    for (const std::size_t end : grapheme_ends(text)) {
      const std::string_view cluster = text.substr(begin, end - begin);
      begin = end;
      std::string_view by;
      if (cluster.size() < 6 && find(cluster, by)) {
        result += by;
        begins = begins && !result.empty();
        continue;
      }
      for (std::size_t i = 0; i < cluster.size();) {
        const std::size_t from = i;
        next_character(cluster, i);
        const std::string_view character = cluster.substr(from, i - from);
        result += find(character, by) ? by : character;
        begins = begins && !result.empty();
      }
    }
    return result;
  }

 private:
  // The replacement of the shortest key that `text` begins with.
  bool find(std::string_view text, std::string_view& by) const {
    const auto offset = [](std::uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); };
    if (units_.empty()) return false;
    std::size_t at = offset(units_[0]);
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte == 0) return false;
      at ^= byte;
      if (at >= units_.size()) return false;
      const std::uint32_t unit = units_[at];
      if ((unit & 0x800000ffu) != byte) return false;
      at ^= offset(unit);
      if ((unit >> 8 & 1u) != 0) {
        if (at >= units_.size()) return false;
        const std::size_t begin = units_[at] & 0x7fffffffu;
        if (begin >= replacements_.size()) return false;
        by = std::string_view(replacements_).substr(begin);
        by = by.substr(0, by.find('\0'));
        return true;
      }
    }
    return false;
  }

  std::vector<std::uint32_t> units_;
  std::string replacements_;
};

std::unique_ptr<const Normalizer> normalizer_of(Function::Change change) {
  return std::make_unique<Function>(std::move(change));
}

// Of what leaves nothing out.
std::unique_ptr<const Normalizer> normalizer_of(std::string (*change)(std::string_view)) {
  return normalizer_of([change](std::string_view text, bool&) { return change(text); });
}

}  // namespace

std::unique_ptr<const Normalizer> make_normalizer(const json& described, const std::string& where) {
  if (described.is_null()) return nullptr;
  const std::string type = JsonFields(described, where).text("type");
  const auto fields = [&](const std::vector<std::string_view>& legal) {
    return JsonFields(described, where, legal);
  };
  if (type == "Sequence") {
    std::vector<std::unique_ptr<const Normalizer>> steps;
    const JsonFields sequence = fields({"normalizers"});
    for (const json& step : sequence.list("normalizers"))
      steps.push_back(make_normalizer(step, fmt::format("{}.normalizers[{}]", where, steps.size())));
    std::erase(steps, nullptr);
    return std::make_unique<NormalizerSequence>(std::move(steps));
  }
  for (const auto& [name, form] : {std::pair{"NFC", NormalForm::nfc}, std::pair{"NFD", NormalForm::nfd},
                                   std::pair{"NFKC", NormalForm::nfkc}, std::pair{"NFKD", NormalForm::nfkd}})
    if (type == name) {
      fields({});
      return normalizer_of([form = form](std::string_view text, bool&) { return normalized(text, form); });
    }
  if (type == "Lowercase") return fields({}), normalizer_of(lower_case);
  if (type == "StripAccents")
    return fields({}),
           normalizer_of([](std::string_view text, bool& begins) { return without(text, is_mark, begins); });
  if (type == "ByteLevel") return fields({}), normalizer_of(bytes_as_characters);
  if (type == "Strip") {
    const JsonFields f = fields({"strip_left", "strip_right"});
    return normalizer_of(
        [left = f.flag("strip_left", true), right = f.flag("strip_right", true)](
            std::string_view text, bool& begins) { return stripped(text, left, right, begins); });
  }
  if (type == "Prepend")
    return normalizer_of([by = fields({"prepend"}).text("prepend")](std::string_view text, bool&) {
      return text.empty() ? std::string() : by + std::string(text);
    });
  if (type == "Replace") {
    const JsonFields f = fields({"pattern", "content"});
    const auto pattern = std::make_shared<const TextPattern>(f.at("pattern"), where + ".pattern");
    return normalizer_of([pattern, by = f.text("content")](std::string_view text, bool& begins) {
      if (by.empty() && begins) {
        std::vector<TextRange> found;
        pattern->find_all(text, found);
        begins = found.empty() || found.front().begin > 0;
      }
      return pattern->replaced(text, by);
    });
  }
  if (type == "Precompiled")
    return std::make_unique<Charsmap>(
        from_base64(fields({"precompiled_charsmap"}).text("precompiled_charsmap"),
                    where + ".precompiled_charsmap"),
        where);
  if (type == "BertNormalizer") {
    const JsonFields f = fields({"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
    const bool clean = f.flag("clean_text", true), chinese = f.flag("handle_chinese_chars", true),
               lower = f.flag("lowercase", true), strip = f.flag("strip_accents", lower);
    return normalizer_of([=](std::string_view text, bool& begins) {
      std::string result(text);
      if (clean) result = bert_clean(result, begins);
      if (chinese) result = bert_spaced(result);
      if (strip) result = without(normalized(result, NormalForm::nfd), is_nonspacing_mark, begins);
      if (lower) result = lower_case(result);
      return result;
    });
  }
  refuse(
      "{}: the normalizer {} is not known; legal: Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip, "
      "StripAccents, "
      "Prepend, Replace, Precompiled, ByteLevel, BertNormalizer",
      where, type);
}

}  // namespace echelon
