# SPDX-License-Identifier: Apache-2.0
oscar_test(attend_oracle SOURCES attend_oracle.c attend_fixture.c LIBS oscar_kernels m)
oscar_test(attend_invariants SOURCES attend_invariants.c attend_fixture.c LIBS oscar_kernels m)
