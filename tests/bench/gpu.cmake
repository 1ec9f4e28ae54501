# SPDX-License-Identifier: Apache-2.0
if(OSCAR_WITH_CUDA)
  add_executable(gpu_bench
    gpu_baselines.c gpu_bench.c gpu_floor.c gpu_time.c samples.c ../support/worker_process.c)
  oscar_cuda_image(gpu_bench gpu_floor gpu_floor.cu)
  target_link_libraries(gpu_bench PRIVATE oscar_kernels oscar_report PkgConfig::JANSSON m)
  target_compile_definitions(gpu_bench PRIVATE BENCH_BASELINES="${CMAKE_CURRENT_SOURCE_DIR}/gpu_baselines.py")
endif()
