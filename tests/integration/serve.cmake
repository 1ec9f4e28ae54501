# SPDX-License-Identifier: Apache-2.0
# The real daemon, spoken to over its sockets; every program runs under io_uring (where it is allowed) and under epoll.
set(serve_support ${PROJECT_SOURCE_DIR}/tests/support/daemon.c ${PROJECT_SOURCE_DIR}/tests/support/peer.c)

# serve_test(NAME [SOURCES more...] [LIBS more...])
function(serve_test name)
  cmake_parse_arguments(S "" "" "SOURCES;LIBS" ${ARGN})
  oscar_test(${name} LABELS integration SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}.c ${serve_support} ${S_SOURCES} LIBS oscar_proto ${S_LIBS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/kernels/include)
  add_dependencies(${name} oscard)
  add_test(NAME ${name}_epoll COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name}_epoll PROPERTIES LABELS integration TIMEOUT 300 SKIP_RETURN_CODE 77
    ENVIRONMENT OSCARD_DAEMON_IO_ENGINE=epoll)
endfunction()

serve_test(serve_handshake)
serve_test(serve_hostile)
serve_test(serve_lifecycle)
serve_test(serve_process)
serve_test(serve_model
  SOURCES ${PROJECT_SOURCE_DIR}/tests/support/raw_worker.c ${PROJECT_SOURCE_DIR}/tests/support/calibration_file.c
    ${PROJECT_SOURCE_DIR}/tests/unit/proto_tensor_file.c
  LIBS m)
pkg_check_modules(NANOMSG REQUIRED IMPORTED_TARGET nanomsg)
serve_test(serve_admin
  SOURCES ${PROJECT_SOURCE_DIR}/tests/support/raw_worker.c ${PROJECT_SOURCE_DIR}/tests/support/worker_process.c
  LIBS PkgConfig::NANOMSG)
