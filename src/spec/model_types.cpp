// The table of transformers' types: what each is called there, how it is read, and which models are written
// as it.
#include <algorithm>

#include "spec/config_llama.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// Of Granite's, windows beside sinks.
bool granite_windows(const ModelSpec& m) { return m.attention_sinks && m.experts != Experts::gpt_oss; }

bool normed_experts(const ModelSpec& m) {
  return m.experts == Experts::deepseek && m.qk_norm && m.num_shared_experts == 0;
}

// Of types whose models are written as another one's, which is the same in other words.
bool written_otherwise(const ModelSpec& /*model*/) { return false; }

// Of GPT-2's relatives, beside those of attention.
std::vector<std::pair<const char*, const char*>> gpt_names(
    std::vector<std::pair<const char*, const char*>> all) {
  all.insert(all.end(), {{".mlp.up_proj.", ".mlp.c_fc."},
                         {".mlp.down_proj.", ".mlp.c_proj."},
                         {"model.embed_tokens.", "model.wte."},
                         {"model.embed_positions.", "model.wpe."},
                         {"model.layers.", "model.h."},
                         {".input_layernorm.", ".ln_1."},
                         {".post_attention_layernorm.", ".ln_2."},
                         {"model.norm.", "model.ln_f."}});
  return all;
}

// Of GPT-J's layers.
std::vector<std::pair<const char*, const char*>> gptj_names() {
  return gpt_names({{".self_attn.o_proj.", ".attn.out_proj."},
                    {".self_attn.", ".attn."},
                    {".mlp.c_fc.", ".mlp.fc_in."},
                    {".mlp.up_proj.", ".mlp.fc_in."},
                    {".mlp.c_proj.", ".mlp.fc_out."},
                    {".mlp.down_proj.", ".mlp.fc_out."}});
}

// Of BLOOM's and Falcon's layers, beside those of the MLP.
std::vector<std::pair<const char*, const char*>> dense_names(
    std::vector<std::pair<const char*, const char*>> all) {
  all.insert(all.end(), {{".self_attn.q_proj.", ".self_attention.query_key_value."},
                         {".self_attn.k_proj.", ".self_attention.query_key_value."},
                         {".self_attn.v_proj.", ".self_attention.query_key_value."},
                         {".self_attn.o_proj.", ".self_attention.dense."},
                         {"model.embed_tokens.", "model.word_embeddings."},
                         {"model.layers.", "model.h."},
                         {"model.norm.", "model.ln_f."}});
  return all;
}

// A bias of the output matrix beside LayerNorm, MLPs without a gate, and attention and MLP of the same norm.
bool is_phi_or_gptj(const ModelSpec& m) {
  return m.output_bias && m.norm_kind == NormKind::layer && !is_gated(m.activation) && m.parallel_residual;
}

// Of layers of one part each.
std::vector<std::pair<const char*, const char*>> mixer_names() {
  return {{".input_layernorm.", ".norm."},
          {".mamba.", ".mixer."},
          {".self_attn.", ".mixer."},
          {".mlp.", ".mixer."},
          {"model.embed_tokens.", "model.embeddings."},
          {"model.norm.", "model.norm_f."}};
}

// Of LFM2's layers.
std::vector<std::pair<const char*, const char*>> lfm2_names() {
  return {{".input_layernorm.", ".operator_norm."},
          {".post_attention_layernorm.", ".ffn_norm."},
          {"self_attn.q_norm.", "self_attn.q_layernorm."},
          {"self_attn.k_norm.", "self_attn.k_layernorm."},
          {"self_attn.o_proj.", "self_attn.out_proj."},
          {".mlp.gate.e_score_correction_bias", ".feed_forward.expert_bias"},
          {".mlp.", ".feed_forward."},
          {".gate_proj.", ".w1."},
          {".up_proj.", ".w3."},
          {".down_proj.", ".w2."},
          {"model.norm.", "model.embedding_norm."}};
}

}  // namespace

// Behind those that are special cases of theirs.
const std::vector<ModelType>& model_types() {
  using M = const ModelSpec&;
  // Of an MLP that all tokens have, and of experts.
  const std::vector<std::pair<const char*, const char*>> granite_names{
      {"mlp.gate_up_proj.", "shared_mlp.input_linear."},
      {"mlp.down_proj.", "shared_mlp.output_linear."},
      {"mlp.shared_experts.gate_up_proj.", "shared_mlp.input_linear."},
      {"mlp.shared_experts.down_proj.", "shared_mlp.output_linear."},
      {"mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"},
      {"mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"},
      {"mlp.gate.", "block_sparse_moe.router.layer."}};
  static const std::vector<ModelType> all{
      {{"gpt2", "GPT2LMHeadModel"}, read_gpt2, [](M m) { return m.family == Family::gpt2; }},
      {{.name = "opt",
        .architecture = "OPTForCausalLM",
        .renamed = {{".input_layernorm.", ".self_attn_layer_norm."},
                    {".post_attention_layernorm.", ".final_layer_norm."},
                    {".self_attn.o_proj.", ".self_attn.out_proj."},
                    {".mlp.up_proj.", ".fc1."},
                    {".mlp.c_fc.", ".fc1."},
                    {".mlp.down_proj.", ".fc2."},
                    {".mlp.c_proj.", ".fc2."},
                    {"model.norm.", "model.final_layer_norm."}},
        .prefix = "model.decoder.",
        .init_key = "init_std"},
       read_opt,
       [](M m) { return m.learned_positions && m.position_offset > 0; }},
      {{"gpt_bigcode", "GPTBigCodeForCausalLM",
        gpt_names({{".self_attn.q_proj.", ".attn.c_attn."},
                   {".self_attn.k_proj.", ".attn.c_attn."},
                   {".self_attn.v_proj.", ".attn.c_attn."},
                   {".self_attn.o_proj.", ".attn.c_proj."}}),
        false, false, "transformer."},
       read_gpt_bigcode,
       [](M m) { return m.learned_positions && m.qkv_bias; }},
      {{"gpt_neo", "GPTNeoForCausalLM",
        gpt_names({{".self_attn.o_proj.", ".attn.attention.out_proj."}, {".self_attn.", ".attn.attention."}}),
        false, false, "transformer."},
       read_gpt_neo,
       [](M m) { return m.learned_positions; }},
      {{"gpt_neox", "GPTNeoXForCausalLM"}, read_neox, [](M m) { return m.family == Family::neox; }},
      {{.name = "bloom",
        .architecture = "BloomForCausalLM",
        .renamed = dense_names({{"model.embedding_norm.", "model.word_embeddings_layernorm."},
                                {".mlp.c_fc.", ".mlp.dense_h_to_4h."},
                                {".mlp.c_proj.", ".mlp.dense_4h_to_h."}}),
        .prefix = "transformer."},
       read_bloom,
       [](M m) { return m.alibi && m.embedding_norm; }},
      {{.name = "mpt",
        .architecture = "MptForCausalLM",
        .renamed = {{".self_attn.q_proj.", ".attn.Wqkv."},
                    {".self_attn.k_proj.", ".attn.Wqkv."},
                    {".self_attn.v_proj.", ".attn.Wqkv."},
                    {".self_attn.o_proj.", ".attn.out_proj."},
                    {".mlp.", ".ffn."},
                    {"model.embed_tokens.", "model.wte."},
                    {"model.layers.", "model.blocks."},
                    {".input_layernorm.", ".norm_1."},
                    {".post_attention_layernorm.", ".norm_2."},
                    {"model.norm.", "model.norm_f."}},
        .prefix = "transformer."},
       read_mpt,
       [](M m) { return m.alibi; }},
      {{"mamba2", "Mamba2ForCausalLM", mixer_names(), false, false, "backbone."},
       read_mamba2,
       [](M m) {
         return m.num_layers > 0 && m.num_state_space_layers() == m.num_layers && !m.layer_pattern.empty() &&
                m.activation != Activation::relu2;  // Nemotron-H's
       }},
      {{"nemotron_h", "NemotronHForCausalLM", mixer_names(), true, false, "backbone."},
       read_nemotron_h,
       [](M m) { return !m.layer_pattern.empty(); }},
      {{"qwen3_next", "Qwen3NextForCausalLM"},
       read_qwen3_next,
       [](M m) { return m.state_space.is_delta() && m.experts != Experts::none; }},
      {{"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"}, read_qwen3_5_moe, written_otherwise},
      {{"qwen3_5_text", "Qwen3_5ForCausalLM"}, read_delta_rule, [](M m) { return m.state_space.is_delta(); }},
      {{"lfm2_moe", "Lfm2MoeForCausalLM", lfm2_names(), true},
       read_lfm2_moe,
       [](M m) { return m.short_conv.kernel > 0 && m.experts != Experts::none; }},
      {{"lfm2", "Lfm2ForCausalLM", lfm2_names()}, read_lfm2, [](M m) { return m.short_conv.kernel > 0; }},
      {{"falcon_h1",
        "FalconH1ForCausalLM",
        {{"post_attention_layernorm.", "pre_ff_layernorm."},
         {".mlp.", ".feed_forward."},
         {"model.norm.", "model.final_layernorm."}}},
       read_falcon_h1,
       [](M m) { return m.state_space.beside_attention; }},
      {{"granite_swa", "GraniteSWAForCausalLM"}, read_granite_swa, granite_windows},
      {{"apertus",
        "ApertusForCausalLM",
        {{"input_layernorm", "attention_layernorm"}, {"post_attention_layernorm", "feedforward_layernorm"}}},
       read_apertus,
       [](M m) { return m.activation == Activation::xielu; }},
      {{"granitemoe", "GraniteMoeForCausalLM", granite_names, false, false, nullptr, true},
       [](const Config& config, ModelSpec& m) { read_granite_moe(config, false, m); },
       [](M m) { return m.fused_mlp && m.experts != Experts::none && m.num_shared_experts == 0; }},
      {{"granitemoeshared", "GraniteMoeSharedForCausalLM", granite_names, false, false, nullptr, true},
       [](const Config& config, ModelSpec& m) { read_granite_moe(config, true, m); },
       written_otherwise},
      {{"granitemoehybrid", "GraniteMoeHybridForCausalLM", granite_names, false, false, nullptr, true},
       read_granite_hybrid,
       [](M m) { return m.fused_mlp && (m.state_space.heads > 0 || !m.interleaved_rope); }},
      {{"bamba",
        "BambaForCausalLM",
        {{"post_attention_layernorm.", "pre_ff_layernorm."},
         {".mlp.", ".feed_forward."},
         {"model.norm.", "model.final_layernorm."}}},
       read_bamba,
       [](M m) { return m.state_space.heads > 0; }},
      {{"codegen", "CodeGenForCausalLM", gptj_names(), false, false, "transformer."},
       read_codegen,
       [](M m) { return is_phi_or_gptj(m) && m.fused_projections; }},
      {{"gptj", "GPTJForCausalLM", gptj_names(), false, false, "transformer."},
       read_gptj,
       [](M m) { return is_phi_or_gptj(m) && m.interleaved_rope; }},
      {{"phi",
        "PhiForCausalLM",
        {{".self_attn.o_proj.", ".self_attn.dense."},
         {".mlp.c_fc.", ".mlp.fc1."},
         {".mlp.up_proj.", ".mlp.fc1."},
         {".mlp.c_proj.", ".mlp.fc2."},
         {".mlp.down_proj.", ".mlp.fc2."},
         {"model.norm.", "model.final_layernorm."}}},
       read_phi,
       is_phi_or_gptj},
      {{"starcoder2", "Starcoder2ForCausalLM"},
       read_starcoder2,
       [](M m) { return m.norm_kind == NormKind::layer && m.activation == Activation::gelu; }},
      {{"falcon", "FalconForCausalLM",
        dense_names({{".mlp.up_proj.", ".mlp.dense_h_to_4h."}, {".mlp.down_proj.", ".mlp.dense_4h_to_h."}}),
        false, false, "transformer."},
       read_falcon,
       [](M m) { return m.norm_kind == NormKind::layer && m.activation == Activation::gelu_erf; }},
      {{.name = "nanochat",
        .architecture = "NanoChatForCausalLM",
        .renamed = {{"mlp.up_proj.", "mlp.fc1."}, {"mlp.down_proj.", "mlp.fc2."}},
        .turns_back = true},
       read_nanochat,
       [](M m) { return m.norm_kind == NormKind::rms_plain; }},
      {{"jais2", "Jais2ForCausalLM"},
       read_jais2,
       [](M m) {
         return m.norm_kind == NormKind::layer && m.activation == Activation::relu2 && !m.norms_less_one;
       }},
      {{"nemotron", "NemotronForCausalLM"},
       read_nemotron,
       [](M m) { return m.norm_kind == NormKind::layer && m.activation == Activation::relu2; }},
      {{"stablelm", "StableLmForCausalLM"},
       read_stablelm,
       [](M m) { return m.norm_kind == NormKind::layer; }},
      {{"cohere2_moe", "Cohere2MoeForCausalLM"},
       read_cohere2_moe,
       [](M m) { return m.parallel_residual && m.experts == Experts::deepseek; }},
      {{"cohere2", "Cohere2ForCausalLM"},
       read_cohere2,
       [](M m) {
         return m.norm_kind == NormKind::layer_weight && (m.window.size > 0 || m.rope.unturned_every > 0);
       }},
      {{"cohere", "CohereForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_cohere(config, false, 5e5, m); },
       [](M m) { return m.norm_kind == NormKind::layer_weight; }},
      {{"olmo", "OlmoForCausalLM"}, read_olmo, [](M m) { return m.norm_kind == NormKind::layer_plain; }},
      {{"glm4",
        "Glm4ForCausalLM",
        {{"post_attention_layernorm", "post_self_attn_layernorm"},
         {"pre_feedforward_layernorm", "post_attention_layernorm"},
         {"post_feedforward_layernorm", "post_mlp_layernorm"}}},
       [](const Config& config, ModelSpec& m) { read_glm(config, true, m); },
       [](M m) { return m.fused_mlp && m.norm_place == NormPlace::both; }},
      {{"glm", "GlmForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_glm(config, false, m); },
       [](M m) { return m.fused_mlp; }},
      {{"ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"}},
        true},
       read_ernie_moe,
       [](M m) { return m.interleaved_rope && m.experts == Experts::deepseek; }},
      {{"ernie4_5", "Ernie4_5ForCausalLM"},
       read_ernie,
       [](M m) {
         return m.interleaved_rope && m.qkv_bias == m.attention_out_bias && m.qkv_bias == m.mlp_bias;
       }},
      {{"helium", "HeliumForCausalLM"}, read_helium, [](M m) { return m.interleaved_rope; }},
      {{"minimax_m2",
        "MiniMaxM2ForCausalLM",
        {{"gate.e_score_correction_bias", "e_score_correction_bias"}},
        true},
       read_minimax_m2,
       [](M m) {
         return m.experts == Experts::mixtral && m.router.scores == RouterScores::sigmoid && m.qk_norm_whole;
       }},
      {{"afmoe",
        "AfmoeForCausalLM",
        {{"pre_feedforward_layernorm", "pre_mlp_layernorm"},
         {"post_feedforward_layernorm", "post_mlp_layernorm"},
         {"mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
         {"mlp.gate.", "mlp.router.gate."}},
        true},
       read_afmoe,
       [](M m) { return m.attention_gate && m.experts == Experts::deepseek; }},
      {{"hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {{"self_attn.q_norm.", "self_attn.query_layernorm."},
         {"self_attn.k_norm.", "self_attn.key_layernorm."},
         {"mlp.gate.", "mlp.gate.wg."},
         {"mlp.shared_experts.", "mlp.shared_mlp."}}},
       read_hunyuan_moe,
       [](M m) { return m.qk_norm_turned && m.experts == Experts::deepseek; }},
      {{"mixtral", "MixtralForCausalLM"}, read_mixtral, [](M m) { return m.experts == Experts::mixtral; }},
      {{"gpt_oss", "GptOssForCausalLM"}, read_gpt_oss, [](M m) { return m.experts == Experts::gpt_oss; }},
      {{.name = "mistral4", .architecture = "Mistral4ForCausalLM", .stacked_experts = true},
       read_mistral4,
       [](M m) {
         return m.latent_attention() && m.experts == Experts::deepseek &&
                m.router.scores == RouterScores::softmax && m.rope.query_growth != 0;
       }},
      {{"deepseek_v2", "DeepseekV2ForCausalLM"},
       read_deepseek2,
       [](M m) {
         return m.latent_attention() && m.experts == Experts::deepseek &&
                m.router.scores == RouterScores::softmax;
       }},
      {{"deepseek_v3", "DeepseekV3ForCausalLM", {}, true, true},
       read_deepseek3,
       [](M m) { return m.latent_attention(); }},
      {{"kimi_k2", "DeepseekV3ForCausalLM", {}, true, true}, read_deepseek3, written_otherwise},
      {{"youtu", "YoutuForCausalLM"}, read_youtu, written_otherwise},
      {{"glm4_moe_lite", "Glm4MoeLiteForCausalLM", {}, true, true}, read_glm4_moe_lite, written_otherwise},
      {{"exaone_moe",
        "ExaoneMoeForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"}},
        true},
       read_exaone_moe,
       [](M m) {
         return m.experts == Experts::deepseek && m.router.scores == RouterScores::sigmoid && m.qk_norm &&
                (m.rope.unturned_every > 0 || m.window.size > 0);
       }},
      // Without biases it is written as a GLM-4.5, which has none of what attention hands on.
      {{"hy_v3",
        "HYV3ForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
         {"mlp.gate.", "mlp.router.gate."},
         {"mlp.shared_experts.", "mlp.shared_mlp."}},
        true},
       read_hy_v3,
       [](M m) {
         return m.experts == Experts::deepseek && m.router.scores == RouterScores::sigmoid && m.qk_norm &&
                m.attention_out_bias;
       }},
      {{"glm4_moe", "Glm4MoeForCausalLM", {}, true, true},
       read_glm4_moe,
       [](M m) { return m.experts == Experts::deepseek && m.router.scores == RouterScores::sigmoid; }},
      {{"solar_open", "SolarOpenForCausalLM", {}, true}, read_solar, written_otherwise},
      {{"sarvam_moe",
        "Glm4MoeForCausalLM",
        {{"model.embed_tokens.", "model.word_embeddings."},
         {"self_attn.q_proj.", "attention.query_key_value."},
         {"self_attn.k_proj.", "attention.query_key_value."},
         {"self_attn.v_proj.", "attention.query_key_value."},
         {"self_attn.o_proj.", "attention.dense."},
         {"self_attn.q_norm.", "attention.query_layernorm."},
         {"self_attn.k_norm.", "attention.key_layernorm."},
         {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"}},
        true},
       read_glm4_moe,
       written_otherwise},
      {{"dots1", "Dots1ForCausalLM", {}, true}, read_dots1, written_otherwise},
      {{"qwen2_moe", "Qwen2MoeForCausalLM"}, read_qwen2_moe, [](M m) { return m.shared_gate; }},
      {{"flex_olmo", "FlexOlmoForCausalLM"},
       read_flex_olmo,
       [](M m) { return normed_experts(m) && m.qk_norm_whole && m.norm_place == NormPlace::after; }},
      {{"olmoe", "OlmoeForCausalLM"}, read_olmoe, [](M m) { return normed_experts(m) && m.qk_norm_whole; }},
      {{"mellum", "MellumForCausalLM"},
       read_mellum,
       [](M m) { return normed_experts(m) && m.rope.local_theta > 0; }},
      {{.name = "qwen3_vl_moe_text", .architecture = "Qwen3MoeForCausalLM", .turned_experts = true},
       read_qwen3_vl_moe,
       written_otherwise},
      {{"qwen3_moe", "Qwen3MoeForCausalLM"}, read_qwen3_moe, normed_experts},
      {{"phi3", "Phi3ForCausalLM"}, read_phi3, [](M m) { return m.fused_projections; }},
      {{"hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {{"self_attn.q_norm.", "self_attn.query_layernorm."},
         {"self_attn.k_norm.", "self_attn.key_layernorm."}}},
       read_hunyuan,
       [](M m) { return m.qk_norm_turned; }},
      {{"ministral3", "Ministral3ForCausalLM"},
       read_ministral3,
       [](M m) { return m.rope.query_growth != 0; }},
      {{"olmo3", "Olmo3ForCausalLM"},
       read_olmo3,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm_whole && m.rope.local_theta > 0; }},
      {{"olmo2", "Olmo2ForCausalLM"},
       read_olmo2,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm_whole; }},
      {{"exaone4", "Exaone4ForCausalLM"},
       read_exaone4,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm; }},
      {{"vaultgemma", "VaultGemmaForCausalLM", {{"post_attention_layernorm", "pre_feedforward_layernorm"}}},
       read_vaultgemma,
       [](M m) {
         return m.norms_less_one && m.norm_place == NormPlace::before &&
                (m.window.size > 0 || !(m.caps == CapSpec{}) || m.scales.attention > 0);
       }},
      {{"gemma", "GemmaForCausalLM"},
       read_gemma1,
       [](M m) { return m.norms_less_one && m.norm_place == NormPlace::before; }},
      {{"gemma2", "Gemma2ForCausalLM"}, read_gemma2, [](M m) { return m.norms_less_one && !m.qk_norm; }},
      {{"gemma3_text", "Gemma3ForCausalLM"}, read_gemma3, [](M m) { return m.norms_less_one; }},
      {{"hyperclovax",
        "HyperCLOVAXForCausalLM",
        {{"post_attention_layernorm", "post_norm1"},
         {"pre_feedforward_layernorm", "post_attention_layernorm"},
         {"post_feedforward_layernorm", "post_norm2"}}},
       read_hyperclovax,
       [](M m) { return m.norm_place == NormPlace::both; }},
      {{"granite", "GraniteForCausalLM"}, read_granite, [](M m) { return m.scales != ScaleSpec{}; }},
      {{"smollm3", "SmolLM3ForCausalLM"}, read_smollm3, [](M m) { return m.rope.unturned_every > 0; }},
      // Which biases it has it says one by one, and heads may be of any width beside them.
      {{"seed_oss", "SeedOssForCausalLM"},
       read_seed_oss,
       [](M m) {
         return !m.qk_norm && is_gated(m.activation) && (m.attention_out_bias || m.mlp_bias) &&
                (m.qkv_bias != m.attention_out_bias || m.hidden % m.num_heads != 0);
       }},
      {{"qwen2", "Qwen2ForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_qwen(config, true, true, m); },
       [](M m) { return m.qkv_bias && !m.attention_out_bias; }},
      {{"qwen3", "Qwen3ForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_qwen(config, false, true, m); },
       [](M m) { return m.qk_norm; }},
      {{"arcee", "ArceeForCausalLM"}, read_arcee, [](M m) { return m.activation == Activation::relu2; }},
      {{"cwm", "CwmForCausalLM"}, read_cwm, [](M m) { return m.window.full_first && !m.qkv_bias; }},
      {{"ministral", "MinistralForCausalLM"},
       read_ministral,
       [](M m) { return m.window.size > 0 && !m.window.in_all(); }},
      // A Mistral without a window is a Llama, but may have heads of any width.
      {{"mistral", "MistralForCausalLM"},
       read_mistral,
       [](M m) { return m.window.size > 0 || m.hidden % m.num_heads != 0; }},
      {{"internlm3", "LlamaForCausalLM"}, read_llama_relative, written_otherwise},
      {{"iquestcoder", "LlamaForCausalLM"}, read_llama_relative, written_otherwise},
      {{"chatglm",
        "GlmForCausalLM",
        {{"model.embed_tokens.", "transformer.embedding.word_embeddings."},
         {"model.layers.", "transformer.encoder.layers."},
         {"model.norm.", "transformer.encoder.final_layernorm."},
         {"lm_head.", "transformer.output_layer."},
         {"self_attn.q_proj.", "self_attention.query_key_value."},
         {"self_attn.k_proj.", "self_attention.query_key_value."},
         {"self_attn.v_proj.", "self_attention.query_key_value."},
         {"self_attn.o_proj.", "self_attention.dense."},
         {"mlp.gate_up_proj.", "mlp.dense_h_to_4h."},
         {"mlp.down_proj.", "mlp.dense_4h_to_h."}}},
       read_chatglm,
       written_otherwise},
      {{"minicpm", "GraniteForCausalLM"}, read_minicpm, written_otherwise},
      {{"internlm2",
        "LlamaForCausalLM",
        {{"model.embed_tokens.", "model.tok_embeddings."},
         {"lm_head.", "output."},
         {"self_attn.q_proj.", "attention.wqkv."},
         {"self_attn.k_proj.", "attention.wqkv."},
         {"self_attn.v_proj.", "attention.wqkv."},
         {"self_attn.o_proj.", "attention.wo."},
         {"input_layernorm.", "attention_norm."},
         {"post_attention_layernorm.", "ffn_norm."},
         {"mlp.gate_proj.", "feed_forward.w1."},
         {"mlp.up_proj.", "feed_forward.w3."},
         {"mlp.down_proj.", "feed_forward.w2."}}},
       read_internlm2,
       written_otherwise},
      {{"exaone",
        "LlamaForCausalLM",
        {{"model.embed_tokens.", "transformer.wte."},
         {"model.norm.", "transformer.ln_f."},
         {"model.layers.", "transformer.h."},
         {".self_attn.o_proj.", ".attn.attention.out_proj."},
         {".self_attn.", ".attn.attention."},
         {".input_layernorm.", ".ln_1."},
         {".post_attention_layernorm.", ".ln_2."},
         {".mlp.gate_proj.", ".mlp.c_fc_0."},
         {".mlp.up_proj.", ".mlp.c_fc_1."},
         {".mlp.down_proj.", ".mlp.c_proj."}}},
       read_exaone,
       written_otherwise},
      {{"llama", "LlamaForCausalLM"},
       [](const Config& config, ModelSpec& m) {
         read_llama(config, {.biased = false, .mlp_biased = true}, m);
       },
       [](M) { return true; }},
  };
  return all;
}

const TransformersType& transformers_type(const ModelSpec& m) {
  const ModelType& type = *std::find_if(model_types().begin(), model_types().end(),
                                        [&m](const ModelType& one) { return one.is(m); });
  return type;
}

}  // namespace echelon
