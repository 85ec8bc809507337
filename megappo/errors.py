"""The error a user can mend: one line that says what, the value, why, and the fix. The CLI turns it into exit code 2."""


class UserError(ValueError):
    """Bad input from the user (config, data, model folder). `str(error)` is the whole message."""


class RunFailed(RuntimeError):
    """A run that started and could not go on. `str(error)` names the first cause; the CLI exits with 1."""


class PeerFailed(RunFailed):
    """Another rank has failed and will say why; this one only tells that it cannot go on."""
