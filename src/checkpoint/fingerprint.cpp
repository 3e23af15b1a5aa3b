#include "checkpoint/fingerprint.h"

#include <fmt/format.h>

#include <exception>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/start_thread.h"
#include "checkpoint/checkpoint_parts.h"
#include "data/checksum.h"

namespace echelon {
namespace {

struct CopiedElements {
  std::string tensor;  // logical name
  std::vector<LogicalRun> runs;
  std::int64_t element_bytes = 0;
  std::vector<std::byte> bytes;
};

std::uint64_t sum_of(const std::vector<CopiedElements>& all) {
  std::uint64_t sum = 0;
  for (const CopiedElements& copy : all) {
    const std::uint64_t name = checksum(std::as_bytes(std::span(copy.tensor)));
    std::span<const std::byte> left = copy.bytes;
    for (const LogicalRun& run : copy.runs) {
      const auto bytes = static_cast<std::size_t>(run.count * copy.element_bytes);
      sum += checksum_of_elements(name, run.begin, left.first(bytes), copy.element_bytes);
      left = left.subspan(bytes);
    }
    check(left.empty(), "the runs of a part are all of its elements");
  }
  return sum;
}

}  // namespace

struct FingerprintTaker::State {
  std::int64_t step = 0;
  std::vector<CopiedElements> copies;
  std::uint64_t sum = 0;
  std::exception_ptr error;
  std::thread thread;
};

FingerprintTaker::FingerprintTaker() = default;

FingerprintTaker::~FingerprintTaker() {
  if (state_ && state_->thread.joinable()) state_->thread.join();
}

void FingerprintTaker::start(const Rank& rank, const ParameterStore& parameters, const ModelSpec& model,
                             const RouterBiases& biases, std::int64_t step) {
  check(!state_, "one fingerprint is taken at a time");
  auto state = std::make_unique<State>();
  state->step = step;
  for (const OwnedTensor& owned : owned_weights(rank, parameters, model, biases)) {
    const TensorPart part = parse_part(owned.stored.name);
    const Parameter* const p = parameters.find_here(part.tensor);
    CopiedElements& copy = state->copies.emplace_back();
    copy.tensor = part.tensor;
    if (part.whole)
      copy.runs = {{0, owned.data.numel()}};
    else
      copy.runs = logical_runs(p->spec, rank.size(Axis::tp), rank.coordinate(Axis::tp), part.range);
    copy.element_bytes = stored_type_bytes(owned.stored.type);
    copy_stored_bytes(owned, copy.bytes);
  }
  state_ = std::move(state);
  state_->thread = start_thread("taking fingerprints", [s = state_.get()] {
    try {
      s->sum = sum_of(s->copies);
    } catch (...) {
      s->error = std::current_exception();
    }
  });
}

std::int64_t FingerprintTaker::step() const { return state_->step; }

std::uint64_t FingerprintTaker::take() {
  state_->thread.join();
  const std::unique_ptr<State> done = std::move(state_);
  if (done->error) std::rethrow_exception(done->error);
  return done->sum;
}

std::string fingerprint_text(std::uint64_t fingerprint) { return fmt::format("{:016x}", fingerprint); }

}  // namespace echelon
