#include "base/error.h"

#include "bindings/bindings.h"
#include "spec/plan_refusal.h"

namespace echelon::python {
namespace {

// The classes are Python's (echelon/_errors.py), which reads field, value and legal out of the sentence.
void raise(const char* name, const std::string& message) {
  nb::object type = nb::module_::import_("echelon._errors").attr(name);
  nb::object error = type(nb::str(message.c_str(), message.size()));
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const RequestError& error) {
    raise("RequestError", error.what());
  } catch (const CommError& error) {
    raise("CommError", error.what());
  } catch (const RunError& error) {
    raise("RunError", error.what());
  } catch (const InvariantError& error) {
    raise("InvariantError", error.what());
  }
}

}  // namespace

std::string in_pythons_words(const std::string& message) {
  return nb::cast<std::string>(nb::module_::import_("echelon._errors").attr("in_pythons_words")(message));
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace echelon::python
