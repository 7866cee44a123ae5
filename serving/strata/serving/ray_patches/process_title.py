"""Makes Ray set the process title with the setproctitle package instead of its own copy.

The title is written over the process's original environment, so its place must be located before the environment changes. A
fork of the fork server changes its environment before it loads Ray, and Ray's copy of setproctitle then fails to find the place.

Written for Ray 2.60. No longer needed when `ray._raylet` has no setproctitle of its own; the test of this file fails then.
"""


def locate() -> None:
    """Call it before the environment changes."""
    from setproctitle import getproctitle

    getproctitle()


def install() -> None:
    import ray._raylet
    from setproctitle import getproctitle, setproctitle

    ray._raylet.getproctitle, ray._raylet.setproctitle = getproctitle, setproctitle
