#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "case_choice.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/safetensors.h"
#include "expert_runs.h"
#include "train/session.h"
#include "untimed.h"
#include "verify/verify.h"

namespace echelon::checkpoint_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;
using nlohmann::json;

ModelSpec bytes_model(ModelSpec model) {
  model.vocab = bytes_vocab;
  return model;
}

// Values, moments and gradients that are all different from zero.
void train_a_little(Trainer& trainer, const Plan& plan) {
  for (std::int64_t step : {0, 1}) {
    trainer.compute_gradients(step, random_samples(plan));
    trainer.apply_gradients(step);
  }
}

struct State {
  LogicalTensors values, exp_avg, exp_avg_sq;
  bool operator==(const State&) const = default;
};
State state_of(const Rank& rank, const Trainer& trainer) {
  return {gather(rank, trainer, ParameterTensor::value), gather(rank, trainer, ParameterTensor::exp_avg),
          gather(rank, trainer, ParameterTensor::exp_avg_sq)};
}

CheckpointInfo info_of(const Plan& plan, std::int64_t step = 2) {
  CheckpointInfo info;
  info.step = step;
  info.seed = 1;
  info.tokens = 154;
  info.dtype = plan.precision.master;
  info.model = plan.model;
  return info;
}

// Saves a trained model, and returns what it held (of rank 0) and where.
std::pair<State, std::string> save(const Plan& plan, const std::string& directory) {
  State state;
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    train_a_little(trainer, plan);
    const State mine = state_of(rank, trainer);
    const std::string where = save_checkpoint(rank, trainer.parameters(), directory, info_of(plan));
    if (rank.index() != 0) return;
    state = mine;
    path = where;
  });
  return {state, path};
}

// By rank.
std::vector<State> load(const Plan& plan, const std::string& path, bool values_only = false) {
  const CheckpointInfo info = read_checkpoint_info(path);
  std::vector<State> states(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 99);  // another seed: nothing is right by chance
    load_checkpoint(rank, trainer.parameters(), info, values_only);
    states[static_cast<std::size_t>(rank.index())] = state_of(rank, trainer);
  });
  return states;
}

TEST(Checkpoint, LoadsOnAnyMesh) {
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
      const TemporaryDirectory directory;
      const auto [state, path] = save(odd_plan(model, 2, 2, true, dtype), directory.path());
      EXPECT_EQ(fs::path(path).filename(), "step-00000002");
      for (auto [dp, tp, sp] :
           {std::tuple{1, 1, false}, {1, 4, true}, {3, 1, false}, {2, 2, true}, {1, 2, false}}) {
        const Plan plan = odd_plan(model, dp, tp, sp, dtype);
        for (const State& loaded : load(plan, path)) EXPECT_EQ(loaded, state) << describe(plan);
      }
      const State fresh = load(odd_plan(model, 1, 1, false, dtype), path, true)[0];  // values only
      EXPECT_EQ(fresh.values, state.values);
      for (const auto& [name, moment] : fresh.exp_avg)
        EXPECT_EQ(moment, std::vector<double>(moment.size(), 0.0)) << name;
    }
  }
}

TEST(Checkpoint, TheMeshThatSavesDoesNotShowInTheFiles) {
  const TemporaryDirectory one, four;
  const auto values_after_load_and_save = [](const TemporaryDirectory& to, const std::string& from, int dp,
                                             int tp) {
    const Plan plan = odd_plan(odd_llama(), dp, tp, tp > 1);
    const CheckpointInfo info = read_checkpoint_info(from);
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 5);
      load_checkpoint(rank, trainer.parameters(), info, false);
      save_checkpoint(rank, trainer.parameters(), to.path(), info_of(plan, 7));
    });
    // As one rank writes it: every element of every tensor, whoever wrote it.
    const Plan one_rank = odd_plan(odd_llama(), 1, 1, false);
    const CheckpointInfo saved = read_checkpoint_info(to.path());
    const TemporaryDirectory alone;
    on_mesh(one_rank, [&](const Rank& rank) {
      Trainer trainer(rank, one_rank, {}, 5);
      load_checkpoint(rank, trainer.parameters(), saved, false);
      save_checkpoint(rank, trainer.parameters(), alone.path(), info_of(one_rank, 7));
    });
    std::string all;
    for (const char* name : {"model.safetensors", "optimizer.safetensors", "checkpoint.json"})
      all += read_bytes(alone / (std::string("step-00000007/") + name));
    return all;
  };
  const std::string path = save(odd_plan(odd_llama(), 1, 2, true), one.path()).second;
  EXPECT_EQ(values_after_load_and_save(one, path, 1, 1), values_after_load_and_save(four, path, 2, 4));
}

TEST(Checkpoint, InfoIsReadFromTheStepOrTheDirectoryAbove) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_llama(), 1, 1, false);
  const std::string path = save(plan, directory.path()).second;
  for (const std::string& at : {path, directory.path().string()}) {
    const CheckpointInfo info = read_checkpoint_info(at);
    EXPECT_EQ(info.path, path);
    EXPECT_EQ(info.step, 2);
    EXPECT_EQ(info.seed, 1u);
    EXPECT_EQ(info.tokens, 154);
    EXPECT_EQ(info.dtype, DType::f64);
    EXPECT_EQ(to_toml(info.model), to_toml(plan.model));
  }
}

TEST(Checkpoint, TheLastStepIsTheOneWithTheLargestNumber) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step : {100, 3, 20, 123456789})
      save_checkpoint(rank, trainer.parameters(), directory.path(), info_of(plan, step));
  });
  const std::vector<std::string> found = list_checkpoints(directory.path());
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(fs::path(found[0]).filename(), "step-00000003");
  EXPECT_EQ(fs::path(found[3]).filename(), "step-123456789");
  EXPECT_EQ(read_checkpoint_info(directory.path()).step, 123456789);
}

TEST(Checkpoint, UnfinishedDirectoriesDoNotCount) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(list_checkpoints(directory / "none").empty());
  EXPECT_TRUE(list_checkpoints(directory.path()).empty());
  expect_contains(message_of<RequestError>([&] { read_checkpoint_info(directory / "none"); }),
                  {"none", "no such"});
  expect_contains(message_of<RequestError>([&] { read_checkpoint_info(directory.path()); }),
                  {directory.path().string(), "no checkpoint"});
  const std::string path = save(odd_plan(odd_gpt2(), 1, 1, false), directory.path()).second;
  fs::copy(path, directory / "step-00000009");
  fs::remove(directory / "step-00000009/checkpoint.json");  // its manifest is written last
  fs::copy(path, directory / ".step-00000008.unfinished-123");
  fs::copy(path, directory / "step-x");
  EXPECT_EQ(list_checkpoints(directory.path()), std::vector<std::string>{path});
  EXPECT_EQ(read_checkpoint_info(directory.path()).path, path);
  expect_contains(message_of<RequestError>([&] { read_checkpoint_info(directory / "step-00000009"); }),
                  {"step-00000009"});
}

TEST(Checkpoint, AnExistingStepIsLeftAsItIs) {
  for (int tp : {1, 2}) {
    const TemporaryDirectory directory;
    const Plan plan = odd_plan(odd_llama(), 1, tp, tp > 1);
    const auto [state, path] = save(plan, directory.path());
    const std::string file = path + (tp == 1 ? "/model.safetensors" : "/model-00000.safetensors");
    const std::string before = read_bytes(file);
    expect_contains(message_of<RequestError>([&] { save(plan, directory.path()); }),
                    {path, "exists already"});
    EXPECT_EQ(read_bytes(file), before);
    EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 1);  // nothing is left behind
  }
}

// One damage at a time.
class Damaged : public testing::Test {
 protected:
  Damaged() : path_(save(plan_, directory_.path()).second) {}

  std::string refusal(const Plan& plan) {
    return message_of<RequestError>([&] { load(plan, path_); });
  }
  std::string refusal() { return refusal(plan_); }
  std::string file(const char* name) const { return path_ + "/" + name; }

  // The file written again, tensors changed or left out (empty name) by `change`, checksums as they were.
  void rewrite(const char* name, const std::function<void(StoredTensor&)>& change) {
    const std::string from = file(name) + ".old";
    fs::rename(file(name), from);
    const SafetensorsFile old(from);
    std::vector<StoredTensor> kept;
    std::vector<const StoredTensor*> sources;
    for (const StoredTensor& tensor : old.tensors()) {
      StoredTensor copy = tensor;
      change(copy);
      if (copy.name.empty()) continue;
      kept.push_back(copy);
      sources.push_back(&tensor);
    }
    SafetensorsWriter writer(file(name), kept);
    for (std::size_t i = 0; i < kept.size(); ++i)
      writer.write(kept[i].name, old.bytes(*sources[i]).data(), old.bytes(*sources[i]).size());
    writer.finish();
  }

  void edit_manifest(const std::function<void(json&)>& change) {
    json manifest = json::parse(read_bytes(file("checkpoint.json")));
    change(manifest);
    write_text(file("checkpoint.json"), seal_manifest(manifest.dump()));
  }

  const Plan plan_ = odd_plan(odd_llama(), 1, 1, false);
  const TemporaryDirectory directory_;
  const std::string path_;
};

TEST_F(Damaged, AFlippedBitNamesTheTensor) {
  for (const auto& [name, tensor] :
       {std::pair{"model.safetensors", "model.layers.1.self_attn.k_proj.weight"},
        {"optimizer.safetensors", "lm_head.weight.exp_avg"},
        {"optimizer.safetensors", "model.layers.0.input_layernorm.weight.exp_avg_sq"}}) {
    const std::string whole = read_bytes(file(name));
    const SafetensorsFile stored(file(name));
    const std::size_t place = whole.size() - 1;
    std::string damaged = whole;
    const auto bytes = stored.bytes(stored.at(tensor));
    const std::string content(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::size_t begin = whole.find(content);
    ASSERT_LT(begin, place);
    damaged[begin + bytes.size() / 2] ^= 0x10;
    write_text(file(name), damaged);
    expect_contains(refusal(), {name, tensor});
    write_text(file(name), whole);
  }
  EXPECT_NO_THROW(load(plan_, path_));
}

TEST_F(Damaged, ATruncatedFileIsNamed) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string whole = read_bytes(file(name));
    for (std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{100}, whole.size() - 1}) {
      write_text(file(name), whole.substr(0, size));
      expect_contains(refusal(), {file(name)});
    }
    fs::remove(file(name));
    expect_contains(refusal(), {file(name)});
    write_text(file(name), whole);
  }
}

TEST_F(Damaged, AMissingTensorIsNamed) {
  rewrite("model.safetensors", [](StoredTensor& t) {
    if (t.name == "model.norm.weight") t.name = "";
  });
  expect_contains(refusal(), {"model.safetensors", "model.norm.weight"});
}

TEST_F(Damaged, AMissingMomentIsNamed) {
  rewrite("optimizer.safetensors", [](StoredTensor& t) {
    if (t.name == "model.norm.weight.exp_avg_sq") t.name = "";
  });
  expect_contains(refusal(), {"optimizer.safetensors", "model.norm.weight.exp_avg_sq"});
}

TEST_F(Damaged, AWrongShapeIsNamed) {
  rewrite("model.safetensors", [](StoredTensor& t) {
    if (t.name == "lm_head.weight") std::swap(t.shape[0], t.shape[1]);
  });
  expect_contains(refusal(), {"lm_head.weight", "(24, 53)", "(53, 24)"});
}

TEST_F(Damaged, AnotherDtypeIsNamed) {
  rewrite("model.safetensors", [](StoredTensor& t) {
    if (t.name != "lm_head.weight") return;
    t.type = StoredType::f32;
    t.shape = {t.shape[0], 2 * t.shape[1]};  // the same bytes
  });
  expect_contains(refusal(), {"lm_head.weight"});
}

TEST_F(Damaged, AForeignModelIsNamed) {
  Plan wider = plan_;
  wider.model.mlp_hidden = 38;
  expect_contains(refusal(wider), {"mlp", "(37, 24)", "(38, 24)"});
  expect_contains(refusal(odd_plan(odd_gpt2(), 1, 1, false)), {"transformer.wte.weight"});
}

TEST_F(Damaged, AForeignManifestIsRefused) {
  const std::string manifest = file("checkpoint.json");
  for (const char* text :
       {"", "not json", "[1, 2]", "{}", "null", "{\"format\": 7}", "{\"format\": \"pt\"}"}) {
    write_text(manifest, text);
    expect_contains(message_of<RequestError>([&] { read_checkpoint_info(path_); }), {manifest});
  }
  fs::remove(manifest);
  expect_contains(message_of<RequestError>([&] { read_checkpoint_info(path_); }), {path_, "checkpoint.json"});
}

TEST_F(Damaged, AManifestFieldOfTheWrongTypeIsNamed) {
  const std::string whole = read_bytes(file("checkpoint.json"));
  for (const char* name : {"step", "seed", "tokens", "dtype", "model", "format"})
    for (const json& wrong : {json(nullptr), json::array({1}), json("x")}) {
      if (wrong.is_string() && std::string(name) == "model") continue;  // "x" is no TOML: below
      edit_manifest([&](json& manifest) { manifest[name] = wrong; });
      expect_contains(message_of<RequestError>([&] { read_checkpoint_info(path_); }),
                      {"checkpoint.json", name});
      edit_manifest([&](json& manifest) { manifest.erase(name); });
      expect_contains(message_of<RequestError>([&] { read_checkpoint_info(path_); }),
                      {"checkpoint.json", name});
      write_text(file("checkpoint.json"), whole);
    }
  const auto info_refusal = [&](const char* name, const json& value) {
    edit_manifest([&](json& manifest) { manifest[name] = value; });
    const std::string message = message_of<RequestError>([&] { read_checkpoint_info(path_); });
    write_text(file("checkpoint.json"), whole);
    return message;
  };
  expect_contains(info_refusal("model", "x"), {"checkpoint.json", "model"});
  expect_contains(info_refusal("model", "hidden = 24"), {"checkpoint.json", "model"});
  expect_contains(info_refusal("step", -1), {"checkpoint.json", "step"});
  expect_contains(info_refusal("step", 2.5), {"checkpoint.json", "step"});
  expect_contains(info_refusal("step", true), {"checkpoint.json", "step"});
  expect_contains(info_refusal("seed", -1), {"checkpoint.json", "seed"});
}

TEST_F(Damaged, BadChecksumsAreRefused) {
  const std::string whole = read_bytes(file("checkpoint.json"));
  const auto refusal_after = [&](const std::function<void(json&)>& change) {
    edit_manifest([&](json& manifest) { change(manifest["checksums"]); });
    const std::string message = refusal();
    write_text(file("checkpoint.json"), whole);
    return message;
  };
  expect_contains(refusal_after([](json& sums) { sums = 3; }), {"checkpoint.json", "checksums"});
  expect_contains(refusal_after([](json& sums) { sums["model.safetensors"] = "x"; }),
                  {"checkpoint.json", "checksums"});
  expect_contains(refusal_after([](json& sums) { sums.erase("optimizer.safetensors"); }),
                  {"checksum", "exp_avg"});
  expect_contains(refusal_after([](json& sums) { sums["model.safetensors"].erase("lm_head.weight"); }),
                  {"checksum", "lm_head.weight"});
  expect_contains(
      refusal_after([](json& sums) { sums["model.safetensors"]["lm_head.weight"] = "zzzzzzzzzzzzzzzz"; }),
      {"checksum", "lm_head.weight"});
  expect_contains(
      refusal_after([](json& sums) { sums["model.safetensors"]["lm_head.weight"] = "0123456789abcdef"; }),
      {"model.safetensors", "lm_head.weight"});
}

// Files may not grow beyond a size: what a full disk looks like to a process. In a child of its own, since
// the limit is the process's.
TEST(FullDisk, IsAnErrorAndTheEarlierCheckpointStays) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_llama(), 1, 1, false);
  const auto [state, path] = save(plan, directory.path());
  const auto model_bytes = fs::file_size(path + "/model.safetensors");
  // In the middle of the first file, and of the second, which is twice as long.
  for (const auto limit : {model_bytes / 2, model_bytes + model_bytes / 2}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      rlimit files{limit, limit};
      ::setrlimit(RLIMIT_FSIZE, &files);
      int result = 1;
      try {
        on_mesh(plan, [&](const Rank& rank) {
          const Trainer trainer(rank, plan, {}, 1);
          save_checkpoint(rank, trainer.parameters(), directory.path(), info_of(plan, 3));
        });
      } catch (const RunError& error) {
        result = std::string(error.what()).find("step-00000003") != std::string::npos ? 42 : 2;
      } catch (...) {
        result = 3;
      }
      ::_exit(result);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 42);
    EXPECT_EQ(list_checkpoints(directory.path()), std::vector<std::string>{path});
    EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 1);  // nothing is left behind
    EXPECT_EQ(load(plan, directory.path())[0], state);
  }
}

TEST(Checkpoint, ADirectoryThatCannotBeMadeIsAnError) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "x");
  expect_contains(message_of<RunError>([&] { save(odd_plan(odd_gpt2(), 1, 2, false), directory / "file"); }),
                  {directory / "file"});
}

// Whole runs, as `echelon train` does them.
class ResumedRuns : public testing::Test {
 protected:
  ResumedRuns() {
    std::string text;
    for (int i = 0; i < 60; ++i) text += fmt::format("{} bottles of {} on the wall\n", i, i * i);
    write_text(directory_ / "text", text);
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  TrainRequest request(const Plan& plan, const std::string& checkpoints) const {
    TrainRequest r = untimed();
    r.plan = plan;
    r.optimizer.total_steps = 6;
    r.optimizer.warmup_steps = 2;
    r.run.timeout = patience;
    r.checkpoint_directory = directory_ / checkpoints;
    r.save_every = 3;
    r.eval_samples = 2;
    return r;
  }
  // The bytes of a checkpoint's files.
  std::map<std::string, std::string> files(const std::string& step) const {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::directory_iterator(directory_ / step))
      contents[entry.path().filename()] = read_bytes(entry.path());
    EXPECT_GE(contents.size(), 3u);
    return contents;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

struct PowerCut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST_F(ResumedRuns, GoesOnWithTheSameBits) {
  std::vector<Plan> plans{odd_plan(bytes_model(odd_gpt2()), 1, 1, false),
                          odd_plan(bytes_model(odd_llama()), 2, 2, true)};
  if (has_cpu_kernels()) plans.push_back(odd_plan(bytes_model(odd_llama()), 1, 2, true, DType::f32));
  for (int tp : {1, 2}) {  // and biases that every step moves
    Plan& experts = plans.emplace_back(odd_plan(bytes_model(odd_deepseek(4)), tp, tp, tp > 1));
    experts.mesh.set(Axis::pp, tp);
    experts.balancing.bias_rate = 0.05;
  }
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (!is_taken()) continue;
    const std::string whole = fmt::format("whole{}", i), cut = fmt::format("cut{}", i);
    std::vector<double> losses, again;
    TrainObserver keep, cut_off, keep_again;
    keep.on_step = [&](const StepRecord& r) { losses.push_back(r.loss); };
    keep_again.on_step = [&](const StepRecord& r) { again.push_back(r.loss); };
    cut_off.on_step = [&](const StepRecord& r) {
      if (r.step == 5) throw PowerCut("power cut");
    };
    const TrainSummary expected = train(request(plans[i], whole), *data_, keep);
    EXPECT_THROW(train(request(plans[i], cut), *data_, cut_off), PowerCut);
    TrainRequest resume = request(plans[i], cut);
    resume.resume = true;
    const TrainSummary resumed = train(resume, *data_, keep_again);
    EXPECT_EQ(expected.steps, 6);
    EXPECT_EQ(resumed.steps, 3);
    EXPECT_EQ(resumed.last_step, 6);
    ASSERT_EQ(losses.size(), 6u);
    EXPECT_EQ(again, std::vector<double>(losses.begin() + 3, losses.end()));
    EXPECT_EQ(resumed.final_loss, expected.final_loss);
    EXPECT_EQ(resumed.validation_loss, expected.validation_loss);
    EXPECT_GT(resumed.validation_loss, 0);
    EXPECT_EQ(files(cut + "/step-00000003"), files(whole + "/step-00000003"));
    EXPECT_EQ(files(cut + "/step-00000006"), files(whole + "/step-00000006"));
    EXPECT_EQ(read_checkpoint_info(resumed.checkpoint).tokens, 6 * 77);
  }
}

// Step by step the samples that (seed, step) name, from the part of the text that is for training.
TEST_F(ResumedRuns, TrainsOnTheSamplersSamples) {
  const Plan plan = odd_plan(bytes_model(odd_llama()), 1, 1, false);
  const TrainRequest r = request(plan, "run");
  std::vector<double> losses, by_hand;
  TrainObserver keep;
  keep.on_step = [&](const StepRecord& record) { losses.push_back(record.loss); };
  train(r, *data_, keep);
  const Split split = split_tokens(data_->size(), r.validation_fraction, plan.seq_len);
  ASSERT_GT(split.validation.size(), 0);
  on_mesh(plan, [&](const Rank& rank) {
    const Sampler sampler(*data_, split.train, r.seed);
    Trainer trainer(rank, plan, r.optimizer, r.seed);
    for (std::int64_t step = 0; step < r.optimizer.total_steps; ++step) {
      by_hand.push_back(trainer.compute_gradients(
          step, [&](std::int64_t at, std::int64_t index, std::int32_t* tokens, std::int32_t* targets) {
            sampler.sample(at, index, plan.seq_len, tokens, targets);
          }));
      trainer.apply_gradients(step);
    }
  });
  EXPECT_EQ(losses, by_hand);
}

TEST_F(ResumedRuns, WorksOnAnotherMesh) {
  const auto plan_of = [](int dp, int tp) { return odd_plan(bytes_model(odd_gpt2()), dp, tp, tp > 1); };
  std::vector<double> losses, norms;
  TrainObserver keep;
  keep.on_step = [&](const StepRecord& r) {
    losses.push_back(r.loss);
    norms.push_back(r.grad_norm);
  };
  train(request(plan_of(1, 1), "one"), *data_, keep);
  fs::create_directory(directory_ / "other");
  fs::copy(directory_ / "one/step-00000003", directory_ / "other/step-00000003");
  TrainRequest resume = request(plan_of(3, 2), "other");
  resume.resume = true;
  const TrainSummary resumed = train(resume, *data_, keep);
  EXPECT_EQ(resumed.steps, 3);
  EXPECT_EQ(resumed.ranks, 6);
  ASSERT_EQ(losses.size(), 9u);
  // The fourth step, before and after: the same weights and tokens, sums grouped in another way.
  const double bound = verify_bound(resume.plan);
  EXPECT_NEAR(losses[6], losses[3], bound * losses[3]);
  EXPECT_NEAR(norms[6], norms[3], bound * norms[3]);
}

TEST_F(ResumedRuns, RefusesWhatWouldNotBeTheSameRun) {
  const Plan plan = odd_plan(bytes_model(odd_gpt2()), 1, 1, false);
  train(request(plan, "run"), *data_, {});
  const auto refusal = [&](const std::function<void(TrainRequest&)>& change) {
    TrainRequest r = request(plan, "run");
    r.resume = true;
    r.optimizer.total_steps = 9;
    change(r);
    return message_of<RequestError>([&] { train(r, *data_, {}); });
  };
  expect_contains(refusal([](auto& r) { r.resume = false; }), {"--checkpoint", "step-00000006", "--resume"});
  expect_contains(refusal([](auto& r) { r.checkpoint_directory = ""; }), {"--resume", "--checkpoint"});
  expect_contains(refusal([](auto& r) { r.seed = 2; }), {"--seed 1", "2"});
  expect_contains(refusal([](auto& r) { r.optimizer.total_steps = 5; }), {"--steps 5", "step-00000006"});
  expect_contains(refusal([](auto& r) { r.plan.precision = DType::f32; }), {"--precision f32", "legal: f64, or --from"});
  expect_contains(refusal([](auto& r) { r.plan.model.norm_eps = 1e-6; }), {"--resume", "odd-gpt2"});
  expect_contains(refusal([](auto& r) { r.plan.model = bytes_model(odd_llama()); }),
                  {"odd-gpt2", "odd-llama"});
  expect_contains(refusal([&](auto& r) { r.checkpoint_directory = directory_ / "none"; }),
                  {"none", "no such"});
  expect_contains(refusal([&](auto& r) { r.checkpoint_directory = std::string(300, 'a'); }),
                  {"--checkpoint a", "too long"});
  expect_contains(refusal([&](auto& r) {
                    r.resume = false;
                    r.checkpoint_directory = directory_ / "text";
                  }),
                  {"--checkpoint", "text"});
  EXPECT_EQ(list_checkpoints(directory_ / "run").size(), 2u);  // all are still there
}

}  // namespace
}  // namespace echelon::checkpoint_test
