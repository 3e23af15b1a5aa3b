#include "tensor/cuda/matmul_cublaslt.h"

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "tensor/column_product.h"
#include "tensor/cuda/cublas_types.h"
#include "tensor/device_stream.h"

namespace echelon {
namespace {

void check_cublas(cublasStatus_t status, const char* what, int device) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail("device {}: {} failed: {}", device, what, cublasLtGetStatusString(status));
}

// Given back by the function that cuBLASLt has for it.
template <class Handle, cublasStatus_t (*destroy)(Handle)>
class Owned {
 public:
  explicit Owned(Handle handle = nullptr) : handle_(handle) {}
  ~Owned() {
    if (handle_ != nullptr) destroy(handle_);
  }
  Owned(Owned&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Handle get() const { return handle_; }

 private:
  Handle handle_;
};
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// The powers of two that the beginning of the rows of a matrix is a multiple of, up to 256.
std::uint32_t alignment_of(const Tensor& t) {
  const auto bits = reinterpret_cast<std::uintptr_t>(t.address()) |
                    static_cast<std::uintptr_t>(t.row_stride() * element_bytes(t.dtype())) | 256;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

// What decides which algorithm is taken: with the same, the same one, and so the same bits.
using Shape = std::array<std::int64_t, 14>;

struct PreparedProduct {
  Operation operation;
  MatrixLayout a, b, c;
  cublasLtMatmulAlgo_t algorithm;
};

}  // namespace

struct CublasLt::State {
  Arena& arena;
  const bool tf32;
  cublasLtHandle_t handle = nullptr;
  Tensor workspace;
  std::map<Shape, std::optional<PreparedProduct>> plans = {};

  State(Arena& of, bool in_tf32)
      : arena(of),
        tf32(in_tf32),
        workspace(of, MemoryCategory::other, DType::u8, {cublaslt_workspace_bytes}) {
    arena.stream().driver().use(device());
    check_cublas(cublasLtCreate(&handle), "cuBLASLt's beginning", device());
  }
  ~State() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  int device() const { return arena.stream().device(); }
  // Nothing where it has no algorithm.
  std::optional<PreparedProduct> make_plan(const MatrixProduct& p) const;
};

CublasLt::CublasLt(Arena& arena, bool tf32) : state_(std::make_unique<State>(arena, tf32)) {}
CublasLt::~CublasLt() = default;

const Tensor& CublasLt::workspace() const { return state_->workspace; }

bool CublasLt::takes(const MatrixProduct& p) {
  const DType a = p.a.dtype(), b = p.b.dtype(), c = p.c.dtype();
  return p.blocks.empty() && a == b && (a == DType::bf16 ? c == DType::bf16 || c == DType::f32 : c == a);
}

std::optional<PreparedProduct> CublasLt::State::make_plan(const MatrixProduct& p) const {
  const cudaDataType_t scale_type = p.c.dtype() == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
  const cublasComputeType_t compute = compute_type(p, tf32);
  const ColumnProduct product = column_product(p);
  const auto layout = [&](const ColumnMatrix& m) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(
        cublasLtMatrixLayoutCreate(&made, cuda_type(m.tensor->dtype()), static_cast<std::uint64_t>(m.rows),
                                   static_cast<std::uint64_t>(m.cols), m.stride),
        "a matrix for cuBLASLt", device());
    return MatrixLayout(made);
  };
  cublasLtMatmulDesc_t described = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&described, compute, scale_type), "a product for cuBLASLt", device());
  PreparedProduct plan{
      Operation(described), layout(product.first), layout(product.second), layout(product.result), {}};
  const auto turned = [](const ColumnMatrix& m) { return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasOperation_t of_first = turned(product.first), of_second = turned(product.second);
  for (const auto& [which, value] :
       {std::pair{CUBLASLT_MATMUL_DESC_TRANSA, of_first}, std::pair{CUBLASLT_MATMUL_DESC_TRANSB, of_second}})
    check_cublas(cublasLtMatmulDescSetAttribute(described, which, &value, sizeof value),
                 "a product for cuBLASLt", device());

  cublasLtMatmulPreference_t preferred = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&preferred), "a choice of cuBLASLt", device());
  const Preference preference(preferred);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preferred, which, &value, sizeof value),
                 "a choice of cuBLASLt", device());
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(cublaslt_workspace_bytes));
  // Parts of a sum meet in what it is computed in, so that an element is rounded once.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(*product.first.tensor));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(*product.second.tensor));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.c));
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, described, plan.a.get(), plan.b.get(), plan.c.get(), plan.c.get(), preferred, 1, &best, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) return {};
  check_cublas(status, "a choice of cuBLASLt", device());
  plan.algorithm = best.algo;
  return plan;
}

bool CublasLt::multiply(const MatrixProduct& p) {
  const auto stride = [](const Tensor& t) { return t.row_stride(); };
  const Shape shape{p.a.rows(),
                    p.a.cols(),
                    p.b.rows(),
                    p.b.cols(),
                    stride(p.a),
                    stride(p.b),
                    stride(p.c),
                    static_cast<std::int64_t>(p.a.dtype()),
                    static_cast<std::int64_t>(p.c.dtype()),
                    p.ta == Transpose::yes,
                    p.tb == Transpose::yes,
                    alignment_of(p.a),
                    alignment_of(p.b),
                    alignment_of(p.c)};
  State& s = *state_;
  s.arena.stream().driver().use(s.device());
  auto plan = s.plans.find(shape);
  if (plan == s.plans.end()) plan = s.plans.emplace(shape, s.make_plan(p)).first;
  if (!plan->second) return false;
  const float one = 1, zero = 0;
  const double wide_one = 1, wide_zero = 0;
  const bool wide = p.c.dtype() == DType::f64;
  const void* const alpha = wide ? static_cast<const void*>(&wide_one) : &one;
  const void* const beta = p.accumulate ? alpha : wide ? static_cast<const void*>(&wide_zero) : &zero;
  const PreparedProduct& prepared = *plan->second;
  const ColumnProduct product = column_product(p);
  check_cublas(cublasLtMatmul(s.handle, prepared.operation.get(), alpha, product.first.tensor->address(),
                              prepared.a.get(), product.second.tensor->address(), prepared.b.get(), beta,
                              p.c.address(), prepared.c.get(), p.c.address(), prepared.c.get(),
                              &prepared.algorithm, s.workspace.address(), cublaslt_workspace_bytes,
                              static_cast<cudaStream_t>(s.arena.stream().handle().handle)),
               "matmul", s.device());
  return true;
}

}  // namespace echelon
