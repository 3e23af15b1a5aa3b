// The output layer's product with cross-entropy. A chunk's gradient replaces its logits, so nothing is
// computed twice: the backward pass computes the loss too.
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "base/split.h"
#include "model/op.h"
#include "parallel/logits_room.h"
#include "parallel/softmax_blocks.h"
#include "parallel/vocabulary_logits.h"
#include "parallel/whole_rows.h"
#include "spec/sum_blocks.h"
#include "tensor/sum_by_blocks.h"

namespace echelon {
namespace {

// The part of a tp rank's rows of the output layer that one of its context-parallel ranks takes: whole
// blocks, as evenly as possible. With more ranks than blocks, or a number that does not divide them, some
// ranks have none.
struct VocabularyPart {
  Range blocks, rows;
};
VocabularyPart vocabulary_part(const SumBlocks& blocks, int ranks, int rank) {
  const std::int64_t all = std::ssize(blocks), parts = std::gcd(all, std::int64_t{ranks}),
                     each = ranks / parts;
  if (rank % each != 0) return {};
  const Range mine = split_range(all, parts, rank / each);
  return {mine,
          {blocks[static_cast<std::size_t>(mine.begin)].front().begin,
           blocks[static_cast<std::size_t>(mine.end - 1)].back().end}};
}

class LossOp final : public OpRunner {
 public:
  LossOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        logits_(s.rank, s.plan.model, op.weights.front(), s.parameters.output_weights(),
                first_id_here(op.weights.front(), s),
                s.plan.numerics == Numerics::ordinary
                    ? SumBlocks()
                    : sum_blocks({op.weights.front()}, s.tensor_parallel.size(), s.tensor_parallel.index())),
        whole_rows_(s.rank, s.plan) {
    Communicator& cp = s.rank.along(Axis::cp);
    const bool in_blocks = is_softmax_in_blocks(s.plan);
    const auto share_out = [&](Range blocks) {
      if (!in_blocks) return;
      const std::int64_t before = s.tensor_parallel.index() * std::ssize(logits_.blocks());
      softmax_.emplace(s.rank, op.weights.front(), logits().table().value,
                       Range{before + blocks.begin, before + blocks.end});
    };
    if (s.plan.numerics == Numerics::ordinary) return;
    if (cp.size() == 1) {
      share_out({0, std::ssize(logits_.blocks())});
      return;
    }
    counts_losses_ = cp.rank() == 0;
    for (int r = 0; r < cp.size(); ++r)
      blocks_of_.push_back(vocabulary_part(logits_.blocks(), cp.size(), r).blocks.size());
    const auto [blocks, rows] = vocabulary_part(logits_.blocks(), cp.size(), cp.rank());
    mine_ = rows;
    SumBlocks own;
    for (std::int64_t b = blocks.begin; b < blocks.end; ++b) {
      const Range range = logits_.blocks()[static_cast<std::size_t>(b)].front();
      own.push_back({{range.begin - rows.begin, range.end - rows.begin}});
    }
    OutputWeights weights{part_of(logits_.table(), 0, rows)};
    if (logits_.weights().bias.defined()) weights.bias = part_of(logits_.weights().bias, 0, rows);
    part_.emplace(s.rank, s.plan.model, op.weights.front(), std::move(weights),
                  logits_.first_id() + rows.begin, std::move(own), &cp);
    share_out(blocks);
  }

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op());
    run.set(out(), run.microbatch().targets.defined()
                       ? loss(run, x)
                       : logits_.gathered(x.row_range(x.rows() - 1, x.rows())));
  }

  void run_backward(BlockRun& run) const override {
    if (op().joined) return;
    std::vector<Term> terms;
    for (std::size_t input = 0; input < op().inputs.size(); ++input) {
      const bool next = op().next && input == 0;
      terms.push_back({given(run, run.take_kept_input(op(), input), next), {}, next});
    }
    add_losses(run, terms);
    for (std::size_t input = 0; input < terms.size(); ++input) {
      const Tensor dx = part_ ? whole_rows_.sum_here(terms[input].dx) : std::move(terms[input].dx);
      terms[input] = {};
      run.add_gradient(in(input), run.rounded(run.tensor_parallel().enter_backward(dx, run.rows()).get()));
    }
  }

 private:
  // If context parallelism cuts sequences under invariant numerics, where losses and gradients of a sequence
  // are summed in order, each cp rank has all rows and a part of the vocabulary.
  const VocabularyLogits& logits() const { return part_ ? *part_ : logits_; }
  struct Given {
    Tensor x, targets;
  };
  Given given(const BlockRun& run, const Tensor& x, bool next) const {
    const Given own{x, next ? run.microbatch().next_targets : run.microbatch().targets};
    if (!part_) return own;
    const std::int64_t rows = x.rows() * run.rank().size(Axis::cp);
    return {whole_rows_.gather(own.x, rows, true), whole_rows_.gather(own.targets, rows, true)};
  }

  Tensor loss(const BlockRun& run, const Tensor& here) const {
    const Tensor loss_sum = logits_.make_loss(), unused = logits_.make_loss();
    const auto [x, targets] = given(run, here, false);
    const Tensor buffer = make_chunk(run.sums().runs().front());
    for (const Range& rows : run.sums().runs())
      each_chunk(run, rows, [&, &x = x, &targets = targets](Range chunk) {
        const Tensor of_chunk = buffer.row_range(0, chunk.size());
        if (of_chunk.cols() > 0) logits().multiply(x.row_range(chunk.begin, chunk.end), of_chunk);
        const Tensor of_targets = targets.flat_range(chunk.begin, chunk.end),
                     sum = counts_losses_ ? loss_sum : unused;
        if (softmax_)
          add_losses(run, merged(run, of_chunk, of_targets), of_targets, sum);
        else
          add_losses(run, of_chunk, of_targets, sum);
      });
    return loss_sum;
  }

  // A loss that is differentiated: of the next tokens, or of the tokens after them, which has a weight.
  struct Term {
    Given given;
    Tensor dx;  // (N, C): the partial gradient of the input
    bool next = false;
  };
  // Adds to the losses and to the weights' gradients, for each sequence one term after another; computes the
  // partial gradients of the inputs.
  void add_losses(BlockRun& run, std::vector<Term>& terms) const {
    const std::vector<const Weight*> trained = logits().weights().trained();
    for (Term& term : terms) {
      const std::vector<std::int64_t> shape{term.given.x.rows(), term.given.x.cols()};
      term.dx = part_ ? run.statistic(shape) : run.partial_sum(shape);
    }
    const std::vector<Range> runs = run.sums().runs();
    const bool waits = run.rank().size(Axis::tp) > 1 || (softmax_ && run.rank().size(Axis::cp) > 1);
    const LogitsRoom room(run.rank(), logits_rows_at_once(run.rank(), runs.front().size()),
                          logits().table().value.rows(), waits);
    const auto take = [&](Range rows, std::span<const Tensor> of_weights, bool onto) {
      for (const Term& term : terms)
        add_loss_of(run, rows, term, room, of_weights, onto || &term != &terms.front());
    };
    if (part_)
      for (const Weight* weight : logits_.weights().trained()) fill_others(run.kernels(), *weight, 0, mine_);
    if (!trained.empty() && has_part())
      run.sums().add(trained, take);
    else
      for (const Range& rows : runs) take(rows, {}, true);
  }
  bool has_part() const { return !part_ || mine_.size() > 0; }

  // What belongs to the rows of a chunk, or to some of them.
  struct ChunkRows {
    Tensor x, dx;                 // (rows, C)
    Tensor targets, sum, target;  // (rows): the sum of exponentials, and the target's logit
    Tensor gradients;             // of logits: (rows, V_local)

    ChunkRows range(Range r) const {
      const auto of = [&](const Tensor& t) { return t.flat_range(r.begin, r.end); };
      const auto rows = [&](const Tensor& t) { return t.row_range(r.begin, r.end); };
      return {rows(x), rows(dx), of(targets), of(sum), of(target), rows(gradients)};
    }
  };

  // For these rows: all rows, or those of a sequence.
  void add_loss_of(const BlockRun& run, Range rows, const Term& term, const LogitsRoom& room,
                   std::span<const Tensor> of_weights, bool onto) const {
    Kernels& kernels = run.kernels();
    const Tensor loss_sum = logits_.make_loss();
    const double weight = term.next || !op().next ? op().scale : 1,
                 gradient_scale = logits_.scale() * weight * run.loss().gradient_scale;
    each_chunk(run, rows, [&](Range range) {
      const ChunkRows chunk{term.given.x.row_range(range.begin, range.end),
                            term.dx.row_range(range.begin, range.end),
                            term.given.targets.flat_range(range.begin, range.end),
                            run.statistic({range.size()}),
                            run.statistic({range.size()}),
                            room.gradients(range.size())};
      room.each_piece(range.size(), [&](const LogitsRoom::Piece& piece) {
        make_gradients(run, room, piece, chunk.range(piece.rows), gradient_scale);
      });
      kernels.add_losses(chunk.sum, chunk.target, chunk.targets, loss_sum);
      if (!has_part()) return kernels.fill(chunk.dx, -0.0);
      if (!softmax_)
        kernels.matmul(chunk.gradients, Transpose::no, logits().table().value, Transpose::no, chunk.dx, false,
                       logits().blocks());
      if (!of_weights.empty())
        logits().add_weight_gradients(chunk.gradients, chunk.x, of_weights,
                                      onto || range.begin > rows.begin);
    });
    if (!counts_losses_) return;
    const std::int64_t place = rows.begin == 0 ? 0 : rows.begin / rows.size();
    const Tensor& sum = term.next ? run.loss().next_sum : run.loss().sum;
    kernels.add_number(loss_sum, sum.flat_range(place, place + 1));
  }

  // For a softmax in blocks, which leaves exponentials in place of the logits: combines the numbers of all
  // ranks' blocks.
  SoftmaxBlocks::Whole merged(const BlockRun& run, const Tensor& of_chunk, const Tensor& targets) const {
    const std::int64_t each = 3 * targets.numel();
    Tensor numbers = softmax_->add_up(of_chunk, targets);
    const auto gather = [&](Axis axis, std::vector<std::int64_t> counts) {
      Communicator& group = run.rank().along(axis);
      if (group.size() == 1) return;
      for (std::int64_t& count : counts) count *= each;
      const Tensor all = run.statistic({sum_of(counts)});
      group.all_gather(numbers, all, counts).wait();
      numbers = all;
    };
    gather(Axis::cp, blocks_of_);
    gather(Axis::tp,
           std::vector(static_cast<std::size_t>(run.rank().size(Axis::tp)), std::ssize(logits_.blocks())));
    return softmax_->merge(numbers, targets);
  }
  // The gradients of a piece's logits, and the sums that its losses need. `rows`: the piece's.
  void make_gradients(const BlockRun& run, const LogitsRoom& room, const LogitsRoom::Piece& piece,
                      const ChunkRows& rows, double factor) const {
    Kernels& kernels = run.kernels();
    if (has_part()) logits().multiply(rows.x, piece.logits);
    // make(group, its logits, its rows)
    const auto each_group = [&](const auto& make) {
      if (has_part())
        room.each_group(piece, [&](Range group) {
          make(group, piece.logits.row_range(group.begin, group.end), rows.range(group));
        });
    };
    if (softmax_) {
      const SoftmaxBlocks::Whole whole = merged(run, piece.logits, rows.targets);
      kernels.copy(whole.sum, rows.sum);
      kernels.copy(whole.target, rows.target);
      const std::int64_t all = piece.rows.size();
      const Tensor scales =
          whole.scales.flat_range(softmax_->here().begin * all, softmax_->here().end * all);
      each_group([&](Range group, const Tensor& exponentials, const ChunkRows& here) {
        if (here.gradients.dtype() != exponentials.dtype()) kernels.copy(exponentials, here.gradients);
        add_terms(run, here, scales, group, all, factor);
        softmax_->make_gradients(exponentials, scales, here.targets, factor, here.gradients, group.begin);
      });
    } else if (logits().is_whole()) {
      each_group([&](Range group, const Tensor& of_group, const ChunkRows& here) {
        kernels.cross_entropy(of_group, here.targets, factor, logits_.cap(), run.statistic({group.size()}),
                              here.sum, here.target, here.gradients);
      });
    } else {
      const VocabularyLogits::Sums sums = logits().exponentials(piece.logits, rows.targets);
      kernels.copy(sums.sum, rows.sum);
      kernels.copy(sums.target, rows.target);
      each_group([&](Range group, const Tensor& exponentials, const ChunkRows& here) {
        kernels.cross_entropy_backward(exponentials, here.sum, here.targets, logits().first_id(), factor,
                                       here.gradients,
                                       {logits_.cap(), sums.max.flat_range(group.begin, group.end)});
      });
    }
  }
  static void add_losses(const BlockRun& run, const SoftmaxBlocks::Whole& whole, const Tensor& targets,
                         const Tensor& loss_sum) {
    run.kernels().add_losses(whole.sum, whole.target, targets, loss_sum);
  }
  // For a softmax in blocks: the input's gradient from the blocks here, from the exponentials in the type of
  // products, which `rows.gradients` holds. `rows` are those of `group` among `all`; scales are all rows',
  // block by block.
  void add_terms(const BlockRun& run, const ChunkRows& rows, const Tensor& scales, Range group,
                 std::int64_t all, double factor) const {
    const Tensor& dx = rows.dx;
    const auto room = [&] { return run.statistic(dx.shape()); };
    const Tensor product = room(), sum = dx.dtype() == product.dtype() && dx.contiguous() ? dx : room();
    sum_by_blocks(run.kernels(), softmax_->count(), sum, room, [&](std::int64_t b, const Tensor& to) {
      softmax_->multiply(b, rows.gradients, product);
      softmax_->make_term(product, scales.flat_range(b * all + group.begin, b * all + group.end),
                          softmax_->target_rows(b, rows.targets), rows.targets, factor, to);
    });
    if (!sum.begins_with(dx)) run.kernels().copy(sum, dx);
  }

  Tensor make_chunk(Range rows) const { return logits().make_chunk(rows.size()); }
  template <class Visit>
  static void each_chunk(const BlockRun& run, Range rows, const Visit& visit) {
    for_each_logits_chunk(run.rank(), rows.size(), [&](Range chunk) {
      visit(Range{rows.begin + chunk.begin, rows.begin + chunk.end});
    });
  }

  // Leaves exponentials in place of the logits.
  VocabularyLogits::Sums add_losses(const BlockRun& run, const Tensor& of_chunk, const Tensor& targets,
                                    const Tensor& loss_sum) const {
    VocabularyLogits::Sums sums = logits().exponentials(of_chunk, targets);
    run.kernels().add_losses(sums.sum, sums.target, targets, loss_sum);
    return sums;
  }

  VocabularyLogits logits_;               // for all rows of the table on a tp rank
  std::optional<VocabularyLogits> part_;  // for this cp rank's part of them
  Range mine_;                            // rows of the table
  std::optional<SoftmaxBlocks> softmax_;  // for this rank's part, if the softmax is in blocks
  std::vector<std::int64_t> blocks_of_;   // how many of a tp rank's blocks each cp rank has
  WholeRows whole_rows_;
  bool counts_losses_ = true;
};

}  // namespace

std::unique_ptr<OpRunner> make_loss_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<LossOp>(op, s);
}

}  // namespace echelon
