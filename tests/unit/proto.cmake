# SPDX-License-Identifier: Apache-2.0
oscar_test(proto_error SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_error.c LIBS oscar_proto)
oscar_test(proto_page SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_page.c ${CMAKE_CURRENT_LIST_DIR}/proto_golden.c LIBS oscar_proto)
oscar_test(proto_digest SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_digest.c ${CMAKE_CURRENT_LIST_DIR}/proto_golden.c LIBS oscar_proto)
oscar_test(proto_geometry SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_geometry.c LIBS oscar_proto)
