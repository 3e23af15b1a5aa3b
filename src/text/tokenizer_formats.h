// The kinds of files that read_tokenizer() knows.
#pragma once

#include <memory>
#include <string>

#include "text/tokenizer.h"

namespace echelon {

std::shared_ptr<const Tokenizer> read_tokenizer_json(const std::string& path);
std::shared_ptr<const Tokenizer> read_tiktoken(const std::string& path, const std::string& text);
std::shared_ptr<const Tokenizer> read_sentencepiece(const std::string& path);

}  // namespace echelon
