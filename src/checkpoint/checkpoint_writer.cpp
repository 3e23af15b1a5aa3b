#include "checkpoint/checkpoint_writer.h"

#include <fmt/format.h>

#include <atomic>
#include <exception>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/start_thread.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/checkpoint_parts.h"
#include "checkpoint/held_checkpoint.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

std::string rank_file_name(int rank) { return fmt::format("rank-{:05}.json", rank); }

// Retries: other ranks may still write there for a moment.
void remove_directory(const fs::path& path) {
  std::error_code error;
  for (int attempt = 0; attempt < 100; ++attempt) {
    fs::remove_all(path, error);
    if (!error && !fs::exists(path)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

struct CheckpointWriter::State {
  struct CopiedFile {
    std::string name;
    std::vector<StoredTensor> declared;
    struct Copy {
      std::vector<std::byte> here{};
      OwnedTensor on_device{};  // to be copied, if it is not on the host
      // The bytes to store, after copying.
      std::span<const std::byte> bytes() {
        if (on_device.remainder.defined()) copy_stored_bytes(on_pinned(), here);
        if (!on_device.data.defined() || on_device.remainder.defined()) return here;
        return {pinned, static_cast<std::size_t>(on_device.data.bytes())};
      }
      std::byte* pinned = nullptr;  // the data, followed by the remainder

     private:
      OwnedTensor on_pinned() const {
        const auto& [stored, data, remainder] = on_device;
        return {stored, Tensor::view_of(pinned, data.dtype(), data.shape()),
                Tensor::view_of(pinned + data.bytes(), remainder.dtype(), remainder.shape())};
      }
    };
    std::vector<Copy> copies;  // of each declared tensor
  };

  CheckpointInfo info;
  fs::path unfinished, whole;
  std::vector<CopiedFile> files;
  std::shared_ptr<DeviceEvent> copied;  // tensors from a device
  std::thread thread;
  Clock::time_point begin, end;  // of writing
  std::atomic<bool> done{false};
  std::exception_ptr error;  // set before done
  std::function<void(const char*)> watch;

  void write(int rank) {
    begin = Clock::now();
    try {
      if (copied) copied->synchronize();
      Checksums checksums;
      for (CopiedFile& file : files) {
        SafetensorsWriter writer((unfinished / file.name).string(), file.declared, {{"format", "pt"}});
        for (std::size_t i = 0; i < file.copies.size(); ++i) {
          const std::span<const std::byte> bytes = file.copies[i].bytes();
          writer.write(file.declared[i].name, bytes.data(), bytes.size());
          file.copies[i].here = std::vector<std::byte>();  // `= {}` would keep its memory
          if (watch) watch("write");
        }
        writer.finish();
        for (std::size_t i = 0; i < writer.tensors().size(); ++i)
          checksums[file.name][writer.tensors()[i].name] = fmt::format("{:016x}", writer.checksums()[i]);
      }
      write_file_atomically((unfinished / rank_file_name(rank)).string(), checksums_text(checksums));
      if (watch) watch("written");
    } catch (...) {
      error = std::current_exception();
    }
    end = Clock::now();
    done.store(true, std::memory_order_release);
    done.notify_all();
  }
};

CheckpointWriter::CheckpointWriter(const Rank& rank, std::string directory)
    : rank_(rank), directory_(std::move(directory)) {}

CheckpointWriter::~CheckpointWriter() {
  if (!state_) return;
  if (state_->thread.joinable()) state_->thread.join();
  try {
    if (state_->copied) state_->copied->synchronize();
  } catch (const RunError&) {  // the device is lost; whoever used it has reported that
  }
  if (rank_.index() == 0) remove_directory(state_->unfinished);
}

void CheckpointWriter::start(const ParameterStore& parameters, const CheckpointInfo& info,
                             const std::vector<CarriedTensor>& carried, const RouterBiases& biases) {
  check(!state_, "one checkpoint is written at a time");
  auto state = std::make_unique<State>();
  state->info = info;
  state->info.dtype = rank_.precision().master;
  state->info.residual_ranks = 0;
  state->unfinished = directory_ / hidden_name(info.step, "unfinished", rank_.job());
  state->whole = directory_ / step_name(info.step);
  std::error_code error;
  fs::create_directories(state->unfinished, error);
  if (error) fail("{}: cannot be made: {}", state->unfinished.string(), error.message());
  for (const OwnedFile& file : owned_files(rank_, parameters, info, carried, biases)) {
    CheckpointWriter::State::CopiedFile& copy = state->files.emplace_back();
    copy.name = file_name(file.kind, rank_);
    for (const OwnedTensor& tensor : file.tensors) {
      copy.declared.push_back(tensor.stored);
      auto& to = copy.copies.emplace_back();
      // What compression carries changes before the next update.
      const bool beside =
          tensor.data.device() == Device::cuda && file.kind != "compression" &&
          (tensor.stored.type == stored_type(tensor.data.dtype()) || tensor.remainder.defined());
      if (beside)
        to.on_device = tensor;
      else
        copy_stored_bytes(tensor, to.here);
    }
  }
  state->watch = watch_;
  state_ = std::move(state);
  queue_copies(*state_, parameters);
  state_->thread =
      start_thread("writing checkpoints", [s = state_.get(), rank = rank_.index()] { s->write(rank); });
}

void CheckpointWriter::queue_copies(State& state, const ParameterStore& parameters) {
  std::size_t total = 0;
  for (const State::CopiedFile& file : state.files)
    for (const auto& copy : file.copies)
      for (const Tensor& tensor : {copy.on_device.data, copy.on_device.remainder})
        if (tensor.defined()) total += static_cast<std::size_t>(tensor.bytes());
  if (total == 0) return;
  DeviceStream& stream = rank_.arena().transfers("checkpoint");
  if (!pinned_ || pinned_->bytes() < total) {
    pinned_.reset();
    pinned_ = std::make_unique<PinnedMemory>(stream.driver(), total, "a checkpoint");
  }
  std::byte* to = pinned_->data();
  try {
    stream.wait_for(*rank_.arena().stream().record());
    for (State::CopiedFile& file : state.files)
      for (auto& copy : file.copies) {
        copy.pinned = to;
        for (const Tensor& tensor : {copy.on_device.data, copy.on_device.remainder}) {
          if (!tensor.defined()) continue;
          const auto bytes = static_cast<std::size_t>(tensor.bytes());
          if (bytes > 0)
            stream.driver().copy(
                {.kind = CopyKind::to_host, .to = to, .from = tensor.address(), .row_bytes = bytes},
                stream.handle());
          to += bytes;
        }
      }
    state.copied = stream.record();
  } catch (...) {
    try {
      stream.synchronize();
    } catch (const RunError&) {  // the device is lost
    }
    throw;
  }
  parameters.read_until(state.copied);
}

bool CheckpointWriter::written() const {
  if (!state_->done.load(std::memory_order_acquire)) return false;
  if (state_->error) std::rethrow_exception(state_->error);
  return true;
}

void CheckpointWriter::wait() const {
  state_->done.wait(false, std::memory_order_acquire);
  (void)written();
}

// Rank 0: writes every rank's checksums as one manifest, and removes all files that it does not name.
void CheckpointWriter::write_manifest() const {
  Checksums all;
  for (int r = 0; r < rank_.mesh().num_ranks(); ++r) {
    const fs::path path = state_->unfinished / rank_file_name(r);
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in)
      fail("{}: cannot be read: {}", path.string(),
           r == rank_.index() ? "has somebody removed it?" : "do all ranks see the same directory?");
    for (auto& [file, tensors] : parse_checksums(text.str(), path.string())) all[file] = tensors;
  }
  CheckpointInfo info = state_->info;
  for (const auto& [file, tensors] : all)
    if (file.starts_with("compression")) info.residual_ranks = rank_.mesh().dp_cp_size();
  write_file_atomically((state_->unfinished / manifest_name).string(), manifest_text(info, all));
  if (info.tokenizer != nullptr)
    for (const auto& [name, text] : *info.tokenizer)
      write_file_atomically((state_->unfinished / name).string(), text);
  std::vector<fs::path> strangers;
  for (const auto& entry : fs::directory_iterator(state_->unfinished)) {
    const std::string name = entry.path().filename().string();
    const bool tokenizer = info.tokenizer != nullptr && info.tokenizer->contains(name);
    if (name != manifest_name && !all.contains(name) && !tokenizer) strangers.push_back(entry.path());
  }
  for (const fs::path& path : strangers) fs::remove_all(path);
  sync_directory(state_->unfinished.string());
}

std::string CheckpointWriter::commit(std::int64_t keep) {
  wait();
  state_->thread.join();
  const std::string path = state_->whole.string();
  if (TraceRecorder* const recorder = rank_.recorder())
    recorder->add({Activity::checkpoint_write, -1, recorder->at(state_->begin), recorder->at(state_->end)});
  if (rank_.index() == 0) {
    write_manifest();
    if (watch_) watch_("commit");
    if (fs::exists(state_->whole)) refuse("{}: exists already and is left as it is", path);
    std::error_code error;
    fs::rename(state_->unfinished, state_->whole, error);
    if (error) fail("{}: cannot be given its name: {}", path, error.message());
    sync_directory(directory_.string());
    std::vector<std::string> all = list_checkpoints(directory_.string());
    for (std::size_t i = 0; keep > 0 && i + static_cast<std::size_t>(keep) < all.size(); ++i)
      remove_unless_held(all[i],
                         directory_ / hidden_name(checkpoint_step(all[i]).value(), "removed", rank_.job()));
  }
  state_.reset();
  return path;
}

}  // namespace echelon
