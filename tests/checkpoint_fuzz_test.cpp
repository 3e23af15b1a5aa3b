// Damaged checkpoints: whatever bytes change, a checkpoint is refused with a sentence, or is what it was.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/finite.h"
#include "mesh_runs.h"
#include "refusals.h"
#include "run_command.h"

namespace echelon::checkpoint_fuzz_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

// Truncated, bits flipped, bytes lost, doubled, zeroed, or a piece of another file put in.
std::string mutated(const std::string& bytes, const std::string& other, const Philox& random,
                    std::uint64_t& at) {
  const auto draw = [&](std::size_t below) {
    return static_cast<std::size_t>(
        random.below(at++, static_cast<std::uint64_t>(std::max<std::size_t>(below, 1))));
  };
  std::string changed = bytes;
  // Headers and the manifest are where the decisions are: half of the changes go there.
  const std::size_t reach = draw(2) == 0 ? std::min<std::size_t>(bytes.size(), 600) : bytes.size();
  const std::size_t where = draw(reach), length = 1 + draw(draw(4) == 0 ? 200 : 8);
  switch (draw(6)) {
    case 0:
      changed.resize(where);
      break;
    case 1:
      for (std::size_t k = 0; k < 1 + draw(3); ++k) {
        const std::size_t place = draw(reach);
        changed[place] = static_cast<char>(changed[place] ^ (1 << draw(8)));
      }
      break;
    case 2:
      changed.erase(where, length);
      break;
    case 3:
      changed.insert(where, bytes.substr(draw(bytes.size()), length));
      break;
    case 4:
      for (std::size_t k = where; k < std::min(changed.size(), where + length); ++k) changed[k] = '\0';
      break;
    default:
      changed.replace(where, std::min(length, changed.size() - where),
                      other.substr(draw(other.size()), length));
  }
  return changed;
}

TEST(CheckpointFuzz, EveryMutationIsRefusedInWordsOrChangesNothing) {
  const char* const asked = std::getenv("ECHELON_MUTATIONS");
  const int mutations = asked != nullptr ? std::atoi(asked) : 250;
  const TemporaryDirectory directory;
  // Parts of tp slices and of ZeRO shards, and residuals.
  Plan plan = odd_plan(odd_llama(), 2, 2, true, DType::f64);
  plan.zero = 1;
  plan.compression = parse_compression("topk:0.1", "");
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    trainer.step(0, random_samples(plan), 1);
    CheckpointInfo info;
    info.step = 1;
    info.seed = 1;
    info.dtype = plan.precision.master;
    info.model = plan.model;
    info.compression = plan.compression;
    const std::string saved =
        save_checkpoint(rank, trainer.parameters(), directory.path(), info, trainer.carried());
    if (rank.index() == 0) path = saved;
  });
  const CheckpointContents whole = check_checkpoint(path);
  EXPECT_GT(whole.files, 8);
  const std::string copy = directory / "copy";
  fs::copy(path, copy);
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(path))
    files[entry.path().filename().string()] = read_bytes(entry.path());
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files) names.push_back(name);
  const Philox random(7, Stream::test, 0);
  std::uint64_t at = 0;
  int refused = 0, harmless = 0;
  for (int i = 0; i < mutations; ++i) {
    const auto pick = [&] { return names[static_cast<std::size_t>(random.below(at++, names.size()))]; };
    // The manifest is one of many files.
    const std::string name = random.below(at++, 3) == 0 ? "checkpoint.json" : pick();
    const std::string& bytes = files.at(name);
    const std::string changed = mutated(bytes, files.at(pick()), random, at);
    write_text(copy + "/" + name, changed);
    try {
      check_checkpoint(copy);
      // Bytes that mean nothing, such as a space in a header: then nothing has changed.
      EXPECT_TRUE(diff_checkpoints(path, copy).empty()) << name << ", mutation " << i;
      ++harmless;
    } catch (const RequestError& error) {
      EXPECT_NE(std::string(error.what()).find(copy), std::string::npos) << error.what();
      ++refused;
    }
    write_text(copy + "/" + name, bytes);
  }
  EXPECT_EQ(refused + harmless, mutations);
  EXPECT_GT(refused, mutations * 9 / 10);
  std::printf("%d refused, %d in bytes that say nothing\n", refused, harmless);
  EXPECT_TRUE(diff_checkpoints(path, copy).empty());
}

// Whole, and of no use: verify and generate say which tensor.
TEST(CheckpointFuzz, ValuesThatAreNoNumbersAreNamed) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_llama(), 1, 1, false, DType::f64);
  const std::string name = "model.layers.1.input_layernorm.weight";
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    trainer.parameters().find(name).value.host<double>()[3] = std::numeric_limits<double>::quiet_NaN();
    CheckpointInfo info;
    info.dtype = plan.precision.master;
    info.model = plan.model;
    path = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
  });
  expect_refusal([&] { check_checkpoint(path); }, {path, name, "1 of its", "nan", "index 3"});
  EXPECT_THROW(check_checkpoint(path), NotFinite);
  const std::string verify = fmt::format("{} checkpoint verify {}", ECHELON_BINARY, path),
                    generate = fmt::format("{} generate --checkpoint {} --max-tokens 1 --prompt-tokens 1",
                                           ECHELON_BINARY, path);
  for (const std::string& command : {verify, generate}) {
    const CommandResult r = run_command(command);
    EXPECT_EQ(r.status, 1) << r.output;
    EXPECT_NE(r.output.find(name), std::string::npos) << r.output;
  }
}

// A shard of another checkpoint of the same model, with names and shapes that fit.
TEST(CheckpointFuzz, AForeignShardIsRefusedByTensor) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_gpt2(), 1, 2, false, DType::f64);
  std::vector<std::string> paths(2);
  on_mesh(plan, [&](const Rank& rank) {
    for (std::size_t seed : {std::size_t{0}, std::size_t{1}}) {
      const Trainer trainer(rank, plan, {}, seed);
      CheckpointInfo info;
      info.seed = 1;
      info.dtype = plan.precision.master;
      info.model = plan.model;
      const std::string saved =
          save_checkpoint(rank, trainer.parameters(), directory / fmt::format("seed{}", seed), info);
      if (rank.index() == 0) paths[seed] = saved;
    }
  });
  fs::copy_file(paths[1] + "/model-00001.safetensors", paths[0] + "/model-00001.safetensors",
                fs::copy_options::overwrite_existing);
  expect_contains(message_of<RequestError>([&] { check_checkpoint(paths[0]); }),
                  {"model-00001.safetensors", "tensor transformer.", "damaged"});
}

// Of a run whose weights have overflowed.
TEST(CheckpointFuzz, WhatIsInfiniteEqualsItself) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_llama(), 1, 1, false, DType::f64);
  const std::string name = "model.layers.1.input_layernorm.weight";
  constexpr double infinite = std::numeric_limits<double>::infinity();
  std::vector<std::string> paths;
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    double* const weight = trainer.parameters().find(name).value.host<double>();
    CheckpointInfo info;
    info.dtype = plan.precision.master;
    info.model = plan.model;
    const auto save = [&](double third, double fourth) {
      weight[3] = third, weight[4] = fourth;
      ++info.step;
      paths.push_back(save_checkpoint(rank, trainer.parameters(), directory.path(), info));
    };
    save(infinite, 1), save(infinite, 1), save(infinite, 2), save(1, 1);
  });
  EXPECT_TRUE(diff_checkpoints(paths[0], paths[1]).empty());
  const auto difference = [&](const std::string& other) {
    const auto found = diff_checkpoints(paths[0], other);
    EXPECT_EQ(found.size(), 1u);
    return found.empty() ? 0 : found.front().rel_diff;
  };
  EXPECT_EQ(difference(paths[2]), 1);  // of 1, the largest that is finite
  EXPECT_EQ(difference(paths[3]), infinite);
}

}  // namespace
}  // namespace echelon::checkpoint_fuzz_test
