// Where in a conversation that a chat template has written a turn's calls of tools are.
#pragma once

#include <cstddef>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace echelon {

// Whether a message, which has a "role", is the assistant's and has "tool_calls".
bool calls_tools(const nlohmann::ordered_json& message);

struct TextPlace {
  std::size_t begin = 0, end = 0;
};

struct WrittenCalls {
  bool any = false;                // of the turn's calls are written at all
  std::optional<TextPlace> place;  // of all that the assistant writes in that turn, where it can be told
};

// Of the turn with this number in `messages`, which `text` is written of. `write` does that, with the
// question for an answer behind them where it is told so; RequestError where the template refuses.
// `answer_end`: what ends a plain answer.
WrittenCalls find_calls(const nlohmann::ordered_json& messages, std::size_t number, const std::string& text,
                        const std::function<std::string(const nlohmann::ordered_json&, bool asks)>& write,
                        const std::string& answer_end);

}  // namespace echelon
