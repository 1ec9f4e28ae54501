# SPDX-License-Identifier: Apache-2.0
oscar_test(daemon_loop SOURCES ${CMAKE_CURRENT_LIST_DIR}/daemon_loop.c LIBS oscar_daemon)
oscar_test(daemon_config SOURCES ${CMAKE_CURRENT_LIST_DIR}/daemon_config.c ${PROJECT_SOURCE_DIR}/tests/support/files.c LIBS oscar_daemon)
oscar_test(daemon_calibrations LABELS unit tsan
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/daemon_calibrations.c ${CMAKE_CURRENT_LIST_DIR}/proto_tensor_file.c
    ${PROJECT_SOURCE_DIR}/tests/support/calibration_file.c
  LIBS oscar_daemon m)
oscar_test(daemon_log SOURCES ${CMAKE_CURRENT_LIST_DIR}/daemon_log.c LIBS oscar_daemon PkgConfig::JANSSON)
