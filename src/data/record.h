// A line of a .jsonl file as the text that a model reads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/chat_format.h"

namespace echelon {

struct TextPart {
  std::string text;
  bool counted = true;  // in the loss, as what is to be predicted
};

struct Record {
  std::vector<TextPart> parts;
  bool end_counted = true;  // the end of text after it
};

// {"text": ...}: all of it counts. {"prompt": ..., "completion": ...}: the completion alone. {"messages":
// [{"role":
// ..., "content": ...}, ...]}: what the assistant says. Other fields are not looked at. RequestError that
// begins with `where` for what is none of these.
Record read_record(std::string_view line, const std::string& where, const ChatFormat& chat);

}  // namespace echelon
