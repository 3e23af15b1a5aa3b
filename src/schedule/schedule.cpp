#include "schedule/schedule.h"

#include <fmt/core.h>

#include "base/error.h"

namespace echelon {
std::vector<Value> reads(const Schedule& schedule, const Instruction& i) {
  std::vector<Value> values;
  each_read(schedule, i, [&](const Value& v) { values.push_back(v); });
  return values;
}

std::vector<Value> writes(const Schedule& schedule, const Instruction& i) {
  std::vector<Value> values;
  each_write(schedule, i, [&](const Value& v) { values.push_back(v); });
  return values;
}

std::vector<Value> releases(const Instruction& i) {
  std::vector<Value> values;
  each_release(i, [&](const Value& v) { values.push_back(v); });
  return values;
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
    case Op::V:
      return "V";
    case Op::VW:
      return "VW";
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

static const char* message_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::activation:
      return "activation";
    case ValueKind::gradient:
      return "gradient";
    case ValueKind::head_input:
      return "output layer's input";
    case ValueKind::head_gradient:
      return "gradient of the output layer's input";
    case ValueKind::head_sums:
      return "output layer's sums";
    case ValueKind::head_scale:
      return "output layer's scale";
    default:
      throw InvariantError("a value that does not travel has no message");
  }
}

std::string to_string(const Instruction& i) {
  if (i.op == Op::send || i.op == Op::recv)
    return fmt::format("{} of the {} {}.{} {} rank {}", op_name(i.op), message_name(i.carries), i.stage,
                       i.microbatch, i.op == Op::send ? "to" : "from", i.peer);
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
    case ValueKind::head_input:
      return fmt::format("the input of part {} of the output layer, microbatch {}", v.stage, v.microbatch);
    case ValueKind::head_gradient:
      return fmt::format("part {} of the gradient of the output layer's input, microbatch {}", v.stage,
                         v.microbatch);
    case ValueKind::head_sums:
      return fmt::format("the sums of part {} of the output layer, microbatch {}", v.stage, v.microbatch);
    case ValueKind::head_saved:
      return fmt::format("what V of part {} of the output layer, microbatch {} keeps", v.stage, v.microbatch);
    case ValueKind::head_scale:
      return fmt::format("the scale of part {} of the output layer, microbatch {}", v.stage, v.microbatch);
  }
  return "?";
}

}  // namespace echelon
