"""What can go wrong, as a tree.

    LmtoolsError
    ├── ConfigError        an option, or a combination of options, that cannot work
    ├── DownloadError      a server, a mirror or an archive that does not give what it should
    ├── DataError          text, a dictionary or a binarized split that is broken or does not fit
    ├── CheckpointError    a checkpoint that is broken, incomplete or does not fit
    └── WorkerError        a worker process that failed or was killed

A message is one line that says what, where (`path:line`), what was found against what was expected, and what
to do. The command line catches LmtoolsError once, prints that line and exits 1, or 2 for a ConfigError. Everything
else that is raised is a bug and keeps its traceback.
"""


class LmtoolsError(Exception):
    """Root of the errors that are the input's or the machine's fault rather than a bug.

    Attributes:
        exit_code: what the command line ends with.
    """

    exit_code = 1


class ConfigError(LmtoolsError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


class DownloadError(LmtoolsError):
    """A server, a mirror or an archive that does not give what it should."""


class DataError(LmtoolsError):
    """Text, a dictionary or a binarized split that is broken or does not fit."""


class CheckpointError(LmtoolsError):
    """A checkpoint that is broken, incomplete or does not fit."""


class WorkerError(LmtoolsError):
    """A worker process that failed or was killed.

    Attributes:
        traceback: the worker's own, when what it raised is a bug rather than an LmtoolsError; else empty.
        exit_code: that of the worker's error.
    """

    def __init__(self, message: str, *, traceback: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.exit_code = exit_code
