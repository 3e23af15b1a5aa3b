// Models, machines, plans, memory and traffic.
#include <algorithm>

#include "base/error.h"
#include "bindings/bindings.h"
#include "checkpoint/hugging_face.h"
#include "plan/workload.h"
#include "schedule/pipeline_layout.h"
#include "spec/machine.h"
#include "spec/model_spec.h"
#include "spec/plan_fields.h"
#include "spec/software.h"
#include "train/account_json.h"

namespace echelon::python {
namespace {

const nb::sig of_name_or_path("def __init__(self, name: str | os.PathLike[str]) -> None");

std::string text_of_name(const nb::object& name) {
  const auto text = nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(name));
  if (text.find('\0') != std::string::npos) refuse("--name: it has a character of code 0");
  return text;
}

// Pickled, and copied, as its file.
template <class T>
void add_pickling(nb::class_<T>& type, T (*from_toml)(const std::string& text, const std::string& where)) {
  type.def("__getstate__", [](const T& one) { return to_toml(one); });
  type.def("__setstate__",
           [from_toml](T& at, const std::string& text) { new (&at) T(from_toml(text, "the pickle")); });
}

// Equal as its file, so that what was copied is equal to what it was copied from.
template <class T>
void add_equality(nb::class_<T>& type) {
  type.def(
      "__eq__", [](const T& a, const T& b) { return to_toml(a) == to_toml(b); }, nb::is_operator(),
      compared_with_anything);
  type.def("__hash__", [](const T& one) { return hash_of(to_toml(one)); });
}

std::string name_of_family(const ModelSpec& model) { return std::string(name_of(model.family)); }

void bind_model(nb::module_& m) {
  nb::class_<ParamSpec>(m, "Parameter", "One parameter of a model: its Hugging Face name and logical shape.")
      .def_ro("name", &ParamSpec::name)
      .def_ro("shape", &ParamSpec::shape)
      .def_prop_ro("numel", &ParamSpec::numel)
      .def_ro("frozen", &ParamSpec::frozen, "Training leaves it as it is.")
      .def_prop_ro(
          "shard_dim",
          [](const ParamSpec& p) { return p.shard_dim < 0 ? std::optional<int>() : p.shard_dim; },
          "The dimension that tensor parallelism cuts; None: whole on every rank.")
      .def("__repr__", [](const ParamSpec& p) {
        return fmt::format("<Parameter {} {}>", p.name, nb::repr(nb::cast(p.shape)).c_str());
      });
  nb::class_<ModelSpec> models(m, "Model", "A transformer as data: its sizes, its family, its parameters.");
  add_pickling(models, &model_from_toml);
  models
      .def(
          "__init__",
          [](ModelSpec* at, const nb::object& name) { new (at) ModelSpec(load_model(text_of_name(name))); },
          "name"_a, of_name_or_path,
          "A preset's name, a TOML file, or a Hugging Face directory (with config.json). RequestError "
          "otherwise.")
      .def_static("presets", &model_preset_names)
      .def_static(
          "from_toml", [](const std::string& text) { return model_from_toml(text, "the text"); }, "text"_a)
      .def(
          "to_toml", [](const ModelSpec& model) { return to_toml(model); },
          "As a file for plan and train; Model.from_toml() of it is this model.")
      .def_ro("name", &ModelSpec::name)
      .def_prop_ro("family", &name_of_family, "gpt2, llama or neox.")
      .def_ro("num_layers", &ModelSpec::num_layers)
      .def_ro("hidden", &ModelSpec::hidden)
      .def_ro("num_heads", &ModelSpec::num_heads)
      .def_ro("num_kv_heads", &ModelSpec::num_kv_heads)
      .def_ro("head_dim", &ModelSpec::head_dim)
      .def_ro("mlp_hidden", &ModelSpec::mlp_hidden)
      .def_ro("vocab", &ModelSpec::vocab)
      .def_ro("max_seq", &ModelSpec::max_seq)
      .def_ro("tied_embedding", &ModelSpec::tied_embedding)
      .def_ro("num_experts", &ModelSpec::num_experts, "Of a layer, those with a router; 0: a dense model.")
      .def_ro("experts_per_token", &ModelSpec::experts_per_token)
      .def_ro("num_shared_experts", &ModelSpec::num_shared_experts, "That all tokens meet.")
      .def_ro("expert_hidden", &ModelSpec::expert_hidden)
      .def_ro("num_dense_layers", &ModelSpec::num_dense_layers, "The first ones, which have no experts.")
      .def_prop_ro("num_parameters", &num_parameters)
      .def_prop_ro("num_active_parameters", &num_active_parameters,
                   "Those that one token meets: of a mixture the experts it is sent to.")
      .def("parameters", &all_parameters, "In the order of the model.")
      .def(
          "flops_per_token",
          [](const ModelSpec& model, std::int64_t seq_len) {
            if (seq_len < 1) refuse("--seq-len {}: must be at least 1", seq_len);
            return model_flops_per_token(model, seq_len);
          },
          "seq_len"_a, "Training FLOPs of one token, forward and backward, nothing made again.")
      .def(
          "__eq__", [](const ModelSpec& a, const ModelSpec& b) { return differences(a, b).empty(); },
          nb::is_operator(), compared_with_anything)
      .def("__hash__", [](const ModelSpec& model) { return nb::hash(nb::int_(num_parameters(model))); })
      .def("__repr__", [](const ModelSpec& model) {
        return fmt::format("<Model {}: {} parameters>", model.name, num_parameters(model));
      });
}

void bind_machine(nb::module_& m) {
  nb::class_<Machine> machines(m, "Machine",
                               "What a plan is for: a device's numbers, and the links between devices.");
  add_pickling(machines, &machine_from_toml);
  add_equality(machines);
  machines
      .def(
          "__init__",
          [](Machine* at, const nb::object& name) { new (at) Machine(load_machine(text_of_name(name))); },
          "name"_a, of_name_or_path,
          "A preset's name or a TOML file, as from `echelon calibrate`. RequestError otherwise.")
      .def_static("presets", &machine_preset_names)
      .def_static(
          "from_toml", [](const std::string& text) { return machine_from_toml(text, "the text"); }, "text"_a)
      .def("to_toml", [](const Machine& machine) { return to_toml(machine); })
      .def_ro("name", &Machine::name)
      .def_ro("memory_bytes", &Machine::memory_bytes)
      .def_ro("memory_bandwidth", &Machine::memory_bandwidth, "Bytes a second.")
      .def_prop_ro("node", &Machine::node, "Devices of a node.")
      .def_prop_ro(
          "peak_flops",
          [](const Machine& machine) {
            std::map<std::string, double> peaks;
            for (Precision p : all_precisions)
              if (machine.peak(p) > 0) peaks[precision_name(p)] = machine.peak(p);
            return peaks;
          },
          "Dense FLOP/s of a device, by precision.")
      .def("__repr__", [](const Machine& machine) { return fmt::format("<Machine {}>", machine.name); });
  nb::class_<Software> programs(m, "Software", "How a training program runs a plan, as data.");
  add_pickling(programs, &software_from_toml);
  add_equality(programs);
  programs
      .def(
          "__init__",
          [](Software* at, const nb::object& name) { new (at) Software(load_software(text_of_name(name))); },
          "name"_a, of_name_or_path, "A preset's name or a TOML file. RequestError otherwise.")
      .def_static("presets", &software_preset_names)
      .def("to_toml", [](const Software& software) { return to_toml(software); })
      .def_ro("name", &Software::name)
      .def_ro("as_of", &Software::as_of, "The version that it describes, by its date.")
      .def("__repr__", [](const Software& software) { return fmt::format("<Software {}>", software.name); });
}

std::string attribute_of(const PlanField& field) {
  std::string name = field.name();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// With its type, which checkers of types read.
template <class T>
void add_attribute(nb::class_<Plan>& plans, const PlanField& field) {
  plans.def_prop_ro(attribute_of(field).c_str(), [&field](const Plan& plan) {
    T of_plan{};
    with_value(field, plan, [&](const auto& value) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, T>) of_plan = value;
    });
    return of_plan;
  });
}

void bind_plan_data(nb::module_& m) {
  nb::class_<Plan> plans(
      m, "Plan",
      "What is run: model, mesh, batch, precision. Every flag of the command line that belongs "
      "to a plan is an attribute: plan.tp, plan.global_batch, plan.schedule, ...");
  add_pickling(plans, &plan_from_toml);
  add_equality(plans);
  plans
      .def_static(
          "from_toml", [](const std::string& text) { return plan_from_toml(text, "the text"); }, "text"_a)
      .def(
          "to_toml", [](const Plan& plan) { return to_toml(plan); },
          "As a file for `train --plan` and plan=.")
      .def_ro("model", &Plan::model)
      .def_prop_ro("num_ranks", [](const Plan& plan) { return plan.mesh.num_ranks(); })
      .def_prop_ro(
          "mesh", [](const Plan& plan) { return plan.mesh.describe(); },
          "As the command line says it: \"dp 2 x tp 2\".")
      .def("to_dict",
           [](const Plan& plan) {
             JsonObject all;
             for (const PlanField& field : plan_fields())
               if (field.use != FieldUse::file)
                 with_value(field, plan,
                            [&](const auto& value) { all[attribute_of(field).c_str()] = nb::cast(value); });
             return all;
           })
      .def("__repr__",
           [](const Plan& plan) { return fmt::format("<Plan {}: {}>", plan.model.name, summary(plan)); });
  for (const PlanField& field : plan_fields())
    if (field.use != FieldUse::file && field.name() != "model")  // which is an object
      with_value(field, Plan(), [&](const auto& value) {
        add_attribute<std::remove_cvref_t<decltype(value)>>(plans, field);
      });
}

void bind_accounts(nb::module_& m) {
  auto memory = nb::class_<Memory>(m, "Memory", "Bytes that one rank holds, by category.");
  memory.def_prop_ro("total", &Memory::total);
  const char* what[] = {"Values of the model.",
                        "Gradients of the parameters.",
                        "Moments and master weights.",
                        "What forward passes keep, and what passes work in.",
                        "Buffers of collectives and messages.",
                        "Whatever else there is."};
  for (MemoryCategory c : all_memory_categories)
    memory.def_prop_ro(
        memory_category_name(c), [c](const Memory& one) { return one[c]; },
        what[static_cast<std::size_t>(c)]);
  memory.def("to_dict", [](const Memory& one) { return from_json(as_json(one).dump()); })
      .def(
          "__eq__", [](const Memory& a, const Memory& b) { return a == b; }, nb::is_operator(),
          compared_with_anything)
      .def("__hash__", [](const Memory& one) { return hash_of(as_json(one).dump()); })
      .def("__repr__", [](const Memory& one) { return fmt::format("<Memory {}>", as_json(one).dump()); });

  const auto axis_of = [](const std::string& name) {
    for (Axis axis : traffic_axes)
      if (name == axis_name(axis)) return axis;
    refuse("--axis {}: no such axis of the mesh", name);
  };
  const auto verb_of = [](const std::string& name) {
    for (Verb verb : all_verbs)
      if (name == verb_name(verb)) return verb;
    refuse("--verb {}: no such verb of a communicator", name);
  };
  nb::class_<Traffic>(m, "Traffic", "Bytes that one rank sends in a step, by axis of the mesh and verb.")
      .def(
          "bytes",
          [axis_of, verb_of](const Traffic& one, const std::string& axis,
                             const std::optional<std::string>& verb) {
            return verb ? one.at(axis_of(axis), verb_of(*verb)).bytes : one.bytes(axis_of(axis));
          },
          "axis"_a, "verb"_a.none() = nb::none(), "Along an axis; of one verb where that is given.")
      .def(
          "calls",
          [axis_of, verb_of](const Traffic& one, const std::string& axis, const std::string& verb) {
            return one.at(axis_of(axis), verb_of(verb)).calls;
          },
          "axis"_a, "verb"_a)
      .def(
          "to_dict", [](const Traffic& one) { return from_json(as_json(one).dump()); },
          "{axis: {verb: bytes}}, without what is not sent.")
      .def(
          "__eq__", [](const Traffic& a, const Traffic& b) { return a == b; }, nb::is_operator(),
          compared_with_anything)
      .def("__hash__", [](const Traffic& one) { return hash_of(as_json(one).dump()); })
      .def("__repr__", [](const Traffic& one) { return fmt::format("<Traffic {}>", as_json(one).dump()); });
}

}  // namespace

void bind_spec(nb::module_& m) {
  bind_model(m);
  bind_machine(m);
  bind_plan_data(m);
  bind_accounts(m);
}

}  // namespace echelon::python
