#include "tensor/cuda/matmul_grouped.h"

#include <cstdint>

#include "base/error.h"
#include "tensor/column_product.h"
#include "tensor/cuda/cublas_types.h"
#include "tensor/cuda/matmul_cublaslt.h"
#include "tensor/device_stream.h"

namespace echelon {
namespace {

void expect_done(cublasStatus_t status, const char* what, int device) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail("device {}: {} failed: {}", device, what, cublasGetStatusString(status));
}

bool is_aligned(const Tensor& t) {
  const auto bits = reinterpret_cast<std::uintptr_t>(t.address()) |
                    static_cast<std::uintptr_t>(t.row_stride() * element_bytes(t.dtype()));
  return bits % 16 == 0;
}

}  // namespace

struct GroupedCublas::State {
  Arena& arena;
  const bool tf32;
  cublasHandle_t handle = nullptr;

  State(Arena& of, bool in_tf32) : arena(of), tf32(in_tf32) {}
  ~State() {
    if (handle != nullptr) cublasDestroy(handle);
  }
  int device() const { return arena.stream().device(); }
};

GroupedCublas::GroupedCublas(Arena& arena, const Tensor& workspace, bool tf32)
    : state_(std::make_unique<State>(arena, tf32)) {
  const int device = state_->device();
  arena.stream().driver().use(device);
  expect_done(cublasCreate(&state_->handle), "cuBLAS' beginning", device);
  expect_done(cublasSetStream(state_->handle, static_cast<cudaStream_t>(arena.stream().handle().handle)),
              "a stream for cuBLAS", device);
  expect_done(
      cublasSetWorkspace(state_->handle, workspace.address(), static_cast<std::size_t>(workspace.bytes())),
      "a workspace for cuBLAS", device);
  // Partial sums are combined in the type of the computation, so that a bf16 element is rounded once.
  expect_done(cublasSetMathMode(state_->handle,
                                static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                                          CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
              "the precision of cuBLAS' sums", device);
}
GroupedCublas::~GroupedCublas() = default;

bool GroupedCublas::takes(const MatrixProduct& p) {
  return CublasLt::takes(p) && p.a.numel() > 0 && p.b.numel() > 0 && p.c.numel() > 0 && is_aligned(p.a) &&
         is_aligned(p.b) && is_aligned(p.c);
}

std::vector<void*> GroupedCublas::addresses(std::span<const MatrixProduct* const> products) {
  std::vector<void*> all(3 * products.size());
  for (std::size_t i = 0; i < products.size(); ++i) {
    const ColumnProduct p = column_product(*products[i]);
    all[i] = p.first.tensor->address();
    all[products.size() + i] = p.second.tensor->address();
    all[2 * products.size() + i] = p.result.tensor->address();
  }
  return all;
}

#if CUBLAS_VERSION >= 120500
bool GroupedCublas::multiply(std::span<const MatrixProduct* const> products, void* const* there) {
  const std::size_t count = products.size();
  std::vector<cublasOperation_t> turn_first, turn_second;
  std::vector<std::int64_t> m, n, k, stride_first, stride_second, stride_result, ones(count, 1);
  // Of the two, the one in the computation's width is used.
  std::vector<float> alpha(count, 1), beta;
  std::vector<double> wide_alpha(count, 1), wide_beta;
  for (const MatrixProduct* product : products) {
    const ColumnProduct p = column_product(*product);
    turn_first.push_back(p.first.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    turn_second.push_back(p.second.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    m.push_back(p.result.rows);
    n.push_back(p.result.cols);
    k.push_back(p.first.transposed ? p.first.rows : p.first.cols);
    stride_first.push_back(p.first.stride);
    stride_second.push_back(p.second.stride);
    stride_result.push_back(p.result.stride);
    beta.push_back(product->accumulate ? 1.0f : 0.0f);
    wide_beta.push_back(product->accumulate ? 1.0 : 0.0);
  }
  const MatrixProduct& one = *products.front();
  const bool wide = one.c.dtype() == DType::f64;
  const void* const scale = wide ? static_cast<const void*>(wide_alpha.data()) : alpha.data();
  const void* const of_results = wide ? static_cast<const void*>(wide_beta.data()) : beta.data();
  const cudaDataType_t of_operands = cuda_type(one.a.dtype());
  State& s = *state_;
  s.arena.stream().driver().use(s.device());
  const cublasStatus_t status = cublasGemmGroupedBatchedEx_64(
      s.handle, turn_first.data(), turn_second.data(), m.data(), n.data(), k.data(), scale, there,
      of_operands, stride_first.data(), there + count, of_operands, stride_second.data(), of_results,
      there + 2 * count, cuda_type(one.c.dtype()), stride_result.data(), static_cast<std::int64_t>(count),
      ones.data(), compute_type(one, s.tf32));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  expect_done(status, "grouped_matmul", s.device());
  return true;
}
#else
bool GroupedCublas::multiply(std::span<const MatrixProduct* const>, void* const*) { return false; }
#endif

}  // namespace echelon
