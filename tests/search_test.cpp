#include "plan/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "plan/explain.h"

namespace echelon::search_test {
namespace {

SearchRequest request(const char* model, int gpus, std::int64_t batch) {
  SearchRequest r;
  r.work = {load_model(model), 1024, batch, Precision::bf16, load_machine("h100"), load_software("current")};
  r.gpus = gpus;
  r.top = 5;
  return r;
}

// The ranking with bounds is that of simulating everything.
TEST(Search, FindsWhatSimulatingEverythingFinds) {
  for (const auto& [name, gpus, batch] :
       {std::tuple{"llama-2-7b", 8, 32}, {"gpt2-1.5b", 4, 16}, {"mixtral-8x7b", 16, 16}}) {
    SearchRequest some = request(name, gpus, batch);
    if (some.work.model.experts != Experts::none) some.pins.cp = 1, some.pins.pp = 2;  // enough of them
    SearchRequest all = some;
    all.top = 10000;
    const SearchResult few = search(some), every = search(all);
    ASSERT_GE(few.plans.size(), 5u) << name;
    EXPECT_LT(few.simulated, every.simulated);
    EXPECT_EQ(few.considered, every.considered);
    for (std::size_t i = 0; i < few.plans.size(); ++i)
      EXPECT_DOUBLE_EQ(few.plans[i].seconds, every.plans[i].seconds) << name << i;
    EXPECT_TRUE(std::is_sorted(every.plans.begin(), every.plans.end(),
                               [](const Estimate& a, const Estimate& b) { return a.seconds < b.seconds; }));
  }
}

TEST(Search, EveryConfigurationIsAccountedFor) {
  const SearchResult result = search(request("llama-3-8b", 16, 64));
  std::int64_t rejected = 0;
  for (const auto& [reason, of] : result.rejected) rejected += of.count;
  EXPECT_EQ(result.considered, result.feasible + rejected);
  EXPECT_GT(result.considered, 1000);
}

TEST(Search, PinsHold) {
  SearchRequest r = request("llama-3-8b", 16, 64);
  r.pins.tp = 4;
  r.pins.pp = 2;
  r.pins.schedule = "zb-h1";
  r.pins.recompute = Recompute::full;
  r.pins.zero = 1;
  r.pins.micro_batch = 2;
  const SearchResult result = search(r);
  ASSERT_FALSE(result.plans.empty());
  for (const Estimate& e : result.plans) {
    const Configuration& c = e.configuration;
    EXPECT_EQ(c.tp, 4);
    EXPECT_EQ(c.pp, 2);
    EXPECT_EQ(c.dp * c.cp, 2);
    EXPECT_EQ(c.schedule, "zb-h1");
    EXPECT_EQ(c.recompute, Recompute::full);
    EXPECT_EQ(c.zero, 1);
    EXPECT_EQ(c.micro_batch, 2);
  }
}

// "If model and batch fit on one GPU use no parallelism; if only the batch does not fit, dp alone."
TEST(Search, SplitsNoMoreThanItMust) {
  const SearchResult one = search(request("gpt2-124m", 1, 8));
  EXPECT_EQ(one.plans.front().configuration.ranks(), 1);
  const Configuration best = search(request("gpt2-124m", 8, 256)).plans.front().configuration;
  EXPECT_EQ(best.dp, 8);
  EXPECT_EQ(best.tp * best.pp * best.cp, 1);
  SearchRequest large = request("llama-2-70b", 8, 8);
  for (const Estimate& e : search(large).plans)
    EXPECT_TRUE(e.configuration.zero > 0 || e.configuration.tp * e.configuration.pp > 1);
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
  const auto found = least_gpus(r, 3);
  ASSERT_TRUE(found);
  EXPECT_LE(found->result.plans.front().seconds, 3);
  r.gpus = found->gpus / 2;
  EXPECT_GT(search(r).plans.front().seconds, 3);
  EXPECT_FALSE(least_gpus(r, 1e-6));
}

TEST(Search, SaysWhatIsNearestWhereNothingFits) {
  const SearchResult result = search(request("llama-3-405b", 8, 8));
  EXPECT_TRUE(result.plans.empty());
  ASSERT_TRUE(result.nearest);
  EXPECT_GT(result.nearest->bytes, result.nearest->usable_bytes);
  EXPECT_NE(explain_nothing(result, 8).find("GB too much"), std::string::npos);
  EXPECT_GT(result.rejected.at("memory").count, 0);
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
  refused([](SearchRequest& r) { r.pins.tp = 3; }, "--tp 3: does not divide --gpus 64");
  refused([](SearchRequest& r) { r.gpus = 6, r.pins.tp = 3; }, "the 64 heads");
  refused([](SearchRequest& r) { r.pins.dp = 8, r.work.global_batch = 4; }, "--global-batch 4");
  refused([](SearchRequest& r) { r.pins.ep = 2; }, "no experts");
  refused([](SearchRequest& r) { r.pins.context = ContextKind::hybrid; }, "--cp-kind hybrid");
  refused([](SearchRequest& r) { r.pins.zero = 4; }, "--zero 4");
  refused([](SearchRequest& r) { r.pins.etp = 2; }, "--etp 2");
  refused([](SearchRequest& r) { r.pins.zero = 0, r.pins.hsdp = 2; }, "--hsdp 2");
  refused([](SearchRequest& r) { r.memory_margin = std::nan(""); }, "--memory-margin nan");
  refused([](SearchRequest& r) { r.pins.layers_per_stage = {1, 2}; }, "add up to 3");
  refused([](SearchRequest& r) { r.pins.layers_per_stage = {81, -1}; }, "81 layers; legal: 0 to 80");
  refused([](SearchRequest& r) { r.pins.schedule = "best"; }, "--schedule best");
  refused([](SearchRequest& r) { r.work.seq_len = (1 << 24) + 1; }, "--seq-len");
  refused(
      [](SearchRequest& r) { r.work.machine = load_machine("a100-80"), r.work.precision = Precision::fp8; },
      "--dtype fp8");
}

// Each would be a plan for other ranks, layers or tokens than there are.
TEST(Search, NamesAShapeThatNoMeshHas) {
  const auto nothing = [](auto change, const char* words) {
    SearchRequest r = request("mixtral-8x7b", 16, 64);
    change(r);
    const SearchResult result = search(r);
    EXPECT_TRUE(result.plans.empty()) << words;
    const std::string why = explain_nothing(result, 16);
    EXPECT_NE(why.find(words), std::string::npos) << why;
  };
  nothing([](SearchRequest& r) { r.pins.zero = 3, r.pins.hsdp = 3; }, "hsdp 3: does not divide");
  nothing([](SearchRequest& r) { r.pins.etp = 3; }, "etp 3");
  nothing([](SearchRequest& r) { r.pins.tp = 4, r.work.model.vocab = 3; }, "a vocabulary of only 3");
  nothing([](SearchRequest& r) { r.pins.tp = 4, r.work.model.mlp_hidden = 3; }, "an MLP of only 3");
  nothing([](SearchRequest& r) { r.pins.cp = 2, r.work.seq_len = 4097; }, "4097 tokens do not divide");
  nothing([](SearchRequest& r) { r.pins.pp = 1, r.pins.layers_per_stage = {16, 16}; }, "2 numbers");
}

// 4098 tokens are two parts of 2049, and no four of equal length.
TEST(Search, PlanFileHasPartsThatTheLengthAllows) {
  SearchRequest r = request("llama-3-8b", 8, 8);
  r.work.seq_len = 4098;
  r.pins.cp = 2;
  const SearchResult result = search(r);
  const Plan plan = plan_from_toml(plan_file(result.plans.front(), r.work), "plan.toml");
  EXPECT_EQ(plan.mesh.size(Axis::cp), 2);
  EXPECT_NO_THROW(validate(plan));
}

TEST(Search, PlanFileComesBack) {
  SearchRequest r = request("llama-3-8b", 8, 64);
  const SearchResult result = search(r);
  const Plan plan = plan_from_toml(plan_file(result.plans.front(), r.work), "plan.toml");
  const Configuration& c = result.plans.front().configuration;
  EXPECT_EQ(plan.mesh.size(Axis::dp), c.dp);
  EXPECT_EQ(plan.mesh.size(Axis::tp), c.tp);
  EXPECT_EQ(plan.micro_batch, c.micro_batch);
  EXPECT_EQ(plan.global_batch, 64);
  EXPECT_EQ(num_parameters(plan.model), num_parameters(r.work.model));
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

}  // namespace
}  // namespace echelon::search_test
