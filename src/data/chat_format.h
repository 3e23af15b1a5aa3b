// How the turns of a conversation are written as one text.
#pragma once

#include <string>

namespace echelon {

// A turn is before_role ROLE after_role CONTENT end; what an assistant says counts in the loss, its end
// included.
struct ChatFormat {
  const char* name;
  const char* marker;  // in the templates that write it so
  const char *begin, *before_role, *after_role, *end, *after_end;
  const char* assistant;   // what the assistant is called
  bool has_system = true;  // turns of the role "system"
};

// ChatML: <|im_start|>ROLE\nCONTENT<|im_end|>\n
const ChatFormat& chatml();

// The one of this name. RequestError naming `field` and the legal ones.
const ChatFormat& chat_format_named(const std::string& name, const std::string& field);

// That of the template beside the file or in the directory, chat_template.jinja or what tokenizer_config.json
// has; ChatML where there is none. RequestError where there is one that is none of the known.
const ChatFormat& chat_format_beside(const std::string& tokenizer);

}  // namespace echelon
