// `echelon simulate --moe` as its users meet it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "verb_test.h"

namespace echelon::simulate_experts_command_test {
namespace {

namespace checks = echelon::checks;
using checks::CommandResult;
using nlohmann::json;

class SimulateExperts : public checks::VerbTest {
 protected:
  SimulateExperts() : VerbTest("simulate") {}
  json object(const std::string& arguments) const {
    const CommandResult r = run("--moe --json " + arguments);
    EXPECT_EQ(r.status, 0) << arguments;
    return json::parse(r.output);
  }
};

TEST_F(SimulateExperts, AnswersInOneObject) {
  const json found = object("--ep 4 --popular-expert 2:0.5 --steps 20 --tokens 512");
  EXPECT_EQ(found["experts"], 8);
  EXPECT_EQ(found["ep"], 4);
  std::vector<std::string> names;
  for (const json& method : found["methods"]) {
    names.push_back(method["method"]);
    EXPECT_EQ(method["expert_tokens"].size(), 8u);
    EXPECT_EQ(method["device_tokens"].size(), 4u);
    EXPECT_EQ(method["busiest_expert_by_step"].size(), 20u);
    EXPECT_EQ(method["capacities"].size(), 4u);
    // 4096 numbers of two bytes a copy.
    EXPECT_EQ(std::fmod(method["dispatch_bytes"]["most_received"].get<double>(), 4096), 0);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"none", "aux-loss", "device-loss", "communication-loss", "bias",
                                             "capacity"}));
  EXPECT_GT(found["methods"][0]["busiest_expert"], 2.5);
  EXPECT_LE(found["methods"][5]["busiest_expert"], 1.25);
  EXPECT_EQ(found, object("--ep 4 --popular-expert 2:0.5 --steps 20 --tokens 512"));
  EXPECT_NE(found, object("--ep 4 --popular-expert 2:0.5 --steps 20 --tokens 512 --seed 2"));
}

TEST_F(SimulateExperts, TakesSizesFromAModel) {
  const json found =
      object("--model deepseek-v3 --tokens 64 --steps 2 --ep 8 --compare none,bias+node-limit");
  EXPECT_EQ(found["experts"], 256);
  EXPECT_EQ(found["top_k"], 8);
  EXPECT_EQ(found["groups"], 8);
  EXPECT_EQ(found["most_groups"], 4);
  EXPECT_LE(found["methods"][1]["groups_per_token"], 4);
  EXPECT_EQ(object("--model mixtral-8x7b --experts 16 --tokens 64 --steps 2")["experts"], 16);
}

TEST_F(SimulateExperts, ReadsPopularitiesFromAFileOrTheFlag) {
  write("wants", "1 1 1\n5\n");
  const json found = object("--experts 4 --top-k 1 --popularity wants --steps 1 --compare none");
  EXPECT_EQ(found["popularity"], (json{1.0, 1.0, 1.0, 5.0}));
  EXPECT_GT(found["methods"][0]["busiest_expert"], 2);
  EXPECT_EQ(object("--experts 4 --top-k 1 --popularity 1,1,1,5 --steps 1 --compare none")["methods"],
            found["methods"]);
  refused("--moe --experts 4 --popularity 1,2", {"--popularity 1,2", "2 numbers", "4 experts"});
  refused("--moe --experts 5 --popularity wants", {"--popularity wants", "4 numbers", "5 experts"});
  write("wants", "1 1 0 2");
  refused("--moe --experts 4 --popularity wants", {"--popularity wants", "above 0"});
  write("wants", "1 1 one 2");
  refused("--moe --experts 4 --popularity wants", {"--popularity wants", "one"});
  refused("--moe --popularity absent", {"--popularity absent"});
}

TEST_F(SimulateExperts, DrawsBeforeAndAfter) {
  const CommandResult text = run("--moe --ep 2 --steps 5 --tokens 128 --compare none,bias --width 60");
  EXPECT_EQ(text.status, 0);
  for (const char* part : {"slowest device", "dropped at capacity", "none: busiest expert",
                           "bias: busiest expert", "expert 7 |", "load / average"})
    EXPECT_NE(text.output.find(part), std::string::npos) << part;
  const CommandResult devices = run("--moe --ep 2 --steps 5 --tokens 128 --heat devices --compare none");
  EXPECT_NE(devices.output.find("device 1 |"), std::string::npos);
  EXPECT_EQ(run("--moe --steps 5 --tokens 128 --out map.svg").status, 0);
  EXPECT_TRUE(read("map.svg").starts_with("<svg "));
  const CommandResult csv =
      run("--moe --steps 5 --tokens 128 --compare none,capacity --format csv 2>/dev/null");
  EXPECT_TRUE(csv.output.starts_with("method,step,expert,device,chosen,kept\nnone,0,0,0,")) << csv.output;
  EXPECT_EQ(std::count(csv.output.begin(), csv.output.end(), '\n'), 1 + 2 * 5 * 8);
}

TEST_F(SimulateExperts, RefusesInOneSentence) {  // long
  refused("--moe --pp 4", {"--pp", "--moe"});
  refused("--experts 4", {"--experts", "--moe"});
  refused("--moe --ep 3", {"--ep 3", "8 experts"});
  refused("--moe --tokens 10 --ep 4", {"--tokens 10", "--ep 4"});
  refused("--moe --model llama-tiny", {"--model llama-tiny", "no experts"});
  refused("--moe --compare none,magic", {"--compare magic", "aux-loss"});
  refused("--moe --format html", {"--format html", "svg"});
  refused("--moe --out map.html", {"--out map.html", "text, svg, csv"});
  refused("--moe --format csv --out map.svg", {"--format csv", "--out map.svg", "legal: svg"});
  refused("--moe --popular-expert 9:0.5", {"--popular-expert 9:0.5", "0 to 7"});
  refused("--moe --popular-expert 1:1.5", {"--popular-expert 1:1.5", "between 0 and 1"});
  refused("--moe --popular-expert 1", {"--popular-expert 1", "0:0.5"});
  refused("--moe --popular-expert 1:0.5 --zipf 2", {"--zipf", "--popular-expert"});
  refused("--moe --zipf nan", {"--zipf nan"});
  refused("--moe --capacities 1,x", {"--capacities x"});
  refused("--moe --drop some", {"--drop some", "position"});
  refused("--moe --heat cold", {"--heat cold", "devices"});
  refused("--moe --dtype f64", {"--dtype f64", "bf16"});
  refused("--moe --scores max", {"--scores max", "sigmoid"});
  refused("--moe --width 3", {"--width 3"});
  refused("--moe --out /absent/map --format svg", {"--out /absent/map"});
}

}  // namespace
}  // namespace echelon::simulate_experts_command_test
