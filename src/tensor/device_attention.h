// Attention that keeps its scores in registers, on devices with warps: bf16 on tensor cores, f32 on ordinary
// ones. DeviceKernels tries this first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tensor/kernels.h"
#include "tensor/rows/attention_delta.h"
#include "tensor/rows/lane_attention.h"
#include "tensor/rows/lane_attention_backward.h"
#include "tensor/rows/warp_attention.h"
#include "tensor/rows/warp_attention_backward.h"

namespace echelon {

template <class Launch>
class AttentionLaunch {
 public:
  AttentionLaunch(const Launch& launch, const AttentionShape& shape, const rows::AttentionSizes& sizes)
      : launch_(launch), shape_(shape), sizes_(sizes) {}

  // False, with nothing done, if this does not support the operands: see fits().
  bool attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse) {
    const auto with = [&]<class Kernel, class T>() {
      if (!has_memory<Kernel>()) return false;
      run("attention",
          Kernel{sizes_, matrix<T>(q), matrix<T>(k), matrix<T>(v), matrix<T>(out), numbers(lse)});
      return true;
    };
    if (fits<bf16>(256, {&q, &k, &v, &out}))
      return of_width([&]<int width, bool group>() {
        constexpr int strips = !group && width == 128 ? 2 : 1, keys = group || width == 64 ? 64 : 32;
        return with.template operator()<rows::WarpAttention<width, strips, keys, group>, bf16>();
      });
    if (fits<float>(128, {&q, &k, &v, &out}))
      return of_narrow_width([&]<int width>() {
        constexpr int wide = width == 64 ? 8 : 4;
        return with.template operator()<rows::LaneAttention<width, wide>, float>();
      });
    return false;
  }

  // Supports all queries and keys that are aligned like the others.
  bool delta(const Tensor& out, const Tensor& dout, const Tensor& delta) {
    const auto with = [&]<class T>(T) {
      using Kernel = rows::WarpAttentionDelta<T>;
      if (!are_whole<T>({&out, &dout}) || !Kernel::takes(sizes_)) return false;
      const Kernel kernel(sizes_, matrix<T>(out), matrix<T>(dout), numbers(delta));
      launch_.run("attention_delta", kernel.num_blocks(launch_.lanes()), kernel);
      return true;
    };
    return with(bf16()) || with(float());
  }

  bool backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout, const Tensor& lse,
                const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
    const auto with = [&]<class Queries, class Keys, class T>() {
      if (!has_memory<Queries>() || !has_memory<Keys>()) return false;
      run("attention_backward, queries",
          Queries{sizes_, matrix<T>(q), matrix<T>(k), matrix<T>(v), matrix<T>(dout), matrix<T>(dq),
                  numbers(lse), numbers(delta)});
      run("attention_backward, keys", Keys{sizes_, matrix<T>(q), matrix<T>(k), matrix<T>(v), matrix<T>(dout),
                                           matrix<T>(dk), matrix<T>(dv), numbers(lse), numbers(delta)});
      return true;
    };
    if (fits<bf16>(256, {&q, &k, &v, &dout, &dq, &dk, &dv}))
      return of_width([&]<int width, bool group>() {
        constexpr int strips = !group && width <= 128 ? 2 : 1;
        constexpr int keys = width == 256 || (width == 128 && !group) ? 32 : 64;
        // Of dk and dv a lane has registers for 192 columns at most, and then for the scores of few queries.
        constexpr int columns = width == 256 ? 128 : width,
                      queries = width == 192 || (width == 256 && !group) ? 32 : 64;
        return with
            .template operator()<rows::WarpAttentionBackwardQueries<width, strips, keys, group>,
                                 rows::WarpAttentionBackwardKeys<width, columns, 1, queries, group>, bf16>();
      });
    if (fits<float>(128, {&q, &k, &v, &dout, &dq, &dk, &dv}))
      return of_narrow_width([&]<int width>() {
        constexpr int wide = width == 64 ? 8 : 4;
        return with.template operator()<rows::LaneAttentionBackwardQueries<width, 4>,
                                        rows::LaneAttentionBackwardKeys<width, wide>, float>();
      });
    return false;
  }

 private:
  template <class T>
  static constexpr std::int64_t at_once = 16 / sizeof(T);  // elements in 16 bytes

  // What is supported: queries and keys at consecutive positions, no ALiBi, all of one type, blocks of whole
  // warps, heads of limited width and a multiple of 16 bytes, rows that start at multiples of 16 bytes, and
  // enough shared memory, which has_memory() checks.
  template <class T>
  bool fits(std::int64_t widest, std::initializer_list<const Tensor*> heads) const {
    return shape_.q_step == 1 && shape_.k_step == 1 && !shape_.alibi.is_used() &&
           shape_.head_dim % at_once<T> == 0 && shape_.head_dim <= widest && are_whole<T>(heads);
  }
  // Whether blocks are whole warps and rows start at multiples of 16 bytes.
  template <class T>
  bool are_whole(std::initializer_list<const Tensor*> heads) const {
    if (launch_.lanes() % rows::warp_lanes != 0) return false;
    for (const Tensor* x : heads)
      if (x->dtype() != dtype_of<T> || x->row_stride() % at_once<T> != 0 ||
          reinterpret_cast<std::uintptr_t>(matrix<T>(*x).data) % 16 != 0)
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
  template <class Call>
  bool of_narrow_width(const Call& call) const {
    if (shape_.head_dim <= 64) return call.template operator()<64>();
    return call.template operator()<128>();
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
  template <class T>
  rows::Matrix<T> matrix(const Tensor& t) const {
    return launch_.template matrix<T>(t);
  }
  float* numbers(const Tensor& t) const { return launch_.template data<float>(t); }

  const Launch& launch_;
  const AttentionShape& shape_;
  rows::AttentionSizes sizes_;
};

}  // namespace echelon
