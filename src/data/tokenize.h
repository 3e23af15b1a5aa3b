// Files of text as files of tokens (token_store.h), by all threads.
#pragma once

#include <string>

#include "base/open_file.h"
#include "base/progress.h"
#include "data/text_tokens.h"
#include "data/token_store.h"

namespace echelon {

// Whether the file, or what is compressed in it, has a record of JSON on each line: .jsonl, .ndjson.
bool holds_records(const std::string& path);

// Each record, or the whole text, is a document: what the tokenizer puts around it, and its end of text where
// it has one. A long text is cut at ends of lines where that changes no token, so that several threads have
// work. Written under a temporary name and renamed. RequestError naming the file and the line of what cannot
// be read.
TokenStoreInfo tokenize_file(const OpenFile& file, const std::string& out, const TextTokens& text,
                             int threads, const Progress& progress);

// The same in a directory of such files, named by the content of the file and by the tokenizer, where it may
// lie already: returns its path. Whoever comes while another makes it waits for it.
std::string cached_tokens(const OpenFile& file, const std::string& directory, const TextTokens& text,
                          int threads, const Progress& progress);

// A file there that whoever has the directory for itself may lock.
inline constexpr const char* cache_owner = ".owner";
// The name of something in the directory that is none of these files, the first of them; empty: there is
// nothing else.
std::string find_stranger_in_cache(const std::string& directory);
// Removes these files, and the directory if they were all.
void remove_token_cache(const std::string& directory);

}  // namespace echelon
