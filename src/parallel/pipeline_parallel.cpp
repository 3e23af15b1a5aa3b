#include "parallel/pipeline_parallel.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace echelon {

PipelineRun PipelineExecutor::run(const StepPrograms::Program& program, PipelineStages& stages) {
  const auto start = Clock::now();
  const auto now = [&] { return seconds_since(start); };
  PipelineRun run;
  run.start = start;
  run.peak_saved = saved_;
  const auto& list = program.lowered->ranks[static_cast<std::size_t>(group_->rank())];
  for (std::size_t k = 0; k < list.size(); ++k) {
    Instruction i = list[k];
    i.microbatch += program.first_microbatch;
    i.version += program.first_version;
    const double begin = now();
    bool again = false;
    if (watch_) watch_(i);
    if (i.op == Op::validate)
      again = !stages.validate();
    else
      execute(i, *program.lowered, stages, run);
    // What has been sent needs its buffer no longer.
    std::erase_if(sends_, [](Pending& pending) { return pending.progress(); });
    run.spans.push_back({i, begin, now()});
    if (!again) continue;
    // Every message that was sent so far has been received so far, and all ranks start again.
    shelf_.clear();
    saved_ = 0;
    k = static_cast<std::size_t>(-1);
  }
  if (program.drains)
    for (Pending& pending : std::exchange(sends_, {})) pending.wait();
  return run;
}

std::vector<Span> PipelineRun::spans_since(Clock::time_point zero) const {
  const double offset = std::chrono::duration<double>(start - zero).count();
  std::vector<Span> moved = spans;
  for (Span& span : moved) {
    span.begin += offset;
    span.end += offset;
  }
  return moved;
}

std::vector<std::vector<Span>> gather_spans(Communicator& group, const std::vector<Span>& spans) {
  static_assert(std::is_trivially_copyable_v<Span>);
  const auto bytes = [](std::vector<Span>& part) {
    return Tensor::view_of(part.data(), DType::u8, {static_cast<std::int64_t>(part.size() * sizeof(Span))});
  };
  std::vector<Span> mine = spans;
  std::int32_t count = static_cast<std::int32_t>(mine.size());
  const auto number = [](std::int32_t& n) { return Tensor::view_of(&n, DType::i32, {1}); };
  if (group.rank() > 0) {
    group.send(number(count), 0).wait();
    if (count > 0) group.send(bytes(mine), 0).wait();
    return {};
  }
  std::vector<std::vector<Span>> all{std::move(mine)};
  for (int from = 1; from < group.size(); ++from) {
    group.recv(number(count), from).wait();
    auto& theirs = all.emplace_back(static_cast<std::size_t>(count));
    if (count > 0) group.recv(bytes(theirs), from).wait();
  }
  return all;
}

Tensor PipelineExecutor::take(const Value& v) {
  const auto found = shelf_.find(v);
  check(found != shelf_.end(), "a pipeline instruction reads a value that is not there");
  Tensor t = std::move(found->second);
  shelf_.erase(found);
  return t;
}

void PipelineExecutor::execute(const Instruction& i, const Schedule& schedule, PipelineStages& stages,
                               PipelineRun& run) {
  const Value input{ValueKind::activation, i.stage - 1, i.microbatch},
      output{ValueKind::activation, i.stage, i.microbatch};
  const Value d_input{ValueKind::gradient, i.stage - 1, i.microbatch},
      d_output{ValueKind::gradient, i.stage, i.microbatch};
  const Value carried{i.carries, i.stage, i.microbatch};
  const bool first = i.stage == 0, last = i.stage + 1 == schedule.num_stages;
  switch (i.op) {
    case Op::recv: {
      const Tensor room = stages.make_boundary(i.microbatch);
      group_->recv(room, i.peer).wait();
      shelf_[carried] = room;
      break;
    }
    case Op::send:
      sends_.push_back(group_->send(take(carried), i.peer));
      ++run.messages;
      break;
    case Op::F: {
      Tensor out = stages.forward(i, first ? Tensor() : take(input));
      if (!last) shelf_[output] = std::move(out);
      run.peak_saved = std::max(run.peak_saved, ++saved_);
      break;
    }
    case Op::B:
    case Op::BW: {
      Tensor gradient = last ? Tensor() : take(d_output);
      Tensor d = i.op == Op::BW ? stages.backward(i, std::move(gradient))
                                : stages.backward_input(i, std::move(gradient));
      if (!first) shelf_[d_input] = std::move(d);
      if (i.op == Op::BW) --saved_;
      oldest_read_ = std::min(oldest_read_.value_or(i.version), i.version);
      break;
    }
    case Op::W:
      stages.backward_weight(i);
      --saved_;
      break;
    case Op::step:
      note_staleness(i, run);
      stages.step(i);
      break;
    case Op::validate:
      throw InvariantError("validation may start the list again: it is run() that executes it");
  }
}

void PipelineExecutor::note_staleness(const Instruction& step, PipelineRun& run) {
  const int late = step.version - std::exchange(oldest_read_, std::nullopt).value_or(step.version);
  run.max_staleness = std::max(run.max_staleness, late);
}

}  // namespace echelon
