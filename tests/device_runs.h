// Whole runs of a small model on a device that is this machine's memory, and the same run on the host.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_driver.h"
#include "mesh_runs.h"
#include "patience.h"
#include "temporary_directory.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::checks {

class RunsOnADevice : public testing::Test {
 protected:
  RunsOnADevice() {
    std::string text;
    for (int i = 0; i < 60; ++i) text += fmt::format("{} bottles of {} on the wall\n", i, i * i);
    write_text(directory_ / "text", text);
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  // On so many ranks; where there is no driver on the host.
  TrainRequest request(const char* name, std::shared_ptr<FakeDriver> driver, int dp) const {
    TrainRequest r = untimed();
    r.plan = odd_plan(odd_llama(), dp, 1, false);
    r.plan.model.vocab = bytes_vocab;
    r.plan.global_batch = 4;
    r.optimizer.total_steps = 4;
    r.optimizer.warmup_steps = 1;
    r.run.timeout = patience;
    r.run.driver = std::move(driver);
    r.save_every = 2;
    r.save_beside = true;
    r.sample_tokens = 4;
    r.fingerprint_every = 1;
    r.checkpoint_directory = directory_ / name;
    return r;
  }
  TrainSummary run(const TrainRequest& r) const { return train(r, *data_, {}); }

  static void expect_predicted_memory(const TrainSummary& device) {
    for (const MemoryCategory category : all_memory_categories)
      EXPECT_EQ(device.measured_memory[category], device.predicted_memory[category])
          << memory_category_name(category);
  }
  // The host's numbers too.
  static void expect_end_of(const TrainSummary& host, const TrainSummary& device) {
    EXPECT_EQ(device.fingerprint, host.fingerprint);
    EXPECT_EQ(device.final_loss, host.final_loss);
    EXPECT_EQ(device.validation_loss, host.validation_loss);
    expect_predicted_memory(device);
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

}  // namespace echelon::checks
