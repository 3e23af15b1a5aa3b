// Products of any shapes in one launch, by cuBLAS (12.5 and later have it).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "tensor/kernels.h"

namespace echelon {

class GroupedCublas {
 public:
  // On the arena's stream, with `workspace`, which outlives this and which others on that stream may use too.
  GroupedCublas(Arena& arena, const Tensor& workspace, bool tf32);
  ~GroupedCublas();
  GroupedCublas(const GroupedCublas&) = delete;
  GroupedCublas& operator=(const GroupedCublas&) = delete;

  // Whether it may stand in a group: types as CublasLt::takes(), nothing empty, and memory that begins, with
  // each of its rows, at multiples of 16 bytes.
  static bool takes(const MatrixProduct& product);
  // The addresses that multiply() wants on the device: of first operands, second operands and results.
  static std::vector<void*> addresses(std::span<const MatrixProduct* const> products);
  // All of one kind of types and taken; `there` is where their addresses are on the device. False, and
  // nothing done, where cuBLAS has no such group: of these types, or at all. RunError where it fails.
  bool multiply(std::span<const MatrixProduct* const> products, void* const* there);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
