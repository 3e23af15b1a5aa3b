// NCCL's collectives. Its communicators are non-blocking: a call that continues in the background is polled
// until it is done or abandoned, so that no rank hangs because of a lost peer.
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/error.h"
#include "tensor/device_collectives.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;

static_assert(sizeof(DeviceCollectives::Id) == NCCL_UNIQUE_ID_BYTES);

struct NcclMember {
  ncclComm_t comm = nullptr;
  std::function<bool()> given_up;
};

NcclMember& of(DeviceCollectives::Member member) { return *static_cast<NcclMember*>(member.handle); }

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
    case DType::i16:  // which is moved, never summed
      return ncclBfloat16;
    case DType::i32:
      return ncclInt32;
    case DType::u8:
      break;
  }
  return ncclUint8;
}

ncclRedOp_t operation_of(ReduceOp op) { return op == ReduceOp::sum ? ncclSum : ncclMax; }

std::string text_of(ncclResult_t result, ncclComm_t comm) {
  const char* const last = ncclGetLastError(comm);
  return last != nullptr && *last != '\0' ? fmt::format("{} ({})", ncclGetErrorString(result), last)
                                          : ncclGetErrorString(result);
}

void use(int device) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess)
    fail("device {}: taking it failed: {}", device, cudaGetErrorString(error));
}

class NcclCollectives final : public DeviceCollectives {
 public:
  std::string name() override {
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess) return "NCCL";
    return fmt::format("NCCL {}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
  }

  Id make_id() override {
    ncclUniqueId id{};
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
      fail("NCCL: making a group failed: {}", text_of(result, nullptr));
    Id bytes{};
    std::memcpy(bytes.data(), &id, sizeof id);
    return bytes;
  }

  Member join(const Id& bytes, int device, int rank, int size,
              const std::function<bool()>& given_up) override {
    use(device);
    ncclUniqueId id{};
    std::memcpy(&id, bytes.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    auto member = std::make_unique<NcclMember>();
    member->given_up = given_up;
    const ncclResult_t begun = ncclCommInitRankConfig(&member->comm, size, id, rank, &config);
    try {
      finish(begun, {member.get(), device}, "joining a group");
    } catch (...) {
      if (member->comm != nullptr) (void)ncclCommAbort(member->comm);
      throw;
    }
    return {member.release(), device};
  }

  void leave(Member member) noexcept override {
    const std::unique_ptr<NcclMember> ours(&of(member));
    (void)cudaSetDevice(member.device);
    try {
      finish(ncclCommFinalize(ours->comm), member, "leaving a group");
    } catch (const std::exception&) {
      (void)ncclCommAbort(ours->comm);
      return;
    }
    (void)ncclCommDestroy(ours->comm);
  }
  void abort(Member member) noexcept override {
    const std::unique_ptr<NcclMember> ours(&of(member));
    (void)cudaSetDevice(member.device);
    (void)ncclCommAbort(ours->comm);
  }
  std::string error(Member member) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(of(member).comm, &state);
    if (asked != ncclSuccess) return text_of(asked, of(member).comm);
    return state == ncclSuccess || state == ncclInProgress ? "" : text_of(state, of(member).comm);
  }

  void begin_together() override {
    if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess)
      fail("NCCL: {}", text_of(result, nullptr));
  }
  void end_together(Member member) override {
    use(member.device);
    finish(ncclGroupEnd(), member, "queueing");
  }

  void all_reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, ReduceOp op,
                  Member member, StreamHandle stream) override {
    use(member.device);
    queued(ncclAllReduce(in, out, size(count), type_of(dtype), operation_of(op), of(member).comm, on(stream)),
           member, "all_reduce");
  }
  void all_gather(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype, Member member,
                  StreamHandle stream) override {
    use(member.device);
    queued(ncclAllGather(in, out, size(count_each), type_of(dtype), of(member).comm, on(stream)), member,
           "all_gather");
  }
  void reduce_scatter(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                      Member member, StreamHandle stream) override {
    use(member.device);
    queued(ncclReduceScatter(in, out, size(count_each), type_of(dtype), ncclSum, of(member).comm, on(stream)),
           member, "reduce_scatter");
  }
  void broadcast(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                 Member member, StreamHandle stream) override {
    use(member.device);
    queued(ncclBroadcast(in, out, size(count), type_of(dtype), root, of(member).comm, on(stream)), member,
           "broadcast");
  }
  void reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root, Member member,
              StreamHandle stream) override {
    use(member.device);
    queued(ncclReduce(in, out, size(count), type_of(dtype), ncclSum, root, of(member).comm, on(stream)),
           member, "reduce");
  }
  void send(const std::byte* in, std::int64_t count, DType dtype, int to, Member member,
            StreamHandle stream) override {
    use(member.device);
    queued(ncclSend(in, size(count), type_of(dtype), to, of(member).comm, on(stream)), member, "send");
  }
  void receive(std::byte* out, std::int64_t count, DType dtype, int from, Member member,
               StreamHandle stream) override {
    use(member.device);
    queued(ncclRecv(out, size(count), type_of(dtype), from, of(member).comm, on(stream)), member, "receive");
  }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  static cudaStream_t on(StreamHandle stream) { return static_cast<cudaStream_t>(stream.handle); }

  // Between begin_together() and end_together(), end_together() waits for it.
  static void queued(ncclResult_t result, Member member, const char* doing) {
    if (result != ncclSuccess && result != ncclInProgress)
      fail("device {}: NCCL: {} failed: {}", member.device, doing, text_of(result, of(member).comm));
  }

  static void finish(ncclResult_t result, Member member, const char* doing) {
    const NcclMember& ours = of(member);
    while (result == ncclInProgress) {
      if (ours.given_up && ours.given_up()) fail("device {}: NCCL: {} was given up", member.device, doing);
      std::this_thread::sleep_for(20us);
      if (const ncclResult_t asked = ncclCommGetAsyncError(ours.comm, &result); asked != ncclSuccess)
        result = asked;
    }
    queued(result, member, doing);
  }
};

}  // namespace

std::string no_nccl() { return ""; }

std::unique_ptr<DeviceCollectives> make_nccl() { return std::make_unique<NcclCollectives>(); }

}  // namespace echelon
