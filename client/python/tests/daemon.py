# SPDX-License-Identifier: Apache-2.0
"""A real oscard for the tests, in a directory of its own. OSCARD names the program."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

READY_S = 20
PACKAGE = Path(__file__).resolve().parent.parent


class Daemon:
    """Started by `with`; `socket` is its path. What it logged is shown when it does not start or does not end well."""

    def __init__(self, budget: str = "64M", calibrations: str | None = None, backend: str = "host") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oscar-py-"))
        self.socket = str(self.folder / "worker.sock")
        self.options = ["--runtime-dir", str(self.folder), "--backend", backend, "--budget", budget]
        if calibrations is not None:
            self.options += ["--calibration-directory", calibrations]
        self.process = None

    def __enter__(self) -> "Daemon":
        notify_path = str(self.folder / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, open(self.folder / "log", "wb") as log:
            notify.bind(notify_path)
            notify.settimeout(READY_S)
            self.process = subprocess.Popen(
                [os.environ["OSCARD"], *self.options],
                env={**os.environ, "NOTIFY_SOCKET": notify_path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                while b"READY=1" not in notify.recv(4096):
                    pass
            except OSError:
                self._end()
                raise RuntimeError("oscard does not become ready") from None
        return self

    def __exit__(self, *_error) -> None:
        self._end()

    def kill(self) -> None:
        """Ends the daemon at once, as a crash does."""
        self.process.kill()
        self.process.wait()

    def _end(self) -> None:
        killed = self.process.poll() is not None
        self.process.terminate()
        status = self.process.wait(timeout=READY_S)
        if status != 0 and not killed:
            sys.stderr.write((self.folder / "log").read_text(errors="replace"))
        shutil.rmtree(self.folder, ignore_errors=True)

    def run_worker(self, program: str) -> str:
        """Runs Python text in another process with this daemon's socket; returns what it printed."""
        environment = {
            **os.environ,
            "OSCAR_SOCKET": self.socket,
            "PYTHONPATH": f"{PACKAGE}{os.pathsep}{PACKAGE / 'tests'}",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True
        )
        return done.stdout
