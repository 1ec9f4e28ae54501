# SPDX-License-Identifier: Apache-2.0
# What every target of the project shares: warnings, sanitizers, include root, and how a test is declared.

add_library(oscar_options INTERFACE)
target_include_directories(oscar_options INTERFACE
  ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/proto/include ${PROJECT_BINARY_DIR})
target_compile_definitions(oscar_options INTERFACE _GNU_SOURCE OSCAR_VERSION_STRING="${PROJECT_VERSION}")
target_compile_options(oscar_options INTERFACE
  -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Wformat=2 -Wundef -Wwrite-strings
  -ffp-contract=off -fno-math-errno -fno-trapping-math $<$<BOOL:${OSCAR_WERROR}>:-Werror>)
if(OSCAR_SANITIZE)
  target_compile_options(oscar_options INTERFACE -fsanitize=${OSCAR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(oscar_options INTERFACE -fsanitize=${OSCAR_SANITIZE})
endif()

# oscar_library(NAME SOURCES... ): a static library of one room.
function(oscar_library name)
  add_library(${name} STATIC ${ARGN})
  target_link_libraries(${name} PUBLIC oscar_options)
endfunction()

# oscar_test(NAME [LABELS unit|integration tsan ...] [TIMEOUT seconds] SOURCES ... LIBS ...): one cmocka program, run by ctest from
# the source directory; LABEL is the same as LABELS. `tsan` adds it to the run under the thread sanitizer. A program that cannot run
# here says why and exits with 77: skipped.
function(oscar_test name)
  cmake_parse_arguments(T "" "TIMEOUT" "SOURCES;LIBS;LABEL;LABELS" ${ARGN})
  set(labels ${T_LABEL} ${T_LABELS})
  if(NOT labels)
    set(labels unit)
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 300)
  endif()
  add_executable(${name} ${T_SOURCES})
  target_link_libraries(${name} PRIVATE oscar_options ${T_LIBS} PkgConfig::CMOCKA)
  target_compile_definitions(${name} PRIVATE OSCAR_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data" OSCAR_BUILD_DIR="${PROJECT_BINARY_DIR}")
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${T_TIMEOUT} SKIP_RETURN_CODE 77)
endfunction()

# oscar_gpu_program(NAME): target gpu_tests builds this program, too.
function(oscar_gpu_program name)
  if(NOT TARGET gpu_tests)
    add_custom_target(gpu_tests)
  endif()
  add_dependencies(gpu_tests ${name})
endfunction()

# oscar_gpu_twin(NAME [PROCESSES]): the test NAME once more on a GPU (NAME_cuda, label `gpu`), by ./dev gpu-test alone. With PROCESSES,
# where several processes share the GPU, it runs under MPS too (label `gpu-processes`).
function(oscar_gpu_twin name)
  cmake_parse_arguments(T "PROCESSES" "" "" ${ARGN})
  if(NOT OSCAR_WITH_CUDA)
    return()
  endif()
  oscar_gpu_program(${name})
  set(labels gpu)
  if(T_PROCESSES)
    list(APPEND labels gpu-processes)
  endif()
  get_test_property(${name} TIMEOUT timeout)
  add_test(NAME ${name}_cuda COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name}_cuda PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} RUN_SERIAL ON
    SKIP_RETURN_CODE 77 ENVIRONMENT OSCAR_TEST_BACKEND=cuda)
endfunction()
