#include "data/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "data/checksum.h"
#include "text/template_texts.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;  // a template sees the keys of an object in their order

struct NamedTemplate {
  const char *name, *source;
};
constexpr std::array<NamedTemplate, 3> named_templates{
    {{"chatml",
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"},
     {"llama3",
      "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
      "{% endfor %}"
      "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"},
     {"gemma",
      "{% for m in messages %}"
      "{% if m.role == 'system' %}{{ raise_exception('gemma has no turns of the role system') }}{% endif %}"
      "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
      "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"}}};

// Friday, 26 July 2024: the day that the templates of Llama 3 have where they are told none.
constexpr std::tm day_of_training = [] {
  std::tm day{};
  day.tm_hour = 12;
  day.tm_mday = 26;
  day.tm_mon = 6;
  day.tm_year = 124;
  day.tm_wday = 5;
  day.tm_yday = 207;
  return day;
}();

std::uint64_t identity_of(const std::string& source, const TemplateValue::Map& tokens) {
  const std::string all = source + TemplateValue(tokens).json();
  return checksum(std::as_bytes(std::span(std::string_view(all))));
}

// In place of what the i-th message says: nothing that a template looks for.
std::string mark(std::size_t i) { return fmt::format("\x02{}\x03", i); }

// What ends a turn, of what is written behind it: a token in brackets, which spaces may stand before.
std::string end_of_turn(const std::string& behind) {
  const std::size_t begin = behind.find_first_not_of(" \n");
  if (begin == std::string::npos || (behind[begin] != '<' && behind[begin] != '[')) return "";
  const std::size_t end = behind.find(behind[begin] == '<' ? '>' : ']', begin);
  return end == std::string::npos ? "" : behind.substr(0, end + 1);
}

// A conversation as it is written, and what is written before each answer, between them and behind the last.
struct Written {
  std::string text;
  std::vector<std::string> around, answers;
};

// Where each answer is in the text, as it was given or without the spaces around it. Nothing where a template
// changes what is around an answer by what it says.
std::optional<std::vector<TextPlace>> places_as_given(const Written& written) {
  std::vector<TextPlace> places;
  std::size_t at = 0;
  const auto& [text, around, answers] = written;
  const auto is_there = [&text = text](std::size_t from, const std::string& what) {
    return text.compare(from, what.size(), what) == 0;
  };
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (!is_there(at, around[i])) return {};
    at += around[i].size();
    bool found = false;
    for (const auto& [left, right] : {std::pair{false, false}, {true, true}, {false, true}, {true, false}}) {
      const std::string said = stripped(answers[i], "", left, right);
      const std::size_t end = at + said.size();
      const bool last = i + 1 == answers.size();
      if (end > text.size() || !is_there(at, said) || !is_there(end, around[i + 1]) ||
          (last && end + around[i + 1].size() != text.size()))
        continue;
      places.push_back({at, end});
      at = end;
      found = true;
      break;
    }
    if (!found) return {};
  }
  return places;
}

std::string token_text(const ordered_json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object() && token.contains("content") && token["content"].is_string())
    return token["content"].get<std::string>();
  return "";
}

TemplateValue::Map special_tokens(const ordered_json& config) {
  TemplateValue::Map tokens;
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    if (config.is_object() && config.contains(name) && !token_text(config[name]).empty())
      tokens.set(name, token_text(config[name]));
  return tokens;
}

// Of several templates the one with this name; empty where there is none.
std::string source_named(const ordered_json& several, const std::string& name) {
  if (several.is_array())
    for (const ordered_json& one : several)
      if (one.is_object() && one.value("name", ordered_json()) == name && one.contains("template") &&
          one["template"].is_string())
        return one["template"].get<std::string>();
  return "";
}

// One text, or several with names, of which transformers takes the one called default.
std::string source_in(const ordered_json& config, const std::string& where) {
  const ordered_json& field = config["chat_template"];
  if (field.is_string()) return field.get<std::string>();
  if (std::string source = source_named(field, "default"); !source.empty()) return source;
  refuse("{}: chat_template is neither a text nor a list of them with one that is named default", where);
}

}  // namespace

ChatTemplate::ChatTemplate(std::string name, const std::string& source, TemplateValue::Map tokens,
                           bool writes_all, const std::string& with_tools)
    : name_(std::move(name)),
      template_(source, name_),
      tokens_(std::move(tokens)),
      writes_all_(writes_all),
      identity_(identity_of(source + with_tools, tokens_)) {
  if (!with_tools.empty()) with_tools_.emplace(with_tools, name_);
}

std::string ChatTemplate::render(const ordered_json& messages, bool asks, const std::tm& now,
                                 const ordered_json& tools) const {
  TemplateValue::Map variables = tokens_;
  variables.set("messages", template_value(messages));
  variables.set("tools", template_value(tools));
  variables.set("documents", None{});
  variables.set("add_generation_prompt", asks);
  return (with_tools_ && !tools.is_null() ? *with_tools_ : template_).render(variables, now);
}
std::string ChatTemplate::render(const ordered_json& messages, bool asks, const std::tm& now) const {
  return render(messages, asks, now, {});
}

std::vector<TextPart> ChatTemplate::parts(const ordered_json& messages, const ordered_json& tools,
                                          const std::string& where) const {
  const auto written_as = [&](const ordered_json& what, bool asks) {
    try {
      return render(what, asks, day_of_training, tools);
    } catch (const RequestError& error) {
      refuse("{}: {}", where, error.what());
    }
  };
  Written written{written_as(messages, false), {}, {}};
  ordered_json marked = messages;
  std::vector<std::size_t> numbers;  // of answers among the messages
  for (std::size_t i = 0; i < messages.size(); ++i)
    if (messages[i]["role"] == "assistant" && !calls_tools(messages[i])) {
      marked[i]["content"] = mark(i);
      written.answers.push_back(messages[i]["content"].get<std::string>());
      numbers.push_back(i);
    }
  std::string rest = written_as(marked, false);
  for (const std::size_t number : numbers) {
    const std::string what = mark(number);
    const std::size_t at = rest.find(what);
    if (at == std::string::npos) refuse("{}: {} leaves out message {}", where, name_, number + 1);
    written.around.push_back(rest.substr(0, at));
    rest.erase(0, at + what.size());
  }
  written.around.push_back(rest);

  const auto refuse_message = [&](std::size_t number) {
    refuse(
        "{}: {} writes message {} otherwise than it asks for it, so that what counts cannot be told; legal: "
        "a record with \"prompt\" and \"completion\"",
        where, name_, number + 1);
  };
  // What is asked with is what an answer is given to.
  const auto question_of = [&](std::size_t number) {
    const ordered_json before(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(number));
    std::string question = written_as(before, true);
    if (!written.text.starts_with(question)) refuse_message(number);
    return question;
  };
  // What stands between an answer and where the next one is asked for: that is not yet written there, as some
  // templates put thoughts, or room for them, in front of it.
  const auto asked_behind = [&](std::size_t number, std::size_t next) {
    const ordered_json before(marked.begin(), marked.begin() + static_cast<std::ptrdiff_t>(next));
    const std::string text = written_as(before, true), what = mark(number);
    const std::size_t at = text.find(what);
    if (at == std::string::npos) refuse_message(number);
    return text.substr(at + what.size());
  };
  std::optional<std::vector<TextPlace>> places = places_as_given(written);
  if (!places) {
    places.emplace();
    std::size_t begin = question_of(numbers.front()).size();
    for (std::size_t k = 0; k < numbers.size(); ++k) {
      const bool last = k + 1 == numbers.size();
      const std::string through = last ? written.text : question_of(numbers[k + 1]),
                        behind = last ? written.around[k + 1] : asked_behind(numbers[k], numbers[k + 1]);
      if (!through.ends_with(behind) || through.size() - behind.size() < begin) refuse_message(numbers[k]);
      places->push_back({begin, through.size() - behind.size()});
      begin = through.size();  // of the next answer
    }
  }
  for (std::size_t k = 0; k < places->size(); ++k)
    (*places)[k].end += end_of_turn(written.around[k + 1]).size();
  // Calls of tools are written beside or in place of what is said: all that the turn adds, but for the spaces
  // behind it.
  std::string answers_end;
  if (std::any_of(messages.begin(), messages.end(), calls_tools)) try {
      answers_end = answer_end();
    } catch (const RequestError&) {  // a template that writes no conversation without calls
    }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (!calls_tools(messages[i])) continue;
    const WrittenCalls calls = find_calls(messages, i, written.text, written_as, answers_end);
    if (!calls.any)
      refuse("{}: {} leaves out the calls of message {}; legal: a template that writes tool_calls", where,
             name_, i + 1);
    if (!calls.place) refuse_message(i);
    places->push_back(*calls.place);
  }
  std::sort(places->begin(), places->end(),
            [](const TextPlace& a, const TextPlace& b) { return a.begin < b.begin; });
  std::vector<TextPart> parts;
  std::size_t done = 0;
  const auto add = [&](std::size_t begin, std::size_t end, bool counted) {
    if (begin < end) parts.push_back({written.text.substr(begin, end - begin), counted});
  };
  for (const TextPlace& place : *places) {
    add(done, place.begin, false);
    add(std::max(done, place.begin), place.end, true);  // behind what ends the answer before
    done = std::max(done, place.end);
  }
  add(done, written.text.size(), false);
  return parts;
}

std::string ChatTemplate::answer_end() const {
  ordered_json talk = ordered_json::array();
  for (std::size_t i = 0; i < 3; ++i)
    talk.push_back({{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", mark(i)}});
  const auto behind_answer = [&](const ordered_json& messages) {
    const std::string text = render(messages, false, day_of_training);
    const std::size_t at = text.find(mark(1));
    return at == std::string::npos ? "" : end_of_turn(text.substr(at + mark(1).size()));
  };
  const std::string last = behind_answer(ordered_json(talk.begin(), talk.begin() + 2));
  return !last.empty() ? last : behind_answer(talk);
}

std::shared_ptr<const ChatTemplate> chat_template_named(const std::string& name, const std::string& field) {
  for (const NamedTemplate& one : named_templates)
    if (name == one.name)
      return std::make_shared<const ChatTemplate>(one.name, one.source, TemplateValue::Map{}, false);
  refuse("{} {}: no such format; legal: chatml, llama3, gemma", field, name);
}

std::shared_ptr<const ChatTemplate> chatml() {
  static const std::shared_ptr<const ChatTemplate> only = chat_template_named("chatml", "");
  return only;
}

std::shared_ptr<const ChatTemplate> chat_template_beside(const std::string& tokenizer) {
  namespace fs = std::filesystem;
  std::error_code none;
  const fs::path directory =
      fs::is_directory(tokenizer, none) ? fs::path(tokenizer) : fs::path(tokenizer).parent_path();
  // transformers takes the file where both are there.
  const fs::path alone = directory / "chat_template.jinja", beside = directory / "tokenizer_config.json";
  ordered_json config;
  if (fs::is_regular_file(beside, none))
    config = parse_ordered_json(read_text(beside.string()), beside.string());
  const TemplateValue::Map tokens = special_tokens(config);
  if (fs::is_regular_file(alone, none))
    return std::make_shared<const ChatTemplate>(alone.string(), read_text(alone.string()), tokens, true);
  if (!config.is_object() || !config.contains("chat_template") || config["chat_template"].is_null())
    return chatml();
  return std::make_shared<const ChatTemplate>(beside.string(), source_in(config, beside.string()), tokens,
                                              true, source_named(config["chat_template"], "tool_use"));
}

}  // namespace echelon
