// Tensors on disk: checkpoints and safetensors files. The bytes of a tensor that is stored whole are not read
// here: Python has them as a view of the file, which is mapped.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>

#include "base/error.h"
#include "bindings/bindings.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/checkpoint_parts.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/safetensors.h"

namespace echelon::python {
namespace {

constexpr StoredType all_types[] = {
    StoredType::boolean, StoredType::u8,   StoredType::i8,  StoredType::u16,     StoredType::i16,
    StoredType::f16,     StoredType::bf16, StoredType::u32, StoredType::i32,     StoredType::f32,
    StoredType::u64,     StoredType::i64,  StoredType::f64, StoredType::f8_e4m3, StoredType::f8_e5m2};

StoredType type_of(const std::string& name) {
  for (StoredType type : all_types)
    if (name == stored_type_name(type)) return type;
  refuse("--dtype {}: safetensors has no such type", name);
}

// The file that a header was read of, whatever has its name later. What is written to it stays in this
// process.
class Mapped {
 public:
  explicit Mapped(const SafetensorsFile& file) : bytes_(static_cast<std::size_t>(file.file().size())) {
    at_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                 file.file().descriptor(), 0);
    if (at_ == MAP_FAILED) fail("{}: cannot be mapped: {}", file.path(), std::strerror(errno));
  }
  ~Mapped() { ::munmap(at_, bytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  std::uint8_t* at(std::int64_t begin) const { return static_cast<std::uint8_t*>(at_) + begin; }

 private:
  std::size_t bytes_;
  void* at_;
};
using MappedFile = std::shared_ptr<const Mapped>;

// Where a tensor lies, whole.
struct Place {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  MappedFile file;
  std::int64_t begin = 0, bytes = 0;
};

Place place_of(const SafetensorsFile& file, const MappedFile& mapped, const StoredTensor& tensor) {
  return {tensor.name, stored_type_name(tensor.type),     tensor.shape,
          mapped,      file.data_begin() + tensor.offset, tensor.bytes()};
}

std::vector<Place> places_in(const std::string& path) {
  const SafetensorsFile file(path);
  const auto mapped = std::make_shared<const Mapped>(file);
  std::vector<Place> places;
  for (const StoredTensor& tensor : file.tensors()) places.push_back(place_of(file, mapped, tensor));
  return places;
}

// A checkpoint of ours. Of each logical tensor it says where it lies, if it is stored whole, or puts its
// parts together.
class Stored {
 public:
  explicit Stored(const std::string& path) : info_(read_checkpoint_info(path)), reader_(info_.path) {
    for (const ParamSpec& spec : all_parameters(info_.model)) specs_[spec.name] = spec;
    const Manifest manifest = read_manifest(info_.path);
    for (const auto& [name, sums] : manifest.checksums) {
      const SafetensorsFile file((std::filesystem::path(info_.path) / name).string());
      const auto mapped = std::make_shared<const Mapped>(file);
      for (const StoredTensor& tensor : file.tensors()) {
        const TensorPart part = parse_part(tensor.name);
        types_[part.tensor] = tensor.type;
        if (part.whole) places_[part.tensor] = place_of(file, mapped, tensor);
      }
    }
  }

  Stored(const Stored&) = delete;  // a reader of many tensors has their files open
  Stored& operator=(const Stored&) = delete;

  const CheckpointInfo& info() const { return info_; }
  std::vector<std::string> names() const { return reader_.names(); }
  std::optional<Place> place(const std::string& name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? std::nullopt : std::optional(found->second);
  }
  std::string dtype(const std::string& name) const { return stored_type_name(at(name)); }
  std::vector<std::int64_t> shape(const std::string& name) const { return spec(name).shape; }
  // Put together, and held against its checksums.
  std::vector<std::byte> read(const std::string& name) {
    const StoredType type = at(name);
    for (DType dtype : {DType::f32, DType::f64, DType::bf16})
      if (stored_type(dtype) == type) return reader_.read(name, spec(name), dtype);
    refuse("{}: {} is {}, which no checkpoint of a training holds", info_.path, name, stored_type_name(type));
  }

 private:
  StoredType at(const std::string& name) const {
    const auto found = types_.find(name);
    if (found == types_.end()) refuse("{}: has no tensor {}", info_.path, name);
    return found->second;
  }
  // Of a moment that of its parameter.
  ParamSpec spec(const std::string& name) const {
    if (const auto found = places_.find(name); found != places_.end() && !specs_.contains(name)) {
      ParamSpec whole;
      whole.name = name;
      whole.shape = found->second.shape;
      return whole;
    }
    std::string parameter = name;
    for (const char* moment : {".exp_avg", ".exp_avg_sq"})
      if (parameter.ends_with(moment)) parameter.resize(parameter.size() - std::strlen(moment));
    const auto found = specs_.find(parameter);
    if (found == specs_.end()) refuse("{}: has no tensor {} of the model", info_.path, name);
    return found->second;
  }

  CheckpointInfo info_;
  CheckpointReader reader_;
  std::map<std::string, ParamSpec> specs_;
  std::map<std::string, StoredType> types_;
  std::map<std::string, Place> places_;
};

nb::dlpack::dtype dlpack_type(StoredType type) {
  using Code = nb::dlpack::dtype_code;
  Code code = Code::Float;
  switch (type) {
    case StoredType::boolean:
      code = Code::Bool;
      break;
    case StoredType::u8:
    case StoredType::u16:
    case StoredType::u32:
    case StoredType::u64:
      code = Code::UInt;
      break;
    case StoredType::i8:
    case StoredType::i16:
    case StoredType::i32:
    case StoredType::i64:
      code = Code::Int;
      break;
    case StoredType::bf16:
      code = Code::Bfloat;
      break;
    case StoredType::f16:
    case StoredType::f32:
    case StoredType::f64:
      break;
    case StoredType::f8_e4m3:
      code = Code::Float8_E4M3FN;
      break;
    case StoredType::f8_e5m2:
      code = Code::Float8_E5M2;
      break;
  }
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * stored_type_bytes(type)), 1};
}

using Bytes1d = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MappedBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
using ReadBytes1d = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A view; it keeps the place, which keeps the file mapped.
MappedBytes raw_bytes(const Place& place) {
  return MappedBytes(place.file->at(place.begin), {static_cast<std::size_t>(place.bytes)});
}

using AnyArray = nb::ndarray<nb::array_api>;

// The bytes of `array`, which lives as long, as an array of another type and shape, for from_dlpack().
AnyArray viewed(const nb::object& array, const std::string& dtype, const std::vector<std::int64_t>& shape) {
  const auto bytes = nb::cast<Bytes1d>(array);
  const StoredType type = type_of(dtype);
  std::vector<std::size_t> sizes;
  std::size_t total = static_cast<std::size_t>(stored_type_bytes(type));
  for (std::int64_t size : shape) {
    sizes.push_back(static_cast<std::size_t>(size));
    total *= sizes.back();
  }
  if (total != bytes.size())
    refuse("--shape: of {} bytes in this type, and there are {}", total, bytes.size());
  return AnyArray(bytes.data(), sizes.size(), sizes.data(), array, nullptr, dlpack_type(type),
                  nb::device::cpu::value, 0);
}

void write_safetensors(
    const std::string& path,
    const std::vector<std::tuple<std::string, std::string, std::vector<std::int64_t>, ReadBytes1d>>& tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<StoredTensor> declared;
  std::set<std::string> names;
  for (const auto& [name, dtype, shape, bytes] : tensors) {
    if (name == "__metadata__")
      refuse("--tensors: {} is no tensor's name: the format has it for the metadata", name);
    if (!names.insert(name).second) refuse("--tensors: {} is there twice", name);
    declared.push_back({name, type_of(dtype), shape});
    if (declared.back().bytes() != static_cast<std::int64_t>(bytes.size()))
      refuse("--tensors: {} has {} bytes where its shape has {}", name, bytes.size(),
             declared.back().bytes());
  }
  const nb::gil_scoped_release release;
  SafetensorsWriter writer(path, std::move(declared), metadata);
  for (const auto& [name, dtype, shape, bytes] : tensors) writer.write(name, bytes.data(), bytes.size());
  writer.finish();
}

}  // namespace

void bind_checkpoint(nb::module_& m) {
  nb::class_<Place>(m, "_Place")
      .def_ro("name", &Place::name)
      .def_ro("dtype", &Place::dtype)
      .def_ro("shape", &Place::shape)
      .def_prop_ro("raw", &raw_bytes);
  m.def("_places_in", &places_in, "path"_a);
  m.def("_viewed", &viewed, "array"_a, "dtype"_a, "shape"_a);
  m.def("_write_safetensors", &write_safetensors, "path"_a, "tensors"_a, "metadata"_a);
  m.def(
      "_holds_checkpoint",
      [](const std::string& path) { return is_checkpoint(path) || !list_checkpoints(path).empty(); },
      "path"_a);
  m.def(
      "_check_checkpoint",
      [](const std::string& path) {
        CheckpointContents c;
        run_apart([&](const Progress& progress) { c = check_checkpoint(path, progress); });
        return std::map<std::string, std::int64_t>{
            {"tensors", c.tensors}, {"parts", c.parts}, {"files", c.files}, {"bytes", c.bytes}};
      },
      "path"_a);
  m.def(
      "_diff_checkpoints",
      [](const std::string& a, const std::string& b) {
        std::map<std::string, double> differences;
        run_apart([&](const Progress& progress) {
          for (const TensorDifference& d : diff_checkpoints(a, b, progress)) differences[d.name] = d.rel_diff;
        });
        return differences;
      },
      "path"_a, "other"_a);
  nb::class_<Stored>(m, "_Stored")
      .def(nb::init<const std::string&>(), "path"_a)
      .def_prop_ro("path", [](const Stored& s) { return s.info().path; })
      .def_prop_ro("step", [](const Stored& s) { return s.info().step; })
      .def_prop_ro("seed", [](const Stored& s) { return s.info().seed; })
      .def_prop_ro("tokens", [](const Stored& s) { return s.info().tokens; })
      .def_prop_ro("dtype", [](const Stored& s) { return std::string(dtype_name(s.info().dtype)); })
      .def_prop_ro("model", [](const Stored& s) { return s.info().model; })
      .def_prop_ro("names", &Stored::names)
      .def("place", &Stored::place, "name"_a)
      .def("dtype_of", &Stored::dtype, "name"_a)
      .def("shape_of", &Stored::shape, "name"_a)
      .def(
          "read",
          [](Stored& s, const std::string& name) {
            std::vector<std::byte> bytes;
            {
              const nb::gil_scoped_release release;
              bytes = s.read(name);
            }
            return nb::bytearray(bytes.data(), bytes.size());
          },
          "name"_a);
}

}  // namespace echelon::python
