# SPDX-License-Identifier: Apache-2.0
# Counts the results in a JUnit file of ctest: prints "passed failed skipped". A cmocka program counts by its own cases, any other
# test as one. A program that ctest saw fail counts as at least one failure: it may have died before cmocka could say so.

# The number in cmocka's summary line; a program's two output streams may share a line.
function cases(word) {
    return match($0, "\\[  " word " +\\] [0-9]+ test\\(s\\)") ? substr($0, RSTART + 13) + 0 : 0
}

/<testcase / {
    status = $0
    sub(/.* status="/, "", status)
    sub(/".*/, "", status)
    ran_passed = ran_failed = ran_skipped = 0
}

/<skipped message="Unable/ { status = "fail" }

{
    ran_passed += cases("PASSED")
    ran_failed += cases("FAILED")
    ran_skipped += cases("SKIPPED")
}

/<\/testcase>/ {
    if (status == "run" && ran_passed + ran_skipped == 0)
        ran_passed = 1
    else if (status == "notrun" || status == "disabled")
        ran_skipped = 1
    else if (status == "fail" && ran_failed == 0)
        ran_failed = 1
    passed += ran_passed
    failed += ran_failed
    skipped += ran_skipped
}

END { print passed + 0, failed + 0, skipped + 0 }
