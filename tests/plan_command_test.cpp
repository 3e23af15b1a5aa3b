// `echelon plan` as its users meet it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "verb_test.h"

namespace echelon::plan_command_test {
namespace {

namespace checks = echelon::checks;
using checks::CommandResult;
using nlohmann::json;

class PlanCommand : public checks::VerbTest {
 protected:
  PlanCommand() : VerbTest("plan") {}
  json object(const std::string& arguments, int status = 0) const {
    const CommandResult r = run(arguments + " --json 2>/dev/null");
    EXPECT_EQ(r.status, status) << arguments;
    return json::parse(r.output);
  }
};

constexpr const char* small = "--model llama-3-8b --machine h100 --gpus 8 --global-batch 64 --seq-len 4096 ";

TEST_F(PlanCommand, AnswersInOneObject) {
  const json answer = object(std::string(small) + "--top 3");
  EXPECT_GT(answer["feasible"], 0);
  EXPECT_GT(answer["rejected"]["memory"], 0);
  EXPECT_GT(answer["search_seconds"], 0);
  ASSERT_EQ(answer["plans"].size(), 3u);
  double before = 0;
  for (const json& plan : answer["plans"]) {
    for (const char* key : {"dp", "tp", "pp", "cp", "ep", "zero", "chunks", "micro_batch", "microbatches"})
      EXPECT_TRUE(plan[key].is_number_integer()) << key;
    EXPECT_EQ(plan["dp"].get<int>() * plan["tp"].get<int>() * plan["pp"].get<int>() * plan["cp"].get<int>(),
              8);
    EXPECT_EQ(plan["dtype"], "bf16");
    EXPECT_GE(plan["step_seconds"], before);
    before = plan["step_seconds"];
    double parts = 0, bytes = 0;
    for (const auto& [name, value] : plan["time_seconds"].items()) parts += value.get<double>();
    EXPECT_NEAR(parts, before, 1e-6 * before);
    for (const auto& [name, value] : plan["memory_bytes"].items())
      if (name != "total") bytes += value.get<double>();
    EXPECT_DOUBLE_EQ(bytes, plan["memory_bytes"]["total"].get<double>());
    const double tokens = 64 * 4096 / (before * 8);
    EXPECT_NEAR(plan["tokens_per_second_per_gpu"].get<double>(), tokens, 1e-6 * tokens);
    EXPECT_NEAR(plan["mfu"].get<double>(), plan["model_tflops_per_gpu"].get<double>() / 989.4, 1e-6);
    EXPECT_TRUE(plan["traffic_bytes_per_gpu"].contains("dp"));
  }
}

TEST_F(PlanCommand, PricesWhatIsPinned) {
  const json plan = object(std::string(small) +
                           "--dp 2 --tp 2 --pp 2 --cp 1 --schedule 1f1b --zero 1 --micro-batch 1 "
                           "--recompute full --layers-per-stage 17,15")["plans"][0];
  EXPECT_EQ(plan["tp"], 2);
  EXPECT_EQ(plan["microbatches"], 32);
  EXPECT_EQ(plan["layers_per_stage"], (json{17, 15}));
  // The bubble of 1F1B is at least (P-1)/(M+P-1), and little more where stages are nearly equal.
  EXPECT_GT(plan["bubble_fraction"], 1.0 / 33 - 1e-9);
  EXPECT_LT(plan["bubble_fraction"], 0.12);
}

TEST_F(PlanCommand, NothingFits) {
  const json answer = object("--model llama-3-405b --machine h100 --gpus 8 --global-batch 8", 1);
  EXPECT_TRUE(answer["plans"].empty());
  EXPECT_GT(answer["rejected"]["memory"], 0);
  EXPECT_GT(answer["nearest"]["bytes"], answer["nearest"]["usable_bytes"]);
  EXPECT_NE(run("--model llama-3-405b --machine h100 --gpus 8 --global-batch 8").output.find("GB too much"),
            std::string::npos);
}

TEST_F(PlanCommand, RefusesWhatCannotBe) {
  refused("--gpus 0", {"--gpus 0", "from 1"});
  refused("--gpus 64 --dp 8 --global-batch 4", {"--global-batch 4", "at least 8"});
  refused("--model llama-3-70b --gpus 6 --tp 3", {"--tp 3", "64 heads", "1, 2, 4"});
  refused("--gpus 8 --tp 16", {"--tp 16", "--gpus 8"});
  refused("--machine tpu", {"--machine tpu", "h100"});
  refused("--software none", {"--software none", "current"});
  refused("--dtype int4", {"--dtype int4", "bf16"});
  refused("--objective speed", {"--objective speed", "memory"});
  refused("--objective gpus", {"--target-time"});
  refused("--sweep layers=3", {"--sweep layers=3", "seq-len"});
  refused("--sweep gpus=8,,16", {"--sweep 8,,16", "missing"});
  refused("--sweep gpus=8,16 --sweep-out sweep.pdf", {"--sweep-out sweep.pdf", ".csv", ".svg"});
  refused("--sweep gpus=8,16 --out plan.toml", {"--out plan.toml", "--sweep"});
  refused("--sweep gpus=8,16 --against tp=2", {"--against tp=2", "--sweep"});
  refused("--sweep-out sweep.csv", {"--sweep-out sweep.csv", "without --sweep"});
  refused("--against tp=3", {"--tp 3", "--gpus 8"});
  refused("--memory-margin nan", {"--memory-margin nan"});
  refused("--schedule quick", {"--schedule quick", "1f1b"});
  refused("--chunks 3 --schedule 1f1b", {"--chunks 3", "interleaved"});
  refused("--plan absent.toml", {"--plan absent.toml"});
}

TEST_F(PlanCommand, ExplainsWritesAndReadsBack) {
  const CommandResult said =
      run(std::string(small) + "--explain --against tp=8,zero=1 --out plan.toml --html plan.html");
  EXPECT_EQ(said.status, 0);
  for (const char* words : {"computation", "memory of each pipeline rank", "why not the next",
                            "why not tp=8,zero=1", "in-flight activations"})
    EXPECT_NE(said.output.find(words), std::string::npos) << words;
  const std::string page = read("plan.html");
  EXPECT_NE(page.find("</html>"), std::string::npos);
  EXPECT_EQ(page.find("src="), std::string::npos);  // needs nothing else
  const json first = object(std::string(small) + "--top 1")["plans"][0];
  const json again = object("--plan plan.toml --machine h100 --top 1")["plans"][0];
  EXPECT_NEAR(again["step_seconds"].get<double>(), first["step_seconds"].get<double>(), 1e-9);
  EXPECT_EQ(again["memory_bytes"], first["memory_bytes"]);
}

// The planner knows programs that do what the trainer here does not.
TEST_F(PlanCommand, SaysWhichPlansOnlyOthersTrain) {
  const CommandResult other =
      run("--model deepseek-v3 --machine h100 --gpus 2048 --dtype fp8 --dp 128 --tp 1 --pp 16 "
          "--cp 1 --ep 64 --zero 1 --top 1 --out plan.toml 2>&1");
  EXPECT_EQ(other.status, 0) << other.output;
  EXPECT_NE(
      other.output.find("plan.toml is a plan for current; train and verify refuse it: --model deepseek-v3"),
      std::string::npos)
      << other.output;
  EXPECT_EQ(run(std::string(small) + "--top 1 --out plan.toml 2>&1").output.find("refuse it"),
            std::string::npos);
}

TEST_F(PlanCommand, Sweeps) {
  const std::string base =
      "--model llama-3-8b --machine h100 --global-batch 128 --seq-len 4096 --pp 1 --cp 1 ";
  EXPECT_EQ(run(base + "--sweep gpus=8..32 --sweep-out sweep.csv").status, 0);
  const std::string csv = read("sweep.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 4);
  EXPECT_EQ(run(base + "--sweep gpus=8,16 --sweep-out sweep.svg").status, 0);
  EXPECT_NE(read("sweep.svg").find("<polyline"), std::string::npos);
}

}  // namespace
}  // namespace echelon::plan_command_test
