# SPDX-License-Identifier: Apache-2.0
oscar_test(attend_oracle TIMEOUT 300 SOURCES attend_oracle.c attend_fixture.c LIBS oscar_kernels m)
oscar_test(attend_invariants LABELS unit tsan TIMEOUT 300 SOURCES attend_invariants.c attend_fixture.c LIBS oscar_kernels m)
