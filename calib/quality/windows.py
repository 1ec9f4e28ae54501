# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence oscard holds packed: whole pages between the sink and the recent window."""

from dataclasses import dataclass

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Windows:
    """Pages that stay BF16."""

    sink_pages: int  # at the start
    recent_pages: int  # full ones before the running page

    def packed(self, tokens):
        """First and end of the tokens that are packed when `tokens` are committed."""
        first = self.sink_pages * PAGE_TOKENS
        return first, max(first, (tokens // PAGE_TOKENS - self.recent_pages) * PAGE_TOKENS)


OSCAR = Windows(sink_pages=1, recent_pages=4)
NONE = Windows(sink_pages=0, recent_pages=0)
