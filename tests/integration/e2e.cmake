# SPDX-License-Identifier: Apache-2.0
# The whole system: the real daemon, liboscar, several processes.
pkg_check_modules(NANOMSG REQUIRED IMPORTED_TARGET nanomsg)
set(here ${CMAKE_CURRENT_LIST_DIR})

add_library(oscar_e2e STATIC
  ${here}/e2e_daemon.c ${here}/e2e_graph.c ${here}/e2e_hold.c ${here}/e2e_model.c
  ${PROJECT_SOURCE_DIR}/tests/support/daemon.c ${PROJECT_SOURCE_DIR}/tests/support/device_memory.c
  ${PROJECT_SOURCE_DIR}/tests/support/worker_process.c)
target_link_libraries(oscar_e2e PUBLIC
  oscar_options oscar_client oscar_kernels oscar_proto PkgConfig::CMOCKA PkgConfig::NANOMSG m)
target_compile_definitions(oscar_e2e PRIVATE OSCAR_BUILD_DIR="${PROJECT_BINARY_DIR}")
if(OSCAR_WITH_CUDA)
  target_compile_definitions(oscar_e2e PUBLIC OSCAR_CUDA)
endif()
add_dependencies(oscar_e2e oscard)

foreach(subject
    attach bad_input batch death devices events fence flush full identity large_pool partial restart share soak stopped)
  oscar_test(e2e_${subject} LABELS integration TIMEOUT 600 SOURCES ${here}/e2e_${subject}.c LIBS oscar_e2e)
  oscar_gpu_twin(e2e_${subject} PROCESSES)
endforeach()

# A device that hangs or fails on command, in place of the one that oscard would find.
add_executable(hanging_oscard ${PROJECT_SOURCE_DIR}/daemon/main.c ${PROJECT_SOURCE_DIR}/tests/support/hanging_oscard.c)
target_link_libraries(hanging_oscard PRIVATE oscar_daemon)
oscar_test(e2e_hang LABELS integration TIMEOUT 600 SOURCES ${here}/e2e_hang.c LIBS oscar_e2e)
add_dependencies(e2e_hang hanging_oscard)

# A driver whose calls stand still. What it is linked to stands for the real library, which need not be where this is built; where
# the kernels are emulated, another one does the same before that driver.
if(OSCAR_WITH_CUDA)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/no_driver.c CONTENT "int no_driver_unit;\n")
  add_library(no_driver SHARED ${CMAKE_CURRENT_BINARY_DIR}/no_driver.c)
  set_target_properties(no_driver PROPERTIES OUTPUT_NAME no_driver NO_SONAME ON
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/no_driver LINK_FLAGS "-Wl,-soname,libcuda.so.1")
  add_library(wedged_driver SHARED ${PROJECT_SOURCE_DIR}/tests/support/wedged_driver.c)
  target_link_libraries(wedged_driver PRIVATE oscar_options no_driver ${CMAKE_DL_LIBS})
  target_link_options(wedged_driver PRIVATE -Wl,--no-as-needed)
  target_include_directories(wedged_driver SYSTEM PRIVATE ${OSCAR_CUDA_INCLUDE})
  set_target_properties(wedged_driver PROPERTIES SKIP_BUILD_RPATH ON)
  oscar_test(e2e_wedged LABELS integration TIMEOUT 600 SOURCES ${here}/e2e_wedged.c LIBS oscar_e2e)
  oscar_gpu_twin(e2e_wedged)
  target_compile_definitions(e2e_wedged PRIVATE WEDGED_DRIVER="$<TARGET_FILE:wedged_driver>")
  add_dependencies(e2e_wedged wedged_driver)
  if(TARGET emulated_cuda)
    add_library(wedged_emulation SHARED ${PROJECT_SOURCE_DIR}/tests/support/wedged_driver.c)
    target_link_libraries(wedged_emulation PRIVATE oscar_options emulated_cuda ${CMAKE_DL_LIBS})
    target_link_options(wedged_emulation PRIVATE -Wl,--no-as-needed)
    target_include_directories(wedged_emulation SYSTEM PRIVATE ${OSCAR_CUDA_INCLUDE})
    add_dependencies(e2e_wedged wedged_emulation)
    set_tests_properties(e2e_wedged PROPERTIES ENVIRONMENT
      "OSCAR_TEST_BACKEND=cuda;OSCAR_CUDA_DRIVER=$<TARGET_FILE:emulated_cuda>;OSCAR_TEST_WEDGED_DRIVER=$<TARGET_FILE:wedged_emulation>;FAKE_CUDA_DELAY_US=100")
  else()
    set_tests_properties(e2e_wedged PROPERTIES DISABLED ON)
  endif()
endif()

add_test(NAME failures_are_covered COMMAND ${PROJECT_SOURCE_DIR}/tests/check_failures.sh)
set_tests_properties(failures_are_covered PROPERTIES LABELS unit)
