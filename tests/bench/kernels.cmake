# SPDX-License-Identifier: Apache-2.0
add_executable(kernels_bench kernels_bench.c kernels_cache.c kernels_pack.c samples.c)
target_link_libraries(kernels_bench PRIVATE oscar_kernels oscar_report m)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  target_sources(kernels_bench PRIVATE kernels_dequant_avx2.c kernels_dequant_avx512.c)
  target_compile_definitions(kernels_bench PRIVATE BENCH_X86)
  set_source_files_properties(kernels_dequant_avx2.c PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(kernels_dequant_avx512.c PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl")
endif()
