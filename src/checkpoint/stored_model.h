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

// One of them, of floats of any type.
class StoredNumbers {
 public:
  StoredNumbers(const SafetensorsFile& file, const StoredTensor& tensor) : file_(&file), tensor_(&tensor) {}

  std::int64_t numel() const { return tensor_->numel(); }
  // Elements [begin, begin + out.size()), each rounded once: straight from the file where they are F there.
  // F is float, double or bf16.
  template <class F>
  void read(std::int64_t begin, std::span<F> out) const;
  // All of them, exactly.
  std::vector<double> all() const;

 private:
  const SafetensorsFile* file_;
  const StoredTensor* tensor_;
};

// Safe to share by threads.
class StoredModel {
 public:
  // RequestError naming the file that is missing or no such one.
  explicit StoredModel(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const std::string* find(const std::string& name) const;  // nullptr when there is none
  std::set<std::string> names() const;
  bool has(StoredType type) const;
  const std::vector<std::int64_t>& shape(const std::string& name) const;  // of one that is there
  // RequestError where it has another shape, or no floats that are read.
  StoredNumbers numbers(const std::string& name, const std::vector<std::int64_t>& shape) const;
  // Whether both have the same numbers; one that is none is like no other.
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
  // So many of its rows lie side by side, and the next ones `step` rows on; 0: all.
  std::int64_t run = 0, step = 0;
  // Or the one of so many parts of an expert, which is the row; the elements of these lie in turn, or part
  // behind part, and those of the matrix column after column. 0: none.
  std::int64_t expert_parts = 0, part = 0;
  bool in_turn = true;
};

// A parameter as the model has it: rows after rows.
class StoredParameter {
 public:
  // `places`: of the rows, among those that the file has of it; empty: in their order. The file's numbers are
  // `less` than the parameter's.
  StoredParameter(const StoredNumbers& numbers, const StoredPlace& place, std::vector<std::int64_t> shape,
                  std::vector<std::int64_t> places, double less);

  std::int64_t numel() const { return rows_ * width_; }
  // Whether it is read whole or not at all: its elements are scattered in the file.
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
