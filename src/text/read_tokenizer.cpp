#include "base/error.h"
#include "text/tokenizer.h"

namespace echelon {

std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& path) {
  refuse("{}: no tokenizer is read from files yet", path);
}

}  // namespace echelon
