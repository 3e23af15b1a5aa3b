#include "spec/block_passes.h"

#include <algorithm>
#include <functional>
#include <set>

namespace echelon {
namespace {

bool is_made_again(const BlockProgram& program, int value, const Recompute& recompute) {
  const int made_by = program.producer(value);
  if (made_by < 0) return false;
  const BlockOp& op = program.ops[static_cast<std::size_t>(made_by)];
  return program.value(value).again == Again::with_input ? is_made_again(program, op.inputs[0], recompute)
                                                         : recompute.contains(op);
}

// What an op needs to make its outputs again, of what is there: of a norm its input even where its statistics
// are kept, of attention what it computes with. An activation takes its input alone.
std::vector<int> made_from(const BlockProgram& program, const BlockOp& op, const std::set<int>& there) {
  for (int output : op.outputs)
    if (program.value(output).again == Again::with_input && op.kind != OpKind::activation &&
        there.contains(output))
      return {output};
  return op.inputs;
}

// The ops that a value comes of, in order.
std::vector<int> ops_for(const BlockProgram& program, int value) {
  std::set<int> ops;
  const std::function<void(int)> add = [&](int needed) {
    const int made_by = program.producer(needed);
    if (made_by < 0 || !ops.insert(made_by).second) return;
    for (int input : program.ops[static_cast<std::size_t>(made_by)].inputs) add(input);
  };
  add(value);
  return {ops.begin(), ops.end()};
}

bool is_cheap(const BlockProgram& program, int value) {
  const Again again = program.value(value).again;
  return again == Again::always || again == Again::with_backward;
}

OpSequence sequence(const BlockProgram& program, std::vector<int> ops, const std::set<int>& keeps) {
  OpSequence s;
  s.ops = std::move(ops);
  s.last_use.assign(program.values.size(), -1);
  s.keeps.assign(program.values.size(), false);
  for (std::size_t place = 0; place < s.ops.size(); ++place)
    for (int value : program.ops[static_cast<std::size_t>(s.ops[place])].inputs)
      s.last_use[static_cast<std::size_t>(value)] = static_cast<int>(place);
  for (int value : keeps) s.keeps[static_cast<std::size_t>(value)] = true;
  return s;
}

}  // namespace

bool is_cheap(const BlockProgram& program, const OpSequence& sequence) {
  return std::all_of(sequence.ops.begin(), sequence.ops.end(), [&](int op) {
    return program.value(program.ops[static_cast<std::size_t>(op)].outputs.front()).again == Again::always;
  });
}

BlockPasses block_passes(const BlockProgram& program, const Recompute& recompute) {
  const int count = static_cast<int>(program.ops.size());
  const auto op = [&](int i) -> const BlockOp& { return program.ops[static_cast<std::size_t>(i)]; };
  std::set<int> read;  // by backward passes, and not made again just before each
  for (const BlockOp& o : program.ops)
    for (int value : o.backward_reads)
      if (!is_cheap(program, value)) read.insert(value);
  const bool later = program.ends_in_loss();
  std::set<int> there;  // at the beginning of the backward pass
  for (int value : read)
    if (!later && !is_made_again(program, value, recompute)) there.insert(value);
  if (program.input >= 0) there.insert(program.input);  // what is made again is made from it

  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  BlockPasses passes;
  std::set<int> kept = there;
  kept.insert(program.output);
  passes.forward = sequence(program, later ? std::vector<int>() : all, kept);
  passes.evaluation = sequence(program, ops_for(program, program.output), {program.output});
  passes.again.resize(program.ops.size());
  for (int i = count; i-- > 0;) {
    std::set<int> needs;
    for (int value : op(i).backward_reads) {
      if (program.value(value).again != Again::with_backward) {
        needs.insert(value);
        continue;
      }
      // It comes of the op before, whose backward pass begins with what this one leaves.
      for (int earlier : op(program.producer(value)).backward_reads) needs.insert(earlier);
    }
    std::set<int> ops, makes;
    const std::function<void(int)> make = [&](int value) {
      if (there.contains(value) || makes.contains(value)) return;
      const int made_by = program.producer(value);
      makes.insert(value);
      ops.insert(made_by);
      for (int from : made_from(program, op(made_by), there)) make(from);
    };
    for (int value : needs) make(value);
    std::set<int> keeps = there;
    for (int made_by : ops)
      for (int value : op(made_by).outputs)
        if (read.contains(value)) keeps.insert(value);
    there = keeps;
    for (int value : needs)
      if (makes.contains(value)) keeps.insert(value);
    passes.again[static_cast<std::size_t>(i)] = sequence(program, {ops.begin(), ops.end()}, keeps);
  }
  passes.done.resize(program.ops.size());
  std::vector<bool> is_done(program.values.size());
  for (int i = 0; i < count; ++i) {
    std::vector<int> last = op(i).backward_reads;
    for (int again : passes.again[static_cast<std::size_t>(i)].ops)
      for (const std::vector<int>* list : {&op(again).inputs, &op(again).outputs})
        last.insert(last.end(), list->begin(), list->end());
    for (int value : last)
      if (!is_done[static_cast<std::size_t>(value)]) {
        is_done[static_cast<std::size_t>(value)] = true;
        passes.done[static_cast<std::size_t>(i)].push_back(value);
      }
  }
  return passes;
}

}  // namespace echelon
