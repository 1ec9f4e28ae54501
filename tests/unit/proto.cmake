# SPDX-License-Identifier: Apache-2.0
oscar_test(proto_error SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_error.c LIBS oscar_proto)
oscar_test(proto_page SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_page.c ${CMAKE_CURRENT_LIST_DIR}/proto_golden.c LIBS oscar_proto)
oscar_test(proto_digest SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_digest.c ${CMAKE_CURRENT_LIST_DIR}/proto_golden.c LIBS oscar_proto)
oscar_test(proto_geometry SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_geometry.c LIBS oscar_proto)
oscar_test(proto_wire SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_wire.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c LIBS oscar_proto)
oscar_test(proto_wire_hostile SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_wire_hostile.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c LIBS oscar_proto PkgConfig::PROTOBUF_C)
oscar_test(proto_frame SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_frame.c LIBS oscar_proto)
oscar_test(proto_admin SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_admin.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c LIBS oscar_proto)
oscar_test(proto_safetensors
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_safetensors.c ${CMAKE_CURRENT_LIST_DIR}/proto_tensor_file.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c
          ${PROJECT_SOURCE_DIR}/tests/support/files.c
  LIBS oscar_proto)
oscar_test(proto_calibration
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_calibration.c ${CMAKE_CURRENT_LIST_DIR}/proto_tensor_file.c ${CMAKE_CURRENT_LIST_DIR}/proto_random.c
  LIBS oscar_proto m)
oscar_test(proto_turns SOURCES ${CMAKE_CURRENT_LIST_DIR}/proto_turns.c LIBS oscar_proto m)
