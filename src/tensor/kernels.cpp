#include "tensor/kernels.h"

#include <fmt/ranges.h>

#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>

#include "base/error.h"
#include "spec/routing_balance.h"
#include "tensor/kernel_backend.h"
#include "tensor/thread_team.h"

namespace echelon {
namespace {

[[noreturn]] void broken_call(const char* what, std::initializer_list<const Tensor*> tensors) {
  std::string text = fmt::format("internal error: {}; called with", what);
  for (const Tensor* t : tensors)
    text += t->defined()
                ? fmt::format(" {} [{}]{}", dtype_name(t->dtype()), fmt::join(t->shape(), ", "),
                              t->contiguous() ? "" : fmt::format(" of rows {} apart", t->row_stride()))
                : " (undefined)";
  throw InvariantError(text);
}

// `what` names the kernel and its requirement; the tensors are those that violate it.
template <class... Tensors>
void require(bool holds, const char* what, const Tensors&... tensors) {
  if (!holds) [[unlikely]]
    broken_call(what, {&static_cast<const Tensor&>(tensors)...});
}

bool is_wide(const Tensor& x) { return x.defined() && (x.dtype() == DType::f32 || x.dtype() == DType::f64); }
bool is_float(const Tensor& x) { return is_wide(x) || (x.defined() && x.dtype() == DType::bf16); }

// Floats that may be used in one call: bf16 with its wide type, or both f64.
bool meets(const Tensor& x, const Tensor& y) { return is_float(y) && wide(y.dtype()) == wide(x.dtype()); }

// Whether y is a float tensor with the dtype of x.
bool like(const Tensor& x, const Tensor& y) { return y.defined() && y.dtype() == x.dtype(); }

// Matrices of the same shape (leading dimensions folded into rows), and of the same dtype.
bool same_shape(const Tensor& x, const Tensor& y) { return x.rows() == y.rows() && x.cols() == y.cols(); }
bool same(const Tensor& x, const Tensor& y) { return is_float(x) && like(x, y) && same_shape(x, y); }

// `count` contiguous elements of any shape.
bool vector_of(const Tensor& t, DType dtype, std::int64_t count) {
  return t.defined() && t.dtype() == dtype && t.contiguous() && t.numel() == count;
}
bool vector_like(const Tensor& x, const Tensor& t, std::int64_t count) {
  return vector_of(t, x.dtype(), count);
}
// A norm's weight and bias for x's columns, or neither, or no bias.
bool affine_like(const Tensor& x, const Tensor& w, const Tensor& b) {
  const auto fits = [&x](const Tensor& t) { return !t.defined() || vector_like(x, t, x.cols()); };
  return fits(w) && fits(b) && (w.defined() || !b.defined());
}
// A vector in the wide type of a call on x.
bool wide_vector(const Tensor& x, const Tensor& t, std::int64_t count) {
  return vector_of(t, wide(x.dtype()), count);
}
bool ids_of(const Tensor& t, std::int64_t count) { return vector_of(t, DType::i32, count); }

bool is_product(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, const Tensor& c) {
  const bool turn_a = ta == Transpose::yes, turn_b = tb == Transpose::yes;
  return is_float(c) && meets(c, a) && meets(c, b) && (turn_a ? a.cols() : a.rows()) == c.rows() &&
         (turn_b ? b.cols() : b.rows()) == (turn_a ? a.rows() : a.cols()) &&
         (turn_b ? b.rows() : b.cols()) == c.cols();
}

bool is_attention(const AttentionShape& s) {
  return s.batch >= 0 && s.q_len >= 0 && s.kv_len >= 0 && s.head_dim > 0 && s.num_kv_heads > 0 &&
         s.num_heads > 0 && s.cap >= 0 && !(s.cap > 0 && s.alibi.is_used()) && s.q_step > 0 && s.k_step > 0 &&
         s.num_heads % s.num_kv_heads == 0 && (s.kv_batch_stride == 0 || s.kv_batch_stride >= s.kv_len) &&
         (!s.first_keys.defined() || ids_of(s.first_keys, s.batch * s.q_len));
}

bool is_queries(const AttentionShape& s, const Tensor& x) {
  return is_float(x) && x.rows() == s.batch * s.q_len && x.cols() == s.num_heads * s.head_dim;
}

// A cache may hold more rows after the last sequence's keys.
bool is_keys(const AttentionShape& s, const Tensor& x) {
  const std::int64_t stride = s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len;
  return x.rows() >= (s.batch == 0 ? 0 : (s.batch - 1) * stride + s.kv_len) &&
         x.cols() == s.num_kv_heads * s.head_dim;
}

std::int64_t num_softmaxes(const AttentionShape& s) { return s.batch * s.num_heads * s.q_len; }

constexpr const char* attention_sizes =
    "attention: a size is negative, query heads do not divide over key/value heads, kv_batch_stride is below "
    "kv_len, cap is negative or beside ALiBi, a step is below 1, or first_keys is no i32 for each query";

void check_squares(const Tensor& x, std::int64_t block, const Tensor& sums) {
  require(is_float(x) && x.contiguous() && block > 0 &&
              vector_of(sums, DType::f64, (x.numel() + block - 1) / block),
          "sum_squares: sums is no f64 for each block of x", x, sums);
}

void check_sums_in_order(const Tensor& x, std::int64_t block, const Tensor& sums) {
  require(x.dtype() == DType::f64 && x.contiguous() && block > 0 &&
              vector_of(sums, DType::f64, (x.numel() + block - 1) / block),
          "sum_in_order: x is not f64, or sums no f64 for each block of it", x, sums);
}

// How p is stored: by itself, with remainders, or in bf16 alone.
void check_weights(const Tensor& p, const Tensor& remainder, const StochasticRounding* rounding) {
  const std::int64_t count = p.numel();
  const bool split = remainder.defined();
  require(is_float(p) && p.contiguous(), "a step of weights: p has gaps", p);
  require(!split || (p.dtype() == DType::bf16 && vector_of(remainder, DType::i16, count)),
          "a step of weights: remainder is no i16 for each bf16 of p", p, remainder);
  require((p.dtype() == DType::bf16 && !split) == (rounding != nullptr),
          "a step of weights: they are rounded at random where they are bf16 alone", p);
  if (rounding != nullptr)
    require(std::accumulate(rounding->runs.begin(), rounding->runs.end(), std::int64_t{0},
                            [](std::int64_t sum, const LogicalRun& run) { return sum + run.count; }) == count,
            "a step of weights: it is not said which logical element each of p is", p);
}

void check_update(const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v, const AdamWStep& step,
                  const Tensor& remainder) {
  const std::int64_t count = p.numel();
  const DType moments = remainder.defined() ? wide(p.dtype()) : p.dtype();
  require(
      is_float(p) && wide_vector(p, g, count) && vector_of(m, moments, count) && vector_of(v, moments, count),
      "adamw: p, g, m and v differ", p, g, m, v);
  check_weights(p, remainder, step.rounding);
  check(step.step >= 1, "adamw: steps count from 1");
}

}  // namespace

SumBlocks equal_blocks(std::int64_t k, std::int64_t blocks) {
  check(blocks > 0 && k % blocks == 0, "equal blocks divide what is summed");
  const std::int64_t each = k / blocks;
  SumBlocks all;
  for (std::int64_t b = 0; b < blocks; ++b) all.push_back({{b * each, (b + 1) * each}});
  return all;
}

// Whether each block is non-empty, as the code that sums them assumes (unless k is 0), and each k is summed
// once.
static bool sums_once(const MatrixProduct& p) {
  const std::int64_t k = p.ta == Transpose::yes ? p.a.rows() : p.a.cols();
  std::int64_t sum = 0;
  for (const auto& block : p.blocks) {
    if (k > 0 && block.empty()) return false;
    for (const Range& range : block) {
      if (k > 0 && (range.begin < 0 || range.size() <= 0 || range.end > k)) return false;
      sum += range.size();
    }
  }
  return p.blocks.empty() || sum == k;
}

const ThreadTeam& KernelBackend::team() const {
  static const ThreadTeam alone(1);
  return alone;
}

const ThreadTeam& Kernels::team() const {
  check(backend_ != nullptr, "no threads compute where nothing is computed");
  return backend_->team();
}

void Kernels::matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate,
                     const SumBlocks& blocks) {
  require(is_product(a, ta, b, tb, c), "matmul: c is no product of a and b", a, b, c);
  const MatrixProduct product{a, ta, b, tb, c, accumulate, blocks};
  require(sums_once(product), "matmul: blocks are not all of k, or one is empty", a);
  if (!backend_) return;
  if (blocks.empty()) return backend_->matmul(a, ta, b, tb, c, accumulate);
  backend_->grouped_matmul({&product, 1});
}

static bool follows(const MatrixProduct& p, const Epilogue& e) {
  const auto beside = [&p](const Tensor& x) { return !x.defined() || same(p.c, x); };
  const Tensor& summed = e.sums_of_b ? p.b : p.a;
  const bool turned = e.sums_of_b ? p.tb == Transpose::no : p.ta == Transpose::yes;
  const int passes = int{e.added.defined()} + int{e.activated.defined()} + int{e.hidden.defined()};
  return (!e.bias.defined() || vector_like(p.c, e.bias, p.c.cols())) && beside(e.added) &&
         beside(e.activated) && beside(e.hidden) && passes <= 1 &&
         !(p.accumulate && (e.bias.defined() || passes > 0)) &&
         (!e.column_sums.defined() || (turned && wide_vector(summed, e.column_sums, summed.cols())));
}

void Kernels::matmul(const MatrixProduct& p, const Epilogue& epilogue) {
  require(is_product(p.a, p.ta, p.b, p.tb, p.c) && follows(p, epilogue),
          "matmul: c is no product of a and b, or what follows is not like it", p.a, p.b, p.c, epilogue.bias,
          epilogue.added, epilogue.activated, epilogue.hidden, epilogue.column_sums);
  if (backend_ && epilogue.is_any() && backend_->fused_matmul(p, epilogue)) return;
  matmul(p.a, p.ta, p.b, p.tb, p.c, p.accumulate, p.blocks);
  finish(p, epilogue);
}

void Kernels::finish(const MatrixProduct& p, const Epilogue& e) {
  require(follows(p, e), "finish: what follows is not like the product", p.a, p.b, p.c, e.bias, e.added,
          e.activated, e.hidden, e.column_sums);
  if (!backend_) return;
  if (e.added.defined())
    backend_->residual(e.added, p.c, e.bias, p.c);
  else if (e.activated.defined())
    backend_->activate(e.activation, p.c, e.bias, e.activated);
  else if (e.bias.defined())
    backend_->add_bias(e.bias, p.c);
  if (e.hidden.defined()) backend_->activate_backward(e.activation, e.hidden, p.c);
  if (e.column_sums.defined()) backend_->bias_gradient(e.sums_of_b ? p.b : p.a, e.column_sums);
}

void Kernels::grouped_matmul(std::span<const MatrixProduct> products) {
  for (const MatrixProduct& p : products)
    require(is_product(p.a, p.ta, p.b, p.tb, p.c) && sums_once(p),
            "grouped_matmul: c is no product of a and b, or blocks are not all of k, or one is empty", p.a,
            p.b, p.c);
  if (backend_) backend_->grouped_matmul(products);
}

void Kernels::fp8_matmul(std::span<const Fp8Product> products) {
  for (const Fp8Product& one : products) {
    const MatrixProduct& p = one.product;
    require(is_product(p.a, p.ta, p.b, p.tb, p.c) && p.blocks.empty(),
            "fp8_matmul: c is no product of a and b", p.a, p.b, p.c);
    const auto has_room = [](const Tensor& x, const Tensor& room) {
      return x.dtype() == DType::bf16 && same(x, room) && room.contiguous();
    };
    require(has_room(p.a, one.room_a) && has_room(p.b, one.room_b),
            "fp8_matmul: an operand is no bf16, or its room is not like it", p.a, one.room_a, p.b,
            one.room_b);
  }
  if (backend_) backend_->fp8_matmul(products);
}

void Kernels::round_to_fp8(const Tensor& x, Fp8 format, Out y) {
  require(is_float(x) && x.dtype() == DType::bf16 && same(x, y),
          "round_to_fp8: x is no bf16, or y not like it", x, y);
  if (backend_) backend_->round_to_fp8(x, format, y);
}

void KernelBackend::fp8_matmul(std::span<const Fp8Product> products) {
  std::vector<MatrixProduct> rounded;
  for (const Fp8Product& p : products) {
    round_to_fp8(p.product.a, p.formats.a, p.room_a);
    round_to_fp8(p.product.b, p.formats.b, p.room_b);
    rounded.push_back(p.product);
    rounded.back().a = p.room_a, rounded.back().b = p.room_b;
  }
  grouped_matmul(rounded);
}

void Kernels::fill(Out x, double value) {
  require(is_float(x), "fill: x holds no floats", x);
  if (backend_) backend_->fill(x, value);
}

void Kernels::copy(const Tensor& from, Out to) {
  const bool remainders = from.defined() && from.dtype() == DType::i16 && like(from, to);
  require((remainders || (is_float(from) && meets(from, to))) && same_shape(from, to),
          "copy: from and to differ", from, to);
  if (backend_) backend_->copy(from, to);
}

void Kernels::add(const Tensor& x, InOut y) {
  require(is_float(x) && meets(x, y) && same_shape(x, y), "add: x and y differ", x, y);
  if (backend_) backend_->add(x, y);
}

void Kernels::scale(InOut x, double factor) {
  require(is_float(x), "scale: x holds no floats", x);
  if (backend_) backend_->scale(x, factor);
}

void Kernels::soft_cap(InOut x, double cap) {
  require(is_wide(x) && cap > 0, "soft_cap: x is not wide, or cap is not above 0", x);
  if (backend_) backend_->soft_cap(x, cap);
}

void Kernels::sum_squares(const Tensor& x, std::int64_t block, Out sums) {
  check_squares(x, block, sums);
  if (backend_) backend_->sum_squares(x, block, sums);
}

void Kernels::sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block) {
  for (const SumsOf& one : all) check_squares(one.x, block, one.sums);
  if (backend_) backend_->sum_squares_of_all(all, block);
}

void Kernels::sum_in_order(const Tensor& x, std::int64_t block, Out sums) {
  check_sums_in_order(x, block, sums);
  if (backend_) backend_->sum_in_order(x, block, sums);
}

void Kernels::sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block) {
  for (const SumsOf& one : all) check_sums_in_order(one.x, block, one.sums);
  if (backend_) backend_->sum_in_order_of_all(all, block);
}

bool Kernels::all_finite(const Tensor& x) {
  require(is_float(x), "all_finite: x holds no floats", x);
  return !backend_ || backend_->all_finite(x);
}

double Kernels::largest(const Tensor& x) {
  require(is_float(x), "largest: x holds no floats", x);
  return backend_ ? backend_->largest(x) : 0;
}

ExactSum Kernels::sum_squares_exactly(const Tensor& x, double scale) {
  constexpr std::int64_t most = std::int64_t{1} << 31;
  require(is_float(x) && x.contiguous() && x.numel() <= most && scale > 0,
          "sum_squares_exactly: x holds no floats, or too many of them", x);
  return backend_ ? backend_->sum_squares_exactly(x, scale) : ExactSum();
}

void Kernels::add_bias(const Tensor& bias, InOut y) {
  require(is_float(y) && vector_like(y, bias, y->cols()), "add_bias: bias is no row of y", bias, y);
  if (backend_) backend_->add_bias(bias, y);
}

void Kernels::residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) {
  require(same(x, out) && same(y, out), "residual: x, y and out differ", x, y, out);
  require(!bias.defined() || vector_like(out, bias, out->cols()), "residual: bias is no row of out", bias,
          out);
  if (backend_) backend_->residual(x, y, bias, out);
}

void Kernels::bias_gradient(const Tensor& dy, InOut dbias) {
  require(is_float(dy) && wide_vector(dy, dbias, dy.cols()), "bias_gradient: dbias is no wide row of dy", dy,
          dbias);
  if (backend_) backend_->bias_gradient(dy, dbias);
}

void Kernels::layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y, Out stats) {
  require(same(x, y) && affine_like(x, w, b) && wide_vector(x, stats, 2 * x.rows()),
          "layer_norm: shapes of x, w, b, y, stats", x, w, b, y, stats);
  if (backend_) backend_->layer_norm(x, w, b, eps, y, stats);
}

void Kernels::layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                               Out y) {
  require(same(x, y) && affine_like(x, w, b) && wide_vector(x, stats, 2 * x.rows()),
          "layer_norm_again: shapes of x, w, b, stats, y", x, w, b, stats, y);
  if (backend_) backend_->layer_norm_again(x, w, b, stats, y);
}

void Kernels::layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                        const Tensor& stats, InOut dx) {
  require(same(x, dy) && same(x, dx) && affine_like(x, w, {}) && wide_vector(x, stats, 2 * x.rows()),
          "layer_norm_backward_input: shapes of dy, x, w, stats, dx", dy, x, w, stats, dx);
  if (backend_) backend_->layer_norm_backward_input(dy, x, w, stats, dx);
}

void Kernels::layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                         InOut db) {
  require(same(x, dy) && wide_vector(x, stats, 2 * x.rows()) && wide_vector(x, dw, x.cols()) &&
              wide_vector(x, db, x.cols()),
          "layer_norm_backward_weight: shapes of dy, x, stats, dw, db", dy, x, stats, dw, db);
  if (backend_) backend_->layer_norm_backward_weight(dy, x, stats, dw, db);
}

void Kernels::rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) {
  require(same(x, y) && affine_like(x, w, {}) && wide_vector(x, stats, x.rows()),
          "rms_norm: shapes of x, w, y, stats", x, w, y, stats);
  if (backend_) backend_->rms_norm(x, w, eps, y, stats);
}

void Kernels::rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) {
  require(same(x, y) && affine_like(x, w, {}) && wide_vector(x, stats, x.rows()),
          "rms_norm_again: shapes of x, w, stats, y", x, w, stats, y);
  if (backend_) backend_->rms_norm_again(x, w, stats, y);
}

void Kernels::rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                      InOut dx) {
  require(same(x, dy) && same(x, dx) && affine_like(x, w, {}) && wide_vector(x, stats, x.rows()),
          "rms_norm_backward_input: shapes of dy, x, w, stats, dx", dy, x, w, stats, dx);
  if (backend_) backend_->rms_norm_backward_input(dy, x, w, stats, dx);
}

void Kernels::rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) {
  require(same(x, dy) && wide_vector(x, stats, x.rows()) && wide_vector(x, dw, x.cols()),
          "rms_norm_backward_weight: shapes of dy, x, stats, dw", dy, x, stats, dw);
  if (backend_) backend_->rms_norm_backward_weight(dy, x, stats, dw);
}

void Kernels::row_squares(const Tensor& x, Out squares) {
  require(is_float(x) && wide_vector(x, squares, x.rows()), "row_squares: shapes of x, squares", x, squares);
  if (backend_) backend_->row_squares(x, squares);
}

void Kernels::rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y,
                                  InOut stats) {
  check(columns >= static_cast<double>(x.cols()), "rms_norm_of_squares: x has columns of longer rows");
  require(same(x, y) && vector_like(x, w, x.cols()) && wide_vector(x, stats, x.rows()),
          "rms_norm_of_squares: shapes of x, w, y, stats", x, w, y, stats);
  if (backend_) backend_->rms_norm_of_squares(x, w, eps, columns, y, stats);
}

void Kernels::rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                     Out sums) {
  require(same(x, dy) && vector_like(x, w, x.cols()) && wide_vector(x, stats, x.rows()) &&
              wide_vector(x, sums, x.rows()),
          "rms_norm_backward_sums: shapes of dy, x, w, stats, sums", dy, x, w, stats, sums);
  if (backend_) backend_->rms_norm_backward_sums(dy, x, w, stats, sums);
}

void Kernels::rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                              const Tensor& stats, const Tensor& sums, double columns,
                                              InOut dx) {
  check(columns >= static_cast<double>(x.cols()),
        "rms_norm_backward_input_of_sums: x has columns of longer rows");
  require(same(x, dy) && same(x, dx) && vector_like(x, w, x.cols()) && wide_vector(x, stats, x.rows()) &&
              wide_vector(x, sums, x.rows()),
          "rms_norm_backward_input_of_sums: shapes of dy, x, w, stats, sums, dx", dy, x, w, stats, sums, dx);
  if (backend_) backend_->rms_norm_backward_input_of_sums(dy, x, w, stats, sums, columns, dx);
}

void Kernels::activate(Activation a, InOut h, const Tensor& bias, Out y) {
  check(!is_gated(a), "activate: of one input");
  require(same(h, y), "activate: h and y differ", h, y);
  require(!bias.defined() || vector_like(h, bias, h->cols()), "activate: bias is no row of h", h, bias);
  if (backend_) backend_->activate(a, h, bias, y);
}

void Kernels::activate_backward(Activation a, InOut h, InOut dy) {
  check(!is_gated(a), "activate_backward: of one input");
  require(same(h, dy), "activate_backward: h and dy differ", h, dy);
  if (backend_) backend_->activate_backward(a, h, dy);
}

void Kernels::xielu(const Tensor& h, const Tensor& alphas, Out y) {
  require(is_float(h) && same(h, y) && vector_like(h, alphas, 2), "xielu: shapes of h, alphas and y", h,
          alphas, y);
  if (backend_) backend_->xielu(h, alphas, y);
}

void Kernels::xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas) {
  require(is_float(h) && same(h, dy) && vector_like(h, alphas, 2) && wide_vector(h, dalphas, 2 * h->rows()),
          "xielu_backward: shapes of h, alphas, dy and dalphas", h, alphas, dy, dalphas);
  if (backend_) backend_->xielu_backward(h, alphas, dy, dalphas);
}

// gate_up (N, 2F) for y (N, F).
static bool twice_as_wide(const Tensor& gate_up, const Tensor& y) {
  return is_float(y) && like(y, gate_up) && gate_up.rows() == y.rows() && gate_up.cols() == 2 * y.cols();
}

void Kernels::gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp) {
  check(is_gated(a), "an activation with a gate");
  require(twice_as_wide(gate_up, y), "gated: gate_up is not twice as wide as y", gate_up, y);
  if (backend_) backend_->gated(a, gate_up, y, clamp);
}

void Kernels::gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) {
  check(is_gated(a), "an activation with a gate");
  require(twice_as_wide(gate_up, dy), "gated_backward: gate_up is not twice as wide as dy", gate_up, dy);
  if (backend_) backend_->gated_backward(a, gate_up, dy, clamp);
}

void Kernels::sigmoid_gate(const Tensor& x, const Tensor& gate, Out y) {
  require(is_float(x) && same(x, gate) && same(x, y), "sigmoid_gate: x, gate and y differ", x, gate, y);
  if (backend_) backend_->sigmoid_gate(x, gate, y);
}

void Kernels::sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y) {
  require(is_float(x) && same(x, gate) && same(x, dy) && same(x, y),
          "sigmoid_gate_backward: x, gate, dy and y differ", x, gate, dy, y);
  if (backend_) backend_->sigmoid_gate_backward(x, gate, dy, y);
}

void Kernels::weighted_activation_backward(Activation a, InOut hidden, InOut dy, const Tensor& weights,
                                           Out dweights, const SwigluClamp& clamp) {
  check(a == Activation::swiglu || a == Activation::clamped_swiglu || a == Activation::relu2,
        "an expert's activation");
  require(is_gated(a) ? twice_as_wide(hidden, dy) : same(hidden, dy),
          "weighted_activation_backward: hidden is not as wide as dy, or with a gate twice as wide", hidden,
          dy);
  require(wide_vector(dy, weights, dy->rows()) && wide_vector(dy, dweights, dy->rows()),
          "weighted_activation_backward: weights and dweights are no wide number for each row of dy", dy,
          weights, dweights);
  if (backend_) backend_->weighted_activation_backward(a, hidden, dy, weights, dweights, clamp);
}

void Kernels::rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns,
                   bool inverse) {
  require(is_float(x) && ids_of(positions, x->rows()), "rope: positions is no i32 for each row of x", x,
          positions);
  require(head_dim > 0 && head_dim % 2 == 0 && x->cols() % head_dim == 0,
          "rope: columns of x are not heads of even size", x);
  check(2 * std::ssize(turns.frequencies) <= head_dim, "rope: more pairs than a head has");
  if (backend_) backend_->rope(x, head_dim, positions, turns, inverse);
}

void Kernels::attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                        Out out, Out lse) {
  require(is_attention(shape), attention_sizes, q, k, shape.first_keys);
  require(is_queries(shape, q) && same(q, out), "attention: q and out are not of batch, q_len and heads", q,
          out);
  require(like(q, k) && like(q, v) && is_keys(shape, k) && is_keys(shape, v),
          "attention: k and v are not of batch, kv_len and heads", q, k, v);
  require(wide_vector(q, lse, num_softmaxes(shape)),
          "attention: lse is no wide number for each head and query", q, lse);
  if (backend_) backend_->attention(q, k, v, shape, out, lse);
}

void Kernels::attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape, Out delta) {
  require(is_attention(shape), attention_sizes, out, shape.first_keys);
  require(is_queries(shape, out) && same(out, dout),
          "attention_delta: out and dout are not of batch, q_len and heads", out, dout);
  require(wide_vector(out, delta, num_softmaxes(shape)),
          "attention_delta: delta is no wide number for each head and query", out, delta);
  if (backend_) backend_->attention_delta(out, dout, shape, delta);
}

void Kernels::attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                                 const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq,
                                 Out dk, Out dv) {
  require(is_attention(shape), attention_sizes, q, k, shape.first_keys);
  check(dk->defined() == dv->defined() && (dq->defined() || dk->defined()),
        "attention_backward: it takes gradients of queries, or of keys and values, or all");
  require(is_queries(shape, q) && same(q, dout) && (!dq->defined() || same(q, dq)),
          "attention_backward: q, dout and dq are not of batch, q_len and heads", q, dout, dq);
  for (const Tensor* x : {&k, &v, dk.operator->(), dv.operator->()})
    require((!x->defined() && x != &k && x != &v) || (like(q, *x) && is_keys(shape, *x)),
            "attention_backward: k, v, dk or dv is not of batch, kv_len and heads", q, *x);
  for (const Tensor* x : {&lse, &delta})
    require(wide_vector(q, *x, num_softmaxes(shape)),
            "attention_backward: lse or delta is no wide number for each head and query", q, *x);
  if (backend_) backend_->attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv);
}

void Kernels::attention_sink(const Tensor& sinks, const AttentionShape& shape, InOut out, InOut lse) {
  require(is_attention(shape), attention_sizes, out, shape.first_keys);
  require(is_queries(shape, out) && vector_like(out, sinks, shape.num_heads),
          "attention_sink: out is not of batch, q_len and heads, or sinks not of heads", out, sinks);
  require(wide_vector(out, lse, num_softmaxes(shape)),
          "attention_sink: lse is no wide number for each head and query", out, lse);
  if (backend_) backend_->attention_sink(sinks, shape, out, lse);
}

void Kernels::attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                                      const AttentionShape& shape, InOut dsinks) {
  require(is_attention(shape), attention_sizes, lse, shape.first_keys);
  require(is_float(sinks) && vector_like(sinks, sinks, shape.num_heads) &&
              wide_vector(sinks, dsinks, shape.num_heads),
          "attention_sink_backward: sinks or dsinks are no number for each head", sinks, dsinks);
  require(wide_vector(sinks, lse, num_softmaxes(shape)) && wide_vector(sinks, delta, num_softmaxes(shape)),
          "attention_sink_backward: lse or delta is no wide number for each head and query", lse, delta);
  if (backend_) backend_->attention_sink_backward(sinks, lse, delta, shape, dsinks);
}

std::int64_t StateSpaceShape::workspace(bool backward) const {
  const std::int64_t q = chunk_rows(), squares = (heads + groups) * q * q, of_rows = q * width();
  const std::int64_t of_delta = delta ? rows.length * (heads + 2 * groups) + of_rows + squares : 0;
  const std::int64_t forward = 3 * rows.length * heads + 4 * of_rows + squares + of_delta;
  if (!backward) return forward + width() * state;  // if no state is given
  return forward + (chunks() + 2) * width() * state + (delta ? 2 : 1) * squares + 2 * of_rows +
         (4 * q + 1) * heads;
}

static bool is_sequences(const Tensor& x, const SequenceRows& rows) {
  return is_float(x) && rows.batch >= 0 && rows.length >= 0 && x.rows() == rows.batch * rows.length &&
         (!rows.first_positions.defined() || ids_of(rows.first_positions, x.rows()));
}
// Of x's shape, in its wide type.
static bool widened(const Tensor& x, const Tensor& y) {
  return is_wide(y) && y.dtype() == wide(x.dtype()) && same_shape(x, y);
}
static bool is_convolution(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows) {
  return is_sequences(x, rows) && like(x, w) && w.contiguous() && w.rows() == x.cols() && w.cols() > 0 &&
         (!bias.defined() || vector_like(x, bias, x.cols()));
}

void Kernels::convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                       Out y) {
  require(is_convolution(x, w, bias, rows), "convolve: x is no sequences, or w or bias not of its columns", x,
          w, bias, rows.first_positions);
  require(widened(x, y), "convolve: y is not as x, and wide", x, y);
  if (backend_) backend_->convolve(x, w, bias, rows, y);
}

void Kernels::convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                const SequenceRows& rows, InOut dy, Out dx) {
  require(is_convolution(x, w, bias, rows),
          "convolve_backward: x is no sequences, or w or bias not of its columns", x, w, bias,
          rows.first_positions);
  require(widened(x, dy) && same(x, dx), "convolve_backward: dy or dx is not as x", x, dy, dx);
  if (backend_) backend_->convolve_backward(x, w, bias, rows, dy, dx);
}

void Kernels::convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows,
                                       InOut dw) {
  require(is_sequences(x, rows) && widened(x, dy), "convolve_backward_weight: dy is not as x", x, dy);
  require(is_wide(dw) && dw->dtype() == dy.dtype() && dw->rows() == x.cols(),
          "convolve_backward_weight: dw is not of x's columns, and wide", x, dw);
  if (backend_) backend_->convolve_backward_weight(x, dy, rows, dw);
}

// Whether y has the shape of one of the parts of [B | C | x].
static bool is_gated_channels(const Tensor& bcx, const Tensor& y, const SequenceRows& rows) {
  return is_sequences(bcx, rows) && like(bcx, y) && y.rows() == bcx.rows() && bcx.cols() == 3 * y.cols();
}
static bool is_short_convolution(const Tensor& bcx, const Tensor& w, const Tensor& y,
                                 const SequenceRows& rows) {
  return is_gated_channels(bcx, y, rows) && like(bcx, w) && w.contiguous() && w.rows() == y.cols() &&
         w.cols() > 0;
}

void Kernels::short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y) {
  require(is_short_convolution(bcx, w, y, rows),
          "short_convolution: bcx is no sequences of three times y's columns, or w not of these", bcx, w, y,
          rows.first_positions);
  if (backend_) backend_->short_convolution(bcx, w, rows, y);
}

void Kernels::short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                         const SequenceRows& rows, Out dbcx, Out y) {
  require(is_short_convolution(bcx, w, dy, rows),
          "short_convolution_backward: bcx is no sequences of three times dy's columns, or w not of these",
          bcx, w, dy, rows.first_positions);
  require(same(bcx, dbcx) && same(dy, y), "short_convolution_backward: dbcx is not as bcx, or y not as dy",
          bcx, dbcx, dy, y);
  if (backend_) backend_->short_convolution_backward(bcx, w, dy, rows, dbcx, y);
}

void Kernels::short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy, const SequenceRows& rows,
                                                InOut dw) {
  require(is_gated_channels(bcx, dy, rows),
          "short_convolution_backward_weight: bcx is no sequences of three times dy's columns", bcx, dy);
  require(is_wide(dw) && dw->dtype() == wide(bcx.dtype()) && dw->rows() == dy.cols(),
          "short_convolution_backward_weight: dw is not of dy's columns, and wide", dy, dw);
  if (backend_) backend_->short_convolution_backward_weight(bcx, dy, rows, dw);
}

static bool is_state_space(const StateSpaceTensors& in, const StateSpaceShape& s, const Tensor& workspace,
                           bool backward) {
  const bool sizes =
      s.heads > 0 && s.head_dim > 0 && s.groups > 0 && s.state > 0 && s.chunk > 0 && s.heads % s.groups == 0;
  const auto of = [&](const Tensor& t, std::int64_t cols) {
    return is_sequences(t, s.rows) && like(in.z, t) && t.cols() == cols;
  };
  return sizes && of(in.z, s.width()) && of(in.dt, s.heads) && is_wide(in.xbc) &&
         in.xbc.dtype() == wide(in.z.dtype()) && in.xbc.rows() == in.z.rows() &&
         in.xbc.cols() == s.mixed_width() && vector_like(in.z, in.dt_bias, s.heads) &&
         vector_like(in.z, in.a_log, s.heads) && vector_like(in.z, in.d, s.delta ? s.head_dim : s.heads) &&
         in.beta.defined() == s.delta && (!s.delta || of(in.beta, s.heads)) &&
         wide_vector(in.z, workspace, s.workspace(backward));
}

void Kernels::state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                          InOut state, Out y) {
  require(is_state_space(in, shape, workspace, false), "state_space: a tensor is not of its shape", in.z,
          in.xbc, in.dt, in.dt_bias, in.a_log, in.d, workspace);
  require(same(in.z, y), "state_space: y is not as z", in.z, y);
  require(
      !state->defined() || (shape.rows.batch == 1 && wide_vector(in.z, state, shape.width() * shape.state)),
      "state_space: a state is of one sequence, and wide", in.z, state);
  if (backend_) backend_->state_space(in, shape, workspace, state, y);
}

void Kernels::state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape,
                                   const Tensor& dy, const Tensor& workspace,
                                   const StateSpaceGradients& out) {
  require(is_state_space(in, shape, workspace, true), "state_space_backward: a tensor is not of its shape",
          in.z, in.xbc, in.dt, in.dt_bias, in.a_log, in.d, workspace);
  require(same(in.z, dy) && same(in.z, out.z) && same(in.dt, out.dt) && same(in.xbc, out.xbc) &&
              is_wide(out.terms) && out.terms.dtype() == in.xbc.dtype() && out.terms.rows() == dy.rows() &&
              out.terms.cols() == shape.terms() && (!shape.delta || same(in.beta, out.beta)),
          "state_space_backward: a gradient is not as what it is of", dy, out.z, out.dt, out.xbc, out.terms);
  if (backend_) backend_->state_space_backward(in, shape, dy, workspace, out);
}

void Kernels::embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) {
  require(is_float(y) && like(y, table) && table.cols() == y->cols(),
          "embedding: widths of the table and y differ", table, y);
  require(ids_of(ids, y->rows()), "embedding: ids is no i32 for each row of y", ids, y);
  if (backend_) backend_->embedding(ids, table, first_id, y);
}

void Kernels::embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable) {
  require(
      is_float(dy) && dtable->defined() && dtable->dtype() == wide(dy.dtype()) && dtable->cols() == dy.cols(),
      "embedding_backward: dtable is not wide and as wide as dy", dtable, dy);
  require(ids_of(ids, dy.rows()), "embedding_backward: ids is no i32 for each row of dy", ids, dy);
  if (backend_) backend_->embedding_backward(ids, dy, first_id, dtable);
}

void Kernels::combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) {
  require(is_float(y) && like(y, x) && x.cols() == y->cols(), "combine_rows: widths of x and y differ", x, y);
  const std::int64_t copies = y->rows() == 0 ? 0 : places.numel() / y->rows() * y->rows();
  require(ids_of(places, copies), "combine_rows: places is no i32, as many for each row of y", places, y);
  require(!weights.defined() || wide_vector(y, weights, copies), "combine_rows: weights are not as places",
          places, weights);
  if (backend_) backend_->combine_rows(x, places, weights, y);
}

void Kernels::row_max(const Tensor& logits, Out max) {
  require(is_wide(logits) && vector_like(logits, max, logits.rows()),
          "row_max: logits are not wide, or max is no number for each row", logits, max);
  if (backend_) backend_->row_max(logits, max);
}

void Kernels::exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
                      Out target) {
  require(is_wide(logits) && ids_of(targets, logits->rows()),
          "exp_sum: logits are not wide, or targets is no i32 for each row", logits, targets);
  for (const Tensor* x : {&max, sum.operator->(), target.operator->()})
    require(vector_like(logits, *x, logits->rows()), "exp_sum: max, sum or target is no number for each row",
            logits, *x);
  if (backend_) backend_->exp_sum(logits, max, targets, first_id, sum, target);
}

void Kernels::cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                                     std::int64_t first_id, double loss_scale, Out dlogits,
                                     const LogitsCap& cap) {
  require(is_wide(p) && vector_like(p, sum, p.rows()) && ids_of(targets, p.rows()),
          "cross_entropy_backward: p is not wide, or sum and targets are no number for each row", p, sum,
          targets);
  require(meets(p, dlogits) && same_shape(p, dlogits), "cross_entropy_backward: dlogits is not as p", p,
          dlogits);
  require(!p.begins_with(dlogits) || p.dtype() == dlogits->dtype(),
          "cross_entropy_backward: narrow dlogits lie where p does", p, dlogits);
  require(cap.cap <= 0 || vector_like(p, cap.max, p.rows()),
          "cross_entropy_backward: capped logits have no max for each row", p, cap.max);
  if (backend_) backend_->cross_entropy_backward(p, sum, targets, first_id, loss_scale, dlogits, cap);
}

void Kernels::cross_entropy(InOut logits, const Tensor& targets, double loss_scale, double cap, Out max,
                            Out sum, Out target, Out dlogits) {
  require(is_wide(logits) && ids_of(targets, logits->rows()),
          "cross_entropy: logits are not wide, or targets is no i32 for each row", logits, targets);
  for (const Tensor* x : {max.operator->(), sum.operator->(), target.operator->()})
    require(vector_like(logits, *x, logits->rows()),
            "cross_entropy: max, sum or target is no number for each row", logits, *x);
  require(meets(logits, dlogits) && same_shape(logits, dlogits),
          "cross_entropy: dlogits is not as the logits", logits, dlogits);
  require(!logits->begins_with(dlogits) || logits->dtype() == dlogits->dtype(),
          "cross_entropy: narrow dlogits lie where the logits do", logits, dlogits);
  if (backend_) backend_->cross_entropy(logits, targets, loss_scale, cap, max, sum, target, dlogits);
}

void Kernels::adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder) {
  check_update(p, g, m, v, step, remainder);
  if (backend_) backend_->adamw(p, g, m, v, step, remainder);
}

void Kernels::adamw_of_all(std::span<const AdamWUpdate> updates) {
  for (const AdamWUpdate& u : updates) check_update(u.p, u.g, u.m, u.v, u.step, u.remainder);
  if (backend_) backend_->adamw_of_all(updates);
}

void Kernels::momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step) {
  require(is_float(m) && m->contiguous() && wide_vector(m, g, m->numel()) && meets(g, update) &&
              update->contiguous() && update->numel() == m->numel(),
          "momentum: g, m and update differ", g, m, update);
  if (backend_) backend_->momentum(g, m, update, step);
}

void Kernels::step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder) {
  require(is_float(p) && meets(p, update) && update.contiguous() && update.numel() == p->numel(),
          "step_weights: p and update differ", p, update);
  check_weights(p, remainder, step.rounding);
  if (backend_) backend_->step_weights(p, update, step, remainder);
}

Philox weight_rounding(std::uint64_t seed, const std::string& parameter, std::int64_t step) {
  return {seed, Stream::weight_rounding, name_hash(fmt::format("{} step {}", parameter, step).c_str())};
}

void Kernels::first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride,
                         std::int64_t count, Out first) {
  require(ids_of(starts, starts.numel()) && ids_of(first, starts.numel()) && stride > 0 && count >= 0,
          "first_keys: starts and first differ, or the keys do not follow each other", starts, first);
  if (backend_) backend_->first_keys(starts, first_position, stride, count, first);
}

static bool is_number(const Tensor& x) { return vector_of(x, DType::f64, 1); }

void Kernels::add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) {
  require(is_wide(sum) && vector_like(sum, sum, targets.numel()) &&
              vector_like(sum, target, targets.numel()) && ids_of(targets, targets.numel()) &&
              is_number(loss),
          "add_losses: sum, target and targets differ, or loss is no f64", sum, target, targets, loss);
  if (backend_) backend_->add_losses(sum, target, targets, loss);
}

void Kernels::merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                            Out sum, Out target, Out scales, Out shares) {
  const std::int64_t rows = targets.numel(), count = static_cast<std::int64_t>(bounds.size()) - 1;
  require(is_wide(parts) && count > 0 && vector_like(parts, parts, 3 * count * rows) &&
              vector_like(parts, sum, rows) && vector_like(parts, target, rows) && ids_of(targets, rows) &&
              vector_like(parts, scales, count * rows) && vector_like(parts, shares, count * rows),
          "merge_softmax: parts, targets and what is made of them differ", parts, targets, sum, scales);
  if (backend_) backend_->merge_softmax(parts, targets, bounds, sum, target, scales, shares);
}

void Kernels::merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                              std::span<const Tensor> of_targets, const Tensor& targets, double factor,
                              Out y) {
  check(means.size() == shares.size() && means.size() == of_targets.size(), "merge_gradients: so many parts");
  require(ids_of(targets, y->rows()), "merge_gradients: targets is no i32 for each row", targets, y);
  for (std::size_t p = 0; p < means.size(); ++p)
    require(same(means[p], y) && same(of_targets[p], y) && wide_vector(y, shares[p], y->rows()),
            "merge_gradients: the parts are not as their sum", means[p], of_targets[p], shares[p], y);
  if (backend_) backend_->merge_gradients(means, shares, of_targets, targets, factor, y);
}

void Kernels::add_number(const Tensor& x, InOut y) {
  require(is_number(x) && is_number(y), "add_number: x or y is no f64", x, y);
  if (backend_) backend_->add_number(x, y);
}

// Logits (N, E) of a router, and its choices (N, k).
static bool is_routing(const TokenRouter& router, const Tensor& logits, const Tensor& ids) {
  return is_wide(logits) && logits.cols() == router.num_experts() &&
         ids_of(ids, logits.rows() * router.experts_per_token());
}

void Kernels::route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
                    Out weights) {
  require(is_routing(router, logits, ids) && vector_like(logits, weights, ids->numel()),
          "route: ids and weights are not k for each row of logits, or logits not E", logits, ids, weights);
  check(bias.empty() || std::ssize(bias) == router.num_experts(),
        "route: the bias has a place for each expert");
  if (backend_) backend_->route(router, logits, bias, ids, weights);
}

void Kernels::weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids, Out weights) {
  require(is_routing(router, logits, ids) && vector_like(logits, weights, ids.numel()),
          "weigh_routes: ids and weights are not k for each row of logits, or logits not E", logits, ids,
          weights);
  if (backend_) backend_->weigh_routes(router, logits, ids, weights);
}

void Kernels::route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                             const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                             Out d_logits) {
  require(is_routing(router, logits, ids) && vector_like(logits, d_weights, ids.numel()) &&
              same(logits, d_logits),
          "route_backward: shapes of logits, ids, d_weights, d_logits", logits, ids, d_weights, d_logits);
  if (backend_) backend_->route_backward(router, logits, ids, d_weights, losses, loss_scale, d_logits);
}

void Kernels::add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                                InOut loss) {
  require(is_wide(logits) && logits.cols() == router.num_experts() && is_number(loss),
          "add_router_losses: logits are not E for each row, or loss is no f64", logits, loss);
  if (backend_) backend_->add_router_losses(router, logits, losses, loss);
}

void Kernels::count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) {
  require(scopes > 0 && ids_of(ids, ids.numel()) && ids.rows() % scopes == 0 &&
              ids.cols() == router.experts_per_token() &&
              ids_of(counts, scopes * num_routing_counts(router.num_experts(), router.spec())),
          "count_routed: ids are not k for each row of scopes of one size, or counts not those of each scope",
          ids, counts);
  if (backend_) backend_->count_routed(router, ids, scopes, counts);
}

void Kernels::drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                                 Out kept) {
  require(is_wide(weights) && vector_like(weights, weights, ids.numel()) && ids_of(ids, ids.numel()) &&
              ids_of(kept, ids.numel()) && capacity.scopes > 0 && ids.rows() % capacity.scopes == 0,
          "drop_over_capacity: ids, weights and kept differ, or scopes have not one size", ids, weights,
          kept);
  if (backend_) backend_->drop_over_capacity(ids, weights, capacity, kept);
}

void Kernels::sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) {
  require(ids_of(kept, kept.numel()) && ids_of(places, kept.numel()) && ids_of(tokens, tokens->numel()) &&
              ids_of(counts, counts->numel()),
          "sort_by_expert: kept and places differ, or something is no i32", kept, places, tokens, counts);
  if (backend_) backend_->sort_by_expert(kept, places, tokens, counts);
}

void Kernels::pack_choices(const Tensor& ids, const Tensor& weights, Out packed) {
  require(is_wide(packed) && ids_of(ids, ids.numel()) && vector_like(packed, weights, ids.numel()) &&
              vector_like(packed, packed, 2 * ids.numel()) && packed->rows() == ids.rows(),
          "pack_choices: packed is not twice as wide as ids and weights", ids, weights, packed);
  if (backend_) backend_->pack_choices(ids, weights, packed);
}

void Kernels::unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids, Out weights) {
  require(is_wide(packed) && ids_of(ids, ids->numel()) && vector_like(packed, weights, ids->numel()) &&
              vector_like(packed, packed, 2 * ids->numel()) && packed.rows() == ids->rows() &&
              (rows.empty() || std::ssize(rows) == packed.rows()),
          "unpack_choices: packed is not twice as wide as ids and weights", packed, ids, weights);
  if (backend_) backend_->unpack_choices(packed, rows, ids, weights);
}

void Kernels::take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) {
  require(ids_of(from, from.numel()) && ids_of(to, std::ssize(rows) * from.cols()),
          "take_ids: `to` has not the rows that are taken", from, to);
  if (backend_) backend_->take_ids(from, rows, to);
}

void Kernels::place_weights(const Tensor& weights, const Tensor& places, InOut placed) {
  require(
      is_wide(weights) && ids_of(places, weights.numel()) && vector_like(weights, placed, placed->numel()),
      "place_weights: weights and places differ", weights, places, placed);
  if (backend_) backend_->place_weights(weights, places, placed);
}

void Kernels::pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                            std::span<const Philox> rounding, const Tensor& gradient, Out packed) {
  require(is_wide(gradient) && gradient.contiguous() && part.end <= gradient.numel() &&
              vector_of(packed, DType::u8, quantized_bytes(kind, bucket, part)),
          "pack_gradient: the part lies outside the gradient, or packed has another size", gradient, packed);
  if (backend_) backend_->pack_gradient(kind, bucket, part, rounding, gradient, packed);
}

void Kernels::unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                              const Tensor& packed, bool accumulate, Out part_of_gradient) {
  require(is_wide(part_of_gradient) && part_of_gradient->contiguous() &&
              part_of_gradient->numel() == part.size() &&
              vector_of(packed, DType::u8, quantized_bytes(kind, bucket, part)),
          "unpack_gradient: packed and the part have other sizes", packed, part_of_gradient);
  if (backend_) backend_->unpack_gradient(kind, bucket, part, packed, accumulate, part_of_gradient);
}

void Kernels::take_largest(InOut x, std::int64_t first_index, Out values, Out indices) {
  require(is_wide(x) && x->contiguous() && 0 < values->numel() && values->numel() <= x->numel() &&
              first_index + x->numel() - 1 <= std::numeric_limits<std::int32_t>::max() &&
              vector_like(x, values, values->numel()) && ids_of(indices, values->numel()),
          "take_largest: values and indices differ, are none, or are more than x has", x, values, indices);
  if (backend_) backend_->take_largest(x, first_index, values, indices);
}

void Kernels::add_at(const Tensor& values, const Tensor& indices, InOut sum) {
  require(is_wide(values) && values.contiguous() && ids_of(indices, values.numel()) &&
              vector_like(values, sum, sum->numel()),
          "add_at: values and indices differ", values, indices, sum);
  if (backend_) backend_->add_at(values, indices, sum);
}

void Kernels::orthonormalize_rows(InOut x, const Philox& fresh) {
  require(is_wide(x) && x->contiguous() && x->rows() <= x->cols(),
          "orthonormalize_rows: x has more rows than columns", x);
  if (backend_) backend_->orthonormalize_rows(x, fresh);
}

}  // namespace echelon
