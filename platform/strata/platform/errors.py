"""Errors that the user can fix. The command line prints cause and fix; any other exception is a bug and prints a traceback."""

SHOWN = 40  # characters of a user's value that an error repeats


class UserError(ValueError):
    """An error with separate `cause` and `fix` texts, for the command line, the HTTP API and tests."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause}\n{fix}")
        self.cause = cause
        self.fix = fix

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return type(self), (self.cause, self.fix)  # Ray pickles errors on their way back from a worker


def shown(value: object, most: int = SHOWN) -> str:
    """A user's value as an error repeats it: on one line, and short."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]}..."
