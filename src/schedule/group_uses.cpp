#include "schedule/group_uses.h"

#include <algorithm>

namespace echelon {

StageGroups stage_groups(const PipelineLayout& pipeline, int pp_rank, int stage) {
  const StageSlice& slice = pipeline.slices()[static_cast<std::size_t>(stage)];
  StageGroups groups;
  groups.first = pipeline.first_group(pp_rank, stage);
  const bool passed_over = slice.embedding && !pipeline.reads_embedding_again();
  groups.block = groups.first + std::max(static_cast<int>(passed_over), static_cast<int>(slice.idle));
  groups.end = groups.first + slice.embedding + static_cast<int>(slice.layers.size());
  if (slice.head && slice.vocabulary_is_cut)
    ++groups.end;  // the final norm is a block like others
  else if (slice.head)
    groups.output = pipeline.output_group(pp_rank);
  return groups;
}

std::vector<int> group_uses(const PipelineLayout& pipeline, const StepPrograms::Program& program,
                            int pp_rank) {
  std::vector<int> uses;
  for (const Instruction& i : program.lowered->ranks[static_cast<std::size_t>(pp_rank)]) {
    if (i.op == Op::V) uses.push_back(pipeline.output_group(pp_rank));
    if (i.op != Op::F && i.op != Op::B && i.op != Op::BW) continue;
    const StageGroups groups = stage_groups(pipeline, pp_rank, i.stage);
    if (i.op == Op::F) {
      for (int group = groups.first; group < groups.end; ++group) uses.push_back(group);
    } else {
      if (groups.output >= 0) uses.push_back(groups.output);
      for (int group = groups.end; group-- > groups.block;) uses.push_back(group);
    }
  }
  return uses;
}

}  // namespace echelon
