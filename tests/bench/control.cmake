# SPDX-License-Identifier: Apache-2.0
add_executable(control_bench
  control_bench.c control_floor.c samples.c ../demo/private_daemon.c ../support/worker_process.c)
target_link_libraries(control_bench PRIVATE
  oscar_options oscar_client oscar_report PkgConfig::JANSSON PkgConfig::XXHASH)
target_compile_definitions(control_bench PRIVATE
  BENCH_OSCARD="$<TARGET_FILE:oscard>" BENCH_OSCARCTL="$<TARGET_FILE:oscarctl>")
add_dependencies(control_bench oscard oscarctl)
