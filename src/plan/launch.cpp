#include "plan/launch.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "plan/launch_parts.h"

namespace echelon {
namespace {

struct Launcher {
  std::string program;
  const char* software;  // the preset that says what it can run
  std::vector<LaunchFile> (*files)(const LaunchRequest&);
};
const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> list{{"megatron-core", "current", launch_megatron_core},
                                          {"megatron-bridge", "current", launch_megatron_bridge},
                                          {"torchtitan", "torchtitan", launch_torchtitan},
                                          {"nanotron", "nanotron", launch_nanotron},
                                          {"deepspeed", "deepspeed", launch_deepspeed}};
  return list;
}

}  // namespace

const std::vector<std::string>& launched_programs() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Launcher& one : launchers()) all.push_back(one.program);
    return all;
  }();
  return names;
}

std::vector<LaunchFile> launch_files(const std::string& program, const Estimate& best, const Workload& work) {
  for (const Launcher& one : launchers())
    if (one.program == program) {
      const LaunchRequest request{program, best, work};
      check_launched(request);
      // The plan may have been searched for another program.
      if (const auto refusal = shape_refusal(best.plan, runner_of(load_software(one.software))))
        not_launched(request, "{}", sentence(best.plan, *refusal));
      return one.files(request);
    }
  refuse("--launch-for {}: no such program; legal: {}", program, fmt::join(launched_programs(), ", "));
}

void check_launched(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const int host = r.work.machine.devices_of_host();
  if (plan.mesh.num_ranks() > host && plan.mesh.num_ranks() % host != 0)
    not_launched(r, "{} ranks are not whole hosts of {}; give --gpus a multiple", plan.mesh.num_ranks(),
                 host);
  if (plan.optimizer != OptimizerKind::adamw)
    not_launched(r, "--optimizer {}: is not written for this program; legal: adamw", name_of(plan.optimizer));
  if (plan.global_batch % (plan.micro_batch * plan.mesh.dp()) != 0)
    not_launched(r,
                 "--global-batch {}: each rank needs whole microbatches; legal: multiples of {} "
                 "(--micro-batch {} times --dp {})",
                 plan.global_batch, plan.micro_batch * plan.mesh.dp(), plan.micro_batch, plan.mesh.dp());
  if (plan.recompute.kinds().size() > 1)
    not_launched(r, "--recompute {}: makes the same again on each pipeline rank",
                 recompute_name(plan.recompute));
}

void check_plain_llama(const LaunchRequest& r, bool is_megatron) {
  const ModelSpec& m = r.model();
  const bool is_hybrid = is_megatron && !m.layer_pattern.empty(),
             runs_latent = is_megatron && !is_hybrid && m.latent_attention();
  ScaleSpec factors = m.scales;
  if (m.latent_attention()) factors.attention = 0;  // its own, which YaRN sets
  const auto lacks = [&](bool has, const char* what) {
    if (has) not_launched(r, "--model {}: has {}, which is not written for this program", m.name, what);
  };
  lacks(m.family == Family::neox, "GPT-NeoX's layers");
  lacks(m.window.size > 0, "layers with windows");
  lacks(m.norm_place != NormPlace::before, "norms behind its blocks");
  lacks(m.qk_norm_whole, "norms over all queries");
  lacks(m.qk_norm_turned, "norms of queries and keys behind their rotation");
  lacks(m.rope.query_growth != 0, "queries that grow with their position");
  lacks(m.caps.attention > 0 || m.caps.logits > 0, "soft caps");
  lacks(!(factors == ScaleSpec{}), "factors of Granite's kind");
  lacks(m.rope.unturned_every > (is_hybrid ? 1 : 0), "layers without positions");
  lacks(m.norms_less_one, "Gemma's norms");
  lacks(m.family == Family::llama && m.norm_kind != NormKind::rms,
        m.norm_kind == NormKind::rms_plain ? "norms without weights" : "LayerNorm");
  lacks(m.alibi, "ALiBi");
  lacks(m.learned_positions, "learned positions in layers of Llama's kind");
  lacks(m.activation == Activation::relu, "ReLU");
  lacks(m.activation == Activation::gelu_erf, "GELU (erf form)");
  lacks(m.activation == Activation::geglu, "GELU with a gate");
  lacks(m.embedding_norm, "a norm behind the embedding");
  lacks(m.parallel_residual, "attention and MLP of the same input");
  lacks(m.interleaved_rope, "rotary positions that turn neighbours");
  lacks(m.latent_attention() && !runs_latent, "latent attention");
  lacks(!is_hybrid && m.state_space.heads > 0, "layers with a state space");
  lacks(m.state_space.is_delta(), "layers of the gated delta rule");
  lacks(m.short_conv.kernel > 0, "layers with a short convolution");
  lacks(m.router.epsilon > 0, "weights of experts that are divided by more than their sum");
  lacks(m.attention_gate, "gates of what attention makes");
  lacks(!is_hybrid && !m.layer_pattern.empty(), "layers of one part each");
  lacks(!is_hybrid && m.expert_latent > 0, "tokens that are narrower on their way to experts");
  lacks(!is_hybrid && m.experts != Experts::none && !is_gated(m.expert_activation()),
        "experts without a gate");
  lacks(m.activation == Activation::xielu, "xIELU");
  lacks(m.num_mtp_layers > 0, "a module that predicts one more token");
  lacks(m.attention_sinks, "attention sinks");
  lacks(m.attention_out_bias, "a bias behind attention");
  lacks(m.mlp_bias, "biases of MLPs");
  lacks(m.output_bias, "a bias of the output matrix");
  lacks(m.experts == Experts::gpt_oss, "experts with biases");
  lacks(m.shared_gate, "a gate of what all tokens share");
  lacks(!is_megatron && m.experts != Experts::none && m.router.scores == RouterScores::sigmoid,
        "routers of sigmoids");
  lacks(!m.latent_attention() && m.rotary_dim > 0, "heads of which a part is turned");
}

std::string launch_head(const LaunchRequest& r) {
  return fmt::format(
      "#!/bin/bash\n"
      "# {} on {} {}: {}\n"
      "# {:.4g} s a step predicted. {}\n"
      "set -e\n"
      "cd \"$(dirname \"$0\")\"\n",
      r.model().name, r.plan().mesh.num_ranks(), r.work.machine.name, summary(r.plan()), r.best.seconds,
      r.nodes() == 1
          ? "Run on one node."
          : fmt::format("Run on each of {} nodes, with NODE_RANK from 0 and MASTER_ADDR the first one's.",
                        r.nodes()));
}

std::string torchrun(const LaunchRequest& r) {
  return fmt::format(
      "torchrun --nnodes {} --nproc-per-node {} --node-rank \"${{NODE_RANK:-0}}\" --master-addr "
      "\"${{MASTER_ADDR:-localhost}}\" --master-port \"${{MASTER_PORT:-29500}}\"",
      r.nodes(), r.ranks_of_node());
}

}  // namespace echelon
