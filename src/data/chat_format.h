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
  const char* assistant;  // what the assistant is called
};

// ChatML: <|im_start|>ROLE\nCONTENT<|im_end|>\n
const ChatFormat& chatml();

// That of the chat_template in the tokenizer_config.json beside the file or in the directory; ChatML where
// there is none. RequestError where there is one that is none of the known.
const ChatFormat& chat_format_beside(const std::string& tokenizer);

}  // namespace echelon
