// Plans with context parallelism that are small and cut unevenly in every other way.
#pragma once

#include "case_choice.h"
#include "pipeline_runs.h"

namespace echelon::checks {

inline constexpr std::int64_t context_length = 48;  // divides by 2 cp for cp 2, 3, 4 and 6

struct ContextCase {
  ContextKind kind = ContextKind::ring;
  ContextBalance balance = ContextBalance::zigzag;
  int cp = 2, ulysses = 1;
};

inline std::vector<ContextCase> context_cases(int cp) {
  std::vector<ContextCase> cases{{ContextKind::ulysses, ContextBalance::zigzag, cp, 1}};
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none}) {
    cases.push_back({ContextKind::ring, balance, cp, 1});
    cases.push_back({ContextKind::allgather, balance, cp, 1});
    if (cp == 4) cases.push_back({ContextKind::hybrid, balance, cp, 2});
  }
  return cases;
}

// Three sequences in microbatches of two, 24 heads: they divide over tp 2 x cp 2, 3, 4. With cp 4 key/value
// heads are fewer than the ranks of Ulysses.
inline Plan context_plan(Family family, const ContextCase& c, DType dtype = DType::f64) {
  ModelSpec model = family == Family::gpt2 ? odd_gpt2(true) : odd_llama();
  model.hidden = 48;
  model.num_heads = 24;
  model.head_dim = 2;
  model.num_kv_heads = family == Family::gpt2 ? 24 : c.cp == 3 ? 6 : 4;
  model.max_seq = context_length;
  Plan plan = odd_plan(model, 1, 1, false, dtype);
  plan.mesh.set(Axis::cp, c.cp);
  plan.context_kind = c.kind;
  plan.context_balance = c.balance;
  plan.ulysses = c.ulysses;
  plan.seq_len = context_length;
  plan.global_batch = 3;
  plan.document_end = 5;
  return plan;
}

inline std::string describe_context(const Plan& p) {
  return fmt::format("{} cp {} {} of {} {} {} pp {} {} zero {}", describe(p), p.mesh.size(Axis::cp),
                     name_of(p.context_kind), p.ulysses, name_of(p.context_balance), name_of(p.mask),
                     p.mesh.size(Axis::pp), p.schedule, p.zero);
}

inline void expect_context_pass(const Plan& plan) {
  if (!is_taken()) return;
  SCOPED_TRACE(describe_context(plan));
  const VerifyReport report = verified(plan);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  if (plan.precision == DType::f64) {
    EXPECT_LE(report.loss_max_rel_diff, 1e-10);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  }
}

// What each kind is combined with, beside nothing.
inline std::vector<Plan> combined_with_the_other_axes(const Plan& plan) {
  std::vector<Plan> plans;
  const auto add = [&](const auto& change) {
    plans.push_back(plan);
    change(plans.back());
  };
  add([](Plan& p) { p.mesh.set(Axis::tp, 2), p.sequence_parallel = true; });
  add([](Plan& p) { p.mesh.set(Axis::pp, 2); });
  add([](Plan& p) { p.mesh.set(Axis::dp, 2); });
  add([](Plan& p) { p.zero = 3; });
  add([](Plan& p) { p.mesh.set(Axis::dp, 2), p.zero = 3; });
  return plans;
}

inline Plan under_a_pipeline(ContextKind kind, const char* schedule, Recompute recompute) {
  Plan plan = context_plan(Family::gpt2, {kind, ContextBalance::zigzag, 2, 1});
  plan.model.num_layers = 4;
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = schedule;
  plan.recompute = recompute;
  plan.micro_batch = 1;
  plan.global_batch = 4;
  return plan;
}

// Both families, with documents kept apart and without.
inline void expect_every_kind(int cp) {
  for (const ContextCase& c : context_cases(cp))
    for (Family family : {Family::gpt2, Family::llama})
      for (AttentionMask mask : {AttentionMask::causal, AttentionMask::document}) {
        Plan plan = context_plan(family, c);
        plan.mask = mask;
        expect_context_pass(plan);
      }
}

}  // namespace echelon::checks
