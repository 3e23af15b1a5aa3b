#include "train/rank_timeline.h"

#include <fmt/format.h>

#include <utility>

#include "comm/host_group.h"

namespace echelon {

void StepTrace::begin(std::int64_t step) {
  if (recorder_ == nullptr) return;
  recorder_->begin_step(step);
  step_ = {Activity::step, static_cast<std::int32_t>(step), recorder_->now()};
}

void StepTrace::end() {
  if (recorder_ == nullptr) return;
  step_.end = recorder_->now();
  recorder_->add(step_);
  recorder_->end_step();
}

void StepTrace::next() {
  end();
  begin(step_.which + 1);
}

RankTimeline rank_timeline(const Rank& rank, const char* name, std::vector<Span> pipeline) {
  RankTimeline t;
  t.name = fmt::format("{} {}", name, rank.index());
  for (Axis axis : rank.mesh().order)
    t.place += fmt::format("{}{} {}", t.place.empty() ? "" : ", ", axis_name(axis), rank.coordinate(axis));
  t.pipeline = std::move(pipeline);
  if (rank.recorder() != nullptr) t.trace = rank.recorder()->trace();
  return t;
}

// Processes of one program on machines of one kind: values travel as they lie in memory.
std::vector<RankTimeline> gather_timelines(const Rank& rank, const RankTimeline& mine) {
  const auto group = rank.join_job_aside("timelines");
  const HostGroup job(*group);
  std::vector<std::string> texts = mine.trace.groups;
  texts.insert(texts.end(), {mine.place, mine.name});
  std::vector<char> ended;  // each by a zero
  for (const std::string& text : texts)
    ended.insert(ended.end(), text.c_str(), text.c_str() + text.size() + 1);
  const auto all_texts = job.gather_records(ended);
  const auto pipelines = job.gather_records(mine.pipeline);
  const auto work = job.gather_records(mine.trace.work);
  const auto calls = job.gather_records(mine.trace.calls);
  std::vector<RankTimeline> all;
  for (std::size_t r = 0; r < all_texts.size(); ++r) {
    texts.clear();
    for (const char* at = all_texts[r].data(); at != all_texts[r].data() + all_texts[r].size();
         at += texts.back().size() + 1)
      texts.emplace_back(at);
    RankTimeline& t = all.emplace_back();
    t.name = std::exchange(texts.back(), {});
    texts.pop_back();
    t.place = std::exchange(texts.back(), {});
    texts.pop_back();
    t.pipeline = pipelines[r];
    t.trace = {work[r], calls[r], texts};
  }
  return all;
}

}  // namespace echelon
