// Regular expressions as tokenizer files have them: of Oniguruma (Ruby's), in Unicode.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

struct TextRange {
  std::size_t begin = 0, end = 0;
};

class Regex {
 public:
  // RequestError that begins with `where` for what is no expression, or would mean something else here.
  Regex(const std::string& pattern, const std::string& where);
  ~Regex();
  Regex(Regex&&) noexcept;

  // All matches in UTF-8, one after the other. May be called from several threads.
  void find_all(std::string_view text, std::vector<TextRange>& found) const;

 private:
  struct Compiled;
  std::unique_ptr<const Compiled> compiled_;
};

}  // namespace echelon
