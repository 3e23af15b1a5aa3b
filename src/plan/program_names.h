// Other programs' names for values of a plan: read from their logs, and written to their launch files.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace echelon {

struct ProgramName {
  std::string_view ours, theirs;
};

// --data-parallel-sharding-strategy of Megatron-FSDP, by --zero.
inline constexpr std::array megatron_sharding_strategies{
    ProgramName{"0", "no_shard"}, ProgramName{"1", "optim"}, ProgramName{"2", "optim_grads"},
    ProgramName{"3", "optim_grads_params"}};
// --recompute-modules, by --recompute.
inline constexpr std::array megatron_recompute_modules{ProgramName{"selective", "core_attn"},
                                                       ProgramName{"mlp", "mlp"}, ProgramName{"moe", "moe"},
                                                       ProgramName{"mla_up_proj", "mla_up_proj"}};
// --cp-comm-type, by --cp-kind.
inline constexpr std::array megatron_context_communication{
    ProgramName{"ring", "p2p"}, ProgramName{"ulysses", "a2a"}, ProgramName{"allgather", "all_gather"}};
// pipeline_parallel_schedule of torchtitan: classes of torch.distributed.pipelining.
inline constexpr std::array torch_schedules{ProgramName{"1f1b", "1F1B"}, ProgramName{"gpipe", "GPipe"},
                                            ProgramName{"interleaved", "Interleaved1F1B"},
                                            ProgramName{"zb-v", "ZBVZeroBubble"}};

// The other program's name; empty if the table has none.
template <class Table>
std::string theirs(const Table& table, std::string_view ours) {
  for (const ProgramName& one : table)
    if (one.ours == ours) return std::string(one.theirs);
  return {};
}
template <class Table>
std::string ours(const Table& table, std::string_view theirs) {
  for (const ProgramName& one : table)
    if (one.theirs == theirs) return std::string(one.ours);
  return {};
}

}  // namespace echelon
