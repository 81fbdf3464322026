"""The servers a recipe names, of teachers and of rollouts: their commands, and running them on this machine for a while."""

import ipaddress
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from opd.errors import UserError
from opd.processes import die_with_parent
from opd.students.config import SamplerConfig, StudentConfig
from opd.teachers.config import FrozenConfig

if TYPE_CHECKING:
    from opd.config import RunConfig

POLL_S = 0.2
STOP_S = 40.0  # a server that was asked to stop answers what it accepted first


@dataclass(frozen=True)
class ServerPlan:
    """One server process. `arguments` are those of `opd serve` without address and token."""

    url: str
    names: tuple[str, ...]  # the recipe's teachers that it answers for; a rollout server answers for none
    arguments: tuple[str, ...]
    token_file: str | None
    serves: Literal["teacher", "student"] = "teacher"

    @property
    def sections(self) -> tuple[str, ...]:
        """The recipe's sections with its address."""
        return ("sampler",) if self.serves == "student" else tuple(f"teachers.{name}" for name in self.names)

    @property
    def field(self) -> str:
        """The recipe's field that errors name."""
        return f"{self.sections[0]}.url"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    @property
    def is_local(self) -> bool:
        """Whether the address is this machine's own loopback."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_plain(self) -> bool:
        """Whether it is `http://HOST:PORT`, which our servers have; any other is a proxy's."""
        return urlsplit(self.url).scheme == "http" and not urlsplit(self.url).path

    def command(self, host: str | None = None, token_file: str | None = None) -> list[str]:
        """The words after `opd`. A server behind a proxy takes the default address, which is on the loopback."""
        token = token_file or self.token_file
        address = ["--host", host or self.host, "--port", str(self.port)] if self.is_plain else []
        return ["serve", self.serves, *self.arguments, *address, *(["--token-file", token] if token else [])]


def server_plans(config: "RunConfig") -> list[ServerPlan]:
    """One plan for each address in the recipe, teachers first. Raises `UserError` as `teacher_plans` and `rollout_plans` do,
    and for an address of both."""
    plans = [*teacher_plans(config.frozen), *rollout_plans(config.sampler, config.student, config.objective.precision)]
    owners: dict[str, ServerPlan] = {}
    for plan in plans:
        if (owner := owners.setdefault(plan.url, plan)) is not plan:
            raise UserError(f"{plan.field}: {plan.url} is {owner.field} as well; give each server its own address")
    return plans


def rollout_plans(sampler: SamplerConfig, student: StudentConfig, precision: str) -> list[ServerPlan]:
    """One plan for each rollout server, which decodes as the sampler in process would. `precision`: of the loss."""
    words = ["--model", student.model, "--dtype", precision if sampler.dtype == "auto" else sampler.dtype]
    for section, options in ((student, ("revision", "attention")), (sampler, ("max_rows", "chunk_tokens", "kept_mib"))):
        words += _changed(section, options)
    plans = [ServerPlan(url, (), tuple(words), sampler.token_file, "student") for url in sampler.urls]
    for plan in plans:
        _check_startable(plan)
    return plans


def teacher_plans(teachers: Mapping[str, FrozenConfig]) -> list[ServerPlan]:
    """One plan for each address in the recipe; teachers that share an address share its process.

    Raises `UserError` where a teacher at an address names no model, or two of them want different ones.
    """
    sharing: dict[str, dict[str, FrozenConfig]] = {}
    for name, config in teachers.items():
        for url in config.urls:
            sharing.setdefault(url, {})[name] = config
    return [_plan(url, group) for url, group in sharing.items()]


def _plan(url: str, group: Mapping[str, FrozenConfig]) -> ServerPlan:
    bases = {name: _base_arguments(name, config) for name, config in group.items()}
    first = next(iter(bases))
    for name, arguments in bases.items():
        if arguments != bases[first] or group[name].token_file != group[first].token_file:
            raise UserError(
                f"teachers.{name}.url: {url} is shared with {first}, which differs in more than adapter and active_experts; "
                "give each its own address"
            )
    plan = ServerPlan(url, tuple(group), (), group[first].token_file)
    _check_startable(plan)
    arguments = list(bases[first])
    for name, config in group.items():
        called = config.served_as or name
        if config.adapter is not None:
            arguments += ["--adapter", f"{called}={config.adapter}"]
        if config.active_experts is not None:
            arguments += ["--active-experts", f"{called}={config.active_experts}"]
    return replace(plan, arguments=tuple(arguments))


def _base_arguments(name: str, config: FrozenConfig) -> tuple[str, ...]:
    if config.model is None:
        raise UserError(f"teachers.{name}.model is missing: name what is to be served at {config.url}")
    words = ["--model", config.model, *_changed(config, ("revision", "dtype", "attention", "max_batch_tokens"))]
    if config.quantization:
        words += ["--quantization", json.dumps(dict(config.quantization))]
    return tuple(words)


def _changed(section: FrozenConfig | StudentConfig | SamplerConfig, options: Sequence[str]) -> list[str]:
    """The options of `opd serve` for those fields that do not have their defaults."""
    words: list[str] = []
    for option in options:
        if (value := getattr(section, option)) != getattr(type(section), option):
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


def _check_startable(plan: ServerPlan) -> None:
    if plan.is_local and not plan.is_plain:
        raise UserError(f"{plan.field}: a server started here is at http://HOST:PORT, which {plan.url} is not")


def commands_elsewhere(plans: Sequence[ServerPlan], recipe: str, overrides: Sequence[str]) -> str:
    """The commands that do the same on several machines, by machine, as text.

    A loopback address becomes one on a machine of its own, the others stay. Servers of one machine get a device each.
    """
    counts: Counter[str] = Counter()
    machines: dict[str, list[ServerPlan]] = {}
    urls: dict[str, list[str]] = {}
    tokens: dict[str, str] = {}
    for plan in plans:
        machine, url = plan.host, plan.url
        if plan.is_local:
            counts[plan.serves] += 1
            machine = f"{plan.serves.upper()}{counts[plan.serves]}"
            url = f"http://{machine}:{plan.port}"
        machines.setdefault(machine, []).append(plan)
        for section in plan.sections:
            urls.setdefault(section, []).append(url)
            tokens[section] = plan.token_file or "token.txt"
    files = ", ".join(dict.fromkeys(tokens.values()))
    lines = [f"# the same on several machines; each needs {files}: one random word, the same everywhere (chmod 600)"]
    for machine, servers in machines.items():
        lines.append(f"# on {machine}:" if len(servers) == 1 else f"# on {machine}, each in a shell of its own:")
        for number, plan in enumerate(servers):
            device = f"CUDA_VISIBLE_DEVICES={number} " if len(servers) > 1 else ""
            proxy = "" if plan.is_plain else f"  # {plan.url} is a proxy's: name the port that it asks, with --port"
            lines.append(f"{device}opd {shlex.join(plan.command('0.0.0.0', plan.token_file or 'token.txt'))}{proxy}")
    words = [
        f"{section}.{key}"
        for section, addresses in urls.items()
        for key in (f"url={','.join(addresses)}", f"token_file={tokens[section]}")
    ]
    set_anew = {word.partition("=")[0] for word in words}
    kept = [override for override in overrides if override.partition("=")[0] not in set_anew]
    lines += ["# on the trainer:", "opd " + shlex.join(["train", recipe, *kept, *words])]
    return "\n".join(lines)


@contextmanager
def running(
    plans: Sequence[ServerPlan], logs: Path, devices: Sequence[str], wait_s: float, say: Callable[[str], None]
) -> Iterator[Callable[[], list[str]]]:
    """Starts the servers, waits until all are healthy, and stops them at the end. `devices` are CUDA devices, one a server.

    Gives a function that says, a line each, which servers have ended since it was last asked.

    Raises `UserError` for an address that is taken, and for a server that ends or is not healthy after `wait_s` seconds,
    with the last line it wrote.
    """
    for plan in plans:
        if _is_healthy(plan.url):
            raise UserError(f"{plan.field}: {plan.url} is served already; stop that server, or use opd train")
    logs.mkdir(parents=True, exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for number, plan in enumerate(plans):
            log = logs / f"{plan.port}.log"
            environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {})}
            with log.open("wb") as output:
                command = [sys.executable, "-m", "opd", *plan.command()]
                servers.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, preexec_fn=die_with_parent)
                )
            say(f"starting {', '.join(plan.sections)} at {plan.url} (log {log})")
        deadline = time.monotonic() + wait_s
        for plan, server in zip(plans, servers):
            _wait(plan, server, logs / f"{plan.port}.log", deadline)
        running_on = dict(zip(plans, servers))
        say(f"{len(servers)} server{'s' if len(servers) > 1 else ''} ready")
        yield lambda: _ended(running_on, logs)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(plan: ServerPlan, server: "subprocess.Popen[bytes]", log: Path, deadline: float) -> None:
    while not _is_healthy(plan.url):
        if server.poll() is not None:
            raise UserError(f"{plan.field}: the server at {plan.url} ended: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise UserError(
                f"{plan.field}: the server at {plan.url} is not ready yet; see {log}, or give --wait more seconds"
            )
        time.sleep(0.2)


def _ended(servers: dict[ServerPlan, "subprocess.Popen[bytes]"], logs: Path) -> list[str]:
    """A line for each server that has ended; it is forgotten."""
    gone = [plan for plan, server in servers.items() if server.poll() is not None]
    for plan in gone:
        del servers[plan]
    return [f"the server at {plan.url} ended: {_last_line(logs / f'{plan.port}.log')}" for plan in gone]


def run_beside(command: Sequence[str], ended: Callable[[], list[str]], say: Callable[[str], None]) -> int:
    """The exit code of a command that runs while servers do; says which of them end meanwhile. Never outlived by it."""
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    try:
        while process.poll() is None:
            for line in ended():
                say(line)
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C reached the process too; whatever else it was, the process is to end
        if not isinstance(sys.exception(), KeyboardInterrupt):
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return process.returncode


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a loopback address needs no proxy
    try:
        with opener.open(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else f"it wrote nothing; see {log}"
