// The files of a tokenizer as they are, to go with a model wherever it goes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

class Tokenizer;
using TokenizerFiles = std::map<std::string, std::string>;  // name -> bytes

// Of a directory: those that Hugging Face's tokenizers read, and generation_config.json, which models without
// a tokenizer have too. It is made of what config.json says of where texts begin and end where there is none,
// as transformers does. Of a tokenizer's own file: it, under the name by which it is found in a directory,
// and what is read beside it. RequestError where one cannot be read.
TokenizerFiles read_tokenizer_files(const std::string& path);
// Whether there is more than generation_config.json.
bool have_tokenizer(const TokenizerFiles& files);

// The token that what is generated begins with, and those that end it, as generation_config.json has them;
// none where it says none.
std::optional<std::int32_t> begin_of_generation(const TokenizerFiles& files);
std::vector<std::int32_t> ends_of_generation(const TokenizerFiles& files);

// These, and what the tokenizer itself says.
std::vector<std::int32_t> ends_of_texts(const Tokenizer& tokenizer, const TokenizerFiles& files);

bool is_tokenizer_file(const std::string& name);

}  // namespace echelon
