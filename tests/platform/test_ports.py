import socket

import pytest

from strata.platform import ports
from strata.platform.errors import UserError


def test_a_port_in_use_is_named_with_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"Port {port} on 127.0.0.1 is in use") as error:
            ports.require_free(port, "127.0.0.1", "serve.port")
    offered = int(error.value.fix.rsplit("=", 1)[1].rstrip("."))
    assert offered != port and ports.is_free(offered)
    ports.require_free(port, "127.0.0.1", "serve.port")
