// The scan of Mamba-2 in its chunked form (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section 6), for
// any Launch. Each head passes a state h (P, N) from position to position,
//   h_t = exp(dt_t A) h_t-1 + dt_t x_t B_t^T,   y_t = h_t C_t + D x_t,
// starting anew at each document. Within a chunk of Q positions, y is a product of Q x Q weights with dt x,
// as attention's output is of its scores with values; between chunks, only the state is passed on. So nearly
// all of it is matrix products; those with states are for all heads of a group at once. Everything that is
// not an input or output of the op is wide.
//
// The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), with keys k and queries q of
// length 1 and values v, first removes what the state holds for a key and then adds the new value:
//   h_t = a_t h_t-1 + u_t k_t^T,   u_t = beta_t (v_t - a_t h_t-1 k_t),   y_t = h_t q_t / sqrt(N),
// with a_t = exp(dt_t A). So it is the same scan with u in place of dt x, and within a chunk u is the
// solution of a triangular system (Yang et al. 2024, https://arxiv.org/abs/2406.06484): the entry of row t
// for an earlier row s is beta_t k_t . k_s times the decay of s until t.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "tensor/host_launch.h"
#include "tensor/kernel_backend.h"
#include "tensor/reference_view.h"
#include "tensor/rows/delta_rule.h"
#include "tensor/rows/state_space.h"
#include "tensor/thread_team.h"

namespace echelon {

// Calls kernel(team, i) for each i < count; on the host the rank's threads share them.
template <class Launch, class Kernel>
void spread_blocks(const Launch& launch, const ThreadTeam& team, const char* name, std::int64_t count,
                   const Kernel& kernel) {
  if constexpr (std::is_same_v<Launch, HostLaunch>)
    team.each_task(count, [&](std::int64_t i, int) { kernel(rows::OneLane(i), i); });
  else
    launch.run(name, count, rows::EachRow<Kernel>{kernel});
}

template <class Launch>
class StateSpaceScan {
 public:
  StateSpaceScan(const Launch& launch, KernelBackend& backend, const StateSpaceShape& shape,
                 const StateSpaceTensors& tensors, const Tensor& workspace)
      : launch_(launch),
        backend_(backend),
        s_(shape),
        in_(tensors),
        free_(workspace),
        steps_(room(s_.rows.length, s_.heads)),
        sums_(room(s_.rows.length, s_.heads)),
        rests_(room(s_.rows.length, s_.heads)),
        stepped_(room(s_.chunk_rows(), s_.width())),
        last_(room(s_.chunk_rows(), s_.width())),
        of_state_(room(s_.chunk_rows(), s_.width())),
        of_chunk_(room(s_.chunk_rows(), s_.width())),
        products_(room(s_.groups * s_.chunk_rows(), s_.chunk_rows())),
        weights_(room(s_.heads * s_.chunk_rows(), s_.chunk_rows())) {
    if (!s_.delta) return;
    betas_ = room(s_.rows.length, s_.heads);
    factors_ = room(s_.rows.length, 2 * s_.groups);
    recalled_ = room(s_.chunk_rows(), s_.width());
    keys_ = room(s_.groups * s_.chunk_rows(), s_.chunk_rows());
    mixed_ = room(s_.heads * s_.chunk_rows(), s_.chunk_rows());
  }

  // `state`: the state before the first position, which becomes the one after the last; or undefined.
  void forward(const Tensor& given, const Tensor& y) {
    const Tensor state = given.defined() ? given : room(s_.width(), s_.state);
    each_sequence([&](std::int64_t sequence) {
      if (!given.defined()) backend_.fill(state, 0.0);
      for (std::int64_t c = 0; c < s_.chunks(); ++c) {
        const Chunk at = chunk(sequence, c);
        make_inputs(at, state);
        make_outputs(at, state);
        with_stored_type(y, [&]<class T>(T) {
          using F = Wide<T>;
          if (s_.delta)
            return blocks("delta_output", at.rows,
                          rows::DeltaOutput<T>{
                              at.template shared<F>(*this), matrix<F>(head_rows(of_state_, at)),
                              matrix<F>(head_rows(of_chunk_, at)), data<T>(in_.d),
                              static_cast<F>(s_.norm_eps), matrix<T>(at.of(in_.z)), matrix<T>(at.of(y))});
          blocks("scan_output", at.rows,
                 rows::ScanOutput<T>{at.template shared<F>(*this), matrix<F>(at.x()),
                                     matrix<F>(head_rows(of_state_, at)), matrix<F>(head_rows(of_chunk_, at)),
                                     data<T>(in_.d), matrix<T>(at.of(in_.z)), matrix<T>(at.of(y))});
        });
        make_state(at, state, state);
      }
    });
  }

  void backward(const Tensor& dy, const StateSpaceGradients& out) {
    const std::int64_t width = s_.width();
    const Tensor states = room((s_.chunks() + 1) * width, s_.state), gradient = room(width, s_.state),
                 d_weights = room(s_.heads * s_.chunk_rows(), s_.chunk_rows()),
                 d_products = room(s_.groups * s_.chunk_rows(), s_.chunk_rows()),
                 d_stepped = room(s_.chunk_rows(), width), d_last = room(s_.chunk_rows(), width),
                 within = room(s_.chunk_rows(), s_.heads), read = room(s_.chunk_rows(), s_.heads),
                 written = room(s_.chunk_rows(), s_.heads), handed = room(s_.chunk_rows(), s_.heads),
                 past = room(1, s_.heads);
    Tensor d_keys, d_mixed;
    if (s_.delta) {
      d_keys = room(s_.groups * s_.chunk_rows(), s_.chunk_rows());
      d_mixed = room(s_.heads * s_.chunk_rows(), s_.chunk_rows());
      backend_.fill(written, 0.0);  // steps make nothing of inputs
    }
    const auto state = [&](std::int64_t c) { return states.row_range(c * width, (c + 1) * width); };
    each_sequence([&](std::int64_t sequence) {
      backend_.fill(state(0), 0.0);
      for (std::int64_t c = 0; c < s_.chunks(); ++c) {
        const Chunk at = chunk(sequence, c);
        make_inputs(at, state(c));
        make_state(at, state(c), state(c + 1));
      }
      backend_.fill(gradient, 0.0);  // nothing reads the last one
      for (std::int64_t c = s_.chunks(); c-- > 0;) {
        const Chunk at = chunk(sequence, c);
        make_inputs(at, state(c));
        make_outputs(at, state(c));
        const Tensor of_state = head_rows(of_state_, at), inner = head_rows(of_chunk_, at),
                     stepped = head_rows(stepped_, at), last = head_rows(last_, at),
                     d_last_here = head_rows(d_last, at), d_stepped_here = head_rows(d_stepped, at),
                     within_here = head_rows(within, at), read_here = head_rows(read, at),
                     written_here = head_rows(written, at), handed_here = head_rows(handed, at),
                     terms = at.of(out.terms), dxbc = at.of(out.xbc);
        const Tensor dx = dxbc.column_range(0, width);
        with_stored_type(dy, [&]<class T>(T) {
          using F = Wide<T>;
          if (s_.delta)
            return blocks("delta_output_backward", at.rows,
                          rows::DeltaOutputBackward<T>{
                              at.template shared<F>(*this), matrix<F>(of_state), matrix<F>(inner),
                              data<T>(in_.d), static_cast<F>(s_.norm_eps), matrix<T>(at.of(in_.z)),
                              matrix<T>(at.of(dy)), matrix<T>(at.of(out.z)), matrix<F>(read_here),
                              matrix<F>(terms.column_range(2 * s_.heads, s_.terms()))});
          blocks("scan_output_backward", at.rows,
                 rows::ScanOutputBackward<T>{
                     at.template shared<F>(*this), matrix<F>(at.x()), matrix<F>(of_state), matrix<F>(inner),
                     data<T>(in_.d), matrix<T>(at.of(in_.z)), matrix<T>(at.of(dy)), matrix<T>(at.of(out.z)),
                     matrix<F>(read_here), matrix<F>(terms.column_range(2 * s_.heads, 3 * s_.heads))});
        });
        for (std::int64_t h = 0; h < s_.heads; ++h) {
          const Tensor d = of_head(inner, h), dw = square(d_weights, h, at);
          product(d, Transpose::no, of_head(stepped, h), Transpose::yes, dw);
          product(square(weights_, h, at), Transpose::yes, d, Transpose::no, of_head(d_stepped_here, h));
        }
        for (std::int64_t g = 0; g < s_.groups; ++g)
          product(at.b(g), Transpose::no, of_group(gradient, g), Transpose::yes,
                  columns_of_group(d_last_here, g));
        if (s_.delta)
          take_back(at, {d_stepped_here, d_last_here, read_here, handed_here, d_keys, d_mixed, dx,
                         at.of(out.beta)});
        with_float_type(steps_, [&]<class F>(F) {
          blocks("scan_weights_backward", s_.groups * at.rows,
                 rows::ScanWeightsBackward<F>{at.template shared<F>(*this),
                                              matrix<F>(squares(d_weights, s_.heads, at)),
                                              matrix<F>(squares(d_products, s_.groups, at))});
          blocks("scan_decays_backward", s_.heads,
                 rows::ScanDecaysBackward<F>{at.rows, matrix<F>(squares(weights_, s_.heads, at)),
                                             matrix<F>(squares(d_weights, s_.heads, at)),
                                             s_.delta ? data<F>(squares(mixed_, s_.heads, at)) : nullptr});
          blocks("scan_decay_sums", s_.heads * at.rows,
                 rows::ScanDecaySums<F>{at.rows, matrix<F>(squares(d_weights, s_.heads, at)),
                                        matrix<F>(within_here)});
          blocks("scan_state_product", s_.heads,
                 rows::ScanStateProduct<F>{at.template shared<F>(*this), matrix<F>(state(c)),
                                           matrix<F>(gradient), data<F>(past)});
        });
        for (std::int64_t g = 0; g < s_.groups; ++g) {
          const Tensor b = at.b(g), c_here = at.c(g), db = at.b_of(dxbc, g), dc = at.c_of(dxbc, g),
                       dp = square(d_products, g, at), behind = of_group(gradient, g);
          product(dp, Transpose::no, b, Transpose::no, dc);
          product(columns_of_group(of_state, g), Transpose::no, of_group(state(c), g), Transpose::no, dc,
                  true);
          product(dp, Transpose::yes, c_here, Transpose::no, db);
          product(columns_of_group(last, g), Transpose::no, behind, Transpose::no, db, true);
          if (!s_.delta) continue;
          const Tensor dk = square(d_keys, g, at);
          product(dk, Transpose::no, b, Transpose::no, db, true);
          product(dk, Transpose::yes, b, Transpose::no, db, true);
          product(columns_of_group(head_rows(recalled_, at), g), Transpose::no, of_group(state(c), g),
                  Transpose::no, db, true);
        }
        with_stored_type(dy, [&]<class T>(T) {
          using F = Wide<T>;
          if (!s_.delta)
            blocks(
                "scan_inputs_backward", at.rows,
                rows::ScanInputsBackward<T>{at.template shared<F>(*this), matrix<F>(at.x()), matrix<F>(inner),
                                            matrix<F>(d_stepped_here), matrix<F>(d_last_here), data<T>(in_.d),
                                            matrix<F>(dx), matrix<F>(written_here), matrix<F>(handed_here)});
          blocks("scan_steps_backward", 1,
                 rows::ScanStepsBackward<T>{at.template shared<F>(*this), matrix<T>(at.of(in_.dt)),
                                            data<T>(in_.dt_bias), data<T>(in_.a_log), matrix<F>(within_here),
                                            matrix<F>(read_here), matrix<F>(written_here),
                                            matrix<F>(handed_here), data<F>(past), matrix<T>(at.of(out.dt)),
                                            matrix<F>(terms)});
        });
        decay(at, gradient, gradient);
        for (std::int64_t g = 0; g < s_.groups; ++g)
          product(columns_of_group(of_state, g), Transpose::yes, at.c(g), Transpose::no,
                  of_group(gradient, g), true);
        for (std::int64_t g = 0; s_.delta && g < s_.groups; ++g)
          product(columns_of_group(head_rows(recalled_, at), g), Transpose::yes, at.b(g), Transpose::no,
                  of_group(gradient, g), true);
      }
      if (s_.delta) units_backward(sequence, out.xbc);
    });
  }

 private:
  struct Chunk {
    const StateSpaceShape& s;
    const StateSpaceTensors& in;
    rows::Chunks chunks;
    std::int64_t first_row, begin, rows;  // of the sequence; in the sequence; of the chunk
    Tensor of(const Tensor& t) const { return t.row_range(first_row + begin, first_row + begin + rows); }
    Tensor x() const { return of(in.xbc).column_range(0, s.width()); }
    Tensor b_of(const Tensor& xbc, std::int64_t g) const {
      const std::int64_t first = s.width() + g * s.state;
      return xbc.column_range(first, first + s.state);
    }
    Tensor c_of(const Tensor& xbc, std::int64_t g) const { return b_of(xbc, s.groups + g); }
    Tensor b(std::int64_t g) const { return b_of(of(in.xbc), g); }
    Tensor c(std::int64_t g) const { return c_of(of(in.xbc), g); }
    template <class F>
    rows::OneChunk<F> shared(const StateSpaceScan& scan) const {
      return {chunks,
              begin,
              rows,
              s.head_dim,
              s.heads / s.groups,
              scan.matrix<F>(scan.steps_.row_range(begin, begin + rows)),
              scan.matrix<F>(scan.sums_.row_range(begin, begin + rows)),
              scan.matrix<F>(scan.rests_.row_range(begin, begin + rows))};
    }
  };

  Chunk chunk(std::int64_t sequence, std::int64_t c) const {
    const rows::Chunks chunks = chunks_of(sequence);
    return {s_, in_, chunks, sequence * s_.rows.length, chunks.begin(c), chunks.end(c) - chunks.begin(c)};
  }
  rows::Chunks chunks_of(std::int64_t sequence) const {
    const std::int32_t* const first = data<std::int32_t>(s_.rows.first_positions);
    return {s_.rows.length, s_.chunk_rows(), first == nullptr ? nullptr : first + sequence * s_.rows.length};
  }

  template <class Visit>
  void each_sequence(const Visit& visit) {
    for (std::int64_t sequence = 0; s_.rows.length > 0 && sequence < s_.rows.batch; ++sequence) {
      const Tensor raw = in_.dt.row_range(sequence * s_.rows.length, (sequence + 1) * s_.rows.length);
      with_stored_type(raw, [&]<class T>(T) {
        using F = Wide<T>;
        blocks(
            "scan_steps", s_.chunks(),
            rows::ScanSteps<T>{matrix<T>(raw), data<T>(in_.dt_bias), data<T>(in_.a_log), chunks_of(sequence),
                               matrix<F>(steps_), matrix<F>(sums_), matrix<F>(rests_)});
        if (!s_.delta) return;
        blocks("delta_units", s_.rows.length,
               rows::DeltaUnits<T>{matrix<T>(of_sequence(in_.beta, sequence)), matrix<F>(betas_),
                                   matrix<F>(keys_and_queries(in_.xbc, sequence)), s_.state, query_scale<F>(),
                                   matrix<F>(factors_)});
      });
      visit(sequence);
    }
  }

  // `before`: the state before the chunk.
  void make_inputs(const Chunk& at, const Tensor& before) {
    if (s_.delta) return solve(at, before);
    with_float_type(steps_, [&]<class F>(F) {
      blocks("scan_inputs", at.rows,
             rows::ScanInputs<F>{at.template shared<F>(*this), matrix<F>(at.x()),
                                 matrix<F>(head_rows(stepped_, at)), matrix<F>(head_rows(last_, at))});
    });
  }
  // Computes u, which the delta rule adds to the state.
  void solve(const Chunk& at, const Tensor& before) {
    for (std::int64_t g = 0; g < s_.groups; ++g) {
      product(at.b(g), Transpose::no, at.b(g), Transpose::yes, square(keys_, g, at));
      product(at.b(g), Transpose::no, of_group(before, g), Transpose::yes,
              columns_of_group(head_rows(recalled_, at), g));
    }
    with_float_type(steps_, [&]<class F>(F) {
      const rows::DeltaChunk<F> of = delta_chunk<F>(at);
      blocks("delta_mixed", s_.heads * at.rows,
             rows::DeltaMixed<F>{of, matrix<F>(squares(keys_, s_.groups, at))});
      blocks("delta_solve", s_.heads,
             rows::DeltaSolve<F>{of, matrix<F>(at.x()), matrix<F>(head_rows(recalled_, at)),
                                 matrix<F>(head_rows(stepped_, at)), matrix<F>(head_rows(last_, at))});
    });
  }
  // The backward pass of solve(). From the gradients of u through the chunk's outputs and through the state
  // at its end (d_last: of what is left of u there), computes those of values, betas, products of keys, and
  // of what the state before holds for a key, which recalled_ becomes. mixed_ becomes itself times its
  // gradient, for the decays.
  struct TakenBack {
    Tensor d_stepped, d_last, read, handed, d_keys, d_mixed, d_values, d_beta;
  };
  void take_back(const Chunk& at, const TakenBack& to) {
    with_float_type(steps_, [&]<class F>(F) {
      const rows::DeltaChunk<F> of = delta_chunk<F>(at);
      blocks("delta_inputs_backward", at.rows,
             rows::DeltaInputsBackward<F>{of, matrix<F>(head_rows(stepped_, at)), matrix<F>(to.d_last),
                                          matrix<F>(to.d_stepped), matrix<F>(to.handed)});
      blocks("delta_solve_backward", s_.heads, rows::DeltaSolveBackward<F>{of, matrix<F>(to.d_stepped)});
    });
    for (std::int64_t h = 0; h < s_.heads; ++h)
      product(of_head(to.d_stepped, h), Transpose::no, of_head(head_rows(stepped_, at), h), Transpose::yes,
              square(to.d_mixed, h, at));
    with_stored_type(to.d_beta, [&]<class T>(T) {
      using F = Wide<T>;
      const rows::DeltaChunk<F> of = delta_chunk<F>(at);
      const rows::Matrix<F> d_mixed = matrix<F>(squares(to.d_mixed, s_.heads, at));
      blocks("delta_mixed_backward", s_.heads * at.rows,
             rows::DeltaMixedBackward<T>{of, matrix<F>(squares(keys_, s_.groups, at)), d_mixed,
                                         matrix<F>(at.x()), matrix<F>(to.d_stepped),
                                         matrix<F>(head_rows(recalled_, at)), matrix<F>(to.d_values),
                                         matrix<F>(to.read), matrix<T>(to.d_beta)});
      blocks("delta_keys_backward", s_.groups * at.rows,
             rows::DeltaKeysBackward<F>{of.at, d_mixed, matrix<F>(squares(to.d_keys, s_.groups, at))});
    });
  }
  void units_backward(std::int64_t sequence, const Tensor& dxbc) {
    with_float_type(steps_, [&]<class F>(F) {
      blocks("delta_units_backward", s_.rows.length,
             rows::DeltaUnitsBackward<F>{matrix<F>(keys_and_queries(in_.xbc, sequence)), s_.state,
                                         query_scale<F>(), matrix<F>(factors_),
                                         matrix<F>(keys_and_queries(dxbc, sequence))});
    });
  }
  template <class F>
  rows::DeltaChunk<F> delta_chunk(const Chunk& at) const {
    return {at.template shared<F>(*this), matrix<F>(betas_.row_range(at.begin, at.begin + at.rows)),
            matrix<F>(squares(mixed_, s_.heads, at))};
  }
  template <class F>
  F query_scale() const {
    return static_cast<F>(1 / std::sqrt(static_cast<double>(s_.state)));
  }
  Tensor of_sequence(const Tensor& t, std::int64_t sequence) const {
    return t.row_range(sequence * s_.rows.length, (sequence + 1) * s_.rows.length);
  }
  Tensor keys_and_queries(const Tensor& xbc, std::int64_t sequence) const {
    return of_sequence(xbc, sequence).column_range(s_.width(), s_.mixed_width());
  }
  // The outputs that the state before the chunk yields, before its decay, and those that the chunk yields.
  void make_outputs(const Chunk& at, const Tensor& before) {
    for (std::int64_t g = 0; g < s_.groups; ++g) {
      product(at.c(g), Transpose::no, at.b(g), Transpose::yes, square(products_, g, at));
      product(at.c(g), Transpose::no, of_group(before, g), Transpose::yes,
              columns_of_group(head_rows(of_state_, at), g));
    }
    with_float_type(steps_, [&]<class F>(F) {
      blocks("scan_weights", s_.heads * at.rows,
             rows::ScanWeights<F>{at.template shared<F>(*this), matrix<F>(squares(products_, s_.groups, at)),
                                  matrix<F>(squares(weights_, s_.heads, at))});
    });
    for (std::int64_t h = 0; h < s_.heads; ++h)
      product(square(weights_, h, at), Transpose::no, of_head(head_rows(stepped_, at), h), Transpose::no,
              of_head(head_rows(of_chunk_, at), h));
  }
  void make_state(const Chunk& at, const Tensor& before, const Tensor& behind) {
    decay(at, before, behind);
    for (std::int64_t g = 0; g < s_.groups; ++g)
      product(columns_of_group(head_rows(last_, at), g), Transpose::yes, at.b(g), Transpose::no,
              of_group(behind, g), true);
  }
  void decay(const Chunk& at, const Tensor& from, const Tensor& to) {
    with_float_type(steps_, [&]<class F>(F) {
      blocks("scan_decay", s_.width(),
             rows::ScanDecay<F>{at.template shared<F>(*this), matrix<F>(from), matrix<F>(to)});
    });
  }

  static Tensor head_rows(const Tensor& t, const Chunk& at) { return t.row_range(0, at.rows); }
  // `count` matrices (rows, rows) of a chunk.
  static Tensor squares(const Tensor& t, std::int64_t count, const Chunk& at) {
    return t.flat_range(0, count * at.rows * at.rows).reshape({count * at.rows, at.rows});
  }
  static Tensor square(const Tensor& t, std::int64_t i, const Chunk& at) {
    return t.flat_range(i * at.rows * at.rows, (i + 1) * at.rows * at.rows).reshape({at.rows, at.rows});
  }
  Tensor of_head(const Tensor& t, std::int64_t h) const {
    return t.column_range(h * s_.head_dim, (h + 1) * s_.head_dim);
  }
  Tensor columns_of_group(const Tensor& t, std::int64_t g) const {
    const std::int64_t width = s_.width() / s_.groups;
    return t.column_range(g * width, (g + 1) * width);
  }
  Tensor of_group(const Tensor& states, std::int64_t g) const {
    const std::int64_t width = s_.width() / s_.groups;
    return states.row_range(g * width, (g + 1) * width);
  }

  Tensor room(std::int64_t rows, std::int64_t cols) {
    const Tensor taken = free_.flat_range(0, rows * cols).reshape({rows, cols});
    free_ = free_.flat_range(rows * cols, free_.numel());
    return taken;
  }

  void product(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, const Tensor& c,
               bool accumulate = false) {
    backend_.matmul(a, ta, b, tb, c, accumulate);
  }

  template <class Kernel>
  void blocks(const char* name, std::int64_t count, const Kernel& kernel) const {
    spread_blocks(launch_, backend_.team(), name, count, kernel);
  }
  template <class T>
  rows::Matrix<T> matrix(const Tensor& t) const {
    return launch_.template matrix<T>(t);
  }
  template <class T>
  T* data(const Tensor& t) const {
    return t.defined() ? launch_.template data<T>(t) : nullptr;
  }

  const Launch& launch_;
  KernelBackend& backend_;
  const StateSpaceShape& s_;
  const StateSpaceTensors& in_;
  Tensor free_;
  Tensor steps_, sums_, rests_;  // of a sequence
  // Of a chunk: dt x, and its decay until the chunk's end; outputs from the state before, and from the chunk;
  // products of C and B, and the weights of rows.
  Tensor stepped_, last_, of_state_, of_chunk_, products_, weights_;
  // For the delta rule. Of a sequence: betas, and the factors that normalise keys and queries. Of a chunk:
  // what the state before holds for its keys, products of keys, and how much of a row's u each later row
  // removes.
  Tensor betas_, factors_, recalled_, keys_, mixed_;
};

}  // namespace echelon
