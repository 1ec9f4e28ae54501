# SPDX-License-Identifier: Apache-2.0
if(OSCAR_WITH_CUDA)
  add_library(gpu_bench_base STATIC gpu_device.c gpu_floor.c gpu_time.c samples.c ../support/worker_process.c)
  oscar_cuda_image(gpu_bench_base gpu_floor gpu_floor.cu)
  target_link_libraries(gpu_bench_base PUBLIC oscar_kernels oscar_report PkgConfig::JANSSON m)
  target_compile_definitions(gpu_bench_base PUBLIC BENCH_BASELINES="${CMAKE_CURRENT_SOURCE_DIR}/gpu_baselines.py")

  add_executable(gpu_bench gpu_baselines.c gpu_bench.c gpu_decode.c gpu_pack.c gpu_prefill.c gpu_store.c)
  target_link_libraries(gpu_bench PRIVATE gpu_bench_base)

  add_executable(gpu_share gpu_share.c gpu_worker.c ../demo/private_daemon.c)
  target_link_libraries(gpu_share PRIVATE oscar_client gpu_bench_base)
  target_compile_definitions(gpu_share PRIVATE BENCH_OSCARD="$<TARGET_FILE:oscard>" BENCH_OSCARCTL="$<TARGET_FILE:oscarctl>")
  add_dependencies(gpu_share oscard oscarctl)
endif()
