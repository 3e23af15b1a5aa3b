// Chat templates as transformers renders them (fixtures/chat_templates/make_fixtures.py), and what of a
// conversation the loss counts.
#include "data/chat_template.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/open_file.h"
#include "data/record.h"
#include "refusals.h"
#include "temporary_directory.h"

namespace echelon::chat_template_test {
namespace {

using namespace checks;
using nlohmann::json;
using nlohmann::ordered_json;

ordered_json fixture() {
  const std::string path =
      (std::filesystem::path(ECHELON_SOURCE_DIR) / "tests/fixtures/chat_templates/cases.json").string();
  return ordered_json::parse(read_text(path));
}

TEST(TextTemplates, AreRenderedAsTransformersRendersThem) {
  const ordered_json all = fixture();
  std::size_t refused = 0;
  for (const auto& [name, source] : all["templates"].items()) {
    const TextTemplate rendered(source.get<std::string>(), name);
    for (const ordered_json& one : all["cases"]) {
      if (one["template"] != name) continue;
      const TemplateValue variables = template_value(one["variables"]);
      if (one.contains("text")) {
        EXPECT_EQ(rendered.render(*variables.map(), {}), one["text"].get<std::string>()) << name;
        continue;
      }
      ++refused;
      EXPECT_THROW(rendered.render(*variables.map(), {}), RequestError) << one["refused"];
    }
  }
  EXPECT_GT(refused, 0u);
}

// As Python has it, which has more than ASCII's.
TEST(TextTemplates, WhiteSpaceIsUnicodes) {
  TemplateValue::Map variables;
  variables.set("x", std::string("\u3000a\u00a0\u00e9 b\u2028"));
  const auto rendered = [&](const char* source) {
    return TextTemplate(source, "here").render(variables, {});
  };
  EXPECT_EQ(rendered("[{{ x | trim }}]"), "[a\u00a0\u00e9 b]");
  EXPECT_EQ(rendered("[{{ x.lstrip() }}]"), "[a\u00a0\u00e9 b\u2028]");
  EXPECT_EQ(rendered("{{ x.split() | join('+') }}"), "a+\u00e9+b");
  EXPECT_EQ(rendered("{{ '  a b c '.split(None, 1) | join('+') }}"), "a+b c ");
  EXPECT_EQ(rendered("{{ '\u00e8a\u00e9'.strip('\u00e9') }}"), "\u00e8a");  // which share a byte
}

TEST(TextTemplates, WhatIsNoTemplateIsRefusedByItsLine) {
  const auto refused = [](const std::string& source, std::vector<std::string> words) {
    words.push_back("here: line ");
    expect_refusal([&] { TextTemplate(source, "here").render({}, {}); }, words);
  };
  refused("a\n{% if %}", {"line 2"});
  refused("{% for x in y %}", {"endfor"});
  refused("{{ x", {"}}"});
  refused("{% include 'a' %}", {"include", "legal: if, for"});
  refused("{{ x | shuffle }}", {"filter shuffle"});
  refused("{{ x is strange }}", {"test strange"});
  refused("{{ x.y.z }}", {"undefined"});
  refused("{{ f(1) }}", {"f is no function"});
  refused("{{ 'a' + 1 }}", {"a text and a number"});
  refused("{{ raise_exception('No.') }}", {"No."});
  // Whatever is told has to be heard.
  refused("{{ [1] | tojson(indents=2) }}", {"tojson has no argument indents", "legal: ensure_ascii, indent"});
  refused("{{ 'a' | trim(left=true) }}", {"trim has no argument left", "legal: chars"});
  refused("{{ 'a' | upper('b') }}", {"upper is given 1 argument;", "legal: up to 0"});
  refused("{{ 'a' | replace('a', 'b', old='c') }}", {"replace is given old twice"});
  refused("{{ [1] | map(attribute='a', otherwise=1) }}", {"map has no argument otherwise"});
  refused("{{ 1 | round(method='up') }}", {"method up", "legal: common, ceil, floor"});
  refused("{{ 'a'.strip(chars='b') }}", {"strip has no argument chars"});
  refused("{{ 'a'.startswith('a', 1) }}", {"startswith is given 2 arguments"});
  refused("{{ 'a' is string(1) }}", {"the test string is given an argument"});
  refused("{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", {"macro m is given 2 arguments"});
  refused("{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", {"macro m has no argument b"});
  refused("{% macro m() %}{{ varargs }}{% endmacro %}{{ m() }}", {"varargs"});
  // What is not kept as Python has it is not written.
  refused("{{ {1: 2} }}", {"a key is not known of a number"});
  refused("{{ range(3) }}", {"no list"});
  refused("{{ [1] | map('string') }}", {"no list"});
  refused("{{ raise_exception }}", {"a function is printed"});
  refused("{{ 9223372036854775807 + 1 }}", {"too large"});
  refused("{{ '99999999999999999999' | int }}", {"too large"});
  refused("{{ 1 % 0 }}", {"divided by 0"});
  refused("{{ " + std::string(300, '(') + "1" + std::string(300, ')') + " }}", {"levels"});
  refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {"levels"});
  const std::string loop = "{% for i in range(1000000) %}", end = "{% endfor %}";
  expect_refusal([&] { TextTemplate(loop + loop + "{% set x = i %}" + end + end, "here").render({}, {}); },
                 {"steps"});
}

TEST(TextTemplates, MutatedOnesAreRefusedOrRendered) {
  const ordered_json all = fixture();
  std::vector<TemplateValue> variables;
  for (const ordered_json& one : all["cases"])
    if (variables.size() < 4) variables.push_back(template_value(one["variables"]));
  std::mt19937 random(5);
  std::size_t rendered = 0;
  for (const auto& [name, source] : all["templates"].items())
    for (int i = 0; i < 150; ++i) {
      std::string mutated = source.get<std::string>();
      const std::size_t at = random() % mutated.size(), size = random() % 4;
      if (i % 3 == 0)
        mutated.erase(at, size + 1);
      else if (i % 3 == 1)
        mutated.insert(at, mutated.substr(random() % mutated.size(), 8 * size + 1));
      else
        mutated[at] = static_cast<char>(random() % 256);
      try {
        TextTemplate(mutated, "here").render(*variables[static_cast<std::size_t>(i) % 4].map(), {});
        ++rendered;
      } catch (const RequestError& error) {
        EXPECT_EQ(std::string(error.what()).rfind("here: ", 0), 0u) << error.what();
      }
    }
  EXPECT_GT(rendered, 0u);
  // What hangs in a chain is as deep as what stands in brackets.
  std::string chain = "{{ x";
  for (int i = 0; i < 100000; ++i) chain += ".y";
  EXPECT_THROW(TextTemplate(chain + " }}", "here"), RequestError);
}

std::string shown(const std::vector<TextPart>& parts) {
  std::string text;
  for (const TextPart& part : parts) text += part.counted ? "[" + part.text + "]" : part.text;
  return text;
}

json talk(std::initializer_list<const char*> contents) {
  json messages = json::array();
  for (const char* content : contents)
    messages.push_back({{"role", messages.size() % 2 == 0 ? "user" : "assistant"}, {"content", content}});
  return messages;
}

TEST(ChatTemplates, WhatTheAssistantSaysCountsWithWhatEndsIt) {
  const ordered_json all = fixture();
  const auto of = [&](const char* name) {
    TemplateValue::Map tokens;
    tokens.set("bos_token", "<s>");
    tokens.set("eos_token", "</s>");
    return ChatTemplate(name, all["templates"][name].get<std::string>(), tokens, true);
  };
  const json two = talk({"a", " b ", "c", "d"});
  const std::string headers = shown(of("headers").parts(two, {}, "x"));
  EXPECT_EQ(headers.substr(headers.find("<|head|>user")),
            "<|head|>user<|/head|>\n\na<|end|><|head|>assistant<|/head|>\n\n[b<|end|>]"
            "<|head|>user<|/head|>\n\nc<|end|><|head|>assistant<|/head|>\n\n[d<|end|>]");
  EXPECT_EQ(shown(of("alternate").parts(two, {}, "x")), "<s>[INST] a[/INST] [b</s>][INST] c[/INST] [d</s>]");
  EXPECT_EQ(shown(of("lines").parts(talk({"a", "b"}), {}, "x")), "<|user|>\na<|end|>\n[b<|end|>]\n</s>");
  const std::string macros = shown(of("macros").parts(two, {}, "x"));
  EXPECT_EQ(macros.substr(macros.find("<|start|>")),
            "<|start|>user<|message|>a<|end|><|start|>assistant<|message|>[ b <|end|>]"
            "<|start|>user<|message|>c<|end|><|start|>assistant<|message|>[d<|return|>]");
  // What is thought is said, where the template leaves it in.
  EXPECT_EQ(shown(of("thoughts").parts(talk({"a", "b"}), {}, "x")),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[b<|im_end|>]\n");
  EXPECT_EQ(shown(of("thoughts").parts(talk({"a", "<think>\nm\n</think>\n\nb"}), {}, "x")),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[<think>\nm\n</think>\n\nb<|im_end|>]\n");
  // Of earlier answers it leaves thoughts out.
  EXPECT_EQ(shown(of("thoughts").parts(talk({"a", "b", "c", "<think>\nm\n</think>\n\nd"}), {}, "x")),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[<think>\nm\n</think>\n\nd<|im_end|>]\n");
  EXPECT_EQ(of("headers").answer_end(), "<|end|>");
  EXPECT_EQ(of("alternate").answer_end(), "</s>");
  EXPECT_EQ(of("macros").answer_end(), "<|return|>");
  EXPECT_EQ(chatml()->answer_end(), "<|im_end|>");
  // Calls of tools are what the assistant says, with what ends them.
  const std::string calls =
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] "
      "%}"
      "<tool_call>{{ c.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
  ordered_json call = talk({"a", "b", "c", "d"});
  call[1] = ordered_json::parse(
      R"({"role": "assistant", "content": null, "tool_calls": [{"arguments": {"z": 1, "a": 2}}]})");
  EXPECT_EQ(shown(ChatTemplate("x", calls, {}, true).parts(call, {}, "line 1")),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
            "[<tool_call>{\"z\": 1, \"a\": 2}</tool_call><|im_end|>]\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n");
  expect_refusal([&] { chatml()->parts(call, {}, "line 2"); }, {"line 2", "chatml", "calls of message 2"});
  // Where nothing ends an answer, what comes behind is written once.
  const std::string bare =
      "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.arguments | "
      "tojson }}"
      "{% endfor %}{% endfor %}";
  ordered_json twice = talk({"a", "b"});
  twice.push_back(call[1]);
  std::string all_of_it;
  for (const TextPart& part : ChatTemplate("x", bare, {}, true).parts(twice, {}, "line 3"))
    all_of_it += part.text;
  EXPECT_EQ(all_of_it, "ab<call>{\"z\": 1, \"a\": 2}");
  const json begun = json::array({{{"role", "assistant"}, {"content", "x"}}});
  expect_refusal([&] { of("alternate").parts(begun, {}, "line 3"); }, {"line 3", "alternate!"});
  EXPECT_THROW(ChatTemplate("x", "{{ messages[0].content }}", {}, true).parts(two, {}, "line 1"),
               RequestError);
  // Behind an answer that is longer stands more than all that is written of this one.
  const std::string longer =
      "{% for m in messages %}{% if m.content | length > 2 %}{{ m.content }}<a long end>{% endif %}{% endfor %}";
  expect_refusal(
      [&] {
        ChatTemplate("x", longer, {}, true).parts(talk({"a", "b"}), {}, "line 2");
      },
      {"line 2", "message 2", "prompt"});
}

TEST(ChatTemplates, AreReadBesideTheTokenizer) {
  const TemporaryDirectory directory;
  const auto rendered = [&] { return chat_template_beside(directory.path())->render(talk({"a"}), true, {}); };
  const std::string plain = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(rendered(), plain);
  EXPECT_FALSE(chat_template_beside(directory.path())->writes_all());
  write_text(directory / "tokenizer_config.json", R"({"bos_token": {"content": "<b>"}})");
  EXPECT_EQ(rendered(), plain);
  write_text(
      directory / "tokenizer_config.json",
      R"({"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"})");
  EXPECT_EQ(rendered(), "<b>a");
  EXPECT_TRUE(chat_template_beside(directory.path())->writes_all());
  write_text(
      directory / "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(rendered(), "d");
  write_text(directory / "chat_template.jinja", "{{ eos_token }}alone\n");
  EXPECT_EQ(rendered(), "alone");
  write_text(directory / "chat_template.jinja", "{% if %}");
  expect_refusal(rendered, {directory / "chat_template.jinja", "line 1"});
  std::filesystem::remove(directory / "chat_template.jinja");
  write_text(directory / "tokenizer_config.json", R"({"chat_template": 3})");
  expect_refusal(rendered, {"chat_template"});
}

// What published templates do with calls of tools, in short: of each the whole turn counts, whatever the
// template makes of a part of the conversation or of the turn without its calls.
TEST(ChatTemplates, CallsOfToolsCountWhole) {
  ordered_json call = talk({"a", "b", "c", "d"});
  call[1] = ordered_json::parse(
      R"({"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"z": 1}}}]})");
  call[2]["role"] = "tool";
  const auto counted = [](const std::string& source, const ordered_json& messages) {
    return shown(ChatTemplate("x", source, {}, true).parts(messages, {}, "line 1"));
  };
  const std::string
      asks = "{% if add_generation_prompt %}<im>assistant\n{% endif %}",
      calls =
          "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson "
          "}}</call>{% endfor %}";
  // Qwen2.5: what is said has to be a text, where nothing is called.
  const std::string said =
      "{% for m in messages %}<im>{{ m.role }}\n{% if m.tool_calls %}{% if m.content %}{{ m.content "
      "}}{% endif %}" +
      calls + "{% else %}{{ m.content + '' }}{% endif %}<end>\n{% endfor %}" + asks;
  const std::string turn = "[<call>f {\"z\": 1}</call><end>]\n",
                    rest = "<im>tool\nc<end>\n<im>assistant\n[d<end>]\n";
  EXPECT_EQ(counted(said, call), "<im>user\na<end>\n<im>assistant\n" + turn + rest);
  // As a text, and beside something that is said.
  ordered_json beside = call;
  beside[1]["content"] = "b ";
  beside[1]["tool_calls"][0]["function"]["arguments"] = "{}";
  EXPECT_EQ(counted(said, beside),
            "<im>user\na<end>\n<im>assistant\n[b <call>f \"{}\"</call><end>]\n" + rest);
  // Qwen3: the last turn has room for thoughts in front of it.
  const std::string thoughts =
      "{% for m in messages %}<im>{{ m.role }}\n{% if loop.last and m.role == 'assistant' "
      "%}<think></think>{% "
      "endif %}{{ m.content or '' }}" +
      calls + "<end>\n{% endfor %}" + asks;
  EXPECT_EQ(counted(thoughts, call), "<im>user\na<end>\n<im>assistant\n" + turn +
                                         "<im>tool\nc<end>\n<im>assistant\n<think></think>[d<end>]\n");
  // Mistral: turns without calls alternate, and nothing is written to ask with; of the last question it
  // writes more.
  const std::string alternating =
      "{% set n = namespace(i=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}{% "
      "if (m.role == "
      "'user') != (n.i % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}{% set n.i = n.i + 1 %}{% "
      "endif %}{% "
      "endfor %}"
      "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
      "{% for m in messages %}{% if m.role == 'user' %}{{ '[T]' if m == asked[-1] }}[I]{{ m.content }}[/I]{% "
      "elif m.tool_calls %}" +
      calls +
      "</s>{% elif m.role == 'tool' %}[R]{{ m.content }}[/R]{% else %} {{ m.content }}</s>{% endif %}{% "
      "endfor %}";
  EXPECT_EQ(counted(alternating, call), "[T][I]a[/I][<call>f {\"z\": 1}</call></s>][R]c[/R] [d</s>]");
  ordered_json longer = call;
  for (const json& more : talk({"e", "g"})) longer.push_back(ordered_json(more));
  EXPECT_EQ(counted(alternating, longer),
            "[I]a[/I][<call>f {\"z\": 1}</call></s>][R]c[/R] [d</s>][T][I]e[/I] [g</s>]");
  // DeepSeek-R1: an answer is asked for with a thought, which calls have none of, and calls say nothing.
  const std::string thinks =
      "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<A>" + calls +
      "<end>{% elif m.role == 'assistant' %}<A>{{ m.content }}<end>{% else %}<U>{{ m.content }}{% endif %}{% "
      "endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}";
  EXPECT_EQ(counted(thinks, call), "<U>a<A>[<call>f {\"z\": 1}</call><end>]<U>c<A>[d<end>]");
  ordered_json empty = call;
  empty[1]["content"] = "";
  expect_refusal([&] { counted(thinks, empty); }, {"line 1", "calls of message 2"});
  // Nothing ends a last turn, or it cannot be the last: what ends an answer ends it.
  for (const std::string last :
       {"{{ '' if loop.last else '<end>\\n' }}",
        "{% if loop.last and m.tool_calls %}{{ raise_exception('no') }}{% endif %}<end>\n"}) {
    const std::string written = counted("{% for m in messages %}<im>{{ m.role }}\n{{ m.content or '' }}" +
                                            calls + last + "{% endfor %}" + asks,
                                        call);
    EXPECT_TRUE(written.starts_with("<im>user\na<end>\n<im>assistant\n" + turn + "<im>tool\nc<end>\n"))
        << last << written;
  }
}

// As transformers chooses: of several templates the one for tools, and tools where the one has no other.
TEST(ChatTemplates, AreGivenTools) {
  const std::string one = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}";
  const ordered_json tools = ordered_json::parse(R"([{"z": {"b": 1, "a": 2}}])");
  const ChatTemplate alone("x", one, {}, true);
  EXPECT_EQ(alone.render(talk({"a"}), true, {}, tools), R"([{"z": {"b": 1, "a": 2}}]a)");
  EXPECT_EQ(alone.render(talk({"a"}), true, {}), "a");
  EXPECT_EQ(alone.render(talk({"a"}), true, {}, ordered_json::array()), "a");
  const TemporaryDirectory directory;
  write_text(
      directory / "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(chat_template_beside(directory.path())->render(talk({"a"}), true, {}, tools), "t");
  EXPECT_EQ(chat_template_beside(directory.path())->render(talk({"a"}), true, {}), "d");
}

// A record's are the template's, as a list or as the JSON of one.
TEST(ChatTemplates, ARecordsToolsAreWritten) {
  const ChatTemplate chat("x",
                          "{% if tools %}[{% for t in tools %}{{ t.name }}{% endfor %}]{% endif %}"
                          "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
                          {}, true);
  const auto written = [&](const std::string& tools) {
    return shown(
        read_record(
            R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])" +
                tools + "}",
            "line 1", chat)
            .parts);
  };
  const std::string plain = "<user>a<assistant>[b]";
  EXPECT_EQ(written(""), plain);
  EXPECT_EQ(written(R"(, "tools": null)"), plain);
  EXPECT_EQ(written(R"(, "tools": [])"), plain);
  EXPECT_EQ(written(R"(, "tools": [{"name": "f"}, {"name": "g"}])"), "[fg]" + plain);
  EXPECT_EQ(written(R"(, "tools": "[{\"name\": \"f\"}]")"), "[f]" + plain);
  for (const char* wrong : {R"({"name": "f"})", R"(["f"])", "3", R"("{}")"})
    expect_refusal([&] { written(fmt::format(R"(, "tools": {})", wrong)); },
                   {"line 1", "tools", "legal: a list of objects"});
  expect_refusal([&] { written(R"(, "tools": "[")"); }, {"line 1", "tools"});
}

}  // namespace
}  // namespace echelon::chat_template_test
