#include "train/run_history.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "refusals.h"
#include "temporary_directory.h"
#include "train/log_formats.h"

namespace echelon::run_history_test {
namespace {

using nlohmann::json;
using namespace checks;

class RunHistory : public testing::Test {
 protected:
  json history(const std::vector<LogEntry>& entries, const HistoryLimits& limits = {}) const {
    std::string text;
    for (const LogEntry& entry : entries) text += json_line(entry);
    return read(text, limits);
  }
  json read(const std::string& text, const HistoryLimits& limits = {}) const {
    write_text(directory_ / "log", text);
    return json::parse(run_history(directory_ / "log", "view", limits).dump());
  }
  static StepRecord step(std::int64_t n, double loss) { return {n, loss, 1, 0.5, 8, 100, 0.25, 0.08, "", {}}; }
  TemporaryDirectory directory_;
};

TEST_F(RunHistory, PutsARunTogether) {
  StepRecord skipped = step(2, std::nan(""));
  skipped.skipped = "not finite";
  const json h = history({RunBegin{0, R"({"model":"m"})"}, step(1, 3), skipped, SavedCheckpoint{2, "ck/2"},
                          Evaluation{2, 2.5}, WorkSpread{1, 2, {0.5, 1}}, Fingerprint{2, "f"}, RunEnd{2, R"({"steps":2})"}});
  EXPECT_EQ(h["steps"]["step"], json({1, 2}));
  EXPECT_EQ(h["steps"]["loss"], json({3, nullptr}));
  EXPECT_EQ(h["steps"]["count"], 2);
  EXPECT_EQ(h["steps"]["each_point"], 1);
  EXPECT_EQ(h["skipped"][0]["step"], 2);
  EXPECT_EQ(h["starts"][0]["start"]["model"], "m");
  EXPECT_EQ(h["checkpoints"][0]["checkpoint"], "ck/2");
  EXPECT_EQ(h["evaluations"][0]["validation_loss"], 2.5);
  EXPECT_EQ(h["spreads"][0]["slowest_rank"], 1);
  EXPECT_EQ(h["fingerprints"][0]["fingerprint"], "f");
  EXPECT_EQ(h["summary"]["steps"], 2);
  EXPECT_EQ(h["taken_back"], 0);
}

// A run that died behind its checkpoint does steps again; so does an older log, which does not say its starts.
TEST_F(RunHistory, TakesBackWhatWasDoneAgain) {
  for (const bool says_starts : {true, false}) {
    std::vector<LogEntry> entries{step(1, 5), step(2, 4), step(3, 30), Evaluation{3, 9}};
    if (says_starts) entries.emplace_back(RunBegin{2, R"({"resumed_from":"ck"})"});
    for (std::int64_t n : {3, 4}) entries.emplace_back(step(n, 1.0 * static_cast<double>(n)));
    const json h = history(entries);
    EXPECT_EQ(h["steps"]["step"], json({1, 2, 3, 4}));
    EXPECT_EQ(h["steps"]["loss"], json({5, 4, 3, 4}));
    EXPECT_EQ(h["taken_back"], 1);
    ASSERT_EQ(h["starts"].size(), 1u);
    EXPECT_EQ(h["starts"][0]["step"], 2);
    EXPECT_TRUE(h["evaluations"].empty());
  }
}

// What was corrupted is said again, right: nothing started anew.
TEST_F(RunHistory, TakesTheRepairedNumbersOfAStep) {
  const json h = history({step(1, 5), step(2, 4), step(3, 30), step(4, 29), Corruption{3, 4, {1}, "rank 1", true}, step(3, 3),
                          step(4, 2), step(5, 1)});
  EXPECT_EQ(h["steps"]["step"], json({1, 2, 3, 4, 5}));
  EXPECT_EQ(h["steps"]["loss"], json({5, 4, 3, 2, 1}));
  EXPECT_EQ(h["taken_back"], 0);
  EXPECT_TRUE(h["starts"].empty());
}

TEST_F(RunHistory, ShowsManyStepsAsMeans) {
  std::vector<LogEntry> entries;
  for (std::int64_t n = 1; n <= 10; ++n) {
    StepRecord record = step(n, static_cast<double>(n));
    record.experts = {{1, 1.5, 0.25, 0, {static_cast<double>(n), 0, 0, 0}, {0, 0, 0, 0}}};
    entries.emplace_back(record);
  }
  const json h = history(entries, {4, 2});
  EXPECT_EQ(h["steps"]["each_point"], 3);
  EXPECT_EQ(h["steps"]["step"], json({3, 6, 9, 10}));
  EXPECT_EQ(h["steps"]["loss"], json({2.0, 5.0, 8.0, 10.0}));
  EXPECT_EQ(h["experts"]["columns"], json({{1, 5}, {6, 10}}));
  EXPECT_EQ(h["experts"]["layers"][0]["loads"], json({{4.0, 4.0}, {0, 0}, {0, 0}, {0, 0}}));
  EXPECT_EQ(h["experts"]["layers"][0]["drop_rate"], json({0.25, 0.25}));
}

TEST_F(RunHistory, RefusesWhatIsNoLog) {
  const auto refused = [&](const std::string& text, const std::vector<std::string>& words) {
    try {
      read(text);
      ADD_FAILURE() << "not refused: " << text;
    } catch (const RequestError& error) {
      for (const std::string& word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in " << error.what();
    }
  };
  refused("{\"step\": 1, \"loss\": 2}\nloss 3\n", {"view", "log: line 2: not JSON"});
  refused("step,loss\n1,2\n", {"not what train --log writes as JSON lines: line 1: not JSON"});
  refused("[1]\n", {"line 1"});
  refused("{\"loss\": 1}\n", {"line 1", "step"});
  refused("{\"step\": \"one\", \"loss\": 1}\n", {"line 1", "whole number"});
  refused("{\"step\": 1, \"loss\": 1, \"experts\": [{\"layer\": 1}]}\n", {"no training's log"});
  // The end of a line that a killed run did not write is not read.
  EXPECT_EQ(read("{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"lo")["steps"]["count"], 1);
}

}  // namespace
}  // namespace echelon::run_history_test
