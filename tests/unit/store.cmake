# SPDX-License-Identifier: Apache-2.0
# The store on a fake device: no daemon, no kernels.
oscar_library(oscar_store_rig ${PROJECT_SOURCE_DIR}/tests/support/fake_device.c ${PROJECT_SOURCE_DIR}/tests/support/store_rig.c
  ${PROJECT_SOURCE_DIR}/tests/support/store_oracle.c)
target_link_libraries(oscar_store_rig PUBLIC oscar_store PkgConfig::CMOCKA)

foreach(subject clients device flight flush index life random space)
  oscar_test(store_${subject} LABELS unit tsan SOURCES store_${subject}.c LIBS oscar_store_rig)
endforeach()
