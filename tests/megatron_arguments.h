// What pretrain_gpt.py and pretrain_hybrid.py of Megatron-LM (0.20) make of a command: the flags that it has
// of those that a launch file may hold, what each takes, and what its validate_args() and its configurations
// ask of them together. bench/check_launches.py asks the program itself.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "spec/software.h"

namespace echelon::checks {

// Throws std::runtime_error with what Megatron-LM would refuse.
class MegatronArguments {
 public:
  // A launch.sh, as bash would read its last command with nothing set.
  explicit MegatronArguments(const std::string& script) {
    one_queue_ = script.find("export CUDA_DEVICE_MAX_CONNECTIONS=1\n") != std::string::npos;
    const std::vector<std::string> words = words_of(script);
    std::size_t at = 0;
    const auto starts = [](const std::string& word) {
      return word.ends_with("/pretrain_gpt.py") || word.ends_with("/pretrain_hybrid.py");
    };
    for (; at < words.size() && !starts(words[at]); ++at)
      if (words[at].starts_with("--n") && words[at] != "--node-rank")
        world_ *= integer(words[at], words.at(at + 1));
    ask(at < words.size(), "the command starts pretrain_gpt.py or pretrain_hybrid.py");
    is_hybrid_ = words[at].ends_with("hybrid.py");
    for (++at; at < words.size(); ++at) {
      const std::string& flag = words[at];
      if (flag == "$@") continue;
      const auto known = flags().find(flag);
      ask(known != flags().end(), flag + " is an argument");
      ask(!given_.contains(flag), flag + " stands once");
      std::string& value = given_[flag];
      if (known->second == "-") continue;
      ask(at + 1 < words.size() && !words[at + 1].starts_with("--"), flag + " has a value");
      value = words[++at];
      if (known->second == "two") {
        ask(at + 1 < words.size() && !words[at + 1].starts_with("--"), flag + " has two values");
        value += " " + words[++at];
      }
      if (known->second == "int")
        ask(integer(flag, value) > 0, flag + " is positive");
      else if (known->second == "float")
        ask(std::stod(value) >= 0, flag + " is no less than 0");
      else if (known->second != "text" && known->second != "two")
        ask((" " + known->second + " ").find(" " + value + " ") != std::string::npos,
            fmt::format("{} {} is one of: {}", flag, value, known->second));
    }
    validate();
  }

  bool has(const std::string& flag) const { return given_.contains(flag); }
  std::int64_t number(const std::string& flag, std::int64_t otherwise = 1) const {
    const auto found = given_.find(flag);
    return found == given_.end() ? otherwise : integer(flag, found->second);
  }
  std::int64_t world() const { return world_; }
  std::int64_t data_parallel() const {
    return world_ / (number("--tensor-model-parallel-size") * number("--pipeline-model-parallel-size") *
                     number("--context-parallel-size"));
  }
  std::int64_t chunks() const { return chunks_; }  // of each pipeline rank
  std::int64_t microbatches() const {
    return number("--global-batch-size") / number("--micro-batch-size") / data_parallel();
  }

 private:
  // By flag: "-" takes none, "int", "float", "text", or one of these words.
  static const std::map<std::string, std::string>& flags() {
    static const std::map<std::string, std::string> all = [] {
      std::map<std::string, std::string> map{
          {"--cp-comm-type", "p2p all_gather a2a a2a+p2p"},
          {"--pipeline-model-parallel-layout", "text"},
          {"--recompute-granularity", "full selective"},
          {"--recompute-method", "uniform block"},
          {"--recompute-modules", "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts"},
          {"--data-parallel-sharding-strategy", "no_shard optim optim_grads optim_grads_params"},
          {"--ckpt-format", "torch torch_dist torch_dcp fsdp_dtensor"},
          {"--fp8-format", "e4m3 hybrid"},
          {"--fp8-recipe", "tensorwise delayed mxfp8 blockwise custom"},
          {"--fp4-format", "e2m1"},
          {"--position-embedding-type", "learned_absolute rope yarn mrope relative none"},
          {"--normalization", "LayerNorm RMSNorm"},
          {"--rope-type", "rope yarn"},
          {"--transformer-impl", "local transformer_engine inference_optimized"},
          {"--tokenizer-type", "NullTokenizer"},
          {"--moe-token-dispatcher-type", "allgather alltoall flex"},
          {"--moe-flex-dispatcher-backend", "deepep hybridep"},
          {"--moe-router-load-balancing-type",
           "aux_loss seq_aux_loss global_aux_loss sinkhorn quantile_balancing none"},
          {"--moe-layer-freq", "text"},
          {"--moe-router-score-function", "softmax sigmoid sqrtsoftplus"},
          {"--hybrid-layer-pattern", "text"},
          {"--spec", "two"}};
      for (const char* flag : {"sequence-parallel",
                               "use-distributed-optimizer",
                               "overlap-grad-reduce",
                               "overlap-param-gather",
                               "use-megatron-fsdp",
                               "no-gradient-accumulation-fusion",
                               "bf16",
                               "group-query-attention",
                               "untie-embeddings-and-output-weights",
                               "disable-bias-linear",
                               "use-rope-scaling",
                               "swiglu",
                               "squared-relu",
                               "add-qkv-bias",
                               "qk-layernorm",
                               "multi-latent-attention",
                               "moe-grouped-gemm",
                               "moe-router-enable-expert-bias",
                               "moe-router-pre-softmax",
                               "fp8-param-gather",
                               "use-mcore-models",
                               "cross-entropy-loss-fusion",
                               "tp-comm-overlap",
                               "mock-data",
                               "optimizer-cpu-offload",
                               "use-precision-aware-optimizer"})
        map["--" + std::string(flag)] = "-";
      for (const char* flag : {"tensor-model-parallel-size",
                               "pipeline-model-parallel-size",
                               "context-parallel-size",
                               "expert-model-parallel-size",
                               "expert-tensor-parallel-size",
                               "recompute-num-layers",
                               "cpu-offloading-num-layers",
                               "micro-batch-size",
                               "global-batch-size",
                               "seq-length",
                               "num-distributed-optimizer-instances",
                               "num-layers",
                               "hidden-size",
                               "ffn-hidden-size",
                               "num-attention-heads",
                               "kv-channels",
                               "max-position-embeddings",
                               "num-query-groups",
                               "q-lora-rank",
                               "kv-lora-rank",
                               "qk-head-dim",
                               "qk-pos-emb-head-dim",
                               "v-head-dim",
                               "rotary-base",
                               "num-experts",
                               "moe-router-topk",
                               "moe-ffn-hidden-size",
                               "moe-shared-expert-intermediate-size",
                               "moe-latent-size",
                               "moe-router-num-groups",
                               "moe-router-group-topk",
                               "mamba-num-heads",
                               "mamba-head-dim",
                               "mamba-num-groups",
                               "mamba-state-dim",
                               "train-iters",
                               "vocab-size",
                               "make-vocab-size-divisible-by",
                               "log-interval"})
        map["--" + std::string(flag)] = "int";
      for (const char* flag :
           {"norm-epsilon", "init-method-std", "attention-dropout", "hidden-dropout", "lr",
            "rope-scaling-factor", "moe-aux-loss-coeff", "optimizer-offload-fraction",
            "moe-router-topk-scaling-factor", "rotary-scaling-factor", "mscale", "mscale-all-dim"})
        map["--" + std::string(flag)] = "float";
      return map;
    }();
    return all;
  }

  static void ask(bool holds, const std::string& law) {
    if (!holds) throw std::runtime_error("not so: " + law);
  }
  static std::int64_t integer(const std::string& flag, const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    ask(error == std::errc() && end == text.data() + text.size(),
        fmt::format("{} {} is an integer", flag, text));
    return value;
  }
  // Of the last command: lines that end in \ are one, "..." is a word without its quotes, ${NAME:-word} that
  // word.
  static std::vector<std::string> words_of(const std::string& script) {
    std::string command;
    std::istringstream lines(script);
    bool goes_on = false;
    for (std::string line; std::getline(lines, line);) {
      command = goes_on ? command + " " : "";
      goes_on = line.ends_with('\\');
      command += goes_on ? line.substr(0, line.size() - 1) : line;
    }
    std::vector<std::string> words;
    std::istringstream in(command);
    for (std::string word; in >> word;) {
      ask(std::count(word.begin(), word.end(), '"') % 2 == 0, word + " is whole without its spaces");
      std::erase(word, '"');
      if (const auto at = word.find(":-"); at != std::string::npos && word.find("${") < at)
        word = word.substr(0, word.find("${")) + word.substr(at + 2, word.find('}') - at - 2) +
               word.substr(word.find('}') + 1);
      words.push_back(std::move(word));
    }
    return words;
  }
  void divides(std::int64_t part, const std::string& whole) const {
    ask(part > 0 && number(whole) % part == 0,
        fmt::format("{} {} is a multiple of {}", whole, number(whole), part));
  }

  void validate() {
    for (const char* needed : {"--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
                               "--max-position-embeddings", "--micro-batch-size", "--global-batch-size"})
      ask(has(needed), std::string(needed) + " is given");
    const std::int64_t tp = number("--tensor-model-parallel-size"),
                       pp = number("--pipeline-model-parallel-size"), cp = number("--context-parallel-size"),
                       heads = number("--num-attention-heads"), groups = number("--num-query-groups", heads);
    ask(world_ % (tp * pp * cp) == 0, "the world's size is a multiple of tp, pp and cp");
    ask(world_ %
                (number("--expert-model-parallel-size") * number("--expert-tensor-parallel-size", tp) * pp) ==
            0,
        "and of ep, etp and pp");
    divides(number("--micro-batch-size") * data_parallel(), "--global-batch-size");
    divides(tp, "--num-attention-heads");
    divides(groups, "--num-attention-heads");
    // Megatron-Core 0.16, for which these are written; up to 0.15 the former alone.
    ask(groups % tp == 0 || tp % groups == 0, "query groups are a multiple or a divisor of tp");
    ask(!has("--num-query-groups") || has("--group-query-attention"), "query groups are asked for");
    ask(!has("--multi-latent-attention") || !has("--group-query-attention"),
        "latent attention has keys of all heads");
    divides(tp, "--ffn-hidden-size");
    ask(number("--make-vocab-size-divisible-by", 128) == padded_vocabulary_multiple,
        "the vocabulary is padded as it is priced");
    ask(number("--max-position-embeddings") >= number("--seq-length"), "sequences have positions");
    if (has("--sequence-parallel")) {
      ask(tp > 1, "sequence parallelism has tp");
      divides(tp * cp, "--seq-length");
    }
    if (cp > 1) divides(2 * cp, "--seq-length");
    if (cp > 1 && given_.contains("--cp-comm-type") && given_.at("--cp-comm-type") == "a2a")
      ask(heads / tp % cp == 0 && std::max<std::int64_t>(groups / tp, 1) % cp == 0,
          "heads are exchanged whole");
    if (has("--num-experts")) divides(number("--expert-model-parallel-size"), "--num-experts");
    ask(!has("--tp-comm-overlap") || has("--sequence-parallel"), "messages overlap where sequences are cut");
    ask(number("--moe-router-topk", 2) > 1 || has("--moe-router-pre-softmax") ||
            given_.contains("--moe-router-score-function"),
        "a single expert's weight is of a softmax over all");
    ask(cp == 1 || has("--bf16"), "attention over cp is in 16 bits");
    const bool fsdp = has("--use-megatron-fsdp");
    ask(tp * cp == 1 || fsdp || one_queue_, "CUDA_DEVICE_MAX_CONNECTIONS is 1 with tp or cp");
    ask(!fsdp || !one_queue_, "and not with FSDP");
    ask(!fsdp || (has("--ckpt-format") && given_.at("--ckpt-format") == "fsdp_dtensor"),
        "FSDP saves fsdp_dtensor");
    ask(!fsdp || has("--no-gradient-accumulation-fusion"), "FSDP's weight gradients are not fused");
    ask(!has("--data-parallel-sharding-strategy") || fsdp, "a sharding strategy is FSDP's");
    ask(!has("--cpu-offloading-num-layers") ||
            (number("--cpu-offloading-num-layers") < number("--num-layers") && pp == 1 &&
             !has("--recompute-granularity")),
        "activations are offloaded of fewer layers than all, without a pipeline and recomputation");
    ask(!has("--optimizer-cpu-offload") || has("--use-precision-aware-optimizer"),
        "the optimizer on the host is the precision-aware one");
    ask(!has("--fp8-param-gather") || has("--use-distributed-optimizer"),
        "parameters are gathered in fp8 by a distributed optimizer");
    ask(!has("--num-experts") || tp == 1 || has("--sequence-parallel"),
        "experts beside tp have cut sequences");
    ask(!has("--use-precision-aware-optimizer") || has("--use-distributed-optimizer"),
        "the precision-aware optimizer is distributed");
    ask(!has("--overlap-param-gather") ||
            ((has("--use-distributed-optimizer") || fsdp) && has("--overlap-grad-reduce")),
        "parameters are gathered beside computation of a distributed optimizer");
    validate_recompute();
    ask(is_hybrid_ == has("--hybrid-layer-pattern") && is_hybrid_ == has("--spec"),
        "a pattern and a specification of layers are pretrain_hybrid.py's");
    if (is_hybrid_)
      validate_pattern(tp, pp);
    else
      validate_layout(pp);
    ask(chunks_ == 1 || microbatches() % pp == 0, "interleaved microbatches are whole groups of pp");
  }

  void validate_recompute() const {
    const auto granularity = given_.find("--recompute-granularity");
    const bool full = granularity != given_.end() && granularity->second == "full",
               selective = granularity != given_.end() && !full;
    ask(full == has("--recompute-method") && full == has("--recompute-num-layers"),
        "full recomputation, and it alone, has a method and a number of layers");
    ask(!has("--recompute-modules") || selective, "modules are made again selectively");
  }

  // A letter for each layer, | between stages, which say how many chunks there are.
  void validate_pattern(std::int64_t tp, std::int64_t pp) {
    const std::string& text = given_.at("--hybrid-layer-pattern");
    const std::int64_t stages = 1 + std::count(text.begin(), text.end(), '|');
    ask(text.find_first_not_of("MGD+*-E|") == std::string::npos, "the pattern has the letters of layers");
    ask(std::ssize(text) - stages + 1 == number("--num-layers"), "the pattern has all layers");
    ask(stages % pp == 0, "each rank has as many stages");
    ask(!has("--pipeline-model-parallel-layout") && !has("--moe-layer-freq"),
        "the pattern says where layers are");
    chunks_ = stages / pp;
    if (text.find('M') != std::string::npos) {
      divides(number("--mamba-num-groups", 8), "--mamba-num-heads");
      ask(number("--mamba-num-groups", 8) % tp == 0, "each rank has whole groups of state spaces");
    }
    ask((text.find('E') != std::string::npos) == has("--num-experts"), "layers of experts have experts");
  }

  // E and L once each at the ends; t*N or letters of decoder layers; | between stages.
  void validate_layout(std::int64_t pp) {
    if (!has("--pipeline-model-parallel-layout")) {
      ask(pp == 1 || number("--num-layers") % pp == 0, "layers without a layout are shared out evenly");
      return;
    }
    const std::string& text = given_.at("--pipeline-model-parallel-layout");
    ask(text.starts_with('E') && text.ends_with('L'), "the embedding is first and the loss last");
    const std::int64_t stages = 1 + std::count(text.begin(), text.end(), '|');
    ask(stages % pp == 0, "each rank has as many stages");
    chunks_ = stages / pp;
    std::int64_t layers = 0;
    for (std::size_t i = 1; i + 1 < text.size(); ++i) {
      if (text[i] == '|') continue;
      ask(text[i] == 't', fmt::format("{} is a layer", text[i]));
      std::size_t end = i + 1;
      if (text[end] == '*') end = text.find_first_not_of("0123456789", end + 1);
      layers += text[i + 1] == '*' ? std::stoll(text.substr(i + 2, end - i - 2)) : 1;
      i = end - 1;
    }
    ask(layers == number("--num-layers"), "the layout has all layers");
  }

  std::map<std::string, std::string> given_;
  std::int64_t world_ = 1, chunks_ = 1;
  bool one_queue_ = false, is_hybrid_ = false;
};

}  // namespace echelon::checks
