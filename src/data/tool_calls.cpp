#include "data/tool_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/template_texts.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

// Nothing that the text has, and that JSON writes as it is.
std::string new_mark(const std::string& text, const char* of_what) {
  std::string mark;
  for (int i = 0; mark.empty() || text.find(mark) != std::string::npos; ++i)
    mark = fmt::format("echelon{}{}mark", of_what, i);
  return mark;
}

// Each call as it is, but for what is called, and with what.
void mark_calls(ordered_json& message, const std::string& mark) {
  for (ordered_json& call : message["tool_calls"]) {
    if (!call.is_object()) continue;
    ordered_json& function =
        call.contains("function") && call["function"].is_object() ? call["function"] : call;
    if (function.contains("name")) function["name"] = mark;
    if (!function.contains("arguments")) continue;
    ordered_json& arguments = function["arguments"];
    if (arguments.is_object()) arguments = ordered_json{{mark, mark}};
    if (arguments.is_string()) arguments = mark;
  }
}

std::optional<std::string> behind(const std::string& text, const std::string& mark) {
  const std::size_t at = text.rfind(mark);
  return at == std::string::npos ? std::nullopt : std::optional(text.substr(at + mark.size()));
}

}  // namespace

bool calls_tools(const ordered_json& message) {
  const auto calls = message.find("tool_calls");
  return message["role"] == "assistant" && calls != message.end() && !calls->is_null() && !calls->empty();
}

WrittenCalls find_calls(const ordered_json& messages, std::size_t number, const std::string& text,
                        const std::function<std::string(const ordered_json&, bool asks)>& write,
                        const std::string& answer_end) {
  const std::string call = new_mark(text, "call"), said = new_mark(text, "text");
  const auto first_of = [](const ordered_json& all, std::size_t count) {
    return ordered_json(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
  };
  // A part of a conversation is what a template may refuse.
  const auto tried = [&](const ordered_json& part, bool asks) -> std::optional<std::string> {
    try {
      return write(part, asks);
    } catch (const RequestError&) {
      return std::nullopt;
    }
  };
  // The whole as it is but for the calls of this turn: with the text it has in common what is before the
  // turn, and what is behind it.
  ordered_json marked = messages;
  mark_calls(marked[number], call);
  const std::string with_marks = write(marked, false);
  WrittenCalls calls;
  const std::size_t first = with_marks.find(call);
  calls.any = first != std::string::npos;
  if (!calls.any) return calls;

  // From the end of what was said before on; the message before is marked in a text of its own, since a
  // template may look at it. What is asked with stands there first, or what an answer without calls has in
  // front of it where the two differ, as where thoughts are asked for that this turn has not.
  std::optional<std::size_t> begin;
  const auto begin_behind = [&](const std::string& opened, const std::optional<std::string>& head) {
    if (!begin && head && opened.starts_with(*head)) begin = first - opened.size() + head->size();
  };
  if (number == 0) {
    begin_behind(with_marks.substr(0, first), tried(ordered_json::array(), true));
  } else {
    ordered_json heard = marked;
    ordered_json& before = heard[number - 1];
    if (calls_tools(before))
      mark_calls(before, said);
    else
      before["content"] = said;
    const std::optional<std::string> whole = tried(heard, false);
    const std::optional<std::string> since = whole ? behind(*whole, said) : std::nullopt;
    const std::size_t opens = since ? since->find(call) : std::string::npos;
    if (opens == std::string::npos) return calls;
    const std::string opened = since->substr(0, opens);
    if (with_marks.compare(first - std::min(first, opens), opens, opened) != 0) return calls;
    if (const auto question = tried(first_of(heard, number), true))
      begin_behind(opened, behind(*question, said));
    ordered_json plain = first_of(heard, number + 1);
    plain.back().erase("tool_calls");
    plain.back()["content"] = call;
    if (const auto answer = tried(plain, false))
      if (const auto head = behind(*answer, said)) begin_behind(opened, head->substr(0, head->find(call)));
  }

  // To where the conversation would end with this turn, but for spaces; or to what ends an answer, where it
  // would not end as it goes on.
  const std::string rest = *behind(with_marks, call);
  std::optional<std::size_t> length;
  if (const auto alone = tried(first_of(marked, number + 1), false))
    if (const auto tail = behind(*alone, call))
      if (const std::string turn = stripped(*tail, "", false, true); rest.starts_with(turn))
        length = turn.size();
  const std::string end = stripped(answer_end, "", true, true);
  if (!end.empty()) {
    const std::size_t from = length.value_or(0);
    const std::size_t next = rest.find_first_not_of(" \n", from);
    if (length && next != std::string::npos && rest.compare(next, end.size(), end) == 0 &&
        !std::string_view(rest).substr(0, from).ends_with(end))
      length = next + end.size();  // that is left to what comes next
    if (!length && number + 1 < messages.size()) {
      ordered_json heard = marked;
      heard[number + 1]["content"] = said;
      if (const auto whole = tried(heard, false); whole && whole->rfind(call) != std::string::npos) {
        const std::string between = whole->substr(whole->rfind(call) + call.size());
        const std::size_t at = between.find(end);
        if (at != std::string::npos && at < between.find(said) &&
            rest.starts_with(between.substr(0, at + end.size())))
          length = at + end.size();
      }
    }
  }
  if (!begin || !length) return calls;
  const std::size_t left = rest.size() - *length;  // behind the turn
  const auto same = [&](std::size_t size, std::size_t here, std::size_t there) {
    return text.compare(here, size, with_marks, there, size) == 0;
  };
  if (*begin + left <= text.size() && same(*begin, 0, 0) &&
      same(left, text.size() - left, with_marks.size() - left))
    calls.place = TextPlace{*begin, text.size() - left};
  return calls;
}

}  // namespace echelon
