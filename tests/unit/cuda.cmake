# SPDX-License-Identifier: Apache-2.0
# The CUDA backend's host side, on a driver library without a GPU.
if(OSCAR_WITH_CUDA)
  set(cuda_support ${PROJECT_SOURCE_DIR}/tests/support)
  set(fake_driver ${cuda_support}/fake_cuda)
  add_library(fake_cuda SHARED
    ${fake_driver}/graph.c ${fake_driver}/kernel.c ${fake_driver}/machine.c ${fake_driver}/memory.c ${fake_driver}/rest.c
    ${fake_driver}/stream.c)
  target_include_directories(fake_cuda SYSTEM PRIVATE ${OSCAR_CUDA_INCLUDE})
  target_link_libraries(fake_cuda PRIVATE oscar_options Threads::Threads)

  # oscar_cuda_test(NAME [LABELS ...] SOURCES ...): on streams that are late, so that what does not wait for them fails here.
  function(oscar_cuda_test name)
    oscar_test(${name} ${ARGN} ${cuda_support}/fake_cuda.c ${cuda_support}/kernel_fixture.c LIBS oscar_kernels)
    target_compile_definitions(${name} PRIVATE FAKE_CUDA_LIBRARY="$<TARGET_FILE:fake_cuda>")
    add_dependencies(${name} fake_cuda)
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT FAKE_CUDA_DELAY_US=100)
  endfunction()

  oscar_cuda_test(cuda_driver SOURCES cuda_driver.c)
  target_link_options(cuda_driver PRIVATE -Wl,--wrap=access)
  oscar_cuda_test(cuda_memory LABELS unit tsan SOURCES cuda_memory.c)
  oscar_cuda_test(cuda_failures SOURCES cuda_failures.c)
  oscar_cuda_test(cuda_stream LABELS unit tsan SOURCES cuda_stream.c)
  oscar_cuda_test(cuda_calibration SOURCES cuda_calibration.c)
endif()
