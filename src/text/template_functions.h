// What a template's expressions may call, of Python and of Jinja.
#pragma once

#include <ctime>
#include <initializer_list>
#include <string>
#include <vector>

#include "text/template_value.h"

namespace echelon {

// Of a call: in their order, and by name.
struct TemplateArguments {
  TemplateValue::List list;
  std::vector<std::pair<std::string, TemplateValue>> named;
  // The one at this place or of this name; nothing where it is not given.
  const TemplateValue* get(std::size_t place, const char* name = "") const;
};

// Those of what has these parameters, in their order: null where one is not given. "": a parameter without a
// name. RequestError naming an argument that is no parameter, or is one twice.
std::vector<const TemplateValue*> template_arguments(const std::string& of, const TemplateArguments& given,
                                                     std::initializer_list<const char*> parameters);

TemplateValue filter_template_value(const std::string& name, const TemplateValue& of,
                                    const TemplateArguments& arguments);
bool test_template_value(const std::string& name, const TemplateValue& of,
                         const TemplateArguments& arguments);
// A method of a text or a mapping.
TemplateValue call_template_method(const std::string& name, const TemplateValue& of,
                                   const TemplateArguments& arguments);
// raise_exception, strftime_now, range, namespace, dict.
TemplateValue call_template_function(const std::string& name, const TemplateArguments& arguments,
                                     const std::tm& now);
bool is_template_function(const std::string& name);
bool is_method_of_mappings(const std::string& name);  // in Python, known here or not

// of[index] and of.name, undefined where there is none.
TemplateValue template_item(const TemplateValue& of, const TemplateValue& index);
// Of a path of names and places with points between them, as filters have it; `otherwise` where there is
// none.
TemplateValue template_attribute(const TemplateValue& of, const TemplateValue& path,
                                 const TemplateValue* otherwise = nullptr);
TemplateValue template_slice(const TemplateValue& of, const TemplateValue& from, const TemplateValue& to,
                             const TemplateValue& step);
TemplateValue::List template_elements(const TemplateValue& of);      // as a loop has them
TemplateValue template_items(const TemplateValue::Map& map);         // pairs
bool template_less(const TemplateValue& a, const TemplateValue& b);  // RequestError where they have no order

}  // namespace echelon
