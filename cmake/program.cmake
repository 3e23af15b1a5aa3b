# Which files of apps/ are used by more than the binary, said once: the page compiles `planner_requests` (browser.cmake); the
# binary, the tests and the Python module link echelon_requests, in which they are with the others.

# What turns the planner's flags into requests, and answers into text.
set(planner_requests
  colours
  command_text
  file_kind
  flag_needs
  flag_values
  help
  plan
  plan_field_flags
  plan_flags
  plan_page
  plan_sweep
  simulate
  simulate_block
  simulate_packing
  simulate_drawing
  simulate_experts
  simulate_experts_flags
  simulate_experts_report
  simulate_flags
  simulate_report
  terminal)
# What a page does in its own way.
set(process_requests
  launch_words
  launched
  progress_line
  survey_at_once)
# What finds its way through all verbs, and documents: the binary's alone.
set(program
  describe
  describe_completions
  describe_man
  program
  topics)
set(training_program
  verbs
  view
  view_server)
# What a build that only plans has besides, in place of all other files.
set(planner_program
  calibrate
  calibrate_from
  device_flag
  planner_verbs)
foreach(list planner_requests process_requests program training_program planner_program)
  list(TRANSFORM ${list} PREPEND ${CMAKE_SOURCE_DIR}/apps/)
  list(TRANSFORM ${list} APPEND .cpp)
endforeach()

# The library and the binary.
function(add_program)
  if(ECHELON_PLANNER_ONLY)
    set(requests ${planner_requests} ${process_requests})
    set(uses echelon_draw echelon_train)
    list(APPEND program ${planner_program})
  else()
    file(GLOB requests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/apps/*.cpp)
    list(APPEND program ${training_program})
    list(REMOVE_ITEM requests ${program} ${CMAKE_SOURCE_DIR}/apps/echelon.cpp ${CMAKE_SOURCE_DIR}/apps/no_progress_line.cpp
         ${CMAKE_SOURCE_DIR}/apps/page_planner.cpp ${CMAKE_SOURCE_DIR}/apps/planner_verbs.cpp)
    set(uses echelon_draw echelon_verify)
    pkg_check_modules(http REQUIRED IMPORTED_TARGET cpp-httplib)
    # Its library's macros are for it alone.
    set_source_files_properties(${CMAKE_SOURCE_DIR}/apps/view_server.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
                                COMPILE_OPTIONS "${http_CFLAGS_OTHER}")
    if("-DCPPHTTPLIB_OPENSSL_SUPPORT" IN_LIST http_CFLAGS_OTHER)  # then the header calls OpenSSL itself
      pkg_check_modules(crypto REQUIRED libcrypto)
      list(APPEND http_LINK_LIBRARIES ${crypto_LINK_LIBRARIES})
    endif()
  endif()
  if(NOT ECHELON_PYTHON)
    list(APPEND requests ${program} ${CMAKE_BINARY_DIR}/embedded_documents.cpp)
  endif()
  add_library(echelon_requests STATIC ${requests})
  target_include_directories(echelon_requests PUBLIC ${CMAKE_SOURCE_DIR})
  target_compile_definitions(echelon_requests PRIVATE ECHELON_VERSION="${PROJECT_VERSION}")
  target_link_libraries(echelon_requests PUBLIC ${uses} PRIVATE ${http_LINK_LIBRARIES} echelon_flags)
  set_target_properties(echelon_requests PROPERTIES UNITY_BUILD ${ECHELON_UNITY} UNITY_BUILD_BATCH_SIZE 0)
  # Parsing flags is not worth the minutes that CLI11's templates take to optimise.
  target_compile_options(echelon_requests PRIVATE ${cold_options})
  if(NOT ECHELON_PYTHON)
    add_executable(echelon ${CMAKE_SOURCE_DIR}/apps/echelon.cpp)
    target_link_libraries(echelon PRIVATE echelon_requests echelon_flags)
  endif()
endfunction()
