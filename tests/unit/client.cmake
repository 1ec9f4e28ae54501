# SPDX-License-Identifier: Apache-2.0
add_library(oscar_fake_oscard STATIC
  ${PROJECT_SOURCE_DIR}/tests/support/fake_oscard.c ${PROJECT_SOURCE_DIR}/tests/support/fake_oscard_answers.c)
target_link_libraries(oscar_fake_oscard PUBLIC oscar_kernels oscar_proto Threads::Threads)

foreach(subject handshake deadline pages seq threads)
  oscar_test(client_${subject} LABELS unit tsan SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_${subject}.c ${CMAKE_CURRENT_LIST_DIR}/client_fixture.c
    LIBS oscar_client oscar_fake_oscard)
endforeach()

oscar_test(client_mapping SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_mapping.c ${CMAKE_CURRENT_LIST_DIR}/client_fixture.c
  LIBS oscar_client oscar_fake_oscard)
oscar_test(client_memory SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_memory.c ${CMAKE_CURRENT_LIST_DIR}/client_fixture.c
  LIBS oscar_client oscar_fake_oscard)
target_link_options(client_memory PRIVATE -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc)

# A program of somebody else does not bring the sanitizer's runtime along.
if(OSCAR_SANITIZE)
  return()
endif()
add_test(NAME client_abi COMMAND ${PROJECT_SOURCE_DIR}/tests/consumer/abi.sh $<TARGET_FILE:oscar>)
add_test(NAME client_installed COMMAND ${PROJECT_SOURCE_DIR}/tests/consumer/installed.sh ${PROJECT_BINARY_DIR})
set_tests_properties(client_abi client_installed PROPERTIES LABELS unit TIMEOUT 300)
