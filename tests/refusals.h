// What is refused, and in which words.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace echelon::checks {

// `act` throws a RequestError of one line that has all these words.
template <class Act>
void expect_refusal(const Act& act, const std::vector<std::string>& words) {
  try {
    act();
  } catch (const RequestError& error) {
    const std::string message = error.what();
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return;
  }
  ADD_FAILURE() << "not refused: " << (words.empty() ? "" : words[0]);
}

}  // namespace echelon::checks
