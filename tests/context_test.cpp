#include <numeric>
#include <set>

#include "base/begins_document.h"
#include "context_runs.h"
#include "overlap_runs.h"
#include "parallel/whole_copies.h"
#include "plan/memory.h"
#include "rank_runs.h"
#include "spec/packed_documents.h"
#include "train/dry_run.h"

namespace echelon::context_test {
namespace {

using namespace checks;

TEST(ContextLayout, EveryPositionIsOnOneRankAndWorkIsCounted) {
  for (int cp : {1, 2, 3, 4})
    for (const ContextCase& c : context_cases(cp)) {
      const Plan plan = context_plan(Family::llama, c);
      SCOPED_TRACE(describe_context(plan));
      const ContextLayout layout(plan);
      std::multiset<std::int64_t> all;
      std::vector<std::int64_t> pairs(static_cast<std::size_t>(layout.ring()), 0);
      for (int rank = 0; rank < cp; ++rank) {
        const auto positions = layout.positions(rank);
        EXPECT_EQ(static_cast<std::int64_t>(positions.size()), layout.tokens_here());
        all.insert(positions.begin(), positions.end());
        for (std::int64_t p : positions) pairs[static_cast<std::size_t>(layout.ring_index(rank))] += p + 1;
      }
      std::vector<std::int64_t> expected(context_length);
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(std::vector<std::int64_t>(all.begin(), all.end()), expected);
      for (int r = 0; r < layout.ring(); ++r)
        EXPECT_EQ(layout.causal_pairs(r), pairs[static_cast<std::size_t>(r)]);
    }
}

// Every key that a query sees is in exactly one pair of runs, and pairs hold nothing else.
TEST(ContextLayout, PairsAreTheCausalMask) {
  for (int cp : {2, 3, 4})
    for (const ContextCase& c : context_cases(cp)) {
      const ContextLayout layout(context_plan(Family::llama, c));
      for (int own = 0; own < layout.ring(); ++own)
        for (int source = 0; source < layout.ring(); ++source) {
          const auto queries = layout.runs(own), keys = layout.runs(source);
          std::set<std::pair<std::int64_t, std::int64_t>> seen, expected;
          for (const auto& pair : layout.pairs(own, source))
            for (std::int64_t i = 0; i < queries[pair.queries].size; ++i)
              for (std::int64_t j = 0; j < keys[pair.keys].size && j <= i + pair.offset; ++j)
                EXPECT_TRUE(seen.insert({queries[pair.queries].at(i), keys[pair.keys].at(j)}).second);
          for (const PositionRun& q : queries)
            for (const PositionRun& k : keys)
              for (std::int64_t i = 0; i < q.size; ++i)
                for (std::int64_t j = 0; j < k.size; ++j)
                  if (k.at(j) <= q.at(i)) expected.insert({q.at(i), k.at(j)});
          EXPECT_EQ(seen, expected);
        }
    }
}

// Else the runs of a rank would be shorter than its part of a sequence, or have nothing.
TEST(ContextLayout, RefusesLengthsThatDoNotDivide) {
  for (const auto& [kind, balance, unit] : {std::tuple{ContextKind::ring, ContextBalance::zigzag, 8},
                                            {ContextKind::ring, ContextBalance::stripe, 4},
                                            {ContextKind::allgather, ContextBalance::none, 4},
                                            {ContextKind::ulysses, ContextBalance::zigzag, 4}})
    for (std::int64_t length = 0; length <= 17; ++length) {
      Plan plan = context_plan(Family::llama, {kind, balance, 4, 1});
      plan.seq_len = length;
      if (length > 0 && length % unit == 0)
        EXPECT_NO_THROW(ContextLayout{plan}) << describe_context(plan) << " length " << length;
      else
        EXPECT_THROW(ContextLayout{plan}, InvariantError) << describe_context(plan) << " length " << length;
    }
}

// Each run of one size, and together all positions in their order.
TEST(PositionRuns, CoverASequence) {
  for (int cp : {1, 2, 3, 4, 6})
    for (int ulysses = 1; ulysses <= cp; ++ulysses)
      for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none}) {
        if (cp % ulysses != 0) continue;
        Plan plan = context_plan(Family::llama, {ContextKind::hybrid, balance, cp, ulysses});
        const std::int64_t unit = length_unit(plan);
        for (plan.seq_len = unit; plan.seq_len <= 4 * unit; plan.seq_len += unit) {
          SCOPED_TRACE(describe_context(plan));
          const ContextLayout layout(plan);
          const PositionRuns runs(plan);
          ASSERT_EQ(std::ssize(runs.order), std::int64_t{cp} * runs.of_rank);
          const std::int64_t size = layout.tokens_here() / runs.of_rank;
          std::int64_t next = 0;
          for (const PositionRuns::Place& place : runs.order)
            for (std::int64_t i = 0; i < size; ++i)
              ASSERT_EQ(layout.positions(place.cp_rank).at(static_cast<std::size_t>(place.run * size + i)),
                        next++);
          EXPECT_EQ(next, plan.seq_len);
        }
      }
}

TEST(ContextLayout, ZigzagAndStripeBalanceACausalMask) {
  const auto imbalance = [](ContextBalance balance, int cp) {
    Plan plan = context_plan(Family::llama, {ContextKind::ring, balance, cp, 1});
    plan.seq_len = 4096;
    return ContextLayout(plan).imbalance();
  };
  for (int cp : {2, 4, 8, 16}) {
    EXPECT_EQ(imbalance(ContextBalance::zigzag, cp), 1);
    EXPECT_LE(imbalance(ContextBalance::stripe, cp), 1.05);
    EXPECT_NEAR(imbalance(ContextBalance::none, cp), 2 - 1.0 / cp, 0.01);
  }
}

// What the planner weighs ranks by is what their kernels are called for: pairs of a query and a key that it
// sees, of one head.
TEST(ContextParallel, KernelsSeeThePairsThatAreCountedOfPackedDocuments) {
  const DocumentLengths lengths = read_document_lengths("3 5\n7 4\n20 3\n130 1\n", "lengths");
  constexpr std::int64_t length = 192, batch = 3;
  const std::vector<DocumentStarts> packed = pack_documents(lengths, length, batch);
  double uneven = 1;
  for (int cp : {2, 3, 4})
    for (const ContextCase& c : context_cases(cp))
      for (std::int64_t window : {0, 12}) {
        Plan plan = context_plan(Family::llama, c);
        plan.seq_len = plan.model.max_seq = length;
        plan.model.window.size = window;
        plan.mask = AttentionMask::document;
        SCOPED_TRACE(fmt::format("{} window {}", describe_context(plan), window));
        const ContextLayout layout(plan);
        const SampleSource source = [&](std::int64_t, std::int64_t sample, std::int32_t* tokens,
                                        std::int32_t* targets) {
          std::fill_n(tokens, length, 0);
          std::fill_n(targets, length, 0);
          // By the token that ends one, or as samples say that know it, whose first token says so too.
          const bool says = sample % 2 == 1;
          if (says) tokens[0] |= begins_document;
          for (std::int64_t start : packed[static_cast<std::size_t>(sample)])
            if (says)
              tokens[start] |= begins_document;
            else if (start > 0)
              tokens[start - 1] = plan.document_end;
        };
        std::vector<std::int64_t> seen(static_cast<std::size_t>(cp)), counted(seen.size());
        ThreadWorld world(cp, patience);
        run_ranks(world, [&](int index) {
          Arena arena;
          const auto counting = std::make_shared<SleepingKernels>(1, milliseconds(0), Time());
          Kernels kernels(counting);
          const Rank rank(world, plan.mesh, index, DType::f32, arena, kernels);
          const Heads heads(24, 4, 2);
          const ContextParallel context(rank, plan, heads);
          const Microbatch microbatch = load_microbatch(rank, plan, 0, {0, batch}, source);
          const Sequences sequences =
              window > 0 ? Sequences{batch, microbatch.window_starts} : microbatch.sequences;
          const std::int64_t rows = batch * plan.tokens_here();
          const Tensor qkv = rank.activation({rows, heads.qkv_width()}),
                       out = rank.activation({rows, heads.width()}), lse = rank.activation({rows * 24});
          context.forward(sequences, context.enter(sequences, qkv), {}, out, lse);
          const auto r = static_cast<std::size_t>(index);
          seen[r] = counting->forward_pairs();
          for (const DocumentStarts& starts : packed)
            counted[r] += layout.document_pairs(layout.ring_index(index), starts, window);
        });
        EXPECT_EQ(seen, counted);
        const auto [least, most] = std::minmax_element(seen.begin(), seen.end());
        uneven = std::max(uneven, static_cast<double>(*most) / static_cast<double>(*least));
      }
  EXPECT_GT(uneven, 1.3);  // or there would be nothing to price
}

TEST(ContextParallel, EqualsOneRankInEveryKind) {
  for (int cp : {2, 3}) expect_every_kind(cp);
}

// The whole product of these is in the slow suite.
TEST(ContextParallel, EqualsOneRankWithTheOtherAxes) {
  for (const ContextCase& c : context_cases(2))
    for (Plan plan : combined_with_the_other_axes(context_plan(Family::llama, c))) {
      plan.mask = AttentionMask::document;
      expect_context_pass(plan);
    }
}

TEST(ContextParallel, EqualsOneRankUnderPipelinesAndRecompute) {
  for (const char* schedule : {"interleaved", "zb-v"})
    for (const Recompute& recompute : {Recompute::none, Recompute::selective, Recompute::full})
      expect_context_pass(under_a_pipeline(ContextKind::ring, schedule, recompute));
  expect_context_pass(under_a_pipeline(ContextKind::ulysses, "dualpipe", Recompute::selective));
}

TEST(ContextParallel, EqualsOneRankOnCpuKernels) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (const ContextCase& c : context_cases(4)) {
    Plan plan = context_plan(Family::llama, c, DType::f32);
    plan.mask = AttentionMask::document;
    expect_context_pass(plan);
  }
}

// A stream of steps, 2BW, sends its microbatches one behind the other.
TEST(ContextParallel, EqualsOneRankWhereTheScheduleDoesNotFlush) {
  Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, 2, 1});
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = "2bw";
  plan.micro_batch = 1;
  plan.global_batch = 4;
  const VerifyReport report = verify(verify_request(plan, 3, 0));
  EXPECT_TRUE(report.pass) << to_json(report, plan);
}

// Two documents in one sequence are two sequences: RoPE sees distances alone.
TEST(ContextParallel, DocumentsAreSequencesOfTheirOwn) {
  const std::int64_t half = context_length / 2;
  const auto token = [](std::int64_t sample, std::int64_t t) {
    return static_cast<std::int32_t>(t + 1 == half ? 5 : 6 + (7 * sample + 11 * t + t * t) % 40);
  };
  const auto loss = [&](Plan plan, std::int64_t documents) {  // in a sample
    plan.seq_len = documents * half;
    const SampleSource samples = [&](std::int64_t, std::int64_t sample, std::int32_t* tokens,
                                     std::int32_t* targets) {
      for (std::int64_t t = 0; t < documents * half; ++t) {
        tokens[t] = token(documents * sample + t / half, t % half);
        targets[t] = (t + 1) % half == 0 ? -1 : token(documents * sample + t / half, t % half + 1);
      }
    };
    double result = 0;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      const double mean = trainer.evaluate(4 / documents, samples);
      if (rank.index() == 0) result = mean;
    });
    return result;
  };
  Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, 1, 1});
  const double apart = loss(plan, 1);
  for (const ContextCase& c : context_cases(2)) {
    plan = context_plan(Family::llama, c);
    plan.model.num_kv_heads = 4;
    EXPECT_GT(std::abs(loss(plan, 2) - apart), 1e-6);
    plan.mask = AttentionMask::document;
    EXPECT_NEAR(loss(plan, 2), apart, 1e-13) << describe_context(plan);
  }
}

// Predicted by the formulas of the papers, stated here once more: b bytes of keys or values of a rank and
// layer.
TEST(ContextParallel, SendsWhatTheFormulasSay) {  // long
  for (int cp : {2, 3, 4})
    for (const ContextCase& c : context_cases(cp)) {
      Plan plan = context_plan(Family::gpt2, c);
      plan.global_batch = plan.micro_batch = 2;
      SCOPED_TRACE(describe_context(plan));
      const std::int64_t b = 2 * (context_length / cp) * plan.model.kv_width() * 8;
      const std::int64_t layers = plan.model.num_layers, ring = cp / ContextLayout(plan).ulysses();
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        trainer.compute_gradients(0, random_samples(plan));
        const Traffic& sent = rank.traffic();
        if (c.kind == ContextKind::ring) {
          EXPECT_EQ(sent.bytes(Axis::cp), layers * (cp - 1) * (2 * b + 4 * b));
        }
        if (c.kind == ContextKind::allgather) {
          EXPECT_EQ(sent.at(Axis::cp, Verb::all_gather).bytes, layers * (cp - 1) * (2 * b + 2 * b));
          EXPECT_EQ(sent.at(Axis::cp, Verb::reduce_scatter).bytes, layers * (cp - 1) * 2 * b);
        }
        if (c.kind == ContextKind::ulysses) {  // every head is a key/value head here: b is a matrix
          const std::int64_t delta = b / plan.model.head_dim;
          EXPECT_EQ(sent.at(Axis::cp, Verb::all_to_all).calls, layers * (4 + 5));
          EXPECT_EQ(sent.bytes(Axis::cp), layers * (8 * b + delta) / cp * (cp - 1));
        }
        if (c.kind == ContextKind::hybrid) {
          EXPECT_EQ(sent.at(Axis::cp, Verb::send).bytes, layers * (ring - 1) * (2 * b + 4 * b));
        }
      });
    }
}

// What a rank keeps is that of T / cp tokens. The output layer's chunk of logits has a fixed size beside it.
TEST(ContextParallel, ActivationsFallAsOneOverCp) {
  const auto activations = [](const char* model, ContextKind kind, int cp, std::int64_t seq_len) {
    Plan plan;
    plan.model = load_model(model);
    plan.model.max_seq = 1 << 20;
    plan.mesh.set(Axis::cp, cp);
    plan.context_kind = kind;
    plan.seq_len = seq_len;
    return static_cast<double>(predict_memory(plan, PipelineLayout(plan))[MemoryCategory::activations]);
  };
  for (ContextKind kind : {ContextKind::ring, ContextKind::ulysses})
    for (const auto& [model, length] : {std::pair{"llama-tiny", 1 << 12}, {"llama-42m", 1 << 17}})
      for (int cp : {2, 4, 8}) {
        // Beyond its key/value heads Ulysses keeps copies of them.
        if (kind == ContextKind::ulysses && cp > load_model(model).num_kv_heads) continue;
        EXPECT_NEAR(activations(model, kind, cp, length) * cp / activations(model, kind, 1, length), 1, 0.05)
            << model << " cp " << cp;
        EXPECT_NEAR(activations(model, kind, cp, length * cp) / activations(model, kind, 1, length), 1, 0.05)
            << model << " cp " << cp;
      }
}

TEST(ContextParallel, RefusesWhatCannotBeCut) {
  const auto refusal = [](const auto& change) {
    Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, 4, 1});
    change(plan);
    return message_of<RequestError>([&] { validate(plan); });
  };
  expect_contains(refusal([](Plan& p) { p.seq_len = 45; }),
                  {"--seq-len 45", "--cp 4", "zigzag", "legal: 40, 48"});
  expect_contains(refusal([](Plan& p) { p.seq_len = 5; }), {"--seq-len 5", "legal: 8"});
  expect_contains(refusal([](Plan& p) { p.context_kind = ContextKind::ulysses, p.model.num_kv_heads = 3; }),
                  {"--cp 4", "--cp-kind ulysses", "24 query and 3 key/value", "legal: 1, 3, 6, 12, 24"});
  expect_contains(refusal([](Plan& p) { p.context_kind = ContextKind::hybrid, p.ulysses = 3; }),
                  {"--cp-ulysses 3", "legal: 1, 2, 4"});
  // Groups that another kind does not have, and cp 1 neither, are none of its business.
  Plan ring = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, 4, 2});
  EXPECT_NO_THROW(validate(ring));
  ring.context_kind = ContextKind::hybrid;
  ring.mesh.set(Axis::cp, 1);
  EXPECT_NO_THROW(validate(ring));
  expect_contains(refusal([](Plan& p) { p.mask = AttentionMask::document, p.document_end = -1; }),
                  {"--mask document", "--document-end"});
  expect_contains(refusal([](Plan& p) { p.document_end = 53; }), {"--document-end 53", "0 to 52"});
}

}  // namespace
}  // namespace echelon::context_test
