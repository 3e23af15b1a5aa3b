// The program as its users meet it: exit status, one sentence, nothing lost; and as programs do: one JSON
// object.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "case_choice.h"
#include "checkpoint/checkpoint_manifest.h"
#include "page_checks.h"
#include "patience.h"
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
                   "16", "--threads", "1", "--precision", ECHELON_TEST_DTYPE},
                  more);
  }
  // A training without end; `act` is told its process once two checkpoints are there.
  template <class Act>
  Result interrupted(const Act& act) const {
    Result stopped;
    std::atomic<bool> ended{false};
    std::thread training_run([&] {
      stopped =
          run(training({"--steps", "1000000", "--save-every", "1", "--checkpoint", "ck"}), "echo $$ >pid");
      ended = true;
    });
    wait_until([&] { return ended || fs::exists(at("ck/step-00000002")); });
    if (!ended) act(std::stoi(read_bytes(at("pid"))));
    training_run.join();
    return stopped;
  }

  Words list_of_checkpoints() const {
    Words paths;
    for (const auto& entry : fs::directory_iterator(at("ck")))
      if (entry.path().filename().string().starts_with("step-")) paths.push_back(entry.path().string());
    return paths;
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

TEST_F(CommandLine, SaysThatRanksShareCores) {  // long
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

TEST_F(CommandLine, WrongWordsAreRefusedByName) {
  refused({},
          {"verb",
           "train, verify, plan, calibrate, devices, simulate, checkpoint, data, launch, generate, bench, view"});
  refused({"frob"},
          {"frob",
           "train, verify, plan, calibrate, devices, simulate, checkpoint, data, launch, generate, bench, view"});
  refused({"bench"}, {"bench", "train, comm"});
  refused({"bench", "x"}, {"x", "train, comm"});
  refused({"train"}, {"--data"});
  refused({"train", "--nope"}, {"--nope", "no such flag"});
  refused({"verify", "stray"}, {"stray"});
  refused({"generate"}, {"--checkpoint"});
  refused(training({"--dp"}), {"--dp", "missing"});
  refused(training({"--dp", "1", "--dp", "2"}), {"--dp", "more than once"});
  refused(training({"--dp", "x"}), {"--dp x", "whole number"});
  refused(training({"--timeline", "step.json"}), {"--timeline step.json", "--trace step.json"});
  refused(training({"--trace", "step.html"}), {"--trace step.html", "--timeline step.html"});
  refused(training({"--steps", "2.5"}), {"--steps 2.5", "whole number", "1e9"});
  refused(training({"--steps", "8k"}), {"--steps 8k", "legal: 8000, 8192"});
  refused(training({"--steps", "99999999999999999999"}), {"--steps 99999999999999999999"});
  refused(training({"--seed", "-1"}), {"--seed -1", "at least 0"});
  refused(training({"--lr", "fast"}), {"--lr fast", "number"});
}

// A name with a space is one word of what is shown to be typed.
TEST_F(CommandLine, NamesInCommandsAreQuoted) {
  fs::create_directory(at("my model"));
  write("my model/config.json", "{}");
  refused({"generate", "--checkpoint", "my model"}, {"echelon checkpoint import 'my model' --out DIR"});
}

TEST_F(CommandLine, MisspeltNamesAreGuessed) {  // long
  refused({"trian"}, {"trian: no such verb (did you mean train?); legal: train"});
  refused({"trian", "--help"}, {"trian: no such verb (did you mean train?); legal: train"});
  refused({"checkpoint", "inof", "-h"}, {"inof: no such verb (did you mean info?); legal: info"});
  EXPECT_EQ(run({"checkpoint", "info", "ck", "--help"}).status, 0);
  refused({"bench", "com"}, {"did you mean comm?"});
  refused({"version"}, {"did you mean --version?"});
  refused(training({"--batch-size", "2"}), {"--batch-size", "did you mean --global-batch?"});
  refused({"train", "text.txt"}, {"did you mean --data text.txt?"});
  refused({"verify", "llama-tiny"}, {"did you mean --model llama-tiny?"});
  refused({"plan", "h100"}, {"did you mean --machine h100?"});
  refused({"generate", "hello"}, {"did you mean --prompt hello?"});
  refused({"checkpoint", "info"}, {"checkpoint info: its argument checkpoint is missing", "--help"});
  refused({"checkpoint", "export", "ck"}, {"checkpoint export: --out is missing"});
  refused({"launch", "--", "trian"}, {"launch: trian: the only verb that it runs is train"});
  refused({"plan", "--gpus", "8", "--against", "tp"}, {"--against tp: must be KEY=VALUE"});
  refused({"simulate", "--out", "drawing.pdf"}, {"--out drawing.pdf", "legal: names that end in .svg"});
  refused({"data", "tokenize", "text.txt", "--tokenizer", "bytes", "--out", "nowhere/x"}, {"--out nowhere/x", "cannot be written"});
  refused({"bench", "comm", "--rank", "2"}, {"--rank", "did you mean --ranks?"});
  refused(training({"--dpp", "2"}),
          {"--dpp: echelon train has no such flag (did you mean --dp?); echelon train --help lists"});
  refused(training({"--microbatch=2"}), {"did you mean --micro-batch?"});
  refused(training({"--prompt", "a"}), {"(generate has)"});
  refused(training({"--devise", "cpu"}), {"--devise", "--help lists"});
  refused({"checkpoint", "exprot", "ck"}, {"exprot", "did you mean export?"});
  refused({"train", "--data", "text.txt", "--model", "lama-tiny"}, {"did you mean llama-tiny?", "gpt2-124m"});
  refused(training({"--pp", "2", "--schedule", "zbh1"}), {"did you mean zb-h1?", "legal: naive"});
  refused({"simulate", "--schedule", "1f1v"}, {"did you mean 1f1b?"});
  refused({"simulate", "--compare", "gpip,1f1b"}, {"did you mean gpipe?"});
  refused({"plan", "--machine", "H100"}, {"did you mean h100?"});
  refused({"plan", "--machine", "cpu"}, {"echelon calibrate"});
  refused({"plan", "--software", "torchtitn"}, {"did you mean torchtitan?"});
  write("plan.toml", "model = \"llama-tiny\"\nglobalbatch = 8\n");
  refused({"train", "--data", "text.txt", "--plan", "plan.toml"}, {"did you mean global-batch?"});
  write("model.toml", std::string(tiny_model) + "n_heads = 3\n");
  refused({"train", "--data", "text.txt", "--model", "model.toml"}, {"did you mean num_heads?"});
}

TEST_F(CommandLine, WrongValuesAreRefusedWithTheLegalOnes) {  // long
  refused(training({"--lr", "-1"}), {"--lr -1", "above 0"});
  refused(training({"--lr", "nan"}), {"--lr nan", "above 0"});
  refused(training({"--lr", "1e-6", "--min-lr", "1e-5"}), {"--min-lr 1e-05", "--lr 1e-06"});
  refused(training({"--warmup", "9", "--steps", "5"}), {"--warmup 9", "5"});
  refused(training({"--steps", "0"}), {"--steps 0"});
  refused(training({"--steps", "-1"}), {"--steps -1", "at least 1"});
  refused(training({"--eval-every", "-1"}), {"--eval-every -1"});
  refused(training({"--eval-samples", "-1"}), {"--eval-samples -1"});
  refused(training({"--save-every", "-1"}), {"--save-every -1"});
  refused(training({"--sample", "-1"}), {"--sample -1"});
  refused(training({"--sample", "64"}), {"--sample 64", "64"});
  refused(training({"--val-fraction", "1"}), {"--val-fraction 1"});
  refused(training({"--timeout", "0"}), {"--timeout 0"});
  refused(training({"--dp", "2", "--collectives", "tree"}),
          {"--collectives tree", "direct, ring, halving-doubling, auto, nccl"});
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
  refused(training({"--dp", "2", "--zero", "4"}), {"--zero 4", "legal: 0, 1, 2, 3"});
  refused(training({"--dp", "2", "--hsdp", "2"}), {"--hsdp 2", "--zero is 0"});
  refused(training({"--zero-prefetch", "2"}), {"--zero-prefetch 2", "with --zero 0"});
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
  refused(with({"--cp", "2", "--seq-len", "30"}), {"--seq-len 30", "--cp 2", "zigzag", "legal: 28, 32"});
  refused(with({"--cp", "2", "--cp-kind", "star"}), {"--cp-kind star", "ring, ulysses, allgather, hybrid"});
  refused(with({"--cp", "2", "--cp-balance", "fair"}), {"--cp-balance fair", "zigzag, stripe, none"});
  refused(with({"--mask", "full"}), {"--mask full", "causal, document"});
  refused(with({"--seq-len", "0"}), {"--seq-len 0"});
  refused(with({"--seq-len", "9999"}), {"--seq-len 9999", "4096"});
  refused(with({"--global-batch", "0"}), {"--global-batch 0"});
  refused(with({"--global-batch", "9223372036854775807"}), {"--global-batch", "1000000"});
  refused(with({"--precision", "bf8"}), {"--precision bf8", "f32"});
  refused(with({"--model", "gpt5"}), {"--model gpt5", "gpt2-tiny"});
  refused(with({"--model", "llama-3-405b"}), {"llama-3-405b", "TiB", "this machine"});
  refused(with({"--checkpoint", ""}), {"--checkpoint", "empty"});
  refused({"verify", "--steps", "0"}, {"--steps 0"});
  refused({"bench", "comm", "--ranks", "0"}, {"--ranks 0", "256"});
  refused({"bench", "comm", "--ranks", "256", "--size", "16384"}, {"--size 16384", "this machine"});
  refused({"bench", "comm", "--size", "nan"}, {"--size nan"});
  refused({"bench", "comm", "--repeats", "0"}, {"--repeats 0", "1 to"});
  refused(training({"--cuda-graphs", "yes"}), {"--cuda-graphs yes", "on, off"});
  refused(training({"--cuda-graphs", "on"}), {"--cuda-graphs on", "--device cpu", "--device cuda"});
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
                                              {"devices"},
                                              {"simulate"},
                                              {"checkpoint"},
                                              {"checkpoint", "info"},
                                              {"checkpoint", "import"},
                                              {"data", "tokenize"},
                                              {"data", "info"},
                                              {"launch"},
                                              {"generate"},
                                              {"bench", "train"},
                                              {"bench", "comm"},
                                              {"bench", "context"},
                                              {"view"}}) {
    const Result r = run(joined(verb, {"--help"}));
    EXPECT_EQ(r.status, 0);
    const std::size_t first = r.out.find(":\n");  // the first heading
    ASSERT_NE(first, std::string::npos) << r.out;
    const std::string heading = r.out.substr(r.out.rfind('\n', first) + 1);
    EXPECT_TRUE(heading.starts_with("Common flags:") || heading.starts_with("Arguments:")) << r.out;
    EXPECT_NE(r.out.find("\nCommon flags:\n"), std::string::npos) << r.out;
    EXPECT_EQ(r.out.find("\nOptions:"), std::string::npos) << "a flag without a heading in " << r.out;
    EXPECT_EQ(r.out.find("\n\n\n"), std::string::npos) << r.out;
    std::istringstream lines(r.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST_F(CommandLine, DevicesAreListedAndThoseThatAreNotThereRefused) {
  const Result text = run({"devices"});
  EXPECT_EQ(text.status, 0);
  EXPECT_TRUE(text.out.starts_with("cpu   ")) << text.out;
  EXPECT_NE(text.out.find("\ncuda  "), std::string::npos) << text.out;
  const json object = one_object(run({"devices", "--json"}));
  EXPECT_EQ(object["devices"][0]["device"], "cpu");
  EXPECT_GE(object["devices"][0]["cores"], 1);
  refused(training({"--device", "gpu"}), {"--device gpu", "legal: cpu, cuda, auto"});
  refused(training({"--device", "none"}), {"--device none", "legal: cpu, cuda, auto"});
  if (!object.contains("no_cuda")) GTEST_SKIP() << "there is a device";
  const std::string why = object["no_cuda"];
  EXPECT_NE(text.out.find("none: " + why), std::string::npos);
  for (const Words& verb : std::vector<Words>{training({}),
                                              {"verify", "--model", "tiny.toml", "--seq-len", "8"},
                                              {"bench", "train", "--model", "tiny.toml", "--seq-len", "8"}})
    refused(joined(verb, {"--device", "cuda"}), {"--device cuda: " + why, "legal: cpu"});
  EXPECT_EQ(run({"verify", "--model", "tiny.toml", "--seq-len", "8", "--device", "auto"}).status, 0);
}

TEST_F(CommandLine, PathsThatCannotBeWrittenAreRefusedAndLeaveNothing) {
  write("kept.jsonl", "{\"step\": 1}\n");
  refused(training({"--checkpoint", "new", "--log", "absent/log"}), {"--log absent/log", "No such file"});
  refused(training({"--checkpoint", "text.txt", "--log", "new.jsonl"}), {"--checkpoint text.txt"});
  refused(training({"--checkpoint", "text.txt/x", "--log", "kept.jsonl"}), {"--checkpoint text.txt/x"});
  refused(training({"--checkpoint", "absent", "--resume"}), {"absent", "no such"});
  refused(training({"--resume"}), {"--resume", "--checkpoint"});
}

TEST_F(CommandLine, LogsGoToSeveralPlacesAtOnce) {
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
TEST_F(CommandLine, RunsAreReportedAsAPage) {  // long
  const Words few{"--sample", "0", "--checkpoint", "ck", "--save-every", "2", "--json"};
  const json first = one_object(run(joined(
      training({"--steps", "3", "--pp", "2", "--log", "run.jsonl", "--report", "a.html"}), few)));
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

  EXPECT_EQ(run({"view", "run.jsonl", "--out", "c.html"}).status, 0);
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
  refused_resume({"--steps", "2"}, {"--steps 2", "step-00000003"});
  refused_resume({"--steps", "5", "--seed", "2"}, {"--seed 1", "2"});
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
  refused({"generate", "--checkpoint", "ck", "--max-tokens", "9223372036854775807"}, {"--max-tokens", "64; legal: up to "});
  refused(joined(generating, {"--prompt", std::string(60, 'a')}), {"60 tokens", "65", "64"});
  refused(joined(generating, {"--prompt-tokens", "1,257"}), {"257", "0 to 256"});
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
TEST_F(CommandLine, ARunIsNotResumedOnOtherData) {  // long
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

TEST_F(CommandLine, StepsThatWereSkippedAreInTheSummary) {  // long
  const Words blown{"--steps",  "4",    "--warmup",       "0", "--lr",     "1e30",
                    "--on-nan", "skip", "--val-fraction", "0", "--sample", "0"};
  const Result r = run(training(blown));
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("\n3 of 4 steps skipped"), std::string::npos) << r.out;
  EXPECT_EQ(one_object(run(joined(training(blown), {"--json"})))["skipped_steps"], 3);
}

// One home reads them all: it does not wait, and says what is there.
TEST_F(CommandLine, WhatIsNoFileIsRefusedWhereverAFileIsNamed) {  // long
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  fs::create_directory(at("directory"));
  fs::create_directory(at("hf"));
  fs::create_symlink("/dev/zero", at("hf/config.json"));
  fs::create_directories(at("ck/step-00000001"));
  fs::create_symlink("../../pipe", at("ck/step-00000001/checkpoint.json"));
  const std::string over_long(5000, 'x');
  const Words simulation{"simulate", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2"};
  const std::vector<std::pair<Words, std::string>> places{
      {{"train", "--data"}, "--data"},
      {{"train", "--data", "text.txt", "--model"}, "--model"},
      {{"train", "--data", "text.txt", "--plan"}, "--plan"},
      {training({"--machine"}), "--machine"},
      {{"plan", "--model", "gpt2-tiny", "--gpus", "1", "--machine"}, "--machine"},
      {{"plan", "--model", "gpt2-tiny", "--gpus", "1", "--software"}, "--software"},
      {joined(simulation, {"--stage-times"}), "--stage-times"},
      {{"simulate", "--schedule"}, "--schedule"}};
  const std::vector<std::pair<std::string, std::string>> paths{
      {"pipe", "a named pipe"},
      {"/dev/zero", "a device"},
      {"directory", ""},       // data may be one, and a model
      {"/proc/self/mem", ""},  // an empty file of data
      {over_long, "File name too long"}};
  for (const auto& [words, flag] : places)
    for (const auto& [path, why] : paths) {
      SCOPED_TRACE(flag + " " + path.substr(0, 40));
      refused(joined(words, {path}), {flag, why});
    }
  refused({"train", "--data", "text.txt", "--model", "hf"}, {"hf/config.json", "a device"});
  refused({"checkpoint", "info", "ck"}, {"checkpoint.json", "a named pipe"});
  refused({"generate", "--checkpoint", "ck"}, {"checkpoint.json", "a named pipe"});
  refused(training({"--schedule", "directory", "--pp", "2"}), {"--schedule directory", "a directory"});
}

TEST_F(CommandLine, AnOutputIsAsItWasUntilItIsWhole) {
  write("cpu.toml", "kept = 1\n");
  refused({"calibrate", "--out", "absent/cpu.toml"}, {"--out absent/cpu.toml", "No such file"});
  if (takes_all_cases()) {  // no file may grow: it was emptied first, and stayed empty
    EXPECT_EQ(run({"calibrate"}, "ulimit -f 0").status, 3);
    EXPECT_EQ(read_bytes(at("cpu.toml")), "kept = 1\n");
  }
  const Words plan{"plan", "--model", "gpt2-tiny", "--gpus", "1", "--machine", "a100-80"};
  refused(joined(plan, {"--out", "absent/plan.toml"}), {"--out absent/plan.toml"});
  const Result through = run(joined(plan, {"--out", "/dev/stdout"}));
  EXPECT_EQ(through.status, 0) << through.err;
  EXPECT_NE(through.out.find("[mesh]"), std::string::npos) << through.out;
}

TEST_F(CommandLine, VerifyAnswersYesInOneObject) {
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
TEST_F(CommandLine, VerifyTakesTheMeshThatIsAsked) {
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

TEST_F(CommandLine, ZeroTrainsAndVerifies) {
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

TEST_F(CommandLine, CollectivesByMessagesTrainAndVerify) {
  const json summary = one_object(run(training(
      {"--dp", "2", "--tp", "3", "--collectives", "ring", "--steps", "2", "--sample", "0", "--json"})));
  EXPECT_EQ(summary["traffic_bytes"]["measured"], summary["traffic_bytes"]["predicted"]);
  EXPECT_GT(summary["collective_messages"]["dp"]["send"], 0);
  const json report = one_object(
      run({"verify", "--model", "tiny.toml", "--dp", "3", "--tp", "1", "--collectives", "halving-doubling",
           "--seq-len", "8", "--steps", "1", "--threads", "1", "--precision", ECHELON_TEST_DTYPE, "--json"}));
  EXPECT_EQ(report["pass"], true);
}

TEST_F(CommandLine, BenchAnswersInOneObject) {
  if (!takes_all_cases()) GTEST_SKIP() << "what is timed takes its time: the slow suite runs it";
  has(one_object(run({"bench", "train", "--model", "tiny.toml", "--seq-len", "8", "--steps", "1", "--threads",
                      "1", "--precision", ECHELON_TEST_DTYPE, "--json"})),
      {"tokens_per_second", "mfu", "step_seconds", "matmul_flops", "memory_bytes", "peak_resident_bytes"});
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

TEST_F(CommandLine, AFullDiskEndsTheRunAndKeepsTheEarlierCheckpoint) {  // long
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
  EXPECT_NE(out.err.find("standard output cannot be written: "), std::string::npos) << out.err;
  EXPECT_EQ(out.err.find("Is a directory"), std::string::npos) << "the reason of something else: " << out.err;
  const Result nowhere = run({"simulate", "--out", "none/drawn.txt"});
  EXPECT_EQ(nowhere.status, 2);
  EXPECT_EQ(nowhere.err, "echelon: --out none/drawn.txt: cannot be written: No such file or directory\n");
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

TEST_F(CommandLine, AnInterruptLeavesWholeCheckpoints) {
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGINT); });
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
  EXPECT_NE(stopped.out.find("--resume continues from ck/step-"), std::string::npos) << stopped.out;
  EXPECT_EQ(stopped.err, "echelon: stopping after this step; a second request ends the run at once\n");
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

// The terminal that it was started from has been closed.
TEST_F(CommandLine, AHangUpLeavesWholeCheckpoints) {
  struct sigaction hang_up {};
  if (::sigaction(SIGHUP, nullptr, &hang_up) != 0 || hang_up.sa_handler == SIG_IGN) GTEST_SKIP() << "under nohup";
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGHUP); });
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
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

// As timeout(1) asks a command to end: itself, and at once the group that it is in. It is stopped meanwhile,
// so that it finds both, however slow this is; two of one kind would be one.
TEST_F(CommandLine, ASignalToTheWholeGroupIsOneRequest) {  // long
  for (const std::string verb : {"train", "launch -- train"}) {
    const CommandResult r = run_command(
        "cd '" + directory_.string() + "'; rm -rf ck; setsid '" + ECHELON_BINARY + "' " + verb +
        " --data text.txt --model tiny.toml --global-batch 2 --seq-len 16 --threads 1 --steps 1000000 "
        "--save-every 1 --keep 2 --checkpoint ck --precision " +
        ECHELON_TEST_DTYPE +
        " & while kill -0 $! && ! ls ck 2>/dev/null | grep -q ^step; do sleep 0.02; done; "
        "kill -STOP $!; kill -TERM $!; kill -INT -- -$!; kill -CONT $!; wait $!");
    EXPECT_EQ(r.status, 0) << verb << "\n" << r.output;
    EXPECT_NE(r.output.find("stopped after step "), std::string::npos) << verb << "\n" << r.output;
  }
}

TEST_F(CommandLine, ASecondRunOnADirectoryIsRefused) {  // long
  Result second, third;
  const Result first = interrupted([&](int process) {
    second = run(training({"--steps", "9", "--checkpoint", "ck"}));
    third = run(training({"--steps", "9", "--checkpoint", "ck", "--resume"}));
    ::kill(process, SIGTERM);
  });
  EXPECT_EQ(first.status, 0) << first.err;
  const std::string holder = "--checkpoint ck: process " + read_bytes(at("pid")).substr(0, 3);
  for (const Result* r : {&second, &third}) {
    EXPECT_EQ(r->status, 2);
    EXPECT_NE(r->err.find(holder), std::string::npos) << r->err;
    EXPECT_NE(r->err.find("name another directory"), std::string::npos) << r->err;
  }
  for (const std::string& path : list_of_checkpoints())
    EXPECT_EQ(run({"checkpoint", "verify", path}).status, 0) << path;
}

TEST_F(CommandLine, LaunchGoesOnFromTheLastCheckpoint) {  // long
  const Words saving{"--steps", "6", "--save-every", "2", "--async-save", "off", "--sample", "0"};
  ASSERT_EQ(run(joined(training(saving), {"--checkpoint", "whole"})).status, 0);
  const auto launched = [&](const Words& launch, const Words& more) {
    return run(joined(joined(joined({"launch"}, launch), Words{"--"}), joined(training(saving), more)));
  };
  const Result r = launched({"--max-restarts", "2"}, {"--checkpoint", "ck", "--die", "0:5:forward"});
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("ended with status 137; restart 1 of 2\n"), std::string::npos) << r.err;
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
  refused({"launch", "--hosts", "a:x", "--", "train", "--checkpoint", "x"}, {"--hosts x"});
}

TEST_F(CommandLine, CheckpointsAreLookedAtComparedAndConverted) {  // long
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
  EXPECT_NE(other.out.find(" tensors differ "), std::string::npos) << other.out;
  EXPECT_NE(other.out.find(" max |a-b| / max |a|\n"), std::string::npos) << other.out;
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "hf"}).status, 0);
  // One that was ended has left this, and is no hindrance.
  fs::create_directories(at("ended/.unfinished"));
  write("ended/.unfinished/model.safetensors.tmp-1", "half");
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "ended"}).status, 0);
  EXPECT_EQ(read_bytes(at("ended/model.safetensors")), read_bytes(at("hf/model.safetensors")));
  EXPECT_FALSE(fs::exists(at("ended/.unfinished")));
  ASSERT_EQ(run({"checkpoint", "import", "hf", "--out", "back", "--dtype", ECHELON_TEST_DTYPE}).status, 0);
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "wide", "--dtype", "f64"}).status, 0);
  EXPECT_NE(run({"checkpoint", "import", "wide", "--out", "narrow"})
                .err.find("weights in f64 are rounded to f32; --dtype f64"),
            std::string::npos);
  EXPECT_EQ(run({"checkpoint", "import", "wide", "--out", "asked", "--dtype", "f32"}).err, "");
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
  refused({"checkpoint", "info", "absent"}, {"checkpoint info absent: no such directory"});
  refused({"checkpoint", "diff", "ck", "absent"}, {"checkpoint diff absent: no such directory"});
  refused({"checkpoint", "diff", "ck", std::string(300, 'a')}, {"checkpoint diff a", "too long"});
  refused({"checkpoint", "export", "ck", "--out", "hf"}, {"--out hf", "not empty"});
  refused({"checkpoint", "import", "ck", "--out", "new"}, {"config.json"});
}

// Fine-tuned text goes in and out by the tokenizer that came with the weights.
TEST_F(CommandLine, ATokenizerGoesWithItsModel) {  // long
  const std::string tuned = std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/fine_tune";
  const Result trained =
      run({"train", "--from", tuned, "--data", tuned + "/records.jsonl", "--steps", "1", "--global-batch",
           "2", "--seq-len", "32", "--threads", "1", "--sample", "0", "--checkpoint", "tuned"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const Words generating{"generate", "--checkpoint", "tuned", "--prompt",
                         "Hello",    "--threads",    "1",     "--json"};
  const json whole = one_object(run(joined(generating, {"--max-tokens", "20", "--seed", "3"})));
  EXPECT_LT(whole["prompt_tokens"].size(), 5u);  // pairs of its bytes are one token
  const std::string text = whole["text"];
  ASSERT_GT(text.size(), 4u);
  // What stops it is not written, and neither is what follows.
  const auto letter = std::find_if(text.begin() + 1, text.end(), [](char c) { return c >= 'a' && c <= 'z'; });
  ASSERT_NE(letter, text.end()) << text;
  const std::string stop(1, *letter);
  const json cut = one_object(run(joined(generating, {"--max-tokens", "20", "--seed", "3", "--stop", stop})));
  EXPECT_EQ(cut["text"], text.substr(0, text.find(stop)));
  // Among the likeliest alone, its sampling is what the likeliest is.
  const json likeliest = one_object(run(joined(generating, {"--max-tokens", "8", "--temperature", "0"})));
  const json narrow = one_object(run(joined(generating, {"--max-tokens", "8", "--top-p", "1e-9"})));
  EXPECT_EQ(narrow["tokens"], likeliest["tokens"]);
  refused(joined(generating, {"--top-p", "0"}), {"--top-p 0"});
  refused(joined(generating, {"--stop", ""}), {"--stop"});
  ASSERT_EQ(run({"checkpoint", "export", "tuned", "--out", "written"}).status, 0);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    EXPECT_EQ(read_bytes(at(std::string("written/") + name)), read_bytes(tuned + "/" + name)) << name;
}

// A run begins by removing what an ended one left unfinished: here the directory of its trace.
TEST_F(CommandLine, SaysWhatItTrainedWhereAFileCannotBeWrittenAnyMore) {
  fs::create_directories(at("ck/.step-00000001.unfinished-0"));
  const Result late = run(training({"--steps", "1", "--sample", "0", "--checkpoint", "ck", "--trace",
                                    "ck/.step-00000001.unfinished-0/t.json", "--json"}));
  EXPECT_EQ(late.status, 3);
  EXPECT_NE(late.err.find("--trace ck/.step-00000001.unfinished-0/t.json: cannot be written"), std::string::npos)
      << late.err;
  EXPECT_EQ(json::parse(late.out, nullptr, false)["last_step"], 1) << late.out;
}

// Text ends its documents with the tokenizer's end of text; whose the ids of a token file are nothing says.
TEST_F(CommandLine, DocumentsEndAsTheTokenizerSays) {  // long
  const std::string tuned = std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/fine_tune";
  const auto by = [&](const std::string& data, const Words& more) {
    return joined({"train", "--from", tuned, "--data", data, "--steps", "1", "--global-batch", "2", "--seq-len",
                   "32", "--threads", "1", "--sample", "0", "--eval-samples", "0", "--mask", "document", "--json"},
                  more);
  };
  const std::string records = tuned + "/records.jsonl";
  const json loss = one_object(run(by(records, {})))["final_loss"];
  EXPECT_EQ(one_object(run(by(records, {"--document-end", "0"})))["final_loss"], loss);
  EXPECT_NE(one_object(run(by(records, {"--document-end", "403"})))["final_loss"], loss);
  ASSERT_EQ(run({"data", "tokenize", records, "--tokenizer", tuned, "--out", "ids"}).status, 0);
  refused(by("ids.tokens", {}), {"--mask document", "404 tokens", "--document-end"});
}

// Several prompts, on several ranks, are the same texts as one after the other.
TEST_F(CommandLine, PromptsAreContinuedOnAnyMesh) {  // long
  ASSERT_EQ(run(training({"--steps", "2", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const Words generating{"generate", "--checkpoint", "ck", "--threads", "1", "--max-tokens", "5", "--json"};
  write("prompts.txt", "To be\n\nor not\nto\n");
  const json all = one_object(run(joined(generating, {"--prompts", "prompts.txt"})))["texts"];
  ASSERT_EQ(all.size(), 3u);
  const Words prompts{"To be", "or not", "to"};
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    // Each has a seed of its own.
    const json one =
        one_object(run(joined(generating, {"--prompt", prompts[i], "--seed", std::to_string(1 + i)})));
    for (const char* field : {"prompt_tokens", "tokens", "text"}) EXPECT_EQ(all[i][field], one[field]) << i;
  }
  for (const Words& mesh : std::vector<Words>{{"--dp", "2"}, {"--tp", "3"}, {"--pp", "2", "--dp", "2"}}) {
    Words words = joined(generating, mesh);
    for (const std::string& prompt : prompts) words = joined(words, {"--prompt", prompt});
    EXPECT_EQ(one_object(run(words))["texts"], all) << testing::PrintToString(mesh);
  }
  const Result shown = run({"generate", "--checkpoint", "ck", "--threads", "1", "--max-tokens", "2", "--dp",
                            "2", "--prompt", "To be", "--prompt", "or"});
  EXPECT_TRUE(shown.out.starts_with("To be")) << shown.out;
  EXPECT_NE(shown.out.find("\nor"), std::string::npos) << shown.out;
  refused(joined(generating, {"--tp", "4"}), {"--tp 4", "6 heads", "legal: 1, 3"});
  refused(joined(generating, {"--pp", "3"}), {"--pp 3", "2 layers"});
  write("none.txt", "\n");
  refused(joined(generating, {"--prompts", "none.txt"}), {"--prompts none.txt", "no line"});
  refused(joined(generating, {"--prompts", "absent"}), {"--prompts", "absent"});
}

// A conversation is the text that its format makes of its turns.
TEST_F(CommandLine, AConversationIsKept) {  // long
  const Words model{"train",
                    "--data",
                    "text.txt",
                    "--model",
                    "llama-tiny",
                    "--global-batch",
                    "2",
                    "--seq-len",
                    "16",
                    "--steps",
                    "3",
                    "--sample",
                    "0",
                    "--threads",
                    "1",
                    "--checkpoint",
                    "long",
                    "--precision",
                    ECHELON_TEST_DTYPE};
  ASSERT_EQ(run(model).status, 0);
  const Words generating{"generate", "--checkpoint",  "long", "--threads", "1", "--max-tokens",
                         "6",        "--temperature", "1"};
  // The bytes tokenizer's ids are bytes, and 256 ends a text.
  const auto answer = [&](const std::string& text) {
    std::string ids;
    for (const char c : text)
      ids += fmt::format("{}{}", ids.empty() ? "" : ",", static_cast<unsigned char>(c));
    std::string said;
    const json report = one_object(run(joined(generating, {"--prompt-tokens", ids, "--json"})));
    for (const int id : report["tokens"]) {
      if (id == 256) break;
      said += static_cast<char>(id);
    }
    return said.substr(0, said.find("<|im_end|>"));
  };
  const auto turn = [](const std::string& said) {
    return "<|im_start|>user\n" + said + "<|im_end|>\n<|im_start|>assistant\n";
  };
  const std::string system = "<|im_start|>system\nBe brief.<|im_end|>\n";
  const std::string first = answer(system + turn("Hello")),
                    second = answer(system + turn("Hello") + first + "<|im_end|>\n" + turn("And you?"));
  EXPECT_NE(first, second) << "too dull to tell";
  write("turns", "Hello\nAnd you?\n");
  for (const Words& mesh : std::vector<Words>{{}, {"--tp", "2"}, {"--pp", "2"}}) {
    const Result talk =
        run(joined(joined(generating, {"--chat", "--system", "Be brief."}), mesh), "exec <turns");
    EXPECT_EQ(talk.status, 0) << talk.err;
    EXPECT_EQ(talk.out, first + "\n" + second + "\n") << testing::PrintToString(mesh);
  }
  refused(joined(generating, {"--chat", "--chat-format", "gemma", "--system", "a"}), {"--system", "gemma"});
  refused(joined(generating, {"--chat", "--chat-format", "latin"}),
          {"--chat-format latin", "chatml, llama3, gemma"});
  refused(joined(generating, {"--chat", "--dp", "2"}), {"--dp 2", "with --chat"});
  // Where the positions end so does the conversation.
  ASSERT_EQ(run(training({"--steps", "1", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const Result full = run({"generate", "--checkpoint", "ck", "--threads", "1", "--chat"}, "exec <turns");
  EXPECT_EQ(full.status, 0) << full.err;
  EXPECT_NE(full.err.find("fills the 64 positions"), std::string::npos) << full.err;
}

TEST_F(CommandLine, HelpNamesEveryFlag) {
  const Result r = run({"train", "--help"});
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.err, "");
  for (const char* flag :
       {"--plan",        "--model",   "--dp",        "--tp",           "--sp",        "--global-batch",
        "--micro-batch", "--seq-len", "--precision", "--data",         "--tokenizer", "--steps",
        "--lr",          "--min-lr",  "--warmup",    "--weight-decay", "--clip",      "--checkpoint",
        "--save-every",  "--resume",  "--log",       "--json"})
    EXPECT_NE(r.out.find(flag), std::string::npos) << flag;
}

TEST_F(CommandLine, HelpTellsOfTopicsAndVerbs) {  // long
  const Result all = run({"help"});
  EXPECT_EQ(all.status, 0) << all.err;
  const std::string list = all.out.substr(all.out.find("\nTopics"));
  std::istringstream lines(list);
  std::set<std::string> documents;
  int topics = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  ") || line[2] == ' ') continue;
    const std::string topic = line.substr(2, line.find(' ', 2) - 2);
    SCOPED_TRACE(topic);
    ++topics;
    const Result r = run({"help", topic});
    EXPECT_EQ(r.status, 0) << r.err;
    const std::size_t more = r.out.find("\nMore: ");
    ASSERT_NE(more, std::string::npos) << r.out;
    const fs::path document = r.out.substr(more + 7, r.out.size() - more - 8);
    EXPECT_TRUE(fs::exists(document)) << document;
    documents.insert(document.filename().string());
    std::istringstream told(r.out.substr(0, more));
    for (std::string one; std::getline(told, one);) EXPECT_LE(one.size(), 80u) << one;
  }
  EXPECT_GE(topics, 20);
  for (const auto& entry : fs::directory_iterator(fs::path(ECHELON_SOURCE_DIR) / "docs"))
    EXPECT_TRUE(entry.path().extension() != ".md" || documents.contains(entry.path().filename())) << entry;

  const std::string zero = run({"help", "zero"}).out;
  for (const char* words :
       {"ZeRO, HSDP, offload", "Flags of train, verify, plan, bench train:", "--zero N=0"})
    EXPECT_NE(zero.find(words), std::string::npos) << words << " in " << zero;
  EXPECT_EQ(zero, run({"help", "fsdp"}).out);
  EXPECT_NE(run({"help", "models"}).out.find("llama-3-8b"), std::string::npos);
  EXPECT_NE(run({"help", "schedules"}).out.find("zb-h1"), std::string::npos);
  EXPECT_EQ(run({"help", "train"}).out, run({"train", "--help"}).out);
  EXPECT_EQ(run({"help", "bench", "comm"}).out, run({"bench", "comm", "--help"}).out);
  refused({"help", "modles"}, {"modles", "did you mean models?"});
  refused({"help", "bench", "con"}, {"did you mean context?"});
  refused({"help", "train", "zero"}, {"help train zero: no such topic or verb"});
}

// Every flag of every verb either acts by itself, or one that cannot act says beside what it does not.
class IdleFlags : public CommandLine {
 protected:
  struct Line {
    Words words;  // the flag that cannot act first, what it stands beside after it
    std::string where;
  };

  std::set<std::string> flags_of(const Words& verb) const {
    std::set<std::string> flags;
    std::istringstream help(run(joined(verb, {"--help"})).out);
    for (std::string line; std::getline(help, line);) {
      const std::size_t at = line.find_first_not_of(' ');
      if (at == std::string::npos || at == 0 || line.compare(at, 2, "--") != 0) continue;
      flags.insert(line.substr(at, line.find_first_of(" ,", at) - at));
    }
    EXPECT_GE(flags.size(), 2u);
    return flags;
  }
  // Each line is refused, and every flag of the verb is known.
  void expect_refused(const Words& verb, const std::vector<Line>& idle) const {
    for (const Line& line : idle)
      if (is_taken(3))
        refused(joined(verb, line.words), {line.words.front(), "has no effect " + line.where, "leave it out"});
  }
  void expect_known(const Words& verb, const std::vector<Line>& idle, const Words& alone) const {
    std::set<std::string> known(alone.begin(), alone.end());
    for (const Line& line : idle) known.insert(line.words.front());
    known.insert({"--help", "--json"});
    for (const std::string& flag : flags_of(verb))
      EXPECT_TRUE(known.contains(flag))
          << testing::PrintToString(verb) << " " << flag << " neither acts by itself nor says what it needs";
  }

  static inline const Words plan_alone{"--plan",
                                       "--model",
                                       "--dp",
                                       "--tp",
                                       "--pp",
                                       "--cp",
                                       "--ep",
                                       "--mask",
                                       "--aux-loss",
                                       "--device-loss",
                                       "--communication-loss",
                                       "--z-loss",
                                       "--bias-rate",
                                       "--capacity",
                                       "--recompute",
                                       "--numerics",
                                       "--hsdp",
                                       "--offload",
                                       "--freeze",
                                       "--lora",
                                       "--global-batch",
                                       "--micro-batch",
                                       "--seq-len",
                                       "--precision",
                                       "--threads",
                                       "--device",
                                       "--timeout"};
  static std::vector<Line> plan_idle() {
    return {{{"--schedule", "nonsense"}, "with --pp 1"},
            {{"--layers-per-stage", "auto"}, "with --pp 1"},
            {{"--chunks", "2"}, "with --pp 1"},
            {{"--chunks", "2", "--pp", "2"}, "with --schedule 1f1b"},
            {{"--optimizer-barrier", "off"}, "with --pp 1"},
            {{"--vocabulary-parallel", "on"}, "with --pp 1"},
            {{"--sp", "on"}, "with --tp 1"},
            {{"--cp-kind", "ring"}, "with --cp 1"},
            {{"--cp-balance", "stripe"}, "with --cp 1"},
            {{"--cp-balance", "stripe", "--cp", "2", "--cp-kind", "ulysses"}, "with --cp-kind ulysses"},
            {{"--cp-ulysses", "2"}, "with --cp 1"},
            {{"--cp-ulysses", "2", "--cp", "2"}, "with --cp-kind ring"},
            {{"--document-end", "3"}, "with --mask causal"},
            {{"--drop", "position"}, "with tiny, which has no experts"},
            {{"--drop", "position", "--model", "mixtral-tiny"}, "with --capacity 0"},
            {{"--balance-scope", "batch", "--model", "mixtral-tiny"}, "without --aux-loss"},
            {{"--zero", "1"}, "with --dp 1 and --cp 1"},
            {{"--zero", "1", "--dp", "2", "--hsdp", "2"}, "with --hsdp 2 of 2 ranks"},
            {{"--zero-prefetch", "2", "--dp", "2"}, "with --zero 0"},
            {{"--bucket", "1MiB"}, "with --dp 1 and --cp 1"},
            {{"--bucket", "1MiB", "--dp", "2", "--zero", "1"}, "with --zero 1"},
            {{"--compress", "int8"}, "with --dp 1 and --cp 1"},
            {{"--offload-dir", "."}, "with --offload none"},
            {{"--collectives", "ring"}, "with one rank"}};
  }
};

TEST_F(IdleFlags, OfAPlan) {
  std::vector<Line> dense = plan_idle(), mixture;
  for (std::size_t i = 0; i < dense.size();) {
    const Words& words = dense[i].words;
    const bool has_model = std::find(words.begin(), words.end(), "--model") != words.end();
    if (!has_model) {
      ++i;
      continue;
    }
    mixture.push_back(dense[i]);
    dense.erase(dense.begin() + static_cast<std::ptrdiff_t>(i));
  }
  const Words train{"train", "--data", "text.txt", "--seq-len", "16"};
  expect_refused(joined(train, {"--model", "tiny.toml"}), dense);
  expect_refused(train, mixture);
  expect_known({"bench", "train"}, plan_idle(), joined(plan_alone, {"--steps"}));
  const std::vector<Line> without{{{"--tokenizer", "bytes"}, "without --data"},
                                  {{"--data-cache", "c"}, "without --data"},
                                  {{"--raw-tokens", "uint16"}, "without --data"}};
  expect_refused({"verify", "--model", "tiny.toml", "--seq-len", "8"}, without);
  std::vector<Line> verifying = plan_idle();
  verifying.insert(verifying.end(), without.begin(), without.end());
  expect_known({"verify"}, verifying,
               joined(plan_alone, {"--comm", "--record", "--lr", "--min-lr", "--warmup", "--weight-decay",
                                   "--clip", "--data", "--steps", "--seed", "--trace", "--timeline",
                                  "--colour"}));
}

TEST_F(IdleFlags, OfTrain) {
  const std::vector<Line> own{
      {{"--from", "ck", "--resume", "--checkpoint", "ck"}, "with --resume"},
      {{"--save-every", "2"}, "without --checkpoint"},
      {{"--keep", "1"}, "without --checkpoint"},
      {{"--async-save", "off"}, "without --checkpoint"},
      {{"--async-save", "off", "--checkpoint", "ck", "--staleness", "1"}, "with --staleness"},
      {{"--eval-every", "2", "--eval-samples", "0"}, "with --eval-samples 0"},
      {{"--eval-every", "2", "--val-fraction", "0"}, "with --val-fraction 0"},
      {{"--eval-samples", "2", "--val-fraction", "0"}, "with --val-fraction 0"},
      {{"--val-fraction", "0.001"}, "with 8291 tokens of data"},
      {{"--raw-tokens", "uint16"}, "without .bin files"},
      {{"--servers", "1"}, "without --staleness"},
      {{"--straggler-every", "1", "--staleness", "1"}, "with --staleness"},
      {{"--fingerprint", "1", "--staleness", "1"}, "with --staleness"},
      {{"--check-replicas", "1", "--staleness", "1"}, "with --staleness"},
      {{"--rerun", "1"}, "without --check-replicas"},
      {{"--bucket", "1MiB", "--dp", "2", "--staleness", "1"}, "with --staleness"}};
  expect_refused(training({}), own);
  std::vector<Line> all = plan_idle();
  all.insert(all.end(), own.begin(), own.end());
  expect_known(
      {"train"}, all,
      joined(plan_alone, {"--comm",         "--record",     "--lr",           "--min-lr",    "--warmup",
                          "--weight-decay", "--clip",       "--data",         "--tokenizer", "--data-cache",
                          "--raw-tokens",   "--from",       "--steps",        "--seed",      "--val-fraction",
                          "--checkpoint",   "--on-nan",     "--resume",       "--staleness", "--memory-limit",
                          "--machine",      "--straggle",   "--plant-expert", "--trace",     "--timeline",
                          "--report",       "--log",        "--sample",       "--dry-run",   "--flip",
                          "--colour",       "--cuda-graphs"}));
}

TEST_F(IdleFlags, OfADryRun) {
  for (const Words& words : std::vector<Words>{{"--resume"},
                                               {"--checkpoint", "ck"},
                                               {"--comm", "mpi"},
                                               {"--data", "text.txt"},
                                               {"--steps", "3"},
                                               {"--threads", "2"},
                                               {"--lr", "1"},
                                               {"--colour", "never"},
                                               {"--die", "0:1:forward"}})
    refused(joined({"train", "--dry-run", "--model", "llama-tiny"}, words),
            {words.front(), "has no effect with --dry-run"});
}

// Without its colours a text is the one that a file gets.
TEST_F(CommandLine, ColoursRepeatWhatTheWordsSay) {  // long
  const auto without_colours = [](std::string text) {
    for (std::size_t at; (at = text.find("\x1b[")) != std::string::npos;)
      text.erase(at, text.find('m', at) + 1 - at);
    return text;
  };
  const auto without_numbers = [](std::string text) {
    std::erase_if(text, [](char c) { return c == ' ' || c == '.' || (c >= '0' && c <= '9'); });
    return text;
  };
  const Words verify{"verify", "--model", "tiny.toml", "--dp", "2", "--steps", "1", "--threads", "1", "--seq-len", "8"};
  const Words plan{"plan", "--model", "llama-3-8b", "--gpus", "8", "--global-batch", "16", "--explain"};
  const Words sweep{"plan", "--model", "llama-3-8b", "--global-batch", "16", "--sweep", "gpus=1,8"};
  const Words train = training({"--steps", "1", "--warmup", "0", "--sample", "0"});
  for (const auto& [words, coloured] : std::vector<std::pair<Words, std::string>>{
           {verify, "\x1b[1;32mPASS\x1b[0m"}, {plan, "\x1b[1mmemory of each pipeline rank, of "},
           {sweep, "\x1b[2m"}, {train, "\x1b[1m"}}) {
    const Result plain = run(words), shown = run(joined(words, {"--color", "always"}));
    EXPECT_EQ(shown.status, 0) << shown.err;
    EXPECT_EQ(plain.out.find('\x1b'), std::string::npos) << plain.out;
    EXPECT_NE(shown.out.find(coloured), std::string::npos) << shown.out;
    if (words == train) continue;  // which says what it measured
    EXPECT_EQ(without_numbers(without_colours(shown.out)), without_numbers(plain.out));
  }
  // On a terminal there are some, unless they are turned off.
  std::string line = ECHELON_BINARY;
  for (const std::string& word : verify) line += " " + word;
  for (const auto& [set, more, has_colours] : std::vector<std::tuple<const char*, const char*, bool>>{
           {"TERM=xterm", "", true},
           {"TERM=xterm NO_COLOR=", "", true},
           {"TERM=xterm NO_COLOR=1", "", false},
           {"TERM=dumb", "", false},
           {"TERM=xterm", " --colour never", false},
           {"TERM=xterm NO_COLOR=1", " --colour always", true}}) {
    const CommandResult r = output_of("cd '" + directory_.string() + "' && unset NO_COLOR && env " + set +
                                      " script -qec '" + line + more + "' /dev/null </dev/null");
    EXPECT_EQ(r.output.find("\x1b[1;32mPASS") != std::string::npos, has_colours) << set << more << r.output;
    EXPECT_NE(r.output.find("PASS"), std::string::npos) << r.output;
  }
  // Lines fit it, and say the same.
  const CommandResult narrow = output_of("COLUMNS=60 TERM=dumb script -qec '" + std::string(ECHELON_BINARY) +
                                         " plan --model llama-3-8b --gpus 8 --global-batch 16 --explain' /dev/null </dev/null");
  std::string words_of_lines;
  std::istringstream lines(narrow.output);
  for (std::string text; std::getline(lines, text);) {
    if (text.ends_with('\r')) text.pop_back();
    EXPECT_LE(text.size(), 60u) << text;
    words_of_lines += text;
  }
  std::string unbroken = run(plan).out;
  std::erase(unbroken, '\n');
  EXPECT_EQ(without_numbers(words_of_lines), without_numbers(unbroken));
  // So do those that are wider elsewhere.
  for (const auto& [command, status] :
       {std::pair{"simulate --compare 1f1b,zb-v,naive --pp 4 --microbatches 8", 0},
        {"train --dry-run --model llama-tiny --dp 2 --tp 2", 0},
        {"devices", 0},
        {"simulate --moe --ep 4 --steps 4 --format text --out /dev/null", 0},
        {"plan --model lama-3-8b", 2}}) {
    const CommandResult r = output_of("COLUMNS=70 TERM=dumb script -qec '" + std::string(ECHELON_BINARY) +
                                      " " + command + "' /dev/null </dev/null");
    EXPECT_EQ(r.status, status) << r.output;
    std::istringstream shown(r.output);
    for (std::string text; std::getline(shown, text);) EXPECT_LE(text.size(), 71u) << text;  // with a \r
  }
  // On a phone's width what a flag does is below its name.
  const CommandResult help = output_of("COLUMNS=40 TERM=dumb script -qec '" + std::string(ECHELON_BINARY) +
                                       " simulate --help' /dev/null </dev/null");
  EXPECT_NE(help.output.find("  --microbatches N\r\n        "), std::string::npos) << help.output;
  for (const Words& words : {verify, plan, train})
    refused(joined(words, {"--colour", "red"}), {"--colour red", "legal: auto, always, never"});
}

TEST_F(CommandLine, DryRunsNeedNoDataAndAnyNumberOfRanks) {
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

TEST_F(IdleFlags, OfTheOtherVerbs) {
  const std::vector<Line> generating{{{"--top-k", "3", "--temperature", "0"}, "with --temperature 0"},
                                     {{"--top-p", "0.9", "--temperature", "0"}, "with --temperature 0"},
                                     {{"--top-p", "0.9", "--top-k", "1"}, "with --top-k 1"},
                                     {{"--seed", "3", "--temperature", "0"}, "with --temperature 0"},
                                     {{"--seed", "3", "--top-k", "1"}, "with --top-k 1"},
                                     {{"--prompt", "a", "--chat"}, "with --chat"},
                                     {{"--prompts", "a", "--chat"}, "with --chat"},
                                     {{"--prompt-tokens", "1", "--chat"}, "with --chat"},
                                     {{"--chat-format", "chatml"}, "without --chat"},
                                     {{"--system", "a"}, "without --chat"}};
  expect_refused({"generate", "--checkpoint", "ck"}, generating);
  expect_known({"generate"}, generating,
               {"--threads", "--device", "--checkpoint", "--max-tokens", "--temperature", "--stop", "--chat",
                "--dp", "--tp", "--pp"});
  const std::vector<Line> launching{
      {{"--agent", "ssh", "--", "train"}, "without --hosts"},
      {{"--elastic", "--max-restarts", "0", "--", "train"}, "with --max-restarts 0"}};
  expect_refused({"launch"}, launching);
  expect_known({"launch"}, launching, {"--ranks", "--hosts", "--max-restarts", "--grace"});
  const std::vector<Line> calibrating{{{"--threads", "1", "--from", "a.csv"}, "with --from"},
                                      {{"--device", "auto", "--from", "a.csv"}, "with --from"},
                                      {{"--machine", "h100"}, "without --from"},
                                      {{"--software", "current"}, "without --from"},
                                      {{"--model", "llama-3-8b"}, "without --from"},
                                      {{"--software-out", "a.toml"}, "without --from"},
                                      {{"--choose", "3"}, "without --from"}};
  expect_refused({"calibrate"}, calibrating);
  expect_known({"calibrate"}, calibrating, {"--out", "--from"});
  expect_known({"bench", "comm"}, {}, {"--ranks", "--size", "--repeats"});
  expect_known({"bench", "context"}, {},
               {"--ranks", "--seq-len", "--heads", "--kv-heads", "--head-dim", "--repeats"});
  const std::vector<Line> exporting{{{"--shard-bytes", "9", "--adapters"}, "with --adapters"}};
  expect_refused({"checkpoint", "export", "ck", "--out", "hf"}, exporting);
  expect_known({"checkpoint", "export"}, exporting, {"--out", "--adapters", "--dtype"});
  expect_known({"checkpoint", "import"}, {}, {"--out", "--dtype", "--seed"});
  expect_known({"data", "tokenize"}, {}, {"--tokenizer", "--out", "--threads"});
  const std::vector<Line> viewing{{{"--port", "8080", "--out", "a.html"}, "with --out"}};
  expect_refused({"view", "run.jsonl"}, viewing);
  expect_known({"view"}, viewing, {"--out"});
}

TEST_F(IdleFlags, OfThePlannersVerbs) {  // long
  const std::vector<Line> planning{
      {{"--schedule", "zb-v", "--pp", "1"}, "with --pp 1"},
      {{"--layers-per-stage", "auto", "--pp", "1"}, "with --pp 1"},
      {{"--chunks", "2", "--pp", "1"}, "with --pp 1"},
      {{"--vocabulary-parallel", "on", "--pp", "1", "--software", "echelon"}, "with --pp 1"},
      {{"--sp", "on", "--tp", "1"}, "with --tp 1"},
      {{"--cp-kind", "ring", "--cp", "1"}, "with --cp 1"},
      {{"--cp-balance", "zigzag", "--cp", "1"}, "with --cp 1"},
      {{"--cp-balance", "zigzag", "--cp-kind", "ulysses"}, "with --cp-kind ulysses"},
      {{"--zero", "1", "--dp", "1", "--cp", "1"}, "with --dp 1 and --cp 1"},
      {{"--target-time", "3"}, "with --objective time"},
      {{"--launch-for", "torchtitan"}, "without --launch-out"},
      {{"--launch-for", "torchtitan", "--launch-out", "a", "--sweep", "gpus=1,2"}, "with --sweep"},
      {{"--launch-out", "a"}, "without --launch-for"},
      {{"--objective", "gpus", "--target-time", "3", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--top", "3", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--out", "x", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--html", "x", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--against", "tp=1", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--explain", "--sweep", "gpus=1"}, "with --sweep"},
      {{"--sweep-out", "x.csv"}, "without --sweep"},
      {{"--gpus", "8", "--sweep", "gpus=1"}, "with --sweep gpus=1"},
      {{"--seq-len", "64", "--sweep", "seq-len=64"}, "with --sweep seq-len=64"},
      {{"--global-batch", "8", "--sweep", "global-batch=8"}, "with --sweep global-batch=8"},
      {{"--price", "2"}, "without --tokens"},
      {{"--mtbf-hours", "1000"}, "without --tokens"},
      {{"--restart-time", "60", "--tokens", "1e9"}, "without --mtbf-hours"},
      {{"--save-time", "1", "--tokens", "1e9"}, "without --mtbf-hours"},
      {{"--write-time", "1", "--tokens", "1e9"}, "without --mtbf-hours"},
      {{"--spares", "1", "--tokens", "1e9"}, "without --mtbf-hours"},
      {{"--repair-hours", "1", "--tokens", "1e9", "--mtbf-hours", "1000"}, "without --spares"},
      {{"--expert-imbalance", "2", "--expert-load", "x", "--model", "mixtral-8x7b"}, "with --expert-load"},
      {{"--expert-load", "x", "--model", "llama-3-8b"}, "with llama-3-8b, which has no experts"},
      {{"--expert-placement", "load", "--model", "mixtral-8x7b"}, "without --expert-load"},
      {{"--expert-replicas", "1", "--model", "mixtral-8x7b"}, "without --expert-load"},
      {{"--dynamic-cp"}, "without --document-lengths"}};
  expect_refused({"plan"}, planning);
  expect_known({"plan"}, planning, {"--plan",      "--model",
                                    "--machine",   "--software",
                                    "--nodes-of",  "--dp",
                                    "--tp",        "--pp",
                                    "--cp",        "--ep",
                                    "--etp",       "--hsdp",
                                    "--offload",   "--recompute",
                                    "--compress",  "--micro-batch",
                                    "--precision", "--memory-margin",
                                    "--sweep",     "--tokens",
                                    "--colour",    "--document-lengths"});
  const std::vector<Line> simulating{
      {{"--chunks", "2"}, "with --schedule 1f1b"},
      {{"--group-size", "2"}, "with --schedule 1f1b"},
      {{"--steps", "2", "--compare", "1f1b,zb-v"}, "with --compare 1f1b,zb-v"},
      {{"--times", "1,1,1", "--stage-times", "1,1,1;1,1,1;1,1,1;1,1,1"}, "with --stage-times"},
      {{"--stage-memory", "1,0,-1"}, "with --schedule 1f1b"},
      {{"--activation-limit", "3"}, "with --schedule 1f1b"},
      {{"--comm-time", "1", "--pp", "1"}, "without messages"},
      {{"--overlap-factor", "0.5"}, "without passes that run as a pair"},
      {{"--vocabulary-parallel"}, "without --output-layer"},
      {{"--format", "svg", "--json"}, "with --json and without --out"},
      {{"--width", "80", "--compare", "1f1b,zb-v"}, "with --compare and without"},
      {{"--width", "80", "--format", "svg"}, "with --format svg"},
      {{"--colour", "never", "--format", "csv"}, "with --format csv"}};
  expect_refused({"simulate"}, simulating);
  const std::vector<Line> routing{
      {{"--aux-loss", "0.1", "--compare", "none"}, "with --compare none"},
      {{"--device-loss", "0.1"}, "with --compare none,aux-loss,bias,capacity"},
      {{"--communication-loss", "0.1"}, "with --compare none,aux-loss,bias,capacity"},
      {{"--bias-rate", "0.1", "--compare", "capacity"}, "with --compare capacity"},
      {{"--capacity", "2", "--compare", "bias"}, "with --compare bias"},
      {{"--drop", "position", "--compare", "bias"}, "with --compare bias"},
      {{"--router-lr", "2", "--compare", "bias"}, "with --compare bias"},
      {{"--most-groups", "1", "--compare", "bias", "--top-k", "1"}, "with --compare bias"},
      {{"--hidden", "64"}, "with --ep 1"},
      {{"--dtype", "f32"}, "with --ep 1"},
      {{"--heat", "experts", "--format", "csv"}, "with --format csv"}};
  expect_refused({"simulate", "--moe"}, routing);
  std::vector<Line> both = simulating;
  both.insert(both.end(), routing.begin(), routing.end());
  // What a drawing of blocks depends on names it.
  for (const Words& words : {Words{"--tp", "2"}, {"--sp", "on"}, {"--recompute", "full"}}) {
    refused(joined({"simulate", "--schedule", "gpipe", "--pp", "2", "--microbatches", "4"}, words),
            {words.front(), "--block"});
    both.push_back({{words.front()}, "without --block"});
  }
  for (const Words& words : {Words{"--cp", "2"}, {"--seq-len", "64"}, {"--sequences", "4"}}) {
    refused(joined({"simulate", "--schedule", "gpipe", "--pp", "2", "--microbatches", "4"}, words),
            {words.front(), "--document-lengths"});
    both.push_back({{words.front()}, "without --document-lengths"});
  }
  expect_known(
      {"simulate"}, both,
      {"--moe",    "--output-layer", "--schedule", "--compare",         "--pp",         "--microbatches",
       "--out",    "--model",        "--experts",  "--top-k",           "--scores",     "--ep",
       "--groups", "--tokens",       "--zipf",     "--popular-expert",  "--popularity", "--capacities",
       "--seed",   "--stage-times",  "--block",    "--document-lengths"});
}

// An empty prompt is a prompt; any other empty value is none.
TEST_F(CommandLine, EmptyValuesAreRefused) {  // long
  for (const char* flag : {"--trace", "--timeline", "--report", "--machine", "--schedule", "--log", "--checkpoint",
                           "--mask", "--model", "--plan", "--staleness", "--straggle", "--memory-limit"})
    refused(std::string(flag) == "--model" ? Words{"train", "--data", "text.txt", flag, ""}
                                           : training({flag, ""}),
            {flag, "empty"});
  refused({"simulate", "--stage-times", ""}, {"--stage-times", "empty"});
  refused({"simulate", "--out", ""}, {"--out", "empty"});
  for (const char* flag : {"--html", "--sweep", "--out", "--against"})
    refused({"plan", flag, ""}, {flag, "empty"});
  refused({"calibrate", "--out", ""}, {"--out", "empty"});
  refused({"launch", "--hosts", "", "--", "train"}, {"--hosts", "empty"});
  refused({"bench", "train", "--schedule", ""}, {"--schedule", "empty"});
  refused({"checkpoint", "export", "ck", "--out", ""}, {"--out", "empty"});
}

// What a model reads is said where it is not what one would expect.
TEST_F(CommandLine, BytesAreNotFedToATokenizersIds) {  // long
  const auto config = [](int vocab) {
    return R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": )" +
           std::to_string(vocab) + "}";
  };
  fs::create_directory(at("big"));
  write("big/config.json", config(300));
  const Words train{"train",   "--data", "text.txt", "--seq-len", "8",           "--threads",       "1",
                    "--steps", "1",      "--sample", "2",         "--precision", ECHELON_TEST_DTYPE};
  // Random weights learn bytes in any vocabulary that has them, and say so.
  const Result fresh = run(joined(train, {"--model", "big", "--checkpoint", "ck"}));
  EXPECT_EQ(fresh.status, 0) << fresh.err;
  EXPECT_NE(fresh.out.find("read as bytes, ids 0 to 256: the other 43 of the vocabulary are never seen"),
            std::string::npos)
      << fresh.out;
  EXPECT_EQ(fresh.out.find("weights"), std::string::npos) << fresh.out;  // the directory has none
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--prompt", "To", "--max-tokens", "2"}).status, 0);
  const Result bytes = run(training({"--steps", "1", "--sample", "0"}));
  EXPECT_EQ(bytes.out.find("read as bytes"), std::string::npos) << bytes.out;
  // What comes from elsewhere has ids of its own.
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "hf"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "import", "hf", "--out", "in", "--dtype", ECHELON_TEST_DTYPE}).status, 0);
  for (const Words& prompt : {Words{}, Words{"--prompt", "To"}})
    refused(joined({"generate", "--checkpoint", "in"}, prompt),
            {"--prompt", "another tokenizer", "--prompt-tokens ID", "0 to 299"});
  const json out = one_object(
      run({"generate", "--checkpoint", "in", "--prompt-tokens", "299,3", "--max-tokens", "2", "--json"}));
  EXPECT_FALSE(out.contains("text"));
  refused(joined(train, {"--model", "hf", "--checkpoint", "in", "--resume"}),
          {"--data", "another tokenizer"});
  const Result unused = run(joined(train, {"--model", "hf"}));
  EXPECT_EQ(unused.status, 0) << unused.err;
  EXPECT_NE(unused.out.find("those in hf are not used: --from hf starts from them"), std::string::npos)
      << unused.out;
  // A vocabulary of bytes stays one on the way out and back.
  ASSERT_EQ(run(training({"--steps", "1", "--sample", "0", "--checkpoint", "small"})).status, 0);
  ASSERT_EQ(run({"checkpoint", "export", "small", "--out", "hf257"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "import", "hf257", "--out", "in257", "--dtype", ECHELON_TEST_DTYPE}).status,
            0);
  EXPECT_EQ(run({"generate", "--checkpoint", "in257", "--prompt", "To", "--max-tokens", "2"}).status, 0);
}

TEST_F(CommandLine, TextBecomesTokensOnceAndWeightsAreStartedFrom) {  // long
  fs::create_directory(at("in"));
  std::string records;
  for (int i = 0; i < 20; ++i)
    records += "{\"prompt\": \"How many? \", \"completion\": \"As many as you like.\"}\n";
  write("in/a.jsonl", records);
  write("in/b.jsonl", "{\"text\": \"half\"}\n{\"text\":\n");
  const Words tokenize{"data", "tokenize", "in", "--tokenizer", "bytes", "--out", "made"};
  // What has been tokenised by then stays for the next time.
  const auto refused_late = [&](const Words& arguments, const Words& words) {
    const Result r = run(arguments);
    EXPECT_EQ(r.status, 2) << r.err;
    for (const std::string& word : words)
      EXPECT_NE(r.err.find(word), std::string::npos) << word << " in: " << r.err;
  };
  refused_late(tokenize, {"b.jsonl: line 2"});
  ASSERT_TRUE(fs::exists(at("made.parts")));  // a.jsonl is done
  std::vector<std::pair<fs::path, fs::file_time_type>> done;
  for (const auto& entry : fs::directory_iterator(at("made.parts")))
    if (entry.path().extension() == ".tokens") done.emplace_back(entry.path(), entry.last_write_time());
  ASSERT_EQ(done.size(), 1u);
  write("in/b.jsonl", "{\"text\": \"whole\"}\n");
  const Words keep{"data", "info", "in", "--data-cache", "made.parts", "--json"};
  const json before = one_object(run(keep));
  EXPECT_EQ(fs::last_write_time(done[0].first), done[0].second);  // it was not made again
  const Result made = run(tokenize);
  EXPECT_EQ(made.status, 0) << made.err;
  EXPECT_NE(made.out.find("of 21 documents in 2 files"), std::string::npos) << made.out;
  EXPECT_FALSE(fs::exists(at("made.parts")));
  refused(tokenize, {"--out made", "made.tokens is there already"});
  const json info = one_object(run({"data", "info", "made.tokens", "--tokenizer", "bytes", "--json"}));
  EXPECT_EQ(info["tokens"], before["tokens"]);
  EXPECT_EQ(info["documents"], 21);
  EXPECT_EQ(info["files"][0]["counted"], 20 * 21 + 6);
  EXPECT_EQ(info["samples"][0]["text"], "How many? As many as you like.");
  EXPECT_EQ(info["samples"][0]["counted"], "As many as you like.");
  EXPECT_EQ(info["samples"].size(), 3u);
  refused({"data"}, {"tokenize, info"});
  refused({"data", "info", "made.tokens", "--raw-tokens", "uint16"}, {"--raw-tokens", "without .bin files"});
  refused({"data", "tokenize", "made.tokens", "--tokenizer", "bytes", "--out", "again"},
          {"has tokens already"});
  refused({"data", "tokenize", "in", "--tokenizer", "bytes", "--out", "x", "--threads", "0"},
          {"--threads 0"});

  ASSERT_EQ(run(training({"--steps", "1", "--sample", "0", "--checkpoint", "base"})).status, 0);
  const Words tune{"train", "--data",    "in/a.jsonl", "--data-cache", "cache", "--from",
                   "base",  "--seq-len", "16",         "--threads",    "1"};
  const Result tuned = run(joined(tune, {"--steps", "2", "--sample", "4", "--tp", "3"}));
  EXPECT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_NE(tuned.out.find("weights from base/step-00000001, trained for 1 step"), std::string::npos)
      << tuned.out;
  refused(joined(tune, {"--model", "gpt2-124m"}), {"--model gpt2-124m", "family = ", "leave out --model"});
  refused(joined(tune, {"--resume", "--checkpoint", "base"}), {"--from", "with --resume"});
  refused(joined(tune, {"--tokenizer", "absent.json"}), {"absent.json"});
  EXPECT_EQ(run({"verify", "--model", "tiny.toml", "--data", "in/a.jsonl", "--data-cache", "cache",
                 "--seq-len", "16", "--steps", "1", "--precision", ECHELON_TEST_DTYPE})
                .status,
            0);
  // Records without an answer: nothing to learn.
  std::string questions;
  for (int i = 0; i < 20; ++i) questions += "{\"messages\": [{\"role\": \"user\", \"content\": \"why?\"}]}\n";
  write("q.jsonl", questions);
  refused_late({"train", "--data", "q.jsonl", "--data-cache", "cache", "--seq-len", "16", "--steps", "1"},
               {"--data", "counts none"});
}

// Names that are not UTF-8, and prose of several lines, have no place in JSON.
TEST_F(CommandLine, JsonIsOneLineOfUtf8) {
  fs::create_directory(at("b\xff"));
  write(
      "b\xff/config.json",
      R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": 257})");
  const json summary = one_object(
      run({"train", "--data", "text.txt", "--model", "b\xff", "--seq-len", "8", "--threads", "1", "--steps",
           "1", "--sample", "0", "--checkpoint", "c\xff", "--precision", ECHELON_TEST_DTYPE, "--json"}));
  EXPECT_EQ(summary["checkpoint"], "c\xef\xbf\xbd/step-00000001");
  const std::function<void(const json&)> one_line = [&](const json& value) {
    if (value.is_string()) {
      EXPECT_EQ(value.get<std::string>().find('\n'), std::string::npos) << value;
    }
    if (value.is_structured())
      for (const json& part : value) one_line(part);
  };
  one_line(summary);
  const Result none = run({"plan", "--model", "llama-2-70b", "--sweep", "gpus=1,2", "--json"});
  EXPECT_EQ(none.status, 1);
  one_line(json::parse(none.out));
}

TEST_F(CommandLine, AsynchronousTraining) {  // long
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
  // The start, three steps, the validation and the summary.
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 6);

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
}  // namespace echelon::command_line_test
