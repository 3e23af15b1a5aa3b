# The planner in a browser's page (`make page`): rooms up to the planner, compiled to WebAssembly by emscripten, inside
# one file. Included in place of everything that trains.
add_executable(page_planner apps/no_progress_line.cpp apps/page_planner.cpp ${planner_requests})
target_include_directories(page_planner PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(page_planner PRIVATE echelon_draw echelon_plan echelon_flags)
# -O1: what is more is the shortening of JavaScript, for which there would have to be node-acorn.
target_link_options(page_planner PRIVATE -O1 -sMODULARIZE=1 -sEXPORT_NAME=EchelonPlanner -sSINGLE_FILE=1 -sINVOKE_RUN=0
  -sALLOW_MEMORY_GROWTH=1 -sTOTAL_STACK=4MB -sFORCE_FILESYSTEM=1 -sEXPORTED_RUNTIME_METHODS=callMain,FS -sENVIRONMENT=web,worker,node)
find_program(NODE NAMES node nodejs REQUIRED)
set(page ${CMAKE_BINARY_DIR}/echelon.html)
add_custom_command(OUTPUT ${page}
  COMMAND ${NODE} ${CMAKE_SOURCE_DIR}/cmake/make_page.js $<TARGET_FILE:page_planner> ${CMAKE_SOURCE_DIR}/cmake/page_worker.js ${page}
  DEPENDS page_planner ${CMAKE_SOURCE_DIR}/cmake/make_page.js ${CMAKE_SOURCE_DIR}/cmake/page_worker.js COMMENT "Putting the planner into its page" VERBATIM)
add_custom_target(page ALL DEPENDS ${page})

# Beside the binary's own answers, where it is built.
set(ECHELON_BINARY ${CMAKE_SOURCE_DIR}/build/release/echelon CACHE FILEPATH "That the planner in the page is compared with")
enable_testing()
add_test(NAME page_planner COMMAND ${NODE} ${CMAKE_SOURCE_DIR}/tests/page_planner_test.js $<TARGET_FILE:page_planner> ${CMAKE_SOURCE_DIR}/cmake/page_worker.js
         ${ECHELON_BINARY})
# As a browser shows it, with the rules of axe-core where the test of the other pages has had them.
add_test(NAME page_planner_browser COMMAND ${NODE} ${CMAKE_SOURCE_DIR}/tests/page_planner_browser_test.js ${page} ${CMAKE_SOURCE_DIR}/tests/page_probe.js
         ${CMAKE_BINARY_DIR}/screenshots ${CMAKE_SOURCE_DIR}/build/release/axe/axe_playwright_python/axe.min.js)
set_tests_properties(page_planner page_planner_browser PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77)
