// A pipeline schedule is data: for each rank the list of instructions that it runs in order. each_read()
// and each_write() are the only code that knows pipeline dataflow; the validator, the simulator, the memory
// account, the send/recv lowering, the drawings and the executor read a schedule through them.
//
// P ranks, S stages (consecutive slices of layers), M microbatches. Which rank runs (stage, microbatch) is
// said by the lists alone: DualPipe keeps each stage on two ranks, one for each direction.
//
// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288, algorithm 2) takes the output
// layer out of the last stage and cuts it over the ranks, part k on rank k. Once the last stage's F is done V
// of each part makes its logits, what they add to softmax and loss, and its part of the gradient of the
// output layer's input; B of the last stage adds these up and tells each part what its softmax is divided by,
// with which VW makes the gradient of the part's weights.
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
  V,         // of a part of the output layer: logits, and the gradient of its input
  VW,        // gradient of its weights
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
  // Of a part of the output layer, which stands in the place of the stage:
  head_input,     // handed out by F of the last stage, the same to each part
  head_gradient,  // what V hands back: its part of that input's gradient, and...
  head_sums,      // ...its maxima, sums of exponentials and targets' logits
  head_saved,     // what V keeps for VW
  head_scale,     // what B of the last stage makes of the sums of all parts, for VW
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
  int stage =
      0;  // of V and VW, and of messages between parts and the last stage: the part of the output layer
  int microbatch = 0;
  // Version of the stage's weights that F, B and BW read and that a step replaces. 0 throughout in a schedule
  // that flushes.
  int version = 0;
  // Runs together with the next instruction of the list, each hiding the other's communication (DualPipe's
  // F&B).
  bool overlaps_next = false;
  // For send and recv: which value (its stage and microbatch are those above), and the other rank.
  ValueKind carries = ValueKind::activation;
  int peer = -1;
  bool operator==(const Instruction&) const = default;
};

struct Schedule {
  std::string name;
  int num_stages = 0;
  int num_microbatches = 0;
  std::vector<std::vector<Instruction>> ranks;
  int vocabulary_parts = 0;  // of the output layer: one a rank, or none

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  // A stage's part of a full one (1/P of the model): 1, 1/V with V chunks a rank, 1 in DualPipe although each
  // is held twice.
  double stage_fraction() const { return static_cast<double>(num_ranks()) / num_stages; }
};

// Visits the values that an instruction needs before it can start...
template <class Visit>
void each_read(const Schedule& schedule, const Instruction& i, Visit visit) {
  switch (i.op) {
    case Op::F:
      if (i.stage > 0) visit(Value{ValueKind::activation, i.stage - 1, i.microbatch});
      visit(Value{ValueKind::weights, i.stage, 0, i.version});
      break;
    case Op::B:
    case Op::BW:
      visit(Value{ValueKind::saved, i.stage, i.microbatch});
      if (i.stage + 1 < schedule.num_stages) {
        visit(Value{ValueKind::gradient, i.stage, i.microbatch});
      } else {
        for (int part = 0; part < schedule.vocabulary_parts; ++part) {
          visit(Value{ValueKind::head_gradient, part, i.microbatch});
          visit(Value{ValueKind::head_sums, part, i.microbatch});
        }
      }
      visit(Value{ValueKind::weights, i.stage, 0, i.version});
      break;
    case Op::W:
      visit(Value{ValueKind::weight_input, i.stage, i.microbatch});
      break;
    case Op::V:
      visit(Value{ValueKind::head_input, i.stage, i.microbatch});
      break;
    case Op::VW:
      visit(Value{ValueKind::head_saved, i.stage, i.microbatch});
      visit(Value{ValueKind::head_scale, i.stage, i.microbatch});
      break;
    case Op::send:
      visit(Value{i.carries, i.stage, i.microbatch});
      break;
    case Op::recv:
    case Op::validate:
      break;
    case Op::step:
      visit(Value{ValueKind::weights, i.stage, 0, i.version});
      break;
  }
}

// ... those that exist when it has ended...
template <class Visit>
void each_write(const Schedule& schedule, const Instruction& i, Visit visit) {
  switch (i.op) {
    case Op::F:
      visit(Value{ValueKind::saved, i.stage, i.microbatch});
      if (i.stage + 1 < schedule.num_stages) {
        visit(Value{ValueKind::activation, i.stage, i.microbatch});
      } else {
        for (int part = 0; part < schedule.vocabulary_parts; ++part)
          visit(Value{ValueKind::head_input, part, i.microbatch});
      }
      break;
    case Op::B:
    case Op::BW:
      if (i.op == Op::B) visit(Value{ValueKind::weight_input, i.stage, i.microbatch});
      if (i.stage > 0) visit(Value{ValueKind::gradient, i.stage - 1, i.microbatch});
      if (i.stage + 1 == schedule.num_stages)
        for (int part = 0; part < schedule.vocabulary_parts; ++part)
          visit(Value{ValueKind::head_scale, part, i.microbatch});
      break;
    case Op::V:
      visit(Value{ValueKind::head_saved, i.stage, i.microbatch});
      visit(Value{ValueKind::head_gradient, i.stage, i.microbatch});
      visit(Value{ValueKind::head_sums, i.stage, i.microbatch});
      break;
    case Op::W:
    case Op::VW:
    case Op::send:
    case Op::validate:
      break;
    case Op::recv:
      visit(Value{i.carries, i.stage, i.microbatch});
      break;
    case Op::step:
      visit(Value{ValueKind::weights, i.stage, 0, i.version + 1});
      break;
  }
}

// ... and those that are no longer needed then: `saved` after W or BW, `weight_input` after W, `head_saved`
// after VW.
template <class Visit>
void each_release(const Instruction& i, Visit visit) {
  if (i.op == Op::BW || i.op == Op::W) visit(Value{ValueKind::saved, i.stage, i.microbatch});
  if (i.op == Op::W) visit(Value{ValueKind::weight_input, i.stage, i.microbatch});
  if (i.op == Op::VW) visit(Value{ValueKind::head_saved, i.stage, i.microbatch});
}

// The same as lists.
std::vector<Value> reads(const Schedule& schedule, const Instruction& instruction);
std::vector<Value> writes(const Schedule& schedule, const Instruction& instruction);
std::vector<Value> releases(const Instruction& instruction);

// Of a part of the output layer.
inline bool is_of_head(ValueKind kind) { return kind >= ValueKind::head_input; }
// What one rank may send to another.
inline bool travels(ValueKind kind) {
  return kind == ValueKind::activation || kind == ValueKind::gradient ||
         (is_of_head(kind) && kind != ValueKind::head_saved);
}
inline bool travels(const Value& v) { return travels(v.kind); }

// A table of values has for each microbatch a row for each stage, then two for each part of the output layer.
// In a row what travels has two columns, and what is kept on its rank one.
struct ValuePlace {
  int row = 0, column = 0;
};
inline int value_rows(const Schedule& s) { return s.num_stages + 2 * s.vocabulary_parts; }
inline ValuePlace value_place(const Schedule& s, const Value& v) {
  switch (v.kind) {
    case ValueKind::head_input:
      return {s.num_stages + 2 * v.stage, 0};
    case ValueKind::head_gradient:
      return {s.num_stages + 2 * v.stage, 1};
    case ValueKind::head_saved:
    case ValueKind::head_sums:
      return {s.num_stages + 2 * v.stage + 1, 0};
    case ValueKind::head_scale:
      return {s.num_stages + 2 * v.stage + 1, 1};
    case ValueKind::gradient:
      return {v.stage, 1};
    case ValueKind::activation:
    case ValueKind::saved:
    case ValueKind::weight_input:
    case ValueKind::weights:
      break;
  }
  return {v.stage, 0};
}

inline bool is_forward(Op op) { return op == Op::F; }
inline bool is_of_head(Op op) { return op == Op::V || op == Op::VW; }
inline bool is_compute(Op op) {
  return op == Op::F || op == Op::B || op == Op::W || op == Op::BW || is_of_head(op);
}
const char* op_name(Op op);  // "F", "B", "W", "BW", "V", "VW", "send", "recv", "step", "validate"
// "2F0", or "send activation 2.0 to 3"
std::string to_string(const Instruction& instruction);
std::string to_string(const Value& value);  // "the activation of stage 1, microbatch 0"

}  // namespace echelon
