// How text becomes tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/chat_template.h"
#include "text/tokenizer.h"

namespace echelon {

struct TextTokens {
  std::shared_ptr<const Tokenizer> tokenizer = bytes_tokenizer();
  std::shared_ptr<const ChatTemplate> chat = chatml();
  std::uint64_t identity = 0;  // checksum of the tokenizer's file; 0: bytes

  bool reads_bytes() const { return identity == 0; }
};

// "bytes", or a file or directory of read_tokenizer(); conversations are written as chat_template_beside()
// says.
TextTokens text_tokens(const std::string& path);
// Whether a directory has a file that read_tokenizer() would look at.
bool has_tokenizer(const std::string& directory);

}  // namespace echelon
