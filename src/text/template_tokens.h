// The source of a template as tokens.
#pragma once

#include <string>
#include <vector>

namespace echelon {

struct TemplateToken {
  enum class Kind {
    raw,
    output_begin,
    output_end,
    tag_begin,
    tag_end,
    name,
    text,
    integer,
    real,
    symbol,
    end
  };
  Kind kind = Kind::end;
  std::string text;
  std::size_t line = 0;
};

std::vector<TemplateToken> template_tokens(const std::string& source, const std::string& where);

}  // namespace echelon
