# SPDX-License-Identifier: Apache-2.0
set(calib_fixture ${CMAKE_CURRENT_LIST_DIR}/calib_fixture.c)
oscar_test(calib_numbers SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_numbers.c ${calib_fixture} LIBS oscar_calib)
oscar_test(calib_captures SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_captures.c ${calib_fixture} LIBS oscar_calib)
oscar_test(calib_fit SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_fit.c ${calib_fixture} LIBS oscar_calib)
oscar_test(calib_report SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_report.c ${calib_fixture} LIBS oscar_calib)
oscar_test(calib_command SOURCES ${CMAKE_CURRENT_LIST_DIR}/calib_command.c ${calib_fixture} LIBS oscar_calib)
target_compile_definitions(calib_command PRIVATE OSCAR_CALIB_PROGRAM="$<TARGET_FILE:oscar-calib>")
add_dependencies(calib_command oscar-calib)
