# embed_files(OUT.cpp SYMBOL FILE...): writes OUT.cpp, which defines
#   const EmbeddedFile SYMBOL[]; const std::size_t num_SYMBOL;
# (src/spec/embedded.h) with the files' texts. Configuring runs again when one of the files changes; a file that is
# added or removed is noticed when the caller lists them with file(GLOB ... CONFIGURE_DEPENDS).
function(embed_files out symbol)
  set(entries "")
  foreach(file IN LISTS ARGN)
    get_filename_component(path "${file}" ABSOLUTE)
    # Without the last extension only: gpt2-1.5b.toml is gpt2-1.5b.
    get_filename_component(name "${path}" NAME_WLE)
    file(READ "${path}" text)
    string(APPEND entries "    {\"${name}\", R\"embedded(${text})embedded\"},\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
  endforeach()
  set(code "// Written by cmake/embed.cmake.\n#include <cstddef>\n\n#include \"spec/embedded.h\"\n\nnamespace echelon {\n\n")
  # `extern` because a const at namespace scope is otherwise private to its file.
  string(APPEND code "extern const EmbeddedFile ${symbol}[];\nextern const std::size_t num_${symbol};\n\n")
  string(APPEND code "const EmbeddedFile ${symbol}[] = {\n${entries}    {nullptr, nullptr},\n};\n")
  string(APPEND code "const std::size_t num_${symbol} = sizeof(${symbol}) / sizeof(${symbol}[0]) - 1;\n\n")
  string(APPEND code "}  // namespace echelon\n")
  set(old "")
  if(EXISTS "${out}")
    file(READ "${out}" old)
  endif()
  if(NOT old STREQUAL code)  # an unchanged file keeps its time, so nothing is compiled again
    file(WRITE "${out}" "${code}")
  endif()
endfunction()
