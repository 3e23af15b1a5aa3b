#include "tensor/cuda/kernels_cuda.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "spec/tf32.h"
#include "tensor/cuda/cuda_launch.cuh"
#include "tensor/cuda/matmul_cublaslt.h"
#include "tensor/cuda/matmul_grouped.h"
#include "tensor/device_kernels.h"
#include "tensor/even_product.h"

namespace echelon {

extern template class AttentionLaunch<CudaLaunch>;                       // attention_cuda.cu
extern template class TokenKernels<CudaLaunch>;                          // tokens_cuda.cu
extern template class RowKernels<CudaLaunch, TokenKernels<CudaLaunch>>;  // rows_cuda.cu

CudaLaunch::CudaLaunch(Arena& arena) : arena_(&arena) {
  const auto attribute = [device = arena.stream().device()](cudaDeviceAttr which, const char* what) {
    int value = 0;
    if (const cudaError_t error = cudaDeviceGetAttribute(&value, which, device); error != cudaSuccess)
      fail("device {}: {} is not known: {}", device, what, cudaGetErrorString(error));
    return value;
  };
  const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, "its shared memory");
  most_shared_bytes_ = static_cast<std::size_t>(bytes) - beside_shared_bytes;
  // Compute capability 10.0 has other instructions, and only code compiled for 9.0a contains them.
  has_warpgroups_ =
      WARPGROUPS_COMPILED && attribute(cudaDevAttrComputeCapabilityMajor, "its compute capability") == 9;
}

void CudaLaunch::allow_shared(const char* name, const void* kernel) const {
  if (allowed_shared_->contains(kernel)) return;
  const auto expect = [&](cudaError_t error) {
    if (error != cudaSuccess)
      fail("device {}: kernel {} cannot have more shared memory: {}", arena_->stream().device(), name,
           cudaGetErrorString(error));
  };
  cudaFuncAttributes kernels{};
  expect(cudaFuncGetAttributes(&kernels, kernel));
  const std::size_t most = most_shared_bytes_ + beside_shared_bytes - kernels.sharedSizeBytes;
  expect(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)));
  allowed_shared_->insert(kernel);
}

namespace {

class CudaKernels final : public DeviceKernels<CudaLaunch> {
 public:
  CudaKernels(Arena& arena, const PrecisionRecipe& precision, Numerics numerics)
      : DeviceKernels<CudaLaunch>(CudaLaunch(arena), numerics) {
    if (numerics != Numerics::ordinary) return;
    cublas_ = std::make_unique<CublasLt>(arena, multiplies_in_tf32(precision));
    groups_ = std::make_unique<GroupedCublas>(arena, cublas_->workspace(), multiplies_in_tf32(precision));
  }

  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override {
    multiply({a, ta, b, tb, c, accumulate});
  }
  // Products that cuBLASLt does not take are multiplied in tiles; if it lacks the epilogue, passes follow its
  // product.
  bool fused_matmul(const MatrixProduct& p, const Epilogue& e) override {
    if (!cublas_ || !CublasLt::takes(p)) return DeviceKernels<CudaLaunch>::fused_matmul(p, e);
    if (p.a.numel() == 0 || p.c.numel() == 0) return false;
    Epilogue made = e;
    if (e.column_sums.defined())
      made.column_sums =
          e.column_sums.beside(MemoryCategory::other, e.column_sums.dtype(), e.column_sums.shape());
    if (cublas_->multiply(p, made)) {
      if (e.column_sums.defined()) add(made.column_sums, e.column_sums);
      if (e.hidden.defined()) activate(e.activation, e.hidden, {}, e.hidden);
      return true;
    }
    if (!e.activated.defined() || !e.bias.defined() || !cublas_->multiply(p, {.bias = e.bias})) return false;
    activate(e.activation, p.c, {}, e.activated);
    return true;
  }
  // One launch for each combination of types, by cuBLAS or in tiles; products that only cuBLASLt takes get
  // one launch each.
  void grouped_matmul(std::span<const MatrixProduct> products) override {
    if (!cublas_) return multiply_in_tiles(products);
    std::map<std::pair<DType, DType>, std::vector<const MatrixProduct*>> groups;  // by operands and result
    std::vector<MatrixProduct> in_tiles;
    for (const MatrixProduct& p : products)
      if (GroupedCublas::takes(p))
        groups[{p.a.dtype(), p.c.dtype()}].push_back(&p);
      else if (!multiply_whole(p))
        in_tiles.push_back(p);
    for (const auto& [types, group] : groups)
      if (group.size() == 1 || !multiply_group(group))
        for (const MatrixProduct* p : group)
          if (!multiply_whole(*p)) in_tiles.push_back(*p);
    multiply_in_tiles(in_tiles);
  }

 protected:
  bool takes_codes(const Fp8Product& p) const override { return cublas_ && CublasLt::takes_fp8(p); }
  bool multiply_codes(const Fp8Product& p, const float* scale_a, const float* scale_b) override {
    return cublas_->multiply_fp8(p, scale_a, scale_b);
  }

 private:
  void multiply(const MatrixProduct& p) {
    if (!cublas_ || !multiply_whole(p)) multiply_in_tiles({&p, 1});
  }
  // False if cuBLASLt does not take it.
  bool multiply_whole(const MatrixProduct& p) {
    if (p.a.numel() == 0 || p.c.numel() == 0 || !CublasLt::takes(p)) return false;
    if (!is_cut_evenly(p)) return cublas_->multiply(p);
    const auto multiply_part = [this](const MatrixProduct& part) {
      if (!cublas_->multiply(part)) multiply_in_tiles({&part, 1});
    };
    const auto round = [this](const Tensor& sums, const Tensor& result) { copy(sums, result); };
    const Tensor room = cublas_->room_for_sums();
    EvenProduct(room, multiply_part, round).run(p);
    return true;
  }
  bool multiply_group(const std::vector<const MatrixProduct*>& group) {
    const std::vector<void*> addresses = GroupedCublas::addresses(group);
    const auto there = launch().upload(std::span<void* const>(addresses));
    return groups_->multiply(group, there.data());
  }

  std::unique_ptr<CublasLt> cublas_;  // under ordinary numerics, and
  std::unique_ptr<GroupedCublas> groups_;
};

}  // namespace

std::pair<int, int> least_compiled_capability() {
  constexpr std::array compiled{__CUDA_ARCH_LIST__};  // 800, 900
  const int least = *std::min_element(compiled.begin(), compiled.end());
  return {least / 100, least / 10 % 10};
}

std::shared_ptr<KernelBackend> make_cuda_kernels(Arena& arena, const PrecisionRecipe& precision,
                                                 Numerics numerics) {
  return std::make_shared<CudaKernels>(arena, precision, numerics);
}

}  // namespace echelon
