// The `pattern` of a step: {"String": ...} or {"Regex": ...}.
#pragma once

#include <optional>

#include "text/json_fields.h"
#include "text/regex.h"

namespace echelon {

class TextPattern {
 public:
  TextPattern(const nlohmann::json& described, const std::string& where) {
    if (described.is_string()) {
      literal_ = described.get<std::string>();
    } else {
      const JsonFields fields(described, where, {"String", "Regex"});
      if (fields.has("Regex"))
        regex_.emplace(fields.text("Regex"), where);
      else
        literal_ = fields.text("String");
    }
    if (!regex_ && literal_.empty()) refuse("{}: an empty text is found everywhere; legal: some text", where);
  }
  explicit TextPattern(std::string literal) : literal_(std::move(literal)) {}

  void find_all(std::string_view text, std::vector<TextRange>& found) const {
    if (regex_) return regex_->find_all(text, found);
    found.clear();
    for (std::size_t at = text.find(literal_); at != std::string_view::npos;
         at = text.find(literal_, at + literal_.size()))
      found.push_back({at, at + literal_.size()});
  }

  std::string replaced(std::string_view text, std::string_view by) const {
    std::vector<TextRange> found;
    find_all(text, found);
    std::string result;
    std::size_t done = 0;
    for (const TextRange& match : found) {
      result += text.substr(done, match.begin - done);
      result += by;
      done = match.end;
    }
    result += text.substr(done);
    return result;
  }

 private:
  std::optional<Regex> regex_;
  std::string literal_;
};

}  // namespace echelon
