#include "spec/software.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <set>
#include <utility>

#include "base/edits.h"
#include "base/error.h"
#include "base/open_file.h"
#include "spec/context_layout.h"
#include "spec/embedded.h"
#include "spec/fields.h"
#include "spec/machine.h"
#include "spec/recompute.h"

namespace echelon {
namespace {

const std::vector<Field<Software>>& software_fields() {
  static const std::vector<Field<Software>> fields{
      {"is_this_trainer", &Software::is_this_trainer},
      {"replicated_shards", &Software::replicated_shards},
      {"context_beside_pipelines", &Software::context_beside_pipelines},
      {"places_experts", &Software::places_experts},
      {"context_cuts_documents", &Software::context_cuts_documents},
      {"context_cuts_pairs", &Software::context_cuts_pairs},
      {"context_repeats_heads", &Software::context_repeats_heads},
      {"tensor_parallel", &Software::tensor_parallel},
      {"tensor_repeats_heads", &Software::tensor_repeats_heads},
      {"reduces_each_microbatch", &Software::reduces_each_microbatch},
      {"pipelines_reduce_once", &Software::pipelines_reduce_once},
      {"reduces_each_group", &Software::reduces_each_group},
      {"interleaves_whole_groups", &Software::interleaves_whole_groups},
      {"updates_on_host", &Software::updates_on_host},
      {"activation_offload_pipelines", &Software::activation_offload_pipelines},
      {"activation_offload_overlaps", &Software::activation_offload_overlaps},
      {"fused_attention", &Software::fused_attention},
      {"older_attention", &Software::older_attention},
      {"tf32", &Software::tf32},
      {"pads_vocabulary", &Software::pads_vocabulary},
      {"trains_with_muon", &Software::trains_with_muon},
      {"dropout", &Software::dropout},
      {"sharded_states", &Software::sharded_states},
      {"value_bytes", &Software::value_bytes, 1, 8},
      {"gradient_bytes", &Software::gradient_bytes, 1, 16},
      {"optimizer_bytes", &Software::optimizer_bytes, 0, 64},
      {"master_bytes", &Software::master_bytes, 0, 4},
      {"reduced_bytes", &Software::reduced_bytes, 1, 8},
      {"logit_bytes", &Software::logit_bytes, 0, 64},
      {"fragmentation", &Software::fragmentation, 0, 10},
      {"saved_factor", &Software::saved_factor, 0.1, 10},
      {"keeps_norm_outputs", &Software::keeps_norm_outputs},
      {"keeps_activated", &Software::keeps_activated},
      {"activation_input_bytes", &Software::activation_input_bytes, 0.5, 4},
      {"keeps_operands", &Software::keeps_operands},
      {"keeps_expert_outputs", &Software::keeps_expert_outputs},
      {"keeps_every_second_product", &Software::keeps_every_second_product},
      {"pipelines_keep_gathered", &Software::pipelines_keep_gathered},
      {"regathers_sequence", &Software::regathers_sequence},
      {"overlaps_gradients", &Software::overlaps_gradients},
      {"overlaps_parameters", &Software::overlaps_parameters},
      {"narrow_parameters", &Software::narrow_parameters},
      {"reshards", &Software::reshards},
      {"scatters_messages", &Software::scatters_messages},
      {"loss_apart", &Software::loss_apart},
      {"sends_tokens_once", &Software::sends_tokens_once},
      {"gathers_before_experts", &Software::gathers_before_experts},
      {"overlaps_experts", &Software::overlaps_experts},
      {"layer_reductions", &Software::layer_reductions, 0, 1000},
      {"shard_copy_seconds", &Software::shard_copy_seconds, 0, 1},
      {"accumulation_bytes", &Software::accumulation_bytes, 0, 64},
      {"loss_passes", &Software::loss_passes, 0.01, 100},
      {"collective_rank_seconds", &Software::collective_rank_seconds, 0, 1},
      {"elementwise_passes", &Software::elementwise_passes, 0.01, 100},
      {"launch_seconds", &Software::launch_seconds, 0, 1},
      {"collective_launch_seconds", &Software::collective_launch_seconds, 0, 1},
      {"product_efficiency", &Software::product_efficiency, 0.01, 2},
      {"attention_efficiency", &Software::attention_efficiency, 0.01, 2},
      {"tensor_overlap", &Software::tensor_overlap, 0, 1},
      {"expert_efficiency", &Software::expert_efficiency, 0.01, 2},
      {"expert_width", &Software::expert_width, 0, 1000000},
      {"expert_call_seconds", &Software::expert_call_seconds, 0, 1},
      {"scan_efficiency", &Software::scan_efficiency, 0.01, 2},
      {"expert_passes", &Software::expert_passes, 0.01, 100},
      {"expert_launch_seconds", &Software::expert_launch_seconds, 0, 1},
      {"expert_pair_seconds", &Software::expert_pair_seconds, 0, 1},
      {"overlap_slowdown", &Software::overlap_slowdown, 1, 3},
      {"network_efficiency", &Software::network_efficiency, 0.001, 2},
      {"step_seconds", &Software::step_seconds, 0, 10},
      {"message_seconds", &Software::message_seconds, 0, 1},
      {"optimizer_passes", &Software::optimizer_passes, 0.01, 100},
      {"straggling", &Software::straggling, 0, 1},
      {"low", &Software::low, 0, 100},
      {"high", &Software::high, 0, 100},
      {"nodes_low", &Software::nodes_low, 0, 100},
      {"nodes_high", &Software::nodes_high, 0, 100},
      {"experts_low", &Software::experts_low, 0, 100},
      {"experts_high", &Software::experts_high, 0, 100},
      {"far_low", &Software::far_low, 0, 100},
      {"far_high", &Software::far_high, 0, 100},
  };
  return fields;
}

constexpr const char* offloaded_states[] = {"moments", "masters", "gradients", "parameters", "activations"};
constexpr const char* offloaded_activations = "activations";

void check_stages(const char* key, const std::optional<std::vector<int>>& stages) {
  if (!stages) return;
  for (int stage : *stages)
    if (stage < 0 || stage > 3) refuse("software: {} = {}: no such stage; legal: 0, 1, 2, 3", key, stage);
  if (stages->empty()) refuse("software: {} = []: give at least one; legal: 0, 1, 2, 3", key);
}

// "2025-11"
bool is_month(const std::string& text) {
  if (text.size() != 7 || text[4] != '-') return false;
  for (std::size_t i : {0, 1, 2, 3, 5, 6})
    if (text[i] < '0' || text[i] > '9') return false;
  const int month = 10 * (text[5] - '0') + (text[6] - '0');
  return month >= 1 && month <= 12;
}

}  // namespace

bool Software::offloads_state() const {
  return offloads && std::any_of(offloads->begin(), offloads->end(),
                                 [](const std::string& what) { return what != offloaded_activations; });
}

bool Software::offloads_activations() const {
  return offloads && std::find(offloads->begin(), offloads->end(), offloaded_activations) != offloads->end();
}

void validate(const Software& s) {
  if (s.name.empty()) refuse("software: the key name is empty");
  const auto in_order = [](const char* keys, double low, double high) {
    if (low > high || (low == 0) != (high == 0))
      refuse("software: {} = {}, {} is not legal: give the lower factor first, and both or neither", keys,
             low, high);
  };
  if (!s.as_of.empty() && !is_month(s.as_of))
    refuse("software: as_of = {} is not legal: give a year and a month, as 2025-11", s.as_of);
  check_stages("zero_stages", s.zero_stages);
  check_stages("pipeline_zero_stages", s.pipeline_zero_stages);
  check_stages("tensor_zero_stages", s.tensor_zero_stages);
  check_stages("offload_zero_stages", s.offload_zero_stages);
  check_stages("dynamic_context_zero_stages", s.dynamic_context_zero_stages);
  for (const std::string& kind : s.context_kinds.value_or(std::vector<std::string>{}))
    if (kind != "ring" && kind != "ulysses" && kind != "allgather")
      refuse("software: context_kinds = {}: is not legal; give ring, ulysses or allgather", kind);
  for (const std::string& precision : s.context_precisions.value_or(std::vector<std::string>{}))
    (void)parse_precision(precision, "software: context_precisions =");
  for (const std::string& precision : s.precisions.value_or(std::vector<std::string>{}))
    (void)parse_precision(precision, "software: precisions =");
  if (s.precisions && s.precisions->empty())
    refuse("software: precisions = []: give at least one; legal: f32, bf16, fp8, fp4");
  for (const std::string& kind : s.recompute.value_or(std::vector<std::string>{}))
    (void)parse_recompute(kind, "software: recompute =");
  for (const std::string& kind : s.activation_offload_recompute.value_or(std::vector<std::string>{}))
    (void)parse_recompute(kind, "software: activation_offload_recompute =");
  if (s.activation_offload_recompute && s.activation_offload_recompute->empty())
    refuse(
        "software: activation_offload_recompute = []: leave it out, or give of none, selective, full, or a "
        "list of ops");
  if (s.recompute && s.recompute->empty())
    refuse("software: recompute = []: give at least one; legal: none, selective, full, or a list of ops");
  for (const std::string& what : s.offloads.value_or(std::vector<std::string>{}))
    if (std::find(std::begin(offloaded_states), std::end(offloaded_states), what) ==
        std::end(offloaded_states))
      refuse("software: offloads = {}: no such state{}; legal: {}", what,
             did_you_mean(what, {std::begin(offloaded_states), std::end(offloaded_states)}),
             fmt::join(offloaded_states, ", "));
  if (s.offloads && s.offloads->empty())
    refuse("software: offloads = []: leave it out, or give of {}", fmt::join(offloaded_states, ", "));
  in_order("low, high", s.low, s.high);
  in_order("nodes_low, nodes_high", s.nodes_low, s.nodes_high);
  in_order("experts_low, experts_high", s.experts_low, s.experts_high);
  in_order("far_low, far_high", s.far_low, s.far_high);
  for (const auto& [key, range] : {std::pair{"measured_gpus", &s.measured_gpus},
                                   {"measured_parameters", &s.measured_parameters},
                                   {"measured_seq_len", &s.measured_seq_len}})
    if (*range && ((*range)->size() != 2 || (*range)->front() < 1 || (*range)->back() < (*range)->front()))
      refuse("software: {} = [{}] is not legal: give the least and the most", key, fmt::join(**range, ", "));
}

static bool is_preset(const std::string& name) {
  const std::vector<std::string> names = software_preset_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

Software software_from_toml(const std::string& text, const std::string& where) {
  const toml::table table = parse_toml(text, where);
  const toml::node* const base = table.get("version_of");
  if (base != nullptr && (!base->is_string() || !is_preset(base->value_or(std::string()))))
    refuse("{}: version_of = {} is not legal: give a preset in quotes: {}", where, shown(*base),
           fmt::join(software_preset_names(), ", "));
  Software s;
  if (base != nullptr) {
    s = load_software(base->value_or(std::string()));
    s.version_of = base->value_or(std::string());
  }
  std::set<std::string> legal{"as_of", "version_of"};
  s.name = read_name(table, where, legal);
  if (const toml::node* date = table.get("as_of"); date != nullptr && !date->is_string())
    refuse("{}: as_of = {} is not legal: give a year and a month in quotes, as \"2025-11\"", where,
           shown(*date));
  s.as_of = table["as_of"].value_or(std::string());
  read_fields(table, software_fields(), where, s, legal);
  read_list<std::string>(table, "schedules", where, s.schedules, legal);
  read_list<std::int64_t>(table, "zero_stages", where, s.zero_stages, legal);
  read_list<std::int64_t>(table, "pipeline_zero_stages", where, s.pipeline_zero_stages, legal);
  read_list<std::int64_t>(table, "tensor_zero_stages", where, s.tensor_zero_stages, legal);
  read_list<std::string>(table, "context_kinds", where, s.context_kinds, legal);
  read_list<std::string>(table, "context_precisions", where, s.context_precisions, legal);
  read_list<std::int64_t>(table, "dynamic_context_zero_stages", where, s.dynamic_context_zero_stages, legal);
  // A version may lack what its preset has.
  if (s.dynamic_context_zero_stages && s.dynamic_context_zero_stages->empty() && base != nullptr)
    s.dynamic_context_zero_stages.reset();
  read_list<std::string>(table, "precisions", where, s.precisions, legal);
  read_list<std::string>(table, "recompute", where, s.recompute, legal);
  read_list<std::string>(table, "offloads", where, s.offloads, legal);
  read_list<std::int64_t>(table, "offload_zero_stages", where, s.offload_zero_stages, legal);
  read_list<std::string>(table, "activation_offload_recompute", where, s.activation_offload_recompute, legal);
  read_list<std::string>(table, "measured_on", where, s.measured_on, legal);
  read_list<std::int64_t>(table, "measured_gpus", where, s.measured_gpus, legal);
  read_list<std::int64_t>(table, "measured_parameters", where, s.measured_parameters, legal);
  read_list<std::int64_t>(table, "measured_seq_len", where, s.measured_seq_len, legal);
  // What of a version's numbers its preset says, it says where they come from too.
  const Provenance of_base = std::exchange(s.provenance, {});
  read_provenance(table, where, s.provenance, legal);
  for (const auto list : {&Provenance::measured, &Provenance::published, &Provenance::fitted})
    if (!(s.provenance.*list)) s.provenance.*list = of_base.*list;
  refuse_other_keys(table, legal, where, "see docs/planning.md for the keys of a training program");
  validate(s);
  return s;
}

std::string to_toml(const Software& s) {
  std::string text = fmt::format("name = {}\n", quoted(s.name));
  if (!s.as_of.empty()) text += fmt::format("as_of = {}\n", quoted(s.as_of));
  if (!s.version_of.empty()) text += fmt::format("version_of = {}\n", quoted(s.version_of));
  text += write_fields(s, software_fields());
  if (!s.version_of.empty() && !s.dynamic_context_zero_stages) text += "dynamic_context_zero_stages = []\n";
  text += list_text("schedules", s.schedules) + list_text("zero_stages", s.zero_stages) +
          list_text("pipeline_zero_stages", s.pipeline_zero_stages) +
          list_text("tensor_zero_stages", s.tensor_zero_stages) +
          list_text("context_kinds", s.context_kinds) +
          list_text("context_precisions", s.context_precisions) +
          list_text("dynamic_context_zero_stages", s.dynamic_context_zero_stages) +
          list_text("precisions", s.precisions) + list_text("recompute", s.recompute) +
          list_text("offloads", s.offloads) + list_text("offload_zero_stages", s.offload_zero_stages) +
          list_text("activation_offload_recompute", s.activation_offload_recompute) +
          list_text("measured_on", s.measured_on) + list_text("measured_gpus", s.measured_gpus) +
          list_text("measured_parameters", s.measured_parameters) +
          list_text("measured_seq_len", s.measured_seq_len) + provenance_text(s.provenance);
  return text;
}

std::vector<std::string> software_preset_names() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_embedded_software; ++i) names.emplace_back(embedded_software[i].name);
  return names;
}

Software load_software(const std::string& name_or_path) {
  for (std::size_t i = 0; i < num_embedded_software; ++i)
    if (name_or_path == embedded_software[i].name)
      return software_from_toml(embedded_software[i].text, "configs/software/" + name_or_path + ".toml");
  std::error_code error;
  if (std::filesystem::status(name_or_path, error).type() == std::filesystem::file_type::not_found)
    refuse("--software {}: neither a preset nor a file{}; the presets are {}", name_or_path,
           did_you_mean(name_or_path, software_preset_names()), fmt::join(software_preset_names(), ", "));
  return software_from_toml(read_text(name_or_path, "--software"), name_or_path);
}

}  // namespace echelon
