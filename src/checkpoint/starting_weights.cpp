#include "checkpoint/starting_weights.h"

#include <filesystem>

#include "base/error.h"
#include "checkpoint/router_biases.h"

namespace echelon {

namespace fs = std::filesystem;

StartingWeights::StartingWeights(const std::string& path) : path_(path) {
  std::error_code none;
  const auto has = [&](const char* name) { return fs::exists(fs::path(path) / name, none); };
  const bool has_adapters = has("adapter_config.json");  // HuggingFaceWeights refuses them
  if (has_adapters || has("config.json")) {
    if (!has_adapters && !has_weights(path))
      refuse("--from {}: has a configuration, and no weights beside it", path);
    hugging_face_.emplace(path);
    return;
  }
  if (!fs::is_directory(path, none)) refuse("--from {}: no such directory", path);
  if (!is_checkpoint(path) && list_checkpoints(path).empty())
    refuse("--from {}: holds neither a model in Hugging Face's layout (config.json) nor a checkpoint", path);
  held_ = std::make_shared<const HeldCheckpoint>(path, "--from");
  checkpoint_ = read_checkpoint_info(held_->path());
  path_ = checkpoint_.path;
}

bool StartingWeights::have_router_biases() const {
  if (hugging_face_) return !hugging_face_->router_biases().empty();
  CheckpointReader reader(checkpoint_.path);
  return !read_router_biases(reader).empty();
}

void StartingWeights::refuse_other_model(const ModelSpec& asked) const {
  const Lora &learned = model().tuning.lora, &lora = asked.tuning.lora;
  if (learned.rank > 0 && !(learned == lora))
    refuse(
        "--lora {}: the weights of --from {} have adapters of --lora {}; legal: leave out --lora to go on "
        "with them",
        lora_text(lora), path_, lora_text(learned));
  for (const auto& [field, here, there] : differences(model(), asked))
    if (field != "name" && field != "freeze" && field != "lora")
      refuse(
          "--model {}: has {} = {}, and the weights of --from {} are of a model with {}; legal: leave out "
          "--model",
          asked.name, field, there.empty() ? "nothing" : there, path_, here.empty() ? "none" : here);
}

RouterBiases StartingWeights::load(const Rank& rank, const ParameterStore& parameters) const {
  if (!hugging_face_) return load_checkpoint(rank, parameters, checkpoint_, true);
  hugging_face_->load(rank, parameters);
  return hugging_face_->router_biases();
}

}  // namespace echelon
