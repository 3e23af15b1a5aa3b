// Tiny models of any shape on meshes of any shape, drawn at random: single heads of one number, vocabularies
// of one word, sequences of one token, weights so large that sums cancel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "expert_runs.h"
#include "schedule/pipeline_layout.h"
#include "verify/verify.h"

namespace echelon::checks {

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : random_(seed, Stream::test, 7) {}
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random_.below(next_++, values.size())];
  }
  bool chance(std::uint64_t percent) { return random_.below(next_++, 100) < percent; }

 private:
  Philox random_;
  std::uint64_t next_ = 0;
};

inline ModelSpec random_model(Draws& draw) {
  const auto pick = [&](std::initializer_list<std::int64_t> values) { return draw.one_of(values); };
  ModelSpec m;
  const std::string kind = draw.one_of<const char*>({"gpt2", "llama", "llama", "mixtral", "deepseek"});
  m.name = "random-" + kind;
  m.family = kind == "gpt2" ? Family::gpt2 : Family::llama;
  m.activation = usual_activation(m.family);
  m.num_layers = pick({1, 1, 2, 3, 4});
  m.num_heads = pick({1, 1, 2, 2, 4});
  m.head_dim = kind == "gpt2" ? pick({1, 2, 2, 4}) : pick({2, 2, 4});
  m.hidden = kind == "gpt2" || draw.chance(50) ? m.num_heads * m.head_dim : pick({1, 1, 2, 3, 4, 8});
  m.num_kv_heads = kind == "gpt2" || draw.chance(50) ? m.num_heads : 1;
  m.mlp_hidden = pick({1, 2, 3, 8});
  m.vocab = pick({1, 1, 2, 3, 5, 17});
  m.max_seq = 16;
  m.tied_embedding = draw.chance(40);
  m.norm_eps = draw.one_of({1e-5, 1e-6, 1e-12});
  m.init_std = draw.one_of({0.02, 0.07, 0.5, 2.0});
  if (kind != "mixtral" && kind != "deepseek") return m;
  m.experts = kind == "mixtral" ? Experts::mixtral : Experts::deepseek;
  m.num_experts = pick({1, 2, 3, 4, 4});
  m.experts_per_token = std::min(m.num_experts, pick({1, 2}));
  m.expert_hidden = pick({1, 2, 4});
  if (m.experts == Experts::mixtral) m.mlp_hidden = m.expert_hidden;
  if (m.experts == Experts::deepseek) {
    m.num_shared_experts = pick({0, 1});
    m.shared_gate = m.num_shared_experts > 0 && m.vocab % 2 == 1;
    m.router.scores = draw.one_of({RouterScores::softmax, RouterScores::sigmoid});
    m.num_dense_layers = m.num_layers > 1 ? pick({0, 1}) : 0;
  }
  return m;
}

inline VerifyRequest random_request(std::uint64_t seed) {
  Draws draw(seed);
  VerifyRequest request;
  Plan& plan = request.plan;
  plan.model = random_model(draw);
  const ModelSpec& m = plan.model;
  const std::int64_t widest = std::min(
      {m.num_heads, m.vocab, m.mlp_hidden, m.experts == Experts::none ? m.mlp_hidden : m.expert_hidden});
  int tp = draw.one_of({1, 2, 4});
  while (tp > widest || m.num_heads % tp != 0) tp /= 2;
  plan.mesh.set(Axis::tp, tp);
  plan.mesh.set(Axis::dp, draw.one_of({1, 2, 2, 3}));
  plan.mesh.set(Axis::pp, m.num_layers > 1 ? draw.one_of({1, 1, 2}) : 1);
  plan.mesh.set(Axis::cp, draw.one_of({1, 1, 2}));
  plan.sequence_parallel = tp > 1 && draw.chance(50);
  plan.seq_len = plan.mesh.size(Axis::cp) > 1 ? draw.one_of<std::int64_t>({4, 8})
                                              : draw.one_of<std::int64_t>({1, 1, 2, 4, 7});
  plan.micro_batch = draw.one_of<std::int64_t>({1, 1, 2});
  plan.global_batch =
      plan.micro_batch * plan.mesh.size(Axis::dp) * (plan.mesh.size(Axis::pp) > 1 ? 4 : draw.one_of({1, 2}));
  plan.precision = has_cpu_kernels() ? draw.one_of({DType::f32, DType::f32, DType::f64}) : DType::f64;
  plan.zero = plan.mesh.size(Axis::dp) > 1 ? draw.one_of({0, 0, 1, 2, 3}) : 0;
  if (plan.mesh.size(Axis::pp) > 1) {
    plan.schedule = m.tied_embedding || plan.zero > 0
                        ? draw.one_of<const char*>({"1f1b", "gpipe", "zb-h1"})
                        : draw.one_of<const char*>({"1f1b", "gpipe", "zb-h1", "pipedream", "2bw"});
    if (m.num_layers == 4 && draw.chance(50)) plan.schedule = draw.one_of<const char*>({"zb-v", "dualpipev"});
    plan.optimizer_barrier = plan.schedule != "1f1b" || plan.zero > 0 || draw.chance(60);
  }
  if (m.num_expert_layers() > 0) {
    if (draw.chance(30)) plan.balancing.expert_loss = 0.1;
    if (draw.chance(20)) plan.balancing.capacity = draw.one_of({1.0, 1.25});
    if (draw.chance(50)) plan.balancing.drop = DropPolicy::position;
    if (draw.chance(20) && plan.optimizer_barrier) plan.balancing.bias_rate = 0.01;
    if (draw.chance(30) && plan.mesh.dp_cp_size() % 2 == 0 && m.num_experts % 2 == 0) plan.mesh.ep = 2;
  }
  request.optimizer.warmup_steps = 0;
  request.optimizer.eps = 1e-5;  // as `echelon verify` has it
  request.run.timeout = patience;
  request.steps = 2;
  request.seed = seed;
  if (!flushes(plan)) request.optimizer.clip = 0;
  return request;
}

inline std::string describe_random(const VerifyRequest& r) {
  const ModelSpec& m = r.plan.model;
  return fmt::format("seed {}: {}, layers {} hidden {} mlp {} vocab {} T {} init {} eps {} of {} experts {}",
                     r.seed, describe_experts(r.plan), m.num_layers, m.hidden, m.mlp_hidden, m.vocab,
                     r.plan.seq_len, m.init_std, m.norm_eps, m.num_experts, m.expert_hidden);
}

// Visits the requests of seeds [first, first + count) that verify() does not refuse, and returns how many
// these are.
template <class Visit>
int for_each_random_request(std::uint64_t first, int count, const Visit& visit) {
  int visited = 0;
  for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(count); ++seed) {
    VerifyRequest request = random_request(seed);
    try {
      validate(request);
    } catch (const RequestError&) {
      continue;
    }
    SCOPED_TRACE(describe_random(request));
    visit(request);
    ++visited;
  }
  return visited;
}

}  // namespace echelon::checks
