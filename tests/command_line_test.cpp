// The program as its users meet it: exit status, one sentence, nothing lost; and as programs do: one JSON
// object.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "case_choice.h"
#include "command_line.h"
#include "tensor/kernels.h"

namespace echelon::command_line_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

TEST_F(CommandLine, WrongWordsAreRefusedByName) {
  refused(
      {},
      {"verb",
       "train, verify, plan, calibrate, devices, simulate, checkpoint, data, launch, generate, bench, view"});
  refused(
      {"frob"},
      {"frob",
       "train, verify, plan, calibrate, devices, simulate, checkpoint, data, launch, generate, bench, view"});
  refused({"bench"}, {"bench", "train, kernels, comm"});
  refused({"bench", "x"}, {"x", "train, kernels, comm"});
  refused({"train"}, {"--data"});
  refused({"train", "--nope"}, {"--nope", "no such flag"});
  refused({"verify", "stray"}, {"stray"});
  refused({"generate"}, {"--checkpoint"});
  refused(training({"--dp"}), {"--dp", "missing"});
  // The value of a variable that is not set, not the word behind it.
  refused({"train", "--data=", "--steps", "1"}, {"--data: its value is empty"});
  refused(training({"--checkpoint=", "--json"}), {"--checkpoint: its value is empty"});
  refused({"train", ""}, {"\"\": echelon train has no such argument"});
  refused(training({"--dp", "1", "--dp", "2"}), {"--dp", "more than once"});
  refused(training({"--dp", "x"}), {"--dp x", "whole number"});
  refused(training({"--timeline", "step.json"}), {"--timeline step.json", "--trace step.json"});
  refused(training({"--trace", "step.html"}), {"--trace step.html", "--timeline step.html"});
  refused(training({"--timeline", "step.svg"}), {"--timeline step.svg", "legal: step.html"});
  refused(training({"--report", "run.json"}), {"--report run.json", "legal: run.html"});
  refused(training({"--steps", "2.5"}), {"--steps 2.5", "whole number", "1e9"});
  refused(training({"--steps", "8k"}), {"--steps 8k", "legal: 8000, 8192"});
  refused(training({"--steps", "99999999999999999999"}), {"--steps 99999999999999999999"});
  refused(training({"--seed", "-1"}), {"--seed -1", "at least 0"});
  refused(training({"--lr", "fast"}), {"--lr fast", "number"});
}

// A name with a space is one word of what is shown to be typed.
// Each of them would do all of it, and write the same files.
TEST_F(CommandLine, WhatOneProcessDoesIsRefusedToSeveral) {
  for (const char* launcher : {"OMPI_COMM_WORLD_SIZE=3", "PMI_SIZE=3", "SLURM_STEP_NUM_TASKS=3"})
    for (const Words& words : std::vector<Words>{{"data", "info", "text.txt"},
                                                 {"generate", "--checkpoint", "absent"},
                                                 {"checkpoint", "info", "absent"},
                                                 {"bench", "comm"}}) {
      const Result r = run(words, fmt::format("export {}", launcher));
      EXPECT_EQ(r.status, 2);
      EXPECT_EQ(r.err,
                fmt::format("echelon: {}: is the work of one process, and 3 were started; legal: one\n",
                            words.front()));
    }
  // As by srun without --mpi, where Slurm has no default.
  for (const Words& words : {training({}), Words{"verify", "--model", "gpt2-tiny"}}) {
    const Result r = run(words, "export SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=1");
    EXPECT_EQ(r.status, 2);
    EXPECT_NE(r.err.find("3 processes were started, and none was told its rank"), std::string::npos) << r.err;
    EXPECT_NE(r.err.find("srun --mpi=pmix"), std::string::npos) << r.err;
  }
  EXPECT_EQ(run({"devices"}, "export PMI_SIZE=3").status, 0);
  EXPECT_EQ(run({"data", "info", "text.txt"}, "export PMI_SIZE=1").status, 0);
}

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
  refused({"data", "tokenize", "text.txt", "--tokenizer", "bytes", "--out", "nowhere/x"},
          {"--out nowhere/x", "cannot be written"});
  refused({"checkpoint", "--json", "info", "ck"},
          {"--json: stands before", "behind echelon checkpoint info"});
  refused({"bench", "comm", "--rank", "2"}, {"--rank", "did you mean --ranks?"});
  refused(training({"--dpp", "2"}),
          {"--dpp: echelon train has no such flag (did you mean --dp?); echelon train --help lists"});
  refused(training({"--microbatch=2"}), {"did you mean --micro-batch?"});
  refused({"launch", "--ranks", "4", "--max-restart", "2", "--", "train", "--data", "text.txt"},
          {"--max-restart: echelon launch has no such flag (did you mean --max-restarts?)"});
  refused(training({"--prompt", "a"}), {"(generate has)"});
  refused(training({"--devise", "cpu"}), {"--devise", "--help lists"});
  refused({"checkpoint", "exprot", "ck"}, {"exprot", "did you mean export?"});
  refused({"train", "--data", "text.txt", "--model", "lama-tiny"},
          {"did you mean llama-tiny?", "help models"});
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
  refused(training({"--lr", "1e39"}), {"--lr 1e+39", "at most 3.4e+38"});
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
          {"--global-batch 2",
           "makes 1 microbatch: dualpipe needs at least 2P = 4; legal: 1f1b, or --global-batch 16"});
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
          {"--memory-limit 100.00 KiB", "rank 0 needs", "activations", "--cp"});
  refused(with({"--cp", "2", "--seq-len", "30"}), {"--seq-len 30", "--cp 2", "zigzag", "legal: 28, 32"});
  refused(with({"--cp", "2", "--cp-kind", "star"}), {"--cp-kind star", "ring, ulysses, allgather, hybrid"});
  refused(with({"--cp", "2", "--cp-balance", "fair"}), {"--cp-balance fair", "zigzag, stripe, none"});
  refused(with({"--mask", "full"}), {"--mask full", "causal, document"});
  refused(with({"--seq-len", "0"}), {"--seq-len 0"});
  refused(with({"--seq-len", "9999"}), {"--seq-len 9999", "4096"});
  refused(with({"--global-batch", "0"}), {"--global-batch 0"});
  refused(with({"--global-batch", "9223372036854775807"}), {"--global-batch", "1000000"});
  refused(with({"--precision", "bf8"}), {"--precision bf8", "f32"});
  refused(with({"--model", "gpt5"}), {"--model gpt5", "help models"});
  refused(with({"--model", "llama-3-405b"}), {"llama-3-405b", "TiB", "this machine"});
  refused(with({"--checkpoint", ""}), {"--checkpoint", "empty"});
  refused({"generate", "--checkpoint", "ck", "--prompt-tokens", "1,,2"}, {"--prompt-tokens"});
  refused({"verify", "--steps", "0"}, {"--steps 0"});
  refused({"bench", "context", "--ranks", "257"}, {"--ranks 257: must be from 1 to 256"});
  refused({"bench", "kernels", "--precision", "fp8"}, {"--precision fp8", "legal: f32, bf16"});
  refused({"bench", "kernels", "--seq-len", "0"}, {"--seq-len 0", "1 to"});
  refused({"bench", "comm", "--ranks", "0"}, {"--ranks 0", "256"});
  refused({"bench", "comm", "--ranks", "256", "--size", "16384"}, {"--size 16384", "this machine"});
  refused({"bench", "comm", "--size", "nan"}, {"--size nan"});
  refused({"bench", "comm", "--repeats", "0"}, {"--repeats 0", "1 to"});
  refused(training({"--cuda-graphs", "yes"}), {"--cuda-graphs yes", "on, off"});
  refused(training({"--cuda-graphs", "on"}), {"--cuda-graphs on", "--device cpu", "--device cuda"});
}

TEST_F(CommandLine, BadModelAndPlanFilesAreRefused) {
  const auto refused_file = [&](const char* flag, const std::string& text, const Words& words) {
    write("bad.toml", text);
    refused({"train", "--data", "text.txt", flag, "bad.toml"}, words);
  };
  refused_file("--model", "[", {"bad.toml", "TOML"});
  refused_file("--model", "", {"bad.toml", "family"});
  refused_file("--model", std::string(tiny_model) + "colour = 3\n",
               {"unknown key colour = 3; see docs/families.md"});
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
                                              {"bench", "kernels"},
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
  EXPECT_TRUE(object["devices"][0]["memory_bytes"].is_number_integer());
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
  const Result either = run({"verify", "--model", "tiny.toml", "--seq-len", "8", "--device", "auto"});
  EXPECT_EQ(either.status, 0);
  EXPECT_NE(either.err.find("echelon: --device auto takes the cpu: " + why + "\n"), std::string::npos)
      << either.err;
}

TEST_F(CommandLine, PathsThatCannotBeWrittenAreRefusedAndLeaveNothing) {
  write("kept.jsonl", "{\"step\": 1}\n");
  refused(training({"--checkpoint", "new", "--log", "absent/log"}), {"--log absent/log", "No such file"});
  refused(training({"--checkpoint", "text.txt", "--log", "new.jsonl"}), {"--checkpoint text.txt"});
  refused(training({"--checkpoint", "text.txt/x", "--log", "kept.jsonl"}), {"--checkpoint text.txt/x"});
  refused(training({"--checkpoint", "absent", "--resume"}), {"absent", "no such"});
  refused(training({"--resume"}), {"--resume", "--checkpoint"});
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
  if (takes_wide_cases()) {  // no file may grow: it was emptied first, and stayed empty
    EXPECT_EQ(run({"calibrate"}, "ulimit -f 0").status, 3);
    EXPECT_EQ(read_bytes(at("cpu.toml")), "kept = 1\n");
  }
  const Words plan{"plan", "--model", "gpt2-tiny", "--gpus", "1", "--machine", "a100-80"};
  refused(joined(plan, {"--out", "absent/plan.toml"}), {"--out absent/plan.toml"});
  const Result through = run(joined(plan, {"--out", "/dev/stdout"}));
  EXPECT_EQ(through.status, 0) << through.err;
  EXPECT_NE(through.out.find("[mesh]"), std::string::npos) << through.out;
}

// Every verb's, by every flag that names a file; the others' values may be files too.
TEST_F(CommandLine, AnOutputIsNoInput) {
  write("p.toml", "kept = 1\n");
  write("costs.csv", "kept\n");
  refused(training({"--log", "text.txt"}), {"--log text.txt: is the file that --data names"});
  refused(training({"--log", "new", "--log", "./new"}), {"--log ./new: is the file that --log names"});
  refused({"verify", "--plan", "p.toml", "--trace", "./p.toml"}, {"--trace ./p.toml", "--plan names"});
  refused({"plan", "--model", "p.toml", "--gpus", "1", "--out", "p.toml"}, {"--out p.toml", "--model names"});
  refused({"plan", "--model", "gpt2-tiny", "--gpus", "1", "--out", "new", "--html", "new"}, {"names"});
  refused({"simulate", "--schedule", "p.toml", "--out", "p.toml"}, {"--out p.toml", "--schedule names"});
  refused({"calibrate", "--from", "costs.csv", "--out", "costs.csv"}, {"--out costs.csv", "--from names"});
  refused({"view", "costs.csv", "--out", "costs.csv"}, {"--out costs.csv"});
  EXPECT_EQ(read_bytes(at("p.toml")), "kept = 1\n");
  EXPECT_EQ(read_bytes(at("costs.csv")), "kept\n");
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
  const Words verify{"verify", "--model",   "tiny.toml", "--dp",      "2", "--steps",
                     "1",      "--threads", "1",         "--seq-len", "8"};
  const Words plan{"plan", "--model", "llama-3-8b", "--gpus", "8", "--global-batch", "16", "--explain"};
  const Words sweep{"plan", "--model", "llama-3-8b", "--global-batch", "16", "--sweep", "gpus=1,8"};
  const Words train = training({"--steps", "1", "--warmup", "0", "--sample", "0"});
  for (const auto& [words, coloured] :
       std::vector<std::pair<Words, std::string>>{{verify, "\x1b[1;32mPASS\x1b[0m"},
                                                  {plan, "\x1b[1mmemory of each pipeline rank, of "},
                                                  {sweep, "\x1b[2m"},
                                                  {train, "\x1b[1m"}}) {
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
  const CommandResult narrow =
      output_of("COLUMNS=60 TERM=dumb script -qec '" + std::string(ECHELON_BINARY) +
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

// An empty prompt is a prompt; any other empty value is none.
TEST_F(CommandLine, EmptyValuesAreRefused) {  // long
  for (const char* flag :
       {"--trace", "--timeline", "--report", "--machine", "--schedule", "--log", "--checkpoint", "--mask",
        "--model", "--plan", "--staleness", "--straggle", "--memory-limit"})
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

TEST_F(CommandLine, WhatIsThereOnceIsSingular) {
  write("one.toml",
        "family = \"llama\"\nnum_layers = 1\nhidden = 8\nnum_heads = 1\nnum_kv_heads = 1\nmlp_hidden = 8\n"
        "vocab = 257\nmax_seq = 64\n");
  const Words dry{"train", "--dry-run", "--model", "one.toml", "--seq-len", "8"};
  const auto refuses = [&](const Words& more, const std::string& words) {
    refused(joined(dry, more), {words});
  };
  refuses({"--pp", "2"}, "has only 1 layer;");
  refuses({"--tp", "2"}, "must divide the 1 head of");
  refuses({"--pp", "2", "--layers-per-stage", "2,0"}, "a stage has 0 to 1 layer;");
  refuses({"--dp", "2", "--global-batch", "1"}, "has only 1 sequence,");
  refused({"simulate", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--stage-times", "1,1,1"},
          {"has 1 stage,"});
}

#if defined(__x86_64__)
TEST_F(CommandLine, ASwitchOfTheEnvironmentIsOnOrOff) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "without CPU kernels nothing reads it";
  const CommandResult r =
      run_command("ECHELON_AMX=never '" + std::string(ECHELON_BINARY) + "' bench kernels --model gpt2-tiny");
  EXPECT_EQ(r.status, 2);
  EXPECT_EQ(r.output, "echelon: ECHELON_AMX never: legal: on, off\n");
}
#endif

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

}  // namespace
}  // namespace echelon::command_line_test
