// Kernels of a device with blocks of many lanes (tensor/rows/team.h): those of rows and tokens, and those
// that need other forms than the host's loops. A backend that multiplies matrices with a vendor's library
// overrides matmul. Nothing here depends on the vendor: tests run it in threads of the host.
//
// In addition to tensor/launching.h, a Launch has
//   most_shared_bytes()   the most shared memory that a block may request
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "spec/numerics.h"
#include "tensor/device_attention.h"
#include "tensor/row_kernels.h"
#include "tensor/rows/codecs.h"
#include "tensor/rows/orthonormalize.h"
#include "tensor/rows/selection.h"
#include "tensor/rows/tile_product.h"
#include "tensor/rows/tiled_attention.h"
#include "tensor/token_kernels.h"

namespace echelon {

template <class Launch>
class DeviceKernels : public RowKernels<Launch, TokenKernels<Launch>> {
 public:
  // With invariant numerics no bf16 products use tensor cores, since the order of their sums is not
  // documented.
  explicit DeviceKernels(Launch launch, Numerics numerics = Numerics::ordinary)
      : RowKernels<Launch, TokenKernels<Launch>>(std::move(launch)), numerics_(numerics) {}

  // In tiles, each sum in the order of k: an element's bits do not depend on shapes.
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override {
    const MatrixProduct product{a, ta, b, tb, c, accumulate};
    multiply_in_tiles({&product, 1});
  }
  void grouped_matmul(std::span<const MatrixProduct> products) override { multiply_in_tiles(products); }

  // In tiles, with the epilogue in the pass that stores them, if all tensors have one type. Column sums are
  // over what a column's tiles read.
  bool fused_matmul(const MatrixProduct& p, const Epilogue& e) override {
    const DType type = p.c.dtype();
    if (p.a.dtype() != type || p.b.dtype() != type || e.column_sums.defined() || p.accumulate) return false;
    if (p.c.numel() == 0) return true;
    const Depths depths({&p});
    const auto ranges = this->launch().upload(std::span<const rows::DepthRange>(depths.ranges));
    const auto ends = this->launch().upload(std::span<const std::int64_t>(depths.ends));
    with_stored_type(p.c, [&, this]<class T>(T) {
      const auto beside = [this](const Tensor& x) { return x.defined() ? matrix<T>(x) : rows::Matrix<T>(); };
      const auto kernel =
          tiled<T, T, T>(p, depths.parts.front(), ranges.data(), ends.data(),
                         rows::StoreFollowed<T>{data<T>(e.bias), beside(e.added), e.activation,
                                                beside(e.activated), beside(e.hidden)});
      this->launch().run("fused_matmul", kernel.num_tiles(), kernel,
                         kernel.shared_bytes(depths.parts.front().blocks));
    });
    return true;
  }

  // Computes codes and scales for each call, each operand's in the orientation that its product reads: only
  // the call knows which products these are, and nothing says for how long an operand stays unchanged.
  void fp8_matmul(std::span<const Fp8Product> products) override {
    std::vector<Fp8Product> in_bf16;
    for (const Fp8Product& p : products)
      if (!takes_codes(p) || !multiply_as_codes(p)) in_bf16.push_back(p);
    if (!in_bf16.empty()) KernelBackend::fp8_matmul(in_bf16);
  }

  void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    std::map<DType, std::vector<const SumsOf*>> by_type;
    for (const SumsOf& one : all) by_type[one.x.dtype()].push_back(&one);
    for (const auto& [type, of_type] : by_type)
      with_stored_type(of_type.front()->x, [&, this]<class T>(T) {
        std::vector<rows::EachRow<rows::SumSquares<T>>> kernels;
        std::vector<std::int64_t> blocks;
        for (const SumsOf* one : of_type) {
          kernels.push_back({{data<T>(one->x), one->x.numel(), block, data<double>(one->sums)}});
          blocks.push_back(one->sums.numel());
        }
        this->template run_together<typename decltype(kernels)::value_type>("sum_squares", kernels, blocks);
      });
  }

  void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    std::vector<rows::SumInOrder> kernels;
    std::vector<std::int64_t> blocks;
    for (const SumsOf& one : all) {
      kernels.push_back({data<double>(one.x), one.x.numel(), block, data<double>(one.sums)});
      blocks.push_back(kernels.back().num_blocks(this->launch().lanes()));
    }
    this->template run_together<rows::SumInOrder>("sum_in_order", kernels, blocks);
  }

  // Stochastically rounded weights get a launch each, since each has its own runs of logical elements.
  void adamw_of_all(std::span<const AdamWUpdate> updates) override {
    std::vector<const AdamWUpdate*> whole, split;
    for (const AdamWUpdate& u : updates)
      if (u.step.rounding != nullptr)
        this->adamw(u.p, u.g, u.m, u.v, u.step, u.remainder);
      else
        (u.remainder.defined() ? split : whole).push_back(&u);
    update_together<float, rows::SplitWeights>(split, [this](const AdamWUpdate& u) {
      return rows::SplitWeights{data<bf16>(u.p), data<std::int16_t>(u.remainder)};
    });
    if (!whole.empty())
      with_float_type(whole.front()->p, [&, this]<class F>(F) {
        using Whole = rows::WholeWeights<F>;
        update_together<F, Whole>(whole, [this](const AdamWUpdate& u) { return Whole{data<F>(u.p)}; });
      });
  }

  bool all_finite(const Tensor& x) override { return largest_of(x, rows::NotFinite()) == 0; }
  double largest(const Tensor& x) override { return largest_of(x, rows::Magnitude()); }

  ExactSum sum_squares_exactly(const Tensor& x, double scale) override {
    const std::int64_t each = elements_at_once(x.numel()), blocks = (x.numel() + each - 1) / each;
    const auto sums = this->launch().template scratch<std::uint64_t>(2 * blocks);
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("sum_squares_exactly", blocks,
                     rows::ExactSquares<T>{data<T>(x), x.numel(), each, scale, sums.data()});
    });
    const std::vector<std::uint64_t> parts = this->launch().read(sums.data(), 2 * blocks);
    ExactSum total;
    for (std::size_t i = 0; i + 1 < parts.size(); i += 2) {
      total.high += parts[i];
      total.low += parts[i + 1];
    }
    return total;
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    if (numerics_ == Numerics::ordinary && by_warps(shape).attention(q, k, v, out, lse)) return;
    with_stored_type(out, [&, this]<class T>(T) {
      using Kernel = rows::TiledAttention<T>;
      run_tiles<Kernel>("attention", shape, [&](const rows::AttentionSizes& sizes) {
        return Kernel{sizes, matrix<T>(q), matrix<T>(k), matrix<T>(v), matrix<T>(out), data<Wide<T>>(lse)};
      });
    });
  }

  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                       Out delta) override {
    if (numerics_ == Numerics::ordinary && by_warps(shape).delta(out, dout, delta)) return;
    with_stored_type(out, [&, this]<class T>(T) {
      const rows::AttentionDelta<T> kernel{sizes_of(shape, 1), matrix<T>(out), matrix<T>(dout),
                                           data<Wide<T>>(delta)};
      this->launch().run_rows("attention_delta", kernel.num_blocks(), shape.head_dim, kernel);
    });
  }

  // In two passes, each of which recomputes the scores: one for the gradients of queries, one for those of
  // keys and values, so that a single block computes each sum.
  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    const bool all = dq->defined() && dk->defined();
    if (all && numerics_ == Numerics::ordinary &&
        by_warps(shape).backward(q, k, v, dout, lse, delta, dq, dk, dv))
      return;
    with_stored_type(dout, [&, this]<class T>(T) {
      using F = Wide<T>;
      using Queries = rows::TiledAttentionBackwardQueries<T>;
      using Keys = rows::TiledAttentionBackwardKeys<T>;
      const auto slopes = [&](const rows::AttentionSizes& sizes) {
        return rows::AttentionSlopes<T>{sizes, data<F>(lse), data<F>(delta)};
      };
      if (dq->defined())
        run_tiles<Queries>("attention_backward, queries", shape, [&](const rows::AttentionSizes& sizes) {
          return Queries{slopes(sizes), matrix<T>(q),    matrix<T>(k),
                         matrix<T>(v),  matrix<T>(dout), matrix<T>(dq)};
        });
      if (!dk->defined()) return;
      run_tiles<Keys>("attention_backward, keys", shape, [&](const rows::AttentionSizes& sizes) {
        return Keys{slopes(sizes),   matrix<T>(q),  matrix<T>(k), matrix<T>(v),
                    matrix<T>(dout), matrix<T>(dk), matrix<T>(dv)};
      });
    });
  }

  void cross_entropy(InOut logits, const Tensor& targets, double loss_scale, double cap, Out max, Out sum,
                     Out target, Out dlogits) override {
    this->with_pair(
        logits, dlogits, [&, this]<class F, class T>(const rows::Matrix<F>& x, const rows::Matrix<T>& d) {
          if constexpr (std::is_same_v<F, Wide<F>>)
            this->launch().run("cross_entropy", x.rows,
                               rows::CrossEntropy<F, T>{x, data<std::int32_t>(targets), F(loss_scale), F(cap),
                                                        data<F>(max), data<F>(sum), data<F>(target), d});
        });
  }

  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) override {
    this->each_row("count_routed", counts->numel(),
                   rows::CountRouted{router.rules(), data<std::int32_t>(ids), ids.rows() / scopes,
                                     data<std::int32_t>(counts)});
  }

  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                          Out kept) override {
    with_float_type(weights, [&, this]<class F>(F) {
      using Kernel = rows::DropOverCapacity<F>;
      this->launch().run(
          "drop_over_capacity", capacity.scopes * capacity.experts,
          Kernel{data<std::int32_t>(ids), data<F>(weights), ids.numel() / capacity.scopes, capacity.experts,
                 capacity.each, capacity.policy == DropPolicy::probability, data<std::int32_t>(kept)},
          Kernel::shared_bytes(this->launch().lanes()));
    });
  }

  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) override {
    const std::int64_t experts = counts->numel();
    auto* const count = data<std::int32_t>(counts);
    this->each_row("sort_by_expert, counts", experts,
                   rows::CountCopies{data<std::int32_t>(kept), kept.numel(), count});
    this->launch().run(
        "sort_by_expert", experts + 1,
        rows::PlaceCopies{data<std::int32_t>(kept), kept.numel(), kept.cols(), experts, tokens->numel(),
                          count, data<std::int32_t>(places), data<std::int32_t>(tokens)},
        rows::PlaceCopies::shared_bytes(this->launch().lanes()));
  }

  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed) override {
    auto* const out = reinterpret_cast<std::byte*>(data<std::uint8_t>(packed));
    with_float_type(gradient, [&, this]<class F>(F) {
      const F* const x = data<F>(gradient);
      if (kind == CompressionKind::bf16)
        return this->each_element("pack_gradient", 1, part.size(), rows::PackBf16<F>{x + part.begin, out});
      std::vector<PhiloxKey> keys;
      for (const Philox& section : rounding) keys.push_back(section.key());
      const auto of_sections = this->launch().upload(std::span<const PhiloxKey>(keys));
      const std::vector<rows::PackedBlock> blocks = packed_blocks(kind, bucket, part);
      const auto all = this->launch().upload(std::span<const rows::PackedBlock>(blocks));
      this->each_row("pack_gradient", std::ssize(blocks),
                     rows::PackBlock<F>{kind, x, all.data(), of_sections.data(), out});
    });
  }
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient) override {
    const auto* const in = reinterpret_cast<const std::byte*>(data<std::uint8_t>(packed));
    with_float_type(part_of_gradient, [&, this]<class F>(F) {
      F* const y = data<F>(part_of_gradient);
      if (kind == CompressionKind::bf16)
        return this->each_element("unpack_gradient", 1, part.size(), rows::UnpackBf16<F>{in, accumulate, y});
      const std::vector<rows::PackedBlock> blocks = packed_blocks(kind, bucket, part);
      const auto all = this->launch().upload(std::span<const rows::PackedBlock>(blocks));
      this->each_row("unpack_gradient", std::ssize(blocks),
                     rows::UnpackBlock<F>{kind, in, all.data(), accumulate, y, part.begin});
    });
  }
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) override {
    const std::int64_t take = values->numel();
    with_float_type(x, [&, this]<class F>(F) {
      using S = rows::Selection<F>;
      const rows::VectorRuns<F> of{data<F>(x), x->numel(), elements_at_once(x->numel())};
      const auto selection = this->launch().template scratch<S>(1);
      const auto counts = this->launch().template scratch<std::int64_t>(of.runs() * S::base);
      for (int digit = S::digits - 1; digit >= 0; --digit) {
        this->each_row("take_largest, counts", of.runs(),
                       rows::CountDigits<F>{of, digit, selection.data(), counts.data()});
        this->launch().run("take_largest, digit", 1,
                           rows::ChooseDigit<F>{counts.data(), of.runs(), take, digit, selection.data()});
      }
      this->each_row("take_largest, selected", of.runs(),
                     rows::CountSelected<F>{of, selection.data(), counts.data()});
      using Move = rows::MoveSelected<F>;
      this->launch().run("take_largest", of.runs(),
                         Move{of, selection.data(), counts.data(), first_index, data<F>(values),
                              data<std::int32_t>(indices)},
                         Move::shared_bytes(this->launch().lanes()));
    });
  }
  void add_at(const Tensor& values, const Tensor& indices, InOut sum) override {
    with_float_type(values, [&, this]<class F>(F) {
      this->each_element("add_at", 1, values.numel(),
                         rows::AddAt<F>{data<F>(values), data<std::int32_t>(indices), data<F>(sum)});
    });
  }
  void orthonormalize_rows(InOut x, const Philox& fresh) override {
    with_float_type(x, [&, this]<class F>(F) {
      this->launch().run("orthonormalize_rows", 1,
                         rows::OrthonormalizeRows<F>::of(data<F>(x), x->rows(), x->cols(), fresh.key()));
    });
  }

 protected:
  // fp8 products of a vendor's library. Codes lie in the rooms: op(a)'s rows, and op(b)'s columns, one after
  // another; the scales, on the device, restore their magnitudes. If it has no product for these (false),
  // rounded operands are multiplied in bf16.
  virtual bool takes_codes(const Fp8Product&) const { return false; }
  virtual bool multiply_codes(const Fp8Product&, const float*, const float*) { return false; }

  template <class T>
  rows::Matrix<T> matrix(const Tensor& t) const {
    return this->launch().template matrix<T>(t);
  }
  // Null for an undefined tensor.
  template <class T>
  T* data(const Tensor& t) const {
    return t.defined() ? this->launch().template data<T>(t) : nullptr;
  }

  // One launch for each combination of types.
  void multiply_in_tiles(std::span<const MatrixProduct> products) {
    std::map<std::array<DType, 3>, std::vector<const MatrixProduct*>> by_types;
    for (const MatrixProduct& p : products)
      if (p.c.numel() > 0) by_types[{p.a.dtype(), p.b.dtype(), p.c.dtype()}].push_back(&p);
    for (const auto& [types, of_types] : by_types) multiply_tiles(of_types);
  }

 private:
  template <class F, class Weights, class WeightsOf>
  void update_together(const std::vector<const AdamWUpdate*>& updates, const WeightsOf& weights_of) {
    using Kernel = rows::EachRun<rows::AdamW<Weights, F>>;
    std::vector<Kernel> kernels;
    std::vector<std::int64_t> blocks;
    for (const AdamWUpdate* u : updates) {
      kernels.emplace_back(rows::AdamW<Weights, F>{weights_of(*u), data<F>(u->g), data<F>(u->m),
                                                   data<F>(u->v), this->template numbers_of<F>(u->step)},
                           1, u->p.numel());
      blocks.push_back(kernels.back().num_blocks(this->launch().lanes()));
    }
    this->template run_together<Kernel>("adamw", kernels, blocks);
  }

  bool multiply_as_codes(const Fp8Product& p) {
    const auto scale_a =
                   this->cast_to_fp8(p.product.a, p.product.ta == Transpose::yes, p.formats.a, p.room_a),
               scale_b = this->cast_to_fp8(p.product.b, p.product.tb == Transpose::no, p.formats.b, p.room_b);
    return multiply_codes(p, &scale_a.data()->back, &scale_b.data()->back);
  }

  // The depths (ranges of k) over which products sum: of all products, one after another; each part has its
  // own ends.
  struct Depths {
    struct Part {
      std::int64_t first_range, first_end, blocks;
    };
    std::vector<rows::DepthRange> ranges;
    std::vector<std::int64_t> ends;
    std::vector<Part> parts;

    explicit Depths(const std::vector<const MatrixProduct*>& products) {
      for (const MatrixProduct* p : products) {
        parts.push_back({std::ssize(ranges), std::ssize(ends), 0});
        for (const auto& block : p->blocks) {
          for (const Range& range : block) ranges.push_back({range.begin, range.end});
          ends.push_back(std::ssize(ranges) - parts.back().first_range);
        }
        const std::int64_t depth = p->ta == Transpose::yes ? p->a.rows() : p->a.cols();
        if (p->blocks.empty()) ranges.push_back({0, depth}), ends.push_back(1);
        parts.back().blocks = std::ssize(ends) - parts.back().first_end;
      }
    }
  };
  // `ranges` and `ends`: of all products, on the device.
  template <class A, class B, class C, class Store>
  rows::TiledProduct<A, B, C, Store> tiled(const MatrixProduct& p, const typename Depths::Part& part,
                                           const rows::DepthRange* ranges, const std::int64_t* ends,
                                           const Store& store) const {
    return {matrix<A>(p.a),
            p.ta == Transpose::yes,
            matrix<B>(p.b),
            p.tb == Transpose::yes,
            matrix<C>(p.c),
            store,
            ranges + part.first_range,
            ends + part.first_end,
            part.blocks};
  }

  void multiply_tiles(const std::vector<const MatrixProduct*>& products) {
    const Depths depths(products);
    const auto all_ranges = this->launch().upload(std::span<const rows::DepthRange>(depths.ranges));
    const auto all_ends = this->launch().upload(std::span<const std::int64_t>(depths.ends));
    const auto with_types = [&, this]<class A, class B, class C>(A, B, C) {
      using Kernel = rows::TiledProduct<A, B, C>;
      std::vector<Kernel> kernels;
      std::vector<std::int64_t> first_tiles;
      std::int64_t tiles = 0, most_blocks = 0;
      for (std::size_t i = 0; i < products.size(); ++i) {
        first_tiles.push_back(tiles);
        kernels.push_back(tiled<A, B, C>(*products[i], depths.parts[i], all_ranges.data(), all_ends.data(),
                                         rows::StoreSum<C>{products[i]->accumulate}));
        tiles += kernels.back().num_tiles();
        most_blocks = std::max(most_blocks, depths.parts[i].blocks);
      }
      const std::size_t shared = Kernel::shared_bytes(most_blocks);
      if (kernels.size() == 1) return this->launch().run("matmul", tiles, kernels.front(), shared);
      const auto all = this->launch().upload(std::span<const Kernel>(kernels));
      const auto firsts = this->launch().upload(std::span<const std::int64_t>(first_tiles));
      this->launch().run("grouped_matmul", tiles,
                         rows::TiledProducts<A, B, C>{all.data(), firsts.data(), std::ssize(kernels)},
                         shared);
    };
    with_stored_type(products.front()->a, [&]<class A>(A a) {
      with_stored_type(products.front()->b, [&]<class B>(B b) {
        with_stored_type(products.front()->c, [&]<class C>(C c) {
          if constexpr (std::is_same_v<Wide<A>, Wide<B>> && std::is_same_v<Wide<A>, Wide<C>>)
            with_types(a, b, c);
        });
      });
    });
  }

  static std::vector<rows::PackedBlock> packed_blocks(CompressionKind kind, const GradientBucket& bucket,
                                                      Range part) {
    std::vector<rows::PackedBlock> blocks;
    std::int64_t byte = 0;
    for_each_block(bucket, part, [&](const GradientSection& section, Range block, Range piece) {
      blocks.push_back({block.begin, block.size(), piece.begin, piece.size(), byte,
                        &section - bucket.sections.data(), piece.begin - section.range.begin});
      byte += static_cast<std::int64_t>(sizeof(float)) + piece.size() * quantized_element_bytes(kind);
    });
    return blocks;
  }

  // Enough elements per block to keep the number of blocks small.
  static std::int64_t elements_at_once(std::int64_t count) {
    constexpr std::int64_t least = 4096, most_blocks = 1024;
    const std::int64_t each = (count + most_blocks - 1) / most_blocks;
    return each < least ? least : each;
  }

  template <class Measure>
  double largest_of(const Tensor& x, const Measure& measure) {
    double most = 0;
    if (x.numel() == 0) return most;
    // Contiguous tensors are divided anew.
    const std::int64_t each = elements_at_once(x.numel()), count = x.numel();
    with_stored_type(x, [&, this]<class T>(T) {
      const rows::Matrix<T> m = matrix<T>(x);
      const std::int64_t blocks = x.contiguous() ? (count + each - 1) / each : m.rows;
      const auto found = this->launch().template scratch<double>(blocks);
      if (x.contiguous())
        this->each_row("largest", blocks,
                       rows::LargestOfRun<T, Measure>{m.data, count, each, measure, found.data()});
      else
        this->each_row("largest", blocks, rows::LargestOfRow<T, Measure>{m, measure, found.data()});
      for (const double of_block : this->launch().read(found.data(), blocks))
        most = rows::LargerOrNaN()(most, of_block);
    });
    return most;
  }

  static rows::AttentionSizes sizes_of(const AttentionShape& s, int tile, const std::int32_t* first_keys) {
    return {s.batch,        s.q_len,
            s.kv_len,       s.num_heads,
            s.num_kv_heads, static_cast<int>(s.head_dim),
            s.q_offset,     s.q_step,
            s.k_step,       s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len,
            s.scale,        s.cap,
            s.alibi,        s.accumulate,
            first_keys,     tile};
  }
  rows::AttentionSizes sizes_of(const AttentionShape& s, int tile) const {
    return sizes_of(s, tile, data<std::int32_t>(s.first_keys));
  }

  AttentionLaunch<Launch> by_warps(const AttentionShape& shape) const {
    return {this->launch(), shape, sizes_of(shape, 1)};
  }

  // Runs make(sizes) with the largest tile whose shared memory a block may have.
  template <class Kernel, class Make>
  void run_tiles(const char* name, const AttentionShape& shape, const Make& make) const {
    for (const int tile : {32, 16, 8, 4}) {
      const std::size_t bytes = Kernel::shared_bytes(tile, static_cast<int>(shape.head_dim));
      if (bytes > this->launch().most_shared_bytes()) continue;
      const Kernel kernel = make(sizes_of(shape, tile));
      return this->launch().run(name, kernel.num_blocks(), kernel, bytes);
    }
    refuse("head dim {}: more than a block of this accelerator has shared memory for; legal: up to 256",
           shape.head_dim);
  }

  const Numerics numerics_;
};

}  // namespace echelon
