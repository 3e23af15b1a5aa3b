// What a checkpoint is said to take on disk, beside what it does.
#include "checkpoint/checkpoint_size.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "verb_test.h"

namespace echelon::checkpoint_size_test {
namespace {

namespace fs = std::filesystem;

std::int64_t bytes_of_tensors(const fs::path& checkpoint) {
  std::int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    if (entry.path().extension() == ".safetensors") {
      const SafetensorsFile file(entry.path().string());
      for (const StoredTensor& tensor : file.tensors()) {
        std::int64_t numel = 1;
        for (const std::int64_t size : tensor.shape) numel *= size;
        bytes += numel * stored_type_bytes(tensor.type);
      }
    }
  return bytes;
}

class CheckpointSize : public checks::VerbTest {
 protected:
  CheckpointSize() : VerbTest("train") { write("text.txt", std::string(4000, 'a') + "bcd"); }

  // What a dry run says, and what a run of one step writes.
  void compare(const std::string& plan) {
    const std::string shape = plan + " --global-batch 4 --micro-batch 2 --seq-len 8",
                      directory = fmt::format("ck{}", ++runs_);
    const checks::CommandResult dry = run(shape + " --dry-run --json");
    ASSERT_EQ(dry.status, 0) << plan;
    ASSERT_EQ(run(shape + " --data text.txt --steps 1 --sample 0 --val-fraction 0 --threads 1 --checkpoint " +
                  directory)
                  .status,
              0)
        << plan;
    EXPECT_EQ(nlohmann::json::parse(dry.output)["checkpoint_bytes"],
              bytes_of_tensors(path_of(directory + "/step-00000001")))
        << plan;
  }

 private:
  int runs_ = 0;
};

TEST_F(CheckpointSize, IsThatOfItsTensors) {
  compare("--model llama-tiny --dp 2 --compress powersgd:2 --tp 2");
  compare("--model mixtral-tiny --dp 2 --ep 2 --bias-rate 0.01 --precision bf16-lean");
}

TEST_F(CheckpointSize, IsThatOfItsTensorsOnOtherMeshes) {  // long
  compare("--model gpt2-tiny --dp 2 --compress topk:0.1");
  compare("--model llama-tiny --dp 2 --tp 2 --zero 1 --precision bf16");
  compare("--model llama-tiny --pp 2 --vocabulary-parallel on");
  compare("--model llama-tiny --dp 2 --zero 2 --optimizer muon");
  compare("--model llama-tiny --lora rank=2 --dp 2");
}

TEST(CheckpointDemand, CountsWhatIsThereAtATime) {
  EXPECT_EQ((CheckpointDemand{.written = 7}).most(), 7);
  EXPECT_EQ((CheckpointDemand{.written = 7, .keep = 2}).most(), 3);
  EXPECT_EQ((CheckpointDemand{.written = 7, .keep = 2, .there = 2}).most(), 1);
  EXPECT_EQ((CheckpointDemand{.written = 7, .keep = 2, .there = 5}).most(), 1);
  EXPECT_EQ((CheckpointDemand{.written = 1, .keep = 2}).most(), 1);
}

TEST(CheckpointDemand, IsNotedOnASmallDisk) {
  constexpr std::int64_t one = 1 << 20;
  const auto note = [](double free, const CheckpointDemand& demand) {
    return small_disk_note("ck", free, one, demand);
  };
  EXPECT_EQ(note(7.0 * one, {.written = 7}), "");
  EXPECT_EQ(note(3.0 * one, {.written = 7, .keep = 2}), "");
  EXPECT_EQ(note(0.5 * one, {.written = 1}),
            "--checkpoint ck: the disk has 512.00 KiB left, and a checkpoint takes 1.00 MiB");
  EXPECT_EQ(
      note(3.5 * one, {.written = 7}),
      "--checkpoint ck: the disk has 3.50 MiB left, for 3 checkpoints of 1.00 MiB, and this run writes 7; "
      "--keep 2 has room");
  EXPECT_EQ(
      note(1.5 * one, {.written = 7}),
      "--checkpoint ck: the disk has 1.50 MiB left, for 1 checkpoint of 1.00 MiB, and this run writes 7");
  EXPECT_EQ(note(2.5 * one, {.written = 7, .keep = 4, .there = 1}),
            "--checkpoint ck: the disk has 2.50 MiB left, for 2 checkpoints of 1.00 MiB, and --keep 4 needs "
            "4 more; "
            "--keep 2 has room");
  // What is advised has room.
  for (const std::int64_t there : {0, 1, 5})
    for (int fit = there == 0 ? 2 : 1; fit < 6; ++fit)
      EXPECT_EQ(note(fit * 1.0 * one, {.written = 99, .keep = fit + there - 1, .there = there}), "")
          << there << " " << fit;
}

}  // namespace
}  // namespace echelon::checkpoint_size_test
