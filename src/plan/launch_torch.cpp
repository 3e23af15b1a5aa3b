// torchtitan, nanotron and DeepSpeed.
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "base/units.h"
#include "plan/launch_parts.h"
#include "plan/program_names.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

struct Flavor {
  const char *name, *model, *preset;
};
// torchtitan's models are flavors, defined in its source.
constexpr Flavor flavors[] = {
    {"8B", "llama3", "llama-3-8b"}, {"70B", "llama3", "llama-3-70b"}, {"405B", "llama3", "llama-3-405b"}};

// A flavor is a whole model: equal sizes do not suffice, since layers may differ. The refusal names the
// fields that differ from the nearest flavor.
const Flavor& flavor_of(const LaunchRequest& r) {
  const ModelSpec& m = r.model();
  std::vector<std::string> nearest;
  const char* preset = nullptr;
  for (const Flavor& f : flavors) {
    ModelSpec flavor = load_model(f.preset);
    // These differ by run; and flavors too can have Llama 3.1's scaled positions.
    flavor.name = m.name, flavor.max_seq = m.max_seq, flavor.init_std = m.init_std;
    if (m.rope.scaling == RopeScaling::llama3) {
      RopeSpec longer = m.rope;
      longer.theta = flavor.rope.theta;
      longer.local_theta = flavor.rope.local_theta, longer.unturned_every = flavor.rope.unturned_every;
      flavor.rope = longer;
    }
    std::vector<std::string> others;
    for (const FieldDifference& one : differences(m, flavor)) others.push_back(one.field);
    if (others.empty()) return f;
    if (preset == nullptr || others.size() < nearest.size()) nearest = others, preset = f.preset;
  }
  not_launched(r,
               "--model {}: is no flavor of it, and differs from {} in {}; legal: llama-3-8b, llama-3-70b, "
               "llama-3-405b, and Llama 3.1's",
               m.name, preset, fmt::join(nearest, ", "));
}

// Module names of each stage, in the order of the model.
std::string stage_modules(const std::vector<std::int64_t>& layers) {
  std::vector<std::string> stages;
  std::int64_t next = 0;
  for (std::size_t s = 0; s < layers.size(); ++s) {
    std::vector<std::string> names;
    if (s == 0) names.push_back("\"tok_embeddings\"");
    for (std::int64_t i = 0; i < layers[s]; ++i) names.push_back(fmt::format("\"layers.{}\"", next++));
    if (s + 1 == layers.size()) names.insert(names.end(), {"\"norm\"", "\"output\""});
    stages.push_back(fmt::format("    [{}],\n", fmt::join(names, ", ")));
  }
  return fmt::format("[\n{}]", fmt::join(stages, ""));
}

// Whether ranks hold stages in turn, rank 0 the first of each chunk. This is how torchtitan places stages
// whatever a CSV says; for V-shaped schedules it has only its own.
bool has_stages_in_turn(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.num_ranks(); ++rank)
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(rank)])
      if (i.stage % schedule.num_ranks() != rank) return false;
  return true;
}

Schedule schedule_of(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  return make_schedule(plan.schedule, plan.mesh.pp(), static_cast<int>(r.best.microbatches), plan.chunks);
}

bool has_weight_passes(const LaunchRequest& r) {
  if (r.plan().mesh.pp() == 1) return false;
  for (const std::vector<Instruction>& rank : schedule_of(r).ranks)
    for (const Instruction& i : rank)
      if (i.op == Op::W) return true;
  return false;
}

std::string schedule_csv(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const Schedule schedule = schedule_of(r);
  if (!has_stages_in_turn(schedule))
    not_launched(r,
                 "--schedule {}: its stages are in a V, and those of a CSV in turn; legal: 1f1b, "
                 "interleaved, zb-v, and "
                 "zb-h1 and zb-h2 as a CSV",
                 plan.schedule);
  return to_csv(schedule);
}

}  // namespace

std::vector<LaunchFile> launch_torchtitan(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const Mesh& mesh = plan.mesh;
  const Flavor& flavor = flavor_of(r);
  if (plan.zero_stage() == 1) not_launched(r, "--zero 1: does not run it; legal: 0, 2, 3");
  if (plan.zero_stage() == 0 && mesh.dp_cp_size() > 1 && mesh.dp() < mesh.num_ranks())
    not_launched(r, "--zero 0: runs it on data-parallel ranks alone; legal: 2, 3");
  if (plan.zero_stage() > 0 && mesh.dp() % plan.hsdp != 0)
    not_launched(r, "--hsdp {}: its replicas are of the {} of dp; legal: divisors of {}", plan.hsdp,
                 counted(mesh.dp(), "rank"), mesh.dp());
  if (const std::int64_t parts = mesh.tp() * (mesh.cp() > 1 ? 2 * mesh.cp() : 1); plan.seq_len % parts != 0)
    not_launched(r, "--seq-len {}: cuts it into {} equal parts", plan.seq_len, parts);
  if (mesh.tp() > 1 && !plan.shards_sequence())
    not_launched(r, "--sp off: its tensor parallelism cuts sequences too");
  if (mesh.cp() > 1 && plan.context_kind == ContextKind::ulysses)
    not_launched(r, "--cp-kind ulysses: does not run it; legal: ring, allgather");
  if (plan.offloads_activations())
    not_launched(r, "--offload {}: its configuration has no such thing; legal: optimizer, none",
                 name_of(plan.offload));
  if (r.work.precision == Precision::fp4)
    not_launched(r, "--precision fp4: does not run it; legal: f32, bf16, fp8");
  const bool full = r.is_recompute("full"), selective = r.is_recompute("selective");
  if (!full && !selective && !r.is_recompute("none"))
    not_launched(r, "--recompute {}: does not run it; legal: none, selective, full",
                 recompute_name(plan.recompute));
  if (mesh.pp() > 1 && (plan.schedule == "naive" || plan.schedule.starts_with("dualpipe")))
    not_launched(
        r, "--schedule {}: does not run it; legal: 1f1b, interleaved, zb-v and others that flush, as a CSV",
        plan.schedule);
  const bool is_fp8 = r.work.precision == Precision::fp8;
  if (mesh.pp() > 1 && plan.schedule == "1f1b" && r.best.microbatches < mesh.pp())
    not_launched(
        r, "--schedule 1f1b: has {} over {} stages, and runs no fewer than stages; legal: gpipe, interleaved",
        counted(r.best.microbatches, "microbatch"), mesh.pp());
  std::string text = fmt::format("# {}\n[job]\ndump_folder = \"./outputs\"\n\n", summary(plan));
  text += fmt::format("[model]\nname = \"{}\"\nflavor = \"{}\"\nhf_assets_path = \"./assets/hf\"\n{}\n",
                      flavor.model, flavor.name, is_fp8 ? "converters = [\"quantize.linear.float8\"]\n" : "");
  const std::int64_t local = mesh.pp() > 1 ? plan.global_batch / mesh.dp() : plan.micro_batch;
  text += fmt::format(
      "[training]\nlocal_batch_size = {}\nglobal_batch_size = {}\nseq_len = {}\nsteps = 100\ndataset = "
      "\"c4_test\"\n",
      local, plan.global_batch, plan.seq_len);
  if (r.work.precision == Precision::f32) text += "mixed_precision_param = \"float32\"\n";
  if (plan.offloads_optimizer()) text += "enable_cpu_offload = true\n";
  const bool shards = plan.zero_stage() > 0;
  text += fmt::format(
      "\n[parallelism]\ndata_parallel_replicate_degree = {}\ndata_parallel_shard_degree = {}\n"
      "fsdp_reshard_after_forward = \"{}\"\ntensor_parallel_degree = {}\ncontext_parallel_degree = {}\n"
      "context_parallel_rotate_method = \"{}\"\npipeline_parallel_degree = {}\n",
      shards ? plan.hsdp : mesh.dp(), shards ? mesh.dp() / plan.hsdp : 1,
      plan.zero != 3  ? "never"
      : mesh.pp() > 1 ? "default"  // keeps the parameters gathered for one microbatch for the others
                      : "always",
      mesh.tp(), mesh.cp(), plan.context_kind == ContextKind::ring ? "alltoall" : "allgather", mesh.pp());
  std::vector<LaunchFile> files;
  if (mesh.pp() > 1) {
    const std::string own = theirs(torch_schedules, plan.schedule);
    text += fmt::format("pipeline_parallel_schedule = \"{}\"\n", own.empty() ? "PipelineScheduleMulti" : own);
    if (own.empty()) {
      text += "pipeline_parallel_schedule_csv = \"schedule.csv\"\n";
      files.push_back({"schedule.csv", schedule_csv(r)});
    }
    text += fmt::format("pipeline_parallel_microbatch_size = {}\nmodule_fqns_per_model_part = {}\n",
                        plan.micro_batch, stage_modules(r.best.layers));
  }
  text += fmt::format("\n[activation_checkpoint]\nmode = \"{}\"\n{}",
                      full        ? "full"
                      : selective ? "selective"
                                  : "none",
                      selective ? "selective_ac_option = \"op\"\n" : "");
  // If W is separate, torch.distributed.pipelining cannot run modules from torch.compile.
  const bool compiles = r.work.software.name != "torchtitan-eager" && !has_weight_passes(r);
  text += fmt::format("\n[compile]\nenable = {}\n", compiles);
  if (is_fp8 && r.work.software.narrow_parameters && shards)  // gathered in 8 bits, as priced
    text +=
        "\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
        "precompute_float8_dynamic_scale_for_fsdp = true\n";
  files.insert(files.begin(),
               {{"launch.sh", launch_head(r) + torchrun(r) +
                                  " -m torchtitan.train --job.config_file torchtitan.toml \"$@\"\n"},
                {"torchtitan.toml", text}});
  return files;
}

// YAML 1.1 reads 1e-05 as a string, and 1.0e-05 as a number.
static std::string yaml_number(double value) {
  std::string text = fmt::format("{}", value);
  const std::size_t at = text.find('e');
  if (at != std::string::npos && text.find('.') == std::string::npos) text.insert(at, ".0");
  return text;
}

// For the version that is priced, February 2025. Its configuration is read strictly; named data stages and
// separate optimizer arguments came with 0.5 (which still calls itself 0.4).
std::vector<LaunchFile> launch_nanotron(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const Mesh& mesh = plan.mesh;
  const ModelSpec& m = r.model();
  check_plain_llama(r);
  if (m.family != Family::llama || m.experts != Experts::none || m.activation != Activation::swiglu ||
      m.qkv_bias || m.qk_norm || m.head_dim * m.num_heads != m.hidden)
    not_launched(r, "--model {}: is none of Llama's form, which alone it has", m.name);
  if (m.rope.scaling != RopeScaling::none)
    not_launched(r, "--model {}: its positions are scaled, as those of no model are there", m.name);
  if (plan.zero_stage() > 1) not_launched(r, "--zero {}: does not run it; legal: 0, 1", plan.zero);
  if (plan.hsdp > 1) not_launched(r, "--hsdp {}: does not run it; legal: 1", plan.hsdp);
  if (mesh.cp() > 1) not_launched(r, "--cp {}: does not run it; legal: 1", mesh.cp());
  if (plan.offload != Offload::none)
    not_launched(r, "--offload {}: does not run it; legal: none", name_of(plan.offload));
  if (mesh.pp() > 1 && plan.schedule != "1f1b" && plan.schedule != "gpipe")
    not_launched(r, "--schedule {}: does not run it; legal: 1f1b, gpipe", plan.schedule);
  if (!r.is_recompute("none") && !r.is_recompute("full"))
    not_launched(r, "--recompute {}: does not run it; legal: none, full", recompute_name(plan.recompute));
  if (r.work.precision != Precision::bf16)  // as its FlashAttention requires
    not_launched(r, "--precision {}: does not run it; legal: bf16", precision_name(r.work.precision));
  std::string text = fmt::format(
      "# {}\n# How layers are given to stages is nanotron's own: by cost, the output matrix among them.\n",
      summary(plan));
  text +=
      "general:\n  project: echelon\n  run: plan\n  seed: 42\n  ignore_sanity_checks: true\n"
      "checkpoints:\n  checkpoint_interval: 1000\n  checkpoints_path: checkpoints\n"
      "data_stages:\n- name: all\n  start_training_step: 1\n  data:\n    dataset: null\n    "
      "num_loading_workers: 1\n    "
      "seed: 42\n"
      "logging:\n  iteration_step_info_interval: 1\n  log_level: info\n  log_level_replica: info\n";
  text += fmt::format(
      "model:\n  ddp_bucket_cap_mb: 25\n  dtype: bfloat16\n  init_method:\n    std: {}\n  "
      "make_vocab_size_divisible_by: 1\n"
      "  model_config:\n    is_llama_config: true\n    hidden_act: silu\n    hidden_size: {}\n    "
      "intermediate_size: {}\n"
      "    max_position_embeddings: {}\n    num_attention_heads: {}\n    num_hidden_layers: {}\n    "
      "num_key_value_heads: {}\n"
      "    rms_norm_eps: {}\n    rope_theta: {:.1f}\n    tie_word_embeddings: {}\n    vocab_size: {}\n",
      yaml_number(m.init_std), m.hidden, m.mlp_hidden, std::max(m.max_seq, plan.seq_len), m.num_heads,
      m.num_layers, m.num_kv_heads, yaml_number(m.norm_eps), m.rope.theta, m.tied_embedding, m.vocab);
  text += fmt::format(
      "optimizer:\n  accumulate_grad_in_fp32: true\n  clip_grad: 1.0\n"
      "  learning_rate_scheduler:\n    learning_rate: 0.0003\n    lr_warmup_steps: 10\n"
      "    lr_warmup_style: linear\n    lr_decay_style: cosine\n    min_decay_lr: 1.0e-05\n"
      "  optimizer_factory:\n    name: adamW\n    adam_beta1: 0.9\n    adam_beta2: 0.95\n    adam_eps: "
      "1.0e-08\n"
      "    torch_adam_is_fused: true\n"
      "  weight_decay: 0.1\n  zero_stage: {}\n",
      plan.zero_stage());
  text += fmt::format(
      "parallelism:\n  dp: {}\n  expert_parallel_size: 1\n  pp: {}\n  pp_engine: {}\n  recompute_layer: {}\n "
      " tp: {}\n  "
      "tp_linear_async_communication: {}\n"
      "  tp_mode: {}\n",
      mesh.dp(), mesh.pp(), plan.schedule == "gpipe" ? "afab" : "1f1b", r.is_recompute("full"), mesh.tp(),
      plan.shards_sequence(), plan.shards_sequence() ? "REDUCE_SCATTER" : "ALL_REDUCE");
  text += fmt::format(
      "tokenizer:\n  tokenizer_name_or_path: gpt2\n"
      "tokens:\n  batch_accumulation_per_replica: {}\n  micro_batch_size: {}\n  sequence_length: {}\n  "
      "train_steps: 100\n",
      r.best.microbatches, plan.micro_batch, plan.seq_len);
  return {{"launch.sh", launch_head(r) + "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" + torchrun(r) +
                            " \"${NANOTRON_PATH:-.}/run_train.py\" --config-file nanotron.yaml \"$@\"\n"},
          {"nanotron.yaml", text}};
}

std::vector<LaunchFile> launch_deepspeed(const LaunchRequest& r) {
  using nlohmann::ordered_json;
  const Plan& plan = r.plan();
  const Mesh& mesh = plan.mesh;
  if (r.model().experts != Experts::none)
    not_launched(r, "--model {}: its experts are layers of the script's own; legal: models without",
                 r.model().name);
  if (mesh.pp() > 1 && plan.schedule != "1f1b")
    not_launched(r, "--schedule {}: does not run it; legal: 1f1b", plan.schedule);
  if (mesh.pp() > 1 && plan.zero_stage() > 1)
    not_launched(r, "--zero {}: its pipeline engine refuses it; legal: 0, 1, or --pp 1", plan.zero);
  if (mesh.cp() > 1 && plan.context_kind != ContextKind::ulysses)
    not_launched(r, "--cp-kind {}: does not run it; legal: ulysses", name_of(plan.context_kind));
  if (plan.hsdp > 1) not_launched(r, "--hsdp {}: does not run it; legal: 1", plan.hsdp);
  if (mesh.tp() > 1 && plan.zero_stage() == 3)
    not_launched(r, "--tp {}: its tensor parallelism is for ZeRO 0 to 2; legal: 1, or --zero 2", mesh.tp());
  if (mesh.tp() > 1 && r.model().state_space.heads > 0)
    not_launched(r, "--tp {}: its tensor parallelism does not cut state spaces by heads; legal: 1",
                 mesh.tp());
  if (!r.is_recompute("none") && !r.is_recompute("full"))
    not_launched(r, "--recompute {}: does not run it; legal: none, full", recompute_name(plan.recompute));
  if (r.work.precision != Precision::bf16 && r.work.precision != Precision::f32)
    not_launched(r, "--precision {}: does not run it; legal: f32, bf16", precision_name(r.work.precision));
  const bool offloads = plan.offloads_optimizer();
  ordered_json config{
      {"train_micro_batch_size_per_gpu", plan.micro_batch},
      {"gradient_accumulation_steps", r.best.microbatches},
      {"gradient_clipping", 1.0},
      {"bf16", {{"enabled", r.work.precision == Precision::bf16}}},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-4}, {"weight_decay", 0.1}}}}},
      {"zero_optimization",
       {{"stage", offloads ? plan.zero : plan.zero_stage()}, {"overlap_comm", plan.zero_stage() > 0}}}};
  // Its own tensor parallelism takes all ranks without it for data-parallel ones, stages of a pipeline too; a
  // PipelineModule leaves cutting its layers to the script.
  const bool cuts_layers = mesh.tp() > 1 && mesh.pp() == 1;
  // Its check of the three batch sizes counts the ranks correctly only without its tensor parallelism.
  if (!cuts_layers) config["train_batch_size"] = plan.global_batch;
  if (offloads) config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"pin_memory", true}};
  if (mesh.cp() > 1) config["sequence_parallel_size"] = mesh.cp();
  if (cuts_layers) config["tensor_parallel"] = {{"autotp_size", mesh.tp()}};
  if (plan.offloads_activations() && !r.is_recompute("full"))
    not_launched(r,
                 "--offload {}: checkpoints of layers are what it keeps on the host; legal: {}none, or "
                 "--recompute full",
                 name_of(plan.offload), offloads ? "optimizer, " : "");
  if (r.is_recompute("full"))
    config["activation_checkpointing"] = {{"partition_activations", false},
                                          {"cpu_checkpointing", plan.offloads_activations()}};
  std::string notes = "# TRAIN: a script that makes the model and calls deepspeed.initialize";
  if (mesh.pp() > 1) {
    notes += mesh.tp() > 1
                 ? fmt::format(
                       " with a PipelineModule of\n# topology=PipeModelDataParallelTopology(num_pp={}, "
                       "num_mp={}, num_dp={}), whose layers it cuts over num_mp itself and",
                       mesh.pp(), mesh.tp(), mesh.dp())
                 : fmt::format(" with a PipelineModule of num_stages={},", mesh.pp());
    notes += fmt::format("\n# whose stages hold {} layers", fmt::join(r.best.layers, ", "));
  }
  if (r.is_recompute("full"))
    notes += plan.offloads_activations()
                 ? ",\n# and checkpoints each layer with deepspeed.checkpointing.checkpoint"
                 : ",\n# and checkpoints each layer";
  return {{"launch.sh", launch_head(r) + notes + ".\n" +
                            // Its own launcher needs a host file.
                            torchrun(r) +
                            " \"${TRAIN:?}\" --deepspeed --deepspeed_config ds_config.json \"$@\"\n"},
          {"ds_config.json", json_text(config) + "\n"}};
}

}  // namespace echelon
