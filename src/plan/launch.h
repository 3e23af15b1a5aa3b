// Writes a plan for other training programs: the command that starts it, and the files that it reads.
#pragma once

#include <string>
#include <vector>

#include "plan/step_model.h"

namespace echelon {

struct LaunchFile {
  std::string name, text;
};

// The programs that can be launched: megatron-core, megatron-bridge, torchtitan, nanotron, deepspeed.
const std::vector<std::string>& launched_programs();

// The files to start a plan, launch.sh first. It starts one node's part of the plan, from the directory in
// which it lies, and takes the address of the first node and its own node number from MASTER_ADDR and
// NODE_RANK. Data and tokenizer are the program's placeholders. RequestError naming what of the plan or the
// model the program does not run, or if `program` is not in the list.
//
//  * megatron-core: pretrain_gpt.py's flags, including the pipeline layout string (0.14 and later).
//  * megatron-bridge: overrides of its ConfigContainer as YAML.
//  * torchtitan: the job's TOML (0.2), and the schedule as a CSV if torch.distributed.pipelining has none of
//    this name.
//  * nanotron: its YAML (0.4).
//  * deepspeed: ds_config.json (0.19), for a training script of your own.
std::vector<LaunchFile> launch_files(const std::string& program, const Estimate& best, const Workload& work);

}  // namespace echelon
