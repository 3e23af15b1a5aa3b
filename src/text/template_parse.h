// A template as a tree.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/template_value.h"

namespace echelon {

struct TemplateNode {
  enum class Kind {
    // Expressions; behind each what `children` are.
    constant,
    name,
    list,         // its elements; `flag`: a tuple
    dictionary,   // keys and values in turn
    attribute,    // of what; `text` is its name
    item,         // of what, which
    slice,        // of what, from, to, step: constants none where left out
    call,         // what, then arguments; `names` of these
    filter,       // of what, then arguments; `text` is its name
    test,         // the same; `flag`: the negation
    unary,        // `text`: not, -, +
    binary,       // `text`: and, or, +, -, *, /, //, %, **, ~
    compare,      // one more than `names`, the operators between them
    conditional,  // condition, value, other value
    // Statements.
    block,   // statements
    raw,     // `text`
    output,  // an expression
    branch,  // condition and block in turn; a last block
    loop,  // of what, filter or null, body, body where there is nothing; `names`: of an element, `flag`: asks
           // for loop
    assign,        // a value; `names`: of what, or of a namespace and its field (`flag`)
    assign_block,  // a block; `names` as above; behind it filters as in `filter` of null
    macro,         // the body, then defaults of the last parameters; `text`, and `names` of parameters
    filtered,      // a block, then a filter of null
    break_loop,
    continue_loop,
  };
  Kind kind = Kind::block;
  std::string text;
  std::vector<std::string> names;
  std::vector<std::unique_ptr<TemplateNode>> children;
  TemplateValue constant;
  bool flag = false;
  std::size_t line = 0;
  int height = 0;  // of the tree below it
};

// RequestError that begins with `where`.
std::unique_ptr<TemplateNode> parse_template(const std::string& source, const std::string& where);

}  // namespace echelon
