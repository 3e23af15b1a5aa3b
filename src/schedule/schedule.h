// A pipeline schedule is data: for each rank the list of instructions that it runs in order. reads() and
// writes() are the only code that knows pipeline dataflow; the validator, the simulator, the memory account,
// the send/recv lowering, the drawings and the executor read a schedule through them.
//
// P ranks, S stages (consecutive slices of layers), M microbatches. Which rank runs (stage, microbatch) is
// said by the lists alone: DualPipe keeps each stage on two ranks, one for each direction.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

enum class Op : std::uint8_t {
  F,         // forward
  B,         // gradient of the stage's input
  W,         // gradient of its weights
  BW,        // both at once
  send,      // of a value to `peer`; posts and goes on
  recv,      // waits until the value is there
  step,      // optimizer step of a stage: only where a schedule does not flush (PipeDream)
  validate,  // waits for what all stages say of the step before, which was made without waiting for them
};

enum class ValueKind : std::uint8_t {
  activation,    // what F(stage, microbatch) hands to the next stage
  gradient,      // of the loss with respect to that activation, handed back by the next stage
  saved,         // what F keeps for the backward pass
  weight_input,  // what B keeps for W
  weights,       // one version of a stage's parameters; microbatch is unused
};

struct Value {
  ValueKind kind = ValueKind::activation;
  int stage = 0;
  int microbatch = 0;
  int version = 0;  // of weights
  auto operator<=>(const Value&) const = default;
};

struct Instruction {
  Op op = Op::F;
  int stage = 0;
  int microbatch = 0;
  // Version of the stage's weights that F, B and BW read and that a step replaces. 0 throughout in a schedule
  // that flushes.
  int version = 0;
  // Runs together with the next instruction of the list, each hiding the other's communication (DualPipe's
  // F&B).
  bool overlaps_next = false;
  // Of send and recv: the other rank, and which value (its stage and microbatch are those above).
  int peer = -1;
  ValueKind carries = ValueKind::activation;
  bool operator==(const Instruction&) const = default;
};

struct Schedule {
  std::string name;
  int num_stages = 0;
  int num_microbatches = 0;
  std::vector<std::vector<Instruction>> ranks;

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  // A stage's part of a full one (1/P of the model): 1, 1/V with V chunks a rank, 1 in DualPipe although each
  // is held twice.
  double stage_fraction() const { return static_cast<double>(num_ranks()) / num_stages; }
};

// At most this many values are read or written by one instruction.
struct Values {
  Value items[4];
  int count = 0;
  void add(Value v) { items[count++] = v; }
  const Value* begin() const { return items; }
  const Value* end() const { return items + count; }
};

// What an instruction needs before it can start, and what exists when it has ended.
Values reads(const Schedule& schedule, const Instruction& instruction);
Values writes(const Schedule& schedule, const Instruction& instruction);
// What is no longer needed when it has ended: `saved` after W or BW, `weight_input` after W.
Values releases(const Instruction& instruction);

inline bool is_forward(Op op) { return op == Op::F; }
inline bool is_compute(Op op) { return op == Op::F || op == Op::B || op == Op::W || op == Op::BW; }
const char* op_name(Op op);  // "F", "B", "W", "BW", "send", "recv", "step", "validate"
// "2F0", or "send activation 2.0 to 3"
std::string to_string(const Instruction& instruction);
std::string to_string(const Value& value);  // "the activation of stage 1, microbatch 0"

}  // namespace echelon
