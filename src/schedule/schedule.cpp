#include "schedule/schedule.h"

#include <fmt/core.h>

namespace echelon {
Values reads(const Schedule& schedule, const Instruction& i) {
  Values values;
  each_read(schedule, i, [&](const Value& v) { values.items[values.count++] = v; });
  return values;
}

Values writes(const Schedule& schedule, const Instruction& i) {
  Values values;
  each_write(schedule, i, [&](const Value& v) { values.items[values.count++] = v; });
  return values;
}

Values releases(const Instruction& i) {
  Values values;
  each_release(i, [&](const Value& v) { values.items[values.count++] = v; });
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
