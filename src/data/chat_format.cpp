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
    {"gemma", "<start_of_turn>", "", "<start_of_turn>", "\n", "<end_of_turn>", "\n", "model"},
}};

}  // namespace

const ChatFormat& chatml() { return formats.front(); }

const ChatFormat& chat_format_beside(const std::string& tokenizer) {
  namespace fs = std::filesystem;
  std::error_code none;
  const fs::path directory =
      fs::is_directory(tokenizer, none) ? fs::path(tokenizer) : fs::path(tokenizer).parent_path();
  const fs::path path = directory / "tokenizer_config.json";
  if (!fs::is_regular_file(path, none)) return chatml();
  const nlohmann::json config = parse_json(read_text(path.string()), path.string());
  if (!config.is_object() || !config.contains("chat_template")) return chatml();
  const std::string text = config["chat_template"].dump();
  for (const ChatFormat& format : formats)
    if (text.find(format.marker) != std::string::npos) return format;
  refuse(
      "{}: its chat_template is none of the known (chatml, llama3, gemma); legal: records with prompt and "
      "completion that are written out as the template would, or a directory without it (ChatML)",
      path.string());
}

}  // namespace echelon
