# SPDX-License-Identifier: Apache-2.0
"""An oscard ends with its program, also when that is terminated. A script stands for oscard. Needs Python only."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PATIENCE_S = 60

# Leaves its number in its folder. With TEST_READY it tells who started it that it is ready; else it tells the test
# where the folder is, and who started it, over and over, that it is not. Only a signal ends it.
OSCARD = f"""#!{sys.executable}
import os, signal, socket, sys
from pathlib import Path
Path(sys.argv[2], "process").write_text(str(os.getpid()))
tell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
if "TEST_READY" in os.environ:
    tell.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
else:
    tell.sendto(sys.argv[2].encode(), os.environ["TEST_SOCKET"])
    try:
        while True:
            tell.sendto(b"STATUS=starting", os.environ["NOTIFY_SOCKET"])
    except OSError:
        pass
while True:
    signal.pause()
"""

# Tells the test where the folder is once it has its oscard. It stays without a call that a signal could just miss.
PROGRAM = """
import os, socket, sys
from oscard import Daemon
with Daemon(sys.argv[1], ".") as daemon:
    said = os.path.dirname(daemon.socket)
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(said.encode(), os.environ["TEST_SOCKET"])
    while True:
        pass
"""


class Oscard(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.oscard = self.folder / "oscard"
        self.oscard.write_text(OSCARD)
        self.oscard.chmod(0o700)

    def expect_end_with_program(self, **environment):
        """Terminates a program as soon as the test is told of its oscard."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(str(self.folder / "told"))
            told.settimeout(PATIENCE_S)
            program = subprocess.Popen(
                [sys.executable, "-B", "-c", PROGRAM, self.oscard],
                cwd=Path(__file__).parent,
                env={**os.environ, "TEST_SOCKET": str(self.folder / "told"), **environment},
            )
            self.addCleanup(program.wait)
            self.addCleanup(program.kill)
            folder = Path(told.recv(4096).decode())
        process = int((folder / "process").read_text())
        self.addCleanup(self.kill, process)
        program.terminate()
        self.assertEqual(program.wait(timeout=PATIENCE_S), -signal.SIGTERM)
        self.assertRaises(ProcessLookupError, os.kill, process, 0)
        self.assertFalse(folder.exists())

    @staticmethod
    def kill(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def test_ends_with_a_program_that_is_terminated(self):
        self.expect_end_with_program(TEST_READY="1")

    def test_ends_with_a_program_that_still_waits_for_it(self):
        self.expect_end_with_program()


if __name__ == "__main__":
    unittest.main()
