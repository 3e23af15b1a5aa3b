// A plan as other programs are started with it: the command, and the files that it reads.
#pragma once

#include <string>
#include <vector>

#include "plan/step_model.h"

namespace echelon {

struct LaunchFile {
  std::string name, text;
};

// Programs that are known: megatron-core, megatron-bridge, torchtitan, nanotron, deepspeed.
const std::vector<std::string>& launched_programs();

// The files, launch.sh first: it starts one node's share of the plan, from the directory that it lies in, and
// takes the address of the first node and its own number from MASTER_ADDR and NODE_RANK. Of data and
// tokenizer it has the program's stand-ins. RequestError naming what of the plan or the model the program
// does not run; `program` is one of the list.
//
//  * megatron-core: pretrain_gpt.py's flags, the pipeline layout string among them (0.14 and later).
//  * megatron-bridge: overrides of its ConfigContainer as YAML.
//  * torchtitan: the job's TOML (0.2), and the schedule as torch.distributed.pipelining's CSV where it has
//  none of that name.
//  * nanotron: its YAML (0.4).
//  * deepspeed: ds_config.json (0.19), for a training script of one's own.
std::vector<LaunchFile> launch_files(const std::string& program, const Estimate& best, const Workload& work);

}  // namespace echelon
