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

// Frees the handle with cuBLASLt's function for it.
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

// A matrix as cuBLASLt sees it (tensor/column_product.h).
struct LtMatrix {
  void* address;
  cudaDataType_t type;
  std::int64_t element_bytes, rows, cols, stride;
  bool transposed;

  // The largest power of two that divides the addresses of its columns, up to the alignment of every tensor
  // of an arena: beyond that it would depend on which block was free, and so would the algorithm and the
  // bits.
  std::uint32_t alignment() const {
    const auto bits =
        reinterpret_cast<std::uintptr_t>(address) | static_cast<std::uintptr_t>(stride * element_bytes) | 64;
    return static_cast<std::uint32_t>(bits & (~bits + 1));
  }
};

LtMatrix matrix_of(const ColumnMatrix& m) {
  const DType dtype = m.tensor->dtype();
  return {m.tensor->address(), cuda_type(dtype), element_bytes(dtype), m.rows, m.cols, m.stride,
          m.transposed};
}

cublasLtEpilogue_t lt_epilogue(ColumnEpilogue::Kind kind) {
  switch (kind) {
    case ColumnEpilogue::Kind::none:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case ColumnEpilogue::Kind::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case ColumnEpilogue::Kind::gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case ColumnEpilogue::Kind::bias_gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case ColumnEpilogue::Kind::gelu_slope:
      return CUBLASLT_EPILOGUE_DGELU;
    case ColumnEpilogue::Kind::sums_of_first:
      return CUBLASLT_EPILOGUE_BGRADA;
    case ColumnEpilogue::Kind::sums_of_second:
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  fail("internal error: no such epilogue");
}

struct LtEpilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  void *vector = nullptr, *beside = nullptr;
  std::int64_t stride = 0;  // of `beside`

  bool is_aligned() const {
    return (reinterpret_cast<std::uintptr_t>(vector) | reinterpret_cast<std::uintptr_t>(beside)) % 16 == 0 &&
           stride % 8 == 0;
  }
};

LtEpilogue epilogue_of(const ColumnEpilogue& e) {
  return {lt_epilogue(e.kind), e.vector == nullptr ? nullptr : e.vector->address(),
          e.beside == nullptr ? nullptr : e.beside->address(),
          e.beside == nullptr ? 0 : e.beside->row_stride()};
}

struct LtProduct {
  LtMatrix first, second, result;
  cublasComputeType_t compute;
  std::optional<LtMatrix> onto;  // what the product is added to: the result, or another matrix
  LtEpilogue epilogue = {};
  // For fp8 operands, on the device: the factors that restore their magnitudes.
  const float *scale_of_first = nullptr, *scale_of_second = nullptr;

  bool is_wide() const { return result.type == CUDA_R_64F; }
  const LtMatrix& before() const { return onto ? *onto : result; }
};

// What determines the choice of algorithm: equal shapes get the same algorithm, and so the same bits.
using Shape = std::array<std::int64_t, 19>;

Shape shape_of(const LtProduct& p) {
  return {p.first.rows,        p.first.cols,         p.second.rows,         p.second.cols,
          p.first.stride,      p.second.stride,      p.result.stride,       p.first.type,
          p.second.type,       p.result.type,        p.first.transposed,    p.second.transposed,
          p.first.alignment(), p.second.alignment(), p.result.alignment(),  p.epilogue.kind,
          p.epilogue.stride,   p.before().stride,    p.before().alignment()};
}

// Products of experts have a new shape in every step. A plan that is made again is the same.
constexpr std::size_t most_plans = 4096;

struct PreparedProduct {
  Operation operation;
  MatrixLayout a, b, c, d;
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
        workspace(of, MemoryCategory::other, DType::u8, {cublaslt_workspace_bytes + cublaslt_sums_bytes}) {
    arena.stream().driver().use(device());
    check_cublas(cublasLtCreate(&handle), "cuBLASLt's beginning", device());
  }
  ~State() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  int device() const { return arena.stream().device(); }
  // No value if there is no algorithm.
  std::optional<PreparedProduct> make_plan(const LtProduct& product) const;
  // Sets the addresses of scales and epilogue: they are this product's, while its plan may be used for others
  // too.
  void set_addresses(const Operation& operation, const LtProduct& product) const;
  bool multiply(const LtProduct& product);
};

CublasLt::CublasLt(Arena& arena, bool tf32) : state_(std::make_unique<State>(arena, tf32)) {}
CublasLt::~CublasLt() = default;

Tensor CublasLt::workspace() const { return state_->workspace.flat_range(0, cublaslt_workspace_bytes); }
Tensor CublasLt::room_for_sums() const {
  return state_->workspace.flat_range(cublaslt_workspace_bytes,
                                      cublaslt_workspace_bytes + cublaslt_sums_bytes);
}

bool CublasLt::takes(const MatrixProduct& p) {
  const DType a = p.a.dtype(), b = p.b.dtype(), c = p.c.dtype();
  return p.blocks.empty() && a == b && (a == DType::bf16 ? c == DType::bf16 || c == DType::f32 : c == a);
}

void CublasLt::State::set_addresses(const Operation& operation, const LtProduct& product) const {
  for (const auto& [which, address] : {std::pair<cublasLtMatmulDescAttributes_t, const void*>{
                                           CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.scale_of_first},
                                       {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.scale_of_second},
                                       {CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.epilogue.vector},
                                       {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.epilogue.beside}})
    if (address != nullptr)
      check_cublas(cublasLtMatmulDescSetAttribute(operation.get(), which, &address, sizeof address),
                   "an address for cuBLASLt", device());
}

std::optional<PreparedProduct> CublasLt::State::make_plan(const LtProduct& product) const {
  const cudaDataType_t scale_type = product.is_wide() ? CUDA_R_64F : CUDA_R_32F;
  const auto layout = [&](const LtMatrix& m) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(cublasLtMatrixLayoutCreate(&made, m.type, static_cast<std::uint64_t>(m.rows),
                                            static_cast<std::uint64_t>(m.cols), m.stride),
                 "a matrix for cuBLASLt", device());
    return MatrixLayout(made);
  };
  cublasLtMatmulDesc_t described = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&described, product.compute, scale_type), "a product for cuBLASLt",
               device());
  PreparedProduct plan{Operation(described),     layout(product.first),  layout(product.second),
                       layout(product.before()), layout(product.result), {}};
  const auto turned = [](const LtMatrix& m) { return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const auto describe = [&](cublasLtMatmulDescAttributes_t which, auto value) {
    check_cublas(cublasLtMatmulDescSetAttribute(described, which, &value, sizeof value),
                 "a product for cuBLASLt", device());
  };
  describe(CUBLASLT_MATMUL_DESC_TRANSA, turned(product.first));
  describe(CUBLASLT_MATMUL_DESC_TRANSB, turned(product.second));
  describe(CUBLASLT_MATMUL_DESC_EPILOGUE, product.epilogue.kind);
  if (product.epilogue.beside != nullptr)
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.epilogue.stride);
  set_addresses(plan.operation, product);

  cublasLtMatmulPreference_t preferred = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&preferred), "a choice of cuBLASLt", device());
  const Preference preference(preferred);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preferred, which, &value, sizeof value),
                 "a choice of cuBLASLt", device());
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(cublaslt_workspace_bytes));
  // Partial sums are combined in the type of the computation, so that an element is rounded once.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, product.first.alignment());
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, product.second.alignment());
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, product.before().alignment());
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, product.result.alignment());
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, described, plan.a.get(), plan.b.get(), plan.c.get(), plan.d.get(), preferred, 1, &best, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) return {};
  // An epilogue that it lacks for these types may be reported as an invalid value.
  if (status == CUBLAS_STATUS_INVALID_VALUE && product.epilogue.kind != CUBLASLT_EPILOGUE_DEFAULT) return {};
  check_cublas(status, "a choice of cuBLASLt", device());
  if (best.state != CUBLAS_STATUS_SUCCESS) return {};  // the rest is undefined then
  plan.algorithm = best.algo;
  return plan;
}

bool CublasLt::State::multiply(const LtProduct& product) {
  arena.stream().driver().use(device());
  const Shape shape = shape_of(product);
  auto plan = plans.find(shape);
  if (plan == plans.end()) {
    if (plans.size() == most_plans) plans.clear();  // queued work needs none of them
    plan = plans.emplace(shape, make_plan(product)).first;
  }
  if (!plan->second) return false;
  const float one = 1, zero = 0;
  const double wide_one = 1, wide_zero = 0;
  const bool wide = product.is_wide();
  const void* const alpha = wide ? static_cast<const void*>(&wide_one) : &one;
  const void* const beta = product.onto ? alpha : wide ? static_cast<const void*>(&wide_zero) : &zero;
  const PreparedProduct& prepared = *plan->second;
  set_addresses(prepared.operation, product);
  check_cublas(cublasLtMatmul(
                   handle, prepared.operation.get(), alpha, product.first.address, prepared.a.get(),
                   product.second.address, prepared.b.get(), beta, product.before().address, prepared.c.get(),
                   product.result.address, prepared.d.get(), &prepared.algorithm, workspace.address(),
                   cublaslt_workspace_bytes, static_cast<cudaStream_t>(arena.stream().handle().handle)),
               "matmul", device());
  return true;
}

bool CublasLt::multiply(const MatrixProduct& p, const Epilogue& epilogue) {
  const std::optional<FollowedProduct> followed = followed_product(p, epilogue);
  if (!followed || !is_exact_enough(followed->epilogue.kind, p.c.dtype())) return false;
  const ColumnProduct& product = followed->product;
  LtProduct made{matrix_of(product.first),
                 matrix_of(product.second),
                 matrix_of(product.result),
                 compute_type(p, state_->tf32),
                 {},
                 epilogue_of(followed->epilogue)};
  if (followed->onto) made.onto = matrix_of(*followed->onto);
  if (made.epilogue.kind != CUBLASLT_EPILOGUE_DEFAULT && (made.is_wide() || !made.epilogue.is_aligned()))
    return false;
  return state_->multiply(made);
}

bool CublasLt::takes_fp8(const Fp8Product& p) {
  constexpr std::int64_t together = 16;  // fp8 elements that tensor cores read at once
  const MatrixProduct& of = p.product;
  const std::int64_t m = of.c.rows(), n = of.c.cols();
  const std::int64_t k = of.ta == Transpose::yes ? of.a.rows() : of.a.cols();
  return m > 0 && n > 0 && k > 0 && m % together == 0 && n % together == 0 && k % together == 0;
}

bool CublasLt::multiply_fp8(const Fp8Product& p, const float* scale_a, const float* scale_b) {
  const ColumnMatrix c = column_product(p.product).result;
  const std::int64_t k = p.product.ta == Transpose::yes ? p.product.a.rows() : p.product.a.cols();
  // Lines along k, which are columns to cuBLASLt; it multiplies with the first operand transposed.
  const auto codes = [&](const Tensor& room, Fp8 format, std::int64_t lines, bool transposed) {
    return LtMatrix{room.address(), format == Fp8::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, 1, k, lines, k,
                    transposed};
  };
  LtProduct made{codes(p.room_b, p.formats.b, c.rows, true),
                 codes(p.room_a, p.formats.a, c.cols, false),
                 matrix_of(c),
                 CUBLAS_COMPUTE_32F,
                 {},
                 {},
                 scale_b,
                 scale_a};
  if (p.product.accumulate) made.onto = made.result;
  return state_->multiply(made);
}

}  // namespace echelon
