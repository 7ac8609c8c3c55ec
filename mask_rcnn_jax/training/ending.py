"""How a logger ends a run before its time."""


class StopTraining(Exception):
    """Raised by a logger, ends the run in good order: saved, scored, logged and returned.

    Its text becomes the reason in the log.
    """
