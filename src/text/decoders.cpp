#include "text/byte_characters.h"
#include "text/text_pattern.h"
#include "text/text_steps.h"
#include "text/unicode.h"

#include <functional>

namespace echelon {
namespace {

using nlohmann::json;
using Tokens = std::vector<std::string>;

class DecodingFunction final : public Decoder {
 public:
  explicit DecodingFunction(std::function<void(Tokens&)> function) : function_(std::move(function)) {}
  void apply(Tokens& tokens) const override { function_(tokens); }

 private:
  std::function<void(Tokens&)> function_;
};

std::string all_of_them(const Tokens& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  return all;
}

void decode_byte_level(Tokens& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += characters_as_bytes(token).value_or(token);
  tokens = {replace_broken(bytes)};
}

// The byte that <0xE2> names; -1 for any other token.
int named_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = 0;
  for (const char c : token.substr(3, 2)) {
    const bool digit = c >= '0' && c <= '9', letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'f';
    if (!digit && !letter) return -1;
    byte = byte * 16 + (digit ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return byte;
}

void decode_byte_fallback(Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (is_whole_utf8(bytes))
      out.push_back(bytes);
    else
      out.insert(out.end(), bytes.size(), "\ufffd");
    bytes.clear();
  };
  for (std::string& token : tokens) {
    const int byte = named_byte(token);
    if (byte >= 0) {
      bytes += static_cast<char>(byte);
    } else {
      flush();
      out.push_back(std::move(token));
    }
  }
  flush();
  tokens = std::move(out);
}

std::string strip_ends(const std::string& token, char32_t content, std::size_t start, std::size_t stop) {
  const std::vector<char32_t> all = characters_of(token);
  std::size_t begin = 0, end = all.size();
  while (begin < start && begin < all.size() && all[begin] == content) ++begin;
  while (all.size() - end < stop && end > 0 && all[end - 1] == content) --end;
  std::string kept;
  for (std::size_t i = begin; i < end; ++i) append_character(kept, all[i]);
  return kept;
}

std::string cleaned_up(std::string text) {
  for (const auto& [from, to] : {std::pair{" .", "."},
                                 {" ?", "?"},
                                 {" !", "!"},
                                 {" ,", ","},
                                 {" ' ", "'"},
                                 {" n't", "n't"},
                                 {" 'm", "'m"},
                                 {" do not", " don't"},
                                 {" 's", "'s"},
                                 {" 've", "'ve"},
                                 {" 're", "'re"}})
    text = TextPattern(std::string(from)).replaced(text, to);
  return text;
}

std::unique_ptr<const Decoder> decoder_of(std::function<void(Tokens&)> f) {
  return std::make_unique<DecodingFunction>(std::move(f));
}

}  // namespace

std::unique_ptr<const Decoder> make_decoder(const json& described, const std::string& where) {
  if (described.is_null()) return nullptr;
  const std::string type = JsonFields(described, where).text("type");
  const auto fields = [&](const std::vector<std::string_view>& legal) {
    return JsonFields(described, where, legal);
  };
  if (type == "Sequence") {
    std::vector<std::shared_ptr<const Decoder>> steps;
    const JsonFields sequence = fields({"decoders"});
    for (const json& step : sequence.list("decoders"))
      steps.push_back(make_decoder(step, fmt::format("{}.decoders[{}]", where, steps.size())));
    std::erase(steps, nullptr);
    return decoder_of([steps](Tokens& tokens) {
      for (const auto& step : steps) step->apply(tokens);
    });
  }
  if (type == "ByteLevel")
    return fields({"add_prefix_space", "trim_offsets", "use_regex"}), decoder_of(decode_byte_level);
  if (type == "ByteFallback") return fields({}), decoder_of(decode_byte_fallback);
  if (type == "Fuse") return fields({}), decoder_of([](Tokens& tokens) { tokens = {all_of_them(tokens)}; });
  if (type == "Replace") {
    const JsonFields f = fields({"pattern", "content"});
    const auto pattern = std::make_shared<const TextPattern>(f.at("pattern"), where + ".pattern");
    return decoder_of([pattern, by = f.text("content")](Tokens& tokens) {
      for (std::string& token : tokens) token = pattern->replaced(token, by);
    });
  }
  if (type == "Strip") {
    const JsonFields f = fields({"content", "start", "stop"});
    const std::vector<char32_t> content = characters_of(f.text("content"));
    if (content.size() != 1) refuse("{}.content: {}; legal: one character", where, f.text("content"));
    const auto start = static_cast<std::size_t>(f.number("start", 0, 1 << 20)),
               stop = static_cast<std::size_t>(f.number("stop", 0, 1 << 20));
    return decoder_of([=, c = content.front()](Tokens& tokens) {
      for (std::string& token : tokens) token = strip_ends(token, c, start, stop);
    });
  }
  if (type == "Metaspace") {
    const JsonFields f = fields({"replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    const bool drop =
        f.text("prepend_scheme", f.flag("add_prefix_space", true) ? "always" : "never") != "never";
    const std::string mark = f.text("replacement", "\u2581");
    if (mark.empty()) refuse("{}.replacement: is empty; legal: one character", where);
    return decoder_of([drop, pattern = std::make_shared<const TextPattern>(mark)](Tokens& tokens) {
      for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = pattern->replaced(tokens[i], i == 0 && drop ? "" : " ");
    });
  }
  if (type == "WordPiece") {
    const JsonFields f = fields({"prefix", "cleanup"});
    return decoder_of([prefix = f.text("prefix", "##"), cleanup = f.flag("cleanup", true)](Tokens& tokens) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0)
          tokens[i] = tokens[i].starts_with(prefix) ? tokens[i].substr(prefix.size()) : " " + tokens[i];
        if (cleanup) tokens[i] = cleaned_up(std::move(tokens[i]));
      }
    });
  }
  if (type == "BPEDecoder") {
    const std::string suffix = fields({"suffix"}).text("suffix", "</w>");
    if (suffix.empty()) refuse("{}.suffix: is empty; legal: some text", where);
    return decoder_of([pattern = std::make_shared<const TextPattern>(suffix)](Tokens& tokens) {
      for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = pattern->replaced(tokens[i], i + 1 == tokens.size() ? "" : " ");
    });
  }
  refuse(
      "{}: the decoder {} is not known; legal: Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, "
      "Metaspace, "
      "WordPiece, BPEDecoder",
      where, type);
}

}  // namespace echelon
