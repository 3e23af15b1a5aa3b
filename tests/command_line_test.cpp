// The program as its users meet it: exit status, one sentence, nothing lost; and as programs do: one JSON
// object.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::command_line_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;
using Words = std::vector<std::string>;

struct Result {
  int status = -1;  // negative: the signal that ended it
  std::string out, err;
};

// Each test has a directory of its own, in which the program runs.
class CommandLine : public testing::Test {
 protected:
  CommandLine() {
    fs::create_directory(directory_);
    write("tiny.toml", tiny_model);
    std::string text;
    for (int i = 0; i < 200; ++i) text += "To be or not to be, that is question " + std::to_string(i) + ".\n";
    write("text.txt", text);
  }

  fs::path at(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& text) const { write_text(at(name).string(), text); }
  std::string listing() const {
    Words names;
    for (const auto& entry : fs::recursive_directory_iterator(directory_))
      names.push_back(entry.path().string() + (entry.is_regular_file() ? read_bytes(entry.path()) : ""));
    std::sort(names.begin(), names.end());
    std::string all;
    for (const std::string& name : names) all += name + "\n";
    return all;
  }

  // In the test's directory, by a shell that does `before` first.
  Result run(const Words& arguments, const std::string& before = ":") const {
    std::string words;
    for (const std::string& a : arguments) words += " '" + a + "'";  // none has a quote
    const CommandResult r =
        output_of("cd '" + directory_.string() + "' && exec 2>'" + (top_ / "err") + "' </dev/null && " +
                  before + " && exec '" + ECHELON_BINARY + "'" + words);
    return {r.status, r.output, read_bytes(top_ / "err")};
  }

  static Words joined(Words a, const Words& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  // A run of a fraction of a second, and `more` flags.
  static Words training(const Words& more) {
    return joined({"train", "--data", "text.txt", "--model", "tiny.toml", "--global-batch", "2", "--seq-len",
                   "16", "--threads", "1", "--dtype", ECHELON_TEST_DTYPE},
                  more);
  }
  // A training without end; `act` is told its process once two checkpoints are there.
  template <class Act>
  Result interrupted(const Act& act) const {
    Result stopped;
    std::thread training_run([&] {
      stopped =
          run(training({"--steps", "1000000", "--save-every", "1", "--checkpoint", "ck"}), "echo $$ >pid");
    });
    for (int i = 0; i < 2000 && !fs::exists(at("ck/step-00000002")); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    act(std::stoi(read_bytes(at("pid"))));
    training_run.join();
    return stopped;
  }

  // Status 2, one line that has all the words, no output, nothing changed on disk.
  void refused(const Words& arguments, const Words& words) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    const std::string before = listing();
    const Result r = run(arguments);
    EXPECT_EQ(r.status, 2) << r.err;
    EXPECT_EQ(r.out, "");
    EXPECT_TRUE(r.err.starts_with("echelon: ")) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    for (const std::string& word : words)
      EXPECT_NE(r.err.find(word), std::string::npos) << word << " in: " << r.err;
    EXPECT_EQ(listing(), before);
  }

  static json one_object(const Result& r) {
    EXPECT_EQ(r.status, 0) << r.err;
    const json object = json::parse(r.out, nullptr, false);
    EXPECT_TRUE(object.is_object()) << r.out;
    return object;
  }
  static void has(const json& object, const Words& names) {
    for (const std::string& name : names)
      EXPECT_TRUE(object.contains(name)) << name << " in " << object.dump();
  }

  static constexpr const char* tiny_model =
      "family = \"llama\"\nnum_layers = 2\nhidden = 24\nnum_heads = 6\nnum_kv_heads = 3\nhead_dim = 4\n"
      "mlp_hidden = 40\nvocab = 257\nmax_seq = 64\n";
  const TemporaryDirectory top_;
  const fs::path directory_ = top_.path() / "here";
};

TEST_F(CommandLine, WrongWordsAreRefusedByName) {
  refused({}, {"verb", "train, verify, plan, calibrate, simulate, checkpoint, launch, generate, bench"});
  refused({"frob"},
          {"frob", "train, verify, plan, calibrate, simulate, checkpoint, launch, generate, bench"});
  refused({"bench"}, {"bench", "train, comm"});
  refused({"bench", "x"}, {"x", "train, comm"});
  refused({"train"}, {"--data"});
  refused({"train", "--nope"}, {"--nope", "no such flag"});
  refused({"verify", "stray"}, {"stray"});
  refused({"generate"}, {"--checkpoint"});
  refused(training({"--dp"}), {"--dp", "missing"});
  refused(training({"--dp", "1", "--dp", "2"}), {"--dp", "more than once"});
  refused(training({"--dp", "x"}), {"--dp x", "whole number"});
  refused(training({"--steps", "1e3"}), {"--steps 1e3", "whole number"});
  refused(training({"--steps", "99999999999999999999"}), {"--steps 99999999999999999999"});
  refused(training({"--seed", "-1"}), {"--seed -1", "at least 0"});
  refused(training({"--lr", "fast"}), {"--lr fast", "number"});
}

TEST_F(CommandLine, WrongValuesAreRefusedWithTheLegalOnes) {
  refused(training({"--lr", "-1"}), {"--lr -1", "above 0"});
  refused(training({"--lr", "nan"}), {"--lr nan", "above 0"});
  refused(training({"--lr", "1e-6", "--min-lr", "1e-5"}), {"--min-lr 1e-05", "--lr 1e-06"});
  refused(training({"--warmup", "9", "--steps", "5"}), {"--warmup 9", "5"});
  refused(training({"--steps", "0"}), {"--steps 0"});
  refused(training({"--eval-every", "-1"}), {"--eval-every -1"});
  refused(training({"--eval-samples", "-1"}), {"--eval-samples -1"});
  refused(training({"--save-every", "-1"}), {"--save-every -1"});
  refused(training({"--sample", "-1"}), {"--sample -1"});
  refused(training({"--sample", "64"}), {"--sample 64", "64"});
  refused(training({"--val-fraction", "1"}), {"--val-fraction 1"});
  refused(training({"--timeout", "0"}), {"--timeout 0"});
  refused(training({"--collectives", "tree"}),
          {"--collectives tree", "direct, ring, halving-doubling, auto"});
  refused(training({"--sp", "maybe"}), {"--sp maybe", "on, off"});
  refused(training({"--tp", "4"}), {"--tp 4", "6 heads", "1, 3, 6"});
  refused(training({"--tp", "2"}), {"--tp 2", "3 key/value heads", "1, 3, 6"});
  refused(training({"--dp", "3"}), {"--dp 3", "--global-batch"});
  refused(training({"--dp", "0"}), {"--dp 0"});
  refused(training({"--dp", "2000000000", "--tp", "6"}), {"--dp 2000000000"});
  refused(training({"--pp", "3"}), {"--pp 3", "1f1b", "2 layers"});
  refused(training({"--pp", "2", "--schedule", "dualpipe"}),
          {"--global-batch 2", "dualpipe needs at least 2P = 4"});
  refused(training({"--pp", "2", "--schedule", "pipedream", "--clip", "1"}),
          {"--clip 1", "pipedream", "legal: 0"});
  refused(training({"--pp", "2", "--layers-per-stage", "1,2"}), {"--layers-per-stage", "3", "2 layers"});
  refused(training({"--zero", "4"}), {"--zero 4", "legal: 0, 1, 2, 3"});
  refused(training({"--dp", "2", "--hsdp", "2"}), {"--hsdp 2", "--zero is 0"});
  refused(training({"--zero-prefetch", "2"}), {"--zero-prefetch 2", "--zero is 0"});
  refused(training({"--offload", "all"}), {"--offload all", "none, optimizer"});
  refused(training({"--offload", "optimizer", "--offload-dir", ""}), {"--offload-dir", "empty"});
  refused(training({"--offload-dir", "here"}), {"--offload-dir here", "--offload optimizer"});
  refused(training({"--offload", "optimizer", "--offload-dir", "/no/such"}), {"--offload-dir /no/such"});
  const Words data{"train", "--data", "text.txt"};
  const auto with = [&](const Words& more) { return joined(data, more); };
  refused(with({"--threads", "0"}), {"--threads 0"});
  refused(with({"--threads", "99999"}), {"--threads 99999"});
  refused(with({"--dp", "5000", "--global-batch", "5000"}), {"--dp 5000", "1024"});
  refused(with({"--memory-limit", "much"}), {"--memory-limit much", "800MiB"});
  refused(with({"--memory-limit", "100KiB"}),
          {"--memory-limit 100.00 KiB", "pp 0 tp 0", "activations", "--cp"});
  refused(with({"--cp", "2", "--seq-len", "30"}), {"--seq-len 30", "--cp 2", "zigzag", "28 and 32"});
  refused(with({"--cp", "2", "--cp-kind", "star"}), {"--cp-kind star", "ring, ulysses, allgather, hybrid"});
  refused(with({"--cp-balance", "fair"}), {"--cp-balance fair", "zigzag, stripe, none"});
  refused(with({"--mask", "full"}), {"--mask full", "causal, document"});
  refused(with({"--seq-len", "0"}), {"--seq-len 0"});
  refused(with({"--seq-len", "9999"}), {"--seq-len 9999", "4096"});
  refused(with({"--global-batch", "0"}), {"--global-batch 0"});
  refused(with({"--global-batch", "9223372036854775807"}), {"--global-batch", "1000000"});
  refused(with({"--dtype", "bf16"}), {"--dtype bf16", "f32"});
  refused(with({"--model", "gpt5"}), {"--model gpt5", "gpt2-tiny"});
  refused(with({"--model", "llama-3-405b"}), {"llama-3-405b", "TiB", "this machine"});
  refused(with({"--checkpoint", ""}), {"--checkpoint", "empty"});
  refused({"verify", "--steps", "0"}, {"--steps 0"});
  refused({"bench", "comm", "--ranks", "0"}, {"--ranks 0", "256"});
  refused({"bench", "comm", "--ranks", "256", "--size", "16384"}, {"--size 16384", "this machine"});
  refused({"bench", "comm", "--size", "nan"}, {"--size nan"});
  refused({"bench", "comm", "--repeats", "0"}, {"--repeats 0", "1 to"});
}

TEST_F(CommandLine, BadDataIsRefused) {
  const auto refused_data = [&](const std::string& path, const Words& words) {
    refused({"train", "--data", path, "--seq-len", "32"}, words);
  };
  fs::create_directory(at("hollow"));
  write("empty.txt", "");
  write("short.txt", std::string(31, 'a'));
  write("wrong.bin", "not tokens at all");
  refused_data("absent", {"--data absent", "no such file"});
  refused_data("hollow", {"--data hollow", "no files"});
  refused_data("empty.txt", {"empty.txt", "empty"});
  refused_data("short.txt", {"32 tokens", "32 + 1"});
  refused_data("wrong.bin", {"wrong.bin", "not a token file"});
  refused_data("/dev/zero", {"/dev/zero", "regular"});
}

TEST_F(CommandLine, BadModelAndPlanFilesAreRefused) {
  const auto refused_file = [&](const char* flag, const std::string& text, const Words& words) {
    write("bad.toml", text);
    refused({"train", "--data", "text.txt", flag, "bad.toml"}, words);
  };
  refused_file("--model", "[", {"bad.toml", "TOML"});
  refused_file("--model", "", {"bad.toml", "family"});
  refused_file("--model", std::string(tiny_model) + "colour = 3\n", {"colour", "num_kv_heads"});
  refused_file("--plan", "[", {"bad.toml", "TOML"});
  refused_file("--plan", "model = \"gpt2-tiny\"\ncolour = 3\n", {"bad.toml", "colour", "micro-batch"});
  refused_file("--plan", "model = \"gpt2-tiny\"\nseq-len = \"8\"\n", {"seq-len", "8", "whole number"});
  refused_file("--plan", "model = \"gpt2-tiny\"\nmesh = 3\n", {"mesh = 3", "table"});
  refused_file("--plan", "model = \"gpt2-tiny\"\n[mesh]\ntp = 0\n", {"mesh.tp = 0"});
  refused({"train", "--data", "text.txt", "--plan", "absent"}, {"--plan absent"});
  fs::create_directory(at("bare"));
  refused({"train", "--data", "text.txt", "--model", "bare"}, {"bare", "config.json"});
}

TEST_F(CommandLine, HelpBeginsWithTheCommonFlagsAndFitsATerminal) {
  for (const Words& verb : std::vector<Words>{{},
                                              {"train"},
                                              {"verify"},
                                              {"plan"},
                                              {"calibrate"},
                                              {"simulate"},
                                              {"checkpoint"},
                                              {"checkpoint", "info"},
                                              {"checkpoint", "import"},
                                              {"launch"},
                                              {"generate"},
                                              {"bench", "train"},
                                              {"bench", "comm"},
                                              {"bench", "context"}}) {
    const Result r = run(joined(verb, {"--help"}));
    EXPECT_EQ(r.status, 0);
    const std::size_t first = r.out.find(":\n");  // the first heading
    ASSERT_NE(first, std::string::npos) << r.out;
    const std::string heading = r.out.substr(r.out.rfind('\n', first) + 1);
    EXPECT_TRUE(heading.starts_with("Common flags:") || heading.starts_with("Positionals:")) << r.out;
    EXPECT_NE(r.out.find("\nCommon flags:\n"), std::string::npos) << r.out;
    EXPECT_EQ(r.out.find("\nOptions:"), std::string::npos) << "a flag without a heading in " << r.out;
    EXPECT_EQ(r.out.find("\n\n\n"), std::string::npos) << r.out;
    std::istringstream lines(r.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST_F(CommandLine, PathsThatCannotBeWrittenAreRefusedAndLeaveNothing) {
  write("kept.jsonl", "{\"step\": 1}\n");
  refused(training({"--checkpoint", "new", "--log", "absent/log"}), {"--log absent/log", "No such file"});
  refused(training({"--checkpoint", "text.txt", "--log", "new.jsonl"}), {"--checkpoint text.txt"});
  refused(training({"--checkpoint", "text.txt/x", "--log", "kept.jsonl"}), {"--checkpoint text.txt/x"});
  refused(training({"--checkpoint", "absent", "--resume"}), {"absent", "no such"});
  refused(training({"--resume"}), {"--resume", "--checkpoint"});
}

TEST_F(CommandLine, TrainsResumesAndGenerates) {
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
  refused_resume({"--steps", "3"}, {"--steps 3", "step-00000003"});
  refused_resume({"--steps", "5", "--seed", "2"}, {"--seed 1", "2"});
  refused({"train", "--data", "text.txt", "--resume", "--checkpoint", "ck"}, {"tiny", "gpt2-tiny"});
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
    if (record.contains("validation_loss")) continue;
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
  refused({"generate", "--checkpoint", "ck", "--max-tokens", "9223372036854775807"}, {"--max-tokens", "64"});
  refused(joined(generating, {"--prompt", std::string(60, 'a')}), {"60 tokens", "65", "64"});
  refused(joined(generating, {"--prompt-tokens", "1,257"}), {"257", "0 to 256"});
  refused(joined(generating, {"--temperature", "-1"}), {"--temperature -1"});
  refused({"generate", "--checkpoint", "absent"}, {"absent"});
  refused({"generate", "--checkpoint", "."}, {"no checkpoint"});

  // Damage is named, and the earlier checkpoint can still be used.
  write("ck/step-00000005/checkpoint.json", "{");
  refused(generating, {"step-00000005/checkpoint.json", "damaged"});
  fs::remove(at("ck/step-00000005/checkpoint.json"));
  refused_resume({"--steps", "6"}, {"step-00000005", "in the way"});
  EXPECT_EQ(run({"generate", "--checkpoint", "ck/step-00000003", "--max-tokens", "2"}).status, 0);
}

TEST_F(CommandLine, VerifyAnswersYesInOneObject) {
  const json report =
      one_object(run({"verify", "--model", "tiny.toml", "--dp", "2", "--tp", "3", "--seq-len", "8", "--steps",
                      "1", "--threads", "1", "--dtype", ECHELON_TEST_DTYPE, "--json"}));
  has(report, {"pass", "ranks", "steps", "bitwise", "loss_max_rel_diff", "grad_max_rel_diff",
               "param_max_rel_diff", "bound", "first_difference", "mesh", "reference_losses", "mesh_losses"});
  EXPECT_EQ(report["pass"], true);
  EXPECT_EQ(report["ranks"], 6);
  EXPECT_EQ(report["mesh"], (json{{"pp", 1}, {"dp", 2}, {"cp", 1}, {"tp", 3}, {"ep", 1}}));
}

TEST_F(CommandLine, ZeroTrainsAndVerifies) {
  const json summary =
      one_object(run(training({"--dp", "2", "--zero", "3", "--zero-prefetch", "2", "--offload", "optimizer",
                               "--offload-dir", ".", "--steps", "2", "--sample", "3", "--json"})));
  EXPECT_EQ(summary["memory_bytes"]["measured"], summary["memory_bytes"]["predicted"]);
  EXPECT_EQ(summary["memory_bytes"]["measured"]["optimizer"], 0);
  EXPECT_EQ(summary["traffic_bytes"]["measured"], summary["traffic_bytes"]["predicted"]);
  EXPECT_GT(summary["traffic_bytes"]["measured"]["dp"]["all_gather"], 0);
  const json report = one_object(run(
      {"verify",           "--model", "tiny.toml", "--dp", "4",         "--hsdp", "2",    "--zero", "3",
       "--seq-len",        "8",       "--steps",   "1",    "--threads", "1",      "--tp", "1",      "--dtype",
       ECHELON_TEST_DTYPE, "--json"}));
  EXPECT_EQ(report["pass"], true);
}

TEST_F(CommandLine, CollectivesByMessagesTrainAndVerify) {
  const json summary = one_object(run(training(
      {"--dp", "2", "--tp", "3", "--collectives", "ring", "--steps", "2", "--sample", "0", "--json"})));
  EXPECT_EQ(summary["traffic_bytes"]["measured"], summary["traffic_bytes"]["predicted"]);
  EXPECT_GT(summary["collective_messages"]["dp"]["send"], 0);
  const json report = one_object(
      run({"verify", "--model", "tiny.toml", "--dp", "3", "--tp", "1", "--collectives", "halving-doubling",
           "--seq-len", "8", "--steps", "1", "--threads", "1", "--dtype", ECHELON_TEST_DTYPE, "--json"}));
  EXPECT_EQ(report["pass"], true);
}

TEST_F(CommandLine, BenchAnswersInOneObject) {
  has(one_object(run({"bench", "train", "--model", "tiny.toml", "--seq-len", "8", "--steps", "1", "--threads",
                      "1", "--dtype", ECHELON_TEST_DTYPE, "--json"})),
      {"tokens_per_second", "mfu", "step_seconds", "matmul_flops", "memory_bytes", "peak_resident_bytes"});
  const json comm =
      one_object(run({"bench", "comm", "--ranks", "2", "--size", "0.0625", "--repeats", "1", "--json"}));
  has(comm, {"cpu", "ranks", "bytes", "rows", "sizes", "message_seconds"});
  std::map<std::string, json> operations;
  for (const json& row : comm["rows"]) operations[row["name"]] = row;
  for (const char* verb : {"memory copy", "send, recv", "all_reduce", "all_gather", "reduce_scatter",
                           "all_to_all", "broadcast", "barrier"})
    EXPECT_GT(operations[verb]["seconds"], 0) << verb;
  // The textbook's bytes of a ring all-reduce, 2(n-1)/n of the buffer, in 2(n-1) steps.
  EXPECT_EQ(operations["ring_all_reduce"]["sent_bytes"], comm["bytes"]);
  EXPECT_EQ(operations["ring_all_reduce"]["steps"], 2);
  EXPECT_EQ(operations["dissemination_barrier"]["steps"], 1);
}

TEST_F(CommandLine, AFullDiskEndsTheRunAndKeepsTheEarlierCheckpoint) {
  ASSERT_EQ(run(training({"--steps", "1", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const std::string before = listing();
  const auto blocks = fs::file_size(at("ck/step-00000001/optimizer.safetensors")) / 2 / 512;
  const Result full =
      run(training({"--steps", "2", "--checkpoint", "ck", "--sample", "0", "--resume", "--json"}),
          "ulimit -f " + std::to_string(blocks));
  EXPECT_EQ(full.status, 3) << full.err;
  EXPECT_EQ(full.out, "");
  EXPECT_NE(full.err.find("step-00000002"), std::string::npos) << full.err;
  EXPECT_NE(full.err.find("File too large"), std::string::npos) << full.err;
  EXPECT_EQ(listing(), before);
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

TEST_F(CommandLine, OutputThatCannotBeWrittenIsAFailure) {
  const Result log = run(training({"--steps", "1", "--sample", "0", "--log", "/dev/full"}));
  EXPECT_EQ(log.status, 3);
  EXPECT_NE(log.err.find("--log /dev/full"), std::string::npos) << log.err;
  const Result out = run(training({"--steps", "1", "--sample", "0", "--json"}), "exec >/dev/full");
  EXPECT_EQ(out.status, 3);
  EXPECT_NE(out.err.find("standard output"), std::string::npos) << out.err;
}

// One rank in f32 has a core of its own on every machine.
TEST_F(CommandLine, AStepIsPricedAsThePlannerDoes) {
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
  const Words f32{"--dtype", "f32"}, machine{"--machine", "measured.toml"},
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
  refused(joined(train, joined(machine, {"--dtype", "f64"})), {"--dtype f64", "f32"});
  refused(joined(train, joined(joined(f32, machine), {"--compress", "int8", "--dp", "2"})),
          {"--compress int8", "none"});
  refused(joined(train, joined(f32, {"--machine", "h100"})), {"--machine h100", "calibrate"});
}

TEST_F(CommandLine, AnInterruptLeavesWholeCheckpoints) {
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGINT); });
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
  EXPECT_NE(stopped.out.find("--resume continues from ck/step-"), std::string::npos) << stopped.out;
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

// A handler that runs on a thread that computes may write over what oneDNN computes with.
TEST_F(CommandLine, NoSignalIsHandledWhereItComputes) {
  int threads = 0, unblocked = 0;
  const Result stopped = interrupted([&](int pid) {
    for (const auto& task : fs::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
      const std::string status = read_bytes(task.path() / "status");
      if (status.empty()) continue;  // the thread has just ended
      const auto mask = [&](const std::string& name) {
        return std::stoull(status.substr(status.find(name) + name.size()), nullptr, 16);
      };
      ++threads;
      for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
        const std::uint64_t bit = std::uint64_t{1} << (signal - 1);
        EXPECT_EQ(mask("SigCgt:") & bit, 0u) << "signal " << signal;
        unblocked += (mask("SigBlk:") & bit) == 0;
      }
    }
    ::kill(pid, SIGUSR1);
  });
  EXPECT_GE(threads, 2);    // a rank, and one that waits for signals:
  EXPECT_LE(unblocked, 3);  // unblocked while it does
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
}

// As timeout(1) asks a command to end: itself, and at once the group that it is in.
TEST_F(CommandLine, ASignalToTheWholeGroupIsOneRequest) {
  for (const std::string verb : {"train", "launch -- train"}) {
    const CommandResult r = run_command(
        "cd '" + directory_.string() + "'; rm -rf ck; setsid '" + ECHELON_BINARY + "' " + verb +
        " --data text.txt --model tiny.toml --global-batch 2 --seq-len 16 --threads 1 --steps 1000000 "
        "--save-every 1 --keep 2 --checkpoint ck --dtype " +
        ECHELON_TEST_DTYPE +
        " & while kill -0 $! && ! ls ck 2>/dev/null | grep -q ^step; do sleep 0.02; done; "
        "kill -TERM $!; sleep 0.01; kill -TERM -- -$!; wait $!");
    EXPECT_EQ(r.status, 0) << verb << "\n" << r.output;
    EXPECT_NE(r.output.find("stopped after step "), std::string::npos) << verb << "\n" << r.output;
  }
}

TEST_F(CommandLine, LaunchGoesOnFromTheLastCheckpoint) {
  const Words saving{"--steps", "6", "--save-every", "2", "--async-save", "off", "--sample", "0"};
  ASSERT_EQ(run(joined(training(saving), {"--checkpoint", "whole"})).status, 0);
  const auto launched = [&](const Words& launch, const Words& more) {
    return run(joined(joined(joined({"launch"}, launch), Words{"--"}), joined(training(saving), more)));
  };
  const Result r = launched({"--max-restarts", "2"}, {"--checkpoint", "ck", "--die", "0:5:forward"});
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("ended with status 137; restart 1 of 2 from ck/step-00000004"), std::string::npos)
      << r.err;
  EXPECT_EQ(run({"checkpoint", "diff", "whole", "ck"}).status, 0);
  // A wrong request is not repeated, and what fails at once is given up.
  EXPECT_EQ(launched({"--max-restarts", "2"}, {"--checkpoint", "other", "--dp", "0"}).status, 2);
  const Result never = launched({"--max-restarts", "1"}, {"--checkpoint", "other", "--die", "0:1:forward"});
  EXPECT_EQ(never.status, 3);
  EXPECT_NE(never.err.find("after 1 restarts"), std::string::npos) << never.err;
  refused({"launch"}, {"launch", "train"});
  refused({"launch", "--", "train", "--data", "text.txt"}, {"--checkpoint"});
  refused({"launch", "--elastic", "--", "train", "--checkpoint", "x"}, {"--elastic", "--hosts"});
  refused({"launch", "--elastic", "--hosts", "a,b", "--", "train", "--checkpoint=x", "--dp=2", "--plan=p"},
          {"--elastic", "--plan p", "--tp"});
  refused({"launch", "--hosts", "a:x", "--", "train", "--checkpoint", "x"}, {"--hosts x"});
}

TEST_F(CommandLine, CheckpointsAreLookedAtComparedAndConverted) {
  ASSERT_EQ(
      run(training({"--steps", "2", "--save-every", "1", "--checkpoint", "ck", "--dp", "2", "--tp", "3"}))
          .status,
      0);
  const json info = one_object(run({"checkpoint", "info", "ck", "--json"}));
  EXPECT_EQ(info["step"], 2);
  const json whole = one_object(run({"checkpoint", "verify", "ck/step-00000001", "--json"}));
  EXPECT_EQ(whole["whole"], true);
  EXPECT_EQ(run({"checkpoint", "diff", "ck", "ck/step-00000002"}).status, 0);
  const Result other = run({"checkpoint", "diff", "ck/step-00000001", "ck/step-00000002"});
  EXPECT_EQ(other.status, 1);
  EXPECT_NE(other.out.find("lm_head.weight.exp_avg"), std::string::npos) << other.out;
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "hf"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "import", "hf", "--out", "back", "--dtype", ECHELON_TEST_DTYPE}).status, 0);
  const Result moments = run({"checkpoint", "diff", "ck", "back"});
  EXPECT_EQ(moments.status, 1);  // moments are not exported, values are
  EXPECT_EQ(moments.out.find("lm_head.weight "), std::string::npos) << moments.out;
  std::string bytes = read_bytes(at("ck/step-00000002/model-00000.safetensors"));
  bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 4);
  write("ck/step-00000002/model-00000.safetensors", bytes);
  const Result damaged = run({"checkpoint", "verify", "ck"});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_NE(damaged.err.find("model-00000.safetensors: tensor "), std::string::npos) << damaged.err;
  refused({"checkpoint"}, {"info, verify, diff, export, import"});
  refused({"checkpoint", "info", "absent"}, {"absent", "no such"});
  refused({"checkpoint", "export", "ck", "--out", "hf"}, {"--out hf", "not empty"});
  refused({"checkpoint", "import", "ck", "--out", "new"}, {"config.json"});
}

TEST_F(CommandLine, HelpNamesEveryFlag) {
  const Result r = run({"train", "--help"});
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.err, "");
  for (const char* flag :
       {"--plan",        "--model",   "--dp",     "--tp",           "--sp",        "--global-batch",
        "--micro-batch", "--seq-len", "--dtype",  "--data",         "--tokenizer", "--steps",
        "--lr",          "--min-lr",  "--warmup", "--weight-decay", "--clip",      "--checkpoint",
        "--save-every",  "--resume",  "--log",    "--json"})
    EXPECT_NE(r.out.find(flag), std::string::npos) << flag;
}

TEST_F(CommandLine, AsynchronousTraining) {
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
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4);  // three steps and the validation

  refused(with({"--staleness", "soon"}), {"--staleness soon"});
  refused(with({"--staleness", "-1"}), {"--staleness -1", "inf"});
  refused(with({"--staleness", "1", "--tp", "3"}), {"--staleness 1", "--tp 1"});
  refused(with({"--staleness", "1", "--eval-every", "2"}), {"--eval-every 2", "legal: 0"});
  refused(with({"--staleness", "1", "--save-every", "2"}), {"--save-every 2", "legal: 0"});
  refused(with({"--servers", "2"}), {"--servers 2", "--staleness"});
  refused(with({"--straggle", "1"}), {"--straggle 1", "1:4"});
  refused(with({"--straggle", "2:4"}), {"--straggle 2:4", "0 to 1"});
  refused(with({"--straggle", "0:0.5"}), {"--straggle 0:0.5", "1 to 1000"});
  refused({"verify", "--model", "tiny.toml", "--staleness", "0"}, {"--staleness 0", "verify"});
}

}  // namespace
}  // namespace echelon::command_line_test
