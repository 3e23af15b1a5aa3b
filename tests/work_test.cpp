#include "base/work.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace echelon::work_test {
namespace {

Work<int> say(std::string& said, char letter, int times) {
  for (int i = 0; i < times; ++i) {
    said += letter;
    co_await Pause{};
  }
  co_return times;
}

Work<void> fail_after_a_pause(std::string& said) {
  co_await say(said, '!', 1);
  throw std::runtime_error("no");
}

Work<std::unique_ptr<int>> both(std::string& said, char letter) {
  const int first = co_await say(said, letter, 2);
  const int none = co_await say(said, letter, 0);
  const int last = co_await say(said, letter, 1);
  co_return std::make_unique<int>(100 * first + 10 * none + last);
}

TEST(Work, GoesOnFromPauseToPause) {
  std::string said;
  Work<std::unique_ptr<int>> work = both(said, 'a');
  EXPECT_EQ(said, "");  // nothing before the first step
  EXPECT_FALSE(work.step());
  EXPECT_EQ(said, "a");
  EXPECT_FALSE(work.step());
  EXPECT_FALSE(work.step());
  EXPECT_EQ(said, "aaa");
  EXPECT_TRUE(work.step());
  EXPECT_EQ(*work.take(), 201);
}

TEST(Work, TwoChangePlacesInTheOrderOfTheirSteps) {
  std::string said;
  Work<std::unique_ptr<int>> a = both(said, 'a');
  Work<int> b = say(said, 'b', 2);
  while (!a.step()) b.step();
  EXPECT_EQ(said, "ababa");
  EXPECT_EQ(b.take(), 2);
}

TEST(Work, FinishesAtOnce) {
  std::string said;
  EXPECT_EQ(*both(said, 'x').finish(), 201);
  EXPECT_EQ(said, "xxx");
}

TEST(Work, ThrowsWhatItsPartsThrow) {
  std::string said;
  Work<void> work = fail_after_a_pause(said);
  EXPECT_FALSE(work.step());
  EXPECT_THROW(work.step(), std::runtime_error);
  const auto outer = [](std::string& s) -> Work<int> {
    co_await fail_after_a_pause(s);
    co_return 1;
  };
  EXPECT_THROW(outer(said).finish(), std::runtime_error);
}

// A model's layers are as many, one after the other.
TEST(Work, PartsLeaveNothingOnTheStack) {
  constexpr int parts = 300'000;
  std::string said;
  const auto all = [](std::string& s) -> Work<int> {
    int sum = 0;
    for (int i = 0; i < parts; ++i) sum += co_await say(s, 'l', i % 100'000 == 0 ? 1 : 0);
    co_return sum;
  };
  EXPECT_EQ(all(said).finish(), 3);
  EXPECT_EQ(said, "lll");
}

TEST(Work, MayBeLeftUnfinished) {
  std::string said;
  auto held = std::make_shared<int>(1);
  const auto holds = [](std::string& s, std::shared_ptr<int> value) -> Work<int> {
    co_await say(s, 'h', 3);
    co_return *value;
  };
  {
    Work<int> work = holds(said, held);
    EXPECT_FALSE(work.step());
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace echelon::work_test
