# What `cmake --install` puts where, and what CPack makes packages of. Two components: `program` is the binary with its
# man pages, completions (zsh's where the site's own are: `site`), documents, presets and examples; `development` the
# library, its headers, and what find_package and pkg-config read. Everything is found from where it lies, so a tree that was installed can be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)  # tests are not installed; the target `installable` makes what is
set(data_dir ${CMAKE_INSTALL_DATAROOTDIR}/echelon)

# One archive of all rooms.
get_property(rooms GLOBAL PROPERTY echelon_rooms)
list(TRANSFORM rooms REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
add_library(echelon_library STATIC EXCLUDE_FROM_ALL ${objects})
set_target_properties(echelon_library PROPERTIES OUTPUT_NAME echelon EXPORT_NAME echelon LINKER_LANGUAGE CXX)
target_compile_features(echelon_library INTERFACE cxx_std_20)
target_include_directories(echelon_library INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/echelon>)

# What a program that uses it links too. Whoever reads the .pc file gets all of it: there is no shared library.
set(config_finds "find_dependency(Threads)\n")
set(pkg_config_flags -pthread)
if(ECHELON_PLANNER_ONLY)
  set(library_modules "")
  set(fmt_module "")
  set(pkg_config_defines -DFMT_HEADER_ONLY=1)
  target_compile_definitions(echelon_library INTERFACE FMT_HEADER_ONLY=1)
else()
  set(library_modules libhwy libxxhash libpcre2-8 icu-uc zlib libzstd)
  set(fmt_module fmt)
  pkg_check_modules(echelon_libraries REQUIRED IMPORTED_TARGET ${library_modules})
  list(JOIN library_modules " " modules)
  string(APPEND config_finds "find_dependency(fmt)\nfind_dependency(PkgConfig)\n"
         "pkg_check_modules(echelon_libraries REQUIRED QUIET IMPORTED_TARGET ${modules})\n")
  target_link_libraries(echelon_library INTERFACE fmt::fmt PkgConfig::echelon_libraries)
endif()
target_link_libraries(echelon_library INTERFACE Threads::Threads)
set(vendor_libraries ${SENTENCEPIECE_LIBRARY})
if(ECHELON_CPU_KERNELS)
  list(APPEND vendor_libraries ${DNNL_LIBRARY})
  string(APPEND config_finds "find_dependency(OpenMP COMPONENTS CXX)\n")
  list(APPEND pkg_config_flags ${OpenMP_CXX_FLAGS})
  target_link_libraries(echelon_library INTERFACE OpenMP::OpenMP_CXX)
endif()
if(ECHELON_CUDA)
  list(APPEND vendor_libraries ${accelerator_libraries})
endif()
if(MPI_C_FOUND)
  list(APPEND vendor_libraries ${MPI_C_LIBRARIES})  # not MPI::MPI_C, which asks the user's project for C
endif()
target_link_libraries(echelon_library INTERFACE ${vendor_libraries})
foreach(library IN LISTS vendor_libraries)
  get_filename_component(directory ${library} DIRECTORY)
  get_filename_component(name ${library} NAME)
  if(name MATCHES "\\.so\\.[0-9]")
    set(name -l:${name})  # of no name without a version, as NCCL's in PyPI's package
  else()
    get_filename_component(name ${library} NAME_WE)
    string(REGEX REPLACE "^lib" "-l" name ${name})
  endif()
  if(NOT directory IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
    list(APPEND pkg_config_flags -L${directory})
  endif()
  list(APPEND pkg_config_flags ${name})
endforeach()
list(REMOVE_DUPLICATES pkg_config_flags)
list(JOIN pkg_config_flags " " pkg_config_flags)
list(JOIN library_modules " " modules)
string(STRIP "${fmt_module} ${modules}" pkg_config_requires)

# The library into this directory of libraries. Not asked for by name: a component that installs go without.
function(install_library libdir component not_by_default)
  set(there ${CMAKE_BINARY_DIR}/installed_${component})
  set(exclude "")
  if(not_by_default)
    set(exclude EXCLUDE_FROM_ALL)
  endif()
  install(TARGETS echelon_library EXPORT ${component} ARCHIVE DESTINATION ${libdir} COMPONENT ${component} ${exclude})
  install(EXPORT ${component} DESTINATION ${libdir}/cmake/echelon FILE echelonTargets.cmake NAMESPACE echelon::
          COMPONENT ${component} ${exclude})
  configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/echelonConfig.cmake.in ${there}/echelonConfig.cmake
                                INSTALL_DESTINATION ${libdir}/cmake/echelon NO_SET_AND_CHECK_MACRO)
  # Below 1.0 a minor version may change what there is.
  write_basic_package_version_file(${there}/echelonConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${there}/echelonConfig.cmake ${there}/echelonConfigVersion.cmake DESTINATION ${libdir}/cmake/echelon
          COMPONENT ${component} ${exclude})
  file(RELATIVE_PATH to_prefix /prefix/${libdir}/pkgconfig /prefix)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/echelon.pc.in ${there}/echelon.pc @ONLY)
  install(FILES ${there}/echelon.pc DESTINATION ${libdir}/pkgconfig COMPONENT ${component} ${exclude})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/echelon COMPONENT ${component}
          ${exclude} FILES_MATCHING PATTERN "*.h" PATTERN "*-inl.h" EXCLUDE
          # What needs Random123 or the toolkit of CUDA, which whoever uses the library need not have.
          REGEX "/(philox_words|cuda/cublas_types|rows/(adamw|codecs|muon|orthonormalize|selection)|row_kernels|device_kernels)\\.h$" EXCLUDE)
endfunction()
install_library(${CMAKE_INSTALL_LIBDIR} development FALSE)
# CPack's prefix is /usr whatever this build's is, and there Debian keeps the libraries of each architecture apart.
set(multiarch_libdir ${CMAKE_INSTALL_LIBDIR})
if(EXISTS /etc/debian_version AND CMAKE_LIBRARY_ARCHITECTURE)
  set(multiarch_libdir lib/${CMAKE_LIBRARY_ARCHITECTURE})
endif()
install_library(${multiarch_libdir} libechelon-dev TRUE)

install(TARGETS echelon RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(DIRECTORY configs/models configs/machines configs/software DESTINATION ${data_dir}/configs COMPONENT program)
install(FILES README.md CHANGELOG.md CONTRIBUTING.md LICENSE DESTINATION ${data_dir} COMPONENT program)
install(DIRECTORY docs DESTINATION ${data_dir} COMPONENT program)
install(DIRECTORY examples DESTINATION ${data_dir} COMPONENT program USE_SOURCE_PERMISSIONS PATTERN CMakeLists.txt EXCLUDE)
install(CODE "set(data_dir \"${data_dir}\")" COMPONENT program)
install(SCRIPT cmake/plain_links.cmake COMPONENT program)

# Man pages and completions, as the binary tells them of its own flags. Compressed as distributions have them.
find_program(GZIP gzip REQUIRED)
set(described ${CMAKE_BINARY_DIR}/described)
add_custom_command(OUTPUT ${described}/stamp
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${described}
  COMMAND echelon describe ${described}
  COMMAND sh -c "exec \"$1\" -9n \"$2\"/*.1" sh ${GZIP} ${described}/man1
  COMMAND ${CMAKE_COMMAND} -E touch ${described}/stamp
  DEPENDS echelon COMMENT "Describing the flags in man pages and completions" VERBATIM)
add_custom_target(descriptions DEPENDS ${described}/stamp)
install(DIRECTORY ${described}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT program)
install(FILES ${described}/bash/echelon DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions
        COMPONENT program)
install(FILES ${described}/zsh/_echelon DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/zsh/site-functions COMPONENT site)
install(FILES ${described}/fish/echelon.fish DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/fish/vendor_completions.d
        COMPONENT program)

add_custom_target(installable DEPENDS echelon echelon_library descriptions)

include(cmake/packages.cmake)
