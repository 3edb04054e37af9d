"""Places in a test's own script where a fault may be injected, beside those that the session has."""


def point(name: str) -> None:
    """Fire the fault that is placed at ``name`` for the present step, if any. Does nothing outside a job of ``instep run``."""
    from instep.session import current

    session = current()
    if session is not None:
        session.point(name)
