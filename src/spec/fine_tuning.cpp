#include "spec/fine_tuning.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "spec/block.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

constexpr const char* no_pattern = "none";

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

}  // namespace

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

std::string freeze_text(const FineTuning& tuning) {
  return tuning.freeze.empty() ? no_pattern : fmt::format("{}", fmt::join(tuning.freeze, ","));
}

std::vector<std::string> parse_freeze(const std::string& text) {
  std::vector<std::string> patterns;
  if (text == no_pattern) return patterns;
  std::istringstream in(text + ",");
  for (std::string pattern; std::getline(in, pattern, ',');) patterns.push_back(pattern);
  return patterns;
}

void tune(BlockProgram& program, const ModelSpec& model) {
  const std::vector<std::string>& patterns = model.tuning.freeze;
  if (patterns.empty()) return;
  for (BlockOp& op : program.ops) {
    for (std::vector<ParamSpec>* list : {&op.weights, &op.biases})
      for (ParamSpec& spec : *list)
        spec.frozen = std::any_of(patterns.begin(), patterns.end(),
                                  [&](const std::string& pattern) { return matches(pattern, spec.name); });
    // Its input's gradient comes of the weights alone.
    if (op.kind == OpKind::linear && !any_trained(op.weights)) op.backward_reads.clear();
  }
}

FreezeProblem freeze_problem(const ModelSpec& model) {
  if (model.tuning.freeze.empty()) return {};
  const std::vector<ParamSpec> all = all_parameters(model);
  for (const std::string& pattern : model.tuning.freeze)
    if (std::none_of(all.begin(), all.end(),
                     [&](const ParamSpec& spec) { return matches(pattern, spec.name); }))
      return {fmt::format("no parameter of {} has a name like {}", model.name,
                          pattern.empty() ? "an empty one" : pattern),
              nearest(pattern, all)};
  if (!any_trained(all)) return {fmt::format("nothing of {} would be trained", model.name), {no_pattern}};
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.has_experts(layer)) continue;
    const BlockProgram program = layer_program(model, layer);
    const std::vector<ParamSpec>& list = program.find(OpKind::experts_in)->weights;
    // The router, then gate, up and down of each expert.
    for (std::size_t i = 1; i + 2 < list.size(); i += 3)
      if (list[i].frozen != list[i + 1].frozen)
        return {fmt::format("{} and {} are one matrix here, and one of them would be trained", list[i].name,
                            list[i + 1].name),
                {no_pattern, list[i].name + "," + list[i + 1].name}};
  }
  return {};
}

}  // namespace echelon
