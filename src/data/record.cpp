#include "data/record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;  // a template sees the keys of an object in their order

const std::string& text_of(const ordered_json& object, const char* field, const std::string& where) {
  const auto found = object.find(field);
  if (found == object.end()) refuse("{}: has no field \"{}\"", where, field);
  if (!found->is_string())
    refuse("{}: \"{}\" must be a string, and is of type {}", where, field, found->type_name());
  return found->get_ref<const std::string&>();
}

// What may be called in a conversation, as the template is given it: a list, or the JSON of one, as which
// data sets have it whose fields are of one kind each.
ordered_json tools_of(const ordered_json& object, const std::string& where) {
  const auto found = object.find("tools");
  if (found == object.end() || found->is_null()) return {};
  const std::string what = where + ": \"tools\"";
  const ordered_json tools =
      found->is_string() ? parse_ordered_json(found->get<std::string>(), what) : *found;
  if (tools.is_null()) return {};
  if (!tools.is_array() ||
      !std::all_of(tools.begin(), tools.end(), [](const auto& t) { return t.is_object(); }))
    refuse("{} is of type {}; legal: a list of objects, or its JSON as a string", what,
           tools.is_array() ? "array of others than objects" : tools.type_name());
  return tools;
}

Record conversation(const ordered_json& messages, const ordered_json& tools, const std::string& where,
                    const ChatTemplate& chat) {
  if (!messages.is_array() || messages.empty())
    refuse("{}: \"messages\" must be a list of objects with \"role\" and \"content\"", where);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string turn = where + ": message " + std::to_string(i + 1);
    if (!messages[i].is_object()) refuse("{} is no object with \"role\" and \"content\"", turn);
    text_of(messages[i], "role", turn);
    const ordered_json content = messages[i].value("content", ordered_json());
    if (!content.is_null() || !calls_tools(messages[i])) text_of(messages[i], "content", turn);
  }
  return {chat.parts(messages, tools, where), false, chat.writes_all(), true};
}

}  // namespace

Record read_record(std::string_view line, const std::string& where, const ChatTemplate& chat) {
  const ordered_json object = parse_ordered_json(std::string(line), where);
  if (!object.is_object()) refuse("{}: is no JSON object", where);
  if (object.contains("messages"))
    return conversation(object["messages"], tools_of(object, where), where, chat);
  Record record;
  if (object.contains("prompt")) {
    record.parts = {{text_of(object, "prompt", where), false}, {text_of(object, "completion", where), true}};
    return record;
  }
  if (object.contains("text")) {
    record.parts = {{text_of(object, "text", where), true}};
    return record;
  }
  refuse(
      "{}: has none of the fields that are read; legal: \"text\", \"prompt\" and \"completion\", "
      "\"messages\"",
      where);
}

}  // namespace echelon
