"""Defines the file of a reward server: its clients' rights and limits, and, as in a recipe, its scorers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from omni_async.config import ConfigError, schema
from omni_async.config import reward as sections
from omni_async.config.load import decode
from omni_async.config.section import InMemory, Plain, Seconds, Section, SizeText, most
from omni_async.config.tree import errors_of, read_tree
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.server.listener import read_token, require_token

# One of each part: a server does not know what its clients generate.
_ANY_MEDIA = (
    MediaShape("image", (3, 1, 1)),
    MediaShape("video", (1, 3, 1, 1), 1.0),
    MediaShape("audio", (1, 1), 1.0),
    MediaShape("text", ()),
)


class Server(Section, kw_only=True, frozen=True):
    host: Plain = "127.0.0.1"
    """Address to listen at. An address that other machines reach needs a token."""
    port: Annotated[int, most(65535, ge=0)] = 8700
    """Port to listen at; 0: a free port, which is printed."""
    token: Plain | None = None
    """Secret that clients send, as the environment variable that contains it: `env:NAME`. null: anyone who reaches the
    port may use the server."""
    max_request: SizeText = "256MiB"
    """Largest body of a request."""
    max_held: SizeText = "1GiB"
    """Bytes of requests that are held at once; the next one is read when there is room. A client's address holds half
    of them, or one body."""
    max_connections: Annotated[int, most(100_000, ge=1)] = 1000
    """Connections at once, at most seven of eight of one address. Beyond that, a new connection closes a silent one, or
    else an idle one. It never ends a request in progress."""
    max_waiting: InMemory = 4096
    """Samples that may wait for a scorer; further requests are answered with 503. A client's address may have
    half of them, or one request; addresses take turns."""
    requests_per_s: Annotated[float, most(1e6, gt=0)] = 200.0
    """Requests a second of one client's address, on average; further requests are answered with 429. Requests
    without the token are counted separately."""
    burst: Annotated[int, most(1_000_000, ge=1)] = 1000
    """Requests of one address that are taken at once after a pause."""
    read_s: Seconds = 30.0
    """Longest that the body of a request may take to arrive. A body that falls more than a sixth of this time behind a
    steady pace is refused (408). While others wait for its room, the limit is a thirtieth."""
    grace_s: Seconds = 30.0
    """How long to wait at the end for requests in progress."""
    remembered: Annotated[int, most(1_000_000, ge=0)] = 10_000
    """Recent scores that a repeated sample is answered from; 0: it is scored again."""


class ServerConfig(Section, kw_only=True, frozen=True):
    server: Server = Server()
    reward: sections.Reward
    placement: schema.Placement = schema.Placement()
    """As in a recipe; only `reward.gpus` has a meaning here."""


def load_server(path: Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Load the file at `path` with `overrides` `key.path=value`. Raises ConfigError, one line; loads no scorer."""
    tree = read_tree(path, overrides)
    with errors_of(path):
        config = decode(tree, ServerConfig)
        if not config.reward.scorers:
            raise ConfigError(f"reward.scorers: empty; registered are {', '.join(registry.names())}")
        for scorer in config.reward.scorers:
            try:
                registry.check(scorer, _ANY_MEDIA)
            except registry.ScorerConfigError as error:
                raise ConfigError(f"reward.scorers: {error}") from None
        require_token(config.server.host, token_of(config.server), "server.host", "server.token")
    return config


def token_of(server: Server) -> str | None:
    """Return the secret itself; ConfigError if its variable is not set, or it is too short."""
    return read_token(server.token, "server.token")
