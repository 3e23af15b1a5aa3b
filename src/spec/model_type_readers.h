// Declares what the files model_types_*.cpp define: how to read the config.json of each model type of
// transformers (model_type). A type is a reader function, declared here and defined in the file named after
// what its layers have, and a row in model_types.cpp with its names in transformers and the models that are
// written as it.
#pragma once

#include <string>
#include <vector>

#include "spec/config_json.h"
#include "spec/model_spec.h"
#include "spec/model_types.h"

namespace echelon {

using ModelReader = void(const Config& config, ModelSpec& m);

// model_types_layer_norm.cpp
ModelReader read_gpt2, read_gpt_bigcode, read_gpt_neo, read_opt, read_neox, read_olmo, read_starcoder2,
    read_stablelm, read_nemotron, read_jais2, read_phi, read_gptj, read_codegen, read_falcon, read_bloom,
    read_mpt, read_cohere2;
void read_cohere(const Config& config, bool typed, double theta, ModelSpec& m);

// model_types_rms_norm.cpp
ModelReader read_llama_relative, read_exaone, read_arcee, read_mistral, read_ministral3, read_smollm3,
    read_olmo2, read_seed_oss, read_phi3, read_ernie, read_helium, read_hunyuan, read_granite,
    read_hyperclovax, read_apertus, read_nanochat, read_internlm2, read_chatglm, read_minicpm;
void read_qwen(const Config& config, bool qwen2, bool typed, ModelSpec& m);
void read_glm(const Config& config, bool glm4, ModelSpec& m);

// model_types_windows.cpp
ModelReader read_gemma1, read_gemma2, read_vaultgemma, read_gemma3, read_ministral, read_olmo3, read_exaone4,
    read_cwm, read_granite_swa;

// model_types_softmax_experts.cpp
ModelReader read_mixtral, read_gpt_oss, read_qwen2_moe, read_qwen3_moe, read_qwen3_vl_moe, read_olmoe,
    read_flex_olmo, read_mellum, read_hunyuan_moe, read_ernie_moe, read_cohere2_moe;
void read_granite_moe(const Config& config, bool shared, ModelSpec& m);

// model_types_sigmoid_experts.cpp
ModelReader read_glm4_moe, read_solar, read_dots1, read_minimax_m2, read_exaone_moe, read_hy_v3, read_afmoe;

// model_types_latent.cpp
ModelReader read_deepseek2, read_deepseek3, read_mistral4, read_glm4_moe_lite, read_youtu;

// model_types_state_space.cpp
ModelReader read_bamba, read_falcon_h1, read_granite_hybrid, read_mamba2, read_nemotron_h;

// model_types_delta_rule.cpp
ModelReader read_delta_rule, read_qwen3_next, read_qwen3_5_moe;

// model_types_short_conv.cpp
ModelReader read_lfm2, read_lfm2_moe;

struct ModelType : TransformersType {
  ModelReader* read;
  // Whether a model is written as this type, if no earlier row of the table matches.
  bool (*is)(const ModelSpec& m);
};

// All types; special cases come before the types that they are cases of.
const std::vector<ModelType>& model_types();

// model_type_defaults.cpp: the configuration with what transformers takes for keys that it leaves out, where
// that is a type's own. Sizes are not among them: a model without them is refused.
Json with_defaults(Json object, const std::string& type);

// model_types_vision.cpp: types with vision, and the part of a configuration that describes the text model
// (all of it for other types).
std::vector<std::string> vision_type_names();
Json text_of(const Json& object, const std::string& where);

// model_types_refused.cpp: RequestError that names, where known, the feature of the type that no block here
// has.
[[noreturn]] void refuse_model_type(const std::string& where, const std::string& type);

}  // namespace echelon
