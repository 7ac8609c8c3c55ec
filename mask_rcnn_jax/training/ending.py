"""How a logger ends a run before its time."""


class StopTraining(Exception):
    """Raised by a logger, ends the run in good order: its state is saved and returned, once scores
    that are pending are logged. The state is not evaluated for it.

    Its text becomes the reason in the log.
    """
