// Types that are not read, and why.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// What people have that no block here is, and why.
struct OtherType {
  const char* name;
  const char* has;
};

constexpr OtherType other_types[] = {
    {"llama4_text", "positions and chunks of attention of its own"},
    {"llama4", "positions and chunks of attention of its own"},
    {"axk1", "a norm behind experts alone, beside latent attention"},
    {"dbrx", "queries, keys and values that are clipped"},
    {"gpt_neox_japanese", "a bias of attention's output in the last layer alone"},
    {"kolibri1", "routers that choose by logits and biases together"},
    {"lfm3", "gates of whole heads"},
    {"mllama", "attention to images in some layers"},
    {"openai-gpt", "norms of the residual stream itself, behind attention and MLP"},
    {"xglm", "positions that are sines and cosines"},
    {"phimoe", "a router of its own (SparseMixer)"},
    {"bitnet", "weights of three values"},
    {"deepseek_v32", "attention to tokens that an indexer chooses"},
    {"diffllama", "the difference of two attentions"},
    {"doge", "a mask of attention that is learned"},
    {"falcon_mamba", "a state space for each channel (Mamba-1)"},
    {"gemma3n", "an embedding for each layer"},
    {"gemma3n_text", "an embedding for each layer"},
    {"gemma4", "layers whose heads differ in width, and that share keys and values"},
    {"gemma4_text", "layers whose heads differ in width, and that share keys and values"},
    {"glm_moe_dsa", "attention to tokens that an indexer chooses"},
    {"granitemoe_swa", "Granite's experts under other names of tensors, beside sinks"},
    {"jetmoe", "experts in attention"},
    {"kimi_linear", "a delta rule whose decays differ from channel to channel"},
    {"laguna", "gates of whole heads, and layers whose numbers of heads differ"},
    {"longcat_flash", "layers of two attentions, and experts that do nothing"},
    {"mimo_v2_flash", "values narrower than keys, times a factor"},
    {"minicpm3", "factors of the embedding and of layers beside latent attention"},
    {"minimax", "linear attention whose decays are not learned"},
    {"olmo_hybrid", "a delta rule whose betas reach 2"},
    {"persimmon", "LayerNorm of each head of queries and keys"},
    {"phi4_multimodal", "adapters for images and sound beside a Phi-4's weights"},
    {"recurrent_gemma", "linear recurrences in place of attention in some layers"},
    {"rwkv", "linear recurrences in place of attention"},
    {"sarvam_mla", "DeepSeek-V3's layers under other names of tensors"},
    {"xlstm", "linear recurrences in place of attention"},
    {"zamba", "attention that several layers share"},
    {"mamba", "a state space for each channel (Mamba-1)"},
    {"jamba", "a state space for each channel (Mamba-1)"},
    {"zamba2", "attention that several layers share"},
    {"t5", "an encoder"},
    {"bert", "attention to later tokens"},
};

}  // namespace

[[noreturn]] void refuse_model_type(const std::string& where, const std::string& type) {
  std::vector<std::string> legal = vision_type_names();
  for (const ModelType& one : model_types()) legal.emplace_back(one.name);
  std::sort(legal.begin(), legal.end());
  const auto* other = std::find_if(std::begin(other_types), std::end(other_types),
                                   [&type](const OtherType& one) { return one.name == type; });
  refuse("{}: model_type = \"{}\" is not supported{}: only {} are", where, type,
         other == std::end(other_types) ? std::string() : fmt::format(", which has {}", other->has),
         fmt::join(legal, ", "));
}

}  // namespace echelon
