"""The gateway's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from headway.contracts.config.base import Config, Identifier, LogFormat
from headway.contracts.errors import ConfigError

EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Names the variable that holds a secret: secrets never stand in a config."""


HostName = Annotated[
    str, StringConstraints(pattern=r"^(\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$", max_length=253)
]


Role = Literal["submit", "consume", "server", "admin"]
"""`submit` may ask for generation, rollouts, sessions and scores; `consume` may also wait, attach and
publish weights; `server` may register a generation server, and nothing else; `admin` may do everything,
also move what serves. `http.ACCESS` says which route asks for which."""
ROLES: tuple[Role, ...] = get_args(Role)
INCLUDED: Mapping[Role, frozenset[Role]] = {
    "submit": frozenset({"submit"}),
    "consume": frozenset({"submit", "consume"}),
    "server": frozenset({"server"}),
    "admin": frozenset(ROLES),
}
"""Roles that each role includes."""


class TokenConfig(Config):
    """A bearer token and what it may do."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the token in audit lines."""
    env: EnvironmentName
    """Environment variable that holds the token."""
    roles: tuple[Role, ...] = Field(min_length=1)
    """Roles of the token; `consume` includes `submit`, `admin` everything, `server` nothing
    else."""
    consumers: tuple[Identifier, ...] = Field((), max_length=1024)
    """Names of consumers that it may use though another token owns them: an agent's token lists the
    trainer's consumer. Any other name belongs to the token that used it first."""


class TLSConfig(Config):
    """Encrypted transport."""

    cert_file: str = Field(min_length=1)
    """Certificate chain, PEM."""
    key_file: str = Field(min_length=1)
    """Private key, PEM."""
    client_ca_file: str | None = None
    """Clients must show a certificate that this authority signed; None asks for none."""


class ServiceConfig(Config):
    """Address, tokens and limits of an HTTP service."""

    host: str = "127.0.0.1"
    """Address to bind; beyond loopback, tokens are asked for unless `allow_anonymous`."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    ready_file: str | None = None
    """File to write `{"url", "pid"}` into once the service answers."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body."""
    token_env: EnvironmentName | None = None
    """Environment variable with a bearer token that has every role; None has no such token."""
    tokens: tuple[TokenConfig, ...] = Field((), max_length=64)
    """Further tokens, each with its roles. Without any token, every request is let through."""
    allow_anonymous: bool = False
    """Listen beyond loopback without a token."""
    allowed_hosts: tuple[HostName, ...] = Field((), max_length=64)
    """Names of this service: requests without a token for other names are refused, as are those of
    web pages of other hosts. IP addresses, loopback names, names without a dot and the machine's own
    need not stand here; `.example.com` allows all names below, `*` all."""
    tls: TLSConfig | None = None
    """TLS of the service; None speaks plain HTTP."""
    header_timeout_s: float = Field(10.0, gt=0.0)
    """Seconds after which a connection whose request has not arrived whole is closed; its body has
    a second more for every 64 KiB that came."""
    unread_timeout_s: float = Field(60.0, gt=0.0)
    """Seconds after which a connection whose client reads nothing of an answer is closed."""
    max_connections: int = Field(8192, ge=1)
    """Connections at once; more get 503, or the place of an idle one of an address that has more."""
    drain_timeout_s: float = Field(5.0, ge=0.0)
    """After SIGTERM, seconds in which requests may end; what a generation server still generates
    then is answered with the tokens so far."""
    log_format: LogFormat = "auto"
    """Form of the log on standard error: lines of `text` for people, or of `json`. `auto` writes text on
    a terminal, JSON elsewhere."""

    @field_validator("tokens")
    @classmethod
    def _names_differ(cls, tokens: tuple[TokenConfig, ...]) -> tuple[TokenConfig, ...]:
        names = [token.name for token in tokens]
        if len(set(names)) < len(names):
            raise ValueError(f"tokens are named {', '.join(names)}; each needs a name of its own")
        return tokens

    def env_for(self, role: Role) -> str | None:
        """The variable with a token that has this role; None where no token is asked for.

        Raises:
            ConfigError: there are tokens, and none has it.
        """
        if self.token_env is not None or not self.tokens:
            return self.token_env
        for token in self.tokens:
            if any(role in INCLUDED[each] for each in token.roles):
                return token.env
        raise ConfigError(f"service.tokens has none with the role {role}; add one")


def default_port(port: int) -> BeforeValidator:
    """A `service` section that names no port listens on this one."""
    return BeforeValidator(
        lambda given: {"port": port, **given} if isinstance(given, dict) else given
    )


class ExecutorConfig(Config):
    """Bounds on running rollouts."""

    max_concurrent: int = Field(512, ge=1)
    """Maximum number of trajectories running at once."""
    max_queued: int = Field(65536, ge=1)
    """Maximum number of trajectories in the queue; further submissions get 429."""
    max_prompt_bytes: int = Field(1 << 20, ge=1024)
    """Maximum bytes of one prompt or conversation in UTF-8; longer ones are refused before they are
    encoded. A mebibyte takes about a second of one core, and 300 MiB meanwhile."""
    max_row_size: int = Field(1 << 21, ge=1024)
    """Maximum number of characters and values in the `data` of one prompt."""
    max_queued_per_consumer: int | None = Field(None, ge=1)
    """The same for each consumer; None bounds only their sum."""
    adapt: bool = True
    """Fewer than `max_concurrent` run while servers run out of cache: the bound is halved when
    they preempt, and grows again while they do not."""
    min_concurrent: int = Field(8, ge=1)
    """Lower bound at which halving stops."""
    lease_s: float = Field(30.0, gt=0.0)
    """Seconds of silence after which a gateway's rollouts are run by another that shares the ledger."""
    rollout_timeout_s: float = Field(600.0, gt=0.0)
    """Seconds after which a running rollout is cancelled and recorded as failed."""
    max_attempts: int = Field(5, ge=1)
    """Attempts per rollout while generation servers fail under it."""
    error_window: int = Field(128, ge=1)
    """The error budget looks at this many most recent rollouts."""
    error_budget: int = Field(16, ge=0)
    """Failures within the window that are tolerated; one more and `wait` raises."""
    reward_workers: int = Field(1, ge=1)
    """Processes that run verifiers for one consumer; as many more start when others need them."""
    reward_timeout_s: float = Field(10.0, gt=0.0)
    """Seconds after which a verifier is killed."""
    reward_memory_bytes: int = Field(4 << 30, ge=256 << 20)
    """Maximum address space of each process that runs verifiers, in bytes."""
    reward_wait_s: float = Field(300.0, gt=0.0)
    """Seconds for a reward that awaits others, a sandbox or a reward model; then the answer is
    scored again. Its wait for a turn in the sandbox does not count."""
    reward_attempts: int = Field(3, ge=1)
    """Number of attempts to score one answer while the verifier itself fails."""
    max_concurrent_scores: int = Field(32, ge=1)
    """Number of answers of `POST /v1/rewards/score` that are scored at once; more wait, and those
    of rollouts do not wait behind them."""


class SandboxConfig(Config):
    """Sandbox for untrusted programs."""

    type: Literal["auto", "bubblewrap", "landlock", "unsafe", "remote", "none"] = "auto"
    """`auto` takes the first of bubblewrap and landlock that contains a probe, or refuses programs."""
    allow_unsafe: bool = False
    """`unsafe`, also as the last resort of `auto`: resource limits only. A program can read and delete
    files."""
    workers: int | None = Field(None, ge=1)
    """Programs of one consumer that run at a time; None takes one per two cores. As many again are kept
    for consumers that run none."""
    wall_factor: float = Field(4.0, ge=1.0)
    """Wall seconds allowed per CPU second: a machine under load is no fault of the program."""
    cgroup: str | None = Field(None, pattern=r"^/")
    """Folder of cgroup v2 that was delegated to the service, with memory and pids, in which the kernel
    counts what programs use; None takes the one that systemd delegated, if any."""
    url: str | None = Field(None, pattern=r"^https?://[^\s]+$")
    """URL of a remote sandbox (`POST /run_code`, as SandboxFusion has it)."""

    @model_validator(mode="after")
    def _check(self) -> SandboxConfig:
        if (self.type == "remote") != (self.url is not None):
            raise ValueError(f"sandbox.type={self.type} with url={self.url}; remote needs a url")
        if self.type == "unsafe" and not self.allow_unsafe:
            raise ValueError(
                "sandbox.type=unsafe holds no program; set allow_unsafe to have it anyway"
            )
        return self


class OutboundConfig(Config):
    """Services that workflows and rewards may call."""

    allow: tuple[str, ...] = Field((), max_length=64)
    """URL prefixes, `https://rewards.example/v1/`; nothing else is called."""
    allow_private: bool = False
    """Also addresses of private networks, loopback and link-local."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Maximum seconds of one call."""
    service_wait_s: float = Field(300.0, gt=0.0)
    """Calls wait this long for a service that is away (no connection, 502, 503, 504) before their
    rollouts fail."""
    max_response_bytes: int = Field(1 << 20, ge=1024)
    """Largest answer that is read."""
    max_connections: int = Field(256, ge=1)
    """Calls at once; more wait."""


class SessionsConfig(Config):
    """Sessions, in which a client of this service runs the turns."""

    max_sessions: int = Field(1024, ge=1)
    """Open at once; more get 429."""
    idle_timeout_s: float = Field(600.0, gt=0.0)
    """A session without a request for so long fails."""
    max_turns: int = Field(256, ge=1)
    """Requests that are answered in one session; further ones are refused."""
    public_url: str | None = Field(None, pattern=r"^https?://[^\s]*[^\s/]$", max_length=512)
    """URL at which agents reach this gateway; None takes the host to which `POST /v1/sessions` was
    sent if it is a name of this gateway, and otherwise, as for agents that a workflow calls, the
    address on which it listens."""


class RetentionConfig(Config):
    """Time for which ended rollouts are remembered."""

    ended_s: float | None = Field(None, gt=0.0)
    """Seconds after its end until a rollout is forgotten, except in counts; None keeps everything."""
    interval_s: float = Field(60.0, gt=0.0)
    """Seconds between searches for rollouts to forget."""


class FleetConfig(Config):
    """Monitoring of generation servers."""

    lease_s: float = Field(10.0, gt=0.0)
    """A server that sent no heartbeat for this long is lost."""
    update_timeout_s: float = Field(300.0, gt=0.0)
    """Deadline of preparing a version on one server, upload included."""
    commit_timeout_s: float = Field(60.0, gt=0.0)
    """Deadline of committing a version on one server; under `update_policy: drain`, running sequences
    end first."""
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the live servers that must have staged a version before it is committed; 1 asks for
    all. The others are fenced until they have caught up."""
    straggler_s: float = Field(30.0, ge=0.0)
    """Seconds for the others to stage a version too, once the quorum has; a server that takes
    longer is fenced and catches up. Over a process group all are waited for."""
    commit_order: Literal["simultaneous", "rolling"] = "simultaneous"
    """All servers swap at once, or one after the other."""
    server_wait_s: float = Field(300.0, gt=0.0)
    """A request waits this long for a ready server with room before it fails."""
    max_failures: int = Field(3, ge=1)
    """Failed requests in a row after which a server is quarantined."""
    max_deaths: int = Field(2, ge=1)
    """Number of servers that may die with a request in flight; it then fails for good, and no other
    server gets it. A server that was stopped cleanly, or fell silent, did not die."""
    quarantine_s: float = Field(10.0, gt=0.0)
    """Length of the first quarantine; doubled each time up to 16 times, then a single request tries
    the server."""
    hedge_after_s: float | None = Field(None, gt=0.0)
    """A request without an answer for so long is also sent to another server, and the first answer
    counts; None never does. It favours short answers where both sample by themselves."""
    target_queue_wait_s: float = Field(30.0, gt=0.0)
    """`/v1/scale` asks for as many servers as keep the wait below this."""
    max_servers: int | None = Field(None, ge=1)
    """`/v1/scale` asks for no more."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that the servers ask for."""


class FollowConfig(Config):
    """A store in which somebody else's trainer leaves versions, to be published by the gateway."""

    path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    """Directory of `weight_v000001` and so on, or its fsspec URL (`s3://bucket/run`); every server
    reads it too, below its `weights.allow`."""
    interval_s: float = Field(1.0, gt=0.0)
    """Seconds between looks at it."""


def _named_path(given: object) -> object:
    return {"path": given} if isinstance(given, str) else given


class GatewayConfig(Config):
    service: Annotated[ServiceConfig, default_port(8000)] = ServiceConfig(port=8000)
    tokenizer: str = Field(min_length=1)
    """Directory with tokenizer.json of the model that the servers run."""
    served_model_name: str | None = Field(None, min_length=1, max_length=256)
    """Name of the model for clients of OpenAI's and SGLang's API; None takes the last part of
    `tokenizer`."""
    ledger: str = "ledger.sqlite"
    """SQLite file of the trajectory ledger; `:memory:` keeps nothing; a `redis://` or `rediss://` URL is
    shared by several gateways."""
    modules: tuple[str, ...] = Field((), max_length=64)
    """Python modules to import at the start, whose `register_workflow`, `register_reward`,
    `register_filter` and `register_tool` calls add names. Nothing that a request carries is ever
    imported."""
    executor: ExecutorConfig = ExecutorConfig()
    fleet: FleetConfig = FleetConfig()
    follow: Annotated[FollowConfig | None, BeforeValidator(_named_path)] = None
    """Publish what a trainer leaves in a store; a text is its path. None follows none."""
    sandbox: SandboxConfig = SandboxConfig()
    outbound: OutboundConfig = OutboundConfig()
    sessions: SessionsConfig = SessionsConfig()
    retention: RetentionConfig = RetentionConfig()
    dashboard: bool = True
    """Serve the dashboard at `/ui`."""
