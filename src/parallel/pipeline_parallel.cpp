#include "parallel/pipeline_parallel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace echelon {

PipelineRun PipelineExecutor::run(const StepPrograms::Program& program, PipelineStages& stages) {
  PipelineRun run;
  run.start = time_.now();
  run.peak_saved = saved_;
  std::vector<Instruction> list = program.lowered->ranks[static_cast<std::size_t>(group_->rank())];
  for (Instruction& i : list) {
    i.microbatch += program.first_microbatch;
    i.version += program.first_version;
  }
  for (std::size_t k = 0; k < list.size(); ++k) {
    const Instruction& i = list[k];
    if (i.overlaps_next && stages.pauses()) {
      const std::size_t first = k;
      while (list[k].overlaps_next) ++k;
      stages.upcoming(nullptr);
      execute_together({&list[first], k + 1 - first}, *program.lowered, stages, run);
      continue;
    }
    const Moment begin = now(run);
    bool again = false;
    stages.before(i);
    stages.upcoming(next_compute(list, k, stages.pauses()));
    if (i.op == Op::validate)
      again = !stages.validate();
    else
      execute(i, *program.lowered, stages, run);
    // What has been sent needs its buffer no longer.
    std::erase_if(sends_, [](Pending& pending) { return pending.progress(); });
    add_span(i, begin, now(run), run);
    if (!again) continue;
    // Every message that was sent so far has been received so far, and all ranks start again.
    run.was_again = true;
    shelf_.clear();
    saved_ = 0;
    k = static_cast<std::size_t>(-1);
  }
  if (program.drains)
    for (Pending& pending : std::exchange(sends_, {})) pending.wait();
  return run;
}

const Instruction* PipelineExecutor::next_compute(const std::vector<Instruction>& list, std::size_t behind,
                                                  bool overlaps) {
  for (std::size_t k = behind + 1; k < list.size(); ++k) {
    if (list[k].overlaps_next && overlaps) return nullptr;
    if (is_compute(list[k].op)) return &list[k];
  }
  return nullptr;
}

PipelineExecutor::Moment PipelineExecutor::now(const PipelineRun& run) const {
  if (device_ != nullptr) return {0, device_->mark()};
  return {seconds_between(run.start, time_.now())};
}

void PipelineExecutor::add_span(const Instruction& i, const Moment& begin, const Moment& end,
                                PipelineRun& run) {
  run.spans.push_back({i, begin.seconds, end.seconds});
  if (begin.on_device) run.on_device.push_back({begin.on_device, end.on_device});
}

void PipelineRun::settle(DeviceClock& clock) {
  if (on_device.empty()) return;
  check(on_device.size() == spans.size(), "a device runs all instructions or none");
  start = clock.time_of(on_device.front().begin);
  const auto seconds = [&](const auto& event) { return seconds_between(start, clock.time_of(event)); };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    spans[i].begin = seconds(on_device[i].begin);
    spans[i].end = seconds(on_device[i].end);
  }
  on_device.clear();
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

Tensor PipelineExecutor::fetch(const Instruction& i, const Schedule& schedule) {
  Tensor fetched;
  for (const Value& v : reads(schedule, i)) {
    if (v.kind == ValueKind::weights && (i.op == Op::B || i.op == Op::BW))
      oldest_read_ = std::min(oldest_read_.value_or(v.version), v.version);
    if (travels(v)) fetched = take(v);
  }
  return fetched;
}

Tensor PipelineExecutor::take(const Value& v) {
  const auto found = shelf_.find(v);
  check(found != shelf_.end(), "a pipeline instruction reads a value that is not there");
  Tensor taken = std::move(found->second);
  shelf_.erase(found);
  return taken;
}

Tensor PipelineExecutor::merge_head(const Instruction& i, const Schedule& schedule, PipelineStages& stages) {
  std::vector<VocabularyParallel::Part> parts;
  for (int part = 0; part < schedule.vocabulary_parts; ++part) {
    Tensor gradient = take({ValueKind::head_gradient, part, i.microbatch});
    parts.push_back({std::move(gradient), take({ValueKind::head_sums, part, i.microbatch})});
  }
  VocabularyParallel::Whole whole = stages.merge_head(i.microbatch, parts);
  for (int part = 0; part < schedule.vocabulary_parts; ++part)
    shelf_[{ValueKind::head_scale, part, i.microbatch}] = whole.scales[static_cast<std::size_t>(part)];
  return std::move(whole.gradient);
}

void PipelineExecutor::shelve(const Instruction& i, const Schedule& schedule, const Tensor& result,
                              PipelineRun& run) {
  for (const Value& v : writes(schedule, i)) {
    if (travels(v) && v.kind != ValueKind::head_scale) shelf_[v] = result;
    if (v.kind == ValueKind::saved) run.peak_saved = std::max(run.peak_saved, ++saved_);
  }
  for (const Value& v : releases(i)) saved_ -= v.kind == ValueKind::saved;
}

void PipelineExecutor::execute(const Instruction& i, const Schedule& schedule, PipelineStages& stages,
                               PipelineRun& run) {
  switch (i.op) {
    case Op::recv: {
      const Tensor room = stages.make_room(i.carries, i.microbatch);
      group_->recv(room, i.peer).wait();
      shelf_[{i.carries, i.stage, i.microbatch}] = room;
      return;
    }
    case Op::send:
      sends_.push_back(group_->send(fetch(i, schedule), i.peer));
      ++run.messages;
      return;
    case Op::B:
    case Op::BW:
      if (i.stage + 1 == schedule.num_stages && schedule.vocabulary_parts > 0)
        return shelve(i, schedule, stages.pass(i, merge_head(i, schedule, stages)).finish(), run);
      [[fallthrough]];
    case Op::F:
      return shelve(i, schedule, stages.pass(i, fetch(i, schedule)).finish(), run);
    case Op::W:
      stages.backward_weight(i);
      return shelve(i, schedule, {}, run);
    case Op::V: {
      VocabularyParallel::Part part = stages.head_part(i, fetch(i, schedule));
      shelf_[{ValueKind::head_gradient, i.stage, i.microbatch}] = std::move(part.gradient);
      shelf_[{ValueKind::head_sums, i.stage, i.microbatch}] = std::move(part.sums);
      return;
    }
    case Op::VW:
      return stages.head_part_weight(i, fetch(i, schedule));
    case Op::step:
      note_staleness(i, run);
      return stages.step(i);
    case Op::validate:
      throw InvariantError("validation may start the list again: it is run() that executes it");
  }
}

// prove_finishes() treats instructions that run together as one: they can receive everything before they
// begin, and send when they are done.
void PipelineExecutor::execute_together(std::span<const Instruction> list, const Schedule& schedule,
                                        PipelineStages& stages, PipelineRun& run) {
  const auto messages = [&](Op op) {
    for (const Instruction& i : list) {
      if (i.op != op) continue;
      const Moment begin = now(run);
      stages.before(i);
      execute(i, schedule, stages, run);
      add_span(i, begin, now(run), run);
    }
  };
  messages(Op::recv);
  struct Part {
    Instruction i;
    Work<Tensor> work;
    Moment begin, end{};
    bool ended = false;
  };
  std::vector<Part> parts;
  for (const Instruction& i : list)
    if (is_compute(i.op)) {
      check(i.op != Op::W, "passes run together");
      parts.push_back({i, stages.pass(i, fetch(i, schedule)), now(run)});
    }
  for (std::size_t left = parts.size(); left > 0;)
    for (Part& part : parts) {
      if (part.ended) continue;
      stages.before(part.i);
      part.ended = part.work.step();
      if (!part.ended) continue;
      shelve(part.i, schedule, part.work.take(), run);
      part.end = now(run);
      --left;
    }
  // In the order of the list, by which drawings know what ran together.
  for (const Part& part : parts) add_span(part.i, part.begin, part.end, run);
  messages(Op::send);
  std::erase_if(sends_, [](Pending& pending) { return pending.progress(); });
}

void PipelineExecutor::note_staleness(const Instruction& step, PipelineRun& run) {
  const int late = step.version - std::exchange(oldest_read_, std::nullopt).value_or(step.version);
  run.max_staleness = std::max(run.max_staleness, late);
}

}  // namespace echelon
