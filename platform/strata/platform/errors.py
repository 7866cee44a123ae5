"""Errors that are the user's to mend: the command line prints cause and fix. Anything else is a bug and keeps its traceback."""


class UserError(ValueError):
    """Carries the cause and the fix apart, so that the command line, the API and tests can show either."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause}\n{fix}")
        self.cause = cause
        self.fix = fix

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return type(self), (self.cause, self.fix)  # Ray pickles errors on their way back from a worker
