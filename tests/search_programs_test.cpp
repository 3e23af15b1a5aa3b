// What searches keep to of the program that is to train, what others gain, and the files that say both.
#include "plan/search.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

#include "plan/explain.h"
#include "plan/interval.h"
#include "refusals.h"
#include "search_requests.h"

namespace echelon::search_programs_test {
namespace {

using checks::expect_refusal;
using checks::request;

// What this trainer cuts into parts that differ by one, others do not run.
TEST(SearchForPrograms, OtherProgramsCutEqualParts) {
  SearchRequest odd = request("llama-3-8b", 64, 16);
  odd.work.plan.seq_len = 32766;
  odd.top = 50;
  for (const Estimate& e : search(odd).plans) {
    EXPECT_TRUE(not_run(odd.work, e.plan).empty()) << summary(e.plan);
    EXPECT_EQ(e.plan.seq_len % (e.plan.mesh.cp() * e.plan.mesh.tp()), 0) << summary(e.plan);
  }
  SearchRequest length = request("llama-3-8b", 8, 16), width = length;
  length.work.plan.seq_len = 4095;
  length.pin("tp", 2);
  expect_refusal([&] { search(length); }, {"--seq-len 4095", "equal parts", "--tp 2", "4096"});
  width.work.plan.model.mlp_hidden = 14337;
  width.pin("tp", 4);
  expect_refusal([&] { search(width); }, {"--tp 4", "an MLP of 14337", "equal parts", "legal: 1"});
  for (SearchRequest* r : {&length, &width}) {
    r->work.software = load_software("echelon");
    r->work.precision = Precision::f32;
    r->work.exact_memory = exact_memory();
    EXPECT_FALSE(search(*r).plans.empty());
  }
}

// A program of others is not given what it cannot make again.
TEST(SearchForPrograms, ProgramsKeepToTheirRecomputation) {
  SearchRequest r = request("llama-3-8b", 16, 32);
  r.work.machine.memory_bytes = 30e9;
  r.top = 1000;
  const std::set<std::string> kinds{"none", "full", "mlp_in"};
  r.work.software.recompute = {"none", "full", "mlp", "moe"};  // a dense model has no experts
  std::set<std::string> found;
  for (const Estimate& e : search(r).plans) {
    found.insert(recompute_name(e.plan.recompute));
    EXPECT_TRUE(not_run(r.work, e.plan).empty());
  }
  EXPECT_TRUE(std::includes(kinds.begin(), kinds.end(), found.begin(), found.end()));
  EXPECT_TRUE(found.contains("mlp_in"));
  Plan plan = r.work.plan;
  plan.recompute = Recompute::selective;
  EXPECT_EQ(not_run(r.work, plan).back(), "recompute selective");
}

// Every program but this one gives all data-parallel ranks equal microbatches; Megatron-Core interleaves
// whole groups of pp of them.
TEST(SearchForPrograms, OtherProgramsTrainEqualMicrobatches) {
  SearchRequest r = request("llama-3-8b", 24, 48);
  r.top = 300;
  SearchRequest over_three = r;
  over_three.pin("pp", 3);
  over_three.pin("cp", 1);
  const SearchResult found = search(over_three);
  ASSERT_FALSE(found.plans.empty());
  int interleaved = 0;
  for (const Estimate& e : found.plans) {
    EXPECT_EQ(48 % (e.plan.mesh.dp() * e.plan.micro_batch), 0) << summary(e.plan);
    if (e.plan.mesh.pp() == 1 || e.plan.schedule != "interleaved") continue;
    ++interleaved;
    EXPECT_EQ(e.microbatches % e.plan.mesh.pp(), 0) << summary(e.plan);
  }
  EXPECT_GT(interleaved, 0);

  r.work.plan.global_batch = 40;
  const auto pinned = [&](const Software& software, std::initializer_list<std::pair<const char*, int>> pins) {
    SearchRequest one = r;
    one.work.software = software;
    one.work.exact_memory = exact_memory();
    one.top = 1;
    for (const auto& [field, value] : pins) one.pin(field, value);
    return one;
  };
  const Software megatron = r.work.software;
  expect_refusal(
      [&] {
        search(pinned(megatron, {{"dp", 3}}));
      },
      {"--dp 3: the 40 sequences of the global batch do not divide over so many ranks",
       "legal: 1, 2, 4, 8, or --global-batch 39, 42"});
  expect_refusal(
      [&] {
        search(pinned(megatron, {{"dp", 4}, {"cp", 1}, {"micro-batch", 3}}));
      },
      {"--micro-batch 3: does not divide the 10 sequences of a data-parallel rank", "legal: 1, 2, 5, 10"});
  SearchRequest one_each = request("llama-3-8b", 8, 8);
  one_each.pin("dp", 8), one_each.pin("micro-batch", 2);
  expect_refusal([&] { search(one_each); },
                 {"--micro-batch 2: does not divide the 1 sequence of a data-parallel rank; legal: 1"});
  EXPECT_FALSE(search(pinned(load_software("echelon"), {{"dp", 3}, {"tp", 8}})).plans.empty());

  // What is asked for by name is priced, with a line that says so: 20 microbatches over pp 3.
  SearchRequest named = pinned(megatron, {{"dp", 2}, {"tp", 4}, {"pp", 3}, {"cp", 1}, {"micro-batch", 1}});
  for (const Estimate& e : search(named).plans) EXPECT_EQ(e.plan.schedule, "1f1b");
  named.pin("schedule", "interleaved");
  const SearchResult priced = search(named);
  ASSERT_FALSE(priced.plans.empty());
  EXPECT_EQ(not_run(named.work, priced.plans.front().plan),
            (std::vector<std::string>{"20 microbatches interleaved over pp 3"}));
}

// Where numbers come from is said of keys that the file has.
TEST(SearchForPrograms, NumbersHaveASource) {
  const std::string text = "high = 1.1\nlow = 0.9\nlogit_bytes = 4\nstep_seconds = 0.01\n";
  const Software s =
      software_from_toml(text + "fitted = ['step_seconds']\npublished = ['logit_bytes']\n", "mine.toml");
  EXPECT_STREQ(s.provenance.of("step_seconds"), "fitted");
  EXPECT_STREQ(s.provenance.of("logit_bytes"), "published");
  EXPECT_STREQ(s.provenance.of("straggling"), "assumed");
  EXPECT_EQ(software_from_toml(to_toml(s), "again").provenance, s.provenance);
  expect_refusal([&] { software_from_toml(text + "fitted = ['straggling']\n", "mine.toml"); },
                 {"fitted = straggling", "keys that this file has"});
  expect_refusal([&] { software_from_toml(text + "measured_gpus = [8, 4]\n", "mine.toml"); },
                 {"measured_gpus = [8, 4]", "the least and the most"});
  Machine machine = load_machine("h100");
  const std::string before = to_toml(machine);
  machine.gemm_efficiency = 0.7;
  machine.memory_bandwidth = 3e12;
  machine.tiers.back().bandwidth = 40e9;
  mark_fitted(machine.provenance, before, to_toml(machine));
  for (const char* key : {"gemm_efficiency", "memory_bandwidth", "tier"})
    EXPECT_STREQ(machine.provenance.of(key), "fitted");
  EXPECT_STREQ(machine.provenance.of("peak_bf16"), "published");
  EXPECT_STREQ(machine.provenance.of("gemm_half_depth"), "assumed");
  for (const std::string& name : machine_preset_names()) {
    const Machine preset = load_machine(name);
    EXPECT_STREQ(preset.provenance.of("memory_bytes"), "published") << name;
    EXPECT_EQ(machine_from_toml(to_toml(preset), name).provenance, preset.provenance) << name;
  }
}

// A program's search keeps to what it runs; what is asked for by name is priced, and said.
TEST(SearchForPrograms, KeepsToWhatTheProgramRuns) {
  for (const std::string& name : software_preset_names()) {
    SearchRequest r = request("gpt2-1.5b", 4, 32);
    r.pin("cp", 1);
    r.work.software = load_software(name);
    r.work.exact_memory = exact_memory();
    r.work.precision = r.work.software.is_this_trainer ? Precision::f32 : Precision::bf16;
    r.top = 10;
    const SearchResult result = search(r);
    ASSERT_FALSE(result.plans.empty()) << name;
    for (const Estimate& e : result.plans)
      EXPECT_TRUE(not_run(r.work, e.plan).empty()) << name << summary(e.plan);
  }
  SearchRequest r = request("gpt2-1.5b", 8, 32);
  r.pin("pp", 2);
  r.pin("dp", 4);
  r.pin("schedule", "zb-v");
  r.pin("zero", 2);
  const SearchResult result = search(r);
  ASSERT_FALSE(result.plans.empty());
  EXPECT_EQ(not_run(r.work, result.plans.front().plan),
            (std::vector<std::string>{"schedule zb-v", "ZeRO 2"}));
  EXPECT_EQ(plans_table(result, r.work).beyond,
            "current does not run ZeRO 2, schedule zb-v; priced as if it did\n");
}

TEST(SearchForPrograms, ProgramsAreData) {
  const std::string text =
      "name = \"mine\"\nas_of = \"2025-11\"\npipeline_zero_stages = [0, 1]\n"
      "context_kinds = []\nprecisions = [\"bf16\", \"fp8\"]\nreplicated_shards = false\n";
  const Software mine = software_from_toml(text, "mine.toml"),
                 again = software_from_toml(to_toml(mine), "again");
  for (const Software& s : {mine, again}) {
    EXPECT_EQ(s.as_of, "2025-11");
    EXPECT_EQ(s.pipeline_zero_stages, (std::vector<int>{0, 1}));
    EXPECT_TRUE(s.context_kinds && s.context_kinds->empty());
    EXPECT_EQ(s.precisions, (std::vector<std::string>{"bf16", "fp8"}));
    EXPECT_FALSE(s.replicated_shards);
    EXPECT_FALSE(s.zero_stages);
  }
  for (const std::string& name : software_preset_names())
    EXPECT_NE(load_software(name).is_this_trainer, !load_software(name).as_of.empty()) << name;
  for (const auto& [line, legal] : {std::pair{"as_of = \"2025\"", "as 2025-11"},
                                    {"as_of = \"2025-13\"", "as 2025-11"},
                                    {"as_of = 2025", "in quotes"},
                                    {"pipeline_zero_stages = [4]", "legal: 0, 1, 2, 3"},
                                    {"pipeline_zero_stages = []", "at least one"},
                                    {"context_kinds = [\"spiral\"]", "ring, ulysses"},
                                    {"precisions = [\"int4\"]", "bf16"},
                                    {"precisions = []", "at least one"}})
    expect_refusal([&, line = line] { software_from_toml(line, "mine.toml"); }, {legal});
}

// ZeRO 3 with a pipeline, context parallelism, replicas and fp8 of a program that has none of them.
TEST(SearchForPrograms, SaysWhatElseAProgramDoesNotRun) {
  SearchRequest r = request("llama-3-8b", 32, 32);
  r.work.software = load_software("deepspeed");
  r.work.precision = Precision::fp8;
  r.top = 10000;
  r.work.software.context_kinds = std::vector<std::string>{};
  for (const Estimate& e : search(r).plans) {
    EXPECT_EQ(not_run(r.work, e.plan), (std::vector<std::string>{"fp8"})) << summary(e.plan);
    EXPECT_EQ(e.plan.mesh.cp(), 1);
    EXPECT_EQ(e.plan.hsdp, 1);
    EXPECT_FALSE(e.plan.mesh.pp() > 1 && e.plan.zero > 1);
    EXPECT_FALSE(e.plan.mesh.tp() > 1 && e.plan.zero > 2);
  }
  for (const auto& [field, value] : {std::pair{"pp", 2}, {"cp", 2}, {"dp", 8}, {"hsdp", 2}, {"zero", 3}})
    r.pin(field, value);
  const SearchResult asked = search(r);
  ASSERT_FALSE(asked.plans.empty());
  EXPECT_EQ(not_run(r.work, asked.plans.front().plan),
            (std::vector<std::string>{"ZeRO 3 beside a pipeline", "shards in 2 replicas",
                                      "context parallelism (ring)", "context parallelism beside a pipeline",
                                      "fp8"}));
  // Of one that has no tensor parallelism none is looked at, but what is asked for.
  SearchRequest whole = request("llama-3-8b", 32, 32);
  whole.work.software = load_software("fsdp");
  whole.top = 10000;
  for (const Estimate& e : search(whole).plans) EXPECT_EQ(e.plan.mesh.tp(), 1);
  whole.pin("tp", 2);
  EXPECT_EQ(not_run(whole.work, search(whole).plans.at(0).plan),
            (std::vector<std::string>{"tensor parallelism"}));
}

// A stage that the program has is not paired with a mesh beside which it has not, unless that is asked for.
TEST(SearchForPrograms, AGivenStageOfZeroKeepsToTheProgramsMeshes) {  // long
  SearchRequest r = request("llama-3-70b", 64, 512);
  r.work.machine = load_machine("h100");
  r.work.plan.seq_len = 8192;
  r.top = 1000;
  r.pin("zero", 3);
  const SearchResult kept = search(r);
  ASSERT_FALSE(kept.plans.empty());
  for (const Estimate& e : kept.plans)
    EXPECT_EQ(not_run(r.work, e.plan), (std::vector<std::string>{})) << summary(e.plan);
  r.pin("pp", 4);
  const std::vector<std::string> beside{"ZeRO 3 beside a pipeline"};
  EXPECT_EQ(not_run(r.work, search(r).plans.at(0).plan), beside);
  SearchRequest other = request("llama-3-8b", 16, 32);
  other.work.software = load_software("torchtitan");
  other.pin("zero", 1);  // which it has beside nothing
  EXPECT_EQ(not_run(other.work, search(other).plans.at(0).plan), (std::vector<std::string>{"ZeRO 1"}));
}

int most_context_ranks(const SearchRequest& r) {
  int most = 1;
  for (const Estimate& e : search(r).plans) most = std::max(most, e.plan.mesh.cp());
  return most;
}

// Fused attention is of 16 and 8 bits: in f32 Megatron-Core cuts no sequences.
TEST(SearchForPrograms, ContextParallelismIsOfThePrecisionsThatTheProgramSays) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.plan.seq_len = 32768;
  r.top = 1000;
  EXPECT_GT(most_context_ranks(r), 1);
  r.work.precision = Precision::f32;
  EXPECT_EQ(most_context_ranks(r), 1);
  r.pin("cp", 2);
  EXPECT_EQ(not_run(r.work, search(r).plans.at(0).plan),
            (std::vector<std::string>{"context parallelism in f32"}));
}

// Megatron-Core's check of the sequence is that of the ring, for Ulysses too.
TEST(SearchForPrograms, UlyssesNeedsPairsOfPartsWhereTheProgramSaysSo) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.plan.seq_len = 4100;  // 4 ranks have 1025 tokens each
  r.top = 1000;
  EXPECT_EQ(most_context_ranks(r), 2);
  r.pin("cp-kind", "ulysses");
  EXPECT_EQ(most_context_ranks(r), 2);
  r.work.software.context_cuts_pairs = false;
  EXPECT_EQ(most_context_ranks(r), 4);
  r.work.software.context_cuts_pairs = true;
  r.pin("cp", 4);
  EXPECT_EQ(not_run(r.work, search(r).plans.at(0).plan),
            (std::vector<std::string>{"sequences of 4100 tokens over cp 4 (ulysses)"}));
}

// Of 8 key/value heads: Megatron-Core has one of them on several tp ranks since 0.16, and exchanges none
// between more cp ranks than there are.
TEST(SearchForPrograms, KeyValueHeadsAreRepeatedWhereTheProgramSaysSo) {  // long
  for (const char* software :
       {"nanotron", "torchtitan", "torchtitan-eager", "megatron-2021", "megatron-deepspeed", "zero-bubble",
        "nemo-2024", "nemo-25.09", "nemo-25.11", "nemo-26.02", "current", "deepspeed", "echelon"}) {
    SCOPED_TRACE(software);
    SearchRequest r = request("llama-3-8b", 32, 64, software);
    const std::string name = software;
    const bool repeats = name == "nemo-26.02" || name == "current" || name == "echelon";
    EXPECT_EQ(r.work.software.tensor_repeats_heads, repeats);
    r.pin("tp", 16);
    if (repeats)
      EXPECT_FALSE(search(r).plans.empty());
    else
      expect_refusal([&] { search(r); }, {"--tp 16", "8 key/value heads of llama-3-8b",
                                          "tensor_repeats_heads", "legal: 1, 2, 4, 8"});
  }
  SearchRequest one_head = request("llama-3-8b", 8, 64, "nanotron");
  one_head.work.plan.model.num_kv_heads = 1;
  one_head.pin("tp", 4);
  expect_refusal([&] { search(one_head); },
                 {"--tp 4: does not divide the 1 key/value head of llama-3-8b", "legal: 1"});
  for (const char* software : {"current", "deepspeed", "echelon"}) {
    SCOPED_TRACE(software);
    SearchRequest r = request("llama-3-8b", 32, 64, software);
    const bool repeats = r.work.software.context_repeats_heads;
    EXPECT_EQ(repeats, std::string_view(software) != "current");
    r.pin("tp", 1), r.pin("pp", 1);
    r.pin("cp", 16);
    r.pin("cp-kind", "ulysses");
    if (repeats)
      EXPECT_FALSE(search(r).plans.empty());
    else
      expect_refusal([&] { search(r); },
                     {"--cp 16", "8 key/value heads", "context_repeats_heads", "--cp-kind ring"});
  }
  // Of a tp rank there are fewer.
  SearchRequest r = request("llama-3-8b", 64, 64);
  r.work.plan.seq_len = 131072;
  r.top = 1000;
  for (const Estimate& e : search(r).plans)
    if (e.plan.mesh.cp() > 1 && e.plan.context_kind == ContextKind::ulysses) {
      EXPECT_EQ(8 % (e.plan.mesh.tp() * e.plan.mesh.cp()), 0) << summary(e.plan);
    }
}

// Queries, keys and values of all heads are gathered, and their gradients summed back.
TEST(SearchForPrograms, RepeatedHeadsTravel) {
  const auto traffic = [](const char* software, std::int64_t kv_heads) {
    SearchRequest r = request("llama-3-8b", 16, 16, software);
    r.work.plan.model.num_kv_heads = kv_heads;
    for (const auto& [field, value] : {std::pair{"tp", 16}, {"pp", 1}, {"micro-batch", 1}, {"zero", 1}})
      r.pin(field, value);
    r.pin("recompute", "none");
    const Estimate e = search(r).plans.at(0);
    return std::pair{e.traffic.tp, e.seconds};
  };
  const auto [none, plain_seconds] = traffic("current", 16);
  const auto [gathered, seconds] = traffic("current", 8);
  const double tokens = 1024, width = 4096 + 2 * 8 * 128, layers = 32, microbatches = 16;
  EXPECT_NEAR(gathered - none, layers * microbatches * 2 * 15 / 16 * tokens * width * 2, 1e-6 * gathered);
  EXPECT_GT(seconds, plain_seconds);
  // This trainer sums the gradients of a head over the two ranks that have it.
  const double head = 2.0 * 128 * 4096 * layers * 4;
  EXPECT_NEAR(traffic("echelon", 8).first - traffic("echelon", 16).first, head, 1e-6 * head);
}

// What it says of others is what a search for them finds.
TEST(SearchForPrograms, OtherProgramsGainWhatTheirOwnSearchFinds) {
  SearchRequest r = request("gpt2-1.5b", 8, 32);
  r.pin("pp", 8);
  r.pin("micro-batch", 1);
  const Estimate best = search(r).plans.front();
  const auto fastest = [](SearchRequest one) {
    one.top = 100;
    double least = 1e300;
    for (const Estimate& e : search(one).plans) least = std::min(least, e.seconds);
    return least;
  };
  const std::vector<OtherProgram> others = other_programs(r, best);
  ASSERT_FALSE(others.empty());
  std::set<std::string> named;
  for (const OtherProgram& other : others) {
    SearchRequest own = r;
    if (other.name.empty())
      own.work.software.schedules.reset();
    else
      own.work.software = load_software(other.name);
    const double least = fastest(own);
    EXPECT_GE(other.plan.seconds, least) << other.name;
    EXPECT_LE(other.plan.seconds, least * (1 + tie)) << other.name;
    EXPECT_LE(other.plan.seconds * (1 + tie), best.seconds * (1 + 1e-12));
    named.insert(other.name);
  }
  EXPECT_TRUE(named.contains(""));  // with a schedule that Megatron-Core does not have
  for (const std::string& name : software_preset_names()) {
    if (named.contains(name) || load_software(name).is_this_trainer || name == "current") continue;
    SearchRequest own = r;
    own.work.software = load_software(name);
    EXPECT_GT(fastest(own) * (1 + tie), best.seconds) << name;
  }
  const std::string said = explain_programs(others, best, r.work);
  EXPECT_NE(said.find("itself without its limits: "), std::string::npos) << said;
  EXPECT_NE(said.find("(current does not run schedule "), std::string::npos) << said;
  EXPECT_NE(explain_programs({}, best, r.work).find("no preset is predicted"), std::string::npos);
}

// What a flag pins may be impossible for another program: that one has no answer, and the others keep theirs.
TEST(SearchForPrograms, AsksNoOtherProgramWhatItCannotDo) {
  SearchRequest r = request("gemma-3-1b", 8, 64);
  r.pin("tp", 2);  // of one key/value head
  SearchRequest of_other = r;
  of_other.work.software = load_software("torchtitan");
  EXPECT_THROW(search(of_other), RequestError);
  for (const OtherProgram& other : other_programs(r, search(r).plans.front()))
    EXPECT_NE(other.name, "torchtitan");
}

// A program of which no mixture was measured has experts for nothing: it would seem twice as fast.
TEST(SearchForPrograms, ComparesMixturesOnlyWithProgramsThatSayWhatExpertsCost) {
  SearchRequest r = request("mixtral-8x7b", 64, 64);
  r.pin("pp", 2);
  r.pin("micro-batch", 1);
  const Estimate best = search(r).plans.front();
  const std::vector<OtherProgram> others = other_programs(r, best);
  for (const OtherProgram& other : others)
    EXPECT_TRUE(other.name.empty() || load_software(other.name).expert_launch_seconds > 0) << other.name;
  const std::vector<std::string> unknown = not_compared(r.work);
  EXPECT_NE(std::find(unknown.begin(), unknown.end(), "fsdp"), unknown.end());
  EXPECT_EQ(std::find(unknown.begin(), unknown.end(), "deepseek-v3"), unknown.end());
  EXPECT_NE(explain_programs(others, best, r.work).find("not compared, as their numbers"), std::string::npos);
  EXPECT_TRUE(not_compared(request("llama-3-8b", 8, 8).work).empty());
  r.work.software = load_software("fsdp");  // knows no more than the others
  EXPECT_TRUE(not_compared(r.work).empty());
}

// What another than the programs that were measured with a scan gains would be guessed.
TEST(SearchForPrograms, ComparesStateSpacesWithProgramsThatWereMeasured) {
  SearchRequest r = request("bamba-9b", 16, 16);
  r.pin("micro-batch", 1);
  const Estimate best = search(r).plans.front();
  const std::vector<OtherProgram> others = other_programs(r, best);
  for (const OtherProgram& other : others)
    EXPECT_TRUE(other.name.empty() || load_software(other.name).scan_efficiency != 1) << other.name;
  const std::vector<std::string> unknown = not_compared(r.work);
  EXPECT_EQ(std::find(unknown.begin(), unknown.end(), "nemo-26.02"), unknown.end());
  EXPECT_NE(std::find(unknown.begin(), unknown.end(), "torchtitan"), unknown.end());
  const std::string text = explain_programs(others, best, r.work);
  EXPECT_NE(text.find("do not say what layers with a state space cost"), std::string::npos) << text;
  EXPECT_EQ(text.find("no preset is predicted"), std::string::npos) << text;
}

// The least that a double can be as well, which std::stod() takes for none.
TEST(SearchForPrograms, NumbersBehindAPlanMayBeOfAnySize) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.pin("micro-batch", 1);
  r.work.machine.watts = 1e-308;
  const std::string text = explain_winner(search(r), r.work);
  EXPECT_NE(text.find(" watts 1e-308"), std::string::npos) << text;
}

// Whether some program's step times were measured there.
bool is_measured(const std::string& machine) {
  const auto is_there = [&](const std::string& on) { return on.starts_with(machine + " "); };
  return std::ranges::any_of(software_preset_names(), [&](const std::string& program) {
    const Software s = load_software(program);
    return s.measured_on && std::ranges::any_of(*s.measured_on, is_there);
  });
}

TEST(Machine, FilesComeBackAndSayWhatIsWrong) {
  for (const std::string& name : machine_preset_names()) {
    const Machine m = load_machine(name);
    EXPECT_EQ(to_toml(machine_from_toml(to_toml(m), "there.toml")), to_toml(m)) << name;
    // What is known of a data sheet alone says so.
    EXPECT_EQ(m.omitted.empty(), is_measured(name) || name == "h200") << name;
  }
  for (const std::string& name : software_preset_names()) {
    const Software s = load_software(name);
    EXPECT_EQ(to_toml(software_from_toml(to_toml(s), "there.toml")), to_toml(s)) << name;
  }
  const std::string h100 = to_toml(load_machine("h100"));
  const auto refused = [&](std::string text, const char* words) {
    try {
      machine_from_toml(text, "there.toml");
      ADD_FAILURE() << words;
    } catch (const RequestError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refused("memory_bytes = 1e9", "memory_bandwidth is missing");
  refused("speed = 3\n" + h100, "unknown key speed = 3; see docs/planning.md");
  refused("memory_byte = 3\n" + h100, "unknown key memory_byte = 3 (did you mean memory_bytes?); see docs/");
  refused("peak_bf61 = 3\n" + h100, "(did you mean peak_bf16?)");
  refused(h100 + "latency = 1", "latency = 1 (did you mean latency_seconds?); a tier has ranks");
  checks::expect_refusal([&] { software_from_toml("low_ = 1\nname = \"x\"", "there.toml"); },
                         {"there.toml: unknown key low_ = 1 (did you mean low?); see docs/planning.md"});
  refused("memory_bytes = 1e9\nmemory_bandwidth = 1e9\n[[tier]]\nranks = 8\nbandwidth = 1e9", "no peak");
  refused("memory_bytes = 1e9\nmemory_bandwidth = 1e9\npeak_f32 = 1e9", "no [[tier]]");
  const std::string named = "name = 3\nmemory_bytes = 1e9\nmemory_bandwidth = 1e9\n";
  refused(named, "name = 3 is not legal: give a name in quotes");
  for (const char* peak : {"inf", "nan", "0", "1e308", "true"})
    refused(fmt::format("memory_bytes = 1e9\nmemory_bandwidth = 1e9\npeak_bf16 = {}", peak),
            "is not legal: give FLOP/s from 1000000 to 1e+30");
  for (const char* name : {"\\u001b[31mred", "two\\nlines", "\\u007f"}) {
    const std::string line = fmt::format("name = \"{}\"\n", name);
    refused(line + "memory_bytes = 1e9", "is not legal: give a name without control characters");
    checks::expect_refusal([&] { software_from_toml(line, "there.toml"); },
                           {"there.toml: name = ", "give a name without control characters"});
  }
  EXPECT_THROW(software_from_toml("name = [1]", "there.toml"), RequestError);
  // What is legal is read again as it was written.
  Machine machine = load_machine("h100");
  Software software = load_software("echelon");
  machine.name = software.name = R"(the "old" one\)";
  EXPECT_EQ(machine_from_toml(to_toml(machine), "there.toml").name, machine.name);
  EXPECT_EQ(software_from_toml(to_toml(software), "there.toml").name, software.name);
  EXPECT_THROW(load_machine("tpu"), RequestError);
}

// What a data sheet does not have. Taken as all of the peaks, and as no time, it made 86% MFU of this one.
TEST(Machine, WhatAFileOmitsIsThatOfAPreset) {
  const std::string sheet =
      "name = \"sheet\"\nmemory_bytes = 192e9\nmemory_bandwidth = 5.3e12\npeak_bf16 = 1307e12\n";
  const std::string links =
      "[[tier]]\nranks = 8\nbandwidth = 360e9\n[[tier]]\nranks = 2048\nbandwidth = 45e9\n";
  const Machine h100 = load_machine("h100");
  SearchRequest r = request("llama-3-8b", 64, 512);
  r.work.machine = machine_from_toml(sheet + links, "there.toml");
  EXPECT_EQ(r.work.machine.omitted.size(), 13u);
  EXPECT_EQ(r.work.machine.gemm_efficiency, h100.gemm_efficiency);
  EXPECT_EQ(r.work.machine.launch_seconds, h100.launch_seconds);
  EXPECT_EQ(r.work.machine.gemm_unaligned, 1);  // of files that have it
  const SearchResult found = search(r);
  const Estimate& best = found.plans.at(0);
  EXPECT_GT(best.mfu, 0.4);
  EXPECT_LT(best.mfu, 0.6);
  EXPECT_GE(best.high / best.seconds, unknown_high);
  const std::string text = plans_table(found, r.work).text();
  EXPECT_NE(text.find("the file of sheet does not say memory_efficiency, gemm_efficiency, "),
            std::string::npos)
      << text;
  EXPECT_NE(plans_json(found, r.work).find("\"machine_omits\""), std::string::npos);

  // What it says counts, also where it is all or nothing.
  const Machine said =
      machine_from_toml("gemm_efficiency = 1\nlaunch_seconds = 0\n" + sheet + links, "there.toml");
  EXPECT_EQ(said.omitted.size(), 11u);
  EXPECT_EQ(said.gemm_efficiency, 1);
  EXPECT_EQ(said.launch_seconds, 0);
  // Products in 8 and 4 bits are of machines that have them.
  const Machine narrow =
      machine_from_toml(sheet + "peak_fp8 = 2614e12\npeak_fp4 = 5e15\n" + links, "there.toml");
  EXPECT_EQ(narrow.omitted.size(), 15u);
  EXPECT_EQ(narrow.gemm_fp8_efficiency, h100.gemm_fp8_efficiency);
  EXPECT_EQ(narrow.gemm_fp4_efficiency, load_machine("b200").gemm_fp4_efficiency);
  // All is written.
  EXPECT_EQ(machine_from_toml(to_toml(narrow), "there.toml").omitted, std::vector<std::string>());
}

// Numbers of data sheets, copied with the sheet's unit.
TEST(Machine, UnitsOfDataSheetsAreRefused) {
  const std::string good =
      "memory_bytes = 80e9\nmemory_bandwidth = 2e12\npeak_bf16 = 312e12\n[[tier]]\nranks = 8\n"
      "bandwidth = 300e9\nlatency_seconds = 3e-6\n";
  machine_from_toml(good, "there.toml");
  const std::vector<std::array<std::string, 3>> wrong{
      {"memory_bytes = 80e9", "memory_bytes = 80", "give bytes from 1000000"},
      {"memory_bandwidth = 2e12", "memory_bandwidth = 2039", "give bytes a second from 1000000"},
      {"peak_bf16 = 312e12", "peak_bf16 = 312", "give FLOP/s from 1000000"},
      {"bandwidth = 300e9", "bandwidth = 300", "give bytes a second from 1000000"},
      {"latency_seconds = 3e-6", "latency_seconds = 3", "give seconds from 0 to 1"}};
  for (const auto& [right, bad, words] : wrong) {
    std::string text = good;
    text.replace(text.find("\n" + right) == std::string::npos ? 0 : text.find("\n" + right) + 1, right.size(),
                 bad);
    checks::expect_refusal([&] { machine_from_toml(text, "there.toml"); }, {bad + " is not legal", words});
  }
}

}  // namespace
}  // namespace echelon::search_programs_test
