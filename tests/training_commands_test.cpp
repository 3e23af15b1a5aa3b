// What trains, verifies and measures, as its users call it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "case_choice.h"
#include "checkpoint/checkpoint_manifest.h"
#include "command_line.h"
#include "page_checks.h"

namespace echelon::training_commands_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

class TrainingCommands : public CommandLine {
 protected:
  // What stands in for a program of the system, where PATH begins with the directory.
  void script(const std::string& name, const std::string& text) const {
    write(name, "#!/bin/sh\n" + text);
    fs::permissions(at(name), fs::perms::owner_all);
  }
};

TEST_F(TrainingCommands, SaysThatRanksShareCores) {  // long
  const Words two_ranks = training({"--steps", "1", "--warmup", "0", "--dp", "2", "--sample", "0"});
  const std::string on_one_core = "taskset -cp $(taskset -cp $$ | grep -o '[0-9]*$') $$ >/dev/null";
  const std::string said = "2 ranks share 1 core: ";
  EXPECT_NE(run(two_ranks, on_one_core).out.find(said), std::string::npos);
  EXPECT_EQ(run(training({"--steps", "1", "--warmup", "0", "--sample", "0"}), on_one_core).out.find("share"),
            std::string::npos);
  const json summary = one_object(run(joined(two_ranks, {"--json"}), on_one_core));
  EXPECT_EQ(summary.at("cores"), 1.0);
  EXPECT_EQ(summary.at("ranks_share_cores"), true);
  EXPECT_LE(summary.at("mfu"), 1.0);
}

TEST_F(TrainingCommands, LogsGoToSeveralPlacesAtOnce) {
  fs::create_directory(at("board"));
  const Result r = run(training({"--steps", "2", "--sample", "0", "--log", "a.jsonl", "b.csv", "board"}));
  EXPECT_EQ(r.status, 0) << r.err;
  const std::string lines = read_bytes(at("a.jsonl")), table = read_bytes(at("b.csv"));
  EXPECT_NE(lines.find("\"step\":2,\"loss\":"), std::string::npos) << lines;
  EXPECT_TRUE(table.starts_with("step,loss,grad_norm,")) << table;
  EXPECT_NE(table.find("\n2,"), std::string::npos) << table;
  EXPECT_EQ(std::distance(fs::directory_iterator(at("board")), fs::directory_iterator()), 1);
}

// The page of a run is drawn from its log: while it ran, and again.
TEST_F(TrainingCommands, RunsAreReportedAsAPage) {  // long
  const Words few{"--sample", "0", "--checkpoint", "ck", "--save-every", "2", "--json"};
  const json first = one_object(
      run(joined(training({"--steps", "3", "--pp", "2", "--log", "run.jsonl", "--report", "a.html"}), few)));
  const json a = document_of(read_bytes(at("a.html")));
  EXPECT_EQ(a["answer"], first);
  EXPECT_EQ(a["history"]["steps"]["step"], json({1, 2, 3}));
  EXPECT_EQ(a["history"]["steps"]["loss"][2], first["final_loss"]);
  EXPECT_EQ(a["history"]["checkpoints"][0]["step"], 2);
  EXPECT_EQ(a["history"]["checkpoints"].back()["checkpoint"], first["checkpoint"]);
  EXPECT_EQ(a["history"]["starts"].size(), 1u);
  EXPECT_EQ(a["tracks"].size(), 2u);
  const json second = one_object(run(joined(
      training({"--steps", "5", "--pp", "2", "--resume", "--log", "run.jsonl", "--report", "b.html"}), few)));
  const json b = document_of(read_bytes(at("b.html")));
  EXPECT_EQ(b["answer"], second);
  EXPECT_EQ(b["history"]["steps"]["step"], json({1, 2, 3, 4, 5}));  // of both
  ASSERT_EQ(b["history"]["starts"].size(), 2u);
  EXPECT_EQ(b["history"]["starts"][1]["step"], 3);

  const Result viewed = run({"view", "run.jsonl", "--out", "c.html"});
  EXPECT_EQ(viewed.status, 0) << viewed.err;
  EXPECT_EQ(viewed.out, "written to c.html\n");
  const json c = document_of(read_bytes(at("c.html")));
  EXPECT_EQ(c["history"], b["history"]);
  EXPECT_EQ(c["answer"], second);
  fs::create_directory(at("logs"));
  refused({"view", "logs", "--out", "d.html"}, {"view logs", ".jsonl"});
  refused({"view", "run.jsonl", "--port", "65536"}, {"--port 65536", "from 0 to 65535"});
  refused({"view", "absent"}, {"view absent", "No such file"});
  refused({"view", "text.txt"}, {"view text.txt", "line 1"});
  fs::copy(at("run.jsonl"), at("logs/run.jsonl"));
  EXPECT_EQ(run({"view", "logs", "--out", "d.html"}).status, 0);
  fs::copy(at("run.jsonl"), at("logs/other.jsonl"));
  refused({"view", "logs", "--out", "d.html"}, {"view logs", "logs/other.jsonl, logs/run.jsonl"});
  refused({"view", "text.txt", "--out", "d.html"}, {"view text.txt", "line 1"});
  refused({"view", "absent", "--out", "d.html"}, {"view absent", "No such file"});
  refused({"view", "run.jsonl", "--out", "absent/d.html"}, {"--out absent/d.html"});
  refused(training({"--report", "absent/d.html"}), {"--report absent/d.html"});
  // Without a log of its own, and nothing is left behind.
  EXPECT_EQ(run(training({"--steps", "1", "--sample", "0", "--report", "e.html"})).status, 0);
  EXPECT_EQ(document_of(read_bytes(at("e.html")))["history"]["steps"]["count"], 1);
}

TEST_F(TrainingCommands, TrainsResumesAndGenerates) {
  const Words saving{"--checkpoint", "ck", "--log", "log", "--sample", "4"};
  const Result first = run(joined(training({"--steps", "3", "--save-every", "2"}), saving));
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.err, "");
  for (const char* word : {"mesh", "memory", "step 3/3", "saved   ck/step-00000002", "sample", "tokens/s"})
    EXPECT_NE(first.out.find(word), std::string::npos) << word << " in: " << first.out;

  refused(joined(training({"--steps", "5"}), saving), {"ck", "step-00000003", "--resume"});
  const auto refused_resume = [&](const Words& more, const Words& words) {
    refused(joined(training({"--resume", "--checkpoint", "ck"}), more), words);
  };
  refused_resume({"--steps", "2"}, {"--steps 2", "step-00000003"});
  refused_resume({"--steps", "5", "--seed", "2"}, {"not 2", "legal: --seed 1"});
  refused({"train", "--data", "text.txt", "--model", "gpt2-tiny", "--resume", "--checkpoint", "ck"},
          {"tiny", "gpt2-tiny", " = ", "without --model"});
  const Result complete =
      run({"train", "--data", "text.txt", "--resume", "--checkpoint", "ck", "--steps", "3", "--global-batch",
           "2", "--seq-len", "16", "--precision", ECHELON_TEST_DTYPE});
  EXPECT_EQ(complete.status, 0) << complete.err;
  EXPECT_NE(complete.out.find("complete: ck/step-00000003"), std::string::npos) << complete.out;
  refused(training({"--checkpoint", "ck/step-00000003"}), {"ck/step-00000003", "above"});

  // The mesh may change between the two.
  const json summary = one_object(
      run(joined(training({"--steps", "5", "--resume", "--json", "--dp", "2", "--tp", "3"}), saving)));
  has(summary, {"steps", "final_loss", "tokens_per_second", "mfu", "ranks", "params", "memory_bytes",
                "traffic_bytes", "step_seconds"});
  EXPECT_EQ(summary["steps"], 2);
  EXPECT_EQ(summary["ranks"], 6);
  for (const char* name : {"memory_bytes", "traffic_bytes", "step_seconds"})
    has(summary[name], {"predicted", "measured"});
  has(summary["memory_bytes"]["measured"],
      {"total", "parameters", "gradients", "optimizer", "activations", "communication", "other"});
  std::istringstream log(read_bytes(at("log")));
  std::vector<int> steps;
  for (std::string line; std::getline(log, line);) {
    const json record = json::parse(line);
    if (!record.contains("lr")) continue;  // of the run, a checkpoint or a validation
    has(record, {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds"});
    steps.push_back(record["step"]);
  }
  EXPECT_EQ(steps, (std::vector<int>{1, 2, 3, 4, 5}));

  const Words generating{"generate", "--checkpoint", "ck", "--threads", "1", "--max-tokens", "5"};
  const json text = one_object(run(joined(generating, {"--prompt", "h\xc3\xa9 ", "--json"})));
  has(text, {"checkpoint", "step", "prompt_tokens", "tokens", "text"});
  EXPECT_EQ(text["step"], 5);
  EXPECT_EQ(text["prompt_tokens"], (json{'h', 0xc3, 0xa9, ' '}));
  EXPECT_TRUE(run(joined(generating, {"--prompt", "To be"})).out.starts_with("To be"));
  refused({"generate", "--checkpoint", "ck", "--max-tokens", "0"}, {"--max-tokens 0"});
  refused({"generate", "--checkpoint", "ck", "--max-tokens", "9223372036854775807"},
          {"--max-tokens", "64; legal: up to "});
  refused(joined(generating, {"--prompt", std::string(60, 'a')}), {"60 tokens", "65", "64"});
  refused(joined(generating, {"--prompt-tokens", "1,257"}),
          {"--prompt-tokens: token 257 is outside the vocabulary", "legal: 0 to 256"});
  refused(joined(generating, {"--prompt-tokens", "-1"}), {"--prompt-tokens: token -1 ", "legal: 0 to 256"});
  refused(joined(generating, {"--temperature", "-1"}), {"--temperature -1"});
  refused({"generate", "--checkpoint", "absent"}, {"absent"});
  refused({"generate", "--checkpoint", "."}, {"no checkpoint"});
  fs::create_directory(at("hf"));
  write("hf/config.json", "{}");
  refused({"generate", "--checkpoint", "hf"}, {"Hugging Face", "echelon checkpoint import hf --out DIR"});

  // Damage is named, and the earlier checkpoint can still be used.
  write("ck/step-00000005/checkpoint.json", "{");
  refused(generating, {"step-00000005/checkpoint.json", "damaged"});
  fs::remove(at("ck/step-00000005/checkpoint.json"));
  const Result resumed = run(training({"--steps", "6", "--checkpoint", "ck", "--resume"}));
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.out.find("step-00000005: there is no checkpoint here (checkpoint.json is missing); it is "
                             "set aside as .step-00000005.damaged-"),
            std::string::npos)
      << resumed.out;
  EXPECT_NE(resumed.out.find("resume  after step 3 of ck/step-00000003"), std::string::npos) << resumed.out;
  EXPECT_EQ(run({"generate", "--checkpoint", "ck/step-00000003", "--max-tokens", "2"}).status, 0);
}

// It went on in silence, on samples that nothing had been trained on.
// A resumed run goes on with the optimizer whose moments there are.
TEST_F(TrainingCommands, AResumedRunHasItsOptimizer) {  // long
  const auto train = [&](const Words& more) { return run(joined(training({"--checkpoint", "mu"}), more)); };
  EXPECT_EQ(train({"--steps", "1", "--optimizer", "muon"}).status, 0);
  EXPECT_NE(run({"checkpoint", "info", "mu"}).out.find("muon"), std::string::npos);
  const Result resumed = train({"--steps", "2", "--resume"});
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  refused(training({"--checkpoint", "mu", "--steps", "3", "--resume", "--optimizer", "adamw"}),
          {"--optimizer adamw", "step-00000002", "legal: muon", "--from"});
  refused(training({"--checkpoint", "mu", "--steps", "3", "--resume", "--offload", "optimizer"}),
          {"--optimizer muon", "--offload none"});
}

TEST_F(TrainingCommands, ARunIsNotResumedOnOtherData) {  // long
  const auto train = [&](const char* steps, const Words& more) {
    return run(joined(training({"--steps", steps, "--checkpoint", "ck", "--sample", "0"}), more));
  };
  ASSERT_EQ(train("1", {}).status, 0);
  const std::string text = read_bytes(at("text.txt"));
  std::string other = text;
  other[text.size() / 2] ^= 1;
  write("text.txt", other);
  refused(training({"--steps", "2", "--checkpoint", "ck", "--resume"}),
          {"--data", "ck/step-00000001", "fingerprint", "legal"});
  write("text.txt", text);
  ASSERT_EQ(train("2", {"--resume"}).status, 0);
  // A checkpoint that does not say what it was trained on goes on with anything.
  json manifest = json::parse(read_bytes(at("ck/step-00000002/checkpoint.json")));
  EXPECT_EQ(manifest.erase("data"), 1u);
  write("ck/step-00000002/checkpoint.json", seal_manifest(manifest.dump()));
  write("text.txt", other);
  EXPECT_EQ(train("3", {"--resume"}).status, 0);
}

TEST_F(TrainingCommands, StepsThatWereSkippedAreInTheSummary) {  // long
  const Words blown{"--steps",  "4",    "--warmup",       "0", "--lr",     "1e30",
                    "--on-nan", "skip", "--val-fraction", "0", "--sample", "0"};
  const Result r = run(training(blown));
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("\n3 of 4 steps skipped"), std::string::npos) << r.out;
  EXPECT_EQ(one_object(run(joined(training(blown), {"--json"})))["skipped_steps"], 3);
}

TEST_F(TrainingCommands, VerifyAnswersYesInOneObject) {
  const json report =
      one_object(run({"verify", "--model", "tiny.toml", "--dp", "2", "--tp", "3", "--seq-len", "8", "--steps",
                      "1", "--threads", "1", "--precision", ECHELON_TEST_DTYPE, "--json"}));
  has(report, {"pass", "ranks", "steps", "bitwise", "loss_max_rel_diff", "grad_max_rel_diff",
               "param_max_rel_diff", "bound", "first_difference", "mesh", "reference_losses", "mesh_losses"});
  EXPECT_EQ(report["pass"], true);
  EXPECT_EQ(report["ranks"], 6);
  EXPECT_EQ(report["mesh"], (json{{"pp", 1}, {"dp", 2}, {"cp", 1}, {"tp", 3}, {"ep", 1}}));
}

// A mesh is what was asked for; where nothing was, the one that is taken is said.
TEST_F(TrainingCommands, VerifyTakesTheMeshThatIsAsked) {
  const auto verified = [&](const Words& more) {
    Words command{"verify",    "--model", "tiny.toml",   "--seq-len",       "8", "--steps", "1",
                  "--threads", "1",       "--precision", ECHELON_TEST_DTYPE};
    command.insert(command.end(), more.begin(), more.end());
    const Result result = run(command);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return result.out;
  };
  const auto expect_said = [](const std::string& out, const Words& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(out.find(part), std::string::npos) << part << " in " << out;
  };
  expect_said(verified({"--dp", "2"}), {"2 ranks = dp 2 ", "PASS"});
  expect_said(verified({"--tp", "3"}), {"3 ranks = tp 3 ", "PASS"});
  expect_said(verified({"--pp", "2", "--global-batch", "4"}), {"2 ranks = pp 2 ", "PASS, to the last bit"});
  // Three key/value heads, which tp 2 does not divide.
  expect_said(verified({}),
              {"no axis of the mesh is given: as with --dp 2 --tp 1", "2 ranks = dp 2 ", "PASS"});
}

TEST_F(TrainingCommands, ZeroTrainsAndVerifies) {
  const json summary =
      one_object(run(training({"--dp", "2", "--zero", "3", "--zero-prefetch", "2", "--offload", "optimizer",
                               "--offload-dir", ".", "--steps", "2", "--sample", "3", "--json"})));
  EXPECT_EQ(summary["memory_bytes"]["measured"], summary["memory_bytes"]["predicted"]);
  EXPECT_EQ(summary["memory_bytes"]["measured"]["optimizer"], 0);
  EXPECT_EQ(summary["traffic_bytes"]["measured"], summary["traffic_bytes"]["predicted"]);
  EXPECT_GT(summary["traffic_bytes"]["measured"]["dp"]["all_gather"], 0);
  const json offloaded =
      one_object(run(training({"--offload", "activations", "--offload-dir", ".", "--steps", "2", "--json"})));
  EXPECT_EQ(offloaded["memory_bytes"]["measured"]["activations"],
            offloaded["memory_bytes"]["predicted"]["activations"]);
  EXPECT_EQ(offloaded["offloaded_activation_bytes"]["measured"],
            offloaded["offloaded_activation_bytes"]["predicted"]);
  EXPECT_GT(offloaded["offloaded_activation_bytes"]["measured"]["out"], 0);
  EXPECT_FALSE(summary.contains("offloaded_activation_bytes"));
  const json report = one_object(run({"verify",
                                      "--model",
                                      "tiny.toml",
                                      "--dp",
                                      "4",
                                      "--hsdp",
                                      "2",
                                      "--zero",
                                      "3",
                                      "--seq-len",
                                      "8",
                                      "--steps",
                                      "1",
                                      "--threads",
                                      "1",
                                      "--tp",
                                      "1",
                                      "--precision",
                                      ECHELON_TEST_DTYPE,
                                      "--json"}));
  EXPECT_EQ(report["pass"], true);
}

TEST_F(TrainingCommands, CollectivesByMessagesTrainAndVerify) {
  const json summary = one_object(run(training(
      {"--dp", "2", "--tp", "3", "--collectives", "ring", "--steps", "2", "--sample", "0", "--json"})));
  EXPECT_EQ(summary["traffic_bytes"]["measured"], summary["traffic_bytes"]["predicted"]);
  EXPECT_GT(summary["collective_messages"]["dp"]["send"], 0);
  const json report = one_object(
      run({"verify", "--model", "tiny.toml", "--dp", "3", "--tp", "1", "--collectives", "halving-doubling",
           "--seq-len", "8", "--steps", "1", "--threads", "1", "--precision", ECHELON_TEST_DTYPE, "--json"}));
  EXPECT_EQ(report["pass"], true);
}

TEST_F(TrainingCommands, BenchAnswersInOneObject) {
  if (!takes_wide_cases()) GTEST_SKIP() << "what is timed takes its time: the slow suite runs it";
  has(one_object(run({"bench", "train", "--model", "tiny.toml", "--seq-len", "8", "--steps", "1", "--threads",
                      "1", "--precision", ECHELON_TEST_DTYPE, "--json"})),
      {"tokens_per_second", "mfu", "step_seconds", "matmul_flops", "memory_bytes", "peak_resident_bytes"});
  // Steps that run into each other are known one step later.
  for (const Words& flags : {Words{"--optimizer-barrier", "off"}, Words{"--schedule", "2bw"}}) {
    const Words common{"bench",          "train",
                       "--model",        "llama-tiny",
                       "--seq-len",      "8",
                       "--pp",           "2",
                       "--threads",      "1",
                       "--steps",        "2",
                       "--precision",    ECHELON_TEST_DTYPE,
                       "--global-batch", "4",
                       "--micro-batch",  "1",
                       "--json"};
    EXPECT_GT(one_object(run(joined(common, flags))).at("final_loss"), 0) << flags.front();
  }
  const json kernels = one_object(run({"bench", "kernels", "--model", "tiny.toml", "--seq-len", "8",
                                       "--repeats", "1", "--precision", "bf16", "--json"}));
  has(kernels, {"cpu", "matmul_flops", "step_seconds", "share_of_peak", "rows"});
  std::map<std::string, json> products;
  for (const json& row : kernels["rows"]) products[row["name"]] = row;
  for (const char* name : {"attention_in forward", "attention_in dx", "attention_in dW", "attention backward",
                           "mlp_out dW", "output forward", "output dx"}) {
    EXPECT_GT(products[name]["seconds"], 0) << name;
    EXPECT_GE(products[name]["count"], 1) << name;
  }
  EXPECT_TRUE(products["output dW"]["by"].is_string());
  const Result collectives =
      run({"bench", "comm", "--ranks", "4", "--size", "0.0625", "--repeats", "1", "--json"});
  std::istringstream table(collectives.err);
  for (std::string line; std::getline(table, line);) EXPECT_LE(line.size(), 80u) << line;
  const json comm = one_object(collectives);
  has(comm, {"cpu", "ranks", "bytes", "rows", "sizes", "message_seconds"});
  std::map<std::string, json> operations;
  for (const json& row : comm["rows"]) operations[row["name"]] = row;
  for (const char* verb : {"memory copy", "send, recv", "all_reduce", "all_gather", "reduce_scatter",
                           "all_to_all", "broadcast", "barrier"})
    EXPECT_GT(operations[verb]["seconds"], 0) << verb;
  // The textbook's bytes of a ring all-reduce, 2(n-1)/n of the buffer, in 2(n-1) steps.
  EXPECT_EQ(operations["ring_all_reduce"]["sent_bytes"], comm["bytes"].get<std::int64_t>() * 3 / 2);
  EXPECT_EQ(operations["ring_all_reduce"]["steps"], 6);
  EXPECT_EQ(operations["dissemination_barrier"]["steps"], 2);
}

// One rank in f32 has a core of its own on every machine.
TEST_F(TrainingCommands, AStepIsPricedAsThePlannerDoes) {
  write("measured.toml", R"(name = "measured"
memory_bytes = 8e9
memory_bandwidth = 1e10
cores = 1
gemm_tile = 16
launch_seconds = 1e-6
collective_seconds = 4e-6
peak_f32 = 1e11

[[tier]]
ranks = 2
bandwidth = 1e10
)");
  const Words f32{"--precision", "f32"}, machine{"--machine", "measured.toml"},
      sizes{"--global-batch", "2", "--seq-len", "16"};
  const Result planned = run(joined(joined({"plan", "--model", "tiny.toml", "--gpus", "1", "--software",
                                            "echelon", "--json", "--out", "plan.toml"},
                                           f32),
                                    joined(machine, sizes)));
  ASSERT_EQ(planned.status, 0) << planned.err;
  const double seconds = json::parse(planned.out).at("plans").at(0).at("step_seconds");
  const Words train{"train", "--plan",  "plan.toml", "--data",   "text.txt", "--threads",
                    "1",     "--steps", "1",         "--sample", "0",        "--json"};
  if (std::string(ECHELON_TEST_DTYPE) == "f32") {
    const Result trained = run(joined(train, machine));
    ASSERT_EQ(trained.status, 0) << trained.err;
    EXPECT_EQ(json::parse(trained.out).at("step_seconds").at("predicted"), seconds);
    EXPECT_NE(trained.err.find("predicted, by measured.toml"), std::string::npos) << trained.err;
  }
  refused(joined(train, joined(machine, {"--precision", "f64"})), {"--precision f64", "f32"});
  refused(joined(train, joined(joined(f32, machine), {"--compress", "int8", "--dp", "2"})),
          {"--compress int8", "none"});
  refused(joined(train, joined(f32, {"--machine", "h100"})), {"--machine h100", "calibrate"});
}

// The command of its start names the weights that it began with, and a restart goes on from the checkpoint's.
TEST_F(TrainingCommands, LaunchGoesOnWithWhatBeganFromOtherWeights) {  // long
  const Words saving{"--steps", "4", "--save-every", "2", "--async-save", "off", "--sample", "0"};
  ASSERT_EQ(run(joined(training(saving), {"--checkpoint", "base"})).status, 0);
  ASSERT_EQ(run(joined(training(saving), {"--from", "base", "--checkpoint", "whole"})).status, 0);
  const auto launched = [&](const Words& more) {
    return run(joined(joined(Words{"launch", "--"}, training(saving)), more));
  };
  const Result r = launched({"--from", "base", "--checkpoint", "ck", "--die", "0:3:forward"});
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(
      r.err.find("ended with status 137 (killed by signal 9, as when memory runs out); restart 1 of 3\n"),
      std::string::npos)
      << r.err;
  EXPECT_NE(r.out.find("resume  after step 2 of ck/step-00000002"), std::string::npos) << r.out;
  EXPECT_EQ(run({"checkpoint", "diff", "whole", "ck"}).status, 0);
  const Result again = launched({"--checkpoint", "ck", "--from=base"});
  EXPECT_EQ(again.out, "complete: ck/step-00000004 has all 4 steps done\n") << again.err;
}

// One of two hosts is gone, and what was to travel between the two is asked for in vain.
TEST_F(TrainingCommands, LaunchGoesOnWithOneRankWhateverWasAskedOfTwo) {  // long
  script("agent", "[ \"$1\" = a ]\n");
  script("mpirun",
         "echo start >>starts\n"
         "[ $(wc -l <starts) -gt 1 ] || { printf '\\036%s here\\n' \"${ECHELON_LAUNCH#2:}\" >&2; exit 1; }\n"
         "while [ \"${1##*/}\" != echelon ]; do shift; done\nexec \"$@\"\n");
  const Words launch{"launch", "--hosts", "a:1,b:1", "--agent", "./agent", "--elastic", "--"};
  for (const Words& more : {Words{"--zero", "3", "--zero-prefetch", "1"},
                            Words{"--bucket", "1KiB", "--compress", "int8", "--collectives", "ring"}}) {
    fs::remove(at("starts"));
    fs::remove_all(at("ck"));
    const Words train = joined(training({"--steps", "2", "--sample", "0", "--checkpoint", "ck"}), more);
    const Result r = run(joined(launch, joined(train, {"--dp=2"})), "export PATH=\"$PWD:$PATH\"");
    EXPECT_EQ(r.status, 0) << r.err;
    EXPECT_NE(r.err.find("1 host left; going on with --dp 1"), std::string::npos) << r.err;
    EXPECT_NE(r.out.find("mesh    1 rank"), std::string::npos) << r.out;
    refused(joined(train, {"--dp", "1"}), {"has no effect"});
  }
}

// Experts are shared out over certain numbers of ranks: of the three that are left, two go on. Where no
// number of them will do, `launch` says what came about.
TEST_F(TrainingCommands, LaunchGoesOnWithAsManyRanksAsThePlanCanHave) {
  script("agent", "[ \"$1\" != d ]\n");
  script("mpirun",
         "echo start >>starts\n"
         "printf '\\036%s here\\n' \"${ECHELON_LAUNCH#2:}\" >&2; [ $(wc -l <starts) -gt 1 ] || exit 1\n"
         "echo \"$*\" >command; while [ \"${1##*/}\" != echelon ]; do shift; done\nexec \"$@\" --comm "
         "threads\n");
  const auto launched = [&](const std::string& experts) {
    fs::remove(at("starts"));
    return run({"launch", "--hosts",      "a,b,c,d",      "--agent", "./agent",  "--elastic", "--",
                "train",  "--model",      "mixtral-tiny", "--data",  "text.txt", "--dp",      "4",
                "--ep",   experts,        "--seq-len",    "16",      "--steps",  "1",         "--sample",
                "0",      "--checkpoint", "ck" + experts},
               "export PATH=\"$PWD:$PATH\"");
  };
  const Result r = launched("2");
  EXPECT_NE(r.err.find("2 hosts left; going on with --dp 2 in place of 4"), std::string::npos) << r.err;
  EXPECT_NE(read_bytes(at("command")).find("-n 2 "), std::string::npos);
  const Result none = launched("4");
  EXPECT_EQ(none.status, 3) << none.err;
  EXPECT_NE(none.err.find("the training cannot go on with --dp 3 in place of 4"), std::string::npos)
      << none.err;
}

// Whoever still writes there, as on a host that was lost: refused, the restart would be the end.
TEST_F(TrainingCommands, LaunchRestartsWhenTheDirectoryIsFree) {  // long
  script("mpirun",
         "say() { printf '\\036%s %s\\n' \"${ECHELON_LAUNCH#2:}\" \"$1\" >&2; }\n"
         "say here; [ ! -d ck ] || { flock -n ck/.lock true; say \"ended $((2 * $?))\"; exit 0; }\nmkdir ck; "
         "exec 9>ck/.lock; flock 9\n"
         "( until grep -q 'waits up to 3m00s until the directory is free: --checkpoint ck: ' said ||\n"
         "  [ ! -e mpirun ]; do sleep 0.02; done ) >/dev/null 2>&1 &\nexit 1\n");
  EXPECT_EQ(
      run({"launch", "--ranks", "1", "--", "train", "--checkpoint", "ck"}, "export PATH=.:$PATH; exec 2>said")
          .status,
      0);
  EXPECT_NE(read_bytes(at("said")).find("restart 1 of 3\n"), std::string::npos) << read_bytes(at("said"));
}

TEST_F(TrainingCommands, LaunchGoesOnFromTheLastCheckpoint) {  // long
  const Words saving{"--steps", "6", "--save-every", "2", "--async-save", "off", "--sample", "0"};
  ASSERT_EQ(run(joined(training(saving), {"--checkpoint", "whole"})).status, 0);
  const auto launched = [&](const Words& launch, const Words& more) {
    return run(joined(joined(joined({"launch"}, launch), Words{"--"}), joined(training(saving), more)));
  };
  const Result r = launched({"--max-restarts", "2"}, {"--checkpoint", "ck", "--die", "0:5:forward"});
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(
      r.err.find("ended with status 137 (killed by signal 9, as when memory runs out); restart 1 of 2\n"),
      std::string::npos)
      << r.err;
  EXPECT_NE(r.out.find("resume  after step 4 of ck/step-00000004"), std::string::npos) << r.out;
  EXPECT_EQ(run({"checkpoint", "diff", "whole", "ck"}).status, 0);
  // A job that is queued again goes on, or has nothing left to do.
  const Result again = launched({}, {"--checkpoint", "ck"});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(again.out, "complete: ck/step-00000006 has all 6 steps done\n");
  const json complete = one_object(
      run(training({"--steps", "6", "--sample", "0", "--checkpoint", "ck", "--resume", "--json"})));
  EXPECT_EQ(complete["complete"], true);
  EXPECT_EQ(complete["last_step"], 6);
  const Result fresh = launched({}, {"--checkpoint", "fresh", "--resume"});
  EXPECT_EQ(fresh.status, 0) << fresh.err;
  EXPECT_NE(fresh.err.find("fresh holds no checkpoint yet"), std::string::npos) << fresh.err;
  // What the data brings about comes again.
  const Result lasting = launched({}, {"--checkpoint", "hot", "--lr", "1e30", "--clip", "0"});
  EXPECT_EQ(lasting.status, 3);
  EXPECT_NE(lasting.err.find("not finite"), std::string::npos) << lasting.err;
  EXPECT_NE(lasting.err.find("ended with status 3; it is not restarted"), std::string::npos) << lasting.err;
  // A wrong request is not repeated, and what fails at once is given up.
  EXPECT_EQ(launched({"--max-restarts", "2"}, {"--checkpoint", "other", "--dp", "0"}).status, 2);
  const Result never = launched({"--max-restarts", "1"}, {"--checkpoint", "other", "--die", "0:1:forward"});
  EXPECT_EQ(never.status, 3);
  EXPECT_NE(never.err.find("after 1 restart\n"), std::string::npos) << never.err;
  // An mpirun that starts no rank, as root's does without leave, would start none again.
  const auto launched_by = [&](const std::string& mpirun) {
    script("mpirun", "echo start >> starts\n" + mpirun + "exit 1\n");
    return run({"launch", "--ranks", "2", "--max-restarts", "2", "--pause", "0.125", "--", "train",
                "--checkpoint", "none"},
               "rm -f starts && export PATH=.:$PATH");
  };
  const Result killed = launched_by("kill -TERM $$\n");
  EXPECT_NE(killed.err.find("mpirun ended with status 143 (signal 15, Terminated), and no rank has begun"),
            std::string::npos)
      << killed.err;
  const Result unstarted = launched_by("");
  EXPECT_EQ(unstarted.status, 3);
  EXPECT_NE(unstarted.err.find("mpirun ended with status 1, and no rank has begun; it is not restarted"),
            std::string::npos)
      << unstarted.err;
  EXPECT_EQ(read_bytes(at("starts")), "start\n");
  const Result begun = launched_by("printf '\\036%s here\\n' \"${ECHELON_LAUNCH#2:}\" >&2\n");
  EXPECT_NE(begun.err.find("and no rank has said why; restart 1 of 2\n"), std::string::npos) << begun.err;
  EXPECT_NE(begun.err.find("and no rank has said why; restart 2 of 2 in 125ms\n"), std::string::npos)
      << begun.err;
  EXPECT_NE(begun.err.find("and no rank has said why after 2 restarts\n"), std::string::npos) << begun.err;
  EXPECT_EQ(read_bytes(at("starts")), "start\nstart\nstart\n");
  // With other hosts it may have been the network.
  write("mpirun", "#!/bin/sh\nexit 1\n");
  const Result unreached =
      run({"launch", "--hosts", "a:2", "--max-restarts", "1", "--", "train", "--checkpoint", "none"},
          "export PATH=.:$PATH");
  EXPECT_NE(unreached.err.find("no rank has begun; restart 1 of 1\n"), std::string::npos) << unreached.err;
  refused({"launch"}, {"launch", "train"});
  refused({"launch", "train", "--data", "text.txt"}, {"--data", "launch ... -- train"});
  refused({"launch", "--ranks", "-1", "--", "train"}, {"--ranks -1", "at least 0"});
  refused({"launch", "--ranks", "4", "--hosts", "localhost:2", "--", "train"},
          {"--ranks 4", "--hosts localhost:2 takes 2"});
  refused({"launch", "--ranks", "2", "--", "train", "--comm=threads"}, {"--comm threads", "--ranks", "mpi"});
  refused({"launch", "--grace", "1", "--", "train", "--checkpoint", "x"}, {"--grace 1", "4"});
  refused({"launch", "--", "train", "--data", "text.txt"}, {"--checkpoint"});
  refused({"launch", "--elastic", "--", "train", "--checkpoint", "x"}, {"--elastic", "--hosts"});
  refused({"launch", "--elastic", "--hosts", "a,b", "--", "train", "--checkpoint=x", "--dp=2", "--plan=p"},
          {"--elastic", "--plan p", "--tp"});
  refused({"launch", "--elastic", "--hosts", "a,b", "--", "train", "--checkpoint=x", "--dp=2", "--tp", "0"},
          {"--tp 0", "at least 1"});
  refused({"launch", "--hosts", "a:x", "--", "train", "--checkpoint", "x"}, {"--hosts x"});
  refused({"launch", "--hosts", "a[01-04]:2", "--", "train", "--checkpoint", "x"},
          {"--hosts a[01-04]:2", "\"a[01-04]\" is no name", "scontrol show hostnames"});
  refused({"launch", "--hosts", "a:2, b:2", "--", "train", "--checkpoint", "x"}, {"\" b\" is no name"});
  refused({"launch", "--hosts", "a:2000000000,b:2000000000", "--", "train", "--checkpoint", "x"},
          {"--hosts a:2000000000,b:2000000000", "4000000000 ranks", "legal: up to 1000000"});
}

TEST_F(TrainingCommands, DryRunsNeedNoDataAndAnyNumberOfRanks) {
  const Words job{"train", "--dry-run", "--model", "llama-tiny", "--dp",           "512", "--tp", "2",
                  "--pp",  "4",         "--zero",  "1",          "--global-batch", "1024"};
  const std::string before = listing();
  const Result text = run(job);
  EXPECT_EQ(text.status, 0) << text.err;
  for (const char* words : {"4096 ranks", "largest: rank ", "dp reduce_scatter", "tp all_gather", "bubble"})
    EXPECT_NE(text.out.find(words), std::string::npos) << words;
  const json object = one_object(run(joined(job, {"--json"})));
  std::int64_t ranks = 0, largest = 0;
  for (const json& of : object.at("classes")) {
    ranks += of.at("ranks").get<std::int64_t>();
    largest = std::max(largest, of.at("memory_bytes").at("total").get<std::int64_t>());
    EXPECT_TRUE(of.at("coordinates").contains("pp"));
    EXPECT_TRUE(of.at("traffic_bytes").at("dp").contains("reduce_scatter"));
  }
  EXPECT_EQ(ranks, 4096);
  EXPECT_EQ(object.at("memory_bytes").at("largest").at("total"), largest);
  EXPECT_EQ(object.at("schedule").at("stages"), 4);
  EXPECT_EQ(listing(), before);
}

// What a run's flags add to its memory is in its dry run, and so is what it would refuse.
TEST_F(TrainingCommands, DryRunsTakeTheFlagsThatMemoryDependsOn) {
  const Words job{"train", "--dry-run",     "--model", "tiny.toml", "--global-batch",
                  "4",     "--micro-batch", "1",       "--seq-len", "16"};
  const auto bytes = [&](const Words& more) {
    return one_object(run(joined(joined(job, more), {"--json"})))["memory_bytes"]["largest"]["total"]
        .get<std::int64_t>();
  };
  EXPECT_GT(bytes({"--check-replicas", "10"}), bytes({}));  // which keep a copy to run steps again from
  EXPECT_EQ(bytes({"--check-replicas", "0"}), bytes({}));
  EXPECT_NE(bytes({"--device", "cuda", "--cuda-graphs", "on"}), bytes({"--device", "cuda"}));
  const auto refuses = [&](const Words& more, const Words& words) { refused(joined(job, more), words); };
  refuses({"--check-replicas", "1", "--device", "cuda"}, {"--check-replicas 1", "--device cpu"});
  refuses({"--check-replicas", "-1"}, {"--check-replicas -1", "at least 0"});
  refuses({"--cuda-graphs", "on"}, {"--cuda-graphs on", "--device cuda"});
  refuses({"--cuda-graphs", "yes"}, {"--cuda-graphs yes", "on, off"});
  refuses({"--staleness", "1"}, {"--staleness", "parameter servers", "without --dry-run"});
}

TEST_F(TrainingCommands, DryRunsSayWhetherARankFits) {
  const Words job{"train", "--dry-run", "--model", "tiny.toml", "--global-batch",
                  "4",     "--seq-len", "16",      "--dp",      "2"};
  const json object = one_object(run(joined(job, {"--json", "--memory-limit", "1GiB"})));
  const json& limit = object["memory_limit"];
  EXPECT_EQ(limit["fits"], true);
  const std::int64_t needed = (1 << 30) - limit["left_bytes"].get<std::int64_t>();
  EXPECT_EQ(needed, object["memory_bytes"]["largest"]["total"].get<std::int64_t>() +
                        object["scratch_bytes_of_a_thread"].get<std::int64_t>());
  const auto within = [&](std::int64_t bytes) {
    return run(joined(job, {"--memory-limit", std::to_string(bytes)}));
  };
  const Result fits = within(needed), beyond = within(needed - 1);
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_NE(fits.out.find("fits in --memory-limit"), std::string::npos) << fits.out;
  EXPECT_EQ(beyond.status, 1) << beyond.err;
  EXPECT_NE(beyond.out.find("more than --memory-limit"), std::string::npos) << beyond.out;
  refused(joined(job, {"--memory-limit", "much"}), {"--memory-limit much"});
  EXPECT_FALSE(one_object(run(joined(job, {"--json"}))).contains("memory_limit"));
}

// Passes leave nothing on the stack, which they filled.
TEST_F(TrainingCommands, DryRunsOfThousandsOfLayers) {  // long
  write("deep.toml",
        "family = \"llama\"\nnum_layers = 3000\nhidden = 8\nnum_heads = 1\nnum_kv_heads = 1\n"
        "mlp_hidden = 8\nvocab = 257\nmax_seq = 64\n");
  const Result deep = run({"train", "--dry-run", "--model", "deep.toml", "--global-batch", "1",
                           "--micro-batch", "1", "--seq-len", "8"});
  EXPECT_EQ(deep.status, 0) << deep.err;
}

// A plan does not say on what it is run.
TEST_F(TrainingCommands, DryRunsSayThatAPlanWasMadeForOtherDevices) {
  ASSERT_EQ(run({"plan", "--model", "tiny.toml", "--machine", "h100", "--software", "echelon", "--gpus", "2",
                 "--global-batch", "4", "--seq-len", "16", "--out", "p.toml"})
                .status,
            0);
  const auto dry = [&](const Words& more) {
    return run(joined({"train", "--dry-run", "--plan", "p.toml"}, more)).out;
  };
  const char* const note = "note    the plan was made for h100";
  EXPECT_NE(dry({}).find(note), std::string::npos) << dry({});
  EXPECT_EQ(dry({"--device", "cuda"}).find(note), std::string::npos);
  EXPECT_EQ(dry({"--device", "cpu"}).find(note), std::string::npos);
}

TEST_F(TrainingCommands, VerifyComparesNothingWithWhatIsNotFinite) {
  const Result lost =
      run({"verify", "--steps", "3", "--seq-len", "16", "--precision", "f32", "--lr", "1e38"});
  EXPECT_EQ(lost.status, 3);
  EXPECT_EQ(lost.out.find("FAIL"), std::string::npos) << lost.out;
  EXPECT_NE(lost.err.find("of one rank is not finite (learning rate 1e+38)"), std::string::npos) << lost.err;
  EXPECT_EQ(std::count(lost.err.begin(), lost.err.end(), '\n'), 1) << lost.err;
}

// What needs a mesh has the one that verify chooses.
TEST_F(TrainingCommands, VerifyJudgesFlagsByTheMeshThatItChooses) {  // long
  write("even.toml",
        "family = \"gpt2\"\nnum_layers = 2\nhidden = 16\nnum_heads = 4\nmlp_hidden = 32\nvocab = "
        "257\nmax_seq = 16\n");
  for (const Words& more : std::vector<Words>{{"--zero", "3"},
                                              {"--bucket", "1KiB"},
                                              {"--compress", "topk:1"},
                                              {"--collectives", "ring"},
                                              {"--sp", "on"}})
    EXPECT_EQ(run(joined({"verify", "--model", "even.toml", "--steps", "1", "--seq-len", "8", "--precision",
                          ECHELON_TEST_DTYPE},
                         more))
                  .status,
              0)
        << testing::PrintToString(more);
  refused({"verify", "--model", "tiny.toml", "--zero", "1", "--dp", "1"}, {"--zero 1", "with --dp 1"});
}

TEST_F(TrainingCommands, AsynchronousTraining) {  // long
  const auto with = [](const Words& more) {
    return joined(training({"--dp", "2", "--sample", "0", "--json"}), more);
  };
  const json synchronous = one_object(run(with({"--steps", "3"})));
  const json bound0 = one_object(run(with({"--steps", "3", "--staleness", "0", "--servers", "2"})));
  for (const char* category : {"parameters", "gradients", "optimizer", "communication"})
    EXPECT_EQ(bound0["server_memory_bytes"]["measured"][category],
              bound0["server_memory_bytes"]["predicted"][category]);
  EXPECT_GT(bound0["server_memory_bytes"]["measured"]["optimizer"], 0);
  EXPECT_EQ(bound0["final_loss"], synchronous["final_loss"]);
  EXPECT_EQ(bound0["validation_loss"], synchronous["validation_loss"]);
  EXPECT_EQ(bound0["staleness"],
            json::parse(R"({"bound": 0, "histogram": [6], "updates_late": {"mean": 0.0, "max": 0}})"));
  EXPECT_EQ(bound0["updates"], 3);
  EXPECT_EQ(bound0["traffic_bytes"]["predicted"], bound0["traffic_bytes"]["measured"]);

  const Words saved{"--checkpoint", "saved", "--staleness", "inf", "--straggle", "1:2"};
  one_object(run(joined(with({"--steps", "2"}), saved)));
  const json resumed = one_object(run(joined(with({"--steps", "5", "--resume", "--log", "log"}), saved)));
  EXPECT_EQ(resumed["steps"], 3);
  EXPECT_EQ(resumed["last_step"], 5);
  EXPECT_EQ(resumed["updates"], 6);
  EXPECT_EQ(resumed["staleness"]["bound"], "inf");
  const json manifest = json::parse(read_bytes(at("saved/step-00000005/checkpoint.json")));
  EXPECT_EQ(manifest["updates"], 10);
  const std::string log = read_bytes(at("log"));
  // The start, three steps, the checkpoint, the validation and the summary.
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 7);

  refused(with({"--staleness", "soon"}), {"--staleness soon"});
  refused(with({"--staleness", "-1"}), {"--staleness -1", "inf"});
  refused(with({"--staleness", "1", "--tp", "3"}), {"--staleness 1", "--tp 1"});
  refused(with({"--staleness", "1", "--eval-every", "2"}), {"--eval-every 2", "legal: 0"});
  refused(with({"--staleness", "1", "--checkpoint", "ck", "--save-every", "2"}),
          {"--save-every 2", "legal: 0"});
  refused(with({"--servers", "2"}), {"--servers 2", "--staleness"});
  refused(with({"--straggle", "1"}), {"--straggle 1", "1:4"});
  refused(with({"--straggle", "2:4"}), {"--straggle 2:4", "0 to 1"});
  refused(with({"--straggle", "0:0.5"}), {"--straggle 0:0.5", "1 to 1000"});
  refused({"verify", "--model", "tiny.toml", "--staleness", "0"}, {"--staleness 0", "verify"});
}

}  // namespace
}  // namespace echelon::training_commands_test
