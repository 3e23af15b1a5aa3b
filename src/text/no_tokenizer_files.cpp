// A build for planning alone: reading tokenizers takes libraries.
#include "base/error.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace echelon {

std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& path) {
  refuse("{}: this build (ECHELON_PLANNER_ONLY) reads no tokenizers", path);
}

std::string in_case(std::string_view, LetterCase) { refuse("this build knows no letters"); }
bool is_cased(std::string_view) { refuse("this build knows no letters"); }
bool is_printable(std::string_view) { refuse("this build knows no letters"); }

}  // namespace echelon
