# SPDX-License-Identifier: Apache-2.0
add_test(NAME deploy_install COMMAND ${PROJECT_SOURCE_DIR}/tests/deploy/install.sh ${PROJECT_BINARY_DIR})
set_tests_properties(deploy_install PROPERTIES LABELS unit TIMEOUT 300 SKIP_RETURN_CODE 77)

add_test(NAME readme_quick_start COMMAND ${PROJECT_SOURCE_DIR}/tests/deploy/quick_start.sh ${PROJECT_BINARY_DIR}
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
set_tests_properties(readme_quick_start PROPERTIES LABELS integration TIMEOUT 300)

add_test(NAME client_manual COMMAND ${PROJECT_SOURCE_DIR}/tests/deploy/manual.sh ${PROJECT_BINARY_DIR}
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
set_tests_properties(client_manual PROPERTIES LABELS integration TIMEOUT 300)
