#include "data/chat_format.h"

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"

namespace echelon {
namespace {

constexpr std::array<ChatFormat, 3> formats{{
    {"chatml", "<|im_start|>", "", "<|im_start|>", "\n", "<|im_end|>", "\n", "assistant"},
    {"llama3", "<|start_header_id|>", "", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "",
     "assistant"},
    {"gemma", "<start_of_turn>", "", "<start_of_turn>", "\n", "<end_of_turn>", "\n", "model", false},
}};

}  // namespace

const ChatFormat& chatml() { return formats.front(); }

const ChatFormat& chat_format_named(const std::string& name, const std::string& field) {
  for (const ChatFormat& format : formats)
    if (name == format.name) return format;
  refuse("{} {}: no such format; legal: chatml, llama3, gemma", field, name);
}

const ChatFormat& chat_format_beside(const std::string& tokenizer) {
  namespace fs = std::filesystem;
  std::error_code none;
  const fs::path directory =
      fs::is_directory(tokenizer, none) ? fs::path(tokenizer) : fs::path(tokenizer).parent_path();
  // transformers takes the file where both are there.
  const fs::path alone = directory / "chat_template.jinja", beside = directory / "tokenizer_config.json";
  const bool is_alone = fs::is_regular_file(alone, none);
  if (!is_alone && !fs::is_regular_file(beside, none)) return chatml();
  std::string text;
  if (is_alone) {
    text = read_text(alone.string());
  } else {
    const nlohmann::json config = parse_json(read_text(beside.string()), beside.string());
    if (!config.is_object() || !config.contains("chat_template")) return chatml();
    text = config["chat_template"].dump();
  }
  for (const ChatFormat& format : formats)
    if (text.find(format.marker) != std::string::npos) return format;
  refuse(
      "{}: its chat template is none of the known (chatml, llama3, gemma); legal: records with prompt and "
      "completion that are written out as the template would, generate --chat-format with one of these, or a "
      "directory without the template (ChatML)",
      (is_alone ? alone : beside).string());
}

}  // namespace echelon
