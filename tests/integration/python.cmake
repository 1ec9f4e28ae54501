# SPDX-License-Identifier: Apache-2.0
# client/python against the real daemon, by the first Python that has numpy. Python cannot load a library with a sanitizer in it.
if(NOT OSCAR_SANITIZE)
  find_program(OSCAR_PYTHON NAMES python3 DOC "Python for the tests of client/python")
  set(python ${OSCAR_PYTHON})
  execute_process(COMMAND ${python} -c "import numpy" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0 AND EXISTS /usr/bin/python3)
    set(python /usr/bin/python3) # the system's packages are for the system's Python
  endif()
  if(python)
    add_test(NAME python COMMAND ${python} ${PROJECT_SOURCE_DIR}/client/python/tests/run.py)
    set_tests_properties(python PROPERTIES LABELS integration TIMEOUT 240 SKIP_RETURN_CODE 77
      ENVIRONMENT "OSCARD=$<TARGET_FILE:oscard>;OSCAR_LIBRARY=$<TARGET_FILE:oscar>;PYTHONDONTWRITEBYTECODE=1")
    if(TARGET emulated_cuda) # tensors and streams of a GPU, without one
      set_property(TEST python APPEND PROPERTY ENVIRONMENT "OSCAR_CUDA_EMULATION=$<TARGET_FILE:emulated_cuda>")
    endif()
  endif()
endif()
