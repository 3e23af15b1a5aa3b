# Debian packages of what installs: `cpack --config build/release/CPackConfig.cmake`, as `make deb` does. `echelon` is the
# program, `libechelon-dev` the library.
set(ECHELON_CONTACT "Echelon maintainers <maintainers@echelon.example>" CACHE STRING "Maintainer that packages name")

# Debian's own changelog tells of its packages, and these follow the program's.
string(TIMESTAMP now "%a, %d %b %Y %H:%M:%S +0000" UTC)
file(WRITE ${CMAKE_BINARY_DIR}/changelog.Debian "echelon (${PROJECT_VERSION}-1) unstable; urgency=medium

  * Version ${PROJECT_VERSION}; see changelog.gz.

 -- ${ECHELON_CONTACT}  ${now}
")
set(changelogs ${CMAKE_BINARY_DIR}/changelog.gz ${CMAKE_BINARY_DIR}/changelog.Debian.gz)
add_custom_command(OUTPUT ${changelogs}
  COMMAND ${GZIP} -9nc ${CMAKE_SOURCE_DIR}/CHANGELOG.md > ${CMAKE_BINARY_DIR}/changelog.gz
  COMMAND ${GZIP} -9nkf ${CMAKE_BINARY_DIR}/changelog.Debian
  DEPENDS ${CMAKE_SOURCE_DIR}/CHANGELOG.md ${CMAKE_BINARY_DIR}/changelog.Debian VERBATIM)
add_custom_target(changelogs DEPENDS ${changelogs})
add_dependencies(installable changelogs)
foreach(package echelon libechelon-dev)
  install(FILES ${CMAKE_SOURCE_DIR}/cmake/copyright ${changelogs} DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${package}
          COMPONENT ${package} EXCLUDE_FROM_ALL)
endforeach()
install(FILES ${described}/zsh/_echelon DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/zsh/vendor-completions
        COMPONENT echelon EXCLUDE_FROM_ALL)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME echelon)
set(CPACK_PACKAGE_CONTACT ${ECHELON_CONTACT})
set(CPACK_COMPONENTS_ALL program echelon libechelon-dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_COMPONENT_PROGRAM_GROUP program)
set(CPACK_COMPONENT_ECHELON_GROUP program)
set(CPACK_COMPONENT_LIBECHELON-DEV_GROUP library)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ
    WORLD_EXECUTE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME echelon)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS openmpi-bin)
set(CPACK_DEBIAN_PROGRAM_DESCRIPTION
"distributed training of transformers: planned, simulated, run, proved
Echelon plans a training across data, sharded, tensor, sequence, context,
pipeline and expert parallelism; simulates and draws every published pipeline
schedule; trains, with ranks as threads or MPI processes; and compares every
tensor of a run with one rank's.")

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libechelon-dev)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS "g++, nlohmann-json3-dev, libtomlplusplus-dev")
if(NOT ECHELON_PLANNER_ONLY)
  string(APPEND CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS
    ", pkg-config, libfmt-dev, libhwy-dev, libxxhash-dev, libpcre2-dev, libicu-dev, libsentencepiece-dev, zlib1g-dev, libzstd-dev")
endif()
if(ECHELON_CPU_KERNELS)
  string(APPEND CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS ", libdnnl-dev")
endif()
if(MPI_C_FOUND)
  string(APPEND CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS ", libopenmpi-dev")
endif()
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION
"distributed training of transformers: library and headers
The parts that the program echelon is made of, as a static library for C++20:
plans, schedules, collectives, layers, training. For find_package(echelon) and
pkg-config.")
include(CPack)
