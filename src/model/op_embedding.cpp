// Token embedding with a table cut by vocabulary (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3):
// each rank looks up its own rows of the table, the others stay zero, and the sum over ranks is the result.
// Also learned positions (GPT-2).
#include <span>

#include "model/op.h"

namespace echelon {
namespace {

void add_rows(const SequenceSums& sums, Kernels& k, const Tensor& ids, const Tensor& dy,
              std::int64_t first_id, const Weight& table) {
  const Weight* const one[] = {&table};
  sums.accumulate(one, {{ids, false}, {dy}},
                  [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
                    k.embedding_backward(parts[0], parts[1], first_id, gradients[0]);
                  });
}

class EmbeddingOp final : public OpRunner {
 public:
  EmbeddingOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        table_(op.next ? s.parameters.next_table() : s.stacked(op.weights)),
        first_id_(first_id_here(op.weights.front(), s)),
        waits_in_(!op.next && s.parameters.lookups_wait() ? &s.parameters : nullptr) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor y = run.activation({run.rows(), table_.value.cols()});
    run.kernels().embedding(ids(run), table_.value, first_id_, y);
    if (op().scale != 1) run.kernels().scale(y, op().scale);
    run.set(out(), y);
  }

  void run_backward(BlockRun& run) const override {
    if (!table_.gradient.defined()) return;
    run.weight_gradient([&k = run.kernels(), sums = run.sums(), tp = run.tensor_parallel(), table = table_,
                         first_id = first_id_, ids = ids(run), d = run.take_gradient_as_left(out()),
                         scale = op().scale, rank = &run.rank(), waits_in = waits_in_] {
      Tensor dy = tp.leave_backward(d, ids.numel()).get();
      if (scale != 1) {
        const Tensor scaled = rank->activation({dy.rows(), dy.cols()});
        k.copy(dy, scaled);
        k.scale(scaled, scale);
        dy = scaled;
      }
      if (waits_in != nullptr)
        waits_in->add_lookups(ids, dy, first_id);
      else
        add_rows(sums, k, ids, dy, first_id, table);
    });
  }

 private:
  const Tensor& ids(const BlockRun& run) const {
    return op().next ? run.microbatch().next_tokens : run.microbatch().tokens;
  }

  Weight table_;  // (V_local, C): vocabulary rows from first_id_ on
  std::int64_t first_id_;
  const ParameterStore* waits_in_;  // what lookups add, or nullptr: it does not wait
};

class PositionsOp final : public OpRunner {
 public:
  PositionsOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), table_(s.stacked(op.weights)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op()), added = run.activation({x.rows(), x.cols()});
    run.kernels().embedding(positions_here(run), table_.value, -op().first_position, added);
    run.kernels().add(added, x);
    run.set(out(), x);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor d = run.take_gradient(out());
    if (table_.gradient.defined())
      run.weight_gradient([&k = run.kernels(), sums = run.sums(), table = table_, ids = positions_here(run),
                           first = -op().first_position, d] { add_rows(sums, k, ids, d, first, table); });
    run.leave_gradient(op(), 0, d);
  }

 private:
  // Of the rows of the residual stream that are here.
  static Tensor positions_here(const BlockRun& run) {
    const Range here = run.tensor_parallel().rows_here(run.rows());
    return run.microbatch().positions.flat_range(here.begin, here.end);
  }

  Weight table_;
};

}  // namespace

std::int64_t first_id_here(const ParamSpec& table, const OpSetting& s) {
  const int index = s.rank.coordinate(Axis::tp);
  return local_ranges(table, s.rank.size(Axis::tp), index)[0].begin +
         (index > 0 ? s.faults.vocabulary_shift : 0);
}

std::unique_ptr<OpRunner> make_embedding_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<EmbeddingOp>(op, s);
}

std::unique_ptr<OpRunner> make_positions_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<PositionsOp>(op, s);
}

}  // namespace echelon
