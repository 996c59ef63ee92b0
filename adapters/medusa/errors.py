"""What the tool tells its user instead of going on. Knows nothing of where it is raised."""


class HeadsError(Exception):
    """One sentence for the user: what is wrong, and with which name or file."""


def first_line(error: BaseException) -> str:
    """The beginning of another library's message, which may run over pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
