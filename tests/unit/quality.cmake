# SPDX-License-Identifier: Apache-2.0
# What of calib/quality needs numpy alone, by the first Python that has it: the codec's golden vectors and the windows.
find_program(OSCAR_PYTHON NAMES python3 DOC "Python for the tests")
foreach(python ${OSCAR_PYTHON} /usr/bin/python3)
  execute_process(COMMAND ${python} -c "import numpy" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(status EQUAL 0)
    break()
  endif()
endforeach()
add_test(NAME quality COMMAND ${python} -B -m unittest discover -s ${PROJECT_SOURCE_DIR}/calib/quality)
set_tests_properties(quality PROPERTIES LABELS unit TIMEOUT 120)
