// Attention of bf16 on tensor cores, where a device has them for it: DeviceKernels asks here first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tensor/kernels.h"
#include "tensor/rows/attention_delta.h"
#include "tensor/rows/warp_attention.h"
#include "tensor/rows/warp_attention_backward.h"

namespace echelon {

template <class Launch>
class WarpAttentionLaunch {
 public:
  WarpAttentionLaunch(const Launch& launch, const AttentionShape& shape, const rows::AttentionSizes& sizes)
      : launch_(launch), shape_(shape), sizes_(sizes) {}

  // False, and nothing is done, for what is not for tensor cores: fits().
  bool attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse) {
    if (!fits({&q, &k, &v, &out})) return false;
    return of_width([&]<int width, bool group>() {
      constexpr int strips = !group && width == 128 ? 2 : 1, keys = group || width == 64 ? 64 : 32;
      using Kernel = rows::WarpAttention<width, strips, keys, group>;
      if (!has_memory<Kernel>()) return false;
      run("attention", Kernel{sizes_, matrix(q), matrix(k), matrix(v), matrix(out), numbers(lse)});
      return true;
    });
  }

  // Of any queries and keys; not on tensor cores, but by what is aligned, as the others are.
  bool delta(const Tensor& out, const Tensor& dout, const Tensor& delta) {
    if (!are_whole({&out, &dout}) || !rows::WarpAttentionDelta::takes(sizes_)) return false;
    const rows::WarpAttentionDelta kernel(sizes_, matrix(out), matrix(dout), numbers(delta));
    launch_.run("attention_delta", kernel.num_blocks(launch_.lanes()), kernel);
    return true;
  }

  bool backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout, const Tensor& lse,
                const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
    if (!fits({&q, &k, &v, &dout, &dq, &dk, &dv})) return false;
    return of_width([&]<int width, bool group>() {
      constexpr int strips = !group && width <= 128 ? 2 : 1;
      constexpr int keys = width == 256 || (width == 128 && !group) ? 32 : 64;
      using Queries = rows::WarpAttentionBackwardQueries<width, strips, keys, group>;
      // Of dk and dv a lane has registers for 192 columns at most, and then for the scores of few queries.
      constexpr int columns = width == 256 ? 128 : width,
                    queries = width == 192 || (width == 256 && !group) ? 32 : 64;
      using Keys = rows::WarpAttentionBackwardKeys<width, columns, 1, queries, group>;
      if (!has_memory<Queries>() || !has_memory<Keys>()) return false;
      run("attention_backward, queries", Queries{sizes_, matrix(q), matrix(k), matrix(v), matrix(dout),
                                                 matrix(dq), numbers(lse), numbers(delta)});
      run("attention_backward, keys", Keys{sizes_, matrix(q), matrix(k), matrix(v), matrix(dout), matrix(dk),
                                           matrix(dv), numbers(lse), numbers(delta)});
      return true;
    });
  }

 private:
  static constexpr std::int64_t at_once = 8;  // elements of bf16: 16 bytes

  // The one rule: queries and keys that are neighbours, bf16, blocks of whole warps, heads up to 256 that are
  // a multiple of 8, rows that begin at multiples of 16 bytes, and as much shared memory as the kernels ask
  // for, which has_memory() says.
  bool fits(std::initializer_list<const Tensor*> heads) const {
    return shape_.q_step == 1 && shape_.k_step == 1 && shape_.head_dim % at_once == 0 &&
           shape_.head_dim <= 256 && are_whole(heads);
  }
  // Whole warps, and rows of bf16 that begin at multiples of 16 bytes.
  bool are_whole(std::initializer_list<const Tensor*> heads) const {
    if (launch_.lanes() % rows::warp_lanes != 0) return false;
    for (const Tensor* x : heads)
      if (x->dtype() != DType::bf16 || x->row_stride() % at_once != 0 ||
          reinterpret_cast<std::uintptr_t>(matrix(*x).data) % (at_once * sizeof(bf16)) != 0)
        return false;
    return true;
  }
  template <class Call>
  bool of_width(const Call& call) const {
    const bool group = launch_.has_warpgroups() && launch_.lanes() == 4 * rows::warp_lanes;
    return group ? of_width<true>(call) : of_width<false>(call);
  }
  template <bool group, class Call>
  bool of_width(const Call& call) const {
    if (shape_.head_dim <= 64) return call.template operator()<64, group>();
    if (shape_.head_dim <= 128) return call.template operator()<128, group>();
    if (shape_.head_dim <= 192) return call.template operator()<192, group>();
    return call.template operator()<256, group>();
  }
  template <class Kernel>
  std::size_t bytes() const {
    return Kernel::shared_bytes(launch_.lanes());
  }
  template <class Kernel>
  bool has_memory() const {
    return bytes<Kernel>() <= launch_.most_shared_bytes();
  }
  template <class Kernel>
  void run(const char* name, Kernel kernel) const {
    kernel.s.tile = Kernel::tile_of(launch_.lanes());
    kernel.s.heads_together = kernel.heads_together();
    launch_.run(name, kernel.num_blocks(), kernel, bytes<Kernel>());
  }
  rows::Matrix<bf16> matrix(const Tensor& t) const { return launch_.template matrix<bf16>(t); }
  float* numbers(const Tensor& t) const { return launch_.template data<float>(t); }

  const Launch& launch_;
  const AttentionShape& shape_;
  rows::AttentionSizes sizes_;
};

}  // namespace echelon
