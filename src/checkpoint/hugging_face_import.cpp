// Makes a checkpoint from a model in Hugging Face's layout.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/hugging_face.h"
#include "comm/threads.h"
#include "tensor/prepare_kernels.h"
#include "text/tokenizer.h"

namespace echelon {

namespace fs = std::filesystem;

ImportedModel import_hugging_face(const std::string& directory, const std::string& checkpoints, DType dtype,
                                  std::uint64_t seed) {
  const HuggingFaceWeights weights(directory);
  if (weights.model().norms_less_one && dtype == DType::bf16)
    refuse(
        "--dtype bf16: the files of {} have the weights of norms less 1, and the sums would be rounded to "
        "2^-8; legal: f32 or f64",
        directory);
  Plan plan;
  plan.model = weights.model();
  plan.precision = recipe_of_weights(dtype);
  CheckpointDirectory into(checkpoints, "--out");
  const auto existing = list_checkpoints(checkpoints);
  if (!existing.empty())
    refuse("--out {}: holds {} already; name another directory", checkpoints,
           fs::path(existing.back()).filename().string());
  auto tokenizer = std::make_shared<const TokenizerFiles>(read_tokenizer_files(directory));
  (void)ends_of_generation(*tokenizer);  // refuses now what `generate` would refuse of the checkpoint
  ImportedModel imported{{}, weights.num_for_images(), dtype != DType::f64 && weights.have_f64()};
  prepare_kernels(plan.precision);
  ThreadWorld world(1, std::chrono::seconds(60));
  world.run([&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, 1);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    const ParameterStore parameters(rank, plan, PipelineLayout(plan), seed, {}, Moments::here,
                                    FirstValues::read);
    weights.load(rank, parameters);
    CheckpointInfo info;
    info.seed = seed;
    info.dtype = dtype;
    info.model = plan.model;
    if (!tokenizer->empty()) info.tokenizer = tokenizer;
    info.trained_on = plan.model.vocab == bytes_vocab && !have_tokenizer(*tokenizer)
                          ? TokenData::Kind::text
                          : TokenData::Kind::tokens;
    into.begin(world.job());
    imported.checkpoint = save_checkpoint(rank, parameters, checkpoints, info, {}, weights.router_biases());
  });
  return imported;
}

}  // namespace echelon
