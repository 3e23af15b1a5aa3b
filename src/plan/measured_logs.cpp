// Logs of training programs: a step from the lines that they print, and what they say of its configuration.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/median.h"
#include "base/parse_number.h"
#include "plan/measured_fields.h"

namespace echelon {
namespace {

struct Log {
  std::string file, model;
  std::vector<std::string> lines;
  GivenFields fields;
};

// Without the sequences that colour a terminal.
std::string without_colours(const std::string& line) {
  std::string plain;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\x1b' && i + 1 < line.size() && line[i + 1] == '[') {
      while (i < line.size() && line[i] != 'm') ++i;
    } else if (line[i] != '\r') {
      plain += line[i];
    }
  }
  return plain;
}

// The number behind `key` in a line; no value where the key is not there. "4.02K" and "5,762" are numbers.
std::optional<double> number_behind(const Log& log, std::size_t line, const std::string& key) {
  const std::string& text = log.lines[line];
  const auto at = text.find(key);
  if (at == std::string::npos) return {};
  std::size_t begin = at + key.size();
  while (begin < text.size() && text[begin] == ' ') ++begin;
  std::string digits;
  std::size_t end = begin;
  for (; end < text.size() &&
         (std::isdigit(static_cast<unsigned char>(text[end])) || text[end] == '.' || text[end] == ',' ||
          text[end] == 'E' || text[end] == 'e' || text[end] == '+' || text[end] == '-');
       ++end)
    if (text[end] != ',') digits += text[end];
  double scale = 1;
  constexpr std::pair<char, double> scales[] = {{'K', 1e3}, {'M', 1e6}, {'G', 1e9}, {'B', 1e9}, {'T', 1e12}};
  for (const auto& [letter, factor] : scales)
    if (end < text.size() && text[end] == letter) scale = factor;
  const std::string where = FilePlace{log.file, line + 1, begin + 1}.text();
  if (digits.empty()) refuse("{}: no number behind \"{}\"", where, key);
  const double value = parse_number<double>(where + ":", digits);
  if (!(std::isfinite(value) && value > 0))
    refuse("{}: {} {} is not legal: must be above 0", where, key, digits);
  return value * scale;
}

void give(Log& log, const std::string& name, const std::string& value, std::size_t line) {
  log.fields.try_emplace(name, GivenField{value, FilePlace{log.file, line + 1}.text()});
}

// The first steps of a run warm up.
double usual(std::vector<double> seconds) {
  const std::size_t warm = seconds.size() > 4 ? 2 : seconds.size() > 1 ? 1 : 0;
  seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(warm));
  return median(seconds);
}

// Of each line that has the key.
std::vector<double> numbers(const Log& log, const std::string& key) {
  std::vector<double> all;
  for (std::size_t i = 0; i < log.lines.size(); ++i)
    if (const auto value = number_behind(log, i, key)) all.push_back(*value);
  return all;
}

bool is_of_word(char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; }

// The digits behind a key that no word ends with; empty where there are none.
std::string digits_behind(const std::string& line, const std::string& key) {
  for (std::size_t at = 0; (at = line.find(key, at)) != std::string::npos; ++at) {
    const std::size_t begin = at + key.size();
    const std::size_t end = std::min(line.find_first_not_of("0123456789", begin), line.size());
    if (end > begin && (at == 0 || !is_of_word(line[at - 1]))) return line.substr(begin, end - begin);
  }
  return {};
}

// Name and value of "  tensor_model_parallel_size ...................... 8", which may have a rank before it
// ("0: ").
std::optional<std::pair<std::string, std::string>> argument_of(const std::string& line) {
  const std::size_t dots = line.find(" ...");
  if (dots == std::string::npos) return {};
  std::size_t name = dots;
  while (name > 0 && is_of_word(line[name - 1])) --name;
  const std::size_t rank = line.find_first_not_of("0123456789");
  const std::size_t begin = rank > 0 && line.compare(rank, 2, ": ") == 0 ? rank + 2 : 0;
  std::size_t value = line.find_first_not_of('.', dots + 1);
  if (name == dots || line.find_first_not_of(" \t", begin) != name || value == std::string::npos ||
      line[value] != ' ')
    return {};
  const std::size_t end = line.find_last_not_of(" \t") + 1;
  ++value;
  return std::pair{line.substr(name, dots - name), end > value ? line.substr(value, end - value) : ""};
}

void read_megatron_arguments(Log& log) {
  static const std::map<std::string, std::string> same{{"tensor_model_parallel_size", "tp"},
                                                       {"pipeline_model_parallel_size", "pp"},
                                                       {"context_parallel_size", "cp"},
                                                       {"expert_model_parallel_size", "ep"},
                                                       {"micro_batch_size", "micro-batch"},
                                                       {"global_batch_size", "global-batch"},
                                                       {"seq_length", "seq-len"},
                                                       {"world_size", "gpus"}};
  std::map<std::string, std::pair<std::string, std::size_t>> said;
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    const auto argument = argument_of(log.lines[i]);
    if (!argument) continue;
    said[argument->first] = {argument->second, i};
    if (const auto found = same.find(argument->first); found != same.end())
      give(log, found->second, argument->second, i);
  }
  const auto value = [&](const char* key) {
    const auto found = said.find(key);
    return found == said.end() || found->second.first == "None" ? std::string() : found->second.first;
  };
  const auto line = [&](const char* key) { return said.at(key).second; };
  if (!value("sequence_parallel").empty())
    give(log, "sp", value("sequence_parallel") == "True" ? "on" : "off", line("sequence_parallel"));
  if (value("use_megatron_fsdp") == "True" || value("use_torch_fsdp2") == "True")
    give(log, "zero", "3",
         line(value("use_megatron_fsdp") == "True" ? "use_megatron_fsdp" : "use_torch_fsdp2"));
  else if (!value("use_distributed_optimizer").empty())
    give(log, "zero", value("use_distributed_optimizer") == "True" ? "1" : "0",
         line("use_distributed_optimizer"));
  if (const std::string chunks = value("virtual_pipeline_model_parallel_size"); !chunks.empty()) {
    give(log, "schedule", "interleaved", line("virtual_pipeline_model_parallel_size"));
    give(log, "chunks", chunks, line("virtual_pipeline_model_parallel_size"));
  }
  if (const std::string kind = value("recompute_granularity"); kind == "full" || kind == "selective")
    give(log, "recompute", kind, line("recompute_granularity"));
  if (!value("fp8").empty()) give(log, "precision", "fp8", line("fp8"));
}

std::optional<double> megatron_seconds(Log& log) {
  const std::vector<double> ms = numbers(log, "elapsed time per iteration (ms):");
  if (ms.empty()) return {};
  read_megatron_arguments(log);
  return usual(ms) / 1000;
}

// A field for the digits behind each key, wherever the log has it.
void give_digits(Log& log, const std::vector<std::pair<const char*, const char*>>& fields) {
  for (std::size_t i = 0; i < log.lines.size(); ++i)
    for (const auto& [key, name] : fields)
      if (const std::string digits = digits_behind(log.lines[i], key); !digits.empty())
        give(log, name, digits, i);
}

std::optional<double> nanotron_seconds(Log& log) {
  const std::vector<double> ms = numbers(log, "elapsed_time_per_iteration_ms:");
  if (ms.empty()) return {};
  give_digits(log, {{"dp=", "dp"},
                    {"pp=", "pp"},
                    {"tp=", "tp"},
                    {"zero_stage=", "zero"},
                    {"sequence_length=", "seq-len"},
                    {"micro_batch_size=", "micro-batch"},
                    {"batch_accumulation_per_replica=", "accumulation"}});
  if (const auto found = log.fields.find("accumulation"); found != log.fields.end()) {
    const GivenField steps = found->second;
    log.fields.erase(found);
    double batch = parse_number<double>(steps.where, steps.value);
    for (const char* factor : {"micro-batch", "dp"})
      if (const auto part = log.fields.find(factor); part != log.fields.end())
        batch *= parse_number<double>(part->second.where, part->second.value);
    if (log.fields.contains("micro-batch") && log.fields.contains("dp"))
      log.fields.try_emplace("global-batch", GivenField{fmt::format("{}", std::llround(batch)), steps.where});
  }
  return usual(ms) / 1000;
}

std::optional<double> torchtitan_seconds(Log& log) {
  std::vector<double> token_seconds;  // of a device
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    if (log.lines[i].find("validate step:") != std::string::npos ||
        log.lines[i].find("loss:") == std::string::npos)
      continue;
    if (const auto tps = number_behind(log, i, " tps:")) token_seconds.push_back(1 / *tps);
  }
  if (token_seconds.empty()) return {};
  give_digits(log, {{"global batch size ", "global-batch"},
                    {"local batch size ", "micro-batch"},
                    {"sequence length ", "seq-len"}});
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    const std::string& line = log.lines[i];
    if (line.find("Applied full activation checkpointing") != std::string::npos)
      give(log, "recompute", "full", i);
    if (line.find("Applied selective activation checkpointing") != std::string::npos)
      give(log, "recompute", "selective", i);
    if (line.find("parallelism: pp=") == std::string::npos) continue;
    std::map<std::string, std::string> sizes;
    for (const std::string axis : {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"})
      if (const std::string size = digits_behind(line, axis + "="); !size.empty()) sizes[axis] = size;
    if (sizes.size() < 6) continue;
    for (const char* axis : {"pp", "cp", "tp", "ep"}) give(log, axis, sizes[axis], i);
    give(log, "hsdp", sizes["dp_replicate"], i);
    const std::int64_t replicas = std::stoll(sizes["dp_replicate"]), shards = std::stoll(sizes["dp_shard"]);
    give(log, "dp", std::to_string(replicas * shards), i);
    give(log, "zero", shards > 1 ? "3" : "0", i);
    if (std::stoi(sizes["cp"]) > 1) give(log, "cp-kind", "allgather", i);  // its default
  }
  // Tokens a second of a device: what a step takes follows from the configuration.
  const MeasuredStep step = measured_step(log.fields, log.model, 1, "--from " + log.file);
  const Plan& plan = step.plan;
  return usual(token_seconds) * static_cast<double>(plan.global_batch * plan.seq_len) /
         static_cast<double>(plan.mesh.num_ranks());
}

}  // namespace

std::optional<MeasuredStep> read_log(const std::string& text, const std::string& file,
                                     const std::string& model) {
  Log log{file, model, {}, {}};
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    log.lines.push_back(without_colours(line));
    read_remark(log.lines.back(), FilePlace{file, log.lines.size()}.text(), log.fields);
  }
  for (const auto& read : {megatron_seconds, nanotron_seconds, torchtitan_seconds})
    if (const auto seconds = read(log)) return measured_step(log.fields, model, *seconds, "--from " + file);
  return {};
}

}  // namespace echelon
