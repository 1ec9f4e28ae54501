# SPDX-License-Identifier: Apache-2.0
oscar_test(calib_import
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_import.c ${CMAKE_CURRENT_LIST_DIR}/calib_archive.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c
          ${PROJECT_SOURCE_DIR}/tests/support/files.c
  LIBS oscar_calib)
oscar_test(calib_pickle
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_pickle.c ${CMAKE_CURRENT_LIST_DIR}/calib_archive.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c
          ${PROJECT_SOURCE_DIR}/tests/support/files.c
  LIBS oscar_calib)
