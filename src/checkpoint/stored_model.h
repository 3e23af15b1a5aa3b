// The tensors of all files of a model in Hugging Face's layout, and how parameters are read from them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace echelon {

inline constexpr const char* single_file = "model.safetensors";
inline constexpr const char* index_file = "model.safetensors.index.json";

// A tensor of floats of any type.
class StoredNumbers {
 public:
  StoredNumbers(const SafetensorsFile& file, const StoredTensor& tensor) : file_(&file), tensor_(&tensor) {}

  std::int64_t numel() const { return tensor_->numel(); }
  // Elements [begin, begin + out.size()), each rounded once; read directly if they are stored as F. F is
  // float, double or bf16.
  template <class F>
  void read(std::int64_t begin, std::span<F> out) const;
  // All elements, exactly.
  std::vector<double> all() const;

 private:
  const SafetensorsFile* file_;
  const StoredTensor* tensor_;
};

// Threads may share it.
class StoredModel {
 public:
  // RequestError naming a file that is missing or is no safetensors file.
  explicit StoredModel(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const std::string* find(const std::string& name) const;  // nullptr if there is none
  std::set<std::string> names() const;
  bool has(StoredType type) const;
  const std::vector<std::int64_t>& shape(const std::string& name) const;  // the tensor must exist
  // RequestError if it has another shape, or a type that is not read as floats.
  StoredNumbers numbers(const std::string& name, const std::vector<std::int64_t>& shape) const;
  // Whether both have the same numbers; NaN equals nothing.
  bool equal(const std::string& a, const std::string& b, const std::vector<std::int64_t>& shape) const;

 private:
  std::string directory_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> places_;
};

// Where a parameter is in the files.
struct StoredPlace {
  std::string name;
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::int64_t first_row = 0;
  // `run` of its rows are consecutive, and the next ones follow `step` rows later; 0: all rows are
  // consecutive.
  std::int64_t run = 0, step = 0;
  // Or it is part `part` of the `expert_parts` parts of an expert, which is a row of the tensor: their
  // elements alternate, or one part follows another, and the matrix is stored column by column. 0: none of
  // this.
  std::int64_t expert_parts = 0, part = 0;
  bool in_turn = true;
};

// A parameter in the model's order: row by row.
class StoredParameter {
 public:
  // `places`: the places of its rows among those that the file has of it; empty: in order. `less` is added to
  // the file's numbers.
  StoredParameter(const StoredNumbers& numbers, const StoredPlace& place, std::vector<std::int64_t> shape,
                  std::vector<std::int64_t> places, double less);

  std::int64_t numel() const { return rows_ * width_; }
  // Its elements are scattered in the file, so it can only be read as a whole.
  bool is_scattered() const { return place_.expert_parts > 0; }
  // Elements [begin, begin + out.size()), each rounded once.
  template <class F>
  void read(std::int64_t begin, std::span<F> out) const;

 private:
  template <class F>
  void read_as_stored(std::int64_t begin, std::span<F> out) const;
  template <class F>
  void read_scattered(std::span<F> out) const;
  std::int64_t row_in_file(std::int64_t row) const;

  StoredNumbers numbers_;
  StoredPlace place_;
  std::vector<std::int64_t> places_;
  std::int64_t rows_, width_;
  double less_;
};

}  // namespace echelon
