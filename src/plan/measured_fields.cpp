#include "plan/measured_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <sstream>
#include <vector>

#include "base/edits.h"
#include "base/error.h"
#include "base/parse_number.h"
#include "base/units.h"
#include "spec/plan_fields.h"

namespace echelon {
namespace {

std::string flag_name(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return key;
}

// Before what is missing is named: a field may only be written otherwise.
void refuse_unknown(const GivenFields& fields) {
  std::vector<std::string> legal{"gpus", "precision"};
  for (const PlanField& field : plan_fields())
    if (field.is_flag_of_plan()) legal.push_back(field.name());
  for (const auto& [name, field] : fields)
    if (!field.value.empty() && std::find(legal.begin(), legal.end(), name) == legal.end())
      refuse(
          "{}: {} is no field of a plan{}; legal: gpus, precision, and the flags of `echelon plan` by their "
          "names",
          field.where, name, did_you_mean(name, legal));
}

}  // namespace

std::string FilePlace::text() const {
  return fmt::format("--from {}, line {}{}", file, line,
                     column > 0 ? fmt::format(", column {}", column) : "");
}

std::string without_escapes(const std::string& line) {
  const auto is_final = [](char c) { return c >= '@' && c <= '~'; };
  std::string plain;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\x1b') {
      if (line[i] != '\r') plain += line[i];
      continue;
    }
    ++i;
    if (i < line.size() && line[i] == '[')
      while (++i < line.size() && !is_final(line[i])) {
      }
    else if (i < line.size() && line[i] == '(')  // a set of characters
      ++i;
  }
  return plain;
}

std::size_t launcher_prefix(const std::string& line) {
  static const std::regex prefix(
      R"( {0,9}[0-9]{1,9}: |)"
      R"(\[([\w.-]{1,300}@)?[0-9]{1,9},[0-9]{1,9}\]<std(out|err)>: ?|)"
      R"(\[[A-Za-z_]{1,99}[0-9]{1,9}\]:|)"
      R"([A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4}(<std(out|err)>: ?)?|)"
      R"([A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} |)"
      R"(\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}([.,][0-9]{1,9})?(Z|[+-][0-9]{2}:?[0-9]{2})?\]?:? )");
  std::size_t length = 0;
  std::smatch found;
  while (std::regex_search(line.begin() + static_cast<std::ptrdiff_t>(length), line.end(), found, prefix,
                           std::regex_constants::match_continuous))
    length += static_cast<std::size_t>(found.length());
  return length;
}

bool read_remark(const std::string& line, const std::string& where, GivenFields& into) {
  const std::string begin = "# echelon:";
  if (!line.starts_with(begin)) return false;
  std::istringstream in(line.substr(begin.size()));
  for (std::string pair; in >> pair;) {
    const auto equals = pair.find('=');
    if (equals == std::string::npos) refuse("{}: {} is not legal: give KEY=VALUE", where, pair);
    into[flag_name(pair.substr(0, equals))] = {pair.substr(equals + 1), where};
  }
  return true;
}

MeasuredStep measured_step(const GivenFields& fields, const std::string& model, double seconds,
                           const std::string& where) {
  MeasuredStep step;
  step.seconds = seconds;
  step.where = where;
  Plan& plan = step.plan;
  plan.sequence_parallel = true;  // as in searched plans; no effect if tp cuts nothing
  const auto given = [&](const char* name) {
    return fields.contains(name) && !fields.at(name).value.empty();
  };
  refuse_unknown(fields);
  for (const char* name : {"global-batch", "seq-len"})
    if (!given(name)) refuse("{}: does not say {}; give it, as in \"# echelon: {}=...\"", where, name, name);
  if (!given("gpus") && !given("dp"))
    refuse("{}: does not say over how many devices; give gpus or dp, as in \"# echelon: gpus=64\"", where);
  if (!given("model") && model.empty())
    refuse("{}: does not say which model; give --model, or \"# echelon: model=...\"", where);
  if (!given("model")) plan.model = load_model(model);
  std::int64_t gpus = 0;
  for (const auto& [name, field] : fields) {
    if (field.value.empty()) continue;
    const std::string place = fmt::format("{}: {}", field.where, name);
    if (name == "gpus") {
      gpus = parse_number<std::int64_t>(place, field.value);
      if (gpus < 1 || gpus > Mesh::most_ranks)
        refuse("{} {}: must be from 1 to {}", place, field.value, Mesh::most_ranks);
    } else if (name == "precision") {
      step.precision = parse_precision(field.value, place);
    } else {
      const PlanField& known = *find_field(name);
      read_text(known, plan, field.value, place);
      if (is_out_of_range(known, plan)) refuse("{} {}: must be {}", place, field.value, range_text(known));
    }
  }
  try {
    validate(plan.mesh);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  if (gpus > 0) {
    const std::int64_t others = plan.mesh.num_ranks() / plan.mesh.dp();
    if (!given("dp")) {
      if (gpus % others != 0)
        refuse("{}: gpus {} is not legal: tp, pp and cp make {} ranks, which do not divide it",
               fields.at("gpus").where, gpus, others);
      plan.mesh.set(Axis::dp, static_cast<int>(gpus / others));
    } else if (plan.mesh.num_ranks() != gpus) {
      refuse("{}: gpus {} is not legal: the mesh has {}", fields.at("gpus").where, gpus,
             counted(plan.mesh.num_ranks(), "rank"));
    }
  }
  if (plan.chunks > 1 && !given("schedule")) plan.schedule = "interleaved";
  if (!given("layers-per-stage") && plan.mesh.pp() > 1) plan.balance_layers = false;
  Workload any;
  any.plan = plan;
  any.software.name = "any";
  any.software.tensor_repeats_heads = any.software.context_repeats_heads = true;
  if (const std::string problem = shape_problem(any, plan); !problem.empty())
    refuse("{}: {}", where, problem);
  return step;
}

}  // namespace echelon
