// NCCL as it behaves, on devices that are this machine's memory (fake_driver.h): work that begins when every
// rank's stream has come to it, sums in an order of its own, groups of calls, and failures that are noticed
// beside the calls. It complains of what NCCL leaves undefined: ranks that queue different things, streams
// that wait for each other in a circle, and members that are left with work under way or not at all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fake_driver.h"
#include "tensor/device_collectives.h"

namespace echelon::checks {

class FakeCollectives final : public DeviceCollectives {
 public:
  explicit FakeCollectives(FakeDriver& driver);
  ~FakeCollectives() override;

  // From its `others`-th piece of work on what a rank of any group queues is never done by its peers, and
  // they learn of it by error().
  void break_after(int others);
  // The same, and nobody learns of it.
  void stall_after(int others);
  int pieces_queued() const { return pieces_; }
  int members() const;  // that have not ended

  std::string name() override { return "fake NCCL 1.2.3"; }
  Id make_id() override;
  Member join(const Id& id, int device, int rank, int size, const std::function<bool()>& given_up) override;
  void leave(Member member) noexcept override;
  void abort(Member member) noexcept override;
  std::string error(Member member) override;
  void begin_together() override;
  void end_together(Member member) override;
  void all_reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, ReduceOp op,
                  Member member, StreamHandle stream) override;
  void all_gather(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype, Member member,
                  StreamHandle stream) override;
  void reduce_scatter(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                      Member member, StreamHandle stream) override;
  void broadcast(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                 Member member, StreamHandle stream) override;
  void reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root, Member member,
              StreamHandle stream) override;
  void send(const std::byte* in, std::int64_t count, DType dtype, int to, Member member,
            StreamHandle stream) override;
  void receive(std::byte* out, std::int64_t count, DType dtype, int from, Member member,
               StreamHandle stream) override;

 private:
  enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, receive };
  struct Asked {
    Kind kind;
    const std::byte* in;
    std::byte* out;
    std::int64_t count;
    DType dtype;
    ReduceOp op;
    int peer;  // root, or the other end
    StreamHandle stream;
  };
  // One piece of work of all ranks.
  struct Piece {
    std::shared_ptr<FakeDriver::Meeting> meeting;
    std::vector<std::vector<Asked>> asked;  // by rank
  };
  struct Group {
    int size = 0, joined = 0;
    std::vector<std::shared_ptr<Piece>> pieces;
    bool broken = false;
  };
  struct End {
    std::shared_ptr<Group> group;
    int rank = 0;
    std::size_t next = 0;
    std::vector<Asked> together;
    std::vector<std::shared_ptr<Piece>> own;
  };

  End& known(Member member);
  void ask(const Asked& asked, Member member);
  void queue(End& end, std::vector<Asked> asked);
  std::vector<FakeDriver::Use> uses_of(const Asked& asked, int size) const;
  void work(const Piece& piece);
  void collective(const Piece& piece, std::size_t index);
  void exchange(const Piece& piece);
  void sum(const std::vector<const std::byte*>& from, std::int64_t at, std::byte* to, std::int64_t count,
           const Asked& asked);
  void end(Member member, bool aborted) noexcept;

  FakeDriver& driver_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Id, std::shared_ptr<Group>> groups_;
  std::set<End*> ends_;
  std::map<std::thread::id, int> depth_;
  std::uint8_t next_id_ = 0;
  std::atomic<int> pieces_{0};
  int broken_from_ = -1;
  bool says_so_ = true;
};

}  // namespace echelon::checks
