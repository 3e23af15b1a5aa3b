#include "spec/recompute.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "spec/block_passes.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

// Megatron's --recompute-modules.
const std::map<std::string, std::string>& other_names() {
  static const std::map<std::string, std::string> names{
      {"core_attn", "attention"}, {"layernorm", "norm"}, {"moe_act", "activation"},
      {"mlp", "mlp_in"},          {"moe", "experts_in"}, {"mla_up_proj", "latent"}};
  return names;
}

// One layer stands for all that are alike.
std::vector<BlockProgram> layers_of(const ModelSpec& m) {
  std::vector<BlockProgram> layers;
  for (const LayerKind& kind : layer_kinds(m)) layers.push_back(layer_program(m, kind.layer));
  return layers;
}

// Of all families: the presets have one of each.
const std::set<std::string>& known_names() {
  static const std::set<std::string> names = [] {
    std::set<std::string> all;
    for (const std::string& preset : model_preset_names())
      for (const std::string& name : recompute_names(load_model(preset))) all.insert(name);
    return all;
  }();
  return names;
}

}  // namespace

const Recompute Recompute::none;
const Recompute Recompute::selective({name_of(OpKind::attention)});
const Recompute Recompute::full = [] {
  Recompute all;
  all.everything_ = true;
  return all;
}();

Recompute::Recompute(const std::vector<std::string>& ops) {
  std::set<std::string> names;
  for (const std::string& op : ops) {
    const auto other = other_names().find(op);
    names.insert(other == other_names().end() ? op : other->second);
  }
  for (OpKind cheap : {OpKind::norm, OpKind::activation, OpKind::narrow}) names.erase(name_of(cheap));
  ops_.assign(names.begin(), names.end());
}

bool Recompute::contains(const BlockOp& op) const {
  const auto has = [&](const std::string& name) {
    return std::binary_search(ops_.begin(), ops_.end(), name);
  };
  return everything_ || has(op.name) || has(name_of(op.kind));
}

std::string recompute_name(const Recompute& recompute) {
  if (recompute == Recompute::none) return "none";
  if (recompute == Recompute::selective) return "selective";
  if (recompute == Recompute::full) return "full";
  return fmt::format("{}", fmt::join(recompute.ops(), ","));
}

std::string recompute_name(const PipelineRecompute& recompute) {
  std::string text;
  const auto& kinds = recompute.kinds();
  for (auto at = kinds.begin(); at != kinds.end();) {
    const auto end = std::find_if(at, kinds.end(), [&](const Recompute& kind) { return !(kind == *at); });
    text += (text.empty() ? "" : "/") + recompute_name(*at);
    if (end - at > 1) text += fmt::format("*{}", end - at);
    at = end;
  }
  return text;
}

PipelineRecompute parse_pipeline_recompute(const std::string& text, const std::string& field) {
  std::vector<Recompute> kinds;
  std::istringstream in(text + "/");
  for (std::string kind; std::getline(in, kind, '/');) {
    std::size_t ranks = 1;
    if (const std::size_t star = kind.find('*'); star != std::string::npos) {
      const std::string count = kind.substr(star + 1);
      constexpr std::size_t most_digits = 6;
      if (count.empty() || count.size() > most_digits ||
          count.find_first_not_of("0123456789") != std::string::npos || (ranks = std::stoul(count)) == 0)
        refuse("{} {}: {} is no number of pipeline ranks; legal: full*2/none*2 and the like", field, text,
               count);
      kind.resize(star);
    }
    kinds.insert(kinds.end(), ranks, parse_recompute(kind, field));
  }
  return PipelineRecompute(std::move(kinds));
}

Recompute parse_recompute(const std::string& text, const std::string& field) {
  for (const Recompute* kind : {&Recompute::none, &Recompute::selective, &Recompute::full})
    if (text == recompute_name(*kind)) return *kind;
  std::vector<std::string> ops;
  std::istringstream in(text);
  bool known = !text.empty() && text.back() != ',';
  for (std::string op; std::getline(in, op, ',');) {
    known &= known_names().contains(op) || other_names().contains(op);
    ops.push_back(op);
  }
  if (!known)
    refuse(
        "{} {}: legal: none, selective, full, or a list of a layer's ops, as in norm,activation,attention: "
        "{}",
        field, text, fmt::join(known_names(), ", "));
  return Recompute(ops);
}

std::vector<std::string> recompute_names(const ModelSpec& m) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const BlockProgram& layer : layers_of(m))
    for (const BlockOp& op : layer.ops) {
      add(name_of(op.kind));
      add(op.name);
    }
  return names;
}

std::string not_in_model(const Recompute& recompute, const ModelSpec& m) {
  // What a search asks of every configuration: every model has these.
  if (recompute.ops().empty() || recompute == Recompute::selective) return {};
  const std::vector<std::string> names = recompute_names(m);
  for (const std::string& op : recompute.ops())
    if (std::find(names.begin(), names.end(), op) == names.end()) return op;
  return {};
}

}  // namespace echelon
