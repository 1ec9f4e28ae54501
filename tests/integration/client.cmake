# SPDX-License-Identifier: Apache-2.0
# The library and oscarctl against the real daemon.
set(client_support
  ${PROJECT_SOURCE_DIR}/tests/support/daemon.c ${PROJECT_SOURCE_DIR}/tests/support/worker_process.c)

oscar_test(client_shared LABELS integration
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_shared.c ${CMAKE_CURRENT_LIST_DIR}/client_scene.c ${client_support}
    ${PROJECT_SOURCE_DIR}/tests/support/calibration_file.c ${PROJECT_SOURCE_DIR}/tests/unit/proto_tensor_file.c
  LIBS oscar_client oscar_kernels m)
add_dependencies(client_shared oscard)

oscar_test(client_ctl LABELS integration
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_ctl.c ${CMAKE_CURRENT_LIST_DIR}/client_scene.c ${client_support}
  LIBS oscar_client oscar_kernels PkgConfig::JANSSON m)
add_dependencies(client_ctl oscard oscarctl)
