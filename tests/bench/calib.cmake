# SPDX-License-Identifier: Apache-2.0
add_executable(calib_bench calib_bench.c)
target_link_libraries(calib_bench PRIVATE oscar_calib oscar_report m)
