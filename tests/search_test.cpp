#include "plan/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "case_choice.h"
#include "plan/explain.h"
#include "refusals.h"
#include "schedule/pipeline_layout.h"
#include "search_requests.h"

namespace echelon::search_test {
namespace {

using checks::expect_refusal;
using checks::request;

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
TEST(Search, WalksFewPlansByMemory) {  // long
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
TEST(Search, ASchedulesPlansHaveAPipeline) {  // long
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

// Where tp takes the whole node, groups inside a node have one rank, which shares out nothing: flags refuse
// them too.
TEST(Search, ReplicasHaveSeveralRanks) {
  SearchRequest r = request("llama-3-8b", 64, 128);
  r.pin("tp", 8);
  r.pin("pp", 1);
  r.top = 1000;
  for (const Estimate& e : search(r).plans) EXPECT_EQ(e.plan.hsdp, 1) << summary(e.plan);
  r.pin("tp", 4);
  const std::vector<Estimate> plans = search(r).plans;
  EXPECT_TRUE(std::any_of(plans.begin(), plans.end(), [](const Estimate& e) {
    return e.plan.hsdp > 1 && e.plan.hsdp < e.plan.mesh.dp_cp_size();
  }));
  SearchRequest eight = request("llama-3-8b", 64, 128);
  eight.pin("hsdp", 8);
  eight.top = 1000;
  for (const Estimate& e : search(eight).plans) EXPECT_GT(e.plan.mesh.dp_cp_size(), 8) << summary(e.plan);
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

// However few are asked for, a rank that is shared with others is said to be.
TEST(Search, ARankIsSharedWithPlansThatAreNotShown) {
  SearchRequest r = request("llama-3-8b", 64, 256);
  r.work.plan.seq_len = 8192;
  r.top = 20;
  const std::vector<Place> all = search(r).places;
  EXPECT_TRUE(all.front().is_shared);
  for (r.top = 1; r.top < 6; ++r.top) {
    const std::vector<Place> few = search(r).places;
    for (std::size_t i = 0; i < few.size(); ++i)
      EXPECT_TRUE(few[i].rank == all[i].rank && few[i].is_shared == all[i].is_shared)
          << "--top " << r.top << ", plan " << i;
  }
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

// Of a micro-batch of which no layer fits while at work, all plans are left out.
// Of the only micro-batch all plans are examined, of which those that recompute everything need least.
TEST(Search, NamesTheNearestPlanOfALargeMicroBatch) {
  SearchRequest r = request("llama-3-8b", 8, 512);
  r.work.plan.seq_len = 8192;
  for (const std::int64_t batch : {128, 256, 512}) {
    r.pin("micro-batch", batch);
    const SearchResult any = search(r);
    EXPECT_TRUE(
        explain_nothing(any, r.gpus).starts_with("no configuration of 8 GPUs fits; the nearest needs"));
    ASSERT_TRUE(any.nearest);
    for (const char* kind : {"none", "selective", "full"}) {
      SearchRequest one = r;
      one.pin("recompute", kind);
      const SearchResult result = search(one);
      ASSERT_TRUE(result.nearest) << kind;
      EXPECT_LE(any.nearest->bytes, result.nearest->bytes) << batch << " " << kind;
    }
  }
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

// Groups of six lie in one node where there is one of them, and over two nodes where there are several.
TEST(Search, FewestDevicesTakeAsLongAsTheyDoAlone) {
  SearchRequest r = request("gpt2-124m", 64, 180);
  r.work.plan.seq_len = 1020;
  r.pin("tp", 6);
  r.pin("pp", 1);
  r.top = 1;
  const auto found = least_gpus(r, 0.15);
  ASSERT_TRUE(found);
  EXPECT_GT(found->gpus, 6);
  SearchRequest alone = r;
  alone.gpus = found->gpus;
  EXPECT_EQ(found->result.plans.front().seconds, search(alone).plans.front().seconds);
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

// A node holds 32B's states beside recomputation alone, which the host's memory spares.
TEST(Search, FindsWhatTheHostSparesInRecomputation) {
  SearchRequest r = request("qwen2.5-32b", 8, 256);
  r.work.plan.seq_len = 8192;
  const Estimate best = search(r).plans.at(0);
  ASSERT_NE(best.plan.recompute, Recompute::none);
  const auto with = with_offload(r, best);
  ASSERT_TRUE(with);
  EXPECT_EQ(with->gpus, 8);
  EXPECT_LT(with->best.seconds, 0.95 * best.seconds);
  EXPECT_NE(with->best.plan.offload, Offload::none);
  const std::string text = explain_offload(*with, best);
  EXPECT_NE(text.find(fmt::format("--offload {}: ", name_of(with->best.plan.offload))), std::string::npos)
      << text;
  // It is what the flag gives.
  SearchRequest asked = r;
  asked.pin("offload", name_of(with->best.plan.offload));
  EXPECT_EQ(with->best.seconds, search(asked).plans.at(0).seconds);
  // Not where the flag says no, or nothing must be recomputed.
  r.pin("offload", "none");
  EXPECT_FALSE(with_offload(r, best));
  const SearchRequest large = request("llama-3-8b", 64, 256);
  EXPECT_FALSE(with_offload(large, search(large).plans.at(0)));
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
