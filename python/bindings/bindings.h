// The parts of the module, one for each subject; and what they share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/typing.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "base/progress.h"
#include "draw/gantt.h"
#include "schedule/timeline.h"

namespace echelon::python {

namespace nb = nanobind;
using namespace nb::literals;

void bind_errors(nb::module_& m);
void bind_spec(nb::module_& m);
void bind_schedule(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_runs(nb::module_& m);
void bind_checkpoint(nb::module_& m);

// A sentence with the flags of the command line as arguments of Python's.
std::string in_pythons_words(const std::string& message);

// How types name the equality of an object with whatever there is.
inline const nb::sig compared_with_anything("def __eq__(self, arg: object, /) -> bool");

// Of an object; equal ones have the same such text.
inline Py_hash_t hash_of(const std::string& text) { return nb::hash(nb::str(text.c_str(), text.size())); }

// Plain dicts, lists, numbers and texts of a JSON text, which is of one object.
using JsonObject = nb::typed<nb::dict, nb::str, nb::any>;
JsonObject from_json(const std::string& text);

// Runs `work` on a thread of its own, without Python's lock, while this thread hears Python's signals; what
// `work` throws is thrown here. At the first KeyboardInterrupt (or whatever else a signal's handler raises)
// `interrupt` is called, which asks the work to end; once it has ended, that is raised.
//
// No signal reaches the threads of the work: inside oneDNN's products a handler's frame would lie in the
// heap.
void run_apart(const std::function<void()>& work, const std::function<void()>& interrupt);

// The same for work that may ask whether a signal has come: `look` returns once this thread has looked, and
// so after `interrupt` where one had. (Otherwise this thread looks now and then.)
using Look = std::function<void()>;
void run_apart_looking(const std::function<void(const Look& look)>& work,
                       const std::function<void()>& interrupt);

// Thrown by work that is to end.
struct Interrupted {};

// The same for work that ends where it reports its progress.
void run_apart(const std::function<void(const Progress&)>& work);

// What the drawings take, of one timeline.
inline std::vector<Track> track(const std::string& title, const Timeline& timeline) {
  return {{title, "", timeline}};
}

}  // namespace echelon::python
