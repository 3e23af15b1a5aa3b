#include "queued_kernels.h"

#include <bit>
#include <cstdint>
#include <optional>

#include "base/error.h"
#include "tensor/device_stream.h"

namespace echelon::checks {

QueuedKernels::QueuedKernels(FakeDriver& driver, Arena& arena, bool tf32)
    : driver_(driver), arena_(arena), tf32_(tf32), kernels_(make_reference_kernels()) {
  if (const std::int64_t bytes = driver.workspace_bytes(Numerics::ordinary); bytes > 0)
    workspace_ = Tensor(arena, MemoryCategory::other, DType::u8, {bytes});
}

Tensor QueuedKernels::held(T tensor, Uses& uses) const {
  if (!tensor.defined()) return {};
  check(tensor.device() == Device::cuda, "a kernel of a device is given memory of the host");
  const std::int64_t length =
      tensor.numel() == 0 ? 0 : (tensor.rows() - 1) * tensor.row_stride() + tensor.cols();
  uses.push_back({tensor.address(), static_cast<std::size_t>(length * element_bytes(tensor.dtype()))});
  return Tensor::view_of(driver_.seen_by_work(tensor.address()), tensor.dtype(), tensor.shape(),
                         tensor.row_stride());
}

std::vector<Tensor> QueuedKernels::held(std::span<const Tensor> tensors, Uses& uses) const {
  std::vector<Tensor> all;
  for (T tensor : tensors) all.push_back(held(tensor, uses));
  return all;
}

std::vector<MatrixProduct> QueuedKernels::held(std::span<const MatrixProduct> products, Uses& uses) const {
  std::vector<MatrixProduct> all;
  for (const MatrixProduct& p : products)
    all.push_back({held(p.a, uses), p.ta, held(p.b, uses), p.tb, held(p.c, uses), p.accumulate, p.blocks});
  return all;
}

AttentionShape QueuedKernels::held(AttentionShape shape, Uses& uses) const {
  shape.first_keys = held(shape.first_keys, uses);
  return shape;
}

SequenceRows QueuedKernels::held(SequenceRows rows, Uses& uses) const {
  rows.first_positions = held(rows.first_positions, uses);
  return rows;
}

StateSpaceShape QueuedKernels::held(StateSpaceShape shape, Uses& uses) const {
  shape.rows = held(shape.rows, uses);
  return shape;
}

StateSpaceTensors QueuedKernels::held(const StateSpaceTensors& in, Uses& uses) const {
  return {held(in.z, uses),     held(in.xbc, uses), held(in.dt, uses),  held(in.dt_bias, uses),
          held(in.a_log, uses), held(in.d, uses),   held(in.beta, uses)};
}

StateSpaceGradients QueuedKernels::held(const StateSpaceGradients& out, Uses& uses) const {
  return {held(out.z, uses), held(out.xbc, uses), held(out.dt, uses), held(out.terms, uses),
          held(out.beta, uses)};
}

LogitsCap QueuedKernels::held(LogitsCap cap, Uses& uses) const {
  cap.max = held(cap.max, uses);
  return cap;
}

void QueuedKernels::enqueue(const char* name, Uses uses, std::function<void()> work) {
  driver_.enqueue(name, arena_.stream().handle(), std::move(uses), std::move(work));
  driver_.check_launch(name);
}

template <class... Parameters, class... Args>
void QueuedKernels::queue(const char* name, void (Kernels::*method)(Parameters...), const Args&... args) {
  Uses uses;
  std::tuple own{held(args, uses)...};
  enqueue(name, std::move(uses), [kernels = kernels_, method, own = std::move(own)] {
    std::apply([&](const auto&... each) { ((*kernels).*method)(each...); }, own);
  });
}

template <class Result, class... Parameters, class... Args>
Result QueuedKernels::ask(const char* name, Result (Kernels::*method)(Parameters...), const Args&... args) {
  Uses uses;
  std::tuple own{held(args, uses)...};
  Result result{};
  enqueue(name, std::move(uses),
          [&] { std::apply([&](const auto&... each) { result = ((*kernels_).*method)(each...); }, own); });
  arena_.stream().synchronize();
  return result;
}

void QueuedKernels::adamw(InOut p, T g, InOut m, InOut v, const AdamWStep& step, InOut remainder) {
  Uses uses;
  const auto work = [kernels = kernels_, own_p = held(p, uses), own_g = held(g, uses), own_m = held(m, uses),
                     own_v = held(v, uses), own_remainder = held(remainder, uses), own = OwnStep(step)] {
    own.with([&](const AdamWStep& at) { kernels->adamw(own_p, own_g, own_m, own_v, at, own_remainder); });
  };
  enqueue("adamw", std::move(uses), work);
}

void QueuedKernels::momentum(T g, InOut m, Out update, const MomentumStep& step) {
  queue("momentum", &Kernels::momentum, g, m, update, step);
}

void QueuedKernels::step_weights(InOut p, T update, const WeightStep& step, InOut remainder) {
  Uses uses;
  const auto work = [kernels = kernels_, own_p = held(p, uses), own_update = held(update, uses),
                     own_remainder = held(remainder, uses), own = OwnStep(step)] {
    own.with([&](const WeightStep& at) { kernels->step_weights(own_p, own_update, at, own_remainder); });
  };
  enqueue("step_weights", std::move(uses), work);
}

void QueuedKernels::matmul(T a, Transpose ta, T b, Transpose tb, Out c, bool accumulate) {
  if (tf32_) return multiply_in_tf32("matmul", std::vector<MatrixProduct>{{a, ta, b, tb, c, accumulate}});
  void (Kernels::*const method)(T, Transpose, T, Transpose, Out, bool, const SumBlocks&) = &Kernels::matmul;
  queue("matmul", method, a, ta, b, tb, c, accumulate, SumBlocks());
}

void QueuedKernels::grouped_matmul(std::span<const MatrixProduct> products) {
  if (tf32_) return multiply_in_tf32("grouped_matmul", products);
  queue("grouped_matmul", &Kernels::grouped_matmul, products);
}

// 13 of 23 bits of the fraction are gone.
static Tensor cut_to_tf32(const Tensor& x) {
  if (x.dtype() != DType::f32) return x;
  const Tensor cut = Tensor::of_host(DType::f32, {x.rows(), x.cols()});
  for (std::int64_t i = 0; i < x.rows(); ++i)
    for (std::int64_t j = 0; j < x.cols(); ++j)
      cut.host<float>()[i * x.cols() + j] = std::bit_cast<float>(
          std::bit_cast<std::uint32_t>(x.host<float>()[i * x.row_stride() + j]) & 0xffffe000u);
  return cut;
}

void QueuedKernels::multiply_in_tf32(const char* name, std::span<const MatrixProduct> products) {
  Uses uses;
  std::vector<MatrixProduct> own = held(products, uses);
  enqueue(name, std::move(uses), [kernels = kernels_, own = std::move(own)] {
    std::vector<MatrixProduct> cut;
    for (MatrixProduct p : own) {
      p.a = cut_to_tf32(p.a), p.b = cut_to_tf32(p.b);
      cut.push_back(std::move(p));
    }
    kernels->grouped_matmul(cut);
  });
}

// Its roundings and products are queued one by one.
void QueuedKernels::fp8_matmul(std::span<const Fp8Product> products) {
  KernelBackend::fp8_matmul(products);
}

void QueuedKernels::round_to_fp8(T x, Fp8 format, Out y) {
  queue("round_to_fp8", &Kernels::round_to_fp8, x, format, y);
}

void QueuedKernels::fill(Out x, double value) { queue("fill", &Kernels::fill, x, value); }

void QueuedKernels::copy(T from, Out to) { queue("copy", &Kernels::copy, from, to); }

void QueuedKernels::add(T x, InOut y) { queue("add", &Kernels::add, x, y); }

void QueuedKernels::scale(InOut x, double factor) { queue("scale", &Kernels::scale, x, factor); }

void QueuedKernels::sum_squares(T x, std::int64_t block, Out sums) {
  queue("sum_squares", &Kernels::sum_squares, x, block, sums);
}

void QueuedKernels::sum_in_order(T x, std::int64_t block, Out sums) {
  queue("sum_in_order", &Kernels::sum_in_order, x, block, sums);
}

bool QueuedKernels::all_finite(T x) { return ask("all_finite", &Kernels::all_finite, x); }

double QueuedKernels::largest(T x) { return ask("largest", &Kernels::largest, x); }

ExactSum QueuedKernels::sum_squares_exactly(T x, double scale) {
  return ask("sum_squares_exactly", &Kernels::sum_squares_exactly, x, scale);
}

void QueuedKernels::add_bias(T bias, InOut y) { queue("add_bias", &Kernels::add_bias, bias, y); }

void QueuedKernels::residual(T x, T y, T bias, Out out) {
  queue("residual", &Kernels::residual, x, y, bias, out);
}

void QueuedKernels::bias_gradient(T dy, InOut dbias) {
  queue("bias_gradient", &Kernels::bias_gradient, dy, dbias);
}

void QueuedKernels::layer_norm(T x, T w, T b, double eps, Out y, Out stats) {
  queue("layer_norm", &Kernels::layer_norm, x, w, b, eps, y, stats);
}

void QueuedKernels::layer_norm_again(T x, T w, T b, T stats, Out y) {
  queue("layer_norm_again", &Kernels::layer_norm_again, x, w, b, stats, y);
}

void QueuedKernels::layer_norm_backward_input(T dy, T x, T w, T stats, InOut dx) {
  queue("layer_norm_backward_input", &Kernels::layer_norm_backward_input, dy, x, w, stats, dx);
}

void QueuedKernels::layer_norm_backward_weight(T dy, T x, T stats, InOut dw, InOut db) {
  queue("layer_norm_backward_weight", &Kernels::layer_norm_backward_weight, dy, x, stats, dw, db);
}

void QueuedKernels::rms_norm(T x, T w, double eps, Out y, Out stats) {
  queue("rms_norm", &Kernels::rms_norm, x, w, eps, y, stats);
}

void QueuedKernels::rms_norm_again(T x, T w, T stats, Out y) {
  queue("rms_norm_again", &Kernels::rms_norm_again, x, w, stats, y);
}

void QueuedKernels::rms_norm_backward_input(T dy, T x, T w, T stats, InOut dx) {
  queue("rms_norm_backward_input", &Kernels::rms_norm_backward_input, dy, x, w, stats, dx);
}

void QueuedKernels::rms_norm_backward_weight(T dy, T x, T stats, InOut dw) {
  queue("rms_norm_backward_weight", &Kernels::rms_norm_backward_weight, dy, x, stats, dw);
}

void QueuedKernels::row_squares(T x, Out squares) { queue("row_squares", &Kernels::row_squares, x, squares); }

void QueuedKernels::rms_norm_of_squares(T x, T w, double eps, double columns, Out y, InOut stats) {
  queue("rms_norm_of_squares", &Kernels::rms_norm_of_squares, x, w, eps, columns, y, stats);
}

void QueuedKernels::rms_norm_backward_sums(T dy, T x, T w, T stats, Out sums) {
  queue("rms_norm_backward_sums", &Kernels::rms_norm_backward_sums, dy, x, w, stats, sums);
}

void QueuedKernels::rms_norm_backward_input_of_sums(T dy, T x, T w, T stats, T sums, double columns,
                                                    InOut dx) {
  queue("rms_norm_backward_input_of_sums", &Kernels::rms_norm_backward_input_of_sums, dy, x, w, stats, sums,
        columns, dx);
}

void QueuedKernels::activate(Activation a, InOut h, T bias, Out y) {
  queue("activate", &Kernels::activate, a, h, bias, y);
}

void QueuedKernels::activate_backward(Activation a, InOut h, InOut dy) {
  queue("activate_backward", &Kernels::activate_backward, a, h, dy);
}

void QueuedKernels::xielu(T h, T alphas, Out y) { queue("xielu", &Kernels::xielu, h, alphas, y); }

void QueuedKernels::xielu_backward(InOut h, T alphas, InOut dy, Out dalphas) {
  queue("xielu_backward", &Kernels::xielu_backward, h, alphas, dy, dalphas);
}

void QueuedKernels::gated(Activation a, T gate_up, Out y, const SwigluClamp& clamp) {
  queue("gated", &Kernels::gated, a, gate_up, y, clamp);
}

void QueuedKernels::gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) {
  queue("gated_backward", &Kernels::gated_backward, a, gate_up, dy, clamp);
}

void QueuedKernels::sigmoid_gate(T x, T gate, Out y) {
  queue("sigmoid_gate", &Kernels::sigmoid_gate, x, gate, y);
}

void QueuedKernels::sigmoid_gate_backward(T x, InOut gate, InOut dy, Out y) {
  queue("sigmoid_gate_backward", &Kernels::sigmoid_gate_backward, x, gate, dy, y);
}

void QueuedKernels::weighted_activation_backward(Activation a, InOut gate_up, InOut dy, T weights,
                                                 Out dweights, const SwigluClamp& clamp) {
  queue("weighted_activation_backward", &Kernels::weighted_activation_backward, a, gate_up, dy, weights,
        dweights, clamp);
}

void QueuedKernels::rope(InOut x, std::int64_t head_dim, T positions, const RopeTurns& turns, bool inverse) {
  queue("rope", &Kernels::rope, x, head_dim, positions, turns, inverse);
}

void QueuedKernels::attention(T q, T k, T v, const AttentionShape& shape, Out out, Out lse) {
  queue("attention", &Kernels::attention, q, k, v, shape, out, lse);
}

void QueuedKernels::convolve(T x, T w, T bias, const SequenceRows& rows, Out y) {
  queue("convolve", &Kernels::convolve, x, w, bias, rows, y);
}

void QueuedKernels::convolve_backward(T x, T w, T bias, const SequenceRows& rows, InOut dy, Out dx) {
  queue("convolve_backward", &Kernels::convolve_backward, x, w, bias, rows, dy, dx);
}

void QueuedKernels::convolve_backward_weight(T x, T dy, const SequenceRows& rows, InOut dw) {
  queue("convolve_backward_weight", &Kernels::convolve_backward_weight, x, dy, rows, dw);
}

void QueuedKernels::short_convolution(T bcx, T w, const SequenceRows& rows, Out y) {
  queue("short_convolution", &Kernels::short_convolution, bcx, w, rows, y);
}

void QueuedKernels::short_convolution_backward(T bcx, T w, T dy, const SequenceRows& rows, Out dbcx, Out y) {
  queue("short_convolution_backward", &Kernels::short_convolution_backward, bcx, w, dy, rows, dbcx, y);
}

void QueuedKernels::short_convolution_backward_weight(T bcx, T dy, const SequenceRows& rows, InOut dw) {
  queue("short_convolution_backward_weight", &Kernels::short_convolution_backward_weight, bcx, dy, rows, dw);
}

void QueuedKernels::state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, T workspace,
                                InOut state, Out y) {
  queue("state_space", &Kernels::state_space, in, shape, workspace, state, y);
}

void QueuedKernels::state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, T dy,
                                         T workspace, const StateSpaceGradients& out) {
  queue("state_space_backward", &Kernels::state_space_backward, in, shape, dy, workspace, out);
}

void QueuedKernels::attention_sink(T sinks, const AttentionShape& shape, InOut out, InOut lse) {
  queue("attention_sink", &Kernels::attention_sink, sinks, shape, out, lse);
}

void QueuedKernels::attention_sink_backward(T sinks, T lse, T delta, const AttentionShape& shape,
                                            InOut dsinks) {
  queue("attention_sink_backward", &Kernels::attention_sink_backward, sinks, lse, delta, shape, dsinks);
}

void QueuedKernels::attention_delta(T out, T dout, const AttentionShape& shape, Out delta) {
  queue("attention_delta", &Kernels::attention_delta, out, dout, shape, delta);
}

void QueuedKernels::attention_backward(T q, T k, T v, T dout, T lse, T delta, const AttentionShape& shape,
                                       Out dq, Out dk, Out dv) {
  queue("attention_backward", &Kernels::attention_backward, q, k, v, dout, lse, delta, shape, dq, dk, dv);
}

void QueuedKernels::embedding(T ids, T table, std::int64_t first_id, Out y) {
  queue("embedding", &Kernels::embedding, ids, table, first_id, y);
}

void QueuedKernels::embedding_backward(T ids, T dy, std::int64_t first_id, InOut dtable) {
  queue("embedding_backward", &Kernels::embedding_backward, ids, dy, first_id, dtable);
}

void QueuedKernels::combine_rows(T x, T places, T weights, Out y) {
  queue("combine_rows", &Kernels::combine_rows, x, places, weights, y);
}

void QueuedKernels::soft_cap(InOut x, double cap) { queue("soft_cap", &Kernels::soft_cap, x, cap); }

void QueuedKernels::row_max(T logits, Out max) { queue("row_max", &Kernels::row_max, logits, max); }

void QueuedKernels::exp_sum(InOut logits, T max, T targets, std::int64_t first_id, Out sum, Out target) {
  queue("exp_sum", &Kernels::exp_sum, logits, max, targets, first_id, sum, target);
}

void QueuedKernels::cross_entropy_backward(T p, T sum, T targets, std::int64_t first_id, double loss_scale,
                                           Out dlogits, const LogitsCap& cap) {
  queue("cross_entropy_backward", &Kernels::cross_entropy_backward, p, sum, targets, first_id, loss_scale,
        dlogits, cap);
}

void QueuedKernels::cross_entropy(InOut logits, T targets, double loss_scale, double cap, Out max, Out sum,
                                  Out target, Out dlogits) {
  queue("cross_entropy", &Kernels::cross_entropy, logits, targets, loss_scale, cap, max, sum, target,
        dlogits);
}

void QueuedKernels::merge_softmax(T parts, T targets, std::span<const std::int64_t> bounds, Out sum,
                                  Out target, Out scales, Out shares) {
  queue("merge_softmax", &Kernels::merge_softmax, parts, targets, bounds, sum, target, scales, shares);
}

void QueuedKernels::merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                                    std::span<const Tensor> of_targets, T targets, double factor, Out y) {
  queue("merge_gradients", &Kernels::merge_gradients, means, shares, of_targets, targets, factor, y);
}

void QueuedKernels::add_losses(T sum, T target, T targets, InOut loss) {
  queue("add_losses", &Kernels::add_losses, sum, target, targets, loss);
}

void QueuedKernels::add_number(T x, InOut y) { queue("add_number", &Kernels::add_number, x, y); }

void QueuedKernels::route(const TokenRouter& router, T logits, std::span<const double> bias, Out ids,
                          Out weights) {
  queue("route", &Kernels::route, router, logits, bias, ids, weights);
}

void QueuedKernels::weigh_routes(const TokenRouter& router, T logits, T ids, Out weights) {
  queue("weigh_routes", &Kernels::weigh_routes, router, logits, ids, weights);
}

void QueuedKernels::route_backward(const TokenRouter& router, T logits, T ids, T d_weights,
                                   const RouterLosses& losses, double loss_scale, Out d_logits) {
  queue("route_backward", &Kernels::route_backward, router, logits, ids, d_weights, losses, loss_scale,
        d_logits);
}

void QueuedKernels::add_router_losses(const TokenRouter& router, T logits, const RouterLosses& losses,
                                      InOut loss) {
  queue("add_router_losses", &Kernels::add_router_losses, router, logits, losses, loss);
}

void QueuedKernels::count_routed(const TokenRouter& router, T ids, std::int64_t scopes, Out counts) {
  queue("count_routed", &Kernels::count_routed, router, ids, scopes, counts);
}

void QueuedKernels::drop_over_capacity(T ids, T weights, const ExpertCapacity& capacity, Out kept) {
  queue("drop_over_capacity", &Kernels::drop_over_capacity, ids, weights, capacity, kept);
}

void QueuedKernels::sort_by_expert(T kept, Out places, Out tokens, Out counts) {
  queue("sort_by_expert", &Kernels::sort_by_expert, kept, places, tokens, counts);
}

void QueuedKernels::pack_choices(T ids, T weights, Out packed) {
  queue("pack_choices", &Kernels::pack_choices, ids, weights, packed);
}

void QueuedKernels::unpack_choices(T packed, std::span<const std::int64_t> rows, Out ids, Out weights) {
  queue("unpack_choices", &Kernels::unpack_choices, packed, rows, ids, weights);
}

void QueuedKernels::take_ids(T from, std::span<const std::int64_t> rows, Out to) {
  queue("take_ids", &Kernels::take_ids, from, rows, to);
}

void QueuedKernels::place_weights(T weights, T places, InOut placed) {
  queue("place_weights", &Kernels::place_weights, weights, places, placed);
}

void QueuedKernels::pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                                  std::span<const Philox> rounding, T gradient, Out packed) {
  queue("pack_gradient", &Kernels::pack_gradient, kind, bucket, part, rounding, gradient, packed);
}

void QueuedKernels::unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, T packed,
                                    bool accumulate, Out part_of_gradient) {
  queue("unpack_gradient", &Kernels::unpack_gradient, kind, bucket, part, packed, accumulate,
        part_of_gradient);
}

void QueuedKernels::take_largest(InOut x, std::int64_t first_index, Out values, Out indices) {
  queue("take_largest", &Kernels::take_largest, x, first_index, values, indices);
}

void QueuedKernels::add_at(T values, T indices, InOut sum) {
  queue("add_at", &Kernels::add_at, values, indices, sum);
}

void QueuedKernels::orthonormalize_rows(InOut x, const Philox& fresh) {
  queue("orthonormalize_rows", &Kernels::orthonormalize_rows, x, fresh);
}

void QueuedKernels::first_keys(T starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                               Out first) {
  queue("first_keys", &Kernels::first_keys, starts, first_position, stride, count, first);
}

}  // namespace echelon::checks
