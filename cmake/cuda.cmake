# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: built where nvcc is found (OSCAR_CUDA: AUTO, ON or OFF). Nothing links to CUDA's libraries.

set(OSCAR_CUDA AUTO CACHE STRING "build the CUDA backend: AUTO (where nvcc is), ON or OFF")
set(OSCAR_CUDA_ARCHITECTURES 80 90 100 CACHE STRING
  "architectures that the kernels are compiled for; none: the host side only, which opens no real GPU (sanitizers, static analysis)")

find_program(OSCAR_NVCC nvcc PATHS /usr/local/cuda/bin /usr/lib/nvidia-cuda-toolkit/bin)
if(OSCAR_CUDA STREQUAL "ON" AND NOT OSCAR_NVCC)
  message(FATAL_ERROR "OSCAR_CUDA is ON and nvcc is not found: add CUDA's bin folder to PATH")
endif()
set(OSCAR_WITH_CUDA OFF)
if(OSCAR_NVCC AND NOT OSCAR_CUDA STREQUAL "OFF")
  set(OSCAR_WITH_CUDA ON)
  file(REAL_PATH ${OSCAR_NVCC} nvcc)
  cmake_path(GET nvcc PARENT_PATH nvcc_folder)
  find_path(OSCAR_CUDA_INCLUDE cuda.h PATHS ${nvcc_folder}/../include REQUIRED)
  find_program(OSCAR_COMPUTE_SANITIZER compute-sanitizer PATHS ${nvcc_folder})
endif()

# oscar_cuda_image(target name source [nvcc options]): compiles kernels to one image for all architectures (and PTX of the newest one, for those to
# come) and embeds it as the symbol oscar_cuda_image_<name>. In the 64 bytes before it lies its name, for a driver that has the kernels
# already (tests/support/fake_cuda).
function(oscar_cuda_image target name source)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
  if(OSCAR_CUDA_ARCHITECTURES STREQUAL "none")
    file(CONFIGURE OUTPUT ${image} CONTENT "")
  else()
    list(GET OSCAR_CUDA_ARCHITECTURES -1 newest)
    set(codes)
    foreach(architecture ${OSCAR_CUDA_ARCHITECTURES})
      list(APPEND codes -gencode arch=compute_${architecture},code=sm_${architecture})
    endforeach()
    list(APPEND codes -gencode arch=compute_${newest},code=compute_${newest})
    set(strict)
    if(OSCAR_WERROR)
      set(strict -Werror all-warnings)
    endif()
    add_custom_command(OUTPUT ${image}
      COMMAND ${OSCAR_NVCC} -fatbin -std=c++17 -O3 ${ARGN} ${strict} -Xfatbin -compress-all ${codes}
        -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/proto/include -MD -MF ${image}.d -o ${image} ${CMAKE_CURRENT_SOURCE_DIR}/${source}
      DEPENDS ${source} DEPFILE ${image}.d VERBATIM COMMENT "Building CUDA kernels ${name}")
  endif()
  set(assembly ${CMAKE_CURRENT_BINARY_DIR}/${name}_image.c)
  file(CONFIGURE OUTPUT ${assembly} CONTENT [[/* Made by cmake/cuda.cmake. */
__asm__(".section .rodata\n.balign 64\n.asciz \"@name@\"\n.balign 64\n.global oscar_cuda_image_@name@\n.hidden oscar_cuda_image_@name@\noscar_cuda_image_@name@:\n.incbin \"@image@\"\n.byte 0\n.previous\n");
typedef int oscar_cuda_image_unit;
]] @ONLY)
  set_source_files_properties(${assembly} PROPERTIES OBJECT_DEPENDS ${image})
  target_sources(${target} PRIVATE ${assembly})
endfunction()
