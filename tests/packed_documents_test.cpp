// Documents packed into sequences: what attention is left, who waits for whom, and what it gains to give each
// document as many ranks as it needs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "plan/explain.h"
#include "plan/search.h"
#include "refusals.h"
#include "train/dry_run.h"
#include "verb_test.h"
#include "workloads.h"

namespace echelon::packed_documents_test {
namespace {

using checks::expect_refusal;

DocumentLengths lengths_of(const std::string& text) { return read_document_lengths(text, "lengths"); }

constexpr std::int64_t length = 8192;
Workload packed(const std::string& lengths, const std::string& software = "current",
                const std::string& model = "llama-3-8b") {
  Workload work = checks::workload_of(load_model(model), length, 64, Precision::bf16, load_machine("h100"),
                                      load_software(software), exact_memory());
  if (lengths.empty()) return work;
  work.documents = lengths_of(lengths);
  work.plan.mask = AttentionMask::document;
  return work;
}

// 32 ranks.
Plan on(const Workload& work, int cp, int pp = 1) {
  Plan plan = work.plan;
  plan.mesh.set(Axis::cp, cp);
  plan.mesh.set(Axis::pp, pp);
  plan.mesh.set(Axis::dp, 32 / cp / pp);
  plan.zero = 1;
  plan.micro_batch = 1;
  plan.schedule = "1f1b";
  return plan;
}

constexpr const char* mixed = "100 400\n700 100\n3000 20\n8000 3\n";

TEST(PackedDocuments, LengthsAreReadAndRefusedByLine) {
  const DocumentLengths lengths = lengths_of("# tokens, documents\n30, 2\n\n10\n30 1 # again\n");
  ASSERT_EQ(lengths.entries.size(), 2u);
  EXPECT_EQ(lengths.entries[0].length, 10);
  EXPECT_EQ(lengths.entries[1].count, 3);
  EXPECT_DOUBLE_EQ(lengths.mean(), 25);
  expect_refusal([] { lengths_of("10\n0 3\n"); }, {"lengths, line 2: a length of 0: must be from 1"});
  expect_refusal([] { lengths_of("10 -1\n"); }, {"line 1: a count of -1: must be from 0"});
  expect_refusal([] { lengths_of("10 1 1\n"); },
                 {"line 1 10 1 1: must be a length, or a length and a count"});
  expect_refusal([] { lengths_of("ten\n"); }, {"line 1", "ten"});
  expect_refusal([] { lengths_of("# nothing\n10 0\n"); }, {"has no documents"});
}

TEST(PackedDocuments, FollowOneAnotherAndAreCutWhereSequencesEnd) {
  const DocumentLengths lengths = lengths_of("3 3\n5 1\n20 1\n");
  const std::vector<DocumentStarts> sequences = pack_documents(lengths, 16, 4000);
  EXPECT_EQ(sequences, pack_documents(lengths, 16, 4000));
  std::map<std::int64_t, int> whole;
  for (const DocumentStarts& starts : sequences) {
    ASSERT_EQ(starts.front(), 0);
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const std::int64_t end = i + 1 < starts.size() ? starts[i + 1] : 16, here = end - starts[i];
      ASSERT_GT(here, 0);
      // The first may have begun, and the last may end, in another sequence.
      if (i > 0 && i + 1 < starts.size()) ++whole[here];
    }
  }
  EXPECT_NEAR(whole[3], 3 * whole[5], 0.2 * whole[3]);
  EXPECT_EQ(whole.size(), 2u);  // no document of 20 tokens fits
}

// A sequence that is one document costs what a sequence costs without a mask.
TEST(PackedDocuments, OneDocumentIsOneSequence) {
  for (const char* software : {"current", "torchtitan", "echelon"})
    for (int cp : {1, 4}) {
      const Workload plain = packed("", software), one = packed("8192\n", software);
      const Estimate a = StepModel(plain).estimate_seconds(on(plain, cp)),
                     b = StepModel(one).estimate_seconds(on(one, cp));
      EXPECT_DOUBLE_EQ(a.seconds, b.seconds) << software << " cp " << cp;
      EXPECT_EQ(a.traffic.cp, b.traffic.cp);
      EXPECT_DOUBLE_EQ(a.mfu, b.mfu);
    }
}

// By another way: positions, one by one, in all batches of 64 that are packed.
TEST(PackedDocuments, AllWaitForTheRankWithMost) {
  constexpr std::int64_t seq_len = 256;
  Workload work = packed("3 400\n22 100\n94 20\n256 3\n", "echelon");
  work.plan.seq_len = seq_len;
  const std::int64_t packed_sequences = PackedDocuments(work).num_sequences(),
                     batches = packed_sequences / 64;
  ASSERT_EQ(batches, 64);
  const std::vector<DocumentStarts> sequences = pack_documents(work.documents, seq_len, packed_sequences);
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none})
    for (int cp : {1, 4}) {
      Plan plan = on(work, cp);
      plan.context_balance = balance;
      const ContextLayout layout(plan);
      std::vector<std::vector<double>> held;  // by each rank of each sequence
      for (const DocumentStarts& starts : sequences) {
        std::vector<double>& ranks = held.emplace_back(static_cast<std::size_t>(cp));
        for (int r = 0; r < cp; ++r)
          for (std::int64_t p : layout.positions(r))
            ranks[static_cast<std::size_t>(r)] +=
                static_cast<double>(p - *(std::upper_bound(starts.begin(), starts.end(), p) - 1) + 1);
      }
      for (std::int64_t micro_batch : {1, 2}) {
        plan.micro_batch = micro_batch;
        const int dp = 32 / cp;
        double all = 0, longest = 0, waited = 0;
        for (std::int64_t batch = 0; batch < batches; ++batch) {
          double busiest = 0;
          for (int d = 0; d < dp; ++d) {
            double rank = 0;
            for (std::int64_t first = 0; first < 64 / dp; first += micro_batch) {
              std::vector<double> together(static_cast<std::size_t>(cp));
              for (std::int64_t k = first; k < first + micro_batch; ++k)
                for (std::size_t r = 0; r < together.size(); ++r)
                  together[r] += held[static_cast<std::size_t>(batch * 64 + d * 64 / dp + k)][r];
              rank += *std::max_element(together.begin(), together.end());
              all += std::accumulate(together.begin(), together.end(), 0.0);
            }
            waited += rank * cp;
            busiest = std::max(busiest, rank);
          }
          longest += busiest;
        }
        const PackedAttention a = PackedDocuments(work).of(plan);
        EXPECT_NEAR(a.busiest, longest * 32 / all, 1e-9);
        EXPECT_NEAR(a.in_group, waited / all, 1e-9);
        EXPECT_NEAR(a.keys, all / static_cast<double>(packed_sequences * seq_len) - 0.5, 1e-9);
        if (cp == 1) continue;
        if (balance == ContextBalance::stripe)
          EXPECT_LT(a.in_group, 1.1);
        else
          EXPECT_GT(a.in_group, 1.1);
      }
    }
}

// What is priced is expected: no draw of a small batch says what a token sees, or how uneven its ranks are.
TEST(PackedDocuments, SmallBatchesAreExpectedAsLargeOnesAre) {
  const auto priced = [](std::int64_t batch, int dp) {
    Workload work = packed("256 6000\n1024 3000\n4096 800\n8192 120\n");
    work.plan.global_batch = batch;
    Plan plan = on(work, 1);
    plan.mesh.set(Axis::dp, dp);
    return PackedDocuments(work).of(plan);
  };
  const PackedAttention one = priced(1, 1), few = priced(32, 2), many = priced(4096, 2);
  EXPECT_EQ(one.keys, many.keys);
  EXPECT_EQ(few.keys, many.keys);
  EXPECT_EQ(one.documents, many.documents);
  EXPECT_NEAR(one.busiest, 1, 1e-9);  // alone it has the mean
  EXPECT_GT(few.busiest, many.busiest);
  EXPECT_NEAR(many.busiest, 1, 0.02);
  // Of twice as many batches, within their noise, the larger of two ranks: off by the root of the samples.
  EXPECT_NEAR((priced(64, 2).busiest - 1) / (few.busiest - 1), std::sqrt(0.5), 0.15);
  EXPECT_NEAR((priced(128, 2).busiest - 1) / (few.busiest - 1), 0.5, 0.15);
}

TEST(PackedDocuments, AttentionTakesAsMuchLongerAsTheBusiestHas) {
  const Workload plain = packed(""), work = packed(mixed);
  StepModel model(work);
  const Estimate whole = StepModel(plain).estimate_seconds(on(plain, 4)),
                 e = model.estimate_seconds(on(work, 4));
  EXPECT_LT(e.seconds, whole.seconds);
  EXPECT_LT(e.documents->keys, 2000);
  EXPECT_EQ(e.documents->in_group, 1);  // Transformer Engine cuts each document
  EXPECT_GT(e.documents->busiest, 1.05);
  // A program that cuts sequences waits for its cp ranks as well.
  Workload cuts = work;
  cuts.software.context_cuts_documents = false;
  EXPECT_GT(StepModel(cuts).estimate_seconds(on(work, 4)).seconds, e.seconds);
  // In a pipeline the largest microbatch holds the others up.
  const Estimate pipeline = model.estimate_seconds(on(work, 1, 8));
  Workload even = packed("512\n");
  const Estimate same = StepModel(even).estimate_seconds(on(even, 1, 8));
  EXPECT_GT(pipeline.documents->largest, 1.3);
  EXPECT_NEAR(same.documents->largest, 1, 1e-9);
  double total = 0;
  for (double part : {pipeline.parts.compute, pipeline.parts.tp_exposed, pipeline.parts.pp_bubble,
                      pipeline.parts.dp_exposed, pipeline.parts.cp_exposed, pipeline.parts.ep_exposed,
                      pipeline.parts.optimizer, pipeline.parts.other})
    total += part;
  EXPECT_NEAR(total, pipeline.seconds, 1e-9 * total);
}

// The wait of a pipeline, against passes one after another: of microbatches of different length, in stages
// that are alike, forward passes end at their sum and once more the longest for each other stage.
TEST(PackedDocuments, APipelineWaitsForItsLargestMicrobatch) {
  const std::vector<double> seconds{3, 1, 4, 1, 5, 2};
  constexpr int stages = 4;
  std::vector<double> ends(stages, 0);
  for (double one : seconds) {
    double ready = 0;
    for (double& end : ends) ready = end = std::max(end, ready) + one;
  }
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0), mean = sum / 6;
  EXPECT_DOUBLE_EQ(ends.back(), sum + (stages - 1) * mean + (stages - 1) * (5 / mean - 1) * mean);
}

TEST(PackedDocuments, EachGetsAsManyRanksAsItNeeds) {
  EXPECT_EQ(dynamic_degree(1, 1024), 1);
  EXPECT_EQ(dynamic_degree(1024, 1024), 1);
  EXPECT_EQ(dynamic_degree(1025, 1024), 2);
  EXPECT_EQ(dynamic_degree(5000, 1024), 8);

  Workload fixed = packed(mixed), dynamic = fixed;
  dynamic.dynamic_context = true;
  const Estimate a = StepModel(fixed).estimate(on(fixed, 8)), b = StepModel(dynamic).estimate(on(dynamic, 8));
  EXPECT_LT(b.seconds, a.seconds);
  EXPECT_LT(b.traffic.cp, 0.7 * a.traffic.cp);
  EXPECT_LT(b.documents->busiest, a.documents->busiest);
  EXPECT_EQ(a.memory, b.memory);  // no rank holds more tokens
  EXPECT_EQ(a.documents->keys, b.documents->keys);
  // The shares of tokens, counted again.
  std::map<int, double> share;
  const std::int64_t sequences = PackedDocuments(fixed).num_sequences();
  for (const DocumentStarts& starts : pack_documents(fixed.documents, length, sequences))
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const std::int64_t tokens = (i + 1 < starts.size() ? starts[i + 1] : length) - starts[i];
      int ranks = 1;
      while (ranks * 1024 < tokens) ranks *= 2;
      share[ranks] += static_cast<double>(tokens) / static_cast<double>(sequences * length);
    }
  ASSERT_EQ(b.documents->degrees.size(), share.size());
  double keys = 0;
  for (const PackedAttention::Degree& degree : b.documents->degrees) {
    EXPECT_NEAR(degree.share, share[degree.ranks], 1e-9);
    keys += degree.share * degree.keys;
  }
  EXPECT_NEAR(keys, b.documents->keys, 1e-6);

  // Short documents stay on their ranks; those as long as a sequence are on all of them.
  dynamic.documents = lengths_of("1024\n");
  EXPECT_EQ(StepModel(dynamic).estimate_seconds(on(dynamic, 8)).traffic.cp, 0);
  fixed.documents = dynamic.documents = lengths_of("8192\n");
  EXPECT_DOUBLE_EQ(StepModel(dynamic).estimate_seconds(on(dynamic, 8)).seconds,
                   StepModel(fixed).estimate_seconds(on(fixed, 8)).seconds);
}

TEST(PackedDocuments, TheSearchKeepsToWhatTheProgramRuns) {
  SearchRequest r;
  r.work = packed(mixed);
  r.work.dynamic_context = true;
  r.gpus = 32;
  r.top = 5;
  const SearchResult found = search(r);
  ASSERT_FALSE(found.plans.empty());
  for (const Estimate& e : found.plans) {
    EXPECT_EQ(e.plan.mesh.pp(), 1);
    EXPECT_LE(e.plan.zero, 1);
    EXPECT_EQ(e.plan.micro_batch, 1);
    EXPECT_TRUE(not_run(r.work, e.plan).empty());
  }
  EXPECT_NE(explain_winner(found, r.work).find("of the mean attention; of the tokens"), std::string::npos);
  EXPECT_EQ(not_run(r.work, on(r.work, 4, 2)),
            std::vector<std::string>{"dynamic context parallelism beside a pipeline"});
  r.work.software = load_software("nemo-2024");
  EXPECT_EQ(not_run(r.work, on(r.work, 4)), std::vector<std::string>{"dynamic context parallelism"});
}

// This trainer cuts sequences, whatever lies in them: stripes are even then, zigzag is not.
TEST(PackedDocuments, TheSearchPicksTheBalanceOfThisTrainer) {
  SearchRequest r;
  r.work = packed(mixed, "echelon", "llama-tiny");
  r.work.precision = Precision::f32;
  r.work.plan.model.max_seq = length;
  r.work.plan.global_batch = 8;
  r.gpus = 8;
  r.top = 2;
  for (const auto& [axis, size] : {std::pair{"cp", 4}, {"dp", 2}, {"tp", 1}, {"pp", 1}}) r.pin(axis, size);
  r.pin("cp-kind", "ring");
  r.pin("zero", 1);
  const SearchResult free = search(r);
  ASSERT_EQ(free.plans.size(), 2u);
  EXPECT_EQ(free.plans[0].plan.context_balance, ContextBalance::stripe);
  EXPECT_NE(summary(free.plans[0].plan).find("cp 4 (ring, stripe)"), std::string::npos);
  r.pin("cp-balance", "zigzag");
  const SearchResult pinned = search(r);
  ASSERT_FALSE(pinned.plans.empty());
  EXPECT_EQ(pinned.plans[0].plan.context_balance, ContextBalance::zigzag);
  EXPECT_GT(pinned.plans[0].seconds, free.plans[0].seconds);
  EXPECT_NE(plan_file(free.plans[0], r.work).find("mask = 'document'"), std::string::npos);
}

// What a large batch is priced of is a part of it: the mean over many meshes stays where all of it has it.
TEST(PackedDocuments, ManyMicrobatchesAreSampled) {
  const auto busiest = [](std::int64_t batch, int dp) {
    Workload work = packed(mixed);
    work.plan.global_batch = batch;
    Plan plan = on(work, 1);
    plan.mesh.set(Axis::dp, dp);
    return PackedDocuments(work).of(plan);
  };
  // 2^18 samples are all looked at, four times and a hundred times as many are not. Off the mean by half as
  // much, and a tenth.
  const PackedAttention all = busiest(1 << 18, 64), more = busiest(1 << 20, 64),
                        most = busiest(100 << 18, 64);
  EXPECT_GT(all.busiest, 1);
  EXPECT_NEAR((more.busiest - 1) / (all.busiest - 1), 0.5, 0.1);
  EXPECT_NEAR((most.busiest - 1) / (all.busiest - 1), 0.1, 0.03);
  EXPECT_GT(more.largest, 1);
}

// Documents are bounded, not sequences: these have a million each.
TEST(PackedDocuments, OfShortOnesFewSequencesArePriced) {
  Workload work = packed("1\n");
  work.plan.seq_len = 1'000'000;
  work.plan.global_batch = 1024;
  PackedDocuments documents(work);
  EXPECT_EQ(documents.of(on(work, 4)).keys, 0.5);
  EXPECT_EQ(documents.num_sequences(), 1);
}

// Only this trainer has stripes; who cuts each document by itself has no balance to choose.
TEST(PackedDocuments, StripesAreThisTrainersAlone) {
  Workload work = packed("");
  Plan plan = on(work, 4);
  plan.context_balance = ContextBalance::stripe;
  EXPECT_EQ(not_run(work, plan), std::vector<std::string>{"cp-balance stripe"});
  plan.context_kind = ContextKind::ulysses;
  EXPECT_TRUE(not_run(work, plan).empty());
  SearchRequest r;
  r.work = packed(mixed);
  r.gpus = 32;
  r.pin("cp", 4);
  r.top = 5;
  for (const Estimate& e : search(r).plans) EXPECT_EQ(e.plan.context_balance, ContextBalance::zigzag);
}

class PackedCommand : public checks::VerbTest {
 protected:
  PackedCommand() : VerbTest("plan") { write("lengths.txt", mixed); }
};

TEST_F(PackedCommand, SaysWhatDocumentsAreAndWhatWouldGain) {  // long
  const std::string request =
      "--model llama-3-8b --machine h100 --gpus 32 --global-batch 64 --seq-len 8192 --top 1 ";
  const std::string asked = request + "--document-lengths lengths.txt --cp 16 --cp-kind ring --tp 1 --pp 1 ";
  const checks::CommandResult fixed = run(asked + "--explain"), dynamic = run(asked + "--dynamic-cp --json");
  EXPECT_EQ(fixed.status, 0) << fixed.output;
  for (const char* words : {"documents: ", "keys, of 4096 without the mask", "(which cut each document)",
                            "itself with --dynamic-cp: ", "none was measured of packed documents"})
    EXPECT_NE(fixed.output.find(words), std::string::npos) << words << " in: " << fixed.output;
  EXPECT_EQ(dynamic.status, 0);
  for (const char* words : {"\"dynamic_cp\":true", "\"busiest_over_mean\":", "\"share_of_tokens\":"})
    EXPECT_NE(dynamic.output.find(words), std::string::npos) << words << " in: " << dynamic.output;
  refused(request + "--dynamic-cp", {"--dynamic-cp", "without --document-lengths"});
  refused(request + "--document-lengths none.txt", {"--document-lengths", "none.txt"});
  refused(request + "--document-lengths lengths.txt --software megatron-2021",
          {"--document-lengths", "megatron-2021 computes all scores"});
  refused("--gpus 24 --seq-len 8190 --document-lengths lengths.txt --dynamic-cp --cp 3",
          {"--cp 3", "groups of 1, 2, 4, 8"});
  refused(request + "--document-lengths lengths.txt --launch-for torchtitan --launch-out d",
          {"--launch-for", "with --document-lengths"});
  for (const char* by : {"", " --dynamic-cp"})
    refused(asked + "--cp-balance stripe" + by, {"--cp-balance", "by itself"});
  EXPECT_EQ(run(asked + "--out plan.toml").status, 0);
  refused("--plan plan.toml", {"--mask document", "--document-lengths"});
  EXPECT_EQ(run("--plan plan.toml --document-lengths lengths.txt").status, 0);
  std::string plan = read("plan.toml");
  plan.replace(plan.find("cp-balance = 'zigzag'"), 21, "cp-balance = 'stripe'");
  write("stripe.toml", plan);
  refused("--plan stripe.toml --document-lengths lengths.txt",
          {"--cp-balance stripe: has no effect", "current cuts by itself", "legal: zigzag"});
  refused("--plan stripe.toml --document-lengths lengths.txt --dynamic-cp",
          {"--cp-balance stripe", "--dynamic-cp"});
  EXPECT_EQ(run("--plan stripe.toml --document-lengths lengths.txt --software echelon").status, 0);
  // What the refusal advises is accepted.
  for (const char* by : {"", " --dynamic-cp"})
    EXPECT_EQ(
        run("--plan stripe.toml --document-lengths lengths.txt --cp-balance zigzag" + std::string(by)).status,
        0);
  plan = read("stripe.toml");
  const std::size_t kind = plan.find("cp-kind = 'ring'");
  ASSERT_NE(kind, std::string::npos);
  plan.replace(kind, 16, "cp-kind = 'ulysses'");
  write("ulysses.toml", plan);
  const checks::CommandResult ulysses =
      run("--plan ulysses.toml --document-lengths lengths.txt --cp 8 --dp 4 --micro-batch 1");
  EXPECT_EQ(ulysses.status, 0) << ulysses.output;  // where no balance acts
}

class PackingSimulated : public checks::VerbTest {
 protected:
  PackingSimulated() : VerbTest("simulate") { write("lengths.txt", mixed); }
};

TEST_F(PackingSimulated, SaysHowEvenlyEachBalanceSharesOut) {
  const checks::CommandResult text = run("--document-lengths lengths.txt --seq-len 8192 --cp 4"),
                              object = run("--document-lengths lengths.txt --seq-len 8192 --cp 4 --json");
  EXPECT_EQ(text.status, 0) << text.output;
  const auto found = nlohmann::json::parse(object.output);
  const auto mean = [&](const char* balance) {
    return found["busiest_over_mean"][balance]["mean"].get<double>();
  };
  EXPECT_LT(mean("stripe"), 1.02);
  EXPECT_GT(mean("zigzag"), 1.1);
  EXPECT_GT(mean("none"), mean("zigzag"));
  double share = 0;
  for (const auto& one : found["share_of_tokens"]) share += one["share"].get<double>();
  EXPECT_NEAR(share, 1, 1e-12);
  EXPECT_NE(text.output.find(fmt::format("zigzag     {:>6.2f}", mean("zigzag"))), std::string::npos)
      << text.output;
  refused("--cp 4", {"--cp", "add --document-lengths"});
  // No groups of powers of two add up to three ranks.
  const checks::CommandResult three = run("--document-lengths lengths.txt --seq-len 6144 --cp 3"),
                              in_json = run("--document-lengths lengths.txt --seq-len 6144 --cp 3 --json");
  EXPECT_EQ(three.output.find("as many ranks as it needs"), std::string::npos) << three.output;
  EXPECT_EQ(in_json.output.find("share_of_tokens"), std::string::npos) << in_json.output;
  EXPECT_EQ(three.status + in_json.status, 0);
  write("short.txt", "1\n");
  refused("--document-lengths short.txt --seq-len 1000000 --sequences 100",
          {"--seq-len 1000000: 100 sequences", "about 1e+08 documents", "at most 1e+07"});
  refused("--document-lengths lengths.txt --pp 4", {"--pp", "another simulation"});
  refused("--document-lengths lengths.txt --seq-len 100 --cp 4",
          {"--seq-len 100: must be a multiple of 8 (2 x --cp), and at most 3906250 with 256 sequences"});
}

}  // namespace
}  // namespace echelon::packed_documents_test
