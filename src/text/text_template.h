// Templates in the language of Jinja (https://jinja.palletsprojects.com), as far as the chat templates of
// published tokenizers use it, with the settings that transformers renders them with: a tag's line loses the
// spaces before it and the newline behind it.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include "text/template_value.h"

namespace echelon {

struct TemplateNode;

// The const methods are safe to call from several threads.
class TextTemplate {
 public:
  // RequestError that begins with `where` for what is no template, or asks for what is not known here.
  TextTemplate(const std::string& source, std::string where);
  ~TextTemplate();
  TextTemplate(TextTemplate&&) noexcept;
  TextTemplate& operator=(TextTemplate&&) noexcept;

  // RequestError for what the template itself refuses (raise_exception), and for what Jinja would not do.
  // strftime_now is of `now`.
  std::string render(const TemplateValue::Map& variables, const std::tm& now) const;

 private:
  std::string where_;
  std::unique_ptr<const TemplateNode> root_;
};

}  // namespace echelon
