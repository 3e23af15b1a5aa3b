// A line of a .jsonl file as the text that a model reads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"

namespace echelon {

struct Record {
  std::vector<TextPart> parts;
  bool end_counted = true;  // the end of text after it
  bool begun = false;       // what a tokenizer puts before a text is written, where it is wanted
  bool is_one = false;      // the parts are one text: a token may have something of two
};

// {"text": ...}: all of it counts. {"prompt": ..., "completion": ...}: the completion alone. {"messages":
// [{"role": ..., "content": ...}, ...]}: what the assistant says, and its "tool_calls", beside which the
// content may be null; the template is given "tools" beside it. Other fields are not looked at. RequestError
// that begins with `where` for what is none of these.
Record read_record(std::string_view line, const std::string& where, const ChatTemplate& chat);

}  // namespace echelon
