// The files of a tokenizer as they are, to go with a model wherever it goes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace echelon {

class Tokenizer;
using TokenizerFiles = std::map<std::string, std::string>;  // name -> bytes

// Of a directory: those that Hugging Face's tokenizers read, empty where there are none, and what generation
// begins and ends with. Of a tokenizer's own file: it, under the name by which it is found in a directory,
// and what is read beside it. RequestError where one cannot be read.
TokenizerFiles read_tokenizer_files(const std::string& path);

// The tokens that end what is generated, as generation_config.json has them; none where it says none.
std::vector<std::int32_t> ends_of_generation(const TokenizerFiles& files);

// These, and what the tokenizer itself says.
std::vector<std::int32_t> ends_of_texts(const Tokenizer& tokenizer, const TokenizerFiles& files);

bool is_tokenizer_file(const std::string& name);

}  // namespace echelon
