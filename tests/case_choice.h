// Which cases of a long loop are run: each test's first and a share of the others, the same ones each time.
// The slow suite takes half of them, with those that the fast one takes (ECHELON_WIDE_CASES), and whoever
// asks for that, all (ECHELON_ALL_CASES).
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "base/philox.h"

namespace echelon::checks {

inline bool takes_all_cases() { return std::getenv("ECHELON_ALL_CASES") != nullptr; }
inline bool takes_wide_cases() { return takes_all_cases() || std::getenv("ECHELON_WIDE_CASES") != nullptr; }

// Of a loop over `all` that are alike, of which the fast suite makes `few`.
inline int so_many(int few, int all) {
  return takes_all_cases() ? all : takes_wide_cases() ? (all + 1) / 2 : few;
}

// To be asked once for each case of a test; one in `share` is taken, others in each test.
inline bool is_taken(std::uint64_t share = 10) {
  static const bool all = takes_all_cases(), wide = takes_wide_cases();
  static std::map<std::string, int> cases;  // by test
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(test->test_suite_name()) + "." + test->name();
  const int number = cases[name]++;
  const std::uint64_t hash = name_hash((name + std::to_string(number)).c_str());
  return all || number == 0 || hash % share == 0 || (wide && hash / share % 2 == 0);
}

}  // namespace echelon::checks
