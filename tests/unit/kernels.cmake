# SPDX-License-Identifier: Apache-2.0
set(kernel_fixture ${PROJECT_SOURCE_DIR}/tests/support/kernel_fixture.c)
oscar_test(kernels_codec SOURCES kernels_codec.c ${kernel_fixture} ${PROJECT_SOURCE_DIR}/tests/support/golden_codec.c
  LIBS oscar_kernels)
oscar_test(kernels_pack SOURCES kernels_pack.c ${kernel_fixture} LIBS oscar_kernels)
oscar_test(kernels_store SOURCES kernels_store.c ${kernel_fixture} LIBS oscar_kernels)
oscar_test(kernels_batch LABELS unit tsan SOURCES kernels_batch.c attend_fixture.c LIBS oscar_kernels m)
oscar_test(kernels_merge SOURCES kernels_merge.c attend_fixture.c LIBS oscar_kernels m)
oscar_test(kernels_memory SOURCES kernels_memory.c ${kernel_fixture} LIBS oscar_kernels)
oscar_test(kernels_stream LABELS unit tsan SOURCES kernels_stream.c ${kernel_fixture} LIBS oscar_kernels)
