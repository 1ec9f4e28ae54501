# SPDX-License-Identifier: Apache-2.0
# What of calib/quality needs numpy alone, by the first Python that has it: the codec's golden vectors, the windows and
# what is kept of earlier runs.
find_program(OSCAR_PYTHON NAMES python3 DOC "Python for the tests")
set(quality_python ${OSCAR_PYTHON})
execute_process(COMMAND ${quality_python} -c "import numpy" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(NOT status EQUAL 0 AND EXISTS /usr/bin/python3)
  set(quality_python /usr/bin/python3) # the system's packages are for the system's Python
endif()
if(quality_python)
  add_test(NAME quality COMMAND ${quality_python} -B -m unittest discover -s ${PROJECT_SOURCE_DIR}/calib/quality)
  set_tests_properties(quality PROPERTIES LABELS unit TIMEOUT 300)
endif()
