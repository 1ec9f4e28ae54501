# SPDX-License-Identifier: Apache-2.0
"""The one kind of failure that a user of the capture program sees."""


class CaptureError(Exception):
    """A cause that the user can act on; its text is shown as one line, without a traceback."""
