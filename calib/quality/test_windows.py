# SPDX-License-Identifier: Apache-2.0
"""The windows against what DESIGN says of them. Needs nothing."""

import unittest

from windows import NONE, OSCAR, PAGE_TOKENS


class Oscar(unittest.TestCase):
    def test_sink_and_at_least_the_last_256_tokens_stay_dense(self):
        for tokens in range(5000):
            first, end = OSCAR.packed(tokens)
            self.assertEqual(first, 64)
            if tokens < 384:
                self.assertEqual(end, 64)
            else:
                self.assertIn(tokens - end, range(256, 320))
            self.assertEqual(end % PAGE_TOKENS, 0)


class WithoutWindows(unittest.TestCase):
    def test_all_but_the_running_page_is_packed(self):
        for tokens in range(1000):
            self.assertEqual(NONE.packed(tokens), (0, tokens - tokens % PAGE_TOKENS))


if __name__ == "__main__":
    unittest.main()
