// Plans whose optimizer's state lies on the host: what the devices hold less, what the link and the host
// take, and when the search looks for them.
#include <gtest/gtest.h>

#include "plan/explain.h"
#include "plan/other_programs.h"
#include "plan/search.h"
#include "refusals.h"
#include "workloads.h"

namespace echelon::host_offload_test {
namespace {

using checks::expect_refusal;

SearchRequest request(const char* model, int gpus, const char* software, std::int64_t batch = 64) {
  SearchRequest r;
  r.work = checks::workload_of(load_model(model), 4096, batch, Precision::bf16, load_machine("h100"),
                               load_software(software));
  r.gpus = gpus;
  r.top = 1;
  return r;
}

Plan plain(int zero, const Workload& work, int dp = 8) {
  Plan plan = work.plan;
  plan.mesh.set(Axis::dp, dp);
  plan.zero = zero;
  plan.micro_batch = 1;
  plan.recompute = Recompute::full;
  return plan;
}

Plan offloaded(Plan plan) {
  plan.offload = Offload::optimizer;
  return plan;
}

struct Kept {
  const char* software;
  int zero;
  double bytes;  // of each own parameter
};

// Of Megatron-Core f32 values and two moments; of DeepSpeed gradients of 2 bytes too, and of FSDP the
// parameters.
TEST(HostOffload, DevicesHoldLessByWhatIsOnTheHost) {
  for (const Kept& kept : std::initializer_list<Kept>{{"current", 1, 12},
                                                      {"deepspeed", 1, 12},
                                                      {"deepspeed", 2, 14},
                                                      {"deepspeed", 3, 14},
                                                      {"fsdp", 2, 16},
                                                      {"fsdp", 3, 18},
                                                      {"torchtitan", 3, 18}}) {
    SCOPED_TRACE(fmt::format("{} ZeRO {}", kept.software, kept.zero));
    const SearchRequest r = request("llama-2-7b", 8, kept.software);
    StepModel model(r.work);
    const Plan plan = plain(kept.zero, r.work);
    const Estimate here = model.estimate(plan), there = model.estimate(offloaded(plan));
    const auto parameters = static_cast<double>(num_parameters(plan.model));
    EXPECT_NEAR(there.host_bytes, kept.bytes * parameters / 8, 1e-9 * there.host_bytes);
    EXPECT_NEAR(static_cast<double>(here.memory.total() - there.memory.total()), there.host_bytes, 8);
    EXPECT_EQ(there.memory[MemoryCategory::optimizer], 0);
    EXPECT_GT(there.seconds, here.seconds);
    double counted = 0;
    for (const MemoryTerm& term : there.memory_terms) counted += term.total();
    EXPECT_NEAR(counted, static_cast<double>(there.memory.total()), 8);
  }
}

// By hand, of Megatron-Core on H100s: gradients of 4 bytes go down and values of 2 come up at 0.8 of 64 GB/s;
// the update reads 4 + 12 and writes 12 + 2 bytes at half of 76.8 GB/s.
TEST(HostOffload, LinkAndHostTakeTheirTime) {
  const SearchRequest r = request("llama-2-7b", 8, "current");
  StepModel model(r.work);
  const Plan plan = plain(1, r.work);
  const Estimate here = model.estimate(plan), there = model.estimate(offloaded(plan));
  const double own = static_cast<double>(num_parameters(plan.model)) / 8;
  const double by_hand = own * (4 + 2) / (0.8 * 64e9) + own * (4 + 12 + 12 + 2) / (0.5 * 76.8e9);
  EXPECT_NEAR(there.host_seconds, by_hand, 1e-9 * by_hand);
  EXPECT_NEAR(there.host_traffic, own * 6, 1);
  // The device's own update is no longer there.
  EXPECT_GT(there.parts.optimizer, by_hand);
  EXPECT_LT(there.parts.optimizer, by_hand + here.parts.optimizer);
  EXPECT_NEAR(there.seconds - here.seconds, there.parts.optimizer - here.parts.optimizer, 1e-9);
  // The more microbatches, the smaller its part.
  SearchRequest large = request("llama-2-7b", 8, "current", 1024);
  StepModel larger(large.work);
  const Plan many = plain(1, large.work);
  EXPECT_NEAR(larger.estimate(offloaded(many)).host_seconds, by_hand, 1e-9 * by_hand);
}

// Of DeepSpeed's stage 2 each microbatch sends its gradients down, beside its backward pass; of FSDP
// parameters come up twice as well, in 32 bits.
TEST(HostOffload, PassesSendWhatTheyMake) {
  for (const Kept& kept : std::initializer_list<Kept>{{"deepspeed", 2, 2}, {"fsdp", 3, 4 + 2 * 4}}) {
    const SearchRequest r = request("llama-2-7b", 8, kept.software, 32);
    StepModel model(r.work);
    const Estimate e = model.estimate(offloaded(plain(kept.zero, r.work)));
    const double own = static_cast<double>(num_parameters(e.plan.model)) / 8;
    const double values = kept.zero == 3 ? 0 : 2;  // that come up once, behind the update
    EXPECT_NEAR(e.host_traffic, own * (4 * kept.bytes + values), 1e-9 * e.host_traffic) << kept.software;
    // On a slow link they stick out of the passes.
    Workload slow = r.work;
    slow.machine.host_bandwidth /= 100;
    const Estimate later = StepModel(slow).estimate(e.plan);
    EXPECT_GT(later.parts.host_exposed, e.parts.host_exposed + 1) << kept.software;
    EXPECT_GT(later.host_seconds, e.host_seconds + 1) << kept.software;
    EXPECT_NEAR(later.parts.dp_exposed, e.parts.dp_exposed, 1e-9 * e.seconds) << kept.software;
  }
}

// This trainer brings its moments to the device, 8 bytes there and 8 back at once: of that sticks out what
// takes longer than the update.
TEST(HostOffload, OfThisTrainerTheUpdateHidesTheLink) {
  SearchRequest r = request("llama-2-7b", 8, "echelon");
  r.work.exact_memory = [](const Plan&, const PipelineLayout&, const Coordinates&, Device) {
    return Memory();
  };
  StepModel model(r.work);
  const Plan plan = plain(1, r.work);
  const Estimate here = model.estimate(plan), there = model.estimate(offloaded(plan));
  const double link = 8 * static_cast<double>(num_parameters(plan.model)) / 8 / (0.8 * 64e9);
  EXPECT_NEAR(there.parts.optimizer, std::max(link, here.parts.optimizer), 1e-9);
  EXPECT_NEAR(there.host_seconds, there.parts.optimizer - here.parts.optimizer, 1e-9);
  r.work.machine.host_bandwidth = 1e15;
  EXPECT_EQ(StepModel(r.work).estimate(offloaded(plan)).host_seconds, 0);
}

Plan with_activations(Plan plan, Offload what = Offload::activations) {
  plan.offload = what;
  return plan;
}

// By hand, of Megatron-Core on one H100 without recomputation: L layers of one microbatch, of which two are
// on the device, and each goes and comes at 0.8 of 64 GB/s beside a layer's passes.
TEST(HostOffload, ActivationsLeaveTwoLayersHere) {
  const SearchRequest r = request("llama-2-7b", 8, "current");
  StepModel model(r.work);
  Plan plan = plain(1, r.work);
  plan.recompute = Recompute::none;
  const Estimate here = model.estimate(plan), there = model.estimate(with_activations(plan));
  const SavedBytes saved = saved_bytes(r.work, plan, Recompute::none);
  const double layers = static_cast<double>(plan.model.num_layers), microbatches = 8;
  EXPECT_EQ(there.microbatches, 8);
  EXPECT_NEAR(there.host_bytes, (layers - 2) * saved.layer.front(), 1);
  EXPECT_NEAR(there.host_traffic, 2 * microbatches * layers * saved.layer.front(), 1);
  const double fragmented = 1 + r.work.software.fragmentation;
  EXPECT_NEAR(static_cast<double>(here.memory.total() - there.memory.total()),
              fragmented * (layers - 2) * saved.layer.front(), 4);
  EXPECT_EQ(there.memory[MemoryCategory::optimizer], here.memory[MemoryCategory::optimizer]);
  double counted = 0;
  for (const MemoryTerm& term : there.memory_terms) counted += term.total();
  EXPECT_NEAR(counted, static_cast<double>(there.memory.total()), 8);
  // Beside their passes, if the link is fast enough; else what takes longer than a pass sticks out.
  const StepParts& parts = here.parts;
  EXPECT_EQ(parts.host_exposed, 0);
  EXPECT_NEAR(there.seconds - here.seconds, there.parts.host_exposed, 1e-6 * here.seconds);
  EXPECT_EQ(there.host_seconds, there.parts.host_exposed);
  Workload fast = r.work, slow = r.work;
  fast.machine.host_bandwidth = 1e15;
  EXPECT_EQ(StepModel(fast).estimate(with_activations(plan)).parts.host_exposed, 0);
  slow.machine.host_bandwidth = 1e9;
  const double link = microbatches * layers * saved.layer.front() / (0.8 * 1e9);
  const double passes = parts.compute + parts.tp_exposed;
  const double exposed = StepModel(slow).estimate(with_activations(plan)).parts.host_exposed;
  EXPECT_LT(exposed, 2 * link);
  EXPECT_GT(exposed, 2 * link - passes);
}

// DeepSpeed's checkpoints go by copies that the passes wait for: of each layer its input, both ways.
TEST(HostOffload, CopiesThatPassesWaitForAreExposed) {
  const SearchRequest r = request("llama-2-7b", 8, "deepspeed");
  StepModel model(r.work);
  const Plan plan = plain(3, r.work);
  const Estimate e = model.estimate(with_activations(plan));
  const double input = 4096.0 * static_cast<double>(plan.model.hidden) * 2;
  const double bytes = 2 * 8 * static_cast<double>(plan.model.num_layers) * input;
  EXPECT_NEAR(e.host_traffic, bytes, 1);
  EXPECT_NEAR(e.parts.host_exposed, bytes / (0.8 * 64e9), 1e-9);
  // With the optimizer's state both lie there.
  const Estimate state = model.estimate(offloaded(plan)),
                 both = model.estimate(with_activations(plan, Offload::both));
  EXPECT_NEAR(both.host_bytes, state.host_bytes + e.host_bytes, 1);
  EXPECT_NEAR(both.host_traffic, state.host_traffic + e.host_traffic, 1e-9 * both.host_traffic);
  EXPECT_NEAR(both.host_seconds, state.host_seconds + e.host_seconds, 1e-9);
  EXPECT_LT(both.memory.total(), state.memory.total());
}

// Long sequences on few devices, whose states fit: the optimizer's state gains too little, and activations
// are looked for behind it. The search keeps to what the program does beside it.
TEST(HostOffload, ActivationsAreLookedForWhereNothingElseFits) {
  SearchRequest r = request("llama-2-7b", 8, "current", 8);
  r.work.plan.seq_len = 16384;
  r.pin("recompute", std::string("none"), "recompute");
  r.pin("cp", std::string("1"), "cp");
  r.pin("tp", std::string("1"), "tp");
  r.pin("pp", std::string("1"), "pp");
  r.pin("zero", std::string("1"), "zero");
  r.work.machine.host_memory_bytes = 2e12;
  const SearchResult found = search(r);
  ASSERT_FALSE(found.plans.empty());
  EXPECT_TRUE(found.plans[0].plan.offloads_activations());
  EXPECT_NE(plans_table(found, r.work)
                .text()
                .find(std::string("every --offload was tried, and ") + name_of(found.plans[0].plan.offload)),
            std::string::npos);
  // Not beside what the program does not run beside it, which nobody asked for.
  SearchRequest beside = r;
  beside.pin("recompute", std::string("full"), "recompute");
  beside.work.machine.memory_bytes = 40e9;
  const SearchResult nothing = search(beside);
  EXPECT_TRUE(nothing.plans.empty());
  EXPECT_FALSE(nothing.nearest->plan.offloads_activations());
  SearchRequest asked = request("llama-3-8b", 8, "current", 64);
  asked.pin("offload", std::string("activations"), "offload");
  asked.top = 20;
  for (const Estimate& e : search(asked).plans) {
    EXPECT_EQ(e.plan.mesh.pp(), 1);
    EXPECT_EQ(e.plan.recompute, PipelineRecompute());
    EXPECT_TRUE(not_run(asked.work, e.plan).empty());
  }
  // What is given by name is priced as if the program had it, and said.
  asked.pin("pp", std::string("2"), "pp");
  asked.pin("recompute", std::string("full"), "recompute");
  const std::string beyond = priced_beyond(search(asked), asked.work);
  EXPECT_NE(beyond.find("offload of activations beside a pipeline"), std::string::npos) << beyond;
  EXPECT_NE(beyond.find("offload of activations beside recompute full"), std::string::npos) << beyond;
}

// Programs that do not keep there what was asked are no answer, and no failure.
TEST(HostOffload, OtherProgramsThatKeepNothingThereArePassedOver) {
  for (const char* what : {"optimizer", "activations"}) {
    SearchRequest r = request("llama-3-8b", 8, "deepspeed", 64);
    r.pin("offload", std::string(what), "offload");
    const Estimate best = search(r).plans.at(0);
    for (const OtherProgram& other : other_programs(r, best)) {
      const Software software = other.name.empty() ? r.work.software : load_software(other.name);
      EXPECT_EQ(no_host({{}, Precision::bf16, r.work.machine, software}, other.plan.plan), "");
      EXPECT_EQ(name_of(other.plan.plan.offload), std::string(what));
    }
  }
}

// Ren et al. 2021: 13 billion parameters on one device of 32 GB, where without it 1.4 billion are the most.
TEST(HostOffload, ThirteenBillionOnOneDevice) {
  SearchRequest r = request("llama-2-13b", 1, "deepspeed", 8);
  r.work.plan.seq_len = 1024;
  r.work.machine.memory_bytes = 34.4e9;  // 32 GiB
  r.work.machine.reserved_bytes = 1e9;
  r.work.machine.host_memory_bytes = 1.5e12;
  const SearchResult found = search(r);
  ASSERT_EQ(found.plans.size(), 1u);
  EXPECT_EQ(found.plans[0].plan.offload, Offload::optimizer);
  EXPECT_NE(plans_table(found, r.work).text().find("every --offload was tried, and optimizer is best"),
            std::string::npos);
  r.pin("offload", std::string("none"), "offload");
  EXPECT_TRUE(search(r).plans.empty());
}

// Only where nothing fits without it; what was looked at both times is told.
TEST(HostOffload, IsLookedForWhereNothingFits) {
  SearchRequest r = request("llama-3-70b", 8, "current");
  r.remembers = true;
  const SearchResult found = search(r);
  ASSERT_FALSE(found.plans.empty());
  EXPECT_EQ(found.plans[0].plan.offload, Offload::optimizer);
  EXPECT_FALSE(found.nearest);
  std::int64_t told = 0;
  for (const Looked& looked : found.looked) {
    told += looked.count;
    for (const Outcome& one : looked.each) ASSERT_LT(one.why, static_cast<int>(found.whys.size()));
  }
  EXPECT_EQ(told, found.considered);
  SearchRequest without = r;
  without.pin("offload", std::string("none"), "offload");
  const SearchResult none = search(without);
  std::int64_t considered = none.considered;
  double least = 1e300;
  std::string best;
  for (const SearchRequest& given : offloading(r)) {
    const SearchResult with = search(given);
    considered += with.considered;
    if (with.plans.empty() || with.plans[0].seconds >= least) continue;
    least = with.plans[0].seconds;
    best = summary(with.plans[0].plan);
  }
  EXPECT_EQ(best, summary(found.plans[0].plan));
  EXPECT_TRUE(none.plans.empty());
  EXPECT_EQ(found.considered, considered);
  for (const Estimate& e : search(request("llama-3-8b", 8, "current")).plans)
    EXPECT_EQ(e.plan.offload, Offload::none);
  // It says so, counts it, and a plan file has it.
  EXPECT_NE(explain_winner(found, r.work).find("kept on the host for each GPU: "), std::string::npos);
  EXPECT_NE(plan_file(found.plans[0], r.work).find("offload = 'optimizer'"), std::string::npos);
  EXPECT_NE(plans_json(found, r.work).find("\"traffic_bytes\""), std::string::npos);
  // A host with too little room does not take it.
  r.work.machine.host_memory_bytes = 20e9;
  const SearchResult full = search(r);
  EXPECT_TRUE(full.plans.empty());
  const std::vector<std::string>& why = full.rejected.at("shape").examples;
  EXPECT_TRUE(std::any_of(why.begin(), why.end(), [](const std::string& one) {
    return one.find("of the host's memory, which has 20.0 GB for each device") != std::string::npos;
  }));
}

TEST(HostOffload, RefusesWhatNoProgramDoes) {
  const auto refused = [](SearchRequest r, const char* zero, const std::vector<std::string>& words) {
    r.pin("offload", std::string("optimizer"), "offload");
    if (*zero != 0) r.pin("zero", std::string(zero), "zero");
    expect_refusal([&] { search(r); }, words);
  };
  refused(request("llama-2-7b", 8, "nanotron"), "",
          {"--offload optimizer", "nanotron keeps nothing on the host"});
  refused(request("llama-2-7b", 8, "current"), "0", {"--offload optimizer", "shards of ZeRO", "--zero 1"});
  SearchRequest titan = request("llama-3-8b", 8, "torchtitan");
  titan.pin("offload", std::string("activations"), "offload");
  expect_refusal([&] { search(titan); },
                 {"--offload activations", "torchtitan keeps no activations on the host", "none"});
  titan.pin("offload", std::string("both"), "offload");
  expect_refusal([&] { search(titan); }, {"--offload both", "legal: optimizer, none"});
  SearchRequest unknown = request("llama-2-7b", 8, "current");
  unknown.work.machine.host_bandwidth = 0;
  refused(unknown, "", {"--offload optimizer", "h100", "host_bandwidth"});
  unknown = request("llama-2-7b", 8, "current");
  unknown.work.machine.host_memory_bandwidth = 0;
  refused(unknown, "", {"--offload optimizer", "host_memory_bandwidth"});
  // What it runs beside another stage is said.
  SearchRequest third = request("llama-2-7b", 8, "current");
  third.pin("offload", std::string("optimizer"), "offload");
  third.pin("zero", std::string("3"), "zero");
  EXPECT_NE(priced_beyond(search(third), third.work).find("offload beside ZeRO 3"), std::string::npos);
  expect_refusal([] { software_from_toml("offloads = [\"momenta\"]\n", "mine.toml"); },
                 {"momenta", "moments"});
  expect_refusal([] { software_from_toml("activation_offload_recompute = [\"ful\"]\n", "mine.toml"); },
                 {"activation_offload_recompute", "ful"});
  const Software read = software_from_toml(to_toml(load_software("current")), "mine.toml");
  EXPECT_TRUE(read.offloads_activations());
  EXPECT_FALSE(read.activation_offload_pipelines);
  EXPECT_EQ(read.activation_offload_recompute, load_software("current").activation_offload_recompute);
}

}  // namespace
}  // namespace echelon::host_offload_test
