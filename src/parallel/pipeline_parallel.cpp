#include "parallel/pipeline_parallel.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "base/error.h"

namespace echelon {
namespace {

// Values between instructions of this rank: activations and gradients that wait for their one reader.
class Shelf {
 public:
  void put(const Value& v, Tensor t) { values_[v] = std::move(t); }
  Tensor take(const Value& v) {
    const auto found = values_.find(v);
    check(found != values_.end(), "a pipeline instruction reads a value that is not there");
    Tensor t = std::move(found->second);
    values_.erase(found);
    return t;
  }

 private:
  std::map<Value, Tensor> values_;
};

}  // namespace

PipelineRun run_pipeline(Communicator& group, const Schedule& lowered, PipelineStages& stages) {
  const auto start = std::chrono::steady_clock::now();
  const auto now = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  PipelineRun run;
  run.start = start;
  Shelf shelf;
  std::vector<Pending> sends;
  int saved = 0;
  for (const Instruction& i : lowered.ranks[static_cast<std::size_t>(group.rank())]) {
    const double begin = now();
    const Value input{ValueKind::activation, i.stage - 1, i.microbatch},
        output{ValueKind::activation, i.stage, i.microbatch};
    const Value d_input{ValueKind::gradient, i.stage - 1, i.microbatch},
        d_output{ValueKind::gradient, i.stage, i.microbatch};
    const Value carried{i.carries, i.stage, i.microbatch};
    const bool first = i.stage == 0, last = i.stage + 1 == lowered.num_stages;
    switch (i.op) {
      case Op::recv: {
        const Tensor room = stages.make_boundary(i.microbatch);
        group.recv(room, i.peer).wait();
        shelf.put(carried, room);
        break;
      }
      case Op::send:
        sends.push_back(group.send(shelf.take(carried), i.peer));
        ++run.messages;
        break;
      case Op::F: {
        Tensor out = stages.forward(i.stage, i.microbatch, first ? Tensor() : shelf.take(input));
        if (!last) shelf.put(output, std::move(out));
        run.peak_saved = std::max(run.peak_saved, ++saved);
        break;
      }
      case Op::B:
      case Op::BW: {
        Tensor gradient = last ? Tensor() : shelf.take(d_output);
        Tensor d = i.op == Op::BW ? stages.backward(i.stage, i.microbatch, std::move(gradient))
                                  : stages.backward_input(i.stage, i.microbatch, std::move(gradient));
        if (!first) shelf.put(d_input, std::move(d));
        if (i.op == Op::BW) --saved;
        break;
      }
      case Op::W:
        stages.backward_weight(i.stage, i.microbatch);
        --saved;
        break;
      case Op::step:
        throw InvariantError("the executor runs schedules that flush");
    }
    // What has been sent needs its buffer no longer.
    std::erase_if(sends, [](Pending& pending) { return pending.progress(); });
    run.spans.push_back({i, begin, now()});
  }
  for (Pending& pending : sends) pending.wait();
  return run;
}

}  // namespace echelon
