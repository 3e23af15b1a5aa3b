// Which cases of a long loop the fast suite runs: each test's first and a share of the others, the same ones
// each time. The slow suite runs all of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "base/philox.h"

namespace echelon::checks {

inline bool takes_all_cases() { return std::getenv("ECHELON_ALL_CASES") != nullptr; }

// To be asked once for each case of a test; one in `share` is taken, others in each test.
inline bool is_taken(std::uint64_t share = 10) {
  static const bool all = takes_all_cases();
  static std::map<std::string, int> cases;  // by test
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(test->test_suite_name()) + "." + test->name();
  const int number = cases[name]++;
  return all || number == 0 || name_hash((name + std::to_string(number)).c_str()) % share == 0;
}

}  // namespace echelon::checks
