// Every flag of every verb either acts by itself, or one that cannot act says beside what it does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "case_choice.h"
#include "command_line.h"

namespace echelon::idle_flags_test {
namespace {

using namespace echelon::checks;
using nlohmann::json;

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
        refused(joined(verb, line.words),
                {line.words.front(), "has no effect " + line.where, "leave it out"});
  }
  void expect_known(const Words& verb, const std::vector<Line>& idle, const Words& alone) const {
    std::set<std::string> known(alone.begin(), alone.end());
    for (const Line& line : idle) known.insert(line.words.front());
    known.insert({"--help", "--json"});
    for (const std::string& flag : flags_of(verb))
      EXPECT_TRUE(known.contains(flag))
          << testing::PrintToString(verb) << " " << flag << " neither acts by itself nor says what it needs";
  }

  static inline const Words plan_alone{
      "--plan",      "--model",     "--dp",       "--tp",           "--optimizer",   "--pp",
      "--cp",        "--ep",        "--mask",     "--aux-loss",     "--device-loss", "--communication-loss",
      "--z-loss",    "--bias-rate", "--capacity", "--recompute",    "--numerics",    "--hsdp",
      "--offload",   "--freeze",    "--lora",     "--global-batch", "--micro-batch", "--seq-len",
      "--precision", "--threads",   "--device",   "--timeout"};
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
  expect_known(
      {"verify"}, verifying,
      joined(plan_alone, {"--comm", "--record", "--lr", "--min-lr", "--warmup", "--weight-decay", "--clip",
                          "--data", "--steps", "--seed", "--trace", "--timeline", "--colour"}));
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

// What training refuses of every device of a kind.
TEST_F(IdleFlags, ADryRunIsOfItsDevice) {
  const auto dry = [](const Words& words) {
    return joined({"train", "--dry-run", "--model", "llama-tiny"}, words);
  };
  refused(dry({"--precision", "tf32"}), {"--precision tf32", "legal with --device cpu: f32"});
  refused(
      dry({"--dp", "2", "--zero", "1", "--offload", "optimizer", "--offload-dir", ".", "--device", "cuda"}),
      {"--offload-dir .", "host's memory"});
  EXPECT_EQ(run(dry({"--precision", "tf32", "--device", "cuda"})).status, 0);
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
               {"--threads", "--device", "--dtype", "--checkpoint", "--max-tokens", "--temperature", "--stop",
                "--chat", "--dp", "--tp", "--pp"});
  const std::vector<Line> launching{
      {{"--agent", "ssh", "--", "train"}, "without --hosts"},
      {{"--elastic", "--max-restarts", "0", "--", "train"}, "with --max-restarts 0"},
      {{"--pause", "1", "--max-restarts", "0", "--", "train"}, "with --max-restarts 0"}};
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
  expect_known({"bench", "kernels"}, {},
               {"--model", "--precision", "--seq-len", "--micro-batch", "--threads", "--repeats"});
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
  expect_known({"plan"}, planning,
               {"--plan",
                "--model",
                "--machine",
                "--software",
                "--nodes-of",
                "--dp",
                "--tp",
                "--pp",
                "--cp",
                "--ep",
                "--etp",
                "--hsdp",
                "--offload",
                "--recompute",
                "--optimizer",
                "--compress",
                "--micro-batch",
                "--precision",
                "--memory-margin",
                "--sweep",
                "--tokens",
                "--colour",
                "--document-lengths"});
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

}  // namespace
}  // namespace echelon::idle_flags_test
