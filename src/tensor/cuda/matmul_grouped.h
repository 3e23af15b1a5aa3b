// Products of any shapes in one launch, by cuBLAS (12.5 and later).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "tensor/kernels.h"

namespace echelon {

class GroupedCublas {
 public:
  // Uses the arena's stream, and `workspace`, which must outlive this and may be shared by others on that
  // stream.
  GroupedCublas(Arena& arena, const Tensor& workspace, bool tf32);
  ~GroupedCublas();
  GroupedCublas(const GroupedCublas&) = delete;
  GroupedCublas& operator=(const GroupedCublas&) = delete;

  // Whether a product may be in a group: types as in CublasLt::takes(), nothing empty, and all rows aligned
  // to 16 bytes.
  static bool takes(const MatrixProduct& product);
  // The addresses that multiply() needs on the device: of first operands, second operands and results.
  static std::vector<void*> addresses(std::span<const MatrixProduct* const> products);
  // All products must have the same types and be taken; `there` is where their addresses are on the device.
  // Returns false, having done nothing, if cuBLAS has no such group, for these types or at all. RunError on
  // failure.
  bool multiply(std::span<const MatrixProduct* const> products, void* const* there);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
