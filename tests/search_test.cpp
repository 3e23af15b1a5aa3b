#include "plan/search.h"
#include "train/dry_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/error.h"
#include "case_choice.h"
#include "plan/explain.h"
#include "plan/near_sizes.h"
#include "refusals.h"
#include "schedule/pipeline_layout.h"
#include "workloads.h"

namespace echelon::search_test {
namespace {

using checks::expect_refusal;

SearchRequest request(const char* model, int gpus, std::int64_t batch, const char* software = "current") {
  SearchRequest r;
  r.work = checks::workload_of(load_model(model), 1024, batch, Precision::bf16, load_machine("h100"),
                               load_software(software));
  if (r.work.software.is_this_trainer) r.work.exact_memory = exact_memory();
  r.gpus = gpus;
  r.top = 5;
  return r;
}

// Of norms with weights and biases, with weights alone, with neither; behind attention, of heads.
TEST(Search, LayersOfEveryKindArePriced) {
  for (const char* model : {"starcoder2-3b", "command-r7b", "glm-4-9b", "olmo-1b", "olmo2-7b", "gemma-3-1b"}) {
    SearchRequest r = request(model, 8, 8);
    for (const char* axis : {"pp", "cp", "micro-batch"}) r.pin(axis, 1);
    r.pin("tp", 2);
    const auto plans = search(r).plans;
    ASSERT_FALSE(plans.empty()) << model;
    EXPECT_GT(plans.front().seconds, 0) << model;
  }
}

// What each rank chooses by itself is the best of all that they could choose together, wherever the memory
// ends; and where it ends between what the ranks keep, better than the same for all.
// What this trainer cuts into parts that differ by one, others do not run.
TEST(Search, OtherProgramsCutEqualParts) {
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

TEST(Search, RanksThatNoTierLinksHaveNoPrice) {
  SearchRequest r = request("llama-3-8b", 64, 64);
  r.work.machine.tiers.resize(1);
  expect_refusal([&] { search(r); }, {"--gpus 64", "h100", "8 devices", "[[tier]]"});
  r.gpus = 8;
  EXPECT_FALSE(search(r).plans.empty());
}

TEST(Search, PinsNothingButFieldsOfAPlan) {
  SearchRequest r = request("gpt2-1.5b", 4, 32);
  expect_refusal([&] { r.pin("micro_batch", 1); }, {"micro_batch", "no field"});
  r.pin("micro-batch", 1);
  EXPECT_TRUE(r.has("micro-batch"));
}

TEST(Search, RanksChooseTheirRecomputation) {  // long
  int mixed = 0, faster = 0;
  for (const auto& [pp, schedule] :
       {std::pair{2, "1f1b"}, {3, "1f1b"}, {2, "zb-v"}, {2, "interleaved"}, {2, "dualpipe"}}) {
    SearchRequest r = request("gpt2-1.5b", pp, 8 * pp);
    r.work.software.recompute.reset();
    for (const char* axis : {"dp", "tp", "cp", "micro-batch"}) r.pin(axis, 1);
    r.pin("pp", pp);
    r.pin("schedule", schedule);
    r.pin("layers-per-stage", "");
    if (std::string(schedule) == "interleaved") r.pin("chunks", 2);
    r.top = 1000;
    const auto with = [&](const std::string& recompute, double usable) {
      SearchRequest one = r;
      if (!recompute.empty()) one.pin("recompute", recompute);
      one.work.machine.memory_bytes = usable + one.work.machine.reserved_bytes;
      return search(one).plans;
    };
    const std::vector<Recompute> kinds = StepModel(r.work).recompute_kinds();
    ASSERT_GE(kinds.size(), 4u);
    std::vector<std::string> all{""};
    for (int rank = 0; rank < pp; ++rank) {
      std::vector<std::string> longer;
      for (const std::string& text : all)
        for (const Recompute& kind : kinds)
          longer.push_back(text + (rank > 0 ? "/" : "") + recompute_name(kind));
      all = longer;
    }
    const auto most = static_cast<double>(with("none", 1e15).front().memory.total()),
               least = static_cast<double>(with("full", 1e15).front().memory.total());
    ASSERT_LT(least, most);
    for (const double part : {0.0, 0.2, 0.5, 0.8, 0.95, 1.0}) {
      const double usable = least + part * (most - least) + 1;
      SCOPED_TRACE(fmt::format("{} over {}, {:.0f} bytes", schedule, pp, usable));
      double best = 1e300;
      for (const std::string& text : all) {
        if (std::string(schedule) == "dualpipe" &&
            text.substr(0, text.find('/')) != text.substr(text.find('/') + 1))
          continue;  // both run the same stages
        const auto plans = with(text, usable);
        if (!plans.empty()) best = std::min(best, plans.front().seconds);
      }
      const auto found = with("", usable), full = with("full", usable);
      ASSERT_FALSE(found.empty());
      // That it is found; of its rank the one with least memory comes first.
      double fastest = 1e300;
      for (const Estimate& e : found) fastest = std::min(fastest, e.seconds);
      EXPECT_DOUBLE_EQ(fastest, best) << summary(found.front().plan);
      mixed += found.front().plan.recompute.kinds().size() > 1;
      faster += found.front().seconds < full.front().seconds;
    }
  }
  EXPECT_GE(mixed, 5);
  EXPECT_GE(faster, 15);
}

// A program of others is not given what it cannot make again.
TEST(Search, ProgramsKeepToTheirRecomputation) {
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

TEST(Search, RecomputationOfManyRanksIsNamedShortly) {
  for (const char* text : {"full", "full*2", "full*3/none", "selective/linear,mlp_in*2/full"})
    EXPECT_EQ(recompute_name(parse_pipeline_recompute(text, "recompute")), text);
  EXPECT_EQ(recompute_name(parse_pipeline_recompute("full/full/none/none", "recompute")), "full*2/none*2");
  for (const char* text : {"full*0", "full*", "full*x", "full*1000000000", "full*-1", "*2", "full//none"})
    EXPECT_THROW(parse_pipeline_recompute(text, "--recompute"), RequestError) << text;
}

TEST(Search, ListsOfRecomputationAreForSoManyRanks) {
  SearchRequest r = request("llama-3-8b", 8, 16);
  r.pin("recompute", "full/none");
  for (const Estimate& e : search(r).plans) {
    EXPECT_EQ(e.plan.mesh.pp(), 2);
    EXPECT_EQ(recompute_name(e.plan.recompute), "full/none");
  }
  r.pin("pp", 4);
  expect_refusal([&] { search(r); }, {"--recompute full/none: is for 2 pipeline ranks, and --pp is 4",
                                      "legal: none, selective, full, or --pp 2"});
  Plan plan = r.work.plan;
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = "dualpipe";
  expect_refusal([&] { PipelineLayout unlike(plan); },
                 {"--recompute full/none: pipeline ranks 0 and 1 of dualpipe both run stage 0",
                  "legal: none, selective, full"});
}

// The ranking with bounds is that of simulating everything.
TEST(Search, FindsWhatSimulatingEverythingFinds) {  // long
  for (const auto& [name, gpus, batch] :
       {std::tuple{"gpt2-1.5b", 4, 16}, {"llama-2-7b", 8, 32}, {"mixtral-8x7b", 16, 16}}) {
    if (!checks::is_taken(6)) continue;
    SearchRequest some = request(name, gpus, batch);
    if (some.work.plan.model.experts != Experts::none)
      some.pin("cp", 1), some.pin("pp", 2);  // enough of them
    SearchRequest all = some;
    all.top = 10000;
    const SearchResult few = search(some), every = search(all);
    ASSERT_GE(few.plans.size(), 5u) << name;
    EXPECT_LT(few.simulated, every.simulated);
    EXPECT_EQ(few.considered, every.considered);
    for (std::size_t i = 0; i < few.plans.size(); ++i) {
      EXPECT_EQ(few.plans[i].seconds, every.plans[i].seconds) << name << i;
      EXPECT_EQ(few.plans[i].memory.total(), every.plans[i].memory.total()) << name << i;
    }
    // One plan alone is the same as the first of many.
    some.top = 1;
    EXPECT_EQ(summary(search(some).plans.front().plan), summary(every.plans.front().plan)) << name;
  }
}

// This trainer's plans are simulated and walked in the order of their bounds, by time and by memory.
TEST(Search, FindsOfThisTrainerWhatWalkingEverythingFinds) {  // long
  for (const Objective objective : {Objective::time, Objective::memory})
    for (const bool cut : {false, true}) {
      SearchRequest some = request("llama-tiny", 4, 8);
      some.work.plan.seq_len = 128;
      some.work.software = load_software("echelon");
      some.work.exact_memory = exact_memory();
      some.objective = objective;
      for (const char* axis : {"cp", "tp"}) some.pin(axis, 1);
      some.pin("pp", 2);
      some.pin("micro-batch", 2);
      some.pin("vocabulary-parallel", cut ? "on" : "off", "");
      SearchRequest all = some;
      all.top = 10000;
      const SearchResult few = search(some), every = search(all);
      SCOPED_TRACE(fmt::format("by {}, cut {}", objective == Objective::time ? "time" : "memory", cut));
      ASSERT_EQ(few.plans.size(), 5u);
      EXPECT_LT(few.simulated, every.simulated);
      for (std::size_t i = 0; i < few.plans.size(); ++i) {
        EXPECT_EQ(few.plans[i].seconds, every.plans[i].seconds) << i;
        EXPECT_EQ(few.plans[i].memory.total(), every.plans[i].memory.total()) << i;
      }
    }
}

// By memory most of this trainer's plans are seen to hold more than others without walking them.
TEST(Search, WalksFewPlansByMemory) {
  SearchRequest r = request("deepseek-v2-lite", 8, 64, "echelon");
  std::atomic<int> walked = 0;
  r.work.exact_memory = [&](const auto&... of) {
    ++walked;
    return exact_memory()(of...);
  };
  r.objective = Objective::memory;
  const SearchResult found = search(r);
  ASSERT_EQ(found.plans.size(), 5u);
  EXPECT_LT(walked, 75);
}

// Alone, a schedule asks for a pipeline that it is the order of.
TEST(Search, ASchedulesPlansHaveAPipeline) {
  SearchRequest r = request("llama-3-8b", 16, 64);
  r.top = 1000;
  const auto has_one_rank = [](const std::vector<Estimate>& plans) {
    return std::any_of(plans.begin(), plans.end(), [](const Estimate& e) { return e.plan.mesh.pp() == 1; });
  };
  EXPECT_TRUE(has_one_rank(search(r).plans));
  r.pin("schedule", "zb-v");
  const std::vector<Estimate> plans = search(r).plans;
  EXPECT_FALSE(plans.empty());
  EXPECT_FALSE(has_one_rank(plans));
  for (const Estimate& e : plans) EXPECT_EQ(e.plan.schedule, "zb-v");
}

// Replicas say nothing of what is cut: that is searched.
TEST(Search, ReplicasAloneLeaveTheStageOpen) {
  SearchRequest r = request("llama-3-8b", 16, 64);
  r.top = 1;
  r.pin("hsdp", 2);
  double best = 1e300;
  for (const int zero : {1, 3}) {
    SearchRequest one = r;
    one.pin("zero", zero);
    for (const Estimate& e : search(one).plans) best = std::min(best, e.seconds);
  }
  const std::vector<Estimate> plans = search(r).plans;
  ASSERT_FALSE(plans.empty());
  EXPECT_EQ(plans.front().plan.hsdp, 2);
  EXPECT_LE(plans.front().seconds, best * (1 + tie));
}

// A rank begins with the fastest plan that is left, and goes to one hundredth above it; in it the plan with
// least memory comes first.
TEST(Search, PlansWithinOneHundredthShareARank) {
  int shared = 0, reordered = 0;
  for (const auto& [name, software] : {std::pair{"llama-2-7b", "current"}, {"gpt2-1.5b", "echelon"}}) {
    SearchRequest r = request(name, 8, 32);
    r.work.software = load_software(software);
    r.work.exact_memory = exact_memory();
    r.pin("cp", 1);
    r.pin("pp", 1);
    r.top = 10000;
    const SearchResult result = search(r);
    ASSERT_EQ(result.places.size(), result.plans.size());
    ASSERT_GE(result.plans.size(), 5u);
    double before = 0;  // the limit of the rank before
    for (std::size_t first = 0; first < result.plans.size();) {
      const Place& place = result.places[first];
      EXPECT_EQ(place.rank, static_cast<int>(first) + 1);
      double fastest = 1e300, slowest = 0;
      std::size_t last = first;
      for (; last < result.plans.size() && result.places[last].rank == place.rank; ++last) {
        const Estimate& e = result.plans[last];
        EXPECT_EQ(result.places[last].is_shared, place.is_shared);
        EXPECT_GE(e.memory.total(), result.plans[std::max(first, last - (last > first))].memory.total());
        fastest = std::min(fastest, e.seconds);
        slowest = std::max(slowest, e.seconds);
      }
      EXPECT_EQ(place.is_shared, last - first > 1);
      EXPECT_GT(fastest, before);
      EXPECT_LE(slowest, fastest * (1 + tie));
      before = fastest * (1 + tie);
      shared += place.is_shared;
      reordered += result.plans[first].seconds > fastest;
      first = last;
    }
    if (result.places.front().is_shared)
      EXPECT_NE(plans_table(result, r.work).text().find("\n 1= "), std::string::npos);
    else
      EXPECT_NE(plans_table(result, r.work).text().find("\n  1 "), std::string::npos);
    // On a narrow terminal a plan is below its numbers, which fit.
    const std::string below = plans_table(result, r.work, 80).text();
    std::istringstream lines(below);
    std::string line;
    EXPECT_TRUE(std::getline(lines, line) && line.ends_with("tokens/s/GPU") && line.size() <= 80) << line;
    EXPECT_TRUE(std::getline(lines, line) && line == "  plan") << line;
    for (const Estimate& e : result.plans) {
      EXPECT_TRUE(std::getline(lines, line) && line.size() <= 80) << line;
      EXPECT_TRUE(std::getline(lines, line));
      EXPECT_EQ(line, "  " + summary(e.plan));
    }
  }
  EXPECT_GE(shared, 3);
  EXPECT_GE(reordered, 2);
}

TEST(Search, EveryConfigurationIsAccountedFor) {
  const SearchResult result = search(request("llama-3-8b", 16, 64));
  std::int64_t rejected = 0;
  for (const auto& [reason, of] : result.rejected) rejected += of.count;
  EXPECT_EQ(result.considered, result.feasible + rejected);
  EXPECT_GT(result.considered, 1000);
}

// Each plan that was considered is remembered with its fate, and to remember changes nothing.
TEST(Search, RemembersWhatBecameOfEveryPlan) {
  SearchRequest own = request("gpt2-124m", 4, 8);
  own.work.software = load_software("echelon");
  own.work.exact_memory = exact_memory();
  own.work.precision = Precision::f32;
  own.work.machine.memory_bytes = 9e9;  // where some of what was simulated does not fit when it is walked
  SearchRequest by_memory = request("llama-3-8b", 8, 16);
  by_memory.objective = Objective::memory;
  for (const SearchRequest& asked :
       {request("llama-3-8b", 16, 64), by_memory, own, request("llama-3-70b", 2, 16)}) {
    const SearchResult without = search(asked);
    SearchRequest remembering = asked;
    remembering.remembers = true;
    const SearchResult result = search(remembering);
    EXPECT_TRUE(without.looked.empty());
    EXPECT_EQ(result.simulated, without.simulated);
    std::map<Fate, std::int64_t> of;
    std::int64_t all = 0;
    std::multiset<double> simulated;
    for (const Looked& looked : result.looked) {
      all += looked.count;
      if (looked.each.empty()) of[looked.all.fate] += looked.count;
      EXPECT_TRUE(looked.each.empty() || static_cast<std::int64_t>(looked.each.size()) == looked.count);
      EXPECT_EQ(looked.each.size(), looked.pipelines.size() * looked.shardings.size());
      for (const Outcome& one : looked.each) {
        ++of[one.fate];
        if (one.fate == Fate::simulated) simulated.insert(one.figure);
        if (one.fate == Fate::schedule || one.fate == Fate::shape) {
          ASSERT_GE(one.why, 0);
          EXPECT_FALSE(result.whys.at(static_cast<std::size_t>(one.why)).empty());
        }
      }
    }
    EXPECT_EQ(all, result.considered);
    for (const auto& [fate, reason] :
         {std::pair{Fate::memory, "memory"}, {Fate::schedule, "schedule"}, {Fate::shape, "shape"},
          {Fate::same, "same"}, {Fate::slower, "slower"}}) {
      const auto found = result.rejected.find(reason);
      EXPECT_EQ(of[fate], found == result.rejected.end() ? 0 : found->second.count) << reason;
    }
    EXPECT_EQ(of[Fate::simulated] + of[Fate::outrun] + of[Fate::behind] + of[Fate::larger], result.feasible);
    for (const Estimate& e : result.plans) EXPECT_TRUE(simulated.contains(e.seconds)) << summary(e.plan);
  }
}

TEST(Search, PinsHold) {
  SearchRequest r = request("llama-3-8b", 16, 64);
  r.pin("tp", 4);
  r.pin("pp", 2);
  r.pin("schedule", "zb-h1");
  r.pin("recompute", "full");
  r.pin("zero", 1);
  r.pin("micro-batch", 2);
  const SearchResult result = search(r);
  ASSERT_FALSE(result.plans.empty());
  for (const Estimate& e : result.plans) {
    const Plan& c = e.plan;
    EXPECT_EQ(c.mesh.tp(), 4);
    EXPECT_EQ(c.mesh.pp(), 2);
    EXPECT_EQ(c.mesh.dp_cp_size(), 2);
    EXPECT_EQ(c.schedule, "zb-h1");
    EXPECT_EQ(c.recompute, Recompute::full);
    EXPECT_EQ(c.zero, 1);
    EXPECT_EQ(c.micro_batch, 2);
  }
}

// "If model and batch fit on one GPU use no parallelism; if only the batch does not fit, dp alone."
TEST(Search, SplitsNoMoreThanItMust) {
  const SearchResult one = search(request("gpt2-124m", 1, 8));
  EXPECT_EQ(one.plans.front().plan.mesh.num_ranks(), 1);
  const Plan best = search(request("gpt2-124m", 8, 256)).plans.front().plan;
  EXPECT_EQ(best.mesh.dp(), 8);
  EXPECT_EQ(best.mesh.tp() * best.mesh.pp() * best.mesh.cp(), 1);
  SearchRequest large = request("llama-2-70b", 8, 8);
  for (const Estimate& e : search(large).plans)
    EXPECT_TRUE(e.plan.zero > 0 || e.plan.mesh.tp() * e.plan.mesh.pp() > 1);
}

TEST(Search, MemoryObjectiveAndMargin) {
  SearchRequest r = request("llama-3-8b", 8, 64);
  const double fast = static_cast<double>(search(r).plans.front().memory.total());
  r.objective = Objective::memory;
  EXPECT_LT(static_cast<double>(search(r).plans.front().memory.total()), fast);
  r.objective = Objective::time;
  r.memory_margin = 0.6;
  for (const Estimate& e : search(r).plans) EXPECT_LE(static_cast<double>(e.memory.total()), 0.4 * 82.5e9);
}

TEST(Search, FewestDevicesReachATime) {
  SearchRequest r = request("llama-3-8b", 64, 256);
  r.pin("pp", 1);
  r.pin("cp", 1);
  // Every smaller number takes longer, those too that are no power of two.
  for (const double target : {8.0, 3.0, 2.2}) {
    const auto found = least_gpus(r, target);
    ASSERT_TRUE(found) << target;
    EXPECT_LE(found->result.plans.front().seconds, target);
    SearchRequest fewer = r;
    fewer.top = 1;
    for (fewer.gpus = 1; fewer.gpus < found->gpus; ++fewer.gpus) {
      const SearchResult result = search(fewer);
      EXPECT_TRUE(result.plans.empty() || result.plans.front().seconds > target) << fewer.gpus;
    }
  }
  EXPECT_FALSE(least_gpus(r, 1e-6));
  r.pin("tp", 4);
  const auto found = least_gpus(r, 3);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->gpus % 4, 0);
  SearchRequest few = request("llama-3-8b", 4, 64);
  for (const char* axis : {"tp", "pp"}) few.pin(axis, 4);
  expect_refusal([&] { least_gpus(few, 1000); }, {"--gpus 4", "16 ranks"});
}

// Every program but this one gives all data-parallel ranks equal microbatches; Megatron-Core interleaves whole
// groups of pp of them.
TEST(Search, OtherProgramsTrainEqualMicrobatches) {
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
  expect_refusal([&] { search(pinned(megatron, {{"dp", 3}})); },
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

// With one microbatch ZeRO 2 takes as long as ZeRO 1 where gradients are summed once a step, and less memory.
TEST(Search, OfEqualPlansTheSmallerOneComesFirst) {
  SearchRequest r = request("gpt2-1.5b", 4, 4);
  r.work.software.zero_stages.reset();
  r.work.software.reduces_each_microbatch = false;
  r.pin("dp", 4);
  r.pin("micro-batch", 1);
  r.top = 100;
  const SearchResult result = search(r);
  int ties = 0;
  for (const Estimate& a : result.plans)
    for (const Estimate& b : result.plans) {
      if (a.seconds != b.seconds || a.memory.total() >= b.memory.total()) continue;
      EXPECT_LT(&a, &b);
      ++ties;
    }
  EXPECT_GT(ties, 0);
}

// Where numbers come from is said of keys that the file has.
TEST(Search, NumbersHaveASource) {
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
TEST(Search, KeepsToWhatTheProgramRuns) {
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

TEST(Search, ProgramsAreData) {
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
TEST(Search, SaysWhatElseAProgramDoesNotRun) {
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
TEST(Search, AGivenStageOfZeroKeepsToTheProgramsMeshes) {
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

// Fused attention is of 16 and 8 bits: in f32 Megatron-Core cuts no sequences.
TEST(Search, ContextParallelismIsOfThePrecisionsThatTheProgramSays) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.plan.seq_len = 32768;
  r.top = 1000;
  const auto most_ranks = [&] {
    int most = 1;
    for (const Estimate& e : search(r).plans) most = std::max(most, e.plan.mesh.cp());
    return most;
  };
  EXPECT_GT(most_ranks(), 1);
  r.work.precision = Precision::f32;
  EXPECT_EQ(most_ranks(), 1);
  r.pin("cp", 2);
  EXPECT_EQ(not_run(r.work, search(r).plans.at(0).plan),
            (std::vector<std::string>{"context parallelism in f32"}));
}

// Megatron-Core's check of the sequence is that of the ring, for Ulysses too.
TEST(Search, UlyssesNeedsPairsOfPartsWhereTheProgramSaysSo) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.plan.seq_len = 4100;  // 4 ranks have 1025 tokens each
  r.top = 1000;
  const auto most_ranks = [&] {
    int most = 1;
    for (const Estimate& e : search(r).plans) most = std::max(most, e.plan.mesh.cp());
    return most;
  };
  EXPECT_EQ(most_ranks(), 2);
  r.pin("cp-kind", "ulysses");
  EXPECT_EQ(most_ranks(), 2);
  r.work.software.context_cuts_pairs = false;
  EXPECT_EQ(most_ranks(), 4);
  r.work.software.context_cuts_pairs = true;
  r.pin("cp", 4);
  EXPECT_EQ(not_run(r.work, search(r).plans.at(0).plan),
            (std::vector<std::string>{"sequences of 4100 tokens over cp 4 (ulysses)"}));
}

// Of 8 key/value heads: Megatron-Core has one of them on several tp ranks since 0.16, and exchanges none
// between more cp ranks than there are.
TEST(Search, KeyValueHeadsAreRepeatedWhereTheProgramSaysSo) {
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
TEST(Search, RepeatedHeadsTravel) {
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
TEST(Search, OtherProgramsGainWhatTheirOwnSearchFinds) {
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
TEST(Search, AsksNoOtherProgramWhatItCannotDo) {
  SearchRequest r = request("gemma-3-1b", 8, 64);
  r.pin("tp", 2);  // of one key/value head
  SearchRequest of_other = r;
  of_other.work.software = load_software("torchtitan");
  EXPECT_THROW(search(of_other), RequestError);
  for (const OtherProgram& other : other_programs(r, search(r).plans.front()))
    EXPECT_NE(other.name, "torchtitan");
}

// A program of which no mixture was measured has experts for nothing: it would seem twice as fast.
TEST(Search, ComparesMixturesOnlyWithProgramsThatSayWhatExpertsCost) {
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
TEST(Search, ComparesStateSpacesWithProgramsThatWereMeasured) {
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

// Of more sequences than 64 too, and in as many chunks as leave a layer less at both ends.
TEST(Search, LooksAtWhatFlagsWouldFind) {
  SearchRequest small = request("gpt2-124m", 8, 4096, "fsdp");
  small.work.plan.seq_len = 128;
  const double found = search(small).plans.front().seconds;
  small.pin("micro-batch", 512);
  EXPECT_LE(found, search(small).plans.front().seconds * (1 + tie));
  SearchRequest large = request("llama-3-405b", 1024, 512);
  for (const char* axis : {"cp", "micro-batch"}) large.pin(axis, 1);
  large.pin("pp", 8);
  large.pin("tp", 8);
  const Estimate best = search(large).plans.front();
  large.pin("schedule", "interleaved");
  large.pin("chunks", 8);
  EXPECT_LE(best.seconds, search(large).plans.front().seconds * (1 + tie));
}

// By how much, however little that is.
TEST(Search, SaysByHowMuchAPlanDoesNotFit) {
  SearchRequest r = request("gpt2-1.5b", 1, 8);
  r.pin("micro-batch", 1);
  r.pin("recompute", "none");
  r.pin("offload", "none");
  const auto bytes = static_cast<double>(search(r).plans.front().memory.total());
  r.work.machine.memory_bytes = bytes + r.work.machine.reserved_bytes - 2300;
  const SearchResult result = search(r);
  ASSERT_TRUE(result.plans.empty());
  ASSERT_FALSE(result.rejected.at("memory").examples.empty());
  EXPECT_NE(result.rejected.at("memory").examples.front().find("2.3 kB more than"), std::string::npos)
      << result.rejected.at("memory").examples.front();
  EXPECT_NE(explain_nothing(result, 1).find("2.3 kB too much"), std::string::npos);
}

TEST(Search, SaysWhatIsNearestWhereNothingFits) {
  for (const char* software : {"current", "echelon"}) {
    SearchRequest r = request("llama-3-405b", 8, 8);
    r.work.software = load_software(software);
    r.work.exact_memory = exact_memory();
    const SearchResult result = search(r);
    EXPECT_TRUE(result.plans.empty());
    ASSERT_TRUE(result.nearest);
    EXPECT_GT(result.nearest->bytes, result.nearest->usable_bytes);
    EXPECT_EQ(result.nearest->bytes, static_cast<double>(result.nearest->memory.total())) << software;
    EXPECT_NE(explain_nothing(result, 8).find("GB too much"), std::string::npos);
    EXPECT_GT(result.rejected.at("memory").count, 0);
  }
}

// Logits that come in pieces are counted whole: where nothing fits by that, what is held decides.
TEST(Search, WhatFitsByWhatItHoldsFits) {
  SearchRequest r = request("gpt2-124m", 1, 8);
  r.work.software = load_software("echelon");
  r.work.exact_memory = exact_memory();
  r.pin("micro-batch", 8);
  r.pin("recompute", "full");
  r.pin("offload", "none");
  const auto held = static_cast<double>(search(r).plans.front().memory.total());
  r.work.machine.memory_bytes = held + r.work.machine.reserved_bytes;
  ASSERT_GT(StepModel(r.work).outlook(search(r).plans.front().plan).bytes, held);
  r.work.machine.memory_bytes -= 1;
  EXPECT_TRUE(search(r).plans.empty());
}

TEST(Search, RefusesWhatCannotBe) {
  const auto refused = [](auto change, const char* words) {
    SearchRequest r = request("llama-3-70b", 64, 512);
    change(r);
    try {
      search(r);
      ADD_FAILURE() << words;
    } catch (const RequestError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refused([](SearchRequest& r) { r.gpus = 0; }, "--gpus 0");
  refused([](SearchRequest& r) { r.pin("tp", 3); }, "--tp 3: does not divide --gpus 64");
  refused([](SearchRequest& r) { r.gpus = 6, r.pin("tp", 3); }, "the 64 heads");
  refused([](SearchRequest& r) { r.pin("dp", 8), r.work.plan.global_batch = 4; },
          "--dp 8: the global batch has only 4 sequences, so some ranks would have none; legal: up to 4, or "
          "--global-batch of at least 8");
  refused([](SearchRequest& r) { r.pin("ep", 2); }, "no experts");
  refused([](SearchRequest& r) { r.pin("cp-kind", "hybrid"); }, "--cp-kind hybrid");
  refused([](SearchRequest& r) { r.pin("zero", 4); }, "--zero 4");
  refused([](SearchRequest& r) { r.pin("etp", 2); }, "--etp 2");
  refused([](SearchRequest& r) { r.pin("zero", 0), r.pin("hsdp", 2); }, "--hsdp 2");
  refused([](SearchRequest& r) { r.memory_margin = std::nan(""); }, "--memory-margin nan");
  refused([](SearchRequest& r) { r.pin("layers-per-stage", "1,2"); }, "add up to 3");
  refused([](SearchRequest& r) { r.pin("layers-per-stage", "81,-1"); },
          "81,-1: a stage has 0 to 80 layers; legal: auto");
  refused([](SearchRequest& r) { r.pin("schedule", "best"); }, "--schedule best");
  refused([](SearchRequest& r) { r.work.plan.seq_len = (1 << 24) + 1; }, "--seq-len");
  refused(
      [](SearchRequest& r) { r.work.machine = load_machine("a100-80"), r.work.precision = Precision::fp8; },
      "--precision fp8");
}

// Each would be a plan for other ranks, layers or tokens than there are. What is called legal is tried beside
// everything else that is given.
TEST(Search, NamesAShapeThatNoMeshHas) {
  const auto refused = [](auto change, const char* words) {
    SearchRequest r = request("mixtral-8x7b", 16, 64);
    change(r);
    expect_refusal([&] { search(r); }, {words});
  };
  refused([](SearchRequest& r) { r.pin("zero", 3), r.pin("hsdp", 3); },
          "do not divide into so many groups; legal: 1, 2, 4, 8, 16");
  refused([](SearchRequest& r) { r.pin("etp", 3); }, "--etp 3: does not divide --tp 1; legal: 1");
  refused([](SearchRequest& r) { r.pin("tp", 4), r.work.plan.model.vocab = 3; },
          "has a vocabulary of only 3; legal: 1, 2");
  // Whose MLPs are of no layer.
  refused(
      [](SearchRequest& r) {
        r.pin("tp", 4), r.work.plan.model.expert_hidden = r.work.plan.model.mlp_hidden = 3;
      },
      "has experts of only 3; legal: 1, 2");
  refused([](SearchRequest& r) { r.pin("cp", 2), r.work.plan.seq_len = 4097; },
          "--seq-len 4097: does not divide over --cp 2 with --cp-balance zigzag; legal: 4096, 4100");
  // With --pp 2 there are 8 ranks of dp, cp and tp.
  refused([](SearchRequest& r) { r.pin("tp", 32), r.pin("pp", 2); },
          "--tp 32: does not divide --gpus 16; legal: 1, 2, 4, 8");
  // No axis is given: what 37 context-parallel ranks would refuse is not what was asked.
  const std::string of_prime = explain_nothing(search(request("mixtral-8x7b", 37, 64)), 37);
  EXPECT_NE(of_prime.find("no configuration of 37 GPUs has a legal shape and schedule, as --dp 37"),
            std::string::npos)
      << of_prime;
  SearchRequest layers = request("mixtral-8x7b", 16, 64);
  layers.pin("pp", 1);
  layers.pin("layers-per-stage", "16,16");
  const SearchResult none = search(layers);
  EXPECT_TRUE(none.plans.empty());
  EXPECT_NE(explain_nothing(none, 16).find("2 numbers, and 1f1b over 1 rank has 1 stage"), std::string::npos)
      << explain_nothing(none, 16);
}

// 37 divides the batch as little as heads, and is more than there are layers.
TEST(Search, FindsLegalSizesBesideOneThatIsNot) {
  const SearchRequest r = request("llama-3-8b", 296, 600);
  const SearchResult none = search(r);
  ASSERT_TRUE(none.plans.empty());
  ASSERT_FALSE(none.nearest);
  const std::vector<NearSize> near = near_sizes(r);
  ASSERT_EQ(near.size(), 3u);
  EXPECT_LT(near[0].gpus, r.gpus);
  EXPECT_EQ(near[0].global_batch, 600);
  for (int i : {1, 2}) EXPECT_EQ(near[static_cast<std::size_t>(i)].gpus, r.gpus);
  EXPECT_LT(near[1].global_batch, 600);
  EXPECT_GT(near[2].global_batch, 600);
  for (const NearSize& one : near) {
    EXPECT_LE(8 * std::abs(one.gpus - r.gpus), r.gpus);
    EXPECT_LE(8 * std::abs(one.global_batch - 600), 600);
    SearchRequest same = r;
    same.gpus = one.gpus;
    same.work.plan.global_batch = one.global_batch;
    same.top = 1;
    EXPECT_EQ(summary(search(same).plans.at(0).plan), summary(one.best.plan));
  }
  const std::string text = explain_nothing(none, r, near);
  for (const NearSize& one : near)
    EXPECT_NE(text.find(one.gpus < r.gpus ? fmt::format("\n  --gpus {}: ", one.gpus)
                                          : fmt::format("\n  --global-batch {}: ", one.global_batch)),
              std::string::npos)
        << text;
  EXPECT_NE(plans_json(none, r.work, {}, near).find("\"near\""), std::string::npos);
}

// Of 25 nodes all are one pipeline, of whose ranks most have one layer; 24 are many.
TEST(Search, FindsFewerGpusThatTakeLessTime) {
  SearchRequest r = request("llama-3-8b", 200, 256);
  r.pin("tp", 8);
  const Estimate best = search(r).plans.at(0);
  const auto fewer = fewer_gpus(r, best);
  ASSERT_TRUE(fewer);
  EXPECT_LT(fewer->gpus, 200);
  EXPECT_EQ(fewer->gpus % 8, 0);
  EXPECT_LT(fewer->best.seconds * (1 + tie), best.seconds);
  r.gpus = 128;
  EXPECT_FALSE(fewer_gpus(r, search(r).plans.at(0)));
}

// Stage 2 of several microbatches holds whole gradients, as stage 1 does: no list has both.
TEST(Search, LeavesOutAStageOfZeroThatIsAnother) {
  const auto asked = [](std::int64_t batch) {
    SearchRequest r = request("llama-tiny", 4, batch, "echelon");
    r.work.plan.seq_len = 128;
    r.top = 20;
    return r;
  };
  const auto has_2 = [](SearchRequest r) {
    for (const char* axis : {"pp", "tp", "cp", "micro-batch"}) r.pin(axis, 1);
    const auto plans = search(r).plans;
    return std::any_of(plans.begin(), plans.end(), [](const Estimate& e) { return e.plan.zero == 2; });
  };
  EXPECT_FALSE(has_2(asked(64)));
  EXPECT_TRUE(has_2(asked(4)));
  SearchRequest second = asked(64);
  second.pin("zero", 2);
  EXPECT_TRUE(has_2(second));
}

// Six ranks can exchange 12 query heads, and not the 4 of keys and values.
TEST(Search, ProposesWhatTrainAccepts) {
  SearchRequest r = request("llama-3-8b", 12, 24);
  r.work.software = load_software("echelon");
  r.work.exact_memory = exact_memory();
  r.work.plan.seq_len = 1200;
  r.work.plan.model.num_heads = 12;
  r.work.plan.model.num_kv_heads = 4;
  r.work.plan.model.num_layers = 6;
  r.pin("recompute", "none");
  r.pin("micro-batch", 1);
  r.pin("tp", 1);
  r.top = checks::takes_wide_cases() ? 10000 : 150;
  const SearchResult result = search(r);
  EXPECT_GT(result.plans.size(), 100u);
  for (const Estimate& e : result.plans)
    if (checks::is_taken(40)) {
      EXPECT_NO_THROW(check_whole(trained_plan(e, r.work))) << summary(e.plan);
    }
  r.pin("cp", 6);
  r.pin("cp-kind", "ulysses");
  expect_refusal([&] { search(r); },
                 {"--cp 6", "12 query and 4 key/value heads", "legal: 1, 2, 4, 12, or --cp-kind ring"});
  r.pin("pp", 2);  // leaves 6 ranks
  expect_refusal([&] { search(r); }, {"--cp 6", "legal: 1, 2, or --cp-kind ring"});
}

// 4098 tokens are two parts of 2049, and no four of equal length.
TEST(Search, PlanFileHasPartsThatTheLengthAllows) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.plan.seq_len = 4098;
  r.work.software.context_cuts_pairs = false;
  r.pin("cp", 2);
  const SearchResult result = search(r);
  const Plan plan = plan_from_toml(plan_file(result.plans.front(), r.work), "plan.toml");
  EXPECT_EQ(plan.mesh.size(Axis::cp), 2);
  EXPECT_NO_THROW(validate(plan));
}

// Whatever was searched: the file has all of the plan, and pricing what it says gives the same.
TEST(Search, PlanFilesComeBack) {
  std::set<std::string> seen;
  const auto come_back = [&](SearchRequest r) {
    r.top = 40;
    const SearchResult result = search(r);
    ASSERT_FALSE(result.plans.empty());
    for (const Estimate& e : result.plans) {
      SCOPED_TRACE(r.work.plan.model.name + " " + summary(e.plan));
      const Plan& c = e.plan;
      const Plan plan = plan_from_toml(plan_file(e, r.work), "plan.toml");
      EXPECT_EQ(to_toml(plan), to_toml(trained_plan(e, r.work)));
      EXPECT_EQ(plan.priced.dtype, precision_name(r.work.precision));
      SearchRequest again = r;
      again.pin_all(plan);
      again.top = 2;
      again.work.machine = load_machine(plan.priced.machine);
      again.work.software = load_software(plan.priced.software);
      const SearchResult same = search(again);
      ASSERT_EQ(same.plans.size(), 1u);
      Plan written = same.plans.front().plan;
      EXPECT_EQ(same.plans.front().layers, e.layers);
      written.layers_per_stage = c.layers_per_stage;  // its own choice, now as numbers
      written.balance_layers = c.balance_layers;
      if (c.mesh.cp() == 1) written.context_kind = c.context_kind;
      EXPECT_EQ(summary(written), summary(c));
      EXPECT_TRUE(written.mesh == c.mesh && written.recompute == c.recompute);
      EXPECT_EQ(same.plans.front().seconds, e.seconds);
      EXPECT_EQ(same.plans.front().memory, e.memory);
      for (const std::string& what : {"zero " + std::to_string(c.zero), "hsdp " + std::to_string(c.hsdp > 1),
                                      c.schedule, "etp " + std::to_string(c.mesh.expert_cut() == c.mesh.tp()),
                                      "cp " + std::to_string(c.mesh.cp() > 1)})
        seen.insert(what);
    }
  };
  SearchRequest dense = request("llama-3-8b", 16, 64);
  come_back(dense);
  dense.pin("pp", 4);
  dense.pin("cp", 2);
  come_back(dense);
  dense.pin("zero", 3);
  dense.pin("hsdp", 2);
  dense.work.precision = Precision::fp8;
  come_back(dense);
  SearchRequest mixture = request("mixtral-8x7b", 32, 64);
  mixture.pin("tp", 4);
  mixture.pin("ep", 4);
  mixture.work.software = load_software("torchtitan");
  come_back(mixture);
  mixture.pin("etp", 1);
  come_back(mixture);
  for (const char* what : {"zero 1", "zero 3", "hsdp 1", "interleaved", "etp 0", "etp 1", "cp 1"})
    EXPECT_TRUE(seen.contains(what)) << what;
}

TEST(Machine, FilesComeBackAndSayWhatIsWrong) {
  for (const std::string& name : machine_preset_names()) {
    const Machine m = load_machine(name);
    EXPECT_EQ(to_toml(machine_from_toml(to_toml(m), "there.toml")), to_toml(m)) << name;
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
  refused("speed = 3\n" + h100, "unknown key speed");
  refused("memory_bytes = 1e9\nmemory_bandwidth = 1e9\n[[tier]]\nranks = 8\nbandwidth = 1e9", "no peak");
  refused("memory_bytes = 1e9\nmemory_bandwidth = 1e9\npeak_f32 = 1e9", "no [[tier]]");
  EXPECT_THROW(load_machine("tpu"), RequestError);
}

// Finding meshes, going through them and simulating each tell how far they are.
TEST(Search, EndsWhereItsProgressThrows) {
  struct Enough {};
  SearchRequest r = request("llama-3-8b", 16, 64);
  int all = 0, untold = 0;
  r.progress = [&](double done, const std::string&) { ++all, untold += done < 0; };
  const SearchResult result = search(r);
  EXPECT_GT(untold, 0);
  EXPECT_GE(all - untold, result.simulated);
  for (const int last : {1, all / 2, all}) {
    int count = 0;
    r.progress = [&](double, const std::string&) {
      if (++count == last) throw Enough{};
    };
    EXPECT_THROW((void)search(r), Enough);
    EXPECT_EQ(count, last);
  }
}

}  // namespace
}  // namespace echelon::search_test
