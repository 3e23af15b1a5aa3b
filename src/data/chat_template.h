// How the turns of a conversation are written as one text: by a template in Jinja's language, as transformers
// renders it.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/tool_calls.h"
#include "text/text_template.h"

namespace echelon {

struct TextPart {
  std::string text;
  bool counted = true;  // in the loss, as what is to be predicted
};

// The const methods are safe to call from several threads.
class ChatTemplate {
 public:
  // `name`: chatml, llama3 or gemma, or the file that `source` is of. `tokens`: bos_token and its like, which
  // a template may write. `with_tools`: the source of what writes conversations that have tools; empty: of
  // the same.
  ChatTemplate(std::string name, const std::string& source, TemplateValue::Map tokens, bool writes_all,
               const std::string& with_tools = "");

  const std::string& name() const { return name_; }
  std::uint64_t identity() const { return identity_; }  // of what it writes
  // What a tokenizer puts around a text the template writes where it is wanted, or leaves out.
  bool writes_all() const { return writes_all_; }

  // Messages: objects with "role" and "content". The last one's answer is asked for where `asks`. `tools`: a
  // list of what may be called, or null. RequestError with what the template refuses.
  std::string render(const nlohmann::ordered_json& messages, bool asks, const std::tm& now,
                     const nlohmann::ordered_json& tools) const;
  std::string render(const nlohmann::ordered_json& messages, bool asks, const std::tm& now) const;
  // The same of a day that is always the same (training data is a function of its text alone); what the
  // assistant says counts, with what ends it. RequestError that begins with `where`.
  std::vector<TextPart> parts(const nlohmann::ordered_json& messages, const nlohmann::ordered_json& tools,
                              const std::string& where) const;
  // What ends an answer; empty where the template writes nothing behind one.
  std::string answer_end() const;

 private:
  std::string name_;
  TextTemplate template_;
  std::optional<TextTemplate> with_tools_;
  TemplateValue::Map tokens_;
  bool writes_all_;
  std::uint64_t identity_;
};

// ChatML: <|im_start|>ROLE\nCONTENT<|im_end|>\n
std::shared_ptr<const ChatTemplate> chatml();

// The one of this name: chatml, llama3, gemma. RequestError naming `field` and the legal ones.
std::shared_ptr<const ChatTemplate> chat_template_named(const std::string& name, const std::string& field);

// The one beside the file or in the directory, chat_template.jinja or what tokenizer_config.json has; ChatML
// where there is none. RequestError where it is no template.
std::shared_ptr<const ChatTemplate> chat_template_beside(const std::string& tokenizer);

}  // namespace echelon
