#include "schedule/schedule.h"

#include <fmt/core.h>

namespace echelon {
namespace {

Value value(ValueKind kind, int stage, int microbatch) { return {kind, stage, microbatch, 0}; }
Value weights(const Instruction& i, int version) { return {ValueKind::weights, i.stage, 0, version}; }
Value carried(const Instruction& i) { return value(i.carries, i.stage, i.microbatch); }

}  // namespace

Values reads(const Schedule& schedule, const Instruction& i) {
  Values v;
  switch (i.op) {
    case Op::F:
      if (i.stage > 0) v.add(value(ValueKind::activation, i.stage - 1, i.microbatch));
      v.add(weights(i, i.version));
      break;
    case Op::B:
    case Op::BW:
      v.add(value(ValueKind::saved, i.stage, i.microbatch));
      if (i.stage + 1 < schedule.num_stages) v.add(value(ValueKind::gradient, i.stage, i.microbatch));
      v.add(weights(i, i.version));
      break;
    case Op::W:
      v.add(value(ValueKind::weight_input, i.stage, i.microbatch));
      break;
    case Op::send:
      v.add(carried(i));
      break;
    case Op::recv:
    case Op::validate:
      break;
    case Op::step:
      v.add(weights(i, i.version));
      break;
  }
  return v;
}

Values writes(const Schedule& schedule, const Instruction& i) {
  Values v;
  switch (i.op) {
    case Op::F:
      v.add(value(ValueKind::saved, i.stage, i.microbatch));
      if (i.stage + 1 < schedule.num_stages) v.add(value(ValueKind::activation, i.stage, i.microbatch));
      break;
    case Op::B:
    case Op::BW:
      if (i.op == Op::B) v.add(value(ValueKind::weight_input, i.stage, i.microbatch));
      if (i.stage > 0) v.add(value(ValueKind::gradient, i.stage - 1, i.microbatch));
      break;
    case Op::W:
    case Op::send:
    case Op::validate:
      break;
    case Op::recv:
      v.add(carried(i));
      break;
    case Op::step:
      v.add(weights(i, i.version + 1));
      break;
  }
  return v;
}

Values releases(const Instruction& i) {
  Values v;
  if (i.op == Op::BW || i.op == Op::W) v.add(value(ValueKind::saved, i.stage, i.microbatch));
  if (i.op == Op::W) v.add(value(ValueKind::weight_input, i.stage, i.microbatch));
  return v;
}

const char* op_name(Op op) {
  switch (op) {
    case Op::F:
      return "F";
    case Op::B:
      return "B";
    case Op::W:
      return "W";
    case Op::BW:
      return "BW";
    case Op::send:
      return "send";
    case Op::recv:
      return "recv";
    case Op::step:
      return "step";
    case Op::validate:
      return "validate";
  }
  return "?";
}

std::string to_string(const Instruction& i) {
  if (i.op == Op::send || i.op == Op::recv)
    return fmt::format("{} of the {} {}.{} {} rank {}", op_name(i.op),
                       i.carries == ValueKind::activation ? "activation" : "gradient", i.stage, i.microbatch,
                       i.op == Op::send ? "to" : "from", i.peer);
  if (i.op == Op::step) return fmt::format("step of stage {} (version {})", i.stage, i.version);
  if (i.op == Op::validate) return "validation of the last step";
  return fmt::format("{}{}{}", i.stage, op_name(i.op), i.microbatch);
}

std::string to_string(const Value& v) {
  switch (v.kind) {
    case ValueKind::activation:
      return fmt::format("the activation of stage {}, microbatch {}", v.stage, v.microbatch);
    case ValueKind::gradient:
      return fmt::format("the gradient of stage {}'s activation, microbatch {}", v.stage, v.microbatch);
    case ValueKind::saved:
      return fmt::format("what F of stage {}, microbatch {} keeps", v.stage, v.microbatch);
    case ValueKind::weight_input:
      return fmt::format("what B of stage {}, microbatch {} keeps", v.stage, v.microbatch);
    case ValueKind::weights:
      return fmt::format("version {} of the weights of stage {}", v.version, v.stage);
  }
  return "?";
}

}  // namespace echelon
