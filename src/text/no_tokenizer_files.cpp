// A build for planning alone: reading tokenizers takes libraries.
#include "base/error.h"
#include "text/tokenizer.h"

namespace echelon {

std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& path) {
  refuse("{}: this build (ECHELON_PLANNER_ONLY) reads no tokenizers", path);
}

}  // namespace echelon
