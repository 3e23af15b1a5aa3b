// What searches refuse, and what they say where nothing fits.
#include "plan/search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "plan/explain.h"
#include "plan/near_sizes.h"
#include "refusals.h"
#include "search_requests.h"

namespace echelon::search_refusals_test {
namespace {

using checks::expect_refusal;
using checks::request;

TEST(SearchRefusals, RanksThatNoTierLinksHaveNoPrice) {
  SearchRequest r = request("llama-3-8b", 64, 64);
  r.work.machine.tiers.resize(1);
  expect_refusal([&] { search(r); }, {"--gpus 64", "h100", "8 devices", "[[tier]]"});
  r.gpus = 8;
  EXPECT_FALSE(search(r).plans.empty());
}

// As in a program that forgot one of them.
TEST(SearchRefusals, NamesWhatIsMissing) {
  SearchRequest r = request("gpt2-1.5b", 4, 32);
  r.work.machine = {};
  expect_refusal([&] { search(r); }, {"machine", "no [[tier]]"});
  r = request("gpt2-1.5b", 4, 32);
  r.work.plan.model = {};
  expect_refusal([&] { search(r); }, {"model", "num_layers = 0"});
  r = request("gpt2-1.5b", 4, 32);
  r.work.software = {};
  expect_refusal([&] { search(r); }, {"software", "name is empty"});
  r.work.software = load_software("echelon");
  expect_refusal([&] { search(r); }, {"software echelon", "Workload::exact_memory is not set"});
}

TEST(SearchRefusals, PinsNothingButFieldsOfAPlan) {
  SearchRequest r = request("gpt2-1.5b", 4, 32);
  expect_refusal([&] { r.pin("micro_batch", 1); }, {"micro_batch", "no field"});
  r.pin("micro-batch", 1);
  EXPECT_TRUE(r.has("micro-batch"));
}

// By how much, however little that is.
TEST(SearchRefusals, SaysByHowMuchAPlanDoesNotFit) {
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

TEST(SearchRefusals, SaysWhatIsNearestWhereNothingFits) {
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
TEST(SearchRefusals, WhatFitsByWhatItHoldsFits) {
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

TEST(SearchRefusals, RefusesWhatCannotBe) {
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
  for (const char* name : {"pipedream", "2bw"})
    refused([&](SearchRequest& r) { r.pin("schedule", name); },
            "is not priced, by plan or with --machine: it does not flush, so it trains otherwise than the "
            "others; legal: 1f1b");
  refused([](SearchRequest& r) { r.work.plan.seq_len = (1 << 24) + 1; }, "--seq-len");
  refused(
      [](SearchRequest& r) { r.work.machine = load_machine("a100-80"), r.work.precision = Precision::fp8; },
      "--precision fp8");
}

// Each would be a plan for other ranks, layers or tokens than there are. What is called legal is tried beside
// everything else that is given.
TEST(SearchRefusals, NamesAShapeThatNoMeshHas) {
  const auto refused = [](auto change, const char* words) {
    SearchRequest r = request("mixtral-8x7b", 16, 64);
    change(r);
    expect_refusal([&] { search(r); }, {words});
  };
  refused([](SearchRequest& r) { r.pin("zero", 3), r.pin("hsdp", 3); },
          "do not divide into so many groups; legal: 1, 2, 4, 8");
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
TEST(SearchRefusals, FindsLegalSizesBesideOneThatIsNot) {
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

}  // namespace
}  // namespace echelon::search_refusals_test
