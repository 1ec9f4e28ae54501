/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka with what it needs before it, in that order. */
#ifndef OSCAR_TESTS_SUPPORT_CMOCKA_ORDER_H
#define OSCAR_TESTS_SUPPORT_CMOCKA_ORDER_H

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#endif
