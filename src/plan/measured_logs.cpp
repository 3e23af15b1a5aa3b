// Reads logs of training programs: the time of a step, and what the log says of its configuration.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <regex>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/median.h"
#include "base/on_off.h"
#include "base/parse_number.h"
#include "plan/measured_fields.h"
#include "plan/program_names.h"

namespace echelon {
namespace {

struct Log {
  std::string file, model;
  std::vector<std::string> lines;
  GivenFields fields;
  bool is_cut = false;  // its last line has no end
};

// The number after `key` in a line; no value if the key is absent, or the log is cut where the number may go
// on. Accepts numbers such as "4.02K" and "5,762".
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
  if (log.is_cut && line + 1 == log.lines.size() && end == text.size()) return {};
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

// The median without the first steps, which warm up.
double usual(std::vector<double> seconds) {
  const std::size_t warm = seconds.size() > 4 ? 2 : seconds.size() > 1 ? 1 : 0;
  seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(warm));
  return median(seconds);
}

// A number and its line.
struct LoggedNumber {
  double value = 0;
  std::size_t line = 0;
};
// From each line that has the key.
std::vector<LoggedNumber> numbers(const Log& log, const std::string& key) {
  std::vector<LoggedNumber> all;
  for (std::size_t i = 0; i < log.lines.size(); ++i)
    if (const auto value = number_behind(log, i, key)) all.push_back({*value, i});
  return all;
}
double usual_seconds(const std::vector<LoggedNumber>& ms) {
  std::vector<double> seconds;
  for (const LoggedNumber& one : ms) seconds.push_back(one.value / 1000);
  return usual(std::move(seconds));
}

bool is_of_word(char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; }

// For settings of a log that plans do not have: a remark may give the nearest field. RequestError if it does
// not.
void refuse_unless_given(const Log& log, const std::string& field, std::size_t line,
                         const std::string& said) {
  if (!log.fields.contains(field))
    refuse("{}: {} is not priced; give what comes nearest, as in \"# echelon: {}=...\"",
           FilePlace{log.file, line + 1}.text(), said, field);
}

// A size of a model as the log states it.
struct LoggedSize {
  std::string key, value;
  std::size_t line = 0;
  std::int64_t ModelSpec::*size;
};
// RequestError if the log's sizes are not those of the given model.
void check_model(const Log& log, const std::vector<LoggedSize>& sizes) {
  const auto named = log.fields.find("model");
  const std::string name = named == log.fields.end() ? log.model : named->second.value;
  if (name.empty() || sizes.empty()) return;
  const ModelSpec model = load_model(name);
  for (const LoggedSize& one : sizes) {
    // Programs print these sizes even for models without such layers.
    if ((one.size == &ModelSpec::num_heads && model.num_attention_layers() == 0) ||
        (one.size == &ModelSpec::mlp_hidden && model.num_mlp_layers() == 0))
      continue;
    const std::string where = FilePlace{log.file, one.line + 1}.text() + ": " + one.key;
    if (parse_number<std::int64_t>(where, one.value) != model.*one.size)
      refuse("{} {} is not the {} of {}; give the --model that ran", where, one.value, model.*one.size,
             model.name);
  }
}

// The digits after `key`, where the key starts a word; empty if there are none.
std::string digits_behind(const std::string& line, const std::string& key) {
  for (std::size_t at = 0; (at = line.find(key, at)) != std::string::npos; ++at) {
    const std::size_t begin = at + key.size();
    const std::size_t end = std::min(line.find_first_not_of("0123456789", begin), line.size());
    if (end > begin && (at == 0 || !is_of_word(line[at - 1]))) return line.substr(begin, end - begin);
  }
  return {};
}

// Name and value of "  tensor_model_parallel_size ...................... 8", possibly after a rank ("0: ").
std::optional<std::pair<std::string, std::string>> argument_of(const std::string& line) {
  const std::size_t dots = line.find(" ...");
  if (dots == std::string::npos) return {};
  std::size_t name = dots;
  while (name > 0 && is_of_word(line[name - 1])) --name;
  const std::size_t begin = launcher_prefix(line);
  std::size_t value = line.find_first_not_of('.', dots + 1);
  if (name == dots || line.find_first_not_of(" \t", begin) != name || value == std::string::npos ||
      line[value] != ' ')
    return {};
  const std::size_t end = line.find_last_not_of(" \t") + 1;
  ++value;
  return std::pair{line.substr(name, dots - name), end > value ? line.substr(value, end - value) : ""};
}

// The arguments that a log of Megatron prints, each with its line.
class MegatronLog {
 public:
  explicit MegatronLog(Log& log) : log_(log) {
    for (std::size_t i = 0; i < log.lines.size(); ++i)
      if (auto argument = argument_of(log.lines[i])) {
        const auto [at, is_new] = said_.try_emplace(argument->first, std::pair{argument->second, i});
        if (!is_new && at->second.first != argument->second)
          said_again_.try_emplace(argument->first, std::pair{argument->second, i});
      }
  }

  void read() {
    for (const auto& [key, field] : {std::pair{"tensor_model_parallel_size", "tp"},
                                     {"pipeline_model_parallel_size", "pp"},
                                     {"context_parallel_size", "cp"},
                                     {"expert_model_parallel_size", "ep"},
                                     {"micro_batch_size", "micro-batch"},
                                     {"global_batch_size", "global-batch"},
                                     {"seq_length", "seq-len"},
                                     {"world_size", "gpus"}})
      give_value(field, key, value(key));
    if (has("sequence_parallel"))
      give_value("sp", "sequence_parallel", on_or_off(is("sequence_parallel", "True")));
    const std::string cut = value("expert_tensor_parallel_size");
    if (has("num_experts") && cut != value("tensor_model_parallel_size"))
      give_value("etp", "expert_tensor_parallel_size", cut);
    read_context();
    read_sharding();
    read_stages();
    read_recompute();
    read_attention();
    read_offload();
    read_precision();
    check_sizes();
  }

 private:
  std::string value(const std::string& key) const {
    const auto found = said_.find(key);
    // A resumed run prints the same values again.
    if (const auto other = said_again_.find(key); other != said_again_.end())
      refuse("{}: {} {} is {} on line {}: this is the log of two runs; give a file for each",
             FilePlace{log_.file, other->second.second + 1}.text(), key, other->second.first,
             found->second.first, found->second.second + 1);
    return found == said_.end() || found->second.first == "None" ? std::string() : found->second.first;
  }
  bool has(const std::string& key) const { return !value(key).empty(); }
  bool is(const std::string& key, const char* what) const { return value(key) == what; }
  // The value without the brackets of a list with one element: "['p2p']".
  std::string only(const std::string& key) const {
    std::string text = value(key);
    if (text.find(',') != std::string::npos) return text;
    std::erase_if(text, [](char c) { return c == '[' || c == ']' || c == '\'' || c == '"' || c == ' '; });
    return text;
  }

  void give_value(const char* field, const std::string& key, const std::string& text) {
    if (!text.empty()) give(log_, field, text, said_.at(key).second);
  }
  // Gives the field by the program's name for its value; refuses a value that no plan has.
  template <class Table>
  void give_name(const char* field, const std::string& key, const Table& table, const std::string& theirs) {
    if (const std::string name = ours(table, theirs); !name.empty())
      give_value(field, key, name);
    else
      refuse_argument(field, key);
  }
  void refuse_argument(const char* field, const std::string& key) const {
    const auto& [text, line] = said_.at(key);
    refuse_unless_given(log_, field, line, key + " " + text);
  }

  void read_context() {
    if (has("context_parallel_size") && !is("context_parallel_size", "1") && has("cp_comm_type"))
      give_name("cp-kind", "cp_comm_type", megatron_context_communication, only("cp_comm_type"));
  }

  void read_sharding() {
    const std::string strategy = "data_parallel_sharding_strategy";
    // The name before Megatron-Core 0.14.
    const std::string fsdp = is("use_custom_fsdp", "True") ? "use_custom_fsdp" : "use_megatron_fsdp";
    if (is(fsdp, "True") && has(strategy))
      give_name("zero", strategy, megatron_sharding_strategies, value(strategy));
    else if (is(fsdp, "True"))
      give_value("zero", fsdp, "3");
    else if (is("use_torch_fsdp2", "True"))
      give_value("zero", "use_torch_fsdp2", is("torch_fsdp2_reshard_after_forward", "False") ? "2" : "3");
    else if (has("use_distributed_optimizer"))
      give_value("zero", "use_distributed_optimizer", is("use_distributed_optimizer", "True") ? "1" : "0");
    give_value("hsdp", "num_distributed_optimizer_instances", value("num_distributed_optimizer_instances"));
  }

  // "Et*6|(tt|)*3tL": the layers of each stage, in the order of the model.
  std::vector<std::int64_t> layout() const {
    std::string text = value("pipeline_model_parallel_layout");
    std::erase(text, ',');
    // Unrolled as Megatron does: groups first, then single letters.
    static const std::regex repeated_groups(R"(\(([^)]+)\)\*([0-9]+))"), repeated_letters(R"((.)\*([0-9]+))");
    constexpr std::size_t most = 4'000;  // characters, since the text is untrusted
    if (text.size() > most) return {};
    for (const std::regex* repeated : {&repeated_groups, &repeated_letters})
      for (std::smatch found; text.size() < most && std::regex_search(text, found, *repeated);) {
        const std::string once = found[1];
        const auto times = static_cast<std::size_t>(std::stoll(found[2].str().substr(0, 6)));
        if (once.size() * times > most) return {};
        std::string all;
        for (std::size_t i = 0; i < times; ++i) all += once;
        text = found.prefix().str() + all + found.suffix().str();
      }
    if (text.find_first_not_of("EtmL|") != std::string::npos) return {};
    std::vector<std::int64_t> stages(1);
    for (const char c : text) {
      if (c == '|') stages.push_back(0);
      if (c == 't') ++stages.back();
    }
    return stages;
  }

  // "MEM*|EM-E": a letter for each layer; modules that predict one more token come after a slash.
  std::vector<std::int64_t> pattern() const {
    const std::string text = value("hybrid_layer_pattern");
    std::vector<std::int64_t> stages(1);
    for (const char c : text.substr(0, text.find('/'))) {
      if (c == '|')
        stages.push_back(0);
      else
        ++stages.back();
    }
    return stages;
  }

  void give_stages(const std::string& key, const std::vector<std::int64_t>& stages) {
    if (stages.empty()) refuse_argument("layers-per-stage", key);
    give_value("layers-per-stage", key, fmt::format("{}", fmt::join(stages, ",")));
    const auto ranks = parse_number<std::size_t>(key, value("pipeline_model_parallel_size"));
    if (ranks == 0 || stages.size() <= ranks || stages.size() % ranks != 0) return;
    give_value("schedule", key, "interleaved");
    give_value("chunks", key, fmt::format("{}", stages.size() / ranks));
  }

  void read_stages() {
    if (!has("pipeline_model_parallel_size") || is("pipeline_model_parallel_size", "1")) return;
    if (const std::string key = "pipeline_model_parallel_layout"; has(key)) give_stages(key, layout());
    if (const std::string key = "hybrid_layer_pattern"; value(key).find('|') != std::string::npos)
      give_stages(key, pattern());
    for (const char* uneven : {"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"})
      if (has(uneven)) refuse_argument("layers-per-stage", uneven);
    for (const char* uneven :
         {"account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"})
      if (is(uneven, "True")) refuse_argument("layers-per-stage", uneven);
    if (const std::string key = "virtual_pipeline_model_parallel_size"; has(key)) {
      give_value("schedule", key, "interleaved");
      give_value("chunks", key, value(key));
    }
  }

  void read_recompute() {
    if (is("recompute_granularity", "full")) {
      if (is("recompute_method", "block")) refuse_argument("recompute", "recompute_method");
      give_value("recompute", "recompute_granularity", "full");
    } else if (is("recompute_granularity", "selective") && has("recompute_modules")) {
      give_name("recompute", "recompute_modules", megatron_recompute_modules, only("recompute_modules"));
    } else if (is("recompute_granularity", "selective")) {  // its default, and once the only choice
      give_value("recompute", "recompute_granularity", "selective");
    } else if (const std::string method = "activations_checkpoint_method"; has(method)) {  // until 2022
      if (!is(method, "uniform")) refuse_argument("recompute", method);
      give_value("recompute", method, "full");
    } else if (is("checkpoint_activations", "True")) {  // until 2021
      give_value("recompute", "checkpoint_activations", "full");
    }
  }

  void read_attention() {
    const std::string key = "attention_backend";
    for (const char* unfused : {"AttnBackend.unfused", "AttnBackend.local"})
      if (is(key, unfused))
        refuse("{}: {} {} is not priced; legal: auto, flash, fused",
               FilePlace{log_.file, said_.at(key).second + 1}.text(), key, unfused);
  }

  void check_sizes() {
    std::vector<LoggedSize> sizes;
    const auto add = [&](const std::string& key, std::int64_t ModelSpec::*size) {
      if (has(key)) sizes.push_back({key, value(key), said_.at(key).second, size});
    };
    add("num_layers", &ModelSpec::num_layers);
    add("hidden_size", &ModelSpec::hidden);
    add("num_attention_heads", &ModelSpec::num_heads);
    if (is("group_query_attention", "True")) add("num_query_groups", &ModelSpec::num_kv_heads);
    if (!has("num_experts")) add("ffn_hidden_size", &ModelSpec::mlp_hidden);
    add("num_experts", &ModelSpec::num_experts);
    add("moe_ffn_hidden_size", &ModelSpec::expert_hidden);
    check_model(log_, sizes);
  }

  void read_offload() {
    const std::string whole = "optimizer_cpu_offload", part = "optimizer_offload_fraction",
                      layers = "cpu_offloading_num_layers";
    const bool optimizer = is(whole, "True"), activations = has(layers) && !is(layers, "0");
    if (optimizer && has(part) && parse_number<double>(part, value(part)) != 1)
      refuse_argument("offload", part);
    // All layers but the last, which is the most that it accepts.
    if (activations && has("num_layers") &&
        parse_number<std::int64_t>(layers, value(layers)) + 1 !=
            parse_number<std::int64_t>("num_layers", value("num_layers")))
      refuse_argument("offload", layers);
    if (optimizer || activations)
      give_value("offload", optimizer ? whole : layers,
                 !activations ? "optimizer"
                 : optimizer  ? "both"
                              : "activations");
  }

  // Neither means f32. fp16 counts as bf16, with the same bytes and rate.
  void read_precision() {
    if (has("fp4"))
      give_value("precision", "fp4", "fp4");
    else if (has("fp8"))
      give_value("precision", "fp8", "fp8");
    else if (is("bf16", "False") && !is("fp16", "True"))
      give_value("precision", "bf16", "f32");
  }

  Log& log_;
  std::map<std::string, std::pair<std::string, std::size_t>> said_, said_again_;
};

// While the batch size ramps up (rampup_batch_size), steps have fewer sequences: leaves these out.
void leave_whole_batches(const Log& log, std::vector<LoggedNumber>& ms) {
  const auto given = log.fields.find("global-batch");
  if (given == log.fields.end()) return;
  const double batch = parse_number<double>(given->second.where + ": global-batch", given->second.value);
  const std::string key = "global batch size:";
  std::optional<double> other;
  std::erase_if(ms, [&](const LoggedNumber& one) {
    const auto of_line = number_behind(log, one.line, key);
    if (!of_line || *of_line == batch) return false;
    other = of_line;
    return true;
  });
  if (ms.empty())
    refuse("--from {}: no iteration has the global batch size of {} that {} says; the last one has {}",
           log.file, batch, given->second.where, *other);
}

std::optional<double> megatron_seconds(Log& log) {
  std::vector<LoggedNumber> ms = numbers(log, "elapsed time per iteration (ms):");
  if (ms.empty()) return {};
  MegatronLog(log).read();
  leave_whole_batches(log, ms);
  return usual_seconds(ms);
}

// Gives a field for the digits after each key, wherever the log has it.
void give_digits(Log& log, const std::vector<std::pair<const char*, const char*>>& fields) {
  for (std::size_t i = 0; i < log.lines.size(); ++i)
    for (const auto& [key, name] : fields)
      if (const std::string digits = digits_behind(log.lines[i], key); !digits.empty())
        give(log, name, digits, i);
}

// Settings that nanotron prints besides sizes, and the fields for them.
void read_nanotrons_choices(Log& log) {
  struct Choice {
    const char *said, *field, *value;
  };
  constexpr Choice choices[] = {{"recompute_layer=True", "recompute", "full"},
                                {"TensorParallelLinearMode.ALL_REDUCE", "sp", "off"},
                                {"TensorParallelLinearMode.REDUCE_SCATTER", "sp", "on"},
                                {"AllForwardAllBackwardPipelineEngine", "schedule", "gpipe"},
                                {"OneForwardOneBackwardPipelineEngine", "schedule", "1f1b"}};
  std::vector<LoggedSize> sizes;
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    const std::string& line = log.lines[i];
    for (const Choice& one : choices)
      if (line.find(one.said) != std::string::npos) give(log, one.field, one.value, i);
    if (line.find("moe_layer_recompute=True") != std::string::npos)
      refuse_unless_given(log, "recompute", i, "moe_layer_recompute=True");
    for (const auto& [key, field] :
         {std::pair{"context_parallel_size=", "cp"}, {"expert_parallel_size=", "ep"}})
      if (const std::string digits = digits_behind(line, key); !digits.empty() && digits != "1")
        refuse_unless_given(log, field, i, key + digits);
    for (const auto& [key, size] : {std::pair{"num_hidden_layers", &ModelSpec::num_layers},
                                    {"hidden_size", &ModelSpec::hidden},
                                    {"num_attention_heads", &ModelSpec::num_heads},
                                    {"num_key_value_heads", &ModelSpec::num_kv_heads},
                                    {"intermediate_size", &ModelSpec::mlp_hidden}})
      if (const std::string digits = digits_behind(line, std::string(key) + "="); !digits.empty())
        sizes.push_back({key, digits, i, size});
  }
  check_model(log, sizes);
}

std::optional<double> nanotron_seconds(Log& log) {
  const std::vector<LoggedNumber> ms = numbers(log, "elapsed_time_per_iteration_ms:");
  if (ms.empty()) return {};
  read_nanotrons_choices(log);
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
  return usual_seconds(ms);
}

// "Using pipeline schedule Interleaved1F1B with 16 microbatches and 8 stages.": these microbatches make up
// the local batch.
void read_torchtitans_pipeline(Log& log) {
  const auto number = [&](const char* field) {
    const GivenField& one = log.fields.at(field);
    return parse_number<std::int64_t>(one.where, one.value);
  };
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    const std::string begin = "Using pipeline schedule ";
    const std::size_t at = log.lines[i].find(begin);
    if (at == std::string::npos || !log.fields.contains("local-batch") || !log.fields.contains("pp"))
      continue;
    std::string name, with, microbatches, of, stages;
    std::istringstream(log.lines[i].substr(at + begin.size())) >> name >> with >> microbatches >> with >>
        of >> stages;
    const std::string where = FilePlace{log.file, i + 1}.text();
    const std::int64_t local = number("local-batch"), pp = number("pp"),
                       count = parse_number<std::int64_t>(where + ": microbatches", microbatches),
                       chunks = parse_number<std::int64_t>(where + ": stages", stages) /
                                std::max<std::int64_t>(pp, 1);
    if (count < 1 || local % count != 0)
      refuse("{}: {} microbatches do not divide the local batch size of {}", where, count, local);
    give(log, "micro-batch", std::to_string(local / count), i);
    if (const std::string schedule = ours(torch_schedules, name); schedule.empty())
      refuse_unless_given(log, "schedule", i, "pipeline schedule " + name);
    else
      give(log, "schedule", schedule, i);
    if (log.fields.at("schedule").value == "interleaved") give(log, "chunks", std::to_string(chunks), i);
    // Each of these steps drains the pipeline.
    if (const auto steps = log.fields.find("accumulation");
        steps != log.fields.end() && number("accumulation") > 1)
      refuse("{}: gradient accumulation steps {} beside a pipeline are not priced; legal: 1",
             steps->second.where, steps->second.value);
  }
}

// A mesh as torchtitan prints it: "dp_shard" and its size. Missing axes have size 1.
using TorchMesh = std::map<std::string, std::string>;

void give_torch_mesh(Log& log, TorchMesh sizes, std::size_t line) {
  for (const char* axis : {"pp", "dp_replicate", "dp_shard", "cp", "tp"}) sizes.try_emplace(axis, "1");
  for (const char* axis : {"pp", "cp", "tp", "ep"})
    if (sizes.contains(axis)) give(log, axis, sizes[axis], line);
  const std::string where = FilePlace{log.file, line + 1}.text();
  const auto number = [&](const char* axis) -> std::int64_t {
    return parse_number<int>(where + ": " + axis, sizes[axis]);
  };
  const std::int64_t replicas = number("dp_replicate"), shards = number("dp_shard");
  give(log, "dp", std::to_string(replicas * shards), line);
  // torchtitan shards over dp_shard x cp if either is above 1; else it only replicates.
  const bool is_sharded = shards > 1 || number("cp") > 1;
  give(log, "zero", is_sharded ? "3" : "0", line);
  give(log, "hsdp", is_sharded ? sizes["dp_replicate"] : "1", line);
  if (number("cp") > 1) give(log, "cp-kind", "allgather", line);  // its default
}

// "Building 2-D device mesh with ['dp_shard', 'tp'], [32, 2]", until mid-2025: lists only axes of several
// ranks.
void read_listed_mesh(Log& log, std::size_t line) {
  const std::string begin = "-D device mesh with [";
  const std::string& text = log.lines[line];
  const std::size_t at = text.find(begin);
  if (at == std::string::npos) return;
  const std::size_t names = at + begin.size(), names_end = text.find(']', names),
                    counts = text.find('[', names), counts_end = text.find(']', counts);
  const auto list = [&](std::size_t from, std::size_t to) {
    std::vector<std::string> words;
    std::string cell;
    if (from == std::string::npos || to == std::string::npos || to < from) return words;
    for (const char c : text.substr(from, to - from) + ",")
      if (c == ',') {
        if (!cell.empty()) words.push_back(std::exchange(cell, {}));
      } else if (is_of_word(c)) {
        cell += c;
      }
    return words;
  };
  const std::vector<std::string> axes = list(names, names_end),
                                 sizes = list(counts == std::string::npos ? counts : counts + 1, counts_end);
  TorchMesh mesh;
  for (std::size_t i = 0; i < axes.size() && i < sizes.size(); ++i) mesh[axes[i]] = sizes[i];
  constexpr std::string_view known[] = {"pp", "dp_replicate", "dp_shard", "cp", "tp"};
  const bool all_known = !axes.empty() && axes.size() == sizes.size() &&
                         std::all_of(axes.begin(), axes.end(), [&](const auto& axis) {
                           return std::find(std::begin(known), std::end(known), axis) != std::end(known);
                         });
  if (all_known)
    give_torch_mesh(log, std::move(mesh), line);
  else if (!log.fields.contains("gpus"))
    refuse_unless_given(log, "dp", line, text.substr(at + begin.size() - 1));
}

std::optional<double> torchtitan_seconds(Log& log) {
  std::vector<double> token_seconds;  // of one device
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    if (log.lines[i].find("validate step:") != std::string::npos ||
        log.lines[i].find("loss:") == std::string::npos)
      continue;
    if (const auto tps = number_behind(log, i, " tps:")) token_seconds.push_back(1 / *tps);
  }
  if (token_seconds.empty()) return {};
  give_digits(log, {{"global batch size ", "global-batch"},
                    {"local batch size ", "local-batch"},
                    {"gradient accumulation steps ", "accumulation"},
                    {"sequence length ", "seq-len"}});
  for (std::size_t i = 0; i < log.lines.size(); ++i) {
    const std::string& line = log.lines[i];
    if (line.find("Applied full activation checkpointing") != std::string::npos)
      give(log, "recompute", "full", i);
    if (line.find("Applied selective activation checkpointing") != std::string::npos)
      give(log, "recompute", "selective", i);
    for (const char* scaled : {"Float8 tensorwise scaled training active",
                               "Float8 training active with recipe", "MX training active with recipe mxfp8"})
      if (line.find(scaled) != std::string::npos) give(log, "precision", "fp8", i);
    read_listed_mesh(log, i);
    if (line.find("parallelism: pp=") == std::string::npos) continue;
    TorchMesh sizes;
    for (const std::string axis : {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"})
      if (const std::string size = digits_behind(line, axis + "="); !size.empty()) sizes[axis] = size;
    if (sizes.size() < 6) continue;
    give_torch_mesh(log, std::move(sizes), i);
  }
  read_torchtitans_pipeline(log);
  // Without a pipeline the local batch is one microbatch.
  if (const auto local = log.fields.find("local-batch"); local != log.fields.end())
    log.fields.try_emplace("micro-batch", local->second);
  log.fields.erase("local-batch");
  log.fields.erase("accumulation");
  // Logs have tokens per second for each device; the configuration gives the seconds of a step.
  const MeasuredStep step = measured_step(log.fields, log.model, 1, "--from " + log.file);
  const Plan& plan = step.plan;
  return usual(token_seconds) * static_cast<double>(plan.global_batch * plan.seq_len) /
         static_cast<double>(plan.mesh.num_ranks());
}

}  // namespace

std::optional<MeasuredStep> read_log(const std::string& text, const std::string& file,
                                     const std::string& model) {
  Log log{file, model, {}, {}, !text.ends_with('\n')};
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    log.lines.push_back(without_escapes(line));
    read_remark(log.lines.back(), FilePlace{file, log.lines.size()}.text(), log.fields);
  }
  for (const auto& read : {megatron_seconds, nanotron_seconds, torchtitan_seconds})
    if (const auto seconds = read(log)) return measured_step(log.fields, model, *seconds, "--from " + file);
  return {};
}

}  // namespace echelon
