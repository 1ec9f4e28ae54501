# SPDX-License-Identifier: Apache-2.0
"""An oscard of its own for a program in Python, which does not outlive it. Needs Python only."""

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

_PATIENCE_S = 60
_BUDGET = "2G"


class Daemon:
    """An oscard of the host backend in a folder of its own, from `with` to its end, or until SIGTERM ends the program.

    For the main thread, which takes signals.
    """

    def __init__(self, program, calibrations):
        self._program, self._calibrations = program, Path(calibrations).resolve()
        self._process = None
        self._terminated = False

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="oscar-quality-")
        folder = Path(self._folder.name)
        self.socket = str(folder / "worker.sock")
        self._before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            self._start(folder)
        except TimeoutError:
            said = (folder / "log").read_text(errors="replace")
            self.__exit__()
            raise SystemExit(f"quality: oscard does not become ready\n{said}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error):
        if self._process is not None:
            self._process.terminate()
        signal.signal(signal.SIGTERM, self._before)
        if self._process is not None:
            self._process.wait(_PATIENCE_S)
        self._folder.cleanup()

    def _start(self, folder):
        arguments = ("--runtime-dir", folder, "--backend", "host", "--budget", _BUDGET)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(folder / "notify"))
            notify.settimeout(_PATIENCE_S)
            with open(folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    [self._program, *map(str, arguments), "--calibration-directory", self._calibrations],
                    env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            if self._terminated:
                signal.raise_signal(signal.SIGTERM)
            while b"READY=1" not in notify.recv(4096):
                pass

    def _terminate(self, number, _frame):
        """Not by an exception: one that is raised while Python destroys an object is lost."""
        if self._process is None:
            self._terminated = True  # and it may be starting: _start knows when
            return
        self.__exit__()
        signal.raise_signal(number)
