#include "spec/fine_tuning.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/parse_number.h"
#include "spec/block.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

constexpr const char* none = "none";

bool any_trained(const std::vector<ParamSpec>& list) {
  return std::any_of(list.begin(), list.end(), [](const ParamSpec& spec) { return !spec.frozen; });
}

// Characters to be changed, left out or put in so that the pattern's words match the name; a star takes any
// number for nothing.
int edits(const std::string& pattern, const std::string& name) {
  std::vector<int> row(name.size() + 1), last;
  for (std::size_t k = 0; k <= name.size(); ++k) row[k] = static_cast<int>(k);
  for (const char c : pattern) {
    last = row;
    row[0] = last[0] + (c == '*' ? 0 : 1);
    for (std::size_t k = 1; k <= name.size(); ++k)
      row[k] = c == '*' ? std::min(last[k], row[k - 1])
                        : std::min({last[k] + 1, row[k - 1] + 1, last[k - 1] + (c == name[k - 1] ? 0 : 1)});
  }
  return row.back();
}

std::vector<std::string> nearest(const std::string& pattern, const std::vector<ParamSpec>& all) {
  constexpr std::size_t most = 3;
  std::vector<std::pair<int, std::string>> by_edits;
  for (const ParamSpec& spec : all) by_edits.emplace_back(edits(pattern, spec.name), spec.name);
  std::stable_sort(by_edits.begin(), by_edits.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(most, by_edits.size()); ++i) names.push_back(by_edits[i].second);
  return names;
}

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text + ",");
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

// As PEFT has it: whole names behind a dot.
bool is_target(const std::string& target, const std::string& module) {
  return module == target || module.ends_with("." + target);
}

bool is_adapted(const BlockOp& op, const ParamSpec& weight, const Lora& lora) {
  if (op.kind != OpKind::linear) return false;
  if (lora.targets.empty()) return op.name.starts_with("attention");
  const std::string module = module_of(weight);
  return std::any_of(lora.targets.begin(), lora.targets.end(),
                     [&](const std::string& target) { return is_target(target, module); });
}

// Cut as the matrix is: by columns B has this rank's rows, by rows A has its columns. The other one is whole
// on every tp rank, each of which has a part of its gradient. So what a rank adds to its columns is theirs,
// what it adds to its part of a sum is a part of that, and nothing more travels.
Adapter adapter(const BlockOp& op, std::size_t index, const Lora& lora) {
  const ParamSpec& weight = op.weights[index];
  const bool in_out = op.order == WeightOrder::in_out;
  const std::int64_t in = weight.shape[in_out ? 0 : 1], out = weight.shape[in_out ? 1 : 0];
  const auto part = [&](const char* name, std::int64_t rows, std::int64_t cols) {
    ParamSpec p;
    p.name = module_of(weight) + name;
    p.shape = {rows, cols};
    p.adapter = true;
    return p;
  };
  Adapter made{index, part(".lora_A.weight", lora.rank, in), part(".lora_B.weight", out, lora.rank)};
  made.a.init = Init::uniform;  // Kaiming's with the slope sqrt(5), as PEFT: up to 1 / sqrt(in)
  made.a.init_std = 1 / std::sqrt(3.0 * static_cast<double>(in));
  made.b.init = Init::zeros;
  const bool by_columns = weight.shard_dim == (in_out ? 1 : 0);
  ParamSpec &cut = by_columns ? made.b : made.a, &whole = by_columns ? made.a : made.b;
  cut.shard_dim = by_columns ? 0 : 1;
  cut.pieces = weight.pieces;
  whole.tp_partial = true;
  return made;
}

void adapt(BlockProgram& program, const Lora& lora) {
  for (BlockOp& op : program.ops) {
    for (std::size_t i = 0; i < op.weights.size(); ++i)
      if (is_adapted(op, op.weights[i], lora)) op.adapters.push_back(adapter(op, i, lora));
    if (op.adapters.empty()) continue;
    op.adapter_scale = lora.scale();
    const bool by_columns = op.adapters.front().b.shard_dim >= 0;
    program.values.push_back({op.name + ".adapted", by_columns ? Home::whole : Home::partial_sum,
                              lora.rank * std::ssize(op.adapters)});
    op.outputs.push_back(static_cast<int>(program.values.size()) - 1);
  }
}

}  // namespace

std::vector<ParamSpec> adaptable_matrices(const ModelSpec& model) {
  std::vector<ParamSpec> all;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
    for (const BlockOp& op : layer_program(model, layer).ops)
      if (op.kind == OpKind::linear) all.insert(all.end(), op.weights.begin(), op.weights.end());
  return all;
}

std::string module_of(const ParamSpec& weight) {
  const std::string_view name = weight.name, end = ".weight";
  return std::string(name.substr(0, name.size() - (name.ends_with(end) ? end.size() : 0)));
}

std::string lora_text(const Lora& lora) {
  if (lora == Lora{}) return none;
  return fmt::format("rank={},alpha={}{}{}", lora.rank, lora.alpha,
                     lora.targets.empty() ? "" : ",targets=", fmt::join(lora.targets, ","));
}

Lora parse_lora(const std::string& text, const std::string& field) {
  Lora lora;
  if (text == none) return lora;
  std::set<std::string> given;
  bool in_targets = false;
  for (const std::string& part : parts_of(text)) {
    const std::size_t equals = part.find('=');
    const std::string key = part.substr(0, equals),
                      value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (equals == std::string::npos && in_targets) {
      lora.targets.push_back(part);
      continue;
    }
    in_targets = key == "targets";
    const bool known = key == "rank" || key == "alpha" || in_targets;
    if (equals == std::string::npos || !known || !given.insert(key).second)
      refuse("{} {}: no such form; legal: rank=8, rank=8,alpha=16, rank=8,alpha=16,targets=NAME,NAME or none",
             field, text);
    const std::string number = fmt::format("{} {}: {} =", field, text, key);
    if (in_targets)
      lora.targets.push_back(value);
    else if (key == "rank")
      lora.rank = parse_number<std::int64_t>(number, value);
    else
      lora.alpha = parse_number<double>(number, value);
  }
  if (!given.contains("rank")) refuse("{} {}: says no rank; legal: rank=8", field, text);
  if (lora.rank < 1) refuse("{} {}: the rank must be at least 1; legal: rank=8", field, text);
  if (!given.contains("alpha")) lora.alpha = static_cast<double>(lora.rank);
  if (!(lora.alpha > 0) || !std::isfinite(lora.alpha))
    refuse("{} {}: alpha must be a number above 0; legal: rank={},alpha={}", field, text, lora.rank,
           2 * lora.rank);
  return lora;
}

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

std::string freeze_text(const FineTuning& tuning) {
  return tuning.freeze.empty() ? none : fmt::format("{}", fmt::join(tuning.freeze, ","));
}

std::vector<std::string> parse_freeze(const std::string& text) {
  return text == none ? std::vector<std::string>() : parts_of(text);
}

void tune(BlockProgram& program, const ModelSpec& model) {
  if (model.tuning == FineTuning{}) return;
  const std::vector<std::string>& patterns = model.tuning.freeze;
  const bool adapts = model.tuning.lora.rank > 0;
  if (adapts) adapt(program, model.tuning.lora);
  const auto set = [&](ParamSpec& spec) {
    spec.frozen = (adapts && !spec.adapter) ||
                  std::any_of(patterns.begin(), patterns.end(),
                              [&](const std::string& pattern) { return matches(pattern, spec.name); });
  };
  for (BlockOp& op : program.ops) {
    for (std::vector<ParamSpec>* list : {&op.weights, &op.biases})
      for (ParamSpec& spec : *list) set(spec);
    bool trains_a = false, trains_b = false;
    for (Adapter& adapter : op.adapters) {
      set(adapter.a);
      set(adapter.b);
      trains_a |= !adapter.a.frozen;
      trains_b |= !adapter.b.frozen;
    }
    if (op.kind != OpKind::linear) continue;
    // The gradient of its input comes of the weights alone.
    op.backward_reads.clear();
    if (any_trained(op.weights) || trains_a) op.backward_reads.push_back(op.inputs.front());
    if (trains_b) op.backward_reads.push_back(op.outputs.back());
  }
}

std::int64_t idle_blocks(const ModelSpec& model) {
  if (model.tuning == FineTuning{} || any_trained(embedding_parameters(model))) return 0;
  std::int64_t layer = 0;
  while (layer < model.num_layers && !model.has_experts(layer) &&
         !any_trained(block_parameters(model, layer)))
    ++layer;
  return 1 + layer;
}

std::vector<AdaptedMatrix> adapted_matrices(const ModelSpec& model) {
  std::vector<AdaptedMatrix> all;
  if (model.tuning.lora.rank == 0) return all;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
    for (const BlockOp& op : layer_program(model, layer).ops)
      for (const Adapter& adapter : op.adapters)
        all.push_back({op.weights[adapter.weight], adapter.a, adapter.b, op.order, op.adapter_scale});
  return all;
}

// Of a model with parts all of whose weights are trained; empty of others.
static std::string trained_as_a_whole(const ModelSpec& model) {
  if (model.latent_attention())
    return fmt::format("{} has latent attention, all of whose weights are trained", model.name);
  if (model.state_space.heads > 0)
    return fmt::format("{} has layers with a state space, all of whose weights are trained", model.name);
  const bool relu2_experts = model.experts != Experts::none && model.expert_activation() == Activation::relu2;
  if (!model.layer_pattern.empty() || relu2_experts || model.expert_latent > 0)
    return fmt::format("{} has Nemotron-H's layers or experts, all of whose weights are trained", model.name);
  return {};
}

TuningProblem freeze_problem(const ModelSpec& model) {
  if (model.tuning.freeze.empty()) return {};
  if (std::string words = trained_as_a_whole(model); !words.empty()) return {std::move(words), {none}};
  const std::vector<ParamSpec> all = all_parameters(model);
  for (const std::string& pattern : model.tuning.freeze)
    if (std::none_of(all.begin(), all.end(),
                     [&](const ParamSpec& spec) { return matches(pattern, spec.name); }))
      return {fmt::format("no parameter of {} has a name like {}", model.name,
                          pattern.empty() ? "an empty one" : pattern),
              nearest(pattern, all)};
  if (!any_trained(all)) return {fmt::format("nothing of {} would be trained", model.name), {none}};
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    for (const BlockOp& op : layer_program(model, layer).ops)  // xielu's two numbers
      if (op.kind == OpKind::activation && !op.weights.empty() &&
          op.weights.front().frozen != op.weights.back().frozen)
        return {fmt::format("{} and {} lie side by side here, and one of them would be trained",
                            op.weights.front().name, op.weights.back().name),
                {none, op.weights.front().name + "," + op.weights.back().name}};
    if (!model.has_experts(layer)) continue;
    const BlockProgram program = layer_program(model, layer);
    const BlockOp& op = *program.find(OpKind::experts_in);
    // The router's, then those of gate, up and down of each expert.
    for (const std::vector<ParamSpec>* list : {&op.weights, &op.biases})
      for (std::size_t i = 1; i + 2 < list->size(); i += 3) {
        const ParamSpec &gate = (*list)[i], &up = (*list)[i + 1];
        if (gate.frozen != up.frozen)
          return {fmt::format("{} and {} are one {} here, and one of them would be trained", gate.name,
                              up.name, list == &op.weights ? "matrix" : "bias"),
                  {none, gate.name + "," + up.name}};
      }
  }
  return {};
}

TuningProblem lora_problem(const ModelSpec& model) {
  const Lora& lora = model.tuning.lora;
  if (lora.rank == 0) return {};
  if (std::string words = trained_as_a_whole(model); !words.empty()) return {std::move(words), {none}};
  if (lora.rank > model.hidden)
    return {fmt::format("{} has {} columns, and a rank beyond that is no saving", model.name, model.hidden),
            {"rank=8"}};
  std::vector<std::string> modules;  // of every layer, which a target may name
  for (const ParamSpec& weight : adaptable_matrices(model)) modules.push_back(module_of(weight));
  std::set<std::string> ends;
  for (const std::string& module : modules) ends.insert(module.substr(module.rfind('.') + 1));
  const std::vector<std::string> all{
      fmt::format("rank={},alpha={},targets={}", lora.rank, lora.alpha, fmt::join(ends, ","))};
  if (lora.targets.empty() && model.num_attention_layers() == 0)
    return {fmt::format("{} has no attention, whose matrices have adapters where none are named", model.name),
            all};
  for (const std::string& target : lora.targets)
    if (std::none_of(modules.begin(), modules.end(),
                     [&](const std::string& module) { return is_target(target, module); }))
      return {fmt::format("no matrix of attention, of a short convolution or of an MLP of {} is called {} "
                          "(those of routed experts, the "
                          "embedding and the output layer have no adapters)",
                          model.name, target.empty() ? "nothing" : target),
              all};
  return {};
}

}  // namespace echelon
