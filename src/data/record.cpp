#include "data/record.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"

namespace echelon {
namespace {

using nlohmann::json;

const std::string& text_of(const json& object, const char* field, const std::string& where) {
  const auto found = object.find(field);
  if (found == object.end()) refuse("{}: has no field \"{}\"", where, field);
  if (!found->is_string()) refuse("{}: \"{}\" is no text but {}", where, field, found->type_name());
  return found->get_ref<const std::string&>();
}

Record conversation(const json& messages, const std::string& where, const ChatFormat& chat) {
  if (!messages.is_array() || messages.empty())
    refuse("{}: \"messages\" must be a list of objects with \"role\" and \"content\"", where);
  Record record{{}, false};
  const auto add = [&](std::string text, bool counted) {
    if (text.empty()) return;
    if (!record.parts.empty() && record.parts.back().counted == counted)
      record.parts.back().text += text;
    else
      record.parts.push_back({std::move(text), counted});
  };
  add(chat.begin, false);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string turn = where + ": message " + std::to_string(i + 1);
    if (!messages[i].is_object()) refuse("{} is no object with \"role\" and \"content\"", turn);
    const std::string& role = text_of(messages[i], "role", turn);
    const std::string& content = text_of(messages[i], "content", turn);
    const bool answers = role == "assistant";
    add(chat.before_role + (answers ? chat.assistant : role) + chat.after_role, false);
    add(content + chat.end, answers);
    add(chat.after_end, false);
  }
  return record;
}

}  // namespace

Record read_record(std::string_view line, const std::string& where, const ChatFormat& chat) {
  const json object = parse_json(std::string(line), where);
  if (!object.is_object()) refuse("{}: is no JSON object", where);
  if (object.contains("messages")) return conversation(object["messages"], where, chat);
  if (object.contains("prompt"))
    return {{{text_of(object, "prompt", where), false}, {text_of(object, "completion", where), true}}, true};
  if (object.contains("text")) return {{{text_of(object, "text", where), true}}, true};
  refuse(
      "{}: has none of the fields that are read; legal: \"text\", \"prompt\" and \"completion\", "
      "\"messages\"",
      where);
}

}  // namespace echelon
