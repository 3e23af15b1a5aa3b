// A pipeline schedule as data: for each rank, the list of instructions that it runs in order. each_read() and
// each_write() are the only code that knows the pipeline's dataflow; the validator, the simulator, memory
// accounting, lowering to sends and receives, drawings and the executor all read a schedule through them.
//
// There are P ranks, S stages (consecutive slices of layers) and M microbatches. Only the lists say which
// rank runs (stage, microbatch): DualPipe keeps each stage on two ranks, one for each direction.
//
// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288, algorithm 2) takes the output
// layer out of the last stage and cuts it over the ranks: part k is on rank k. After the last stage's F, V of
// each part computes its logits, its contribution to the softmax and the loss, and its part of the gradient
// of the output layer's input. B of the last stage sums these and sends each part the denominator of its
// softmax, with which VW computes the gradient of the part's weights.
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
  VW,        // of a part of the output layer: gradient of its weights
  send,      // sends a value to `peer` without waiting
  recv,      // waits until the value has arrived
  step,      // optimizer step of a stage; only in schedules without a flush (PipeDream)
  validate,  // waits for what all stages report of the previous step, which did not wait for them
};

enum class ValueKind : std::uint8_t {
  activation,    // the output of F(stage, microbatch), for the next stage
  gradient,      // the loss's gradient with respect to that activation, back from the next stage
  saved,         // what F keeps for the backward pass
  weight_input,  // what B keeps for W
  weights,       // one version of a stage's parameters; microbatch is unused
  // Of a part of the output layer, whose number is in Value::stage:
  head_input,     // the output of the last stage's F, the same for each part
  head_gradient,  // of V: its part of that input's gradient...
  head_sums,      // ...and its maxima, sums of exponentials and target logits
  head_saved,     // what V keeps for VW
  head_scale,     // softmax denominators, which B of the last stage computes from all parts' sums for VW
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
  // For V and VW, and for messages between the last stage and a part of the output layer: the part.
  int stage = 0;
  int microbatch = 0;
  // The version of the stage's weights that F, B and BW read and that a step replaces. Always 0 in a schedule
  // that flushes.
  int version = 0;
  // Runs together with the next instruction of the list, each hiding the other's communication (DualPipe's
  // F&B).
  bool overlaps_next = false;
  // For send and recv: the kind of the value (its stage and microbatch are above), and the other rank.
  ValueKind carries = ValueKind::activation;
  int peer = -1;
  bool operator==(const Instruction&) const = default;
};

struct Schedule {
  std::string name;
  int num_stages = 0;
  int num_microbatches = 0;
  std::vector<std::vector<Instruction>> ranks;
  int vocabulary_parts = 0;  // of the output layer: one per rank, or none

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  // A stage's size as a fraction of a full stage, which is 1/P of the model: 1/V with V chunks a rank, else
  // 1, also in DualPipe although each stage is held twice.
  double stage_fraction() const { return static_cast<double>(num_ranks()) / num_stages; }
};

// Visits the values that an instruction needs before it can start.
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

// Visits the values that an instruction has written when it ends.
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

// Visits the values that are not needed after an instruction: `saved` after W or BW, `weight_input` after W,
// `head_saved` after VW.
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

// Whether the kind belongs to a part of the output layer.
inline bool is_of_head(ValueKind kind) { return kind >= ValueKind::head_input; }
// Whether one rank may send the value to another.
inline bool travels(ValueKind kind) {
  return kind == ValueKind::activation || kind == ValueKind::gradient ||
         (is_of_head(kind) && kind != ValueKind::head_saved);
}
inline bool travels(const Value& v) { return travels(v.kind); }

// The place of a value in a table of all values. For each microbatch the table has a row for each stage, then
// two for each part of the output layer. Values that travel have two columns in a row, values that stay on
// their rank one.
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
