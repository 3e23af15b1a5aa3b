// `echelon plan` as its users meet it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "page_checks.h"
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
  int before = 1;
  for (const json& plan : answer["plans"]) {
    for (const char* key : {"dp", "tp", "pp", "cp", "ep", "zero", "chunks", "micro_batch", "microbatches"})
      EXPECT_TRUE(plan[key].is_number_integer()) << key;
    EXPECT_EQ(plan["dp"].get<int>() * plan["tp"].get<int>() * plan["pp"].get<int>() * plan["cp"].get<int>(),
              8);
    EXPECT_EQ(plan["dtype"], "bf16");
    EXPECT_GE(plan["rank"], before);
    EXPECT_TRUE(plan["rank_is_shared"].is_boolean());
    before = plan["rank"];
    const double seconds = plan["step_seconds"];
    double parts = 0, bytes = 0;
    for (const auto& [name, value] : plan["time_seconds"].items()) parts += value.get<double>();
    EXPECT_NEAR(parts, seconds, 1e-6 * seconds);
    for (const auto& [name, value] : plan["memory_bytes"].items())
      if (name != "total") bytes += value.get<double>();
    EXPECT_DOUBLE_EQ(bytes, plan["memory_bytes"]["total"].get<double>());
    const double tokens = 64 * 4096 / (seconds * 8);
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

// Where no number of devices is enough, how far the fastest is from it.
TEST_F(PlanCommand, TheFastestIsSaidWhereNoNumberReachesTheTarget) {
  const std::string asked =
      "--model gpt2-1.5b --gpus 16 --global-batch 64 --seq-len 1024 --objective gpus --target-time 0.0001";
  const CommandResult r = run(asked);
  EXPECT_EQ(r.status, 1);
  const json best = object("--model gpt2-1.5b --gpus 16 --global-batch 64 --seq-len 1024")["plans"][0];
  EXPECT_NE(
      r.output.find(
          "no number of GPUs up to --gpus 16 reaches 0.0001 s a step; the fastest that was found takes"),
      std::string::npos)
      << r.output;
  EXPECT_NE(r.output.find("on 16 GPUs: dp "), std::string::npos) << r.output;
  const json near = object(asked, 1)["near"];
  ASSERT_EQ(near.size(), 1u);
  EXPECT_EQ(near[0]["gpus"], 16);
  EXPECT_LE(near[0]["step_seconds"].get<double>(), best["step_seconds"].get<double>() * (1 + 1e-9));
  // Of a batch of 2 no more than some have anything to do.
  const json few = object(
      "--model gpt2-tiny --gpus 16 --global-batch 2 --seq-len 64 --objective gpus --target-time 1e-9", 1);
  ASSERT_EQ(few["near"].size(), 1u);
  EXPECT_LE(few["near"][0]["gpus"], 16);
}

TEST_F(PlanCommand, RefusesWhatCannotBe) {  // long
  refused("--gpus 0", {"--gpus 0", "from 1"});
  refused("--gpus 64 --dp 8 --global-batch 4",
          {"--dp 8", "only 4 sequences", "legal: up to 4, or --global-batch of at least 8"});
  refused("--model llama-3-70b --gpus 6 --tp 3", {"--tp 3", "64 heads", "legal: 1, 2\n"});
  refused("--gpus 8 --tp 16", {"--tp 16", "--gpus 8"});
  refused("--dp 65536 --tp 65536", {"--tp 65536", "4294967296 ranks", "legal: up to 1000000"});
  refused("--dp 1000000 --tp 1000000 --pp 1000000 --cp 1000000", {"ranks or more", "legal: up to 1000000"});
  refused("--machine tpu", {"--machine tpu", "h100"});
  refused("--software none", {"--software none", "current"});
  refused("--precision int4", {"--precision int4", "bf16"});
  refused("--objective speed", {"--objective speed", "memory"});
  refused("--objective gpus", {"--target-time"});
  refused("--sweep layers=3", {"--sweep layers=3", "seq-len"});
  refused("--sweep gpus=8,,16", {"--sweep 8,,16", "missing"});
  refused("--sweep gpus=8..2000000000", {"--sweep 8..2000000000", "to at most 1000000000"});
  refused("--global-batch 1000001", {"--global-batch 1000001: must be a number from 1 to 1000000"});
  refused("--sweep gpus=8,16 --sweep-out sweep.pdf", {"--sweep-out sweep.pdf", ".csv", ".svg"});
  refused("--sweep gpus=8,16 --out plan.toml", {"--out plan.toml", "--sweep"});
  refused("--sweep gpus=8,16 --against tp=2", {"--against tp=2", "--sweep"});
  refused("--sweep-out sweep.csv", {"--sweep-out sweep.csv", "without --sweep"});
  refused("--out plan.html", {"--out plan.html", "a plan for train", ".toml", "--html plan.html"});
  refused("--out plan.svg", {"--out plan.svg", "a plan for train", "legal: plan.toml"});
  refused("--html plan.toml", {"--html plan.toml", "a page", "legal: plan.html"});
  refused("--against tp=3", {"--tp 3", "--gpus 8"});
  refused("--memory-margin nan", {"--memory-margin nan"});
  refused("--schedule quick", {"--schedule quick", "1f1b"});
  refused("--chunks 3 --schedule 1f1b", {"--chunks 3", "interleaved"});
  refused("--plan absent.toml", {"--plan absent.toml"});
}

// All others of these would be too slow, which has no example.
TEST_F(PlanCommand, HeadsNoListWithoutExamples) {
  const CommandResult said = run("--model gpt2-124m --gpus 1 --global-batch 8 --explain");
  EXPECT_NE(said.output.find("why not the next"), std::string::npos) << said.output;
  EXPECT_EQ(said.output.find("an example of each kind"), std::string::npos) << said.output;
}

TEST_F(PlanCommand, ExplainsWritesAndReadsBack) {  // long
  const CommandResult said =
      run(std::string(small) + "--explain --against tp=8,zero=1 --out plan.toml --html plan.html");
  EXPECT_EQ(said.status, 0);
  for (const char* words :
       {"computation", "memory of each pipeline rank", "counted on rank 0:", " parameters x 2 bytes",
        "layers x microbatches in flight x", "why not the next", "why not tp=8,zero=1", "tp=8 alone: +",
        "zero=1 alone: ", " memory: ",
        "in-flight activations", "80% between", "as far as current was off of dense models on one node",
        "h100, published: memory_bytes 8.5e+10", "h100, fitted: gemm_fp8_efficiency 0.5965",
        "h100, assumed: reserved_bytes 5e+09", "tier bandwidth 4.5e+10", "current, fitted: "})
    EXPECT_NE(said.output.find(words), std::string::npos) << words;
  checks::document_of(read("plan.html"));
  const json first = object(std::string(small) + "--top 1")["plans"][0];
  const json again = object("--plan plan.toml --machine h100 --top 1")["plans"][0];
  EXPECT_NEAR(again["step_seconds"].get<double>(), first["step_seconds"].get<double>(), 1e-9);
  EXPECT_EQ(again["memory_bytes"], first["memory_bytes"]);
}

TEST_F(PlanCommand, DrawsAPageWithItsAnswer) {  // long
  const json answer = object(std::string(small) + "--pp 2 --html plan.html");
  const json page = checks::document_of(read("plan.html"));
  EXPECT_EQ(page["answer"], answer);
  ASSERT_EQ(page["plans"].size(), answer["plans"].size());
  ASSERT_FALSE(page["survey"]["cells"].empty());
  double least = 1e300;
  for (const json& cell : page["survey"]["cells"]) {
    EXPECT_EQ(cell["pp"], 2);
    EXPECT_TRUE(cell.contains("plan") || cell.contains("refusal"));
    if (cell.contains("plan")) least = std::min(least, cell["plan"]["step_seconds"].get<double>());
  }
  EXPECT_NEAR(least, answer["plans"][0]["step_seconds"].get<double>(), 0.01 * least);
  // What ranks hold over the step comes to what the plan holds.
  const json& held = page["tracks"][0]["memory"];
  for (std::size_t r = 0; r < held.size(); ++r) {
    double kept = 0, most = 0;
    for (const json& category : held[r]["kept"]) kept += category.get<double>();
    for (std::size_t k = 1; k < held[r]["held"].size(); k += 2) most = std::max(most, held[r]["held"][k].get<double>());
    const double peak = answer["plans"][0]["rank_memory_bytes"][r];
    EXPECT_NEAR(kept + most, peak, 1e-3 * peak) << r;
  }
  // A plan's command prices that plan, to the last digit.
  for (std::size_t i = 0; i < page["plans"].size(); ++i) {
    const std::string command = page["plans"][i]["command"];
    ASSERT_TRUE(command.starts_with("echelon plan ")) << command;
    const json again = object(command.substr(13) + " --top 1")["plans"][0];
    EXPECT_EQ(again["step_seconds"], answer["plans"][i]["step_seconds"]) << command;
    EXPECT_EQ(again["memory_bytes"], answer["plans"][i]["memory_bytes"]) << command;
  }
}

TEST_F(PlanCommand, DrawsWhatBecameOfEveryPlan) {  // long
  const json answer = object(std::string(small) + "--html plan.html");
  const json looked = checks::document_of(read("plan.html"))["looked"];
  std::int64_t all = 0, of_memory = 0;
  for (const json& group : looked["groups"]) {
    EXPECT_EQ(group[0].get<int>() * group[1].get<int>() * group[2].get<int>() * group[3].get<int>(), 8) << group;
    if (!group[9].is_array()) {
      all += group[9].get<std::int64_t>();
      continue;
    }
    EXPECT_EQ(group[11].size(), 2 * group[9].size() * group[10].size());
    for (std::size_t i = 0; i < group[11].size(); i += 2, ++all) of_memory += group[11][i] == 5;
  }
  EXPECT_EQ(all, answer["considered"].get<std::int64_t>());
  EXPECT_EQ(looked["told"], answer["considered"]);
  EXPECT_EQ(of_memory, answer["rejected"].value("memory", 0));
}

TEST_F(PlanCommand, DrawsAPageWhereNothingFits) {
  const CommandResult said = run("--model llama-3-70b --gpus 2 --global-batch 16 --html plan.html");
  EXPECT_EQ(said.status, 1);
  const json page = checks::document_of(read("plan.html"));
  EXPECT_TRUE(page["plans"].empty());
  EXPECT_TRUE(page["tracks"].empty());
  EXPECT_TRUE(page["survey"]["front"].empty());
  const std::string nothing = page["nothing"];
  EXPECT_NE(said.output.find(nothing), std::string::npos) << nothing;
  EXPECT_GT(page["answer"]["nearest"]["bytes"].get<double>(), page["machine"]["usable_bytes"].get<double>());
  EXPECT_FALSE(page["looked"]["groups"].empty());
  // What is legal near the request, where nothing is.
  const CommandResult near =
      run("--model llama-3-8b --machine h100 --gpus 1000 --global-batch 3 --html plan.html");
  EXPECT_EQ(near.status, 1);
  const std::string advice = checks::document_of(read("plan.html"))["nothing"];
  EXPECT_NE(advice.find("near it:\n  --gpus "), std::string::npos) << advice;
}

// The planner knows programs that do what the trainer here does not.
TEST_F(PlanCommand, SaysWhichPlansOnlyOthersTrain) {
  const CommandResult other = run(
      "--model llama-2-7b --machine h100 --gpus 8 --seq-len 8192 --global-batch 16 --top 1 --out plan.toml "
      "2>&1");
  EXPECT_EQ(other.status, 0) << other.output;
  EXPECT_NE(other.output.find("plan.toml is a plan for current; train and verify refuse it: --seq-len 8192"),
            std::string::npos)
      << other.output;
  EXPECT_EQ(run(std::string(small) + "--top 1 --out plan.toml 2>&1").output.find("refuse it"),
            std::string::npos);
}

TEST_F(PlanCommand, SaysWhatItsNumbersAreOf) {
  const std::string one = "--model gpt2-124m --global-batch 1 --micro-batch 1 --seq-len 1024 ";
  const CommandResult said = run(one + "--gpus 1 --recompute none --explain");
  EXPECT_NE(said.output.find("tokens/s/GPU  plan"), std::string::npos) << said.output;
  EXPECT_NE(said.output.find("1 sequence of 1024 tokens a step"), std::string::npos) << said.output;
  EXPECT_NE(said.output.find("\n1 configuration considered, 1 simulated"), std::string::npos) << said.output;
  EXPECT_NE(said.output.find("a step of 1 microbatch takes"), std::string::npos) << said.output;
  EXPECT_EQ(said.output.find("on the pipeline rank"), std::string::npos) << said.output;
  EXPECT_NE(run(one + "--gpus 2 --pp 2 --explain").output.find("s; on the pipeline rank that waits least:"),
            std::string::npos);
  EXPECT_NE(run(one + "--sweep gpus=1,2").output.find("tokens/s/GPU"), std::string::npos);
}

// The same dtype, machine and program, though none of them is what `plan` takes without a flag.
TEST_F(PlanCommand, APlanIsPricedAgainForWhatItWasMadeFor) {
  const std::string made =
      "--model mixtral-8x7b --machine b200 --nodes-of 4 --software torchtitan --precision fp8 --gpus 16 --tp "
      "4 --etp 1 "
      "--global-batch 64 --seq-len 4096 --top 1 ";
  const json first = object(made + "--out plan.toml")["plans"][0];
  const json again = object("--plan plan.toml --top 1")["plans"][0];
  EXPECT_EQ(first["etp"], 1);
  for (const auto& [key, value] : first.items())
    if (key != "rank_is_shared") {  // with plans that are not priced again
      EXPECT_EQ(again[key], value) << key;
    }
  const CommandResult said = run(made + "--out plan.toml 2>&1");
  EXPECT_NE(said.output.find("train and verify refuse it: --etp 1"), std::string::npos) << said.output;
  EXPECT_NE(run("--model llama-3-8b --machine b200 --gpus 8 --global-batch 64 --seq-len 4096 "
                "--precision fp4 --top 1 --out plan.toml 2>&1")
                .output.find("plan.toml is priced in fp4; train and verify run it in bf16"),
            std::string::npos);
  for (const char* precision : {"f32", "bf16", "fp8"}) {
    const std::string one = std::string(small) + "--precision " + precision + " --top 1 --out plan.toml 2>&1";
    EXPECT_EQ(run(one).output.find("priced in"), std::string::npos) << precision;
    EXPECT_NE(read("plan.toml").find(std::string("precision = '") + precision), std::string::npos)
        << read("plan.toml");
  }
  write("mine.toml", read("plan.toml").replace(read("plan.toml").find("'h100'"), 6, "'mine'"));
  refused("--plan mine.toml", {"--plan mine.toml", "machine mine", "--machine"});
}

TEST_F(PlanCommand, TheLifeOfARun) {  // long
  const std::string run = std::string(small) + "--tokens 1e12 --price 2 --top 1 ";
  const json answer = object(run),
             failing = object(run + "--mtbf-hours 1000 --save-time 30 --restart-time 600"),
             spared = object(run + "--mtbf-hours 1000 --spares 1 --repair-hours 400");
  const json &life = answer["run"], &with = failing["run"];
  const double step = answer["plans"][0]["step_seconds"].get<double>();
  EXPECT_EQ(life["steps"], 3'814'698);  // 1e12 / (64 x 4096), rounded up
  EXPECT_NEAR(life["wall_seconds"].get<double>(), 3'814'698 * step, 1e-3 * step);
  EXPECT_NEAR(life["gpu_hours"].get<double>() * 450, life["wall_seconds"].get<double>(), 1);  // on 8
  EXPECT_NEAR(life["money"].get<double>(), 2 * life["gpu_hours"].get<double>(), 1e-3);
  EXPECT_NEAR(life["joules"].get<double>(), life["wall_seconds"].get<double>() * 8 * 700, 1e3);
  const json& plan = answer["plans"][0];
  EXPECT_NEAR(life["wall_seconds_p90"].get<double>() / life["wall_seconds"].get<double>(),
              plan["step_seconds_p90"].get<double>() / step, 1e-9);
  EXPECT_NEAR(life["money_p10"].get<double>() / life["money"].get<double>(),
              plan["step_seconds_p10"].get<double>() / step, 1e-9);
  EXPECT_EQ(life["goodput"], 1);
  EXPECT_LT(with["goodput"], 0.995);
  EXPECT_GT(with["goodput"], 0.98);
  EXPECT_GT(with["checkpoint_seconds"], 60);
  EXPECT_LT(spared["run"]["goodput"], 0.5);  // 3 would be in repair
  EXPECT_FALSE(object(small)["plans"].empty());
  EXPECT_FALSE(object(small).contains("run"));
  refused(small + std::string("--price 2"), {"--price", "--tokens"});
  refused(small + std::string("--tokens 0"), {"--tokens 0", "above 0"});
  refused(run + "--mtbf-hours -1", {"--mtbf-hours -1", "above 0"});
  refused(small + std::string("--tokens 1e12 --price 1e308"), {"--price 1e+308: must be at most 1000000000"});
  refused(run + "--mtbf-hours 1e308", {"--mtbf-hours 1e+308: must be at most 1000000000"});
  refused(run + "--mtbf-hours 1000 --spares 1 --repair-hours 1e306",
          {"--repair-hours 1e+306: must be at most"});
  refused(run + "--spares 1", {"--spares", "--mtbf-hours"});
  refused(run + "--mtbf-hours 1000 --repair-hours 1", {"--repair-hours", "--spares"});
  refused(run + "--mtbf-hours 1 --restart-time 1e6",
          {"--restart-time", "8 devices fail every 450 s", "never ends"});
}

// docs/planning.md prints below a command what it answers. Lines may be cut off.
TEST_F(PlanCommand, TextbookAnswersAreWhatItPrints) {
  const std::string prompt = "$ echelon plan ";
  std::ifstream page(std::string(ECHELON_SOURCE_DIR) + "/docs/planning.md");
  int compared = 0;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with(prompt)) continue;
    if (line.find("a100-80") == std::string::npos && line.find("--tokens") == std::string::npos) continue;
    const std::string command = line.substr(prompt.size());
    std::istringstream said(run(command).output);
    for (std::string printed; std::getline(page, line) && line != "```"; ++compared) {
      ASSERT_TRUE(std::getline(said, printed)) << command;
      const auto seconds = line.find(", in ");  // that the search took
      EXPECT_EQ(printed.substr(0, std::min(seconds, line.size())), line.substr(0, seconds)) << command;
    }
  }
  EXPECT_GT(compared, 30);
}

TEST_F(PlanCommand, SeventyBillionOn80A100) {
  const std::string base =
      "--model llama-3-70b --machine a100-80 --gpus 80 --dp 80 --precision f32 --global-batch 80 "
      "--micro-batch 1 "
      "--seq-len 4096 --recompute full ";
  const json whole = object(base + "--zero 0", 1)["nearest"]["memory_bytes"];
  EXPECT_NEAR(whole["parameters"].get<double>(), 282.2e9, 0.05e9);
  const json cut = object(base + "--zero 3")["plans"][0]["memory_bytes"];
  EXPECT_NEAR(cut["parameters"].get<double>(), 3.53e9, 0.005e9);
  EXPECT_NEAR(cut["gradients"].get<double>(), 3.53e9, 0.005e9);
  EXPECT_NEAR(cut["optimizer"].get<double>(), 7.06e9, 0.01e9);
}

TEST_F(PlanCommand, SeventyBillionOn512A100) {
  const json named = object(
      "--model llama-3-70b --machine a100-80 --gpus 512 --global-batch 1024 --seq-len 4096 --tp 8 --pp 4 "
      "--cp 1 "
      "--top 1")["plans"][0];
  EXPECT_EQ(named["dp"], 16);
  EXPECT_LT(named["memory_bytes"]["total"].get<double>(), 80e9);
  EXPECT_GT(named["mfu"].get<double>(), 0.5);
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

// As beneath a plan alone: what it is priced by, though machine and program do not say or do it.
TEST_F(PlanCommand, SweepsSayWhatIsAssumed) {
  write("sheet.toml",
        "memory_bytes = 80e9\nmemory_bandwidth = 3e12\npeak_bf16 = 900e12\n[[tier]]\nranks = 8\n"
        "bandwidth = 360e9\n");
  const std::string base =
      "--model llama-3-8b --global-batch 64 --machine sheet.toml --software torchtitan --schedule zb-v ";
  const std::string alone = run(base + "--gpus 8 --top 1").output,
                    table = run(base + "--sweep gpus=4,8").output;
  for (const char* note : {"the file of sheet does not say memory_efficiency, ",
                           "torchtitan does not run schedule zb-v; priced as if it did\n"}) {
    EXPECT_NE(alone.find(note), std::string::npos) << alone;
    EXPECT_NE(table.find(note), std::string::npos) << table;
    EXPECT_EQ(table.find(note), table.rfind(note)) << table;  // once
  }
  const json sweep = object(base + "--sweep gpus=4,8");
  EXPECT_NE(sweep["notes"].get<std::string>().find("zb-v"), std::string::npos);
  EXPECT_LT(sweep["sweep"][0]["step_seconds"], sweep["sweep"][0]["step_seconds_p90"]);
}

// What a run takes on each number of devices, as planned for it alone. So many that never run through have no
// run.
TEST_F(PlanCommand, SweepsPriceWholeRuns) {
  const std::string base =
      "--model llama-3-8b --global-batch 128 --seq-len 4096 --pp 1 --cp 1 --tokens 1e12 --price 2 "
      "--mtbf-hours 2000 --restart-time 1500000 ";
  const json points = object(base + "--sweep gpus=8,16,4096")["sweep"];
  for (int i : {0, 1}) {
    json alone = object(base + fmt::format("--top 1 --gpus {}", 8 << i))["run"];
    EXPECT_EQ(points[i]["run"], alone);
  }
  const CommandResult table = run(base + "--sweep gpus=8,128 --sweep-out sweep.csv");
  EXPECT_NE(table.output.find("    days  GPU-hours       cost  plan"), std::string::npos) << table.output;
  EXPECT_NE(table.output.find(fmt::format("{:.4g}  dp", points[0]["run"]["money"].get<double>())),
            std::string::npos)
      << table.output;
  EXPECT_NE(table.output.find("--restart-time 1500000: 128 devices fail"), std::string::npos) << table.output;
  EXPECT_NE(read("sweep.csv").find("recompute,days,gpu_hours,cost\n"), std::string::npos)
      << read("sweep.csv");
}

}  // namespace
}  // namespace echelon::plan_command_test
