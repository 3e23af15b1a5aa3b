// Who may write a directory of checkpoints, and which of them a run goes on from.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>

#include "base/open_file.h"
#include "bottles.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/held_checkpoint.h"
#include "checkpoint/new_directory.h"
#include "mesh_runs.h"
#include "train/session.h"

namespace {
std::function<void(const std::string& path)> on_sync;  // empty: nobody looks
}

// In place of the C library's, for this program.
extern "C" int fsync(int fd) {
  if (on_sync) on_sync(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd)).string());
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace echelon::checkpoint_directory_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

class OfCheckpoints : public testing::Test {
 protected:
  OfCheckpoints() {
    write_text(directory_ / "text", bottles(60));
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
    request_.plan = odd_plan(odd_llama(), 1, 1, false);
    request_.plan.model.vocab = bytes_vocab;
    request_.optimizer.total_steps = 3;
    request_.optimizer.warmup_steps = 1;
    request_.run.timeout = patience;
    request_.eval_samples = 0;
    request_.save_every = 1;
    request_.checkpoint_directory = path_;
  }
  std::string step(int n) const { return (fs::path(path_) / step_name(n)).string(); }
  static std::string some_file(const std::string& checkpoint) {
    for (const auto& entry : fs::directory_iterator(checkpoint))
      if (entry.path().extension() == ".safetensors") return entry.path().string();
    return "";
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "a/b/run";
  std::unique_ptr<TokenData> data_;
  TrainRequest request_;
};

TEST_F(OfCheckpoints, OneRunHoldsThem) {
  {
    CheckpointDirectory first(path_, "--checkpoint");
    expect_contains(
        message_of<RequestError>([&] { CheckpointDirectory(path_, "--checkpoint"); }),
        {"--checkpoint " + path_, fmt::format("process {} on ", ::getpid()), "since 2", "another directory"});
    expect_contains(message_of<RequestError>([&] { train(request_, *data_, {}); }),
                    {"--checkpoint " + path_});
  }
  EXPECT_FALSE(fs::exists(directory_ / "a"));  // what did not begin leaves nothing
  CheckpointDirectory(path_, "--checkpoint").begin("job");
  EXPECT_TRUE(fs::exists(path_));
  CheckpointDirectory(path_, "--checkpoint").begin("job");
}

// However it dies.
TEST_F(OfCheckpoints, ADeadHolderLetsGo) {
  const pid_t child = ::fork();
  if (child == 0) {
    CheckpointDirectory held(path_, "--checkpoint");
    held.begin("job");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(fs::exists(path_ + "/.lock"));
  CheckpointDirectory(path_, "--checkpoint").begin("job");
}

// Nothing that a link leads to is written.
TEST_F(OfCheckpoints, ALockFollowsNoLink) {
  fs::create_directories(path_);
  write_text(directory_ / "precious", "text");
  fs::create_symlink(directory_ / "precious", path_ + "/.lock");
  expect_contains(message_of<RequestError>([&] { CheckpointDirectory(path_, "--checkpoint"); }),
                  {path_, ".lock"});
  EXPECT_EQ(read_bytes(directory_ / "precious"), "text");
}

// Who may not read it cannot tell whether it is damaged.
TEST_F(OfCheckpoints, OneThatCannotBeReadIsNotSetAside) {
  constexpr uid_t nobody = 65534;
  train(request_, *data_, {});
  fs::permissions(some_file(step(3)), fs::perms::none);
  fs::permissions(directory_.path(), fs::perms{0755});
  CheckpointDirectory held(path_, "--checkpoint");
  const bool is_root = ::geteuid() == 0;  // who may read all
  ASSERT_TRUE(!is_root || ::seteuid(nobody) == 0);
  const bool comes_there = ::faccessat(AT_FDCWD, step(3).c_str(), R_OK | X_OK, AT_EACCESS) == 0;
  std::string why;
  if (comes_there) why = message_of<Unreadable>([&] { held.find_last_whole({}); });
  ASSERT_TRUE(!is_root || ::seteuid(0) == 0);
  if (!comes_there) GTEST_SKIP() << "temporary directories are root's alone";
  expect_contains(why, {some_file(step(3)), "Permission denied"});
  EXPECT_EQ(list_checkpoints(path_).size(), 3u);
}

TEST_F(OfCheckpoints, ARunGoesOnFromTheLastThatIsWhole) {
  train(request_, *data_, {});
  const std::string whole = read_bytes(some_file(step(3)));
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  const auto resumed = [&](std::int64_t from, int damaged) {
    StartInfo seen;
    TrainObserver observer;
    observer.on_start = [&](const StartInfo& start) { seen = start; };
    const TrainSummary summary = train(request_, *data_, observer);
    EXPECT_EQ(seen.first_step, from);
    ASSERT_EQ(static_cast<int>(seen.notes.size()), damaged);
    for (const std::string& note : seen.notes) expect_contains(note, {path_, "set aside as .step-0000000"});
    EXPECT_EQ(read_bytes(some_file(step(3))), whole);  // the same bits again
    fs::remove_all(step(4));
  };
  const std::string file = some_file(step(3));
  fs::resize_file(file, 10);
  resumed(2, 1);
  std::string flipped = whole;
  flipped[flipped.size() - 3] ^= 1;
  write_text(some_file(step(3)), flipped);
  resumed(2, 1);
  fs::remove(step(3) + "/checkpoint.json");
  fs::remove(step(2) + "/checkpoint.json");
  resumed(1, 2);
  EXPECT_EQ(list_checkpoints(path_).size(), 3u);
  // Those that were set aside are all there still.
  EXPECT_EQ(std::distance(fs::directory_iterator(path_), {}), 3 + 4 + 1);
  for (int n = 1; n <= 3; ++n) fs::resize_file(some_file(step(n)), 10);
  expect_contains(message_of<RequestError>([&] { train(request_, *data_, {}); }),
                  {path_, "none", "step-00000003"});
  EXPECT_TRUE(fs::exists(step(3)));
}

// What nobody gave again is another run's default.
TEST_F(OfCheckpoints, WhatARunDoesOtherwiseIsSaid) {
  train(request_, *data_, {});
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  StartInfo seen;
  TrainObserver observer;
  observer.on_start = [&](const StartInfo& start) { seen = start; };
  request_.optimizer.lr = 0.125;
  request_.optimizer.clip = 0.5;
  request_.optimizer.warmup_steps = 3;
  request_.plan.numerics = Numerics::invariant;
  request_.plan.micro_batch = 1;
  train(request_, *data_, observer);
  ASSERT_EQ(seen.notes.size(), 1u);
  expect_contains(seen.notes.front(),
                  {"goes on with --clip 0.5 (it was 1), --lr 0.125 (it was 0.001), --numerics invariant (it "
                   "was ordinary), --warmup 3 (it was 1)"});
  request_.optimizer.total_steps = 5;
  train(request_, *data_, observer);
  EXPECT_TRUE(seen.notes.empty());
  request_.optimizer.total_steps = 6;
  request_.plan.mask = AttentionMask::document;
  request_.plan.document_end = 10;
  train(request_, *data_, observer);
  ASSERT_EQ(seen.notes.size(), 1u);
  EXPECT_EQ(seen.notes.front(), "goes on with --mask document (it was causal)");
}

// Balance losses and capacities are no part of the model, and a run without them diverges from what it was.
TEST_F(OfCheckpoints, WhatARunDoesOtherwiseWithExpertsIsSaid) {  // long
  request_.plan.model = load_model("mixtral-tiny");
  request_.plan.balancing.expert_loss = 0.5;
  request_.plan.balancing.capacity = 2;
  train(request_, *data_, {});
  request_.plan.balancing = {};
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  StartInfo seen;
  TrainObserver observer;
  observer.on_start = [&](const StartInfo& start) { seen = start; };
  train(request_, *data_, observer);
  ASSERT_EQ(seen.notes.size(), 1u);
  expect_contains(seen.notes.front(), {"goes on with --aux-loss 0 (it was 0.5), --capacity 0 (it was 2)"});
}

// While somebody reads it, --keep of the run beside leaves it, and its next save takes it away.
TEST_F(OfCheckpoints, OneThatIsReadIsNotRemoved) {
  request_.keep = 1;
  std::optional<HeldCheckpoint> held;
  TrainObserver observer;
  observer.on_checkpoint = [&](const std::string&) {
    if (!held) held.emplace(path_);
  };
  train(request_, *data_, observer);
  EXPECT_EQ(held->path(), step(1));
  EXPECT_EQ(list_checkpoints(path_), (std::vector{step(1), step(3)}));
  held.reset();
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  train(request_, *data_, {});
  EXPECT_EQ(list_checkpoints(path_), std::vector{step(4)});
}

// Where the file system locks nothing, or somebody removes it by hand.
TEST_F(OfCheckpoints, OneThatIsRemovedWhileItIsReadIsSaidToBe) {
  train(request_, *data_, {});
  CheckpointReader reader(step(1));
  fs::remove_all(step(1));
  expect_contains(message_of<RunError>([&] { reader.whole_shape(reader.names().front()); }),
                  {step(1) + ": was removed while it was read", "--keep", "read the last one"});
}

// As after `mv`: what is saved next would be taken for older, and with `keep` removed.
TEST_F(OfCheckpoints, OneByTheNameOfAnotherStepIsRefused) {
  train(request_, *data_, {});
  fs::rename(step(3), step(8));
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  expect_contains(message_of<RequestError>([&] { train(request_, *data_, {}); }),
                  {"--checkpoint " + path_, "step-00000008", "holds step 3", "rename or remove"});
  EXPECT_TRUE(fs::exists(step(8)));
  fs::rename(step(8), step(3));
  EXPECT_EQ(train(request_, *data_, {}).last_step, 4);
}

// A later version's is not damaged for all that this one knows: nothing before it is taken in its place.
TEST_F(OfCheckpoints, OneOfALaterVersionIsNotPassedOver) {
  train(request_, *data_, {});
  std::string manifest = read_bytes(step(3) + "/checkpoint.json");
  manifest.replace(manifest.find("echelon-checkpoint-2"), 20, "echelon-checkpoint-9");
  write_text(step(3) + "/checkpoint.json", manifest);
  request_.resume = true;
  request_.optimizer.total_steps = 4;
  expect_contains(message_of<RequestError>([&] { train(request_, *data_, {}); }), {"echelon-checkpoint-9"});
}

// Of two that write to the same directory one does, whenever the other looks.
TEST(NewDirectories, AreOfOneAlone) {
  const TemporaryDirectory top;
  for (int round = 0; round < 1000; ++round) {
    const std::string out = top / std::to_string(round);
    std::atomic<int> ready = 0, done = 0;
    const auto write = [&](const std::string& text) {
      ++ready;
      while (ready < 2) std::this_thread::yield();
      try {
        NewDirectory directory(out);
        for (const char* name : {"first", "last"}) write_text(directory.path(name), text);
        directory.finish("last");
        ++done;
      } catch (const RequestError&) {
      }
    };
    std::thread other(write, "other");
    write("one");
    other.join();
    ASSERT_EQ(done, 1) << round;
    EXPECT_EQ(read_bytes(out + "/first"), read_bytes(out + "/last"));
    EXPECT_FALSE(fs::exists(out + "/.unfinished"));
  }
}

// After a power cut there is not the file that makes a model of the others without those.
TEST(NewDirectories, AreSyncedBeforeTheirLastFileAndBehindIt) {
  const TemporaryDirectory top;
  const std::string out = fs::canonical(top.path()) / "out";
  std::vector<bool> has_last;
  {
    NewDirectory directory(out);
    for (const char* name : {"first", "last"}) write_text(directory.path(name), name);
    on_sync = [&](const std::string& path) {
      if (path != out) return;
      EXPECT_TRUE(fs::exists(out + "/first"));
      has_last.push_back(fs::exists(out + "/last"));
    };
    directory.finish("last");
    on_sync = {};
  }
  EXPECT_EQ(has_last, (std::vector{false, true}));
}

}  // namespace
}  // namespace echelon::checkpoint_directory_test
