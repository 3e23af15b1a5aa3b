#include "spec/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "spec/fields.h"
#include "spec/plan_refusal.h"
#include "spec/toml_text.h"

namespace echelon {
namespace {

// Why so many tp ranks cannot share the model; empty where they can.
std::string tp_problem(const ModelSpec& model, int tp) {
  if (model.num_heads % tp != 0)
    return fmt::format("the {} heads of {} do not divide", model.num_heads, model.name);
  if (model.num_kv_heads % tp != 0 && tp % model.num_kv_heads != 0)
    return fmt::format("the {} key/value heads of {} neither divide by it nor into it", model.num_kv_heads,
                       model.name);
  if (model.vocab < tp) return fmt::format("{} has a vocabulary of only {}", model.name, model.vocab);
  if (model.mlp_hidden < tp) return fmt::format("{} has an MLP of only {}", model.name, model.mlp_hidden);
  if (model.experts != Experts::none && model.expert_hidden < tp)
    return fmt::format("{} has experts of only {}", model.name, model.expert_hidden);
  return "";
}

void validate_tp(const Plan& plan) {
  const int tp = plan.mesh.size(Axis::tp);
  const std::string problem = tp_problem(plan.model, tp);
  if (problem.empty()) return;
  std::vector<Remedy> legal;
  for (int n = 1; n <= plan.model.num_heads; ++n)
    if (tp_problem(plan.model, n).empty()) legal.push_back(remedy(Axis::tp, n));
  throw PlanRefusal("--tp", fmt::format("--tp {}: {}", tp, problem), legal);
}

// Far above any real batch; their products then stay in range.
constexpr std::int64_t most_sequences = 1'000'000;

void within(const char* flag, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most) refuse("{} {}: must be from 1 to {}", flag, value, most);
}

}  // namespace

DType parse_dtype(const std::string& text, const std::string& field) {
  if (text == "f32") return DType::f32;
  if (text == "f64") return DType::f64;
  if (text == "bf16")
    refuse("{} bf16: training in bf16 is not built yet; legal: f32, f64 (reference kernels)", field);
  refuse("{} {}: no such type; legal: f32, f64 (reference kernels)", field, text);
}

const char* offload_name(Offload offload) { return offload == Offload::none ? "none" : "optimizer"; }

Offload parse_offload(const std::string& text, const std::string& field) {
  for (Offload kind : {Offload::none, Offload::optimizer})
    if (text == offload_name(kind)) return kind;
  refuse("{} {}: no such kind; legal: none, optimizer", field, text);
}

namespace {

void validate_zero(const Plan& plan) {
  const int ranks = plan.mesh.dp_cp_size();
  const auto stages = [](int least, int most) {
    std::vector<Remedy> legal;
    for (int stage = least; stage <= most; ++stage) legal.push_back(remedy("--zero", &Plan::zero, stage));
    return legal;
  };
  if (plan.zero < 0 || plan.zero > 3)
    throw PlanRefusal("--zero", fmt::format("--zero {}: no such stage", plan.zero), stages(0, 3));
  if (plan.hsdp < 1 || ranks % plan.hsdp != 0) {
    std::vector<Remedy> legal;
    for (int n = 1; n <= ranks; ++n)
      if (ranks % n == 0) legal.push_back(remedy("--hsdp", &Plan::hsdp, n));
    throw PlanRefusal("--hsdp",
                      fmt::format("--hsdp {}: the {} data-parallel ranks do not divide into so many groups",
                                  plan.hsdp, ranks),
                      legal);
  }
  if (plan.hsdp > 1 && plan.zero == 0) {
    std::vector<Remedy> legal = stages(1, 3);
    legal.push_back(remedy("--hsdp", &Plan::hsdp, 1));
    throw PlanRefusal(
        "--hsdp",
        fmt::format("--hsdp {}: replicates what --zero 1, 2 or 3 cuts over ranks, and --zero is 0",
                    plan.hsdp),
        legal);
  }
  constexpr int most_units = 100'000;
  if (plan.zero_prefetch < 0 || plan.zero_prefetch > most_units)
    refuse("--zero-prefetch {}: must be from 0 to {}", plan.zero_prefetch, most_units);
  if (plan.bucket_bytes < 1) refuse("--bucket {}: must be at least 1 byte", plan.bucket_bytes);
  if (plan.zero > 0 && plan.bucket_bytes != default_bucket_bytes)
    throw PlanRefusal(
        "--bucket",
        fmt::format("--bucket {}: --zero {} reduces gradients layer by layer", plan.bucket_bytes, plan.zero),
        {remedy("--zero", &Plan::zero, 0)});
}

void validate_compression(const Plan& plan) {
  if (plan.compression.kind == CompressionKind::none) return;
  const std::string method = compression_text(plan.compression);
  const Remedy without{"--compress", "none", [](Plan& other) { other.compression = {}; }};
  if (plan.zero == 3)
    throw PlanRefusal(
        "--compress",
        fmt::format("--compress {}: holds what it packs or carries over for all parameters, and --zero 3 is "
                    "for ranks that have no room for that",
                    method),
        {without, remedy("--zero", &Plan::zero, 0), remedy("--zero", &Plan::zero, 1),
         remedy("--zero", &Plan::zero, 2)});
  if (plan.hsdp > 1)
    throw PlanRefusal(
        "--compress",
        fmt::format("--compress {}: what travels between the {} replicas of --hsdp would not be compressed",
                    method, plan.hsdp),
        {without, remedy("--hsdp", &Plan::hsdp, 1)});
}

}  // namespace

void validate(const Plan& plan) {
  validate(plan.model);
  validate(plan.mesh);
  const ModelSpec& model = plan.model;
  if (model.latent_attention())
    refuse("--model {}: latent attention is not built yet; legal: a model with kv_rank = 0", model.name);
  within("--global-batch", plan.global_batch, most_sequences);
  within("--micro-batch", plan.micro_batch, most_sequences);
  validate_tp(plan);
  const int dp = plan.mesh.size(Axis::dp);
  if (plan.global_batch < dp)
    throw PlanRefusal(
        "--dp",
        fmt::format("--dp {}: the global batch has only {} sequences, so some ranks would have none", dp,
                    plan.global_batch),
        {remedy(Axis::dp, static_cast<int>(plan.global_batch), Remedy::Kind::at_most),
         remedy("--global-batch", &Plan::global_batch, dp, Remedy::Kind::at_least)});
  validate_zero(plan);
  validate_compression(plan);
  if (plan.seq_len < 1 || plan.seq_len > model.max_seq)
    refuse("--seq-len {}: {} has positions for 1 to {}", plan.seq_len, model.name, model.max_seq);
  if (!plan.optimizer_barrier && plan.zero_stage() > 0)
    throw PlanRefusal(
        "--optimizer-barrier",
        fmt::format(
            "--optimizer-barrier off: with --zero {} the values of all ranks would have to travel twice",
            plan.zero),
        {{"--optimizer-barrier", "on", [](Plan& other) { other.optimizer_barrier = true; }},
         remedy("--zero", &Plan::zero, 0)});
  validate_context(plan);
  validate_experts(plan);
}

bool interleaves_pairs(const Plan& plan) { return plan.mesh.ep > 1 && plan.zero_stage() < 3; }

Range dp_samples(const Plan& plan, int dp_rank) {
  return split_range(plan.global_batch, plan.mesh.size(Axis::dp), dp_rank);
}

std::vector<Range> microbatches(const Plan& plan, int dp_rank) {
  const Range samples = dp_samples(plan, dp_rank);
  std::vector<Range> batches;
  for (std::int64_t begin = samples.begin; begin < samples.end; begin += plan.micro_batch)
    batches.push_back({begin, std::min(begin + plan.micro_batch, samples.end)});
  if (plan.zero_stage() >= 2 || plan.mesh.ep > 1) {
    const std::int64_t most = dp_samples(plan, 0).size();
    batches.resize(static_cast<std::size_t>((most + plan.micro_batch - 1) / plan.micro_batch),
                   {samples.end, samples.end});
  }
  return batches;
}

std::string to_toml(const Plan& plan) {
  toml::table mesh;
  for (Axis axis : all_axes) mesh.insert(axis_name(axis), plan.mesh.size(axis));
  mesh.insert("ep", plan.mesh.ep);
  if (plan.mesh.etp != 0) mesh.insert("etp", plan.mesh.etp);
  toml::array layers;
  for (std::int64_t count : plan.layers_per_stage) layers.push_back(count);
  toml::table table{{"model", toml::parse(to_toml(plan.model))},
                    {"mesh", mesh},
                    {"sp", plan.sequence_parallel},
                    {"global-batch", plan.global_batch},
                    {"micro-batch", plan.micro_batch},
                    {"seq-len", plan.seq_len},
                    {"dtype", dtype_name(plan.dtype)},
                    {"recompute", recompute_name(plan.recompute)},
                    {"schedule", plan.schedule},
                    {"schedule-text", plan.schedule_text},
                    {"chunks", plan.chunks},
                    {"optimizer-barrier", plan.optimizer_barrier},
                    {"zero", plan.zero},
                    {"hsdp", plan.hsdp},
                    {"zero-prefetch", plan.zero_prefetch},
                    {"bucket", plan.bucket_bytes},
                    {"compress", compression_text(plan.compression)},
                    {"offload", offload_name(plan.offload)},
                    {"offload-dir", plan.offload_directory},
                    {"cp-kind", context_kind_name(plan.context_kind)},
                    {"cp-balance", context_balance_name(plan.context_balance)},
                    {"cp-ulysses", plan.ulysses},
                    {"mask", attention_mask_name(plan.mask)},
                    {"document-end", plan.document_end},
                    {"aux-loss", plan.balancing.expert_loss},
                    {"device-loss", plan.balancing.device_loss},
                    {"communication-loss", plan.balancing.communication_loss},
                    {"z-loss", plan.balancing.z_loss},
                    {"bias-rate", plan.balancing.bias_rate},
                    {"balance-scope", balance_scope_name(plan.balancing.scope)},
                    {"capacity", plan.balancing.capacity},
                    {"drop", drop_policy_name(plan.balancing.drop)}};
  if (plan.balance_layers)
    table.insert("layers-per-stage", "auto");
  else
    table.insert("layers-per-stage", layers);
  if (plan.priced != Priced{})
    table.insert("priced", toml::table{{"machine", plan.priced.machine},
                                       {"node", plan.priced.node},
                                       {"software", plan.priced.software},
                                       {"dtype", plan.priced.dtype}});
  std::ostringstream out;
  out << table << "\n";
  return out.str();
}

namespace {

template <class T>
T value_at(const toml::table& table, const char* key, const std::string& where, T fallback) {
  const toml::node* node = table.get(key);
  if (node == nullptr) return fallback;
  auto value = node->value_exact<T>();
  if constexpr (std::is_same_v<T, double>)
    if (node->is_integer()) value = static_cast<double>(**node->as_integer());
  const char* legal = std::is_same_v<T, bool>          ? "true or false"
                      : std::is_same_v<T, std::string> ? "a text"
                      : std::is_same_v<T, double>      ? "a number"
                                                       : "a whole number";
  if (!value) refuse("{}: {} = {} is not legal: give {}", where, key, shown(*node), legal);
  return *value;
}

}  // namespace

Plan plan_from_toml(const std::string& text, const std::string& where) {
  const toml::table table = parse_toml(text, where);
  static constexpr std::array known{"model",
                                    "mesh",
                                    "sp",
                                    "global-batch",
                                    "micro-batch",
                                    "seq-len",
                                    "dtype",
                                    "recompute",
                                    "schedule",
                                    "chunks",
                                    "layers-per-stage",
                                    "schedule-text",
                                    "zero",
                                    "hsdp",
                                    "zero-prefetch",
                                    "bucket",
                                    "offload",
                                    "offload-dir",
                                    "optimizer-barrier",
                                    "compress",
                                    "cp-kind",
                                    "cp-balance",
                                    "cp-ulysses",
                                    "mask",
                                    "document-end",
                                    "aux-loss",
                                    "device-loss",
                                    "communication-loss",
                                    "z-loss",
                                    "bias-rate",
                                    "balance-scope",
                                    "capacity",
                                    "drop",
                                    "priced"};
  for (const auto& [key, node] : table)
    if (std::find(known.begin(), known.end(), std::string_view(key.str())) == known.end())
      refuse("{}: unknown key \"{}\"; legal: {}", where, key.str(), fmt::join(known, ", "));
  Plan plan;
  if (const toml::table* model = table["model"].as_table()) {
    std::ostringstream out;
    out << *model;
    plan.model = model_from_toml(out.str(), where + ": [model]");
  } else {
    const auto name = value_at<std::string>(table, "model", where, "");
    if (name.empty()) refuse("{}: model is missing: a table or the name of a preset", where);
    plan.model = load_model(name);
  }
  if (const toml::node* mesh = table.get("mesh")) {
    if (!mesh->is_table())
      refuse("{}: mesh = {} is not legal: give a table of pp, dp, cp, tp, ep, etp", where, shown(*mesh));
    for (const auto& [key, node] : *mesh->as_table()) {
      const auto size = node.value_exact<std::int64_t>();
      if (!size || *size < 1 || *size > 1'000'000)
        refuse("{}: mesh.{} = {} is not legal: give a whole number from 1 to 1000000", where, key.str(),
               shown(node));
      bool found = key.str() == "ep" || key.str() == "etp";
      if (found) (key.str() == "ep" ? plan.mesh.ep : plan.mesh.etp) = static_cast<int>(*size);
      for (Axis axis : all_axes)
        if (key.str() == axis_name(axis)) {
          plan.mesh.set(axis, static_cast<int>(*size));
          found = true;
        }
      if (!found) refuse("{}: mesh.{} is no axis; legal: pp, dp, cp, tp, ep, etp", where, key.str());
    }
  }
  plan.sequence_parallel = value_at<bool>(table, "sp", where, true);
  plan.global_batch = value_at<std::int64_t>(table, "global-batch", where, 1);
  plan.micro_batch = value_at<std::int64_t>(table, "micro-batch", where, 1);
  plan.seq_len =
      value_at<std::int64_t>(table, "seq-len", where, std::min<std::int64_t>(plan.model.max_seq, 1024));
  const auto dtype = value_at<std::string>(table, "dtype", where, "f32");
  plan.dtype = parse_dtype(dtype, where + ": dtype");
  plan.recompute =
      parse_recompute(value_at<std::string>(table, "recompute", where, "none"), where + ": recompute");
  plan.schedule = value_at<std::string>(table, "schedule", where, plan.schedule);
  plan.schedule_text = value_at<std::string>(table, "schedule-text", where, "");
  // Out of range stays out of range.
  const auto small = [&](const char* key, std::int64_t fallback) {
    return static_cast<int>(
        std::clamp<std::int64_t>(value_at<std::int64_t>(table, key, where, fallback), -1, 1'000'000));
  };
  plan.chunks = small("chunks", 0);
  plan.zero = small("zero", plan.zero);
  plan.hsdp = small("hsdp", plan.hsdp);
  plan.zero_prefetch = small("zero-prefetch", plan.zero_prefetch);
  plan.bucket_bytes = value_at<std::int64_t>(table, "bucket", where, plan.bucket_bytes);
  plan.compression =
      parse_compression(value_at<std::string>(table, "compress", where, "none"), where + ": compress");
  plan.offload = parse_offload(value_at<std::string>(table, "offload", where, "none"), where + ": offload");
  plan.offload_directory = value_at<std::string>(table, "offload-dir", where, "");
  plan.context_kind =
      parse_context_kind(value_at<std::string>(table, "cp-kind", where, context_kind_name(plan.context_kind)),
                         where + ": cp-kind");
  plan.context_balance = parse_context_balance(
      value_at<std::string>(table, "cp-balance", where, context_balance_name(plan.context_balance)),
      where + ": cp-balance");
  plan.ulysses = small("cp-ulysses", plan.ulysses);
  plan.mask = parse_attention_mask(
      value_at<std::string>(table, "mask", where, attention_mask_name(plan.mask)), where + ": mask");
  plan.document_end = small("document-end", plan.document_end);
  Balancing& balancing = plan.balancing;
  for (const auto& [key, number] : {std::pair{"aux-loss", &balancing.expert_loss},
                                    {"device-loss", &balancing.device_loss},
                                    {"communication-loss", &balancing.communication_loss},
                                    {"z-loss", &balancing.z_loss},
                                    {"bias-rate", &balancing.bias_rate},
                                    {"capacity", &balancing.capacity}})
    *number = value_at<double>(table, key, where, 0);
  balancing.scope = parse_balance_scope(
      value_at<std::string>(table, "balance-scope", where, balance_scope_name(balancing.scope)),
      where + ": balance-scope");
  balancing.drop = parse_drop_policy(
      value_at<std::string>(table, "drop", where, drop_policy_name(balancing.drop)), where + ": drop");
  plan.optimizer_barrier = value_at<bool>(table, "optimizer-barrier", where, true);
  if (const toml::node* priced = table.get("priced")) {
    if (!priced->is_table())
      refuse("{}: priced = {} is not legal: give a table of machine, node, software, dtype", where,
             shown(*priced));
    const toml::table& by = *priced->as_table();
    refuse_other_keys(by, {"machine", "node", "software", "dtype"}, where + ": [priced]",
                      "legal: machine, node, software, dtype");
    plan.priced = {value_at<std::string>(by, "machine", where, ""),
                   value_at<std::string>(by, "software", where, ""),
                   value_at<std::string>(by, "dtype", where, ""),
                   static_cast<int>(std::clamp<std::int64_t>(value_at<std::int64_t>(by, "node", where, 0), -1,
                                                             1'000'000))};
  }
  if (const toml::node* layers = table.get("layers-per-stage")) {
    const auto illegal = [&] {
      refuse("{}: layers-per-stage = {} is not legal: give a list of whole numbers, or \"auto\"", where,
             shown(*layers));
    };
    plan.balance_layers = layers->value_exact<std::string>() == "auto";
    if (!layers->is_array() && !plan.balance_layers) illegal();
    for (const toml::node& count : plan.balance_layers ? toml::array() : *layers->as_array()) {
      if (!count.is_integer()) illegal();
      plan.layers_per_stage.push_back(**count.as_integer());
    }
  }
  return plan;
}

}  // namespace echelon
