# SPDX-License-Identifier: Apache-2.0
# client/python against the real daemon, by the first Python that has numpy; on a GPU by the python3 in PATH, if it has torch.
# Python cannot load a library with a sanitizer in it.
if(NOT OSCAR_SANITIZE)
  find_program(OSCAR_PYTHON NAMES python3 DOC "Python for the tests of client/python")
  set(python ${OSCAR_PYTHON})
  execute_process(COMMAND ${python} -c "import numpy" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0 AND EXISTS /usr/bin/python3)
    set(python /usr/bin/python3) # the system's packages are for the system's Python
  endif()
  set(programs "OSCARD=$<TARGET_FILE:oscard>;OSCAR_LIBRARY=$<TARGET_FILE:oscar>;PYTHONDONTWRITEBYTECODE=1")
  set(package ${PROJECT_SOURCE_DIR}/client/python)
  set(replay ${PROJECT_SOURCE_DIR}/tests/gpu/torch_replay.py)
  if(python)
    add_test(NAME python COMMAND ${python} ${package}/tests/run.py)
    add_test(NAME torch_replay COMMAND ${python} ${replay})
    set_tests_properties(python torch_replay PROPERTIES LABELS integration TIMEOUT 240 SKIP_RETURN_CODE 77
      ENVIRONMENT "${programs}")
    set_property(TEST torch_replay APPEND PROPERTY ENVIRONMENT
      OSCAR_TEST_BACKEND=host PYTHONPATH=${package}:${package}/tests)
    if(TARGET emulated_cuda) # tensors and streams of a GPU, without one
      set_property(TEST python APPEND PROPERTY ENVIRONMENT "OSCAR_CUDA_EMULATION=$<TARGET_FILE:emulated_cuda>")
    endif()
  endif()
  if(OSCAR_PYTHON AND OSCAR_WITH_CUDA)
    oscar_gpu_program(oscard)
    oscar_gpu_program(oscar)
    add_test(NAME torch_replay_cuda COMMAND ${OSCAR_PYTHON} ${replay})
    set_tests_properties(torch_replay_cuda PROPERTIES LABELS gpu TIMEOUT 240 RUN_SERIAL ON SKIP_RETURN_CODE 77
      ENVIRONMENT "${programs};OSCAR_TEST_BACKEND=cuda;PYTHONPATH=${package}:${package}/tests")
  endif()
endif()
